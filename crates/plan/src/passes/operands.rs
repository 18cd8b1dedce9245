//! Number formats in which linears and their gradients multiply. Runs after differentiation, because the gradients may
//! have another format than the linears. Invariant: no other pass sets [`Linear::operands`](plimsoll_graph::ops::Linear).

use super::quantize::quantize;
use crate::{PlanError, Precision};
use plimsoll_graph::{Graph, Op};

/// Returns the graph with the operands of `precision` in its linears and their gradients: marked where a kernel rounds
/// operands while it reads them, quantized before the op where it reads quantized values.
///
/// # Errors
/// [`PlanError::BadPolicy`] if the graph has no linear, or none that can be quantized.
pub fn operands(graph: &Graph, precision: Precision) -> Result<Graph, PlanError> {
    let policy = precision.policy();
    let quantizes = policy.forward.quantized().is_some();
    let mut g = if quantizes { quantize(graph, precision)? } else { rounded(graph, precision)? };
    if let Some(backward) = policy.backward {
        for node in &mut g.nodes {
            if let Op::LinearInputGrad(op) = &mut node.op {
                op.operands = backward;
            } else if let Op::LinearWeightGrad(op) = &mut node.op {
                op.operands = backward;
            }
        }
    }
    Ok(g)
}

/// Returns the graph with the operands of `precision` in all linears, which round them while they read them.
fn rounded(graph: &Graph, precision: Precision) -> Result<Graph, PlanError> {
    let mut g = graph.clone();
    let mut found = false;
    for node in &mut g.nodes {
        if let Op::Linear(op) = &mut node.op {
            op.operands = precision.policy().forward;
            found = true;
        }
    }
    if found {
        return Ok(g);
    }
    let why = format!("{} is for linear layers, and the model has none", precision.name());
    Err(PlanError::BadPolicy { field: "precision", why })
}
