//! Ops on rows: elementwise ops, norms, softmax. Invariant: the kernel is chosen by columns and element types, never
//! by the number of rows, so a row has the same bits in any step.

use super::{DeviceTensor, OpLaunch};
use crate::kernel::{Arg, Kernel, KernelFile, KernelLaunch, LaunchShape, code, int, kernel_arguments};
use crate::row_kernels::{
    LayerNormArgs, NormShape, STEPS, THREADS, elementwise_shape, group, layer_norm_kernel, norm_shape,
    row_width, wide,
};
use plimsoll_exec::DeviceError;
use plimsoll_graph::DType;
use plimsoll_graph::ops::{Activation, BatchNorm, Glu, LayerNorm};

pub(super) fn add(call: &mut OpLaunch<'_>) -> Result<(), DeviceError> {
    let a = call.input(0)?;
    let b = call.input(1)?;
    let y = call.output(0)?;
    let kernel = Kernel::new(KernelFile::Elementwise, "add", y.dtype);
    call.kernel(&kernel, flat(&y, wide(y.dtype)), &[a.pointer(), b.pointer(), y.pointer(), elements(&y)])
}

pub(super) fn gelu(call: &mut OpLaunch<'_>) -> Result<(), DeviceError> {
    unary(call, "gelu")
}

pub(super) fn relu(call: &mut OpLaunch<'_>) -> Result<(), DeviceError> {
    unary(call, "relu")
}

/// Runs an elementwise kernel of one input.
fn unary(call: &mut OpLaunch<'_>, entry: &'static str) -> Result<(), DeviceError> {
    let x = call.input(0)?;
    let y = call.output(0)?;
    let kernel = Kernel::new(KernelFile::Elementwise, entry, y.dtype);
    call.kernel(&kernel, flat(&y, wide(y.dtype)), &[x.pointer(), y.pointer(), elements(&y)])
}

pub(super) fn cast(call: &mut OpLaunch<'_>) -> Result<(), DeviceError> {
    let x = call.input(0)?;
    let y = call.output(0)?;
    let KernelLaunch { kernel, shape, args } = cast_to(x.dtype, y.dtype, x.address, y.address, y.elements());
    call.kernel(&kernel, shape, &args)
}

/// Returns the kernel, grid and arguments of a conversion of `elements` elements at `x` from a type to another, at `y`.
pub(super) fn cast_to(from: DType, to: DType, x: u64, y: u64, elements: u64) -> KernelLaunch<[Arg; 3]> {
    KernelLaunch {
        kernel: cast_kernel(from, to),
        shape: elementwise_shape(elements, wide(from).min(wide(to))),
        args: [Arg::pointer(x), Arg::pointer(y), Arg::long(elements)],
    }
}

fn cast_kernel(from: DType, to: DType) -> Kernel {
    Kernel::new(KernelFile::Elementwise, "cast", from).with("INTO", code(to))
}

pub(super) fn glu(call: &mut OpLaunch<'_>, op: &Glu) -> Result<(), DeviceError> {
    let x = call.input(0)?;
    let y = call.output(0)?;
    let accesses = y.elements() / row_width(y.dtype, y.columns);
    let shape = LaunchShape::of(accesses.div_ceil(STEPS * u64::from(THREADS)), THREADS);
    let kernel = glu_kernel(y.dtype, y.columns, op.activation);
    call.kernel(&kernel, shape, &[x.pointer(), y.pointer(), Arg::long(accesses)])
}

fn glu_kernel(dtype: DType, columns: u64, activation: Activation) -> Kernel {
    let silu = match activation {
        Activation::Gelu => 0,
        Activation::Silu => 1,
    };
    Kernel::new(KernelFile::Elementwise, "glu", dtype).with("COLUMNS", columns as i64).with("SILU", silu)
}

pub(super) fn concat(call: &mut OpLaunch<'_>) -> Result<(), DeviceError> {
    let y = call.output(0)?;
    let kernel = Kernel::new(KernelFile::Elementwise, "concat", y.dtype);
    let mut first = 0;
    for i in 0..call.launch.ins.len() {
        let x = call.input(i)?;
        let args = [x.pointer(), y.pointer(), Arg::int(x.columns), Arg::int(first), Arg::int(y.columns)];
        call.kernel(&kernel, LaunchShape::of(y.rows, THREADS), &args)?;
        first += x.columns;
    }
    Ok(())
}

pub(super) fn layer_norm(call: &mut OpLaunch<'_>, op: &LayerNorm) -> Result<(), DeviceError> {
    let outputs = NormOutputs {
        y: call.output_if(0)?,
        mean: call.output_if(1)?,
        rstd: call.output_if(2)?,
        quantized: None,
    };
    if outputs.y.is_none() {
        return Err(call.refused("nobody reads its rows".to_owned()));
    }
    norm(call, op, outputs)
}

/// Outputs of a layer norm; the rows are written in their element type, quantized, or both.
pub(super) struct NormOutputs {
    pub(super) y: Option<DeviceTensor>,
    pub(super) mean: Option<DeviceTensor>,
    pub(super) rstd: Option<DeviceTensor>,
    pub(super) quantized: Option<DeviceTensor>,
}

