//! Sessions of sequence models: sequences in, a row of outputs for each of them out, in input order. [`Session::plan`] plans a
//! session inside a memory budget, [`PlannedSession::start`] loads the weights, [`Session::push`] adds a sequence and
//! [`Session::next`] returns a row.
//!
//! Invariant: every sequence that was pushed is returned once, in input order, with finite values; otherwise an error names it
//! by its position.

use super::bounds::{bounds, copies, output_bytes, with_outputs};
use super::in_order::InOrder;
use super::{
    Completed, ModelId, Next, PlanPart, PlannedStages, Push, RowUnit, SearchStage, StageStart, StagesRequest,
    StepOutput, StepSession, StopCheck, WeightSource,
};
use crate::budget::Budget;
use crate::{Observer, RuntimeError, SequenceError, Settings, Silent, Tokenizer};
use plimsoll_data::pack::{Fill, MAX_PACKS, Order};
use plimsoll_graph::{Bounds, Bytes, Graph, VerifyError};
use plimsoll_models::{Output, SequenceModel};
use plimsoll_plan::{Ledger, Program};

/// Tokens of the shortest sequence: one letter between two special tokens.
const SHORTEST: u64 = 3;

/// A model that a session computes: its architecture, its tokenizer and its weights.
pub trait SessionModel {
    /// The architecture.
    fn architecture(&self) -> SequenceModel;

    /// The tokenizer.
    fn tokenizer(&self) -> &Tokenizer;

    /// The weights.
    fn weights(&self) -> &dyn WeightSource;

    /// Builds the graph for the bounds of a step.
    fn graph(&self, bounds: Bounds, outputs: &[Output]) -> Result<Graph, VerifyError> {
        self.architecture().graph(bounds, outputs)
    }
}

/// Request for a session: the outputs of a sequence, limits of the input, and the machines.
#[derive(Clone, Debug)]
pub struct SessionRequest {
    /// Outputs of every sequence. Empty: all outputs of the model's graph, for a [`SessionModel`] that chooses them itself.
    pub outputs: Vec<Output>,
    /// Tokens of the longest sequence, special tokens included, or an upper bound; `None`: the tokens of a step.
    pub longest: Option<u64>,
    /// Number of sequences, if known; it bounds the memory of rows that wait for an older row.
    pub sequences: Option<u64>,
    /// Order in which sequences are packed into steps. Rows are returned in input order with any.
    pub order: Order,
    /// Number of CPU replicas that the length of the input justifies; `None` means no limit (see [`Settings::most_replicas`]).
    pub worthwhile_replicas: Option<u64>,
    /// Device, threads, memory budget, precision and tokens of a step.
    pub settings: Settings,
}

impl Default for SessionRequest {
    fn default() -> Self {
        Self {
            outputs: vec![Output::Mean],
            longest: None,
            sequences: None,
            order: Order::ByLength,
            worthwhile_replicas: None,
            settings: Settings::default(),
        }
    }
}

impl SessionRequest {
    /// Number of full steps whose rows may wait for an older row.
    fn waiting_steps(&self) -> u64 {
        match self.order {
            Order::ByLength => MAX_PACKS as u64,
            Order::Input => 0,
        }
    }
}

/// The stage in which sequence models are in memory together. Up to the rows of `waiting_steps` full steps, and at most those of
/// all `sequences`, wait for an older row.
pub(crate) fn sequence_stage(
    parts: Vec<PlanPart<'_>>,
    longest: u64,
    waiting_steps: u64,
    sequences: Option<u64>,
) -> SearchStage<'_> {
    SearchStage {
        parts,
        longest,
        finish: Box::new(move |program, replicas| {
            with_outputs(program, copies(replicas), waiting_steps, sequences)
        }),
        kept: Box::new(move |program, steps| Bytes(output_bytes(program).0 * (steps as u64 + waiting_steps))),
    }
}

/// The plan of a [`Session`].
pub struct PlannedSession<'a> {
    stages: PlannedStages<'a>,
    models: Vec<&'a dyn SessionModel>,
    outputs: Vec<String>,
    order: Order,
}

impl<'a> PlannedSession<'a> {
    /// The program: schedule, kernels and the address of every tensor.
    pub fn program(&self) -> &Program {
        &self.stages.programs()[0]
    }

    /// The memory of the session, by purpose, in bytes.
    pub fn ledger(&self) -> Ledger {
        self.program().ledger()
    }

