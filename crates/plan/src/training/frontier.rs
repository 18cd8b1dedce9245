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
const MAX_CHOSEN_NODES: usize = 14;

/// [`MAX_CHOSEN_NODES`] if results can be offloaded too: every such node then has three choices. The other nodes are
/// recomputed or stored all together.
const MAX_CHOSEN_NODES_WITH_OFFLOAD: usize = 8;

/// Maximum number of nodes of a layer that cannot be recomputed, such as the node whose result is read by the next layer,
/// and whose results may be offloaded.
const MAX_OFFLOAD_ONLY_NODES: usize = 2;

/// Seconds that a copy costs even if kernels run meanwhile, as a share of its own seconds: it uses a part of the bandwidth of
/// the memory. Without a cost, values would be offloaded that fit the arena.
const HIDDEN_COPY_COST: f64 = 0.02;

/// Number of layers whose offloaded values are in the arena at once, while they are copied out or back.
const LAYERS_IN_TRANSIT: u64 = 2;

/// Pareto-optimal choices for the activations of the differentiated graph of a micro-step, in order of stored bytes. A
/// choice is expanded to layers and nodes only on request: there may be thousands, of which a search uses few.
pub struct Frontier {
    /// Kind of each layer.
    layers: Vec<usize>,
    /// Choices of each kind of layer.
    kinds: Rc<Vec<Vec<LayerChoice>>>,
    combinations: Rc<Combinations>,
}

/// Identifies the choice of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerChoiceId {
    /// Kind of the layer.
    kind: usize,
    /// Index among the choices of that kind.
    choice: u16,
}

impl Frontier {
    /// Number of choices.
    pub fn len(&self) -> usize {
        self.combinations.all.len()
    }

    /// Whether there is no choice, because no node belongs to a layer.
    pub fn is_empty(&self) -> bool {
        self.combinations.all.is_empty()
    }

    /// Lower bound on the bytes that choice `k` and all later ones store from the forward to the backward pass. All of them are
    /// live at one instant, so this is a lower bound on the memory of its plan.
    pub fn stored_bytes(&self, k: usize) -> Bytes {
        Bytes(self.combinations.all[k].stored_bytes)
    }

    /// Predicted seconds that choice `k` takes longer than storing all activations.
    pub fn seconds(&self, k: usize) -> f64 {
        self.combinations.all[k].seconds
    }

    /// Choice of each layer in choice `k`. The choices of equal layers are interchangeable and are assigned such that
    /// earlier layers store less, because their stored values live longer.
    pub fn layer_choices(&self, k: usize) -> Vec<LayerChoiceId> {
        let mut of_kind: BTreeMap<usize, Vec<u16>> = BTreeMap::new();
        let layers = choices_of_layers(&self.layers, &self.kinds);
        for (&kind, choice) in self.layers.iter().zip(self.combinations.layer_choices(&layers, k)) {
            of_kind.entry(kind).or_default().push(choice);
        }
        // Choices of a kind are in order of arena bytes. `pop` takes the last, so the sort is descending.
        of_kind.values_mut().for_each(|choices| choices.sort_unstable_by_key(|&choice| Reverse(choice)));
        let mut assigned = vec![];
        for &kind in &self.layers {
            let choice = of_kind.get_mut(&kind).and_then(Vec::pop).unwrap_or(0);
            assigned.push(LayerChoiceId { kind, choice });
        }
        assigned
    }

    /// Policy for the activations of `graph` whose layers have these choices.
    pub fn policy(&self, graph: &Graph, choices: &[LayerChoiceId]) -> ActivationPolicy {
        let mut dropped: BTreeSet<NodeId> = BTreeSet::new();
        let mut offloaded: BTreeSet<NodeId> = BTreeSet::new();
        for (nodes, id) in by_layer(graph).into_values().zip(choices) {
            let choice = &self.kinds[id.kind][usize::from(id.choice)];
            dropped.extend(choice.dropped.iter().map(|&i| nodes[i]));
            offloaded.extend(choice.offloaded.iter().map(|&i| nodes[i]));
        }
        ActivationPolicy {
            recompute: RecomputePolicy::Nodes(dropped),
            offload: ActivationOffload::Nodes(offloaded),
        }
    }
}

