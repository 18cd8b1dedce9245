//! Low-rank adapters (Hu et al. 2021, arXiv:2106.09685) as a change of a built graph, so that models need not know
//! of them. Invariant: with B = 0, as it starts, the adapted graph computes what the plain one does.

use crate::Training;
use crate::init::Init;
use crate::training::Dropping;
use crate::tuning::TunedPart;
use graph::ops::{Epilogue, Prologue, Scale};
use graph::{Builder, Def, Graph, Op, Piece, Role, ValueId, VerifyError};
use std::fmt;

/// Which linear maps get `y + alpha / rank * (x A^T) B^T`, A: (rank, K), B: (N, rank).
#[derive(Clone, Debug, PartialEq)]
pub struct Lora {
    /// Rows of A.
    pub rank: u64,
    /// Weight of the adapter, times `rank`.
    pub alpha: f32,
    /// Modules, by the end of their name: `query` is that of every layer.
    pub targets: Vec<String>,
}

/// Why there is no training graph.
#[derive(Debug)]
#[non_exhaustive]
pub enum TrainingError {
    /// No linear map has this name.
    Target {
        /// What was asked for.
        target: String,
        /// What there is, without layers.
        known: Vec<String>,
    },
    /// The rank of an adapter is 0.
    Rank,
    /// The graph breaks a rule.
    Graph(VerifyError),
}

impl fmt::Display for TrainingError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Target { target, known } => {
                write!(f, "no linear map of the model is called `{target}`; there are `{}`", known.join("`, `"))
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

/// A graph that goes on, and where the values of the plain one are in it.
pub(crate) struct Adapted {
    pub(crate) builder: Builder,
    pub(crate) dropping: Dropping,
    pub(crate) values: Vec<ValueId>,
}

/// `graph` with adapters, and with dropout behind the maps that add to the stream, whose names end like `adding`.
pub(crate) fn adapt(
    graph: &Graph,
    training: &Training,
    lora: Option<&Lora>,
    adding: &[&str],
) -> Result<Adapted, TrainingError> {
    check(graph, lora)?;
    let (mut g, mut values) = sources(graph);
    let mut dropping = Dropping::new(&mut g, training);
    for node in &graph.nodes {
        let inputs: Vec<ValueId> = node.inputs.iter().map(|v| values[v.index()]).collect();
        g.in_layer(node.layer);
        let mut outputs = g.node(node.op, &inputs);
        if let Some(module) = module(graph, node) {
            if let Some(lora) = lora.filter(|l| l.targets.iter().any(|t| ends(module, t))) {
                outputs[0] = lora.add(&mut g, module, inputs[0], outputs[0]);
            }
            if adding.iter().any(|a| ends(module, a)) {
                outputs[0] = dropping.apply(&mut g, outputs[0]);
            }
        }
        for (old, new) in node.outputs.iter().zip(outputs) {
            if let Some(old) = old {
                values[old.index()] = new;
            }
        }
    }
    g.in_layer(None);
    Ok(Adapted { builder: g, dropping, values })
}

impl Lora {
    /// A starts as torch's Linear does, B at 0 (as the authors' code). `None`: the tensor is no adapter's.
    pub fn init(piece: &Piece) -> Option<Init> {
        let fan_in = piece.shape.get(1).copied().unwrap_or(1) as f32;
        match TunedPart::of(&piece.tensor) {
            TunedPart::AdapterA { .. } => Some(Init::Uniform(fan_in.powf(-0.5))),
            TunedPart::AdapterB { .. } => Some(Init::Zeros),
            TunedPart::Base | TunedPart::Classifier => None,
        }
    }

    /// y + scale (x A^T) B^T. x: (T, K), y: (T, N).
    fn add(&self, g: &mut Builder, module: &str, x: ValueId, y: ValueId) -> ValueId {
        let n = g.graph().spec(y).row_elements();
        let h = g.linear(x, &format!("{module}.lora_A"), self.rank, false); // (T, rank)
        let h = g.linear(h, &format!("{module}.lora_B"), n, false);
        let h = g.one(Op::Scale(Scale { factor: self.alpha / self.rank as f32 }), &[h]);
        g.add(y, h)
    }
}

/// A builder with the sources of `graph`, and where they are in it; nodes' values are not there yet.
fn sources(graph: &Graph) -> (Builder, Vec<ValueId>) {
    let mut g = Builder::new(graph.bounds);
    let mut values = vec![ValueId::at(0); graph.values.len()];
    for (v, value) in graph.values().filter(|(_, value)| value.def == Def::Source) {
        let spec = &value.spec;
        values[v.index()] = match spec.role {
            Role::Param(p) => g.param_of(graph.params[p.index()].clone(), spec.dtype),
            Role::State(s) => g.state(graph.states[s.index()].clone(), &spec.shape, spec.dtype),
            Role::Input | Role::Activation | Role::Grad | Role::Scratch => {
                let name = graph.inputs.iter().find(|(_, input)| *input == v).map_or("", |(name, _)| name);
                g.input(name, &spec.shape, spec.dtype)
            }
        };
    }
    (g, values)
}

/// The module that a plain linear map belongs to.
fn module<'a>(graph: &'a Graph, node: &graph::Node) -> Option<&'a str> {
    let Op::Linear(linear) = node.op else { return None };
    if (linear.prologue, linear.epilogue) != (Prologue::None, Epilogue::None) {
        return None;
    }
    let weight = graph.spec(*node.inputs.get(1)?).role;
    let Role::Param(p) = weight else { return None };
    graph.params[p.index()].name.strip_suffix(".weight")
}

/// Whether `module` is called `name`, with any number of components before it.
fn ends(module: &str, name: &str) -> bool {
    module.strip_suffix(name).is_some_and(|before| before.is_empty() || before.ends_with('.'))
}

fn check(graph: &Graph, lora: Option<&Lora>) -> Result<(), TrainingError> {
    let Some(lora) = lora else { return Ok(()) };
    if lora.rank == 0 {
        return Err(TrainingError::Rank);
    }
    let modules: Vec<&str> = graph.nodes.iter().filter_map(|n| module(graph, n)).collect();
    let missing = lora.targets.iter().find(|t| !modules.iter().any(|m| ends(m, t)));
    let Some(target) = missing else { return Ok(()) };
    let mut known: Vec<String> = modules.iter().map(|m| without_layer(m)).collect();
    known.sort_unstable();
    known.dedup();
    Err(TrainingError::Target { target: target.clone(), known })
}

/// `encoder.layer.3.output.dense` -> `output.dense`.
fn without_layer(module: &str) -> String {
    let number = |part: &str| part.bytes().all(|b| b.is_ascii_digit());
    let parts: Vec<&str> = module.split('.').collect();
    let first = parts.iter().rposition(|p| number(p)).map_or(0, |i| i + 1);
    parts[first..].join(".")
}
