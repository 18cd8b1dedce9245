//! The interface between the training loop and a model that is open for training: the [`TrainFacts`] of the run, its
//! [`Batches`], a [`Stepper`] for the device, and the [`Tensors`] of its checkpoints. Invariant: the loop sees neither graphs
//! nor addresses, only counts, losses and named tensors, so everything that a resumed run needs is in a checkpoint.

use super::config::OptimizerKind;
use super::engine::RunPlanReport;
use super::feed::DataSummary;
use crate::TrainError;
use plimsoll_data::weights::FileDType;
use plimsoll_exec::memory::Memory;
use plimsoll_graph::Bytes;
use plimsoll_plan::Remedy;
use plimsoll_runtime::health::PlannedMemory;
use plimsoll_runtime::machine::holders;
use plimsoll_runtime::session::{ExpertLayer, TrainingBatch};
use plimsoll_runtime::timeline::MeasuredTimeline;
use plimsoll_runtime::{Machine, Observer, RuntimeError};
use serde::{Serialize, Serializer};
use serde_json::Value;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

/// A model that is open for training, with its data at the beginning.
pub struct OpenedModel {
    /// Facts that do not change during the run.
    pub facts: TrainFacts,
    /// Training and validation data.
    pub batches: Box<dyn Batches>,
    /// The model on its device.
    pub stepper: Box<dyn Stepper>,
}

/// Facts of a training run that are known when its model is open and do not change until its end.
#[derive(Clone, Debug)]
pub struct TrainFacts {
    /// The optimizer that was planned.
    pub optimizer: OptimizerKind,
    /// Values that the planner chose for keys set to `auto`, with dotted keys.
    pub choices: Vec<(String, Value)>,
    /// Number of parameters, if known.
    pub parameters: Option<u64>,
    /// Number of parameters that are trained, if known.
    pub trained_parameters: Option<u64>,
    /// Sizes of the data, if known.
    pub data: Option<DataSummary>,
    /// Number of steps of the run, if the epochs were counted before the first step.
    pub counted_steps: Option<u64>,
    /// The plan, for run.json; `None` for a model without a plan.
    pub plan: Option<RunPlanReport>,
    /// The device that computes, with its name.
    pub device: String,
    /// The machine that computes; empty if it has no memory but the host's.
    pub machines: Vec<Arc<dyn Machine>>,
    /// Whether the plans are in host memory.
    pub on_host: bool,
    /// Whether a step runs while the host continues. The loop then reads its result after the next step was started, so that
    /// the device does not wait for the host.
    pub is_asynchronous: bool,
    /// Memory budget in bytes: of the process on the CPU, of the GPU's memory on a GPU.
    pub budget: Bytes,
    /// Planned peak memory in bytes that counts against the budget: plans and reserved memory, and on the CPU also the data.
    pub peak: Bytes,
    /// Share of the planned memory that is lost to packing.
    pub fragmentation: f64,
    /// The largest tensors of the plan with their sizes, for an error.
    pub largest_tensors: String,
    /// Sizes of micro-steps between which the run may change, in ascending order; a single one without `memory.dynamic`. A run
    /// begins with the largest.
    pub sizes: Vec<MicroStepSize>,
}

impl TrainFacts {
    /// The planned memory while micro-steps have size number `size` of [`TrainFacts::sizes`].
    pub fn planned_memory(&self, size: usize) -> PlannedMemory {
        let largest = self.sizes.last().map_or(Bytes::ZERO, |size| size.bytes);
        let held = self.sizes.get(size).map_or(largest, |size| size.bytes);
        PlannedMemory {
            budget: self.budget,
            // What smaller micro-steps have given back is not taken again unless there is room.
            peak: self.peak.saturating_sub(largest.saturating_sub(held)),
            held,
            fragmentation: self.fragmentation,
        }
    }

    /// Reads the free and total memory of the device, counting all processes.
    pub fn usage(&self) -> Result<Memory, TrainError> {
        let machine = self
            .machines
            .first()
            .ok_or_else(|| RuntimeError::bug("a run without a machine has no memory that it can follow"))?;
        Ok(machine.usage().map_err(RuntimeError::from)?)
    }

