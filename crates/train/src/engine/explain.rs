//! The optimisations in effect in a training plan, each with what it saves and costs. Invariant: the plan without an
//! optimisation keeps every other choice of the plan: micro-batch, rows of logits, optimizer, recomputed nodes.

use super::open_trained_model;
use super::program::{self, ExactPlan};
use super::trained_model::TrainedModel;
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
    let model = open_trained_model(config, observer)?;
    let candidate = found.candidate;
    let exact = ExactPlan {
        candidate,
        activations: found.activations.clone(),
        fuse: Fuse::default(),
        max_norm: None,
        offload: found.offload,
        window: found.window,
    };
    let with = cost(&found.program, &candidate);
    let mut effects = sharing(&found.program, with)?;
    let planner = ExactPlanner { config, model: &model, target };
    if !found.program.offload().is_empty() {
        let (instead, _) = planner.with_key("memory.offload", json!("none"))?;
        let activations = ActivationPolicy { offload: ActivationOffload::NONE, ..found.activations.clone() };
        let without =
            planner.cost(config, &ExactPlan { offload: Offload::default(), activations, ..exact.clone() })?;
        effects.extend(effect("offload", instead, with, without));
    }
    if found.activations.recompute != RecomputePolicy::None {
        let (instead, _) = planner.with_key("memory.remat", json!("none"))?;
        let activations = ActivationPolicy { recompute: RecomputePolicy::None, ..found.activations.clone() };
        let without = planner.cost(config, &ExactPlan { activations, ..exact.clone() })?;
        effects.extend(effect("recomputation of activations", instead, with, without));
    }
    if u64::from(candidate.chunk) < candidate.tokens {
        let (instead, _) = planner.with_key("memory.loss_chunk", json!(candidate.tokens))?;
        let chunk = u32::try_from(candidate.tokens).unwrap_or(u32::MAX);
        let without = planner
            .cost(config, &ExactPlan { candidate: Candidate { chunk, ..candidate }, ..exact.clone() })?;
        effects.extend(effect(
            &format!("logits of {} rows at a time", candidate.chunk),
            instead,
            with,
            without,
        ));
    }
    // A micro-step of a head is a pack.
    if candidate.accumulation > 1 && config.model.kind != ModelKind::Head {
        let tokens = config.batch.tokens;
        let (instead, _) = planner.with_key("batch.micro_tokens", json!(tokens))?;
        let one_micro_batch = Candidate { tokens, accumulation: 1, ..candidate };
        let without = planner.cost(config, &ExactPlan { candidate: one_micro_batch, ..exact.clone() })?;
        effects.extend(effect(
            &format!("a step of {} micro-batches", candidate.accumulation),
            instead,
            with,
            without,
        ));
    }
    let kind = program::kind_of(&candidate.optimizer);
    if matches!(kind, OptimizerKind::Adamw8bit | OptimizerKind::Adafactor) {
        let (instead, other) = planner.with_key("optimizer.kind", json!(OptimizerKind::Adamw))?;
        let optimizer = program::optimizers(&other)[0];
        let without = planner
            .cost(config, &ExactPlan { candidate: Candidate { optimizer, ..candidate }, ..exact.clone() })?;
        let name = if kind == OptimizerKind::Adafactor { "factored second moments" } else { "8-bit moments" };
        effects.extend(effect(name, instead, with, without));
    }
    if program::updates_at_once(config, &model, &exact) {
        let (instead, _) = planner.with_key("optimizer.clip_norm", json!(1.0))?;
        let without = planner.cost(config, &ExactPlan { max_norm: Some(1.0), ..exact.clone() })?;
        effects.extend(effect(
            "every parameter updated as soon as its gradient is complete",
            instead,
            with,
            without,
        ));
    }
    let without = planner.cost(config, &ExactPlan { fuse: Fuse::Nothing, ..exact.clone() })?;
    effects.extend(effect("fused ops", "every op of the model by itself".to_owned(), with, without));
    if found.program.depth() > 1 {
        let without = Some(cost(&found.program.clone().with_pipeline_depth(1), &candidate));
        let name =
            format!("{} steps in flight (their overlap is not in the expected time)", found.program.depth());
        effects.extend(effect(&name, "one step at a time".to_owned(), with, without));
    }
    // Keys that change the nodes of the graph: nodes of one graph cannot be recomputed in the other, so both plans are
    // without recomputation where the search chose nodes.
    let (exact, note) = match exact.activations.recompute {
        RecomputePolicy::Nodes(_) => {
            (ExactPlan { activations: ActivationPolicy::STORED, ..exact }, NOT_RECOMPUTED)
        }
        _ => (exact, ""),
    };
    let with = if note.is_empty() { Some(with) } else { planner.cost(config, &exact)? };
    let mut keys: Vec<(String, &str, Value)> = vec![];
    if config.precision.kind != Precision::F32 {
        let name = format!("precision {}", config.precision.kind.name());
        keys.push((name, "precision.kind", json!(Precision::F32)));
    }
    if config.model.lora.is_some() {
        keys.push(("adapters of low rank (LoRA)".to_owned(), "model.lora", Value::Null));
    }
    if config.model.freeze_encoder {
        keys.push(("frozen encoder".to_owned(), "model.freeze_encoder", json!(false)));
    }
    for (name, key, value) in keys {
        let (instead, other) = planner.with_key(key, value)?;
        let without = planner.cost(&other, &exact)?;
        if let Some(with) = with {
            effects.extend(effect(&format!("{name}{note}"), instead, with, without));
        }
    }
    effects.retain(Effect::is_any);
    Ok(effects)
}

