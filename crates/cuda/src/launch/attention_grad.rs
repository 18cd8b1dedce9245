//! Gradient of attention: a kernel that prepares the rows, one for dk and dv (of wide heads in 16 bits, one each), and one
//! for dq. Invariant: the kernels are determined by the element type, the op and nothing else, so the bits of a row depend
//! on its own sequence only.

use super::attention::{columns, mask_extent, mask_kind};
use super::{Call, Tensor};
use crate::capability::HOPPER;
use crate::kernel::{Arg, File, Kernel, Shape, code};
use crate::tensor_map::tensor_map;
use plimsoll_exec::DeviceError;
use plimsoll_graph::ops::{Attention, AttentionGrad, Bias, Mask, Qkv};
use plimsoll_graph::{Bytes, DType};
use plimsoll_plan::{WIDEST_CUDA_HEAD, cuda_flash_grad_parts};

/// Rows of one head that a block of `prepare` processes, 8 threads each.
const PREPARED: u64 = 32;

pub(super) fn attention_grad(call: &mut Call<'_>, op: &AttentionGrad) -> Result<(), DeviceError> {
    let op = &op.forward;
    let operands = check(call, op)?;
    let [dq, dk, dv] = gradients(call, op)?;
    if [dq, dk, dv].iter().all(Option::is_none) {
        return Ok(());
    }
    let Operands { dy, q, k, v, o, lse, spans, cosines, sines } = operands;
    let [stats, rotated_q, rotated_k, counters] = workspace(call, op, q)?;
    let [at_q, at_k] = if op.rotary { [rotated_q, rotated_k] } else { [q.address, k.address] };
    let [q_stride, k_stride] = if op.rotary { [op.width(), op.kv_width()] } else { [q.columns, k.columns] };
    let [to_q, to_k, to_v] = [dq, dk, dv].map(|d| Arg::pointer(d.unwrap_or(0)));
    let [span, local, global] = mask_extent(op.mask);
    let (heads, kv_heads) = (Arg::int(op.heads), Arg::int(op.kv_heads));
    let table = cosines.dtype;
    let prepare = [
        dy.pointer(),
        o.pointer(),
        lse.pointer(),
        q.pointer(),
        Arg::long(q.columns),
        k.pointer(),
        Arg::long(k.columns),
        spans.pointer(),
        Arg::int(spans.rows),
        Arg::int(q.rows),
        cosines.pointer(),
        sines.pointer(),
        Arg::int(cosines.rows),
        Arg::pointer(stats),
        Arg::pointer(rotated_q),
        Arg::pointer(rotated_k),
        to_q,
        to_k,
        to_v,
        Arg::long(q.columns),
        Arg::long(k.columns),
        heads,
        kv_heads,
        Arg::pointer(counters),
    ];
    let blocks = (q.rows * u64::from(op.heads)).div_ceil(PREPARED);
    call.kernel(&prepare_kernel(op, q.dtype, table), Shape::of(blocks, 256), &prepare)?;
    let counts = call.launch.counts;
    let capability = call.context.card.capability;
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
        let (d1, d2, stride) = match side.has_keys() {
            true => (to_k, to_v, k.columns),
            false => (to_q, Arg::pointer(0), q.columns),
        };
        let (width, kv_width) = (op.width(), op.kv_width());
        if let Some(form) = HopperForm::of(op, q.dtype, side, capability) {
            if q.rows == 0 {
                continue; // no tensor map can describe a tensor without rows
            }
            // k and v of a fused qkv are columns of its matrix, rotated rows are matrices of their own.
            let [k_column, v_column] = columns(op);
            let map = |address, columns| tensor_map(call.context, q.dtype, (address, q.rows, columns), 64);
            let whole = |x: Tensor, column| map(x.address - column * q.dtype.size(), x.columns);
            let [of_q, of_k] = match op.rotary {
                true => [map(rotated_q, width)?, map(rotated_k, kv_width)?],
                false => [whole(q, 0)?, whole(k, k_column)?],
            };
            let maps = [of_q, of_k, whole(v, v_column)?, map(dy.address, width)?];
            let args = [
                Arg::int(if op.rotary { 0 } else { k_column }),
                Arg::int(v_column),
                Arg::pointer(stats),
                spans.pointer(),
                Arg::int(spans.rows),
                Arg::int(q.rows),
                cosines.pointer(),
                sines.pointer(),
                Arg::int(cosines.rows),
                d1,
                d2,
                Arg::long(stride),
                heads,
                kv_heads,
                Arg::float(op.scale),
                Arg::int(span),
                Arg::pointer(counters),
                call.status(),
            ];
            let heads = u64::from(if side.has_keys() { op.kv_heads } else { op.heads });
            let items = (counts.tokens / form.rows() + spans.rows) * heads;
            let blocks = items.div_ceil(form.units.into()).min(call.context.card.multiprocessors.into());
            let shape = Shape { shared: form.shared(op), ..Shape::of(blocks, form.threads()) };
            call.kernel_on(&form.kernel(op, (q.dtype, table), side), shape, &maps, &args)?;
            continue;
        }
        let form = GradForm::of(op, q.dtype, side);
        let args = [
            Arg::pointer(at_q),
            Arg::pointer(at_k),
            v.pointer(),
            dy.pointer(),
            Arg::long(q_stride),
            Arg::long(k_stride),
            Arg::long(v.columns),
            Arg::pointer(stats),
            spans.pointer(),
            Arg::int(spans.rows),
            Arg::int(q.rows),
            cosines.pointer(),
            sines.pointer(),
            Arg::int(cosines.rows),
            d1,
            d2,
            Arg::long(stride),
            heads,
            kv_heads,
            Arg::float(op.scale),
            Arg::int(span),
            Arg::int(local),
            Arg::int(global),
            call.status(),
        ];
        let heads = u64::from(if side.has_keys() { op.kv_heads } else { op.heads });
        // Blocks of rows belong to spans, of which a sequence of the step may have several.
        let blocks = (counts.tokens / form.rows + spans.rows) * heads;
        let shape = Shape { shared: form.shared, ..Shape::of(blocks, form.threads) };
        call.kernel(&form.kernel("attention_grad", op, (q.dtype, table), side), shape, &args)?;
    }
    Ok(())
}

