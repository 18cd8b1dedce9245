//! Matmul on Hopper's tensor cores by our wgmma kernel (`wgmma.cu`) with fused epilogues. Invariant: every tile sums
//! the terms of an element in the same order, so tiles differ in speed only, and a row's bits depend on the row and
//! the form alone.

use super::{GemmForm, GemmOperands};
use crate::CudaError;
use crate::capability::HOPPER;
use crate::context::Context;
use crate::kernel::{Kernel, KernelFile, LaunchShape, WithMaps, int, kernel_arguments};
use crate::loaded_kernels::LoadedKernels;
use crate::tensor_map::{DeviceMatrix, tensor_map};
use plimsoll_graph::DType;
use plimsoll_graph::ops::Epilogue;

kernel_arguments! {
    /// Arguments of `wgmma` (wgmma.cu) beside its tensor maps.
    struct WgmmaArgs {
        bias: u64,
        rows: i32,
        n: i32,
        k: i32,
    }
    size 24, last 16
}

/// A tile shape of the kernel: the part of y that a block computes at a time, and how its warpgroups divide it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct WgmmaTile {
    /// Name in the table of choices.
    pub(super) name: &'static str,
    /// Columns of a block's tile (BN).
    columns: u32,
    /// Rows of a warpgroup's part of the tile, in units of 64, the M of a wgmma instruction.
    atoms: u32,
    /// Whether the schedule is ping-pong, where the two consumer warpgroups take alternate tiles, so that one
    /// multiplies while the other runs its epilogue; otherwise cooperative, where they split the rows of one tile.
    turns: bool,
    /// Cluster size: the blocks that share their loads of w by multicast.
    cluster: u32,
    /// Pipeline stages of x and w in shared memory.
    stages: u32,
    /// Number of rows of tiles (counted in clusters) that are processed together before the next columns, so that their
    /// loads hit L2.
    group: u32,
}

/// The tiles that are timed; the first is the default without timing.
pub(super) const TILES: [WgmmaTile; 5] = [
    WgmmaTile { name: "128x192-turns", columns: 192, atoms: 2, turns: true, cluster: 2, stages: 4, group: 8 },
    WgmmaTile { name: "128x256", columns: 256, atoms: 1, turns: false, cluster: 2, stages: 4, group: 8 },
    WgmmaTile { name: "256x128", columns: 128, atoms: 2, turns: false, cluster: 2, stages: 4, group: 4 },
    WgmmaTile { name: "128x128-turns", columns: 128, atoms: 2, turns: true, cluster: 2, stages: 5, group: 8 },
    WgmmaTile { name: "128x128-alone", columns: 128, atoms: 2, turns: true, cluster: 1, stages: 5, group: 16 },
];

/// The tile for few rows.
pub(super) const FEW: WgmmaTile = TILES[4];

/// Columns of k of a stage.
const DEPTH: u32 = 64;
/// Columns of a TMA box of y and of the residual: 128 bytes, the width of the shared-memory swizzle.
const PIECE: u32 = 64;
/// Rows of a warp's TMA box of y.
const WARP_ROWS: u32 = 16;
/// Bytes of all output buffers: two boxes for each of eight warps.
const BUFFERS: u32 = 8 * 2 * PIECE * WARP_ROWS * 2;
/// Threads of a block: two consumer warpgroups and one that loads.
const THREADS: u32 = 384;

impl WgmmaTile {
    /// Looks up a tile by its name in the table of choices.
    pub(super) fn named(name: &str) -> Option<Self> {
        TILES.into_iter().find(|tile| tile.name == name)
    }

    /// Whether the tile supports a form on this GPU. Rows must be multiples of 16 bytes, as TMA requires of strides.
    /// Quantized values are left to cuBLASLt, which is faster in all but one form of the supported models (H200).
    pub(super) fn suits(&self, context: &Context, form: GemmForm) -> bool {
        let narrow = match form.dtype {
            DType::Bf16 | DType::F16 => true,
            DType::F32 | DType::F8 | DType::I8 | DType::I32 | DType::U8 => false,
        };
        let aligned = form.n.is_multiple_of(8) && form.k.is_multiple_of(8);
        let fused = match form.epilogue {
            Epilogue::None | Epilogue::Gelu => true,
            Epilogue::Residual => self.has_residual(),
            Epilogue::Gate => self.has_gate() && !form.bias,
            Epilogue::SiluGate => false,
        };
        let stored = !form.by_k || form.epilogue == Epilogue::None && form.norm.is_none();
        context.card.capability == HOPPER && narrow && aligned && fused && stored
    }

    /// Whether the tile can compute a gate: a pair of blocks exchanges the gate and the gated halves, and both must
    /// consist of whole boxes of y.
    fn has_gate(&self) -> bool {
        self.cluster == 2 && self.columns.is_multiple_of(2 * PIECE)
    }

    /// Columns of y of a block's tile.
    fn outputs(&self, form: GemmForm) -> u32 {
        if form.gate() { self.columns / 2 } else { self.columns }
    }

    /// Whether enough registers are left to add a residual.
    fn has_residual(&self) -> bool {
        self.atoms * self.columns <= 256
    }

