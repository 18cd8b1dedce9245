//! Element types of a training graph, before it is differentiated: gradients then get theirs from the values that
//! they belong to. Invariant: what the ops call [sensitive](graph::PrecisionClass::Sensitive) computes in f32
//! whatever its operands are, and every choice is the element type of a value.

use crate::PlanError;
use graph::{DType, Graph, Op, Role, TensorSpec};
use serde::{Deserialize, Serialize};

/// The element type of weights and activations.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Precision {
    /// IEEE binary32 everywhere.
    #[default]
    F32,
    /// bfloat16, with f32 masters and moments.
    Bf16,
    /// IEEE binary16, with f32 masters and moments, and a scaled loss.
    Fp16,
}

impl Precision {
    /// The element type.
    pub fn dtype(self) -> DType {
        match self {
            Self::F32 => DType::F32,
            Self::Bf16 => DType::Bf16,
            Self::Fp16 => DType::F16,
        }
    }

    /// The name in configurations and reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
            Self::Fp16 => "fp16",
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
    if precision == Precision::F32 {
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

/// Whether an op multiplies by its parameters or looks them up. Norms scale by theirs.
fn reads_weights(op: &Op) -> bool {
    let products = op.rules().precision() == graph::PrecisionClass::Matmul;
    products || matches!(op, Op::Embed(_))
}
