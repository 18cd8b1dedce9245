//! Search for the fastest training program within a memory budget: tokens per micro-batch and recomputation, for the first
//! optimizer that fits. Invariant: candidates do not
//! depend on the budget, and whether one fits is decided by its plan alone; a larger budget therefore never
//! gives a slower plan of the same optimizer, nor a later optimizer.

use super::frontier::Frontier;
use super::layers::{Layers, ModelCost};
use super::{ActivationPolicy, Optimizer, Solver, Training, plans};
use crate::compile::{has_matmuls, lowered};
use crate::cost::replayed;
use crate::{
    ActivationOffload, Bill, Offload, Persistent, PlanError, Program, RecomputePolicy, Target, Window, passes,
    step_seconds,
};
use plimsoll_graph::{Bytes, Graph, Space};
use plimsoll_setting::Setting;
use std::cell::{Cell, OnceCell, RefCell};
use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

/// Candidates and budget of a search.
pub struct TrainingSearch<'a> {
    /// Training options, apart from those that are searched.
    pub training: Training<'a>,
    /// Memory budget.
    pub budget: Bytes,
    /// Tokens of an optimizer step.
    pub step_tokens: u64,
    /// Candidate numbers of tokens of a micro-batch. They are tried in groups of six, in this order: a group only if
    /// nothing of the groups before it fits.
    pub tokens: Vec<u64>,
    /// Rows of logits computed at a time in a micro-step of this many tokens. It does not depend on the budget, because sums
    /// over rows are rounded by chunks.
    pub chunk: &'a dyn Fn(u64) -> u32,
    /// Candidate optimizers in order of preference: the first with a plan within the budget is used, regardless
    /// of speed.
    pub optimizers: Vec<Optimizer>,
    /// Number of layers of the model, which must be alike in size and time; 0 for a model without layers.
    pub layers: u32,
    /// Recomputation policy, or the request to choose one.
    pub remat: RematChoice,
    /// Tokens of micro-steps between which a run can switch; empty for a run that does not. The program has a micro-step for
    /// each of these numbers below the chosen one. All of them then add to the gradients of a step, and evaluations have the
    /// smallest number.
    pub dynamic: Vec<u64>,
    /// Polled between plans; returning true ends the search with [`PlanError::Stopped`].
    pub stopped: &'a dyn Fn() -> bool,
}

/// Recomputation policy: fixed, or chosen by the search.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RematChoice {
    /// Fixed by the caller.
    Fixed(RecomputePolicy),
    /// Chosen by the search.
    Auto,
}

/// One combination of settings.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Candidate {
    /// Tokens of a micro-batch.
    pub tokens: u64,
    /// Rows of logits computed at a time.
    pub chunk: u32,
    /// Optimizer.
    pub optimizer: Optimizer,
    /// Micro-batches per optimizer step.
    pub accumulation: u64,
}

/// Result of a search: the fastest combination that fits.
#[derive(Debug)]
pub struct TrainingChoice {
    /// Compiled program.
    pub program: Program,
    /// Settings of the program.
    pub candidate: Candidate,
    /// Policy for the activations: which are recomputed and which are offloaded.
    pub activations: ActivationPolicy,
    /// Tensors stored outside the memory of the device.
    pub offload: Offload,
    /// Limit on the bytes of moves that run ahead of or behind launches.
    pub window: Window,
    /// Predicted seconds of an optimizer step.
    pub seconds: f64,
    /// Predicted tokens per second.
    pub tokens_per_second: f64,
    /// Other combinations, fastest first.
    pub rejected: Vec<RejectedCandidate>,
}

/// A combination that was not chosen.
#[derive(Clone, Debug, PartialEq)]
pub struct RejectedCandidate {
    /// Settings of the combination.
    pub candidate: Candidate,
    /// Number of recomputed nodes.
    pub recomputed: usize,
    /// Predicted memory use of the process.
    pub peak: Bytes,
    /// Predicted tokens per second.
    pub tokens_per_second: f64,
    /// Whether the combination fits into the budget.
    pub fits: bool,
}

/// Builds the forward graph of a micro-batch and the graph of an evaluation batch, given the tokens of the
/// micro-batch, the rows of logits computed at a time, and the number of layers, which is at most the number of
/// layers of the search.
pub type BuildTraining<'a> = &'a dyn Fn(u64, u32, u32) -> Result<(Graph, Graph), PlanError>;

/// A candidate under consideration, with the costs of its plans.
struct OpenCandidate {
    candidate: Candidate,
    step: Rc<MicroStepCost>,
    apply: ApplyCost,
    /// Number of recomputation choices that are not excluded. A choice is excluded, with all later ones, if it was
    /// predicted to fit and exceeded the budget when it was planned.
    allowed: Cell<usize>,
}

/// Cost of the optimizer step. It depends on the tokens of a micro-batch only in whether one micro-batch is a
/// whole step.
#[derive(Clone, Copy)]
struct ApplyCost {
    /// Predicted seconds.
    seconds: f64,
    /// Lower bound on the memory of every plan: parameters, states and reserved memory.
    base: Bytes,
    /// Largest sum of other live bytes during the optimizer step.
    live: Bytes,
}

