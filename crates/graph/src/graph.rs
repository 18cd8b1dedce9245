//! The computation graph, as index tables of nodes and values. Invariant: nodes are in topological order, and
//! every value is defined exactly once, by a node or as a source (input, parameter or state).

use crate::{Bounds, NodeId, Op, OutputRole, ParamId, Role, StateDef, StateId, TensorSpec, ValueId};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::ops::{Deref, Range};
use std::sync::Arc;

/// A computation in SSA form whose steps hold at most [`Bounds`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Graph {
    /// Maximum size of one step.
    pub bounds: Bounds,
    /// Ops in topological order.
    pub nodes: Vec<Node>,
    /// All tensors, indexed by [`ValueId`].
    pub values: Vec<Value>,
    /// Origin of each parameter in the weight file, indexed by [`ParamId`].
    pub params: Vec<Param>,
    /// Description of each state, indexed by [`StateId`].
    pub states: Vec<StateDef>,
    /// Tensors supplied with every step, by name.
    pub inputs: Vec<(String, ValueId)>,
    /// Tensors returned after every step, each with another role.
    pub outputs: Vec<(OutputRole, ValueId)>,
    /// Pairs (state, new): at the end of the step the storage of `state` holds the value `new`.
    pub updates: Vec<(ValueId, ValueId)>,
}

/// One op applied to values.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Node {
    /// The op and its attributes.
    pub op: Op,
    /// Operands.
    pub inputs: Vec<ValueId>,
    /// Results; `None` marks an output that is never read and therefore has no storage.
    pub outputs: Vec<Option<ValueId>>,
    /// Index of the transformer layer that the node belongs to, if any.
    pub layer: Option<u32>,
    /// Phase of the training step that the node belongs to.
    pub phase: Phase,
}

/// Phase of a training step; an inference graph has only the forward phase.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    /// Forward pass, from inputs to outputs.
    Forward,
    /// Backward pass: computes gradients.
    Backward,
    /// Recomputation: forward ops that are executed a second time during the backward pass instead of storing
    /// their results.
    Recompute,
    /// Optimizer update: computes new parameters and states.
    Update,
}

/// A tensor and its definition.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Value {
    /// Type of the tensor.
    pub spec: TensorSpec,
    /// Definition of the tensor.
    pub def: Def,
}

/// Definition of a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Def {
    /// Exists before the step: an input, a parameter or a state.
    Source,
    /// Output number `1` of node `0`.
    Node(NodeId, u32),
}

/// A parameter: rows of tensors of the weight file, concatenated along dimension 0.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Param {
    /// Name of the module that the parameter belongs to; used in labels only.
    pub name: String,
    /// Row ranges to read, in order along dimension 0.
    pub pieces: Pieces,
}

/// A list of pieces. It is shared by copies: every pass copies the graph, and a mixture of experts has many pieces.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Pieces(Arc<[ParamPiece]>);

impl Deref for Pieces {
    type Target = [ParamPiece];
    fn deref(&self) -> &[ParamPiece] {
        &self.0
    }
}

impl<'a> IntoIterator for &'a Pieces {
    type Item = &'a ParamPiece;
    type IntoIter = std::slice::Iter<'a, ParamPiece>;
    fn into_iter(self) -> Self::IntoIter {
        self.0.iter()
    }
}

impl FromIterator<ParamPiece> for Pieces {
    fn from_iter<I: IntoIterator<Item = ParamPiece>>(pieces: I) -> Self {
        Self(pieces.into_iter().collect())
    }
}

impl From<Vec<ParamPiece>> for Pieces {
    fn from(pieces: Vec<ParamPiece>) -> Self {
        Self(pieces.into())
    }
}

impl<const N: usize> From<[ParamPiece; N]> for Pieces {
    fn from(pieces: [ParamPiece; N]) -> Self {
        Self(pieces.into())
    }
}

impl Serialize for Pieces {
    fn serialize<S: Serializer>(&self, out: S) -> Result<S::Ok, S::Error> {
        self.0.as_ref().serialize(out)
    }
}

impl<'de> Deserialize<'de> for Pieces {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        Vec::<ParamPiece>::deserialize(from).map(Self::from)
    }
}

impl Param {
    /// Splits the elements `range` of the parameter by piece. Returns for each piece that overlaps `range`, in order:
    /// the index of the piece, the first overlapping element as an index in the piece's tensor, and the number of
    /// overlapping elements.
    #[expect(clippy::arithmetic_side_effects, reason = "the numbers of elements of a tensor within the limits")]
    pub fn split_by_piece(&self, range: Range<u64>) -> impl Iterator<Item = (usize, u64, usize)> + '_ {
        let mut start = 0;
        self.pieces.iter().enumerate().filter_map(move |(i, piece)| {
            // `start..end`: the elements of the parameter in this piece; `a..b`: those that `range` selects.
            let row: u64 = piece.shape.iter().skip(1).product();
            let end = start + (piece.rows.1 - piece.rows.0) * row;
            let a = range.start.max(start);
            let b = range.end.min(end);
            // A piece that begins at a later row of its tensor skips the rows before it.
            let first = piece.rows.0 * row + a - start;
            start = end;
            (a < b).then(|| (i, first, (b - a) as usize))
        })
    }
}

