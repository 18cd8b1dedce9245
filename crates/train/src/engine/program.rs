//! Plans a configuration: which choices are fixed, which are searched, and the bill if nothing fits. Invariant: an
//! explicit value of a key is planned as given; only `auto` is chosen.

use super::remedies::with_remedies;
use super::trained_model::TrainedModel;
use crate::TrainError;
use crate::config::{
    self, ModelKind, OffloadPart, OffloadPolicy, OptimizerKind, Remat, RematPolicy, TrainConfig, halves,
};
use plimsoll_data::codons;
use plimsoll_graph::ops::{Adafactor, AdamW, Sgd};
use plimsoll_graph::{Bounds, Bytes, Dim, Graph, Op, Param, Phase};
use plimsoll_models::FRAMES;
use plimsoll_plan::{
    ActivationOffload, ActivationPolicy, Candidate, Fuse, Kernels, Offload, Optimizer, ParameterGroup,
    PlanError, Program, RematChoice, Remedy, Room, Target, Training, TrainingChoice, TrainingSearch, Window,
};
use plimsoll_runtime::{Observer, RuntimeError};
use plimsoll_setting::Setting;
use std::cmp::Ordering;
use std::collections::BTreeSet;

/// Tokens of a pack for each sequence, for the default of `batch.sequences`.
const TOKENS_PER_SEQUENCE: u64 = 8;

/// Values of `memory.loss_chunk`, the number of rows of logits materialised at a time, that are chosen.
const CHUNKS: [u32; 3] = [64, 256, 1024];

/// Maximum number of logits at a time on a CPU, whose caches hold them, unless the smallest chunk has more.
const HOST_LOGITS: u64 = 2 << 20;

/// Number of halvings of a batch of an evaluation.
const EVALUATION_SIZES: usize = 6;

/// Ops recomputed under `memory.remat: selective`: memory-bound ops, which are cheap to compute again.
const CHEAP: [&str; 7] = ["layer_norm", "rms_norm", "gelu", "glu", "relu", "dropout", "dispatch"];

/// The memory that plans may use.
#[derive(Clone, Copy)]
pub(super) struct PlanLimits {
    /// Memory budget.
    pub(super) budget: Bytes,
    /// Room for what is kept outside the memory of the device.
    pub(super) room: Room,
}

impl PlanLimits {
    /// A memory budget, and as much room outside it as any plan needs.
    pub(super) fn of(budget: Bytes) -> Self {
        Self { budget, room: Room::UNLIMITED }
    }

    /// Returns a plan within the budget if it has room outside the memory of the device.
    fn admit(&self, found: TrainingChoice) -> Result<TrainingChoice, PlanError> {
        self.room.admits(&found.program)?;
        Ok(found)
    }
}

/// Searches the fastest plans for a configuration within memory limits on a target.
pub(super) fn search(
    config: &TrainConfig,
    model: &TrainedModel,
    target: &Target,
    limits: PlanLimits,
    observer: &dyn Observer,
) -> Result<TrainingChoice, TrainError> {
    let search = PlanSearch { config, model, target, limits, observer };
    let refused = match search.run() {
        Err(TrainError::Runtime(RuntimeError::Plan(PlanError::OverBudget(bill)))) => bill,
        other => return other,
    };
    let bill = with_remedies(*refused, config, target, &|config| search.remedy_of(config));
    if search.is_stopped() {
        Err(interrupted(observer).into())
    } else {
        Err(PlanError::OverBudget(Box::new(bill)).into())
    }
}

/// Like [`search`], but the bill of a refusal offers no remedies, each of which is planned.
pub(super) fn search_alone(
    config: &TrainConfig,
    model: &TrainedModel,
    target: &Target,
    limits: PlanLimits,
    observer: &dyn Observer,
) -> Result<TrainingChoice, TrainError> {
    PlanSearch { config, model, target, limits, observer }.run()
}

/// The plan of a run, for which remedies are priced, and the memory outside it.
#[derive(Clone, Copy)]
pub(super) struct RunningPlan<'a> {
    pub(super) program: &'a Program,
    /// Expected rate of the plan.
    pub(super) tokens_per_second: f64,
    /// Bytes of the memory budget that the process and the data use, on a CPU.
    pub(super) outside_plans: Bytes,
    /// Free host memory and free disk space for offloaded values.
    pub(super) room: Room,
}

