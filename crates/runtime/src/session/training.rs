//! Training sessions: a model whose parameters and optimizer states stay on one device between steps. Invariant: a step
//! runs the plans of [`plimsoll_plan::Training`]; inputs are resolved from their names, and outputs from their roles, once, when the
//! session starts. Micro-steps and updates are submitted, and their results are read later, so that the device need not wait for
//! the host.

use super::admission::Site;
use super::batch::{BatchInputs, BoundInputs, TrainingBatch, lacks, targets};
use super::weights::load_training;
use crate::{Observer, RuntimeError};
use plimsoll_exec::{
    Copies, Data, Executor, OutputValues, PersistentKind, PersistentTensor, ReadShared, Submitted,
};
use plimsoll_graph::{Bounds, Bytes, Counts, Graph, OutputRole, StateDef, StateRole};
use plimsoll_plan::passes::cotangent;
use plimsoll_plan::training::plans;
use plimsoll_plan::{InputId, Location, OutputId, Program};
use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

/// A training program running on a device.
pub struct TrainSession {
    executor: Executor,
    /// Inputs and outputs of the micro-step plans, the largest first.
    micros: Vec<MicroStepPlan>,
    /// Index of the plan that micro-steps run.
    micro: usize,
    /// The optimizer's update; `None` where a micro-step updates the weights itself.
    apply: Option<UpdatePlan>,
    /// The evaluation plan's inputs and outputs.
    evaluate: LossPlan,
    /// Submitted micro-steps and updates whose results have not been read from the device, the oldest first.
    in_flight: VecDeque<(Submission, Submitted)>,
    /// Results that were read from the device to make room for a further submission, the oldest first.
    results: VecDeque<StepResult>,
    /// Memory for the frames of a batch, reused; empty for models without frames.
    frames: Vec<[i32; 2]>,
    /// Rows of the experts of micro-steps whose results are in `results`, the oldest first.
    waiting_rows: VecDeque<u32>,
    /// Rows of the experts of the micro-step whose result was returned last.
    expert_rows: Vec<u32>,
}

/// Kind of a submitted step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Submission {
    MicroStep,
    Update,
}

/// Result of a submitted micro-step or update.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum StepResult {
    /// Result of a step submitted by [`TrainSession::submit_micro_step`].
    MicroStep(MicroStepLosses),
    /// Result of an update submitted by [`TrainSession::submit_update`].
    Update(UpdateResult),
}

/// Scalar inputs of a micro-step.
#[derive(Clone, Copy, Debug)]
pub struct MicroStepInputs<'a> {
    /// Whether gradients are added to the sum of the earlier micro-steps; otherwise a new sum starts.
    pub keep: bool,
    /// Loss scale, which keeps 16-bit gradients from underflowing.
    pub loss_scale: f32,
    /// Number of targets in the micro-batch, by which a micro-step that updates the weights itself divides the gradients.
    pub targets: u64,
    /// Learning rate and optimizer corrections, for a micro-step that updates the weights itself.
    pub hyper: &'a [f32],
    /// Key of dropout's random generator: the run's seed. Its counter has the number of the pack.
    pub seed: [i32; 2],
}

/// Losses of a micro-step.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct MicroStepLosses {
    /// Cross-entropy, summed over targets.
    pub cross_entropy: f64,
    /// Z-loss of the output logits, summed over targets.
    pub z: Option<f64>,
    /// Divergence from the teachers times its weight, summed over sequences.
    pub distillation: Option<f64>,
    /// Load-balancing loss of the routers, summed over packs, each times its targets.
    pub balance: Option<f64>,
    /// Z-loss of the router logits, summed over packs, each times its targets.
    pub router_z: Option<f64>,
    /// Number of rows dropped by experts, summed over layers.
    pub dropped: u64,
    /// For a micro-step that updates the weights itself: whether it did, which requires that every gradient was finite.
    pub moved: Option<bool>,
}

