//! Simulated GPUs for tests: a [`Machine`] whose devices compute on one CPU thread, in a memory space of their
//! own. They can be slow, fail at a given launch, refuse arenas, and report any amount of free memory.

use plimsoll_cpu::{CpuDevice, Isa};
use plimsoll_exec::{
    Device, DeviceError, DeviceKind, GraphCapture, Holder, Launch, Machine, Recorder, Ticket, Tracer,
};
use plimsoll_graph::{Bytes, Counts};
use plimsoll_plan::{Kernels, Precision, Target};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// A simulated GPU whose devices compute on one CPU thread.
#[derive(Debug)]
pub struct Card {
    name: String,
    model: String,
    /// Number of the launch, counted over all devices of this machine, from which launches and copies fail.
    fails_at: u64,
    launches: Arc<AtomicU64>,
    /// Extra time of every launch.
    delay: Duration,
    /// Number of the step whose graph capture begins, and then fails at its end for lack of memory.
    records_at: Option<u64>,
    memory: Arc<Memory>,
}

/// Memory of a simulated GPU: the amount of free memory and refusals are set by the test, allocations are counted.
#[derive(Debug)]
pub struct Memory {
    free: AtomicU64,
    /// Number of next allocations to refuse, as if another process had taken the memory in between.
    refusing: AtomicU64,
    refused: AtomicU64,
    devices: AtomicU64,
    arenas: AtomicU64,
    clear_interval: AtomicU64,
    /// Bytes of mapped memory: the largest arena since the last `trim`.
    mapped: AtomicU64,
    given_back: AtomicU64,
}

impl Memory {
    pub fn of(free: u64) -> Self {
        Self {
            free: free.into(),
            refusing: 0.into(),
            refused: 0.into(),
            devices: 0.into(),
            arenas: 0.into(),
            clear_interval: 0.into(),
            mapped: 0.into(),
            given_back: 0.into(),
        }
    }

    pub fn free(&self, bytes: u64) {
        self.free.store(bytes, Ordering::Relaxed);
    }

    pub fn refuse(&self, arenas: u64) {
        self.refusing.store(arenas, Ordering::Relaxed);
    }

    pub fn clear_every(&self, steps: u64) {
        self.clear_interval.store(steps, Ordering::Relaxed);
    }

    /// Bytes of mapped memory: the largest arena since the last `trim`.
    pub fn mapped(&self) -> Bytes {
        Bytes(self.mapped.load(Ordering::Relaxed))
    }

    /// Number of allocations of an arena that were refused.
    pub fn refused(&self) -> u64 {
        self.refused.load(Ordering::Relaxed)
    }

    /// Number of opened devices.
    pub fn devices(&self) -> u64 {
        self.devices.load(Ordering::Relaxed)
    }

    /// Number of allocated arenas.
    pub fn arenas(&self) -> u64 {
        self.arenas.load(Ordering::Relaxed)
    }

    /// Bytes that `trim` unmapped.
    pub fn given_back(&self) -> u64 {
        self.given_back.load(Ordering::Relaxed)
    }

    fn take(&self, bytes: Bytes) -> Result<(), DeviceError> {
        let one_less = |n: u64| n.checked_sub(1);
        if self.refusing.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_less).is_ok() {
            self.refused.fetch_add(1, Ordering::Relaxed);
            return Err(DeviceError::OutOfMemory { bytes });
        }
        self.arenas.fetch_add(1, Ordering::Relaxed);
        self.mapped.fetch_max(bytes.0, Ordering::Relaxed);
        Ok(())
    }

    fn trim(&self, arena: Bytes) -> Bytes {
        let back = self.mapped.swap(arena.0, Ordering::Relaxed).saturating_sub(arena.0);
        self.given_back.fetch_add(back, Ordering::Relaxed);
        Bytes(back)
    }
}

impl Card {
    pub fn new(number: usize) -> Self {
        Self {
            name: format!("card:{number} (of the tests)"),
            model: "of the tests".to_owned(),
            fails_at: u64::MAX,
            launches: Arc::default(),
            delay: Duration::ZERO,
            records_at: None,
            memory: Arc::new(Memory::of(4 << 30)),
        }
    }

    pub fn with(self, memory: Arc<Memory>) -> Self {
        Self { memory, ..self }
    }

    pub fn failing_at(self, launch: u64) -> Self {
        Self { fails_at: launch, ..self }
    }

    pub fn slow(self, delay: Duration) -> Self {
        Self { delay, ..self }
    }

