//! Training sessions: a model whose parameters and optimizer states stay on one device between steps. Invariant: a step
//! runs the plans of [`plimsoll_plan::Training`]; inputs and outputs are resolved from their names once, when the session
//! starts.

use super::admission::Site;
use super::weights::load_training;
use crate::{Observer, RuntimeError};
use plimsoll_exec::{Executor, PersistentKind, PersistentTensor, ReadShared};
use plimsoll_graph::{Bounds, Counts, DType};
use plimsoll_plan::training::{master, plans};
use plimsoll_plan::{InputId, OutputId, Program};
use std::collections::BTreeMap;
use std::time::Duration;

/// A training program running on a device.
pub struct TrainSession {
    executor: Executor,
    /// The micro-step plan's inputs and outputs.
    micro: Micro,
    /// The optimizer's update; `None` where a micro-step updates the weights itself.
    apply: Option<Apply>,
    /// The evaluation plan's inputs and outputs.
    evaluate: Forward,
}

/// Inputs of a micro-batch.
#[derive(Clone, Copy, Debug)]
pub enum Batch<'a> {
    /// Sequences of tokens, packed end to end.
    Tokens {
        /// Token ids: (T).
        ids: &'a [i32],
        /// Start and end of each sequence: (S, 2).
        spans: &'a [[i32; 2]],
        /// The id to predict at each token, or the class of each sequence; -1 for none.
        targets: &'a [i32],
    },
    /// Rows of precomputed embeddings.
    Rows {
        /// The nucleotide and the protein embeddings: (R, D) each.
        parts: &'a [Vec<f32>],
        /// The class of each row: (R).
        targets: &'a [i32],
    },
}

/// Scalar inputs of a micro-step.
#[derive(Clone, Copy, Debug)]
pub struct MicroStep<'a> {
    /// Whether gradients are added to the sum of the earlier micro-steps; otherwise a new sum starts.
    pub keep: bool,
    /// Loss scale, which keeps 16-bit gradients from underflowing.
    pub loss_scale: f32,
    /// Number of targets in the micro-batch.
    pub targets: u64,
    /// Learning rate and optimizer corrections, for a micro-step that updates the weights itself.
    pub hyper: &'a [f32],
    /// Counter of dropout's random generator: the run's seed and the number of this micro-step.
    pub seed: [i32; 2],
}

/// Losses of a micro-step.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Losses {
    /// Cross-entropy, summed over targets.
    pub cross_entropy: f64,
    /// Z-loss of the output logits, summed over targets.
    pub z: Option<f64>,
    /// Load-balancing loss of the routers.
    pub balance: Option<f64>,
    /// Z-loss of the router logits.
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
    /// Whether the weights were updated, that is, whether every gradient was finite.
    pub moved: bool,
}

/// A plan that computes the loss of a batch.
struct Forward {
    plan: usize,
    inputs: BatchInputs,
    cross_entropy: OutputId,
}

/// Batch inputs of a plan.
enum BatchInputs {
    Tokens { ids: InputId, spans: InputId, targets: InputId },
    Rows { parts: Vec<InputId>, targets: InputId },
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
    balance: Option<OutputId>,
    router_z: Option<OutputId>,
    /// For each layer with experts, the number of rows that the experts dropped.
    dropped: Vec<OutputId>,
    /// Factor of the gradients, where the micro-step updates the weights; the factor is zero if a gradient was not
    /// finite.
    scale: Option<OutputId>,
}

/// Plan of the optimizer's update.
struct Apply {
    plan: usize,
    hyper: InputId,
    unscale: InputId,
    norm: Option<OutputId>,
    scale: OutputId,
}