    /// The plan as a single stage of a search.
    pub fn stages(&self) -> &PlannedStages<'a> {
        &self.stages
    }

    /// Returns the plan as a single stage of a search.
    pub fn into_stages(self) -> PlannedStages<'a> {
        self.stages
    }

    /// Allocates the planned memory, loads the weights and starts the session.
    ///
    /// # Errors
    /// [`plimsoll_plan::PlanError::OverBudget`] if the memory is no longer free; errors of devices and of weights.
    pub fn start(&self) -> Result<Session<'_>, RuntimeError> {
        self.start_with(&mut Silent)
    }

    /// As [`PlannedSession::start`]; messages go to `observer`.
    ///
    /// # Errors
    /// As [`PlannedSession::start`].
    pub fn start_with(&self, observer: &mut dyn Observer) -> Result<Session<'_>, RuntimeError> {
        self.session(self.stages.start(0, self.stage_start(), observer)?)
    }

    /// Options to start the steps of the session, for [`crate::run::RunHarness::start_session`].
    pub fn stage_start(&self) -> StageStart<'_> {
        let weights = self.models.iter().map(|model| model.weights()).collect();
        StageStart { order: self.order, weights, running: vec![], kept: "outputs" }
    }

    /// Returns the session over steps that were started with [`PlannedSession::stage_start`].
    ///
    /// # Errors
    /// The program lacks a model or an output: a bug.
    pub fn session<'p>(&'p self, steps: StepSession<'p>) -> Result<Session<'p>, RuntimeError> {
        let models = self
            .models
            .iter()
            .enumerate()
            .map(|(index, model)| {
                let name = plan_name(index, self.models.len());
                let id = steps
                    .model(&name)
                    .ok_or_else(|| RuntimeError::bug(format!("the program has no {name}")))?;
                Ok(SessionPart { id, tokenizer: model.tokenizer(), outputs: self.outputs_of(&steps, id)? })
            })
            .collect::<Result<Vec<_>, RuntimeError>>()?;
        let waiting = InOrder::default();
        Ok(Session { steps, models, waiting, current: None, tokens: 0, encoded: vec![] })
    }

    /// The requested outputs of a model, in the order of the request.
    fn outputs_of(&self, steps: &StepSession<'_>, model: ModelId) -> Result<Vec<RowOutput>, RuntimeError> {
        let known = steps.outputs(model);
        if self.outputs.is_empty() {
            return Ok((0..known.len()).map(|index| RowOutput::new(known, index)).collect());
        }
        self.outputs
            .iter()
            .map(|name| {
                let index = known.iter().position(|output| output.name == *name);
                let index =
                    index.ok_or_else(|| RuntimeError::bug(format!("the model has no output `{name}`")))?;
                Ok(RowOutput::new(known, index))
            })
            .collect()
    }
}

/// Name of the plan of a model; `models` is the number of models of the session.
fn plan_name(index: usize, models: usize) -> String {
    if models == 1 { "encoder".to_owned() } else { format!("model {index}") }
}

/// A session of sequence models.
///
/// # Examples
/// ```
/// use plimsoll_runtime::session::{Next, Push, SessionRequest, Session};
/// use plimsoll_runtime::{EncoderModel, RuntimeError};
///
/// # fn main() -> Result<(), RuntimeError> {
/// let model = EncoderModel::builtin_protein()?; // random weights; `Model::open` opens a folder or a hub id
/// let planned = Session::plan(&[&model], &SessionRequest::default())?; // Err: the bill, and what would fit
/// println!("{}", planned.ledger());
/// let mut session = planned.start()?;
/// let mut print = |row: plimsoll_runtime::session::SessionRow<'_>| println!("{}: {:?}", row.position(), row.values(0));
/// for protein in ["MKVLAW", "TRESNDQCEGHIL"] {
///     while session.push(protein)? == Push::Full {
///         if let Next::Ready(row) = session.next()? { print(row) }
///     }
/// }
/// session.finish(|row| Ok::<(), RuntimeError>(print(row)))?;
/// # Ok(())
/// # }
/// ```
pub struct Session<'a> {
    steps: StepSession<'a>,
    models: Vec<SessionPart<'a>>,
    waiting: InOrder<PendingRow>,
    /// The row that was returned last; its buffer is reused after the next call.
    current: Option<(PendingRow, Vec<f32>)>,
    /// Number of tokens computed so far.
    tokens: u64,
    /// Memory for the tokens of a sequence, reused.
    encoded: Vec<i32>,
}

/// A model of a session.
struct SessionPart<'a> {
    id: ModelId,
    tokenizer: &'a Tokenizer,
    outputs: Vec<RowOutput>,
}

/// An output of a row.
#[derive(Clone, Copy)]
struct RowOutput {
    /// Index among the outputs of the model's graph.
    index: usize,
    per: RowUnit,
    /// Number of values of a sequence or of a token.
    width: usize,
}

impl RowOutput {
    fn new(outputs: &[StepOutput], index: usize) -> Self {
        Self { index, per: outputs[index].per, width: outputs[index].width }
    }

