//! Remedies for a configuration that does not fit: other values of its keys, each evaluated with its own plan.
//! Invariant: every offered remedy was planned within the budget; its cost is the expected time per token relative to
//! the plan of the bill.

use crate::config::{
    MemorySection, ModelKind, Offload, OffloadPolicy, OffloadTo, OptimizerKind, Remat, RematPolicy, TrainConfig,
};
use plimsoll_graph::DType;
use plimsoll_plan::{Bill, PlanError, Precision, Target, TrainingChoice};
use plimsoll_setting::Setting;
use serde_json::{Value, json};

/// Keys and values of one remedy.
type RemedySettings = Vec<(String, Value)>;

/// Adds remedies to a bill: every single change that is sufficient by itself; if none is, the shortest prefix of the
/// list of changes that is sufficient in combination. Shorter sequences are a change of several degrees, of which the
/// smallest sufficient one is offered.
pub(super) fn with_remedies(
    mut bill: Bill,
    config: &TrainConfig,
    target: &Target,
    plan: &dyn Fn(&TrainConfig) -> Result<Option<TrainingChoice>, PlanError>,
) -> Bill {
    let single = settings(config, target);
    let shorter = shorter(config);
    let mut any = false;
    for settings in &single {
        if let Some(found) = planned(config, settings, plan) {
            any = true;
            offer(&mut bill, settings, &found);
        }
    }
    let least = least_that_fits(&shorter, &|settings| planned(config, settings, plan));
    if let Some((settings, found)) = least {
        any = true;
        offer(&mut bill, settings, &found);
    }
    if any {
        return bill;
    }
    // The changes before shorter sequences, then these with the first degree, then in the end with the last one.
    let prefixes = (2..=single.len()).map(|n| together(&single[..n], None));
    let with_shorter = [shorter.first(), shorter.last()].into_iter().flatten();
    for settings in prefixes.chain(with_shorter.map(|degree| together(&single, Some(degree)))) {
        if let Some(found) = planned(config, &settings, plan) {
            offer(&mut bill, &settings, &found);
            break;
        }
    }
    bill
}

/// The plan of a configuration with other settings; `None` if it does not fit, or if the settings change nothing or are not
/// valid.
fn planned(
    config: &TrainConfig,
    settings: &RemedySettings,
    plan: &dyn Fn(&TrainConfig) -> Result<Option<TrainingChoice>, PlanError>,
) -> Option<TrainingChoice> {
    let other = config.with(settings.iter().map(|(key, value)| (key, value))).ok()?;
    if other == *config || !other.is_sound() {
        return None;
    }
    plan(&other).ok().flatten()
}

/// Adds a remedy to a bill: settings, with the plan that was found for them.
fn offer(bill: &mut Bill, settings: &RemedySettings, found: &TrainingChoice) {
    let assignments = settings.iter().map(|(key, value)| {
        let setting = Setting::key(key.clone());
        match key.as_str() {
            // A resumed run keeps what was chosen for these keys, so that `auto` would change nothing there.
            "batch.micro_tokens" => setting.to(found.candidate.tokens),
            "memory.loss_chunk" => setting.to(found.candidate.chunk),
            _ => setting.to(word(value)),
        }
    });
    bill.offer(assignments.collect(), found.program.peak(), 1.0 / found.tokens_per_second);
}

/// Values of `data.longest` that may be offered, each half of the one before, the largest first; empty for models that
/// do not read documents.
fn shorter(config: &TrainConfig) -> Vec<RemedySettings> {
    if matches!(config.model.kind, ModelKind::Head | ModelKind::Caller) {
        return vec![];
    }
    let halves = std::iter::successors(Some(config.data.longest / 2), |n| Some(n / 2));
    halves.take_while(|&n| n >= 2).map(|n| vec![("data.longest".to_owned(), json!(n))]).collect()
}

