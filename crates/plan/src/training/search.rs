//! Search for the fastest training program within a memory budget: tokens per micro-batch and recomputation, for the first
//! optimizer that fits. Invariant: candidates do not
//! depend on the budget, and whether one fits is decided by its plan alone; a larger budget therefore never
//! gives a slower plan of the same optimizer, nor a later optimizer.

use super::frontier::Frontier;
use super::layers::{Layers, Size};
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
    /// How recomputation is decided.
    pub remat: RematChoice,
    /// Tokens of micro-steps between which a run can switch; empty for a run that does not. The program has a micro-step for
    /// each of these numbers below the chosen one. All of them then add to the gradients of a step, and evaluations have the
    /// smallest number.
    pub dynamic: Vec<u64>,
    /// Polled between plans; returning true ends the search with [`PlanError::Stopped`].
    pub stopped: &'a dyn Fn() -> bool,
}

/// How recomputation is decided.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RematChoice {
    /// Fixed by the caller.
    Given(RecomputePolicy),
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
    /// What is recomputed and offloaded of the activations.
    pub activations: ActivationPolicy,
    /// What is kept outside the memory of the device.
    pub offload: Offload,
    /// Limit on the bytes of moves that run ahead of or behind launches.
    pub window: Window,
    /// Predicted seconds of an optimizer step.
    pub seconds: f64,
    /// Predicted tokens per second.
    pub tokens_per_second: f64,
    /// Other combinations, fastest first.
    pub rejected: Vec<Rejected>,
}

/// A combination that was not chosen.
#[derive(Clone, Debug, PartialEq)]
pub struct Rejected {
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

/// A candidate under consideration.
struct OpenCandidate {
    candidate: Candidate,
    step: Rc<MicroStep>,
    apply: Apply,
    /// Recomputation choices from this index on are excluded, because a choice that was predicted to fit exceeded the
    /// budget when it was planned.
    below: Cell<usize>,
}

/// Cost of the optimizer step. It depends on the tokens of a micro-batch only in whether one micro-batch is a
/// whole step.
#[derive(Clone, Copy)]
struct Apply {
    /// Predicted seconds.
    seconds: f64,
    /// Lower bound on the memory of every plan: parameters, states and reserved memory.
    base: Bytes,
    /// Largest sum of other live bytes during the optimizer step.
    live: Bytes,
}

/// A micro-step and its evaluation; shared by all optimizers unless the optimizer step is part of it.
struct MicroStep {
    /// Graphs of models with fewer layers, by number of layers.
    graphs: RefCell<BTreeMap<u32, Rc<Graph>>>,
    evaluation: Rc<Graph>,
    /// Largest sum of live bytes of an evaluation, computed on first use.
    evaluated: OnceCell<Bytes>,
    /// Predicted seconds, without recomputation chosen by the search.
    seconds: f64,
    /// Recomputation choices, if the search decides, and the indices of the choices considered.
    frontier: Option<Frontier>,
    choices: Vec<usize>,
}

/// A recomputation choice of a candidate, with its predicted memory and time.
struct Tried {
    candidate: Candidate,
    choice: usize,
    recomputed: usize,
    peak: Bytes,
    seconds: f64,
}

/// Number of sizes of a micro-batch of which the fastest is chosen. In descending order of the sizes, a smaller one is not faster
/// than all larger ones unless these do not fit.
const GROUP: usize = 6;

/// Number of fitting, and of non-fitting, alternatives that are planned for the report.
const REPORTED: usize = 5;

impl TrainingSearch<'_> {
    /// Returns the fastest program within the budget.
    ///
    /// # Errors
    /// [`PlanError::OverBudget`] with the bill of the smallest program if none fits.
    pub fn run(&self, target: &Target, build: BuildTraining<'_>) -> Result<TrainingChoice, PlanError> {
        let look = Look { search: self, target, build };
        match look.searched()? {
            Searched::Found(found) => Ok(*found),
            Searched::Nothing { tried, too_large: Some(error) } if tried.is_empty() => Err(error),
            Searched::Nothing { tried, .. } => Err(PlanError::OverBudget(Box::new(look.bill(&tried)?))),
        }
    }