/// Result of an optimizer update.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct UpdateResult {
    /// Global norm of the gradient; `None` where the plan does not compute it.
    pub norm: Option<f64>,
    /// Whether every gradient was finite; otherwise no weight was updated.
    pub moved: bool,
}

/// A plan that computes the loss of a batch.
struct LossPlan {
    plan: usize,
    inputs: BatchInputs,
    /// Role of the cross-entropy, which is among `outputs`.
    cross_entropy: OutputRole,
    outputs: PlanOutputs,
}

/// The outputs of a plan that are read after every step, sorted by role, each with the memory for its values. The three
/// lists have the same order: the executor takes and fills slices.
struct PlanOutputs {
    roles: Vec<OutputRole>,
    /// The handle of each output, and its number of values.
    requested: Vec<(OutputId, usize)>,
    values: Vec<OutputValues>,
}

/// Plan of the forward and backward pass of a micro-batch. An input is `None` where the plan lacks it. Of the outputs, only a
/// micro-step that updates the weights has [`OutputRole::GradientScale`].
struct MicroStepPlan {
    forward: LossPlan,
    loss_scale: Option<InputId>,
    auxiliary_scale: Option<InputId>,
    keep: Option<InputId>,
    unscale: Option<InputId>,
    hyper: Option<InputId>,
    seed: Option<InputId>,
    /// Layers with experts.
    expert_layers: Vec<ExpertLayer>,
}

/// A layer with experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertLayer {
    /// Number of the layer, from 0.
    pub layer: u32,
    /// Number of experts.
    pub experts: usize,
}

/// Plan of the optimizer's update.
struct UpdatePlan {
    plan: usize,
    hyper: InputId,
    unscale: InputId,
    /// The factor of the gradients, and their norm if the plan computes it.
    outputs: PlanOutputs,
}

/// Number of results for which there is room from the start; more micro-steps in a step allocate.
const MOST_RESULTS: usize = 64;

impl TrainSession {
    /// Starts a program of [`plimsoll_plan::Training`]: initializes the states, and writes the values read by `source` to the
    /// parameters, to their master copies and to their averages. Reports the progress to `observer`.
    ///
    /// # Errors
    /// Too little free memory, errors of the device or of `source`, or a program that lacks a training plan.
    pub fn start(
        site: &Site,
        program: Program,
        source: ReadShared<'_>,
        observer: &mut dyn Observer,
    ) -> Result<Self, RuntimeError> {
        let micros = MicroStepPlan::all(&program)?;
        let apply = UpdatePlan::of(&program)?;
        let evaluate = evaluation(&program)?;
        let largest = &micros[0].forward;
        let sequences = program.plans()[largest.plan].1.graph.bounds.sequences as usize;
        let frames = Vec::with_capacity(largest.inputs.frames_of_a_sequence() * sequences);
        let executor = site.start_one(program, observer)?;
        observer.stage("arena allocated", &site.reading());
        let in_flight = VecDeque::with_capacity(executor.depth());
        let results = VecDeque::with_capacity(MOST_RESULTS);
        // Micro-steps of all sizes have the same outputs.
        let experts = micros[0].expert_layers.iter().map(|layer| layer.experts).sum();
        let waiting_rows = VecDeque::with_capacity(MOST_RESULTS * experts);
        let expert_rows = Vec::with_capacity(experts);
        let mut session = Self {
            executor,
            micros,
            micro: 0,
            apply,
            evaluate,
            in_flight,
            results,
            frames,
            waiting_rows,
            expert_rows,
        };
        session.load(source, observer)?;
        observer.stage("weights loaded", &site.reading());
        Ok(session)
    }

