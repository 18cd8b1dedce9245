//! Which values of a layer are kept and which are computed again: every choice that no other one beats in both
//! bytes and time. A layer is solved once for all that are like it, over all subsets of its values; choices of the
//! layers are put together by dynamic programming over kept bytes. Invariant: a choice's bytes and seconds are the sums
//! of its parts; what a plan really takes is asked of the plan.

use crate::Target;
use crate::cost::node_seconds;
use plimsoll_graph::{Bytes, Graph, NodeId, Phase, ValueId};
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

/// As many nodes of a layer are tried in every combination; where it has more, those that give least are kept.
const NODES: usize = 14;

/// The undominated choices for the differentiated graph of a micro-step, fewest kept bytes first. Each is made when it
/// is asked for: there may be thousands, and a search looks at few.
pub struct Frontier {
    /// By layer: the kind that it is of.
    layers: Vec<usize>,
    kinds: Rc<Vec<Vec<RecomputeChoice>>>,
    sums: Rc<Sums>,
}

/// How a layer is treated: its kind, and the position among the ways of that kind.
pub type LayerWay = (usize, u16);

impl Frontier {
    /// How many choices there are.
    pub fn len(&self) -> usize {
        self.sums.all.len()
    }

    /// Whether there is none, because no node belongs to a layer.
    pub fn is_empty(&self) -> bool {
        self.sums.all.is_empty()
    }

    /// Bytes that choice `k` keeps from the forward to the backward pass, all at once: no plan of it holds less.
    pub fn kept(&self, k: usize) -> Bytes {
        Bytes(self.sums.all[k].kept)
    }

    /// Expected seconds of the recomputation of choice `k`.
    pub fn seconds(&self, k: usize) -> f64 {
        self.sums.all[k].seconds
    }

    /// How choice `k` treats each layer. Layers that are alike may change places: the earlier ones keep least, since they
    /// wait longest.
    pub fn ways(&self, k: usize) -> Vec<LayerWay> {
        let mut sorted: BTreeMap<usize, Vec<u16>> = BTreeMap::new();
        let of = self.layers.iter().map(|&kind| self.kinds[kind].as_slice()).collect::<Vec<_>>();
        for (&kind, way) in self.layers.iter().zip(self.sums.ways(&of, k)) {
            sorted.entry(kind).or_default().push(way);
        }
        sorted.values_mut().for_each(|ways| ways.sort_unstable_by_key(|&way| Reverse(way)));
        let way_of = |&kind: &usize| (kind, sorted.get_mut(&kind).and_then(Vec::pop).unwrap_or(0));
        self.layers.iter().map(way_of).collect()
    }

    /// The nodes whose results are not kept where the layers of a graph are treated so.
    pub fn nodes(&self, graph: &Graph, ways: &[LayerWay]) -> BTreeSet<NodeId> {
        let layers = by_layer(graph).into_values();
        let dropped = |(ids, &(kind, way)): (Vec<NodeId>, &LayerWay)| {
            self.kinds[kind][usize::from(way)].dropped.iter().map(move |&i| ids[i]).collect::<Vec<_>>()
        };
        layers.zip(ways).flat_map(dropped).collect()
    }
}

/// Solves graphs for one target, and what it has seen before only once.
#[derive(Default)]
pub struct Solver {
    /// The ways of every kind of layer.
    kinds: Rc<Vec<Vec<RecomputeChoice>>>,
    by_signature: BTreeMap<String, usize>,
    /// By the kinds of the layers.
    sums: BTreeMap<Vec<usize>, Rc<Sums>>,
}

impl Solver {
    /// The frontier of a model: for each of its layers, the one of the graph that it is like.
    pub fn frontier(&mut self, graph: &Graph, layers: &[usize], target: &Target) -> Frontier {
        let readers = readers(graph);
        let kind = |nodes: &Vec<NodeId>| self.kind(graph, &Block::of(graph, &readers, target, nodes));
        let of_graph: Vec<usize> = by_layer(graph).values().map(kind).collect();
        let layers: Vec<usize> = layers.iter().map(|&like| of_graph[like]).collect();
        let kinds = Rc::clone(&self.kinds);
        let ways = || Sums::of(&layers.iter().map(|&kind| kinds[kind].as_slice()).collect::<Vec<_>>());
        let sums = Rc::clone(self.sums.entry(layers.clone()).or_insert_with(|| Rc::new(ways())));
        Frontier { layers, kinds, sums }
    }

    /// The position of a layer's ways. Those of other layers may be the same.
    fn kind(&mut self, graph: &Graph, block: &Block) -> usize {
        let signature = block.signature(graph);
        if let Some(&kind) = self.by_signature.get(&signature) {
            return kind;
        }
        let ways = block.ways();
        let kind = self.kinds.iter().position(|known| *known == ways).unwrap_or_else(|| {
            Rc::make_mut(&mut self.kinds).push(ways);
            self.kinds.len() - 1
        });
        self.by_signature.insert(signature, kind);
        kind
    }
}

