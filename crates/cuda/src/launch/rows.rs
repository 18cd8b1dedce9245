//! Ops on rows: elementwise ops, norms, softmax. Invariant: the kernel is chosen by columns and element types, never
//! by the number of rows, so a row has the same bits in any step.

use super::{Call, Tensor};
use crate::kernel::{Arg, File, Kernel, Shape, code};
use plimsoll_exec::DeviceError;
use plimsoll_graph::DType;
use plimsoll_graph::ops::{Activation, BatchNorm, Glu, LayerNorm};

/// Threads of a block of an elementwise kernel.
pub(super) const THREADS: u32 = 256;
/// Memory accesses of a thread of an elementwise kernel.
const STEPS: u64 = 4;
/// Largest number of elements of a row that a thread of a norm keeps in registers, with the parameters beside them.
const ELEMENTS_PER_THREAD: u64 = 24;
/// As `ELEMENTS_PER_THREAD`, for rows that need the largest block.
const WIDEST_ELEMENTS_PER_THREAD: u64 = 32;

pub(super) fn add(call: &mut Call<'_>) -> Result<(), DeviceError> {
    let (a, b, y) = (call.input(0)?, call.input(1)?, call.output(0)?);
    let kernel = Kernel::new(File::Elementwise, "add", y.dtype);
    call.kernel(&kernel, flat(&y, wide(y.dtype)), &[a.pointer(), b.pointer(), y.pointer(), elements(&y)])
}

pub(super) fn gelu(call: &mut Call<'_>) -> Result<(), DeviceError> {
    let (x, y) = (call.input(0)?, call.output(0)?);
    unary(call, "gelu", x, y)
}

/// Returns the kernel, grid and arguments of `x = gelu(x)` over `elements` elements, as a pass behind a matmul.
pub(crate) fn gelu_in_place(dtype: DType, x: u64, elements: u64) -> (Kernel, Shape, [Arg; 3]) {
    let args = [Arg::pointer(x), Arg::pointer(x), Arg::long(elements)];
    (Kernel::new(File::Elementwise, "gelu", dtype), all(elements, wide(dtype)), args)
}

pub(super) fn relu(call: &mut Call<'_>) -> Result<(), DeviceError> {
    let (x, y) = (call.input(0)?, call.output(0)?);
    unary(call, "relu", x, y)
}

fn unary(call: &mut Call<'_>, entry: &'static str, x: Tensor, y: Tensor) -> Result<(), DeviceError> {
    let kernel = Kernel::new(File::Elementwise, entry, y.dtype);
    call.kernel(&kernel, flat(&y, wide(y.dtype)), &[x.pointer(), y.pointer(), elements(&y)])
}

pub(super) fn cast(call: &mut Call<'_>) -> Result<(), DeviceError> {
    let (x, y) = (call.input(0)?, call.output(0)?);
    let (kernel, shape, args) = cast_to((x.dtype, y.dtype), x.address, y.address, y.elements());
    call.kernel(&kernel, shape, &args)
}

/// Returns the kernel, grid and arguments of a conversion of `elements` elements at `x` from a type to another, at `y`.
pub(super) fn cast_to((from, to): (DType, DType), x: u64, y: u64, elements: u64) -> (Kernel, Shape, [Arg; 3]) {
    let args = [Arg::pointer(x), Arg::pointer(y), Arg::long(elements)];
    (cast_kernel(from, to), all(elements, wide(from).min(wide(to))), args)
}

fn cast_kernel(from: DType, to: DType) -> Kernel {
    Kernel::new(File::Elementwise, "cast", from).with("INTO", code(to))
}

pub(super) fn glu(call: &mut Call<'_>, op: &Glu) -> Result<(), DeviceError> {
    let (x, y) = (call.input(0)?, call.output(0)?);
    let accesses = y.elements() / row_width(y.dtype, y.columns);
    let shape = Shape::of(accesses.div_ceil(STEPS * u64::from(THREADS)), THREADS);
    let kernel = glu_kernel(y.dtype, y.columns, op.activation);
    call.kernel(&kernel, shape, &[x.pointer(), y.pointer(), Arg::long(accesses)])
}

fn glu_kernel(dtype: DType, columns: u64, activation: Activation) -> Kernel {
    let silu = match activation {
        Activation::Gelu => 0,
        Activation::Silu => 1,
    };
    Kernel::new(File::Elementwise, "glu", dtype).with("COLUMNS", columns as i64).with("SILU", silu)
}

