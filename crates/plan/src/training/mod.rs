//! Training program of a model: the micro-step, the optimizer step and the evaluation, as plans that share
//! parameters and states. Invariant: the three plans share one persistent region, so the peak of the program
//! bounds the memory of the whole training run.

mod frontier;
mod layers;
mod search;

pub use frontier::{Frontier, LayerChoiceId, Solver};
pub use search::{Candidate, RejectedCandidate, RematChoice, TrainingChoice, TrainingSearch};

use crate::compile::{compile_owned, has_matmuls};
use crate::passes::{RecomputePolicy, dce, differentiate, operands, precision, push_node};
use crate::{
    ActivationOffload, Fuse, Offload, Persistent, Plan, PlanError, Policy, Precision, PrecisionPolicy, Program,
    Target, Weights, Window,
};
use plimsoll_graph::ops::{
    Accumulate, Adafactor, AdamW, AdamW8bit, BLOCK, Cast, CountSteps, Ema, GradScale, OperandFormat, Sgd,
};
use plimsoll_graph::{
    Builder, Bytes, DType, Def, Dim, Graph, Moment, Node, Op, OutputRole, Param, Phase, Role, StateDef,
    StateId, StateRole, TensorSpec, Value, ValueId,
};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

/// Names of the plans of a training program.
pub mod plans {
    /// Forward and backward pass of a micro-batch.
    pub const MICRO: &str = "micro-step";
    /// Optimizer step.
    pub const APPLY: &str = "apply";
    /// Evaluation: the loss of a batch.
    pub const EVALUATE: &str = "evaluate";

    /// Name of the plan of a micro-step of `tokens` tokens, of which a program has several besides [`MICRO`] if a run
    /// switches between them.
    pub fn smaller(tokens: u64) -> String {
        format!("{MICRO} of {tokens} tokens")
    }
}

/// Options of training. The graph is given separately: it has an output [`OutputRole::Loss`] and optionally an output
/// [`OutputRole::Auxiliary`], which is minimized too.
pub struct Training<'a> {
    /// Number formats; one with a backward pass.
    pub precision: Precision,
    /// Values that the backward pass recomputes instead of reading stored ones.
    pub remat: RecomputePolicy,
    /// Optimizer.
    pub optimizer: Optimizer,
    /// Returns how a parameter is trained.
    pub group: &'a dyn Fn(&Param) -> ParameterGroup,
    /// Number of micro-batches per optimizer step.
    pub accumulation: u64,
    /// Largest global gradient norm; 0 disables clipping.
    pub max_norm: f32,
    /// Decay of the exponential moving average of every trained parameter, which evaluations use; `None` for no average.
    pub ema: Option<f32>,
    /// Ops to fuse.
    pub fuse: Fuse,
    /// Tensors that are stored outside the arena between their uses.
    pub offload: Offload,
    /// The activations that are stored outside the arena, if `offload` has activations.
    pub activations: ActivationOffload,
    /// Limit on the bytes of moves that run ahead of or behind launches ([`Policy::window`]).
    pub window: Window,
    /// Largest number of bytes that one update fetches at once ([`Policy::block`]).
    pub block: Option<Bytes>,
}

/// Policy for the activations that the backward pass reads: which are recomputed, which are offloaded; the others stay in
/// the arena.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ActivationPolicy {
    /// Activations that the backward pass recomputes.
    pub recompute: RecomputePolicy,
    /// Activations that are stored outside the arena from the forward to the backward pass, if [`Training::offload`] has activations.
    pub offload: ActivationOffload,
}

impl ActivationPolicy {
    /// All activations stay in the arena.
    pub const STORED: Self = Self { recompute: RecomputePolicy::None, offload: ActivationOffload::NONE };
}

/// Group of a parameter: whether it is trained, and with which weight decay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ParameterGroup {
    /// Not trained.
    Frozen,
    /// Trained with weight decay.
    Decay,
    /// Trained without weight decay.
    NoDecay,
}