impl TrainSession {
    /// Starts a program of [`plimsoll_plan::Training`]: initializes the states, and writes the values read by `source` to the
    /// parameters and to their master copies. Reports the progress to `observer`.
    ///
    /// # Errors
    /// Too little free memory, errors of the device or of `source`, or a program that lacks a training plan.
    pub fn start(
        site: &Site,
        program: Program,
        source: ReadShared<'_>,
        observer: &mut dyn Observer,
    ) -> Result<Self, RuntimeError> {
        let (micro, apply, evaluate) = (Micro::of(&program)?, Apply::of(&program)?, evaluation(&program)?);
        let mut session = Self { executor: site.start_one(program, observer)?, micro, apply, evaluate };
        session.load(source, observer)?;
        Ok(session)
    }

    /// Initializes the states, then loads the parameters together with their master copies, which are f32.
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
        let copy = |PersistentTensor { what, at, .. }: &PersistentTensor| match what {
            PersistentKind::Param(param) => {
                let wanted = master(&param.name);
                let (state, copy) = states.get(wanted.name.as_str())?;
                (**state == wanted).then_some((*at, *copy))
            }
            PersistentKind::State(_) => None,
        };
        let copies: BTreeMap<u64, u64> = residents.iter().filter_map(copy).collect();
        load_training(executor, &copies, source, observer)
    }

    /// The program that the device runs.
    pub fn program(&self) -> &Program {
        self.executor.program()
    }

    /// The plan of a micro-step.
    pub fn micro_plan(&self) -> &plimsoll_plan::Plan {
        &self.program().plans()[self.micro.forward.plan].1
    }

    /// The bounds of a micro-batch.
    pub fn bounds(&self) -> Bounds {
        self.micro_plan().graph.bounds
    }

    /// Computes the losses and gradients of a micro-batch.
    ///
    /// # Errors
    /// A batch of the wrong kind or larger than the plan's bounds; device errors.
    pub fn micro_step(&mut self, batch: Batch<'_>, step: MicroStep<'_>) -> Result<Losses, RuntimeError> {
        self.timed_micro_step(batch, step, None)
    }

    /// As [`TrainSession::micro_step`]; also adds the time of instruction `i` of [`TrainSession::micro_plan`] to
    /// `times[i]`. Timing makes the step slower.
    ///
    /// # Errors
    /// As [`TrainSession::micro_step`], and a number of entries that is not the number of instructions.
    pub fn timed_micro_step(
        &mut self,
        batch: Batch<'_>,
        step: MicroStep<'_>,
        times: Option<&mut [Duration]>,
    ) -> Result<Losses, RuntimeError> {
        let Self { executor, micro, .. } = self;
        let counts = micro.forward.write(executor, batch)?;
        let targets = step.targets as f32;
        let (keep, auxiliary) = ([f32::from(u8::from(step.keep))], [step.loss_scale * targets]);
        let (loss_scale, unscale) = ([step.loss_scale], [1.0 / (step.loss_scale * targets)]);
        for (input, values) in [
            (micro.loss_scale, &loss_scale[..]),
            (micro.auxiliary_scale, &auxiliary),
            (micro.keep, &keep),
            (micro.unscale, &unscale),
            (micro.hyper, step.hyper),
        ] {
            if let Some(input) = input {
                executor.write_f32(input, values)?;
            }
        }
        if let Some(input) = micro.seed {
            executor.write_i32(input, &step.seed)?;
        }
        match times {
            None => executor.run(micro.forward.plan, counts)?,
            Some(times) => executor.run_timed(micro.forward.plan, counts, times)?,
        }
        let cross_entropy = scalar(executor, micro.forward.cross_entropy)?;
        let mut optional = |output: Option<OutputId>| output.map(|id| scalar(executor, id)).transpose();
        let (z, balance) = (optional(micro.z)?, optional(micro.balance)?);
        let router_z = optional(micro.router_z)?;
        let moved = match micro.scale {
            Some(scale) => Some(cross_entropy.is_finite() && moved(executor, scale)?),
            None => None,
        };
        let mut dropped = 0;
        for &counter in &micro.dropped {
            let mut rows = [0];
            executor.read_i32(counter, &mut rows)?;
            dropped += rows[0].max(0) as u64;
        }
        Ok(Losses { cross_entropy, z, balance, router_z, dropped, moved })
    }

    /// Updates the weights with the gradient sum times `unscale`, unless a gradient is not finite. Returns `None` where
    /// the micro-steps update the weights themselves.
    ///
    /// # Errors
    /// Device errors.
    pub fn apply(&mut self, hyper: &[f32], unscale: f32) -> Result<Option<Update>, RuntimeError> {
        let Self { executor, apply: Some(apply), .. } = self else { return Ok(None) };
        executor.write_f32(apply.hyper, hyper)?;
        executor.write_f32(apply.unscale, &[unscale])?;
        executor.run(apply.plan, Counts { tokens: 0, sequences: 0 })?;
        let norm = apply.norm.map(|output| scalar(executor, output)).transpose()?;
        Ok(Some(Update { norm, moved: moved(executor, apply.scale)? }))
    }

    /// Computes the cross-entropy of a batch, summed over targets, without training.
    ///
    /// # Errors
    /// As [`TrainSession::micro_step`].
    pub fn evaluate(&mut self, batch: Batch<'_>) -> Result<f64, RuntimeError> {
        let Self { executor, evaluate, .. } = self;
        let counts = evaluate.write(executor, batch)?;
        executor.run(evaluate.plan, counts)?;
        scalar(executor, evaluate.cross_entropy)
    }

    /// The persistent tensors (parameters and states), with their addresses for [`TrainSession::read`] and
    /// [`TrainSession::write`].
    pub fn residents(&self) -> Vec<PersistentTensor> {
        self.executor.persistent_tensors()
    }

    /// Reads bytes of a persistent tensor from address `at`.
    pub fn read(&mut self, at: u64, out: &mut [u8]) -> Result<(), RuntimeError> {
        Ok(self.executor.download(at, out)?)
    }

    /// Writes bytes of a persistent tensor at address `at`.
    pub fn write(&mut self, at: u64, bytes: &[u8]) -> Result<(), RuntimeError> {
        Ok(self.executor.upload(at, bytes)?)
    }
}

