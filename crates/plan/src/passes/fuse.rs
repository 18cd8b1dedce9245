//! Fusion, after the unfused graph is whole and differentiated. Invariant: the fused graph computes the same
//! function; a value that anyone else reads is never fused away.
//!
//! 1. query, key, value linears of one input -> one linear with their weights under each other.
//! 2. linear -> gelu  =>  linear with a gelu epilogue.
//! 3. linear -> add   =>  linear with a residual epilogue.

use super::dce;
use crate::Weights;
use plimsoll_graph::ops::{Activation, Epilogue, Glu, Linear, Prologue, Qkv};
use plimsoll_graph::{
    DType, Def, Dim, Graph, NodeId, Op, Param, ParamId, Piece, Role, TensorSpec, Value, ValueId,
};

/// The graph with fused ops. Trained weights stay apart: other plans share them one by one.
pub fn fuse(graph: Graph, weights: Weights) -> Graph {
    let mut fusion = Fusion { reads: graph.reads(), g: graph };
    match weights {
        Weights::Resident | Weights::Streamed => (0..fusion.g.nodes.len()).for_each(|i| fusion.qkv(i)),
        Weights::Trained => {}
    }
    for i in 0..fusion.g.nodes.len() {
        fusion.epilogue(i);
    }
    dce(&fusion.g)
}

/// The graph with every linear of 16 bits and the gate behind it as one, where all rows are whole words of 16 bytes: what
/// a target's products of such rows do in registers.
pub fn gates(graph: &Graph) -> Graph {
    let mut fusion = Fusion { g: graph.clone(), reads: graph.reads() };
    (0..graph.nodes.len()).for_each(|i| fusion.gate(i));
    dce(&fusion.g)
}

/// The graph with every layer norm of 16 bits and at most `widest` columns in front of the one linear that reads it: what
/// a target's products do with rows that they hold whole. A linear with a gate behind it keeps its norm apart, and so does
/// one whose rows are no whole words of 16 bytes, such as a few classes' scores.
pub fn norms(graph: &Graph, widest: u64) -> Graph {
    let mut fusion = Fusion { g: graph.clone(), reads: graph.reads() };
    (0..graph.nodes.len()).for_each(|i| fusion.norm(i, widest));
    dce(&fusion.g)
}

/// A graph and how often each of its values is read. Nodes that a fusion leaves without readers still count
/// as readers: that can only forbid a fusion, and none that the three forms above ask for.
struct Fusion {
    g: Graph,
    reads: Vec<u32>,
}

impl Fusion {
    /// The plain linear that defines `v`, if `v` is read once and nowhere else.
    fn plain_linear(&self, v: ValueId) -> Option<(NodeId, Linear)> {
        let Def::Node(id, 0) = self.g.value(v).def else { return None };
        let Op::Linear(linear) = self.g.node(id).op else { return None };
        (linear.epilogue == Epilogue::None && self.reads[v.index()] == 1).then_some((id, linear))
    }

    fn epilogue(&mut self, i: usize) {
        let node = &self.g.nodes[i];
        let found = if let Op::Gelu(_) = node.op {
            self.plain_linear(node.inputs[0]).map(|found| (found, Epilogue::Gelu, None))
        } else if let Op::Add(_) = node.op {
            // Of two linears the later one is fused.
            let sides = [(1, 0), (0, 1)].into_iter();
            let found =
                sides.filter_map(|(lin, res)| Some((self.plain_linear(node.inputs[lin])?, node.inputs[res])));
            found.max_by_key(|((id, _), _)| *id).map(|(found, res)| (found, Epilogue::Residual, Some(res)))
        } else {
            None
        };
        let Some(((id, linear), epilogue, residual)) = found else { return };
        let inputs = self.g.node(id).inputs.iter().copied().chain(residual).collect();
        self.g.nodes[i].op = Op::Linear(Linear { epilogue, ..linear });
        self.set_inputs(i, inputs);
    }

    fn gate(&mut self, i: usize) {
        let Op::Glu(Glu { activation: Activation::Gelu }) = self.g.nodes[i].op else { return };
        let Some((id, linear)) = self.plain_linear(self.g.nodes[i].inputs[0]) else { return };
        let inputs = self.g.node(id).inputs.clone();
        let columns = [inputs[0], self.g.nodes[i].inputs[0]].map(|v| self.g.spec(v).row_elements());
        let narrow = [DType::Bf16, DType::F16].contains(&self.g.spec(inputs[0]).dtype);
        if linear.bias || !narrow || !(columns[0].is_multiple_of(8) && columns[1].is_multiple_of(16)) {
            return;
        }
        self.g.nodes[i].op = Op::Linear(Linear { epilogue: Epilogue::Gate, ..linear });
        self.set_inputs(i, inputs);
    }

