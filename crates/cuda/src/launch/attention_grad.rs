//! Gradient of attention: a kernel that prepares the rows, one for dk and dv (of wide heads in 16 bits, one each), and one
//! for dq. Invariant: the kernels are determined by the element type, the op and nothing else, so the bits of a row depend
//! on its own sequence only.

use super::attention::{columns, mask_extent, mask_kind, sample_op};
use super::{DeviceTensor, OpLaunch};
use crate::capability::HOPPER;
use crate::kernel::{Kernel, KernelFile, LaunchShape, WithMaps, code, int, kernel_arguments};
use crate::tensor_map::{DeviceMatrix, tensor_map};
use cudarc::driver::sys::CUtensorMap;
use plimsoll_exec::DeviceError;
use plimsoll_graph::ops::{Attention, AttentionGrad, Bias, Mask, Qkv};
use plimsoll_graph::{Bytes, DType};
use plimsoll_plan::{WIDEST_CUDA_HEAD, cuda_flash_grad_parts};

/// Rows of one head that a block of `prepare` processes, 8 threads each.
const PREPARED: u64 = 32;

kernel_arguments! {
    /// Arguments of `prepare` (attention_grad.cuh).
    struct PrepareArgs {
        dy: u64,
        o: u64,
        lse: u64,
        q: u64,
        q_stride: u64,
        k: u64,
        k_stride: u64,
        spans: u64,
        sequences: i32,
        tokens: i32,
        cosines: u64,
        sines: u64,
        longest: i32,
        stats: u64,
        q_rotated: u64,
        k_rotated: u64,
        dq: u64,
        dk: u64,
        dv: u64,
        dq_stride: u64,
        dk_stride: u64,
        heads: i32,
        kv_heads: i32,
        counters: u64,
    }
    size 176, last 168
}

kernel_arguments! {
    /// Arguments of the gradient kernels that read by address (attention_args.cuh).
    struct AttentionGradArgs {
        q: u64,
        k: u64,
        v: u64,
        dy: u64,
        q_stride: u64,
        k_stride: u64,
        v_stride: u64,
        stats: u64,
        spans: u64,
        sequences: i32,
        tokens: i32,
        cosines: u64,
        sines: u64,
        longest: i32,
        d1: u64,
        d2: u64,
        d_stride: u64,
        heads: i32,
        kv_heads: i32,
        scale: f32,
        span: i32,
        local: i32,
        global: i32,
        status: u64,
    }
    size 160, last 152
}

kernel_arguments! {
    /// Arguments of `attention_grad` (attention_grad_hopper.cu) beside its tensor maps.
    struct AttentionGradMapArgs {
        k_column: i32,
        v_column: i32,
        stats: u64,
        spans: u64,
        sequences: i32,
        tokens: i32,
        cosines: u64,
        sines: u64,
        longest: i32,
        d1: u64,
        d2: u64,
        d_stride: u64,
        heads: i32,
        kv_heads: i32,
        scale: f32,
        span: i32,
        counters: u64,
        status: u64,
    }
    size 112, last 104
}

