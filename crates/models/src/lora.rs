//! Low-rank adapters (LoRA, Hu et al. 2021, arXiv:2106.09685), inserted by rewriting a built graph, so that model
//! builders contain no code for them. Invariant: while B = 0, its initial value, and without dropout, the adapted graph
//! computes the function of the original graph.

use crate::Training;
use crate::init::Init;
use crate::training::{DropoutBuilder, PacksInput};
use crate::tuning::TunedPart;
use plimsoll_graph::ops::{Epilogue, Prologue, Scale};
use plimsoll_graph::{Builder, Def, Graph, Op, ParamPiece, Role, ValueId, VerifyError};
use std::fmt;

/// LoRA hyperparameters. A linear map x: (T, K) -> y: (T, N) with an adapter computes
/// `y + alpha / rank * (x A^T) B^T`, with A: (rank, K) and B: (N, rank).
#[derive(Clone, Debug, PartialEq)]
pub struct Lora {
    /// Rank of the update: the rows of A and the columns of B. At least 1.
    pub rank: u64,
    /// Scale of the update before the division by `rank`.
    pub alpha: f32,
    /// Modules that get an adapter, by the last dot-separated components of their names: `query` selects the query
    /// projection of every layer.
    pub targets: Vec<String>,
}

/// An error from building a training graph.
#[derive(Debug)]
#[non_exhaustive]
pub enum TrainingError {
    /// A target of [`Lora::targets`] matches no linear map of the model.
    Target {
        /// The target that matches nothing.
        target: String,
        /// Names of the model's linear maps without their layer prefix, sorted, each once.
        known: Vec<String>,
    },
    /// The rank of an adapter is 0.
    Rank,
    /// The graph that was built does not pass verification.
    Graph(VerifyError),
}

impl fmt::Display for TrainingError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Target { target, known } => {
                write!(
                    f,
                    "the model has no linear layer `{target}`; its linear layers are `{}`",
                    known.join("`, `")
                )
            }
            Self::Rank => write!(f, "the rank of an adapter must be at least 1"),
            Self::Graph(_) => write!(f, "the model's graph is not sound"),
        }
    }
}

impl std::error::Error for TrainingError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Graph(error) => Some(error),
            Self::Target { .. } | Self::Rank => None,
        }
    }
}

/// A builder that holds the rewritten graph, to which the caller adds the head and the loss.
pub(crate) struct Adapted {
    pub(crate) builder: Builder,
    /// Dropout for the head, with random streams that the rewritten graph does not use.
    pub(crate) dropout: DropoutBuilder,
    /// For each value of the original graph, by index, the value of the rewritten graph that replaces it.
    pub(crate) values: Vec<ValueId>,
}

/// Copies `graph` node by node, adds an adapter to every linear map that `lora` targets, and adds dropout to the
/// output of every linear map that matches a name in `residual_maps`: the maps whose outputs are added to the residual stream.
pub(crate) fn adapt(
    graph: &Graph,
    training: &Training,
    lora: Option<&Lora>,
    residual_maps: &[&str],
) -> Result<Adapted, TrainingError> {
    check(graph, lora)?;
    let (mut g, mut values) = sources(graph);
    let mut dropout = DropoutBuilder::new(&mut g, training, &mut PacksInput::default());
    for node in &graph.nodes {
        let inputs: Vec<ValueId> = node.inputs.iter().map(|v| values[v.index()]).collect();
        g.in_layer(node.layer);
        let mut outputs = g.node(node.op, &inputs);
        if let Some(module) = module(graph, node) {
            if let Some(lora) = lora.filter(|l| l.targets.iter().any(|t| is_called(module, t))) {
                outputs[0] = lora.add(&mut g, module, inputs[0], outputs[0]);
            }
            if residual_maps.iter().any(|a| is_called(module, a)) {
                outputs[0] = dropout.apply(&mut g, outputs[0]);
            }
        }
        for (old, new) in node.outputs.iter().zip(outputs) {
            if let Some(old) = old {
                values[old.index()] = new;
            }
        }
    }
    g.in_layer(None);
    Ok(Adapted { builder: g, dropout, values })
}