    /// Initializes the states, then loads the parameters together with their master copies and averages, which are f32.
    fn load(&mut self, source: ReadShared<'_>, observer: &mut dyn Observer) -> Result<(), RuntimeError> {
        let executor = &mut self.executor;
        executor.start_states()?;
        let residents = executor.persistent_tensors();
        let mut states = BTreeMap::new();
        for PersistentTensor { what, at, .. } in &residents {
            if let PersistentKind::State(state) = what {
                states.insert(&state.role, (state, *at));
            }
        }
        let copies: BTreeMap<Location, Copies> = residents
            .iter()
            .filter_map(|PersistentTensor { what, at, .. }| match what {
                PersistentKind::Param(param) => {
                    let master = StateRole::Master { param: param.name.clone() };
                    let average = StateRole::Average { param: param.name.clone() };
                    let copies = [master, average].map(|role| {
                        let (state, copy) = states.get(&role)?;
                        (**state == StateDef::zeros(role)).then_some(*copy)
                    });
                    Some((*at, copies))
                }
                PersistentKind::State(_) => None,
            })
            .collect();
        load_training(executor, &copies, source, observer)
    }

    /// The program that the device runs.
    pub fn program(&self) -> &Program {
        self.executor.program()
    }

    /// The plan that micro-steps run at present.
    pub fn micro_plan(&self) -> &plimsoll_plan::Plan {
        self.plan_of(self.micro)
    }

    /// The plan of micro-steps of size `k`.
    fn plan_of(&self, k: usize) -> &plimsoll_plan::Plan {
        &self.program().plans()[self.micros[k].forward.plan].1
    }

    /// The sizes of micro-steps between which [`TrainSession::set_micro_step`] switches, the largest first: the maximum number
    /// of tokens, and the bytes of the arena that are in use with this size.
    pub fn micro_steps(&self) -> Vec<(u64, Bytes)> {
        let sizes = 0..self.micros.len();
        sizes.map(|k| (self.plan_of(k).graph.bounds.tokens, self.arena_bytes_of(k))).collect()
    }

    /// Runs the following micro-steps with the plan of size `k` of [`TrainSession::micro_steps`], and gives back the memory
    /// that only larger sizes use, or takes it again.
    ///
    /// # Errors
    /// A step is in flight, or errors of the device. If a larger size finds no memory, the session keeps its size, and the
    /// error is [`DeviceError::OutOfMemory`](plimsoll_exec::DeviceError::OutOfMemory).
    pub fn set_micro_step(&mut self, k: usize) -> Result<(), RuntimeError> {
        self.nothing_in_flight()?;
        if self.micros.len() > 1 {
            self.executor.use_alternatives_from(k)?;
        }
        self.micro = k;
        Ok(())
    }

    /// Number of the plan of the present size of micro-steps in the program.
    pub fn micro_plan_index(&self) -> usize {
        self.micros[self.micro].forward.plan
    }

    /// Bytes of the arena that plans of the present size of micro-steps use.
    pub fn arena_bytes(&self) -> Bytes {
        self.arena_bytes_of(self.micro)
    }

    /// Bytes of the arena that plans of micro-steps of size `k` use.
    fn arena_bytes_of(&self, k: usize) -> Bytes {
        match self.micros.len() {
            1 => self.program().arena_bytes(),
            _ => self.program().arena_bytes_from(k),
        }
    }

    /// Waits for all submitted micro-steps and updates, and drops their results and errors.
    pub fn drop_submitted(&mut self) {
        while let Some((stage, step)) = self.in_flight.pop_front() {
            // The step is repeated, or the run ends with an earlier error.
            let _ = self.collect_outputs(stage, step);
        }
        self.results.clear();
        self.waiting_rows.clear();
    }

    /// Whether an update that failed may have changed parameters or states: its first launch, which only reads gradients,
    /// was issued. Copies before it only bring states to the device.
    pub fn has_begun_update(&self) -> bool {
        self.executor.launched() > 0
    }

    /// The bounds of a micro-batch.
    pub fn bounds(&self) -> Bounds {
        self.micro_plan().graph.bounds
    }

    /// The bounds of a batch of an evaluation.
    pub fn evaluation_bounds(&self) -> Bounds {
        self.program().plans()[self.evaluate.plan].1.graph.bounds
    }

