//! The sections `memory`, `batch` and `run` of the configuration: the memory budget, the step size, and the length and
//! outputs of a run. Invariant: plain data; keys that cannot change a result are marked in the schema (`changes`) and
//! may differ on resume.

use super::Auto;
use crate::TrainError;
use plimsoll_graph::{Bytes, Space};
use plimsoll_plan::{Kernels, Reserved, Target};
use plimsoll_runtime::dynamic::{self, Thresholds};
use plimsoll_runtime::{Device, Settings, machine};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::time::Duration;

/// The memory budget, and what may be recomputed to stay within it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct MemorySection {
    /// Memory budget of the run: a size such as 22GiB or 500MB, a number of bytes in quotes, a share of the free memory
    /// (default 80%), or the smallest of several, such as 20GB and 90%. A run that needs more is refused.
    #[schemars(extend("changes" = "machine"))]
    pub budget: String,
    /// Rematerialisation: activations that are recomputed in the backward pass instead of being stored. auto
    /// (default), none, full, every_n, selective, or a list of ops such as [layer_norm, gelu]; `plimsoll plan
    /// --train` lists the recomputed ops of a plan. Results have the same bits.
    #[schemars(extend("changes" = "machine"))]
    pub remat: Remat,
    /// First and last layer, counted from 0, whose activations memory.remat recomputes; null (default) is all
    /// layers. Only with memory.remat full, every_n, selective or a list of ops.
    #[schemars(extend("changes" = "machine"))]
    pub remat_layers: Option<[u64; 2]>,
    /// With memory.remat every_n, the number of layers from one stored layer input to the next (default 2).
    #[schemars(range(min = 1, max = 1024), extend("changes" = "machine"))]
    pub remat_every: u64,
    /// Number of rows of logits that are in memory at a time; auto (default) is 64, 256 or 1024, by the sizes of the model and
    /// of a micro-step and the kind of device.
    #[schemars(extend("minimum" = 1, "maximum" = 2147483647, "changes" = "rounding"))]
    pub loss_chunk: Auto<u64>,
    /// What is kept outside the memory of the device between its uses: none (default), auto, which is the fastest choice
    /// that fits the budget, or a list of optimizer (moments and averages), masters (f32 copies of 16-bit parameters),
    /// gradients (sums over the micro-steps of a step), parameters and activations (from the forward to the backward pass;
    /// with memory.remat auto those that are better offloaded than kept or recomputed). Copies run while kernels compute.
    /// Results have the same bits.
    #[schemars(extend("changes" = "machine"))]
    pub offload: Offload,
    /// Where memory.offload keeps it: host (default), pinned host memory beside a GPU, or disk, a scratch file in the output
    /// folder. On a CPU only disk.
    #[schemars(extend("changes" = "machine"))]
    pub offload_to: OffloadTo,
    /// Micro-steps whose size follows the free memory; null (default) is one size for the whole run.
    pub dynamic: Option<DynamicSection>,
}

/// What is kept outside the memory of the device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(untagged)]
pub enum Offload {
    /// A policy by name.
    Policy(OffloadPolicy),
    /// The listed kinds.
    Parts(#[schemars(length(min = 1))] Vec<OffloadPart>),
}

/// Policies of what is kept outside the memory of the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum OffloadPolicy {
    /// Nothing.
    None,
    /// The fastest choice that fits the budget.
    Auto,
}

/// A kind of values that can be kept outside the memory of the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum OffloadPart {
    /// Moments of the optimizer, and averages of the weights.
    Optimizer,
    /// f32 copies of 16-bit parameters.
    Masters,
    /// Gradients, from one micro-step to the next and to the update.
    Gradients,
    /// Parameters.
    Parameters,
    /// Activations, from the forward to the backward pass.
    Activations,
}

/// The memory that takes what is kept outside that of the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum OffloadTo {
    /// Pinned host memory.
    Host,
    /// A scratch file.
    Disk,
}

impl MemorySection {
    /// The choices of [`MemorySection::offload`], in the order in which they take more from the device: one that is given, or all
    /// of `auto`.
    pub fn offloads(&self) -> Vec<plimsoll_plan::Offload> {
        use OffloadPart::{Activations, Gradients, Masters, Optimizer, Parameters};
        match &self.offload {
            Offload::Policy(OffloadPolicy::None) => vec![plimsoll_plan::Offload::default()],
            Offload::Parts(parts) => vec![self.offload_of(parts)],
            Offload::Policy(OffloadPolicy::Auto) => {
                // Activations first: the search offloads them only where that is faster than to recompute them.
                let all = [Activations, Optimizer, Masters, Gradients, Parameters];
                (0..=all.len()).map(|n| self.offload_of(&all[..n])).collect()
            }
        }
    }