    /// Rows of a block's tile (BM).
    fn rows(&self) -> u32 {
        64 * self.atoms * if self.turns { 1 } else { 2 }
    }

    /// Bytes of shared memory.
    pub(super) fn shared(&self) -> u32 {
        // Barriers: two for each stage, and two for the ping-pong order.
        self.stages * (self.rows() + self.columns) * 128 + BUFFERS + (2 * self.stages + 2) * 8
    }

    pub(super) fn kernel(&self, form: GemmForm) -> Kernel {
        let epilogue = match form.epilogue {
            Epilogue::None => 0,
            Epilogue::Gelu => 1,
            Epilogue::Residual => 2,
            // Launches refuse gates with SiLU.
            Epilogue::Gate | Epilogue::SiluGate => 3,
        };
        let kernel = Kernel::new(KernelFile::Wgmma, "wgmma", form.dtype)
            .with("EPILOGUE", epilogue)
            .with("BN", i64::from(self.columns))
            .with("MA", i64::from(self.atoms))
            .with("PINGPONG", i64::from(self.turns))
            .with("CLUSTER", i64::from(self.cluster))
            .with("STAGES", i64::from(self.stages))
            .with("GROUP", i64::from(self.group));
        if form.by_k { kernel.with("W_BY_K", 1) } else { kernel }
    }

    /// Launches the matmul.
    pub(super) fn run(
        &self,
        context: &Context,
        kernels: &LoadedKernels,
        form: GemmForm,
        operands: &GemmOperands,
    ) -> Result<(), CudaError> {
        let GemmForm { n, k, dtype, .. } = form;
        let &GemmOperands { x, w, bias, residual, y, rows, .. } = operands;
        // The kernel does not read a missing residual, but its tensor map must be valid.
        let r = if residual == 0 { y } else { residual };
        let x = DeviceMatrix { address: x, rows, columns: k, dtype };
        let (w, w_height) = if form.by_k {
            (DeviceMatrix { address: w, rows: k, columns: n, dtype }, DEPTH / self.cluster)
        } else {
            (
                DeviceMatrix { address: w, rows: form.weight_rows(), columns: k, dtype },
                self.columns / self.cluster,
            )
        };
        let y = DeviceMatrix { address: y, rows, columns: n, dtype };
        let maps = [
            tensor_map(context, &x, self.rows())?,
            tensor_map(context, &w, w_height)?,
            tensor_map(context, &y, WARP_ROWS)?,
            tensor_map(context, &DeviceMatrix { address: r, ..y }, self.rows())?,
        ];
        let args = WgmmaArgs { bias, rows: int(rows), n: int(n), k: int(k) };
        // Persistent clusters: at most one block per multiprocessor, each of which loops over tiles.
        let columns = n.div_ceil(u64::from(self.outputs(form)));
        let tiles = rows.div_ceil(u64::from(self.rows() * self.cluster)) * columns;
        let clusters = tiles.min(u64::from(context.card.multiprocessors / self.cluster));
        let blocks = clusters * u64::from(self.cluster);
        let shape = LaunchShape { shared: self.shared(), ..LaunchShape::of(blocks, THREADS) };
        kernels.call_as(context, &self.kernel(form), || form.to_string(), shape, &WithMaps { maps, args })
    }
}

/// Returns a sample of the kernel's forms.
pub(super) fn every_kernel() -> Vec<Kernel> {
    let bf16 = GemmForm { bias: true, ..GemmForm::new(2560, 2560, DType::Bf16) };
    let f16 = GemmForm { bias: true, ..GemmForm::new(2560, 2560, DType::F16) };
    let by_k = GemmForm { by_k: true, ..GemmForm::new(2560, 2560, DType::Bf16) };
    let mut kernels = vec![];
    for tile in TILES {
        kernels.extend(
            [bf16, GemmForm { epilogue: Epilogue::Gelu, ..bf16 }, f16, by_k].map(|form| tile.kernel(form)),
        );
        if tile.has_residual() {
            kernels.push(tile.kernel(GemmForm { epilogue: Epilogue::Residual, ..bf16 }));
        }
        if tile.has_gate() {
            kernels.push(tile.kernel(GemmForm { epilogue: Epilogue::Gate, ..bf16 }));
        }
    }
    kernels
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_fit_into_a_multiprocessor_and_have_names_of_their_own() {
        for tile in TILES {
            assert_eq!(WgmmaTile::named(tile.name), Some(tile));
            assert!(tile.shared() <= 227 << 10, "{tile:?} takes {} bytes", tile.shared());
            // A TMA box has at most 256 rows, and each block's share of w must start at a multiple of 8 rows, a whole
            // swizzle.
            assert!(tile.rows() <= 256 && (tile.columns / tile.cluster).is_multiple_of(8), "{tile:?}");
            // So must its share of the rows of k, if w is stored by k, in pieces of 64 columns.
            assert!((DEPTH / tile.cluster).is_multiple_of(8) && tile.columns.is_multiple_of(PIECE), "{tile:?}");
        }
    }
}
