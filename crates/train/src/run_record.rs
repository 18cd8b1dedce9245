//! The records of training runs that run.json holds, while a run is in progress and after its end. Invariant: the keys that both
//! records have, have the same meaning, so that a reader need not know how the run ended.

use super::engine::RunPlanReport;
use super::state::RunState;
use plimsoll_data::outputs::WrittenFiles;
use plimsoll_graph::Bytes;
use plimsoll_runtime::health::HealthRecord;
use plimsoll_runtime::machine::MemoryStage;
use serde::Serialize;
use serde_json::Value;
use std::collections::BTreeMap;

/// Record of a finished run.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TrainRecord {
    /// Version of Plimsoll.
    #[serde(rename = "plimsoll")]
    pub version: &'static str,
    /// `finished`.
    pub status: &'static str,
    /// The configuration before choices were made.
    pub config: Value,
    /// Values that the planner chose for keys set to `auto`, by their dotted keys.
    pub choices: BTreeMap<String, Value>,
    /// Key of the limit that ended the run.
    pub ended: &'static str,
    /// Whether the run ended because its validation loss did not improve.
    pub stopped_early: bool,
    /// Final state of the run.
    pub state: RunState,
    /// Mean cross-entropy per target of the last step, in nats; `None` if the last process did no step.
    pub loss: Option<f64>,
    /// Path of the newest checkpoint; `None` if the last process wrote none.
    pub checkpoint: Option<String>,
    /// Seconds from the start of the training loop in the last process to its end.
    pub seconds: f64,
    /// Tokens trained on in these seconds, per second.
    pub tokens_per_second: f64,
    /// The device that computed, with its name.
    pub device: String,
    /// Memory budget.
    pub budget_bytes: Bytes,
    /// Planned peak of the memory that counts against the budget.
    pub peak_bytes: Bytes,
    /// The plan; `None` for a model without a plan.
    pub plan: Option<RunPlanReport>,
    /// Memory at the end of each stage.
    #[serde(rename = "memory")]
    pub stages: Vec<MemoryStage>,
    /// Health of the whole run.
    pub health: Option<HealthRecord>,
    /// Files that the run wrote.
    pub outputs: WrittenFiles,
}

/// Record of a run that has not finished.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct UnfinishedRecord<'a> {
    /// Version of Plimsoll.
    #[serde(rename = "plimsoll")]
    pub(crate) version: &'static str,
    /// `running`, or how the run ended, such as `failed`.
    pub(crate) status: &'a str,
    /// The configuration before choices were made.
    pub(crate) config: &'a Value,
    /// Memory at the end of each stage.
    #[serde(rename = "memory")]
    pub(crate) stages: &'a [MemoryStage],
    /// Health of the run so far.
    pub(crate) health: Option<&'a HealthRecord>,
    /// Files that the run wrote.
    pub(crate) outputs: &'a WrittenFiles,
    /// The error that ended the run.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) error: Option<String>,
}
