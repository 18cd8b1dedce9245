//! Writer of metrics.jsonl (`plimsoll_runtime::metrics` reads it), which has one line for each logged step, each
//! evaluation, each change of the size of micro-steps and the memory at the end of each stage, and of event files with
//! the numbers of steps and evaluations. Invariant: a resumed run first removes the lines of steps that it will repeat.

use super::dynamic::{MicroStepSizeChange, SizeReplay};
use super::opened_model::{Auxiliary, ExpertRows};
use super::tensorboard::EventFile;
use crate::TrainError;
use plimsoll_data::atomic::AtomicFile;
use plimsoll_runtime::RuntimeError;
use plimsoll_runtime::health::Health;
use plimsoll_runtime::machine::Reading;
use plimsoll_runtime::metrics::{FILE, MetricsReader, NewLines};
use serde::Serialize;
use serde_json::{Map, Number, Value};
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};

/// Line of a training step; non-finite numbers become null.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct StepLine<'a> {
    /// Optimizer step, counted from 1.
    pub step: u64,
    /// Mean cross-entropy per target, in nats.
    pub loss: Option<Number>,
    /// Auxiliary losses, one column each: means over micro-steps, weighted by their targets. Non-finite values become
    /// null.
    #[serde(flatten)]
    pub auxiliary: Auxiliary,
    /// Learning rate.
    pub lr: Option<Number>,
    /// Norm of all gradients.
    pub grad_norm: Option<Number>,
    /// Tokens trained on so far.
    pub tokens: u64,
    /// Epoch in which the step began, from 0.
    pub epoch: u64,
    /// Number of micro-steps of the step.
    pub micro_steps: u64,
    /// Tokens per second since the previous line.
    pub tokens_per_second: Option<Number>,
    /// Seconds spent waiting for training data since the previous line. On a GPU the previous step runs meanwhile.
    pub data_wait_seconds: Option<Number>,
    /// Seconds since this process started or resumed the run.
    pub seconds: Option<Number>,
    /// Rows dropped because an expert's capacity was exceeded.
    #[serde(skip_serializing_if = "is_zero")]
    pub dropped: u64,
    /// Share of the rows that each expert of each layer received.
    #[serde(skip_serializing_if = "ExpertRows::is_empty")]
    pub expert_load: ExpertRows<'a>,
    /// Loss scale; only for fp16.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub loss_scale: Option<Number>,
    /// Steps skipped so far because a gradient was not finite.
    pub skipped: u64,
    /// Resident memory of the process, in bytes.
    pub memory_bytes: u64,
    /// Host memory that all processes use, in bytes.
    pub host_used_bytes: u64,
    /// Memory of the GPU that this process uses, in bytes; only on a GPU.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub card_bytes: Option<u64>,
    /// Memory of the GPU that all processes use, in bytes; only on a GPU.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub card_used_bytes: Option<u64>,
    /// How close the run is to its limits: `ok`, `tight` or `critical`.
    pub status: &'static str,
    /// Measured memory divided by the budget.
    pub utilisation: Option<Number>,
    /// Risk, from 0 to 1, that memory runs out.
    pub oom_risk: Option<Number>,
}

impl StepLine<'_> {
    /// Returns the line with the memory and the health of a run.
    pub fn with_memory(self, reading: &Reading, health: Health) -> Self {
        Self {
            memory_bytes: reading.process.0,
            host_used_bytes: reading.host.used().0,
            card_bytes: reading.card.map(|card| card.process.0),
            card_used_bytes: reading.card.map(|card| card.all.used().0),
            status: health.status.word(),
            utilisation: number(health.utilisation),
            oom_risk: number(health.oom_risk),
            ..self
        }
    }
}

/// Line of an evaluation.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct EvaluationLine {
    /// Step after which the evaluation ran.
    pub step: u64,
    /// Mean cross-entropy per target, in nats.
    pub validation_loss: Option<Number>,
    /// Number of targets evaluated.
    pub validation_targets: u64,
    /// Whether the loss is the lowest so far.
    pub best: bool,
}

