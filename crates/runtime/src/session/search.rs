//! Search for a plan: the number of replicas, the stages, resident or streamed weights, and the tokens of a step.
//! Invariant: the search is pure (it plans and compares, and queries no machine), and runs and `plan` both call it, so
//! the planned bytes are the bytes held.

use super::bounds::{MIN_TOKENS_OF_REPLICA, TOKEN_STEP};
use crate::RuntimeError;
use crate::budget::Budget;
use crate::settings::replicas_of_equal_size;
use plimsoll_graph::{Bytes, Graph, VerifyError};
use plimsoll_plan::{
    Bill, Build, Dump, PlanError, Policy, Program, Search, Streaming, Target, Weights, compile_with, fit,
};

/// The space of plans to search.
pub struct SearchSpace<'a> {
    /// Returns the target of one replica, given the number of replicas.
    pub target: &'a dyn Fn(usize) -> Result<Target, RuntimeError>,
    /// Pipeline depth: in-flight steps of a device.
    pub depth: usize,
    /// Number of threads shared by the replicas.
    pub threads: usize,
    /// Maximum number of replicas to try.
    pub replicas: usize,
    /// Tokens of a step; `None` searches for the most that fit, up to the target's saturation.
    pub tokens: Option<u64>,
    /// When weights are streamed.
    pub stream: Streaming,
    /// Memory budgets to try, in this order; they differ in the entries of the process itself.
    pub budgets: &'a [Budget],
}

/// A model in a stage.
pub struct PlanPart<'a> {
    /// Name of the model's plan.
    pub name: String,
    /// Builds the graph for a step of the given number of tokens.
    pub graph: Box<dyn Fn(u64) -> Result<Graph, VerifyError> + 'a>,
    /// Compilation policy; the search overrides whether weights are streamed.
    pub policy: Policy,
    /// Whether the model's weights may be streamed; otherwise the policy's placement is used in every plan.
    pub streams: bool,
}

/// Post-processes a program, for example adding the buffers that a run holds beside its arena. The second argument is
/// the number of replicas.
pub type FinishProgram<'a> = Box<dyn Fn(Program, usize) -> Program + 'a>;

/// Computes the bytes of host memory that hold outputs in transit, given the program and the number of in-flight steps.
pub type OutputsInTransit<'a> = Box<dyn Fn(&Program, usize) -> Bytes + 'a>;

/// Models that are in memory together: the plans of one program.
pub struct SearchStage<'a> {
    /// The models, in the order of their plans.
    pub parts: Vec<PlanPart<'a>>,
    /// Minimum number of tokens of a step: the length of the longest sequence.
    pub longest: u64,
    /// Adds the buffers that a run holds beside the arena.
    pub finish: FinishProgram<'a>,
    /// Bytes that a run keeps in host memory beside a GPU's arena.
    pub kept: OutputsInTransit<'a>,
}

impl<'a> SearchStage<'a> {
    /// A stage that holds no memory beside its arena.
    pub fn new(parts: Vec<PlanPart<'a>>, longest: u64) -> Self {
        let finish: FinishProgram<'a> = Box::new(|program, _| program);
        let kept: OutputsInTransit<'a> = Box::new(|_, _| Bytes::ZERO);
        Self { parts, longest, finish, kept }
    }
}

/// A candidate of the search.
pub(crate) struct SearchPoint<'a> {
    /// Target of one replica.
    pub(crate) target: &'a Target,
    /// Pipeline depth.
    pub(crate) depth: usize,
    /// Number of replicas.
    pub(crate) replicas: usize,
}

/// The result of a search.
#[derive(Debug)]
pub struct SearchResult {
    /// Index of the chosen budget in [`SearchSpace::budgets`].
    pub budget: usize,
    /// Number of replicas.
    pub replicas: usize,
    /// Index of the chosen alternative.
    pub alternative: usize,
    /// The program of each stage of the alternative.
    pub programs: Vec<Program>,
    /// The candidates that did not fit, in the order in which they were tried.
    pub rejected: Vec<RejectedCandidate>,
}

/// A candidate that did not fit, with the bill of its smallest step.
#[derive(Debug)]
pub struct RejectedCandidate {
    /// Index of the budget in [`SearchSpace::budgets`].
    pub budget: usize,
    /// Number of replicas.
    pub replicas: usize,
    /// Index of the alternative.
    pub alternative: usize,
    /// The bill; if several stages do not fit, the largest of their bills.
    pub bill: Box<Bill>,
}