    /// Maximum number of submitted micro-steps and updates on the device; 1 where a step runs while it is submitted.
    pub fn depth(&self) -> usize {
        self.executor.depth()
    }

    /// Submits the forward and backward pass of a micro-batch. The batch may be changed afterwards. If the device holds no
    /// further step, waits for the oldest one.
    ///
    /// # Errors
    /// A batch of the wrong kind or larger than the plan's bounds; device errors.
    pub fn submit_micro_step(
        &mut self,
        batch: TrainingBatch<'_>,
        step: MicroStepInputs<'_>,
    ) -> Result<(), RuntimeError> {
        self.make_room()?;
        let scalars = Scalars::of(&step);
        let Self { executor, micros, micro, frames, .. } = self;
        let micro = &micros[*micro];
        let (inputs, counts) = micro.inputs(batch, &step, &scalars, frames)?;
        let submitted = inputs.with(|inputs| {
            executor.submit(micro.forward.plan, inputs, counts, &micro.forward.outputs.requested)
        })?;
        self.in_flight.push_back((Submission::MicroStep, submitted));
        Ok(())
    }

    /// Submits the update of the weights with the gradient sum times `unscale`, which is skipped on the device if a gradient
    /// is not finite. Submits nothing where the micro-steps update the weights themselves.
    ///
    /// # Errors
    /// Device errors.
    pub fn submit_update(&mut self, hyper: &[f32], unscale: f32) -> Result<(), RuntimeError> {
        if self.apply.is_some() {
            self.make_room()?;
        }
        let Some(apply) = &self.apply else { return Ok(()) };
        let unscale = [unscale];
        let inputs = [(apply.hyper, Data::F32(hyper)), (apply.unscale, Data::F32(&unscale))];
        let counts = Counts { tokens: 0, sequences: 0, packs: 1 };
        let submitted = self.executor.submit(apply.plan, &inputs, counts, &apply.outputs.requested)?;
        self.in_flight.push_back((Submission::Update, submitted));
        Ok(())
    }

    /// Returns the result of the oldest micro-step or update whose result was not returned yet; waits for it.
    ///
    /// # Errors
    /// Device errors, or nothing was submitted.
    pub fn result(&mut self) -> Result<StepResult, RuntimeError> {
        let result = match self.results.pop_front() {
            Some(result) => result,
            None => self.collect()?,
        };
        if matches!(result, StepResult::MicroStep(_)) {
            let experts = self.micros[0].expert_layers.iter().map(|layer| layer.experts).sum();
            self.expert_rows.clear();
            let rows = self.waiting_rows.len().min(experts);
            self.expert_rows.extend(self.waiting_rows.drain(..rows));
        }
        Ok(result)
    }

    /// The layers with experts.
    pub fn expert_layers(&self) -> &[ExpertLayer] {
        &self.micros[0].expert_layers
    }

    /// Number of rows that each expert received in the micro-step whose result was returned last, layer by layer as in
    /// [`TrainSession::expert_layers`].
    pub fn expert_rows(&self) -> &[u32] {
        &self.expert_rows
    }

    /// An error if a step is in flight.
    fn nothing_in_flight(&self) -> Result<(), RuntimeError> {
        if self.in_flight.is_empty() {
            Ok(())
        } else {
            Err(RuntimeError::bug("the results of submitted steps were not read"))
        }
    }

    /// Collects the oldest step if the device holds no further one.
    fn make_room(&mut self) -> Result<(), RuntimeError> {
        if self.in_flight.len() >= self.executor.depth() {
            let result = self.collect()?;
            self.results.push_back(result);
        }
        Ok(())
    }

