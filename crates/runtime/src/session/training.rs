//! Training sessions: a model whose parameters and optimizer states stay on one device between steps. Invariant: a step
//! runs the plans of [`plimsoll_plan::Training`]; inputs and outputs are resolved from their names once, when the session
//! starts. Micro-steps and updates are submitted, and their results are read later, so that the device need not wait for
//! the host.

use super::admission::Site;
use super::batch::{Batch, BatchInputs, Inputs, lacks, targets};
use super::weights::load_training;
use crate::{Observer, RuntimeError};
use plimsoll_exec::{Copies, Data, Executor, PersistentKind, PersistentTensor, ReadShared, Submitted};
use plimsoll_graph::{Bounds, Bytes, Counts, DType, StateDef};
use plimsoll_plan::training::{average, master, plans};
use plimsoll_plan::{InputId, Location, OutputId, Program};
use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

/// A training program running on a device.
pub struct TrainSession {
    executor: Executor,
    /// Inputs and outputs of the micro-step plans, the largest first.
    micros: Vec<Micro>,
    /// Index of the plan that micro-steps run.
    micro: usize,
    /// The optimizer's update; `None` where a micro-step updates the weights itself.
    apply: Option<Apply>,
    /// The evaluation plan's inputs and outputs.
    evaluate: Forward,
    /// Submitted micro-steps and updates whose results have not been read from the device, the oldest first.
    in_flight: VecDeque<(Stage, Submitted)>,
    /// Results that were read from the device to make room for a further submission, the oldest first.
    results: VecDeque<StepResult>,
    /// Memory for the outputs of one micro-step or update, reused.
    outputs: [Vec<Vec<f32>>; 2],
    /// Memory for the frames of a batch, reused; empty for models without frames.
    frames: Vec<[i32; 2]>,
    /// Rows of the experts of micro-steps whose results are in `results`, the oldest first.
    waiting_rows: VecDeque<u32>,
    /// Rows of the experts of the micro-step whose result was returned last.
    expert_rows: Vec<u32>,
}

/// What was submitted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    MicroStep,
    Update,
}

/// Result of a submitted micro-step or update.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum StepResult {
    /// Result of a step submitted by [`TrainSession::submit_micro_step`].
    MicroStep(Losses),
    /// Result of an update submitted by [`TrainSession::submit_update`].
    Update(Update),
}

