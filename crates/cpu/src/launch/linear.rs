//! Launches of linear layers, one function per weight layout. Invariant: every precondition of a kernel is checked
//! here.

use super::super::elementwise::Gate;
use super::super::gemm::{self, Act};
use super::super::matmul::{Operand, matmul};
use super::super::operands::Operands;
use super::super::{Cpu, Element, QuantizedTiles, gemm_bf16, gemm_int8};
use super::Launched;
use super::backward::gate;
use plimsoll_exec::DeviceError;
use plimsoll_graph::ops::{Epilogue, Linear};

/// Linear layer with an f32 weight packed in panels.
pub(in super::super) fn panels(l: &Operands<'_>, cpu: &Cpu, op: &Linear) -> Launched {
    gemm::linear(cpu, l.input(0)?, l.vector(1)?, epilogue(l, op)?, l.output(0)?, l.workspace()?);
    Ok(())
}

/// Linear layer with a bf16 weight packed in tiles.
pub(in super::super) fn tiles(l: &Operands<'_>, cpu: &Cpu, op: &Linear) -> Launched {
    if let Some(activation) = op.epilogue.gate() {
        return gated(l, cpu, op, gate(activation));
    }
    gemm_bf16::linear(cpu, l.input(0)?, l.vector(1)?, epilogue(l, op)?, l.output(0)?, l.workspace()?);
    Ok(())
}

/// Linear layer with a bf16 weight packed in tiles, and the gated linear unit after it.
fn gated(l: &Operands<'_>, cpu: &Cpu, op: &Linear, gate: Gate) -> Launched {
    #[cfg(target_arch = "x86_64")]
    if cpu.isa().has_tiles() {
        let bias = op.bias.then(|| l.vector(2)).transpose()?;
        gemm_bf16::gated(cpu, l.input(0)?, l.vector(1)?, bias, gate, l.output(0)?, l.workspace()?);
        return Ok(());
    }
    let _ = (cpu, op, gate);
    Err(l.refuse("a gate behind a matmul needs AMX tiles".to_owned()))
}

/// Linear layer with an int8 weight, packed in tiles, and quantized activations.
pub(in super::super) fn codes(l: &Operands<'_>, cpu: &Cpu, op: &Linear) -> Launched {
    let (x, y) = (l.codes(0)?, l.output(0)?);
    let w = QuantizedTiles::new(l.bytes(&l.launch.ins[1])?, y.cols().div_ceil(gemm::PANEL), x.columns);
    gemm_int8::linear(cpu, x, w, epilogue(l, op)?, y, l.workspace()?);
    Ok(())
}

/// Linear layer with an unpacked, row-major weight, as in training.
pub(in super::super) fn rows(l: &Operands<'_>, cpu: &Cpu, op: &Linear) -> Launched {
    let (x, w) = (Operand::Stored(l.input(0)?), Operand::Transposed(l.input(1)?));
    matmul(cpu, x, w, epilogue(l, op)?, l.output(0)?, l.workspace()?);
    Ok(())
}

/// Epilogue of a matmul: bias, activation and residual.
fn epilogue<'a, E: Element>(l: &Operands<'a>, op: &Linear) -> Result<gemm::Epilogue<'a, E>, DeviceError> {
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
    Ok(gemm::Epilogue { bias, act, residual })
}
