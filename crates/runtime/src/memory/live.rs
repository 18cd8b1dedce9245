//! State of a run while it runs: progress.json in the folder of the run, and the same state for the observer. Invariant: the
//! file is complete at every moment, is written a few times a second at most, and is removed when the run has finished.

use crate::health::{Health, PlannedMemory};
use crate::leak::Leak;
use crate::lock;
use crate::machine::Reading;
use crate::{Level, Observer, Progress, Trained};
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use std::{fs, io};

/// Name of the file.
pub const FILE: &str = "progress.json";

/// Interval between two states of one stage.
const INTERVAL: Duration = Duration::from_secs(1);

/// Shortest interval between two states.
const SHORTEST: Duration = Duration::from_millis(100);

/// State of a run at one moment; the content of progress.json.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct LiveState {
    /// The command: `train`, `predict` or `embed`.
    pub command: String,
    /// Present activity of the run, such as `training` or `evaluating`.
    pub stage: String,
    /// Number of the process.
    pub process_id: u32,
    /// Time of this state, in seconds since 1970.
    pub updated: u64,
    /// Seconds since the process started the run.
    pub seconds: f64,
    /// Work that is finished, in units of `unit`.
    pub done: u64,
    /// All work; `None` if unknown.
    pub total: Option<u64>,
    /// Unit of `done`: `steps`, or `bytes` of the input.
    pub unit: String,
    /// Estimated seconds to the end.
    pub seconds_left: Option<f64>,
    /// Tokens per second since the start.
    pub tokens_per_second: f64,
    /// Mean cross-entropy of the last step, in nats; only in training.
    pub loss: Option<f64>,
    /// Loss of the last evaluation; only in training.
    pub validation_loss: Option<f64>,
    /// Finished records of the input; not in training.
    pub records: Option<u64>,
    /// Maximum number of tokens of a micro-step, or of a step of inference; only where it changes during the run.
    pub micro_tokens: Option<u64>,
    /// Memory budget in bytes.
    pub budget_bytes: u64,
    /// Planned peak in bytes.
    pub planned_bytes: u64,
    /// Bytes of the arenas that the run holds.
    pub held_bytes: u64,
    /// Resident memory of the process.
    pub process_bytes: u64,
    /// Host memory that all processes use, within the limits of containers.
    pub host_used_bytes: u64,
    /// All host memory, within the limits of containers.
    pub host_total_bytes: u64,
    /// Memory of the GPU; `None` if plans are in host memory.
    pub card: Option<LiveCard>,
    /// How close the run is to its limits: `ok`, `tight` or `critical`; empty before the model is open.
    pub status: String,
    /// Measured memory divided by the budget.
    pub utilisation: f64,
    /// Risk, from 0 to 1, that memory runs out.
    pub oom_risk: f64,
    /// Growth of host memory for each step, if it was found to leak.
    pub leak_bytes_per_step: Option<u64>,
}

/// Memory of a GPU in a [`LiveState`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LiveCard {
    /// Bytes that this process uses.
    pub process_bytes: u64,
    /// Bytes that all processes use.
    pub used_bytes: u64,
    /// All bytes of the GPU.
    pub total_bytes: u64,
}

impl LiveState {
    /// Enters the planned memory.
    pub fn set_planned(&mut self, planned: &PlannedMemory) {
        let PlannedMemory { budget, peak, held, .. } = planned;
        (self.budget_bytes, self.planned_bytes, self.held_bytes) = (budget.0, peak.0, held.0);
    }

    /// Enters a reading.
    pub fn set_reading(&mut self, reading: &Reading) {
        self.process_bytes = reading.process.0;
        (self.host_used_bytes, self.host_total_bytes) = (reading.host.used().0, reading.host.total.0);
        self.card = reading.card.map(|card| LiveCard {
            process_bytes: card.process.0,
            used_bytes: card.all.used().0,
            total_bytes: card.all.total.0,
        });
    }

