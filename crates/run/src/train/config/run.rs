//! The sections `memory`, `batch` and `run`: what a step holds, how long it goes on, and what is kept. Invariant: plain
//! data; keys that cannot change a result say so in the schema (`changes`), and may differ on resume.

use super::Auto;
use crate::{RunError, Settings, machine};
use graph::Bytes;
use plan::{Reserved, Target};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The line, and what is given up to stay under it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Memory {
    /// The most memory the run may take, like 24GiB, 500MB or 80% of what is free.
    #[schemars(extend("changes" = "machine"))]
    pub budget: String,
    /// What is computed again in the backward pass instead of being kept; the bits are the same.
    #[schemars(extend("changes" = "machine"))]
    pub remat: Remat,
    /// Layers between two kept ones with remat every_n.
    #[schemars(range(min = 1), extend("changes" = "machine"))]
    pub remat_every: u64,
    /// Rows of logits that exist at a time.
    #[schemars(extend("minimum" = 1))]
    pub loss_chunk: Auto<u64>,
}

/// What is computed again in the backward pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Remat {
    /// What brings the most speed under the line, value by value.
    Auto,
    /// Nothing.
    None,
    /// Whole layers.
    Full,
    /// All but every n-th layer's input.
    EveryN,
    /// What is cheap to compute: norms, activations, gates.
    Selective,
}

/// What a step holds. For a head, a row counts as one token.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Batch {
    /// Tokens of an optimizer step, over all its micro-steps.
    #[schemars(range(min = 1))]
    pub tokens: u64,
    /// Tokens of a micro-step, a divisor of the step's; auto is the fastest that fits.
    #[schemars(extend("minimum" = 1))]
    pub micro_tokens: Auto<u64>,
    /// Sequences that a micro-step can hold; auto is one for each eight tokens.
    #[schemars(extend("minimum" = 1))]
    pub sequences: Auto<u64>,
}

/// How long, and what is kept.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Run {
    /// The run ends after this many optimizer steps.
    #[schemars(range(min = 1), extend("changes" = "end"))]
    pub steps: Option<u64>,
    /// The run ends after this many passes over the data.
    #[schemars(range(min = 1), extend("changes" = "end"))]
    pub epochs: Option<u64>,
    /// The run ends after this many targets.
    #[schemars(range(min = 1), extend("changes" = "end"))]
    pub max_tokens: Option<u64>,
    /// Draws weights, order, masks and dropout.
    pub seed: u64,
    /// Steps between two evaluations; null evaluates never.
    #[schemars(range(min = 1), extend("changes" = "end"))]
    pub evaluate_every: Option<u64>,
    /// Targets that an evaluation is made on; null is all.
    #[schemars(range(min = 1), extend("changes" = "end"))]
    pub evaluate_tokens: Option<u64>,
    /// The run ends after this many evaluations without a better one; null goes on.
    #[schemars(range(min = 1), extend("changes" = "end"))]
    pub patience: Option<u64>,
    /// Steps between two checkpoints; null saves at the end and on a signal.
    #[schemars(range(min = 1), extend("changes" = "log"))]
    pub save_every: Option<u64>,
    /// Checkpoints that are kept, the newest.
    #[schemars(range(min = 1), extend("changes" = "log"))]
    pub keep_last: u64,
    /// Whether the checkpoint of the lowest evaluation is kept too.
    #[schemars(extend("changes" = "log"))]
    pub keep_best: bool,
    /// Steps between two lines of metrics.jsonl; its numbers are those of that step.
    #[schemars(range(min = 1), extend("changes" = "log"))]
    pub log_every: u64,
    /// The run's folder; null is the configuration's name with _run.
    #[schemars(extend("changes" = "log"))]
    pub output: Option<String>,
    /// Threads that compute; auto is the cores.
    #[schemars(extend("minimum" = 1, "maximum" = 1024, "changes" = "machine"))]
    pub threads: Auto<u64>,
    /// Where to compute.
    #[schemars(extend("changes" = "machine"))]
    pub device: Device,
}

/// Where to train.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Device {
    /// The fastest that is there: today the CPU.
    #[default]
    Auto,
    /// The CPU.
    Cpu,
}

impl Default for Memory {
    fn default() -> Self {
        Self { budget: "80%".to_owned(), remat: Remat::Auto, remat_every: 2, loss_chunk: Auto(None) }
    }
}

impl Default for Batch {
    fn default() -> Self {
        Self { tokens: 16_384, micro_tokens: Auto(None), sequences: Auto(None) }
    }
}

impl Default for Run {
    fn default() -> Self {
        Self {
            steps: None,
            epochs: None,
            max_tokens: None,
            seed: 0,
            evaluate_every: None,
            evaluate_tokens: None,
            patience: None,
            save_every: None,
            keep_last: 2,
            keep_best: true,
            log_every: 1,
            output: None,
            threads: Auto(None),
            device: Device::Auto,
        }
    }
}

/// Code, stacks, the plans themselves and what an allocator keeps. Measured beside the arena of examples/moe-mini.yaml:
/// 20 MB of the release build, 27 MB with 40 layers. `cargo test -p plimsoll --test it training_memory` measures again.
pub(crate) const PROCESS: Bytes = Bytes(32 << 20);

impl Run {
    /// The machine that the run computes on.
    pub fn machine(&self) -> Settings {
        let threads = self.threads.0.map_or_else(machine::cores, |n| n as usize);
        // Training computes on the CPU, which is what both words of `device` mean today.
        match self.device {
            Device::Auto | Device::Cpu => Settings { threads, ..Settings::default() },
        }
    }

    /// The same as plans know it, with what the process holds beside its arena and its data.
    pub fn target(&self) -> Result<Target, RunError> {
        let mut target = self.machine().target()?;
        target.reserved.push(Reserved { label: "process".to_owned(), bytes: PROCESS });
        Ok(target)
    }
}