impl Lora {
    /// The initial value of an adapter's tensor: A as `torch.nn.Linear` initialises a weight, uniform in
    /// ±1/sqrt(fan_in), and B at 0, as in the authors' code. `None` if the tensor does not belong to an adapter.
    pub fn init(piece: &ParamPiece) -> Option<Init> {
        let fan_in = piece.shape.get(1).copied().unwrap_or(1) as f32;
        match TunedPart::of(&piece.tensor) {
            TunedPart::AdapterA { .. } => Some(Init::Uniform(fan_in.powf(-0.5))),
            TunedPart::AdapterB { .. } => Some(Init::Zeros),
            TunedPart::Base | TunedPart::Classifier => None,
        }
    }

    /// Adds an adapter for `module` and returns `y + alpha / rank * (x A^T) B^T`: (T, N). x: (T, K), y: (T, N).
    fn add(&self, g: &mut Builder, module: &str, x: ValueId, y: ValueId) -> ValueId {
        let n = g.graph().spec(y).row_elements();
        let h = g.linear(x, &format!("{module}.lora_A"), self.rank, false); // (T, rank)
        let h = g.linear(h, &format!("{module}.lora_B"), n, false);
        let h = g.one(Op::Scale(Scale { factor: self.alpha / self.rank as f32 }), &[h]);
        g.add(y, h)
    }
}

/// A builder with copies of the inputs, parameters and states of `graph`, and a map from values of `graph` to values of
/// the builder. The entries of values that nodes define are placeholders until the nodes are copied.
fn sources(graph: &Graph) -> (Builder, Vec<ValueId>) {
    let mut g = Builder::new(graph.bounds);
    let mut values = vec![ValueId::at(0); graph.values.len()];
    for (v, value) in graph.values().filter(|(_, value)| value.def == Def::Source) {
        let spec = &value.spec;
        values[v.index()] = match spec.role {
            Role::Param(p) => g.param_of(graph.params[p.index()].clone(), spec.dtype),
            Role::State(s) => g.state(graph.states[s.index()].clone(), &spec.shape, spec.dtype),
            Role::Input | Role::Activation | Role::Grad => {
                let name = graph.inputs.iter().find(|(_, input)| *input == v).map_or("", |(name, _)| name);
                g.input(name, &spec.shape, spec.dtype)
            }
        };
    }
    (g, values)
}

/// The name of a linear node's module: the weight's name without `.weight`. `None` if the node is not linear, has a
/// fused prologue or epilogue, or has a weight that is not a parameter.
fn module<'a>(graph: &'a Graph, node: &plimsoll_graph::Node) -> Option<&'a str> {
    let Op::Linear(linear) = node.op else { return None };
    if (linear.prologue, linear.epilogue) != (Prologue::None, Epilogue::None) {
        return None;
    }
    let weight = graph.spec(*node.inputs.get(1)?).role;
    let Role::Param(p) = weight else { return None };
    graph.params[p.index()].name.strip_suffix(".weight")
}

/// Whether the last dot-separated components of `module` are `name`.
fn is_called(module: &str, name: &str) -> bool {
    module.strip_suffix(name).is_some_and(|before| before.is_empty() || before.ends_with('.'))
}

/// Refuses a rank of 0 and targets that match no linear map of `graph`.
fn check(graph: &Graph, lora: Option<&Lora>) -> Result<(), TrainingError> {
    let Some(lora) = lora else { return Ok(()) };
    if lora.rank == 0 {
        return Err(TrainingError::Rank);
    }
    let modules: Vec<&str> = graph.nodes.iter().filter_map(|n| module(graph, n)).collect();
    let missing = lora.targets.iter().find(|t| !modules.iter().any(|m| is_called(m, t)));
    let Some(target) = missing else { return Ok(()) };
    let mut known: Vec<String> = modules.iter().map(|m| without_layer(m)).collect();
    known.sort_unstable();
    known.dedup();
    Err(TrainingError::Target { target: target.clone(), known })
}

/// The components after the last number in a module's name: `encoder.layer.3.output.dense` -> `output.dense`.
fn without_layer(module: &str) -> String {
    let parts: Vec<&str> = module.split('.').collect();
    let layer = parts.iter().rposition(|part| part.bytes().all(|b| b.is_ascii_digit()));
    parts[layer.map_or(0, |i| i + 1)..].join(".")
}
