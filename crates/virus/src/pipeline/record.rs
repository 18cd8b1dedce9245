//! The run record run.json: inputs, models, plan, and statistics of the run. Invariant: `identity` contains
//! everything that results depend on, except for the names of the inputs, which appear in tables; runs with
//! equal identities and input names write identical result files.

use crate::PredictOptions;
use crate::methods::Method;
use crate::methods::caller::results::CallsSummary;
use crate::output::ResultCounts;
use crate::pipeline::engine::StageTotals;
use crate::pipeline::shape::{ENCODERS, HEAD};
use plimsoll_data::outputs::WrittenFiles;
use plimsoll_data::pack::Fill;
use plimsoll_data::sequence::Input;
use plimsoll_graph::Bytes;
use plimsoll_plan::{Program, Staging};
use plimsoll_runtime::dynamic::{DynamicSettings, StepSizeChange};
use plimsoll_runtime::health::HealthRecord;
use plimsoll_runtime::machine::MemoryStage;
use plimsoll_runtime::price::{self, KernelNames, PlanReport};
use plimsoll_runtime::report::{DeviceReport, path_texts, staging_by_label};
use plimsoll_runtime::watch::Watch;
use plimsoll_runtime::{RuntimeError, Usage};
use serde::Serialize;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::PathBuf;

/// Returns everything that results depend on. `arithmetic` describes the device: another precision, instruction
/// set or kind of GPU gives different bits. For a GPU it names the kind, the versions of driver and libraries,
/// and the canonical summation orders of GEMMs; the kernel selected by timing is not part of it, because it
/// changes no bits.
pub(crate) fn identity(
    options: &PredictOptions,
    method: &dyn Method,
    inputs: &[Input],
    arithmetic: Value,
) -> Value {
    let inputs: Vec<Value> =
        inputs.iter().map(|i| json!({"bytes": i.bytes, "sha256": i.sha256_hex()})).collect();
    json!({
        "inputs": inputs,
        "models": method.digests(),
        "parameters": method.parameters(options),
        "arithmetic": arithmetic,
    })
}

/// Returns the input names as given on the command line, as they appear in tables and notes.
pub(crate) fn names(inputs: &[Input]) -> Vec<String> {
    inputs.iter().map(|input| input.path.display().to_string()).collect()
}

/// Record of a prediction for `--json`.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(untagged)]
pub enum PredictRecord {
    /// The contents of run.json.
    Run(Box<RunRecord>),
    /// The record of a shard, whose result is its journal.
    Shard(ShardRecord),
    /// The run.json of the earlier run whose results were already complete, as that run wrote it.
    Existing(Value),
}

/// The contents of run.json.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct RunRecord {
    /// Version of Plimsoll.
    #[serde(rename = "plimsoll")]
    pub version: &'static str,
    /// Everything that results depend on; compared as JSON by later runs.
    pub identity: Value,
    /// Names of the inputs as given on the command line.
    pub inputs: Vec<String>,
    /// Name of the first device; `None` for a run that computes nothing.
    pub device: Option<String>,
    /// Work of each device.
    pub devices: Vec<DeviceReport>,
    /// The kernels that were used; `None` for a run that computes nothing.
    pub kernels: Option<KernelNames>,
    /// Folders of the shards that were merged.
    #[serde(serialize_with = "path_texts")]
    pub merged: Vec<PathBuf>,
    /// Element type of the encoders' weights and activations.
    pub precision: Option<String>,
    /// Properties of the first device, beside the plan, on which result bits depend.
    pub arithmetic: Option<String>,
    /// Settings that do not change results.
    pub settings: SettingsRecord,
    /// The plan; `None` for a run that computes nothing.
    pub plan: Option<PlanReport>,
    /// Plan of the preceding stage, if there was one.
    pub plan_of_nucleotide_stage: Option<PlanReport>,
    /// Planned host memory of the process beside the arena.
    #[serde(serialize_with = "staging_by_label")]
    pub process: Vec<Staging>,
    /// Number of windows whose results were taken from the journal of an interrupted run.
    pub windows_from_journal: u64,
    /// Numbers of sequences.
    pub sequences: SequenceCounts,
    /// Times of the run.
    pub seconds: SecondsRecord,
    /// Number of tokens that each encoder computed.
    pub tokens: BTreeMap<&'static str, u64>,
    /// Tokens of each encoder divided by its seconds; `all` is those of all encoders divided by the seconds of the run.
    pub tokens_per_second: BTreeMap<&'static str, f64>,
    /// Used fraction of the token capacity of each encoder's packs; `_but_last` is without its last pack.
    pub packing_fill: BTreeMap<String, f64>,
    /// Memory at the end of each stage.
    #[serde(rename = "memory")]
    pub stages: Vec<MemoryStage>,
    /// Changes of the size of the steps.
    pub size_changes: Vec<StepSizeChange>,
    /// Health of the whole run.
    pub health: Option<HealthRecord>,
    /// Entries that depend on the method.
    #[serde(flatten)]
    pub method: MethodRecord,
    /// Counts of the results. As `calls` and `outputs`, entered when the results are complete.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub counts: Option<ResultCounts>,
    /// Calls of a caller.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub calls: Option<CallsSummary>,
    /// Files that the run wrote.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub outputs: Option<WrittenFiles>,
}

