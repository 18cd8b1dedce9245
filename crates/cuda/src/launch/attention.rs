//! Attention.

use super::Call;
use crate::kernel::Kernel;
use exec::DeviceError;
use graph::ops::Attention;

pub(super) fn attention(call: &mut Call<'_>, _: &Attention) -> Result<(), DeviceError> {
    Err(call.refused("unwritten".into()))
}
pub(super) fn every_kernel() -> Vec<Kernel> {
    vec![]
}