/// Returns settings with which a plan needs at least a tenth less memory than that of the run, each priced by the planner
/// against the expected rate of the run.
pub(super) fn remedies(
    config: &TrainConfig,
    model: &TrainedModel,
    running: RunningPlan<'_>,
    observer: &dyn Observer,
) -> Vec<Remedy> {
    let RunningPlan { program, tokens_per_second, outside_plans, room } = running;
    let budget = Bytes(program.peak().0 / 10 * 9);
    let limits = PlanLimits { budget, room };
    let search = PlanSearch { config, model, target: program.target(), limits, observer };
    let mut bill = program.bill(budget, vec![]);
    bill.seconds_per_token = 1.0 / tokens_per_second;
    // A smaller budget alone: more recomputation, or smaller micro-batches.
    if let Ok(Some(found)) = search.remedy_of(config) {
        let megabytes = (found.program.peak() + outside_plans).0.div_ceil(1_000_000);
        let smaller = Setting::Budget.to(format!("{megabytes}MB"));
        bill.offer(vec![smaller], found.program.peak(), 1.0 / found.tokens_per_second);
    }
    with_remedies(bill, config, program.target(), &|config| search.remedy_of(config)).remedies
}

/// Whether any plan of a configuration fits the memory budget.
pub(super) fn fits(
    config: &TrainConfig,
    model: &TrainedModel,
    target: &Target,
    budget: Bytes,
    observer: &dyn Observer,
) -> Result<bool, TrainError> {
    let search = PlanSearch { config, model, target, limits: PlanLimits::of(budget), observer };
    for offload in config.memory.offloads() {
        match search.fits(Offloading::least(offload)) {
            Ok(false) => {}
            Err(PlanError::Stopped) => return Err(interrupted(observer).into()),
            found => return Ok(found?),
        }
    }
    Ok(false)
}

/// Result of a search with every choice of `memory.offload`.
enum FastestPlan {
    Found(Box<TrainingChoice>),
    Refused(OffloadRefusal),
}

/// Why no choice of `memory.offload` fits.
enum OffloadRefusal {
    /// This choice exceeds the memory budget. Its bill takes a search of its own.
    Budget(Offloading),
    Other(PlanError),
}

/// A search for the fastest plans of a configuration: the model and the target to plan for, and the memory limits.
#[derive(Clone, Copy)]
struct PlanSearch<'a> {
    config: &'a TrainConfig,
    model: &'a TrainedModel,
    target: &'a Target,
    limits: PlanLimits,
    /// Tells whether a signal has stopped the search.
    observer: &'a dyn Observer,
}