/// Tries budgets, numbers of replicas (the maximum, then about half as many each time, down to one) and alternatives (those
/// after the first only with one replica), and returns the first candidate that fits. `alternatives` are ways to compute the same results, each a
/// list of stages that run one after the other. Unless the space requires streaming, weights are streamed only in the
/// last alternative: reading the input once per stage costs less than reading the weights in every step.
///
/// # Errors
/// [`PlanError::OverBudget`] with the bill of the last candidate, or any other error of planning.
pub fn search(
    space: &SearchSpace<'_>,
    alternatives: &[Vec<SearchStage<'_>>],
    dump: Dump<'_>,
) -> Result<SearchResult, RuntimeError> {
    let mut rejected: Vec<RejectedCandidate> = vec![];
    for (budget_index, budget) in space.budgets.iter().enumerate() {
        let mut replicas = space.replicas.max(1);
        loop {
            let target = (space.target)(replicas)?;
            let point = SearchPoint { target: &target, depth: space.depth, replicas };
            // Fewer replicas save memory at less cost than another alternative, so they are tried first.
            let tried = if replicas == 1 { alternatives.len() } else { 1 };
            for (alternative, stages) in alternatives[..tried].iter().enumerate() {
                // Each replica would read the weights in every step, so only a single replica streams them.
                let stream = match space.stream {
                    _ if replicas > 1 => Streaming::Never,
                    Streaming::Auto if alternative + 1 < alternatives.len() => Streaming::Never,
                    stream => stream,
                };
                let fitted = stages.iter().map(|stage| point.fit(space, stage, stream, budget, &mut *dump));
                match all_programs(fitted)? {
                    Ok(programs) => {
                        return Ok(SearchResult {
                            budget: budget_index,
                            replicas,
                            alternative,
                            programs,
                            rejected,
                        });
                    }
                    Err(bill) => {
                        rejected.push(RejectedCandidate { budget: budget_index, replicas, alternative, bill })
                    }
                }
            }
            if replicas == 1 {
                break;
            }
            replicas = replicas_of_equal_size(space.threads, replicas / 2);
        }
    }
    match rejected.pop() {
        Some(last) => Err(PlanError::OverBudget(last.bill).into()),
        None => Err(RuntimeError::bug("there was nothing to plan")),
    }
}

/// Collects the programs of all stages. If some do not fit, returns the largest of their bills: a budget that covers
/// that bill fits every stage.
fn all_programs(
    programs: impl Iterator<Item = Result<Program, PlanError>>,
) -> Result<Result<Vec<Program>, Box<Bill>>, RuntimeError> {
    let mut fitting: Vec<Program> = vec![];
    let mut refused: Option<Box<Bill>> = None;
    for program in programs {
        match program {
            Ok(program) => fitting.push(program),
            Err(PlanError::OverBudget(bill)) => {
                let is_larger =
                    refused.as_ref().is_none_or(|other| bill.ledger.total() >= other.ledger.total());
                if is_larger {
                    refused = Some(bill);
                }
            }
            Err(error) => return Err(error.into()),
        }
    }
    Ok(match refused {
        None => Ok(fitting),
        Some(bill) => Err(bill),
    })
}

impl SearchPoint<'_> {
    /// Plans a stage with the most tokens that fit, or with the requested number of tokens.
    fn fit(
        &self,
        space: &SearchSpace<'_>,
        stage: &SearchStage<'_>,
        stream: Streaming,
        budget: &Budget,
        dump: Dump<'_>,
    ) -> Result<Program, PlanError> {
        let search = self.tokens(stage.longest, space.tokens, budget);
        let build: Build<'_> = &mut |tokens, weights| stage.program(self, tokens, weights, &mut *dump);
        let found = match (stage.parts.iter().any(|part| part.streams), space.tokens) {
            (true, tokens) => fit(tokens, search, stream, build),
            (false, None) => Program::largest_bounds(search, &mut |tokens| build(tokens, Weights::Resident)),
            (false, Some(tokens)) => {
                Program::exactly(tokens, search, &mut |tokens| build(tokens, Weights::Resident))
            }
        };
        found.map_err(|error| budget.with_process(error))
    }

    /// Range of tokens of a step to search.
    fn tokens(&self, longest: u64, asked: Option<u64>, budget: &Budget) -> Search {
        let (ceiling, floor) = match self.replicas {
            1 => (self.target.saturation.max(longest), longest),
            replicas => {
                let share = (self.target.saturation / replicas as u64).next_multiple_of(TOKEN_STEP);
                let tokens_each = share.max(MIN_TOKENS_OF_REPLICA).max(longest);
                // Fewer replicas with longer steps are faster than many with short steps, because each replica reads
                // all weights in every step; hence a minimum step size for several replicas.
                (tokens_each, if asked.is_none() { MIN_TOKENS_OF_REPLICA.max(longest) } else { longest })
            }
        };
        Search { floor, ceiling, step: TOKEN_STEP, budget: budget.for_plans(), room: budget.room }
    }
}

