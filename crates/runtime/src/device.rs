//! Where to run: the CPU, or machines that share the work. Invariant: machines of a run are of one kind, so that one
//! program fits all of them and a result does not depend on which of them computed it.

use crate::{RequestError, RuntimeError};
use exec::Machine;
use serde_json::Value;
use std::sync::Arc;

/// Where to run.
#[derive(Clone, Debug, Default)]
pub enum Device {
    /// The CPU.
    #[default]
    Cpu,
    /// Other machines, such as GPUs: one or more, of one kind. [`Device::machines`] makes sure of that.
    Machines(Vec<Arc<dyn Machine>>),
}

impl Device {
    /// Machines that share the work, in this order.
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

    /// How GPUs are used, for the run record: names of flags with their values; nothing on the CPU.
    pub fn options(&self) -> Value {
        match self {
            Self::Cpu => Value::Null,
            // All are used alike.
            Self::Machines(machines) => machines[0]
                .options()
                .into_iter()
                .map(|(name, value)| (name.to_owned(), Value::String(value)))
                .collect(),
        }
    }

    /// How many devices it is.
    pub fn count(&self) -> usize {
        match self {
            Self::Cpu => 1,
            Self::Machines(machines) => machines.len(),
        }
    }
}

impl PartialEq for Device {
    fn eq(&self, other: &Self) -> bool {
        let names = |machines: &[Arc<dyn Machine>]| machines.iter().map(|m| m.name()).collect::<Vec<_>>();
        match (self, other) {
            (Self::Cpu, Self::Cpu) => true,
            (Self::Machines(some), Self::Machines(others)) => names(some) == names(others),
            (Self::Cpu | Self::Machines(_), _) => false,
        }
    }
}

impl Eq for Device {}