    /// Enters the health of the run.
    pub fn set_health(&mut self, health: Health, leak: Option<Leak>) {
        self.status = health.status.word().to_owned();
        (self.utilisation, self.oom_risk) = (health.utilisation, health.oom_risk);
        self.leak_bytes_per_step = leak.map(|leak| leak.bytes_per_step);
    }

    /// Enters the progress of a prediction or of embeddings.
    pub fn set_progress(&mut self, progress: &Progress) {
        let Progress { bytes, bytes_total, records, tokens, seconds, .. } = *progress;
        (self.done, self.total) = (bytes, bytes_total);
        "bytes".clone_into(&mut self.unit);
        self.records = Some(records);
        self.tokens_per_second = tokens as f64 / seconds.max(1e-9);
        self.seconds_left = bytes_total.and_then(|total| left(bytes, total, seconds));
    }

    /// Enters the progress of a training run, `first` steps of which were done before this process started.
    pub fn set_trained(&mut self, trained: &Trained, first: u64, seconds: f64) {
        (self.done, self.total) = (trained.step, trained.steps);
        "steps".clone_into(&mut self.unit);
        self.loss = Some(trained.loss).filter(|loss| loss.is_finite());
        self.tokens_per_second = trained.tokens_per_second;
        self.seconds_left = trained
            .steps
            .and_then(|steps| left(trained.step.saturating_sub(first), steps.saturating_sub(first), seconds));
    }

    /// Reads the state of the run in `folder`; `None` without a file, or if it is not a state.
    pub fn read(folder: &Path) -> Option<Self> {
        /// Largest accepted file in bytes; a state has about a thousand.
        const LARGEST: u64 = 1 << 16;
        let text = plimsoll_data::bounded::read_text(&folder.join(FILE), LARGEST).ok()?;
        serde_json::from_str(&text).ok()
    }

    /// Seconds since the state was written; 0 if the clock was set back.
    pub fn age(&self) -> u64 {
        now().saturating_sub(self.updated)
    }
}

/// Seconds to the end if `done` of `total` took `seconds`; `None` before anything is done.
fn left(done: u64, total: u64, seconds: f64) -> Option<f64> {
    (done > 0).then(|| seconds / done as f64 * total.saturating_sub(done) as f64)
}

/// Seconds since 1970.
fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}

/// Writer of the state of a run.
#[derive(Debug)]
pub struct Live {
    /// progress.json; `None` if the run has no folder, or the file could not be written.
    path: Option<PathBuf>,
    /// The present state.
    pub state: LiveState,
    began: Instant,
    shown: Option<Instant>,
}

impl Live {
    /// Creates a writer for a run of `command`, which has `folder` for its output. Nothing is written before the first
    /// state.
    pub fn new(command: &str, folder: Option<&Path>) -> Self {
        let state = LiveState {
            command: command.to_owned(),
            stage: "starting".to_owned(),
            process_id: std::process::id(),
            ..LiveState::default()
        };
        Self { path: folder.map(|folder| folder.join(FILE)), state, began: Instant::now(), shown: None }
    }

    /// Whether a second has passed since the last state.
    pub fn is_due(&self) -> bool {
        self.shown.is_none_or(|shown| shown.elapsed() >= INTERVAL)
    }

    /// Enters what the run does now. The state is shown unless one was shown a moment ago, so a stage that takes no time
    /// costs none.
    pub fn begin(&mut self, stage: &str, observer: &mut dyn Observer) {
        stage.clone_into(&mut self.state.stage);
        if self.shown.is_none_or(|shown| shown.elapsed() >= SHORTEST) {
            self.show(observer);
        }
    }

    /// Writes the present state and passes it to `observer`. If the file cannot be written, warns and writes no further
    /// state: the run does not depend on the file.
    pub fn show(&mut self, observer: &mut dyn Observer) {
        self.shown = Some(Instant::now());
        self.state.updated = now();
        self.state.seconds = self.began.elapsed().as_secs_f64();
        observer.live(&self.state);
        if let Some(path) = &self.path
            && let Err(error) = write(path, &self.state)
        {
            let text = format!("{} cannot be written and is no longer updated: {error}", path.display());
            observer.say(Level::Warning, &text);
            self.path = None;
        }
    }