/// One way to treat a layer: the positions of the nodes that are dropped.
#[derive(Clone, Debug, PartialEq)]
struct RecomputeChoice {
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

/// By value: the nodes that read it.
fn readers(graph: &Graph) -> Vec<Vec<NodeId>> {
    let mut readers = vec![vec![]; graph.values.len()];
    for (id, node) in graph.nodes() {
        node.inputs.iter().for_each(|v| readers[v.index()].push(id));
    }
    readers
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
    fn of(graph: &Graph, readers: &[Vec<NodeId>], target: &Target, nodes: &[NodeId]) -> Self {
        let mut index: BTreeMap<ValueId, usize> = BTreeMap::new();
        let mut values = vec![];
        for (i, &id) in nodes.iter().enumerate() {
            for &v in graph.node(id).outputs.iter().flatten() {
                index.insert(v, values.len());
                let read = readers[v.index()].iter().any(|&id| graph.node(id).phase == Phase::Backward);
                values.push((i, graph.spec(v).bytes(&graph.bounds).0, read));
            }
        }
        let mut free = vec![true; nodes.len()];
        for (&v, &k) in &index {
            let i = values[k].0;
            let layer = graph.node(nodes[i]).layer;
            free[i] &= readers[v.index()].iter().map(|&id| graph.node(id)).all(|reader| match reader.phase {
                Phase::Backward => true,
                Phase::Forward => reader.layer == layer,
                Phase::Recompute | Phase::Update => false,
            });
        }
        for k in graph.outputs.iter().filter_map(|(_, v)| index.get(v)) {
            free[values[*k].0] = false;
        }
        // A state's new value lies in its storage, not among the activations.
        for k in graph.updates.iter().filter_map(|(_, new)| index.get(new)) {
            values[*k].1 = 0;
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
        format!("{ops:?} {:?} {:?} {:?} {:?}", self.reads, self.values, self.free, self.seconds)
    }

    /// All undominated ways.
    fn ways(&self) -> Vec<RecomputeChoice> {
        let bytes = |i: usize| self.values.iter().filter(|v| v.0 == i).map(|v| v.1).sum::<u64>();
        let mut free: Vec<usize> = (0..self.nodes.len()).filter(|&i| self.free[i]).collect();
        free.sort_by_key(|&i| Reverse((bytes(i), i)));
        free.truncate(NODES);
        free.sort_unstable();
        let subset =
            |bits: u32| free.iter().enumerate().filter(move |(k, _)| bits >> k & 1 == 1).map(|(_, &i)| i);
        let all: Vec<RecomputeChoice> =
            (0..1u32 << free.len()).map(|bits| self.way(subset(bits).collect())).collect();
        undominated(all, |way| (way.kept, way.seconds))
    }

    /// What it keeps and computes with `dropped` dropped. Positions ascend, so readers come behind what they read.
    fn way(&self, dropped: Vec<usize>) -> RecomputeChoice {
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
        RecomputeChoice { kept: kept.map(|(v, _)| v.1).sum(), dropped, seconds }
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
    /// Units kept.
    units: usize,
}

/// As many parts kept bytes together are counted in: finer steps than a plan's packing can tell apart.
const PARTS: u64 = 2048;

/// All undominated sums of one way of each layer, by dynamic programming over (layers, kept bytes). Bytes are counted
/// in units, parts of the most that can be kept, rounded up, so that the work does not grow with their number; where there
/// are fewer bytes than parts it is exact.
struct Sums {
    /// Fewest bytes first.
    all: Vec<Sum>,
    /// Bytes of a unit.
    unit: u64,
    /// By layer and units kept up to it: the way of the layer that leads there.
    chosen: Vec<Vec<u16>>,
}

impl Sums {
    fn of(layers: &[&[RecomputeChoice]]) -> Self {
        let most: u64 = layers.iter().map(|ways| ways.iter().map(|w| w.kept).max().unwrap_or(0)).sum();
        let unit = most.div_ceil(PARTS).max(1);
        let units = |way: &RecomputeChoice| way.kept.div_ceil(unit) as usize;
        let width = layers.iter().map(|ways| ways.iter().map(units).max().unwrap_or(0)).sum::<usize>() + 1;
        // Of the layers so far: by units kept, the least seconds and their bytes.
        let mut least = vec![(f64::INFINITY, 0u64); width];
        least[0].0 = 0.0;
        let mut chosen: Vec<Vec<u16>> = vec![];
        // As many units as the layers so far can keep.
        let mut reached = 0;
        for ways in layers {
            let (mut next, mut way_of) = (vec![(f64::INFINITY, 0u64); width], vec![0u16; width]);
            // Of equal sums the one in which this layer keeps most is taken.
            let mut order: Vec<(usize, &RecomputeChoice)> = ways.iter().enumerate().collect();
            order.sort_by_key(|(_, way)| Reverse(units(way)));
            for (k, way) in order {
                let to = units(way);
                let sums = next[to..].iter_mut().zip(&mut way_of[to..]).zip(&least[..=reached]);
                for ((next, way_of), (seconds, kept)) in sums {
                    if seconds + way.seconds < next.0 {
                        (*next, *way_of) = ((seconds + way.seconds, kept + way.kept), k as u16);
                    }
                }
            }
            reached += ways.iter().map(units).max().unwrap_or(0);
            least = next;
            chosen.push(way_of);
        }
        let ends = least.iter().enumerate().filter(|(_, (seconds, _))| seconds.is_finite());
        let all = ends.map(|(units, &(seconds, kept))| {
            // To picoseconds: equal terms in another order have equal sums.
            Sum { kept, seconds: (seconds * 1e12).round() / 1e12, units }
        });
        Self { all: undominated(all.collect(), |sum| (sum.kept, sum.seconds)), unit, chosen }
    }

    /// By layer: the position of its way in sum `k`.
    fn ways(&self, layers: &[&[RecomputeChoice]], k: usize) -> Vec<u16> {
        let mut units = self.all[k].units;
        let mut ways = vec![0; layers.len()];
        for i in (0..layers.len()).rev() {
            ways[i] = self.chosen[i][units];
            units -= layers[i][usize::from(ways[i])].kept.div_ceil(self.unit) as usize;
        }
        ways
    }
}

#[cfg(test)]
mod tests;