/// Cost of a micro-step and its evaluation; shared by all optimizers unless the optimizer step is part of it.
struct MicroStepCost {
    /// Graphs of models with fewer layers, by number of layers.
    graphs: RefCell<BTreeMap<u32, Rc<Graph>>>,
    evaluation: Rc<Graph>,
    /// Largest sum of live bytes of an evaluation, computed on first use.
    evaluation_bytes: OnceCell<Bytes>,
    /// Predicted seconds, without recomputation chosen by the search.
    seconds: f64,
    /// Recomputation choices, if the search decides.
    frontier: Option<Frontier>,
    /// Indices in the frontier of the choices considered, the least stored bytes first.
    choices: Vec<usize>,
}

/// A recomputation choice of a candidate, with its predicted memory and time.
struct ChoicePrediction {
    candidate: Candidate,
    /// Index in [`MicroStepCost::choices`].
    choice: usize,
    recomputed: usize,
    peak: Bytes,
    seconds: f64,
}

/// Number of sizes of a micro-batch of which the fastest is chosen. In descending order of the sizes, a smaller one is not faster
/// than all larger ones unless these do not fit.
const SIZES_PER_GROUP: usize = 6;

/// Number of fitting, and of non-fitting, alternatives that are reported.
const REPORTED: usize = 5;

impl TrainingSearch<'_> {
    /// Returns the fastest program within the budget.
    ///
    /// # Errors
    /// [`PlanError::OverBudget`] with the bill of the smallest program if none fits.
    pub fn run(&self, target: &Target, build: BuildTraining<'_>) -> Result<TrainingChoice, PlanError> {
        let search = TargetSearch { search: self, target, build };
        match search.run()? {
            SearchOutcome::Found(choice) => Ok(*choice),
            SearchOutcome::NothingFits { candidates, too_large: Some(error) } if candidates.is_empty() => {
                Err(error)
            }
            SearchOutcome::NothingFits { candidates, .. } => {
                Err(PlanError::OverBudget(Box::new(search.bill(&candidates)?)))
            }
        }
    }

    /// Like [`Self::run`], but returns `None` if nothing fits.
    pub fn find(&self, target: &Target, build: BuildTraining<'_>) -> Result<Option<TrainingChoice>, PlanError> {
        let search = TargetSearch { search: self, target, build };
        Ok(match search.run()? {
            SearchOutcome::Found(choice) => Some(*choice),
            SearchOutcome::NothingFits { .. } => None,
        })
    }

    /// Whether any combination fits into the budget.
    pub fn fits(&self, target: &Target, build: BuildTraining<'_>) -> Result<bool, PlanError> {
        // The smallest micro-batch needs the least memory, except that one which is a whole step need not
        // accumulate gradients.
        let search = TargetSearch { search: self, target, build };
        let smallest_and_largest = self.tokens.iter().min().into_iter().chain(self.tokens.iter().max());
        for tokens in smallest_and_largest.copied().collect::<BTreeSet<u64>>() {
            match search.candidates(&[tokens]) {
                Ok(candidates) if search.fastest_fitting(&candidates)?.is_some() => return Ok(true),
                Ok(_) | Err(PlanError::TooLarge { .. }) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(false)
    }

    /// Tokens of the micro-steps of a program whose largest micro-step has `tokens` tokens, in descending order.
    fn micro_step_sizes(&self, tokens: u64) -> Vec<u64> {
        let smaller = self.dynamic.iter().copied().filter(|&n| n < tokens);
        let sizes: BTreeSet<u64> = smaller.chain([tokens]).collect();
        sizes.into_iter().rev().collect()
    }

    /// Returns an error if the caller has stopped the search.
    fn check_stopped(&self) -> Result<(), PlanError> {
        if (self.stopped)() { Err(PlanError::Stopped) } else { Ok(()) }
    }

    /// Training options of a candidate.
    fn training(&self, candidate: &Candidate) -> Training<'_> {
        // An accumulation of 1 stores no sums of gradients, to which micro-steps of several sizes must all add.
        let min_accumulation = if self.dynamic.is_empty() { 1 } else { 2 };
        let ActivationPolicy { recompute: remat, offload: activations } = ActivationPolicy::STORED;
        Training {
            optimizer: candidate.optimizer,
            accumulation: candidate.accumulation.max(min_accumulation),
            remat,
            activations,
            ..self.training
        }
    }
}

/// A search for one target.
struct TargetSearch<'a> {
    search: &'a TrainingSearch<'a>,
    target: &'a Target,
    build: BuildTraining<'a>,
}

/// The fastest candidate within the budget, planned, and the predictions for the others.
struct FittingProgram {
    program: Program,
    activations: ActivationPolicy,
    best: ChoicePrediction,
    others: Vec<ChoicePrediction>,
}

/// Result of a search over all groups of sizes.
enum SearchOutcome {
    Found(Box<TrainingChoice>),
    /// Nothing fits.
    NothingFits {
        /// The combinations that were considered.
        candidates: Vec<OpenCandidate>,
        /// The size that excluded combinations.
        too_large: Option<PlanError>,
    },
}

