//! The graph: index tables of nodes and values. Invariant: nodes stand in topological order, and a value
//! is defined once, by a node or as a source (input, parameter, state).

use crate::{Bounds, NodeId, Op, ParamId, Role, StateId, TensorSpec, ValueId};
use serde::{Deserialize, Serialize};

/// A computation for at most [`Bounds`], in SSA form.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Graph {
    /// The most that one step may hold.
    pub bounds: Bounds,
    /// Ops in topological order.
    pub nodes: Vec<Node>,
    /// Tensors.
    pub values: Vec<Value>,
    /// Where each parameter comes from.
    pub params: Vec<Param>,
    /// What each state is.
    pub states: Vec<State>,
    /// Given with every step, by name.
    pub inputs: Vec<(String, ValueId)>,
    /// Asked for after every step, by name.
    pub outputs: Vec<(String, ValueId)>,
    /// (state, new): at the end of the step the state's storage holds the new value.
    pub updates: Vec<(ValueId, ValueId)>,
}

/// An op applied to values.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Node {
    /// What is computed.
    pub op: Op,
    /// Operands.
    pub inputs: Vec<ValueId>,
    /// Results; `None` is one that nobody reads and that therefore has no storage.
    pub outputs: Vec<Option<ValueId>>,
    /// The transformer layer that it belongs to.
    pub layer: Option<u32>,
    /// The part of the step that it belongs to.
    pub phase: Phase,
}

/// The part of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    /// Inputs to outputs.
    Forward,
    /// Gradients.
    Backward,
    /// Forward ops once more, in place of keeping what they gave.
    Recompute,
    /// New parameters and states.
    Update,
}

/// A tensor and its definition.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Value {
    /// Its type.
    pub spec: TensorSpec,
    /// Who defines it.
    pub def: Def,
}

/// Who defines a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Def {
    /// It is there before the step: an input, a parameter or a state.
    Source,
    /// Output `1` of node `0`.
    Node(NodeId, u32),
}

/// A parameter: rows of tensors of the weight file, put under each other.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Param {
    /// For people: the module that it belongs to.
    pub name: String,
    /// What to read, in order along dimension 0.
    pub pieces: Vec<Piece>,
}

/// A range of rows of one tensor in the weight file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Piece {
    /// Its canonical name; `models` knows its other names.
    pub tensor: String,
    /// The shape that the file must have for it.
    pub shape: Vec<u64>,
    /// The rows (start, end) that are read.
    pub rows: (u64, u64),
}

/// A tensor that survives the step and is in no weight file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct State {
    /// Unique in a graph; graphs of one program that name the same state share its storage.
    pub name: String,
    /// What it is for: its line in the ledger.
    pub kind: StateKind,
    /// Every element before the first step.
    pub init: f32,
}

/// What a state is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StateKind {
    /// Gradients of the micro-batches of a step, added up.
    Gradient,
    /// Moments and their scales.
    Optimizer,
    /// The f32 copy of a parameter of 16 bits.
    Master,
    /// Running statistics.
    Buffer,
}

impl StateKind {
    /// Its line in the ledger.
    pub fn label(self) -> &'static str {
        match self {
            Self::Gradient => "gradients",
            Self::Optimizer => "optimizer",
            Self::Master => "master weights",
            Self::Buffer => "buffers",
        }
    }
}

impl Graph {
    /// An empty graph for at most `bounds`.
    pub fn new(bounds: Bounds) -> Self {
        Self {
            bounds,
            nodes: vec![],
            values: vec![],
            params: vec![],
            states: vec![],
            inputs: vec![],
            outputs: vec![],
            updates: vec![],
        }
    }

    /// The node of an id.
    pub fn node(&self, id: NodeId) -> &Node {
        &self.nodes[id.index()]
    }

    /// The value of an id.
    pub fn value(&self, id: ValueId) -> &Value {
        &self.values[id.index()]
    }

    /// The type of a value.
    pub fn spec(&self, id: ValueId) -> &TensorSpec {
        &self.values[id.index()].spec
    }

    /// The output of a name.
    pub fn output(&self, name: &str) -> Option<ValueId> {
        self.outputs.iter().find(|(n, _)| n == name).map(|&(_, v)| v)
    }

    /// The input of a name.
    pub fn input(&self, name: &str) -> Option<ValueId> {
        self.inputs.iter().find(|(n, _)| n == name).map(|&(_, v)| v)
    }

    /// All nodes with their ids, in order.
    pub fn nodes(&self) -> impl Iterator<Item = (NodeId, &Node)> {
        self.nodes.iter().enumerate().map(|(i, n)| (NodeId::at(i), n))
    }

    /// All values with their ids, in order.
    pub fn values(&self) -> impl Iterator<Item = (ValueId, &Value)> {
        self.values.iter().enumerate().map(|(i, v)| (ValueId::at(i), v))
    }

    /// Parameter values with their sources, in order of the values.
    pub fn param_values(&self) -> impl Iterator<Item = (ValueId, ParamId, &Param)> {
        self.values().filter_map(|(id, v)| match v.spec.role {
            Role::Param(p) => Some((id, p, &self.params[p.index()])),
            Role::Input | Role::Activation | Role::Grad | Role::State(_) | Role::Scratch => None,
        })
    }

    /// State values, in order of the values.
    pub fn state_values(&self) -> impl Iterator<Item = (ValueId, StateId, &State)> {
        self.values().filter_map(|(id, v)| match v.spec.role {
            Role::State(s) => Some((id, s, &self.states[s.index()])),
            Role::Input | Role::Activation | Role::Grad | Role::Param(_) | Role::Scratch => None,
        })
    }

    /// How often each value is read: by nodes, as an output, as the new side of an update.
    pub fn reads(&self) -> Vec<u32> {
        let mut reads = vec![0; self.values.len()];
        let by_nodes = self.nodes.iter().flat_map(|n| n.inputs.iter());
        let outside = self.outputs.iter().map(|(_, v)| v).chain(self.updates.iter().map(|(_, new)| new));
        for v in by_nodes.chain(outside) {
            reads[v.index()] += 1;
        }
        reads
    }

    /// Number of parameters (elements) by shape, without padding of layouts.
    pub fn parameter_count(&self) -> u64 {
        self.param_values()
            .map(|(v, ..)| self.spec(v).shape.iter().filter_map(|d| d.fixed()).product::<u64>())
            .sum()
    }
}
