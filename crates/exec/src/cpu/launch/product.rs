//! Launches of products whose operands change in every step: gradients of linears, experts, the fused loss. Invariant: what a kernel relies on is checked here.

use super::super::Cpu;
use super::super::operands::Operands;
use crate::device::DeviceError;
use graph::ops::*;

pub(in super::super) fn grouped_linear(
    l: &Operands<'_>,
    _: &Cpu,
    _: &GroupedLinear,
) -> Result<(), DeviceError> {
    Err(l.refuse("the CPU has no kernel for it".to_owned()))
}

pub(in super::super) fn grouped_linear_input_grad(
    l: &Operands<'_>,
    _: &Cpu,
    _: &GroupedLinearInputGrad,
) -> Result<(), DeviceError> {
    Err(l.refuse("the CPU has no kernel for it".to_owned()))
}

pub(in super::super) fn grouped_linear_weight_grad(
    l: &Operands<'_>,
    _: &Cpu,
    _: &GroupedLinearWeightGrad,
) -> Result<(), DeviceError> {
    Err(l.refuse("the CPU has no kernel for it".to_owned()))
}

/// With a weight in rows, as training has it.
pub(in super::super) fn linear(l: &Operands<'_>, _: &Cpu, _: &Linear) -> Result<(), DeviceError> {
    Err(l.refuse("the CPU has no kernel for it".to_owned()))
}

pub(in super::super) fn linear_cross_entropy(
    l: &Operands<'_>,
    _: &Cpu,
    _: &LinearCrossEntropy,
) -> Result<(), DeviceError> {
    Err(l.refuse("the CPU has no kernel for it".to_owned()))
}

pub(in super::super) fn linear_cross_entropy_grad(
    l: &Operands<'_>,
    _: &Cpu,
    _: &LinearCrossEntropyGrad,
) -> Result<(), DeviceError> {
    Err(l.refuse("the CPU has no kernel for it".to_owned()))
}

pub(in super::super) fn linear_input_grad(
    l: &Operands<'_>,
    _: &Cpu,
    _: &LinearInputGrad,
) -> Result<(), DeviceError> {
    Err(l.refuse("the CPU has no kernel for it".to_owned()))
}

pub(in super::super) fn linear_weight_grad(
    l: &Operands<'_>,
    _: &Cpu,
    _: &LinearWeightGrad,
) -> Result<(), DeviceError> {
    Err(l.refuse("the CPU has no kernel for it".to_owned()))
}
