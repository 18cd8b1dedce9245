//! Products on Hopper's tensor cores with a layer norm in front of them (`wgmma_norm.cu`): rows stay in shared memory, whole.
//! Invariant: the bits are those of the norm and the product apart, and depend on no row but their own; how many blocks share
//! the columns of the same rows is for speed alone.

use super::hopper;
use super::{Form, Norm, Operands};
use crate::CudaError;
use crate::context::Context;
use crate::kernel::{Arg, File, HOPPER, Kernel, Kernels, Shape, code};
use crate::launch::norm_of;
use crate::tensor_map::tensor_map;
use graph::DType;
use graph::ops::Epilogue;

/// The widest rows that a multiprocessor keeps beside tiles of w.
pub(crate) const WIDEST: u64 = 640;

/// A form of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Normed {
    /// What the table calls it.
    pub(super) name: &'static str,
    /// Blocks that share what they read of w.
    pub(super) cluster: u32,
    /// Fewer rows are normalised by a kernel of their own, into scratch: a block's rows must all be there before it
    /// multiplies, which few rows do not make up for (H200, ESM-2 8M, a layer without attention, 2 048, 4 096, 8 192 and
    /// 16 296 tokens: 43, 47, 67 and 107 us for 36, 45, 70 and 118 apart).
    pub(super) few: u64,
}

/// All that are tried.
pub(super) const NORMED: [Normed; 2] =
    [Normed { name: "norm", cluster: 1, few: 6144 }, Normed { name: "norm-pairs", cluster: 2, few: 6144 }];

/// Rows of a block, and of a box of x.
const ROWS: u32 = 128;
const BOX: u32 = 32;
/// Columns of a tile.
const COLUMNS: u32 = 128;
/// Bytes of a stage, which is 64 of k of a tile's rows of w; and of 64 columns of a block's rows.
const STAGE: u32 = COLUMNS * 128;
const PIECE: u32 = ROWS * 128;
/// Rows and bytes of a warp's box of y; warps that have one.
const WARP_ROWS: u32 = 16;
const BUFFER: u32 = WARP_ROWS * 128;
const WARPS: u32 = 16;
const THREADS: u32 = 640;
/// What of shared memory is left to barriers, and what there is.
const BARRIERS: u32 = 512;
const SHARED: u32 = 227 << 10;

impl Normed {
    /// By the name in the table.
    pub(super) fn named(name: &str) -> Option<Self> {
        NORMED.into_iter().find(|normed| normed.name == name)
    }

    /// Whether it computes a form on a card: rows must be whole words of 16 bytes.
    pub(super) fn suits(context: &Context, form: Form) -> bool {
        let narrow = match form.dtype {
            DType::Bf16 | DType::F16 => true,
            DType::F32 | DType::F8 | DType::I8 | DType::I32 | DType::U8 => false,
        };
        let whole = form.n.is_multiple_of(8) && form.k.is_multiple_of(8) && form.k <= WIDEST;
        let kept = match form.epilogue {
            Epilogue::None | Epilogue::Gelu => true,
            Epilogue::Residual | Epilogue::Gate => false,
        };
        context.card.capability == HOPPER && form.norm.is_some() && narrow && whole && kept
    }

    fn kernel(&self, form: Form) -> Kernel {
        let room = Room::beside(form.k);
        Kernel::new(File::WgmmaNorm, "wgmma_norm", form.dtype)
            .with("EPILOGUE", i64::from(form.epilogue == Epilogue::Gelu))
            .with("PARAM", code(types(form).1))
            .with("COLUMNS", form.k as i64)
            .with("GROUP", 32)
            .with("BN", i64::from(COLUMNS))
            .with("CLUSTER", i64::from(self.cluster))
            .with("STAGES", i64::from(room.stages))
            .with("BUFFERS", i64::from(room.buffers))
            .with("LENT", i64::from(room.lent))
    }