    /// Waits for the oldest step on the device.
    fn collect(&mut self) -> Result<StepResult, RuntimeError> {
        let (stage, step) = self
            .in_flight
            .pop_front()
            .ok_or_else(|| RuntimeError::bug("a result was asked for, but no step was submitted"))?;
        self.collect_outputs(stage, step)?;
        match (stage, &self.apply) {
            (Submission::MicroStep, _) => {
                let micro = &self.micros[self.micro];
                self.waiting_rows.extend(micro.expert_rows());
                Ok(StepResult::MicroStep(micro.losses()?))
            }
            (Submission::Update, Some(apply)) => Ok(StepResult::Update(apply.update())),
            (Submission::Update, None) => Err(no_update()),
        }
    }

    /// Waits for the oldest step on the device, and reads its outputs to the memory of its plan. A micro-step is of the
    /// present size, because the size changes only while no step is in flight.
    fn collect_outputs(&mut self, stage: Submission, step: Submitted) -> Result<(), RuntimeError> {
        let outputs = match (stage, &mut self.apply) {
            (Submission::MicroStep, _) => &mut self.micros[self.micro].forward.outputs,
            (Submission::Update, Some(apply)) => &mut apply.outputs,
            (Submission::Update, None) => return Err(no_update()),
        };
        Ok(self.executor.collect(step, &mut outputs.values)?)
    }

    /// Runs a micro-step and adds the time of instruction `i` of [`TrainSession::micro_plan`] to `times[i]`. Timing makes the
    /// step slower.
    ///
    /// # Errors
    /// As [`TrainSession::submit_micro_step`]; a number of entries that is not the number of instructions; a step is in
    /// flight.
    pub fn timed_micro_step(
        &mut self,
        batch: TrainingBatch<'_>,
        step: MicroStepInputs<'_>,
        times: &mut [Duration],
    ) -> Result<MicroStepLosses, RuntimeError> {
        self.nothing_in_flight()?;
        let scalars = Scalars::of(&step);
        let Self { executor, micros, micro, frames, .. } = self;
        let micro = &mut micros[*micro];
        let (inputs, counts) = micro.inputs(batch, &step, &scalars, frames)?;
        inputs.with(|inputs| {
            inputs.iter().try_for_each(|&(input, data)| match data {
                Data::F32(values) => executor.write_f32(input, values),
                Data::I32(values) => executor.write_i32(input, values),
            })
        })?;
        executor.run_timed(micro.forward.plan, counts, times)?;
        let outputs = &mut micro.forward.outputs;
        for (&(output, _), values) in outputs.requested.iter().zip(&mut outputs.values) {
            executor.read_u8(output, values.bytes_mut())?;
        }
        micro.losses()
    }

    /// Computes the cross-entropy of a batch, summed over targets, without training.
    ///
    /// # Errors
    /// As [`TrainSession::submit_micro_step`]; a step is in flight.
    pub fn evaluate(&mut self, batch: TrainingBatch<'_>) -> Result<f64, RuntimeError> {
        self.nothing_in_flight()?;
        let Self { executor, evaluate, frames, .. } = self;
        let (inputs, counts) = evaluate.inputs.bind(batch, frames)?;
        let LossPlan { plan, outputs, .. } = evaluate;
        let submitted = inputs.with(|inputs| executor.submit(*plan, inputs, counts, &outputs.requested))?;
        executor.collect(submitted, &mut outputs.values)?;
        evaluate.loss()
    }

    /// The persistent tensors (parameters and states), with their addresses for [`TrainSession::read`] and
    /// [`TrainSession::write`].
    pub fn residents(&self) -> Vec<PersistentTensor> {
        self.executor.persistent_tensors()
    }

    /// Reads bytes of a persistent tensor from position `at`.
    pub fn read(&mut self, at: Location, out: &mut [u8]) -> Result<(), RuntimeError> {
        Ok(self.executor.download(at, out)?)
    }

    /// Writes bytes of a persistent tensor at position `at`.
    pub fn write(&mut self, at: Location, bytes: &[u8]) -> Result<(), RuntimeError> {
        Ok(self.executor.upload(at, bytes)?)
    }
}

