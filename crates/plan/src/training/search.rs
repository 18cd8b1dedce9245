//! The search for the fastest way to train inside the line: tokens of a micro-batch, rows of logits, the
//! optimizer's moments and what is recomputed. Invariant: the candidates do not depend on the budget and each fits or
//! does not by its plan, so that more budget never gives a slower plan.

use super::{After, Choice, Optimizer, Training, frontier};
use crate::{PlanError, Program, Remat, Target, passes, step_seconds};
use graph::{Bytes, Graph, Node, Phase};
use std::collections::BTreeSet;

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
    /// Optimizers to choose from, in order of preference between those that are as fast.
    pub optimizers: Vec<Optimizer>,
    /// Who decides what is recomputed.
    pub remat: RematChoice,
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
    micro: Graph,
    after: After,
    /// Expected seconds of a micro-step that recomputes nothing beyond what the caller says, and of the rest.
    micro_seconds: f64,
    apply_seconds: f64,
}

/// A candidate with its plans.
struct Tried {
    candidate: Candidate,
    program: Program,
    remat: Remat,
    seconds: f64,
}

/// As many of the faster alternatives are planned for the report.
const REPORTED: usize = 6;

impl TrainingSearch<'_> {
    /// The fastest program inside the line.
    ///
    /// # Errors
    /// [`PlanError::OverBudget`] with the bill of the smallest program that was tried, where none fits.
    pub fn run(&self, target: &Target, build: BuildTraining<'_>) -> Result<Found, PlanError> {
        let mut open = self.candidates().map(|c| self.open(c, target, build)).collect::<Result<Vec<_>, _>>()?;
        // Stable: of equal ones the preferred comes first.
        open.sort_by(|a, b| b.most().total_cmp(&a.most()));
        let mut tried: Vec<Tried> = vec![];
        for open in &open {
            // The most that it can do is no more than what another one does: so it is with all that follow.
            if tried.iter().any(|t| t.fits(self.budget) && t.rate() >= open.most()) {
                break;
            }
            self.squeeze(open, target, &mut tried)?;
        }
        let fastest = |t: &&Tried| t.fits(self.budget);
        let best = tried.iter().filter(fastest).map(Tried::rate).fold(0.0, f64::max);
        let Some(k) = tried.iter().position(|t| t.fits(self.budget) && t.rate() >= best) else {
            let smallest = tried.iter().min_by_key(|t| t.program.peak());
            let nothing = || PlanError::BadPolicy { field: "batch", why: "nothing to choose from".to_owned() };
            let bill = smallest.ok_or_else(nothing)?.program.bill(self.budget, vec![]);
            return Err(PlanError::OverBudget(Box::new(bill)));
        };
        let best = tried.swap_remove(k);
        for open in open.iter().filter(|o| o.candidate != best.candidate) {
            let known = tried.iter().any(|t| t.candidate == open.candidate);
            if !known && tried.len() < REPORTED {
                tried.push(self.plan(open, self.given(), open.micro_seconds, target)?);
            }
        }
        tried.sort_by(|a, b| b.rate().total_cmp(&a.rate()));
        let rejected = tried.iter().map(|t| t.rejected(self.budget)).collect();
        Ok(Found {
            seconds: best.seconds,
            tokens_per_second: best.rate(),
            program: best.program,
            remat: best.remat,
            candidate: best.candidate,
            rejected,
        })
    }

    /// Whether any combination is inside the line.
    pub fn fits(&self, target: &Target, build: BuildTraining<'_>) -> Result<bool, PlanError> {
        // The smallest micro-batch takes least, but for one that is a whole step, which need not add gradients up.
        let mut candidates: Vec<Candidate> = self.candidates().collect();
        candidates.sort_by_key(|c| (c.tokens, c.chunk));
        let ends = candidates.first().into_iter().chain(candidates.last()).map(|c| c.tokens);
        for tokens in ends.collect::<BTreeSet<u64>>() {
            for candidate in candidates.iter().filter(|c| c.tokens == tokens) {
                let open = self.open(*candidate, target, build)?;
                let choices = match &self.remat {
                    RematChoice::Given(_) => vec![],
                    RematChoice::Auto => frontier(&open.micro, target),
                };
                let least = choices.into_iter().next().map(|choice| Remat::Nodes(choice.nodes));
                let least = least.unwrap_or_else(|| self.given());
                if open.after.with(&open.micro, &least, target)?.peak() <= self.budget {
                    return Ok(true);
                }
            }
        }
        Ok(false)
    }

    fn candidates(&self) -> impl Iterator<Item = Candidate> {
        self.optimizers.iter().flat_map(move |&optimizer| {
            self.tokens.iter().flat_map(move |&tokens| {
                self.chunks.iter().map(move |&chunk| {
                    let accumulation = self.step_tokens.div_ceil(tokens).max(1);
                    Candidate { tokens, chunk, optimizer, accumulation }
                })
            })
        })
    }

    /// What is recomputed where nothing has to be.
    fn given(&self) -> Remat {
        match &self.remat {
            RematChoice::Given(remat) => remat.clone(),
            RematChoice::Auto => Remat::None,
        }
    }

    /// How a candidate is trained.
    fn training(&self, candidate: &Candidate) -> Training<'_> {
        let (optimizer, accumulation) = (candidate.optimizer, candidate.accumulation);
        Training { optimizer, accumulation, remat: Remat::None, ..self.training }
    }

    fn open(&self, candidate: Candidate, target: &Target, build: BuildTraining<'_>) -> Result<Open, PlanError> {
        let (forward, evaluation) = build(candidate.tokens, candidate.chunk)?;
        let training = self.training(&candidate);
        let micro = training.micro_step(&forward)?;
        let seconds = |graph: &Graph| step_seconds(graph, target, graph.bounds.full());
        let micro_seconds = seconds(&passes::remat(&micro, &self.given())?);
        let after = training.after(&micro, &evaluation, target)?;
        let apply_seconds = after.apply().map_or(0.0, |plan| seconds(&plan.graph));
        Ok(Open { candidate, micro, after, micro_seconds, apply_seconds })
    }

    fn plan(&self, open: &Open, remat: Remat, micro_seconds: f64, target: &Target) -> Result<Tried, PlanError> {
        let program = open.after.with(&open.micro, &remat, target)?;
        let seconds = open.seconds(micro_seconds);
        Ok(Tried { candidate: open.candidate, program, remat, seconds })
    }

    /// Tries a candidate with everything kept, and if that does not fit with as little recomputed as fits.
    fn squeeze(&self, open: &Open, target: &Target, tried: &mut Vec<Tried>) -> Result<(), PlanError> {
        let whole = self.plan(open, self.given(), open.micro_seconds, target)?;
        let done = whole.fits(self.budget) || self.remat != RematChoice::Auto;
        tried.push(whole);
        if done {
            return Ok(());
        }
        let choices = thinned(frontier(&open.micro, target));
        let plan = |choice: &Choice| {
            let seconds = open.micro_seconds + choice.seconds;
            self.plan(open, Remat::Nodes(choice.nodes.clone()), seconds, target)
        };
        let Some(least) = choices.first() else { return Ok(()) };
        let mut best = plan(least)?;
        // Peaks grow with what is kept, so the border is found by halving.
        let (mut low, mut high) = (0, if best.fits(self.budget) { choices.len() } else { 1 });
        while high - low > 1 {
            let middle = low + (high - low) / 2;
            let next = plan(&choices[middle])?;
            if next.fits(self.budget) {
                (low, best) = (middle, next);
            } else {
                high = middle;
            }
        }
        tried.push(best);
        Ok(())
    }
}

