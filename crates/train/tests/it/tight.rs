//! A machine for tests whose memory other processes take and give back: its readings are scripted, and its device fails
//! chosen allocations, copies and launches. Invariant: everything else is computed by the CPU, so a run has its bits.

use plimsoll_cpu::CpuMachine;
use plimsoll_exec::memory::Memory;
use plimsoll_exec::{
    Device, DeviceError, DeviceKind, Holder, Launch, Machine, OnStart, Recorder, Ticket, Tracer,
};
use plimsoll_graph::Bytes;
use plimsoll_plan::{Kernels, Precision, Target};
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

/// Where a device fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// The allocation of the arena.
    Arena,
    /// The return of memory to the arena.
    Growth,
    /// A copy to the arena.
    Upload,
    /// A copy from the arena for a checkpoint.
    Download,
    /// The request of an output.
    Fetch,
    /// A launch of this op.
    Launch(&'static str),
}

/// Failures of a device.
#[derive(Clone, Copy, Debug)]
pub struct Fault {
    pub place: Place,
    /// Step after which the device fails: the number of steps whose results were read, or of readings if these count.
    pub after: u64,
    /// Number of events at this place that still succeed.
    pub skip: u64,
    /// Number of failures.
    pub times: u64,
    /// Whether memory is the cause.
    pub of_memory: bool,
}

impl Fault {
    /// One lack of memory at `place` in the step behind `after`.
    pub fn once(place: Place, after: u64) -> Self {
        Self { place, after, skip: 0, times: 1, of_memory: true }
    }
}

/// What the machine and its devices share with a test.
pub struct Script {
    /// Number of steps whose results were read.
    pub step: AtomicU64,
    /// Thousandths of the memory in use before step `step + 1`, or at the reading of this number.
    pub used: fn(u64) -> u64,
    /// Number of readings, if readings count instead of steps.
    readings: Option<AtomicU64>,
    fault: Mutex<Option<Fault>>,
    /// Bytes of the arena that have memory, after each change.
    pub mapped: Mutex<Vec<u64>>,
}

impl Script {
    pub fn new(used: fn(u64) -> u64, fault: Option<Fault>) -> Arc<Self> {
        let (step, mapped) = (AtomicU64::new(0), Mutex::new(vec![]));
        Arc::new(Self { step, used, readings: None, fault: Mutex::new(fault), mapped })
    }

    /// A script whose memory changes from reading to reading, for runs without optimizer steps.
    pub fn of_readings(used: fn(u64) -> u64, fault: Option<Fault>) -> Arc<Self> {
        let (step, mapped) = (AtomicU64::new(0), Mutex::new(vec![]));
        Arc::new(Self { step, used, readings: Some(AtomicU64::new(0)), fault: Mutex::new(fault), mapped })
    }

    /// Whether all failures have happened.
    pub fn is_over(&self) -> bool {
        self.fault.lock().expect("no panic").is_none_or(|fault| fault.times == 0)
    }

    /// An error if the device fails at `place` now.
    fn pass(&self, place: Place) -> Result<(), DeviceError> {
        let mut fault = self.fault.lock().expect("no panic");
        let step = self.readings.as_ref().unwrap_or(&self.step).load(Ordering::Relaxed);
        let Some(due) = fault.as_mut().filter(|f| f.place == place && f.after <= step && f.times > 0) else {
            return Ok(());
        };
        if due.skip > 0 {
            due.skip -= 1;
            return Ok(());
        }
        due.times -= 1;
        Err(match (due.of_memory, place) {
            (true, Place::Arena | Place::Growth) => DeviceError::OutOfMemory { bytes: Bytes(7) },
            (true, _) => DeviceError::Exhausted { source: "another process took the memory".into() },
            (false, _) => DeviceError::Machine { source: "it fell off the bus".into() },
        })
    }
}

/// A CPU whose memory is scripted.
pub struct TightMachine(pub Arc<Script>, pub u32);

impl fmt::Debug for TightMachine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("tight")
    }
}

fn cpu() -> CpuMachine {
    CpuMachine::new(1, 2)
}

impl Machine for TightMachine {
    fn kind(&self) -> DeviceKind {
        DeviceKind { family: "tight", model: String::new() }
    }

    fn name(&self) -> String {
        format!("tight {}", self.1)
    }

    fn precisions(&self) -> Vec<Precision> {
        cpu().precisions()
    }

    fn target(&self) -> Result<Target, DeviceError> {
        cpu().target()
    }

    fn free(&self) -> Result<Bytes, DeviceError> {
        Ok(Bytes(1 << 40))
    }

