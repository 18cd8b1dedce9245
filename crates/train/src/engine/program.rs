//! Plans a configuration: which choices are fixed, which are searched, and the bill if nothing fits. Invariant: an
//! explicit value of a key is planned as given; only `auto` is chosen.

use super::remedies::with_remedies;
use super::trained_model::TrainedModel;
use crate::TrainError;
use crate::config::{OptimizerKind, PrecisionKind, Remat, RematPolicy, TrainConfig, sizes_of_step};
use plimsoll_data::codons;
use plimsoll_graph::ops::{Adafactor, AdamW, Sgd};
use plimsoll_graph::{Bounds, Bytes, Graph, Param};
use plimsoll_models::FRAMES;
use plimsoll_plan::{
    Candidate, Fuse, Optimizer, ParameterGroup, PlanError, Precision, Program, RematChoice, Remedy, Target,
    Training, TrainingChoice, TrainingSearch,
};
use plimsoll_runtime::{Observer, RuntimeError};
use std::collections::BTreeSet;

/// Default of `batch.sequences`: one sequence for every this many tokens of a micro-batch.
const TOKENS_PER_SEQUENCE: u64 = 8;

/// Candidates for `memory.loss_chunk`, the number of rows of logits materialised at a time.
const CHUNKS: [u32; 3] = [64, 256, 1024];

/// Number of halvings of a batch of an evaluation.
const SIZES: usize = 6;

/// Ops recomputed under `memory.remat: selective`: memory-bound ops, which are cheap to compute again.
const CHEAP: [&str; 7] = ["layer_norm", "rms_norm", "gelu", "glu", "relu", "dropout", "dispatch"];

/// Searches the fastest plans for a configuration within a memory budget on a target.
pub(super) fn search(
    config: &TrainConfig,
    subject: &TrainedModel,
    target: &Target,
    budget: Bytes,
    observer: &dyn Observer,
) -> Result<TrainingChoice, TrainError> {
    let stopped = || observer.stop().is_some();
    let refused = match search_alone(config, subject, target, budget, observer) {
        Err(TrainError::Runtime(RuntimeError::Plan(PlanError::OverBudget(bill)))) => bill,
        other => return other,
    };
    let other = |config: &TrainConfig| {
        let subject = subject.like(&config.model);
        let build = |tokens, chunk, layers| subject.graphs(bounds(config, tokens), chunk, layers);
        with_search(config, &subject, budget, &stopped, |search| search.find(target, &build))
    };
    let bill = with_remedies(*refused, config, &other);
    match stopped() {
        true => Err(interrupted(observer).into()),
        false => Err(PlanError::OverBudget(Box::new(bill)).into()),
    }
}

/// Like [`search`], but the bill of a refusal offers no remedies, each of which is planned.
pub(super) fn search_alone(
    config: &TrainConfig,
    subject: &TrainedModel,
    target: &Target,
    budget: Bytes,
    observer: &dyn Observer,
) -> Result<TrainingChoice, TrainError> {
    let stopped = || observer.stop().is_some();
    let plan = || {
        let build = |tokens, chunk, layers| subject.graphs(bounds(config, tokens), chunk, layers);
        let (sample, _) = build(sizes(config)[0], CHUNKS[0], 1)?;
        has_ops(config, &sample)?;
        with_search(config, subject, budget, &stopped, |search| search.run(target, &build))
    };
    match plan() {
        Ok(found) => Ok(found),
        Err(PlanError::Stopped) => Err(interrupted(observer).into()),
        Err(error) => Err(error.into()),
    }
}

