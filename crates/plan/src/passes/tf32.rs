//! Linear products on factors cut to TF32. Invariant: nothing else changes: every value, and every sum, stays f32.

use crate::PlanError;
use plimsoll_graph::{Graph, Op};

/// The graph with its linears on TF32.
///
/// # Errors
/// [`PlanError::BadPolicy`] where it has none.
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