/// Memory and recomputation of a step, predicted from a small model.
struct LivePrediction {
    /// Largest sum of live bytes.
    bytes: Bytes,
    /// Number of recomputed nodes.
    recomputed: usize,
}

impl TargetSearch<'_> {
    /// Searches the groups of micro-batch sizes until something fits.
    fn run(&self) -> Result<SearchOutcome, PlanError> {
        let mut all_candidates = vec![];
        let mut too_large = None;
        for tokens in self.search.tokens.chunks(SIZES_PER_GROUP) {
            let candidates = match self.candidates(tokens) {
                Ok(candidates) => candidates,
                Err(error @ PlanError::TooLarge { .. }) => {
                    too_large = Some(error);
                    continue;
                }
                Err(error) => return Err(error),
            };
            if let Some(choice) = self.choose(&candidates)? {
                return Ok(SearchOutcome::Found(Box::new(choice)));
            }
            all_candidates.extend(candidates);
        }
        Ok(SearchOutcome::NothingFits { candidates: all_candidates, too_large })
    }

    /// All combinations with these micro-batch sizes that are not too large for any machine, the potentially fastest first.
    ///
    /// # Errors
    /// [`PlanError::TooLarge`] if all combinations are too large.
    fn candidates(&self, tokens: &[u64]) -> Result<Vec<OpenCandidate>, PlanError> {
        let search = self.search;
        has_matmuls(search.training.precision, self.target)?;
        let offload = &search.training.offload;
        let mut solver =
            if offload.activations { Solver::with_offload_to(offload.to) } else { Solver::default() };
        // By the rank of the optimizer, and whether one micro-batch is a whole step.
        let mut apply_costs: BTreeMap<(usize, bool), ApplyCost> = BTreeMap::new();
        let mut ranked: Vec<(usize, OpenCandidate)> = vec![];
        let mut too_large = None;
        for &tokens in tokens {
            let chunk = (search.chunk)(tokens);
            let mut shared: Option<Rc<MicroStepCost>> = None;
            let accumulation = search.step_tokens.div_ceil(tokens).max(1);
            for (rank, &optimizer) in search.optimizers.iter().enumerate() {
                search.check_stopped()?;
                let candidate = Candidate { tokens, chunk, optimizer, accumulation };
                let step = match shared.take().filter(|_| !search.training(&candidate).updates_immediately()) {
                    Some(step) => Ok(step),
                    None => self.micro_step(&candidate, &mut solver).map(Rc::new),
                };
                let step = match step {
                    Ok(step) => step,
                    Err(error @ PlanError::TooLarge { .. }) => {
                        too_large = Some(error);
                        continue;
                    }
                    Err(error) => return Err(error),
                };
                shared = Some(Rc::clone(&step));
                let apply = match apply_costs.entry((rank, accumulation == 1)) {
                    Entry::Occupied(known) => *known.get(),
                    Entry::Vacant(entry) => *entry.insert(self.apply(&candidate)?),
                };
                let allowed = Cell::new(step.choices.len());
                ranked.push((rank, OpenCandidate { candidate, step, apply, allowed }));
            }
        }
        if let (true, Some(error)) = (ranked.is_empty(), too_large) {
            return Err(error);
        }
        ranked.sort_by_key(|(rank, _)| *rank);
        let mut candidates: Vec<OpenCandidate> = ranked.into_iter().map(|(_, candidate)| candidate).collect();
        // The sort is stable: among equal candidates the preferred one comes first.
        candidates.sort_by(|a, b| b.max_rate(search.budget).total_cmp(&a.max_rate(search.budget)));
        Ok(candidates)
    }

    fn micro_step(&self, candidate: &Candidate, solver: &mut Solver) -> Result<MicroStepCost, PlanError> {
        let Self { search, target, .. } = *self;
        let training = search.training(candidate);
        let all = Layers::uniform(search.layers);
        // The frontier needs few layers. Memory is predicted from more of them if there is offload.
        let memory_layers = self.memory_layers(all.clone()).small_layers();
        let (forward, evaluation) = (self.build)(candidate.tokens, candidate.chunk, memory_layers)?;
        let memory_graph = Rc::new(training.micro_step(&forward)?);
        let graph = match all.small_layers() {
            layers if layers == memory_layers => Rc::clone(&memory_graph),
            layers => Rc::new(self.graph(candidate, layers)?),
        };
        let evaluation = training.evaluation(&evaluation, &memory_graph)?;
        // Unsupported graphs are rejected before anything is priced.
        let apply = training.apply(&graph)?;
        target.supports([&*graph, &evaluation].into_iter().chain(&apply))?;
        let step = ModelCost::extrapolated(search.layers, |layers| {
            let seconds = self.seconds(&self.graph(candidate, layers)?, &self.fixed_policy())?;
            Ok(ModelCost { persistent: Bytes::ZERO, pinned: Bytes::ZERO, seconds })
        })?;
        let (recompute_seconds, frontier) = match &search.remat {
            RematChoice::Fixed(remat) => {
                let layers = Layers::with_recomputation(remat, search.layers);
                let small_graph = self.graph(candidate, layers.small_layers())?;
                let graph = passes::remat(&small_graph, &layers.small_policy(remat))?;
                (layers.recomputed(&graph, target).1, None)
            }
            RematChoice::Auto => (0.0, Some(solver.frontier(&graph, &all.representatives(), target))),
        };
        let frontier = frontier.filter(|f| !f.is_empty());
        let choices = frontier.as_ref().map_or_else(|| vec![0], |f| considered_choices(f.len()));
        Ok(MicroStepCost {
            graphs: RefCell::new(BTreeMap::from([(all.small_layers(), graph), (memory_layers, memory_graph)])),
            evaluation: Rc::new(evaluation),
            evaluation_bytes: OnceCell::new(),
            seconds: step.seconds + recompute_seconds,
            frontier,
            choices,
        })
    }

    /// Graph of a micro-step of the model with `layers` layers.
    fn graph(&self, candidate: &Candidate, layers: u32) -> Result<Graph, PlanError> {
        let (forward, _) = (self.build)(candidate.tokens, candidate.chunk, layers)?;
        self.search.training(candidate).micro_step(&forward)
    }

    /// Cost of the optimizer step, and the memory common to all steps.
    fn apply(&self, candidate: &Candidate) -> Result<ApplyCost, PlanError> {
        let Self { search, target, .. } = *self;
        let training = search.training(candidate);
        let live_bytes = Cell::new(Bytes::ZERO);
        let cost = ModelCost::extrapolated(search.layers, |layers| {
            let (forward, evaluation) = (self.build)(candidate.tokens, candidate.chunk, layers)?;
            let micro = training.micro_step(&forward)?;
            let apply = training.apply(&micro)?;
            let evaluation = training.evaluation(&evaluation, &micro)?;
            let mut persistent = Persistent::new();
            for graph in apply.iter().chain([&evaluation, &micro]) {
                for (_, value) in graph.sources() {
                    let home = training.offload.home(graph, value.spec.role);
                    persistent.place(graph, &value.spec.clone().in_space(home), target.alignment);
                }
            }
            if let Some(apply) = &apply {
                // The largest model is built last, so its bytes remain.
                let live = self.live(apply, &Layers::uniform(layers), &ActivationPolicy::STORED)?;
                live_bytes.set(live.bytes);
            }
            let stored = ActivationPolicy::STORED;
            let seconds = apply.as_ref().map_or(Ok(0.0), |graph| self.seconds(graph, &stored))?;
            let [persistent, pinned] = [Space::Device, Space::Host].map(|space| persistent.bytes(space));
            Ok(ModelCost { persistent, pinned, seconds })
        })?;
        if search.training.offload.gradients {
            // The norm fetches the gradients of all layers at once, so few layers do not predict its memory.
            let (forward, _) = (self.build)(candidate.tokens, candidate.chunk, search.layers)?;
            if let Some(apply) = training.apply(&training.micro_step(&forward)?)? {
                let layers = Layers::uniform(search.layers);
                live_bytes.set(self.live(&apply, &layers, &ActivationPolicy::STORED)?.bytes);
            }
        }
        let base = cost.persistent + target.page_tables(cost.pinned) + target.reserved();
        Ok(ApplyCost { seconds: cost.seconds, base, live: live_bytes.get() })
    }

    /// Policy for the activations where the search does not choose: with fixed recomputation the activations that are not
    /// recomputed are offloaded, if offload has activations; otherwise all are stored.
    fn fixed_policy(&self) -> ActivationPolicy {
        match self.search.remat {
            RematChoice::Fixed(_) => {
                ActivationPolicy { offload: ActivationOffload::All, ..ActivationPolicy::STORED }
            }
            RematChoice::Auto => ActivationPolicy::STORED,
        }
    }

    /// Predicted seconds of a full step of `graph`, without recomputation.
    fn seconds(&self, graph: &Graph, stored: &ActivationPolicy) -> Result<f64, PlanError> {
        let training = &self.search.training;
        if training.offload.is_empty() {
            return Ok(step_seconds(graph, self.target, graph.bounds.full()));
        }
        let policy = training.policy(stored);
        let (graph, schedule) = lowered(graph.clone(), &policy, self.target, &mut |_, _| {})?;
        Ok(replayed(&graph, &schedule, self.target, graph.bounds.full()).into_iter().sum())
    }

    /// Predicts the memory of a step of the full model from the graph of the small model.
    fn live(
        &self,
        graph: &Graph,
        layers: &Layers,
        stored: &ActivationPolicy,
    ) -> Result<LivePrediction, PlanError> {
        let (graph, schedule) =
            lowered(graph.clone(), &self.search.training.policy(stored), self.target, &mut |_, _| {})?;
        let bytes = layers.live(&graph, &schedule, self.target)?;
        let (recomputed, _) = layers.recomputed(&graph, self.target);
        Ok(LivePrediction { bytes, recomputed })
    }

    /// The fastest program that fits among the candidates, with the candidates that were not chosen.
    fn choose(&self, candidates: &[OpenCandidate]) -> Result<Option<TrainingChoice>, PlanError> {
        let Some(FittingProgram { program, activations, mut best, others }) =
            self.fastest_fitting(candidates)?
        else {
            return Ok(None);
        };
        if !program.offload().is_empty() {
            // Copies hide behind the kernels of other layers, which only the whole plan has.
            best.seconds = optimizer_step_seconds(&program, &best.candidate);
        }
        Ok(Some(TrainingChoice {
            program,
            candidate: best.candidate,
            seconds: best.seconds,
            tokens_per_second: best.rate(),
            rejected: self.rejected(candidates, &best, others)?,
            activations,
            offload: self.search.training.offload,
            window: self.search.training.window,
        }))
    }

    /// Fastest candidate that fits when planned, for the first optimizer that has one.
    fn fastest_fitting(&self, candidates: &[OpenCandidate]) -> Result<Option<FittingProgram>, PlanError> {
        let budget = self.search.budget;
        for &optimizer in &self.search.optimizers {
            loop {
                let mut predictions: Vec<ChoicePrediction> = vec![];
                for open in candidates.iter().filter(|open| open.candidate.optimizer == optimizer) {
                    // Skip a candidate if its best possible rate does not exceed the rate of an earlier candidate.
                    if predictions.iter().any(|earlier| earlier.rate() >= open.max_rate(budget)) {
                        continue;
                    }
                    predictions.extend(self.least_recomputation(open)?);
                }
                let best_rate = predictions.iter().map(ChoicePrediction::rate).fold(0.0, f64::max);
                let Some(k) = predictions.iter().position(|p| p.rate() >= best_rate) else { break };
                let best = predictions.swap_remove(k);
                let (program, activations) = self.plan_all_layers(candidates, &best)?;
                if program.peak() <= budget {
                    return Ok(Some(FittingProgram { program, activations, best, others: predictions }));
                }
                // Packing adds waste to the live bytes, so the choice may fail although its live bytes fit. The next round
                // considers only choices with more recomputation, so the loop ends.
                for open in candidates.iter().filter(|open| open.candidate == best.candidate) {
                    open.allowed.set(best.choice);
                }
            }
        }
        Ok(None)
    }

    /// Finds the recomputation choice of a candidate that fits the budget with the least recomputation. The choices are
    /// sorted by stored bytes, and peak memory grows with them, so the search is a bisection. It tries the same
    /// positions for every budget, so a larger budget never gives a choice with more recomputation.
    fn least_recomputation(&self, open: &OpenCandidate) -> Result<Option<ChoicePrediction>, PlanError> {
        let Some(last) = open.last() else { return Ok(None) };
        let most_stored = self.predict_fitting(open, last)?;
        if most_stored.is_some() || last == 0 {
            return Ok(most_stored);
        }
        // `high` does not fit; `best` is the prediction of `low`, if `low` was tried.
        let mut low = 0;
        let mut high = last;
        let mut best = None;
        while high - low > 1 {
            let middle = low + (high - low) / 2;
            match self.predict_fitting(open, middle)? {
                None => high = middle,
                fitting @ Some(_) => {
                    low = middle;
                    best = fitting;
                }
            }
        }
        if best.is_some() {
            return Ok(best);
        }
        self.predict_fitting(open, 0)
    }

    /// Predicts memory and time of choice `k` of a candidate; `None` if it does not fit the budget.
    fn predict_fitting(&self, open: &OpenCandidate, k: usize) -> Result<Option<ChoicePrediction>, PlanError> {
        let budget = self.search.budget;
        if open.memory_bound(k) > budget {
            return Ok(None);
        }
        Ok(Some(self.predict(open, k)?).filter(|prediction| prediction.fits(budget)))
    }

    /// Reports the candidates not chosen: the fastest within and the fastest outside the budget, one per size
    /// and optimizer.
    fn rejected(
        &self,
        candidates: &[OpenCandidate],
        best: &ChoicePrediction,
        mut others: Vec<ChoicePrediction>,
    ) -> Result<Vec<RejectedCandidate>, PlanError> {
        let budget = self.search.budget;
        for open in candidates {
            if others.len() < REPORTED && !others.iter().chain([best]).any(|p| p.is_of_size_of(open)) {
                others.extend(self.least_recomputation(open)?);
            }
        }
        let mut faster: Vec<&OpenCandidate> =
            candidates.iter().filter(|open| open.unlimited_rate() > best.rate()).collect();
        faster.sort_by(|a, b| b.unlimited_rate().total_cmp(&a.unlimited_rate()));
        let mut outside: Vec<ChoicePrediction> = vec![];
        for open in faster {
            if outside.len() < REPORTED && !outside.iter().any(|p| p.is_of_size_of(open)) {
                let prediction = self.predict(open, open.step.choices.len() - 1)?;
                outside.extend(Some(prediction).filter(|p| !p.fits(budget)));
            }
        }
        others.extend(outside);
        others.sort_by(|a, b| b.rate().total_cmp(&a.rate()));
        Ok(others.iter().map(|prediction| prediction.rejected(budget)).collect())
    }

    /// Bill of the smallest program that the search considers: with one byte less the search fails.
    fn bill(&self, candidates: &[OpenCandidate]) -> Result<Bill, PlanError> {
        let mut predictions: Vec<ChoicePrediction> = vec![];
        for open in candidates {
            let last = open.step.choices.len() - 1;
            for k in std::iter::successors(Some(last), |k| (*k > 0).then_some(k / 2)) {
                if predictions.iter().all(|p| open.memory_bound(k) < p.peak) {
                    predictions.push(self.predict(open, k)?);
                }
            }
        }
        // A packed plan needs no less than its predicted peak.
        predictions.sort_by_key(|p| p.peak);
        let mut smallest: Option<(ChoicePrediction, Program)> = None;
        for prediction in predictions {
            if smallest.as_ref().is_none_or(|(_, program)| prediction.peak < program.peak()) {
                let (program, _) = self.plan_all_layers(candidates, &prediction)?;
                let before = smallest.take().filter(|(_, before)| before.peak() <= program.peak());
                smallest = before.or(Some((prediction, program)));
            }
        }
        let (smallest, program) = smallest.ok_or_else(|| bad_batch("nothing to choose from"))?;
        let bill = program.bill(self.search.budget, vec![]);
        Ok(Bill { seconds_per_token: 1.0 / smallest.rate(), budget_setting: Setting::Budget, ..bill })
    }

    /// Predicts memory and time of choice `k` of a candidate.
    fn predict(&self, open: &OpenCandidate, k: usize) -> Result<ChoicePrediction, PlanError> {
        self.search.check_stopped()?;
        let step = &open.step;
        let all = self.search.layers;
        let (layers, graph, stored) = match (&step.frontier, &self.search.remat) {
            (Some(frontier), _) if k + 1 < step.choices.len() => {
                let choices = frontier.layer_choices(step.choices[k]);
                let layers = self.memory_layers(Layers::of(&choices));
                let graph = self.small_graph(open, &layers)?;
                let originals = layers.originals().into_iter();
                let small_choices: Vec<_> = originals.map(|layer| choices[layer as usize]).collect();
                let stored = frontier.policy(&graph, &small_choices);
                (layers, graph, stored)
            }
            (None, RematChoice::Fixed(remat)) => {
                let layers = self.memory_layers(Layers::with_recomputation(remat, all));
                let stored = ActivationPolicy { recompute: layers.small_policy(remat), ..self.fixed_policy() };
                (layers.clone(), self.small_graph(open, &layers)?, stored)
            }
            (_, _) => {
                let layers = self.memory_layers(Layers::uniform(all));
                (layers.clone(), self.small_graph(open, &layers)?, ActivationPolicy::STORED)
            }
        };
        let LivePrediction { bytes, recomputed } = self.live(&graph, &layers, &stored)?;
        let live = bytes.max(open.apply.live).max(self.evaluation_bytes(step)?);
        let peak = open.apply.base + live;
        let candidate = open.candidate;
        let bound = open.memory_bound(k);
        debug_assert!(peak >= bound, "{candidate:?} {k}: {peak}, at least {bound}");
        Ok(ChoicePrediction { candidate, choice: k, recomputed, peak, seconds: open.seconds(k) })
    }

    /// The layers of the small model from which memory is predicted. With offload these are all layers: copies run ahead by a
    /// number of bytes, not of layers.
    fn memory_layers(&self, layers: Layers) -> Layers {
        if self.search.training.offload.is_empty() { layers } else { Layers::different(self.search.layers) }
    }

    /// Graph of the small model, built once.
    fn small_graph(&self, open: &OpenCandidate, layers: &Layers) -> Result<Rc<Graph>, PlanError> {
        let layers = layers.small_layers();
        if let Some(known) = open.step.graphs.borrow().get(&layers) {
            return Ok(Rc::clone(known));
        }
        let graph = Rc::new(self.graph(&open.candidate, layers)?);
        open.step.graphs.borrow_mut().insert(layers, Rc::clone(&graph));
        Ok(graph)
    }

    /// Largest sum of live bytes of an evaluation.
    fn evaluation_bytes(&self, step: &MicroStepCost) -> Result<Bytes, PlanError> {
        if let Some(&known) = step.evaluation_bytes.get() {
            return Ok(known);
        }
        let layers = self.memory_layers(Layers::uniform(self.search.layers));
        let live = self.live(&step.evaluation, &layers, &ActivationPolicy::STORED)?;
        Ok(*step.evaluation_bytes.get_or_init(|| live.bytes))
    }

    /// Plans the full model for a predicted choice, and returns the policy for its activations.
    fn plan_all_layers(
        &self,
        candidates: &[OpenCandidate],
        prediction: &ChoicePrediction,
    ) -> Result<(Program, ActivationPolicy), PlanError> {
        self.search.check_stopped()?;
        let open = candidates.iter().find(|open| open.candidate == prediction.candidate);
        let open = open.ok_or_else(|| bad_batch("it was never tried"))?;
        let training = self.search.training(&prediction.candidate);
        let mut evaluation = None;
        let mut micro_steps = vec![];
        for tokens in self.search.micro_step_sizes(prediction.candidate.tokens) {
            let (forward, of_size) = (self.build)(tokens, (self.search.chunk)(tokens), self.search.layers)?;
            let micro = training.micro_step(&forward)?;
            let stored = match (&open.step.frontier, &self.search.remat) {
                (Some(frontier), _) if prediction.choice + 1 < open.step.choices.len() => {
                    let choices = frontier.layer_choices(open.step.choices[prediction.choice]);
                    frontier.policy(&micro, &choices)
                }
                (None, RematChoice::Fixed(remat)) => {
                    ActivationPolicy { recompute: remat.clone(), ..self.fixed_policy() }
                }
                (_, _) => ActivationPolicy::STORED,
            };
            micro_steps.push((micro, stored));
            // Sizes descend, so evaluations have the smallest one.
            evaluation = Some(of_size);
        }
        let stored = micro_steps.first().map_or(ActivationPolicy::STORED, |(_, stored)| stored.clone());
        let evaluation = evaluation.ok_or_else(|| bad_batch("it was never tried"))?;
        let program = training.program_of(micro_steps, &evaluation, self.target)?;
        Ok((program, stored))
    }
}

