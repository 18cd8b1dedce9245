//! Which values of a layer are kept and which are computed again: every choice that no other one beats in both
//! bytes and time. A layer is solved once for all that are like it, over all subsets of its values; choices of the
//! layers are put together by dynamic programming over kept bytes. Invariant: a choice's bytes and seconds are the sums
//! of its parts; what a plan really takes is asked of the plan.

use crate::Target;
use crate::cost::node_seconds;
use graph::{Bytes, Graph, NodeId, Phase, ValueId};
use std::collections::{BTreeMap, BTreeSet};

/// What is recomputed, and what that costs.
#[derive(Clone, Debug, PartialEq)]
pub struct Choice {
    /// The nodes whose results are not kept.
    pub nodes: BTreeSet<NodeId>,
    /// Bytes that are kept from the forward to the backward pass.
    pub kept: Bytes,
    /// Expected seconds of recomputation.
    pub seconds: f64,
}

/// As many nodes of a layer are tried in every combination; where it has more, those that give least are kept.
const NODES: usize = 14;

/// The undominated choices for the differentiated graph of a micro-step, fewest kept bytes first.
pub fn frontier(graph: &Graph, target: &Target) -> Vec<Choice> {
    let mut solved: BTreeMap<String, Vec<Way>> = BTreeMap::new();
    let mut layers: Vec<(Vec<NodeId>, Vec<Way>)> = vec![];
    for (_, nodes) in by_layer(graph) {
        let block = Block::of(graph, target, &nodes);
        let options = solved.entry(block.signature(graph)).or_insert_with(|| block.ways());
        layers.push((nodes, options.clone()));
    }
    let sums = combine(&layers.iter().map(|(_, options)| options.as_slice()).collect::<Vec<_>>());
    sums.into_iter().map(|sum| sum.choice(&layers)).collect()
}

/// One way to treat a layer: the positions of the nodes that are dropped.
#[derive(Clone, Debug, PartialEq)]
struct Way {
    dropped: Vec<usize>,
    kept: u64,
    seconds: f64,
}

/// Forward nodes of every layer, in order.
fn by_layer(graph: &Graph) -> BTreeMap<u32, Vec<NodeId>> {
    let mut layers: BTreeMap<u32, Vec<NodeId>> = BTreeMap::new();
    for (id, node) in graph.nodes() {
        if let (Some(layer), Phase::Forward) = (node.layer, node.phase) {
            layers.entry(layer).or_default().push(id);
        }
    }
    layers
}

/// A layer as a problem of its own.
struct Block {
    nodes: Vec<NodeId>,
    /// (position of the node that gives it, bytes, whether the backward pass reads it).
    values: Vec<(usize, u64, bool)>,
    /// By node: the values of this layer that it reads.
    reads: Vec<Vec<usize>>,
    seconds: Vec<f64>,
    /// By node: whether it may be dropped, because only this layer's forward and the backward pass read it.
    free: Vec<bool>,
}

impl Block {
    fn of(graph: &Graph, target: &Target, nodes: &[NodeId]) -> Self {
        let mut index: BTreeMap<ValueId, usize> = BTreeMap::new();
        let mut values = vec![];
        for (i, &id) in nodes.iter().enumerate() {
            for &v in graph.node(id).outputs.iter().flatten() {
                index.insert(v, values.len());
                values.push((i, graph.spec(v).bytes(&graph.bounds).0, false));
            }
        }
        let mut free = vec![true; nodes.len()];
        for node in &graph.nodes {
            for k in node.inputs.iter().filter_map(|v| index.get(v)) {
                match node.phase {
                    Phase::Backward => values[*k].2 = true,
                    Phase::Forward => {
                        let layer = graph.node(nodes[values[*k].0]).layer;
                        free[values[*k].0] &= node.layer == layer;
                    }
                    Phase::Recompute | Phase::Update => free[values[*k].0] = false,
                }
            }
        }
        for k in graph.outputs.iter().filter_map(|(_, v)| index.get(v)) {
            free[values[*k].0] = false;
        }
        let reads = |id: &NodeId| graph.node(*id).inputs.iter().filter_map(|v| index.get(v).copied()).collect();
        let seconds = |id: &NodeId| node_seconds(graph, graph.node(*id), target, graph.bounds.full());
        Self {
            reads: nodes.iter().map(reads).collect(),
            seconds: nodes.iter().map(seconds).collect(),
            nodes: nodes.to_vec(),
            values,
            free,
        }
    }

    /// Equal for layers that are equal but for their weights.
    fn signature(&self, graph: &Graph) -> String {
        let ops: Vec<_> = self.nodes.iter().map(|&id| graph.node(id).op).collect();
        format!("{ops:?} {:?} {:?} {:?}", self.reads, self.values, self.free)
    }

    /// All undominated ways.
    fn ways(&self) -> Vec<Way> {
        let bytes = |i: usize| self.values.iter().filter(|v| v.0 == i).map(|v| v.1).sum::<u64>();
        let mut free: Vec<usize> = (0..self.nodes.len()).filter(|&i| self.free[i]).collect();
        free.sort_by_key(|&i| std::cmp::Reverse((bytes(i), i)));
        free.truncate(NODES);
        free.sort_unstable();
        let subset =
            |bits: u32| free.iter().enumerate().filter(move |(k, _)| bits >> k & 1 == 1).map(|(_, &i)| i);
        let all: Vec<Way> = (0..1u32 << free.len()).map(|bits| self.way(subset(bits).collect())).collect();
        undominated(all, |way| (way.kept, way.seconds))
    }

