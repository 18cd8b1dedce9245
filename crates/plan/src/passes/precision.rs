//! Conversion of a graph to another element type. Runs before differentiation, so that gradients get the element
//! types of their values. Invariant: [sensitive](graph::PrecisionClass::Sensitive) ops compute in f32 for operands of
//! any type, and every decision is visible as the element type of a value.

use super::push_node;
use crate::{PlanError, Precision};
use plimsoll_graph::ops::Cast;
use plimsoll_graph::{DType, Def, Graph, Node, Op, Phase, Role, TensorSpec, Value, ValueId};

/// Returns the graph with the weights of linears, experts, embeddings and losses in `precision`, and activations in
/// the types that the ops infer from them. Parameters of norms, rotary tables, and weights that multiply an f32
/// activation stay f32.
///
/// # Errors
/// [`PlanError::BadPolicy`] if a graph input is floating-point, because the activations computed from it would stay
/// f32; also if an op does not accept the resulting element types.
pub fn precision(graph: &Graph, precision: Precision) -> Result<Graph, PlanError> {
    if precision.policy().storage == DType::F32 {
        return Ok(graph.clone());
    }
    if let Some((name, _)) = graph.inputs.iter().find(|(_, v)| graph.spec(*v).dtype.is_float()) {
        let why = format!("`{name}` is given in f32, so {} would save nothing; train in f32", precision.name());
        return Err(PlanError::BadPolicy { field: "precision", why });
    }
    let mut g = graph.clone();
    for (id, node) in graph.nodes() {
        // Some ops return f32 for inputs of any type (a mean over a sequence). A matmul of their result keeps f32 weights
        // too: kernels take operands of one type, and these matmuls have a row for each sequence, not each token.
        let wide = matches!(node.inputs.first(), Some(&x) if is_f32_activation(g.spec(x)));
        if reads_weights(&node.op) && !wide {
            for &v in &node.inputs {
                if let (Role::Param(_), true) = (graph.spec(v).role, graph.spec(v).dtype.is_float()) {
                    g.values[v.index()].spec.dtype = precision.policy().storage;
                }
            }
        }
        let ins: Vec<&TensorSpec> = node.inputs.iter().map(|&v| g.spec(v)).collect();
        let outs = node.op.rules().infer(&ins, &g.bounds).map_err(|rule| PlanError::BadPolicy {
            field: "precision",
            why: format!("node {id} ({}): {rule}", node.op.name()),
        })?;
        for (out, spec) in node.outputs.iter().zip(outs) {
            if let Some(v) = out {
                g.values[v.index()].spec.dtype = spec.dtype;
            }
        }
    }
    Ok(g)
}

/// Like [`precision`], for inference graphs: the final norms, on which only outputs, means over segments and row
/// selections depend, take and return f32, and every other 16-bit output of the graph is cast to f32.
///
/// # Errors
/// As for [`precision`].
pub fn inference(graph: &Graph, element: Precision) -> Result<Graph, PlanError> {
    if element.policy().storage == DType::F32 {
        return Ok(graph.clone());
    }
    let mut g = precision(&widen_last_norms(graph), element)?;
    for i in 0..g.outputs.len() {
        let v = g.outputs[i].1;
        let dtype = g.spec(v).dtype;
        if dtype.is_float() && dtype != DType::F32 {
            let layer = layer_of(&g, v);
            g.outputs[i].1 = cast(&mut g, v, layer);
        }
    }
    Ok(g)
}

/// Returns the graph with a cast to f32 before each final norm. A final norm after another final node needs none: its
/// input is f32 already.
fn widen_last_norms(graph: &Graph) -> Graph {
    let last = last(graph);
    let mut g = Graph { nodes: vec![], ..graph.clone() };
    for (id, node) in graph.nodes() {
        let mut node = node.clone();
        let is_norm = matches!(node.op, Op::LayerNorm(_) | Op::RmsNorm(_));
        let from_last = matches!(graph.value(node.inputs[0]).def, Def::Node(from, _) if last[from.index()]);
        if is_norm && last[id.index()] && !from_last {
            node.inputs[0] = cast(&mut g, node.inputs[0], node.layer);
        }
        push_node(&mut g, node);
    }
    g
}

/// Whether each node is final: a norm, a mean over segments or a row selection that is read only by such nodes and as
/// an output of the graph. Indexed by node.
fn last(graph: &Graph) -> Vec<bool> {
    let mut last: Vec<bool> = graph.nodes.iter().map(|node| is_last(&node.op)).collect();
    for i in (0..graph.nodes.len()).rev() {
        if last[i] {
            continue;
        }
        for v in &graph.nodes[i].inputs {
            if let Def::Node(from, _) = graph.value(*v).def {
                last[from.index()] = false;
            }
        }
    }
    last
}

/// Whether an op may be final, see [`last`].
fn is_last(op: &Op) -> bool {
    matches!(op, Op::LayerNorm(_) | Op::RmsNorm(_) | Op::SegmentMean(_) | Op::SelectRows(_))
}

/// Layer of the node that computes `v`.
fn layer_of(g: &Graph, v: ValueId) -> Option<u32> {
    match g.value(v).def {
        Def::Node(id, _) => g.node(id).layer,
        Def::Source => None,
    }
}

/// Appends a cast of `v` to f32 and returns its result.
fn cast(g: &mut Graph, v: ValueId, layer: Option<u32>) -> ValueId {
    let spec = TensorSpec::activation(g.spec(v).shape.clone(), DType::F32);
    let wide = ValueId::at(g.values.len());
    g.values.push(Value { spec, def: Def::Source });
    let op = Op::Cast(Cast { to: DType::F32 });
    push_node(g, Node { op, inputs: vec![v], outputs: vec![Some(wide)], layer, phase: Phase::Forward });
    wide
}

/// Whether a value is an activation in f32.
fn is_f32_activation(spec: &TensorSpec) -> bool {
    spec.dtype == DType::F32 && !matches!(spec.role, Role::Param(_))
}

/// Whether the parameters of an op are converted: matmul weights and embedding tables are, scales and offsets of
/// norms are not.
fn reads_weights(op: &Op) -> bool {
    let is_matmul = op.rules().precision() == plimsoll_graph::PrecisionClass::Matmul;
    is_matmul || matches!(op, Op::Embed(_))
}