    /// Removes the file, because the run has finished and its record has everything.
    pub fn finish(&self) {
        if let Some(path) = &self.path {
            // A file that stays is replaced by the next run, and a monitor sees the record of the finished run.
            let _ = lock::remove(path);
        }
    }
}

/// Replaces the file. It is not synced to the disk: after a crash of the machine nobody needs it.
fn write(path: &Path, state: &LiveState) -> io::Result<()> {
    // Named after the process: two runs that write into one folder do not rename each other's unfinished files.
    let part = path.with_file_name(format!(".{FILE}.{}-0.part", std::process::id()));
    let text = serde_json::to_vec(state).map_err(io::Error::other)?;
    let done = fs::write(&part, text).and_then(|()| fs::rename(&part, path));
    // A full disk leaves an empty file.
    done.inspect_err(|_| drop(fs::remove_file(&part)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::health::HealthStatus;
    use crate::machine::CardReading;
    use plimsoll_exec::memory::Memory;
    use plimsoll_graph::Bytes;
    use plimsoll_testing::Folder;

    /// Observer that counts states and keeps warnings.
    #[derive(Default)]
    struct Ear(usize, Vec<String>);

    impl Observer for Ear {
        fn say(&mut self, _: Level, text: &str) {
            self.1.push(text.to_owned());
        }

        fn progress(&mut self, _: &Progress) {}

        fn live(&mut self, _: &LiveState) {
            self.0 += 1;
        }
    }

    #[test]
    fn a_state_is_read_as_it_was_written() {
        let folder = Folder::new("live");
        let mut live = Live::new("train", Some(&folder.0));
        assert!(live.is_due() && LiveState::read(&folder.0).is_none());
        let all = Memory { free: Bytes(50), total: Bytes(80) };
        let card = Some(CardReading { process: Bytes(20), all });
        live.state.set_reading(&Reading { card, process: Bytes(7), ..Reading::of_host() });
        let health = Health { status: HealthStatus::Tight, utilisation: 0.75, oom_risk: 0.5 };
        live.state.set_health(health, Some(Leak { found_after: 20, bytes_per_step: 3 }));
        let trained = Trained { step: 30, steps: Some(60), loss: 2.5, ..Trained::default() };
        live.state.set_trained(&trained, 10, 40.0);
        let mut ear = Ear::default();
        live.show(&mut ear);
        assert!(!live.is_due());
        let read = LiveState::read(&folder.0).expect("a state");
        assert_eq!(read, live.state);
        // 20 of 50 steps took 40 seconds.
        assert_eq!((read.seconds_left, read.total, ear.0), (Some(60.0), Some(60), 1));
        assert!(read.age() < 100);
        live.finish();
        assert_eq!(fs::read_dir(&folder.0).expect("read").count(), 0);
    }

    #[test]
    fn a_file_that_cannot_be_written_is_a_warning_and_no_error() {
        let folder = Folder::new("live");
        let mut live = Live::new("predict", Some(&folder.0));
        fs::create_dir(folder.path(FILE)).expect("a folder in the way");
        let mut ear = Ear::default();
        live.show(&mut ear);
        live.show(&mut ear);
        assert_eq!((ear.0, ear.1.len()), (2, 1), "{:?}", ear.1);
        assert!(ear.1[0].contains("progress.json cannot be written"), "{:?}", ear.1);
        assert_eq!(fs::read_dir(&folder.0).expect("read").count(), 1, "only the folder in the way");
    }

    #[test]
    fn progress_of_a_pipe_has_no_end() {
        let mut state = LiveState::default();
        let progress = Progress { bytes: 50, tokens: 30, seconds: 10.0, ..Progress::default() };
        state.set_progress(&progress);
        assert_eq!((state.total, state.seconds_left, state.tokens_per_second), (None, None, 3.0));
        state.set_progress(&Progress { bytes_total: Some(200), ..progress });
        assert_eq!(state.seconds_left, Some(30.0));
    }
}
