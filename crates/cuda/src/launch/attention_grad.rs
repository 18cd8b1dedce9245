//! Gradient of attention: a kernel that prepares the rows, one for dk and dv, and one for dq. Invariant: the kernels are
//! determined by the element type, the op and nothing else, so the bits of a row depend on its own sequence only.

use super::attention::{columns, mask_extent, mask_kind};
use super::{Call, Tensor};
use crate::kernel::{Arg, File, Kernel, Shape, code};
use plimsoll_exec::DeviceError;
use plimsoll_graph::DType;
use plimsoll_graph::ops::{Attention, AttentionGrad, Bias, Mask, Qkv};
use plimsoll_plan::{WIDEST_HEAD, cuda_flash_grad_parts};

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
    let [stats, rotated_q, rotated_k] = workspace(call, op, q)?;
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
    ];
    let blocks = (q.rows * u64::from(op.heads)).div_ceil(PREPARED);
    call.kernel(&prepare_kernel(op, q.dtype, table), Shape::of(blocks, 256), &prepare)?;
    let counts = call.launch.counts;
    for keys in [true, false] {
        let (d1, d2, stride, used) = match keys {
            true => (to_k, to_v, k.columns, dk.is_some() || dv.is_some()),
            false => (to_q, Arg::pointer(0), q.columns, dq.is_some()),
        };
        if !used {
            continue;
        }
        let form = GradForm::of(op, q.dtype, keys);
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
        let heads = u64::from(if keys { op.kv_heads } else { op.heads });
        let blocks = (counts.tokens / form.rows + counts.sequences) * heads;
        let shape = Shape { shared: form.shared, ..Shape::of(blocks, form.threads) };
        call.kernel(&form.kernel("attention_grad", op, (q.dtype, table), keys), shape, &args)?;
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
    if op.head_dim > WIDEST_HEAD {
        let dim = op.head_dim;
        return Err(call.refused(format!("a head of {dim} columns is wider than {WIDEST_HEAD}")));
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

/// Carves the workspace for this step's tokens: addresses of the stats, and of the rotated q and k.
fn workspace(call: &Call<'_>, op: &Attention, q: Tensor) -> Result<[u64; 3], DeviceError> {
    let (address, size) = call.workspace()?;
    let [stats, rotated_q, rotated_k] = cuda_flash_grad_parts(op, q.rows, q.dtype);
    if (stats + rotated_q + rotated_k).0 > size.0 {
        return Err(call.refused(format!("its workspace has only {size}")));
    }
    Ok([address, address + stats.0, address + stats.0 + rotated_q.0])
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
    /// Returns the variant for dk and dv (`keys`) or for dq.
    fn of(op: &Attention, dtype: DType, keys: bool) -> Self {
        let wide = op.head_dim > 64;
        if dtype == DType::F32 {
            let (rows, words) = (if wide { 32 } else { 64 }, op.head_dim.div_ceil(4) | 1);
            let shared = 2 * (rows + 32) * words * 16 + 2 * rows * 36 * 4;
            let constants = [("ROWS", rows), ("", 0), ("", 0), ("", 0), ("", 0)];
            let file = File::AttentionGradF32;
            return Self { file, constants, rows: u64::from(rows), threads: 256, shared };
        }
        let columns = op.head_dim.next_multiple_of(16);
        let (warps, m_tiles, stages) = (4, 1, 2);
        let tile = if wide { 32 } else { 64 };
        let step = if wide && keys { 16 } else { 32 };
        let rows = warps * m_tiles * 16;
        let stats = if keys { stages * tile * 8 } else { 0 };
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
        keys: bool,
    ) -> Kernel {
        let kernel = Kernel::new(self.file, entry, dtype)
            .with("HEAD_DIM", i64::from(op.head_dim))
            .with("TABLE", code(table))
            .with("ROTARY", i64::from(op.rotary))
            .with("MASK", mask_kind(op.mask))
            .with("ALIBI", i64::from(op.bias == Bias::Alibi))
            .with("KEYS", i64::from(keys));
        let constants = self.constants.iter().filter(|(name, _)| !name.is_empty());
        constants.fold(kernel, |kernel, &(name, value)| kernel.with(name, i64::from(value)))
    }
}

/// The kernel that prepares the rows. It is an entry of each file, which needs the variant's constants all the same.
fn prepare_kernel(op: &Attention, dtype: DType, table: DType) -> Kernel {
    GradForm::of(op, dtype, true).kernel("prepare", op, (dtype, table), true)
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
    ops.push(op(64, Mask::Full, Bias::Alibi, false));
    ops.push(op(5, Mask::Full, Bias::None, false));
    let of = |op: &Attention| {
        [DType::F32, DType::Bf16, DType::F16].map(|dtype| {
            let of_side =
                |keys| GradForm::of(op, dtype, keys).kernel("attention_grad", op, (dtype, DType::F32), keys);
            [prepare_kernel(op, dtype, DType::F32), of_side(true), of_side(false)]
        })
    };
    ops.iter().flat_map(of).flatten().collect()
}
