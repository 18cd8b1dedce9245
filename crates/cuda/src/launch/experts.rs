//! Mixture of experts: routing, dispatch, and the matmuls of all experts.

use super::Call;
use crate::kernel::Kernel;
use plimsoll_exec::DeviceError;
use plimsoll_graph::ops::{
    Combine, CombineGrad, Dispatch, DispatchGrad, GroupedLinear, GroupedLinearInputGrad,
    GroupedLinearWeightGrad, Route, RouteGrad, RouterLoss, RouterLossGrad,
};

pub(super) fn combine(call: &mut Call<'_>, _: &Combine) -> Result<(), DeviceError> {
    Err(call.refused("no kernel".to_owned()))
}

pub(super) fn combine_grad(call: &mut Call<'_>, _: &CombineGrad) -> Result<(), DeviceError> {
    Err(call.refused("no kernel".to_owned()))
}

pub(super) fn dispatch(call: &mut Call<'_>, _: &Dispatch) -> Result<(), DeviceError> {
    Err(call.refused("no kernel".to_owned()))
}

pub(super) fn dispatch_grad(call: &mut Call<'_>, _: &DispatchGrad) -> Result<(), DeviceError> {
    Err(call.refused("no kernel".to_owned()))
}

pub(super) fn grouped_linear(call: &mut Call<'_>, _: &GroupedLinear) -> Result<(), DeviceError> {
    Err(call.refused("no kernel".to_owned()))
}

pub(super) fn grouped_input_grad(call: &mut Call<'_>, _: &GroupedLinearInputGrad) -> Result<(), DeviceError> {
    Err(call.refused("no kernel".to_owned()))
}

pub(super) fn grouped_weight_grad(call: &mut Call<'_>, _: &GroupedLinearWeightGrad) -> Result<(), DeviceError> {
    Err(call.refused("no kernel".to_owned()))
}

pub(super) fn route(call: &mut Call<'_>, _: &Route) -> Result<(), DeviceError> {
    Err(call.refused("no kernel".to_owned()))
}

pub(super) fn route_grad(call: &mut Call<'_>, _: &RouteGrad) -> Result<(), DeviceError> {
    Err(call.refused("no kernel".to_owned()))
}

pub(super) fn router_loss(call: &mut Call<'_>, _: &RouterLoss) -> Result<(), DeviceError> {
    Err(call.refused("no kernel".to_owned()))
}

pub(super) fn router_loss_grad(call: &mut Call<'_>, _: &RouterLossGrad) -> Result<(), DeviceError> {
    Err(call.refused("no kernel".to_owned()))
}

pub(super) fn every_kernel() -> Vec<Kernel> {
    vec![]
}
