//! metrics.jsonl: a line for each logged step and each evaluation. Invariant: lines are in the order of their steps, and
//! none is of a step that a run which goes on will do again.

use super::trainable::Auxiliary;
use crate::TrainError;
use data::atomic::AtomicFile;
use runtime::RuntimeError;
use serde::{Deserialize, Serialize};
use serde_json::Number;
use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, ErrorKind, Write};
use std::path::{Path, PathBuf};

/// The file's name.
pub const FILE: &str = "metrics.jsonl";

/// A step that was trained. What is no number is null.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct StepLine {
    /// Which, from 1.
    pub step: u64,
    /// Cross-entropy of a target, in nats.
    pub loss: Option<Number>,
    /// Auxiliary losses, a column each: means over micro-steps, weighted by their targets. What is not finite is null.
    #[serde(flatten)]
    pub auxiliary: Auxiliary,
    /// The learning rate.
    pub lr: Option<Number>,
    /// The norm of all gradients.
    pub grad_norm: Option<Number>,
    /// Tokens trained on so far.
    pub tokens: u64,
    /// The epoch it began in, from 0.
    pub epoch: u64,
    /// Micro-steps of the step.
    pub micro_steps: u64,
    /// Since the line before.
    pub tokens_per_second: Option<Number>,
    /// Since this process began the run.
    pub seconds: Option<Number>,
    /// Rows that experts dropped.
    #[serde(skip_serializing_if = "is_zero")]
    pub dropped: u64,
    /// Of fp16.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub loss_scale: Option<Number>,
    /// Steps skipped so far, because a gradient was not finite.
    pub skipped: u64,
    /// Resident memory of the process.
    pub memory_bytes: u64,
}

/// An evaluation.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct EvaluationLine {
    /// After which step.
    pub step: u64,
    /// Cross-entropy of a target, in nats.
    pub validation_loss: Option<Number>,
    /// Targets.
    pub validation_targets: u64,
    /// Whether it is the lowest so far.
    pub best: bool,
}

fn is_zero(n: &u64) -> bool {
    *n == 0
}

/// What JSON has for a float: nothing for those that are no numbers.
pub fn number(x: f64) -> Option<Number> {
    Number::from_f64(x)
}

/// The file.
#[derive(Debug)]
pub struct Metrics {
    path: PathBuf,
    file: File,
}

/// What every line begins with.
#[derive(Deserialize)]
struct Step {
    step: u64,
}

impl Metrics {
    /// Of the run in `folder`, with the lines up to `step` that are there.
    pub fn open(folder: &Path, step: u64) -> Result<Self, TrainError> {
        let path = folder.join(FILE);
        keep(&path, step)?;
        let file = OpenOptions::new().append(true).open(&path).map_err(RuntimeError::io(&path))?;
        Ok(Self { path, file })
    }

    /// Appends a line.
    pub fn put(&mut self, line: &impl Serialize) -> Result<(), TrainError> {
        let mut text = serde_json::to_string(line).map_err(|e| RuntimeError::bug(e.to_string()))?;
        text.push('\n');
        Ok(self.file.write_all(text.as_bytes()).map_err(RuntimeError::io(&self.path))?)
    }
}

/// Writes the file anew with the lines up to `step`; half a line, which a kill leaves, is none.
fn keep(path: &Path, step: u64) -> Result<(), TrainError> {
    let mut kept = AtomicFile::create(path)?;
    let old = match File::open(path) {
        Ok(file) => Some(BufReader::new(file)),
        Err(e) if e.kind() == ErrorKind::NotFound => None,
        Err(e) => return Err(RuntimeError::io(path)(e).into()),
    };
    for line in old.into_iter().flat_map(BufRead::lines) {
        let line = line.map_err(RuntimeError::io(path))?;
        match serde_json::from_str::<Step>(&line) {
            Ok(there) if there.step <= step => writeln!(kept, "{line}").map_err(|e| kept.error(e))?,
            Ok(_) | Err(_) => break,
        }
    }
    Ok(kept.commit()?)
}
