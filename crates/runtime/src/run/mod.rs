//! The harness of a run over a stream of sequences, which `embed`, `classify` and `predict` share: starts the session of a plan,
//! feeds an engine with the batches of a front end, shows progress and warnings, and compares the memory with the plan at the
//! end. Invariant: an interruption is heeded before each batch and while the run waits; what an engine has finished is its own
//! to keep.

pub mod lock;
pub mod metrics;
pub mod ordered;
pub mod series;

use crate::health::PlannedMemory;
use crate::machine::Reading;
use crate::observer::stopped;
use crate::session::bounds::tokens;
use crate::session::{PlannedStages, StageStart, StepSession, StopCheck, Usage, say_given_back};
use crate::watch::{StageRecorder, Watch};
use crate::{Level, Observer, Progress, RuntimeError};
use plimsoll_graph::Bytes;
use plimsoll_plan::{Program, Remedy};
use std::time::Instant;

/// The batches of a front end, which reads and tokenizes on its own threads.
pub trait BatchSource {
    /// Tokenized sequences.
    type Batch;

    /// Returns the next batch in input order; `None` at the end of the input. While it waits, calls `wait` repeatedly and returns
    /// its error, so that a silent pipe does not block an interrupt.
    fn next(
        &mut self,
        wait: &mut dyn FnMut() -> Result<(), RuntimeError>,
    ) -> Result<Option<Self::Batch>, RuntimeError>;

    /// Total bytes of input, if known.
    fn bytes_total(&self) -> Option<u64>;
}

/// An engine: computes the sequences of batches in a session and writes their results in input order.
pub trait StreamEngine {
    /// Tokenized sequences.
    type Batch;
    /// Error of the run.
    type Error: From<RuntimeError>;

    /// Reports what the front end found in the input of a batch.
    fn announce(&mut self, batch: &Self::Batch, observer: &mut dyn Observer) -> Result<(), Self::Error>;

    /// Computes the sequences of a batch, or queues them. Calls `stop` while it waits, and returns its error.
    fn take(&mut self, batch: Self::Batch, stop: StopCheck<'_>) -> Result<(), Self::Error>;

    /// Processes some of the waiting work after the end of the input; returns whether there is more.
    fn drain(&mut self, stop: StopCheck<'_>) -> Result<bool, Self::Error>;

    /// Returns the warnings that the session raised since the last call, for example about failed devices.
    fn warnings(&mut self) -> Vec<String>;

    /// Reports the changes of the size of the steps since the last call.
    fn report_sizes(&mut self, watch: &mut Watch, observer: &mut dyn Observer);

    /// Adds seconds that the run waited for the front end.
    fn add_wait(&mut self, _seconds: f64) {}

    /// The progress of the run; `bytes_total` are the bytes of the input, if known.
    fn progress(&mut self, bytes_total: Option<u64>) -> Progress;
}

/// State of a session at the end of its run.
pub struct SessionEnd<'a> {
    /// The program of the size of steps that is in use.
    pub program: &'a Program,
    /// Work of each device.
    pub usage: &'a [Usage],
    /// Bytes of the arena of an earlier stage, some of which may still be mapped.
    pub held: Bytes,
}

/// The watch and the observer of a run.
pub struct RunHarness<'r> {
    /// Memory of the run, its stages and its live view.
    pub watch: &'r mut Watch,
    /// Receives messages and progress.
    pub observer: &'r mut dyn Observer,
}

impl RunHarness<'_> {
    /// Starts the session of a stage of a plan: on the executors in `start` if they all run its program already, with their
    /// weights; otherwise it loads the weights.
    ///
    /// # Errors
    /// Those of [`PlannedStages::start`].
    pub fn start_session<'a>(
        &mut self,
        planned: &'a PlannedStages<'a>,
        stage: usize,
        start: StageStart<'a>,
    ) -> Result<StepSession<'a>, RuntimeError> {
        self.watch.set_planned(PlannedMemory::of(&planned.programs()[stage], planned.site().budget()));
        let session = if !start.running.is_empty() && planned.is_on(stage, &start.running) {
            planned.resume(stage, start)?
        } else {
            let watch = &mut *self.watch;
            let record = &mut |name: &str, reading: &Reading, _: &mut dyn Observer| {
                watch.record_stage(name, None, reading.clone());
            };
            planned.start(stage, start, &mut StageRecorder { inner: self.observer, record })?
        };
        if session.is_dynamic() {
            self.watch.set_step_tokens(tokens(session.program_in_use()));
        }
        Ok(session)
    }

    /// Feeds an engine with the batches of a front end until the input ends, and then drains it. `kept` says what an interruption
    /// leaves.
    ///
    /// # Errors
    /// An interruption, an error of the input, or an error of the engine.
    pub fn stream<B, E>(&mut self, batches: &mut B, engine: &mut E, kept: &str) -> Result<(), E::Error>
    where
        B: BatchSource,
        E: StreamEngine<Batch = B::Batch>,
    {
        let bytes_total = batches.bytes_total();
        loop {
            let wait = Instant::now();
            let batch = batches.next(&mut || stopped(self.observer, kept));
            engine.add_wait(wait.elapsed().as_secs_f64());
            let Some(batch) = batch? else { break };
            engine.announce(&batch, self.observer)?;
            let taken = engine.take(batch, &|| stopped(self.observer, kept));
            // Before the error of a batch: a warning may be its cause.
            self.warn(engine);
            taken?;
            self.show(&engine.progress(bytes_total));
        }
        loop {
            let more = engine.drain(&|| stopped(self.observer, kept));
            self.warn(engine);
            if !more? {
                return Ok(());
            }
            self.show(&engine.progress(bytes_total));
        }
    }

    /// Reports the progress to the observer, and to monitors.
    pub fn show(&mut self, progress: &Progress) {
        self.observer.progress(progress);
        self.watch.show(self.observer, |state| state.set_progress(progress));
    }

    /// Reports the memory that devices gave back, gives advice if memory was short, and compares the memory with the plan. `remedies` finds the
    /// settings with which the run would need less memory.
    pub fn end_session(
        &mut self,
        planned: &PlannedStages<'_>,
        end: &SessionEnd<'_>,
        remedies: impl FnOnce() -> Vec<Remedy>,
    ) {
        say_given_back(end.usage, self.observer);
        if self.watch.wants_advice() {
            self.watch.advise(remedies(), self.observer);
        }
        planned.site().compare(end.program, end.held, "at the end", self.observer);
    }

    /// Reports the warnings of an engine and changes of the size of the steps.
    fn warn<E: StreamEngine>(&mut self, engine: &mut E) {
        engine.report_sizes(self.watch, self.observer);
        for text in engine.warnings() {
            self.observer.say(Level::Warning, &text);
        }
    }
}
