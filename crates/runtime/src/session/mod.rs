//! Sessions: models running on devices. A [`Session`] computes outputs of sequences and returns a row for each of them in input
//! order. It is built on a [`StepSession`], which packs sequences into steps, computes the steps on all replicas and devices, and
//! returns the outputs of each step with the keys of its sequences: [`Settings::plan_stages`] plans it,
//! [`PlannedStages::start`] starts it.
//!
//! Invariant: the outputs of a sequence are a function of its tokens, the weights, the precision and the kind of
//! device, and are returned exactly once.
//!
//! [`Settings::plan_stages`]: crate::Settings::plan_stages

mod admission;
mod batch;
pub mod bounds;
mod forward;
mod frames;
mod in_order;
mod planned;
mod replica;
mod replicas;
mod report;
mod search;
mod sequences;
mod sizes;
mod timed;
mod training;
mod weights;

pub use admission::Site;
pub use batch::TrainingBatch;
pub use forward::ForwardSession;
pub use planned::{PlannedStages, StageStart, StagesRequest};
pub use replicas::{RowUnit, StepOutput, StopCheck, Usage, say_given_back};
pub use report::threads;
pub(crate) use search::SearchPoint;
pub use search::{
    FinishProgram, OutputsInTransit, PlanPart, RejectedCandidate, SearchResult, SearchSpace, SearchStage,
    search,
};
pub(crate) use sequences::sequence_stage;
pub use sequences::{PlannedSession, Session, SessionModel, SessionRequest, SessionRow};
pub use timed::{ReplicaSpans, TimedSession, TimedStep};
pub use training::{
    ExpertLayer, MicroStepInputs, MicroStepLosses, StepResult, TrainSession, UpdateResult, cross_entropy,
};
pub use weights::WeightSource;

use crate::health::PlannedMemory;
use crate::watch::Watch;
use crate::{Level, Observer, OomPhase, Progress, RuntimeError};
use admission::OomFallback;
use frames::FramesInput;
use planned::Reload;
use plimsoll_data::pack::{Fill, Order, Packer, TokenPack};
use plimsoll_exec::{DeviceError, Executor};
use plimsoll_graph::Counts;
use plimsoll_plan::{InputId, Program, step_seconds};
use replicas::{CompletedWork, InputValues, ReplicaPool, Returned, StepWork};
use sizes::{SizeAction, StepSizes};
use std::collections::VecDeque;
use std::sync::Arc;

/// Number of packs per device into which the remaining sequences are cut at the end of the input; with several, the
/// devices finish closer together.
const LAST_PACKS: usize = 2;

/// Index of a model in a session: the position of its plan in the program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ModelId(usize);

/// A running session of steps.
///
/// `'a` is the lifetime of the plan and the weights: after a lack of memory, a session plans smaller steps and loads the
/// weights again.
pub struct StepSession<'a> {
    state: SessionState,
    /// Starts the session again with a smaller program, where none was planned before; `None` if it cannot.
    reload: Option<Reload<'a>>,
}

/// State of a session, without its references to the plan and the weights.
struct SessionState {
    /// The devices with their step queue.
    replicas: ReplicaPool<StepTag>,
    /// The models, in the order of the program's plans.
    models: Vec<ModelState>,
    /// In-flight steps of packed sequences.
    packs: usize,
    /// In-flight steps of rows.
    rows: usize,
    /// Packs waiting to be sent; at most one of each model until the input has ended.
    ready: VecDeque<ReadyPack>,
    /// Whether the input has ended.
    ended: bool,
    /// Whether the session was cancelled: no more packs are sent.
    cancelled: bool,
    /// Sizes of the steps.
    sizes: StepSizes,
    /// The machines.
    site: Site,
    /// Steps of rows that were not computed for lack of memory.
    returned_rows: VecDeque<ReturnedRows>,
    /// Messages of the session itself that were not taken by the client.
    messages: Vec<String>,
    /// Error of a reading of the memory, to be returned by the next call.
    failed: Option<RuntimeError>,
}

