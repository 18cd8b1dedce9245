//! Memory and health of a run while it runs: readings at the end of each stage, the leak detector, and the state that
//! monitors show. Invariant: nothing here changes a run; it reads memory, and writes progress.json.

use crate::dynamic::StepSizeChange;
use crate::health::{Health, HealthRecord, HealthStatus, PlannedMemory, Recommendation};
use crate::leak::{Leak, LeakDetector};
use crate::live::{Live, LiveState};
use crate::machine::{MemoryStage, Reading, Tracker};
use crate::observer::{FileTransfer, Level, Observer, Progress, StartProgress, Trained};
use plimsoll_exec::Machine;
use plimsoll_graph::Bytes;
use plimsoll_plan::Remedy;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Age from which the memory of host and card is read again. The memory of the process is read after every step.
const READ_AGAIN: Duration = Duration::from_secs(1);

/// Memory and health of a run.
#[derive(Debug)]
pub struct Watch {
    tracker: Tracker,
    reading: Reading,
    /// When host and card were read.
    read: Instant,
    planned: Option<PlannedMemory>,
    detector: LeakDetector,
    now: Health,
    record: HealthRecord,
    /// Whether recommendations were computed.
    advised: bool,
    /// Changes of the size of the steps.
    sizes: Vec<StepSizeChange>,
    live: Live,
}

impl Watch {
    /// Starts to watch a run of `command` on `machines`, whose state is written to progress.json in `folder`.
    pub fn start(command: &str, folder: Option<&Path>, machines: Vec<Arc<dyn Machine>>) -> Self {
        let tracker = Tracker::on(machines);
        Self {
            reading: tracker.read(),
            read: Instant::now(),
            tracker,
            planned: None,
            detector: LeakDetector::default(),
            now: Health::default(),
            record: HealthRecord::default(),
            advised: false,
            sizes: vec![],
            live: Live::new(command, folder),
        }
    }

    /// Sets the machines whose memory is read, if they were not known at the start.
    pub fn set_machines(&mut self, machines: Vec<Arc<dyn Machine>>) {
        self.tracker.set_machines(machines);
    }

    /// Enters the planned memory, from which on the run has a health.
    pub fn set_planned(&mut self, planned: PlannedMemory) {
        self.record.fragmentation = self.record.fragmentation.max(planned.fragmentation);
        self.planned = Some(planned);
        self.assess();
    }

    /// Enters the maximum number of tokens of a step, for a run whose steps change their size.
    pub fn set_step_tokens(&mut self, tokens: u64) {
        self.live.state.micro_tokens = Some(tokens);
    }

    /// Reports changes of the size of the steps, with the planned memory after the last.
    pub fn resized(
        &mut self,
        changes: Vec<StepSizeChange>,
        planned: PlannedMemory,
        observer: &mut dyn Observer,
    ) {
        let Some(last) = changes.last() else { return };
        self.set_step_tokens(last.to);
        changes.iter().for_each(|change| observer.say(Level::Info, &change.words()));
        self.sizes.extend(changes);
        self.set_planned(planned);
        self.enter();
        self.live.show(observer);
    }

    /// The changes of the size of the steps, for records.
    pub fn size_changes(&self) -> &[StepSizeChange] {
        &self.sizes
    }

    /// Reads the memory and records the end of the stage `name`; `step` is the optimizer step of a training run.
    pub fn end_stage(&mut self, name: &str, step: Option<u64>) -> MemoryStage {
        self.read();
        self.record_stage(name, step, self.reading.clone())
    }

    /// Records the end of a stage with a reading of that moment.
    pub fn record_stage(&mut self, name: &str, step: Option<u64>, reading: Reading) -> MemoryStage {
        let stage = MemoryStage { name: name.to_owned(), step, reading };
        self.tracker.record(stage.clone());
        stage
    }

    /// Whether memory is short and no recommendations were computed yet.
    pub fn wants_advice(&self) -> bool {
        self.record.worst.status > HealthStatus::Ok && !self.advised
    }

    /// Records recommendations and reports them.
    pub fn advise(&mut self, remedies: Vec<Remedy>, observer: &mut dyn Observer) {
        self.advised = true;
        let status = self.record.worst.status.word();
        self.record.recommendations = remedies.into_iter().map(Recommendation::from).collect();
        for recommendation in &self.record.recommendations {
            observer.say(Level::Info, &format!("memory is {status}: {}", recommendation.text));
        }
    }

