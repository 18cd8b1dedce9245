//! The search for the fastest way to train inside the line: tokens of a micro-batch, rows of logits and what is
//! recomputed, with the first optimizer that fits. Invariant: the candidates do not depend on the budget and each fits
//! or does not by its plan, so that more budget never gives a slower plan of one optimizer, nor a later optimizer.

use super::{After, Frontier, Optimizer, Solver, Training};
use crate::compile::Checks;
use crate::{Bill, Persistent, PlanError, Program, Remat, Target, passes, step_seconds};
use graph::{Bytes, Def, Graph, Node, Phase};
use std::cell::OnceCell;
use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

/// What is searched, and inside which line.
pub struct TrainingSearch<'a> {
    /// How the model is trained, but for what is searched.
    pub training: Training<'a>,
    /// The line.
    pub budget: Bytes,
    /// Tokens of an optimizer step.
    pub step_tokens: u64,
    /// Tokens of a micro-batch to choose from.
    pub tokens: Vec<u64>,
    /// Rows of logits at a time to choose from.
    pub chunks: Vec<u32>,
    /// Optimizers to choose from: the first that has a plan inside the line is taken, whatever the others' speed.
    pub optimizers: Vec<Optimizer>,
    /// Who decides what is recomputed.
    pub remat: RematChoice,
    /// Asked between the plans of a search: true ends it with [`PlanError::Stopped`].
    pub stopped: &'a dyn Fn() -> bool,
}

/// Who decides what is recomputed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RematChoice {
    /// The caller.
    Given(Remat),
    /// The search.
    Auto,
}

/// One combination.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Candidate {
    /// Tokens of a micro-batch.
    pub tokens: u64,
    /// Rows of logits at a time.
    pub chunk: u32,
    /// What makes a step of gradients.
    pub optimizer: Optimizer,
    /// Micro-batches of a step.
    pub accumulation: u64,
}

/// The fastest combination that fits.
#[derive(Debug)]
pub struct Found {
    /// Its plans.
    pub program: Program,
    /// What it is.
    pub candidate: Candidate,
    /// What is recomputed.
    pub remat: Remat,
    /// Expected seconds of an optimizer step.
    pub seconds: f64,
    /// Expected tokens per second.
    pub tokens_per_second: f64,
    /// Other combinations, the fastest first.
    pub rejected: Vec<Rejected>,
}

/// A combination that was not taken.
#[derive(Clone, Debug, PartialEq)]
pub struct Rejected {
    /// What it is.
    pub candidate: Candidate,
    /// What it recomputes.
    pub recomputed: usize,
    /// What the process would hold.
    pub peak: Bytes,
    /// Expected tokens per second.
    pub tokens_per_second: f64,
    /// Whether it is inside the line.
    pub fits: bool,
}

/// Builds the forward graph of a micro-batch of so many tokens with so many rows of logits at a time, and the graph
/// of an evaluation batch.
pub type BuildTraining<'a> = &'a dyn Fn(u64, u32) -> Result<(Graph, Graph), PlanError>;

/// A candidate on the way.
struct Open {
    candidate: Candidate,
    step: Rc<MicroStep>,
    apply: Apply,
    /// The plans of the optimizer's step and of evaluation, once they are asked for.
    after: OnceCell<After>,
}

/// What the step of the optimizer costs. It depends on the tokens of a micro-batch only as far as one is a whole step.
#[derive(Clone, Copy)]
struct Apply {
    /// Expected seconds.
    seconds: f64,
    /// What no plan goes below, whatever is recomputed: parameters, states, and what the target reserves.
    base: Bytes,
}

/// A micro-step and its evaluation: of all optimizers together, where they are not steps of it.
struct MicroStep {
    graph: Graph,
    evaluation: Rc<Graph>,
    /// Expected seconds where nothing is recomputed beyond what the caller says.
    seconds: f64,
    /// What may be recomputed, where the search decides it, and which of it are looked at.
    frontier: Option<Frontier>,
    choices: Vec<usize>,
}

/// A candidate that was planned, by what is asked of its plans: the plans themselves would be too many.
struct Tried {
    candidate: Candidate,
    remat: Remat,
    recomputed: usize,
    peak: Bytes,
    seconds: f64,
}

/// As many alternatives that fit, and as many that do not, are planned for the report.
const REPORTED: usize = 5;