/// The inputs; k and v begin at their own first columns of a fused qkv.
struct Operands {
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    spans: Tensor,
    cosines: Tensor,
    sines: Tensor,
}

/// Checks what the kernels rely on, and returns the inputs.
fn check(call: &Call<'_>, op: &Attention) -> Result<Operands, DeviceError> {
    if op.head_dim > WIDEST_CUDA_HEAD {
        let dim = op.head_dim;
        return Err(call.refused(format!("a head of {dim} columns is wider than {WIDEST_CUDA_HEAD}")));
    }
    let (spans, forward) = (1 + op.operands(), op.inputs());
    let [q, mut k, mut v] = match op.qkv {
        Qkv::Separate => [call.input(1)?, call.input(2)?, call.input(3)?],
        Qkv::Fused => [call.input(1)?; 3],
    };
    let [at_k, at_v] = columns(op);
    (k.address, v.address) = (k.address + at_k * q.dtype.size(), v.address + at_v * q.dtype.size());
    let none = Tensor { address: 0, rows: 0, columns: 0, dtype: DType::F32 };
    let (cosines, sines) = match op.rotary {
        true => (call.input(spans + 1)?, call.input(spans + 2)?),
        false => (none, none),
    };
    let (dy, o, lse) = (call.input(0)?, call.input(forward + 1)?, call.input(forward + 2)?);
    if [k, v, dy, o].iter().any(|x| x.dtype != q.dtype) || !q.dtype.is_float() || lse.dtype != DType::F32 {
        return Err(call.refused("q, k, v, o and do must be of one element type, and lse of f32".to_owned()));
    }
    if cosines.dtype != sines.dtype {
        return Err(call.refused(format!("cosines are {:?} and sines are {:?}", cosines.dtype, sines.dtype)));
    }
    Ok(Operands { dy, q, k, v, o, lse, spans: call.input(spans)?, cosines, sines })
}

