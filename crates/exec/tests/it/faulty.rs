//! A device that computes on a CPU, with errors that a test asks for.

use plimsoll_cpu::CpuDevice;
use plimsoll_exec::{Device, DeviceError, Launch, Recorder, Ticket, Tracer};
use plimsoll_graph::Bytes;
use plimsoll_plan::Kernels;

/// A CPU with `depth` in-flight steps on which some copies to the host fail.
pub struct FaultyDevice {
    pub cpu: CpuDevice,
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

impl Device for FaultyDevice {
    fn fetch(&mut self, at: u64, bytes: Bytes) -> Result<Ticket, DeviceError> {
        self.count += 1;
        match self.fetches.contains(&(self.count - 1)) {
            true => Err(error("no copy")),
            false => self.cpu.fetch(at, bytes),
        }
    }

    fn collect(&mut self, ticket: Ticket, out: &mut [u8]) -> Result<(), DeviceError> {
        self.cpu.collect(ticket, out)?;
        if self.tickets.contains(&ticket.0) { Err(error("bad data")) } else { Ok(()) }
    }

    fn depth(&self) -> usize {
        self.depth
    }

    fn name(&self) -> String {
        self.cpu.name()
    }

    fn kernels(&self) -> Kernels {
        self.cpu.kernels()
    }

    fn workers(&self) -> u64 {
        self.cpu.workers()
    }

    fn alloc_arena(&mut self, bytes: Bytes) -> Result<(), DeviceError> {
        self.cpu.alloc_arena(bytes)
    }

    fn set_borders(&mut self, borders: &[Bytes]) -> Result<(), DeviceError> {
        self.cpu.set_borders(borders)
    }

    fn set_mapped(&mut self, bytes: Bytes) -> Result<(), DeviceError> {
        self.cpu.set_mapped(bytes)
    }

    fn persistent(&mut self, bytes: Bytes) {
        self.cpu.persistent(bytes);
    }

    fn takes_weights(&self) -> bool {
        self.cpu.takes_weights()
    }

    fn prepare(&mut self, launch: &Launch<'_>) -> Result<(), DeviceError> {
        self.cpu.prepare(launch)
    }

    fn upload(&mut self, at: u64, bytes: &[u8]) -> Result<(), DeviceError> {
        self.cpu.upload(at, bytes)
    }

    fn download(&mut self, at: u64, out: &mut [u8]) -> Result<(), DeviceError> {
        self.cpu.download(at, out)
    }

    fn fill(&mut self, at: u64, bytes: Bytes, byte: u8) -> Result<(), DeviceError> {
        self.cpu.fill(at, bytes, byte)
    }

    fn copy(&mut self, from: u64, to: u64, bytes: Bytes) -> Result<(), DeviceError> {
        self.cpu.copy(from, to, bytes)
    }

    fn launch(&mut self, launch: &Launch<'_>) -> Result<(), DeviceError> {
        self.cpu.launch(launch)
    }

    fn wait(&mut self) -> Result<(), DeviceError> {
        self.cpu.wait()
    }

    fn stage(&mut self, ways: [Bytes; 2]) -> Result<(), DeviceError> {
        self.cpu.stage(ways)
    }

    fn feed(&mut self, at: u64, bytes: &[u8]) -> Result<(), DeviceError> {
        self.cpu.upload(at, bytes)
    }

    fn recorder(&mut self) -> Option<&mut dyn Recorder> {
        None
    }

    fn tracer(&mut self) -> &mut dyn Tracer {
        self.cpu.tracer()
    }

    fn arithmetic(&self) -> String {
        self.cpu.arithmetic()
    }

    fn matmul_provider(&self) -> Option<String> {
        self.cpu.matmul_provider()
    }

    fn clear_interval(&self) -> u64 {
        self.cpu.clear_interval()
    }

    fn trim(&mut self) -> Result<Bytes, DeviceError> {
        self.cpu.trim()
    }
}