/// Choices of each layer, given the kind of each layer.
fn choices_of_layers<'a>(layers: &[usize], kinds: &'a [Vec<LayerChoice>]) -> Vec<&'a [LayerChoice]> {
    layers.iter().map(|&kind| kinds[kind].as_slice()).collect()
}

/// Computes frontiers for one target and caches the results of equal layers and equal models.
#[derive(Default)]
pub struct Solver {
    /// The space to which activations may be offloaded; none if it is the arena.
    offload_to: Space,
    /// Choices of each kind of layer.
    kinds: Rc<Vec<Vec<LayerChoice>>>,
    /// Kind of each signature, see [`LayerProblem::signature`].
    by_signature: BTreeMap<String, usize>,
    /// Combined choices, by the kinds of the layers.
    combinations: BTreeMap<Vec<usize>, Rc<Combinations>>,
}

impl Solver {
    /// A solver that may offload activations to a space; to none if it is the arena.
    pub fn with_offload_to(space: Space) -> Self {
        Self { offload_to: space, ..Self::default() }
    }

    /// Computes the frontier of a model. `layers` has, for each layer of the model, the layer of `graph` that
    /// represents it.
    pub fn frontier(&mut self, graph: &Graph, layers: &[usize], target: &Target) -> Frontier {
        let readers = readers(graph);
        let mut graph_kinds = vec![];
        for nodes in by_layer(graph).values() {
            let problem = LayerProblem::of(graph, &readers, target, nodes);
            let problem = problem.with_offload_to(self.offload_to, graph, target, layers.len());
            graph_kinds.push(self.kind(graph, &problem));
        }
        let layers: Vec<usize> = layers.iter().map(|&represented| graph_kinds[represented]).collect();
        let kinds = Rc::clone(&self.kinds);
        let combinations = self
            .combinations
            .entry(layers.clone())
            .or_insert_with(|| Rc::new(Combinations::of(&choices_of_layers(&layers, &kinds))));
        let combinations = Rc::clone(combinations);
        Frontier { layers, kinds, combinations }
    }

    /// Kind of a layer, solving the layer if it was not seen before. Different layers with equal choices share a
    /// kind.
    fn kind(&mut self, graph: &Graph, problem: &LayerProblem) -> usize {
        let signature = problem.signature(graph);
        if let Some(&kind) = self.by_signature.get(&signature) {
            return kind;
        }
        let choices = problem.choices();
        let kind = self.kinds.iter().position(|known| *known == choices).unwrap_or_else(|| {
            Rc::make_mut(&mut self.kinds).push(choices);
            self.kinds.len() - 1
        });
        self.by_signature.insert(signature, kind);
        kind
    }
}

