//! Launches of linear layers, one function per weight layout. Invariant: every precondition of a kernel is checked
//! here.

use super::Launched;
use super::backward::gate;
use crate::launch::operands::LaunchOperands;
#[cfg(target_arch = "x86_64")]
use crate::matmul::linear_bf16::GatedLinearCall;
use crate::matmul::linear_f32::{self, PANEL};
use crate::matmul::linear_int8::{self, QuantizedLinearCall};
use crate::matmul::row_major::{Factor, MatmulCall, matmul};
use crate::matmul::{Act, LinearCall, MatmulEpilogue, linear_bf16};
use crate::rows::elementwise::Gate;
use crate::{Cpu, Element, QuantizedTiles};
use plimsoll_exec::DeviceError;
use plimsoll_graph::ops::{Epilogue, Linear};

/// Linear layer with an f32 weight packed in panels.
pub(crate) fn packed_f32(l: &LaunchOperands<'_>, cpu: &Cpu, op: &Linear) -> Launched {
    linear_f32::linear(cpu, packed(l, op)?, l.workspace()?);
    Ok(())
}

/// Linear layer with a bf16 weight packed in tiles.
pub(crate) fn packed_bf16(l: &LaunchOperands<'_>, cpu: &Cpu, op: &Linear) -> Launched {
    if let Some(activation) = op.epilogue.gate() {
        return gated(l, cpu, op, gate(activation));
    }
    linear_bf16::linear(cpu, packed(l, op)?, l.workspace()?);
    Ok(())
}

/// Operands of a linear layer with a packed weight.
fn packed<'a, E: Element>(l: &LaunchOperands<'a>, op: &Linear) -> Result<LinearCall<'a, E>, DeviceError> {
    Ok(LinearCall { x: l.input(0)?, w: l.vector(1)?, epilogue: epilogue(l, op)?, y: l.output(0)? })
}

/// Linear layer with a bf16 weight packed in tiles, and the gated linear unit after it.
fn gated(l: &LaunchOperands<'_>, cpu: &Cpu, op: &Linear, gate: Gate) -> Launched {
    #[cfg(target_arch = "x86_64")]
    if cpu.isa().has_tiles() {
        let bias = op.bias.then(|| l.vector(2)).transpose()?;
        let call = GatedLinearCall { x: l.input(0)?, w: l.vector(1)?, bias, gate, y: l.output(0)? };
        linear_bf16::gated(cpu, call, l.workspace()?);
        return Ok(());
    }
    let _ = (cpu, op, gate);
    Err(l.refuse("a gate behind a matmul needs AMX tiles".to_owned()))
}

/// Linear layer with an int8 weight, packed in tiles, and quantized activations.
pub(crate) fn packed_int8(l: &LaunchOperands<'_>, cpu: &Cpu, op: &Linear) -> Launched {
    let x = l.quantized(0)?;
    let y = l.output(0)?;
    let w = QuantizedTiles::new(l.bytes(&l.launch.ins[1])?, y.cols().div_ceil(PANEL), x.columns);
    linear_int8::linear(cpu, QuantizedLinearCall { x, w, epilogue: epilogue(l, op)?, y }, l.workspace()?);
    Ok(())
}

/// Linear layer with an unpacked, row-major weight, as in training.
pub(crate) fn row_major(l: &LaunchOperands<'_>, cpu: &Cpu, op: &Linear) -> Launched {
    let call = MatmulCall {
        a: Factor::Stored(l.input(0)?),
        b: Factor::Transposed(l.input(1)?),
        epilogue: epilogue(l, op)?,
        y: l.output(0)?,
    };
    matmul(cpu, call, l.workspace()?);
    Ok(())
}

/// Epilogue of a matmul: bias, activation and residual.
fn epilogue<'a, E: Element>(l: &LaunchOperands<'a>, op: &Linear) -> Result<MatmulEpilogue<'a, E>, DeviceError> {
    let bias = op.bias.then(|| l.vector(2)).transpose()?;
    let after = 2 + usize::from(op.bias);
    let (act, residual) = match op.epilogue {
        Epilogue::None => (Act::None, None),
        Epilogue::Gelu => (Act::Gelu, None),
        Epilogue::Residual => (Act::None, Some(l.input(after)?)),
        Epilogue::Gate | Epilogue::SiluGate => {
            return Err(l.refuse("only bf16 matmuls on AMX tiles have a gate behind them".to_owned()));
        }
    };
    Ok(MatmulEpilogue { bias, act, residual })
}
