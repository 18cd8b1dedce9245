//! f32 copies of 16-bit operands at the start of the workspace, for kernels that compute in f32.
//!
//! Invariant: the copies are stored one after the other in the order of the operands, each at the start of a cache
//! line, inside the space that the plan reserves for the maximum sizes. The kernel's own scratch follows them.

use crate::Cpu;
use crate::launch::operands::LaunchOperands;
use crate::rows::cast::{self, Float16};
use plimsoll_exec::{DeviceError, Operand};
use plimsoll_graph::{Bytes, DType};
use plimsoll_plan::copy_bytes;

/// Every operand that has a copy, and the copy's byte offset in the workspace.
pub(crate) fn copies<'a>(l: &LaunchOperands<'a>) -> impl Iterator<Item = (&'a Operand, u64)> {
    let launch = l.launch;
    let mut end = 0;
    widened(l).map(move |o| {
        let at = end;
        end += copy_bytes(&o.spec, launch.counts).0;
        (o, at)
    })
}

/// Total bytes of all copies.
pub(crate) fn end(l: &LaunchOperands<'_>) -> Bytes {
    widened(l).map(|o| copy_bytes(&o.spec, l.launch.counts)).sum()
}

/// The 16-bit operands, inputs first; none if the launch is not widened.
fn widened<'a>(l: &LaunchOperands<'a>) -> impl Iterator<Item = &'a Operand> {
    let launch = l.launch;
    let widened = l.widened;
    let all = launch.ins.iter().chain(launch.outs.iter().flatten());
    all.filter(move |o| widened && half(o.spec.dtype).is_some())
}

/// Converts the 16-bit inputs to their f32 copies.
pub(crate) fn widen(l: &LaunchOperands<'_>, cpu: &Cpu) -> Result<(), DeviceError> {
    for o in l.launch.ins.iter().filter(|_| l.widened) {
        if let Some(half) = half(o.spec.dtype) {
            cast::widen(cpu, half, l.stored(o)?, l.copy_of(o)?);
        }
    }
    Ok(())
}

/// Rounds the f32 copies of outputs to the outputs themselves.
pub(crate) fn narrow(l: &LaunchOperands<'_>, cpu: &Cpu) -> Result<(), DeviceError> {
    for o in l.launch.outs.iter().flatten().filter(|_| l.widened) {
        if let Some(half) = half(o.spec.dtype) {
            cast::narrow(cpu, half, l.copy_of(o)?, l.stored_mut(o)?);
        }
    }
    Ok(())
}

/// The 16-bit floating-point format of an element type; `None` for other types.
pub(crate) fn half(dtype: DType) -> Option<Float16> {
    match dtype {
        DType::Bf16 => Some(Float16::Bf16),
        DType::F16 => Some(Float16::F16),
        DType::F32 | DType::F8 | DType::I8 | DType::I32 | DType::U8 => None,
    }
}