impl PlanSearch<'_> {
    /// Returns the fastest plan; a refusal has the bill of the smallest plan, without remedies.
    fn run(&self) -> Result<TrainingChoice, TrainError> {
        match self.plan() {
            Err(PlanError::Stopped) => Err(interrupted(self.observer).into()),
            found => Ok(found?),
        }
    }

    fn plan(&self) -> Result<TrainingChoice, PlanError> {
        let (sample, _) = self.graphs(sizes(self.config)[0], CHUNKS[0], 1)?;
        has_ops(self.config, &sample)?;
        match self.fastest()? {
            FastestPlan::Found(found) => {
                offloads(self.config, &found.program)?;
                Ok(*found)
            }
            FastestPlan::Refused(OffloadRefusal::Other(error)) => Err(error),
            // Searched again for its bill, which takes long and which the other choices do not need.
            FastestPlan::Refused(OffloadRefusal::Budget(offloading)) => self
                .with_choices(offloading, |search| {
                    search.run(self.target, &|tokens, chunk, layers| self.graphs(tokens, chunk, layers))
                }),
        }
    }

    /// The graphs of a micro-batch of `tokens` tokens and of an evaluation batch.
    fn graphs(&self, tokens: u64, chunk: u32, layers: u32) -> Result<(Graph, Graph), PlanError> {
        self.model.graphs(bounds(self.config, tokens), chunk, layers)
    }

    fn is_stopped(&self) -> bool {
        self.observer.stop().is_some()
    }

    /// Returns the fastest plan with one choice of `memory.offload` within the budget; `None` if none fits.
    fn find(&self, offloading: Offloading) -> Result<Option<TrainingChoice>, PlanError> {
        self.with_choices(offloading, |search| {
            search.find(self.target, &|tokens, chunk, layers| self.graphs(tokens, chunk, layers))
        })
    }

    /// Whether any plan with one choice of `memory.offload` fits the budget.
    fn fits(&self, offloading: Offloading) -> Result<bool, PlanError> {
        self.with_choices(offloading, |search| {
            search.fits(self.target, &|tokens, chunk, layers| self.graphs(tokens, chunk, layers))
        })
    }

    /// Returns the fastest plan with one choice of `memory.offload`; `None` if none fits. The error of a plan that fits the
    /// budget, but exceeds the free host memory or disk space, is stored in `over_room`.
    fn find_in_room(
        &self,
        offloading: Offloading,
        over_room: &mut Option<PlanError>,
    ) -> Result<Option<TrainingChoice>, PlanError> {
        let found = self.find(offloading)?;
        match found.map(|found| self.limits.admit(found)).transpose() {
            Err(error @ PlanError::OverRoom { .. }) => {
                *over_room = Some(error);
                Ok(None)
            }
            other => other,
        }
    }

    /// Returns the fastest plan with one choice of `memory.offload`. Where the full window does not fit, smaller windows are
    /// tried: they take less of the device, and of host memory on the way to a file.
    fn find_with_windows(
        &self,
        offload: Offload,
        over_room: &mut Option<PlanError>,
    ) -> Result<Option<TrainingChoice>, PlanError> {
        match self.find_in_room(Offloading { offload, window: Window::Full }, over_room) {
            Ok(None) if !offload.is_empty() => {
                let searched =
                    SMALLER_WINDOWS.map(|window| self.find_in_room(Offloading { offload, window }, over_room));
                fastest_of(self.config, searched)
            }
            other => other,
        }
    }

    /// Searches with every choice of `memory.offload` for the fastest plan. Where a choice does not fit, it is tried with fewer
    /// copies ahead of their use, which takes less memory. If none fits, the refusal is that of the choice that keeps most
    /// outside the memory of the device.
    fn fastest(&self) -> Result<FastestPlan, PlanError> {
        let config = self.config;
        let is_auto = config.memory.offload == config::Offload::Policy(OffloadPolicy::Auto);
        let mut best: Option<TrainingChoice> = None;
        let mut refused = None;
        for offload in config.memory.offloads() {
            let without_activations = Offload { activations: false, ..offload };
            let mut over_room = None;
            let mut found = self.find_with_windows(offload, &mut over_room);
            // Offloaded activations take most of the room, and recomputing them instead takes none. Without activations, the
            // choice of activations alone is the first choice, which was searched already.
            let may_recompute = is_auto && offload.activations && !without_activations.is_empty();
            if may_recompute && over_room.is_some() && matches!(found, Ok(None)) {
                found = self.find_with_windows(without_activations, &mut None);
            }
            match found {
                Ok(Some(found)) => {
                    // Without offload and without recomputation nothing is done twice, and nothing waits for a copy.
                    let is_fastest =
                        offload.is_empty() && recomputes_nothing(&found) && rank(config, &found) == 0;
                    best = Some(better(config, best, found));
                    if is_fastest {
                        break;
                    }
                }
                Ok(None) => {
                    refused = Some(match over_room {
                        Some(error) => OffloadRefusal::Other(error),
                        None => OffloadRefusal::Budget(Offloading::least(offload)),
                    });
                }
                Err(error @ PlanError::TooLarge { .. }) => refused = Some(OffloadRefusal::Other(error)),
                // `auto` has nowhere to keep anything: its first choice, which keeps all on the device, decides.
                Err(error @ PlanError::NoSpace { .. }) => {
                    refused.get_or_insert(OffloadRefusal::Other(error));
                }
                Err(error) => return Err(error),
            }
        }
        if let Some(best) = best {
            return Ok(FastestPlan::Found(Box::new(best)));
        }
        Ok(FastestPlan::Refused(refused.unwrap_or_else(|| {
            OffloadRefusal::Other(PlanError::BadPolicy {
                field: "memory.offload",
                why: "there is no choice".to_owned(),
            })
        })))
    }

    /// The fastest plan of another configuration within the same limits; see [`PlanSearch::remedy`].
    fn remedy_of(&self, config: &TrainConfig) -> Result<Option<TrainingChoice>, PlanError> {
        let model = self.model.like(&config.model);
        PlanSearch { config, model: &model, ..*self }.remedy()
    }

    /// The fastest plan that may be offered as a remedy, or `None` if the configuration does not fit. A bill prices many
    /// configurations with every choice of `memory.offload`, so the choice that keeps most outside the memory of the device is
    /// tried first: the others are searched only if it fits.
    fn remedy(&self) -> Result<Option<TrainingChoice>, PlanError> {
        let smallest = self.config.memory.offloads().last().copied().filter(|offload| !offload.is_empty());
        // Errors are those of the search below.
        if let Some(offload) = smallest
            && let Ok(false) = self.fits(Offloading::least(offload))
        {
            return Ok(None);
        }
        Ok(match self.fastest()? {
            FastestPlan::Found(found) => Some(*found),
            FastestPlan::Refused(_) => None,
        })
    }

    /// Builds the search space, that is the choices that the configuration leaves open, and passes it to `ask`.
    fn with_choices<T>(
        &self,
        offloading: Offloading,
        ask: impl FnOnce(&TrainingSearch<'_>) -> Result<T, PlanError>,
    ) -> Result<T, PlanError> {
        let config = self.config;
        let group = |param: &Param| self.model.group(config, param);
        let tokens = sizes(config);
        let optimizers = optimizers(config);
        let logits = LogitsChunking::of(config, self.model, self.target)?;
        let search = TrainingSearch {
            training: Training {
                offload: offloading.offload,
                window: offloading.window,
                ..training(config, &group, optimizers[0])
            },
            budget: self.limits.budget,
            step_tokens: config.batch.tokens,
            tokens,
            chunk: &|tokens| logits.chunk(tokens),
            optimizers,
            layers: self.model.layers(),
            remat: remat(config),
            dynamic: config.dynamic_sizes(),
            stopped: &|| self.is_stopped(),
        };
        ask(&search)
    }
}

