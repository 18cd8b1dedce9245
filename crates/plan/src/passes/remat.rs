//! Recomputation (Chen et al. 2016): what the backward pass reads is computed once more right before it is read,
//! in place of being kept since the forward pass. Invariant: the same ops run on the same values, so gradients
//! have the same bits; what crosses from one group of layers to the next is always kept.

use super::push_node;
use crate::PlanError;
use plimsoll_graph::{Def, Graph, Node, NodeId, Op, Phase, Role, Value, ValueId};
use std::collections::BTreeSet;

/// What is computed twice.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Remat {
    /// Nothing: all that the backward pass reads is kept.
    #[default]
    None,
    /// Every layer, from its input.
    Full,
    /// Groups of so many layers, each from its input.
    EveryN(u32),
    /// What these ops give.
    Selective(Vec<String>),
    /// What these forward nodes give.
    Nodes(BTreeSet<NodeId>),
    /// Another policy, in the layers from the first to the last alone.
    Layers {
        /// The first layer, from 0.
        first: u32,
        /// The last layer.
        last: u32,
        /// What is computed twice there.
        of: Box<Remat>,
    },
}

/// The graph in which the backward pass recomputes as `policy` says.
///
/// # Errors
/// [`PlanError::BadPolicy`] where it names no op, or groups of no layers.
pub fn remat(graph: &Graph, policy: &Remat) -> Result<Graph, PlanError> {
    let dropped = dropped(graph, policy)?;
    let mut rewriter = Rewriter {
        old: graph,
        new: Graph {
            values: graph.values.clone(),
            params: graph.params.clone(),
            states: graph.states.clone(),
            inputs: graph.inputs.clone(),
            outputs: graph.outputs.clone(),
            updates: graph.updates.clone(),
            ..Graph::new(graph.bounds)
        },
        dropped,
        twins: vec![None; graph.values.len()],
    };
    for node in &graph.nodes {
        let mut node = node.clone();
        if node.phase == Phase::Backward {
            node.inputs = node.inputs.iter().map(|&v| rewriter.again(v)).collect();
        }
        push_node(&mut rewriter.new, node);
    }
    Ok(rewriter.new)
}

/// By node: whether what it gives is not kept for the backward pass.
fn dropped(graph: &Graph, policy: &Remat) -> Result<Vec<bool>, PlanError> {
    let bad = |why: String| Err(PlanError::BadPolicy { field: "remat", why });
    let forward = |node: &Node| node.phase == Phase::Forward;
    Ok(match policy {
        Remat::None => vec![false; graph.nodes.len()],
        Remat::Full => inner(graph, 1),
        Remat::EveryN(0) => return bad("groups of 0 layers".to_owned()),
        Remat::EveryN(n) => inner(graph, *n),
        Remat::Selective(names) => {
            if let Some(name) = names.iter().find(|name| !Op::NAMES.contains(&name.as_str())) {
                return bad(format!("there is no op `{name}`; ops are {}", Op::NAMES.join(", ")));
            }
            graph.nodes.iter().map(|n| forward(n) && names.iter().any(|name| name == n.op.name())).collect()
        }
        Remat::Nodes(nodes) => graph.nodes().map(|(id, n)| forward(n) && nodes.contains(&id)).collect(),
        Remat::Layers { first, last, of } => {
            let inside = |node: &Node| node.layer.is_some_and(|layer| (*first..=*last).contains(&layer));
            let of = dropped(graph, of)?;
            graph.nodes.iter().zip(of).map(|(node, dropped)| dropped && inside(node)).collect()
        }
    })
}

/// Forward nodes of layers whose values stay in their group of `n` layers.
fn inner(graph: &Graph, n: u32) -> Vec<bool> {
    let group = |node: &Node| node.layer.map(|layer| layer / n);
    let mut inner: Vec<bool> =
        graph.nodes.iter().map(|node| node.phase == Phase::Forward && node.layer.is_some()).collect();
    for node in graph.nodes.iter().filter(|node| node.phase == Phase::Forward) {
        for v in &node.inputs {
            if let Def::Node(id, _) = graph.value(*v).def {
                inner[id.index()] &= group(graph.node(id)) == group(node);
            }
        }
    }
    for (_, v) in &graph.outputs {
        if let Def::Node(id, _) = graph.value(*v).def {
            inner[id.index()] = false;
        }
    }
    inner
}

struct Rewriter<'a> {
    old: &'a Graph,
    new: Graph,
    dropped: Vec<bool>,
    /// By value: the one that was computed again.
    twins: Vec<Option<ValueId>>,
}

impl Rewriter<'_> {
    /// The value that the backward pass reads in place of `v`.
    fn again(&mut self, v: ValueId) -> ValueId {
        let Def::Node(id, _) = self.old.value(v).def else { return v };
        if !self.dropped[id.index()] {
            return v;
        }
        if let Some(twin) = self.twins[v.index()] {
            return twin;
        }
        let mut node = self.old.node(id).clone();
        node.phase = Phase::Recompute;
        node.inputs = node.inputs.iter().map(|&v| self.again(v)).collect();
        for out in node.outputs.iter_mut().flatten() {
            let spec = self.old.spec(*out).clone().with_role(Role::Activation);
            let twin = ValueId::at(self.new.values.len());
            self.new.values.push(Value { spec, def: Def::Source });
            self.twins[out.index()] = Some(twin);
            *out = twin;
        }
        push_node(&mut self.new, node);
        self.twins[v.index()].unwrap_or(v)
    }
}