/// The first of several degrees of a change that fits, with its plan. A later one needs no more memory than an earlier one,
/// so the search is a bisection.
fn least_that_fits<'a>(
    degrees: &'a [RemedySettings],
    planned: &dyn Fn(&RemedySettings) -> Option<TrainingChoice>,
) -> Option<(&'a RemedySettings, TrainingChoice)> {
    let mut found = (degrees.last()?, planned(degrees.last()?)?);
    // The invariant of the loop is that `high` fits and that nothing before `low` does.
    let mut low = 0;
    let mut high = degrees.len() - 1;
    while low < high {
        let middle = low.midpoint(high);
        match planned(&degrees[middle]) {
            Some(choice) => (high, found) = (middle, (&degrees[middle], choice)),
            None => low = middle + 1,
        }
    }
    Some(found)
}

/// Lists the changes that may be offered: first changes that leave the result bit-identical, then number formats, then
/// changes to what is trained.
fn settings(config: &TrainConfig, target: &Target) -> Vec<RemedySettings> {
    let c = config;
    let adam = c.optimizer.kind == OptimizerKind::Adamw;
    let has_moments = adam || matches!(c.optimizer.kind, OptimizerKind::Auto | OptimizerKind::Adamw8bit);
    let stores_f32 = c.precision.kind.policy().storage == DType::F32;
    let encoder = matches!(c.model.kind, ModelKind::Esm2 | ModelKind::DnabertS);
    let no_lora = c.model.lora.is_none();
    let holds_more = c.batch.pack_tokens.0.is_some_and(|tokens| tokens > c.longest_sequence());
    let changes = [
        (c.batch.micro_tokens.0.is_some(), "batch.micro_tokens", json!("auto")),
        (c.memory.loss_chunk.0.is_some(), "memory.loss_chunk", json!("auto")),
        (adam, "optimizer.kind", json!(OptimizerKind::Adamw8bit)),
        (has_moments, "optimizer.kind", json!(OptimizerKind::Adafactor)),
        (stores_f32, "precision.kind", json!(Precision::Bf16)),
        (encoder && no_lora && !c.model.freeze_encoder, "model.lora.rank", json!(8)),
        (encoder && c.model.classes.is_some() && no_lora, "model.freeze_encoder", json!(true)),
        (c.optimizer.clip_norm.is_some(), "optimizer.clip_norm", Value::Null),
        (c.optimizer.ema.is_some(), "optimizer.ema", Value::Null),
        (holds_more && c.model.kind != ModelKind::Head, "batch.pack_tokens", json!("auto")),
    ];
    let applicable = changes.into_iter().filter(|(is_applicable, ..)| *is_applicable);
    let mut all: Vec<RemedySettings> =
        applicable.map(|(_, key, value)| vec![(key.to_owned(), value)]).collect();
    if c.memory.offload == Offload::Policy(OffloadPolicy::None) {
        let mut offload = vec![("memory.offload".to_owned(), json!(OffloadPolicy::Auto))];
        if target.arena_in_host() {
            offload.push(("memory.offload_to".to_owned(), json!(OffloadTo::Disk)));
        }
        all.insert(0, offload);
    }
    let auto = Remat::Policy(RematPolicy::Auto);
    if c.memory.remat != auto {
        let mut remat = vec![("memory.remat".to_owned(), json!(auto))];
        let usual = MemorySection::default().remat_every;
        if c.memory.remat_every != usual {
            remat.push(("memory.remat_every".to_owned(), json!(usual)));
        }
        if c.memory.remat_layers.is_some() {
            remat.push(("memory.remat_layers".to_owned(), Value::Null));
        }
        all.insert(0, remat);
    }
    all
}

/// Combines several changes, and last `degree`, into one; of two values for a key, the later value is used.
fn together(parts: &[RemedySettings], degree: Option<&RemedySettings>) -> RemedySettings {
    let mut all: RemedySettings = vec![];
    for (key, value) in parts.iter().chain(degree).flatten() {
        all.retain(|(known, _)| known != key);
        all.push((key.clone(), value.clone()));
    }
    all
}

/// Formats a value as on the command line.
fn word(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}
