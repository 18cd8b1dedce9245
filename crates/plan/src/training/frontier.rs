//! Pareto frontier of the activations: the choices of stored, recomputed and offloaded values that no other choice beats
//! in both bytes and time. Equal layers are solved once, over all choices of their nodes; the choices of the layers are
//! combined by dynamic programming over stored bytes. Invariant: bytes and seconds of a choice are sums over layers;
//! the peak memory of a choice is known only from its plan.

use super::ActivationPolicy;
use crate::cost::{copy_seconds, node_seconds};
use crate::schedule::Queue;
use crate::{ActivationOffload, RecomputePolicy, Target};
use plimsoll_graph::{Bytes, Graph, NodeId, Phase, Space, ValueId};
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

/// Maximum number of nodes of a layer that are tried in every combination. Of a layer with more nodes, those with the
/// fewest result bytes are always stored.
const NODES: usize = 14;

/// The same if results can be offloaded too: every such node then has three choices. The other nodes are recomputed or stored
/// all together.
const NODES_OF_THREE_CHOICES: usize = 8;

/// Maximum number of nodes of a layer that cannot be recomputed, such as the one whose result is read by the next layer, and
/// whose results may be offloaded.
const ONLY_OFFLOADED: usize = 2;

/// Seconds that a copy costs even if kernels run meanwhile, as a share of its own seconds: it uses a part of the bandwidth of
/// the memory. Without a cost, values would be offloaded that have room.
const HIDDEN_COPY: f64 = 0.02;

/// Number of layers whose offloaded values are in the arena at once, on their way out or back.
const LAYERS_ON_THE_WAY: u64 = 2;

/// Pareto-optimal choices for the activations of the differentiated graph of a micro-step, in order of stored bytes. A
/// choice is expanded to layers and nodes only on request: there may be thousands, of which a search uses few.
pub struct Frontier {
    /// Kind of each layer.
    layers: Vec<usize>,
    /// Choices of each kind of layer.
    kinds: Rc<Vec<Vec<LayerChoice>>>,
    sums: Rc<Sums>,
}

/// Choice of a layer: its kind, and the index among the choices of that kind.
pub type LayerWay = (usize, u16);

impl Frontier {
    /// Number of choices.
    pub fn len(&self) -> usize {
        self.sums.all.len()
    }

    /// Whether there is no choice, because no node belongs to a layer.
    pub fn is_empty(&self) -> bool {
        self.sums.all.is_empty()
    }

    /// Lower bound on the bytes that choice `k` and all later ones store from the forward to the backward pass. All of them are
    /// live at one instant, so this is a lower bound on the memory of its plan.
    pub fn kept(&self, k: usize) -> Bytes {
        Bytes(self.sums.all[k].kept)
    }

    /// Predicted seconds that choice `k` takes longer than storing all activations.
    pub fn seconds(&self, k: usize) -> f64 {
        self.sums.all[k].seconds
    }

    /// Choice of each layer in choice `k`. The choices of equal layers are interchangeable and are assigned such that
    /// earlier layers store less, because their stored values live longer.
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

    /// What becomes of the activations of `graph` if its layers have these choices.
    pub fn policy(&self, graph: &Graph, ways: &[LayerWay]) -> ActivationPolicy {
        let mut dropped: BTreeSet<NodeId> = BTreeSet::new();
        let mut moved: BTreeSet<NodeId> = BTreeSet::new();
        for (ids, &(kind, way)) in by_layer(graph).into_values().zip(ways) {
            let choice = &self.kinds[kind][usize::from(way)];
            dropped.extend(choice.dropped.iter().map(|&i| ids[i]));
            moved.extend(choice.moved.iter().map(|&i| ids[i]));
        }
        ActivationPolicy {
            recompute: RecomputePolicy::Nodes(dropped),
            offload: ActivationOffload::Nodes(moved),
        }
    }
}

/// Computes frontiers for one target and caches the results of equal layers and equal models.
#[derive(Default)]
pub struct Solver {
    /// The space to which activations may be moved; none if it is the arena.
    offload_to: Space,
    /// Choices of each kind of layer.
    kinds: Rc<Vec<Vec<LayerChoice>>>,
    /// Kind of each signature, see [`Block::signature`].
    by_signature: BTreeMap<String, usize>,
    /// Combined choices, by the kinds of the layers.
    sums: BTreeMap<Vec<usize>, Rc<Sums>>,
}

impl Solver {
    /// A solver that may move activations to a space; to none if it is the arena.
    pub fn with_offload_to(space: Space) -> Self {
        Self { offload_to: space, ..Self::default() }
    }

