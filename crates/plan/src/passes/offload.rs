//! Stores parameters and states outside the arena between their uses: each node reads a copy that a move fetches, and the
//! new value of an update is stored by a move. Invariant: the graph computes the same function. A parameter that is an
//! output of the graph stays in the arena, because its storage is read after the step. A part of a value lies in the space of
//! the value: a node that reads it reads a copy of that part, and a new value that is joined from parts is stored by parts.

use super::push_node;
use crate::views::offset_of_row;
use plimsoll_graph::ops::{Join, Move};
use plimsoll_graph::{
    Bytes, Def, Graph, Node, NodeId, Op, Phase, Role, Space, StateKind, StateRole, Value, ValueId,
};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::ops::Range;

/// Tensors that are stored outside the arena between their uses, and where.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Offload {
    /// Moments of the optimizer, with their quantization scales, and averages of the weights.
    pub optimizer: bool,
    /// f32 master copies of 16-bit parameters.
    pub masters: bool,
    /// Gradients accumulated over the micro-steps of a step.
    pub gradients: bool,
    /// Parameters.
    pub parameters: bool,
    /// Activations, from the forward to the backward pass; which of them, [`ActivationOffload`](crate::ActivationOffload)
    /// says.
    pub activations: bool,
    /// The space where they are stored.
    pub to: Space,
}

impl Offload {
    /// Stores the parameters in `to`.
    pub fn parameters(to: Space) -> Self {
        Self { parameters: true, to, ..Self::default() }
    }

    /// Whether nothing is stored outside the arena.
    pub fn is_empty(&self) -> bool {
        let Self { optimizer, masters, gradients, parameters, activations, to } = *self;
        !(optimizer || masters || gradients || parameters || activations) || to == Space::Device
    }

    /// The tensors that a graph stores outside the arena.
    pub fn of(graph: &Graph) -> Self {
        let mut offload = Self::default();
        for (_, value) in graph.sources().filter(|(_, value)| value.spec.space != Space::Device) {
            offload.to = value.spec.space;
            match value.spec.role {
                Role::Param(_) => offload.parameters = true,
                Role::State(s) => match graph.states[s.index()].role.kind() {
                    StateKind::Gradient => offload.gradients = true,
                    StateKind::Optimizer | StateKind::Average => offload.optimizer = true,
                    StateKind::Master => offload.masters = true,
                    StateKind::Buffer => {}
                },
                Role::Input | Role::Activation | Role::Grad => {}
            }
        }
        // An update stores new states, which are no activations of a layer.
        for node in graph.nodes.iter().filter(|node| node.phase == Phase::Forward) {
            for &v in node.outputs.iter().flatten() {
                let spec = graph.spec(v);
                if spec.role == Role::Activation && spec.space != Space::Device {
                    offload.activations = true;
                    offload.to = offload.to.max(spec.space);
                }
            }
        }
        offload
    }

    /// The tensors that either stores outside the arena; both use the same space.
    pub(crate) fn and(self, other: Self) -> Self {
        Self {
            optimizer: self.optimizer || other.optimizer,
            masters: self.masters || other.masters,
            gradients: self.gradients || other.gradients,
            parameters: self.parameters || other.parameters,
            activations: self.activations || other.activations,
            to: if self.to == Space::Device { other.to } else { self.to },
        }
    }

    /// The space of a parameter or state between its uses.
    pub(crate) fn home(&self, graph: &Graph, role: Role) -> Space {
        let is_moved = match role {
            Role::Param(_) => self.parameters,
            // Every parameter's average reads this number of four bytes, so a copy for each would only take time.
            Role::State(s) if graph.states[s.index()].role == StateRole::AveragedSteps => false,
            Role::State(s) => match graph.states[s.index()].role.kind() {
                StateKind::Gradient => self.gradients,
                StateKind::Optimizer | StateKind::Average => self.optimizer,
                StateKind::Master => self.masters,
                StateKind::Buffer => false,
            },
            Role::Input | Role::Activation | Role::Grad => false,
        };
        if is_moved { self.to } else { Space::Device }
    }
}