impl TrainingSearch<'_> {
    /// The fastest program inside the line.
    ///
    /// # Errors
    /// [`PlanError::OverBudget`] with the bill of the smallest program, where none fits.
    pub fn run(&self, target: &Target, build: BuildTraining<'_>) -> Result<Found, PlanError> {
        let mut open = self.open(&self.tokens, target, build)?;
        // Stable: of equal ones the preferred comes first.
        open.sort_by(|a, b| b.most(self.budget).total_cmp(&a.most(self.budget)));
        let look = Look { search: self, target };
        let mut tried: Vec<Tried> = vec![];
        for &optimizer in &self.optimizers {
            for open in open.iter().filter(|open| open.candidate.optimizer == optimizer) {
                // The most that it can do is no more than what another one does: so it is with all that follow.
                if tried.iter().any(|t| t.rate() >= open.most(self.budget)) {
                    break;
                }
                tried.extend(look.squeezed(open)?);
            }
            if !tried.is_empty() {
                break;
            }
        }
        let best = tried.iter().map(Tried::rate).fold(0.0, f64::max);
        let Some(k) = tried.iter().position(|t| t.rate() >= best) else {
            return Err(PlanError::OverBudget(Box::new(look.bill(&open)?)));
        };
        let best = tried.swap_remove(k);
        let rejected = look.rejected(&open, &best, tried)?;
        Ok(Found {
            program: look.whole(&open, &best)?,
            candidate: best.candidate,
            seconds: best.seconds,
            tokens_per_second: best.rate(),
            rejected,
            remat: best.remat,
        })
    }

    /// Whether any combination is inside the line.
    pub fn fits(&self, target: &Target, build: BuildTraining<'_>) -> Result<bool, PlanError> {
        // The smallest micro-batch takes least, but for one that is a whole step, which need not add gradients up.
        let look = Look { search: self, target };
        let ends = self.tokens.iter().min().into_iter().chain(self.tokens.iter().max());
        for tokens in ends.copied().collect::<BTreeSet<u64>>() {
            for open in self.open(&[tokens], target, build)? {
                if look.squeezed(&open)?.is_some() {
                    return Ok(true);
                }
            }
        }
        Ok(false)
    }

    fn proceed(&self) -> Result<(), PlanError> {
        if (self.stopped)() { Err(PlanError::Stopped) } else { Ok(()) }
    }

    /// How a candidate is trained.
    fn training(&self, candidate: &Candidate) -> Training<'_> {
        let (optimizer, accumulation) = (candidate.optimizer, candidate.accumulation);
        Training { optimizer, accumulation, remat: Remat::None, ..self.training }
    }

    /// All combinations with micro-batches of these tokens, in order of preference.
    fn open(&self, tokens: &[u64], target: &Target, build: BuildTraining<'_>) -> Result<Vec<Open>, PlanError> {
        let mut solver = Solver::default();
        let mut applied: BTreeMap<(usize, bool), Apply> = BTreeMap::new();
        let mut open: Vec<(usize, Open)> = vec![];
        for (&tokens, &chunk) in tokens.iter().flat_map(|t| self.chunks.iter().map(move |c| (t, c))) {
            self.proceed()?;
            let (forward, evaluation) = build(tokens, chunk)?;
            let evaluation = Rc::new(evaluation);
            let mut shared: Option<Rc<MicroStep>> = None;
            let accumulation = self.step_tokens.div_ceil(tokens).max(1);
            for (rank, &optimizer) in self.optimizers.iter().enumerate() {
                self.proceed()?;
                let candidate = Candidate { tokens, chunk, optimizer, accumulation };
                let training = self.training(&candidate);
                let step = match shared.take().filter(|_| !training.steps_at_once()) {
                    Some(step) => step,
                    None => {
                        let graph = training.micro_step(&forward)?;
                        self.supported(&training, &graph, &evaluation, target)?;
                        Rc::new(self.micro_step(graph, &evaluation, target, &mut solver)?)
                    }
                };
                shared = Some(Rc::clone(&step));
                let apply = match applied.entry((rank, accumulation == 1)) {
                    Entry::Occupied(known) => *known.get(),
                    Entry::Vacant(place) => *place.insert(Apply::of(&training, &step.graph, target)?),
                };
                open.push((rank, Open { candidate, step, apply, after: OnceCell::new() }));
            }
        }
        open.sort_by_key(|(rank, _)| *rank);
        Ok(open.into_iter().map(|(_, open)| open).collect())
    }

    /// Whether the target has kernels for the whole step, so that nothing is priced that cannot run.
    fn supported(
        &self,
        training: &Training<'_>,
        micro: &Graph,
        evaluation: &Graph,
        target: &Target,
    ) -> Result<(), PlanError> {
        let apply = training.apply(micro)?;
        let evaluation = passes::precision(evaluation, training.precision)?;
        target.supports([micro, &evaluation].into_iter().chain(&apply))
    }

    fn micro_step(
        &self,
        graph: Graph,
        evaluation: &Rc<Graph>,
        target: &Target,
        solver: &mut Solver,
    ) -> Result<MicroStep, PlanError> {
        let (seconds, frontier) = match &self.remat {
            RematChoice::Given(remat) => (full(&passes::remat(&graph, remat)?, target), None),
            RematChoice::Auto => (full(&graph, target), Some(solver.frontier(&graph, target))),
        };
        let frontier = frontier.filter(|f| !f.is_empty());
        let choices = frontier.as_ref().map_or_else(|| vec![0], |f| thinned(f.len()));
        Ok(MicroStep { graph, evaluation: Rc::clone(evaluation), seconds, frontier, choices })
    }
}