    /// Computes the frontier of a model. `layers` has, for each layer of the model, the layer of `graph` that
    /// represents it.
    pub fn frontier(&mut self, graph: &Graph, layers: &[usize], target: &Target) -> Frontier {
        let readers = readers(graph);
        let offload_to = self.offload_to;
        let kind = |nodes: &Vec<NodeId>| {
            let block = Block::of(graph, &readers, target, nodes);
            self.kind(graph, &block.with_offload_to(offload_to, graph, target, layers.len()))
        };
        let of_graph: Vec<usize> = by_layer(graph).values().map(kind).collect();
        let layers: Vec<usize> = layers.iter().map(|&like| of_graph[like]).collect();
        let kinds = Rc::clone(&self.kinds);
        let ways = || Sums::of(&layers.iter().map(|&kind| kinds[kind].as_slice()).collect::<Vec<_>>());
        let sums = Rc::clone(self.sums.entry(layers.clone()).or_insert_with(|| Rc::new(ways())));
        Frontier { layers, kinds, sums }
    }

    /// Kind of a layer, solving the layer if it was not seen before. Different layers with equal choices share a
    /// kind.
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

/// A choice of one layer.
#[derive(Clone, Debug, PartialEq)]
struct LayerChoice {
    /// Indices in the layer of the nodes whose results are not stored.
    dropped: Vec<usize>,
    /// Indices in the layer of the nodes whose results are offloaded.
    moved: Vec<usize>,
    /// Stored bytes.
    kept: u64,
    /// Stored bytes, and this layer's share of the offloaded ones that are on their way.
    held: u64,
    /// Predicted seconds of recomputation, and of waiting for copies.
    seconds: f64,
}

/// Forward nodes of each layer, in order.
fn by_layer(graph: &Graph) -> BTreeMap<u32, Vec<NodeId>> {
    let mut layers: BTreeMap<u32, Vec<NodeId>> = BTreeMap::new();
    for (id, node) in graph.nodes() {
        if let (Some(layer), Phase::Forward) = (node.layer, node.phase) {
            layers.entry(layer).or_default().push(id);
        }
    }
    layers
}

/// Nodes that read each value, indexed by value.
fn readers(graph: &Graph) -> Vec<Vec<NodeId>> {
    let mut readers = vec![vec![]; graph.values.len()];
    for (id, node) in graph.nodes() {
        node.inputs.iter().for_each(|v| readers[v.index()].push(id));
    }
    readers
}

/// Recomputation problem of one layer. Nodes and values are numbered within the layer.
struct Block {
    nodes: Vec<NodeId>,
    /// Each value as (node that computes it, bytes, whether the backward pass reads it).
    values: Vec<(usize, u64, bool)>,
    /// Values of this layer that each node reads.
    reads: Vec<Vec<usize>>,
    /// Predicted seconds of each node.
    seconds: Vec<f64>,
    /// Whether each node may be recomputed: its results are read only by the forward pass of this layer and by the
    /// backward pass.
    free: Vec<bool>,
    /// The copies of the values; `None` if nothing is offloaded.
    copies: Option<Copies>,
}

/// Predicted seconds of the copies of a layer.
struct Copies {
    /// Of each value: its copy out of the arena, and the one back.
    of_value: Vec<[f64; 2]>,
    /// Of the kernels of the forward pass, and of the later ones, which hide copies.
    kernels: [f64; 2],
    /// Number of layers of the model.
    layers: u64,
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
        // The new value of a state is stored in the state's memory and takes no bytes of the activations.
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
            copies: None,
        }
    }

    /// The block whose values may be moved to a space, unless it is the arena.
    fn with_offload_to(self, space: Space, graph: &Graph, target: &Target, layers: usize) -> Self {
        // On the way to a file the copies of both hops run at once, so the slower counts.
        let hops = match (space, target.arena_in_host()) {
            (Space::Device, _) => return self,
            (Space::Host, _) => vec![[Queue::Out, Queue::In]],
            (Space::File, true) => vec![[Queue::Write, Queue::Read]],
            (Space::File, false) => vec![[Queue::Out, Queue::In], [Queue::Write, Queue::Read]],
        };
        let copy = |(_, bytes, _): &(usize, u64, bool)| {
            [0, 1].map(|way| {
                let seconds = hops.iter().map(|hop| copy_seconds(target, hop[way], Bytes(*bytes)));
                seconds.fold(0.0, f64::max)
            })
        };
        let layer = self.nodes.first().and_then(|&id| graph.node(id).layer);
        let later = graph.nodes.iter().filter(|node| node.layer == layer && node.phase != Phase::Forward);
        let later: f64 = later.map(|node| node_seconds(graph, node, target, graph.bounds.full())).sum();
        let copies = Copies {
            of_value: self.values.iter().map(copy).collect(),
            kernels: [self.seconds.iter().sum(), later],
            layers: layers as u64,
        };
        Self { copies: Some(copies), ..self }
    }

    /// Key that is equal for layers that differ in their weights only.
    fn signature(&self, graph: &Graph) -> String {
        let ops: Vec<_> = self.nodes.iter().map(|&id| graph.node(id).op).collect();
        // The copies follow from the values and the seconds, but for the kernels of the backward pass.
        let later = self.copies.as_ref().map(|copies| copies.kernels[1]);
        format!("{ops:?} {:?} {:?} {:?} {:?} {later:?}", self.reads, self.values, self.free, self.seconds)
    }

    /// All Pareto-optimal choices.
    fn ways(&self) -> Vec<LayerChoice> {
        let bytes = |i: usize| self.values.iter().filter(|v| v.0 == i).map(|v| v.1).sum::<u64>();
        let largest = |mut nodes: Vec<usize>, n: usize| {
            nodes.sort_by_key(|&i| Reverse((bytes(i), i)));
            nodes.truncate(n);
            nodes.sort_unstable();
            nodes
        };
        let mut free = largest((0..self.nodes.len()).filter(|&i| self.free[i]).collect(), NODES);
        let mut movable: Vec<usize> = vec![];
        let mut together: Vec<usize> = vec![];
        if self.copies.is_some() {
            together.clone_from(&free);
            free = largest(free, NODES_OF_THREE_CHOICES);
            together.retain(|i| !free.contains(i));
            let is_read =
                |i: usize| self.values.iter().any(|&(node, bytes, read)| node == i && read && bytes > 0);
            let others = (0..self.nodes.len()).filter(|&i| !self.free[i] && is_read(i)).collect();
            movable.extend(&free);
            movable.extend(largest(others, ONLY_OFFLOADED));
        }
        let subset = |nodes: &[usize], bits: u32| -> Vec<usize> {
            nodes.iter().enumerate().filter(|(k, _)| bits >> k & 1 == 1).map(|(_, &i)| i).collect()
        };
        let mut all: Vec<LayerChoice> = vec![];
        for dropped in 0..1u32 << free.len() {
            // The first nodes of `movable` are those of `free`, so their bits agree.
            for moved in (0..1u32 << movable.len()).filter(|moved| moved & dropped == 0) {
                let [dropped, moved] = [subset(&free, dropped), subset(&movable, moved)];
                if !together.is_empty() {
                    let mut more = [&dropped[..], &together].concat();
                    more.sort_unstable();
                    all.push(self.way(more, moved.clone()));
                }
                all.push(self.way(dropped, moved));
            }
        }
        undominated(all, |way| (way.held, way.seconds))
    }

    /// Stored bytes and additional seconds if the results of the nodes `dropped` are recomputed and those of the nodes `moved`
    /// are offloaded. Indices ascend, so the reverse order visits readers before the nodes whose results they read. A
    /// dropped node is recomputed only if its result is needed.
    #[expect(clippy::arithmetic_side_effects, reason = "bytes of the values of a graph within the limits")]
    fn way(&self, dropped: Vec<usize>, moved: Vec<usize>) -> LayerChoice {
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
        let mut kept = 0;
        let mut offloaded = 0;
        let mut copied = [0.0, 0.0];
        for (k, &(node, bytes, _)) in
            self.values.iter().enumerate().filter(|(k, v)| read[*k] && !is_dropped[v.0])
        {
            match self.copies.as_ref().filter(|_| moved.contains(&node)) {
                Some(copies) => {
                    offloaded += bytes;
                    (0..2).for_each(|way| copied[way] += copies.of_value[k][way]);
                }
                None => kept += bytes,
            }
        }
        let mut held = kept;
        if let Some(Copies { kernels: [forward, later], layers, .. }) = self.copies {
            held += (LAYERS_ON_THE_WAY.min(layers) * offloaded).div_ceil(layers.max(1));
            let waits = (copied[0] - forward).max(0.0) + (copied[1] - later - seconds).max(0.0);
            seconds += waits + HIDDEN_COPY * (copied[0] + copied[1]);
        }
        LayerChoice { kept, held, dropped, moved, seconds }
    }
}

