//! Launches of routing: which expert, rows there and back, and the losses of the router. Invariant: what a kernel relies on is checked here.

use super::super::Cpu;
use super::super::operands::Operands;
use crate::device::DeviceError;
use graph::ops::*;

pub(in super::super) fn combine(l: &Operands<'_>, _: &Cpu, _: &Combine) -> Result<(), DeviceError> {
    Err(l.refuse("the CPU has no kernel for it".to_owned()))
}

pub(in super::super) fn combine_grad(l: &Operands<'_>, _: &Cpu, _: &CombineGrad) -> Result<(), DeviceError> {
    Err(l.refuse("the CPU has no kernel for it".to_owned()))
}

pub(in super::super) fn dispatch(l: &Operands<'_>, _: &Cpu, _: &Dispatch) -> Result<(), DeviceError> {
    Err(l.refuse("the CPU has no kernel for it".to_owned()))
}

pub(in super::super) fn dispatch_grad(l: &Operands<'_>, _: &Cpu, _: &DispatchGrad) -> Result<(), DeviceError> {
    Err(l.refuse("the CPU has no kernel for it".to_owned()))
}

pub(in super::super) fn route(l: &Operands<'_>, _: &Cpu, _: &Route) -> Result<(), DeviceError> {
    Err(l.refuse("the CPU has no kernel for it".to_owned()))
}

pub(in super::super) fn route_grad(l: &Operands<'_>, _: &Cpu, _: &RouteGrad) -> Result<(), DeviceError> {
    Err(l.refuse("the CPU has no kernel for it".to_owned()))
}

pub(in super::super) fn router_loss(l: &Operands<'_>, _: &Cpu, _: &RouterLoss) -> Result<(), DeviceError> {
    Err(l.refuse("the CPU has no kernel for it".to_owned()))
}

pub(in super::super) fn router_loss_grad(
    l: &Operands<'_>,
    _: &Cpu,
    _: &RouterLossGrad,
) -> Result<(), DeviceError> {
    Err(l.refuse("the CPU has no kernel for it".to_owned()))
}