/// Added to the name of an optimisation whose plans are both without recomputation.
const NOT_RECOMPUTED: &str = " (both plans without recomputation)";

/// Plans configurations with given choices, to compare them with the plan of `config`.
struct ExactPlanner<'a> {
    config: &'a TrainConfig,
    model: &'a TrainedModel,
    target: &'a Target,
}

impl ExactPlanner<'_> {
    /// The cost of a configuration with these choices; `None` if no machine has the memory for the plan.
    fn cost(&self, config: &TrainConfig, exact: &ExactPlan) -> Result<Option<PlanCost>, TrainError> {
        match program::exactly(config, &self.model.like(&config.model), self.target, exact) {
            Ok(program) => Ok(Some(cost(&program, &exact.candidate))),
            Err(PlanError::TooLarge { .. }) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// The configuration with another value of a key, and the setting as text.
    fn with_key(&self, key: &str, value: Value) -> Result<(String, TrainConfig), TrainError> {
        let other = self.config.with([(&key.to_owned(), &value)])?;
        let word = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
        Ok((Setting::key(key.to_owned()).to(word).to_string(), other))
    }
}

/// The effect of an optimisation; `None` if there is no plan without it.
fn effect(name: &str, instead: String, with: PlanCost, without: Option<PlanCost>) -> Option<Effect> {
    without.map(|without| Effect { name: name.to_owned(), instead, with, without })
}

/// Memory of a program, and its expected time for each token of an optimizer step.
fn cost(program: &Program, candidate: &Candidate) -> PlanCost {
    let micro_step = seconds_of(program, plans::MICRO);
    let step = candidate.accumulation as f64 * micro_step + seconds_of(program, plans::APPLY);
    let tokens = candidate.tokens * candidate.accumulation;
    PlanCost { bytes: program.peak(), seconds_per_token: step / tokens as f64 }
}

/// Expected seconds of the plan `name`; 0 if the program does not have it.
fn seconds_of(program: &Program, name: &str) -> f64 {
    let plan = program.index(name).map(|k| &program.plans()[k].1);
    plan.map_or(0.0, |plan| seconds(program, plan))
}