    /// The largest tensors of the plan, and the other processes that hold memory of the device at present.
    pub fn memory_report(&self) -> MemoryReport {
        let holders = self.machines.first().map_or_else(String::new, |machine| holders(machine, self.on_host));
        MemoryReport { largest: self.largest_tensors.clone(), holders }
    }
}

/// Training and validation data of a run, in micro-batches of whole packs.
pub trait Batches {
    /// Takes the next micro-batch of the training data, of at most `max_packs` packs and at most the packs of the largest
    /// micro-step; `None` at the end of an epoch, after which the next call begins another epoch.
    fn take(&mut self, max_packs: u64) -> Result<Option<MicroBatch<'_>>, TrainError>;

    /// Takes the next batch of the validation data, up to the pack with target number `max_targets`; `None` at the end of the
    /// validation data.
    fn take_validation(&mut self, max_targets: u64) -> Result<Option<MicroBatch<'_>>, TrainError>;

    /// Restarts the validation data from its beginning.
    fn rewind(&mut self) -> Result<(), TrainError>;

    /// Returns the position in the training data after the micro-batch taken last.
    fn position(&self) -> Result<Value, TrainError>;

    /// Continues the training data at a position returned by [`Batches::position`].
    fn seek(&mut self, position: &Value) -> Result<(), TrainError>;
}

/// A micro-batch that was taken from the data.
#[derive(Clone, Copy, Debug)]
pub struct MicroBatch<'a> {
    /// Its size.
    pub taken: Taken,
    /// Inputs of the plan that computes it.
    pub inputs: TrainingBatch<'a>,
}

/// A model on its device: runs micro-steps, updates and evaluations. A step is one or more micro-steps and an update; their
/// results are read in the order in which they were started.
pub trait Stepper: Tensors {
    /// Starts the forward and backward pass of a micro-batch. Its gradients are those of the loss scale times the
    /// cross-entropy summed over targets.
    fn micro_step(&mut self, batch: &MicroBatch<'_>, scalars: MicroStepScalars<'_>) -> Result<(), TrainError>;

    /// Runs a micro-step as the first of a step, with a loss scale of 1, waits for it, and returns the times of its
    /// instructions, in their order; empty if the model has no plans.
    fn timed_micro_step(&mut self, _: &MicroBatch<'_>, _: &[f32]) -> Result<Vec<InstructionTime>, TrainError> {
        Ok(vec![])
    }

    /// Runs a micro-step as [`Stepper::timed_micro_step`] does, and returns the timeline of the run's plans with the times of
    /// its instructions and the memory while it ran; `None` if the model has no plans.
    fn measured_timeline(
        &mut self,
        _: &MicroBatch<'_>,
        _: &[f32],
    ) -> Result<Option<MeasuredTimeline>, TrainError> {
        Ok(None)
    }

    /// Starts the update of the weights with the accumulated gradients times `unscale`, which is skipped if a gradient is not
    /// finite.
    fn apply(&mut self, hyper: &[f32], unscale: f32) -> Result<(), TrainError>;

    /// Waits for the oldest unfinished step. Calls `found` with the result of each of its `micro_steps` micro-steps, and
    /// returns the result of its update.
    fn finish_step(
        &mut self,
        micro_steps: u64,
        found: &mut dyn FnMut(MicroStepResult),
    ) -> Result<Applied, TrainError>;

