//! 8-bit quantization of the linears of encoder layers: weights with one scale per output, activations with one scale
//! per token. Invariant: an activation is quantized once for all linears that read it, inside the op that computes it
//! if that op has a fused quantized form; all other ops are unchanged.

use super::{dce, push_node};
use crate::{PlanError, Precision};
use plimsoll_graph::ops::{Epilogue, Gelu, Linear, Prologue, Quantize, Quantized};
use plimsoll_graph::{DType, Def, Graph, Node, Op, Role, TensorSpec, Value, ValueId};

/// Returns the graph with the linears of its layers computed on the quantized operands of `precision`; an unchanged copy
/// if `precision` does not quantize.
///
/// # Errors
/// [`PlanError::BadPolicy`] if the graph has no linear that can be quantized.
pub(super) fn quantize(graph: &Graph, precision: Precision) -> Result<Graph, PlanError> {
    let operands = precision.policy().forward;
    let Some(dtype) = operands.quantized() else { return Ok(graph.clone()) };
    let mut updated = vec![false; graph.values.len()];
    graph.updates.iter().for_each(|(of, _)| updated[of.index()] = true);
    let chosen: Vec<bool> = graph.nodes.iter().map(|node| is_quantized(graph, &updated, node)).collect();
    if !chosen.contains(&true) {
        let why = format!("{} is for the linear layers of encoders, and the model has none", precision.name());
        return Err(PlanError::BadPolicy { field: "precision", why });
    }
    let mut wanted = vec![false; graph.values.len()];
    for (node, _) in graph.nodes.iter().zip(&chosen).filter(|(_, chosen)| **chosen) {
        wanted[node.inputs[0].index()] = true;
    }
    let quantized = vec![None; graph.values.len()];
    let mut pass = QuantizePass { g: Graph { nodes: vec![], ..graph.clone() }, quantized, dtype };
    for (node, &chosen) in graph.nodes.iter().zip(&chosen) {
        let mut node = node.clone();
        if let (Op::Linear(linear), true) = (&mut node.op, chosen) {
            linear.operands = operands;
            node.inputs[0] = pass.quantized[node.inputs[0].index()].expect("quantised where it was made");
            node.inputs[1] = pass.quantized_weight(node.inputs[1]);
        }
        match node.outputs[0].filter(|v| wanted[v.index()]) {
            Some(v) => pass.push_quantized(node, v),
            None => push_node(&mut pass.g, node),
        }
    }
    Ok(dce(&pass.g))
}

/// Whether a node is computed on quantized operands: a linear without a prologue that belongs to a layer, whose input
/// is the first output of another node, in bf16, and whose weight is a bf16 parameter that no update changes.
///
/// Only first outputs are quantized by [`QuantizePass::push_quantized`]. A prologue normalises rows of numbers, not of
/// quantized values. The quantized weight is a second value of the parameter, which an update would not change.
fn is_quantized(graph: &Graph, updated: &[bool], node: &Node) -> bool {
    let Op::Linear(Linear { prologue: Prologue::None, .. }) = node.op else { return false };
    let [x, w] = [node.inputs[0], node.inputs[1]].map(|v| graph.value(v));
    let has_quantizable_operands = matches!((x.def, w.spec.role), (Def::Node(_, 0), Role::Param(_)));
    has_quantizable_operands
        && node.layer.is_some()
        && (x.spec.dtype, w.spec.dtype) == (DType::Bf16, DType::Bf16)
        && !updated[node.inputs[1].index()]
}

/// State of the rewrite.
struct QuantizePass {
    /// The new graph: all values of the old graph under their old ids, and the nodes rewritten so far.
    g: Graph,
    /// Quantized form of each value of the old graph, if it exists already.
    quantized: Vec<Option<ValueId>>,
    /// Element type of the quantized values.
    dtype: DType,
}

impl QuantizePass {
    /// Appends `node`, whose first output `v` is needed in quantized form. Layer norm, GELU, GLU and the GELU of a
    /// linear become the fused function of a [`Quantize`]; after any other op a separate one follows.
    fn push_quantized(&mut self, node: Node, v: ValueId) {
        let Node { layer, phase, .. } = node;
        let (of, inputs) = if let (Op::LayerNorm(op), [_, None, None]) = (node.op, &node.outputs[..]) {
            (Quantized::LayerNorm(op), node.inputs)
        } else if let Op::Gelu(op) = node.op {
            (Quantized::Gelu(op), node.inputs)
        } else if let Op::Glu(op) = node.op {
            (Quantized::Glu(op), node.inputs)
        } else if let Op::Linear(linear @ Linear { epilogue: Epilogue::Gelu, .. }) = node.op {
            let sum = self.value(self.g.spec(v).clone());
            let op = Op::Linear(Linear { epilogue: Epilogue::None, ..linear });
            push_node(&mut self.g, Node { op, outputs: vec![Some(sum)], ..node });
            (Quantized::Gelu(Gelu {}), vec![sum])
        } else {
            push_node(&mut self.g, node);
            (Quantized::Rows, vec![v])
        };
        let quantized = self.value(TensorSpec::activation(self.g.spec(v).shape.clone(), self.dtype));
        self.quantized[v.index()] = Some(quantized);
        let y = (of != Quantized::Rows).then_some(Some(v));
        let outputs = [Some(quantized)].into_iter().chain(y).collect();
        push_node(
            &mut self.g,
            Node { op: Op::Quantize(Quantize { of, to: self.dtype }), inputs, outputs, layer, phase },
        );
    }

    /// Returns the quantized form of a parameter, as a second value with the same role. Other readers continue to read
    /// the parameter in its own type.
    fn quantized_weight(&mut self, w: ValueId) -> ValueId {
        let role = self.g.spec(w).role;
        let spec = TensorSpec::activation(self.g.spec(w).shape.clone(), self.dtype).with_role(role);
        let quantized = self.quantized[w.index()].unwrap_or_else(|| self.value(spec));
        self.quantized[w.index()] = Some(quantized);
        quantized
    }

    /// Adds a value; `push_node` sets its definition when a node outputs it.
    fn value(&mut self, spec: TensorSpec) -> ValueId {
        self.g.values.push(Value { spec, def: Def::Source });
        ValueId::at(self.g.values.len() - 1)
    }
}