/// The error for a search without candidates.
fn bad_batch(why: &str) -> PlanError {
    PlanError::BadPolicy { field: "batch", why: why.to_owned() }
}

/// Predicted seconds of an optimizer step of a program: its micro-steps and its update.
fn optimizer_step_seconds(program: &Program, candidate: &Candidate) -> f64 {
    let micro_step = program.seconds_of(plans::MICRO).unwrap_or(0.0);
    let apply = program.seconds_of(plans::APPLY).unwrap_or(0.0);
    candidate.accumulation as f64 * micro_step + apply
}

impl OpenCandidate {
    /// Last choice that is not excluded: the one with the least recomputation.
    fn last(&self) -> Option<usize> {
        self.allowed.get().checked_sub(1)
    }

    /// Lower bound on the memory of every plan of choice `k`.
    fn memory_bound(&self, k: usize) -> Bytes {
        let step = &self.step;
        self.apply.base + step.frontier.as_ref().map_or(Bytes::ZERO, |f| f.stored_bytes(step.choices[k]))
    }

    /// Number of choices, from the first on, that may fit into a budget.
    fn choices_within(&self, budget: Bytes) -> usize {
        (0..self.allowed.get()).take_while(|&k| self.memory_bound(k) <= budget).count()
    }

    /// Predicted seconds of an optimizer step with choice `k`.
    fn seconds(&self, k: usize) -> f64 {
        let step = &self.step;
        let recompute = step.frontier.as_ref().map_or(0.0, |f| f.seconds(step.choices[k]));
        self.candidate.accumulation as f64 * (step.seconds + recompute) + self.apply.seconds
    }

