//! Element types of a graph, before it is differentiated: gradients then get theirs from the values that they belong
//! to. Invariant: what the ops call [sensitive](plimsoll_graph::PrecisionClass::Sensitive) computes in f32
//! whatever its operands are, and every choice is the element type of a value.

use super::push_node;
use crate::PlanError;
use plimsoll_graph::ops::Cast;
use plimsoll_graph::{DType, Def, Graph, Node, Op, Phase, Role, TensorSpec, Value, ValueId};
use serde::{Deserialize, Serialize};

/// The element type of weights and activations.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Precision {
    /// IEEE binary32 everywhere.
    #[default]
    F32,
    /// The same, but linear products on factors cut to TF32, which has 10 bits of mantissa; for inference.
    Tf32,
    /// bfloat16, with f32 masters and moments.
    Bf16,
    /// IEEE binary16, with f32 masters and moments, and a scaled loss.
    Fp16,
    /// e4m3 in the products of encoder layers, bfloat16 elsewhere; for inference.
    Fp8,
    /// Integers of 8 bits there; for inference.
    Int8,
}

impl Precision {
    /// The element type of what is not in codes.
    pub fn dtype(self) -> DType {
        match self {
            Self::F32 | Self::Tf32 => DType::F32,
            Self::Bf16 | Self::Fp8 | Self::Int8 => DType::Bf16,
            Self::Fp16 => DType::F16,
        }
    }

    /// The type of the codes, if there are any.
    pub fn codes(self) -> Option<DType> {
        match self {
            Self::F32 | Self::Tf32 | Self::Bf16 | Self::Fp16 => None,
            Self::Fp8 => Some(DType::F8),
            Self::Int8 => Some(DType::I8),
        }
    }

    /// The name in configurations and reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::Tf32 => "tf32",
            Self::Bf16 => "bf16",
            Self::Fp16 => "fp16",
            Self::Fp8 => "fp8",
            Self::Int8 => "int8",
        }
    }
}

/// The graph with weights of linears, experts, embeddings and losses in `precision`, and activations as they follow
/// from it. Norms' parameters and positions stay f32.
///
/// # Errors
/// [`PlanError::BadPolicy`] where an input of f32 would keep the graph in f32; [`PlanError::Verify`] where an op
/// does not take the element types: our bug.
pub fn precision(graph: &Graph, precision: Precision) -> Result<Graph, PlanError> {
    if precision.dtype() == DType::F32 {
        return Ok(graph.clone());
    }
    if let Some((name, _)) = graph.inputs.iter().find(|(_, v)| graph.spec(*v).dtype.is_float()) {
        let why = format!("`{name}` is given in f32, so {} would save nothing; train in f32", precision.name());
        return Err(PlanError::BadPolicy { field: "precision", why });
    }
    let mut g = graph.clone();
    for node in &graph.nodes {
        if !reads_weights(&node.op) {
            continue;
        }
        for &v in &node.inputs {
            if let (Role::Param(_), true) = (graph.spec(v).role, graph.spec(v).dtype.is_float()) {
                g.values[v.index()].spec.dtype = precision.dtype();
            }
        }
    }
    for (id, node) in graph.nodes() {
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

/// The same for inference: the norms that nothing but outputs and their means depend on compute and give f32, and what
/// is still of 16 bits becomes f32 where it is an output.
///
/// # Errors
/// Those of [`precision`].
pub fn inference(graph: &Graph, element: Precision) -> Result<Graph, PlanError> {
    if element.dtype() == DType::F32 {
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

/// The graph with a cast to f32 in front of every norm that only outputs and their means depend on.
fn widen_last_norms(graph: &Graph) -> Graph {
    let last = last(graph);
    let mut g = Graph { nodes: vec![], ..graph.clone() };
    for (id, node) in graph.nodes() {
        let mut node = node.clone();
        let norm = matches!(node.op, Op::LayerNorm(_) | Op::RmsNorm(_));
        let given = graph.value(node.inputs[0]).def;
        let from_last = matches!(given, Def::Node(from, _) if last[from.index()]);
        if norm && last[id.index()] && !from_last {
            node.inputs[0] = cast(&mut g, node.inputs[0], node.layer);
        }
        push_node(&mut g, node);
    }
    g
}

/// By node: whether it is a norm, a mean or a choice of rows on which nothing but such nodes and outputs depend.
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

fn is_last(op: &Op) -> bool {
    matches!(op, Op::LayerNorm(_) | Op::RmsNorm(_) | Op::SegmentMean(_) | Op::SelectRows(_))
}

fn layer_of(g: &Graph, v: ValueId) -> Option<u32> {
    match g.value(v).def {
        Def::Node(id, _) => g.node(id).layer,
        Def::Source => None,
    }
}

/// `v` in f32.
fn cast(g: &mut Graph, v: ValueId, layer: Option<u32>) -> ValueId {
    let spec = TensorSpec::activation(g.spec(v).shape.clone(), DType::F32);
    let wide = ValueId::at(g.values.len());
    g.values.push(Value { spec, def: Def::Source });
    let op = Op::Cast(Cast { to: DType::F32 });
    push_node(g, Node { op, inputs: vec![v], outputs: vec![Some(wide)], layer, phase: Phase::Forward });
    wide
}

/// Whether an op multiplies by its parameters or looks them up. Norms scale by theirs.
fn reads_weights(op: &Op) -> bool {
    let products = op.rules().precision() == plimsoll_graph::PrecisionClass::Matmul;
    products || matches!(op, Op::Embed(_))
}