/// Scalar inputs of a micro-step.
#[derive(Clone, Copy, Debug)]
pub struct MicroStep<'a> {
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
pub struct Losses {
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
pub struct Update {
    /// Global norm of the gradient; `None` where the plan does not compute it.
    pub norm: Option<f64>,
    /// Whether every gradient was finite; otherwise no weight was updated.
    pub moved: bool,
}

/// A plan that computes the loss of a batch.
struct Forward {
    plan: usize,
    inputs: BatchInputs,
    cross_entropy: OutputId,
}

/// Plan of the forward and backward pass of a micro-batch. An input or output is `None` where the plan lacks it.
struct Micro {
    forward: Forward,
    loss_scale: Option<InputId>,
    auxiliary_scale: Option<InputId>,
    keep: Option<InputId>,
    unscale: Option<InputId>,
    hyper: Option<InputId>,
    seed: Option<InputId>,
    z: Option<OutputId>,
    distillation: Option<OutputId>,
    balance: Option<OutputId>,
    router_z: Option<OutputId>,
    /// Factor of the gradients, where the micro-step updates the weights; the factor is zero if a gradient was not
    /// finite.
    scale: Option<OutputId>,
    /// All outputs with their numbers of values: those above in their order, the cross-entropy first, then for each layer
    /// with experts the first row of each expert and the number of rows, then for each layer with a capacity the number of
    /// rows that its experts dropped.
    outputs: Vec<(OutputId, usize)>,
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
struct Apply {
    plan: usize,
    hyper: InputId,
    unscale: InputId,
    /// Whether the first output is the norm; the last is the factor of the gradients.
    has_norm: bool,
    outputs: Vec<(OutputId, usize)>,
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
        let micros = Micro::all(&program)?;
        let (apply, evaluate) = (Apply::of(&program)?, evaluation(&program)?);
        let of_update = apply.as_ref().map_or(0, |apply| apply.outputs.len());
        let outputs = [micros[0].outputs.len(), of_update].map(|n| vec![vec![]; n]);
        let largest = &micros[0].forward;
        let sequences = program.plans()[largest.plan].1.graph.bounds.sequences as usize;
        let frames = Vec::with_capacity(largest.inputs.frames_of_a_sequence() * sequences);
        let executor = site.start_one(program, observer)?;
        observer.stage("arena allocated", &site.reading());
        let (in_flight, results) =
            (VecDeque::with_capacity(executor.depth()), VecDeque::with_capacity(MOST_RESULTS));
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
            outputs,
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
                states.insert(state.name.as_str(), (state, *at));
            }
        }
        let copies_of = |PersistentTensor { what, at, .. }: &PersistentTensor| match what {
            PersistentKind::Param(param) => {
                let wanted = [master(&param.name), average(&param.name)];
                let place = |wanted: &StateDef| {
                    let (state, copy) = states.get(wanted.name.as_str())?;
                    (**state == *wanted).then_some(*copy)
                };
                Some((*at, wanted.each_ref().map(place)))
            }
            PersistentKind::State(_) => None,
        };
        let copies: BTreeMap<Location, Copies> = residents.iter().filter_map(copies_of).collect();
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
        let bytes = |k| match self.micros.len() {
            1 => self.program().arena_bytes(),
            _ => self.program().arena_bytes_from(k),
        };
        (0..self.micros.len()).map(|k| (self.plan_of(k).graph.bounds.tokens, bytes(k))).collect()
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
        match self.micros.len() {
            1 => self.program().arena_bytes(),
            _ => self.program().arena_bytes_from(self.micro),
        }
    }

    /// Waits for all submitted micro-steps and updates, and drops their results and errors.
    pub fn drop_submitted(&mut self) {
        while let Some((stage, step)) = self.in_flight.pop_front() {
            // The step is repeated, or the run ends with an earlier error.
            let _ = self.executor.collect(step, &mut self.outputs[stage as usize]);
        }
        self.results.clear();
        self.waiting_rows.clear();
    }

    /// Whether an update that failed may have changed parameters or states: its first instruction, which only reads
    /// gradients, was issued.
    pub fn has_begun_update(&self) -> bool {
        self.executor.issued() > 0
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
    pub fn submit_micro_step(&mut self, batch: Batch<'_>, step: MicroStep<'_>) -> Result<(), RuntimeError> {
        self.make_room()?;
        let scalars = Scalars::of(&step);
        let Self { executor, micros, micro, frames, .. } = self;
        let micro = &micros[*micro];
        let (inputs, counts) = micro.inputs(batch, &step, &scalars, frames)?;
        let submitted =
            inputs.with(|inputs| executor.submit(micro.forward.plan, inputs, counts, &micro.outputs))?;
        self.in_flight.push_back((Stage::MicroStep, submitted));
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
        let submitted = self.executor.submit(apply.plan, &inputs, counts, &apply.outputs)?;
        self.in_flight.push_back((Stage::Update, submitted));
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
            let there = self.waiting_rows.len().min(experts);
            self.expert_rows.extend(self.waiting_rows.drain(..there));
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
        match self.in_flight.is_empty() {
            true => Ok(()),
            false => Err(RuntimeError::bug("the results of submitted steps were not read")),
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
        let outputs = &mut self.outputs[stage as usize];
        self.executor.collect(step, outputs)?;
        Ok(match stage {
            Stage::MicroStep => {
                self.waiting_rows.extend(self.micros[0].expert_rows(outputs));
                StepResult::MicroStep(self.micros[0].losses(outputs)?)
            }
            Stage::Update => {
                let has_norm = self.apply.as_ref().is_some_and(|apply| apply.has_norm);
                let norm = has_norm.then(|| f64::from(outputs[0][0]));
                let moved = outputs.last().is_some_and(|scale| factor(scale) != 0.0);
                StepResult::Update(Update { norm, moved })
            }
        })
    }

    /// Runs a micro-step and adds the time of instruction `i` of [`TrainSession::micro_plan`] to `times[i]`. Timing makes the
    /// step slower.
    ///
    /// # Errors
    /// As [`TrainSession::submit_micro_step`]; a number of entries that is not the number of instructions; a step is in
    /// flight.
    pub fn timed_micro_step(
        &mut self,
        batch: Batch<'_>,
        step: MicroStep<'_>,
        times: &mut [Duration],
    ) -> Result<Losses, RuntimeError> {
        self.nothing_in_flight()?;
        let scalars = Scalars::of(&step);
        let Self { executor, micros, micro, outputs: [outputs, _], frames, .. } = self;
        let micro = &micros[*micro];
        let (inputs, counts) = micro.inputs(batch, &step, &scalars, frames)?;
        inputs.with(|inputs| {
            inputs.iter().try_for_each(|&(input, data)| match data {
                Data::F32(values) => executor.write_f32(input, values),
                Data::I32(values) => executor.write_i32(input, values),
            })
        })?;
        executor.run_timed(micro.forward.plan, counts, times)?;
        for (&(output, n), values) in micro.outputs.iter().zip(&mut *outputs) {
            values.resize(n, 0.0);
            executor.read_u8(output, bytemuck::cast_slice_mut(values))?;
        }
        micro.losses(outputs)
    }

    /// Computes the cross-entropy of a batch, summed over targets, without training.
    ///
    /// # Errors
    /// As [`TrainSession::submit_micro_step`]; a step is in flight.
    pub fn evaluate(&mut self, batch: Batch<'_>) -> Result<f64, RuntimeError> {
        self.nothing_in_flight()?;
        let Self { executor, evaluate, frames, .. } = self;
        let (inputs, counts) = evaluate.inputs.given(batch, frames)?;
        let wanted = [(evaluate.cross_entropy, 1)];
        let submitted = inputs.with(|inputs| executor.submit(evaluate.plan, inputs, counts, &wanted))?;
        let mut outputs = [vec![]];
        executor.collect(submitted, &mut outputs)?;
        Ok(f64::from(outputs[0][0]))
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

impl Forward {
    fn of(program: &Program, plan: usize) -> Result<Self, RuntimeError> {
        if targets(program, plan).is_empty() {
            return Err(lacks(program, plan, "input `targets`"));
        }
        let inputs = BatchInputs::of(program, plan)?;
        // A model that also minimizes a z-loss or a distillation loss has the cross-entropy as a separate output; otherwise
        // it is the whole loss.
        let output = |name: &str| program.output(plan, name);
        let cross_entropy = output("cross_entropy").or_else(|| output("loss"));
        let cross_entropy = cross_entropy.ok_or_else(|| lacks(program, plan, "output `loss`"))?;
        Ok(Self { plan, inputs, cross_entropy })
    }
}

/// Values of the scalar inputs of a micro-step that are computed from [`MicroStep`].
struct Scalars {
    keep: [f32; 1],
    loss_scale: [f32; 1],
    unscale: [f32; 1],
}

impl Scalars {
    fn of(step: &MicroStep<'_>) -> Self {
        let scale = step.loss_scale * step.targets as f32;
        Self { keep: [f32::from(u8::from(step.keep))], loss_scale: [step.loss_scale], unscale: [1.0 / scale] }
    }
}

impl Micro {
    /// The micro-steps of a program, the largest first.
    fn all(program: &Program) -> Result<Vec<Self>, RuntimeError> {
        let first = index(program, plans::MICRO)?;
        let smaller = program.alternatives().iter().copied().filter(|&plan| plan != first);
        std::iter::once(first).chain(smaller).map(|plan| Self::of(program, plan)).collect()
    }

    fn of(program: &Program, plan: usize) -> Result<Self, RuntimeError> {
        let input = |name: &str| program.input(plan, name);
        let output = |name: &str| program.output(plan, name);
        let graph = &program.plans()[plan].1.graph;
        // The integer outputs of a training graph are those of its experts, named after their layers.
        let of_experts = |prefix: &str| -> Vec<(u32, OutputId, usize)> {
            let integers = graph.outputs.iter().filter(|(_, value)| graph.spec(*value).dtype == DType::I32);
            let mut found: Vec<_> = integers
                .filter_map(|(name, value)| {
                    let layer = name.strip_prefix(prefix)?.parse().ok()?;
                    let values = graph.spec(*value).shape.iter().filter_map(|dim| dim.fixed()).product::<u64>();
                    Some((layer, OutputId { plan, value: *value }, values as usize))
                })
                .collect();
            found.sort_by_key(|(layer, ..)| *layer);
            found
        };
        let (loads, dropped) = (of_experts("load."), of_experts("dropped."));
        let expert_layers =
            loads.iter().map(|&(layer, _, values)| ExpertLayer { layer, experts: values.saturating_sub(1) });
        let expert_layers = expert_layers.collect();
        let scale = match program.index(plans::APPLY) {
            Some(_) => None,
            None => {
                let missing = || RuntimeError::bug("a micro-step that moves the weights has no output `scale`");
                Some(output("scale").ok_or_else(missing)?)
            }
        };
        let forward = Forward::of(program, plan)?;
        let [z, distillation, balance, router_z] =
            ["z_loss", "distillation_loss", "balance_loss", "router_z_loss"].map(output);
        let one = |id: OutputId| (id, 1);
        let outputs = std::iter::once(one(forward.cross_entropy))
            .chain([z, distillation, balance, router_z].into_iter().flatten().map(one))
            .chain(scale.map(|id| (id, 2)))
            .chain(loads.into_iter().chain(dropped).map(|(_, id, values)| (id, values)))
            .collect();
        Ok(Self {
            forward,
            loss_scale: input("d loss"),
            auxiliary_scale: input("d aux"),
            keep: input("keep"),
            unscale: input("unscale"),
            hyper: input("hyper"),
            seed: input("seed"),
            z,
            distillation,
            balance,
            router_z,
            scale,
            outputs,
            expert_layers,
        })
    }

    /// All inputs of a micro-step with their values, and the batch's numbers of tokens, sequences and packs.
    fn inputs<'a>(
        &self,
        batch: Batch<'a>,
        step: &'a MicroStep<'a>,
        scalars: &'a Scalars,
        frames: &'a mut Vec<[i32; 2]>,
    ) -> Result<(Inputs<'a>, Counts), RuntimeError> {
        let (mut inputs, counts) = self.forward.inputs.given(batch, frames)?;
        inputs.add(self.loss_scale, Data::F32(&scalars.loss_scale))?;
        inputs.add(self.auxiliary_scale, Data::F32(&scalars.loss_scale))?;
        inputs.add(self.keep, Data::F32(&scalars.keep))?;
        inputs.add(self.unscale, Data::F32(&scalars.unscale))?;
        inputs.add(self.hyper, Data::F32(step.hyper))?;
        inputs.add(self.seed, Data::I32(&step.seed))?;
        Ok((inputs, counts))
    }

    /// The number of rows of each expert, layer by layer, from the values of all outputs.
    fn expert_rows<'a>(&self, outputs: &'a [Vec<f32>]) -> impl Iterator<Item = u32> + use<'a> {
        let optional = [self.z, self.distillation, self.balance, self.router_z, self.scale];
        let before = 1 + optional.into_iter().flatten().count();
        let layers = outputs.iter().skip(before).take(self.expert_layers.len());
        layers.flat_map(|offsets| {
            offsets.windows(2).map(|pair| integer(pair[1]).saturating_sub(integer(pair[0])))
        })
    }

    /// The losses from the values of all outputs.
    fn losses(&self, outputs: &[Vec<f32>]) -> Result<Losses, RuntimeError> {
        let mut rest = outputs.iter();
        let mut next_if = |requested: bool| requested.then(|| rest.next()).flatten();
        let missing = || RuntimeError::bug("a micro-step has fewer outputs than were asked for");
        let cross_entropy = f64::from(next_if(true).ok_or_else(missing)?[0]);
        let mut optional =
            |output: Option<OutputId>| next_if(output.is_some()).map(|values| f64::from(values[0]));
        let (z, distillation) = (optional(self.z), optional(self.distillation));
        let (balance, router_z) = (optional(self.balance), optional(self.router_z));
        let moved =
            next_if(self.scale.is_some()).map(|scale| cross_entropy.is_finite() && factor(scale) != 0.0);
        let dropped = rest.skip(self.expert_layers.len()).map(|rows| u64::from(integer(rows[0]))).sum();
        Ok(Losses { cross_entropy, z, distillation, balance, router_z, dropped, moved })
    }
}