/// Line of a change of the size of micro-steps (`memory.dynamic`).
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct SizeLine {
    /// [`SIZE_EVENT`].
    pub event: &'static str,
    /// First step with the new size.
    pub step: u64,
    /// Tokens of a micro-step before.
    pub from: u64,
    /// Tokens of a micro-step from this step on.
    pub to: u64,
    /// Cause of the change.
    pub reason: &'static str,
    /// Share of the memory that all processes used, if it was read.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub utilisation: Option<Number>,
}

/// Value of `event` of a [`SizeLine`].
pub const SIZE_EVENT: &str = "dynamic_batch";

fn is_zero(n: &u64) -> bool {
    *n == 0
}

/// Converts a float to a JSON number; `None` if it is not finite.
pub fn number(x: f64) -> Option<Number> {
    Number::from_f64(x)
}

/// The open file, and the event file with the same numbers if TensorBoard is wanted.
#[derive(Debug)]
pub struct Metrics {
    path: PathBuf,
    file: File,
    events: Option<EventFile>,
}

/// Reads the changes of size after `step`, and the last step, from the metrics of the run in `folder`. A run that resumes at
/// `step` repeats them.
pub fn changes_after(folder: &Path, step: u64) -> Result<SizeReplay, TrainError> {
    let mut replay = SizeReplay { until: step, ..SizeReplay::default() };
    let mut reader = MetricsReader::new(folder);
    let Some(mut lines) = reader.open()? else { return Ok(replay) };
    while let Some(line) = lines.next_line()? {
        let found = step_of(&line, &lines)?;
        if found <= step {
            continue;
        }
        replay.until = replay.until.max(found);
        let change = line.get("event").is_some_and(|event| event == SIZE_EVENT);
        if let Some(tokens) = line.get("to").and_then(Value::as_u64).filter(|_| change) {
            replay.changes.push_back(MicroStepSizeChange { step: found, tokens });
        }
    }
    Ok(replay)
}

/// The step of a line that a run wrote.
fn step_of(line: &Map<String, Value>, lines: &NewLines) -> Result<u64, TrainError> {
    let step = line.get("step").and_then(Value::as_u64);
    Ok(step.ok_or_else(|| {
        lines.malformed("no `step`, by which a resumed run finds the lines to keep".to_owned())
    })?)
}

impl Metrics {
    /// Opens the metrics of the run in `folder` and keeps its existing lines up to `step`. `tensorboard`: writes event files
    /// for TensorBoard too.
    pub fn open(folder: &Path, step: u64, tensorboard: bool) -> Result<Self, TrainError> {
        let path = folder.join(FILE);
        keep(folder, &path, step)?;
        let file = OpenOptions::new().append(true).open(&path).map_err(RuntimeError::io(&path))?;
        let events = tensorboard.then(|| EventFile::create(folder, step + 1)).transpose()?;
        Ok(Self { path, file, events })
    }

    /// Appends a line.
    pub fn put(&mut self, line: &impl Serialize) -> Result<(), TrainError> {
        let mut text = serde_json::to_string(line).map_err(json_bug)?;
        text.push('\n');
        self.file.write_all(text.as_bytes()).map_err(RuntimeError::io(&self.path))?;
        if let Some(events) = &mut self.events
            && let Value::Object(line) = serde_json::to_value(line).map_err(json_bug)?
            // Lines of stages and events are no values of a step, so TensorBoard does not get them.
            && !line.contains_key("stage")
            && !line.contains_key("event")
        {
            events.put(&line)?;
        }
        Ok(())
    }
}

/// The error of a line that cannot be written as JSON, which no line can be.
fn json_bug(error: serde_json::Error) -> RuntimeError {
    RuntimeError::bug(error.to_string())
}

/// Rewrites the file with its lines up to `step`. An incomplete line left by a killed process is removed.
fn keep(folder: &Path, path: &Path, step: u64) -> Result<(), TrainError> {
    let mut file = AtomicFile::create(path)?;
    let mut reader = MetricsReader::new(folder);
    if let Some(mut lines) = reader.open()? {
        while let Some(line) = lines.next_line()? {
            // A line of an earlier step can come after one of a later step: a change of the size of micro-steps during an
            // evaluation has the number of the next step, and lines of the evaluated step follow it.
            if step_of(&line, &lines)? <= step {
                file.write_all(lines.text()).map_err(|e| file.error(e))?;
            }
        }
    }
    Ok(file.commit()?)
}
