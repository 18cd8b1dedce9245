//! A machine for tests whose memory other processes take and give back: its readings are scripted, and its device fails
//! chosen allocations, copies and launches. Invariant: everything else is computed by the CPU, so a run has its bits.

use crate::{DeviceCall, HookedDevice, Hooks};
use plimsoll_cpu::CpuMachine;
use plimsoll_exec::memory::Memory;
use plimsoll_exec::{Device, DeviceError, DeviceKind, Holder, Launch, Machine};
use plimsoll_graph::Bytes;
use plimsoll_plan::{Location, Precision, Target};
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

/// Operation at which a device fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultPlace {
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
    /// The place.
    pub place: FaultPlace,
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
    pub fn once(place: FaultPlace, after: u64) -> Self {
        Self { place, after, skip: 0, times: 1, of_memory: true }
    }
}

/// Scripted memory and failures of a machine, shared with the test.
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
    /// A script whose memory changes from step to step.
    pub fn new(used: fn(u64) -> u64, fault: Option<Fault>) -> Arc<Self> {
        let step = AtomicU64::new(0);
        let mapped = Mutex::new(vec![]);
        Arc::new(Self { step, used, readings: None, fault: Mutex::new(fault), mapped })
    }

    /// A script whose memory changes from reading to reading, for runs without optimizer steps.
    pub fn of_readings(used: fn(u64) -> u64, fault: Option<Fault>) -> Arc<Self> {
        let step = AtomicU64::new(0);
        let mapped = Mutex::new(vec![]);
        Arc::new(Self { step, used, readings: Some(AtomicU64::new(0)), fault: Mutex::new(fault), mapped })
    }

    /// Whether all failures have happened.
    pub fn is_over(&self) -> bool {
        self.fault.lock().expect("no panic").is_none_or(|fault| fault.times == 0)
    }

    /// An error if the device fails at `place` now.
    fn pass(&self, place: FaultPlace) -> Result<(), DeviceError> {
        // The count of the fault that is due goes down in place, so that the next call sees it.
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
            (true, FaultPlace::Arena | FaultPlace::Growth) => DeviceError::OutOfMemory { bytes: Bytes(7) },
            (true, _) => DeviceError::Exhausted { source: "another process took the memory".into() },
            (false, _) => DeviceError::Machine { source: "it fell off the bus".into() },
        })
    }
}

/// A CPU whose memory is scripted, and its number among such machines.
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
        let unit = 1 << 30;
        let used = (self.0.used)(at);
        Ok(Memory { free: Bytes((1000 - used) * unit), total: Bytes(1000 * unit) })
    }

    fn holders(&self) -> Vec<Holder> {
        vec![Holder { who: "process 7 (python)".to_owned(), bytes: Some(Bytes(5)) }]
    }

    fn arithmetic(&self) -> String {
        cpu().arithmetic()
    }

    fn open(&self) -> Result<Vec<Box<dyn Device>>, DeviceError> {
        let mut devices: Vec<Box<dyn Device>> = vec![];
        for cpu in cpu().open()? {
            let hooks = TightHooks { script: Arc::clone(&self.0), weights: Bytes::ZERO };
            devices.push(Box::new(HookedDevice::new(cpu, hooks)));
        }
        Ok(devices)
    }
}

/// Makes a CPU a device of a [`TightMachine`].
struct TightHooks {
    script: Arc<Script>,
    /// Size of the weights and states, the first bytes of the arena.
    weights: Bytes,
}

impl TightHooks {
    /// Sizes of the part of the arena with memory: at its allocation and now.
    fn mapped(&self) -> (u64, u64) {
        let mapped = self.script.mapped.lock().expect("no panic");
        (mapped[0], mapped[mapped.len() - 1])
    }

    fn note_mapped(&self, bytes: Bytes) {
        self.script.mapped.lock().expect("no panic").push(bytes.0);
    }

    /// Overwrites everything after the first `bytes` bytes, so that a step that reads it computes NaN.
    fn overwrite_after(&self, bytes: Bytes, cpu: &mut dyn Device) -> Result<(), DeviceError> {
        // All bits set are a NaN in every floating-point format of the arena.
        cpu.fill(Location::in_arena(bytes.0), Bytes(self.mapped().0 - bytes.0), 0xFF)
    }

    /// Panics if an operand of `launch` is in memory that was given back.
    fn check_operands(&self, launch: &Launch<'_>) {
        let mapped = self.script.mapped.lock().expect("no panic").last().copied().unwrap_or_default();
        for operand in launch.ins.iter().chain(launch.outs.iter().flatten()) {
            let end = operand.at + operand.bytes(launch.counts).0;
            assert!(end <= mapped, "{} uses memory that was given back", launch.op.name());
        }
    }
}

impl Hooks for TightHooks {
    fn before(&mut self, call: DeviceCall<'_>, cpu: &mut dyn Device) -> Result<(), DeviceError> {
        match call {
            DeviceCall::Allocate(allocation) => {
                self.script.pass(FaultPlace::Arena)?;
                self.weights = allocation.weights;
                self.note_mapped(allocation.arena);
                Ok(())
            }
            DeviceCall::SetMapped(bytes) => {
                let (first, last) = self.mapped();
                if bytes.0 > last {
                    self.script.pass(FaultPlace::Growth)?;
                }
                assert!(bytes.0 <= first, "{bytes} of {first}");
                self.overwrite_after(bytes, cpu)
            }
            DeviceCall::Upload => self.script.pass(FaultPlace::Upload),
            DeviceCall::Download(from) if from.at < self.weights.0 => self.script.pass(FaultPlace::Download),
            // An output lies behind the weights and states.
            DeviceCall::Download(_) => self.script.pass(FaultPlace::Fetch),
            DeviceCall::Launch(launch) => {
                self.script.pass(FaultPlace::Launch(launch.op.name()))?;
                self.check_operands(launch);
                Ok(())
            }
            DeviceCall::Fill | DeviceCall::Start(_) | DeviceCall::Complete(_) | DeviceCall::Synchronize => {
                Ok(())
            }
        }
    }

    fn after(&mut self, call: DeviceCall<'_>, cpu: &mut dyn Device) -> Result<(), DeviceError> {
        if let DeviceCall::SetMapped(bytes) = call {
            self.overwrite_after(bytes, cpu)?;
            self.note_mapped(bytes);
        }
        Ok(())
    }
}