/// A pack that waits to be sent as a step.
struct ReadyPack {
    /// Index of the model.
    model: usize,
    pack: TokenPack,
}

impl ReadyPack {
    /// Expected duration of the step in seconds.
    fn seconds(&self, program: &Program) -> f64 {
        let TokenPack { tokens, spans, .. } = &self.pack;
        let counts = Counts { tokens: tokens.len() as u64, sequences: spans.len() as u64, packs: 1 };
        step_seconds(&program.plans()[self.model].1.graph, program.target(), counts)
    }
}

/// A step of rows that a device returned without computing it.
struct ReturnedRows {
    /// Index of the model.
    model: usize,
    keys: Vec<u64>,
    /// The values of each input.
    rows: Vec<Vec<f32>>,
}

/// Receives the next result of the replicas, with or without waiting.
type Take<'t> = &'t mut dyn FnMut(&mut ReplicaPool<StepTag>) -> Result<Option<Returned<StepTag>>, RuntimeError>;

/// Inputs, outputs and reusable buffers of a model.
struct ModelState {
    inputs: SessionInputs,
    outputs: Arc<[StepOutput]>,
    /// Output buffers of completed steps for reuse: for each step a vector per output.
    spare: Vec<Vec<Vec<f32>>>,
}

/// Inputs of a model, resolved from their names when the session starts.
enum SessionInputs {
    /// Token sequences, packed end to end.
    Packed {
        /// Token ids: (T).
        ids: InputId,
        /// Start and end of each sequence: (S, 2).
        spans: InputId,
        /// Index of each sequence's first token: (S); `None` where the graph does not select it.
        firsts: Option<InputId>,
        lasts: Option<InputId>,
        /// The spans within which attention stays: (n S, 2), n for each sequence; `None` where attention spans a
        /// whole sequence.
        frames: Option<FramesInput>,
        /// Packs sequences into steps.
        packer: Box<Packer>,
    },
    /// Rows of f32 values.
    Rows {
        /// The inputs, in the order of the graph.
        inputs: Vec<InputId>,
        /// Input buffers of completed steps for reuse: for each step a vector per input.
        spare: Vec<Vec<Vec<f32>>>,
    },
}

/// Model and keys of a step.
enum StepTag {
    /// Step of packed sequences.
    Pack { model: usize, owners: Vec<u64> },
    /// Step of rows.
    Rows { model: usize, keys: Vec<u64> },
}

/// Result of [`Session::push`] and [`StepSession::push`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "what is not taken must be pushed again"]
pub enum Push {
    /// The sequences were accepted.
    Taken,
    /// Nothing was accepted, because enough steps are in flight. Call `next`, then push the sequences again.
    Full,
}

/// The next result of a session: a [`SessionRow`] of a [`Session`], a [`Completed`] step of a [`StepSession`].
pub enum Next<T> {
    /// A result.
    Ready(T),
    /// No result is available; where the call waits, nothing is in flight and the session needs more input.
    Pending,
    /// The input has ended, and all results were returned.
    Finished,
}

/// A completed step. Pass it to [`StepSession::recycle`] after reading the values, so that its buffers are reused.
pub struct Completed {
    /// The model.
    pub model: ModelId,
    /// Keys of the step's sequences or rows.
    pub keys: Vec<u64>,
    /// Numbers of sequences and tokens of the step.
    pub counts: Counts,
    /// Device time in seconds.
    pub seconds: f64,
    outputs: Arc<[StepOutput]>,
    values: Vec<Vec<f32>>,
    inputs: Vec<InputValues>,
}

impl Completed {
    /// Returns the values of output `output` for the sequence (or row) `i` of the step: one row, or for a per-token
    /// output one row per token of the sequence.
    pub fn values(&self, output: usize, i: usize) -> &[f32] {
        let StepOutput { per, width, .. } = self.outputs[output];
        // A packed step's second input holds the spans; a per-token output has a row for each token of the span.
        let rows = match (per, self.inputs.get(1)) {
            (RowUnit::Token, Some(InputValues::Spans(spans))) => spans[i][0] as usize..spans[i][1] as usize,
            (RowUnit::Token | RowUnit::Sequence, _) => i..i + 1,
        };
        &self.values[output][rows.start * width..rows.end * width]
    }
}

