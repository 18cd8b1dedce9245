//! What the loop needs of a model that is trained. Invariant: the loop sees neither graphs nor batches, only counts,
//! losses and tensors by name; so everything that a run goes on from is in a checkpoint.

use super::config::OptimizerKind;
use crate::TrainError;
use data::weights::DType;
use graph::Bytes;
use serde::Serialize;
use serde_json::Value;
use std::ops::Range;

/// A model with its data, as it is trained.
pub trait Trainable {
    /// Takes the next micro-batch; `None` where an epoch ends: the next call begins another.
    fn take(&mut self) -> Result<Option<Taken>, TrainError>;

    /// Says what the optimizer is told in the step that begins: where one micro-step is a whole step, it moves the
    /// weights.
    fn prepare(&mut self, hyper: &[f32]);

    /// Forward and backward of the micro-batch that was taken last. Its gradients begin a group, or join it with `keep`.
    /// They are those of `loss_scale` times the cross-entropy summed over targets.
    fn micro_step(&mut self, keep: bool, loss_scale: f32) -> Result<Found, TrainError>;

    /// Moves the weights by the group's gradients times `unscale`, unless these are not numbers.
    fn apply(&mut self, hyper: &[f32], unscale: f32) -> Result<Applied, TrainError>;

    /// The loss of the next micro-batch to evaluate on; `None` at their end: the next call begins again.
    fn evaluate(&mut self) -> Result<Option<Evaluated>, TrainError>;

    /// Begins the evaluation data again.
    fn rewind(&mut self) -> Result<(), TrainError>;

    /// The place in the training data behind the batch that was taken last.
    fn position(&self) -> Result<Value, TrainError>;

    /// Goes on from such a place.
    fn seek(&mut self, position: &Value) -> Result<(), TrainError>;

    /// The optimizer that was planned.
    fn optimizer(&self) -> OptimizerKind;

    /// What the planner decided where the configuration said `auto`: keys of the configuration, with points, and values.
    fn choices(&self) -> Vec<(String, Value)>;

    /// The number of parameters, where it is known.
    fn parameters(&self) -> Option<u64> {
        None
    }

    /// The plan, for the run record.
    fn plan(&self) -> Result<Value, TrainError>;

    /// The most memory that the process takes: its plans, what is reserved for it, and its data.
    fn peak(&self) -> Bytes;

    /// The tensors of a file of the checkpoint, in the order in which they are written. Those of the model have the
    /// hub's names and shapes; the state has what else the next step depends on: masters, moments, running statistics.
    fn tensors(&self, part: Part) -> Vec<Stored>;

    /// The name of a file of the checkpoint.
    fn file(&self, part: Part) -> &'static str {
        part.file()
    }

    /// Bytes of the elements of a tensor, little-endian.
    fn read(
        &mut self,
        part: Part,
        tensor: usize,
        elements: Range<u64>,
        out: &mut Vec<u8>,
    ) -> Result<(), TrainError>;

    /// The opposite: `bytes` hold the elements from `start` on.
    fn write(&mut self, part: Part, tensor: usize, start: u64, bytes: &[u8]) -> Result<(), TrainError>;

    /// Small files that belong beside the model, by name: config.json, a tokenizer.
    fn beside(&self) -> Result<Vec<(String, Vec<u8>)>, TrainError>;
}

/// A micro-batch that was taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Taken {
    /// Its tokens.
    pub tokens: u64,
    /// Its targets.
    pub targets: u64,
}

/// What a micro-step found.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Found {
    /// The cross-entropy, summed over targets.
    pub loss: f64,
    /// Auxiliary losses.
    pub auxiliary: Auxiliary,
    /// Rows that experts dropped.
    pub dropped: u64,
}

/// Auxiliary losses, each with its weight, means over targets (z) or tokens (of routers); `None` where the model has
/// none. They are minimized with the cross-entropy and reported apart from it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Auxiliary {
    /// The z-loss of the output's logits.
    #[serde(rename = "z_loss", skip_serializing_if = "Option::is_none")]
    pub z: Option<f64>,
    /// The loss that keeps experts evenly used.
    #[serde(rename = "balance_loss", skip_serializing_if = "Option::is_none")]
    pub balance: Option<f64>,
    /// The z-loss of the routers' logits.
    #[serde(rename = "router_z_loss", skip_serializing_if = "Option::is_none")]
    pub router_z: Option<f64>,
}

impl Auxiliary {
    /// Adds `other` times `weight`.
    pub fn add(&mut self, other: &Self, weight: f64) {
        let sum = |a: &mut Option<f64>, b: Option<f64>| {
            if let Some(b) = b {
                *a = Some(a.unwrap_or(0.0) + weight * b);
            }
        };
        sum(&mut self.z, other.z);
        sum(&mut self.balance, other.balance);
        sum(&mut self.router_z, other.router_z);
    }
}

/// How an update went.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Applied {
    /// The norm of all gradients.
    pub norm: f64,
    /// Whether the weights moved: every gradient was finite. Where updates follow their gradients one by one
    /// (one micro-batch a step and no clip), those before the first that is not finite have moved their weights.
    pub ok: bool,
}

/// What an evaluation step found.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Evaluated {
    /// The cross-entropy, summed over targets.
    pub loss: f64,
    /// The targets.
    pub targets: u64,
}

/// A file of tensors in a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// The weights, as others read them.
    Model,
    /// What else the next step depends on.
    State,
}

impl Part {
    /// Both.
    pub const ALL: [Part; 2] = [Part::Model, Part::State];

    /// The usual name of its file.
    pub fn file(self) -> &'static str {
        match self {
            Self::Model => "model.safetensors",
            Self::State => "state.safetensors",
        }
    }
}

/// A tensor of a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stored {
    /// Its name, unique in its file.
    pub name: String,
    /// Its element type.
    pub dtype: DType,
    /// Its shape.
    pub shape: Vec<u64>,
}

impl Stored {
    /// How many elements it has.
    pub fn elements(&self) -> u64 {
        self.shape.iter().product()
    }
}