/// Returns settings with which a plan needs at least a tenth less memory than `program`, each priced by the planner
/// against `tokens_per_second`, the expected rate of `program`. `beside` is the part of the memory budget that is not the
/// plan's.
pub(super) fn remedies(
    config: &TrainConfig,
    subject: &TrainedModel,
    (program, tokens_per_second): (&Program, f64),
    beside: Bytes,
    observer: &dyn Observer,
) -> Vec<Remedy> {
    let stopped = || observer.stop().is_some();
    let budget = Bytes(program.peak().0 / 10 * 9);
    let plan = |config: &TrainConfig| {
        let subject = subject.like(&config.model);
        let build = |tokens, chunk, layers| subject.graphs(bounds(config, tokens), chunk, layers);
        with_search(config, &subject, budget, &stopped, |search| search.find(program.target(), &build))
    };
    let mut bill = program.bill(budget, vec![]);
    bill.seconds_per_token = 1.0 / tokens_per_second;
    // A smaller budget alone: more recomputation, or smaller micro-batches.
    if let Ok(Some(found)) = plan(config) {
        let megabytes = (found.program.peak() + beside).0.div_ceil(1_000_000);
        bill.offer(format!("--budget {megabytes}MB"), found.program.peak(), 1.0 / found.tokens_per_second);
    }
    with_remedies(bill, config, &plan).remedies
}

/// Whether any plan of a configuration fits the memory budget.
pub(super) fn fits(
    config: &TrainConfig,
    subject: &TrainedModel,
    target: &Target,
    budget: Bytes,
    observer: &dyn Observer,
) -> Result<bool, TrainError> {
    let stopped = &|| observer.stop().is_some();
    let build = |tokens, chunk, layers| subject.graphs(bounds(config, tokens), chunk, layers);
    match with_search(config, subject, budget, stopped, |search| search.fits(target, &build)) {
        Err(PlanError::Stopped) => Err(interrupted(observer).into()),
        found => Ok(found?),
    }
}

/// The error of a search that was interrupted by a signal.
fn interrupted(observer: &dyn Observer) -> RuntimeError {
    let kept = "no plan was found yet, and nothing was written".to_owned();
    RuntimeError::Interrupted { signal: observer.stop().unwrap_or_default(), kept }
}

/// Builds the search space, that is the choices that a configuration leaves open, and passes it to `ask`.
fn with_search<T>(
    config: &TrainConfig,
    subject: &TrainedModel,
    budget: Bytes,
    stopped: &dyn Fn() -> bool,
    ask: impl FnOnce(&TrainingSearch<'_>) -> Result<T, PlanError>,
) -> Result<T, PlanError> {
    let group = |param: &Param| subject.group(config, param);
    let tokens = sizes(config);
    let optimizers = optimizers(config);
    let largest = tokens.iter().copied().max().unwrap_or(1);
    let chunks = match config.memory.loss_chunk.0 {
        Some(rows) => vec![rows.min(u64::from(u32::MAX)) as u32],
        None => CHUNKS.into_iter().filter(|&c| c == CHUNKS[0] || u64::from(c) <= largest).collect(),
    };
    let search = TrainingSearch {
        training: training(config, &group, optimizers[0]),
        budget,
        step_tokens: config.batch.tokens,
        tokens,
        chunks,
        optimizers,
        layers: subject.layers(),
        remat: remat(config),
        dynamic: config.dynamic_sizes(),
        stopped,
    };
    ask(&search)
}

/// Training options of a configuration, for steps of one micro-batch without recomputation.
fn training<'a>(
    config: &TrainConfig,
    group: &'a dyn Fn(&Param) -> ParameterGroup,
    optimizer: Optimizer,
) -> Training<'a> {
    Training {
        precision: precision(config.precision.kind),
        remat: plimsoll_plan::RecomputePolicy::None,
        optimizer,
        group,
        accumulation: 1,
        max_norm: config.optimizer.clip_norm.unwrap_or(0.0) as f32,
        ema: config.optimizer.ema.map(|decay| decay as f32),
        fuse: Fuse::default(),
    }
}

/// All choices of a plan that a search would make.
#[derive(Clone)]
pub(super) struct Exact {
    /// Micro-batch, rows of logits, and optimizer.
    pub(super) candidate: Candidate,
    /// Recomputation.
    pub(super) remat: plimsoll_plan::RecomputePolicy,
    /// Ops to fuse.
    pub(super) fuse: Fuse,
    /// Largest gradient norm, in place of that of the configuration.
    pub(super) max_norm: Option<f32>,
}