/// Runs a layer norm.
pub(super) fn norm(call: &mut OpLaunch<'_>, op: &LayerNorm, outputs: NormOutputs) -> Result<(), DeviceError> {
    let x = call.input(0)?;
    let gamma = call.input(1)?;
    let beta = call.input(2)?;
    if gamma.dtype != beta.dtype {
        return Err(call.refused(format!("gamma is {:?} and beta is {:?}", gamma.dtype, beta.dtype)));
    }
    let Some(group) = group(x.dtype, x.columns) else {
        return Err(call.refused(format!("rows of {} columns are too wide for a block", x.columns)));
    };
    let NormShape { shape, rows_per_group } = norm_shape(x.rows, group);
    let NormOutputs { y, mean, rstd, quantized } = outputs;
    let args = LayerNormArgs {
        x: x.address,
        gamma: gamma.address,
        beta: beta.address,
        y: y.map_or(0, |y| y.address),
        means: mean.map_or(0, |mean| mean.address),
        rstds: rstd.map_or(0, |rstd| rstd.address),
        quantized: quantized.map_or(0, |quantized| quantized.address),
        scales: quantized.map_or(0, |quantized| quantized.scales()),
        rows: x.rows,
        rows_per_group: int(rows_per_group),
        eps: op.eps,
    };
    let kernel = layer_norm_kernel(x.dtype, gamma.dtype, x.columns, group);
    let kernel = if quantized.is_some() { kernel.quantized() } else { kernel };
    call.kernel(&kernel, shape, &args)
}

kernel_arguments! {
    /// Arguments of `batch_norm` (norm.cu).
    struct BatchNormArgs {
        x: u64,
        gamma: u64,
        beta: u64,
        mean: u64,
        var: u64,
        y: u64,
        columns: i32,
        eps: f32,
    }
    size 56, last 52
}

pub(super) fn batch_norm(call: &mut OpLaunch<'_>, op: &BatchNorm) -> Result<(), DeviceError> {
    let x = call.input(0)?;
    let y = call.output(0)?;
    let gamma = call.input(1)?;
    let beta = call.input(2)?;
    let mean = call.input(3)?;
    let var = call.input(4)?;
    if let Some(other) = [beta, mean, var].iter().find(|param| param.dtype != gamma.dtype) {
        return Err(call.refused(format!("gamma is {:?} and another is {:?}", gamma.dtype, other.dtype)));
    }
    let args = BatchNormArgs {
        x: x.address,
        gamma: gamma.address,
        beta: beta.address,
        mean: mean.address,
        var: var.address,
        y: y.address,
        columns: int(x.columns),
        eps: op.eps,
    };
    call.kernel(&batch_norm_kernel(x.dtype, gamma.dtype), LaunchShape::of(x.rows, THREADS), &args)
}

fn batch_norm_kernel(dtype: DType, params: DType) -> Kernel {
    Kernel::new(KernelFile::Norm, "batch_norm", dtype).with("PARAM", code(params))
}

pub(super) fn softmax(call: &mut OpLaunch<'_>) -> Result<(), DeviceError> {
    let x = call.input(0)?;
    let y = call.output(0)?;
    let args = [x.pointer(), y.pointer(), Arg::long(x.rows), Arg::int(x.columns)];
    call.kernel(
        &Kernel::new(KernelFile::Norm, "softmax", x.dtype),
        LaunchShape::of(x.rows.div_ceil(4), 128),
        &args,
    )
}

/// Returns the grid for all elements of `y` in accesses of `width` elements.
pub(super) fn flat(y: &DeviceTensor, width: u64) -> LaunchShape {
    elementwise_shape(y.elements(), width)
}

pub(super) fn elements(y: &DeviceTensor) -> Arg {
    Arg::long(y.elements())
}

pub(super) fn every_kernel() -> Vec<Kernel> {
    let types = [DType::F32, DType::Bf16, DType::F16];
    let mut kernels = vec![];
    for dtype in types {
        kernels
            .extend(["add", "gelu", "relu", "concat"].map(|e| Kernel::new(KernelFile::Elementwise, e, dtype)));
        kernels.extend(types.map(|to| cast_kernel(dtype, to)));
        // DNABERT-S, and rows that are not aligned.
        kernels.extend([3072, 33].map(|columns| glu_kernel(dtype, columns, Activation::Gelu)));
        kernels.push(glu_kernel(dtype, 3072, Activation::Silu));
        kernels.extend([DType::F32, dtype].map(|params| batch_norm_kernel(dtype, params)));
        kernels.push(Kernel::new(KernelFile::Norm, "softmax", dtype));
        for columns in [320, 480, 640, 768, 1280, 2560, 33, 16384] {
            let group = group(dtype, columns).unwrap_or_default();
            let norm = layer_norm_kernel(dtype, DType::F32, columns, group);
            kernels.extend([norm, norm.quantized(), layer_norm_kernel(dtype, dtype, columns, group)]);
        }
    }
    kernels.dedup();
    kernels
}