pub(super) fn concat(call: &mut Call<'_>) -> Result<(), DeviceError> {
    let y = call.output(0)?;
    let kernel = Kernel::new(File::Elementwise, "concat", y.dtype);
    let mut first = 0;
    for i in 0..call.launch.ins.len() {
        let x = call.input(i)?;
        let args = [x.pointer(), y.pointer(), Arg::int(x.columns), Arg::int(first), Arg::int(y.columns)];
        call.kernel(&kernel, Shape::of(y.rows, THREADS), &args)?;
        first += x.columns;
    }
    Ok(())
}

pub(super) fn layer_norm(call: &mut Call<'_>, op: &LayerNorm) -> Result<(), DeviceError> {
    let outs = [call.output_if(0)?, call.output_if(1)?, call.output_if(2)?];
    let [Some(y), mean, rstd] = outs else {
        return Err(call.refused("nobody reads its rows".to_owned()));
    };
    norm(call, op, [Some(y), mean, rstd], None)
}

/// Runs a layer norm whose output rows are written in their element type, quantized, or both.
pub(super) fn norm(
    call: &mut Call<'_>,
    op: &LayerNorm,
    [y, mean, rstd]: [Option<Tensor>; 3],
    quantized: Option<Tensor>,
) -> Result<(), DeviceError> {
    let (x, gamma, beta) = (call.input(0)?, call.input(1)?, call.input(2)?);
    if gamma.dtype != beta.dtype {
        return Err(call.refused(format!("gamma is {:?} and beta is {:?}", gamma.dtype, beta.dtype)));
    }
    let Some(group) = group(x.dtype, x.columns) else {
        return Err(call.refused(format!("rows of {} columns are too wide for a block", x.columns)));
    };
    let (shape, each) = norm_shape(x.rows, group);
    let [y, mean, rstd, quantized_at] =
        [y, mean, rstd, quantized].map(|t| Arg::pointer(t.map_or(0, |t| t.address)));
    let scales = Arg::pointer(quantized.map_or(0, |quantized| quantized.scales()));
    let [x_at, gamma_at, beta_at] = [x, gamma, beta].map(|t| t.pointer());
    let rows = [Arg::long(x.rows), Arg::int(each), Arg::float(op.eps)];
    let args = [x_at, gamma_at, beta_at, y, mean, rstd, rows[0], rows[1], rows[2], quantized_at, scales];
    let kernel = layer_norm_kernel(x.dtype, gamma.dtype, x.columns, group);
    // Without quantized output the kernel does not have the last two parameters.
    match quantized {
        Some(_) => call.kernel(&kernel.quantized(), shape, &args),
        None => call.kernel(&kernel, shape, &args[..9]),
    }
}

/// Returns the kernel, grid and arguments of a layer norm in front of a matmul, for rows of at most
/// [`ELEMENTS_PER_THREAD`] elements per lane of a warp.
pub(crate) fn norm_of(
    (dtype, params): (DType, DType),
    (rows, columns): (u64, u64),
    [x, gamma, beta, y]: [u64; 4],
    eps: f32,
) -> (Kernel, Shape, [Arg; 9]) {
    const WARP: u64 = 32;
    let (shape, each) = norm_shape(rows, WARP);
    let [x, gamma, beta, y, none] = [x, gamma, beta, y, 0].map(Arg::pointer);
    let args = [x, gamma, beta, y, none, none, Arg::long(rows), Arg::int(each), Arg::float(eps)];
    (layer_norm_kernel(dtype, params, columns, WARP), shape, args)
}

/// Returns the grid, and the number of rows per group of threads. Once there are enough rows for all groups, a group
/// does several rows, for which it reads gamma and beta once.
pub(super) fn norm_shape(rows: u64, group: u64) -> (Shape, u64) {
    let each = if rows * group >= 1 << 20 { 8 } else { 1 };
    let threads = group.max(128);
    (Shape::of(rows.div_ceil(each * (threads / group)), threads as u32), each)
}

fn layer_norm_kernel(dtype: DType, params: DType, columns: u64, group: u64) -> Kernel {
    let kernel = Kernel::new(File::Norm, "layer_norm", dtype).with("PARAM", code(params));
    kernel.with("COLUMNS", columns as i64).with("GROUP", group as i64)
}