/// The windows that are tried where the full one does not fit.
const SMALLER_WINDOWS: [Window; 3] = [Window::Part(4), Window::Part(16), Window::CLOSED];

/// A choice of `memory.offload`, with the limit on moves that run ahead ([`Training::window`]).
#[derive(Clone, Copy)]
struct Offloading {
    offload: Offload,
    window: Window,
}

impl Offloading {
    /// The copies of `offload` that need the least memory.
    fn least(offload: Offload) -> Self {
        Self { offload, window: if offload.is_empty() { Window::Full } else { Window::CLOSED } }
    }
}

/// Position of a plan's optimizer in the order of preference.
fn rank(config: &TrainConfig, found: &TrainingChoice) -> usize {
    let kind = kind_of(&found.candidate.optimizer);
    optimizers(config).iter().position(|optimizer| kind_of(optimizer) == kind).unwrap_or(usize::MAX)
}

/// Returns the plan whose optimizer comes first in the order of preference, because the optimizer decides results. Of two plans
/// with the same optimizer, returns the faster; if they are equally fast, `first`.
fn better(config: &TrainConfig, first: Option<TrainingChoice>, second: TrainingChoice) -> TrainingChoice {
    let Some(first) = first else { return second };
    let is_first = match rank(config, &first).cmp(&rank(config, &second)) {
        Ordering::Less => true,
        Ordering::Equal => first.tokens_per_second >= second.tokens_per_second,
        Ordering::Greater => false,
    };
    if is_first { first } else { second }
}

/// The best of the plans that were found.
fn fastest_of(
    config: &TrainConfig,
    searched: impl IntoIterator<Item = Result<Option<TrainingChoice>, PlanError>>,
) -> Result<Option<TrainingChoice>, PlanError> {
    searched.into_iter().try_fold(None, |best, found| {
        Ok(match found? {
            Some(found) => Some(better(config, best, found)),
            None => best,
        })
    })
}

