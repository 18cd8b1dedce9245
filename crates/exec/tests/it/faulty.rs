//! Errors of a device that a test asks for.

use plimsoll_exec::{Device, DeviceError};
use plimsoll_testing::{Call, Hooks};

/// Makes a device with `depth` in-flight steps on which some copies to the host fail.
pub struct Faults {
    pub depth: usize,
    /// Numbers of the fetches that fail, among all fetches.
    pub fetches: Vec<u64>,
    /// Numbers of the tickets that return a data error when they are collected.
    pub tickets: Vec<u64>,
    /// Number of fetches so far.
    pub count: u64,
}

fn error(why: &str) -> DeviceError {
    DeviceError::Machine { source: why.into() }
}

impl Hooks for Faults {
    fn before(&mut self, call: Call<'_>, _: &mut dyn Device) -> Result<(), DeviceError> {
        if !matches!(call, Call::Fetch) {
            return Ok(());
        }
        self.count += 1;
        if self.fetches.contains(&(self.count - 1)) { Err(error("no copy")) } else { Ok(()) }
    }

    fn after(&mut self, call: Call<'_>, _: &mut dyn Device) -> Result<(), DeviceError> {
        match call {
            Call::Collect(ticket) if self.tickets.contains(&ticket.0) => Err(error("bad data")),
            _ => Ok(()),
        }
    }

    fn depth(&self, _: &dyn Device) -> usize {
        self.depth
    }
}
