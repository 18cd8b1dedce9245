//! TF32 for linears: operands may be rounded to TF32 (10 bits of mantissa). Runs before differentiation, which gives the
//! gradients of such linears in TF32. Invariant: every value and every sum stays f32.

use crate::PlanError;
use plimsoll_graph::{Graph, Op};

/// Returns the graph with TF32 enabled for all linears.
///
/// # Errors
/// [`PlanError::BadPolicy`] if the graph has no linear.
pub fn tf32(graph: &Graph) -> Result<Graph, PlanError> {
    let (mut g, mut found) = (graph.clone(), false);
    for node in &mut g.nodes {
        if let Op::Linear(linear) = &mut node.op {
            (linear.tf32, found) = (true, true);
        }
    }
    match found {
        true => Ok(g),
        false => {
            let why = "tf32 is for linear layers, and the model has none".to_owned();
            Err(PlanError::BadPolicy { field: "precision", why })
        }
    }
}
