//! Operator fusion. Runs after differentiation, because fused ops have no gradient. Invariant: the fused graph
//! computes the same function; a value with another reader is never fused away.
//!
//! 1. query, key and value linears of the same input -> one linear with their weights concatenated along the rows.
//! 2. linear -> gelu  =>  linear with a gelu epilogue.
//! 3. linear -> add   =>  linear with a residual epilogue.

use super::dce;
use crate::Weights;
use crate::kernels::GateFusion;
use plimsoll_graph::ops::{Activation, Epilogue, Glu, Linear, Prologue, Qkv};
use plimsoll_graph::{
    DType, Def, Dim, Graph, NodeId, Op, Param, ParamId, ParamPiece, Role, TensorSpec, Value, ValueId,
};

/// Returns the graph with the fusions that every target supports. If weights are trained, a GELU stays separate, and
/// query, key and value weights are not concatenated, because the other plans of the training program share each of
/// them as a separate parameter.
pub fn fuse(graph: Graph, weights: Weights) -> Graph {
    let mut fusion = Fusion { reads: graph.reads(), g: graph };
    match weights {
        Weights::Resident | Weights::Streamed { .. } => (0..fusion.g.nodes.len()).for_each(|i| fusion.qkv(i)),
        Weights::Trained => {}
    }
    // A fused GELU is applied to sums that are not rounded to 16 bits. In training, whether a linear before a GELU can be
    // fused depends on what is recomputed (its gradient reads the linear's output), and recomputation must not change
    // bits, so it is never fused.
    let gelu = match weights {
        Weights::Resident | Weights::Streamed { .. } => true,
        Weights::Trained => false,
    };
    for i in 0..fusion.g.nodes.len() {
        fusion.epilogue(i, gelu);
    }
    dce(&fusion.g)
}

/// Returns the graph with each 16-bit linear and the gated linear unit after it that meet the conditions `gates` fused
/// into one linear with a gate epilogue, if the rows of the input are multiples of 16 bytes. For targets whose GEMM
/// kernels apply the gate to the sums.
pub fn fuse_gates(graph: &Graph, gates: GateFusion) -> Graph {
    let mut fusion = Fusion { g: graph.clone(), reads: graph.reads() };
    (0..graph.nodes.len()).for_each(|i| fusion.gate(i, gates));
    dce(&fusion.g)
}

/// Returns the graph with each 16-bit layer norm of at most `widest` columns fused into the linear that is its only
/// reader. For targets whose GEMM kernels hold whole rows of the input. A norm stays separate if the linear has a
/// gate or a residual epilogue, or if rows of its input or output are not multiples of 16 bytes, such as the scores
/// of a few classes.
pub fn fuse_norms(graph: &Graph, widest: u64) -> Graph {
    let mut fusion = Fusion { g: graph.clone(), reads: graph.reads() };
    (0..graph.nodes.len()).for_each(|i| fusion.norm(i, widest));
    dce(&fusion.g)
}

/// A graph and the number of reads of each value. Reads by nodes that a fusion made dead still count until `dce`
/// runs. That can only prevent a fusion, and prevents none of the forms above.
struct Fusion {
    g: Graph,
    reads: Vec<u32>,
}

impl Fusion {
    /// Returns the linear without epilogue that computes `v`, if `v` is read exactly once.
    fn plain_linear(&self, v: ValueId) -> Option<(NodeId, Linear)> {
        let Def::Node(id, 0) = self.g.value(v).def else { return None };
        let Op::Linear(linear) = self.g.node(id).op else { return None };
        (linear.epilogue == Epilogue::None && self.reads[v.index()] == 1).then_some((id, linear))
    }

    /// Fuses the linear before node `i` into it, if the node is an add, or a GELU and `gelu` is set. The node is replaced rather than
    /// the linear, because the residual may be computed after the linear.
    fn epilogue(&mut self, i: usize, gelu: bool) {
        let node = &self.g.nodes[i];
        let fusion = if let (Op::Gelu(_), true) = (node.op, gelu) {
            self.plain_linear(node.inputs[0]).map(|linear| (linear, Epilogue::Gelu, None))
        } else if let Op::Add(_) = node.op {
            // If both operands are linears, the later one is fused and the result of the earlier one is the residual.
            let sides = [(node.inputs[1], node.inputs[0]), (node.inputs[0], node.inputs[1])].into_iter();
            let candidates = sides.filter_map(|(v, residual)| Some((self.plain_linear(v)?, residual)));
            let later = candidates.max_by_key(|((id, _), _)| *id);
            later.map(|(linear, residual)| (linear, Epilogue::Residual, Some(residual)))
        } else {
            None
        };
        let Some(((id, linear), epilogue, residual)) = fusion else { return };
        let inputs = self.g.node(id).inputs.iter().copied().chain(residual).collect();
        self.g.nodes[i].op = Op::Linear(Linear { epilogue, ..linear });
        self.set_inputs(i, inputs);
    }