    pub fn recording_in_vain_at(self, step: u64) -> Self {
        Self { records_at: Some(step), ..self }
    }

    pub fn of_kind(number: usize, kind: &str) -> Self {
        Self { name: format!("card:{number} ({kind})"), model: kind.to_owned(), ..Self::new(number) }
    }
}

impl Machine for Card {
    fn kind(&self) -> DeviceKind {
        DeviceKind { family: "card", model: self.model.clone() }
    }

    fn precisions(&self) -> Vec<Precision> {
        vec![Precision::Bf16, Precision::F32]
    }

    fn name(&self) -> String {
        self.name.clone()
    }

    fn target(&self) -> Result<Target, DeviceError> {
        let target = CpuDevice::target(1, Isa::detect());
        let target = target.map_err(|e| DeviceError::Machine { source: Box::new(e) })?;
        Ok(Target { space: "card".to_owned(), ..target })
    }

    fn depth(&self) -> usize {
        2
    }

    fn free(&self) -> Result<Bytes, DeviceError> {
        Ok(Bytes(self.memory.free.load(Ordering::Relaxed)))
    }

    fn holders(&self) -> Vec<Holder> {
        vec![Holder { who: "process 7 (python)".to_owned(), bytes: Some(Bytes(5)) }]
    }

    fn arithmetic(&self) -> String {
        "of the CPU".to_owned()
    }

    fn open(&self) -> Result<Vec<Box<dyn Device>>, DeviceError> {
        let (fails_at, launches, delay) = (self.fails_at, Arc::clone(&self.launches), self.delay);
        let (name, memory, arena) = (self.name.clone(), Arc::clone(&self.memory), Bytes::ZERO);
        memory.devices.fetch_add(1, Ordering::Relaxed);
        let (cpu, recording) = (CpuDevice::new(1), Recording { at: self.records_at, ..Recording::default() });
        Ok(vec![Box::new(CardDevice { cpu, name, fails_at, launches, delay, recording, memory, arena })])
    }
}

struct CardDevice {
    cpu: CpuDevice,
    name: String,
    fails_at: u64,
    launches: Arc<AtomicU64>,
    delay: Duration,
    recording: Recording,
    memory: Arc<Memory>,
    arena: Bytes,
}

/// Simulated graph capture. Launches issued during a capture are not executed, as on a GPU.
#[derive(Default)]
struct Recording {
    at: Option<u64>,
    steps: u64,
    on: bool,
    note: Option<String>,
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

    fn kernels(&self) -> Kernels {
        self.cpu.kernels()
    }

    fn workers(&self) -> u64 {
        self.cpu.workers()
    }

    fn alloc_arena(&mut self, bytes: Bytes) -> Result<(), DeviceError> {
        self.memory.take(bytes)?;
        self.arena = bytes;
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
        if self.recording.on {
            return Ok(());
        }
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

    /// Two in-flight steps, as on a GPU, although the CPU computes each step at its submission.
    fn depth(&self) -> usize {
        2
    }

    fn recorder(&mut self) -> Option<&mut dyn Recorder> {
        Some(&mut self.recording)
    }

    fn tracer(&mut self) -> &mut dyn Tracer {
        self.cpu.tracer()
    }

    fn stage(&mut self, ways: [Bytes; 2]) -> Result<(), DeviceError> {
        self.cpu.stage(ways)
    }

    fn feed(&mut self, at: u64, bytes: &[u8]) -> Result<(), DeviceError> {
        self.upload(at, bytes)
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

    fn matmul_provider(&self) -> Option<String> {
        self.cpu.matmul_provider()
    }

    fn arithmetic(&self) -> String {
        self.cpu.arithmetic()
    }

    fn trim(&mut self) -> Result<Bytes, DeviceError> {
        Ok(self.memory.trim(self.arena))
    }

    fn clear_interval(&self) -> u64 {
        self.memory.clear_interval.load(Ordering::Relaxed)
    }
}

impl Recorder for Recording {
    fn begin(&mut self, _: usize, _: Counts) -> Result<GraphCapture, DeviceError> {
        self.steps += 1;
        self.on = self.at == Some(self.steps);
        Ok(if self.on { GraphCapture::Record } else { GraphCapture::Plain })
    }

    fn end(&mut self, _: bool) -> Result<GraphCapture, DeviceError> {
        self.on = false;
        self.note = Some("there is no room for a record".to_owned());
        Ok(GraphCapture::Plain)
    }

    fn note(&mut self) -> Option<String> {
        self.note.take()
    }
}