impl SearchStage<'_> {
    /// Compiles the stage's program for steps of `tokens` tokens.
    pub(crate) fn program(
        &self,
        point: &SearchPoint<'_>,
        tokens: u64,
        weights: Weights,
        dump: Dump<'_>,
    ) -> Result<Program, PlanError> {
        let mut plans = Vec::with_capacity(self.parts.len());
        for part in &self.parts {
            let graph = (part.graph)(tokens).map_err(|source| PlanError::of_graph("build", source))?;
            let weights = if part.streams { weights } else { part.policy.weights };
            let policy = Policy { weights, ..part.policy.clone() };
            plans.push((part.name.clone(), compile_with(&graph, &policy, point.target, &mut *dump)?));
        }
        let program = Program::new(point.target.clone(), plans, vec![]);
        Ok((self.finish)(program, point.replicas)
            .with_pipeline_depth(point.depth)
            .with_replicas(point.replicas))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use plimsoll_graph::{Builder, DType, Dim};
    use plimsoll_plan::Staging;

    /// Stage of models with one square matrix each: a plan holds the weight and one row per token.
    fn stage(widths: &[u64]) -> SearchStage<'static> {
        let part = |&width: &u64| PlanPart {
            name: "matrix".to_owned(),
            graph: Box::new(move |tokens| {
                let mut g =
                    Builder::new(plimsoll_graph::Bounds { tokens, sequences: 1, longest: tokens, packs: 1 });
                let x = g.input("x", &[Dim::Tokens(1), Dim::Fixed(width)], DType::F32);
                let y = g.linear(x, "matrix", width, false);
                g.output("y", y);
                g.finish()
            }),
            policy: Policy::default(),
            streams: true,
        };
        SearchStage::new(widths.iter().map(part).collect(), 1)
    }

    fn found(
        replicas: usize,
        budgets: &[(u64, u64)],
        alternatives: &[Vec<SearchStage<'_>>],
    ) -> Result<SearchResult, RuntimeError> {
        let budget = |&(bytes, process): &(u64, u64)| Budget {
            process: vec![Staging { label: "queues".to_owned(), bytes: Bytes(process) }],
            ..Budget::unlimited(Bytes(bytes))
        };
        let budgets: Vec<Budget> = budgets.iter().map(budget).collect();
        let space = SearchSpace {
            target: &|replicas| Ok(Target::named("cpu")?.with_workers((8 / replicas) as u64)),
            depth: 1,
            threads: 8,
            replicas,
            tokens: None,
            stream: Streaming::Auto,
            budgets: &budgets,
        };
        search(&space, alternatives, &mut |_, _| {})
    }

    const MB: u64 = 1_000_000;

    #[test]
    fn the_first_candidate_that_fits_is_chosen_and_the_others_are_reported() {
        let tried = |choice: &SearchResult| -> Vec<(usize, usize, usize)> {
            choice.rejected.iter().map(|r| (r.budget, r.replicas, r.alternative)).collect()
        };
        // Two matrices of 16.8 MB each, together or one after the other; 5.6 MB of workspace.
        let ways = || vec![vec![stage(&[2048, 2048])], vec![stage(&[2048]), stage(&[2048])]];
        let choice = found(4, &[(1000 * MB, 0)], &ways()).expect("it fits");
        assert_eq!((choice.replicas, choice.alternative, choice.programs.len()), (4, 0, 1));
        assert!(tried(&choice).is_empty());

        // Memory for one replica's step with both matrices.
        let choice = found(4, &[(44 * MB, 0)], &ways()).expect("it fits");
        assert_eq!((choice.replicas, choice.alternative), (1, 0));
        assert_eq!(tried(&choice), [(0, 4, 0), (0, 2, 0)]);

        // Memory for one matrix at a time. Weights are not streamed while another alternative is left.
        let choice = found(2, &[(26 * MB, 0)], &ways()).expect("it fits");
        assert_eq!((choice.replicas, choice.alternative, choice.programs.len()), (1, 1, 2));
        assert!(choice.programs.iter().all(|program| !program.is_streamed()));
        assert_eq!(tried(&choice), [(0, 2, 0), (0, 1, 0)]);

        // Both fit with the smaller queues of the second budget.
        let choice = found(1, &[(44 * MB, 30 * MB), (44 * MB, 2 * MB)], &ways()).expect("it fits");
        assert_eq!((choice.budget, choice.alternative), (1, 0));
        assert!(tried(&choice).iter().all(|(budget, ..)| *budget == 0));
    }

    #[test]
    fn a_refusal_is_the_bill_of_the_last_candidate_with_the_process() {
        let error = found(2, &[(MB, MB / 2)], &[vec![stage(&[4096])]]).expect_err("16 MB in 1");
        let RuntimeError::Plan(PlanError::OverBudget(bill)) = error else { panic!("{error}") };
        assert_eq!(bill.budget, Bytes(MB));
        assert_eq!(bill.ledger.get("process: queues"), Bytes(MB / 2));
    }
}