impl<'a> StepSession<'a> {
    /// Creates a session on executors with equal programs and weights. Models whose graph has the inputs `ids` and
    /// `spans` take sequences, packed in the order `order`; other models take rows.
    /// `reload` has the plan of the programs; with programs of several sizes, the steps follow the memory.
    fn new(executors: Vec<Executor>, order: Order, reload: Reload<'a>) -> Result<Self, RuntimeError> {
        let replicas = ReplicaPool::new(executors)?;
        let program = replicas.program();
        let models = (0..program.plans().len()).map(|plan| ModelState::of(program, plan, order)).collect();
        let site = reload.site().clone();
        let sizes = StepSizes::new(replicas.programs(), replicas.size(), &reload);
        let state = SessionState {
            replicas,
            models,
            packs: 0,
            rows: 0,
            ready: VecDeque::new(),
            ended: false,
            cancelled: false,
            sizes,
            site,
            returned_rows: VecDeque::new(),
            messages: vec![],
            failed: None,
        };
        let session = Self { state, reload: Some(reload) };
        session.set_gives_way();
        Ok(session)
    }

    /// The session without references to plan and weights. It cannot load the weights again, so a lack of memory in a step
    /// ends it, unless programs for smaller steps are loaded ([`Settings::dynamic`](crate::Settings::dynamic)).
    pub fn detached(self) -> StepSession<'static> {
        let session = StepSession { state: self.state, reload: None };
        session.set_gives_way();
        session
    }

    /// The program that the devices run; of programs of several sizes, the largest.
    pub fn program(&self) -> &Program {
        self.state.replicas.programs().program(0)
    }

    /// The program of the size that is in use.
    pub fn program_in_use(&self) -> &Program {
        self.state.replicas.program()
    }

    /// Whether the size of the steps changes during the run.
    pub fn is_dynamic(&self) -> bool {
        self.state.sizes.is_dynamic()
    }

    /// Reports the changes of the size of the steps since the last call.
    pub fn report_sizes(&mut self, watch: &mut Watch, observer: &mut dyn Observer) {
        let changes = self.state.sizes.take_changes();
        let held = self.program_in_use().all_arenas_bytes();
        let planned = PlannedMemory { held, ..PlannedMemory::of(self.program(), self.state.site.budget()) };
        watch.resized(changes, planned, observer);
    }

    /// Returns the model with the given plan name.
    pub fn model(&self, name: &str) -> Option<ModelId> {
        self.program().index(name).map(ModelId)
    }

    /// The outputs of a model, in the order of [`Completed::values`]' indices.
    pub fn outputs(&self, model: ModelId) -> &[StepOutput] {
        &self.state.models[model.0].outputs
    }

    /// Maximum number of tokens of a sequence for a model.
    pub fn longest(&self, model: ModelId) -> usize {
        let bounds = self.program().plans()[model.0].1.graph.bounds;
        let longest = match &self.state.models[model.0].inputs {
            SessionInputs::Packed { frames: Some(frames), .. } => bounds.longest * frames.count as u64,
            SessionInputs::Packed { frames: None, .. } | SessionInputs::Rows { .. } => bounds.longest,
        };
        longest.min(bounds.tokens) as usize
    }

    /// Adds sequences, each with its model and key: all of them, or none if the session is full.
    ///
    /// # Errors
    /// A sequence without tokens or longer than [`StepSession::longest`], or a model that takes rows.
    pub fn push<'t>(
        &mut self,
        sequences: impl IntoIterator<Item = (ModelId, u64, &'t [i32])>,
    ) -> Result<Push, RuntimeError> {
        self.follow_memory()?;
        if self.is_full() {
            return Ok(Push::Full);
        }
        for (model, key, tokens) in sequences {
            match &mut self.state.models[model.0].inputs {
                SessionInputs::Packed { packer, frames, .. } => {
                    frames.map_or(Ok(()), |frames| frames.check(tokens.len()))?;
                    packer.push(key, tokens)?;
                }
                SessionInputs::Rows { .. } => {
                    return Err(RuntimeError::bug("a model of rows was given a sequence"));
                }
            }
        }
        self.dispatch();
        Ok(Push::Taken)
    }

    /// Whether [`StepSession::push`] would return [`Push::Full`].
    pub fn is_full(&self) -> bool {
        !self.has_room() && self.has_packs()
    }

    /// Enqueues a step of rows ahead of the waiting packs, because results of other sequences depend on these rows.
    /// Check [`StepSession::has_room_for_rows`] first, and take the buffers from [`StepSession::row_buffers`].
    pub fn submit_rows(
        &mut self,
        model: ModelId,
        keys: Vec<u64>,
        rows: Vec<Vec<f32>>,
    ) -> Result<(), RuntimeError> {
        let ModelState { inputs, outputs, spare } = &mut self.state.models[model.0];
        let SessionInputs::Rows { inputs, .. } = inputs else {
            return Err(RuntimeError::bug("a model of sequences was given rows"));
        };
        let work = StepWork {
            plan: model.0,
            inputs: inputs.iter().copied().zip(rows.into_iter().map(InputValues::F32)).collect(),
            counts: Counts { tokens: 0, sequences: keys.len() as u64, packs: 1 },
            outputs: Arc::clone(outputs),
            values: spare.pop().unwrap_or_default(),
            tag: StepTag::Rows { model: model.0, keys },
        };
        self.state.rows += 1;
        self.state.replicas.send_first(work);
        Ok(())
    }

    /// Whether fewer steps of rows are in flight than the target, so that another would start soon.
    pub fn has_room_for_rows(&self) -> bool {
        self.state.rows < self.state.replicas.in_flight_target() && !self.is_changing()
    }

    /// Returns the position of a row input by name.
    pub fn row_input(&self, model: ModelId, name: &str) -> Option<usize> {
        let graph = &self.program().plans()[model.0].1.graph;
        graph.inputs.iter().position(|(input, _)| input == name)
    }

    /// Returns empty buffers for the inputs of a step of rows, indexed by [`StepSession::row_input`].
    pub fn row_buffers(&mut self, model: ModelId) -> Vec<Vec<f32>> {
        let SessionInputs::Rows { inputs, spare } = &mut self.state.models[model.0].inputs else {
            return vec![];
        };
        let mut buffers = spare.pop().unwrap_or_default();
        buffers.resize_with(inputs.len(), Vec::new);
        buffers.iter_mut().for_each(Vec::clear);
        buffers
    }

    /// Enqueues a pack of each model that has waiting sequences, even if the pack is not full.
    pub fn flush(&mut self) {
        self.make_ready(true);
        self.dispatch();
    }

    /// Ends the input. The remaining sequences are cut into packs such that every device gets some; with several
    /// models, the steps with the longest expected time are sent first.
    pub fn end(&mut self) {
        if std::mem::replace(&mut self.state.ended, true) {
            return;
        }
        let devices = self.state.replicas.working();
        let mut packers: Vec<(usize, &mut Packer)> = vec![];
        for (number, model) in self.state.models.iter_mut().enumerate() {
            if let SessionInputs::Packed { packer, .. } = &mut model.inputs {
                packers.push((number, packer));
            }
        }
        if devices > 1 {
            packers.iter_mut().for_each(|(_, packer)| packer.cut(LAST_PACKS * devices));
        }
        // One pack of each model in turn, so that steps of all models are queued alternately.
        loop {
            let before = self.state.ready.len();
            for (model, packer) in &mut packers {
                self.state.ready.extend(packer.next_pack(true).map(|pack| ReadyPack { model: *model, pack }));
            }
            if self.state.ready.len() == before {
                break;
            }
        }
        if devices > 1 && packers.len() > 1 {
            let program = self.state.replicas.program();
            self.state
                .ready
                .make_contiguous()
                .sort_by(|a, b| b.seconds(program).total_cmp(&a.seconds(program)));
        }
        self.dispatch();
    }

    /// Returns a completed step without waiting; [`Next::Pending`] if there is none yet.
    ///
    /// # Errors
    /// A device error when no other device is left to recompute its steps, or the error of a step that no device can
    /// compute.
    pub fn poll(&mut self) -> Result<Next<Completed>, RuntimeError> {
        self.returned(&mut ReplicaPool::poll)
    }

    /// Waits for the next completed step while any is in flight. `stop` is called about every 50 ms; its error ends
    /// the wait.
    ///
    /// # Errors
    /// As [`StepSession::poll`], and the error of `stop`.
    pub fn next(&mut self, stop: StopCheck<'_>) -> Result<Next<Completed>, RuntimeError> {
        self.returned(&mut |replicas| replicas.wait(stop))
    }

    /// Sends steps and takes what the devices return, by `take`, until a step is completed or none is to be expected.
    fn returned(&mut self, take: Take<'_>) -> Result<Next<Completed>, RuntimeError> {
        loop {
            self.follow_memory()?;
            self.dispatch();
            match take(&mut self.state.replicas).map_err(|error| self.with_phase(error))? {
                Some(Returned::Done(done)) => return Ok(Next::Ready(self.completed(done))),
                Some(Returned::LacksMemory(error, works)) => self.take_back(error, works),
                None if self.must_follow_memory() => {}
                None => return Ok(self.idle()),
            }
        }
    }

    /// Takes back the buffers of a completed step for reuse.
    pub fn recycle(&mut self, completed: Completed) {
        let Completed { model, keys, values, inputs, .. } = completed;
        let model = &mut self.state.models[model.0];
        model.spare.push(values);
        match &mut model.inputs {
            SessionInputs::Packed { packer, .. } => {
                let mut inputs = inputs.into_iter();
                if let (Some(InputValues::I32(tokens)), Some(InputValues::Spans(spans))) =
                    (inputs.next(), inputs.next())
                {
                    packer.recycle(TokenPack { tokens, spans, owners: keys });
                }
            }
            SessionInputs::Rows { spare, .. } => {
                spare.push(inputs.into_iter().filter_map(InputValues::into_f32).collect());
            }
        }
    }

    /// Whether packs are waiting that were not sent to the devices' queue.
    pub fn has_packs(&self) -> bool {
        !self.state.ready.is_empty()
    }

    /// Cancels the run: steps that no device has started are dropped, steps that have started are still returned.
    /// Returns the keys of the dropped rows.
    pub fn cancel(&mut self) -> Vec<u64> {
        self.state.cancelled = true;
        self.state.replicas.set_gives_way(false);
        let mut dropped: Vec<u64> = self.state.returned_rows.drain(..).flat_map(|step| step.keys).collect();
        for work in self.state.replicas.cancel() {
            match work.tag {
                StepTag::Pack { .. } => self.state.packs -= 1,
                StepTag::Rows { keys, .. } => {
                    self.state.rows -= 1;
                    dropped.extend(keys);
                }
            }
        }
        dropped
    }

    /// Number of in-flight steps.
    pub fn in_flight(&self) -> usize {
        self.state.replicas.in_flight()
    }

    /// Number of in-flight steps at which every device has its next step ready when it completes one.
    pub fn in_flight_target(&self) -> usize {
        self.state.replicas.in_flight_target()
    }

    /// Number of devices in use; failed devices are excluded.
    pub fn working(&self) -> usize {
        self.state.replicas.working()
    }

    /// Work done so far by each device.
    pub fn usage(&self) -> &[Usage] {
        self.state.replicas.usage()
    }

    /// Returns the warnings since the last call, such as a failed device.
    pub fn warnings(&mut self) -> Vec<String> {
        let mut warnings = self.state.replicas.warnings();
        warnings.append(&mut self.state.messages);
        warnings
    }

    /// Utilization of the packs of a model.
    pub fn fill(&self, model: ModelId) -> Fill {
        match &self.state.models[model.0].inputs {
            SessionInputs::Packed { packer, .. } => packer.fill(),
            SessionInputs::Rows { .. } => Fill::default(),
        }
    }

    /// Returns the executors of the working devices for another session; in-flight steps are dropped.
    pub fn into_executors(self) -> Vec<Executor> {
        self.state.replicas.into_executors()
    }

    /// Whether another pack may be sent.
    fn has_room(&self) -> bool {
        self.state.packs < self.state.replicas.in_flight_target() && !self.is_changing()
    }

    /// Whether no step is sent until the size of the steps has changed.
    fn is_changing(&self) -> bool {
        self.state.sizes.is_changing()
    }

    /// Whether [`StepSession::follow_memory`] must be called before the next step is sent.
    fn must_follow_memory(&self) -> bool {
        self.state.failed.is_some() || (self.is_changing() && self.state.replicas.in_flight() == 0)
    }

    /// Changes the size of the steps, if that was decided on and no step is in flight.
    fn follow_memory(&mut self) -> Result<(), RuntimeError> {
        if let Some(error) = self.state.failed.take() {
            return Err(error);
        }
        if self.state.replicas.in_flight() > 0 {
            return Ok(());
        }
        match self.state.sizes.wanted() {
            None => return Ok(()),
            Some(SizeAction::Reload(error)) => self.reload(error)?,
            Some(SizeAction::Resize(size)) => match self.state.replicas.resize(size) {
                Ok(()) => self.state.sizes.resized(),
                Err(error) => {
                    // The reading was overtaken: the session continues with its size.
                    let refused = if is_out_of_memory(&error) { self.state.sizes.refused() } else { None };
                    self.state.messages.push(refused.ok_or_else(|| self.with_phase(error))?);
                    return Ok(());
                }
            },
        }
        self.set_gives_way();
        let program = self.state.replicas.program();
        // The models first: packs that wait are divided by the bounds of the new program, and rows are sent with its inputs.
        self.state.models.iter_mut().enumerate().for_each(|(plan, model)| model.resize(program, plan));
        for ReadyPack { model, pack } in std::mem::take(&mut self.state.ready) {
            let bounds = program.plans()[model].1.graph.bounds;
            let packs = pack.divided(bounds.tokens as usize, bounds.sequences as usize);
            self.state.ready.extend(packs.into_iter().map(|pack| ReadyPack { model, pack }));
        }
        while let Some(ReturnedRows { model, keys, rows }) = self.state.returned_rows.pop_front() {
            self.submit_rows(ModelId(model), keys, rows)?;
        }
        Ok(())
    }

    /// Starts again with a smaller program, because the devices lack memory for the present one and no other is loaded. The
    /// error is that of the devices, with its phase, if there is no smaller program.
    fn reload(&mut self, error: DeviceError) -> Result<(), RuntimeError> {
        let program = self.state.replicas.program().clone();
        let executors = self.state.replicas.stop();
        let mut warnings = Warnings(&mut self.state.messages);
        match self.state.sizes.reload(self.reload.as_ref(), &program, executors, &mut warnings)? {
            Some(executors) => self.state.replicas.go_on(executors),
            None => Err(self.with_phase(error.into())),
        }
    }

    /// Tells the devices whether a lack of memory is answered with a smaller size.
    fn set_gives_way(&self) {
        self.state
            .replicas
            .set_gives_way(self.state.sizes.gives_way(self.reload.as_ref()) && !self.state.cancelled);
    }

    /// Takes back steps that a device has no memory for, and all steps that no device has started, to send them again after
    /// a change to a smaller size.
    fn take_back(&mut self, error: DeviceError, mut works: Vec<StepWork<StepTag>>) {
        works.extend(self.state.replicas.cancel());
        // The first step goes back last, to the front of the queue.
        for StepWork { inputs, values, tag, .. } in works.into_iter().rev() {
            let mut inputs = inputs.into_iter().map(|(_, values)| values);
            match tag {
                StepTag::Pack { model, owners } => {
                    self.state.packs -= 1;
                    self.state.models[model].spare.push(values);
                    if let (Some(InputValues::I32(tokens)), Some(InputValues::Spans(spans))) =
                        (inputs.next(), inputs.next())
                    {
                        let pack = TokenPack { tokens, spans, owners };
                        self.state.ready.push_front(ReadyPack { model, pack });
                    }
                }
                StepTag::Rows { model, keys } => {
                    self.state.rows -= 1;
                    self.state.models[model].spare.push(values);
                    let rows = inputs.filter_map(InputValues::into_f32).collect();
                    self.state.returned_rows.push_front(ReturnedRows { model, keys, rows });
                }
            }
        }
        self.state.sizes.lacks_memory(error);
    }

    /// Adds the phase, what holds the memory and what to try to an error of a lack of memory; returns other errors unchanged.
    fn with_phase(&self, error: RuntimeError) -> RuntimeError {
        match error {
            RuntimeError::Device(error) if error.is_out_of_memory() => {
                let fallback = OomFallback {
                    phase: OomPhase::Step,
                    tried: self.state.sizes.tried(),
                    dynamic: self.state.sizes.is_dynamic(),
                };
                self.state.site.out_of_memory(self.state.replicas.program(), fallback, error)
            }
            other => other,
        }
    }

    /// The state of a session without a completed step: [`Next::Finished`] or [`Next::Pending`].
    fn idle(&self) -> Next<Completed> {
        let waits = !self.state.ready.is_empty() || !self.state.returned_rows.is_empty();
        let is_done = self.state.ended && !waits && self.state.replicas.in_flight() == 0;
        if is_done { Next::Finished } else { Next::Pending }
    }

    /// Adds to `ready` the next pack of each model that has none there: a full pack, or with `flush` a partial one.
    fn make_ready(&mut self, flush: bool) {
        for (number, model) in self.state.models.iter_mut().enumerate() {
            if let SessionInputs::Packed { packer, .. } = &mut model.inputs
                && self.state.ready.iter().all(|other| other.model != number)
            {
                let pack = packer.next_pack(flush);
                self.state.ready.extend(pack.map(|pack| ReadyPack { model: number, pack }));
            }
        }
    }

    /// Sends packs in the order in which they became ready, as far as there is room; models therefore alternate.
    fn dispatch(&mut self) {
        if self.state.cancelled {
            return;
        }
        loop {
            if !self.state.ended {
                self.make_ready(false);
            }
            match self.state.ready.pop_front() {
                Some(ready) if self.has_room() && self.admits_step() => self.send(ready),
                Some(waits) => return self.state.ready.push_front(waits),
                None => return,
            }
        }
    }

    /// Whether the memory in use admits another step of the present size. An error is returned by the next call that can.
    fn admits_step(&mut self) -> bool {
        self.state.sizes.admits_step().unwrap_or_else(|error| {
            self.state.failed = Some(error);
            false
        })
    }

    /// Sends a pack as a step of its model.
    fn send(&mut self, ready: ReadyPack) {
        let ReadyPack { model, pack } = ready;
        let ModelState { inputs, outputs, spare } = &mut self.state.models[model];
        let SessionInputs::Packed { ids, spans: spans_input, firsts, lasts, frames, .. } = inputs else {
            return;
        };
        let TokenPack { tokens, spans, owners } = pack;
        let counts = Counts { tokens: tokens.len() as u64, sequences: spans.len() as u64, packs: 1 };
        let firsts =
            firsts.map(|input| (input, InputValues::I32(spans.iter().map(|[start, _]| *start).collect())));
        let lasts =
            lasts.map(|input| (input, InputValues::I32(spans.iter().map(|[_, end]| end - 1).collect())));
        let frames = frames.map(|frames| (frames.input, InputValues::Spans(frames.of_spans(&spans).collect())));
        // Tokens and spans come first: `Completed::values`, `recycle` and `take_back` find them by position. The other
        // inputs follow from the spans, so a pack that is sent again gets new ones.
        let mut inputs = vec![(*ids, InputValues::I32(tokens)), (*spans_input, InputValues::Spans(spans))];
        inputs.extend(firsts);
        inputs.extend(lasts);
        inputs.extend(frames);
        let work = StepWork {
            plan: model,
            inputs,
            counts,
            outputs: Arc::clone(outputs),
            values: spare.pop().unwrap_or_default(),
            tag: StepTag::Pack { model, owners },
        };
        self.state.packs += 1;
        self.state.sizes.sent();
        self.state.replicas.send(work);
    }

    /// Converts a step returned by the devices, and updates the in-flight counts.
    fn completed(&mut self, done: CompletedWork<StepTag>) -> Completed {
        if self.state.sizes.completed() {
            self.set_gives_way();
        }
        let CompletedWork { work: StepWork { inputs, counts, values, outputs, tag, .. }, seconds } = done;
        let (model, keys) = match tag {
            StepTag::Pack { model, owners } => {
                self.state.packs -= 1;
                (model, owners)
            }
            StepTag::Rows { model, keys } => {
                self.state.rows -= 1;
                (model, keys)
            }
        };
        let inputs = inputs.into_iter().map(|(_, values)| values).collect();
        Completed { model: ModelId(model), keys, counts, seconds, outputs, values, inputs }
    }
}