/// Returns the elements that no other element beats in both bytes and seconds, in order of bytes.
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

/// A combination of one choice per layer.
struct Sum {
    /// Stored bytes and those on their way.
    held: u64,
    /// Stored bytes, or fewer: the least of this and all later combinations.
    kept: u64,
    /// Predicted seconds of recomputation.
    seconds: f64,
    /// `held` in units of [`Sums::unit`], rounded up for each layer.
    units: usize,
}

/// Number of units into which the largest number of held bytes is divided: finer than packing can distinguish.
const PARTS: u64 = 2048;

/// All Pareto-optimal combinations of one choice per layer, by dynamic programming over (layer, held bytes). Bytes
/// are counted in units, a fraction of the largest number of held bytes, and rounded up for each layer, so that the
/// work does not grow with the number of bytes. The result is exact if there are at most [`PARTS`] bytes.
struct Sums {
    /// Combinations in order of held bytes.
    all: Vec<Sum>,
    /// Bytes per unit.
    unit: u64,
    /// `chosen[l][u]`: the choice of layer l in the fastest combination of the layers up to l that stores u units.
    chosen: Vec<Vec<u16>>,
}

impl Sums {
    #[expect(clippy::arithmetic_side_effects, reason = "bytes of the values of a graph within the limits")]
    fn of(layers: &[&[LayerChoice]]) -> Self {
        let most: u64 = layers.iter().map(|ways| ways.iter().map(|w| w.held).max().unwrap_or(0)).sum();
        let unit = most.div_ceil(PARTS).max(1);
        let units = |way: &LayerChoice| way.held.div_ceil(unit) as usize;
        let width = layers.iter().map(|ways| ways.iter().map(units).max().unwrap_or(0)).sum::<usize>() + 1;
        // Least seconds of a combination of the layers so far, and its bytes held and stored, by held units.
        let mut least = vec![(f64::INFINITY, [0_u64; 2]); width];
        least[0].0 = 0.0;
        let mut chosen: Vec<Vec<u16>> = vec![];
        // Largest number of units that the layers so far can store.
        let mut reached = 0;
        for ways in layers {
            let mut next = vec![(f64::INFINITY, [0_u64; 2]); width];
            let mut way_of = vec![0_u16; width];
            // Of the choices with equal units only the fastest can be part of a best combination. With many layers a
            // layer has few units, so most of its choices are left out. The comparison below is strict, so among
            // combinations of equal time the one in which this layer stores most wins.
            let mut fastest: BTreeMap<usize, (usize, &LayerChoice)> = BTreeMap::new();
            for (k, way) in ways.iter().enumerate() {
                let known = fastest.entry(units(way)).or_insert((k, way));
                if way.seconds < known.1.seconds {
                    *known = (k, way);
                }
            }
            for (to, (k, way)) in fastest.into_iter().rev() {
                let sums = next[to..].iter_mut().zip(&mut way_of[to..]).zip(&least[..=reached]);
                for ((next, way_of), (seconds, [held, kept])) in sums {
                    if seconds + way.seconds < next.0 {
                        *next = (seconds + way.seconds, [held + way.held, kept + way.kept]);
                        *way_of = k as u16;
                    }
                }
            }
            reached += ways.iter().map(units).max().unwrap_or(0);
            least = next;
            chosen.push(way_of);
        }
        let ends = least.iter().enumerate().filter(|(_, (seconds, _))| seconds.is_finite());
        let all = ends.map(|(units, &(seconds, [held, kept]))| {
            // Rounded to picoseconds: sums of equal terms in another order must compare equal.
            Sum { held, kept, seconds: (seconds * 1e12).round() / 1e12, units }
        });
        let mut all = undominated(all.collect(), |sum| (sum.held, sum.seconds));
        let mut least = u64::MAX;
        for sum in all.iter_mut().rev() {
            least = least.min(sum.kept);
            sum.kept = least;
        }
        Self { all, unit, chosen }
    }

    /// Choice of each layer in combination `k`, reconstructed from the last layer to the first.
    fn ways(&self, layers: &[&[LayerChoice]], k: usize) -> Vec<u16> {
        let mut units = self.all[k].units;
        let mut ways = vec![0; layers.len()];
        for i in (0..layers.len()).rev() {
            ways[i] = self.chosen[i][units];
            units -= layers[i][usize::from(ways[i])].held.div_ceil(self.unit) as usize;
        }
        ways
    }
}

#[cfg(test)]
mod tests;