    /// Predicted tokens per second with choice `k`.
    fn rate(&self, k: usize) -> f64 {
        self.candidate.step_tokens() / self.seconds(k)
    }

    /// Upper bound on the tokens per second within a budget.
    fn max_rate(&self, budget: Bytes) -> f64 {
        self.choices_within(budget).checked_sub(1).map_or(0.0, |k| self.rate(k))
    }

    /// Predicted tokens per second without a budget: with the least recomputation.
    fn unlimited_rate(&self) -> f64 {
        self.rate(self.step.choices.len() - 1)
    }
}

impl Candidate {
    fn step_tokens(&self) -> f64 {
        self.tokens as f64 * self.accumulation as f64
    }
}

impl ChoicePrediction {
    /// Whether the prediction and a candidate have the same tokens per micro-batch and the same optimizer.
    fn is_of_size_of(&self, open: &OpenCandidate) -> bool {
        (self.candidate.tokens, self.candidate.optimizer) == (open.candidate.tokens, open.candidate.optimizer)
    }

    fn rate(&self) -> f64 {
        self.candidate.step_tokens() / self.seconds
    }

    fn fits(&self, budget: Bytes) -> bool {
        self.peak <= budget
    }

    fn rejected(&self, budget: Bytes) -> RejectedCandidate {
        RejectedCandidate {
            candidate: self.candidate,
            recomputed: self.recomputed,
            peak: self.peak,
            tokens_per_second: self.rate(),
            fits: self.fits(budget),
        }
    }
}