    /// Like [`Self::run`], but returns `None` if nothing fits.
    pub fn find(&self, target: &Target, build: BuildTraining<'_>) -> Result<Option<TrainingChoice>, PlanError> {
        let look = Look { search: self, target, build };
        Ok(match look.searched()? {
            Searched::Found(found) => Some(*found),
            Searched::Nothing { .. } => None,
        })
    }

    /// Whether any combination fits into the budget.
    pub fn fits(&self, target: &Target, build: BuildTraining<'_>) -> Result<bool, PlanError> {
        // The smallest micro-batch needs the least memory, except that one which is a whole step need not
        // accumulate gradients.
        let look = Look { search: self, target, build };
        let ends = self.tokens.iter().min().into_iter().chain(self.tokens.iter().max());
        for tokens in ends.copied().collect::<BTreeSet<u64>>() {
            match look.open(&[tokens]) {
                Ok(open) if look.fitting(&open)?.is_some() => return Ok(true),
                Ok(_) | Err(PlanError::TooLarge { .. }) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(false)
    }

    /// Tokens of the micro-steps of a program whose largest micro-step has `tokens` tokens, in descending order.
    fn switched(&self, tokens: u64) -> Vec<u64> {
        let smaller = self.dynamic.iter().copied().filter(|&n| n < tokens);
        let sizes: BTreeSet<u64> = smaller.chain([tokens]).collect();
        sizes.into_iter().rev().collect()
    }

    fn proceed(&self) -> Result<(), PlanError> {
        if (self.stopped)() { Err(PlanError::Stopped) } else { Ok(()) }
    }

    /// Training options of a candidate.
    fn training(&self, candidate: &Candidate) -> Training<'_> {
        let least = if self.dynamic.is_empty() { 1 } else { 2 };
        let (optimizer, accumulation) = (candidate.optimizer, candidate.accumulation.max(least));
        let ActivationPolicy { recompute: remat, offload: activations } = ActivationPolicy::STORED;
        Training { optimizer, accumulation, remat, activations, ..self.training }
    }
}

/// A search on one target.
struct Look<'a> {
    search: &'a TrainingSearch<'a>,
    target: &'a Target,
    build: BuildTraining<'a>,
}

/// The fastest candidate within the budget, planned, and the others considered for it.
struct Fitting {
    program: Program,
    activations: ActivationPolicy,
    best: Tried,
    others: Vec<Tried>,
}

/// Result of a search over all groups of sizes.
enum Searched {
    Found(Box<TrainingChoice>),
    /// Nothing fits.
    Nothing {
        /// The combinations that were considered.
        tried: Vec<OpenCandidate>,
        /// Why combinations were left out.
        too_large: Option<PlanError>,
    },
}

