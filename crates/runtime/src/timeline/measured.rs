//! A timeline with what was measured of a step: the time of every instruction, and the memory of the process and the
//! device while it ran. Invariant: times and memory are measured in one run of the step; what did not run has no time.

use crate::machine::resident;
use plimsoll_exec::Machine;
use plimsoll_graph::{Bytes, Counts};
use plimsoll_plan::{Program, Timeline, instruction_seconds};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// A timeline of a program, and the measurements of one step of one of its plans.
#[derive(Clone, Debug, PartialEq)]
pub struct MeasuredTimeline {
    /// The timeline of the program. The times of the measured plan are those expected for the measured step.
    pub timeline: Timeline,
    /// Measured seconds of each instruction; `None` for the plans that were not measured.
    pub seconds: Vec<Option<f64>>,
    /// Tokens and sequences of the measured step.
    pub counts: Counts,
    /// Measured memory while the step ran.
    pub memory: Vec<MeasuredMemory>,
}

/// Measured memory over the instructions of a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MeasuredMemory {
    /// Owner of the memory: the process or the GPU.
    pub label: String,
    /// Instruction, and bytes while it ran; ascending instructions.
    pub bytes: Vec<(usize, u64)>,
}

/// A reading of the memory while a step runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemorySample {
    /// When it was read.
    pub at: Instant,
    /// Resident memory of the process.
    pub process: Bytes,
    /// Memory of the device that the process holds, where the device counts it.
    pub device: Option<Bytes>,
}

impl MemorySample {
    fn read(machine: &dyn Machine) -> Self {
        Self { at: Instant::now(), process: resident().0, device: machine.taken().ok().flatten() }
    }
}

/// A step of a plan that was run once, and its measurements.
#[derive(Clone, Copy, Debug)]
pub struct MeasuredStep<'a> {
    /// Number of the plan in its program.
    pub plan: usize,
    /// Tokens and sequences of the step.
    pub counts: Counts,
    /// Time of each instruction of the plan.
    pub times: &'a [Duration],
    /// When the step started.
    pub start: Instant,
    /// Readings of the memory while the step ran.
    pub samples: &'a [MemorySample],
}

/// Pause between two readings of the memory.
const PAUSE: Duration = Duration::from_millis(1);

/// Calls `run`, and reads the memory of the process and of `machine` about once in a millisecond until it returns.
pub fn sampled<T>(machine: &dyn Machine, run: impl FnOnce() -> T) -> (T, Vec<MemorySample>) {
    /// Ends the reader, also when `run` panics: the scope waits for it.
    struct StopOnDrop<'a>(&'a AtomicBool);

    impl Drop for StopOnDrop<'_> {
        fn drop(&mut self) {
            self.0.store(true, Ordering::Relaxed);
        }
    }

    let ended = AtomicBool::new(false);
    thread::scope(|scope| {
        let reader = scope.spawn(|| {
            let mut samples = vec![MemorySample::read(machine)];
            while !ended.load(Ordering::Relaxed) {
                thread::sleep(PAUSE);
                samples.push(MemorySample::read(machine));
            }
            samples
        });
        let ends = StopOnDrop(&ended);
        let result = run();
        drop(ends);
        let samples = reader.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        (result, samples)
    })
}

impl MeasuredTimeline {
    /// The timeline of a program with the measurements of a step of one of its plans.
    pub fn new(program: &Program, step: &MeasuredStep<'_>) -> Self {
        let MeasuredStep { plan, counts, times, .. } = *step;
        let mut timeline = program.timeline();
        let first = timeline.plans[plan].first;
        let mut seconds = vec![None; timeline.instructions.len()];
        let expected = instruction_seconds(&program.plans()[plan].1, program.target(), counts);
        for (i, (time, expected)) in times.iter().zip(expected).enumerate() {
            seconds[first + i] = Some(time.as_secs_f64());
            timeline.instructions[first + i].seconds = expected;
        }
        let memory = memory(first, step);
        Self { timeline, seconds, counts, memory }
    }
}

/// The readings at the instructions that ran at their times: of several in one instruction, the highest. `first` is the number
/// of the plan's first instruction.
fn memory(first: usize, step: &MeasuredStep<'_>) -> Vec<MeasuredMemory> {
    let mut process = MeasuredMemory { label: "process, measured".to_owned(), bytes: vec![] };
    let mut device = MeasuredMemory { label: "card, measured".to_owned(), bytes: vec![] };
    // End of each instruction since the start of the step.
    let mut ends = vec![];
    let mut end = Duration::ZERO;
    for time in step.times {
        end += *time;
        ends.push(end);
    }
    for sample in step.samples {
        let since = sample.at.saturating_duration_since(step.start);
        // A reading after the last instruction counts to the last: the reader stops a moment after the step.
        let instruction = ends.partition_point(|end| *end <= since).min(ends.len().saturating_sub(1));
        process.add(first + instruction, sample.process);
        if let Some(bytes) = sample.device {
            device.add(first + instruction, bytes);
        }
    }
    [process, device].into_iter().filter(|line| !line.bytes.is_empty()).collect()
}

impl MeasuredMemory {
    /// Adds a reading at an instruction that is not before that of the last reading.
    fn add(&mut self, instruction: usize, reading: Bytes) {
        match self.bytes.last_mut() {
            Some((last, highest)) if *last == instruction => *highest = reading.0.max(*highest),
            _ => self.bytes.push((instruction, reading.0)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn readings_belong_to_the_instruction_that_ran() {
        let start = Instant::now();
        let ms = Duration::from_millis;
        let sample = |at: u64, process: u64, device: Option<u64>| MemorySample {
            at: start + ms(at),
            process: Bytes(process),
            device: device.map(Bytes),
        };
        let samples =
            [sample(0, 10, None), sample(3, 30, Some(7)), sample(5, 20, Some(8)), sample(99, 40, None)];
        let times = [ms(2), ms(4), ms(1)];
        let counts = Counts { tokens: 1, sequences: 1, packs: 1 };
        let found = memory(100, &MeasuredStep { plan: 0, counts, times: &times, start, samples: &samples });
        let wanted =
            [("process, measured", vec![(100, 10), (101, 30), (102, 40)]), ("card, measured", vec![(101, 8)])];
        let wanted = wanted.map(|(label, bytes)| MeasuredMemory { label: label.to_owned(), bytes });
        assert_eq!(found, wanted);
    }
}
