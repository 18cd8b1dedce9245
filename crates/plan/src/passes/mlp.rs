//! Fusion of the MLP block of a transformer layer into one op, for targets with a kernel that never writes the hidden
//! layer to memory. Invariant: the fused graph computes the same function; a value with another reader is never fused
//! away.
//!
//! [layer norm ->] linear with a gelu, or linear -> glu, -> linear [with a residual]  =>  mlp.

use super::dce;
use plimsoll_graph::ops::{Activation, Epilogue, Glu, Hidden, LayerNorm, Linear, Mlp, Prologue};
use plimsoll_graph::{DType, Def, Graph, Node, Op, ValueId};

/// Returns the graph with each bf16 MLP block replaced by one [`Mlp`] op. The epilogues of linears must have been
/// fused before, see [`fuse`](super::fuse()).
pub fn fuse_mlp(graph: &Graph) -> Graph {
    let chain = Chain { g: graph, reads: graph.reads() };
    let mut g = graph.clone();
    for (i, node) in graph.nodes.iter().enumerate() {
        if let Some((op, inputs)) = chain.ending_in(node) {
            (g.nodes[i].op, g.nodes[i].inputs) = (Op::Mlp(op), inputs);
        }
    }
    dce(&g)
}

/// A graph and the number of reads of each value.
struct Chain<'a> {
    g: &'a Graph,
    reads: Vec<u32>,
}

impl<'a> Chain<'a> {
    /// Returns the MLP that has `node` as its second linear, and the inputs of the MLP.
    fn ending_in(&self, node: &Node) -> Option<(Mlp, Vec<ValueId>)> {
        let (second, residual) = match linear(node)? {
            Linear { epilogue: Epilogue::None, bias, .. } => (bias, false),
            Linear { epilogue: Epilogue::Residual, bias, .. } => (bias, true),
            Linear { epilogue: Epilogue::Gelu | Epilogue::Gate, .. } => return None,
        };
        let (hidden, first, product) = self.hidden(node.inputs[0])?;
        let norm = self.norm(product.inputs[0]);
        let front = norm.map_or(&product.inputs[..1], |(_, norm)| &norm.inputs);
        let op = Mlp { norm: norm.map(|(op, _)| op), hidden, bias: [first, second], residual };
        Some((op, [front, &product.inputs[1..], &node.inputs[1..]].concat()))
    }

    /// If `v` is a bf16 hidden layer, returns its function, whether the first linear has a bias, and the node of the
    /// first linear. A gated hidden layer must have a multiple of 32 columns, see [`Hidden::Gate`].
    fn hidden(&self, v: ValueId) -> Option<(Hidden, bool, &'a Node)> {
        let node = self.only_for(v)?;
        if self.g.spec(v).dtype != DType::Bf16 {
            return None;
        }
        if let Op::Glu(Glu { activation: Activation::Gelu }) = node.op {
            let product = self.only_for(node.inputs[0])?;
            let plain = linear(product).filter(|l| l.epilogue == Epilogue::None)?;
            let whole = self.g.spec(v).row_elements().is_multiple_of(32);
            return whole.then_some((Hidden::Gate, plain.bias, product));
        }
        let gelu = linear(node).filter(|l| l.epilogue == Epilogue::Gelu)?;
        Some((Hidden::Gelu, gelu.bias, node))
    }

    /// Returns the layer norm before the first linear, if `v` has no other reader and gamma and beta are f32.
    fn norm(&self, v: ValueId) -> Option<(LayerNorm, &'a Node)> {
        let node = self.only_for(v)?;
        let Op::LayerNorm(op) = node.op else { return None };
        let wide = node.inputs[1..].iter().all(|&v| self.g.spec(v).dtype == DType::F32);
        wide.then_some((op, node))
    }

    /// Returns the node that has `v` as its first output, if `v` is read exactly once.
    fn only_for(&self, v: ValueId) -> Option<&'a Node> {
        match self.g.value(v).def {
            Def::Node(id, 0) if self.reads[v.index()] == 1 => Some(self.g.node(id)),
            Def::Node(..) | Def::Source => None,
        }
    }
}

/// The linear of a node, if it has no fused prologue.
fn linear(node: &Node) -> Option<Linear> {
    let Op::Linear(linear) = node.op else { return None };
    (linear.prologue == Prologue::None).then_some(linear)
}
