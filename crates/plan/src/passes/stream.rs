//! Splits streamed parameters: each node reads its own copy of a parameter, which is loaded from the weight file
//! immediately before that node, so that no parameter stays in memory between two uses. Invariant: the graph computes
//! the same function; a parameter that is an output or takes part in an update is not streamed, because its storage
//! is read after the step.

use plimsoll_graph::{Def, Graph, Role, Value, ValueId};

/// Returns the graph with a separate value for each node that reads a streamed parameter.
pub fn stream(graph: &Graph) -> Graph {
    let mut g = graph.clone();
    let streamed = streamed(graph);
    let mut taken = vec![false; graph.values.len()];
    for i in 0..g.nodes.len() {
        let mut inputs = graph.nodes[i].inputs.clone();
        for k in 0..inputs.len() {
            let v = graph.nodes[i].inputs[k];
            if !streamed[v.index()] {
                continue;
            }
            // A node that reads a parameter as two of its inputs loads it only once.
            let before = graph.nodes[i].inputs[..k].iter().position(|&u| u == v);
            inputs[k] = match before {
                Some(j) => inputs[j],
                None if std::mem::replace(&mut taken[v.index()], true) => copy(&mut g, v),
                None => v,
            };
        }
        g.nodes[i].inputs = inputs;
    }
    g
}

/// Whether each value is a parameter that can be loaded from the weight file in every step. Indexed by value.
pub(crate) fn streamed(graph: &Graph) -> Vec<bool> {
    let is_param = |role| match role {
        Role::Param(_) => true,
        Role::Input | Role::Activation | Role::Grad | Role::State(_) => false,
    };
    let mut streamed: Vec<bool> = graph.values.iter().map(|v| is_param(v.spec.role)).collect();
    let outputs = graph.outputs.iter().map(|(_, v)| *v);
    for v in outputs.chain(graph.updates.iter().flat_map(|&(state, new)| [state, new])) {
        streamed[v.index()] = false;
    }
    streamed
}

/// Adds another value of the same parameter.
fn copy(g: &mut Graph, v: ValueId) -> ValueId {
    let spec = g.spec(v).clone();
    g.values.push(Value { spec, def: Def::Source });
    ValueId::at(g.values.len() - 1)
}