/// An optimizer with its constant hyperparameters.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Optimizer {
    /// AdamW with f32 moments.
    AdamW(AdamW),
    /// AdamW with 8-bit moments for parameters of at least 4096 elements.
    AdamW8bit(AdamW),
    /// Adafactor: factored second moments.
    Adafactor(Adafactor),
    /// Stochastic gradient descent, with or without momentum.
    Sgd(Sgd),
}

/// Maximum number of submitted micro-steps and updates on a GPU: the micro-step and the update of one step, and the micro-step
/// of the next, which is enqueued before the first results are read.
pub const TRAINING_DEPTH: usize = 3;

/// Smaller parameters keep f32 moments, whose memory is negligible (Dettmers et al. 2022).
const EIGHT_BIT_FLOOR: u64 = 4096;

/// An optimizer state of a parameter.
struct MomentSpec {
    which: Moment,
    shape: Vec<Dim>,
    dtype: DType,
}

impl MomentSpec {
    fn new(which: Moment, shape: &[Dim], dtype: DType) -> Self {
        Self { which, shape: shape.to_vec(), dtype }
    }
}

impl Optimizer {
    /// Number of elements of the input `hyper`.
    pub fn hyper(&self) -> u64 {
        match self {
            Self::AdamW(_) | Self::AdamW8bit(_) => 3,
            Self::Adafactor(_) => 2,
            Self::Sgd(_) => 1,
        }
    }

    /// Returns this optimizer with weight decay enabled or disabled.
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

    /// The update op of a parameter, and its states in the order of the op's operands.
    fn of(self, p: &TensorSpec) -> (Op, Vec<MomentSpec>) {
        let elements: u64 = p.shape.iter().filter_map(|d| d.fixed()).product();
        match self {
            Self::AdamW8bit(adamw) if elements >= EIGHT_BIT_FLOOR => {
                let scales = [Dim::Fixed(elements.div_ceil(BLOCK))];
                let states = vec![
                    MomentSpec::new(Moment::First, &p.shape, DType::U8),
                    MomentSpec::new(Moment::FirstScales, &scales, DType::F32),
                    MomentSpec::new(Moment::Second, &p.shape, DType::U8),
                    MomentSpec::new(Moment::SecondScales, &scales, DType::F32),
                ];
                (Op::AdamW8bit(AdamW8bit { adamw }), states)
            }
            Self::AdamW(adamw) | Self::AdamW8bit(adamw) => {
                let first = MomentSpec::new(Moment::First, &p.shape, DType::F32);
                let second = MomentSpec::new(Moment::Second, &p.shape, DType::F32);
                (Op::AdamW(adamw), vec![first, second])
            }
            Self::Adafactor(op) => match p.shape[..] {
                [r, c] => {
                    let rows = MomentSpec::new(Moment::SecondRows, &[r], DType::F32);
                    let columns = MomentSpec::new(Moment::SecondColumns, &[c], DType::F32);
                    (Op::Adafactor(op), vec![rows, columns])
                }
                _ => (Op::Adafactor(op), vec![MomentSpec::new(Moment::Second, &p.shape, DType::F32)]),
            },
            Self::Sgd(op) if op.momentum == 0.0 => (Op::Sgd(op), vec![]),
            Self::Sgd(op) => (Op::Sgd(op), vec![MomentSpec::new(Moment::Momentum, &p.shape, DType::F32)]),
        }
    }
}