/// Returns the graph with the chosen parameters and states outside the arena. `arena_in_host` says that the arena is host
/// memory, which a file is read into directly; to another arena it goes through pinned host memory.
pub fn offload(graph: &Graph, what: &Offload, arena_in_host: bool) -> Graph {
    if what.is_empty() {
        return graph.clone();
    }
    let mut g = Graph { nodes: vec![], updates: vec![], ..graph.clone() };
    for (v, _) in fetched_sources(graph, what).into_iter().enumerate().filter(|(_, is_fetched)| *is_fetched) {
        g.values[v].spec.space = what.to;
    }
    let route = route(what.to, arena_in_host);
    let mut stores = StateStores::of(graph, &g);
    stores.insert(&mut g, None, route);
    for (id, node) in graph.nodes() {
        let mut node = node.clone();
        if let (Op::Part(_), &[operand], &[Some(part)]) = (&node.op, &node.inputs[..], &node.outputs[..]) {
            g.values[part.index()].spec.space = g.spec(operand).space;
            push_node(&mut g, node);
            stores.insert(&mut g, Some(id), route);
            continue;
        }
        if stores.replaces(&node) {
            stores.insert(&mut g, Some(id), route);
            continue;
        }
        let mut fetched: BTreeMap<ValueId, ValueId> = BTreeMap::new();
        let position = LayerPhase::of(&node);
        for input in &mut node.inputs {
            // The moves of activations are in the graph already.
            if g.spec(*input).space == Space::Device || matches!(node.op, Op::Move(_)) {
                continue;
            }
            // A node that reads a value as two of its inputs has one copy of it.
            *input = *fetched.entry(*input).or_insert_with(|| {
                route[1..].iter().fold(*input, |from, &to| push_move(&mut g, from, to, position))
            });
        }
        push_node(&mut g, node);
        stores.insert(&mut g, Some(id), route);
    }
    restore_update_order(graph, &mut g);
    g
}

/// The spaces through which a value in the space `from` comes into the arena, from the first to the last.
pub(super) fn route(from: Space, arena_in_host: bool) -> &'static [Space] {
    match (from, arena_in_host) {
        (Space::File, false) => &[Space::File, Space::Host, Space::Device],
        (Space::File, true) => &[Space::File, Space::Device],
        (Space::Host, _) => &[Space::Host, Space::Device],
        (Space::Device, _) => &[Space::Device],
    }
}

/// Brings the updates of `g` into the order of those of `graph`, which are of the same states.
fn restore_update_order(graph: &Graph, g: &mut Graph) {
    let of_state: BTreeMap<ValueId, usize> =
        graph.updates.iter().enumerate().map(|(k, (state, _))| (*state, k)).collect();
    g.updates.sort_by_key(|(state, _)| of_state.get(state).copied());
}

/// Layer and phase of a node, which the moves that are made for it get too.
#[derive(Clone, Copy)]
pub(super) struct LayerPhase {
    layer: Option<u32>,
    phase: Phase,
}

impl LayerPhase {
    /// Outside of all layers, in the update.
    const UPDATE: Self = Self { layer: None, phase: Phase::Update };

    pub(super) fn of(node: &Node) -> Self {
        Self { layer: node.layer, phase: node.phase }
    }
}

/// Whether each value is a parameter or state that is stored outside the arena, indexed by value.
pub(super) fn fetched_sources(graph: &Graph, what: &Offload) -> Vec<bool> {
    let mut is_fetched = vec![false; graph.values.len()];
    for (v, value) in graph.sources() {
        is_fetched[v.index()] = what.home(graph, value.spec.role) != Space::Device;
    }
    // Outputs and the new values of updates are read from their storage after the last node, so a source that is one of them
    // stays in the arena.
    let reads = ByteReads::of(graph);
    let outputs = graph.outputs.iter().map(|(_, v)| *v);
    let new_values = graph.updates.iter().map(|(_, new)| *new);
    for v in outputs.chain(new_values) {
        let (whole, _) = reads.wholes[v.index()];
        is_fetched[whole.index()] = false;
    }
    is_fetched
}

/// A value that is stored after a node.
enum StateStore {
    /// The new value of a state.
    Whole { state: ValueId, new: ValueId },
    /// One of the values that the new value of the state is joined from.
    Part { state: ValueId, operand: ValueId },
    /// The new value of the state, joined from values that were stored before it.
    Join { state: ValueId, new: ValueId },
}

/// The updates of a graph by the node after which the new value may be stored: it exists, and no later node reads the bytes
/// that it replaces.
struct StateStores {
    /// The stores after each node; `None` is before the first.
    after: BTreeMap<Option<NodeId>, Vec<StateStore>>,
    /// The operands of each new value that is stored by parts.
    joins: BTreeMap<ValueId, Vec<ValueId>>,
    /// The stored copy of each operand.
    stored: BTreeMap<ValueId, ValueId>,
}