    fn offload_of(&self, parts: &[OffloadPart]) -> plimsoll_plan::Offload {
        let to = match self.offload_to {
            OffloadTo::Host => Space::Host,
            OffloadTo::Disk => Space::File,
        };
        plimsoll_plan::Offload {
            optimizer: parts.contains(&OffloadPart::Optimizer),
            masters: parts.contains(&OffloadPart::Masters),
            gradients: parts.contains(&OffloadPart::Gradients),
            parameters: parts.contains(&OffloadPart::Parameters),
            activations: parts.contains(&OffloadPart::Activations),
            to,
        }
    }
}

/// Micro-steps whose size follows the free memory.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct DynamicSection {
    /// Shares of the memory at which the size changes: aggressive (target 0.92, warning 0.94, critical 0.96, emergency
    /// 0.98), balanced (default; 0.90, 0.92, 0.95, 0.97) or conservative (0.85, 0.88, 0.92, 0.95). The memory is that of the
    /// GPU or of the container, and the share is that of all processes.
    #[schemars(extend("changes" = "machine"))]
    pub profile: Profile,
    /// Share of the memory below which a larger size must stay; null (default) is that of the profile.
    #[schemars(extend("exclusiveMinimum" = 0, "maximum" = 1, "changes" = "machine"))]
    pub target: Option<f64>,
    /// Share of the memory from which the next smaller size is used; null (default) is that of the profile.
    #[schemars(extend("exclusiveMinimum" = 0, "maximum" = 1, "changes" = "machine"))]
    pub warning: Option<f64>,
    /// Share of the memory from which the largest size that meets the target is used; null (default) is that of the
    /// profile.
    #[schemars(extend("exclusiveMinimum" = 0, "maximum" = 1, "changes" = "machine"))]
    pub critical: Option<f64>,
    /// Share of the memory from which the smallest size is used, without waiting for the next reading; null (default) is
    /// that of the profile.
    #[schemars(extend("exclusiveMinimum" = 0, "maximum" = 1, "changes" = "machine"))]
    pub emergency: Option<f64>,
    /// Tokens of the smallest micro-step, a multiple of batch.pack_tokens. auto (default) is the smallest of up to six sizes,
    /// each half of the one before in whole packs, from memory.dynamic.max_batch or batch.tokens on.
    #[schemars(extend("minimum" = 1, "maximum" = 2147483647, "changes" = "rounding"))]
    pub min_batch: Auto<u64>,
    /// Tokens of the largest micro-step, a multiple of batch.pack_tokens up to batch.tokens. auto (default) is the fastest
    /// number that fits the memory budget.
    #[schemars(extend("minimum" = 1, "maximum" = 2147483647, "changes" = "machine"))]
    pub max_batch: Auto<u64>,
    /// Number of optimizer steps between two readings of the memory (default 10). An emergency is seen at every step.
    #[schemars(range(min = 1, max = 1000000000000_u64), extend("changes" = "machine"))]
    pub adjustment_frequency: u64,
    /// Whether a change is by a factor of two at most, except in a critical state or an emergency (default true).
    #[schemars(extend("changes" = "machine"))]
    pub smooth_transitions: bool,
}

/// Shares of the memory at which the size of micro-steps changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Profile {
    /// Uses most of the memory.
    Aggressive,
    /// The default.
    Balanced,
    /// Leaves memory for other processes.
    Conservative,
}

impl Profile {
    fn thresholds(self) -> Thresholds {
        match self {
            Self::Aggressive => Thresholds::AGGRESSIVE,
            Self::Balanced => Thresholds::BALANCED,
            Self::Conservative => Thresholds::CONSERVATIVE,
        }
    }
}

impl DynamicSection {
    /// The thresholds of the profile with those that are given.
    pub fn thresholds(&self) -> Thresholds {
        let Thresholds { target, warning, critical, emergency } = self.profile.thresholds();
        Thresholds {
            target: self.target.unwrap_or(target),
            warning: self.warning.unwrap_or(warning),
            critical: self.critical.unwrap_or(critical),
            emergency: self.emergency.unwrap_or(emergency),
        }
    }

