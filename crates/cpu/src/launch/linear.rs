//! Launches of linear layers, one function per weight layout. Invariant: every precondition of a kernel is checked
//! here.

use super::Launched;
use super::backward::gate;
use crate::launch::operands::Operands;
use crate::matmul::linear_f32::{self, Act};
use crate::matmul::row_major::{Operand, matmul};
use crate::rows::elementwise::Gate;
use crate::{Cpu, Element, QuantizedTiles, matmul::linear_bf16, matmul::linear_int8};
use plimsoll_exec::DeviceError;
use plimsoll_graph::ops::{Epilogue, Linear};

/// Linear layer with an f32 weight packed in panels.
pub(crate) fn panels(l: &Operands<'_>, cpu: &Cpu, op: &Linear) -> Launched {
    linear_f32::linear(cpu, l.input(0)?, l.vector(1)?, epilogue(l, op)?, l.output(0)?, l.workspace()?);
    Ok(())
}

/// Linear layer with a bf16 weight packed in tiles.
pub(crate) fn tiles(l: &Operands<'_>, cpu: &Cpu, op: &Linear) -> Launched {
    if let Some(activation) = op.epilogue.gate() {
        return gated(l, cpu, op, gate(activation));
    }
    linear_bf16::linear(cpu, l.input(0)?, l.vector(1)?, epilogue(l, op)?, l.output(0)?, l.workspace()?);
    Ok(())
}

/// Linear layer with a bf16 weight packed in tiles, and the gated linear unit after it.
fn gated(l: &Operands<'_>, cpu: &Cpu, op: &Linear, gate: Gate) -> Launched {
    #[cfg(target_arch = "x86_64")]
    if cpu.isa().has_tiles() {
        let bias = op.bias.then(|| l.vector(2)).transpose()?;
        linear_bf16::gated(cpu, l.input(0)?, l.vector(1)?, bias, gate, l.output(0)?, l.workspace()?);
        return Ok(());
    }
    let _ = (cpu, op, gate);
    Err(l.refuse("a gate behind a matmul needs AMX tiles".to_owned()))
}

/// Linear layer with an int8 weight, packed in tiles, and quantized activations.
pub(crate) fn codes(l: &Operands<'_>, cpu: &Cpu, op: &Linear) -> Launched {
    let x = l.codes(0)?;
    let y = l.output(0)?;
    let w = QuantizedTiles::new(l.bytes(&l.launch.ins[1])?, y.cols().div_ceil(linear_f32::PANEL), x.columns);
    linear_int8::linear(cpu, x, w, epilogue(l, op)?, y, l.workspace()?);
    Ok(())
}

/// Linear layer with an unpacked, row-major weight, as in training.
pub(crate) fn rows(l: &Operands<'_>, cpu: &Cpu, op: &Linear) -> Launched {
    let x = Operand::Stored(l.input(0)?);
    let w = Operand::Transposed(l.input(1)?);
    matmul(cpu, x, w, epilogue(l, op)?, l.output(0)?, l.workspace()?);
    Ok(())
}

/// Epilogue of a matmul: bias, activation and residual.
fn epilogue<'a, E: Element>(l: &Operands<'a>, op: &Linear) -> Result<linear_f32::Epilogue<'a, E>, DeviceError> {
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
    Ok(linear_f32::Epilogue { bias, act, residual })
}
