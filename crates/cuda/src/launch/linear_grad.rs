//! Gradients of a matmul.

use super::Call;
use crate::kernel::Kernel;
use plimsoll_exec::DeviceError;
use plimsoll_graph::ops::LinearWeightGrad;

pub(super) fn input_grad(call: &mut Call<'_>) -> Result<(), DeviceError> {
    Err(call.refused("no kernel".to_owned()))
}

pub(super) fn weight_grad(call: &mut Call<'_>, _: &LinearWeightGrad) -> Result<(), DeviceError> {
    Err(call.refused("no kernel".to_owned()))
}

pub(super) fn every_kernel() -> Vec<Kernel> {
    vec![]
}
