//! Assigns weights the layout that the kernels of the target read. Invariant: a weight that is also read by another
//! op, or is an output, stays row-major; its matmuls then read a packed copy, which the ledger counts.

use crate::{PlanError, Target};
use plimsoll_graph::{Def, Graph, Layout, Role, Value, ValueId};

/// Returns the graph with every weight in the layout that its kernel on `target` requires.
///
/// # Errors
/// [`PlanError::Unsupported`] if no kernel of the target accepts a node, or if a kernel requires a packed weight but
/// the weight is computed or updated: weights are packed only when they are loaded from the file, so the kernel would
/// misread the row-major elements.
pub fn layout(graph: &Graph, target: &Target) -> Result<Graph, PlanError> {
    let mut g = graph.clone();
    let (updated, by_others) = readers(graph);
    for i in 0..g.nodes.len() {
        for &k in g.nodes[i].op.weights() {
            let weight = g.nodes[i].inputs[k];
            let found = g.spec(weight).layout;
            let preferred = target.kernels.accepting(&g, &g.nodes[i]).next();
            let wanted = preferred.ok_or_else(|| target.unsupported(&g, &g.nodes[i]))?.weights();
            if found == wanted {
                continue;
            }
            if !matches!(g.spec(weight).role, Role::Param(_)) || updated[weight.index()] {
                let (op, dtype) = ("linear with a weight that is computed or updated", g.spec(weight).dtype);
                return Err(PlanError::Unsupported { ops: vec![(op, dtype)], target: target.name.clone() });
            }
            if by_others[weight.index()] {
                let copy = packed_copy(&mut g, weight, wanted);
                g.nodes[i].inputs[k] = copy;
            } else {
                g.values[weight.index()].spec.layout = wanted;
            }
        }
    }
    Ok(g)
}

/// Two flags for each value: whether it is updated, and whether it is read other than as the weight of an op. Graph
/// outputs and new values of updates count as such reads.
fn readers(g: &Graph) -> (Vec<bool>, Vec<bool>) {
    let (mut updated, mut by_others) = (vec![false; g.values.len()], vec![false; g.values.len()]);
    for node in &g.nodes {
        for (j, v) in node.inputs.iter().enumerate() {
            by_others[v.index()] |= !node.op.weights().contains(&j);
        }
    }
    for (_, v) in &g.outputs {
        by_others[v.index()] = true;
    }
    for (state, new) in &g.updates {
        updated[state.index()] = true;
        by_others[new.index()] = true;
    }
    (updated, by_others)
}

/// Returns the packed copy of a weight. It has the role of the weight, that is, the same parameter. Created once and
/// shared by all ops that read it.
fn packed_copy(g: &mut Graph, weight: ValueId, layout: Layout) -> ValueId {
    let mut spec = g.spec(weight).clone();
    spec.layout = layout;
    let twin = g.values().find(|(_, v)| v.spec == spec).map(|(id, _)| id);
    twin.unwrap_or_else(|| {
        g.values.push(Value { spec, def: Def::Source });
        ValueId::at(g.values.len() - 1)
    })
}