    /// The settings of the decision on a change.
    pub fn settings(&self) -> dynamic::DynamicSettings {
        let every = self.adjustment_frequency;
        let smooth = self.smooth_transitions;
        dynamic::DynamicSettings { thresholds: self.thresholds(), every, smooth }
    }
}

impl Default for DynamicSection {
    fn default() -> Self {
        Self {
            profile: Profile::Balanced,
            target: None,
            warning: None,
            critical: None,
            emergency: None,
            min_batch: Auto(None),
            max_batch: Auto(None),
            adjustment_frequency: dynamic::EVERY,
            smooth_transitions: true,
        }
    }
}

/// Activations that are recomputed in the backward pass instead of being stored.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(untagged)]
pub enum Remat {
    /// A policy by name.
    Policy(RematPolicy),
    /// The outputs of the listed ops.
    Ops(#[schemars(length(min = 1))] Vec<String>),
}

/// Recomputation policies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum RematPolicy {
    /// Chosen value by value: the fastest choice that fits the budget.
    Auto,
    /// No recomputation.
    None,
    /// Whole layers.
    Full,
    /// Stores only the input of every n-th layer.
    EveryN,
    /// Cheap ops only: norms, activations, gates.
    Selective,
}

/// Size of an optimizer step, of its packs and of its micro-steps. For a head, a row counts as one token.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct BatchSection {
    /// Tokens of an optimizer step, over all its micro-steps (default 16384; 256 rows for a head).
    #[schemars(range(min = 1, max = 1099511627776_u64))]
    pub tokens: u64,
    /// Tokens of a pack, a divisor of batch.tokens. A pack is a number of whole sequences, chosen by the data and the seed
    /// alone; losses of routers, capacities of experts and the batch norm of a head are those of a pack. auto (default) is
    /// data.longest, or the next larger divisor of batch.tokens; for a caller eight of its longest windows; for a head
    /// batch.tokens.
    #[schemars(extend("minimum" = 1, "maximum" = 2147483647))]
    pub pack_tokens: Auto<u64>,
    /// Tokens of a micro-step, a multiple of batch.pack_tokens: the packs that are computed at a time. auto (default) is the
    /// fastest number that fits the memory budget. With memory.dynamic, its keys min_batch and max_batch take the place of
    /// this key. A micro-step of a head is a pack.
    #[schemars(extend("minimum" = 1, "maximum" = 2147483647, "changes" = "rounding"))]
    pub micro_tokens: Auto<u64>,
    /// Maximum number of sequences in a pack; auto (default) is one for every eight tokens.
    #[schemars(extend("minimum" = 1, "maximum" = 2147483647))]
    pub sequences: Auto<u64>,
}