/// Whether a plan computes every node once.
fn recomputes_nothing(found: &TrainingChoice) -> bool {
    let mut nodes = found.program.plans().iter().flat_map(|(_, plan)| &plan.graph.nodes);
    nodes.all(|node| node.phase != Phase::Recompute || matches!(node.op, Op::Move(_)))
}

/// The error of a search that was interrupted by a signal.
fn interrupted(observer: &dyn Observer) -> RuntimeError {
    let kept = "no plan was found yet, and nothing was written".to_owned();
    RuntimeError::Interrupted { signal: observer.stop().unwrap_or_default(), kept }
}

/// Sizes that determine the rows of logits that are computed at a time.
struct LogitsChunking {
    /// The value of `memory.loss_chunk`, if it is set.
    loss_chunk: Option<u64>,
    /// Largest number of classes of a loss.
    classes: u64,
    /// Elements that the inputs of all layers have for each token.
    inputs: u64,
    /// Maximum number of logits at a time.
    max_logits: u64,
}

impl LogitsChunking {
    fn of(config: &TrainConfig, model: &TrainedModel, target: &Target) -> Result<Self, PlanError> {
        let pack = bounds(config, config.pack_tokens());
        let (graph, _) = model.graphs(pack, CHUNKS[0], model.layers().min(1))?;
        let losses = graph.nodes.iter().filter(|node| matches!(node.op, Op::LinearCrossEntropy(_)));
        let sizes = losses.filter_map(|node| match graph.spec(node.inputs[1]).shape[..] {
            [Dim::Fixed(classes), Dim::Fixed(width)] => Some([classes, width]),
            _ => None,
        });
        let [classes, width] = sizes.max_by_key(|[classes, _]| *classes).unwrap_or([1, 1]);
        let max_logits = match target.kernels {
            Kernels::Cuda(_) => u64::MAX,
            Kernels::Reference | Kernels::Cpu(_) => HOST_LOGITS,
        };
        let inputs = width.saturating_mul(u64::from(model.layers().max(1)));
        Ok(Self { loss_chunk: config.memory.loss_chunk.0, classes, inputs, max_logits })
    }

    /// Rows of logits that a micro-step of `tokens` tokens computes at a time. The sums over rows are rounded by chunks, so the
    /// number must not depend on the budget: it is the largest whose logits are no larger than the inputs of all layers.
    fn chunk(&self, tokens: u64) -> u32 {
        if let Some(rows) = self.loss_chunk {
            return rows.min(u64::from(u32::MAX)) as u32;
        }
        let max_logits = tokens.saturating_mul(self.inputs).min(self.max_logits);
        let largest = CHUNKS.into_iter().rev().find(|&rows| {
            let rows = u64::from(rows);
            rows <= tokens && rows.saturating_mul(self.classes) <= max_logits
        });
        largest.unwrap_or(CHUNKS[0])
    }
}

/// Training options of a configuration, for steps of one micro-batch without recomputation.
fn training<'a>(
    config: &TrainConfig,
    group: &'a dyn Fn(&Param) -> ParameterGroup,
    optimizer: Optimizer,
) -> Training<'a> {
    Training {
        precision: config.precision.kind,
        remat: plimsoll_plan::RecomputePolicy::None,
        activations: ActivationOffload::All,
        optimizer,
        group,
        accumulation: 1,
        max_norm: config.optimizer.clip_norm.unwrap_or(0.0) as f32,
        ema: config.optimizer.ema.map(|decay| decay as f32),
        fuse: Fuse::default(),
        offload: Offload::default(),
        window: Window::Full,
        block: None,
    }
}

/// All choices of a plan that a search would make.
#[derive(Clone)]
pub(super) struct ExactPlan {
    /// Micro-batch, rows of logits, and optimizer.
    pub(super) candidate: Candidate,
    /// Recomputation and offload of the activations.
    pub(super) activations: ActivationPolicy,
    /// Ops to fuse.
    pub(super) fuse: Fuse,
    /// Largest gradient norm, in place of that of the configuration.
    pub(super) max_norm: Option<f32>,
    /// Values that are kept outside the memory of the device.
    pub(super) offload: Offload,
    /// Limit on the bytes of moves that run ahead of launches.
    pub(super) window: Window,
}