/// Prepares or runs the gradients of attention that are read.
pub(super) fn attention_grad(call: &mut OpLaunch<'_>, op: &AttentionGrad) -> Result<(), DeviceError> {
    let op = &op.forward;
    let operands = check(call, op)?;
    let gradients = gradients(call, op)?;
    let AttentionGradients { dq, dk, dv } = gradients;
    if dq.is_none() && dk.is_none() && dv.is_none() {
        return Ok(());
    }
    let AttentionGradOperands { dy, q, k, v, o, lse, spans, cosines, sines } = operands;
    let workspace = GradWorkspace::of(call, op, q)?;
    let prepare = PrepareArgs {
        dy: dy.address,
        o: o.address,
        lse: lse.address,
        q: q.address,
        k: k.address,
        spans: spans.address,
        cosines: cosines.address,
        sines: sines.address,
        stats: workspace.stats,
        q_rotated: workspace.q_rotated,
        k_rotated: workspace.k_rotated,
        dq: dq.unwrap_or(0),
        dk: dk.unwrap_or(0),
        dv: dv.unwrap_or(0),
        counters: workspace.counters,
        q_stride: q.columns,
        k_stride: k.columns,
        dq_stride: q.columns,
        dk_stride: k.columns,
        sequences: int(spans.rows),
        tokens: int(q.rows),
        longest: int(cosines.rows),
        heads: int(op.heads),
        kv_heads: int(op.kv_heads),
    };
    let dtypes = GradTypes { elements: q.dtype, table: cosines.dtype };
    let blocks = (q.rows * u64::from(op.heads)).div_ceil(PREPARED);
    call.kernel(&prepare_kernel(op, dtypes), LaunchShape::of(blocks, 256), &prepare)?;
    // The gradient kernels read q and k rotated.
    let [span, local, global] = mask_extent(op.mask).map(int);
    let shared_args = AttentionGradArgs {
        q: if op.rotary { workspace.q_rotated } else { q.address },
        k: if op.rotary { workspace.k_rotated } else { k.address },
        v: v.address,
        dy: dy.address,
        stats: workspace.stats,
        spans: spans.address,
        cosines: cosines.address,
        sines: sines.address,
        d1: 0,
        d2: 0,
        status: call.status(),
        q_stride: if op.rotary { op.width() } else { q.columns },
        k_stride: if op.rotary { op.kv_width() } else { k.columns },
        v_stride: v.columns,
        d_stride: 0,
        sequences: int(spans.rows),
        tokens: int(q.rows),
        longest: int(cosines.rows),
        heads: int(op.heads),
        kv_heads: int(op.kv_heads),
        scale: op.scale,
        span,
        local,
        global,
    };
    let tokens = call.launch.counts.tokens;
    for &side in Side::all(op, q.dtype) {
        let used = match side {
            Side::Q => dq.is_some(),
            Side::KAndV => dk.is_some() || dv.is_some(),
            Side::K => dk.is_some(),
            Side::V => dv.is_some(),
        };
        if !used {
            continue;
        }
        let args = if side.has_keys() {
            AttentionGradArgs { d1: dk.unwrap_or(0), d2: dv.unwrap_or(0), d_stride: k.columns, ..shared_args }
        } else {
            AttentionGradArgs { d1: dq.unwrap_or(0), d2: 0, d_stride: q.columns, ..shared_args }
        };
        let heads = u64::from(if side.has_keys() { op.kv_heads } else { op.heads });
        if let Some(variant) = HopperGradVariant::of(op, q.dtype, side, call.context.card.capability) {
            if q.rows == 0 {
                continue; // no tensor map can describe a tensor without rows
            }
            let maps = tensor_maps(call, op, &operands, &workspace)?;
            let items = (tokens / variant.rows() + spans.rows) * heads;
            let blocks = items.div_ceil(variant.units.into()).min(call.context.card.multiprocessors.into());
            let shape =
                LaunchShape { shared: variant.shared(op), ..LaunchShape::of(blocks, variant.threads()) };
            // k and v of a fused qkv are columns of its matrix, rotated rows are matrices of their own.
            let [k_column, v_column] = columns(op);
            let args = AttentionGradMapArgs {
                k_column: int(if op.rotary { 0 } else { k_column }),
                v_column: int(v_column),
                stats: args.stats,
                spans: args.spans,
                sequences: args.sequences,
                tokens: args.tokens,
                cosines: args.cosines,
                sines: args.sines,
                longest: args.longest,
                d1: args.d1,
                d2: args.d2,
                d_stride: args.d_stride,
                heads: args.heads,
                kv_heads: args.kv_heads,
                scale: args.scale,
                span: args.span,
                counters: workspace.counters,
                status: args.status,
            };
            call.kernel(&variant.kernel(op, dtypes, side), shape, &WithMaps { maps, args })?;
            continue;
        }
        let variant = AttentionGradVariant::of(op, q.dtype, side);
        // Blocks of rows belong to spans, of which a sequence of the step may have several.
        let blocks = (tokens / variant.rows + spans.rows) * heads;
        let shape = LaunchShape { shared: variant.shared, ..LaunchShape::of(blocks, variant.threads) };
        call.kernel(&variant.kernel("attention_grad", op, dtypes, side), shape, &args)?;
    }
    Ok(())
}

