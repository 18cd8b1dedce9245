//! Gradient of attention.

use super::Call;
use crate::kernel::Kernel;
use plimsoll_exec::DeviceError;
use plimsoll_graph::ops::AttentionGrad;

pub(super) fn attention_grad(call: &mut Call<'_>, _: &AttentionGrad) -> Result<(), DeviceError> {
    Err(call.refused("no kernel".to_owned()))
}

pub(super) fn every_kernel() -> Vec<Kernel> {
    vec![]
}
