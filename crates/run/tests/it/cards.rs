//! Machines for tests: CPU devices that stand in for cards, which can be slow or fail.

use exec::cpu::CpuDevice;
use exec::{Device, DeviceError, Launch, Machine, Span, Ticket};
use graph::Bytes;
use plan::{KernelRow, Target};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// A machine whose devices compute on one thread of the CPU.
#[derive(Debug)]
pub struct Card {
    name: String,
    /// The launch at which its device fails, counted over all its devices, and never works again.
    fails_at: u64,
    launches: Arc<AtomicU64>,
    /// What every launch takes longer.
    delay: Duration,
}

impl Card {
    pub fn new(number: usize) -> Self {
        Self {
            name: format!("card:{number} (of the tests)"),
            fails_at: u64::MAX,
            launches: Arc::default(),
            delay: Duration::ZERO,
        }
    }

    pub fn failing_at(self, launch: u64) -> Self {
        Self { fails_at: launch, ..self }
    }

    pub fn slow(self, delay: Duration) -> Self {
        Self { delay, ..self }
    }

    pub fn of_kind(number: usize, kind: &str) -> Self {
        Self { name: format!("card:{number} ({kind})"), ..Self::new(number) }
    }
}

impl Machine for Card {
    fn name(&self) -> String {
        self.name.clone()
    }

    fn target(&self) -> Result<Target, DeviceError> {
        let target = Target::named("cpu").map_err(|e| DeviceError::Machine { source: Box::new(e) })?;
        Ok(Target { space: "card".to_owned(), ..target.with_units(1) })
    }

    fn depth(&self) -> usize {
        2
    }

    fn free(&self) -> Result<Bytes, DeviceError> {
        Ok(Bytes(4 << 30))
    }

    fn arithmetic(&self) -> String {
        "of the CPU".to_owned()
    }

    fn open(&self) -> Result<Box<dyn Device>, DeviceError> {
        let (fails_at, launches, delay) = (self.fails_at, Arc::clone(&self.launches), self.delay);
        Ok(Box::new(CardDevice { cpu: CpuDevice::new(1), name: self.name.clone(), fails_at, launches, delay }))
    }
}

struct CardDevice {
    cpu: CpuDevice,
    name: String,
    fails_at: u64,
    launches: Arc<AtomicU64>,
    delay: Duration,
}

impl CardDevice {
    fn works(&self) -> Result<(), DeviceError> {
        match self.launches.load(Ordering::Relaxed) < self.fails_at {
            true => Ok(()),
            false => Err(DeviceError::Machine { source: "it fell off the bus".into() }),
        }
    }
}

impl Device for CardDevice {
    fn name(&self) -> String {
        self.name.clone()
    }

    fn kernels(&self) -> Vec<KernelRow> {
        self.cpu.kernels()
    }

    fn units(&self) -> u64 {
        self.cpu.units()
    }

    fn alloc_arena(&mut self, bytes: Bytes) -> Result<(), DeviceError> {
        self.cpu.alloc_arena(bytes)
    }

    fn prepare(&mut self, launch: &Launch<'_>) -> Result<(), DeviceError> {
        self.cpu.prepare(launch)
    }

    fn upload(&mut self, at: u64, bytes: &[u8]) -> Result<(), DeviceError> {
        self.works()?;
        self.cpu.upload(at, bytes)
    }

    fn download(&mut self, at: u64, out: &mut [u8]) -> Result<(), DeviceError> {
        self.works()?;
        self.cpu.download(at, out)
    }

    fn fill(&mut self, at: u64, bytes: Bytes, byte: u8) -> Result<(), DeviceError> {
        self.cpu.fill(at, bytes, byte)
    }

    fn copy(&mut self, from: u64, to: u64, bytes: Bytes) -> Result<(), DeviceError> {
        self.works()?;
        self.cpu.copy(from, to, bytes)
    }

    fn launch(&mut self, launch: &Launch<'_>) -> Result<(), DeviceError> {
        self.launches.fetch_add(1, Ordering::Relaxed);
        self.works()?;
        std::thread::sleep(self.delay);
        self.cpu.launch(launch)
    }

    fn wait(&mut self) -> Result<(), DeviceError> {
        self.works()?;
        self.cpu.wait()
    }

    fn fetch(&mut self, at: u64, bytes: Bytes) -> Result<Ticket, DeviceError> {
        self.works()?;
        self.cpu.fetch(at, bytes)
    }

    fn collect(&mut self, ticket: Ticket, out: &mut [u8]) -> Result<(), DeviceError> {
        self.works()?;
        self.cpu.collect(ticket, out)
    }

    /// As a card: what is computed at once is collected late.
    fn depth(&self) -> usize {
        2
    }

    fn trace(&mut self, on: bool) -> Result<(), DeviceError> {
        self.cpu.trace(on)
    }

    fn spans(&mut self) -> Result<Vec<Span>, DeviceError> {
        self.cpu.spans()
    }

    fn arithmetic(&self) -> String {
        self.cpu.arithmetic()
    }

    fn trim(&mut self) -> Result<Bytes, DeviceError> {
        self.cpu.trim()
    }
}
