//! Planned sessions: the result of the search, and starting a session from it. Invariant: a session runs the planned
//! program or one with smaller steps, and both are reported.

use super::Session;
use super::admission::Site;
use super::report::{device_lines, device_words, memory_line_with_host, memory_words};
use super::search::{Choice, Rejected, SearchSpace, SearchStage, search};
use super::weights::{WeightSource, load_all};
use crate::budget::Budget;
use crate::{Level, Observer, RequestError, RuntimeError, Settings};
use plimsoll_data::pack::Order;
use plimsoll_exec::Executor;
use plimsoll_graph::Bytes;
use plimsoll_plan::{Program, Remedy, Streaming};

/// Request for the plan of a session.
pub struct Request<'a> {
    /// Alternative ways to compute the same results, in order of preference: each is a list of stages that run one
    /// after the other.
    pub alternatives: Vec<Vec<SearchStage<'a>>>,
    /// Maximum number of replicas to try, see [`Settings::most_replicas`].
    pub replicas: usize,
    /// Tokens of a step: [`Settings::tokens`], or a number chosen by the client.
    pub tokens: Option<u64>,
    /// Memory budgets to try, in order; they differ in the entries of the process itself.
    pub budgets: Vec<Budget>,
}

/// The plan of a session: one program per stage.
pub struct Planned<'a> {
    settings: Settings,
    stages: Vec<SearchStage<'a>>,
    choice: Choice,
    site: Site,
}

/// Options for starting a stage.
pub struct Start<'a> {
    /// Order in which sequences are packed.
    pub order: Order,
    /// Weight source of each model of the stage, in the order of the stage's parts.
    pub weights: Vec<&'a dyn WeightSource>,
    /// Executors of an earlier session to switch to this program; they keep their compiled kernels.
    pub running: Vec<Executor>,
    /// Name of the values that the host keeps for in-flight steps, for messages.
    pub kept: &'static str,
}

impl Settings {
    /// Plans a session on these machines.
    ///
    /// # Errors
    /// [`plimsoll_plan::PlanError::OverBudget`] with the bill where nothing fits; a request that contradicts itself.
    pub fn plan<'a>(&self, request: Request<'a>) -> Result<Planned<'a>, RuntimeError> {
        let Request { mut alternatives, replicas, tokens, budgets } = request;
        let stages = || alternatives.iter().flatten();
        if self.stream == Streaming::Always && !stages().flat_map(|stage| &stage.parts).any(|part| part.streams)
        {
            return Err(RequestError::NotStreamed.into());
        }
        let longest = stages().map(|stage| stage.longest).max().unwrap_or(0);
        if let Some(tokens) = tokens.filter(|&tokens| tokens < longest) {
            return Err(RequestError::TokensTooFew { tokens, longest }.into());
        }
        let space = SearchSpace {
            target: &|replicas| self.target_of(replicas),
            depth: self.depth(),
            threads: self.threads,
            replicas,
            tokens,
            stream: self.stream,
            budgets: &budgets,
        };
        let choice = search(&space, &alternatives, &mut |_, _| {})?;
        let site = Site::new(self, choice.replicas, tokens, budgets[choice.budget].clone());
        let stages = alternatives.swap_remove(choice.alternative);
        Ok(Planned { settings: self.clone(), stages, choice, site })
    }
}

