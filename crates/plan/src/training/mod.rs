//! A model and how it is trained, as plans over one set of parameters and states: the micro-step, the step of the
//! optimizer, and evaluation. Invariant: the three share their persistent region, so that the peak of the program
//! covers all that a run ever does.

mod frontier;
mod layers;
mod search;

pub use frontier::{Frontier, LayerWay, Solver};
pub use search::{Candidate, Found, Rejected, RematChoice, TrainingSearch};

use crate::compile::compile_owned;
use crate::passes::{Precision, Remat, dce, differentiate, precision};
use crate::{Persistent, Plan, PlanError, Policy, Program, Target, Weights};
use graph::ops::{Accumulate, Adafactor, AdamW, AdamW8bit, BLOCK, Cast, GradScale, Sgd};
use graph::{Builder, DType, Dim, Graph, Op, Param, Phase, Role, State, StateKind, TensorSpec, ValueId};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Names of the plans of a training program.
pub mod plans {
    /// Forward and backward of a micro-batch.
    pub const MICRO: &str = "micro-step";
    /// The step of the optimizer.
    pub const APPLY: &str = "apply";
    /// The loss of a batch.
    pub const EVALUATE: &str = "evaluate";
}

/// How a model is trained. The graph is given with it: one with an output `loss` and perhaps `aux`.
pub struct Training<'a> {
    /// Element type of weights and activations.
    pub precision: Precision,
    /// What is computed twice in place of being kept.
    pub remat: Remat,
    /// What makes a step of gradients.
    pub optimizer: Optimizer,
    /// How a parameter is trained.
    pub group: &'a dyn Fn(&Param) -> Group,
    /// Micro-batches of a step.
    pub accumulation: u64,
    /// The largest global norm of a gradient; 0 is no clip.
    pub max_norm: f32,
}

/// How a parameter is trained.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Group {
    /// Not at all.
    Frozen,
    /// With weight decay.
    Decay,
    /// Without.
    NoDecay,
}

/// What makes a step of gradients, with what does not change from step to step.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Optimizer {
    /// Two moments of f32.
    AdamW(AdamW),
    /// Two moments of 8 bits where a parameter has at least 4096 elements.
    AdamW8bit(AdamW),
    /// Squared gradients by row and column.
    Adafactor(Adafactor),
    /// A momentum, or nothing.
    Sgd(Sgd),
}

/// Smaller parameters keep moments of f32: their bytes do not matter (Dettmers et al. 2022).
const EIGHT_BIT_FLOOR: u64 = 4096;