    fn usage(&self) -> Result<Memory, DeviceError> {
        let Script { step, readings, .. } = &*self.0;
        let at = match readings {
            Some(readings) => readings.fetch_add(1, Ordering::Relaxed),
            None => step.load(Ordering::Relaxed),
        };
        let (unit, used) = (1 << 30, (self.0.used)(at));
        Ok(Memory { free: Bytes((1000 - used) * unit), total: Bytes(1000 * unit) })
    }

    fn holders(&self) -> Vec<Holder> {
        vec![Holder { who: "process 7 (python)".to_owned(), bytes: Some(Bytes(5)) }]
    }

    fn arithmetic(&self) -> String {
        cpu().arithmetic()
    }

    fn open(&self) -> Result<Vec<Box<dyn Device>>, DeviceError> {
        let tight = |cpu| Box::new(TightDevice { cpu, script: Arc::clone(&self.0) }) as Box<dyn Device>;
        Ok(cpu().open()?.into_iter().map(tight).collect())
    }
}

struct TightDevice {
    cpu: Box<dyn Device>,
    script: Arc<Script>,
}

impl Device for TightDevice {
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
        self.script.pass(Place::Arena)?;
        self.script.mapped.lock().expect("no panic").push(bytes.0);
        self.cpu.alloc_arena(bytes)
    }

    fn set_borders(&mut self, borders: &[Bytes]) -> Result<(), DeviceError> {
        self.cpu.set_borders(borders)
    }

    /// Overwrites what is given back, so that a step that reads it computes NaN.
    fn set_mapped(&mut self, bytes: Bytes) -> Result<(), DeviceError> {
        let mut mapped = self.script.mapped.lock().expect("no panic");
        let (first, last) = (mapped[0], mapped[mapped.len() - 1]);
        if bytes.0 > last {
            self.script.pass(Place::Growth)?;
        }
        assert!(bytes.0 <= first, "{bytes} of {first}");
        self.cpu.fill(bytes.0, Bytes(first - bytes.0), 0xFF)?;
        self.cpu.set_mapped(bytes)?;
        self.cpu.fill(bytes.0, Bytes(first - bytes.0), 0xFF)?;
        mapped.push(bytes.0);
        Ok(())
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

    fn prepare_all(&mut self, launches: &[Launch<'_>], report: OnStart<'_>) -> Result<(), DeviceError> {
        self.cpu.prepare_all(launches, report)
    }

    fn upload(&mut self, at: u64, bytes: &[u8]) -> Result<(), DeviceError> {
        self.script.pass(Place::Upload)?;
        self.cpu.upload(at, bytes)
    }

    fn download(&mut self, at: u64, out: &mut [u8]) -> Result<(), DeviceError> {
        self.script.pass(Place::Download)?;
        self.cpu.download(at, out)
    }

    fn fill(&mut self, at: u64, bytes: Bytes, byte: u8) -> Result<(), DeviceError> {
        self.cpu.fill(at, bytes, byte)
    }

    fn copy(&mut self, from: u64, to: u64, bytes: Bytes) -> Result<(), DeviceError> {
        self.cpu.copy(from, to, bytes)
    }

    fn launch(&mut self, launch: &Launch<'_>) -> Result<(), DeviceError> {
        self.script.pass(Place::Launch(launch.op.name()))?;
        let mapped = self.script.mapped.lock().expect("no panic").last().copied().unwrap_or_default();
        for operand in launch.ins.iter().chain(launch.outs.iter().flatten()) {
            let end = operand.at + operand.bytes(launch.counts).0;
            assert!(end <= mapped, "{} uses memory that was given back", launch.op.name());
        }
        self.cpu.launch(launch)
    }

    fn wait(&mut self) -> Result<(), DeviceError> {
        self.cpu.wait()
    }

    fn stage(&mut self, ways: [Bytes; 2]) -> Result<(), DeviceError> {
        self.cpu.stage(ways)
    }

    fn feed(&mut self, at: u64, bytes: &[u8]) -> Result<(), DeviceError> {
        self.upload(at, bytes)
    }

    fn fetch(&mut self, at: u64, bytes: Bytes) -> Result<Ticket, DeviceError> {
        self.script.pass(Place::Fetch)?;
        self.cpu.fetch(at, bytes)
    }

    fn collect(&mut self, ticket: Ticket, out: &mut [u8]) -> Result<(), DeviceError> {
        self.cpu.collect(ticket, out)
    }

    fn depth(&self) -> usize {
        self.cpu.depth()
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
        0
    }

    fn trim(&mut self) -> Result<Bytes, DeviceError> {
        self.cpu.trim()
    }
}