/// Collects warnings during a start in the middle of a run.
struct Warnings<'a>(&'a mut Vec<String>);

impl Observer for Warnings<'_> {
    fn say(&mut self, level: Level, text: &str) {
        if level == Level::Warning {
            self.0.push(text.to_owned());
        }
    }

    fn progress(&mut self, _: &Progress) {}
}

fn is_out_of_memory(error: &RuntimeError) -> bool {
    matches!(error, RuntimeError::Device(error) if error.is_out_of_memory())
}

impl ModelState {
    fn of(program: &Program, plan: usize, order: Order) -> Self {
        let graph = &program.plans()[plan].1.graph;
        let inputs = match (program.input(plan, "ids"), program.input(plan, "spans")) {
            (Some(ids), Some(spans)) => {
                let b = graph.bounds;
                let frames = FramesInput::of(program, plan);
                let longest = b.longest as usize * frames.map_or(1, |frames| frames.count);
                let packer = Packer::new(b.tokens as usize, b.sequences as usize, longest, order);
                let firsts = program.input(plan, "rows");
                let lasts = program.input(plan, "lasts");
                SessionInputs::Packed { ids, spans, firsts, lasts, frames, packer: Box::new(packer) }
            }
            (Some(_) | None, _) => {
                let inputs = graph.inputs.iter().map(|&(_, value)| InputId { plan, value }).collect();
                SessionInputs::Rows { inputs, spare: vec![] }
            }
        };
        Self { inputs, outputs: StepOutput::of(program, plan).into(), spare: vec![] }
    }

    /// Changes inputs, outputs and bounds to those of a program of another size.
    fn resize(&mut self, program: &Program, plan: usize) {
        let graph = &program.plans()[plan].1.graph;
        match &mut self.inputs {
            SessionInputs::Packed { ids, spans, firsts, lasts, frames, packer } => {
                // The programs have equal inputs; only the values that they name may have other numbers.
                *ids = program.input(plan, "ids").unwrap_or(*ids);
                *spans = program.input(plan, "spans").unwrap_or(*spans);
                *firsts = program.input(plan, "rows");
                *lasts = program.input(plan, "lasts");
                *frames = FramesInput::of(program, plan);
                packer.resize(graph.bounds.tokens as usize, graph.bounds.sequences as usize);
            }
            SessionInputs::Rows { inputs, .. } => {
                *inputs = graph.inputs.iter().map(|&(_, value)| InputId { plan, value }).collect();
            }
        }
        self.outputs = StepOutput::of(program, plan).into();
        // Buffers of larger steps would keep their memory.
        self.spare.clear();
    }
}
