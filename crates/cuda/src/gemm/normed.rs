//! Matmul on Hopper's tensor cores with a fused layer norm in front (`wgmma_norm.cu`): a block keeps its normalised
//! rows of x in shared memory. Invariant: results are bit-equal to the separate norm and matmul, and a row's bits
//! depend on that row alone; the number of blocks that share the columns of a row affects speed only.

use super::hopper;
use super::{GemmForm, GemmOperands, NormParameters};
use crate::CudaError;
use crate::capability::HOPPER;
use crate::context::Context;
use crate::kernel::{Kernel, KernelFile, KernelLaunch, LaunchShape, WithMaps, code, int, kernel_arguments};
use crate::loaded_kernels::LoadedKernels;
use crate::row_kernels::SeparateNorm;
use crate::tensor_map::{DeviceMatrix, tensor_map};
use plimsoll_graph::DType;
use plimsoll_graph::ops::Epilogue;

/// Largest K whose rows fit into shared memory beside the stages of w.
pub(crate) const WIDEST: u64 = 640;

kernel_arguments! {
    /// Arguments of `wgmma_norm` (wgmma_norm.cu) beside its tensor maps.
    struct WgmmaNormArgs {
        gamma: u64,
        beta: u64,
        bias: u64,
        rows: i32,
        n: i32,
        column_splits: i32,
        eps: f32,
    }
    size 40, last 36
}

/// A variant of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Normed {
    /// Name in the table of choices.
    pub(super) name: &'static str,
    /// Cluster size: the blocks that share their loads of w by multicast.
    pub(super) cluster: u32,
    /// Below this number of rows, the norm runs as a separate kernel into scratch: a block cannot multiply before all
    /// its rows are normalised, and with few rows nothing hides that time (H200, ESM-2 8M, a layer without attention,
    /// 2 048, 4 096, 8 192 and 16 296 tokens: fused 43, 47, 67 and 107 us; separate 36, 45, 70 and 118 us).
    pub(super) few: u64,
}

/// The variants that are timed.
pub(super) const NORMED: [Normed; 2] =
    [Normed { name: "norm", cluster: 1, few: 6144 }, Normed { name: "norm-pairs", cluster: 2, few: 6144 }];

/// Rows of x of a block (BM).
const ROWS: u32 = 128;
/// Rows of a TMA box of x.
const BOX: u32 = 32;
/// Columns of y of a tile (BN).
const COLUMNS: u32 = 128;
/// Bytes of a pipeline stage: the tile's 128 rows of w by 64 columns of k, 128 bytes a row.
const STAGE: u32 = COLUMNS * 128;
/// Bytes of 64 columns of a block's rows of x.
const PIECE: u32 = ROWS * 128;
/// Rows of a warp's TMA box of y.
const WARP_ROWS: u32 = 16;
/// Bytes of a warp's TMA box of y.
const BUFFER: u32 = WARP_ROWS * 128;
/// Consumer warps, which store y.
const WARPS: u32 = 16;
/// Threads of a block: four warpgroups of consumers and one that loads.
const THREADS: u32 = 640;
/// Bytes of shared memory reserved for barriers.
const BARRIERS: u32 = 512;
/// Shared memory of a Hopper block.
const SHARED: u32 = 227 << 10;

impl Normed {
    /// Looks up a variant by its name in the table of choices.
    pub(super) fn named(name: &str) -> Option<Self> {
        NORMED.into_iter().find(|normed| normed.name == name)
    }

    /// Whether the kernel supports a form on this GPU. Rows must be multiples of 16 bytes, as TMA requires of strides.
    pub(super) fn suits(context: &Context, form: GemmForm) -> bool {
        let narrow = match form.dtype {
            DType::Bf16 | DType::F16 => true,
            DType::F32 | DType::F8 | DType::I8 | DType::I32 | DType::U8 => false,
        };
        let aligned = form.n.is_multiple_of(8) && form.k.is_multiple_of(8) && form.k <= WIDEST;
        let fused = match form.epilogue {
            Epilogue::None | Epilogue::Gelu => true,
            Epilogue::Residual | Epilogue::Gate | Epilogue::SiluGate => false,
        };
        context.card.capability == HOPPER && form.norm.is_some() && narrow && aligned && fused
    }