impl LossPlan {
    /// A plan whose cross-entropy is read after every step, and with it the outputs for whose roles `is_read` is true.
    fn of(program: &Program, plan: usize, is_read: impl Fn(&OutputRole) -> bool) -> Result<Self, RuntimeError> {
        if targets(program, plan).is_empty() {
            return Err(lacks(program, plan, "input `targets`"));
        }
        let inputs = BatchInputs::of(program, plan)?;
        let cross_entropy = cross_entropy(&program.plans()[plan].1.graph);
        let outputs = PlanOutputs::of(program, plan, |role| *role == cross_entropy || is_read(role));
        outputs.number(&cross_entropy).ok_or_else(|| lacks(program, plan, "output `loss`"))?;
        Ok(Self { plan, inputs, cross_entropy, outputs })
    }

    /// Cross-entropy of the last step that was read, summed over targets.
    fn loss(&self) -> Result<f64, RuntimeError> {
        self.outputs
            .number(&self.cross_entropy)
            .ok_or_else(|| RuntimeError::bug("the plan of a loss has no output for its cross-entropy"))
    }
}

/// Role of the output that is the cross-entropy of a graph: a separate one if the graph has further losses, or else the whole
/// loss.
pub fn cross_entropy(graph: &Graph) -> OutputRole {
    match graph.output(OutputRole::CrossEntropy) {
        Some(_) => OutputRole::CrossEntropy,
        None => OutputRole::Loss,
    }
}

impl PlanOutputs {
    /// The outputs of a plan for whose roles `is_read` is true. They have the same number of values in every step.
    fn of(program: &Program, plan: usize, is_read: impl Fn(&OutputRole) -> bool) -> Self {
        let graph = &program.plans()[plan].1.graph;
        let mut outputs: Vec<_> = graph.outputs.iter().filter(|(role, _)| is_read(role)).collect();
        outputs.sort();
        let mut requested = Vec::with_capacity(outputs.len());
        let mut values = Vec::with_capacity(outputs.len());
        for &&(_, value) in &outputs {
            let spec = graph.spec(value);
            let elements = spec.shape.iter().filter_map(|dim| dim.fixed()).product::<u64>() as usize;
            requested.push((OutputId { plan, value }, elements));
            values.push(OutputValues::zeros(spec.dtype, elements));
        }
        Self { roles: outputs.iter().map(|(role, _)| role.clone()).collect(), requested, values }
    }

    /// All outputs of the last step that was read, sorted by role.
    fn iter(&self) -> impl Iterator<Item = (&OutputRole, &OutputValues)> {
        self.roles.iter().zip(&self.values)
    }

    /// The values of an output in f32, if the plan has it.
    fn floats(&self, role: &OutputRole) -> Option<&[f32]> {
        self.iter().find(|(other, _)| *other == role).map(|(_, values)| values.as_f32())
    }

    /// The first value of an output in f32, if the plan has it.
    fn number(&self, role: &OutputRole) -> Option<f64> {
        self.floats(role).and_then(<[f32]>::first).map(|&x| f64::from(x))
    }

    /// Whether every gradient was finite, if the plan tells: the second factor of the gradients is zero otherwise.
    fn gradients_are_finite(&self) -> Option<bool> {
        self.floats(&OutputRole::GradientScale).map(|scale| scale.get(1).is_some_and(|&factor| factor != 0.0))
    }
}

/// Values of the scalar inputs of a micro-step that are computed from [`MicroStepInputs`].
struct Scalars {
    keep: [f32; 1],
    loss_scale: [f32; 1],
    unscale: [f32; 1],
}

impl Scalars {
    fn of(step: &MicroStepInputs<'_>) -> Self {
        let scale = step.loss_scale * step.targets as f32;
        Self { keep: [f32::from(u8::from(step.keep))], loss_scale: [step.loss_scale], unscale: [1.0 / scale] }
    }
}