    /// Number of values of a sequence of `tokens` tokens.
    fn len(self, tokens: usize) -> usize {
        match self.per {
            RowUnit::Sequence => self.width,
            RowUnit::Token => self.width * tokens,
        }
    }
}

/// A sequence whose row was not returned yet.
#[derive(Clone, Copy)]
struct PendingRow {
    model: usize,
    tokens: usize,
}

/// The outputs of a sequence.
pub struct SessionRow<'s> {
    position: u64,
    row: PendingRow,
    outputs: &'s [RowOutput],
    values: &'s [f32],
}

impl<'s> SessionRow<'s> {
    /// Position of the sequence among all pushed sequences, from 0.
    pub fn position(&self) -> u64 {
        self.position
    }

    /// Index of the sequence's model.
    pub fn model(&self) -> usize {
        self.row.model
    }

    /// Number of tokens of the sequence, special tokens included.
    pub fn tokens(&self) -> usize {
        self.row.tokens
    }

    /// The values of an output, by its index in [`SessionRequest::outputs`]: `(D)`, or `(tokens, D)` for an output per token.
    pub fn values(&self, output: usize) -> &'s [f32] {
        let tokens = self.row.tokens;
        let start: usize = self.outputs[..output].iter().map(|before| before.len(tokens)).sum();
        &self.values[start..start + self.outputs[output].len(tokens)]
    }

    /// Number of outputs.
    pub fn outputs(&self) -> usize {
        self.outputs.len()
    }

    /// The values of all outputs, one after another.
    pub fn all_values(&self) -> &'s [f32] {
        self.values
    }
}

impl<'a> Session<'a> {
    /// Plans models that are in memory together: chooses the number of replicas, the tokens of a step, and whether weights are
    /// streamed.
    ///
    /// # Errors
    /// [`plimsoll_plan::PlanError::OverBudget`] with the bill where nothing fits; a request that contradicts itself.
    pub fn plan(
        models: &[&'a dyn SessionModel],
        request: &SessionRequest,
    ) -> Result<PlannedSession<'a>, RuntimeError> {
        Self::plan_within(models, request, request.settings.read_budget()?)
    }

    /// Plans as [`Session::plan`], within a budget that has entries of the process, or was read before.
    ///
    /// # Errors
    /// As [`Session::plan`].
    pub fn plan_within(
        models: &[&'a dyn SessionModel],
        request: &SessionRequest,
        budget: Budget,
    ) -> Result<PlannedSession<'a>, RuntimeError> {
        let SessionRequest { outputs, settings, longest, .. } = request;
        let longest = longest.map(|longest| longest.max(SHORTEST));
        let policy = settings.policy()?;
        let parts = models
            .iter()
            .enumerate()
            .map(|(index, &model)| {
                let outputs = outputs.clone();
                PlanPart {
                    name: plan_name(index, models.len()),
                    graph: Box::new(move |tokens| {
                        model.graph(bounds(tokens, longest.unwrap_or(tokens)), &outputs)
                    }),
                    policy: policy.clone(),
                    streams: true,
                }
            })
            .collect();
        let stage =
            sequence_stage(parts, longest.unwrap_or(SHORTEST), request.waiting_steps(), request.sequences);
        let stages = settings.plan_stages(StagesRequest {
            alternatives: vec![vec![stage]],
            replicas: settings.most_replicas(request.worthwhile_replicas),
            tokens: settings.tokens,
            budgets: vec![budget],
        })?;
        let outputs = outputs.iter().map(|output| output.name()).collect();
        Ok(PlannedSession { stages, models: models.to_vec(), outputs, order: request.order })
    }

    /// Adds a sequence of the first model: letters as in a FASTA file, in upper or lower case, or text. White space, digits and
    /// gaps between letters are dropped.
    ///
    /// # Errors
    /// As [`Session::push_to`].
    pub fn push(&mut self, sequence: impl AsRef<[u8]>) -> Result<Push, RuntimeError> {
        self.push_to(0, sequence)
    }

    /// Adds a sequence of a model, given by its index in [`Session::plan`].
    ///
    /// # Errors
    /// [`SequenceError`]: no letters, letters of another alphabet, mostly unknown tokens, more tokens than a step.
    pub fn push_to(&mut self, model: usize, sequence: impl AsRef<[u8]>) -> Result<Push, RuntimeError> {
        if self.steps.is_full() {
            return Ok(Push::Full);
        }
        let mut encoded = std::mem::take(&mut self.encoded);
        encoded.clear();
        let tokenizer = self.models[model].tokenizer;
        tokenizer.encode_sequence(self.waiting.next_key(), sequence.as_ref(), &mut encoded)?;
        let pushed = self.push_tokens(model, &encoded);
        self.encoded = encoded;
        pushed
    }