/// Addresses of the first columns of dq, dk and dv; `None` for a gradient that nobody reads.
fn gradients(call: &Call<'_>, op: &Attention) -> Result<[Option<u64>; 3], DeviceError> {
    let output = |i| call.output_if(i);
    Ok(match op.qkv {
        Qkv::Separate => [output(0)?, output(1)?, output(2)?].map(|d| d.map(|d| d.address)),
        Qkv::Fused => {
            let [at_k, at_v] = columns(op);
            let fused = output(0)?;
            [0, at_k, at_v].map(|column| fused.map(|d| d.address + column * d.dtype.size()))
        }
    })
}

/// Carves the workspace for this step's tokens: addresses of the stats, of the rotated q and k, and of the counters.
fn workspace(call: &Call<'_>, op: &Attention, q: Tensor) -> Result<[u64; 4], DeviceError> {
    let (mut end, size) = call.workspace()?;
    let parts = cuda_flash_grad_parts(op, q.rows, q.dtype);
    if parts.into_iter().sum::<Bytes>().0 > size.0 {
        return Err(call.refused(format!("its workspace has only {size}")));
    }
    Ok(parts.map(|part| {
        let address = end;
        end += part.0;
        address
    }))
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
        match op.head_dim > 128 && dtype != DType::F32 {
            true => &[Self::K, Self::V, Self::Q],
            false => &[Self::KAndV, Self::Q],
        }
    }

    /// Whether the rows of a block are keys.
    fn has_keys(self) -> bool {
        self != Self::Q
    }
}

