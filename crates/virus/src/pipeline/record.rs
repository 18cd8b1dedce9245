//! The run record run.json: inputs, models, plan, and statistics of the run. Invariant: `identity` contains
//! everything that results depend on, except for the names of the inputs, which appear in tables; runs with
//! equal identities and input names write identical result files.

use crate::methods::caller::calibration::{CALIBRATION, Calibration};
use crate::methods::caller::score::Limits;
use crate::pipeline::engine::Totals;
use crate::{CallerOptions, Opened, OpenedModels, Options};
use plimsoll_data::hex::hex;
use plimsoll_data::pack::Fill;
use plimsoll_data::sequence::Input;
use plimsoll_graph::Bytes;
use plimsoll_plan::{Program, Staging};
use plimsoll_runtime::RuntimeError;
use plimsoll_runtime::Usage;
use plimsoll_runtime::watch::Watch;
use plimsoll_runtime::{CallerModel, EncoderModel, HeadModel, identity, price, process};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

/// Returns the digests of all model files. Reads every file once.
pub(crate) fn digests(
    dna: &EncoderModel,
    protein: &EncoderModel,
    head: &HeadModel,
) -> Result<Value, RuntimeError> {
    Ok(json!({
        "dna": identity::digests(&dna.weights, &dna.described_by)?,
        "protein": identity::digests(&protein.weights, &protein.described_by)?,
        "head": object(head.weights.sha256()?),
    }))
}

/// Returns the digests of the files of a caller.
pub(crate) fn caller_digests(model: &CallerModel, calibration: &Calibration) -> Result<Value, RuntimeError> {
    let config = ("config.json".to_owned(), hex(&Sha256::digest(model.config_text.as_bytes())));
    let calibration = (CALIBRATION.to_owned(), calibration.sha256.clone());
    Ok(json!({"caller": object(model.weights.sha256()?.into_iter().chain([config, calibration]))}))
}

/// Returns the options of a caller and its calibration, for run.json.
fn calling(options: &CallerOptions, calibration: &Calibration) -> Value {
    let Limits { min_length, max_n, min_complexity } = options.limits;
    json!({
        "threshold": options.threshold.name(),
        "max_fdr": options.max_fdr,
        "prevalence": options.prevalence,
        "training_prior": 0.5,
        "paired": options.paired,
        "min_length": min_length.unwrap_or(calibration.shortest()),
        "max_n": max_n,
        "min_complexity": min_complexity,
        "calibration": calibration.json,
    })
}

/// Returns everything that results depend on. `arithmetic` describes the device: another precision, instruction
/// set or kind of GPU gives different bits. For a GPU it names the kind, the versions of driver and libraries,
/// and the canonical summation orders of GEMMs; the kernel selected by timing is not part of it, because it
/// changes no bits.
pub(crate) fn identity(options: &Options, opened: &Opened, inputs: &[Input], arithmetic: Value) -> Value {
    let inputs: Vec<Value> =
        inputs.iter().map(|i| json!({"bytes": i.bytes, "sha256": i.sha256_hex()})).collect();
    let parameters = options.result_key();
    json!({"inputs": inputs, "models": opened.digests, "parameters": parameters, "arithmetic": arithmetic})
}

/// Returns the input names as given on the command line, as they appear in tables and notes.
pub(crate) fn names(inputs: &[Input]) -> Value {
    inputs.iter().map(|input| Value::from(input.path.display().to_string())).collect()
}

/// Builds a JSON object of digests by file.
fn object(digests: impl IntoIterator<Item = (String, String)>) -> Value {
    digests.into_iter().map(|(file, sha)| (file, Value::from(sha))).collect()
}

/// The data for the run record.
pub(crate) struct RunRecordInputs<'a> {
    pub(crate) options: &'a Options,
    pub(crate) opened: &'a Opened,
    /// The program that was run; `None` for a merge of shards.
    pub(crate) program: Option<&'a Program>,
    /// Statistics of each device.
    pub(crate) devices: &'a [Usage],
    /// Plan of the preceding stage, if there was one.
    pub(crate) before: Option<&'a Value>,
    pub(crate) budget: Bytes,
    /// Planned host memory of the process beside the arena.
    pub(crate) process: &'a [Staging],
    pub(crate) totals: &'a Totals,
    pub(crate) fill: [Fill; 2],
    pub(crate) seconds: f64,
    pub(crate) watch: &'a Watch,
    pub(crate) inputs: &'a [Input],
    pub(crate) identity: Value,
}