/// What an optimizer keeps of a parameter: its name, shape and element type.
type StateOf = (&'static str, Vec<Dim>, DType);

impl Optimizer {
    /// Elements of the input `hyper`.
    pub fn hyper(&self) -> u64 {
        match self {
            Self::AdamW(_) | Self::AdamW8bit(_) => 3,
            Self::Adafactor(_) => 2,
            Self::Sgd(_) => 1,
        }
    }

    /// The same with another weight decay.
    fn with_decay(self, decay: bool) -> Self {
        if decay {
            return self;
        }
        match self {
            Self::AdamW(op) => Self::AdamW(AdamW { weight_decay: 0.0, ..op }),
            Self::AdamW8bit(op) => Self::AdamW8bit(AdamW { weight_decay: 0.0, ..op }),
            Self::Adafactor(op) => Self::Adafactor(Adafactor { weight_decay: 0.0, ..op }),
            Self::Sgd(op) => Self::Sgd(Sgd { weight_decay: 0.0, ..op }),
        }
    }

    /// The op for a parameter, and its states: (name, shape, element type).
    fn of(self, p: &TensorSpec) -> (Op, Vec<StateOf>) {
        let elements: u64 = p.shape.iter().filter_map(|d| d.fixed()).product();
        let like = |name| (name, p.shape.clone(), DType::F32);
        match self {
            Self::AdamW8bit(adamw) if elements >= EIGHT_BIT_FLOOR => {
                let codes = |name| (name, p.shape.clone(), DType::U8);
                let scales = |name| (name, vec![Dim::Fixed(elements.div_ceil(BLOCK))], DType::F32);
                let states = vec![codes("m"), scales("m_absmax"), codes("v"), scales("v_absmax")];
                (Op::AdamW8bit(AdamW8bit { adamw }), states)
            }
            Self::AdamW(adamw) | Self::AdamW8bit(adamw) => (Op::AdamW(adamw), vec![like("m"), like("v")]),
            Self::Adafactor(op) => match p.shape[..] {
                [r, c] => {
                    let states = vec![("row", vec![r], DType::F32), ("column", vec![c], DType::F32)];
                    (Op::Adafactor(op), states)
                }
                _ => (Op::Adafactor(op), vec![like("v")]),
            },
            Self::Sgd(op) if op.momentum == 0.0 => (Op::Sgd(op), vec![]),
            Self::Sgd(op) => (Op::Sgd(op), vec![like("momentum")]),
        }
    }
}

impl Training<'_> {
    /// Whether each gradient is used up right behind its node, in the micro-step itself, so that gradients never
    /// live together. A clip needs all of them, more micro-batches their sums, and a scaled loss a look at all.
    pub fn steps_at_once(&self) -> bool {
        self.accumulation == 1 && self.max_norm == 0.0 && self.precision != Precision::Fp16
    }

    /// The program: `forward` at the bounds of a micro-batch, `evaluation` at those of an evaluation batch.
    pub fn program(&self, forward: &Graph, evaluation: &Graph, target: &Target) -> Result<Program, PlanError> {
        let micro = self.micro_step(forward)?;
        self.program_of(micro, &self.remat, evaluation, target)
    }

    /// The program of a micro-step that [`Training::micro_step`] built, under another choice of what is recomputed.
    pub fn program_of(
        &self,
        micro: Graph,
        remat: &Remat,
        evaluation: &Graph,
        target: &Target,
    ) -> Result<Program, PlanError> {
        let mut persistent = Persistent::new();
        let mut plan = |graph: Graph, remat: &Remat| {
            compile_owned(graph, &policy(remat), target, &mut persistent, &mut |_, _| {})
        };
        let apply = self.apply(&micro)?.map(|graph| plan(graph, &Remat::None)).transpose()?;
        let evaluate = plan(precision(evaluation, self.precision)?, &Remat::None)?;
        let micro = plan(micro, remat)?;
        let named = |name: &str, plan: Plan| (name.to_owned(), plan);
        let after =
            apply.map(|plan| named(plans::APPLY, plan)).into_iter().chain([named(plans::EVALUATE, evaluate)]);
        let plans = std::iter::once(named(plans::MICRO, micro)).chain(after).collect();
        Ok(Program::sharing(target.clone(), plans))
    }

    /// Forward and backward, and what becomes of the gradients: states that are added up, or at once a step. Without
    /// what nobody reads, such as gradients of what is frozen, so that what keeps a value alive is a reader.
    pub fn micro_step(&self, forward: &Graph) -> Result<Graph, PlanError> {
        if !matches!(self.precision, Precision::F32 | Precision::Bf16 | Precision::Fp16) {
            let why = format!("{:?} is for inference; training takes f32, bf16 or fp16", self.precision);
            return Err(PlanError::BadPolicy { field: "precision", why });
        }
        let graph = precision(forward, self.precision)?;
        let outputs: Vec<String> =
            ["loss", "aux"].iter().filter(|n| graph.output(n).is_some()).map(|n| (*n).to_owned()).collect();
        let trained = |param: &Param| (self.group)(param) != Group::Frozen;
        let mut common: Option<Common> = None;
        // Where each gradient is used up at once: the scale that guarded the last update, and its norm.
        let mut guard: Option<[ValueId; 2]> = None;
        let mut sink = |g: &mut Builder, p: ValueId, grad: ValueId| {
            let common = *common.get_or_insert_with(|| self.common(g));
            let Role::Param(id) = g.graph().spec(p).role else { return };
            g.in_phase(Phase::Update);
            self.use_up(g, &graph.params[id.index()], p, grad, common, &mut guard);
            g.in_phase(Phase::Backward);
        };
        let mut builder = differentiate(&graph, &outputs, &trained, &mut sink)?;
        if let Some([scale, _]) = guard {
            builder.output("scale", scale);
        }
        if common.is_none() {
            let why = "no parameter is trained: all are frozen".to_owned();
            return Err(PlanError::BadPolicy { field: "group", why });
        }
        let graph = builder.finish().map_err(|source| PlanError::Verify { after: "training", source })?;
        Ok(dce(&graph))
    }

    /// Inputs that every gradient needs.
    fn common(&self, g: &mut Builder) -> Common {
        let mut scalars = |name, n| g.input(name, &[Dim::Fixed(n)], DType::F32);
        match (self.steps_at_once(), self.accumulation) {
            (true, _) => {
                Common::Step { unscale: scalars("unscale", 1), hyper: scalars("hyper", self.optimizer.hyper()) }
            }
            (false, 1) => Common::Keep,
            (false, _) => Common::Add { keep: scalars("keep", 1) },
        }
    }

    fn use_up(
        &self,
        g: &mut Builder,
        param: &Param,
        p: ValueId,
        grad: ValueId,
        common: Common,
        guard: &mut Option<[ValueId; 2]>,
    ) {
        let shape = g.graph().spec(p).shape.clone();
        match common {
            Common::Step { unscale, hyper } => {
                // The norm of the gradient before is one more operand: where one gradient is not finite, neither this
                // parameter nor any that follows moves. The factor is `unscale` whatever the norms, without a clip.
                let norm = guard.map(|[_, norm]| norm);
                let inputs: Vec<ValueId> = [grad].into_iter().chain(norm).chain([unscale]).collect();
                let outs = g.node(Op::GradScale(GradScale { max_norm: 0.0 }), &inputs);
                if let [scale, norm] = outs[..] {
                    *guard = Some([scale, norm]);
                    self.step(g, param, p, grad, scale, hyper);
                }
            }
            Common::Keep => {
                let dtype = g.graph().spec(grad).dtype;
                let state = g.state(gradient(&param.name), &shape, dtype);
                g.update(state, grad);
            }
            Common::Add { keep } => {
                let state = g.state(gradient(&param.name), &shape, DType::F32);
                let sum = g.one(Op::Accumulate(Accumulate {}), &[state, grad, keep]);
                g.update(state, sum);
            }
        }
    }

    /// The step of the optimizer over the gradients that micro-steps left; none where each is used up at once.
    fn apply(&self, micro: &Graph) -> Result<Option<Graph>, PlanError> {
        if self.steps_at_once() {
            return Ok(None);
        }
        let g = &mut Builder::from_graph(Graph::new(micro.bounds), Phase::Update);
        let unscale = g.input("unscale", &[Dim::Fixed(1)], DType::F32);
        let hyper = g.input("hyper", &[Dim::Fixed(self.optimizer.hyper())], DType::F32);
        let grads: BTreeMap<&str, ValueId> = micro.state_values().map(|(v, _, s)| (&*s.name, v)).collect();
        let mut pairs = vec![];
        for (v, _, param) in micro.param_values() {
            let wanted = gradient(&param.name);
            let Some(&grad) = grads.get(&*wanted.name) else { continue };
            let spec = micro.spec(grad);
            let grad = g.state(wanted, &spec.shape, spec.dtype);
            pairs.push((g.param_of(param.clone(), micro.spec(v).dtype), param, grad));
        }
        let inputs: Vec<ValueId> = pairs.iter().map(|(.., grad)| *grad).chain([unscale]).collect();
        let scale = g.node(Op::GradScale(GradScale { max_norm: self.max_norm }), &inputs);
        g.output("scale", scale[0]);
        g.output("norm", scale[1]);
        for (p, param, grad) in pairs {
            self.step(g, param, p, grad, scale[0], hyper);
        }
        let built = std::mem::replace(g, Builder::new(micro.bounds)).finish();
        built.map(Some).map_err(|source| PlanError::Verify { after: "apply", source })
    }

    /// The step of one parameter, of its f32 master where it has 16 bits.
    fn step(&self, g: &mut Builder, param: &Param, p: ValueId, grad: ValueId, scale: ValueId, hyper: ValueId) {
        let name = &param.name;
        let spec = g.graph().spec(p).clone();
        let (op, states) = self.optimizer.with_decay((self.group)(param) == Group::Decay).of(&spec);
        let master = match spec.dtype {
            DType::F32 => p,
            DType::Bf16 | DType::F16 | DType::F8 | DType::I8 | DType::I32 | DType::U8 => {
                g.state(master(name), &spec.shape, DType::F32)
            }
        };
        let states: Vec<ValueId> = states
            .into_iter()
            .map(|(what, shape, dtype)| {
                g.state(state(format!("{what} {name}"), StateKind::Optimizer), &shape, dtype)
            })
            .collect();
        let inputs: Vec<ValueId> = [&[master, grad], &states[..], &[scale, hyper]].concat();
        let outs = g.node(op, &inputs);
        g.update(master, outs[0]);
        for (&state, &new) in states.iter().zip(&outs[1..]) {
            g.update(state, new);
        }
        if master != p {
            let narrow = g.one(Op::Cast(Cast { to: spec.dtype }), &[outs[0]]);
            g.update(p, narrow);
        }
    }
}

/// How the graphs of training are planned.
fn policy(remat: &Remat) -> Policy {
    Policy { weights: Weights::Trained, remat: remat.clone(), ..Policy::default() }
}

/// What becomes of a gradient.
#[derive(Clone, Copy)]
enum Common {
    /// The optimizer's step follows it.
    Step { unscale: ValueId, hyper: ValueId },
    /// It is kept for the step of all.
    Keep,
    /// It is added to those of earlier micro-batches.
    Add { keep: ValueId },
}

/// What a gradient is kept in: its own element type where one micro-batch makes a step, f32 where several are
/// added up.
fn gradient(name: &str) -> State {
    state(format!("grad {name}"), StateKind::Gradient)
}

/// The f32 copy of the parameter `name` of 16 bits, which the optimizer moves.
pub fn master(name: &str) -> State {
    state(format!("master {name}"), StateKind::Master)
}

fn state(name: String, kind: StateKind) -> State {
    State { name, kind, init: 0.0 }
}
