//! Simulated GPUs for tests: a [`Machine`] whose devices compute on one CPU thread, in a memory space of their
//! own. They can be slow, fail at a given launch, refuse arenas, and report any amount of free memory.

use crate::{DeviceCall, HookedDevice, Hooks};
use plimsoll_cpu::{CpuDevice, Isa};
use plimsoll_exec::{Device, DeviceError, DeviceInfo, DeviceKind, GraphCapture, Holder, Machine, Recorder};
use plimsoll_graph::{Bytes, Counts};
use plimsoll_plan::{ArenaMemory, Precision, Target};
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
    memory: Arc<CardMemory>,
}

/// Memory of a simulated GPU: the amount of free memory and refusals are set by the test, allocations are counted.
#[derive(Debug)]
pub struct CardMemory {
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

impl CardMemory {
    /// A GPU with `free` bytes of free memory.
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

    /// Sets the bytes of free memory.
    pub fn free(&self, bytes: u64) {
        self.free.store(bytes, Ordering::Relaxed);
    }

    /// Refuses the next `arenas` allocations of an arena.
    pub fn refuse(&self, arenas: u64) {
        self.refusing.store(arenas, Ordering::Relaxed);
    }

    /// Sets the number of steps between two calls of `trim`.
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

    fn allocate(&self, bytes: Bytes) -> Result<(), DeviceError> {
        // The counter stays at 0.
        if self.refusing.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |n| n.checked_sub(1)).is_ok() {
            self.refused.fetch_add(1, Ordering::Relaxed);
            return Err(DeviceError::OutOfMemory { bytes });
        }
        self.arenas.fetch_add(1, Ordering::Relaxed);
        // Memory stays mapped for the largest arena until it is trimmed, as on a GPU.
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
    /// A GPU with 4 GiB of free memory on which nothing fails.
    pub fn new(number: usize) -> Self {
        Self {
            name: format!("card:{number} (of the tests)"),
            model: "of the tests".to_owned(),
            fails_at: u64::MAX,
            launches: Arc::default(),
            delay: Duration::ZERO,
            records_at: None,
            memory: Arc::new(CardMemory::of(4 << 30)),
        }
    }

    /// The GPU with this memory.
    pub fn with(self, memory: Arc<CardMemory>) -> Self {
        Self { memory, ..self }
    }

    /// The GPU with launches and copies that fail from launch number `launch` on, counted over all its devices.
    pub fn failing_at(self, launch: u64) -> Self {
        Self { fails_at: launch, ..self }
    }

    /// The GPU with an extra time of every launch.
    pub fn slow(self, delay: Duration) -> Self {
        Self { delay, ..self }
    }

    /// The GPU with a graph capture of step number `step`, which fails at its end for lack of memory.
    pub fn recording_in_vain_at(self, step: u64) -> Self {
        Self { records_at: Some(step), ..self }
    }

    /// A GPU of the model `kind`.
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
        Ok(Target { space: ArenaMemory::Device, ..target })
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
        let name = self.name.clone();
        let fails_at = self.fails_at;
        let launches = Arc::clone(&self.launches);
        let delay = self.delay;
        let memory = Arc::clone(&self.memory);
        let arena = Bytes::ZERO;
        memory.devices.fetch_add(1, Ordering::Relaxed);
        let recording = Recording { at: self.records_at, ..Recording::default() };
        let card = CardHooks { name, fails_at, launches, delay, recording, memory, arena, since: 0 };
        Ok(vec![Box::new(HookedDevice::new(Box::new(CpuDevice::new(1)), card))])
    }
}

/// Makes a CPU a device of a [`Card`].
struct CardHooks {
    name: String,
    fails_at: u64,
    launches: Arc<AtomicU64>,
    delay: Duration,
    recording: Recording,
    memory: Arc<CardMemory>,
    arena: Bytes,
    /// Steps since the last trim.
    since: u64,
}

/// Simulated graph capture. Launches issued during a capture are not executed, as on a GPU.
#[derive(Default)]
struct Recording {
    at: Option<u64>,
    steps: u64,
    on: bool,
    note: Option<String>,
}

impl CardHooks {
    fn works(&self) -> Result<(), DeviceError> {
        if self.launches.load(Ordering::Relaxed) < self.fails_at {
            Ok(())
        } else {
            Err(DeviceError::Machine { source: "it fell off the bus".into() })
        }
    }
}

impl Hooks for CardHooks {
    fn before(&mut self, call: DeviceCall<'_>, _: &mut dyn Device) -> Result<(), DeviceError> {
        match call {
            DeviceCall::Allocate(allocation) => {
                self.memory.allocate(allocation.arena)?;
                self.arena = allocation.arena;
                Ok(())
            }
            DeviceCall::Launch(_) => {
                self.launches.fetch_add(1, Ordering::Relaxed);
                self.works()?;
                if !self.recording.on {
                    std::thread::sleep(self.delay);
                }
                Ok(())
            }
            DeviceCall::Upload
            | DeviceCall::Download(_)
            | DeviceCall::Start(_)
            | DeviceCall::Complete(_)
            | DeviceCall::Synchronize => self.works(),
            DeviceCall::SetMapped(_) | DeviceCall::Fill => Ok(()),
        }
    }

    fn is_capturing(&self) -> bool {
        self.recording.on
    }

    /// Two in-flight steps, as on a GPU, although the CPU computes each step at its submission.
    fn info(&self, inner: DeviceInfo) -> DeviceInfo {
        DeviceInfo { name: self.name.clone(), depth: 2, ..inner }
    }

    fn recorder<'a>(&'a mut self, _: &'a mut dyn Device) -> Option<&'a mut dyn Recorder> {
        Some(&mut self.recording)
    }

    fn begin_step(&mut self, _: &mut dyn Device) -> Result<Bytes, DeviceError> {
        let interval = self.memory.clear_interval.load(Ordering::Relaxed);
        self.since += 1;
        if interval == 0 || self.since < interval {
            return Ok(Bytes::ZERO);
        }
        self.since = 0;
        Ok(self.memory.trim(self.arena))
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