    /// Adds a tokenized sequence of a model, special tokens included.
    ///
    /// # Errors
    /// [`SequenceError::LongerThanStep`].
    pub fn push_tokens(&mut self, model: usize, tokens: &[i32]) -> Result<Push, RuntimeError> {
        let id = self.models[model].id;
        let position = self.waiting.next_key();
        let most = self.steps.longest(id);
        if tokens.len() > most {
            let source = SequenceError::LongerThanStep { tokens: tokens.len(), most };
            return Err(RuntimeError::Sequence { position, source });
        }
        let pushed = self.steps.push([(id, position, tokens)])?;
        if pushed == Push::Taken {
            self.waiting.add(PendingRow { model, tokens: tokens.len() });
        }
        Ok(pushed)
    }

    /// Returns the next row in input order, and waits for it while steps are in flight.
    ///
    /// # Errors
    /// A result that is not finite; an error of a device if no other device is left.
    #[expect(clippy::should_implement_trait, reason = "a row borrows from the session")]
    pub fn next(&mut self) -> Result<Next<SessionRow<'_>>, RuntimeError> {
        self.next_or_stop(&|| Ok(()))
    }

    /// As [`Session::next`]. `stop` is called about every 50 ms while the session waits; its error ends the wait.
    ///
    /// # Errors
    /// As [`Session::next`], and the error of `stop`.
    pub fn next_or_stop(&mut self, stop: StopCheck<'_>) -> Result<Next<SessionRow<'_>>, RuntimeError> {
        self.next_row(&mut |steps| steps.next(stop))
    }

    /// Returns the next row in input order without waiting; [`Next::Pending`] if it is not complete.
    ///
    /// # Errors
    /// As [`Session::next`].
    pub fn poll(&mut self) -> Result<Next<SessionRow<'_>>, RuntimeError> {
        self.next_row(&mut StepSession::poll)
    }

    /// Ends the input: the remaining sequences are computed in steps that are not full.
    pub fn end(&mut self) {
        self.steps.end();
    }

    /// Ends the input, and passes all remaining rows to `take` in input order.
    ///
    /// # Errors
    /// As [`Session::next`], and errors of `take`.
    pub fn finish<E: From<RuntimeError>>(
        mut self,
        mut take: impl FnMut(SessionRow<'_>) -> Result<(), E>,
    ) -> Result<(), E> {
        self.end();
        while let Next::Ready(row) = self.next()? {
            take(row)?;
        }
        match self.waiting.len() {
            0 => Ok(()),
            missing => Err(RuntimeError::bug(format!("{missing} sequences have no result")).into()),
        }
    }

    /// Number of tokens computed so far.
    pub fn tokens(&self) -> u64 {
        self.tokens
    }

    /// Number of rows returned so far.
    pub fn returned(&self) -> u64 {
        self.waiting.taken()
    }

    /// Utilization of the packs of a model.
    pub fn fill(&self, model: usize) -> Fill {
        self.steps.fill(self.models[model].id)
    }

    /// The session of steps below this session.
    pub fn steps(&self) -> &StepSession<'a> {
        &self.steps
    }

    /// The session of steps below this session. Steps must be taken from it by this session alone.
    pub fn steps_mut(&mut self) -> &mut StepSession<'a> {
        &mut self.steps
    }

    /// Takes completed steps with `take` until the oldest row is complete.
    fn next_row(
        &mut self,
        take: &mut dyn FnMut(&mut StepSession<'a>) -> Result<Next<Completed>, RuntimeError>,
    ) -> Result<Next<SessionRow<'_>>, RuntimeError> {
        if let Some((_, buffer)) = self.current.take() {
            self.waiting.recycle(buffer);
        }
        loop {
            let position = self.waiting.taken();
            if let Some(released) = self.waiting.pop() {
                let (row, values) = self.current.insert(released);
                let outputs = &self.models[row.model].outputs;
                return Ok(Next::Ready(SessionRow { position, row: *row, outputs, values }));
            }
            match take(&mut self.steps)? {
                Next::Ready(step) => self.store(step)?,
                Next::Pending => return Ok(Next::Pending),
                Next::Finished => return Ok(Next::Finished),
            }
        }
    }

    /// Stores the values of a completed step.
    fn store(&mut self, step: Completed) -> Result<(), RuntimeError> {
        self.tokens += step.counts.tokens;
        for (i, &position) in step.keys.iter().enumerate() {
            let (row, values) = self.waiting.values_of(position)?;
            for output in &self.models[row.model].outputs {
                values.extend_from_slice(step.values(output.index, i));
            }
            if !values.iter().all(|x| x.is_finite()) {
                return Err(RuntimeError::Sequence { position, source: SequenceError::NotFinite });
            }
        }
        self.steps.recycle(step);
        Ok(())
    }
}
