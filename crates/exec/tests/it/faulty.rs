//! Errors of a device that a test asks for.

use plimsoll_exec::{Device, DeviceError, DeviceInfo};
use plimsoll_plan::Queue;
use plimsoll_testing::{DeviceCall, Hooks};

/// Makes a device with `depth` in-flight steps on which some copies to the host fail.
pub struct Faults {
    pub depth: usize,
    /// Numbers of the copies to the host that cannot be started, among all of them.
    pub starts: Vec<u64>,
    /// Numbers of the copies whose completion returns a data error, among those that were started.
    pub completions: Vec<u64>,
    /// Number of copies whose start was asked for so far.
    pub started: u64,
    /// Number of copies that were completed so far.
    pub completed: u64,
}

fn error(why: &str) -> DeviceError {
    DeviceError::Machine { source: why.into() }
}

impl Hooks for Faults {
    fn before(&mut self, call: DeviceCall<'_>, _: &mut dyn Device) -> Result<(), DeviceError> {
        if !matches!(call, DeviceCall::Start(transfer) if transfer.queue() == Queue::Out) {
            return Ok(());
        }
        self.started += 1;
        if self.starts.contains(&(self.started - 1)) { Err(error("no copy")) } else { Ok(()) }
    }

    fn after(&mut self, call: DeviceCall<'_>, _: &mut dyn Device) -> Result<(), DeviceError> {
        if !matches!(call, DeviceCall::Complete(_)) {
            return Ok(());
        }
        self.completed += 1;
        if self.completions.contains(&(self.completed - 1)) { Err(error("bad data")) } else { Ok(()) }
    }

    fn info(&self, inner: DeviceInfo) -> DeviceInfo {
        DeviceInfo { depth: self.depth, ..inner }
    }
}