/// Maximum number of recomputation choices considered: finer steps are below the accuracy of the cost model.
const MAX_CHOICES: usize = 32;

/// Positions of the considered choices among `n`: at equal distances, with the first and the last.
fn considered_choices(n: usize) -> Vec<usize> {
    if n <= MAX_CHOICES {
        return (0..n).collect();
    }
    (0..MAX_CHOICES).map(|i| i * (n - 1) / (MAX_CHOICES - 1)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::training::ParameterGroup;
    use crate::{Fuse, Offload, Precision};
    use plimsoll_graph::Bounds;
    use plimsoll_graph::ops::{AdamW, Mask};
    use plimsoll_models::{DecoderConfig, Experts, Mlp, Norm, Positions};

    const ADAM: AdamW = AdamW { beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1 };

    fn decoder(experts: Option<Experts>) -> DecoderConfig {
        DecoderConfig {
            vocab_size: 300,
            hidden_size: 64,
            layers: 1,
            heads: 4,
            kv_heads: 2,
            head_dim: 16,
            intermediate_size: 96,
            norm: Norm::Rms,
            eps: 1e-5,
            positions: Positions::Rotary(10_000.0),
            mask: Mask::Causal,
            mlp: Mlp::SwiGlu,
            bias: plimsoll_models::Biases::NONE,
            qk_norm: false,
            scaling: plimsoll_models::RopeScaling::None,
            tied: experts.is_none(),
            experts,
        }
    }

    /// The prediction from few layers equals the plan of all layers: the lower bound in bytes and the number of
    /// recomputed nodes, for every recomputation policy.
    #[test]
    fn a_model_of_many_layers_takes_what_few_of_them_say() {
        let target = Target::named("cpu").unwrap();
        let experts = Experts {
            experts: 4,
            top_k: 2,
            shared: 1,
            renormalise: true,
            capacity: 1250,
            balance: 0.01,
            z: 0.001,
        };
        let selective = RecomputePolicy::Selective(vec!["rms_norm".to_owned(), "glu".to_owned()]);
        let some = |of: RecomputePolicy| RecomputePolicy::Layers { first: 2, last: 8, of: Box::new(of) };
        let policies = [
            RematChoice::Auto,
            RematChoice::Fixed(RecomputePolicy::None),
            RematChoice::Fixed(RecomputePolicy::Full),
            RematChoice::Fixed(selective.clone()),
            RematChoice::Fixed(RecomputePolicy::EveryN(2)),
            RematChoice::Fixed(RecomputePolicy::EveryN(3)),
            RematChoice::Fixed(some(RecomputePolicy::Full)),
            RematChoice::Fixed(some(selective)),
            RematChoice::Fixed(some(RecomputePolicy::EveryN(2))),
        ];
        let mut compared = 0;
        for (config, precision) in [(decoder(None), Precision::F32), (decoder(Some(experts)), Precision::Bf16)]
        {
            let build = |tokens, chunk, layers| {
                let bounds = Bounds { tokens, sequences: 4, longest: 64, packs: 1 };
                let config = DecoderConfig { layers: u64::from(layers), ..config.clone() };
                let loss = plimsoll_models::Training { chunk, z_loss: 0.0, dropout: 0.1 };
                let verified = |source| PlanError::of_graph("build", source);
                let still = plimsoll_models::Training { dropout: 0.0, ..loss };
                Ok((
                    config.train_graph(bounds, &loss).map_err(verified)?,
                    config.train_graph(bounds, &still).map_err(verified)?,
                ))
            };
            for (layers, remat, max_norm) in [4, 5, 13]
                .into_iter()
                .flat_map(|l| policies.iter().map(move |p| (l, p)))
                .flat_map(|(l, p)| [(l, p, 0.0), (l, p, 1.0)])
            {
                let search = TrainingSearch {
                    training: Training {
                        activations: ActivationOffload::All,
                        precision,
                        remat: RecomputePolicy::None,
                        optimizer: Optimizer::AdamW(ADAM),
                        group: &|_| ParameterGroup::Decay,
                        accumulation: 1,
                        max_norm,
                        ema: (layers == 5).then_some(0.9),
                        fuse: Fuse::default(),
                        offload: Offload::default(),
                        window: Window::Full,
                        block: None,
                    },
                    budget: Bytes(u64::MAX),
                    step_tokens: 256,
                    tokens: vec![128, 256],
                    chunk: &|_| 64,
                    optimizers: vec![Optimizer::AdamW(ADAM), Optimizer::AdamW8bit(ADAM)],
                    layers,
                    remat: remat.clone(),
                    dynamic: vec![],
                    stopped: &|| false,
                };
                let on_target = TargetSearch { search: &search, target: &target, build: &build };
                let candidates = on_target.candidates(&search.tokens).unwrap();
                for open in &candidates {
                    for k in (0..open.step.choices.len()).step_by(7) {
                        let prediction = on_target.predict(open, k).unwrap();
                        let (program, _) = on_target.plan_all_layers(&candidates, &prediction).unwrap();
                        let context = (layers, remat, &prediction.candidate, k);
                        assert_eq!(prediction.peak, program.lower_bound(), "{context:?}");
                        let micro = &program.plans()[0].1.graph;
                        let recomputed =
                            micro.nodes.iter().filter(|n| n.phase == plimsoll_graph::Phase::Recompute);
                        assert_eq!(prediction.recomputed, recomputed.count(), "{context:?}");
                        compared += 1;
                    }
                }
            }
        }
        assert!(compared > 300, "{compared}");
    }
}