impl Open {
    fn seconds(&self, micro: f64) -> f64 {
        self.candidate.accumulation as f64 * micro + self.apply_seconds
    }

    /// Tokens per second with nothing recomputed.
    fn most(&self) -> f64 {
        self.candidate.step_tokens() / self.seconds(self.micro_seconds)
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
        self.program.peak() <= budget
    }

    fn rejected(&self, budget: Bytes) -> Rejected {
        let recompute = |n: &&Node| n.phase == Phase::Recompute;
        Rejected {
            candidate: self.candidate,
            recomputed: self.program.plans()[0].1.graph.nodes.iter().filter(recompute).count(),
            peak: self.program.peak(),
            tokens_per_second: self.rate(),
            fits: self.fits(budget),
        }
    }
}

/// As many choices of what is recomputed are planned at most: a finer step brings less than the cost model knows.
const CHOICES: usize = 32;

fn thinned(choices: Vec<Choice>) -> Vec<Choice> {
    let n = choices.len();
    if n <= CHOICES {
        return choices;
    }
    let kept: BTreeSet<usize> = (0..CHOICES).map(|i| i * (n - 1) / (CHOICES - 1)).collect();
    choices.into_iter().enumerate().filter(|(k, _)| kept.contains(k)).map(|(_, choice)| choice).collect()
}