/// Length of the run, evaluation, checkpoints and logging.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct RunSection {
    /// Number of optimizer steps after which the run ends. At least one of run.steps, run.epochs and
    /// run.max_tokens is required.
    #[schemars(range(min = 1, max = 1000000000000_u64), extend("changes" = "end"))]
    pub steps: Option<u64>,
    /// Number of passes over the training data after which the run ends.
    #[schemars(range(min = 1, max = 1000000000000_u64), extend("changes" = "end"))]
    pub epochs: Option<u64>,
    /// Number of targets (tokens that count in the loss) after which the run ends. A schedule that ends with the run counts
    /// batch.tokens targets a step; a step has fewer where packs are not full or tokens are masked, so give schedule.steps then.
    #[schemars(range(min = 1, max = 1000000000000000000_u64), extend("changes" = "end"))]
    pub max_tokens: Option<u64>,
    /// Seed of the initial weights, the order of the data, the masks and dropout (default 0).
    #[schemars(range(min = 0, max = 9223372036854775807_u64))]
    pub seed: u64,
    /// Interval between two evaluations on the validation data: a number of steps, or a number of epochs such as 1 epoch or
    /// 2 epochs; null (default) never evaluates, and holds no data out.
    #[schemars(extend("minimum" = 1, "maximum" = 1000000000000_u64, "changes" = "end"))]
    pub evaluate_every: Option<Interval>,
    /// Number of targets of an evaluation; null (default) uses all validation data.
    #[schemars(range(min = 1, max = 1000000000000000000_u64), extend("changes" = "end"))]
    pub evaluate_tokens: Option<u64>,
    /// Number of evaluations without a loss that is lower by more than run.min_delta, after which the run ends
    /// (early stopping); null (default) never ends the run. Requires run.evaluate_every.
    #[schemars(range(min = 1, max = 1000000000000_u64), extend("changes" = "end"))]
    pub patience: Option<u64>,
    /// Smallest improvement of the validation loss that counts for run.patience, in nats (default 0).
    #[schemars(range(min = 0, max = 1000000), extend("changes" = "end"))]
    pub min_delta: f64,
    /// Interval between two checkpoints: a number of steps, a number of epochs such as 1 epoch or 2 epochs, or a time such as
    /// 10min (default; units s, min and h), after which the current step is saved. null saves only at the end and on a signal;
    /// never writes no checkpoint, at the end neither, so a run that is interrupted starts again.
    #[schemars(extend("minimum" = 1, "maximum" = 1000000000000_u64, "changes" = "log"))]
    pub save_every: Option<Interval>,
    /// Number of newest checkpoints that are kept; older checkpoints are deleted (default 2).
    #[schemars(range(min = 1, max = 1000000000000_u64), extend("changes" = "log"))]
    pub keep_last: u64,
    /// Whether the checkpoint with the lowest validation loss is kept as well (default true); the link best in the
    /// output folder names it.
    #[schemars(extend("changes" = "log"))]
    pub keep_best: bool,
    /// Number of steps between two lines of metrics.jsonl (default 1); a line contains the values of its own
    /// step, not means.
    #[schemars(range(min = 1, max = 1000000000000_u64), extend("changes" = "log"))]
    pub log_every: u64,
    /// Whether event files for TensorBoard, with the numbers of metrics.jsonl, are written to the folder tensorboard in the
    /// output folder (default false).
    #[schemars(extend("changes" = "log"))]
    pub tensorboard: bool,
    /// Output folder of the run; null (default) is the name of the configuration file with _run appended.
    #[schemars(extend("changes" = "log"))]
    pub output: Option<String>,
    /// Compute threads, 1 to 1024; auto (default) is the number of cores.
    #[schemars(extend("minimum" = 1, "maximum" = 1024, "changes" = "machine"))]
    pub threads: Auto<u64>,
    /// Device to train on: auto (default) is the first GPU that can be used, or else the CPU; cpu; cuda, the
    /// first GPU; or cuda:N, the GPU with ordinal N.
    #[schemars(extend("changes" = "machine"))]
    pub device: String,
}

/// Interval between two events of a run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(untagged)]
pub enum Interval {
    /// A number of optimizer steps.
    Steps(u64),
    /// A number of epochs such as `2 epochs`, a duration such as `10min`, or `never`.
    Text(String),
}

impl Interval {
    /// An interval of `n` epochs, as in a configuration.
    pub fn of_epochs(n: u64) -> Self {
        Self::Text(if n == 1 { "1 epoch".to_owned() } else { format!("{n} epochs") })
    }

    /// The number of epochs of an interval such as `epoch`, `1 epoch` or `2 epochs`; `None` for other intervals.
    pub fn epochs(&self) -> Option<u64> {
        let Self::Text(text) = self else { return None };
        let text = text.trim();
        let number = text.strip_suffix("epochs").or_else(|| text.strip_suffix("epoch"))?.trim();
        if text == "epoch" {
            return Some(1);
        }
        number.parse().ok().filter(|&number: &u64| number > 0)
    }

    /// Whether this is a number of steps, a number of epochs or a duration.
    pub fn is_valid(&self) -> bool {
        match self {
            Self::Steps(n) => *n > 0,
            Self::Text(text) => self.epochs().is_some() || Self::time(text).is_some(),
        }
    }

    /// Whether this is `never`.
    pub fn is_never(&self) -> bool {
        matches!(self, Self::Text(text) if text.trim() == "never")
    }

    /// Parses a duration such as 10min; `None` if the text is not a positive duration.
    pub fn time(text: &str) -> Option<Duration> {
        let digits = text.find(|c: char| !c.is_ascii_digit() && c != '.')?;
        let (number, unit) = text.split_at(digits);
        let seconds = match unit.trim() {
            "s" => 1.0,
            "min" => 60.0,
            "h" => 3600.0,
            _ => return None,
        };
        let time = Duration::try_from_secs_f64(number.parse::<f64>().ok()? * seconds).ok()?;
        (!time.is_zero()).then_some(time)
    }

    /// Whether an event is due after `step`, when the previous event was `since` ago. Events by epoch are not: see
    /// [`Interval::is_due_after_epoch`].
    pub fn is_due(&self, step: u64, since: Duration) -> bool {
        match self {
            Self::Steps(n) => step.is_multiple_of(*n),
            Self::Text(text) => Self::time(text).is_some_and(|time| since >= time),
        }
    }

