//! Planned sessions: the result of the search, and starting a session from it. Invariant: a session runs the planned
//! program or one with smaller steps, and both are reported.

use super::StepSession;
use super::admission::{OomFallback, Site};
use super::bounds::{TOKEN_STEP, tokens};
use super::report::{device_lines, device_words, memory_line_with_host, memory_words};
use super::search::{RejectedCandidate, SearchPoint, SearchResult, SearchSpace, SearchStage, search};
use super::weights::{WeightSource, load_all};
use crate::budget::Budget;
use crate::dynamic::{DynamicSettings, MAX_SIZES, RETRIES};
use crate::{Level, Observer, OomPhase, RequestError, RuntimeError, Settings};
use plimsoll_data::pack::Order;
use plimsoll_exec::Executor;
use plimsoll_graph::Bytes;
use plimsoll_plan::{Program, Remedy, Streaming};
use plimsoll_setting::Setting;

/// Request for the plan of a session.
pub struct StagesRequest<'a> {
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
pub struct PlannedStages<'a> {
    settings: Settings,
    stages: Vec<SearchStage<'a>>,
    choice: SearchResult,
    site: Site,
}

/// Options for starting a stage.
pub struct StageStart<'a> {
    /// Order in which sequences are packed.
    pub order: Order,
    /// Weight source of each model of the stage, in the order of the stage's parts.
    pub weights: Vec<&'a dyn WeightSource>,
    /// Executors of an earlier session to switch to this program; they keep their compiled kernels.
    pub running: Vec<Executor>,
    /// Name of the values that the host keeps for in-flight steps, for messages.
    pub kept: &'static str,
}

/// The plan and the weights of a running session, to start it again with smaller steps.
pub(super) struct Reload<'a> {
    planned: &'a PlannedStages<'a>,
    stage: usize,
    weights: Vec<&'a dyn WeightSource>,
}

impl<'a> Reload<'a> {
    /// The place where the session runs.
    pub(super) fn site(&self) -> &'a Site {
        &self.planned.site
    }

    /// The settings of steps that follow the memory.
    pub(super) fn dynamic(&self) -> Option<DynamicSettings> {
        self.planned.settings.dynamic
    }

    /// Whether steps may become smaller than `tokens` tokens.
    pub(super) fn has_smaller(&self, tokens: u64) -> bool {
        let longest = self.planned.stages[self.stage].longest;
        !self.planned.site.has_requested_tokens() && tokens > longest
    }

    /// Switches the executors to the program for half the tokens of `program` and loads the weights again; `None` if there is
    /// no such program.
    pub(super) fn smaller(
        &self,
        program: &Program,
        executors: Vec<Executor>,
        observer: &mut dyn Observer,
    ) -> Result<Option<Vec<Executor>>, RuntimeError> {
        let Some(smaller) = self.planned.smaller_than(self.stage, std::slice::from_ref(program))? else {
            return Ok(None);
        };
        self.planned.load(self.stage, smaller, executors, &self.weights, observer).map(Some)
    }
}

impl Settings {
    /// Plans the stages of a session on these machines.
    ///
    /// # Errors
    /// [`plimsoll_plan::PlanError::OverBudget`] with the bill where nothing fits; a request that contradicts itself.
    pub fn plan_stages<'a>(&self, request: StagesRequest<'a>) -> Result<PlannedStages<'a>, RuntimeError> {
        let StagesRequest { mut alternatives, replicas, tokens, budgets } = request;
        let stages: Vec<&SearchStage<'_>> = alternatives.iter().flatten().collect();
        let can_stream = stages.iter().any(|stage| stage.parts.iter().any(|part| part.streams));
        if self.stream == Streaming::Always && !can_stream {
            return Err(RequestError::NotStreamed.into());
        }
        let longest = stages.iter().map(|stage| stage.longest).max().unwrap_or(0);
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
        Ok(PlannedStages { settings: self.clone(), stages, choice, site })
    }
}