/// Expected seconds of a full step.
fn full(graph: &Graph, target: &Target) -> f64 {
    step_seconds(graph, target, graph.bounds.full())
}

/// A search on a machine.
struct Look<'a> {
    search: &'a TrainingSearch<'a>,
    target: &'a Target,
}

impl Look<'_> {
    /// A candidate with as little recomputed as fits. Peaks grow with what is kept, so the border is found by halving,
    /// over the same positions for every budget: more of it never ends at an earlier one.
    fn squeezed(&self, open: &Open) -> Result<Option<Tried>, PlanError> {
        let budget = self.search.budget;
        let fitting = |k: usize| match open.floor(k) <= budget {
            true => Ok(Some(self.plan(open, k)?).filter(|t| t.fits(budget))),
            false => Ok(None),
        };
        let whole = fitting(open.last())?;
        if whole.is_some() || open.last() == 0 {
            return Ok(whole);
        }
        let (mut low, mut high, mut best) = (0, open.last(), None);
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

    /// What the candidates would take that were not chosen: the fastest inside the line and the fastest outside, one
    /// for each size and optimizer.
    fn rejected(&self, open: &[Open], best: &Tried, tried: Vec<Tried>) -> Result<Vec<Rejected>, PlanError> {
        let budget = self.search.budget;
        let mut others = tried;
        let like = |t: &Tried, o: &Open| {
            (t.candidate.tokens, t.candidate.optimizer) == (o.candidate.tokens, o.candidate.optimizer)
        };
        for open in open {
            if others.len() < REPORTED && !others.iter().chain([best]).any(|t| like(t, open)) {
                others.extend(self.squeezed(open)?);
            }
        }
        let mut faster: Vec<&Open> = open.iter().filter(|o| o.rate(o.last()) > best.rate()).collect();
        faster.sort_by(|a, b| b.rate(b.last()).total_cmp(&a.rate(a.last())));
        let mut outside: Vec<Tried> = vec![];
        for open in faster {
            if outside.len() < REPORTED && !outside.iter().any(|t| like(t, open)) {
                outside.extend(Some(self.plan(open, open.last())?).filter(|t| !t.fits(budget)));
            }
        }
        others.extend(outside);
        others.sort_by(|a, b| b.rate().total_cmp(&a.rate()));
        Ok(others.iter().map(|t| t.rejected(budget)).collect())
    }

    /// The bill of what takes least of all that a search looks at before it gives up: one byte less is refused.
    fn bill(&self, open: &[Open]) -> Result<Bill, PlanError> {
        let mut ways: Vec<(Bytes, &Open, usize)> = vec![];
        for open in open {
            let halved = std::iter::successors(Some(open.last()), |k| (*k > 0).then_some(k / 2));
            ways.extend(halved.map(|k| (open.floor(k), open, k)));
        }
        ways.sort_by_key(|(floor, ..)| *floor);
        let mut least: Option<Tried> = None;
        for (floor, open, k) in ways {
            if least.as_ref().is_none_or(|t| floor < t.peak) {
                let tried = self.plan(open, k)?;
                least = least.into_iter().chain([tried]).min_by_key(|t| t.peak);
            }
        }
        let nothing = || PlanError::BadPolicy { field: "batch", why: "nothing to choose from".to_owned() };
        let least = least.ok_or_else(nothing)?;
        let bill = self.whole(open, &least)?.bill(self.search.budget, vec![]);
        Ok(Bill { seconds_per_token: 1.0 / least.rate(), budget_flag: "--budget", ..bill })
    }

    /// What choice `k` of a candidate would take.
    fn plan(&self, open: &Open, k: usize) -> Result<Tried, PlanError> {
        self.search.proceed()?;
        let step = &open.step;
        let remat = match (&step.frontier, &self.search.remat) {
            (Some(_), _) if k == open.last() => Remat::None,
            (Some(frontier), _) => Remat::Nodes(frontier.choice(step.choices[k]).nodes),
            (None, RematChoice::Given(remat)) => remat.clone(),
            (None, RematChoice::Auto) => Remat::None,
        };
        let program = self.after(open)?.with(&step.graph, &remat, self.target, Checks::Draft)?;
        let (peak, candidate, seconds) = (program.peak(), open.candidate, open.seconds(k));
        debug_assert!(peak >= open.floor(k), "{candidate:?} {k}: {peak}, at least {}", open.floor(k));
        let recompute = |n: &&Node| n.phase == Phase::Recompute;
        let recomputed = program.plans()[0].1.graph.nodes.iter().filter(recompute).count();
        Ok(Tried { candidate, remat, recomputed, peak, seconds })
    }

    /// Drafts of the plans beside the micro-step, made once.
    fn after<'o>(&self, open: &'o Open) -> Result<&'o After, PlanError> {
        if let Some(after) = open.after.get() {
            return Ok(after);
        }
        let after = self.after_with(open, Checks::Draft)?;
        Ok(open.after.get_or_init(|| after))
    }

    fn after_with(&self, open: &Open, checks: Checks) -> Result<After, PlanError> {
        self.search.proceed()?;
        let training = self.search.training(&open.candidate);
        training.after(&open.step.graph, &open.step.evaluation, self.target, checks)
    }

    /// The plans of what was tried, checked.
    fn whole(&self, open: &[Open], tried: &Tried) -> Result<Program, PlanError> {
        let nothing = || PlanError::BadPolicy { field: "batch", why: "it was never tried".to_owned() };
        let open = open.iter().find(|o| o.candidate == tried.candidate).ok_or_else(nothing)?;
        self.after_with(open, Checks::All)?.with(&open.step.graph, &tried.remat, self.target, Checks::All)
    }
}

