//! Memory and health of a training run in metrics.jsonl. Invariant: the lines of the stages before the first step wait until
//! the file is open, and every line has the step after which the stage ended.

use super::metrics::Metrics;
use super::opened_model::{Stepper, TrainFacts};
use crate::TrainError;
use plimsoll_runtime::health::PlannedMemory;
use plimsoll_runtime::machine::{MemoryStage, Reading};
use plimsoll_runtime::report::to_json;
use plimsoll_runtime::watch::Watch;
use plimsoll_runtime::{Observer, Trained};
use serde::Serialize;
use std::ops::{Deref, DerefMut};
use std::path::Path;
use std::time::Instant;

/// Line of metrics.jsonl of a stage.
#[derive(Serialize)]
struct StageLine {
    /// The stage, with the step by which a resumed run finds the lines that it keeps.
    #[serde(flatten)]
    stage: MemoryStage,
    /// Seconds since this process started the run.
    seconds: f64,
}

/// The watch of a training run.
pub(crate) struct TrainWatch {
    watch: Watch,
    began: Instant,
    /// Lines that wait until metrics.jsonl is open.
    waiting: Vec<StageLine>,
    /// Steps done before this process started, and when its first step began.
    first: (u64, Instant),
}

impl TrainWatch {
    /// Starts to watch a run into `folder`, and records its first stage.
    pub fn start(folder: &Path) -> Self {
        let now = Instant::now();
        let watch = Watch::start("train", Some(folder), vec![]);
        let mut watch = Self { watch, began: now, waiting: vec![], first: (0, now) };
        let start = watch.end_stage("start", None);
        watch.wait(start);
        watch
    }

    /// Records a stage of the start.
    pub fn starting(&mut self, name: &str, reading: &Reading, observer: &mut dyn Observer) {
        let stage = self.record_stage(name, None, reading.clone());
        self.wait(stage);
        self.begin(name, observer);
    }

    /// Keeps the line of a stage until metrics.jsonl is open.
    fn wait(&mut self, stage: MemoryStage) {
        let line = self.line(stage);
        self.waiting.push(line);
    }

    /// The line of metrics.jsonl of a stage.
    fn line(&self, stage: MemoryStage) -> StageLine {
        StageLine { stage, seconds: self.began.elapsed().as_secs_f64() }
    }

    /// Continues with an open model, from `step` on: writes the lines of the stages so far.
    pub fn opened(&mut self, facts: &TrainFacts, step: u64, metrics: &mut Metrics) -> Result<(), TrainError> {
        self.set_machines(facts.machines.clone());
        self.set_planned(facts.planned_memory(facts.sizes.len().saturating_sub(1)));
        self.first = (step, Instant::now());
        for mut line in std::mem::take(&mut self.waiting) {
            line.stage.step = Some(step);
            metrics.put(&to_json(&line))?;
        }
        Ok(())
    }

    /// Records the end of a stage after `step`. If memory is short, reports once which settings would need less.
    pub fn stage(
        &mut self,
        name: &str,
        step: u64,
        model: &dyn Stepper,
        metrics: &mut Metrics,
        observer: &mut dyn Observer,
    ) -> Result<(), TrainError> {
        let stage = self.end_stage(name, Some(step));
        metrics.put(&to_json(&self.line(stage)))?;
        // Planning takes seconds and memory of its own, so it is done at the beginning or at the end, not in between.
        if matches!(name, "first step" | "trained") && self.wants_advice() {
            self.advise(model.remedies(observer), observer);
        }
        Ok(())
    }

    /// Enters the loss of an evaluation in the state that is shown.
    pub fn evaluated(&mut self, loss: f64) {
        self.live_state().validation_loss = Some(loss).filter(|loss| loss.is_finite());
    }

    /// Enters the size of micro-steps, with `memory.dynamic`, and the memory that is held with it.
    pub fn resized(&mut self, tokens: u64, planned: PlannedMemory) {
        self.live_state().micro_tokens = Some(tokens);
        self.set_planned(planned);
    }

    /// Reports the progress after a step.
    pub fn trained(&mut self, trained: &Trained, observer: &mut dyn Observer) {
        let (first, began) = self.first;
        self.show(observer, |state| state.set_trained(trained, first, began.elapsed().as_secs_f64()));
    }
}

impl Deref for TrainWatch {
    type Target = Watch;

    fn deref(&self) -> &Watch {
        &self.watch
    }
}

impl DerefMut for TrainWatch {
    fn deref_mut(&mut self) -> &mut Watch {
        &mut self.watch
    }
}