    fn norm(&mut self, i: usize, widest: u64) {
        let Op::Linear(linear) = self.g.nodes[i].op else { return };
        let mut inputs = self.g.nodes[i].inputs.clone();
        let normed = inputs[0];
        let Def::Node(id, 0) = self.g.value(normed).def else { return };
        let Op::LayerNorm(norm) = self.g.node(id).op else { return };
        let narrow = [DType::Bf16, DType::F16].contains(&self.g.spec(normed).dtype);
        let columns = self.g.spec(normed).row_elements();
        let plain = match linear.epilogue {
            Epilogue::None | Epilogue::Gelu => linear.prologue == Prologue::None,
            Epilogue::Residual | Epilogue::Gate => false,
        };
        // Nobody else reads the normalised rows nor, since there is no gradient, what is known of them.
        let alone = self.reads[normed.index()] == 1
            && self.g.node(id).outputs[1..].iter().flatten().all(|v| self.reads[v.index()] == 0);
        let whole = columns.is_multiple_of(8)
            && matches!(self.g.spec(inputs[1]).shape[0], Dim::Fixed(n) if n.is_multiple_of(8));
        if !(narrow && plain && alone && columns <= widest && whole) {
            return;
        }
        let [x, gamma, beta] = self.g.node(id).inputs[..] else { return };
        inputs[0] = x;
        inputs.extend([gamma, beta]);
        self.g.nodes[i].op = Op::Linear(Linear { prologue: Prologue::LayerNorm(norm), ..linear });
        self.set_inputs(i, inputs);
    }

    fn qkv(&mut self, i: usize) {
        let Op::Attention(mut attention) = self.g.nodes[i].op else { return };
        if attention.qkv != Qkv::Separate {
            return;
        }
        let inputs = self.g.nodes[i].inputs.clone();
        let linears: Vec<(NodeId, Linear)> = inputs[..3].iter().filter_map(|&v| self.plain_linear(v)).collect();
        let [(first, linear), b, c] = linears[..] else { return };
        let ids = [first, b.0, c.0];
        let x = self.g.node(first).inputs[0];
        let alike = [b, c].iter().all(|(id, l)| *l == linear && self.g.node(*id).inputs[0] == x);
        let operands = 1..2 + usize::from(linear.bias);
        let parts: Vec<[ValueId; 3]> = operands.map(|k| ids.map(|id| self.g.node(id).inputs[k])).collect();
        if !alike || !parts.iter().all(|&parts| self.stackable(parts)) {
            return;
        }
        let weights: Vec<ValueId> = parts.into_iter().map(|parts| self.stack(parts)).collect();
        // The first of the three becomes the fused one: whatever it reads is there already.
        attention.qkv = Qkv::Fused;
        let columns = Dim::Fixed(attention.columns()[0]);
        let spec = TensorSpec { shape: vec![Dim::Tokens(1), columns], ..self.g.spec(inputs[0]).clone() };
        let out = self.push(Value { spec, def: Def::Node(first, 0) });
        self.g.nodes[first.index()].outputs = vec![Some(out)];
        self.set_inputs(first.index(), std::iter::once(x).chain(weights).collect());
        self.g.nodes[i].op = Op::Attention(attention);
        self.set_inputs(i, std::iter::once(out).chain(inputs[3..].iter().copied()).collect());
    }

    /// Whether three values are parameters of one type that nobody else reads or updates.
    fn stackable(&self, parts: [ValueId; 3]) -> bool {
        let first = self.g.spec(parts[0]);
        parts.iter().all(|&v| {
            let spec = self.g.spec(v);
            matches!(spec.role, Role::Param(_))
                && (spec.dtype, spec.layout, spec.placement) == (first.dtype, first.layout, first.placement)
                && self.reads[v.index()] == 1
                && !self.g.updates.iter().any(|(state, _)| *state == v)
        })
    }

    /// One parameter in place of three, which are put under each other when they are loaded.
    fn stack(&mut self, parts: [ValueId; 3]) -> ValueId {
        let params = parts.iter().filter_map(|&v| match self.g.spec(v).role {
            Role::Param(p) => Some(&self.g.params[p.index()]),
            Role::Input | Role::Activation | Role::Grad | Role::State(_) | Role::Scratch => None,
        });
        let pieces: Vec<Piece> = params.flat_map(|p| p.pieces.iter().cloned()).collect();
        let rows: u64 = pieces.iter().map(|p| p.rows.1 - p.rows.0).sum();
        let name = format!("{}+{}", pieces[0].tensor, pieces.len() - 1);
        let id = ParamId::at(self.g.params.len());
        self.g.params.push(Param { name, pieces });
        let mut spec = self.g.spec(parts[0]).clone().with_role(Role::Param(id));
        spec.shape[0] = Dim::Fixed(rows);
        self.push(Value { spec, def: Def::Source })
    }

    fn push(&mut self, value: Value) -> ValueId {
        self.g.values.push(value);
        self.reads.push(0);
        ValueId::at(self.g.values.len() - 1)
    }

    fn set_inputs(&mut self, node: usize, inputs: Vec<ValueId>) {
        for v in &self.g.nodes[node].inputs {
            self.reads[v.index()] -= 1;
        }
        for v in &inputs {
            self.reads[v.index()] += 1;
        }
        self.g.nodes[node].inputs = inputs;
    }
}
