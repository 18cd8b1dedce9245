//! Placement of the new values of states. Invariant: a new value is written directly into the storage of its
//! state wherever the old value is no longer read; otherwise it is copied there immediately after the last read
//! of the old value.

use crate::sharing::Sharing;
use plimsoll_graph::{Def, Graph, NodeId, ValueId};

/// How the updates of a graph are performed.
pub(crate) struct Updates {
    /// The state into whose storage a value is written directly, indexed by value.
    pub(crate) home: Vec<Option<ValueId>>,
    /// Pairs (state, new value) that are copied after each node, indexed by node.
    pub(crate) copies: Vec<Vec<(ValueId, ValueId)>>,
    /// Pairs (state, new value) that are copied before the first node: the new value is an input or a
    /// parameter, and the old value is never read.
    pub(crate) before: Vec<(ValueId, ValueId)>,
}

impl Updates {
    pub(crate) fn of(graph: &Graph, sharing: Sharing) -> Self {
        let last = last_reads(graph);
        let mut updates = Self {
            home: vec![None; graph.values.len()],
            copies: vec![vec![]; graph.nodes.len()],
            before: vec![],
        };
        for &(state, new) in &graph.updates {
            let read = last[state.index()];
            match graph.value(new).def {
                Def::Node(id, k) if sharing.states && written_there(graph, state, id, k as usize, read) => {
                    match &mut updates.home[new.index()] {
                        home @ None => *home = Some(state),
                        // The value is the new value of two states and can be written directly into only one of
                        // them.
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

/// The last node that reads each value, indexed by value.
fn last_reads(graph: &Graph) -> Vec<Option<NodeId>> {
    let mut last = vec![None; graph.values.len()];
    for (id, node) in graph.nodes() {
        for v in &node.inputs {
            last[v.index()] = Some(id);
        }
    }
    last
}

/// Whether output `k` of a node can be written directly into the storage of `state`, whose last read is by node
/// `read`.
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