impl Apply {
    fn of(training: &Training<'_>, micro: &Graph, target: &Target) -> Result<Self, PlanError> {
        let apply = training.apply(micro)?;
        let mut persistent = Persistent::new();
        for graph in apply.iter().chain([micro]) {
            for value in graph.values.iter().filter(|v| v.def == Def::Source) {
                persistent.place(graph, &value.spec, target.alignment);
            }
        }
        let seconds = apply.as_ref().map_or(0.0, |graph| full(graph, target));
        Ok(Self { seconds, base: persistent.bytes() + target.reserved() })
    }
}

impl Open {
    /// The choice that recomputes nothing, or the caller's.
    fn last(&self) -> usize {
        self.step.choices.len() - 1
    }

    /// What no plan of choice `k` goes below.
    fn floor(&self, k: usize) -> Bytes {
        let step = &self.step;
        self.apply.base + step.frontier.as_ref().map_or(Bytes::ZERO, |f| f.kept(step.choices[k]))
    }

    /// How many choices, from the first on, may be inside a line.
    fn within(&self, budget: Bytes) -> usize {
        (0..self.step.choices.len()).take_while(|&k| self.floor(k) <= budget).count()
    }

    /// Expected seconds of an optimizer step with choice `k`.
    fn seconds(&self, k: usize) -> f64 {
        let step = &self.step;
        let again = step.frontier.as_ref().map_or(0.0, |f| f.seconds(step.choices[k]));
        self.candidate.accumulation as f64 * (step.seconds + again) + self.apply.seconds
    }

    /// Tokens per second with choice `k`.
    fn rate(&self, k: usize) -> f64 {
        self.candidate.step_tokens() / self.seconds(k)
    }

    /// The most tokens per second that it may have inside a line.
    fn most(&self, budget: Bytes) -> f64 {
        self.within(budget).checked_sub(1).map_or(0.0, |k| self.rate(k))
    }
}

impl Candidate {
    fn step_tokens(&self) -> f64 {
        (self.tokens * self.accumulation) as f64
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

/// As many choices of what is recomputed are planned at most: a finer step brings less than the cost model knows.
const CHOICES: usize = 32;

/// The positions of those of `n` choices.
fn thinned(n: usize) -> Vec<usize> {
    match n <= CHOICES {
        true => (0..n).collect(),
        false => (0..CHOICES).map(|i| i * (n - 1) / (CHOICES - 1)).collect(),
    }
}
