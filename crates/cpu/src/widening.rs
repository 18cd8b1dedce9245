//! Operands of 16 bits for kernels that compute in f32: copies at the start of the workspace.
//!
//! Invariant: copies lie one behind the other in the order of the operands, each on a cache line of its own, inside
//! of what the plan set aside for full bounds; the kernel's own scratch comes behind them.

use super::Cpu;
use super::cast::{self, Half};
use super::operands::Operands;
use exec::{DeviceError, Operand};
use graph::{Bytes, DType};
use plan::copy_bytes;

/// Every operand that has a copy, and where that starts in the workspace.
pub(super) fn copies<'a>(l: &Operands<'a>) -> impl Iterator<Item = (&'a Operand, u64)> {
    let launch = l.launch;
    let mut end = 0;
    widened(l).map(move |o| {
        let at = end;
        end += copy_bytes(&o.spec, launch.counts).0;
        (o, at)
    })
}

/// Bytes of all copies.
pub(super) fn end(l: &Operands<'_>) -> Bytes {
    widened(l).map(|o| copy_bytes(&o.spec, l.launch.counts)).sum()
}

fn widened<'a>(l: &Operands<'a>) -> impl Iterator<Item = &'a Operand> {
    let (launch, widened) = (l.launch, l.widened);
    let all = launch.ins.iter().chain(launch.outs.iter().flatten());
    all.filter(move |o| widened && half(o.spec.dtype).is_some())
}

/// Fills the copies of inputs.
pub(super) fn widen(l: &Operands<'_>, cpu: &Cpu) -> Result<(), DeviceError> {
    for o in l.launch.ins.iter().filter(|_| l.widened) {
        if let Some(half) = half(o.spec.dtype) {
            cast::widen(cpu, half, l.stored(o)?, l.copy_of(o)?);
        }
    }
    Ok(())
}

/// Rounds the copies of outputs to where they belong.
pub(super) fn narrow(l: &Operands<'_>, cpu: &Cpu) -> Result<(), DeviceError> {
    for o in l.launch.outs.iter().flatten().filter(|_| l.widened) {
        if let Some(half) = half(o.spec.dtype) {
            cast::narrow(cpu, half, l.copy_of(o)?, l.stored_mut(o)?);
        }
    }
    Ok(())
}

/// The format of an element type of 16 bits.
pub(super) fn half(dtype: DType) -> Option<Half> {
    match dtype {
        DType::Bf16 => Some(Half::Bf16),
        DType::F16 => Some(Half::F16),
        DType::F32 | DType::F8 | DType::I8 | DType::I32 | DType::U8 => None,
    }
}