/// The value of an i32 output, which is returned as f32 with the same bits.
fn integer(bits: f32) -> u32 {
    (bits.to_bits() as i32).max(0) as u32
}

impl Apply {
    fn of(program: &Program) -> Result<Option<Self>, RuntimeError> {
        let Some(plan) = program.index(plans::APPLY) else { return Ok(None) };
        let missing = || RuntimeError::bug("the plan of an update lacks an input or an output");
        let input = |name: &str| program.input(plan, name).ok_or_else(missing);
        let output = |name: &str| program.output(plan, name);
        let (norm, scale) = (output("norm"), output("scale").ok_or_else(missing)?);
        let outputs = norm.map(|id| (id, 1)).into_iter().chain([(scale, 2)]).collect();
        let (hyper, unscale) = (input("hyper")?, input("unscale")?);
        Ok(Some(Self { plan, hyper, unscale, has_norm: norm.is_some(), outputs }))
    }
}

fn evaluation(program: &Program) -> Result<Forward, RuntimeError> {
    Forward::of(program, index(program, plans::EVALUATE)?)
}

/// Index of the named plan.
fn index(program: &Program, name: &str) -> Result<usize, RuntimeError> {
    let missing = || RuntimeError::bug(format!("the training program has no plan `{name}`"));
    program.index(name).ok_or_else(missing)
}

/// Factor of the gradients, the second element of the output `scale`; zero if a gradient was not finite.
fn factor(scale: &[f32]) -> f32 {
    scale.get(1).copied().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use plimsoll_graph::{Builder, Dim};
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
        let error = Micro::all(&program(&[plans::EVALUATE])).err().expect("refused").to_string();
        assert!(error.contains("has no plan `micro-step`"), "{error}");
        let error = evaluation(&program(&[plans::EVALUATE])).err().expect("refused").to_string();
        assert!(error.contains("`evaluate` of a training program has no input `targets`"), "{error}");
    }
}