/// A choice for the activations of one layer.
#[derive(Clone, Debug, PartialEq)]
struct LayerChoice {
    /// Indices in the layer of the nodes whose results are not stored.
    dropped: Vec<usize>,
    /// Indices in the layer of the nodes whose results are offloaded.
    offloaded: Vec<usize>,
    /// Bytes stored in the arena from the forward to the backward pass.
    stored_bytes: u64,
    /// Stored bytes, and this layer's share of the offloaded bytes in transit.
    arena_bytes: u64,
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

/// Problem of one layer: which activations to store, to recompute and to offload. Nodes and values are numbered within the
/// layer.
struct LayerProblem {
    nodes: Vec<NodeId>,
    /// Values that the nodes compute.
    values: Vec<LayerValue>,
    /// Indices of the values of this layer that each node reads.
    reads: Vec<Vec<usize>>,
    /// Predicted seconds of each node.
    seconds: Vec<f64>,
    /// Whether each node may be recomputed: its results are read only by the forward pass of this layer and by the
    /// backward pass.
    recomputable: Vec<bool>,
    /// Times of the copies of the values; `None` if nothing is offloaded.
    copies: Option<CopyTimes>,
}

/// A value that a node of the layer computes.
#[derive(Clone, Debug)]
struct LayerValue {
    /// Index in the layer of the node that computes the value.
    node: usize,
    bytes: u64,
    /// Whether the backward pass reads the value.
    read_by_backward: bool,
}

/// Predicted seconds of the copies of a layer, and of the kernels that hide them.
struct CopyTimes {
    /// Seconds of the copies of each value.
    of_value: Vec<RoundTrip>,
    /// Seconds of the kernels of the forward pass, which hide copies out of the arena.
    forward_kernels: f64,
    /// Seconds of the kernels of the later passes, which hide copies back.
    backward_kernels: f64,
    /// Number of layers of the model.
    layers: u64,
}

/// Predicted seconds of the copies of an offloaded value out of the arena and back.
#[derive(Clone, Copy, Default)]
struct RoundTrip {
    out: f64,
    back: f64,
}

/// The queues in which a value is copied between two spaces on its way out of the arena and back.
struct Hop {
    out: Queue,
    back: Queue,
}

impl Hop {
    const HOST: Self = Self { out: Queue::Out, back: Queue::In };
    const FILE: Self = Self { out: Queue::Write, back: Queue::Read };
}

impl LayerProblem {
    fn of(graph: &Graph, readers: &[Vec<NodeId>], target: &Target, nodes: &[NodeId]) -> Self {
        let mut index: BTreeMap<ValueId, usize> = BTreeMap::new();
        let mut values = vec![];
        for (i, &id) in nodes.iter().enumerate() {
            for &v in graph.node(id).outputs.iter().flatten() {
                index.insert(v, values.len());
                let read_by_backward =
                    readers[v.index()].iter().any(|&id| graph.node(id).phase == Phase::Backward);
                let bytes = graph.spec(v).bytes(&graph.bounds).0;
                values.push(LayerValue { node: i, bytes, read_by_backward });
            }
        }
        let mut recomputable = vec![true; nodes.len()];
        for (&v, &k) in &index {
            let i = values[k].node;
            let layer = graph.node(nodes[i]).layer;
            recomputable[i] &=
                readers[v.index()].iter().map(|&id| graph.node(id)).all(|reader| match reader.phase {
                    Phase::Backward => true,
                    Phase::Forward => reader.layer == layer,
                    Phase::Recompute | Phase::Update => false,
                });
        }
        for k in graph.outputs.iter().filter_map(|(_, v)| index.get(v)) {
            recomputable[values[*k].node] = false;
        }
        // The new value of a state is stored in the state's memory and takes no bytes of the activations.
        for k in graph.updates.iter().filter_map(|(_, new)| index.get(new)) {
            values[*k].bytes = 0;
        }
        let mut reads = vec![];
        let mut seconds = vec![];
        for &id in nodes {
            let node = graph.node(id);
            reads.push(node.inputs.iter().filter_map(|v| index.get(v).copied()).collect());
            seconds.push(node_seconds(graph, node, target, graph.bounds.full()));
        }
        Self { reads, seconds, nodes: nodes.to_vec(), values, recomputable, copies: None }
    }

    /// Returns the problem with the option to offload its values to `space`; unchanged for [`Space::Device`], which is the
    /// arena itself.
    fn with_offload_to(self, space: Space, graph: &Graph, target: &Target, layers: usize) -> Self {
        // To a file, a value goes through pinned host memory, unless the arena is host memory itself.
        let hops = match (space, target.arena_in_host()) {
            (Space::Device, _) => return self,
            (Space::Host, _) => vec![Hop::HOST],
            (Space::File, true) => vec![Hop::FILE],
            (Space::File, false) => vec![Hop::HOST, Hop::FILE],
        };
        let mut of_value = vec![];
        for value in &self.values {
            let bytes = Bytes(value.bytes);
            let mut trip = RoundTrip::default();
            // The copies of both hops run at once, for different values, so the slower one counts.
            for hop in &hops {
                trip.out = trip.out.max(copy_seconds(target, hop.out, bytes));
                trip.back = trip.back.max(copy_seconds(target, hop.back, bytes));
            }
            of_value.push(trip);
        }
        // The problem holds the forward nodes of one layer; copies back overlap the other nodes of the same layer.
        let layer = self.nodes.first().and_then(|&id| graph.node(id).layer);
        let backward_nodes =
            graph.nodes.iter().filter(|node| node.layer == layer && node.phase != Phase::Forward);
        let backward_seconds =
            backward_nodes.map(|node| node_seconds(graph, node, target, graph.bounds.full()));
        let copies = CopyTimes {
            of_value,
            forward_kernels: self.seconds.iter().sum(),
            backward_kernels: backward_seconds.sum(),
            layers: layers as u64,
        };
        Self { copies: Some(copies), ..self }
    }