impl Forward {
    fn of(program: &Program, plan: usize) -> Result<Self, RuntimeError> {
        let input = |name: &str| program.input(plan, name);
        let lacks = |what: &str| {
            let name = &program.plans()[plan].0;
            RuntimeError::bug(format!("the plan `{name}` of a training program has no {what}"))
        };
        let targets = input("targets").ok_or_else(|| lacks("input `targets`"))?;
        let inputs = match (input("ids"), input("spans")) {
            (Some(ids), Some(spans)) => BatchInputs::Tokens { ids, spans, targets },
            (Some(_) | None, _) => {
                let parts = ["dna", "protein"].map(|name| input(name).ok_or_else(|| lacks("input of rows")));
                BatchInputs::Rows { parts: parts.into_iter().collect::<Result<_, _>>()?, targets }
            }
        };
        // A model that also minimizes a z-loss has the cross-entropy as a separate output; otherwise it is the whole
        // loss.
        let output = |name: &str| program.output(plan, name);
        let cross_entropy = output("cross_entropy").or_else(|| output("loss"));
        Ok(Self { plan, inputs, cross_entropy: cross_entropy.ok_or_else(|| lacks("output `loss`"))? })
    }

    /// Writes a batch to the plan's inputs; returns the batch's numbers of tokens and sequences.
    fn write(&self, executor: &mut Executor, batch: Batch<'_>) -> Result<Counts, RuntimeError> {
        match (&self.inputs, batch) {
            (&BatchInputs::Tokens { ids, spans, targets }, Batch::Tokens { ids: i, spans: s, targets: t }) => {
                executor.write_i32(ids, i)?;
                executor.write_i32(spans, s.as_flattened())?;
                executor.write_i32(targets, t)?;
                Ok(Counts { tokens: i.len() as u64, sequences: s.len() as u64 })
            }
            (BatchInputs::Rows { parts, targets }, Batch::Rows { parts: rows, targets: t }) => {
                for (&part, rows) in parts.iter().zip(rows) {
                    executor.write_f32(part, rows)?;
                }
                executor.write_i32(*targets, t)?;
                Ok(Counts { tokens: t.len() as u64, sequences: t.len() as u64 })
            }
            (BatchInputs::Tokens { .. }, Batch::Rows { .. })
            | (BatchInputs::Rows { .. }, Batch::Tokens { .. }) => {
                Err(RuntimeError::bug("a batch is not of the kind that the model takes"))
            }
        }
    }
}

