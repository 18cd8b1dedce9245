//! Products on Hopper's tensor cores by our own kernel (`wgmma.cu`), with all that stands behind them. Invariant: every
//! tile sums an element in the same order, so tiles differ in speed only, and a row's bits depend on nothing but the form.

use super::{Form, Operands};
use crate::CudaError;
use crate::context::Context;
use crate::kernel::{Arg, File, HOPPER, Kernel, Kernels, Shape};
use crate::tensor_map::tensor_map;
use graph::DType;
use graph::ops::Epilogue;

/// A form of the kernel: which part of y a block makes at a time, and how.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Tile {
    /// What the table calls it.
    pub(super) name: &'static str,
    /// Columns of a block's tile.
    columns: u32,
    /// Rows of a warpgroup's, in 64.
    atoms: u32,
    /// Whether the two warpgroups take tiles in turns, and so multiply while the other finishes; or else they share the
    /// rows of one.
    turns: bool,
    /// Blocks that share what they read of w.
    cluster: u32,
    /// Stages of x and w in shared memory.
    stages: u32,
    /// Clusters' rows that are swept together.
    group: u32,
}

/// All that are tried.
pub(super) const TILES: [Tile; 5] = [
    Tile { name: "128x192-turns", columns: 192, atoms: 2, turns: true, cluster: 2, stages: 4, group: 8 },
    Tile { name: "128x256", columns: 256, atoms: 1, turns: false, cluster: 2, stages: 4, group: 8 },
    Tile { name: "256x128", columns: 128, atoms: 2, turns: false, cluster: 2, stages: 4, group: 4 },
    Tile { name: "128x128-turns", columns: 128, atoms: 2, turns: true, cluster: 2, stages: 5, group: 8 },
    Tile { name: "128x128-alone", columns: 128, atoms: 2, turns: true, cluster: 1, stages: 5, group: 16 },
];

/// The one for few rows.
pub(super) const FEW: Tile = TILES[4];

/// Columns of a box of y and of the residual: 128 bytes, which is what shared memory is swizzled in.
const PIECE: u32 = 64;
/// Rows of a warp's box of y.
const WARP_ROWS: u32 = 16;
/// Bytes of all warps' boxes of y: eight warps, two boxes each.
const BUFFERS: u32 = 8 * 2 * PIECE * WARP_ROWS * 2;
const THREADS: u32 = 384;

impl Tile {
    /// By the name in the table.
    pub(super) fn named(name: &str) -> Option<Self> {
        TILES.into_iter().find(|tile| tile.name == name)
    }

    /// Whether it computes a form on a card: rows must be whole words of 16 bytes. Codes are the library's, which is faster
    /// on them in all but one form of the models (H200).
    pub(super) fn suits(&self, context: &Context, form: Form) -> bool {
        let narrow = match form.dtype {
            DType::Bf16 | DType::F16 => true,
            DType::F32 | DType::F8 | DType::I8 | DType::I32 | DType::U8 => false,
        };
        let whole = form.n.is_multiple_of(8) && form.k.is_multiple_of(8);
        let kept = match form.epilogue {
            Epilogue::None | Epilogue::Gelu => true,
            Epilogue::Residual => self.has_residual(),
            Epilogue::Gate => self.has_gate() && !form.bias,
        };
        context.card.capability == HOPPER && narrow && whole && kept
    }

    /// Whether the gates are one block's to fetch, and what they pass the other's, and both are whole pieces.
    fn has_gate(&self) -> bool {
        self.cluster == 2 && self.columns.is_multiple_of(2 * PIECE)
    }

    /// Columns of y.
    fn outputs(&self, form: Form) -> u32 {
        if form.gate() { self.columns / 2 } else { self.columns }
    }

    /// Whether registers are left for a residual.
    fn has_residual(&self) -> bool {
        self.atoms * self.columns <= 256
    }

    /// Rows of a block's tile.
    fn rows(&self) -> u32 {
        64 * self.atoms * if self.turns { 1 } else { 2 }
    }