    /// Reads the memory after training step `step`, and reports a leak of host memory when it is found.
    pub fn step(&mut self, step: u64, observer: &mut dyn Observer) {
        self.read_if_old();
        if let Some(leak) = self.reading.anonymous.and_then(|memory| self.detector.add(memory)) {
            self.record.leak = Some(leak);
            observer.say(Level::Warning, &leak_words(step, leak));
            self.assess();
        }
    }

    /// Reports what the run does now, such as `evaluating`.
    pub fn begin(&mut self, what: &str, observer: &mut dyn Observer) {
        self.enter();
        self.live.begin(what, observer);
    }

    /// Enters the progress by `change`, and reports the state of the run if the last one is a second old.
    pub fn show(&mut self, observer: &mut dyn Observer, change: impl FnOnce(&mut LiveState)) {
        change(&mut self.live.state);
        if self.live.is_due() {
            self.read_if_old();
            self.enter();
            self.live.show(observer);
        }
    }

    /// The state that is shown next.
    pub fn live_state(&mut self) -> &mut LiveState {
        &mut self.live.state
    }

    /// Removes progress.json, after the record of the finished run was written.
    pub fn finish(&self) {
        self.live.finish();
    }

    /// The memory read last.
    pub fn reading(&self) -> &Reading {
        &self.reading
    }

    /// The health at the last reading.
    pub fn health(&self) -> Health {
        self.now
    }

    /// The stages so far, for records.
    pub fn stages(&self) -> &[MemoryStage] {
        self.tracker.stages()
    }

    /// The health of the whole run, for records; `None` before anything was planned.
    pub fn record(&self) -> Option<&HealthRecord> {
        self.planned.map(|_| &self.record)
    }

    fn read_if_old(&mut self) {
        if self.read.elapsed() >= READ_AGAIN {
            return self.read();
        }
        self.reading.read_process();
        self.assess();
    }

    fn read(&mut self) {
        self.reading = self.tracker.read();
        self.read = Instant::now();
        self.assess();
    }

    /// Computes the health of the last reading.
    fn assess(&mut self) {
        let Some(planned) = &self.planned else { return };
        self.now = Health::of(planned, &self.reading, self.detector.leak());
        self.record.worst = self.record.worst.worse(self.now);
    }

    /// Enters memory and health in the state that is shown.
    fn enter(&mut self) {
        if let Some(planned) = &self.planned {
            self.live.state.set_planned(planned);
            self.live.state.set_health(self.now, self.detector.leak());
        }
        self.live.state.set_reading(&self.reading);
    }
}

/// Message about a leak.
fn leak_words(step: u64, leak: Leak) -> String {
    let rate = Bytes(leak.bytes_per_step).rounded();
    format!(
        "the host memory of this process grows by about {rate} with every step (found at step {step}); the run goes on, \
         and docs/leaks.md says what it can be"
    )
}

/// Observer that records the stages of a start in a [`Watch`], and passes everything on to another observer.
pub struct StageRecorder<'a> {
    /// The observer that hears everything.
    pub inner: &'a mut dyn Observer,
    /// Receives the stages.
    pub record: &'a mut dyn FnMut(&str, &Reading, &mut dyn Observer),
}

impl Observer for StageRecorder<'_> {
    fn say(&mut self, level: Level, text: &str) {
        self.inner.say(level, text);
    }

    fn progress(&mut self, progress: &Progress) {
        self.inner.progress(progress);
    }

    fn trained(&mut self, trained: &Trained) {
        self.inner.trained(trained);
    }

    fn stop(&self) -> Option<u8> {
        self.inner.stop()
    }

    fn transfer(&mut self, transfer: &FileTransfer<'_>) {
        self.inner.transfer(transfer);
    }

    fn starting(&mut self, progress: &StartProgress) {
        self.inner.starting(progress);
    }

    fn stage(&mut self, name: &str, reading: &Reading) {
        (self.record)(name, reading, self.inner);
        self.inner.stage(name, reading);
    }

    fn live(&mut self, state: &LiveState) {
        self.inner.live(state);
    }
}
