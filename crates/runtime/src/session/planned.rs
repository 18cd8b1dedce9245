//! A plan of a session: what the search chose, and its start. Invariant: what is started is what was planned, or a smaller
//! step, and both are reported.

use super::Session;
use super::admission::Site;
use super::report::{computing_lines, memory_lines};
use super::search::{Choice, Rejected, Space, Stage, search};
use super::weights::{WeightSource, load_all};
use crate::budget::Budget;
use crate::{Level, Observer, RequestError, RuntimeError, Settings};
use data::pack::Order;
use exec::Executor;
use graph::Bytes;
use plan::{Program, Stream};

/// What is to be planned.
pub struct Request<'a> {
    /// Ways to compute the same, in the order of preference: each a list of stages that run one after the other.
    pub alternatives: Vec<Vec<Stage<'a>>>,
    /// The most replicas to try, see [`Settings::most_replicas`].
    pub replicas: usize,
    /// Tokens of a step, as [`Settings::tokens`] where the client has no number of its own.
    pub tokens: Option<u64>,
    /// The memory budgets to try: they differ in what the process itself takes.
    pub budgets: Vec<Budget>,
}

/// The plan of a session: a program for each stage.
pub struct Planned<'a> {
    settings: Settings,
    stages: Vec<Stage<'a>>,
    choice: Choice,
    site: Site,
}

/// How a stage is started.
pub struct Start<'a> {
    /// The order in which sequences are packed.
    pub order: Order,
    /// The weights of each model of the stage, in the order of its parts.
    pub weights: Vec<&'a dyn WeightSource>,
    /// Executors of an earlier session, which are switched to this program and keep what they have compiled.
    pub running: Vec<Executor>,
    /// What the host keeps of steps on their way, in words.
    pub kept: &'static str,
}

impl Settings {
    /// Plans a session on these machines.
    ///
    /// # Errors
    /// [`plan::PlanError::OverBudget`] with the bill where nothing fits; a request that contradicts itself.
    pub fn plan<'a>(&self, request: Request<'a>) -> Result<Planned<'a>, RuntimeError> {
        let Request { mut alternatives, replicas, tokens, budgets } = request;
        let stages = || alternatives.iter().flatten();
        if self.stream == Stream::Always && !stages().flat_map(|stage| &stage.parts).any(|part| part.streams) {
            return Err(RequestError::NotStreamed.into());
        }
        let longest = stages().map(|stage| stage.longest).max().unwrap_or(0);
        if let Some(tokens) = tokens.filter(|&tokens| tokens < longest) {
            return Err(RequestError::TokensTooFew { tokens, longest }.into());
        }
        let space = Space {
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
    /// The program of each stage.
    pub fn programs(&self) -> &[Program] {
        &self.choice.programs
    }

    /// The position of the budget that was chosen.
    pub fn budget(&self) -> usize {
        self.choice.budget
    }

    /// The position of the alternative that was chosen.
    pub fn alternative(&self) -> usize {
        self.choice.alternative
    }

    /// The candidates that did not fit.
    pub fn rejected(&self) -> &[Rejected] {
        &self.choice.rejected
    }

    /// The machines with the replicas that were chosen.
    pub fn site(&self) -> &Site {
        &self.site
    }

    /// The plan of a stage beside the budget, in one line; `kept` is what the host keeps of steps on their way, in words.
    pub fn memory_line(&self, stage: usize, kept: &str) -> String {
        let program = &self.choice.programs[stage];
        memory_lines(self.site.budget(), program, self.kept(stage, program), kept)
    }

    fn kept(&self, stage: usize, program: &Program) -> Bytes {
        (self.stages[stage].kept)(program, self.site.in_flight_target())
    }

    /// Starts a stage: memory is allocated, weights are loaded, and the process is held against its budget.
    ///
    /// # Errors
    /// [`plan::PlanError::OverBudget`] where memory is not free (any more); errors of devices and of weights.
    pub fn start(
        &self,
        stage: usize,
        start: Start<'_>,
        observer: &mut dyn Observer,
    ) -> Result<Session, RuntimeError> {
        let (program, budget) = (&self.choice.programs[stage], self.site.budget());
        budget.admits_held(program, self.kept(stage, program))?;
        observer.say(Level::Info, &self.memory_line(stage, start.kept));
        self.settings.first_use().iter().for_each(|text| observer.say(Level::Info, text));
        let mut executors =
            self.site.start_smaller(program.clone(), &self.stages[stage], start.running, observer)?;
        for line in computing_lines(&executors, self.settings.precision()?) {
            observer.say(self.settings.computing_level(), &line);
        }
        for (plan, weights) in start.weights.into_iter().enumerate() {
            load_all(&mut executors, plan, weights)?;
        }
        if let Some(program) = executors.first().map(Executor::program) {
            budget.admits_held(program, self.kept(stage, program))?;
        }
        Session::new(executors, start.order)
    }

    /// Whether executors follow the program of a stage, so that a session on them needs no start.
    pub fn is_on(&self, stage: usize, executors: &[Executor]) -> bool {
        executors.iter().all(|executor| executor.program() == &self.choice.programs[stage])
    }

    /// A session of a stage on executors that hold its weights already, see [`Planned::is_on`].
    ///
    /// # Errors
    /// Executors of another program; no room for the threads of the devices.
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