    /// Compiles it for a form.
    pub(super) fn prepare(
        &self,
        context: &Context,
        kernels: &mut Kernels,
        form: Form,
    ) -> Result<(), CudaError> {
        kernels.prepare(context, &self.kernel(form), Room::beside(form.k).shared)?;
        kernels.prepare(context, &norm_of(types(form), (1, form.k), [0; 4], 0.0).0, 0)?;
        hopper::FEW.prepare(context, kernels, Form { norm: None, ..form })
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
        if operands.rows < self.few && operands.rows * k * dtype.size() <= operands.workspace.1 {
            return apart(context, kernels, form, operands);
        }
        let &Operands { x, w, bias, norm: Norm { gamma, beta, eps }, y, rows, .. } = operands;
        let matrix =
            |address, rows, columns, height| tensor_map(context, dtype, (address, rows, columns), height);
        let maps = [
            matrix(x, rows, k, BOX)?,
            matrix(w, n, k, COLUMNS / self.cluster)?,
            matrix(y, rows, n, WARP_ROWS)?,
        ];
        let clusters = context.card.multiprocessors / self.cluster;
        let heights = rows.div_ceil(u64::from(ROWS * self.cluster));
        let parts = parts(heights, n.div_ceil(u64::from(COLUMNS)), u64::from(clusters));
        let [gamma, beta, bias] = [gamma, beta, bias].map(Arg::pointer);
        let args = [gamma, beta, bias, Arg::int(rows), Arg::int(n), Arg::int(parts), Arg::float(eps)];
        let blocks = (heights * parts).min(u64::from(clusters)) * u64::from(self.cluster);
        let shape = Shape { shared: Room::beside(k).shared, ..Shape::of(blocks, THREADS) };
        kernels.call_with(context, &self.kernel(form), || form.to_string(), shape, &maps, &args)
    }
}

/// The norm and the product one after the other.
fn apart(context: &Context, kernels: &Kernels, form: Form, operands: &Operands) -> Result<(), CudaError> {
    let &Operands { x, norm: Norm { gamma, beta, eps }, rows, workspace: (scratch, _), .. } = operands;
    let (kernel, shape, args) = norm_of(types(form), (rows, form.k), [x, gamma, beta, scratch], eps);
    kernels.call(context, &kernel, shape, &args)?;
    hopper::FEW.run(context, kernels, Form { norm: None, ..form }, &Operands { x: scratch, ..*operands })
}

/// Of x, and of gamma and beta.
fn types(form: Form) -> (DType, DType) {
    (form.dtype, form.norm.unwrap_or(DType::F32))
}

/// What normalising a block's rows takes, in tiles of columns.
const NORM: u64 = 2;

/// Clusters that share the columns of the same rows, so that none is idle for long: each normalises them again.
fn parts(heights: u64, tiles: u64, clusters: u64) -> u64 {
    let takes = |parts: &u64| (heights * parts).div_ceil(clusters) * (tiles.div_ceil(*parts) + NORM);
    (1..=tiles).min_by_key(takes).unwrap_or(1)
}

/// What lies in shared memory beside rows.
struct Room {
    stages: u32,
    /// Of y, of a warp.
    buffers: u32,
    /// Whether the two pairs of warpgroups share them.
    lent: bool,
    /// All bytes, with the rows.
    shared: u32,
}

impl Room {
    /// Two buffers a warp where five stages fit beside them, one where five fit, or else one for two warps.
    fn beside(k: u64) -> Self {
        let rows = k.div_ceil(64) as u32 * PIECE;
        let of = |buffers: u32, lent: bool| {
            let fixed = rows + buffers * BUFFER * if lent { WARPS / 2 } else { WARPS } + BARRIERS;
            let stages = ((SHARED - fixed) / STAGE).min(8);
            Self { stages, buffers, lent, shared: fixed + stages * STAGE }
        };
        [of(2, false), of(1, false)].into_iter().find(|room| room.stages >= 5).unwrap_or(of(1, true))
    }
}

/// A sample of it.
pub(super) fn every_kernel() -> Vec<Kernel> {
    let mut kernels = vec![];
    for k in [320, 480, 640] {
        for (epilogue, dtype, params) in [
            (Epilogue::None, DType::Bf16, DType::F32),
            (Epilogue::Gelu, DType::Bf16, DType::F32),
            (Epilogue::Gelu, DType::F16, DType::F16),
        ] {
            let form = Form { n: 4 * k, k, dtype, tf32: false, bias: true, epilogue, norm: Some(params) };
            kernels.extend(NORMED.map(|normed| normed.kernel(form)));
        }
    }
    kernels
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_of_every_width_leave_room_for_three_stages() {
        for k in (8..=WIDEST).step_by(8) {
            let room = Room::beside(k);
            assert!(room.stages >= 3 && room.shared <= SHARED, "{k}");
        }
        assert_eq!(
            [320, 480, 640].map(|k| (Room::beside(k).stages, Room::beside(k).lent)),
            [(5, false), (5, true), (3, true)]
        );
    }

    #[test]
    fn few_rows_share_columns_and_many_do_not() {
        // 132 multiprocessors in clusters of two; 10 tiles of columns.
        let of = |rows: u64| parts(rows.div_ceil(256), 10, 66);
        assert_eq!([256, 2048, 16_296, 65_520].map(of), [10, 5, 1, 1]);
        assert_eq!(parts(1, 1, 66), 1);
    }
}
