//! The run record run.json: inputs, models, plan, and statistics of the run. Invariant: `identity` contains
//! everything that results depend on, except for the names of the inputs, which appear in tables; runs with
//! equal identities and input names write identical result files.

use crate::Options;
use crate::methods::Method;
use crate::pipeline::engine::Totals;
use crate::pipeline::shape::{ENCODERS, HEAD};
use plimsoll_data::pack::Fill;
use plimsoll_data::sequence::Input;
use plimsoll_graph::Bytes;
use plimsoll_plan::{Program, Staging};
use plimsoll_runtime::RuntimeError;
use plimsoll_runtime::Usage;
use plimsoll_runtime::watch::Watch;
use plimsoll_runtime::{price, process};
use serde_json::{Map, Value, json};

/// Returns everything that results depend on. `arithmetic` describes the device: another precision, instruction
/// set or kind of GPU gives different bits. For a GPU it names the kind, the versions of driver and libraries,
/// and the canonical summation orders of GEMMs; the kernel selected by timing is not part of it, because it
/// changes no bits.
pub(crate) fn identity(options: &Options, method: &dyn Method, inputs: &[Input], arithmetic: Value) -> Value {
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
pub(crate) fn names(inputs: &[Input]) -> Value {
    inputs.iter().map(|input| Value::from(input.path.display().to_string())).collect()
}

/// The data for the run record.
pub(crate) struct RunRecordInputs<'a> {
    pub(crate) options: &'a Options,
    pub(crate) method: &'a dyn Method,
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
    pub(crate) fill: [Fill; ENCODERS],
    pub(crate) seconds: f64,
    pub(crate) watch: &'a Watch,
    pub(crate) inputs: &'a [Input],
    pub(crate) identity: Value,
}

impl RunRecordInputs<'_> {
    /// Returns the contents of run.json without the counts, which `Results::finish` adds.
    pub(crate) fn record(&self) -> Result<Value, RuntimeError> {
        let t = self.totals;
        let s = &t.seconds;
        let shape = self.method.shape();
        let rate = |tokens: u64, seconds: f64| if seconds > 0.0 { tokens as f64 / seconds } else { 0.0 };
        let mut seconds = json!({
            "total": self.seconds,
            "starting": self.seconds - s.streaming,
            "waiting_for_input": s.waiting,
            "waiting_for_devices": s.devices,
            "between": s.between(),
            "writing": s.writing,
        });
        let mut tokens = Map::new();
        let mut rates = Map::new();
        let mut fills = Map::new();
        for (i, encoder) in shape.encoders.iter().enumerate() {
            let fill = self.fill[i];
            seconds[encoder.plan.replace(' ', "_")] = s.encoders[i].into();
            tokens.insert(encoder.key.to_owned(), t.tokens[i].into());
            rates.insert(encoder.key.to_owned(), rate(t.tokens[i], s.encoders[i]).into());
            fills.insert(encoder.key.to_owned(), fill.all().into());
            fills.insert(format!("{}_but_last", encoder.key), fill.but_last().into());
        }
        rates.insert("all".to_owned(), rate(t.tokens.iter().sum(), self.seconds).into());
        if shape.head.is_some() {
            seconds[HEAD] = s.head.into();
        }
        let mut record = json!({
            "plimsoll": env!("CARGO_PKG_VERSION"),
            "identity": self.identity,
            "inputs": names(self.inputs),
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
            "sequences": {shape.words.sequences: t.sequences, "failed": t.failed, "records": t.records},
            "seconds": seconds,
            "tokens": tokens,
            "tokens_per_second": rates,
            "packing_fill": fills,
            "memory": self.watch.stages(),
            "size_changes": self.watch.size_changes(),
            "health": self.watch.record(),
        });
        if let Some(record) = record.as_object_mut() {
            record.extend(self.method.record());
        }
        Ok(record)
    }
}