impl MicroStepPlan {
    /// The micro-steps of a program, the largest first.
    fn all(program: &Program) -> Result<Vec<Self>, RuntimeError> {
        let first = index(program, plans::MICRO)?;
        let smaller = program.alternatives().iter().copied().filter(|&plan| plan != first);
        std::iter::once(first).chain(smaller).map(|plan| Self::of(program, plan)).collect()
    }

    fn of(program: &Program, plan: usize) -> Result<Self, RuntimeError> {
        let updates = program.index(plans::APPLY).is_none();
        let forward = LossPlan::of(program, plan, |role| match role {
            OutputRole::GradientScale => updates,
            OutputRole::ZLoss
            | OutputRole::DistillationLoss
            | OutputRole::BalanceLoss
            | OutputRole::RouterZLoss
            | OutputRole::ExpertRows { .. }
            | OutputRole::DroppedRows { .. } => true,
            OutputRole::Loss
            | OutputRole::Auxiliary
            | OutputRole::CrossEntropy
            | OutputRole::GradientNorm
            | OutputRole::Gradient { .. }
            | OutputRole::Named(_) => false,
        })?;
        if updates && forward.outputs.gradients_are_finite().is_none() {
            return Err(RuntimeError::bug("a micro-step that moves the weights has no output `scale`"));
        }
        let expert_layers = forward
            .outputs
            .iter()
            .filter_map(|(role, values)| {
                let OutputRole::ExpertRows { layer } = *role else { return None };
                Some(ExpertLayer { layer, experts: values.as_i32().len().saturating_sub(1) })
            })
            .collect();
        Ok(Self {
            forward,
            loss_scale: program.input(plan, &cotangent(&OutputRole::Loss)),
            auxiliary_scale: program.input(plan, &cotangent(&OutputRole::Auxiliary)),
            keep: program.input(plan, "keep"),
            unscale: program.input(plan, "unscale"),
            hyper: program.input(plan, "hyper"),
            seed: program.input(plan, "seed"),
            expert_layers,
        })
    }

    /// All inputs of a micro-step with their values, and the batch's numbers of tokens, sequences and packs.
    fn inputs<'a>(
        &self,
        batch: TrainingBatch<'a>,
        step: &'a MicroStepInputs<'a>,
        scalars: &'a Scalars,
        frames: &'a mut Vec<[i32; 2]>,
    ) -> Result<(BoundInputs<'a>, Counts), RuntimeError> {
        let (mut inputs, counts) = self.forward.inputs.bind(batch, frames)?;
        inputs.add(self.loss_scale, Data::F32(&scalars.loss_scale))?;
        inputs.add(self.auxiliary_scale, Data::F32(&scalars.loss_scale))?;
        inputs.add(self.keep, Data::F32(&scalars.keep))?;
        inputs.add(self.unscale, Data::F32(&scalars.unscale))?;
        inputs.add(self.hyper, Data::F32(step.hyper))?;
        inputs.add(self.seed, Data::I32(&step.seed))?;
        Ok((inputs, counts))
    }

    /// Number of rows of each expert in the last micro-step that was read, layer by layer.
    fn expert_rows(&self) -> impl Iterator<Item = u32> {
        let layers =
            self.forward.outputs.iter().filter(|(role, _)| matches!(role, OutputRole::ExpertRows { .. }));
        layers.flat_map(|(_, first_rows)| {
            // `first_rows[e]` is the first row of expert `e`, with the total behind the last.
            first_rows.as_i32().windows(2).map(|pair| natural(pair[1]).saturating_sub(natural(pair[0])))
        })
    }

    /// Losses of the last micro-step that was read.
    fn losses(&self) -> Result<MicroStepLosses, RuntimeError> {
        let outputs = &self.forward.outputs;
        let cross_entropy = self.forward.loss()?;
        let dropped = outputs.iter().filter(|(role, _)| matches!(role, OutputRole::DroppedRows { .. }));
        Ok(MicroStepLosses {
            cross_entropy,
            z: outputs.number(&OutputRole::ZLoss),
            distillation: outputs.number(&OutputRole::DistillationLoss),
            balance: outputs.number(&OutputRole::BalanceLoss),
            router_z: outputs.number(&OutputRole::RouterZLoss),
            dropped: dropped.flat_map(|(_, rows)| rows.as_i32()).map(|&rows| u64::from(natural(rows))).sum(),
            moved: outputs.gradients_are_finite().map(|are_finite| are_finite && cross_entropy.is_finite()),
        })
    }
}

