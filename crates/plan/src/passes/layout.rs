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
    let uses = weight_uses(graph);
    for i in 0..g.nodes.len() {
        for &k in g.nodes[i].op.weights() {
            let weight = g.nodes[i].inputs[k];
            let found = g.spec(weight).layout;
            let preferred = target.kernels.accepting(&g, &g.nodes[i]).next();
            let wanted = preferred.ok_or_else(|| target.unsupported(&g, &g.nodes[i]))?.weights();
            if found == wanted {
                continue;
            }
            if !matches!(g.spec(weight).role, Role::Param(_)) || uses[weight.index()].is_updated {
                let op = "linear with a weight that is computed or updated";
                let ops = vec![(op, g.spec(weight).dtype)];
                return Err(PlanError::Unsupported { ops, target: target.name.clone() });
            }
            if uses[weight.index()].has_other_readers {
                let copy = packed_copy(&mut g, weight, wanted);
                g.nodes[i].inputs[k] = copy;
            } else {
                g.values[weight.index()].spec.layout = wanted;
            }
        }
    }
    Ok(g)
}

/// Uses of a value other than as the weight of an op.
#[derive(Clone, Copy, Default)]
struct WeightUses {
    is_updated: bool,
    /// Whether it is read other than as a weight: by a node, as an output of the graph, or as the new value of an update.
    has_other_readers: bool,
}

/// Uses of each value, indexed by value.
fn weight_uses(g: &Graph) -> Vec<WeightUses> {
    let mut uses = vec![WeightUses::default(); g.values.len()];
    for node in &g.nodes {
        for (j, v) in node.inputs.iter().enumerate() {
            uses[v.index()].has_other_readers |= !node.op.weights().contains(&j);
        }
    }
    for (_, v) in &g.outputs {
        uses[v.index()].has_other_readers = true;
    }
    for (state, new) in &g.updates {
        uses[state.index()].is_updated = true;
        uses[new.index()].has_other_readers = true;
    }
    uses
}

/// Returns the packed copy of a weight. It has the role of the weight, that is, the same parameter. Created once and
/// shared by all ops that read it.
fn packed_copy(g: &mut Graph, weight: ValueId, layout: Layout) -> ValueId {
    let mut spec = g.spec(weight).clone();
    spec.layout = layout;
    let known = g.values().find(|(_, v)| v.spec == spec).map(|(id, _)| id);
    known.unwrap_or_else(|| {
        g.values.push(Value { spec, def: Def::Source });
        ValueId::at(g.values.len() - 1)
    })
}