impl Look<'_> {
    /// Searches the groups of micro-batch sizes until something fits.
    fn searched(&self) -> Result<Searched, PlanError> {
        let (mut tried, mut too_large) = (vec![], None);
        for tokens in self.search.tokens.chunks(GROUP) {
            let open = match self.open(tokens) {
                Ok(open) => open,
                Err(error @ PlanError::TooLarge { .. }) => {
                    too_large = Some(error);
                    continue;
                }
                Err(error) => return Err(error),
            };
            if let Some(found) = self.found(&open)? {
                return Ok(Searched::Found(Box::new(found)));
            }
            tried.extend(open);
        }
        Ok(Searched::Nothing { tried, too_large })
    }

    /// All combinations with these micro-batch sizes that are not too large for any machine, the potentially fastest first.
    ///
    /// # Errors
    /// [`PlanError::TooLarge`] if all combinations are too large.
    fn open(&self, tokens: &[u64]) -> Result<Vec<OpenCandidate>, PlanError> {
        let search = self.search;
        has_matmuls(search.training.precision, self.target)?;
        let offload = &search.training.offload;
        let mut solver =
            if offload.activations { Solver::with_offload_to(offload.to) } else { Solver::default() };
        let mut applied: BTreeMap<(usize, bool), Apply> = BTreeMap::new();
        let mut open: Vec<(usize, OpenCandidate)> = vec![];
        let mut too_large = None;
        for &tokens in tokens {
            let chunk = (search.chunk)(tokens);
            let mut shared: Option<Rc<MicroStep>> = None;
            let accumulation = search.step_tokens.div_ceil(tokens).max(1);
            for (rank, &optimizer) in search.optimizers.iter().enumerate() {
                search.proceed()?;
                let candidate = Candidate { tokens, chunk, optimizer, accumulation };
                let step = match shared.take().filter(|_| !search.training(&candidate).steps_at_once()) {
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
                let apply = match applied.entry((rank, accumulation == 1)) {
                    Entry::Occupied(known) => *known.get(),
                    Entry::Vacant(place) => *place.insert(self.apply(&candidate)?),
                };
                let below = Cell::new(step.choices.len());
                open.push((rank, OpenCandidate { candidate, step, apply, below }));
            }
        }
        if let (true, Some(error)) = (open.is_empty(), too_large) {
            return Err(error);
        }
        open.sort_by_key(|(rank, _)| *rank);
        let mut open: Vec<OpenCandidate> = open.into_iter().map(|(_, open)| open).collect();
        // The sort is stable: among equal candidates the preferred one comes first.
        open.sort_by(|a, b| b.most(search.budget).total_cmp(&a.most(search.budget)));
        Ok(open)
    }

    fn micro_step(&self, candidate: &Candidate, solver: &mut Solver) -> Result<MicroStep, PlanError> {
        let Self { search, target, .. } = *self;
        let training = search.training(candidate);
        let all = Layers::alike(search.layers);
        let sample = self.sample(all.clone()).shown();
        let (forward, evaluation) = (self.build)(candidate.tokens, candidate.chunk, sample)?;
        let sampled = Rc::new(training.micro_step(&forward)?);
        let graph = match all.shown() {
            layers if layers == sample => Rc::clone(&sampled),
            layers => Rc::new(self.graph(candidate, layers)?),
        };
        let evaluation = training.evaluation(&evaluation, &sampled)?;
        // Unsupported graphs are rejected before anything is priced.
        let apply = training.apply(&graph)?;
        target.supports([&*graph, &evaluation].into_iter().chain(&apply))?;
        let step = Size::extended(search.layers, |layers| {
            let seconds = self.seconds(&self.graph(candidate, layers)?, &self.given())?;
            Ok(Size { persistent: Bytes::ZERO, pinned: Bytes::ZERO, seconds })
        })?;
        let (again, frontier) = match &search.remat {
            RematChoice::Given(remat) => {
                let layers = Layers::under(remat, search.layers);
                let graph = passes::remat(&self.graph(candidate, layers.shown())?, &layers.shrunk(remat))?;
                (layers.recomputed(&graph, target).1, None)
            }
            RematChoice::Auto => (0.0, Some(solver.frontier(&graph, &all.likes(), target))),
        };
        let frontier = frontier.filter(|f| !f.is_empty());
        let choices = frontier.as_ref().map_or_else(|| vec![0], |f| thinned(f.len()));
        Ok(MicroStep {
            graphs: RefCell::new(BTreeMap::from([(all.shown(), graph), (sample, sampled)])),
            evaluation: Rc::new(evaluation),
            evaluated: OnceCell::new(),
            seconds: step.seconds + again,
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
    fn apply(&self, candidate: &Candidate) -> Result<Apply, PlanError> {
        let Self { search, target, .. } = *self;
        let training = search.training(candidate);
        let live = Cell::new(Bytes::ZERO);
        let size = Size::extended(search.layers, |layers| {
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
                live.set(self.live(apply, &Layers::alike(layers), &ActivationPolicy::STORED)?.0);
            }
            let stored = ActivationPolicy::STORED;
            let seconds = apply.as_ref().map_or(Ok(0.0), |graph| self.seconds(graph, &stored))?;
            let [persistent, pinned] = [Space::Device, Space::Host].map(|space| persistent.bytes(space));
            Ok(Size { persistent, pinned, seconds })
        })?;
        if search.training.offload.gradients {
            // It fetches the gradients of all layers at once for their norm, of which a few layers show little.
            let (forward, _) = (self.build)(candidate.tokens, candidate.chunk, search.layers)?;
            if let Some(apply) = training.apply(&training.micro_step(&forward)?)? {
                live.set(self.live(&apply, &Layers::alike(search.layers), &ActivationPolicy::STORED)?.0);
            }
        }
        let base = size.persistent + target.page_tables(size.pinned) + target.reserved();
        Ok(Apply { seconds: size.seconds, base, live: live.get() })
    }

    /// What becomes of the activations where the search does not choose: with a given recomputation those that are not
    /// recomputed are offloaded, if offload has activations; otherwise all are stored.
    fn given(&self) -> ActivationPolicy {
        match self.search.remat {
            RematChoice::Given(_) => {
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

    /// Largest sum of live bytes in a step of the full model, computed from the graph of the small model, and
    /// the number of recomputed nodes.
    fn live(
        &self,
        graph: &Graph,
        layers: &Layers,
        stored: &ActivationPolicy,
    ) -> Result<(Bytes, usize), PlanError> {
        let (graph, schedule) =
            lowered(graph.clone(), &self.search.training.policy(stored), self.target, &mut |_, _| {})?;
        let live = layers.live(&graph, &schedule, self.target)?;
        Ok((live, layers.recomputed(&graph, self.target).0))
    }

    fn found(&self, open: &[OpenCandidate]) -> Result<Option<TrainingChoice>, PlanError> {
        let Some(Fitting { program, activations, mut best, others }) = self.fitting(open)? else {
            return Ok(None);
        };
        if !program.offload().is_empty() {
            // Copies hide behind the kernels of other layers, which only the whole plan has.
            best.seconds = seconds_of(&program, &best.candidate);
        }
        Ok(Some(TrainingChoice {
            program,
            candidate: best.candidate,
            seconds: best.seconds,
            tokens_per_second: best.rate(),
            rejected: self.rejected(open, &best, others)?,
            activations,
            offload: self.search.training.offload,
            window: self.search.training.window,
        }))
    }

    /// Fastest candidate that fits when planned, for the first optimizer that has one.
    fn fitting(&self, open: &[OpenCandidate]) -> Result<Option<Fitting>, PlanError> {
        let budget = self.search.budget;
        for &optimizer in &self.search.optimizers {
            loop {
                let mut tried: Vec<Tried> = vec![];
                for open in open.iter().filter(|open| open.candidate.optimizer == optimizer) {
                    // Skip a candidate if its best possible rate does not exceed the rate of a tried candidate.
                    if tried.iter().any(|t| t.rate() >= open.most(budget)) {
                        continue;
                    }
                    tried.extend(self.squeezed(open)?);
                }
                let best = tried.iter().map(Tried::rate).fold(0.0, f64::max);
                let Some(k) = tried.iter().position(|t| t.rate() >= best) else { break };
                let best = tried.swap_remove(k);
                let (program, activations) = self.whole(open, &best)?;
                if program.peak() <= budget {
                    return Ok(Some(Fitting { program, activations, best, others: tried }));
                }
                // Packing adds waste to the live bytes, so the choice may fail although its live bytes fit.
                open.iter().filter(|o| o.candidate == best.candidate).for_each(|o| o.below.set(best.choice));
            }
        }
        Ok(None)
    }

    /// Finds the recomputation choice of a candidate that fits the budget with the least recomputation. The choices are
    /// sorted by stored bytes, and peak memory grows with them, so the search is a bisection. It tries the same
    /// positions for every budget, so a larger budget never gives a choice with more recomputation.
    fn squeezed(&self, open: &OpenCandidate) -> Result<Option<Tried>, PlanError> {
        let budget = self.search.budget;
        let fitting = |k: usize| match open.floor(k) <= budget {
            true => Ok(Some(self.tried(open, k)?).filter(|t| t.fits(budget))),
            false => Ok(None),
        };
        let Some(last) = open.last() else { return Ok(None) };
        let whole = fitting(last)?;
        if whole.is_some() || last == 0 {
            return Ok(whole);
        }
        let (mut low, mut high, mut best) = (0, last, None);
        while high - low > 1 {
            let middle = low + (high - low) / 2;
            match fitting(middle)? {
                None => high = middle,
                found @ Some(_) => (low, best) = (middle, found),
            }
        }
        match best {
            None => fitting(0),
            Some(_) => Ok(best),
        }
    }

    /// Reports the candidates not chosen: the fastest within and the fastest outside the budget, one per size
    /// and optimizer.
    fn rejected(
        &self,
        open: &[OpenCandidate],
        best: &Tried,
        tried: Vec<Tried>,
    ) -> Result<Vec<Rejected>, PlanError> {
        let budget = self.search.budget;
        let mut others = tried;
        let like = |t: &Tried, o: &OpenCandidate| {
            (t.candidate.tokens, t.candidate.optimizer) == (o.candidate.tokens, o.candidate.optimizer)
        };
        for open in open {
            if others.len() < REPORTED && !others.iter().chain([best]).any(|t| like(t, open)) {
                others.extend(self.squeezed(open)?);
            }
        }
        let fastest = |o: &OpenCandidate| o.rate(o.step.choices.len() - 1);
        let mut faster: Vec<&OpenCandidate> = open.iter().filter(|o| fastest(o) > best.rate()).collect();
        faster.sort_by(|a, b| fastest(b).total_cmp(&fastest(a)));
        let mut outside: Vec<Tried> = vec![];
        for open in faster {
            if outside.len() < REPORTED && !outside.iter().any(|t| like(t, open)) {
                let tried = self.tried(open, open.step.choices.len() - 1)?;
                outside.extend(Some(tried).filter(|t| !t.fits(budget)));
            }
        }
        others.extend(outside);
        others.sort_by(|a, b| b.rate().total_cmp(&a.rate()));
        Ok(others.iter().map(|t| t.rejected(budget)).collect())
    }

    /// Bill of the smallest program that the search considers: with one byte less the search fails.
    fn bill(&self, open: &[OpenCandidate]) -> Result<Bill, PlanError> {
        let mut ways: Vec<Tried> = vec![];
        for open in open {
            let last = open.step.choices.len() - 1;
            for k in std::iter::successors(Some(last), |k| (*k > 0).then_some(k / 2)) {
                if ways.iter().all(|t| open.floor(k) < t.peak) {
                    ways.push(self.tried(open, k)?);
                }
            }
        }
        // A packed plan needs no less than its predicted peak.
        ways.sort_by_key(|t| t.peak);
        let mut least: Option<(Tried, Program)> = None;
        for tried in ways {
            if least.as_ref().is_none_or(|(_, program)| tried.peak < program.peak()) {
                let (program, _) = self.whole(open, &tried)?;
                let before = least.take().filter(|(_, before)| before.peak() <= program.peak());
                least = before.or(Some((tried, program)));
            }
        }
        let nothing = || PlanError::BadPolicy { field: "batch", why: "nothing to choose from".to_owned() };
        let (least, program) = least.ok_or_else(nothing)?;
        let bill = program.bill(self.search.budget, vec![]);
        Ok(Bill { seconds_per_token: 1.0 / least.rate(), budget_setting: Setting::Budget, ..bill })
    }

    /// Predicts memory and time of choice `k` of a candidate.
    fn tried(&self, open: &OpenCandidate, k: usize) -> Result<Tried, PlanError> {
        self.search.proceed()?;
        let step = &open.step;
        let all = self.search.layers;
        let (layers, graph, stored) = match (&step.frontier, &self.search.remat) {
            (Some(frontier), _) if k + 1 < step.choices.len() => {
                let ways = frontier.ways(step.choices[k]);
                let layers = self.sample(Layers::of(&ways));
                let graph = self.small(open, &layers)?;
                let shown: Vec<_> = layers.originals().into_iter().map(|layer| ways[layer as usize]).collect();
                let stored = frontier.policy(&graph, &shown);
                (layers, graph, stored)
            }
            (None, RematChoice::Given(remat)) => {
                let layers = self.sample(Layers::under(remat, all));
                let stored = ActivationPolicy { recompute: layers.shrunk(remat), ..self.given() };
                (layers.clone(), self.small(open, &layers)?, stored)
            }
            (_, _) => {
                let layers = self.sample(Layers::alike(all));
                (layers.clone(), self.small(open, &layers)?, ActivationPolicy::STORED)
            }
        };
        let (live, recomputed) = self.live(&graph, &layers, &stored)?;
        let live = live.max(open.apply.live).max(self.evaluated(step)?);
        let (peak, candidate, seconds) = (open.apply.base + live, open.candidate, open.seconds(k));
        debug_assert!(peak >= open.floor(k), "{candidate:?} {k}: {peak}, at least {}", open.floor(k));
        Ok(Tried { candidate, choice: k, recomputed, peak, seconds })
    }

    /// The layers of the small model from which memory is predicted. What is copied ahead is limited in bytes, not in layers,
    /// so with offload all layers are in it.
    fn sample(&self, layers: Layers) -> Layers {
        if self.search.training.offload.is_empty() { layers } else { Layers::different(self.search.layers) }
    }

    /// Graph of the small model, built once.
    fn small(&self, open: &OpenCandidate, layers: &Layers) -> Result<Rc<Graph>, PlanError> {
        let shown = layers.shown();
        if let Some(known) = open.step.graphs.borrow().get(&shown) {
            return Ok(Rc::clone(known));
        }
        let graph = Rc::new(self.graph(&open.candidate, shown)?);
        open.step.graphs.borrow_mut().insert(shown, Rc::clone(&graph));
        Ok(graph)
    }

    fn evaluated(&self, step: &MicroStep) -> Result<Bytes, PlanError> {
        if let Some(&known) = step.evaluated.get() {
            return Ok(known);
        }
        let (live, _) = self.live(
            &step.evaluation,
            &self.sample(Layers::alike(self.search.layers)),
            &ActivationPolicy::STORED,
        )?;
        Ok(*step.evaluated.get_or_init(|| live))
    }

    /// Plans the full model for a tried choice, and returns what becomes of its activations.
    fn whole(&self, open: &[OpenCandidate], tried: &Tried) -> Result<(Program, ActivationPolicy), PlanError> {
        self.search.proceed()?;
        let nothing = || PlanError::BadPolicy { field: "batch", why: "it was never tried".to_owned() };
        let open = open.iter().find(|o| o.candidate == tried.candidate).ok_or_else(nothing)?;
        let training = self.search.training(&tried.candidate);
        let (mut evaluation, mut micro_steps) = (None, vec![]);
        for tokens in self.search.switched(tried.candidate.tokens) {
            let (forward, evaluated) = (self.build)(tokens, (self.search.chunk)(tokens), self.search.layers)?;
            let micro = training.micro_step(&forward)?;
            let stored = match (&open.step.frontier, &self.search.remat) {
                (Some(frontier), _) if tried.choice + 1 < open.step.choices.len() => {
                    let ways = frontier.ways(open.step.choices[tried.choice]);
                    frontier.policy(&micro, &ways)
                }
                (None, RematChoice::Given(remat)) => {
                    ActivationPolicy { recompute: remat.clone(), ..self.given() }
                }
                (_, _) => ActivationPolicy::STORED,
            };
            micro_steps.push((micro, stored));
            evaluation = Some(evaluated);
        }
        let stored = micro_steps.first().map_or(ActivationPolicy::STORED, |(_, stored)| stored.clone());
        let program = training.program_of(micro_steps, &evaluation.ok_or_else(nothing)?, self.target)?;
        Ok((program, stored))
    }
}

/// Predicted seconds of an optimizer step of a program: its micro-steps and its update.
fn seconds_of(program: &Program, candidate: &Candidate) -> f64 {
    let seconds = |name: &str| program.seconds_of(name).unwrap_or(0.0);
    candidate.accumulation as f64 * seconds(plans::MICRO) + seconds(plans::APPLY)
}

impl OpenCandidate {
    /// Last choice that is not excluded: the one with the least recomputation.
    fn last(&self) -> Option<usize> {
        self.below.get().checked_sub(1)
    }

    /// Lower bound on the memory of every plan of choice `k`.
    fn floor(&self, k: usize) -> Bytes {
        let step = &self.step;
        self.apply.base + step.frontier.as_ref().map_or(Bytes::ZERO, |f| f.kept(step.choices[k]))
    }

    /// Number of choices, from the first on, that may fit into a budget.
    fn within(&self, budget: Bytes) -> usize {
        (0..self.below.get()).take_while(|&k| self.floor(k) <= budget).count()
    }

    /// Predicted seconds of an optimizer step with choice `k`.
    fn seconds(&self, k: usize) -> f64 {
        let step = &self.step;
        let again = step.frontier.as_ref().map_or(0.0, |f| f.seconds(step.choices[k]));
        self.candidate.accumulation as f64 * (step.seconds + again) + self.apply.seconds
    }

    /// Predicted tokens per second with choice `k`.
    fn rate(&self, k: usize) -> f64 {
        self.candidate.step_tokens() / self.seconds(k)
    }

    /// Upper bound on the tokens per second within a budget.
    fn most(&self, budget: Bytes) -> f64 {
        self.within(budget).checked_sub(1).map_or(0.0, |k| self.rate(k))
    }
}

impl Candidate {
    fn step_tokens(&self) -> f64 {
        self.tokens as f64 * self.accumulation as f64
    }
}

impl Tried {
    fn rate(&self) -> f64 {
        self.candidate.step_tokens() / self.seconds
    }

    fn fits(&self, budget: Bytes) -> bool {
        self.peak <= budget
    }

    fn rejected(&self, budget: Bytes) -> Rejected {
        Rejected {
            candidate: self.candidate,
            recomputed: self.recomputed,
            peak: self.peak,
            tokens_per_second: self.rate(),
            fits: self.fits(budget),
        }
    }
}

/// Maximum number of recomputation choices considered: finer steps are below the accuracy of the cost model.
const CHOICES: usize = 32;

/// Positions of the considered choices among `n`.
fn thinned(n: usize) -> Vec<usize> {
    match n <= CHOICES {
        true => (0..n).collect(),
        false => (0..CHOICES).map(|i| i * (n - 1) / (CHOICES - 1)).collect(),
    }
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
            RematChoice::Given(RecomputePolicy::None),
            RematChoice::Given(RecomputePolicy::Full),
            RematChoice::Given(selective.clone()),
            RematChoice::Given(RecomputePolicy::EveryN(2)),
            RematChoice::Given(RecomputePolicy::EveryN(3)),
            RematChoice::Given(some(RecomputePolicy::Full)),
            RematChoice::Given(some(selective)),
            RematChoice::Given(some(RecomputePolicy::EveryN(2))),
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
                let look = Look { search: &search, target: &target, build: &build };
                let open = look.open(&search.tokens).unwrap();
                for one in &open {
                    for k in (0..one.step.choices.len()).step_by(7) {
                        let tried = look.tried(one, k).unwrap();
                        let (program, _) = look.whole(&open, &tried).unwrap();
                        let said = (layers, remat, &tried.candidate, k);
                        assert_eq!(tried.peak, program.lower_bound(), "{said:?}");
                        let micro = &program.plans()[0].1.graph;
                        let recomputed =
                            micro.nodes.iter().filter(|n| n.phase == plimsoll_graph::Phase::Recompute);
                        assert_eq!(tried.recomputed, recomputed.count(), "{said:?}");
                        compared += 1;
                    }
                }
            }
        }
        assert!(compared > 300, "{compared}");
    }
}
