//! A timeline with what was measured of a step: the time of every instruction, and the memory of the process and the
//! device while it ran. Invariant: times and memory are measured in one run of the step; what did not run has no time.

use crate::machine::resident;
use plimsoll_exec::Machine;
use plimsoll_graph::{Bytes, Counts};
use plimsoll_plan::{Program, Timeline, instruction_seconds};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// A timeline and the measurements of one of its plans.
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
    /// Whose memory.
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

/// Pause between two readings of the memory.
const PAUSE: Duration = Duration::from_millis(1);

/// Calls `run`, and reads the memory of the process and of `machine` about once in a millisecond until it returns.
pub fn sampled<T>(machine: &dyn Machine, run: impl FnOnce() -> T) -> (T, Vec<MemorySample>) {
    /// Ends the reader, also when `run` panics: the scope waits for it.
    struct Ends<'a>(&'a AtomicBool);

    impl Drop for Ends<'_> {
        fn drop(&mut self) {
            self.0.store(true, Ordering::Relaxed);
        }
    }

    let ended = AtomicBool::new(false);
    let sample =
        || MemorySample { at: Instant::now(), process: resident().0, device: machine.taken().ok().flatten() };
    thread::scope(|scope| {
        let reader = scope.spawn(|| {
            let mut samples = vec![sample()];
            while !ended.load(Ordering::Relaxed) {
                thread::sleep(PAUSE);
                samples.push(sample());
            }
            samples
        });
        let ends = Ends(&ended);
        let result = run();
        drop(ends);
        let samples = reader.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        (result, samples)
    })
}

impl MeasuredTimeline {
    /// The timeline of a program with the times of the instructions of plan number `plan`, in a step of `counts` that
    /// started at `start`.
    pub fn new(
        program: &Program,
        plan: usize,
        counts: Counts,
        times: &[Duration],
        start: Instant,
        samples: &[MemorySample],
    ) -> Self {
        let mut timeline = program.timeline();
        let first = timeline.plans[plan].first;
        let mut seconds = vec![None; timeline.instructions.len()];
        let expected = instruction_seconds(&program.plans()[plan].1, program.target(), counts);
        for (i, (time, expected)) in times.iter().zip(expected).enumerate() {
            seconds[first + i] = Some(time.as_secs_f64());
            timeline.instructions[first + i].seconds = expected;
        }
        let memory = memory(first, times, start, samples);
        Self { timeline, seconds, counts, memory }
    }
}

/// The readings at the instructions that ran at their times: of several in one instruction, the highest.
fn memory(first: usize, times: &[Duration], start: Instant, samples: &[MemorySample]) -> Vec<MeasuredMemory> {
    let mut ends = vec![];
    let mut end = Duration::ZERO;
    for time in times {
        end += *time;
        ends.push(end);
    }
    let instruction = |at: Instant| {
        let since = at.saturating_duration_since(start);
        first + ends.partition_point(|end| *end <= since).min(times.len().saturating_sub(1))
    };
    let line = |label: &str, of: &dyn Fn(&MemorySample) -> Option<Bytes>| {
        let mut bytes: Vec<(usize, u64)> = vec![];
        for sample in samples {
            let Some(found) = of(sample) else { continue };
            let at = instruction(sample.at);
            match bytes.last_mut() {
                Some((last, most)) if *last == at => *most = found.0.max(*most),
                _ => bytes.push((at, found.0)),
            }
        }
        MeasuredMemory { label: label.to_owned(), bytes }
    };
    let process = line("process, measured", &|sample| Some(sample.process));
    let device = line("card, measured", &|sample| sample.device);
    [process, device].into_iter().filter(|line| !line.bytes.is_empty()).collect()
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
        let found = memory(100, &[ms(2), ms(4), ms(1)], start, &samples);
        let wanted =
            [("process, measured", vec![(100, 10), (101, 30), (102, 40)]), ("card, measured", vec![(101, 8)])];
        let wanted = wanted.map(|(label, bytes)| MeasuredMemory { label: label.to_owned(), bytes });
        assert_eq!(found, wanted);
    }
}
