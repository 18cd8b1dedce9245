//! Sessions: models that run on devices. A session packs the sequences that it is given into steps, computes them on all
//! replicas and devices, and gives back the outputs of each step with the keys of its sequences. [`Settings::plan`] plans
//! one, [`Planned::start`] starts it.
//!
//! Invariant: the outputs of a sequence are a function of its tokens, the weights, the precision and the kind of device; they
//! come back once.
//!
//! [`Settings::plan`]: crate::Settings::plan

mod admission;
pub mod bounds;
mod in_order;
mod planned;
mod replica;
mod replicas;
mod report;
mod search;
mod timed;
mod training;
mod weights;

pub use admission::Site;
pub use in_order::InOrder;
pub use planned::{Planned, Request, Start};
pub use replicas::{Output, Per, Stop, Usage, say_given_back};
pub use report::threads;
pub use search::{Choice, Finish, Kept, Part, Rejected, Space, Stage, search};
pub use timed::{ReplicaSpans, TimedSession, TimedStep};
pub use training::{Batch, Losses, MicroStep, TrainSession, Update};
pub use weights::WeightSource;

use crate::RuntimeError;
use data::pack::{Fill, Order, Pack, Packer};
use exec::Executor;
use graph::Counts;
use plan::{InputId, Program, step_seconds};
use replicas::{Done, Replicas, Values, Work};
use std::collections::VecDeque;
use std::sync::Arc;

/// Into how many packs for each device the sequences that are left at the end are cut: with several, the devices end closer
/// together.
const LAST_PACKS: usize = 2;

/// A model of a session: the position of its plan in the program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ModelId(usize);

/// A running session.
pub struct Session {
    replicas: Replicas<Tag>,
    models: Vec<Model>,
    /// Steps of packed sequences in flight.
    packs: usize,
    /// Steps of rows in flight.
    rows: usize,
    /// Packs that wait for room, with their models; before the input has ended at most one of each model.
    ready: VecDeque<(usize, Pack)>,
    /// The input has ended.
    ended: bool,
    /// No more packs are sent.
    cancelled: bool,
}

struct Model {
    inputs: Inputs,
    outputs: Arc<[Output]>,
    /// Buffers of steps that came back: a vector for each output.
    spare: Vec<Vec<Vec<f32>>>,
}

/// The inputs of a model, resolved once.
enum Inputs {
    /// Sequences of tokens, packed end to end.
    Packed {
        ids: InputId,
        spans: InputId,
        /// The first token of each sequence, where the graph selects it.
        firsts: Option<InputId>,
        packer: Box<Packer>,
    },
    /// Rows of numbers.
    Rows {
        inputs: Vec<InputId>,
        /// Buffers of steps that came back: a vector for each input.
        spare: Vec<Vec<Vec<f32>>>,
    },
}

/// Whose step it is.
enum Tag {
    Pack { model: usize, owners: Vec<u64> },
    Rows { model: usize, keys: Vec<u64> },
}

/// Whether a session has taken what it was given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "what is not taken must be pushed again"]
pub enum Push {
    /// It was taken.
    Taken,
    /// Nothing was taken: as many steps are in flight as there should be. Call [`Session::next`], then push again.
    Full,
}

/// What a session gives back.
pub enum Next {
    /// The outputs of a step.
    Ready(Completed),
    /// Nothing is in flight: the session needs more input.
    Pending,
    /// The input has ended, and everything came back.
    Finished,
}

/// A step that is done. Give it to [`Session::recycle`] when its values were read.
pub struct Completed {
    /// The model.
    pub model: ModelId,
    /// The keys of its sequences, or of its rows.
    pub keys: Vec<u64>,
    /// The sequences and tokens of the step.
    pub counts: Counts,
    /// Seconds of its device's time.
    pub seconds: f64,
    outputs: Arc<[Output]>,
    values: Vec<Vec<f32>>,
    inputs: Vec<Values>,
}

impl Completed {
    /// The values of output `output` that belong to the sequence (or row) `i` of the step: one row, or a row for each of its
    /// tokens.
    pub fn values(&self, output: usize, i: usize) -> &[f32] {
        let Output { per, width, .. } = self.outputs[output];
        let rows = match (per, self.inputs.get(1)) {
            (Per::Token, Some(Values::Spans(spans))) => spans[i][0] as usize..spans[i][1] as usize,
            (Per::Token | Per::Sequence, _) => i..i + 1,
        };
        &self.values[output][rows.start * width..rows.end * width]
    }
}