    /// Key that is equal for layers that differ in their weights only.
    fn signature(&self, graph: &Graph) -> String {
        let ops: Vec<_> = self.nodes.iter().map(|&id| graph.node(id).op).collect();
        // The copies follow from the values and the seconds, but for the kernels of the backward pass.
        let backward = self.copies.as_ref().map(|copies| copies.backward_kernels);
        format!(
            "{ops:?} {:?} {:?} {:?} {:?} {backward:?}",
            self.reads, self.values, self.recomputable, self.seconds
        )
    }

    /// Bytes of the results of node `i`.
    fn result_bytes(&self, i: usize) -> u64 {
        self.values.iter().filter(|value| value.node == i).map(|value| value.bytes).sum()
    }

    /// Whether the backward pass reads bytes of the results of node `i`.
    fn is_read_by_backward(&self, i: usize) -> bool {
        self.values.iter().any(|value| value.node == i && value.read_by_backward && value.bytes > 0)
    }

    /// The `n` nodes with the most result bytes, ascending.
    fn largest(&self, mut nodes: Vec<usize>, n: usize) -> Vec<usize> {
        nodes.sort_by_key(|&i| Reverse((self.result_bytes(i), i)));
        nodes.truncate(n);
        nodes.sort_unstable();
        nodes
    }

    /// All Pareto-optimal choices.
    fn choices(&self) -> Vec<LayerChoice> {
        let recomputable = (0..self.nodes.len()).filter(|&i| self.recomputable[i]).collect();
        let mut droppable = self.largest(recomputable, MAX_CHOSEN_NODES);
        let mut offloadable: Vec<usize> = vec![];
        let mut dropped_together: Vec<usize> = vec![];
        if self.copies.is_some() {
            dropped_together.clone_from(&droppable);
            droppable = self.largest(droppable, MAX_CHOSEN_NODES_WITH_OFFLOAD);
            dropped_together.retain(|i| !droppable.contains(i));
            let others =
                (0..self.nodes.len()).filter(|&i| !self.recomputable[i] && self.is_read_by_backward(i));
            offloadable.extend(&droppable);
            offloadable.extend(self.largest(others.collect(), MAX_OFFLOAD_ONLY_NODES));
        }
        let mut all: Vec<LayerChoice> = vec![];
        for dropped in 0..1u32 << droppable.len() {
            // A node is dropped or offloaded, not both. The first nodes of `offloadable` are those of `droppable`, so their
            // bits agree.
            for offloaded in (0..1u32 << offloadable.len()).filter(|offloaded| offloaded & dropped == 0) {
                let dropped = subset(&droppable, dropped);
                let offloaded = subset(&offloadable, offloaded);
                if !dropped_together.is_empty() {
                    let mut more = [&dropped[..], &dropped_together].concat();
                    more.sort_unstable();
                    all.push(self.choice(more, offloaded.clone()));
                }
                all.push(self.choice(dropped, offloaded));
            }
        }
        undominated(all, |choice| (choice.arena_bytes, choice.seconds))
    }