/// A number of rows that a device has returned.
fn natural(rows: i32) -> u32 {
    rows.max(0) as u32
}

impl UpdatePlan {
    fn of(program: &Program) -> Result<Option<Self>, RuntimeError> {
        let Some(plan) = program.index(plans::APPLY) else { return Ok(None) };
        let missing = || RuntimeError::bug("the plan of an update lacks an input or an output");
        let outputs = PlanOutputs::of(program, plan, |role| match role {
            OutputRole::GradientScale | OutputRole::GradientNorm => true,
            OutputRole::Loss
            | OutputRole::Auxiliary
            | OutputRole::CrossEntropy
            | OutputRole::ZLoss
            | OutputRole::DistillationLoss
            | OutputRole::BalanceLoss
            | OutputRole::RouterZLoss
            | OutputRole::ExpertRows { .. }
            | OutputRole::DroppedRows { .. }
            | OutputRole::Gradient { .. }
            | OutputRole::Named(_) => false,
        });
        outputs.gradients_are_finite().ok_or_else(missing)?;
        let hyper = program.input(plan, "hyper").ok_or_else(missing)?;
        let unscale = program.input(plan, "unscale").ok_or_else(missing)?;
        Ok(Some(Self { plan, hyper, unscale, outputs }))
    }

    /// Result of the last update that was read.
    fn update(&self) -> UpdateResult {
        let moved = self.outputs.gradients_are_finite() == Some(true);
        UpdateResult { norm: self.outputs.number(&OutputRole::GradientNorm), moved }
    }
}

/// An update is in flight whose plan is unknown.
fn no_update() -> RuntimeError {
    RuntimeError::bug("an update was submitted, but the program has no plan for it")
}

fn evaluation(program: &Program) -> Result<LossPlan, RuntimeError> {
    LossPlan::of(program, index(program, plans::EVALUATE)?, |_| false)
}

/// Index of the named plan.
fn index(program: &Program, name: &str) -> Result<usize, RuntimeError> {
    program.index(name).ok_or_else(|| RuntimeError::bug(format!("the training program has no plan `{name}`")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use plimsoll_graph::{Builder, DType, Dim};
    use plimsoll_plan::{Policy, Target, compile};

    #[test]
    fn a_program_without_its_plans_is_a_fault() {
        let target = Target::named("null").expect("read");
        let mut g = Builder::new(Bounds { tokens: 4, sequences: 1, longest: 4, packs: 1 });
        let x = g.input("x", &[Dim::Tokens(1), Dim::Fixed(2)], DType::F32);
        let y = g.gelu(x);
        g.output("y", y);
        let plan = compile(&g.finish().expect("verified"), &Policy::default(), &target).expect("planned");
        let program = |names: &[&str]| {
            let plans = names.iter().map(|name| ((*name).to_owned(), plan.clone())).collect();
            Program::new(target.clone(), plans, vec![])
        };
        let error = evaluation(&program(&[plans::MICRO])).err().expect("refused").to_string();
        assert!(error.contains("has no plan `evaluate`"), "{error}");
        let error = MicroStepPlan::all(&program(&[plans::EVALUATE])).err().expect("refused").to_string();
        assert!(error.contains("has no plan `micro-step`"), "{error}");
        let error = evaluation(&program(&[plans::EVALUATE])).err().expect("refused").to_string();
        assert!(error.contains("`evaluate` of a training program has no input `targets`"), "{error}");
    }
}
