//! The middle of a layer as one op, where the target has a kernel that never writes its hidden layer. Invariant: the
//! fused graph computes the same function; a value that anyone else reads is never fused away.
//!
//! [layer norm ->] linear with a gelu, or linear -> glu, -> linear [with a residual]  =>  mlp.

use super::dce;
use plimsoll_graph::ops::{Activation, Epilogue, Glu, Hidden, LayerNorm, Linear, Mlp, Prologue};
use plimsoll_graph::{DType, Def, Graph, Node, Op, ValueId};

/// A fused graph of bf16 with its MLPs as one op each.
pub fn mlp(graph: &Graph) -> Graph {
    let chain = Chain { g: graph, reads: graph.reads() };
    let mut g = graph.clone();
    for (i, node) in graph.nodes.iter().enumerate() {
        if let Some((op, inputs)) = chain.ending_in(node) {
            (g.nodes[i].op, g.nodes[i].inputs) = (Op::Mlp(op), inputs);
        }
    }
    dce(&g)
}

/// A graph and how often each of its values is read.
struct Chain<'a> {
    g: &'a Graph,
    reads: Vec<u32>,
}

impl<'a> Chain<'a> {
    /// The MLP whose second product is `node`, and its inputs.
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

    /// What makes `v` a hidden layer of bf16: whether its product has a bias, and that product.
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

    /// The norm in front of the first product, if that alone reads it; gamma and beta are in f32.
    fn norm(&self, v: ValueId) -> Option<(LayerNorm, &'a Node)> {
        let node = self.only_for(v)?;
        let Op::LayerNorm(op) = node.op else { return None };
        let wide = node.inputs[1..].iter().all(|&v| self.g.spec(v).dtype == DType::F32);
        wide.then_some((op, node))
    }

    /// The node whose first output `v` is, if `v` is read once and nowhere else.
    fn only_for(&self, v: ValueId) -> Option<&'a Node> {
        match self.g.value(v).def {
            Def::Node(id, 0) if self.reads[v.index()] == 1 => Some(self.g.node(id)),
            Def::Node(..) | Def::Source => None,
        }
    }
}

/// A linear of rows as they are.
fn linear(node: &Node) -> Option<Linear> {
    let Op::Linear(linear) = node.op else { return None };
    (linear.prologue == Prologue::None).then_some(linear)
}