    fn kernel(&self, form: GemmForm) -> Kernel {
        let layout = SharedMemory::shared_beside_tiles(form.k);
        Kernel::new(KernelFile::WgmmaNorm, "wgmma_norm", form.dtype)
            .with("EPILOGUE", i64::from(form.epilogue == Epilogue::Gelu))
            .with("PARAM", code(norm_params(form)))
            .with("COLUMNS", form.k as i64)
            .with("GROUP", 32)
            .with("BN", i64::from(COLUMNS))
            .with("CLUSTER", i64::from(self.cluster))
            .with("STAGES", i64::from(layout.stages))
            .with("BUFFERS", i64::from(layout.buffers))
            .with("SHARED_BUFFERS", i64::from(layout.shared_buffers))
    }

    /// Compiles the kernels for a form: the fused one, and the separate norm and matmul for few rows.
    pub(super) fn prepare(
        &self,
        context: &Context,
        kernels: &mut LoadedKernels,
        form: GemmForm,
        operands: &GemmOperands,
    ) -> Result<(), CudaError> {
        kernels.prepare(context, &self.kernel(form), SharedMemory::shared_beside_tiles(form.k).shared)?;
        kernels.prepare(context, &separate_norm(form, operands).launch().kernel, 0)?;
        let apart = hopper::FEW.kernel(GemmForm { norm: None, ..form });
        kernels.prepare(context, &apart, hopper::FEW.shared())
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
        if operands.rows < self.few && operands.rows * k * dtype.size() <= operands.workspace.1 {
            return run_separately(context, kernels, form, operands);
        }
        let &GemmOperands { x, w, bias, norm: NormParameters { gamma, beta, eps }, y, rows, .. } = operands;
        let x = DeviceMatrix { address: x, rows, columns: k, dtype };
        let w = DeviceMatrix { address: w, rows: n, columns: k, dtype };
        let y = DeviceMatrix { address: y, rows, columns: n, dtype };
        let maps = [
            tensor_map(context, &x, BOX)?,
            tensor_map(context, &w, COLUMNS / self.cluster)?,
            tensor_map(context, &y, WARP_ROWS)?,
        ];
        let clusters = context.card.multiprocessors / self.cluster;
        let heights = rows.div_ceil(u64::from(ROWS * self.cluster));
        let parts = column_splits(heights, n.div_ceil(u64::from(COLUMNS)), u64::from(clusters));
        let args =
            WgmmaNormArgs { gamma, beta, bias, rows: int(rows), n: int(n), column_splits: int(parts), eps };
        let blocks = (heights * parts).min(u64::from(clusters)) * u64::from(self.cluster);
        let shape = LaunchShape {
            shared: SharedMemory::shared_beside_tiles(k).shared,
            ..LaunchShape::of(blocks, THREADS)
        };
        kernels.call_as(context, &self.kernel(form), || form.to_string(), shape, &WithMaps { maps, args })
    }
}

/// Launches the norm and the matmul as separate kernels.
fn run_separately(
    context: &Context,
    kernels: &LoadedKernels,
    form: GemmForm,
    operands: &GemmOperands,
) -> Result<(), CudaError> {
    let norm = separate_norm(form, operands);
    let KernelLaunch { kernel, shape, args } = norm.launch();
    kernels.call(context, &kernel, shape, &args)?;
    hopper::FEW.run(context, kernels, GemmForm { norm: None, ..form }, &GemmOperands { x: norm.y, ..*operands })
}