impl Training<'_> {
    /// Whether each parameter is updated in the micro-step as soon as its gradient is complete, so that not all
    /// gradients are in memory at once. This is impossible with clipping, which needs the norm of all
    /// gradients, with several micro-batches, whose gradients are summed, and with a loss scale, which
    /// must check all gradients for overflow.
    pub fn updates_immediately(&self) -> bool {
        self.accumulation == 1 && self.max_norm == 0.0 && !self.precision.policy().scales_loss
    }

    /// Builds the program; `forward` has the bounds of a micro-batch, `evaluation` the bounds of an evaluation
    /// batch.
    pub fn program(&self, forward: &Graph, evaluation: &Graph, target: &Target) -> Result<Program, PlanError> {
        let micro = self.micro_step(forward)?;
        let stored = ActivationPolicy { recompute: self.remat.clone(), offload: self.activations.clone() };
        self.program_of(vec![(micro, stored)], evaluation, target)
    }

    /// Builds the program from graphs returned by [`Training::micro_step`], each with the policy for its activations: the
    /// micro-steps between which a run switches, the largest first, or a single one. Gradients of several micro-steps
    /// have the same addresses, which requires an accumulation of more than one micro-batch.
    pub fn program_of(
        &self,
        micro_steps: Vec<(Graph, ActivationPolicy)>,
        evaluation: &Graph,
        target: &Target,
    ) -> Result<Program, PlanError> {
        has_matmuls(self.precision, target)?;
        let mut micro_steps = micro_steps.into_iter();
        let Some((micro, stored)) = micro_steps.next() else {
            return Err(PlanError::BadPolicy { field: "batch", why: "there is no micro-step".to_owned() });
        };
        let mut persistent = Persistent::new();
        // Persistent addresses are assigned in the order of compilation: parameters and states of the update first.
        let apply = match self.apply(&micro)? {
            Some(graph) => Some(self.compiled(graph, &ActivationPolicy::STORED, target, &mut persistent)?),
            None => None,
        };
        let evaluation = self.evaluation(evaluation, &micro)?;
        let evaluate = self.compiled(evaluation, &ActivationPolicy::STORED, target, &mut persistent)?;
        let micro = self.compiled(micro, &stored, target, &mut persistent)?;
        let mut smaller = vec![];
        for (graph, stored) in micro_steps {
            let name = plans::smaller(graph.bounds.tokens);
            smaller.push((name, self.compiled(graph, &stored, target, &mut persistent)?));
        }
        let mut plans = vec![(plans::MICRO.to_owned(), micro)];
        plans.extend(apply.map(|plan| (plans::APPLY.to_owned(), plan)));
        plans.push((plans::EVALUATE.to_owned(), evaluate));
        let alternatives = std::iter::once(0).chain(plans.len()..plans.len() + smaller.len()).collect();
        plans.extend(smaller);
        let program = Program::sharing(target.clone(), plans).with_alternatives(alternatives);
        Ok(program.with_pipeline_depth(TRAINING_DEPTH))
    }

    /// Compiles a graph with the parameters and states of the program.
    fn compiled(
        &self,
        graph: Graph,
        stored: &ActivationPolicy,
        target: &Target,
        persistent: &mut Persistent,
    ) -> Result<Plan, PlanError> {
        compile_owned(graph, &self.policy(stored), target, persistent, &mut |_, _| {})
    }

    /// Builds the micro-step: forward, backward, and accumulation of the gradients or the immediate optimizer
    /// step. Unread values, such as gradients of frozen parameters, are removed, so that values are kept alive
    /// only by actual readers.
    pub fn micro_step(&self, forward: &Graph) -> Result<Graph, PlanError> {
        let graph = self.in_precision(forward)?;
        let losses = [OutputRole::Loss, OutputRole::Auxiliary];
        let outputs: Vec<_> = losses.into_iter().filter(|role| graph.output(role).is_some()).collect();
        let trained = |param: &Param| (self.group)(param) != ParameterGroup::Frozen;
        let mut gradient_use: Option<GradientUse> = None;
        let mut guard: Option<OverflowGuard> = None;
        let mut on_gradient = |g: &mut Builder, p: ValueId, grad: ValueId| {
            let gradient_use = *gradient_use.get_or_insert_with(|| self.gradient_use(g));
            let Role::Param(id) = g.graph().spec(p).role else { return };
            g.in_phase(Phase::Update);
            let param = TrainedParam { param: &graph.params[id.index()], value: p, grad };
            self.use_gradient(g, param, gradient_use, &mut guard);
            g.in_phase(Phase::Backward);
        };
        let mut builder = differentiate(&graph, &outputs, &trained, &mut on_gradient)?;
        if let Some(OverflowGuard { scale, .. }) = guard {
            builder.output(OutputRole::GradientScale, scale);
            builder.in_phase(Phase::Update);
            builder.in_layer(None);
            self.count_step(&mut builder, scale);
        }
        if gradient_use.is_none() {
            let why = "no parameter is trained: all are frozen".to_owned();
            return Err(PlanError::BadPolicy { field: "group", why });
        }
        let graph = builder.finish().map_err(|source| PlanError::of_graph("training", source))?;
        self.with_operands(dce(&graph))
    }

    /// Compilation policy of the graphs.
    fn policy(&self, stored: &ActivationPolicy) -> Policy {
        Policy {
            weights: Weights::Trained,
            remat: stored.recompute.clone(),
            activations: stored.offload.clone(),
            fuse: self.fuse,
            offload: self.offload,
            window: self.window,
            block: self.block,
            ..Policy::default()
        }
    }

    /// Converts a forward graph to the element types of training.
    fn in_precision(&self, graph: &Graph) -> Result<Graph, PlanError> {
        if self.precision.policy().backward.is_none() {
            let mut trained: Vec<&str> = Precision::trained().map(Precision::name).collect();
            let last = trained.pop().unwrap_or_default();
            let why = format!(
                "{} is for inference; training takes {} or {last}",
                self.precision.name(),
                trained.join(", ")
            );
            return Err(PlanError::BadPolicy { field: "precision", why });
        }
        precision(graph, self.precision)
    }

    /// Sets the operands of linears and of their gradients.
    fn with_operands(&self, graph: Graph) -> Result<Graph, PlanError> {
        let PrecisionPolicy { forward, backward, .. } = self.precision.policy();
        match (forward, backward) {
            (OperandFormat::Stored, Some(OperandFormat::Stored)) => Ok(graph),
            _ => operands(&graph, self.precision),
        }
    }

    /// Use of the gradients of a micro-step; adds the inputs that it reads.
    fn gradient_use(&self, g: &mut Builder) -> GradientUse {
        if self.updates_immediately() {
            let unscale = g.input("unscale", &[Dim::Fixed(1)], DType::F32);
            let hyper = g.input("hyper", &[Dim::Fixed(self.optimizer.hyper())], DType::F32);
            return GradientUse::Step { unscale, hyper };
        }
        if self.accumulation == 1 {
            return GradientUse::Store;
        }
        GradientUse::Accumulate { keep: g.input("keep", &[Dim::Fixed(1)], DType::F32) }
    }

    /// Adds the nodes that use a gradient: the optimizer step of its parameter, or its storage for a later one.
    fn use_gradient(
        &self,
        g: &mut Builder,
        trained: TrainedParam<'_>,
        gradient_use: GradientUse,
        guard: &mut Option<OverflowGuard>,
    ) {
        let TrainedParam { param, value, grad } = trained;
        let shape = g.graph().spec(value).shape.clone();
        match gradient_use {
            GradientUse::Step { unscale, hyper } => {
                // The norm of the previous gradient is an additional operand: once a gradient is not finite,
                // neither this parameter nor any later one is updated. Without clipping the factor is `unscale`
                // for any norm.
                let norm = guard.map(|guard| guard.norm);
                let inputs: Vec<ValueId> = [grad].into_iter().chain(norm).chain([unscale]).collect();
                let outs = g.node(Op::GradScale(GradScale { max_norm: 0.0 }), &inputs);
                if let [scale, norm] = outs[..] {
                    *guard = Some(OverflowGuard { scale, norm });
                    self.step(g, trained, scale, hyper);
                }
            }
            // In the gradient's own element type with one micro-batch per step, in that of sums if several are summed.
            GradientUse::Store => {
                let dtype = g.graph().spec(grad).dtype;
                let state = g.state(gradient(param), &shape, dtype);
                g.update(state, grad);
            }
            GradientUse::Accumulate { keep } => {
                let state = g.state(gradient(param), &shape, self.precision.policy().sums);
                let sum = g.one(Op::Accumulate(Accumulate {}), &[state, grad, keep]);
                g.update(state, sum);
            }
        }
    }

    /// Builds the optimizer step over the gradients left by the micro-steps; `None` if gradients are applied
    /// immediately.
    fn apply(&self, micro: &Graph) -> Result<Option<Graph>, PlanError> {
        if self.updates_immediately() {
            return Ok(None);
        }
        let g = &mut Builder::from_graph(Graph::new(micro.bounds), Phase::Update);
        let unscale = g.input("unscale", &[Dim::Fixed(1)], DType::F32);
        let hyper = g.input("hyper", &[Dim::Fixed(self.optimizer.hyper())], DType::F32);
        let grads: BTreeMap<&StateRole, ValueId> = micro.state_values().map(|(v, _, s)| (&s.role, v)).collect();
        let mut trained = vec![];
        for (v, _, param) in micro.param_values() {
            let wanted = gradient(param);
            let Some(&grad) = grads.get(&wanted.role) else { continue };
            let spec = micro.spec(grad);
            let grad = g.state(wanted, &spec.shape, spec.dtype);
            let value = g.param_of(param.clone(), micro.spec(v).dtype);
            trained.push(TrainedParam { param, value, grad });
        }
        let inputs: Vec<ValueId> = trained.iter().map(|param| param.grad).chain([unscale]).collect();
        let scale = g.node(Op::GradScale(GradScale { max_norm: self.max_norm }), &inputs);
        g.output(OutputRole::GradientScale, scale[0]);
        g.output(OutputRole::GradientNorm, scale[1]);
        for param in trained {
            self.step(g, param, scale[0], hyper);
        }
        self.count_step(g, scale[0]);
        let built = std::mem::replace(g, Builder::new(micro.bounds)).finish();
        built.map(Some).map_err(|source| PlanError::of_graph("apply", source))
    }

    /// Adds the update of one parameter, or of its master copy if the precision has masters and the parameter is narrower.
    fn step(&self, g: &mut Builder, trained: TrainedParam<'_>, scale: ValueId, hyper: ValueId) {
        let TrainedParam { param, value, grad } = trained;
        let spec = g.graph().spec(value).clone();
        let (op, states) = self.optimizer.with_decay((self.group)(param) == ParameterGroup::Decay).of(&spec);
        let wider = self.precision.policy().masters.filter(|dtype| *dtype != spec.dtype);
        let master = match wider {
            Some(dtype) => {
                let role = StateRole::Master { param: param.name.clone() };
                g.state(StateDef::zeros(role), &spec.shape, dtype)
            }
            None => value,
        };
        let states: Vec<ValueId> = states
            .into_iter()
            .map(|MomentSpec { which, shape, dtype }| {
                let role = StateRole::Moment { param: param.name.clone(), which };
                g.state(StateDef::zeros(role), &shape, dtype)
            })
            .collect();
        let inputs: Vec<ValueId> = [&[master, grad], &states[..], &[scale, hyper]].concat();
        let outs = g.node(op, &inputs);
        g.update(master, outs[0]);
        for (&state, &new) in states.iter().zip(&outs[1..]) {
            g.update(state, new);
        }
        if master != value {
            let narrow = g.one(Op::Cast(Cast { to: spec.dtype }), &[outs[0]]);
            g.update(value, narrow);
        }
        if let Some(decay) = self.ema {
            let average = g.state(average(param), &spec.shape, DType::F32);
            let steps = g.state(StateDef::zeros(StateRole::AveragedSteps), &[Dim::Fixed(1)], DType::F32);
            let mean = g.one(Op::Ema(Ema { decay }), &[average, outs[0], scale, steps]);
            g.update(average, mean);
        }
    }

    /// Counts the step for the warm-up of the averages, which read the number of earlier steps before.
    fn count_step(&self, g: &mut Builder, scale: ValueId) {
        if self.ema.is_some() {
            let steps = g.state(StateDef::zeros(StateRole::AveragedSteps), &[Dim::Fixed(1)], DType::F32);
            let count = g.one(Op::CountSteps(CountSteps {}), &[steps, scale]);
            g.update(steps, count);
        }
    }

    /// Returns the graph of an evaluation in the precision of training. If the weights are averaged, it reads the averages
    /// in place of the parameters that `micro` trains, rounded to the type of the parameter where that is 16-bit.
    fn evaluation(&self, graph: &Graph, micro: &Graph) -> Result<Graph, PlanError> {
        let graph = self.with_operands(self.in_precision(graph)?)?;
        if self.ema.is_none() {
            return Ok(graph);
        }
        // A parameter without a gradient, such as a running mean, is not averaged.
        let roles = micro.states.iter().map(|state| &state.role);
        let of_trained = roles.filter_map(|role| match role {
            StateRole::Gradient { param } | StateRole::Average { param } => Some(param.as_str()),
            StateRole::Master { .. }
            | StateRole::Moment { .. }
            | StateRole::AveragedSteps
            | StateRole::Buffer { .. } => None,
        });
        let trained: BTreeSet<&str> = of_trained.collect();
        Ok(averaged(&graph, &|param| trained.contains(&*param.name)))
    }
}