    /// What it keeps and computes with `dropped` dropped. Positions ascend, so readers come behind what they read.
    fn way(&self, dropped: Vec<usize>) -> Way {
        let mut is_dropped = vec![false; self.nodes.len()];
        dropped.iter().for_each(|&i| is_dropped[i] = true);
        let mut read: Vec<bool> = self.values.iter().map(|v| v.2).collect();
        let mut seconds = 0.0;
        for &i in dropped.iter().rev() {
            let cloned = (0..read.len()).any(|k| read[k] && self.values[k].0 == i);
            if cloned {
                seconds += self.seconds[i];
                self.reads[i].iter().for_each(|&k| read[k] = true);
            }
        }
        let kept = self.values.iter().zip(&read).filter(|(v, read)| **read && !is_dropped[v.0]);
        Way { kept: kept.map(|(v, _)| v.1).sum(), dropped, seconds }
    }
}

/// Those that no other one beats in both, fewest bytes first.
fn undominated<T>(mut all: Vec<T>, cost: impl Fn(&T) -> (u64, f64)) -> Vec<T> {
    all.sort_by(|a, b| {
        let ((bytes, seconds), (other, others)) = (cost(a), cost(b));
        bytes.cmp(&other).then(seconds.total_cmp(&others))
    });
    let mut fastest = f64::INFINITY;
    all.retain(|o| {
        let better = cost(o).1 < fastest;
        fastest = fastest.min(cost(o).1);
        better
    });
    all
}

/// One way of each layer.
struct Sum {
    kept: u64,
    seconds: f64,
    /// By layer: the position of its way.
    ways: Vec<u16>,
}

impl Sum {
    /// Layers that are alike may change places: the earlier ones keep least, since they wait longest.
    fn choice(mut self, layers: &[(Vec<NodeId>, Vec<Way>)]) -> Choice {
        for i in 0..layers.len() {
            for j in i + 1..layers.len() {
                let alike = layers[i].1 == layers[j].1;
                if alike && self.ways[j] < self.ways[i] {
                    self.ways.swap(i, j);
                }
            }
        }
        let mut nodes = BTreeSet::new();
        for ((ids, ways), &k) in layers.iter().zip(&self.ways) {
            nodes.extend(ways[usize::from(k)].dropped.iter().map(|&i| ids[i]));
        }
        Choice { nodes, kept: Bytes(self.kept), seconds: self.seconds }
    }
}

/// Parts that all kept bytes together are counted in: finer steps than a plan's packing can tell apart.
const PARTS: u64 = 2048;

/// All undominated sums of one way of each layer, by dynamic programming over (layers, kept bytes). Bytes are counted
/// in parts of the most that can be kept, rounded up, so that the work does not grow with their number; where there
/// are fewer bytes than parts it is exact.
fn combine(layers: &[&[Way]]) -> Vec<Sum> {
    let most: u64 = layers.iter().map(|ways| ways.iter().map(|w| w.kept).max().unwrap_or(0)).sum();
    let part = most.div_ceil(PARTS).max(1);
    let units = |way: &Way| way.kept.div_ceil(part) as usize;
    let width = layers.iter().map(|ways| ways.iter().map(units).max().unwrap_or(0)).sum::<usize>() + 1;
    // Of the layers so far: by units kept, the least seconds, and the way of the last layer that gives them.
    let mut least = vec![f64::INFINITY; width];
    least[0] = 0.0;
    let mut chosen: Vec<Vec<u16>> = vec![];
    for ways in layers {
        let (mut next, mut way_of) = (vec![f64::INFINITY; width], vec![0u16; width]);
        for (kept, &seconds) in least.iter().enumerate().filter(|(_, s)| s.is_finite()) {
            for (k, way) in ways.iter().enumerate() {
                let to = kept + units(way);
                if seconds + way.seconds < next[to] {
                    (next[to], way_of[to]) = (seconds + way.seconds, k as u16);
                }
            }
        }
        least = next;
        chosen.push(way_of);
    }
    let ends = (0..width).filter(|&kept| least[kept].is_finite());
    let sums = ends.map(|end| {
        let (mut kept, mut ways) = (end, vec![0; layers.len()]);
        for i in (0..layers.len()).rev() {
            ways[i] = chosen[i][kept];
            kept -= units(&layers[i][usize::from(ways[i])]);
        }
        let of = |i: usize| &layers[i][usize::from(ways[i])];
        let kept = (0..ways.len()).map(|i| of(i).kept).sum();
        // To picoseconds: equal terms in another order have equal sums.
        let seconds = (0..ways.len()).map(|i| of(i).seconds).sum::<f64>();
        let seconds = (seconds * 1e12).round() / 1e12;
        Sum { kept, seconds, ways }
    });
    undominated(sums.collect(), |sum| (sum.kept, sum.seconds))
}

#[cfg(test)]
mod tests;
