//! The reference machine, the smallest backend that can run plans. Invariant: it needs no hardware, so programs
//! planned for the target `null` run anywhere.

use super::ReferenceDevice;
use crate::device::{Device, DeviceError, DeviceKind, Machine};
use crate::memory;
use plimsoll_graph::Bytes;
use plimsoll_plan::{Precision, Target};

/// The machine for the target `null`.
#[derive(Clone, Copy, Debug, Default)]
pub struct ReferenceMachine;

impl Machine for ReferenceMachine {
    fn kind(&self) -> DeviceKind {
        DeviceKind { family: "reference", model: String::new() }
    }

    fn name(&self) -> String {
        self.kind().to_string()
    }

    fn precisions(&self) -> Vec<Precision> {
        vec![Precision::F32, Precision::Bf16, Precision::Fp16, Precision::Tf32, Precision::Fp8, Precision::Int8]
    }

    fn target(&self) -> Result<Target, DeviceError> {
        Target::named("null").map_err(|e| DeviceError::Machine { source: Box::new(e) })
    }

    fn free(&self) -> Result<Bytes, DeviceError> {
        Ok(memory::available().free)
    }

    fn arithmetic(&self) -> String {
        self.name()
    }

    fn open(&self) -> Result<Vec<Box<dyn Device>>, DeviceError> {
        Ok(vec![Box::new(ReferenceDevice::new())])
    }
}