impl Exact {
    fn training<'a>(&self, config: &TrainConfig, group: &'a dyn Fn(&Param) -> ParameterGroup) -> Training<'a> {
        let of_config = training(config, group, self.candidate.optimizer);
        Training {
            remat: self.remat.clone(),
            accumulation: self.candidate.accumulation,
            max_norm: self.max_norm.unwrap_or(of_config.max_norm),
            fuse: self.fuse,
            ..of_config
        }
    }
}

/// Plans exactly these choices, without a budget.
pub(super) fn exactly(
    config: &TrainConfig,
    subject: &TrainedModel,
    target: &Target,
    exact: &Exact,
) -> Result<Program, PlanError> {
    let Candidate { tokens, chunk, .. } = exact.candidate;
    let group = |param: &Param| subject.group(config, param);
    let (forward, evaluation) = subject.graphs(bounds(config, tokens), chunk, subject.layers())?;
    exact.training(config, &group).program(&forward, &evaluation, target)
}

/// Whether the plan updates each parameter as soon as its gradient is complete.
pub(super) fn updates_at_once(config: &TrainConfig, subject: &TrainedModel, exact: &Exact) -> bool {
    exact.training(config, &|param| subject.group(config, param)).steps_at_once()
}

/// Bounds of a micro-batch of `tokens` tokens. With `memory.dynamic` it consists of packs of the smallest size.
pub(super) fn bounds(config: &TrainConfig, tokens: u64) -> Bounds {
    let Some(&unit) = config.dynamic_sizes().last() else { return bounds_of_pack(config, tokens) };
    let Bounds { sequences, longest, .. } = bounds_of_pack(config, unit);
    Bounds { tokens, sequences: sequences.saturating_mul(tokens.div_ceil(unit)), longest }
}

/// Bounds of a pack of `tokens` tokens. For a head, a token is a row.
fn bounds_of_pack(config: &TrainConfig, tokens: u64) -> Bounds {
    if config.model.kind == crate::config::ModelKind::Head {
        return Bounds { tokens, sequences: tokens, longest: 1 };
    }
    let longest = config.longest_sequence();
    if config.model.kind == crate::config::ModelKind::Caller {
        // The shortest window that may be drawn.
        let shortest = config.window_lengths().min();
        let least = (codons::tokens_of(shortest.unwrap_or(0) as usize) as u64).max(FRAMES);
        let sequences = config.batch.sequences.0.unwrap_or(tokens / least).clamp(1, tokens);
        // The longest span of attention is a frame.
        return Bounds { tokens, sequences, longest: (longest / FRAMES).min(tokens) };
    }
    let sequences = config.batch.sequences.0.unwrap_or(tokens / TOKENS_PER_SEQUENCE).clamp(1, tokens);
    Bounds { tokens, sequences, longest: longest.min(tokens) }
}

/// Bounds of the largest pack of data that may be chosen: a micro-batch, or the smallest one of `memory.dynamic`.
pub(super) fn largest(config: &TrainConfig) -> Bounds {
    if let Some(&unit) = config.dynamic_sizes().last() {
        return bounds(config, unit);
    }
    bounds(config, sizes(config).into_iter().max().unwrap_or(1))
}

/// Candidate micro-batch sizes in tokens, in descending order: `batch.tokens` divided by powers of two, as long as the division
/// is exact and the longest sequence still fits.
fn sizes(config: &TrainConfig) -> Vec<u64> {
    if let Some(tokens) = config.batch.micro_tokens.0 {
        return vec![tokens];
    }
    if let Some(dynamic) = &config.memory.dynamic {
        return dynamic.max_batch.0.map_or_else(|| config.dynamic_sizes(), |max| vec![max]);
    }
    match sizes_of_step(config).collect::<Vec<u64>>() {
        // Such a configuration is refused by its rules.
        sizes if sizes.is_empty() => vec![config.batch.tokens],
        sizes => sizes,
    }
}

/// Sizes of a batch of an evaluation, in descending order: that of a micro-step, and its halves as long as the longest
/// sequence fits.
pub(super) fn smaller_sizes(config: &TrainConfig) -> Vec<u64> {
    let head = config.model.kind == crate::config::ModelKind::Head;
    let least = if head { 1 } else { config.longest_sequence() };
    let first = sizes(config).first().copied().unwrap_or(1);
    let halves =
        std::iter::successors(Some(first), |n| Some(n / 2)).take_while(|&n| n >= least.min(first).max(1));
    halves.take(SIZES).collect()
}

