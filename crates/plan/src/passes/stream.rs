//! A copy of a streamed parameter for each node that reads it, so that each is read from its file right before
//! its use and none has to survive between two. Invariant: the computation is the same; a parameter that is an
//! output or takes part in an update is not streamed, because its storage is read after the step.

use plimsoll_graph::{Def, Graph, Role, Value, ValueId};

/// The graph in which no streamed parameter has two readers.
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
            // A node that reads a parameter twice needs it once.
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

/// By value: whether it is a parameter that can be read from its file in every step.
pub(crate) fn streamed(graph: &Graph) -> Vec<bool> {
    let is_param = |role| match role {
        Role::Param(_) => true,
        Role::Input | Role::Activation | Role::Grad | Role::State(_) | Role::Scratch => false,
    };
    let mut streamed: Vec<bool> = graph.values.iter().map(|v| is_param(v.spec.role)).collect();
    let outputs = graph.outputs.iter().map(|(_, v)| *v);
    for v in outputs.chain(graph.updates.iter().flat_map(|&(state, new)| [state, new])) {
        streamed[v.index()] = false;
    }
    streamed
}

fn copy(g: &mut Graph, v: ValueId) -> ValueId {
    let spec = g.spec(v).clone();
    g.values.push(Value { spec, def: Def::Source });
    ValueId::at(g.values.len() - 1)
}