    /// Fuses the linear before node `i` into it, if the node is a gated linear unit that meets the conditions of
    /// [`fuse_gates`].
    fn gate(&mut self, i: usize, gates: GateFusion) {
        let Op::Glu(Glu { activation }) = self.g.nodes[i].op else { return };
        let Some((id, linear)) = self.plain_linear(self.g.nodes[i].inputs[0]) else { return };
        let inputs = self.g.node(id).inputs.clone();
        let columns = [inputs[0], self.g.nodes[i].inputs[0]].map(|v| self.g.spec(v).row_elements());
        let is_dtype_supported = gates.dtypes.contains(&self.g.spec(inputs[0]).dtype);
        let is_op_supported = (gates.silu || activation == Activation::Gelu) && (gates.bias || !linear.bias);
        let is_shape_supported = columns[0].is_multiple_of(8)
            && columns[0] <= gates.max_columns
            && columns[1].is_multiple_of(gates.multiple.saturating_mul(2));
        if !(is_op_supported && is_dtype_supported && is_shape_supported) {
            return;
        }
        self.g.nodes[i].op = Op::Linear(Linear { epilogue: Epilogue::of_gate(activation), ..linear });
        self.set_inputs(i, inputs);
    }

    /// Fuses the layer norm before node `i` into it, if the node is a linear that meets the conditions of
    /// [`fuse_norms`].
    fn norm(&mut self, i: usize, widest: u64) {
        let Op::Linear(linear) = self.g.nodes[i].op else { return };
        let mut inputs = self.g.nodes[i].inputs.clone();
        let normed = inputs[0];
        let Def::Node(id, 0) = self.g.value(normed).def else { return };
        let Op::LayerNorm(norm) = self.g.node(id).op else { return };
        let is_16_bit = [DType::Bf16, DType::F16].contains(&self.g.spec(normed).dtype);
        let columns = self.g.spec(normed).row_elements();
        let is_fusable = match linear.epilogue {
            Epilogue::None | Epilogue::Gelu => linear.prologue == Prologue::None,
            Epilogue::Residual | Epilogue::Gate | Epilogue::SiluGate => false,
        };
        // The fused op outputs neither the normalised rows nor their mean and reciprocal deviation, so nothing else
        // may read them.
        let is_only_reader = self.reads[normed.index()] == 1
            && self.g.node(id).outputs[1..].iter().flatten().all(|v| self.reads[v.index()] == 0);
        let is_aligned = columns.is_multiple_of(8)
            && matches!(self.g.spec(inputs[1]).shape[0], Dim::Fixed(n) if n.is_multiple_of(8));
        if !(is_16_bit && is_fusable && is_only_reader && columns <= widest && is_aligned) {
            return;
        }
        let [x, gamma, beta] = self.g.node(id).inputs[..] else { return };
        inputs[0] = x;
        inputs.extend([gamma, beta]);
        self.g.nodes[i].op = Op::Linear(Linear { prologue: Prologue::LayerNorm(norm), ..linear });
        self.set_inputs(i, inputs);
    }

    /// Fuses the query, key and value linears before node `i` into one, if the node is an attention and the three
    /// linears have the same input and options.
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
        // The fused linear takes the position of the first of the three, at which x is already computed.
        attention.qkv = Qkv::Fused;
        let columns = Dim::Fixed(attention.columns()[0]);
        let spec = TensorSpec { shape: vec![Dim::Tokens(1), columns], ..self.g.spec(inputs[0]).clone() };
        let out = self.push(Value { spec, def: Def::Node(first, 0) });
        self.g.nodes[first.index()].outputs = vec![Some(out)];
        self.set_inputs(first.index(), std::iter::once(x).chain(weights).collect());
        self.g.nodes[i].op = Op::Attention(attention);
        self.set_inputs(i, std::iter::once(out).chain(inputs[3..].iter().copied()).collect());
    }

    /// Whether three values are parameters of equal element type, layout and space, without another reader and
    /// without updates.
    fn stackable(&self, parts: [ValueId; 3]) -> bool {
        let first = self.g.spec(parts[0]);
        parts.iter().all(|&v| {
            let spec = self.g.spec(v);
            matches!(spec.role, Role::Param(_))
                && (spec.dtype, spec.layout, spec.space) == (first.dtype, first.layout, first.space)
                && self.reads[v.index()] == 1
                && !self.g.updates.iter().any(|(state, _)| *state == v)
        })
    }

    /// Adds one parameter with the rows of three parameters; loading concatenates the pieces.
    fn stack(&mut self, parts: [ValueId; 3]) -> ValueId {
        let params = parts.iter().filter_map(|&v| match self.g.spec(v).role {
            Role::Param(p) => Some(&self.g.params[p.index()]),
            Role::Input | Role::Activation | Role::Grad | Role::State(_) => None,
        });
        let pieces: Vec<ParamPiece> = params.flat_map(|p| p.pieces.iter().cloned()).collect();
        let rows: u64 = pieces.iter().map(|p| p.rows.1.saturating_sub(p.rows.0)).sum();
        let name = format!("{}+{}", pieces[0].tensor, pieces.len() - 1);
        let id = ParamId::at(self.g.params.len());
        self.g.params.push(Param { name, pieces: pieces.into() });
        let mut spec = self.g.spec(parts[0]).clone().with_role(Role::Param(id));
        spec.shape[0] = Dim::Fixed(rows);
        self.push(Value { spec, def: Def::Source })
    }

    /// Adds a value without readers.
    fn push(&mut self, value: Value) -> ValueId {
        self.g.values.push(value);
        self.reads.push(0);
        ValueId::at(self.g.values.len() - 1)
    }

    /// Replaces the inputs of a node and updates the numbers of reads.
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