/// Returns the layer norm of a form as a separate kernel, which writes its rows to the workspace.
fn separate_norm(form: GemmForm, operands: &GemmOperands) -> SeparateNorm {
    let NormParameters { gamma, beta, eps } = operands.norm;
    SeparateNorm {
        dtype: form.dtype,
        params: norm_params(form),
        rows: operands.rows,
        columns: form.k,
        x: operands.x,
        gamma,
        beta,
        y: operands.workspace.0,
        eps,
    }
}

/// Element type of gamma and beta.
fn norm_params(form: GemmForm) -> DType {
    form.norm.unwrap_or(DType::F32)
}

/// Estimated cost of normalising a block's rows, in units of the cost of one tile of columns.
const NORM: u64 = 2;

/// Returns among how many clusters the columns of the same rows are split: the number that minimises the estimated
/// time. More clusters balance the load, but each of them normalises the rows again.
fn column_splits(heights: u64, tiles: u64, clusters: u64) -> u64 {
    // Rounds of all clusters, times the cost of a round. Of equal times the fewest splits win (`min_by_key` returns the
    // first), so that rows are not normalised more often than it helps.
    let splits = 1..=tiles;
    splits
        .min_by_key(|splits| (heights * splits).div_ceil(clusters) * (tiles.div_ceil(*splits) + NORM))
        .unwrap_or(1)
}

/// Division of a block's shared memory, beside the rows of x.
struct SharedMemory {
    /// Pipeline stages of w.
    stages: u32,
    /// Output buffers of a warp.
    buffers: u32,
    /// Whether the two pairs of warpgroups share the output buffers.
    shared_buffers: bool,
    /// Total bytes of shared memory, including the rows of x.
    shared: u32,
}

impl SharedMemory {
    /// Two output buffers a warp if at least five stages fit beside them, else one if five stages fit, else one for
    /// two warps.
    fn shared_beside_tiles(k: u64) -> Self {
        let rows = k.div_ceil(64) as u32 * PIECE;
        for buffers in [2, 1] {
            let layout = Self::with_buffers(rows, buffers, false);
            if layout.stages >= 5 {
                return layout;
            }
        }
        Self::with_buffers(rows, 1, true)
    }

    /// The division with this number of output buffers, and as many stages as fit beside `rows` bytes of x.
    fn with_buffers(rows: u32, buffers: u32, shared_buffers: bool) -> Self {
        let fixed = rows + buffers * BUFFER * if shared_buffers { WARPS / 2 } else { WARPS } + BARRIERS;
        let stages = ((SHARED - fixed) / STAGE).min(8);
        Self { stages, buffers, shared_buffers, shared: fixed + stages * STAGE }
    }
}

/// Returns a sample of the kernel's forms.
pub(super) fn every_kernel() -> Vec<Kernel> {
    let mut kernels = vec![];
    for k in [320, 480, 640] {
        for (epilogue, dtype, params) in [
            (Epilogue::None, DType::Bf16, DType::F32),
            (Epilogue::Gelu, DType::Bf16, DType::F32),
            (Epilogue::Gelu, DType::F16, DType::F16),
        ] {
            let form = GemmForm { bias: true, epilogue, norm: Some(params), ..GemmForm::new(4 * k, k, dtype) };
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
            let layout = SharedMemory::shared_beside_tiles(k);
            assert!(layout.stages >= 3 && layout.shared <= SHARED, "{k}");
        }
        assert_eq!(
            [320, 480, 640].map(|k| (
                SharedMemory::shared_beside_tiles(k).stages,
                SharedMemory::shared_beside_tiles(k).shared_buffers
            )),
            [(5, false), (5, true), (3, true)]
        );
    }

    #[test]
    fn few_rows_share_columns_and_many_do_not() {
        // 132 multiprocessors in clusters of two; 10 tiles of columns.
        let of = |rows: u64| column_splits(rows.div_ceil(256), 10, 66);
        assert_eq!([256, 2048, 16_296, 65_520].map(of), [10, 5, 1, 1]);
        assert_eq!(column_splits(1, 1, 66), 1);
    }
}