impl RunRecordInputs<'_> {
    /// Returns the contents of run.json without the counts, which `Outputs::finish` adds.
    pub(crate) fn record(&self) -> Result<Value, RuntimeError> {
        let t = self.totals;
        let s = &t.seconds;
        let rate = |tokens: u64, seconds: f64| if seconds > 0.0 { tokens as f64 / seconds } else { 0.0 };
        let models = match &self.opened.models {
            OpenedModels::VirNucPro(models) => json!({
                "dna": models.dna.name,
                "protein": models.protein.name,
                "head": models.head.name,
                "trained": models.head.trained,
            }),
            OpenedModels::Caller(caller) => json!({"caller": caller.model.name, "trained": true}),
        };
        let mut record = json!({
            "plimsoll": env!("CARGO_PKG_VERSION"),
            "identity": self.identity,
            "inputs": names(self.inputs),
            "models": models,
            "device": self.devices.first().map(|device| &device.name),
            "devices": self.devices.iter().map(|device| device.to_json(self.seconds)).collect::<Vec<_>>(),
            "kernels": self.program.map(price::kernels),
            "merged": self.options.merge,
            "precision": self.identity["arithmetic"]["precision"],
            "arithmetic": self.devices.first().map(|device| &device.arithmetic),
            "settings": {
                "threads": self.options.settings.threads,
                "dataloader_workers": self.options.workers,
                "prefetch": self.options.prefetch,
                "tokens": self.options.settings.tokens,
                "dynamic": self.options.settings.dynamic.map(|dynamic| dynamic.to_json()),
                "strict": self.options.strict,
                "sort_by_length": self.options.sort_by_length,
                "budget_bytes": self.budget.0,
                "gpu": self.options.settings.device.options(),
                "flags_without_effect": self.options.settings.unused_flags,
            },
            "plan": self.program.map(price::to_json).transpose()?,
            "plan_of_nucleotide_stage": self.before,
            "process": process::to_json(self.process),
            "windows_from_journal": t.kept,
            "sequences": {"orfs": t.orfs, "failed": t.failed, "records": t.records},
            "seconds": {
                "total": self.seconds,
                "starting": self.seconds - s.streaming,
                "waiting_for_input": s.waiting,
                "waiting_for_devices": s.devices,
                "between": s.between(),
                "nucleotide_encoder": s.encoders[0],
                "protein_encoder": s.encoders[1],
                "head": s.head,
                "writing": s.writing,
            },
            "tokens": {"nucleotide": t.tokens[0], "protein": t.tokens[1]},
            "tokens_per_second": {
                "nucleotide": rate(t.tokens[0], s.encoders[0]),
                "protein": rate(t.tokens[1], s.encoders[1]),
                "all": rate(t.tokens[0] + t.tokens[1], self.seconds),
            },
            "packing_fill": {
                "nucleotide": self.fill[0].all(),
                "nucleotide_but_last": self.fill[0].but_last(),
                "protein": self.fill[1].all(),
                "protein_but_last": self.fill[1].but_last(),
            },
            "memory": self.watch.stages(),
            "size_changes": self.watch.size_changes(),
            "health": self.watch.record(),
        });
        if let (OpenedModels::Caller(caller), Some(options)) = (&self.opened.models, &self.options.caller) {
            let fill = self.fill[0];
            record["calling"] = calling(options, &caller.calibration);
            record["sequences"] = json!({"windows": t.orfs, "failed": t.failed, "records": t.records});
            record["tokens"] = json!({"caller": t.tokens[0]});
            record["tokens_per_second"] =
                json!({"caller": rate(t.tokens[0], s.encoders[0]), "all": rate(t.tokens[0], self.seconds)});
            record["packing_fill"] = json!({"caller": fill.all(), "caller_but_last": fill.but_last()});
            if let Some(seconds) = record["seconds"].as_object_mut() {
                ["nucleotide_encoder", "protein_encoder", "head"]
                    .iter()
                    .for_each(|key| drop(seconds.remove(*key)));
                seconds.insert("caller".to_owned(), s.encoders[0].into());
            }
        }
        Ok(record)
    }
}
