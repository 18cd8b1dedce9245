//! Linear maps.

use super::Call;
use exec::DeviceError;
use graph::ops::Linear;

pub(super) fn linear(call: &mut Call<'_>, _: &Linear) -> Result<(), DeviceError> {
    Err(call.refused("unwritten".into()))
}
