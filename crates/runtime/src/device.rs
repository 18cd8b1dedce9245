//! The device choice of a run: the CPU, or machines that share the work. Invariant: the machines of a run are of one
//! kind, so that one program fits all of them and a result does not depend on which machine computed it.

use crate::{RequestError, RuntimeError};
use plimsoll_exec::Machine;
use std::collections::BTreeMap;
use std::sync::Arc;

/// The devices to run on.
#[derive(Clone, Debug, Default)]
pub enum Device {
    /// The CPU.
    #[default]
    Cpu,
    /// One or more other machines of one kind, such as GPUs; checked by [`Device::machines`].
    Machines(Vec<Arc<dyn Machine>>),
}

impl Device {
    /// Selects machines that share the work, in this order.
    ///
    /// # Errors
    /// Machines of different kinds, or a machine given twice.
    pub fn machines(machines: Vec<Arc<dyn Machine>>) -> Result<Self, RuntimeError> {
        let Some((kind, first)) = machines.first().map(|machine| (machine.kind(), machine.name())) else {
            return Err(RuntimeError::bug("there is no device to compute on"));
        };
        for (i, machine) in machines.iter().enumerate() {
            let name = machine.name();
            if machine.kind() != kind {
                return Err(RequestError::MixedDevices { first, other: name }.into());
            }
            if machines[..i].iter().any(|other| other.name() == name) {
                return Err(RequestError::DeviceTwice { name }.into());
            }
        }
        Ok(Self::Machines(machines))
    }

    /// Options of the GPUs for the run record: values by flag name; `None` on the CPU.
    pub fn options(&self) -> Option<BTreeMap<&'static str, String>> {
        match self {
            Self::Cpu => None,
            // All machines have the same options.
            Self::Machines(machines) => Some(machines[0].options().into_iter().collect()),
        }
    }

    /// Number of devices.
    pub fn count(&self) -> usize {
        match self {
            Self::Cpu => 1,
            Self::Machines(machines) => machines.len(),
        }
    }
}

impl PartialEq for Device {
    fn eq(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Cpu, Self::Cpu) => true,
            (Self::Machines(some), Self::Machines(others)) => names(some) == names(others),
            (Self::Cpu | Self::Machines(_), _) => false,
        }
    }
}

impl Eq for Device {}

fn names(machines: &[Arc<dyn Machine>]) -> Vec<String> {
    machines.iter().map(|machine| machine.name()).collect()
}