impl Session {
    /// A session on executors that have the same program and weights. Models whose graph has the inputs `ids` and `spans`
    /// take sequences, in the order `order`; others take rows.
    pub(crate) fn new(executors: Vec<Executor>, order: Order) -> Result<Self, RuntimeError> {
        let replicas = Replicas::new(executors)?;
        let program = replicas.program();
        let models = (0..program.plans().len()).map(|plan| Model::of(program, plan, order)).collect();
        Ok(Self { replicas, models, packs: 0, rows: 0, ready: VecDeque::new(), ended: false, cancelled: false })
    }

    /// The program that the devices follow.
    pub fn program(&self) -> &Program {
        self.replicas.program()
    }

    /// The model of a name.
    pub fn model(&self, name: &str) -> Option<ModelId> {
        self.program().index(name).map(ModelId)
    }

    /// The outputs of a model, in the order of [`Completed::values`].
    pub fn outputs(&self, model: ModelId) -> &[Output] {
        &self.models[model.0].outputs
    }

    /// The most tokens of a sequence for a model.
    pub fn longest(&self, model: ModelId) -> usize {
        let bounds = self.program().plans()[model.0].1.graph.bounds;
        bounds.longest.min(bounds.tokens) as usize
    }

    /// Adds a sequence for each of some models, with its key: all of them or none.
    ///
    /// # Errors
    /// A sequence without tokens, or longer than [`Session::longest`].
    pub fn push<'t>(
        &mut self,
        sequences: impl IntoIterator<Item = (ModelId, u64, &'t [i32])>,
    ) -> Result<Push, RuntimeError> {
        if self.is_full() {
            return Ok(Push::Full);
        }
        for (model, key, tokens) in sequences {
            match &mut self.models[model.0].inputs {
                Inputs::Packed { packer, .. } => packer.push(key, tokens)?,
                Inputs::Rows { .. } => return Err(RuntimeError::bug("a model of rows was given a sequence")),
            }
        }
        self.dispatch();
        Ok(Push::Taken)
    }

    /// Whether [`Session::push`] would take nothing.
    pub fn is_full(&self) -> bool {
        !self.has_room() && self.has_packs()
    }

    /// Sends a step of rows before the packs that wait, since these rows are what others wait for. Rows go through
    /// [`Session::has_room_for_rows`] and take buffers from [`Session::row_buffers`].
    pub fn submit_rows(
        &mut self,
        model: ModelId,
        keys: Vec<u64>,
        rows: Vec<Vec<f32>>,
    ) -> Result<(), RuntimeError> {
        let Model { inputs, outputs, spare } = &mut self.models[model.0];
        let Inputs::Rows { inputs, .. } = inputs else {
            return Err(RuntimeError::bug("a model of sequences was given rows"));
        };
        let work = Work {
            plan: model.0,
            inputs: inputs.iter().copied().zip(rows.into_iter().map(Values::F32)).collect(),
            counts: Counts { tokens: 0, sequences: keys.len() as u64 },
            outputs: Arc::clone(outputs),
            values: spare.pop().unwrap_or_default(),
            tag: Tag::Rows { model: model.0, keys },
        };
        self.rows += 1;
        self.replicas.send_first(work);
        Ok(())
    }

    /// Whether another step of rows would not wait for long.
    pub fn has_room_for_rows(&self) -> bool {
        self.rows < self.replicas.in_flight_target()
    }

    /// The position of an input of rows, by its name.
    pub fn row_input(&self, model: ModelId, name: &str) -> Option<usize> {
        let graph = &self.program().plans()[model.0].1.graph;
        graph.inputs.iter().position(|(input, _)| input == name)
    }

    /// Empty buffers for the inputs of a step of rows, at the positions of [`Session::row_input`].
    pub fn row_buffers(&mut self, model: ModelId) -> Vec<Vec<f32>> {
        let Inputs::Rows { inputs, spare } = &mut self.models[model.0].inputs else { return vec![] };
        let mut buffers = spare.pop().unwrap_or_default();
        buffers.resize_with(inputs.len(), Vec::new);
        buffers.iter_mut().for_each(Vec::clear);
        buffers
    }