impl Micro {
    fn of(program: &Program) -> Result<Self, RuntimeError> {
        let plan = index(program, plans::MICRO)?;
        let input = |name: &str| program.input(plan, name);
        let output = |name: &str| program.output(plan, name);
        let graph = &program.plans()[plan].1.graph;
        // Rows dropped by experts are the only integer outputs of a training graph.
        let counters = graph.outputs.iter().filter(|(_, value)| graph.spec(*value).dtype == DType::I32);
        let scale = match program.index(plans::APPLY) {
            Some(_) => None,
            None => {
                let missing = || RuntimeError::bug("a micro-step that moves the weights has no output `scale`");
                Some(output("scale").ok_or_else(missing)?)
            }
        };
        Ok(Self {
            forward: Forward::of(program, plan)?,
            loss_scale: input("d loss"),
            auxiliary_scale: input("d aux"),
            keep: input("keep"),
            unscale: input("unscale"),
            hyper: input("hyper"),
            seed: input("seed"),
            z: output("z_loss"),
            balance: output("balance_loss"),
            router_z: output("router_z_loss"),
            dropped: counters.map(|&(_, value)| OutputId { plan, value }).collect(),
            scale,
        })
    }
}

impl Apply {
    fn of(program: &Program) -> Result<Option<Self>, RuntimeError> {
        let Some(plan) = program.index(plans::APPLY) else { return Ok(None) };
        let missing = || RuntimeError::bug("the plan of an update lacks an input or an output");
        let input = |name: &str| program.input(plan, name).ok_or_else(missing);
        let output = |name: &str| program.output(plan, name);
        let scale = output("scale").ok_or_else(missing)?;
        Ok(Some(Self { plan, hyper: input("hyper")?, unscale: input("unscale")?, norm: output("norm"), scale }))
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

/// Reads an output of one f32.
fn scalar(executor: &mut Executor, output: OutputId) -> Result<f64, RuntimeError> {
    let mut value = [0f32];
    executor.read_f32(output, &mut value)?;
    Ok(f64::from(value[0]))
}

/// Whether an update changed the weights: its gradient factor, the second element, is not zero.
fn moved(executor: &mut Executor, scale: OutputId) -> Result<bool, RuntimeError> {
    let mut scale_and_factor = [0f32; 2];
    executor.read_f32(scale, &mut scale_and_factor)?;
    Ok(scale_and_factor[1] != 0.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use plimsoll_graph::{Builder, Dim};
    use plimsoll_plan::{Policy, Target, compile};

    #[test]
    fn a_program_without_its_plans_is_a_fault() {
        let target = Target::named("null").expect("read");
        let mut g = Builder::new(Bounds { tokens: 4, sequences: 1, longest: 4 });
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
        let error = Micro::of(&program(&[plans::EVALUATE])).err().expect("refused").to_string();
        assert!(error.contains("has no plan `micro-step`"), "{error}");
        let error = evaluation(&program(&[plans::EVALUATE])).err().expect("refused").to_string();
        assert!(error.contains("`evaluate` of a training program has no input `targets`"), "{error}");
    }
}