    /// Returns the rows that the experts received in the step that was finished last; empty without experts.
    fn expert_rows(&self) -> ExpertRows<'_> {
        ExpertRows::default()
    }

    /// Waits for micro-steps that were started, and drops their results: the step is repeated, or the run ends.
    fn abandon(&mut self);

    /// Whether a failed [`Stepper::apply`] may have changed weights or states, so that it cannot be repeated.
    fn has_begun_update(&self) -> bool;

    /// Computes the cross-entropy of a batch of the validation data, summed over targets.
    fn evaluate(&mut self, batch: &MicroBatch<'_>) -> Result<f64, TrainError>;

    /// Changes the following micro-steps to size number `size` of [`TrainFacts::sizes`], and gives back the memory that only
    /// larger sizes use, or takes it again. All results must have been read. If there is no memory for a larger size, the error
    /// says so ([`TrainError::is_out_of_memory`]) and the size does not change.
    fn set_size(&mut self, size: usize) -> Result<(), TrainError>;

    /// Returns settings with which the plan needs at least a tenth less memory, each priced by the planner against the
    /// plan of this run, the fastest first.
    fn remedies(&self, observer: &dyn Observer) -> Vec<Remedy>;
}

/// Scalar inputs of a micro-step.
#[derive(Clone, Copy, Debug)]
pub struct MicroStepScalars<'a> {
    /// Whether its gradients are added to those of the earlier micro-steps of the step; otherwise they replace them.
    pub keep: bool,
    /// Factor of the cross-entropy.
    pub loss_scale: f32,
    /// Hyperparameters of the step, because a step of a single micro-batch updates the weights during its micro-step.
    pub hyper: &'a [f32],
}

/// The tensors of a model that checkpoints hold.
pub trait Tensors {
    /// Returns the tensors of a checkpoint file in the order in which they are written. Model tensors have the names
    /// and shapes of the Hugging Face Hub; the state has everything else that the next step depends on: master weights,
    /// moments, running statistics. Without averaged weights, [`StatePart::Average`] is empty and has no
    /// file.
    fn tensors(&self, part: StatePart) -> Vec<StoredTensor>;

    /// Returns the file name of a part of the checkpoint.
    fn file(&self, part: StatePart) -> &'static str {
        part.file()
    }

    /// Reads a range of elements of tensor number `tensor` into `out`, as little-endian bytes.
    fn read(
        &mut self,
        part: StatePart,
        tensor: usize,
        elements: Range<u64>,
        out: &mut Vec<u8>,
    ) -> Result<(), TrainError>;

    /// Writes `bytes` to tensor number `tensor`, beginning at element `start`.
    fn write(&mut self, part: StatePart, tensor: usize, start: u64, bytes: &[u8]) -> Result<(), TrainError>;

    /// Returns names and contents of small files stored next to the model: config.json, tokenizer files.
    fn extra_files(&self) -> Result<Vec<(String, Vec<u8>)>, TrainError>;
}

/// Size of a micro-batch that was taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Taken {
    /// Number of tokens.
    pub tokens: u64,
    /// Number of targets.
    pub targets: u64,
    /// Number of packs of the data.
    pub packs: u64,
}

/// A size of micro-steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MicroStepSize {
    /// Maximum number of tokens.
    pub tokens: u64,
    /// Bytes of the device's memory that are in use with this size.
    pub bytes: Bytes,
}

/// Holders of the memory of a device: tensors and processes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MemoryReport {
    /// The largest tensors of the plan, with their sizes.
    pub largest: String,
    /// Other processes, with their sizes; or how much all others hold together, if the processes are unknown.
    pub holders: String,
}

/// Measured time of an instruction of a micro-step.
#[derive(Clone, Debug)]
pub struct InstructionTime {
    /// Name of the op and shape of its first output, or what is transferred.
    pub instruction: String,
    /// Name of the kernel, as in target files; empty for a transfer.
    pub kernel: &'static str,
    /// Seconds that the plan expects.
    pub expected: f64,
    /// Time that was measured.
    pub measured: Duration,
}

/// Result of a training micro-step.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct MicroStepResult {
    /// Number of targets.
    pub targets: u64,
    /// Cross-entropy, summed over targets.
    pub loss: f64,
    /// Auxiliary losses.
    pub auxiliary: Auxiliary,
    /// Rows dropped because an expert's capacity was exceeded.
    pub dropped: u64,
}

/// Rows that the experts of all layers received in a step. A token has one row for each expert that it was routed to.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ExpertRows<'a> {
    /// Layers with experts.
    pub layers: &'a [ExpertLayer],
    /// Number of rows of each expert, layer by layer.
    pub rows: &'a [u64],
}

