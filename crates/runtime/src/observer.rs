//! Reporting of a run's events. Invariant: applications never print; they report to an observer.

use crate::RuntimeError;
use crate::live::LiveState;
use crate::machine::Reading;
pub use plimsoll_exec::{StartProgress, StartStage};
use plimsoll_graph::Bytes;

/// Receiver of a run's messages and progress.
pub trait Observer {
    /// Reports a line of text, such as the memory line or a warning.
    fn say(&mut self, level: Level, text: &str);

    /// Reports progress. Called often; the observer decides how often it redraws.
    fn progress(&mut self, progress: &Progress);

    /// Reports progress of a training run. Called after every step.
    fn trained(&mut self, _: &Trained) {}

    /// Returns the number of a signal that asks the run to end early. Called between steps; results finished by then
    /// are kept.
    fn stop(&self) -> Option<u8> {
        None
    }

    /// Reports progress of a model file that is being downloaded or written. Called often.
    fn transfer(&mut self, _: &FileTransfer<'_>) {}

    /// Reports progress of the work before the first step: kernels are compiled, launches prepared, weights loaded.
    /// Called often.
    fn starting(&mut self, _: &StartProgress) {}

    /// Reports the memory at the end of a stage of the start: `planned`, `arena allocated`, `weights loaded`.
    fn stage(&mut self, _: &str, _: &Reading) {}

    /// Reports the state of the run. Called about once a second.
    fn live(&mut self, _: &LiveState) {}
}

/// Reports the progress of a start to `observer`, and a line of text before kernels are compiled.
pub(crate) fn on_start(observer: &mut dyn Observer) -> impl FnMut(StartProgress) {
    move |progress| {
        if let StartProgress { stage: StartStage::Compile, done: 0, total } = progress {
            let kernels = if total == 1 { "kernel" } else { "kernels" };
            observer.say(
                Level::Info,
                &format!("compiling {total} {kernels} for this GPU; later runs find them compiled"),
            );
        }
        observer.starting(&progress);
    }
}

/// Returns [`RuntimeError::Interrupted`] if a signal asks the run to end; `kept` describes what is kept.
pub fn stopped(observer: &dyn Observer, kept: &str) -> Result<(), RuntimeError> {
    match observer.stop() {
        Some(signal) => Err(RuntimeError::Interrupted { signal, kept: kept.to_owned() }),
        None => Ok(()),
    }
}

/// Severity of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    /// Affects the meaning of the results.
    Warning,
    /// Of interest to every user.
    Info,
    /// Explains details of a run.
    Detail,
}

/// Progress of a run.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Progress {
    /// Bytes of the inputs, as stored (compressed), whose records are computed; estimated by [`FinishedBytes`].
    pub bytes: u64,
    /// Total bytes of the inputs; `None` if an input is a pipe.
    pub bytes_total: Option<u64>,
    /// Number of finished records.
    pub records: u64,
    /// Number of sequences (open reading frames) processed by the models.
    pub sequences: u64,
    /// Number of tokens processed by the encoders.
    pub tokens: u64,
    /// Seconds since the encoders started.
    pub seconds: f64,
}

/// Estimates how many bytes of the input are computed: the bytes read, multiplied by the finished share of the work that
/// was made of them. Invariant: the estimate never decreases, and is less than the total until the run has finished.
#[derive(Clone, Copy, Debug, Default)]
pub struct FinishedBytes(u64);

impl FinishedBytes {
    /// Returns the estimate after `read` of `total` bytes, if `done` of the `taken` units of work from these bytes are
    /// finished. Bytes without work count as finished.
    pub fn update(&mut self, read: u64, total: Option<u64>, done: u64, taken: u64) -> u64 {
        let share = if taken == 0 { 1.0 } else { (done as f64 / taken as f64).min(1.0) };
        // Rounding and the last results, which are written after their tokens are computed, must not show 100 %.
        let below_total = total.map_or(u64::MAX, |total| total.saturating_sub(1));
        self.0 = self.0.max((read as f64 * share) as u64).min(below_total);
        self.0
    }
}

/// Progress of a training run.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Trained {
    /// Number of completed steps.
    pub step: u64,
    /// Total number of steps; `None` if unknown.
    pub steps: Option<u64>,
    /// Mean cross-entropy per target of the last step, in nats.
    pub loss: f64,
    /// Tokens per second since this process started the run.
    pub tokens_per_second: f64,
    /// Resident memory of the process.
    pub memory: Bytes,
    /// The memory budget.
    pub line: Bytes,
}

/// Progress of a file that is being downloaded or written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileTransfer<'a> {
    /// Name of the file.
    pub file: &'a str,
    /// Bytes completed.
    pub bytes: u64,
    /// Size of the file in bytes.
    pub total: u64,
}

/// An observer that ignores all events.
#[derive(Clone, Copy, Debug, Default)]
pub struct Silent;

impl Observer for Silent {
    fn say(&mut self, _: Level, _: &str) {}

    fn progress(&mut self, _: &Progress) {}
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finished_bytes_follow_the_work() {
        let mut finished = FinishedBytes::default();
        let check = |finished: &mut FinishedBytes, read, done, taken, wanted| {
            assert_eq!(finished.update(read, Some(1000), done, taken), wanted, "{read} {done} {taken}");
        };
        check(&mut finished, 500, 0, 100, 0);
        check(&mut finished, 500, 50, 100, 250);
        // The input is read to its end, and half of it waits.
        check(&mut finished, 1000, 100, 200, 500);
        // A share that falls does not move the estimate back.
        check(&mut finished, 1000, 100, 250, 500);
        check(&mut finished, 1000, 250, 250, 999);
        let mut pipe = FinishedBytes::default();
        assert_eq!(pipe.update(80, None, 1, 4), 20);
        assert_eq!(pipe.update(80, None, 0, 0), 80);
    }
}