impl StateStores {
    /// The stores of all updates of `graph`, whose states have the spaces of `g`.
    fn of(graph: &Graph, g: &Graph) -> Self {
        let mut stores = Self { after: BTreeMap::new(), joins: BTreeMap::new(), stored: BTreeMap::new() };
        let reads = ByteReads::of(graph);
        let read_counts = graph.reads();
        for &(state, new) in &graph.updates {
            let is_moved = g.spec(state).space != Space::Device;
            // A new value that only the state holds is never whole in the arena.
            let by_parts = joined_from(graph, new).filter(|_| is_moved && read_counts[new.index()] == 1);
            let Some(operands) = by_parts else {
                let after = reads.last(state, 0..u64::MAX).max(definer(graph, new));
                stores.push(after, StateStore::Whole { state, new });
                continue;
            };
            let mut last = None;
            let mut start = 0_u64;
            for &operand in operands {
                let end = start.saturating_add(graph.spec(operand).bytes(&graph.bounds).0);
                let after = reads.last(state, start..end).max(definer(graph, operand));
                stores.push(after, StateStore::Part { state, operand });
                last = last.max(after);
                start = end;
            }
            stores.push(last, StateStore::Join { state, new });
            stores.joins.insert(new, operands.to_vec());
        }
        stores
    }

    fn push(&mut self, after: Option<NodeId>, store: StateStore) {
        self.after.entry(after).or_default().push(store);
    }

    /// Whether a node is a join whose operands are stored one by one, and are joined where they are stored.
    fn replaces(&self, node: &Node) -> bool {
        matches!(node.op, Op::Join(_)) && node.outputs.iter().flatten().any(|v| self.joins.contains_key(v))
    }

    /// Adds the updates behind a node to the new graph, with the moves that store the new values of offloaded states.
    fn insert(&mut self, g: &mut Graph, after: Option<NodeId>, route: &[Space]) {
        for store in self.after.remove(&after).unwrap_or_default() {
            let position = g.nodes.last().map_or(LayerPhase::UPDATE, LayerPhase::of);
            match store {
                StateStore::Whole { state, new } => {
                    let stored = push_store(g, state, new, route, position);
                    g.updates.push((state, stored));
                }
                StateStore::Part { state, operand } => {
                    let stored = push_store(g, state, operand, route, position);
                    self.stored.insert(operand, stored);
                }
                StateStore::Join { state, new } => {
                    let operands = self.joins.get(&new).map_or(&[][..], Vec::as_slice);
                    let inputs: Vec<ValueId> =
                        operands.iter().filter_map(|operand| self.stored.get(operand).copied()).collect();
                    g.values[new.index()].spec.space = g.spec(state).space;
                    let LayerPhase { layer, phase } = position;
                    let op = Op::Join(Join {});
                    push_node(g, Node { op, inputs, outputs: vec![Some(new)], layer, phase });
                    g.updates.push((state, new));
                }
            }
        }
    }
}

/// Adds the moves of `value` to the space of `state`, back along the route into the arena, and returns the last result. A
/// state in the arena needs none.
fn push_store(g: &mut Graph, state: ValueId, value: ValueId, route: &[Space], position: LayerPhase) -> ValueId {
    if g.spec(state).space == Space::Device {
        return value;
    }
    route.iter().rev().skip(1).fold(value, |from, &to| push_move(g, from, to, position))
}

/// The operands of the join that gives `v`; `None` if it is the result of another op.
fn joined_from(graph: &Graph, v: ValueId) -> Option<&[ValueId]> {
    let node = graph.node(definer(graph, v)?);
    matches!(node.op, Op::Join(_)).then_some(&node.inputs[..])
}

/// The node that defines a value.
fn definer(graph: &Graph, v: ValueId) -> Option<NodeId> {
    match graph.value(v).def {
        Def::Node(id, _) => Some(id),
        Def::Source => None,
    }
}

/// A read of bytes of a value by a launch or a move.
struct ByteRead {
    node: NodeId,
    /// Index of the input.
    input: usize,
    bytes: Range<u64>,
}

/// The reads of all values, with the reads of their parts.
struct ByteReads {
    /// The value that each value is a part of, and the offset there in bytes; the value itself if it is none.
    wholes: Vec<(ValueId, u64)>,
    /// The reads of each value that is no part, indexed by value, in the order of the nodes.
    of_value: Vec<Vec<ByteRead>>,
}

impl ByteReads {
    fn of(graph: &Graph) -> Self {
        let mut wholes: Vec<(ValueId, u64)> = graph.values().map(|(v, _)| (v, 0)).collect();
        let mut of_value: Vec<Vec<ByteRead>> = graph.values.iter().map(|_| vec![]).collect();
        for (id, node) in graph.nodes() {
            if let (Op::Part(part), &[operand], &[Some(result)]) =
                (&node.op, &node.inputs[..], &node.outputs[..])
            {
                let offset = offset_of_row(graph, operand, part.first);
                let (whole, at) = wholes[operand.index()];
                wholes[result.index()] = (whole, (Bytes(at) + Bytes(offset)).0);
                continue;
            }
            for (input, v) in node.inputs.iter().enumerate() {
                let (whole, start) = wholes[v.index()];
                let end = Bytes(start) + graph.spec(*v).bytes(&graph.bounds);
                of_value[whole.index()].push(ByteRead { node: id, input, bytes: start..end.0 });
            }
        }
        Self { wholes, of_value }
    }

