//! Ops on rows: elementwise ops, norms, softmax. Invariant: the kernel is chosen by columns and element types, never
//! by the number of rows, so a row has the same bits in any step.

use super::{Call, Tensor};
use crate::kernel::{Arg, File, Kernel, Shape, code};
use crate::row_kernels::{STEPS, THREADS, all, group, layer_norm_kernel, norm_shape, row_width, wide};
use plimsoll_exec::DeviceError;
use plimsoll_graph::DType;
use plimsoll_graph::ops::{Activation, BatchNorm, Glu, LayerNorm};

pub(super) fn add(call: &mut Call<'_>) -> Result<(), DeviceError> {
    let (a, b, y) = (call.input(0)?, call.input(1)?, call.output(0)?);
    let kernel = Kernel::new(File::Elementwise, "add", y.dtype);
    call.kernel(&kernel, flat(&y, wide(y.dtype)), &[a.pointer(), b.pointer(), y.pointer(), elements(&y)])
}

pub(super) fn gelu(call: &mut Call<'_>) -> Result<(), DeviceError> {
    let (x, y) = (call.input(0)?, call.output(0)?);
    unary(call, "gelu", x, y)
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

/// Returns the grid for all elements of `y` in accesses of `width` elements.
pub(super) fn flat(y: &Tensor, width: u64) -> Shape {
    all(y.elements(), width)
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