/// Settings of a run that do not change its results.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct SettingsRecord {
    /// Compute threads of the CPU.
    pub threads: usize,
    /// Tokenizer threads.
    pub dataloader_workers: usize,
    /// Batches that each tokenizer thread may run ahead of the encoders.
    pub prefetch: usize,
    /// Tokens of a step; `None` is the most that fit.
    pub tokens: Option<u64>,
    /// When the size of steps follows the free memory; `None` is one size for the whole run.
    pub dynamic: Option<DynamicSettings>,
    /// Whether anomalies of the input are errors.
    pub strict: bool,
    /// Whether sequences are reordered by length when they are packed.
    pub sort_by_length: bool,
    /// Memory budget.
    pub budget_bytes: Bytes,
    /// Options of the GPUs by flag name; `None` on the CPU.
    pub gpu: Option<BTreeMap<&'static str, String>>,
    /// Flags that were given but have no effect on this device.
    pub flags_without_effect: Vec<&'static str>,
}

/// Numbers of sequences of a run.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct SequenceCounts {
    /// Number of computed sequences under the method's name for them, such as `orfs`.
    #[serde(flatten)]
    pub computed: BTreeMap<&'static str, u64>,
    /// Number of sequences with a value that is not finite.
    pub failed: u64,
    /// Number of records.
    pub records: u64,
}

/// Times of a run in seconds.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct SecondsRecord {
    /// The whole run.
    pub total: f64,
    /// Before the first record was read: models, plans, weights.
    pub starting: f64,
    /// The engine waited for records.
    pub waiting_for_input: f64,
    /// The engine waited for devices.
    pub waiting_for_devices: f64,
    /// Neither waiting nor writing.
    pub between: f64,
    /// Writing results.
    pub writing: f64,
    /// Seconds of the steps of each model, such as `protein_encoder` and `head`.
    #[serde(flatten)]
    pub models: BTreeMap<&'static str, f64>,
}

/// The entries of run.json that depend on the method.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct MethodRecord {
    /// The models; `None` for a method without models.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub models: Option<ModelsRecord>,
    /// Threshold, limits and calibration of a caller.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub calling: Option<CallingRecord>,
}

/// The models of a run.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct ModelsRecord {
    /// Name of each model by its role, such as `head`.
    #[serde(flatten)]
    pub names: BTreeMap<&'static str, String>,
    /// Whether the models have trained weights.
    pub trained: bool,
}

/// Threshold, limits and calibration with which a caller called the records.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct CallingRecord {
    /// Name of the preset, or the least score of a record that is called virus.
    pub threshold: String,
    /// Largest false discovery rate of a record that is called virus.
    pub max_fdr: Option<f64>,
    /// Expected share of viral records in the input.
    pub prevalence: f64,
    /// Share of viral windows in the training of the caller.
    pub training_prior: f64,
    /// Whether the records are mates of pairs.
    pub paired: bool,
    /// Least length of a called record in bases.
    pub min_length: u64,
    /// Largest share of unknown letters of a called record.
    pub max_n: f64,
    /// Least complexity of a called record.
    pub min_complexity: f64,
    /// The calibration file of the caller.
    pub calibration: Value,
}

/// Record of a shard.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct ShardRecord {
    /// Version of Plimsoll.
    #[serde(rename = "plimsoll")]
    pub version: &'static str,
    /// Number of the shard and of all shards, such as `1/2`.
    pub shard: Option<String>,
    /// Path of the journal, which is the result.
    pub journal: String,
    /// Number of windows whose results were taken from the journal of an interrupted run.
    pub windows_from_journal: u64,
    /// Number of tokens that each encoder computed.
    pub tokens: BTreeMap<&'static str, u64>,
    /// Times of the run.
    pub seconds: ShardSeconds,
}

