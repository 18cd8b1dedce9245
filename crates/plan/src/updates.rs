//! Where the new value of a state is written. Invariant: a new value lies in its state's storage from the start
//! wherever nobody reads the old one any more; elsewhere it is copied there, as soon as that is so.

use graph::{Def, Graph, NodeId, ValueId};

/// How the updates of a graph are carried out.
pub(crate) struct Updates {
    /// By value: the state in whose storage it is written.
    pub(crate) home: Vec<Option<ValueId>>,
    /// By node: the (state, new) that are copied behind it.
    pub(crate) copies: Vec<Vec<(ValueId, ValueId)>>,
    /// Those that need no node: a state becomes an input or a parameter that nobody reads.
    pub(crate) before: Vec<(ValueId, ValueId)>,
}

impl Updates {
    pub(crate) fn of(graph: &Graph) -> Self {
        let last = last_reads(graph);
        let mut updates = Self {
            home: vec![None; graph.values.len()],
            copies: vec![vec![]; graph.nodes.len()],
            before: vec![],
        };
        for &(state, new) in &graph.updates {
            let read = last[state.index()];
            match graph.value(new).def {
                Def::Node(id, k) if written_there(graph, state, id, k as usize, read) => {
                    match &mut updates.home[new.index()] {
                        home @ None => *home = Some(state),
                        // It is the new value of two states and can only be written into one.
                        Some(_) => updates.copies[id.index()].push((state, new)),
                    }
                }
                Def::Node(id, _) => {
                    let after = read.map_or(id, |read| read.max(id));
                    updates.copies[after.index()].push((state, new));
                }
                Def::Source => match read {
                    Some(after) => updates.copies[after.index()].push((state, new)),
                    None => updates.before.push((state, new)),
                },
            }
        }
        updates
    }
}

/// By value: the last node that reads it.
fn last_reads(graph: &Graph) -> Vec<Option<NodeId>> {
    let mut last = vec![None; graph.values.len()];
    for (id, node) in graph.nodes() {
        for v in &node.inputs {
            last[v.index()] = Some(id);
        }
    }
    last
}

/// Whether output `k` of a node can be written into the storage of `state`, which is read last at `read`.
fn written_there(graph: &Graph, state: ValueId, id: NodeId, k: usize, read: Option<NodeId>) -> bool {
    match read {
        None => true,
        Some(read) if read == id => {
            let node = graph.node(id);
            let allowed = node.op.rules().alias(k);
            node.inputs.iter().enumerate().all(|(j, &v)| v != state || allowed.contains(&j))
        }
        Some(read) => read < id,
    }
}