/// A range of rows of one tensor of the weight file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ParamPiece {
    /// Canonical name of the tensor; the crate `models` maps the names of other file formats to it.
    pub tensor: String,
    /// Required shape of the tensor in the file.
    pub shape: Vec<u64>,
    /// Rows (start, end) to read, end exclusive.
    pub rows: (u64, u64),
}

impl ParamPiece {
    /// All rows of a tensor; a tensor without dimensions has one row.
    pub fn whole(tensor: String, shape: Vec<u64>) -> Self {
        let rows = (0, shape.first().copied().unwrap_or(1));
        Self { tensor, shape, rows }
    }
}

impl Graph {
    /// Creates an empty graph with steps of at most `bounds`.
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

    /// Returns a node by its id.
    pub fn node(&self, id: NodeId) -> &Node {
        &self.nodes[id.index()]
    }

    /// Returns a value by its id.
    pub fn value(&self, id: ValueId) -> &Value {
        &self.values[id.index()]
    }

    /// Returns the type of a value.
    pub fn spec(&self, id: ValueId) -> &TensorSpec {
        &self.values[id.index()].spec
    }

    /// Returns the output with a role, if it exists. A string is the name of an output without a meaning to the planner
    /// ([`OutputRole::Named`]).
    pub fn output(&self, role: impl Into<OutputRole>) -> Option<ValueId> {
        let role = role.into();
        self.outputs.iter().find(|(other, _)| *other == role).map(|&(_, v)| v)
    }

    /// Returns the input named `name`, if it exists.
    pub fn input(&self, name: &str) -> Option<ValueId> {
        self.inputs.iter().find(|(n, _)| n == name).map(|&(_, v)| v)
    }

    /// Name of the input or output that is the value `v`, if it is one.
    pub fn interface_name(&self, v: ValueId) -> Option<String> {
        let input = self.inputs.iter().find(|(_, value)| *value == v).map(|(name, _)| name.clone());
        input.or_else(|| self.outputs.iter().find(|(_, value)| *value == v).map(|(role, _)| role.to_string()))
    }

    /// Iterates over all nodes with their ids, in topological order.
    pub fn nodes(&self) -> impl Iterator<Item = (NodeId, &Node)> {
        self.nodes.iter().enumerate().map(|(i, n)| (NodeId::at(i), n))
    }

    /// Iterates over all values with their ids.
    pub fn values(&self) -> impl Iterator<Item = (ValueId, &Value)> {
        self.values.iter().enumerate().map(|(i, v)| (ValueId::at(i), v))
    }

    /// Iterates over the values that exist before the step, with their ids.
    pub fn sources(&self) -> impl Iterator<Item = (ValueId, &Value)> {
        self.values().filter(|(_, value)| value.def == Def::Source)
    }

    /// Iterates over the parameters with the value that they have at the start of a step, in order of the values.
    pub fn param_values(&self) -> impl Iterator<Item = (ValueId, ParamId, &Param)> {
        self.sources().filter_map(|(id, v)| match v.spec.role {
            Role::Param(p) => Some((id, p, &self.params[p.index()])),
            Role::Input | Role::Activation | Role::Grad | Role::State(_) => None,
        })
    }

    /// Iterates over the states with the value that they have at the start of a step, in order of the values.
    pub fn state_values(&self) -> impl Iterator<Item = (ValueId, StateId, &StateDef)> {
        self.sources().filter_map(|(id, v)| match v.spec.role {
            Role::State(s) => Some((id, s, &self.states[s.index()])),
            Role::Input | Role::Activation | Role::Grad | Role::Param(_) => None,
        })
    }

    /// Counts how often each value is read: by nodes, as a graph output, and as the new value of an update.
    /// Indexed by value.
    pub fn reads(&self) -> Vec<u32> {
        let mut reads = vec![0; self.values.len()];
        let by_nodes = self.nodes.iter().flat_map(|n| n.inputs.iter());
        let outside = self.outputs.iter().map(|(_, v)| v).chain(self.updates.iter().map(|(_, new)| new));
        for v in by_nodes.chain(outside) {
            reads[v.index()] += 1;
        }
        reads
    }

    /// Total number of parameter elements by shape, without the padding of layouts.
    pub fn parameter_count(&self) -> u64 {
        self.param_values()
            .map(|(v, ..)| self.spec(v).shape.iter().filter_map(|d| d.fixed()).product::<u64>())
            .sum()
    }
}