/// Returns the tensor maps of q, k, v and dy, q and k rotated.
fn tensor_maps(
    call: &OpLaunch<'_>,
    op: &Attention,
    operands: &AttentionGradOperands,
    workspace: &GradWorkspace,
) -> Result<[CUtensorMap; 4], DeviceError> {
    let &AttentionGradOperands { dy, q, k, v, .. } = operands;
    let dtype = q.dtype;
    let rows = q.rows;
    let [k_column, v_column] = columns(op);
    let (q_matrix, k_matrix) = if op.rotary {
        (
            DeviceMatrix { address: workspace.q_rotated, rows, columns: op.width(), dtype },
            DeviceMatrix { address: workspace.k_rotated, rows, columns: op.kv_width(), dtype },
        )
    } else {
        (whole_matrix(q, 0), whole_matrix(k, k_column))
    };
    let dy_matrix = DeviceMatrix { address: dy.address, rows, columns: op.width(), dtype };
    let context = call.context;
    Ok([
        tensor_map(context, &q_matrix, 64)?,
        tensor_map(context, &k_matrix, 64)?,
        tensor_map(context, &whole_matrix(v, v_column), 64)?,
        tensor_map(context, &dy_matrix, 64)?,
    ])
}

/// Returns the matrix of a fused qkv, from which q, k or v begins at column `column`; q, k or v itself if that is 0.
fn whole_matrix(x: DeviceTensor, column: u64) -> DeviceMatrix {
    DeviceMatrix { address: x.address - column * x.dtype.size(), ..x.matrix() }
}

/// Element types of q, k and v, and of the rotary tables.
#[derive(Clone, Copy)]
struct GradTypes {
    elements: DType,
    table: DType,
}

/// The inputs; k and v begin at their own first columns of a fused qkv.
struct AttentionGradOperands {
    dy: DeviceTensor,
    q: DeviceTensor,
    k: DeviceTensor,
    v: DeviceTensor,
    o: DeviceTensor,
    lse: DeviceTensor,
    spans: DeviceTensor,
    cosines: DeviceTensor,
    sines: DeviceTensor,
}

/// Checks what the kernels rely on, and returns the inputs.
fn check(call: &OpLaunch<'_>, op: &Attention) -> Result<AttentionGradOperands, DeviceError> {
    if op.head_dim > WIDEST_CUDA_HEAD {
        let dim = op.head_dim;
        return Err(call.refused(format!("a head of {dim} columns is wider than {WIDEST_CUDA_HEAD}")));
    }
    let spans = 1 + op.operands();
    let forward = op.inputs();
    let [q, mut k, mut v] = match op.qkv {
        Qkv::Separate => [call.input(1)?, call.input(2)?, call.input(3)?],
        Qkv::Fused => [call.input(1)?; 3],
    };
    let [at_k, at_v] = columns(op);
    k.address += at_k * q.dtype.size();
    v.address += at_v * q.dtype.size();
    let mut cosines = DeviceTensor::NONE;
    let mut sines = DeviceTensor::NONE;
    if op.rotary {
        cosines = call.input(spans + 1)?;
        sines = call.input(spans + 2)?;
    }
    let dy = call.input(0)?;
    let o = call.input(forward + 1)?;
    let lse = call.input(forward + 2)?;
    if [k, v, dy, o].iter().any(|x| x.dtype != q.dtype) || !q.dtype.is_float() || lse.dtype != DType::F32 {
        return Err(call.refused("q, k, v, o and do must be of one element type, and lse of f32".to_owned()));
    }
    if cosines.dtype != sines.dtype {
        return Err(call.refused(format!("cosines are {:?} and sines are {:?}", cosines.dtype, sines.dtype)));
    }
    Ok(AttentionGradOperands { dy, q, k, v, o, lse, spans: call.input(spans)?, cosines, sines })
}

