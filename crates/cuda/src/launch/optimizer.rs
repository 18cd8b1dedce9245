//! Updates of parameters, and the norm of all gradients.

use super::Call;
use crate::kernel::Kernel;
use plimsoll_exec::DeviceError;
use plimsoll_graph::ops::{Adafactor, AdamW, AdamW8bit, GradScale, Sgd};

pub(super) fn adafactor(call: &mut Call<'_>, _: &Adafactor) -> Result<(), DeviceError> {
    Err(call.refused("no kernel".to_owned()))
}

pub(super) fn adamw(call: &mut Call<'_>, _: &AdamW) -> Result<(), DeviceError> {
    Err(call.refused("no kernel".to_owned()))
}

pub(super) fn adamw_8bit(call: &mut Call<'_>, _: &AdamW8bit) -> Result<(), DeviceError> {
    Err(call.refused("no kernel".to_owned()))
}

pub(super) fn grad_scale(call: &mut Call<'_>, _: &GradScale) -> Result<(), DeviceError> {
    Err(call.refused("no kernel".to_owned()))
}

pub(super) fn sgd(call: &mut Call<'_>, _: &Sgd) -> Result<(), DeviceError> {
    Err(call.refused("no kernel".to_owned()))
}

pub(super) fn every_kernel() -> Vec<Kernel> {
    vec![]
}