/// Times of a shard in seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct ShardSeconds {
    /// The whole run.
    pub total: f64,
}

/// The data for the run record.
pub(crate) struct RunRecordInputs<'a> {
    pub(crate) options: &'a PredictOptions,
    pub(crate) method: &'a dyn Method,
    /// The program that was run; `None` for a merge of shards.
    pub(crate) program: Option<&'a Program>,
    /// Statistics of each device.
    pub(crate) devices: &'a [Usage],
    /// Plan of the preceding stage, if there was one.
    pub(crate) before: Option<PlanReport>,
    pub(crate) budget: Bytes,
    /// Planned host memory of the process beside the arena.
    pub(crate) process: &'a [Staging],
    pub(crate) totals: &'a StageTotals,
    pub(crate) fill: [Fill; ENCODERS],
    pub(crate) seconds: f64,
    pub(crate) watch: &'a Watch,
    pub(crate) inputs: &'a [Input],
    pub(crate) identity: Value,
}

impl RunRecordInputs<'_> {
    /// Returns the run record without what `ResultsWriter::finish` enters.
    pub(crate) fn record(self) -> Result<RunRecord, RuntimeError> {
        let totals = self.totals;
        let spent = &totals.seconds;
        let shape = self.method.shape();
        let settings = &self.options.settings;
        let mut seconds = SecondsRecord {
            total: self.seconds,
            starting: self.seconds - spent.streaming,
            waiting_for_input: spent.waiting,
            waiting_for_devices: spent.devices,
            between: spent.between(),
            writing: spent.writing,
            models: BTreeMap::new(),
        };
        let mut tokens = BTreeMap::new();
        let mut rates = BTreeMap::new();
        let mut fills = BTreeMap::new();
        for (i, encoder) in shape.encoders.iter().enumerate() {
            let fill = self.fill[i];
            seconds.models.insert(encoder.seconds_key, spent.encoders[i]);
            tokens.insert(encoder.key, totals.tokens[i]);
            rates.insert(encoder.key, tokens_per_second(totals.tokens[i], spent.encoders[i]));
            fills.insert(encoder.key.to_owned(), fill.all());
            fills.insert(format!("{}_but_last", encoder.key), fill.but_last());
        }
        rates.insert("all", tokens_per_second(totals.tokens.iter().sum(), self.seconds));
        if shape.head.is_some() {
            seconds.models.insert(HEAD, spent.head);
        }
        let first = self.devices.first();
        Ok(RunRecord {
            version: env!("CARGO_PKG_VERSION"),
            inputs: names(self.inputs),
            device: first.map(|device| device.name.clone()),
            devices: DeviceReport::of(self.devices, self.seconds),
            kernels: self.program.map(price::kernels),
            merged: self.options.merge.clone(),
            precision: self.identity["arithmetic"]["precision"].as_str().map(str::to_owned),
            arithmetic: first.map(|device| device.arithmetic.clone()),
            identity: self.identity,
            settings: SettingsRecord {
                threads: settings.threads,
                dataloader_workers: self.options.workers,
                prefetch: self.options.prefetch,
                tokens: settings.tokens,
                dynamic: settings.dynamic,
                strict: self.options.strict,
                sort_by_length: self.options.sort_by_length,
                budget_bytes: self.budget,
                gpu: settings.device.options(),
                flags_without_effect: settings.unused_flags.clone(),
            },
            plan: self.program.map(price::report).transpose()?,
            plan_of_nucleotide_stage: self.before,
            process: self.process.to_vec(),
            windows_from_journal: totals.windows_from_journal,
            sequences: SequenceCounts {
                computed: BTreeMap::from([(shape.names.sequences_key, totals.sequences)]),
                failed: totals.failed,
                records: totals.records,
            },
            seconds,
            tokens,
            tokens_per_second: rates,
            packing_fill: fills,
            stages: self.watch.stages().to_vec(),
            size_changes: self.watch.size_changes().to_vec(),
            health: self.watch.record().cloned(),
            method: self.method.record(),
            counts: None,
            calls: None,
            outputs: None,
        })
    }
}

/// Tokens per second; 0 for an encoder that ran no step.
fn tokens_per_second(tokens: u64, seconds: f64) -> f64 {
    if seconds > 0.0 { tokens as f64 / seconds } else { 0.0 }
}