impl ExactPlan {
    fn training<'a>(&self, config: &TrainConfig, group: &'a dyn Fn(&Param) -> ParameterGroup) -> Training<'a> {
        let of_config = training(config, group, self.candidate.optimizer);
        Training {
            remat: self.activations.recompute.clone(),
            activations: self.activations.offload.clone(),
            accumulation: self.candidate.accumulation,
            max_norm: self.max_norm.unwrap_or(of_config.max_norm),
            fuse: self.fuse,
            offload: self.offload,
            window: self.window,
            ..of_config
        }
    }
}

/// Plans exactly these choices, without a budget.
pub(super) fn exactly(
    config: &TrainConfig,
    model: &TrainedModel,
    target: &Target,
    exact: &ExactPlan,
) -> Result<Program, PlanError> {
    let Candidate { tokens, chunk, .. } = exact.candidate;
    let group = |param: &Param| model.group(config, param);
    let (forward, evaluation) = model.graphs(bounds(config, tokens), chunk, model.layers())?;
    exact.training(config, &group).program(&forward, &evaluation, target)
}

/// Whether the plan updates each parameter as soon as its gradient is complete.
pub(super) fn updates_at_once(config: &TrainConfig, model: &TrainedModel, exact: &ExactPlan) -> bool {
    exact.training(config, &|param| model.group(config, param)).updates_immediately()
}

/// Bounds of a micro-batch of `tokens` tokens: of as many packs as it has room for.
pub(super) fn bounds(config: &TrainConfig, tokens: u64) -> Bounds {
    let pack = pack_bounds(config);
    let packs = (tokens / pack.tokens).max(1);
    // Every sequence has a token, so there are no more of them than tokens.
    let sequences = pack.sequences.saturating_mul(packs).clamp(1, tokens.max(1));
    Bounds { tokens, sequences, longest: pack.longest.min(tokens), packs }
}

/// Bounds of a pack. For a head, a token is a row.
pub(super) fn pack_bounds(config: &TrainConfig) -> Bounds {
    let tokens = config.pack_tokens();
    if config.model.kind == ModelKind::Head {
        return Bounds { tokens, sequences: tokens, longest: 1, packs: 1 };
    }
    let longest = config.longest_sequence();
    if config.model.kind == ModelKind::Caller {
        // The shortest window that may be drawn.
        let shortest = config.window_lengths().min();
        let shortest_tokens = (codons::tokens_of(shortest.unwrap_or(0) as usize) as u64).max(FRAMES);
        let sequences = config.batch.sequences.0.unwrap_or(tokens / shortest_tokens).clamp(1, tokens);
        // The longest span of attention is a frame.
        return Bounds { tokens, sequences, longest: (longest / FRAMES).min(tokens), packs: 1 };
    }
    let sequences = config.batch.sequences.0.unwrap_or(tokens / TOKENS_PER_SEQUENCE).clamp(1, tokens);
    Bounds { tokens, sequences, longest: longest.min(tokens), packs: 1 }
}

/// Bounds of the largest micro-batch that may be chosen.
pub(super) fn largest(config: &TrainConfig) -> Bounds {
    bounds(config, sizes(config).into_iter().max().unwrap_or(1))
}

/// Candidate micro-batch sizes in tokens, in descending order.
fn sizes(config: &TrainConfig) -> Vec<u64> {
    if let Some(tokens) = config.batch.micro_tokens.0 {
        return vec![tokens];
    }
    if let Some(dynamic) = &config.memory.dynamic {
        return dynamic.max_batch.0.map_or_else(|| config.dynamic_sizes(), |max| vec![max]);
    }
    match config.micro_sizes() {
        // Such a configuration is refused by its rules.
        sizes if sizes.is_empty() => vec![config.pack_tokens()],
        sizes => sizes,
    }
}

