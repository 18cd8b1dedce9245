//! Linear layers: a matmul with its bias, residual and epilogue. Invariant: operands have one float type, to which the
//! sums are rounded once; or x and w are quantized and all others are bf16.

use super::{DeviceTensor, OpLaunch};
use crate::gemm::{self, GemmForm, GemmOperands, NormParameters};
use plimsoll_exec::DeviceError;
use plimsoll_graph::ops::{Epilogue, LayerNorm, Linear, OperandFormat, Prologue};
use plimsoll_graph::{DType, Layout};
use plimsoll_setting::Setting;

/// A linear layer whose operands have one element type.
pub(super) fn linear(call: &mut OpLaunch<'_>, op: &Linear) -> Result<(), DeviceError> {
    let [x, w, y] = [call.input(0)?, call.input(1)?, call.output(0)?];
    let (bias, residual) = added(call, op)?;
    accepted(call, &[Some(x), Some(w), bias, residual, Some(y)])?;
    matmul(call, op, [x, w, y], bias, residual)
}

/// A linear layer with quantized x and w, and bf16 for the others.
pub(super) fn quantized(call: &mut OpLaunch<'_>, op: &Linear) -> Result<(), DeviceError> {
    let [x, w, y] = [call.input(0)?, call.input(1)?, call.output(0)?];
    let (bias, residual) = added(call, op)?;
    accepted_beside_quantized(call, &[bias, residual, Some(y)])?;
    if op.epilogue.gate().is_some() {
        return Err(call.refused("fp8 matmuls have no gate behind them".to_owned()));
    }
    matmul(call, op, [x, w, y], bias, residual)
}

/// Returns the bias and the residual.
fn added(
    call: &OpLaunch<'_>,
    op: &Linear,
) -> Result<(Option<DeviceTensor>, Option<DeviceTensor>), DeviceError> {
    let bias = op.bias.then(|| call.input(2)).transpose()?;
    let residual = match op.epilogue {
        Epilogue::Residual => Some(call.input(2 + usize::from(op.bias))?),
        Epilogue::None | Epilogue::Gelu | Epilogue::Gate | Epilogue::SiluGate => None,
    };
    Ok((bias, residual))
}

/// Prepares or runs the matmul, whose operands have been checked.
fn matmul(
    call: &mut OpLaunch<'_>,
    op: &Linear,
    [x, w, y]: [DeviceTensor; 3],
    bias: Option<DeviceTensor>,
    residual: Option<DeviceTensor>,
) -> Result<(), DeviceError> {
    if op.epilogue == Epilogue::SiluGate {
        return Err(call.refused("matmuls on GPUs have no SiLU gate behind them".to_owned()));
    }
    let tf32 = op.operands == OperandFormat::Tf32;
    if tf32 && call.preparing && std::env::var("NVIDIA_TF32_OVERRIDE").is_ok_and(|value| value.trim() == "0") {
        let why = format!(
            "NVIDIA_TF32_OVERRIDE=0 keeps cuBLAS from TF32; unset it, or use {}",
            Setting::Precision.to("f32")
        );
        return Err(call.refused(why));
    }
    let (scratch, bytes) = call.workspace()?;
    let (params, norm) = norm(call, op)?.unzip();
    let form = GemmForm {
        tf32,
        bias: bias.is_some(),
        epilogue: op.epilogue,
        norm: params,
        ..GemmForm::new(y.columns, x.stride(), x.dtype)
    };
    if form.norm.is_some() && !gemm::has_norms(call.context, form) {
        let widest = gemm::WIDEST;
        return Err(call.refused(format!(
            "norms are in front of matmuls of 16 bits with at most {widest} columns, in multiples of 8, and no gate or \
             residual behind them, on compute capability 9.0: this is {form}"
        )));
    }
    let operands = GemmOperands {
        x: x.address,
        w: w.address,
        scales: (x.scales(), w.scales()),
        bias: bias.map_or(0, |bias| bias.address),
        residual: residual.map_or(0, |residual| residual.address),
        norm: norm.unwrap_or_default(),
        y: y.address,
        rows: y.rows,
        workspace: (scratch, bytes.0),
    };
    if operands.rows == 0 {
        return Ok(());
    }
    if call.preparing {
        call.gemm.prepare(call.context, call.kernels, form, &operands)?;
    } else {
        call.gemm.run(call.context, call.kernels, form, &operands)?;
    }
    Ok(())
}

/// Returns the layer norm that is fused in front of the matmul, with the element type of its gamma and beta; `None` if
/// no norm is fused.
fn norm(call: &OpLaunch<'_>, op: &Linear) -> Result<Option<(DType, NormParameters)>, DeviceError> {
    let Prologue::LayerNorm(LayerNorm { eps }) = op.prologue else { return Ok(None) };
    let gamma = call.input(op.norm_at())?;
    let beta = call.input(op.norm_at() + 1)?;
    if gamma.dtype != beta.dtype {
        return Err(call.refused(format!("gamma is {:?} and beta is {:?}", gamma.dtype, beta.dtype)));
    }
    Ok(Some((gamma.dtype, NormParameters { gamma: gamma.address, beta: beta.address, eps })))
}

/// Checks that the GPU has fp8 matmuls and that the other operands have their output type.
fn accepted_beside_quantized(call: &OpLaunch<'_>, others: &[Option<DeviceTensor>]) -> Result<(), DeviceError> {
    call.check_quantized_type(DType::F8)?;
    match others.iter().flatten().find(|other| other.dtype != DType::Bf16) {
        None => Ok(()),
        Some(other) => {
            Err(call
                .refused(format!("the operands beside quantized x and w are bf16, not {}", other.dtype.name())))
        }
    }
}

/// Checks that all operands are row-major matrices of one float type.
fn accepted(call: &OpLaunch<'_>, operands: &[Option<DeviceTensor>]) -> Result<(), DeviceError> {
    let dtypes = || operands.iter().flatten().map(|operand| operand.dtype);
    let first = dtypes().next().filter(|dtype| dtype.is_float());
    if dtypes().any(|dtype| Some(dtype) != first) {
        let names: Vec<&str> = dtypes().map(|dtype| dtype.name()).collect();
        return Err(call.refused(format!("operands must have one float type, not {}", names.join(", "))));
    }
    let layouts = call.launch.ins.iter().map(|operand| operand.spec.layout);
    if layouts.into_iter().any(|layout| layout != Layout::RowMajor) {
        return Err(call.refused("operands must be row-major".to_owned()));
    }
    Ok(())
}