    /// Sends a pack of each model that has sequences, full or not.
    pub fn flush(&mut self) {
        self.make_ready(true);
        self.dispatch();
    }

    /// Says that the input has ended: what is left is cut so that every device gets some of it. With several models the
    /// steps that take longest are sent first.
    pub fn end(&mut self) {
        if std::mem::replace(&mut self.ended, true) {
            return;
        }
        let devices = self.replicas.working();
        let mut packers: Vec<(usize, &mut Packer)> = vec![];
        for (number, model) in self.models.iter_mut().enumerate() {
            if let Inputs::Packed { packer, .. } = &mut model.inputs {
                packers.push((number, packer));
            }
        }
        if devices > 1 {
            packers.iter_mut().for_each(|(_, packer)| packer.cut(LAST_PACKS * devices));
        }
        loop {
            let before = self.ready.len();
            for (model, packer) in &mut packers {
                self.ready.extend(packer.next_pack(true).map(|pack| (*model, pack)));
            }
            if self.ready.len() == before {
                break;
            }
        }
        if devices > 1 && packers.len() > 1 {
            let program = self.replicas.program();
            self.ready.make_contiguous().sort_by(|a, b| seconds(program, b).total_cmp(&seconds(program, a)));
        }
        self.dispatch();
    }

    /// A step that is done by now; [`Next::Pending`] where none is.
    ///
    /// # Errors
    /// The error of a device, when no other device can compute its steps, or of a step that no device can compute.
    pub fn poll(&mut self) -> Result<Next, RuntimeError> {
        self.dispatch();
        match self.replicas.poll()? {
            Some(done) => Ok(Next::Ready(self.completed(done))),
            None => Ok(self.idle()),
        }
    }

    /// The next step that is done; waits while any is in flight. `stop` is called now and then, and its error ends the wait.
    ///
    /// # Errors
    /// As [`Session::poll`], and that of `stop`.
    pub fn next(&mut self, stop: Stop<'_>) -> Result<Next, RuntimeError> {
        self.dispatch();
        match self.replicas.wait(stop)? {
            Some(done) => Ok(Next::Ready(self.completed(done))),
            None => Ok(self.idle()),
        }
    }

    /// Takes back the buffers of a step.
    pub fn recycle(&mut self, completed: Completed) {
        let Completed { model, keys, values, inputs, .. } = completed;
        let model = &mut self.models[model.0];
        model.spare.push(values);
        match &mut model.inputs {
            Inputs::Packed { packer, .. } => {
                let mut inputs = inputs.into_iter();
                if let (Some(Values::I32(tokens)), Some(Values::Spans(spans))) = (inputs.next(), inputs.next())
                {
                    packer.recycle(Pack { tokens, spans, owners: keys });
                }
            }
            Inputs::Rows { spare, .. } => {
                let rows = inputs.into_iter().filter_map(|values| match values {
                    Values::F32(rows) => Some(rows),
                    Values::I32(_) | Values::Spans(_) => None,
                });
                spare.push(rows.collect());
            }
        }
    }

    /// Whether packs wait that no device has been given.
    pub fn has_packs(&self) -> bool {
        !self.ready.is_empty()
    }

    /// Ends the run early: sequences that no device has begun are dropped, steps in flight still come back. The keys of rows
    /// that no device has begun.
    pub fn cancel(&mut self) -> Vec<u64> {
        self.cancelled = true;
        let mut dropped = vec![];
        for work in self.replicas.cancel() {
            match work.tag {
                Tag::Pack { .. } => self.packs -= 1,
                Tag::Rows { keys, .. } => {
                    self.rows -= 1;
                    dropped.extend(keys);
                }
            }
        }
        dropped
    }

    /// Steps in flight.
    pub fn in_flight(&self) -> usize {
        self.replicas.in_flight()
    }

    /// Steps that should be in flight, so that every device has its next one when it ends one.
    pub fn in_flight_target(&self) -> usize {
        self.replicas.in_flight_target()
    }

    /// Devices that work: those that failed are left out.
    pub fn working(&self) -> usize {
        self.replicas.working()
    }

    /// What each device did so far.
    pub fn usage(&self) -> &[Usage] {
        self.replicas.usage()
    }

    /// Warnings since the last call, such as about a device that failed.
    pub fn warnings(&mut self) -> Vec<String> {
        self.replicas.warnings()
    }

