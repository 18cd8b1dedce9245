//! The optimisations in effect in a training plan, each with what it saves and costs. Invariant: the plan without an
//! optimisation keeps every other choice of the plan: micro-batch, rows of logits, optimizer, recomputed nodes.

use super::program::{self, Exact};
use super::subject;
use crate::TrainError;
use crate::config::{ModelKind, OptimizerKind, TrainConfig};
use plimsoll_plan::training::plans;
use plimsoll_plan::{
    ActivationOffload, ActivationPolicy, Candidate, Fuse, Offload, PlanError, Precision, Program,
    RecomputePolicy, Target, TrainingChoice,
};
use plimsoll_runtime::Observer;
use plimsoll_runtime::explain::{Effect, PlanCost, seconds, sharing};
use plimsoll_setting::Setting;
use serde_json::{Value, json};

/// Returns the optimisations in effect in the plan `found` of a configuration. A plan without one of them may exceed the
/// budget.
pub fn explain(
    config: &TrainConfig,
    target: &Target,
    found: &TrainingChoice,
    observer: &mut dyn Observer,
) -> Result<Vec<Effect>, TrainError> {
    if config.memory.dynamic.is_some() {
        return Err(TrainError::PlanOfDynamic { request: Setting::Explain.to(true) });
    }
    let subject = subject(config, observer)?;
    let candidate = found.candidate;
    let exact = Exact {
        candidate,
        activations: found.activations.clone(),
        fuse: Fuse::default(),
        max_norm: None,
        offload: found.offload,
        window: found.window,
    };
    let with = cost(&found.program, &candidate);
    let mut effects = sharing(&found.program, with)?;
    let mut add = |name: &str, instead: String, with: PlanCost, without: Option<PlanCost>| {
        effects.extend(without.map(|without| Effect { name: name.to_owned(), instead, with, without }));
    };
    // `None` if no machine has the memory for the plan.
    let planned = |config: &TrainConfig, exact: &Exact| -> Result<Option<PlanCost>, TrainError> {
        match program::exactly(config, &subject.like(&config.model), target, exact) {
            Ok(program) => Ok(Some(cost(&program, &exact.candidate))),
            Err(PlanError::TooLarge { .. }) => Ok(None),
            Err(error) => Err(error.into()),
        }
    };
    // With another value of a key.
    let keyed = |key: &str, value: Value| -> Result<(String, TrainConfig), TrainError> {
        let other = config.with([(&key.to_owned(), &value)])?;
        let word = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
        Ok((Setting::key(key.to_owned()).to(word).to_string(), other))
    };
    if !found.program.offload().is_empty() {
        let (instead, _) = keyed("memory.offload", json!("none"))?;
        let activations = ActivationPolicy { offload: ActivationOffload::NONE, ..found.activations.clone() };
        let without = planned(config, &Exact { offload: Offload::default(), activations, ..exact.clone() })?;
        add("offload", instead, with, without);
    }
    if found.activations.recompute != RecomputePolicy::None {
        let (instead, _) = keyed("memory.remat", json!("none"))?;
        let activations = ActivationPolicy { recompute: RecomputePolicy::None, ..found.activations.clone() };
        let without = planned(config, &Exact { activations, ..exact.clone() })?;
        add("recomputation of activations", instead, with, without);
    }
    if u64::from(candidate.chunk) < candidate.tokens {
        let (instead, _) = keyed("memory.loss_chunk", json!(candidate.tokens))?;
        let chunk = u32::try_from(candidate.tokens).unwrap_or(u32::MAX);
        let without = planned(config, &Exact { candidate: Candidate { chunk, ..candidate }, ..exact.clone() })?;
        add(&format!("logits of {} rows at a time", candidate.chunk), instead, with, without);
    }
    // A micro-step of a head is a pack.
    if candidate.accumulation > 1 && config.model.kind != ModelKind::Head {
        let tokens = config.batch.tokens;
        let (instead, _) = keyed("batch.micro_tokens", json!(tokens))?;
        let whole = Candidate { tokens, accumulation: 1, ..candidate };
        let without = planned(config, &Exact { candidate: whole, ..exact.clone() })?;
        add(&format!("a step of {} micro-batches", candidate.accumulation), instead, with, without);
    }
    let kind = program::kind_of(&candidate.optimizer);
    if matches!(kind, OptimizerKind::Adamw8bit | OptimizerKind::Adafactor) {
        let (instead, other) = keyed("optimizer.kind", json!(OptimizerKind::Adamw))?;
        let optimizer = program::optimizers(&other)[0];
        let without =
            planned(config, &Exact { candidate: Candidate { optimizer, ..candidate }, ..exact.clone() })?;
        let name = if kind == OptimizerKind::Adafactor { "factored second moments" } else { "8-bit moments" };
        add(name, instead, with, without);
    }
    if program::updates_at_once(config, &subject, &exact) {
        let (instead, _) = keyed("optimizer.clip_norm", json!(1.0))?;
        let without = planned(config, &Exact { max_norm: Some(1.0), ..exact.clone() })?;
        add("every parameter updated as soon as its gradient is complete", instead, with, without);
    }
    let without = planned(config, &Exact { fuse: Fuse::Nothing, ..exact.clone() })?;
    add("fused ops", "every op of the model by itself".to_owned(), with, without);
    if found.program.depth() > 1 {
        let without = Some(cost(&found.program.clone().with_pipeline_depth(1), &candidate));
        let name =
            format!("{} steps in flight (their overlap is not in the expected time)", found.program.depth());
        add(&name, "one step at a time".to_owned(), with, without);
    }
    // Keys that change the nodes of the graph: nodes of one graph cannot be recomputed in the other, so both plans are
    // without recomputation where the search chose nodes.
    let (exact, note) = match exact.activations.recompute {
        RecomputePolicy::Nodes(_) => (Exact { activations: ActivationPolicy::STORED, ..exact }, NOT_RECOMPUTED),
        _ => (exact, ""),
    };
    let with = if note.is_empty() { Some(with) } else { planned(config, &exact)? };
    let mut add = |name: String, key: &str, value: Value| -> Result<(), TrainError> {
        let (instead, other) = keyed(key, value)?;
        let costs = with.zip(planned(&other, &exact)?);
        let effect = |(with, without)| Effect { name: format!("{name}{note}"), instead, with, without };
        effects.extend(costs.map(effect));
        Ok(())
    };
    if config.precision.kind != Precision::F32 {
        let name = format!("precision {}", config.precision.kind.name());
        add(name, "precision.kind", json!(Precision::F32))?;
    }
    if config.model.lora.is_some() {
        add("adapters of low rank (LoRA)".to_owned(), "model.lora", Value::Null)?;
    }
    if config.model.freeze_encoder {
        add("frozen encoder".to_owned(), "model.freeze_encoder", json!(false))?;
    }
    effects.retain(Effect::is_any);
    Ok(effects)
}

/// Added to the name of an optimisation whose plans are both without recomputation.
const NOT_RECOMPUTED: &str = " (both plans without recomputation)";

/// Memory of a program, and its expected time for each token of an optimizer step.
fn cost(program: &Program, candidate: &Candidate) -> PlanCost {
    let seconds_of = |name: &str| {
        let plan = program.index(name).map(|k| &program.plans()[k].1);
        plan.map_or(0.0, |plan| seconds(program, plan))
    };
    let step = candidate.accumulation as f64 * seconds_of(plans::MICRO) + seconds_of(plans::APPLY);
    let tokens = candidate.tokens * candidate.accumulation;
    PlanCost { bytes: program.peak(), seconds_per_token: step / tokens as f64 }
}