/// Returns the number of threads that share a row in their registers: the fewest that keep the parameters too,
/// otherwise the largest block; `None` if even that cannot keep a row.
pub(super) fn group(dtype: DType, columns: u64) -> Option<u64> {
    let width = row_width(dtype, columns);
    let kept = |group: u64| (columns / width).div_ceil(group) * width;
    let few = [32, 64, 128, 256, 512].into_iter().find(|&group| kept(group) <= ELEMENTS_PER_THREAD);
    few.or_else(|| (kept(1024) <= WIDEST_ELEMENTS_PER_THREAD).then_some(1024))
}

pub(super) fn batch_norm(call: &mut Call<'_>, op: &BatchNorm) -> Result<(), DeviceError> {
    let (x, y, gamma) = (call.input(0)?, call.output(0)?, call.input(1)?);
    let params = [gamma, call.input(2)?, call.input(3)?, call.input(4)?];
    if let Some(other) = params.iter().find(|param| param.dtype != gamma.dtype) {
        return Err(call.refused(format!("gamma is {:?} and another is {:?}", gamma.dtype, other.dtype)));
    }
    let [a, b, c, d] = params.map(|param| param.pointer());
    let args = [x.pointer(), a, b, c, d, y.pointer(), Arg::int(x.columns), Arg::float(op.eps)];
    call.kernel(&batch_norm_kernel(x.dtype, gamma.dtype), Shape::of(x.rows, THREADS), &args)
}

fn batch_norm_kernel(dtype: DType, params: DType) -> Kernel {
    Kernel::new(File::Norm, "batch_norm", dtype).with("PARAM", code(params))
}

pub(super) fn softmax(call: &mut Call<'_>) -> Result<(), DeviceError> {
    let (x, y) = (call.input(0)?, call.output(0)?);
    let args = [x.pointer(), y.pointer(), Arg::long(x.rows), Arg::int(x.columns)];
    call.kernel(&Kernel::new(File::Norm, "softmax", x.dtype), Shape::of(x.rows.div_ceil(4), 128), &args)
}

/// Number of elements in 16 bytes.
pub(super) fn wide(dtype: DType) -> u64 {
    if dtype == DType::F32 { 4 } else { 8 }
}

/// Number of elements per access to rows of `columns`: 16 bytes if all rows are aligned to 16 bytes.
pub(super) fn row_width(dtype: DType, columns: u64) -> u64 {
    if columns.is_multiple_of(wide(dtype)) { wide(dtype) } else { 1 }
}

/// Returns the grid for all elements of `y` in accesses of `width` elements.
pub(super) fn flat(y: &Tensor, width: u64) -> Shape {
    all(y.elements(), width)
}

fn all(elements: u64, width: u64) -> Shape {
    Shape::of(elements.div_ceil(width * STEPS * u64::from(THREADS)), THREADS)
}

pub(super) fn elements(y: &Tensor) -> Arg {
    Arg::long(y.elements())
}

pub(super) fn every_kernel() -> Vec<Kernel> {
    let types = [DType::F32, DType::Bf16, DType::F16];
    let mut kernels = vec![];
    for dtype in types {
        kernels.extend(["add", "gelu", "relu", "concat"].map(|e| Kernel::new(File::Elementwise, e, dtype)));
        kernels.extend(types.map(|to| cast_kernel(dtype, to)));
        // DNABERT-S, and rows that are not aligned.
        kernels.extend([3072, 33].map(|columns| glu_kernel(dtype, columns, Activation::Gelu)));
        kernels.push(glu_kernel(dtype, 3072, Activation::Silu));
        kernels.extend([DType::F32, dtype].map(|params| batch_norm_kernel(dtype, params)));
        kernels.push(Kernel::new(File::Norm, "softmax", dtype));
        for columns in [320, 480, 640, 768, 1280, 2560, 33, 16384] {
            let group = group(dtype, columns).unwrap_or_default();
            let norm = layer_norm_kernel(dtype, DType::F32, columns, group);
            kernels.extend([norm, norm.quantized(), layer_norm_kernel(dtype, dtype, columns, group)]);
        }
    }
    kernels.dedup();
    kernels
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_go_to_the_fewest_threads_that_keep_them() {
        let groups = [(320, 32), (768, 32), (1280, 64), (2560, 128), (24_576, 1024), (32_768, 1024)];
        for (columns, threads) in groups {
            assert_eq!(group(DType::Bf16, columns), Some(threads), "{columns} columns");
        }
        assert_eq!((group(DType::F32, 33), group(DType::F32, 32_769)), (Some(32), None));
    }
}
