//! Stores activations outside the arena from the forward to the backward pass: a move takes each away behind the node that
//! computes it, and another brings a copy back before the first node that reads it after the forward pass. Invariant: the
//! graph computes the same function, and no node of the forward pass reads a copy.

use super::offload::{LayerPhase, push_move, route};
use super::push_node;
use plimsoll_graph::{Def, Graph, NodeId, Phase, Role, Space, ValueId};
use std::collections::{BTreeMap, BTreeSet};

/// Which activations are stored outside the arena from the forward to the backward pass.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum ActivationOffload {
    /// The activations of all layers but the last, whose backward pass follows its forward pass at once. Of each layer, the
    /// activations of at least a 16th of the bytes of its largest: a copy of a small one takes longer than its bytes are
    /// worth.
    #[default]
    All,
    /// The results of these forward nodes.
    Nodes(BTreeSet<NodeId>),
}

/// Largest ratio of the largest activation of a layer to one that [`ActivationOffload::All`] moves.
const MAX_SIZE_RATIO: u64 = 16;

impl ActivationOffload {
    /// No activations.
    pub const NONE: Self = Self::Nodes(BTreeSet::new());

    /// The values of a graph, among those that nodes behind the forward pass read.
    fn values(&self, graph: &Graph) -> BTreeSet<ValueId> {
        let stored = stored(graph);
        match self {
            Self::Nodes(nodes) => {
                stored.into_iter().filter(|(_, id)| nodes.contains(id)).map(|(v, _)| v).collect()
            }
            Self::All => {
                let mut largest: BTreeMap<u32, u64> = BTreeMap::new();
                for &(v, id) in &stored {
                    if let Some(layer) = graph.node(id).layer {
                        let most = largest.entry(layer).or_default();
                        *most = graph.spec(v).bytes(&graph.bounds).0.max(*most);
                    }
                }
                let last = largest.keys().next_back().copied();
                let mut values = BTreeSet::new();
                for (v, id) in stored {
                    let Some(layer) = graph.node(id).layer.filter(|&layer| Some(layer) != last) else {
                        continue;
                    };
                    if graph.spec(v).bytes(&graph.bounds).0 >= largest[&layer] / MAX_SIZE_RATIO {
                        values.insert(v);
                    }
                }
                values
            }
        }
    }
}

/// The activations that forward nodes of layers compute and later nodes read, each with its node. New values of states are not
/// among them: they lie in the storage of the state.
fn stored(graph: &Graph) -> Vec<(ValueId, NodeId)> {
    let mut stored: BTreeMap<ValueId, NodeId> = BTreeMap::new();
    for node in graph.nodes.iter().filter(|node| node.phase != Phase::Forward) {
        for &v in &node.inputs {
            if let (Def::Node(id, _), Role::Activation) = (graph.value(v).def, graph.spec(v).role)
                && graph.node(id).phase == Phase::Forward
                && graph.node(id).layer.is_some()
            {
                stored.insert(v, id);
            }
        }
    }
    for (_, new) in &graph.updates {
        stored.remove(new);
    }
    stored.into_iter().collect()
}

/// Returns the graph with the chosen activations in the space `to` between the forward and the backward pass. `arena_in_host`
/// says that the arena is host memory, which a file is read into directly.
pub fn offload_activations(graph: &Graph, which: &ActivationOffload, to: Space, arena_in_host: bool) -> Graph {
    let values = which.values(graph);
    if values.is_empty() {
        return graph.clone();
    }
    let route = route(to, arena_in_host);
    let mut g = Graph { nodes: vec![], ..graph.clone() };
    let mut away: BTreeMap<ValueId, ValueId> = BTreeMap::new();
    let mut back: BTreeMap<ValueId, ValueId> = BTreeMap::new();
    for node in &graph.nodes {
        let mut node = node.clone();
        let position = LayerPhase::of(&node);
        if node.phase != Phase::Forward {
            for input in &mut node.inputs {
                if let Some(&stored) = away.get(input) {
                    *input = *back.entry(*input).or_insert_with(|| {
                        route[1..].iter().fold(stored, |from, &to| push_move(&mut g, from, to, position))
                    });
                }
            }
        }
        let outputs: Vec<ValueId> = node.outputs.iter().flatten().copied().collect();
        push_node(&mut g, node);
        for v in outputs.into_iter().filter(|v| values.contains(v)) {
            let stored = route.iter().rev().skip(1).fold(v, |from, &to| push_move(&mut g, from, to, position));
            away.insert(v, stored);
        }
    }
    g
}