impl Planned<'_> {
    /// The programs, one per stage.
    pub fn programs(&self) -> &[Program] {
        &self.choice.programs
    }

    /// Index of the chosen budget in [`Request::budgets`].
    pub fn budget(&self) -> usize {
        self.choice.budget
    }

    /// Index of the chosen alternative in [`Request::alternatives`].
    pub fn alternative(&self) -> usize {
        self.choice.alternative
    }

    /// The candidates that did not fit.
    pub fn rejected(&self) -> &[Rejected] {
        &self.choice.rejected
    }

    /// The machines with the chosen number of replicas.
    pub fn site(&self) -> &Site {
        &self.site
    }

    /// The largest peak of the programs.
    fn peak(&self) -> Bytes {
        self.programs().iter().map(Program::peak).max().unwrap_or_default()
    }

    /// Expected seconds for each token, summed over the stages.
    fn seconds_per_token(&self) -> f64 {
        let of_program = |program: &Program| {
            let tokens = program.plans().iter().map(|(_, plan)| plan.graph.bounds.tokens).max().unwrap_or(1);
            program.seconds() / (tokens.max(1) * program.replicas() as u64) as f64
        };
        self.programs().iter().map(of_program).sum()
    }

    /// The setting that would save memory if memory is short: the budget of a plan with at least a tenth less. `plan`
    /// plans the same work within another budget. Empty if there is no such plan.
    pub fn remedies<'p>(&self, plan: impl FnOnce(&Budget) -> Result<Planned<'p>, RuntimeError>) -> Vec<Remedy> {
        let budget = self.site.budget();
        let beside = budget.process_bytes();
        let wanted = Budget { bytes: Bytes(self.peak().0 / 10 * 9) + beside, ..budget.clone() };
        // A refusal means that nothing smaller does the same work.
        let Ok(smaller) = plan(&wanted) else { return vec![] };
        let megabytes = (smaller.peak() + smaller.site.budget().process_bytes()).0.div_ceil(1_000_000);
        vec![Remedy {
            flag: format!("--memory-budget {megabytes}MB"),
            saves: self.peak().saturating_sub(smaller.peak()),
            slower: smaller.seconds_per_token() / self.seconds_per_token() - 1.0,
        }]
    }

    /// Text line that compares the plan of a stage with the budget; `kept` names the values that the host keeps for
    /// in-flight steps.
    pub fn memory_line(&self, stage: usize, kept: &str) -> String {
        let program = &self.choice.programs[stage];
        memory_line_with_host(self.site.budget(), program, self.kept(stage, program), kept)
    }

    /// Bytes that the host keeps for the in-flight steps of a stage.
    fn kept(&self, stage: usize, program: &Program) -> Bytes {
        (self.stages[stage].kept)(program, self.site.in_flight_target())
    }

    /// Starts a stage: allocates memory, loads the weights, and checks the process against its budget before and after.
    ///
    /// # Errors
    /// [`plimsoll_plan::PlanError::OverBudget`] where memory is not or no longer free; errors of devices and weights.
    pub fn start(
        &self,
        stage: usize,
        start: Start<'_>,
        observer: &mut dyn Observer,
    ) -> Result<Session, RuntimeError> {
        let (program, budget) = (&self.choice.programs[stage], self.site.budget());
        let kept = self.kept(stage, program);
        budget.admits_held(program, kept)?;
        observer.say(Level::Info, &memory_words(budget, program, kept, start.kept));
        observer.say(Level::Detail, &self.memory_line(stage, start.kept));
        self.settings.first_use().iter().for_each(|text| observer.say(Level::Info, text));
        let mut executors =
            self.site.start_smaller(program.clone(), &self.stages[stage], start.running, observer)?;
        observer.stage("arena allocated", &self.site.reading());
        let precision = self.settings.precision()?;
        for words in device_words(&executors, precision) {
            observer.say(Level::Info, &words);
        }
        for line in device_lines(&executors, precision) {
            observer.say(Level::Detail, &line);
        }
        for (plan, weights) in start.weights.into_iter().enumerate() {
            load_all(&mut executors, plan, weights)?;
        }
        if let Some(program) = executors.first().map(Executor::program) {
            budget.admits_held(program, self.kept(stage, program))?;
        }
        observer.stage("weights loaded", &self.site.reading());
        Session::new(executors, start.order)
    }

    /// Whether all executors run the program of a stage, so that [`Planned::resume`] can be used.
    pub fn is_on(&self, stage: usize, executors: &[Executor]) -> bool {
        executors.iter().all(|executor| executor.program() == &self.choice.programs[stage])
    }

    /// Creates a session of a stage on executors that already hold its weights, see [`Planned::is_on`].
    ///
    /// # Errors
    /// Executors of another program; a thread limit too low for the devices' threads.
    pub fn resume(
        &self,
        stage: usize,
        executors: Vec<Executor>,
        order: Order,
    ) -> Result<Session, RuntimeError> {
        match self.is_on(stage, &executors) {
            true => Session::new(executors, order),
            false => Err(RuntimeError::bug("a session was to go on with executors of another program")),
        }
    }
}