/// Addresses of the first columns of dq, dk and dv; `None` for a gradient that is not read.
struct AttentionGradients {
    dq: Option<u64>,
    dk: Option<u64>,
    dv: Option<u64>,
}

/// Returns the outputs; those of a fused qkv are columns of one matrix.
fn gradients(call: &OpLaunch<'_>, op: &Attention) -> Result<AttentionGradients, DeviceError> {
    match op.qkv {
        Qkv::Separate => {
            let dq = call.output_if(0)?.map(|d| d.address);
            let dk = call.output_if(1)?.map(|d| d.address);
            let dv = call.output_if(2)?.map(|d| d.address);
            Ok(AttentionGradients { dq, dk, dv })
        }
        Qkv::Fused => {
            let fused = call.output_if(0)?;
            let [dq, dk, dv] = [0, columns(op)[0], columns(op)[1]]
                .map(|column| fused.map(|d| d.address + column * d.dtype.size()));
            Ok(AttentionGradients { dq, dk, dv })
        }
    }
}

/// Addresses in the workspace of a step.
struct GradWorkspace {
    stats: u64,
    q_rotated: u64,
    k_rotated: u64,
    counters: u64,
}

impl GradWorkspace {
    /// Carves the workspace for the step's tokens; an error if it is too small.
    fn of(call: &OpLaunch<'_>, op: &Attention, q: DeviceTensor) -> Result<Self, DeviceError> {
        let (start, size) = call.workspace()?;
        let parts = cuda_flash_grad_parts(op, q.rows, q.dtype);
        if parts.into_iter().sum::<Bytes>().0 > size.0 {
            return Err(call.refused(format!("its workspace has only {size}")));
        }
        let mut end = start;
        let [stats, q_rotated, k_rotated, counters] = parts.map(|part| {
            let address = end;
            end += part.0;
            address
        });
        Ok(Self { stats, q_rotated, k_rotated, counters })
    }
}

/// The gradients that one kernel computes; the number is its constant `KEYS`.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Side {
    /// dq: the rows of a block are queries.
    Q = 0,
    /// dk and dv: the rows of a block are keys, as in the next two.
    KAndV = 1,
    /// dk
    K = 2,
    /// dv
    V = 3,
}

impl Side {
    /// The kernels of an op. In 16 bits, the sums of dk and dv of heads wider than 128 columns do not fit into the
    /// registers of a warp together.
    fn all(op: &Attention, dtype: DType) -> &'static [Self] {
        if op.head_dim > 128 && dtype != DType::F32 {
            &[Self::K, Self::V, Self::Q]
        } else {
            &[Self::KAndV, Self::Q]
        }
    }

    /// Whether the rows of a block are keys.
    fn has_keys(self) -> bool {
        self != Self::Q
    }
}

