//! Rematerialization (Chen et al. 2016, arXiv:1604.06174): values that the backward pass reads are recomputed
//! immediately before use instead of being stored since the forward pass. Invariant: recomputation runs the same ops
//! on the same operands, so the gradients are bitwise equal; under [`RecomputePolicy::Full`] and [`RecomputePolicy::EveryN`] a value that
//! is read by another group of layers is always stored.

use super::push_node;
use crate::PlanError;
use plimsoll_graph::{Def, Graph, Node, NodeId, Op, Phase, Role, Value, ValueId};
use std::collections::BTreeSet;

/// Rematerialization policy: the values that the backward pass recomputes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum RecomputePolicy {
    /// No recomputation: all values that the backward pass reads are stored.
    #[default]
    None,
    /// Recomputes every layer from its input.
    Full,
    /// Recomputes groups of this number of layers, each from the input of its first layer.
    EveryN(u32),
    /// Recomputes the results of the forward nodes with these op names.
    Selective(Vec<String>),
    /// Recomputes the results of these forward nodes.
    Nodes(BTreeSet<NodeId>),
    /// Applies another policy to a range of layers only.
    Layers {
        /// First layer, counted from 0.
        first: u32,
        /// Last layer, inclusive.
        last: u32,
        /// Policy of these layers.
        of: Box<RecomputePolicy>,
    },
}

/// Returns the differentiated graph with recomputation according to `policy`.
///
/// # Errors
/// [`PlanError::BadPolicy`] if the policy names an unknown op or has groups of 0 layers.
pub fn remat(graph: &Graph, policy: &RecomputePolicy) -> Result<Graph, PlanError> {
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
        copies: vec![None; graph.values.len()],
    };
    for node in &graph.nodes {
        let mut node = node.clone();
        if node.phase == Phase::Backward {
            node.inputs = node.inputs.iter().map(|&v| rewriter.recomputed(v)).collect();
        }
        push_node(&mut rewriter.new, node);
    }
    Ok(rewriter.new)
}

/// Whether the results of each node are recomputed instead of stored. Indexed by node.
fn dropped(graph: &Graph, policy: &RecomputePolicy) -> Result<Vec<bool>, PlanError> {
    Ok(match policy {
        RecomputePolicy::None => vec![false; graph.nodes.len()],
        RecomputePolicy::Full => read_only_in_group(graph, 1),
        RecomputePolicy::EveryN(0) => return Err(bad_remat("groups of 0 layers".to_owned())),
        RecomputePolicy::EveryN(n) => read_only_in_group(graph, *n),
        RecomputePolicy::Selective(names) => {
            if let Some(name) = names.iter().find(|name| !Op::NAMES.contains(&name.as_str())) {
                return Err(bad_remat(format!("there is no op `{name}`; ops are {}", Op::NAMES.join(", "))));
            }
            let nodes = graph.nodes.iter();
            nodes.map(|n| n.phase == Phase::Forward && names.iter().any(|name| name == n.op.name())).collect()
        }
        RecomputePolicy::Nodes(nodes) => {
            graph.nodes().map(|(id, n)| n.phase == Phase::Forward && nodes.contains(&id)).collect()
        }
        RecomputePolicy::Layers { first, last, of } => {
            let mut dropped = dropped(graph, of)?;
            for (dropped, node) in dropped.iter_mut().zip(&graph.nodes) {
                *dropped &= node.layer.is_some_and(|layer| (*first..=*last).contains(&layer));
            }
            dropped
        }
    })
}

fn bad_remat(why: String) -> PlanError {
    PlanError::BadPolicy { field: "remat", why }
}

/// Forward nodes whose results are read in the forward pass only by their own group of `n` layers, and are no outputs
/// of the graph. Indexed by node.
fn read_only_in_group(graph: &Graph, n: u32) -> Vec<bool> {
    let mut inner: Vec<bool> =
        graph.nodes.iter().map(|node| node.phase == Phase::Forward && node.layer.is_some()).collect();
    for node in graph.nodes.iter().filter(|node| node.phase == Phase::Forward) {
        for v in &node.inputs {
            if let Def::Node(id, _) = graph.value(*v).def {
                inner[id.index()] &= group(graph.node(id), n) == group(node, n);
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

/// Group of `n` layers that a node belongs to.
fn group(node: &Node, n: u32) -> Option<u32> {
    node.layer.map(|layer| layer / n)
}

/// State of the rewrite.
struct Rewriter<'a> {
    old: &'a Graph,
    new: Graph,
    /// Whether the results of each node are recomputed.
    dropped: Vec<bool>,
    /// Recomputed copy of each value, if it exists already.
    copies: Vec<Option<ValueId>>,
}

impl Rewriter<'_> {
    /// Returns the value that the backward pass reads instead of `v`: `v` itself if it is stored, otherwise its
    /// recomputed copy. Appends the recomputing nodes on first use, so that they run immediately before the first
    /// backward node that needs them.
    fn recomputed(&mut self, v: ValueId) -> ValueId {
        let Def::Node(id, _) = self.old.value(v).def else { return v };
        if !self.dropped[id.index()] {
            return v;
        }
        if let Some(copy) = self.copies[v.index()] {
            return copy;
        }
        let mut node = self.old.node(id).clone();
        node.phase = Phase::Recompute;
        node.inputs = node.inputs.iter().map(|&v| self.recomputed(v)).collect();
        for out in node.outputs.iter_mut().flatten() {
            let spec = self.old.spec(*out).clone().with_role(Role::Activation);
            let copy = ValueId::at(self.new.values.len());
            self.new.values.push(Value { spec, def: Def::Source });
            self.copies[out.index()] = Some(copy);
            *out = copy;
        }
        push_node(&mut self.new, node);
        self.copies[v.index()].unwrap_or(v)
    }
}