impl ExpertRows<'_> {
    /// Whether the model has no experts.
    pub fn is_empty(&self) -> bool {
        self.layers.is_empty()
    }
}

/// Written as an object with an array for each layer: the share of its rows that each expert received, with six decimals.
impl Serialize for ExpertRows<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut rest = self.rows;
        serializer.collect_map(self.layers.iter().map(|layer| {
            let (rows, after) = rest.split_at(layer.experts.min(rest.len()));
            rest = after;
            (layer.layer, Shares(rows))
        }))
    }
}

/// Numbers of which the shares are written.
struct Shares<'a>(&'a [u64]);

impl Serialize for Shares<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let all = self.0.iter().sum::<u64>().max(1) as f64;
        serializer.collect_seq(self.0.iter().map(|&rows| (rows as f64 / all * 1e6).round() / 1e6))
    }
}

/// Auxiliary losses, each multiplied by its weight, as means over targets; those of routers are means over the tokens of a
/// pack, and these are means over packs, weighted by their targets;
/// `None` if the model does not have the loss. They are minimised together with the cross-entropy and reported separately.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Auxiliary {
    /// z-loss of the output logits.
    #[serde(rename = "z_loss", skip_serializing_if = "Option::is_none")]
    pub z: Option<f64>,
    /// Divergence from the teachers, times its weight and the square of the temperature.
    #[serde(rename = "distillation_loss", skip_serializing_if = "Option::is_none")]
    pub distillation: Option<f64>,
    /// Load-balancing loss of the experts.
    #[serde(rename = "balance_loss", skip_serializing_if = "Option::is_none")]
    pub balance: Option<f64>,
    /// z-loss of the router logits.
    #[serde(rename = "router_z_loss", skip_serializing_if = "Option::is_none")]
    pub router_z: Option<f64>,
}

impl Auxiliary {
    /// Adds `other` multiplied by `weight`.
    pub fn add(&mut self, other: &Self, weight: f64) {
        add_weighted(&mut self.z, other.z, weight);
        add_weighted(&mut self.distillation, other.distillation, weight);
        add_weighted(&mut self.balance, other.balance, weight);
        add_weighted(&mut self.router_z, other.router_z, weight);
    }
}

fn add_weighted(sum: &mut Option<f64>, value: Option<f64>, weight: f64) {
    if let Some(value) = value {
        *sum = Some(sum.unwrap_or(0.0) + weight * value);
    }
}

/// Result of an optimizer update.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Applied {
    /// Norm of all gradients; NaN if it was not computed.
    pub norm: f64,
    /// Whether the update was applied, that is whether every gradient was finite. If each update is applied as soon as
    /// its gradient is computed (one micro-batch per step and no gradient clipping), the weights updated before the
    /// first non-finite gradient have changed nevertheless.
    pub ok: bool,
}

/// The tensor files of a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StatePart {
    /// The weights, in a file that other programs can read.
    Model,
    /// All other tensors that the next step depends on.
    State,
    /// The model with averaged weights, if the run averages weights (`optimizer.ema`).
    Average,
}

/// Folder of the model with averaged weights inside a checkpoint.
pub const AVERAGE: &str = "ema";

impl StatePart {
    /// All parts.
    pub const ALL: [StatePart; 3] = [StatePart::Model, StatePart::State, StatePart::Average];

    /// Default name of the file.
    pub fn file(self) -> &'static str {
        match self {
            Self::Model => "model.safetensors",
            Self::State => "state.safetensors",
            Self::Average => "ema/model.safetensors",
        }
    }
}

/// Name, element type and shape of a tensor of a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredTensor {
    /// Name, unique within its file.
    pub name: String,
    /// Element type.
    pub dtype: FileDType,
    /// Shape.
    pub shape: Vec<u64>,
}

impl StoredTensor {
    /// Returns the number of elements.
    pub fn elements(&self) -> u64 {
        self.shape.iter().product()
    }
}