/// Sizes of a batch of an evaluation, in descending order: that of a micro-step, and half as many packs and so on.
pub(super) fn smaller_sizes(config: &TrainConfig) -> Vec<u64> {
    let pack = config.pack_tokens();
    let largest = sizes(config).first().map_or(1, |tokens| tokens / pack).max(1);
    halves(largest).take(EVALUATION_SIZES).map(|packs| packs.saturating_mul(pack)).collect()
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

fn remat(config: &TrainConfig) -> RematChoice {
    let of = match &config.memory.remat {
        Remat::Policy(RematPolicy::Auto) => return RematChoice::Auto,
        Remat::Policy(RematPolicy::None) => plimsoll_plan::RecomputePolicy::None,
        Remat::Policy(RematPolicy::Full) => plimsoll_plan::RecomputePolicy::Full,
        Remat::Policy(RematPolicy::EveryN) => {
            plimsoll_plan::RecomputePolicy::EveryN(config.memory.remat_every as u32)
        }
        Remat::Policy(RematPolicy::Selective) => {
            plimsoll_plan::RecomputePolicy::Selective(CHEAP.map(str::to_owned).to_vec())
        }
        Remat::Ops(names) => plimsoll_plan::RecomputePolicy::Selective(names.clone()),
    };
    RematChoice::Fixed(match config.memory.remat_layers {
        None => of,
        Some([first, last]) => {
            plimsoll_plan::RecomputePolicy::Layers { first: first as u32, last: last as u32, of: Box::new(of) }
        }
    })
}

/// Rejects a part of a list of what is kept outside the memory of the device if the run does not have it, since it would
/// have no effect.
fn offloads(config: &TrainConfig, program: &Program) -> Result<(), PlanError> {
    let config::Offload::Parts(parts) = &config.memory.offload else { return Ok(()) };
    let has = program.offload();
    for part in parts {
        let (is_there, name, why) = match part {
            OffloadPart::Optimizer => (has.optimizer, "optimizer", "the optimizer has no states"),
            OffloadPart::Masters => (has.masters, "masters", "there are masters only with 16-bit parameters"),
            OffloadPart::Gradients => (
                has.gradients,
                "gradients",
                "each parameter is updated as soon as its gradient is complete, so that none are kept",
            ),
            OffloadPart::Parameters => (has.parameters, "parameters", "the model has no parameters"),
            // They are offloaded where the search finds that better than to keep or recompute them.
            OffloadPart::Activations => (true, "activations", ""),
        };
        if !is_there {
            let why = format!("`{name}` has no effect: {why}; remove it from the list");
            return Err(PlanError::BadPolicy { field: "memory.offload", why });
        }
    }
    Ok(())
}

/// Rejects a list of ops to recompute if one of them is not in the model, since it would have no effect.
fn has_ops(config: &TrainConfig, graph: &Graph) -> Result<(), PlanError> {
    let Remat::Ops(names) = &config.memory.remat else { return Ok(()) };
    let model_ops: BTreeSet<&str> = graph.nodes.iter().map(|node| node.op.name()).collect();
    match names.iter().find(|name| !model_ops.contains(name.as_str())) {
        None => Ok(()),
        Some(name) => {
            let model_ops = model_ops.into_iter().collect::<Vec<_>>().join(", ");
            let why = format!("the model has no op `{name}`; it has {model_ops}");
            Err(PlanError::BadPolicy { field: "memory.remat", why })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::open_trained_model;
    use plimsoll_graph::Space;
    use plimsoll_runtime::Silent;

    /// A small language model on an H100, within a budget in bytes; `keys` are settings.
    fn planned_small(budget: u64, keys: &[&str]) -> Result<TrainingChoice, TrainError> {
        let text = "
model: {kind: dense_lm, vocabulary: 512, hidden: 256, layers: 6, heads: 4, intermediate: 1024}
data: {train: [corpus.txt], longest: 512}
batch: {tokens: 1024, micro_tokens: 1024}
memory: {remat: none}
run: {steps: 10}
";
        let keys: Vec<String> = keys.iter().map(|&key| key.to_owned()).collect();
        let config = TrainConfig::parse(text, "example", &keys).expect("a configuration");
        let target = Target::named("h100").expect("a target");
        let model = open_trained_model(&config, &mut Silent).expect("a model");
        search_alone(&config, &model, &target, PlanLimits::of(Bytes(budget)), &Silent)
    }

    /// What a plan keeps outside is what was asked for, and a part that the run does not have is refused by name.
    #[test]
    fn every_part_of_a_list_has_an_effect() {
        for (parts, keys) in [
            ("optimizer", vec!["optimizer.clip_norm=1.0"]),
            ("optimizer", vec!["optimizer.ema=0.99"]),
            ("optimizer, masters", vec!["precision.kind=bf16"]),
            ("gradients", vec!["optimizer.clip_norm=1.0"]),
            ("parameters", vec![]),
        ] {
            let offload = format!("memory.offload=[{parts}]");
            let keys: Vec<&str> = [&offload[..]].into_iter().chain(keys).collect();
            let found = planned_small(u64::MAX, &keys).unwrap_or_else(|e| panic!("{keys:?}: {e}"));
            assert_eq!(found.program.offload(), found.offload, "{keys:?}");
        }
        for (parts, keys, named) in [
            ("optimizer, masters", vec![], "`masters` has no effect"),
            ("optimizer, gradients", vec!["optimizer.clip_norm=null"], "`gradients` has no effect"),
            (
                "parameters, optimizer",
                vec!["optimizer.kind=sgd", "optimizer.momentum=0"],
                "`optimizer` has no effect",
            ),
        ] {
            let offload = format!("memory.offload=[{parts}]");
            let keys: Vec<&str> = [&offload[..]].into_iter().chain(keys).collect();
            let error = planned_small(u64::MAX, &keys).expect_err(named).to_string();
            assert!(error.contains(named), "{keys:?}: {error}");
        }
    }

    /// With `memory.offload: auto`, `optimizer.kind: auto` is AdamW with offloaded states where AdamW does not fit the device:
    /// 8-bit AdamW would change results.
    #[test]
    fn auto_offloads_before_it_changes_the_optimizer() {
        let keys = ["optimizer.kind=auto", "memory.offload=auto"];
        let kept = planned_small(u64::MAX, &keys).expect("planned");
        assert!(kept.offload.is_empty() && matches!(kept.candidate.optimizer, Optimizer::AdamW(_)));
        let resident = kept.program.peak().0;
        let without = planned_small(resident - (20 << 20), &keys[..1]).expect("planned");
        assert!(matches!(without.candidate.optimizer, Optimizer::AdamW8bit(_)));
        let found = planned_small(resident - (20 << 20), &keys).expect("planned");
        assert!(!found.offload.is_empty() && matches!(found.candidate.optimizer, Optimizer::AdamW(_)));
    }

    /// `memory.offload: auto` takes what host memory has room for, and refuses with the room if that is too little.
    #[test]
    fn auto_keeps_to_the_room_outside_the_device() {
        let text = "
model: {kind: dense_lm, vocabulary: 4096, hidden: 1024, layers: 16, heads: 8, intermediate: 4096}
data: {train: [corpus.txt], longest: 512}
optimizer: {kind: adamw, clip_norm: null}
precision: {kind: bf16}
memory: {offload: auto}
batch: {tokens: 4096, micro_tokens: 4096}
run: {steps: 10}
";
        let config = TrainConfig::parse(text, "example", &[]).expect("a configuration");
        let target = Target::named("h100").expect("a target");
        let model = open_trained_model(&config, &mut Silent).expect("a model");
        let gigabytes = |n: u64| Bytes(n * 1_000_000_000);
        let planned = |budget: u64, host: u64| {
            let room = Room { host: gigabytes(host), file: Bytes::ZERO };
            let limits = PlanLimits { budget: gigabytes(budget), room };
            search_alone(&config, &model, &target, limits, &Silent)
        };
        // Parameters of 270 M elements: 0.54 GB, masters 1.1 GB, moments 2.2 GB.
        let held = |budget, host| {
            let found = planned(budget, host).unwrap_or_else(|e| panic!("{budget} {host}: {e}"));
            found.program.space_bytes(Space::Host).0 / 100_000_000
        };
        assert_eq!(held(16, 1), 0, "everything fits the device");
        assert!((20..40).contains(&held(3, 4)), "moments alone");
        let error = planned(3, 1).expect_err("no room for the moments");
        let TrainError::Runtime(RuntimeError::Plan(PlanError::OverRoom { space, room, .. })) = &error else {
            panic!("{error}")
        };
        assert_eq!((*space, *room), (Space::Host, gigabytes(1)));
    }
}