/// Returns the graph with the averages of the parameters for which `trained` is true in place of these parameters.
fn averaged(graph: &Graph, trained: &dyn Fn(&Param) -> bool) -> Graph {
    let mut g = Graph { nodes: vec![], ..graph.clone() };
    // The parameters whose average is rounded, with the average.
    let mut narrow: BTreeMap<ValueId, ValueId> = BTreeMap::new();
    for (v, _, param) in graph.param_values().filter(|(.., param)| trained(param)) {
        let state = StateId::at(g.states.len());
        g.states.push(average(param));
        let spec = &mut g.values[v.index()].spec;
        let role = Role::State(state);
        if spec.dtype == DType::F32 {
            spec.role = role;
            continue;
        }
        let wide = TensorSpec::activation(spec.shape.clone(), DType::F32).with_role(role);
        spec.role = Role::Activation;
        narrow.insert(v, ValueId::at(g.values.len()));
        g.values.push(Value { spec: wide, def: Def::Source });
    }
    for node in &graph.nodes {
        // Directly before the first reader, so that the rounded values of two layers are not in memory together.
        for &v in &node.inputs {
            if let Some(wide) = narrow.remove(&v) {
                let op = Op::Cast(Cast { to: graph.spec(v).dtype });
                let cast = Node { op, inputs: vec![wide], outputs: vec![Some(v)], ..node.clone() };
                push_node(&mut g, cast);
            }
        }
        push_node(&mut g, node.clone());
    }
    g
}

/// Use of the gradients of a micro-step.
#[derive(Clone, Copy)]
enum GradientUse {
    /// The optimizer step follows immediately.
    Step { unscale: ValueId, hyper: ValueId },
    /// Stored for the optimizer step.
    Store,
    /// Added to the gradients of earlier micro-batches.
    Accumulate { keep: ValueId },
}

/// A trained parameter with its value and its gradient in a graph.
#[derive(Clone, Copy)]
struct TrainedParam<'a> {
    param: &'a Param,
    value: ValueId,
    grad: ValueId,
}

/// Results of the last immediate optimizer step, which keep later parameters from being updated after an overflow.
#[derive(Clone, Copy)]
struct OverflowGuard {
    /// Factor on the gradient.
    scale: ValueId,
    /// Norm of all gradients so far.
    norm: ValueId,
}

/// State that stores the gradient of a parameter between the micro-steps and the optimizer step.
fn gradient(param: &Param) -> StateDef {
    StateDef::zeros(StateRole::Gradient { param: param.name.clone() })
}

/// State that stores the average of a parameter.
fn average(param: &Param) -> StateDef {
    StateDef::zeros(StateRole::Average { param: param.name.clone() })
}