    fn shared(&self) -> u32 {
        // The barriers: two for each stage, and two for turns.
        self.stages * (self.rows() + self.columns) * 128 + BUFFERS + (2 * self.stages + 2) * 8
    }

    pub(super) fn kernel(&self, form: Form) -> Kernel {
        let epilogue = match form.epilogue {
            Epilogue::None => 0,
            Epilogue::Gelu => 1,
            Epilogue::Residual => 2,
            Epilogue::Gate => 3,
        };
        Kernel::new(File::Wgmma, "wgmma", form.dtype)
            .with("EPILOGUE", epilogue)
            .with("BN", i64::from(self.columns))
            .with("MA", i64::from(self.atoms))
            .with("PINGPONG", i64::from(self.turns))
            .with("CLUSTER", i64::from(self.cluster))
            .with("STAGES", i64::from(self.stages))
            .with("GROUP", i64::from(self.group))
    }

    /// Compiles it for a form.
    pub(super) fn prepare(
        &self,
        context: &Context,
        kernels: &mut Kernels,
        form: Form,
    ) -> Result<(), CudaError> {
        kernels.prepare(context, &self.kernel(form), self.shared())
    }

    /// Puts a product into the stream.
    pub(super) fn run(
        &self,
        context: &Context,
        kernels: &Kernels,
        form: Form,
        operands: &Operands,
    ) -> Result<(), CudaError> {
        let Form { n, k, dtype, .. } = form;
        let &Operands { x, w, bias, residual, y, rows, .. } = operands;
        // What is not there is not read, but must be described.
        let r = if residual == 0 { y } else { residual };
        let matrix =
            |address, rows, columns, height| tensor_map(context, dtype, (address, rows, columns), height);
        let maps = [
            matrix(x, rows, k, self.rows())?,
            matrix(w, form.outputs(), k, self.columns / self.cluster)?,
            matrix(y, rows, n, WARP_ROWS)?,
            matrix(r, rows, n, self.rows())?,
        ];
        let args = [Arg::pointer(bias), Arg::int(rows), Arg::int(n), Arg::int(k)];
        // Clusters stay, and take tile after tile.
        let columns = n.div_ceil(u64::from(self.outputs(form)));
        let tiles = rows.div_ceil(u64::from(self.rows() * self.cluster)) * columns;
        let clusters = tiles.min(u64::from(context.card.multiprocessors / self.cluster));
        let blocks = clusters * u64::from(self.cluster);
        let shape = Shape { shared: self.shared(), ..Shape::of(blocks, THREADS) };
        kernels.call_with(context, &self.kernel(form), || form.to_string(), shape, &maps, &args)
    }
}

/// A sample of it.
pub(super) fn every_kernel() -> Vec<Kernel> {
    let form =
        |dtype, epilogue| Form { n: 2560, k: 2560, dtype, tf32: false, bias: true, epilogue, norm: None };
    let [none, gelu, residual, gate] =
        [Epilogue::None, Epilogue::Gelu, Epilogue::Residual, Epilogue::Gate].map(|e| form(DType::Bf16, e));
    let of = |tile: Tile| {
        let all = [none, gelu, form(DType::F16, Epilogue::None)].into_iter();
        let residual = tile.has_residual().then_some(residual);
        let gate = tile.has_gate().then_some(gate);
        all.chain(residual).chain(gate).map(|form| tile.kernel(form)).collect::<Vec<_>>()
    };
    TILES.into_iter().flat_map(of).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_fit_into_a_multiprocessor_and_have_names_of_their_own() {
        for tile in TILES {
            assert_eq!(Tile::named(tile.name), Some(tile));
            assert!(tile.shared() <= 227 << 10, "{tile:?} takes {} bytes", tile.shared());
            // Boxes have at most 256 rows, and halves of w start at whole swizzles.
            assert!(tile.rows() <= 256 && (tile.columns / tile.cluster).is_multiple_of(8), "{tile:?}");
        }
    }
}