    /// How full the packs of a model were.
    pub fn fill(&self, model: ModelId) -> Fill {
        match &self.models[model.0].inputs {
            Inputs::Packed { packer, .. } => packer.fill(),
            Inputs::Rows { .. } => Fill::default(),
        }
    }

    /// The executors of the devices that still work, for another session. What is in flight is dropped.
    pub fn into_executors(self) -> Vec<Executor> {
        self.replicas.into_executors()
    }

    fn has_room(&self) -> bool {
        self.packs < self.replicas.in_flight_target()
    }

    fn idle(&self) -> Next {
        let is_done = self.ended && self.ready.is_empty() && self.replicas.in_flight() == 0;
        if is_done { Next::Finished } else { Next::Pending }
    }

    /// Makes the next pack of each model that has none ready: where its packer has a full one, or with `flush` any.
    fn make_ready(&mut self, flush: bool) {
        for (number, model) in self.models.iter_mut().enumerate() {
            if let Inputs::Packed { packer, .. } = &mut model.inputs
                && self.ready.iter().all(|(other, _)| *other != number)
            {
                self.ready.extend(packer.next_pack(flush).map(|pack| (number, pack)));
            }
        }
    }

    /// Sends packs while there is room, in the order in which they became ready: models take turns.
    fn dispatch(&mut self) {
        if self.cancelled {
            return;
        }
        loop {
            if !self.ended {
                self.make_ready(false);
            }
            match self.ready.pop_front() {
                Some((model, pack)) if self.has_room() => self.send(model, pack),
                Some(waits) => return self.ready.push_front(waits),
                None => return,
            }
        }
    }

    fn send(&mut self, number: usize, pack: Pack) {
        let Model { inputs, outputs, spare } = &mut self.models[number];
        let Inputs::Packed { ids, spans: of_spans, firsts, .. } = inputs else { return };
        let Pack { tokens, spans, owners } = pack;
        let counts = Counts { tokens: tokens.len() as u64, sequences: spans.len() as u64 };
        let rows = firsts.map(|input| (input, Values::I32(spans.iter().map(|[start, _]| *start).collect())));
        let mut inputs = vec![(*ids, Values::I32(tokens)), (*of_spans, Values::Spans(spans))];
        inputs.extend(rows);
        let work = Work {
            plan: number,
            inputs,
            counts,
            outputs: Arc::clone(outputs),
            values: spare.pop().unwrap_or_default(),
            tag: Tag::Pack { model: number, owners },
        };
        self.packs += 1;
        self.replicas.send(work);
    }

    fn completed(&mut self, done: Done<Tag>) -> Completed {
        let Done { work: Work { inputs, counts, values, outputs, tag, .. }, seconds } = done;
        let (model, keys) = match tag {
            Tag::Pack { model, owners } => {
                self.packs -= 1;
                (model, owners)
            }
            Tag::Rows { model, keys } => {
                self.rows -= 1;
                (model, keys)
            }
        };
        let inputs = inputs.into_iter().map(|(_, values)| values).collect();
        Completed { model: ModelId(model), keys, counts, seconds, outputs, values, inputs }
    }
}

/// The expected seconds of a step.
fn seconds(program: &Program, (model, pack): &(usize, Pack)) -> f64 {
    let counts = Counts { tokens: pack.tokens.len() as u64, sequences: pack.spans.len() as u64 };
    step_seconds(&program.plans()[*model].1.graph, program.target(), counts)
}

impl Model {
    fn of(program: &Program, plan: usize, order: Order) -> Self {
        let graph = &program.plans()[plan].1.graph;
        let inputs = match (program.input(plan, "ids"), program.input(plan, "spans")) {
            (Some(ids), Some(spans)) => {
                let b = graph.bounds;
                let packer = Packer::new(b.tokens as usize, b.sequences as usize, b.longest as usize, order);
                let firsts = program.input(plan, "rows");
                Inputs::Packed { ids, spans, firsts, packer: Box::new(packer) }
            }
            (Some(_) | None, _) => {
                let inputs = graph.inputs.iter().map(|&(_, value)| InputId { plan, value }).collect();
                Inputs::Rows { inputs, spare: vec![] }
            }
        };
        Self { inputs, outputs: Output::of(program, plan).into(), spare: vec![] }
    }
}
