//! Writer of metrics.jsonl, which has one line for each logged step and each evaluation, and of event files with the same
//! numbers. Invariant: lines are ordered by step, and a resumed run first removes the lines of steps that it will repeat.

use super::tensorboard::EventFile;
use super::trainable::Auxiliary;
use crate::TrainError;
use plimsoll_data::atomic::AtomicFile;
use plimsoll_runtime::RuntimeError;
use serde::{Deserialize, Serialize};
use serde_json::{Number, Value};
use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, ErrorKind, Write};
use std::path::{Path, PathBuf};

/// Name of the file.
pub const FILE: &str = "metrics.jsonl";

/// Line of a training step; non-finite numbers become null.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct StepLine {
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
    /// Loss scale; only for fp16.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub loss_scale: Option<Number>,
    /// Steps skipped so far because a gradient was not finite.
    pub skipped: u64,
    /// Resident memory of the process, in bytes.
    pub memory_bytes: u64,
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

/// The field that every line has.
#[derive(Deserialize)]
struct StepMetrics {
    step: u64,
}

impl Metrics {
    /// Opens the metrics of the run in `folder` and keeps its existing lines up to `step`. `tensorboard`: writes event files
    /// for TensorBoard too.
    pub fn open(folder: &Path, step: u64, tensorboard: bool) -> Result<Self, TrainError> {
        let path = folder.join(FILE);
        keep(&path, step)?;
        let file = OpenOptions::new().append(true).open(&path).map_err(RuntimeError::io(&path))?;
        let events = tensorboard.then(|| EventFile::create(folder, step + 1)).transpose()?;
        Ok(Self { path, file, events })
    }

    /// Appends a line.
    pub fn put(&mut self, line: &impl Serialize) -> Result<(), TrainError> {
        let bug = |e: serde_json::Error| RuntimeError::bug(e.to_string());
        let mut text = serde_json::to_string(line).map_err(bug)?;
        text.push('\n');
        self.file.write_all(text.as_bytes()).map_err(RuntimeError::io(&self.path))?;
        if let Some(events) = &mut self.events
            && let Value::Object(line) = serde_json::to_value(line).map_err(bug)?
        {
            events.put(&line)?;
        }
        Ok(())
    }
}

/// Rewrites the file with its lines up to `step`. An incomplete line left by a killed process ends the copy.
fn keep(path: &Path, step: u64) -> Result<(), TrainError> {
    let mut kept = AtomicFile::create(path)?;
    let old = match File::open(path) {
        Ok(file) => Some(BufReader::new(file)),
        Err(e) if e.kind() == ErrorKind::NotFound => None,
        Err(e) => return Err(RuntimeError::io(path)(e).into()),
    };
    for line in old.into_iter().flat_map(BufRead::lines) {
        let line = line.map_err(RuntimeError::io(path))?;
        match serde_json::from_str::<StepMetrics>(&line) {
            Ok(there) if there.step <= step => writeln!(kept, "{line}").map_err(|e| kept.error(e))?,
            Ok(_) | Err(_) => break,
        }
    }
    Ok(kept.commit()?)
}
