//! Weights in the order in which the target's kernels stream them. Invariant: a weight that anything but
//! products reads keeps its rows, and the products get a packed copy of their own, which the ledger shows.

use crate::{PlanError, Target};
use plimsoll_graph::{Def, Graph, Layout, Role, Value, ValueId};

/// The graph with the layouts of `target`.
///
/// # Errors
/// [`PlanError::Unsupported`] where the kernel streams packed weights and a weight cannot be packed when it
/// is loaded, because it is computed or updated: its rows would be read as panels.
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

/// By value: whether it is updated, and whether anything but a product reads it, or one as anything but its
/// weight.
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

/// The packed twin of a weight: made once, shared by all linears that read it.
fn packed_copy(g: &mut Graph, weight: ValueId, layout: Layout) -> ValueId {
    let mut spec = g.spec(weight).clone();
    spec.layout = layout;
    let twin = g.values().find(|(_, v)| v.spec == spec).map(|(id, _)| id);
    twin.unwrap_or_else(|| {
        g.values.push(Value { spec, def: Def::Source });
        ValueId::at(g.values.len() - 1)
    })
}