/// A gradient kernel's variant, with its launch parameters.
struct AttentionGradVariant {
    file: KernelFile,
    /// Constants that define the variant.
    constants: [(&'static str, u32); 5],
    /// Rows of a block: keys for dk and dv, queries for dq.
    rows: u64,
    threads: u32,
    shared: u32,
}

impl AttentionGradVariant {
    /// Returns the variant for the gradients of `side`. Heads wider than 128 columns have smaller tiles and fewer rows,
    /// so that they fit into the shared memory of a block of compute capability 8.6, 8.9 or 12.0, 99 KiB.
    fn of(op: &Attention, dtype: DType, side: Side) -> Self {
        if dtype == DType::F32 {
            let (rows, tile) = match op.head_dim {
                129.. => (16, 16),
                65.. => (32, 32),
                _ => (64, 32),
            };
            // Words of 16 bytes of a row: an odd number, so that adjacent rows begin in different banks.
            let words = op.head_dim.div_ceil(4) | 1;
            let shared = 2 * (rows + tile) * words * 16 + 2 * rows * (tile + 4) * 4;
            let constants = [("ROWS", rows), ("TILE", tile), ("", 0), ("", 0), ("", 0)];
            let file = KernelFile::AttentionGradF32;
            return Self { file, constants, rows: u64::from(rows), threads: 256, shared };
        }
        let columns = op.head_dim.next_multiple_of(16);
        let warps = if columns > 240 { 3 } else { 4 };
        let m_tiles = 1;
        let stages = 2;
        let (tile, step) = match columns {
            129.. => (16, 16),
            65.. => (32, if side.has_keys() { 16 } else { 32 }),
            _ => (64, 32),
        };
        let rows = warps * m_tiles * 16;
        let stats = if side.has_keys() { stages * tile * 8 } else { 0 };
        let shared = 2 * (rows + stages * tile) * (columns + 8) * 2 + stats;
        let constants = [("WARPS", warps), ("MT", m_tiles), ("TILE", tile), ("STEP", step), ("STAGES", stages)];
        let file = KernelFile::AttentionGrad;
        Self { file, constants, rows: u64::from(rows), threads: warps * 32, shared }
    }

    fn kernel(&self, entry: &'static str, op: &Attention, dtypes: GradTypes, side: Side) -> Kernel {
        let kernel = Kernel::new(self.file, entry, dtypes.elements)
            .with("HEAD_DIM", i64::from(op.head_dim))
            .with("TABLE", code(dtypes.table))
            .with("ROTARY", i64::from(op.rotary))
            .with("MASK", mask_kind(op.mask))
            .with("ALIBI", i64::from(op.bias == Bias::Alibi))
            .with("KEYS", side as i64);
        let constants = self.constants.iter().filter(|(name, _)| !name.is_empty());
        constants.fold(kernel, |kernel, &(name, value)| kernel.with(name, i64::from(value)))
    }
}

/// A variant of `attention_grad_hopper.cu`.
#[derive(Clone, Copy)]
struct HopperGradVariant {
    /// Parts of a block that compute rows of their own.
    units: u32,
    /// Warpgroups of a unit, with 64 rows each.
    groups: u32,
    /// Steps of 64 columns that shared memory holds.
    stages: u32,
}

impl HopperGradVariant {
    /// Returns the variant for the gradients of `side`, the fastest one measured; `None` for what `attention_grad.cu`
    /// and `attention_grad_f32.cu` compute.
    fn of(op: &Attention, dtype: DType, side: Side, capability: (u32, u32)) -> Option<Self> {
        let mask = matches!(op.mask, Mask::Full | Mask::Causal | Mask::Window(_));
        if capability != HOPPER || dtype == DType::F32 || !mask || op.bias != Bias::None {
            return None;
        }
        let [units, groups, stages] = match op.head_dim {
            64 if side == Side::Q => [3, 1, 3],
            64 => [2, 1, 4],
            128 => [1, 2, 4],
            _ => return None,
        };
        Some(Self { units, groups, stages })
    }

    /// Rows of an item.
    fn rows(self) -> u64 {
        u64::from(self.groups * 64)
    }

    /// The consumer warpgroups, and one of producer warps.
    fn threads(self) -> u32 {
        (self.units * self.groups + 1) * 128
    }

    /// Bytes of shared memory. A unit has tiles of 64 rows for x1, x2 and results of each group, and for y1 and y2 of each
    /// stage; 64 stats and two barriers of each stage; the item and its two barriers.
    fn shared(self, op: &Attention) -> u32 {
        let Self { units, groups, stages } = self;
        units * ((3 * groups + 2 * stages) * 64 * op.head_dim * 2 + stages * (64 * 8 + 16) + 32)
    }

    fn kernel(self, op: &Attention, dtypes: GradTypes, side: Side) -> Kernel {
        Kernel::new(KernelFile::AttentionGradHopper, "attention_grad", dtypes.elements)
            .with("HEAD_DIM", i64::from(op.head_dim))
            .with("TABLE", code(dtypes.table))
            .with("ROTARY", i64::from(op.rotary))
            .with("MASK", mask_kind(op.mask))
            .with("KEYS", side as i64)
            .with("UNITS", i64::from(self.units))
            .with("GROUPS", i64::from(self.groups))
            .with("STAGES", i64::from(self.stages))
    }
}

/// The kernel that prepares the rows. It is an entry of each file, which needs the variant's constants all the same.
fn prepare_kernel(op: &Attention, dtypes: GradTypes) -> Kernel {
    let side = Side::all(op, dtypes.elements)[0];
    AttentionGradVariant::of(op, dtypes.elements, side).kernel("prepare", op, dtypes, side)
}

/// Returns a sample of the kernels: every head dimension of the supported models, with every mask and bias.
pub(super) fn every_kernel() -> Vec<Kernel> {
    let op = sample_op;
    let sparse = Mask::BlockSparse { block: 64, local: 2, global: 1 };
    let mut ops: Vec<Attention> =
        [16, 20, 24, 32, 40, 64, 128].map(|head_dim| op(head_dim, Mask::Full, Bias::None, true)).into();
    for mask in [Mask::Causal, Mask::Window(100), sparse] {
        ops.push(op(64, mask, Bias::Alibi, false));
        ops.push(op(128, mask, Bias::Alibi, true));
    }
    for head_dim in [136, 160, 192, 256] {
        ops.push(op(head_dim, Mask::Full, Bias::None, true));
    }
    for mask in [Mask::Causal, Mask::Window(100), sparse] {
        ops.push(op(256, mask, Bias::Alibi, true));
    }
    ops.push(op(64, Mask::Full, Bias::Alibi, false));
    ops.push(op(5, Mask::Full, Bias::None, false));
    for (head_dim, rotary) in [(64, true), (64, false), (128, true), (128, false)] {
        ops.extend([Mask::Causal, Mask::Window(100)].map(|mask| op(head_dim, mask, Bias::None, rotary)));
    }
    let mut kernels = vec![];
    for op in &ops {
        for dtype in [DType::F32, DType::Bf16, DType::F16] {
            let dtypes = GradTypes { elements: dtype, table: DType::F32 };
            kernels.push(prepare_kernel(op, dtypes));
            for &side in Side::all(op, dtype) {
                let variant = AttentionGradVariant::of(op, dtype, side);
                kernels.push(variant.kernel("attention_grad", op, dtypes, side));
            }
            for &side in Side::all(op, dtype) {
                let variant = HopperGradVariant::of(op, dtype, side, HOPPER);
                kernels.extend(variant.map(|variant| variant.kernel(op, dtypes, side)));
            }
        }
    }
    kernels
}

#[cfg(test)]
mod tests {
    use super::super::attention::tests::{SMALLEST_SHARED_MEMORY, op};
    use super::*;

    #[test]
    fn every_head_fits_into_the_shared_memory_of_every_card() {
        for op in (1..=WIDEST_CUDA_HEAD).map(op) {
            for dtype in [DType::F32, DType::Bf16] {
                let shared = |&side: &Side| AttentionGradVariant::of(&op, dtype, side).shared;
                let most = Side::all(&op, dtype).iter().map(shared).max();
                assert!(
                    most.is_some_and(|most| most <= SMALLEST_SHARED_MEMORY),
                    "{} columns: {most:?}",
                    op.head_dim
                );
            }
        }
    }

    #[test]
    fn every_variant_for_hopper_fits_into_its_shared_memory() {
        let mut variants = 0;
        for op in (1..=WIDEST_CUDA_HEAD).map(op) {
            for &side in Side::all(&op, DType::Bf16) {
                let Some(variant) = HopperGradVariant::of(&op, DType::Bf16, side, HOPPER) else { continue };
                assert!(variant.shared(&op) <= 227 << 10, "{} columns: {}", op.head_dim, variant.shared(&op));
                variants += 1;
            }
        }
        assert_eq!(variants, 4, "heads of 64 and of 128 columns, a kernel for dk and dv and one for dq each");
    }
}