    /// The reads of bytes of a value.
    fn of_bytes(&self, v: ValueId, bytes: Range<u64>) -> impl Iterator<Item = &ByteRead> {
        let reads = self.of_value[v.index()].iter();
        reads.filter(move |read| read.bytes.start < bytes.end && bytes.start < read.bytes.end)
    }

    /// The last node that reads bytes of a value.
    fn last(&self, v: ValueId, bytes: Range<u64>) -> Option<NodeId> {
        self.of_bytes(v, bytes).map(|read| read.node).max()
    }
}

/// Adds a move of `from` to the space `to`, and returns its result.
pub(super) fn push_move(g: &mut Graph, from: ValueId, to: Space, position: LayerPhase) -> ValueId {
    let operand = g.spec(from).clone();
    let v = ValueId::at(g.values.len());
    let spec = operand.clone().with_role(Move::role(operand.role)).in_space(to);
    g.values.push(Value { spec, def: Def::Source });
    let LayerPhase { layer, phase } = position;
    push_node(g, Node { op: Op::Move(Move { to }), inputs: vec![from], outputs: vec![Some(v)], layer, phase });
    v
}

/// Adds a move within the arena for each update whose new value cannot be written into the storage of its state: the old
/// value is read later, or the new value is an input, a parameter, a part or an operand of a join, or the new value of
/// another state too. In the returned graph the new value of every update is written there.
pub fn store_updates(graph: Graph) -> Graph {
    let reads = ByteReads::of(&graph);
    let mut lies_elsewhere: Vec<bool> =
        reads.wholes.iter().enumerate().map(|(v, (whole, _))| whole.index() != v).collect();
    for node in graph.nodes.iter().filter(|node| matches!(node.op, Op::Join(_))) {
        node.inputs.iter().for_each(|v| lies_elsewhere[v.index()] = true);
    }
    let mut after: BTreeMap<Option<NodeId>, Vec<(ValueId, ValueId)>> = BTreeMap::new();
    let mut moved = vec![];
    for &(state, new) in &graph.updates {
        if !lies_elsewhere[new.index()] && is_written_there(&graph, &reads, state, new) {
            // It cannot lie in the storage of another state as well.
            lies_elsewhere[new.index()] = true;
            continue;
        }
        moved.push((state, new));
        let last_use = reads.last(state, 0..u64::MAX).max(definer(&graph, new));
        after.entry(last_use).or_default().push((state, new));
    }
    if moved.is_empty() {
        return graph;
    }
    let updates: Vec<_> = graph.updates.iter().copied().filter(|update| !moved.contains(update)).collect();
    let mut g = Graph { nodes: vec![], updates, ..graph.clone() };
    push_updates(&mut g, after.remove(&None), LayerPhase::UPDATE);
    for (id, node) in graph.nodes() {
        push_node(&mut g, node.clone());
        push_updates(&mut g, after.remove(&Some(id)), LayerPhase::of(node));
    }
    restore_update_order(&graph, &mut g);
    g
}

/// Adds updates (state, new), each with a move of the new value to the space of its state.
fn push_updates(g: &mut Graph, updates: Option<Vec<(ValueId, ValueId)>>, position: LayerPhase) {
    for (state, new) in updates.unwrap_or_default() {
        let stored = push_move(g, new, g.spec(state).space, position);
        g.updates.push((state, stored));
    }
}

/// Whether `new` can be written directly into the storage of `state`: whatever writes bytes of it comes after the last read
/// of the old bytes there, or is their last reader and may overwrite that operand.
fn is_written_there(graph: &Graph, reads: &ByteReads, state: ValueId, new: ValueId) -> bool {
    let mut open = vec![(new, 0_u64)];
    while let Some((v, start)) = open.pop() {
        let Def::Node(id, k) = graph.value(v).def else { return false };
        let node = graph.node(id);
        let end = Bytes(start) + graph.spec(v).bytes(&graph.bounds);
        if let Op::Join(_) = node.op {
            let mut offset = start;
            for &operand in &node.inputs {
                open.push((operand, offset));
                offset = (Bytes(offset) + graph.spec(operand).bytes(&graph.bounds)).0;
            }
            continue;
        }
        let allowed = node.op.rules().alias(k as usize);
        for read in reads.of_bytes(state, start..end.0) {
            let in_place = read.node == id && allowed.contains(&read.input) && read.bytes == (start..end.0);
            if read.node >= id && !in_place {
                return false;
            }
        }
    }
    true
}