    /// Whether an event is due at the end of an epoch, after which `epochs` epochs are complete.
    pub fn is_due_after_epoch(&self, epochs: u64) -> bool {
        self.epochs().is_some_and(|n| epochs.is_multiple_of(n))
    }
}

impl RunSection {
    /// Whether the run writes checkpoints.
    pub fn writes_checkpoints(&self) -> bool {
        !self.save_every.as_ref().is_some_and(Interval::is_never)
    }
}

impl fmt::Display for Interval {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Steps(1) => f.write_str("1 step"),
            Self::Steps(n) => write!(f, "{n} steps"),
            Self::Text(text) if text.trim() == "epoch" => f.write_str("1 epoch"),
            Self::Text(text) => f.write_str(text),
        }
    }
}

/// Device to train on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceChoice {
    /// The first GPU that can be used, or else the CPU.
    Auto,
    /// The CPU.
    Cpu,
    /// The GPU with this ordinal.
    Cuda(usize),
}

impl DeviceChoice {
    /// Parses the value of `run.device`; `None` if it names no device.
    pub fn parse(word: &str) -> Option<Self> {
        match word {
            "auto" => Some(Self::Auto),
            "cpu" => Some(Self::Cpu),
            "cuda" => Some(Self::Cuda(0)),
            _ => word.strip_prefix("cuda:")?.parse().ok().map(Self::Cuda),
        }
    }
}

impl Default for MemorySection {
    fn default() -> Self {
        Self {
            budget: "80%".to_owned(),
            remat: Remat::Policy(RematPolicy::Auto),
            remat_layers: None,
            remat_every: 2,
            loss_chunk: Auto(None),
            offload: Offload::Policy(OffloadPolicy::None),
            offload_to: OffloadTo::Host,
            dynamic: None,
        }
    }
}

impl Default for BatchSection {
    fn default() -> Self {
        Self { tokens: 16_384, pack_tokens: Auto(None), micro_tokens: Auto(None), sequences: Auto(None) }
    }
}

impl Default for RunSection {
    fn default() -> Self {
        Self {
            steps: None,
            epochs: None,
            max_tokens: None,
            seed: 0,
            evaluate_every: None,
            evaluate_tokens: None,
            patience: None,
            min_delta: 0.0,
            // The interval bounds the work lost when the process is killed.
            save_every: Some(Interval::Text("10min".to_owned())),
            keep_last: 2,
            keep_best: true,
            log_every: 1,
            tensorboard: false,
            output: None,
            threads: Auto(None),
            device: "auto".to_owned(),
        }
    }
}

/// Memory reserved for code, stacks, the plans themselves and the allocator's overhead. Measured besides the arena of
/// examples/moe-mini.yaml: 20 MB in the release build, 27 MB with 40 layers. `cargo test -p plimsoll-cli --test it
/// training_memory` repeats the measurement.
pub(crate) const PROCESS: Bytes = Bytes(32 << 20);

/// Device memory that the kernels of training and the library of its weight gradients take beyond what targets reserve
/// for inference. Measured with bench/train_ledger.py on an H100, driver 580: 532.9 to 535.2 MiB in all, over 22
/// configurations, besides the arena and its last page of 2 MiB; the value is in the middle.
const KERNELS: Bytes = Bytes(18 << 18);

impl RunSection {
    /// Returns the settings of a run on `device`.
    pub fn settings(&self, device: Device) -> Settings {
        let threads = self.threads.0.map_or_else(machine::cores, |n| n as usize);
        Settings { device, threads, ..Settings::default() }
    }

    /// Returns the planning target of a run on `device`, with the memory
    /// that training takes outside its arena.
    pub fn target(&self, device: Device) -> Result<Target, TrainError> {
        let settings = self.settings(device);
        let target = settings.target()?;
        Ok(if settings.is_on_host() { with_reserved(target, "process", PROCESS) } else { training_on(target) })
    }
}

/// Adds what training on a GPU takes besides its arena to a target; other targets are returned as they are.
pub fn training_on(target: Target) -> Target {
    match target.kernels {
        Kernels::Cuda(_) => with_reserved(target, "kernels of training", KERNELS),
        Kernels::Reference | Kernels::Cpu(_) => target,
    }
}

fn with_reserved(mut target: Target, label: &str, bytes: Bytes) -> Target {
    target.reserved.push(Reserved { label: label.to_owned(), bytes });
    target
}
