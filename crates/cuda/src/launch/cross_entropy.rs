//! Output projection with softmax cross-entropy.

use super::Call;
use crate::kernel::Kernel;
use plimsoll_exec::DeviceError;
use plimsoll_graph::ops::{LinearCrossEntropy, LinearCrossEntropyGrad};

pub(super) fn linear_cross_entropy(call: &mut Call<'_>, _: &LinearCrossEntropy) -> Result<(), DeviceError> {
    Err(call.refused("no kernel".to_owned()))
}

pub(super) fn linear_cross_entropy_grad(
    call: &mut Call<'_>,
    _: &LinearCrossEntropyGrad,
) -> Result<(), DeviceError> {
    Err(call.refused("no kernel".to_owned()))
}

pub(super) fn every_kernel() -> Vec<Kernel> {
    vec![]
}