impl PlannedStages<'_> {
    /// The programs, one per stage.
    pub fn programs(&self) -> &[Program] {
        &self.choice.programs
    }

    /// Index of the chosen budget in [`StagesRequest::budgets`].
    pub fn budget(&self) -> usize {
        self.choice.budget
    }

    /// Index of the chosen alternative in [`StagesRequest::alternatives`].
    pub fn alternative(&self) -> usize {
        self.choice.alternative
    }

    /// The candidates that did not fit.
    pub fn rejected(&self) -> &[RejectedCandidate] {
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
        self.programs()
            .iter()
            .map(|program| {
                let tokens =
                    program.plans().iter().map(|(_, plan)| plan.graph.bounds.tokens).max().unwrap_or(1);
                program.seconds() / (tokens.max(1) * program.replicas() as u64) as f64
            })
            .sum()
    }

    /// The setting that would save memory if memory is short: the budget of a plan with at least a tenth less. `plan`
    /// plans the same work within another budget. Empty if there is no such plan.
    pub fn remedies<'p>(
        &self,
        plan: impl FnOnce(&Budget) -> Result<PlannedStages<'p>, RuntimeError>,
    ) -> Vec<Remedy> {
        let budget = self.site.budget();
        let process_bytes = budget.process_bytes();
        let wanted = Budget { bytes: Bytes(self.peak().0 / 10 * 9) + process_bytes, ..budget.clone() };
        // A refusal means that nothing smaller does the same work.
        let Ok(smaller) = plan(&wanted) else { return vec![] };
        let megabytes = (smaller.peak() + smaller.site.budget().process_bytes()).0.div_ceil(1_000_000);
        vec![Remedy {
            settings: vec![Setting::MemoryBudget.to(format!("{megabytes}MB"))],
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
    pub fn start<'p>(
        &'p self,
        stage: usize,
        start: StageStart<'p>,
        observer: &mut dyn Observer,
    ) -> Result<StepSession<'p>, RuntimeError> {
        let program = &self.choice.programs[stage];
        let budget = self.site.budget();
        let kept = self.kept(stage, program);
        budget.admits_held(program, kept)?;
        observer.say(Level::Info, &memory_words(budget, program, kept, start.kept));
        observer.say(Level::Detail, &self.memory_line(stage, start.kept));
        self.settings.first_use().iter().for_each(|text| observer.say(Level::Info, text));
        let StageStart { order, weights, running, .. } = start;
        let programs = self.sizes(stage)?;
        self.say_sizes(&programs, observer);
        let executors = self.load(stage, programs, running, &weights, observer)?;
        if let Some(program) = executors.first().map(Executor::program) {
            budget.admits_held(program, self.kept(stage, program))?;
        }
        StepSession::new(executors, order, self.reload(stage, weights))
    }

    /// Allocates memory for programs of one or several sizes, and loads the weights, with smaller steps where memory is short.
    fn load(
        &self,
        stage: usize,
        mut programs: Vec<Program>,
        mut running: Vec<Executor>,
        weights: &[&dyn WeightSource],
        observer: &mut dyn Observer,
    ) -> Result<Vec<Executor>, RuntimeError> {
        let mut tried = vec![];
        loop {
            let mut executors = self.site.start_smaller(programs, &self.stages[stage], running, observer)?;
            observer.stage("arena allocated", &self.site.reading());
            if tried.is_empty() {
                self.say_devices(&executors, observer)?;
            }
            let mut loading = weights.iter().enumerate();
            let error = match loading.try_for_each(|(plan, &weights)| load_all(&mut executors, plan, weights)) {
                Ok(()) => {
                    observer.stage("weights loaded", &self.site.reading());
                    return Ok(executors);
                }
                Err(RuntimeError::Device(error)) if error.is_out_of_memory() => error,
                Err(error) => return Err(error),
            };
            let used: Vec<Program> =
                executors.first().map_or(vec![], |one| one.prepared().programs().cloned().collect());
            let smaller = self.smaller_than(stage, &used)?.filter(|_| tried.len() < RETRIES);
            let Some(smaller) = smaller else {
                let dynamic = self.settings.dynamic.is_some();
                let fallback = OomFallback { phase: OomPhase::Load, tried: &tried, dynamic };
                return Err(self.site.out_of_memory(&used[0], fallback, error));
            };
            let to = tokens(&smaller[0]);
            let from = tokens(&used[0]);
            let text = format!(
                "there is too little memory to load the weights: steps now have {to} tokens instead of {from}"
            );
            observer.say(Level::Warning, &text);
            tried.push(to);
            (programs, running) = (smaller, executors);
        }
    }

    /// The plan and the weights of a stage, with which a session starts again with smaller steps.
    fn reload<'p>(&'p self, stage: usize, weights: Vec<&'p dyn WeightSource>) -> Reload<'p> {
        Reload { planned: self, stage, weights }
    }

    /// Programs for the sizes of the steps of a stage, the largest first: with [`Settings::dynamic`], the planned program and
    /// those for halves of its tokens, as long as they hold the longest sequence and need less memory.
    pub fn sizes(&self, stage: usize) -> Result<Vec<Program>, RuntimeError> {
        let mut sizes = vec![self.choice.programs[stage].clone()];
        while self.settings.dynamic.is_some() && sizes.len() < MAX_SIZES {
            let Some(smaller) = self.halved(stage, &sizes[sizes.len() - 1])? else { break };
            sizes.push(smaller);
        }
        Ok(sizes)
    }

    /// The program for half the tokens of `program`, a program of a stage; `None` if it would not hold the longest sequence,
    /// would need as much memory, or would have its weights at other addresses.
    fn halved(&self, stage: usize, program: &Program) -> Result<Option<Program>, RuntimeError> {
        let search_stage = &self.stages[stage];
        let before = tokens(program);
        let half = (before / 2 / TOKEN_STEP * TOKEN_STEP).max(search_stage.longest);
        if half >= before {
            return Ok(None);
        }
        let target = program.target();
        let depth = program.depth();
        let point = SearchPoint { target, depth, replicas: program.replicas() };
        let weights = program.weights();
        let smaller = search_stage.program(&point, half, weights, &mut |_, _| {})?;
        let is_smaller = smaller.arena_bytes() < program.arena_bytes();
        Ok((is_smaller && smaller.has_weights_of(program) && admits_equal_inputs(&smaller, program))
            .then_some(smaller))
    }

    /// The programs behind the first of `used`, or, behind the last and unless a number of tokens was requested, the program
    /// for half the tokens.
    fn smaller_than(&self, stage: usize, used: &[Program]) -> Result<Option<Vec<Program>>, RuntimeError> {
        match used {
            [] => Ok(None),
            [_] if self.site.has_requested_tokens() => Ok(None),
            [only] => Ok(self.halved(stage, only)?.map(|smaller| vec![smaller])),
            [_, smaller @ ..] => Ok(Some(smaller.to_vec())),
        }
    }

    /// Reports the sizes of the steps, if their size follows the memory.
    fn say_sizes(&self, programs: &[Program], observer: &mut dyn Observer) {
        if self.settings.dynamic.is_none() {
            return;
        }
        let sizes = programs.iter().map(|program| tokens(program).to_string()).collect::<Vec<_>>().join(", ");
        match programs.len() {
            1 => observer.say(
                Level::Warning,
                &format!(
                    "{}: only steps of {sizes} tokens can be used, so their size cannot change",
                    Setting::Dynamic
                ),
            ),
            _ => observer.say(Level::Info, &format!("steps of {sizes} tokens, by the free memory")),
        }
    }

    /// Reports the devices, and the kernels with which they compute.
    fn say_devices(&self, executors: &[Executor], observer: &mut dyn Observer) -> Result<(), RuntimeError> {
        let precision = self.settings.precision()?;
        for words in device_words(executors, precision) {
            observer.say(Level::Info, &words);
        }
        for line in device_lines(executors, precision) {
            observer.say(Level::Detail, &line);
        }
        Ok(())
    }

    /// Whether all executors run the program of a stage, so that [`PlannedStages::resume`] can be used.
    pub fn is_on(&self, stage: usize, executors: &[Executor]) -> bool {
        let planned = &self.choice.programs[stage];
        let is_dynamic = self.settings.dynamic.is_some();
        executors.iter().all(|executor| {
            let programs = executor.prepared();
            programs.program(0) == planned && (programs.programs().len() > 1) == is_dynamic
        })
    }

    /// Creates a session of a stage on running executors that already hold its weights, see [`PlannedStages::is_on`].
    ///
    /// # Errors
    /// Executors of another program; a thread limit too low for the devices' threads.
    pub fn resume<'p>(&'p self, stage: usize, start: StageStart<'p>) -> Result<StepSession<'p>, RuntimeError> {
        let StageStart { order, weights, running, .. } = start;
        if self.is_on(stage, &running) {
            StepSession::new(running, order, self.reload(stage, weights))
        } else {
            Err(RuntimeError::bug("a session was to go on with executors of another program"))
        }
    }
}

/// Whether two programs of one stage admit equal inputs: sequences of equal length, and equally many rows of a model of rows.
fn admits_equal_inputs(some: &Program, other: &Program) -> bool {
    let pairs = some.plans().iter().zip(other.plans());
    pairs.into_iter().all(|((_, some), (_, other))| {
        let some_bounds = some.graph.bounds;
        let other_bounds = other.graph.bounds;
        some_bounds.longest == other_bounds.longest
            && (some.graph.input("ids").is_some() || some_bounds == other_bounds)
    })
}