    /// Stored bytes and additional seconds if the results of the nodes `dropped` are recomputed and those of the nodes
    /// `offloaded` are offloaded. Indices ascend, so the reverse order visits readers before the nodes whose results they
    /// read. A dropped node is recomputed only if its result is needed.
    #[expect(clippy::arithmetic_side_effects, reason = "bytes of the values of a graph within the limits")]
    fn choice(&self, dropped: Vec<usize>, offloaded: Vec<usize>) -> LayerChoice {
        let mut is_dropped = vec![false; self.nodes.len()];
        dropped.iter().for_each(|&i| is_dropped[i] = true);
        let mut needed: Vec<bool> = self.values.iter().map(|value| value.read_by_backward).collect();
        let mut seconds = 0.0;
        for &i in dropped.iter().rev() {
            let recomputed = (0..needed.len()).any(|k| needed[k] && self.values[k].node == i);
            if recomputed {
                seconds += self.seconds[i];
                self.reads[i].iter().for_each(|&k| needed[k] = true);
            }
        }
        let mut stored_bytes = 0;
        let mut offloaded_bytes = 0;
        let mut copied = RoundTrip::default();
        for (k, value) in self.values.iter().enumerate() {
            if !needed[k] || is_dropped[value.node] {
                continue;
            }
            match self.copies.as_ref().filter(|_| offloaded.contains(&value.node)) {
                Some(copies) => {
                    offloaded_bytes += value.bytes;
                    copied.out += copies.of_value[k].out;
                    copied.back += copies.of_value[k].back;
                }
                None => stored_bytes += value.bytes,
            }
        }
        let mut arena_bytes = stored_bytes;
        if let Some(CopyTimes { forward_kernels, backward_kernels, layers, .. }) = self.copies {
            // The values of a few layers are in transit at once. Each layer is charged its share of them, so that the sum over
            // all layers is their number of bytes.
            arena_bytes += (LAYERS_IN_TRANSIT.min(layers) * offloaded_bytes).div_ceil(layers.max(1));
            // Copies back are hidden by the kernels of the backward pass, which recomputation makes longer.
            let waits =
                (copied.out - forward_kernels).max(0.0) + (copied.back - backward_kernels - seconds).max(0.0);
            seconds += waits + HIDDEN_COPY_COST * (copied.out + copied.back);
        }
        LayerChoice { stored_bytes, arena_bytes, dropped, offloaded, seconds }
    }
}

/// The nodes whose bits are set: bit `k` stands for `nodes[k]`.
fn subset(nodes: &[usize], bits: u32) -> Vec<usize> {
    nodes.iter().enumerate().filter(|(k, _)| bits >> k & 1 == 1).map(|(_, &i)| i).collect()
}

/// Returns the elements that no other element beats in both bytes and seconds, in order of bytes.
fn undominated<T>(mut all: Vec<T>, cost: impl Fn(&T) -> (u64, f64)) -> Vec<T> {
    all.sort_by(|a, b| {
        let (a_bytes, a_seconds) = cost(a);
        let (b_bytes, b_seconds) = cost(b);
        a_bytes.cmp(&b_bytes).then(a_seconds.total_cmp(&b_seconds))
    });
    let mut fastest = f64::INFINITY;
    all.retain(|element| {
        let (_, seconds) = cost(element);
        let better = seconds < fastest;
        fastest = fastest.min(seconds);
        better
    });
    all
}

/// A combination of one choice per layer.
struct Combination {
    /// Stored bytes and bytes in transit.
    arena_bytes: u64,
    /// Smallest number of stored bytes of this and all later combinations.
    stored_bytes: u64,
    /// Predicted seconds of recomputation and of waiting for copies.
    seconds: f64,
    /// `arena_bytes` in units of [`Combinations::unit`], rounded up for each layer.
    units: usize,
}

/// Number of units into which the largest number of arena bytes is divided: finer than packing can distinguish.
const UNITS: u64 = 2048;

/// All Pareto-optimal combinations of one choice per layer, by dynamic programming over (layer, arena bytes). Bytes
/// are counted in units, a fraction of the largest number of arena bytes, and rounded up for each layer, so that the
/// work does not grow with the number of bytes. The result is exact if there are at most [`UNITS`] bytes.
struct Combinations {
    /// Combinations in order of arena bytes.
    all: Vec<Combination>,
    /// Bytes per unit.
    unit: u64,
    /// `chosen[l][u]`: the choice of layer l in the fastest combination of the layers up to l that takes u units.
    chosen: Vec<Vec<u16>>,
}

/// The fastest combination of the layers so far that takes a given number of units; of infinite time if there is none.
#[derive(Clone, Copy)]
struct PartialCombination {
    seconds: f64,
    arena_bytes: u64,
    stored_bytes: u64,
}

impl PartialCombination {
    const NONE: Self = Self { seconds: f64::INFINITY, arena_bytes: 0, stored_bytes: 0 };
}

/// Units of a choice, rounded up.
fn units(choice: &LayerChoice, unit: u64) -> usize {
    choice.arena_bytes.div_ceil(unit) as usize
}

/// Largest number of units of the choices of a layer.
fn most_units(choices: &[LayerChoice], unit: u64) -> usize {
    choices.iter().map(|choice| units(choice, unit)).max().unwrap_or(0)
}

impl Combinations {
    #[expect(clippy::arithmetic_side_effects, reason = "bytes of the values of a graph within the limits")]
    fn of(layers: &[&[LayerChoice]]) -> Self {
        let most_bytes: u64 =
            layers.iter().map(|choices| choices.iter().map(|c| c.arena_bytes).max().unwrap_or(0)).sum();
        let unit = most_bytes.div_ceil(UNITS).max(1);
        let width = layers.iter().map(|choices| most_units(choices, unit)).sum::<usize>() + 1;
        // `fastest[u]`: the fastest combination of the layers so far that takes u units.
        let mut fastest = vec![PartialCombination::NONE; width];
        fastest[0].seconds = 0.0;
        let mut chosen: Vec<Vec<u16>> = vec![];
        // Largest number of units that the layers so far can take.
        let mut reached = 0;
        for choices in layers {
            let mut next = vec![PartialCombination::NONE; width];
            let mut next_choice = vec![0_u16; width];
            // Of the choices with equal units only the fastest can be part of a best combination. With many layers a
            // layer has few units, so most of its choices are left out. The comparison below is strict, so among
            // combinations of equal time the one in which this layer stores most wins.
            let mut by_units: BTreeMap<usize, (usize, &LayerChoice)> = BTreeMap::new();
            for (k, choice) in choices.iter().enumerate() {
                let known = by_units.entry(units(choice, unit)).or_insert((k, choice));
                if choice.seconds < known.1.seconds {
                    *known = (k, choice);
                }
            }
            for (taken, (k, choice)) in by_units.into_iter().rev() {
                // A combination of u units before this layer becomes one of u + `taken` units.
                let extended =
                    next[taken..].iter_mut().zip(&mut next_choice[taken..]).zip(&fastest[..=reached]);
                for ((next, next_choice), before) in extended {
                    if before.seconds + choice.seconds < next.seconds {
                        *next = PartialCombination {
                            seconds: before.seconds + choice.seconds,
                            arena_bytes: before.arena_bytes + choice.arena_bytes,
                            stored_bytes: before.stored_bytes + choice.stored_bytes,
                        };
                        *next_choice = k as u16;
                    }
                }
            }
            reached += most_units(choices, unit);
            fastest = next;
            chosen.push(next_choice);
        }
        let mut all = vec![];
        for (units, partial) in fastest.iter().enumerate().filter(|(_, partial)| partial.seconds.is_finite()) {
            all.push(Combination {
                arena_bytes: partial.arena_bytes,
                stored_bytes: partial.stored_bytes,
                // Rounded to picoseconds: sums of equal terms in another order must compare equal.
                seconds: (partial.seconds * 1e12).round() / 1e12,
                units,
            });
        }
        let mut all = undominated(all, |combination| (combination.arena_bytes, combination.seconds));
        // With offload, stored bytes need not ascend with arena bytes. A search skips all choices after one whose stored
        // bytes exceed the budget, so each combination gets the least of it and all later ones.
        let mut least = u64::MAX;
        for combination in all.iter_mut().rev() {
            least = least.min(combination.stored_bytes);
            combination.stored_bytes = least;
        }
        Self { all, unit, chosen }
    }

    /// Choice of each layer in combination `k`, reconstructed from the last layer to the first.
    fn layer_choices(&self, layers: &[&[LayerChoice]], k: usize) -> Vec<u16> {
        let mut remaining = self.all[k].units;
        let mut choices = vec![0; layers.len()];
        for i in (0..layers.len()).rev() {
            choices[i] = self.chosen[i][remaining];
            remaining -= units(&layers[i][usize::from(choices[i])], self.unit);
        }
        choices
    }
}

#[cfg(test)]
mod tests;