/// A gradient kernel's variant, with its launch parameters.
struct GradForm {
    file: File,
    /// Constants that define the variant.
    constants: [(&'static str, u32); 5],
    /// Rows of a block: keys for dk and dv, queries for dq.
    rows: u64,
    threads: u32,
    shared: u32,
}

impl GradForm {
    /// Returns the variant for the gradients of `side`. Heads wider than 128 columns have smaller tiles and fewer rows,
    /// so that they fit into the shared memory of a block of compute capability 8.6, 8.9 or 12.0, 99 KiB.
    fn of(op: &Attention, dtype: DType, side: Side) -> Self {
        if dtype == DType::F32 {
            let (rows, tile) = match op.head_dim {
                129.. => (16, 16),
                65.. => (32, 32),
                _ => (64, 32),
            };
            let words = op.head_dim.div_ceil(4) | 1;
            let shared = 2 * (rows + tile) * words * 16 + 2 * rows * (tile + 4) * 4;
            let constants = [("ROWS", rows), ("TILE", tile), ("", 0), ("", 0), ("", 0)];
            let file = File::AttentionGradF32;
            return Self { file, constants, rows: u64::from(rows), threads: 256, shared };
        }
        let columns = op.head_dim.next_multiple_of(16);
        let (warps, m_tiles, stages) = (if columns > 240 { 3 } else { 4 }, 1, 2);
        let (tile, step) = match columns {
            129.. => (16, 16),
            65.. => (32, if side.has_keys() { 16 } else { 32 }),
            _ => (64, 32),
        };
        let rows = warps * m_tiles * 16;
        let stats = if side.has_keys() { stages * tile * 8 } else { 0 };
        let shared = 2 * (rows + stages * tile) * (columns + 8) * 2 + stats;
        let constants = [("WARPS", warps), ("MT", m_tiles), ("TILE", tile), ("STEP", step), ("STAGES", stages)];
        let file = File::AttentionGrad;
        Self { file, constants, rows: u64::from(rows), threads: warps * 32, shared }
    }

    fn kernel(
        &self,
        entry: &'static str,
        op: &Attention,
        (dtype, table): (DType, DType),
        side: Side,
    ) -> Kernel {
        let kernel = Kernel::new(self.file, entry, dtype)
            .with("HEAD_DIM", i64::from(op.head_dim))
            .with("TABLE", code(table))
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
struct HopperForm {
    /// Parts of a block that compute rows of their own.
    units: u32,
    /// Warpgroups of a unit, with 64 rows each.
    groups: u32,
    /// Steps of 64 columns that shared memory holds.
    stages: u32,
}

impl HopperForm {
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

    fn kernel(self, op: &Attention, (dtype, table): (DType, DType), side: Side) -> Kernel {
        Kernel::new(File::AttentionGradHopper, "attention_grad", dtype)
            .with("HEAD_DIM", i64::from(op.head_dim))
            .with("TABLE", code(table))
            .with("ROTARY", i64::from(op.rotary))
            .with("MASK", mask_kind(op.mask))
            .with("KEYS", side as i64)
            .with("UNITS", i64::from(self.units))
            .with("GROUPS", i64::from(self.groups))
            .with("STAGES", i64::from(self.stages))
    }
}

/// The kernel that prepares the rows. It is an entry of each file, which needs the variant's constants all the same.
fn prepare_kernel(op: &Attention, dtype: DType, table: DType) -> Kernel {
    let side = Side::all(op, dtype)[0];
    GradForm::of(op, dtype, side).kernel("prepare", op, (dtype, table), side)
}

/// Returns a sample of the kernels: every head dimension of the supported models, with every mask and bias.
pub(super) fn every_kernel() -> Vec<Kernel> {
    let op = |head_dim, mask, bias, rotary| {
        let (heads, kv_heads, scale, qkv) = (12, 12, 1.0, Qkv::Fused);
        Attention { heads, kv_heads, head_dim, scale, mask, bias, rotary, qkv }
    };
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
            kernels.push(prepare_kernel(op, dtype, DType::F32));
            kernels.extend(Side::all(op, dtype).iter().map(|&side| {
                GradForm::of(op, dtype, side).kernel("attention_grad", op, (dtype, DType::F32), side)
            }));
            kernels.extend(Side::all(op, dtype).iter().filter_map(|&side| {
                Some(HopperForm::of(op, dtype, side, HOPPER)?.kernel(op, (dtype, DType::F32), side))
            }));
        }
    }
    kernels
}

#[cfg(test)]
mod tests {
    use super::super::attention::tests::{LEAST_SHARED, op};
    use super::*;

    #[test]
    fn every_head_fits_into_the_shared_memory_of_every_card() {
        for op in (1..=WIDEST_CUDA_HEAD).map(op) {
            for dtype in [DType::F32, DType::Bf16] {
                let shared = |&side: &Side| GradForm::of(&op, dtype, side).shared;
                let most = Side::all(&op, dtype).iter().map(shared).max();
                assert!(most.is_some_and(|most| most <= LEAST_SHARED), "{} columns: {most:?}", op.head_dim);
            }
        }
    }

    #[test]
    fn every_variant_for_hopper_fits_into_its_shared_memory() {
        let mut variants = 0;
        for op in (1..=WIDEST_CUDA_HEAD).map(op) {
            for &side in Side::all(&op, DType::Bf16) {
                let Some(form) = HopperForm::of(&op, DType::Bf16, side, HOPPER) else { continue };
                assert!(form.shared(&op) <= 227 << 10, "{} columns: {}", op.head_dim, form.shared(&op));
                variants += 1;
            }
        }
        assert_eq!(variants, 4, "heads of 64 and of 128 columns, a kernel for dk and dv and one for dq each");
    }
}