/// The number format of an evaluation.
pub(super) fn inference_precision(config: &TrainConfig) -> Precision {
    precision(config.precision.kind)
}

pub(super) fn optimizers(config: &TrainConfig) -> Vec<Optimizer> {
    let o = &config.optimizer;
    let weight_decay = o.weight_decay as f32;
    let adam = AdamW { beta1: o.betas[0] as f32, beta2: o.betas[1] as f32, eps: o.eps as f32, weight_decay };
    match o.kind {
        OptimizerKind::Auto => vec![Optimizer::AdamW(adam), Optimizer::AdamW8bit(adam)],
        OptimizerKind::Adamw => vec![Optimizer::AdamW(adam)],
        OptimizerKind::Adamw8bit => vec![Optimizer::AdamW8bit(adam)],
        // `eps1` is added to the squared gradients; 1e-30 is the value of Shazeer and Stern.
        OptimizerKind::Adafactor => {
            vec![Optimizer::Adafactor(Adafactor { eps1: 1e-30, clip: o.update_clip as f32, weight_decay })]
        }
        OptimizerKind::Sgd => {
            vec![Optimizer::Sgd(Sgd { momentum: o.momentum as f32, weight_decay, nesterov: o.nesterov })]
        }
    }
}

/// The value of `optimizer.kind` for a planned optimizer.
pub(super) fn kind_of(optimizer: &Optimizer) -> OptimizerKind {
    match optimizer {
        Optimizer::AdamW(_) => OptimizerKind::Adamw,
        Optimizer::AdamW8bit(_) => OptimizerKind::Adamw8bit,
        Optimizer::Adafactor(_) => OptimizerKind::Adafactor,
        Optimizer::Sgd(_) => OptimizerKind::Sgd,
    }
}

fn precision(kind: PrecisionKind) -> Precision {
    match kind {
        PrecisionKind::F32 => Precision::F32,
        PrecisionKind::Tf32 => Precision::Tf32,
        PrecisionKind::Bf16 => Precision::Bf16,
        PrecisionKind::Fp16 => Precision::Fp16,
    }
}

fn remat(config: &TrainConfig) -> RematChoice {
    let ops = |ops: &[&str]| {
        plimsoll_plan::RecomputePolicy::Selective(ops.iter().map(|op| (*op).to_owned()).collect())
    };
    let of = match &config.memory.remat {
        Remat::Policy(RematPolicy::Auto) => return RematChoice::Auto,
        Remat::Policy(RematPolicy::None) => plimsoll_plan::RecomputePolicy::None,
        Remat::Policy(RematPolicy::Full) => plimsoll_plan::RecomputePolicy::Full,
        Remat::Policy(RematPolicy::EveryN) => {
            plimsoll_plan::RecomputePolicy::EveryN(config.memory.remat_every as u32)
        }
        Remat::Policy(RematPolicy::Selective) => ops(&CHEAP),
        Remat::Ops(names) => plimsoll_plan::RecomputePolicy::Selective(names.clone()),
    };
    RematChoice::Given(match config.memory.remat_layers {
        None => of,
        Some([first, last]) => {
            plimsoll_plan::RecomputePolicy::Layers { first: first as u32, last: last as u32, of: Box::new(of) }
        }
    })
}

/// Rejects a list of ops to recompute if one of them is not in the model, since it would have no effect.
fn has_ops(config: &TrainConfig, graph: &Graph) -> Result<(), PlanError> {
    let Remat::Ops(names) = &config.memory.remat else { return Ok(()) };
    let there: BTreeSet<&str> = graph.nodes.iter().map(|node| node.op.name()).collect();
    match names.iter().find(|name| !there.contains(name.as_str())) {
        None => Ok(()),
        Some(name) => {
            let there = there.into_iter().collect::<Vec<_>>().join(", ");
            let why = format!("the model has no op `{name}`; it has {there}");
            Err(PlanError::BadPolicy { field: "memory.remat", why })
        }
    }
}
