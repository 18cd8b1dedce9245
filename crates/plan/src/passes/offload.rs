//! Keeps parameters and states outside the arena between their uses: each node reads a copy that a move fetches, and the
//! new value of an update is stored by a move. Invariant: the graph computes the same function. A parameter that is an
//! output of the graph stays in the arena, because its storage is read after the step.

use super::push_node;
use plimsoll_graph::ops::Move;
use plimsoll_graph::{Def, Graph, Node, NodeId, Op, Phase, Role, Space, StateKind, Value, ValueId};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// What is kept outside the arena, and where.
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
    /// The space where they are kept.
    pub to: Space,
}

impl Offload {
    /// Keeps the parameters in `to`.
    pub fn parameters(to: Space) -> Self {
        Self { parameters: true, to, ..Self::default() }
    }

    /// Whether nothing is kept outside the arena.
    pub fn is_empty(&self) -> bool {
        let Self { optimizer, masters, gradients, parameters, activations, to } = *self;
        !(optimizer || masters || gradients || parameters || activations) || to == Space::Device
    }

    /// What a graph keeps outside the arena.
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
        for value in &graph.values {
            let is_away = value.spec.space != Space::Device && value.def != Def::Source;
            if value.spec.role == Role::Activation && is_away {
                offload.activations = true;
                offload.to = offload.to.max(value.spec.space);
            }
        }
        offload
    }

    /// What either keeps outside the arena; both keep it in the same space.
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
    for (v, value) in graph.sources() {
        g.values[v.index()].spec.space = what.home(graph, value.spec.role);
    }
    let kept = graph.outputs.iter().map(|(_, v)| *v).chain(graph.updates.iter().map(|(_, new)| *new));
    for v in kept.filter(|v| graph.value(*v).def == Def::Source) {
        g.values[v.index()].spec.space = Space::Device;
    }
    let route = route(what.to, arena_in_host);
    let mut stores = Stores::of(graph);
    stores.insert(&mut g, None, route);
    for (id, node) in graph.nodes() {
        let mut node = node.clone();
        let mut fetched: BTreeMap<ValueId, ValueId> = BTreeMap::new();
        for input in &mut node.inputs {
            // The moves of activations are in the graph already.
            if g.spec(*input).space == Space::Device || matches!(node.op, Op::Move(_)) {
                continue;
            }
            // A node that reads a value as two of its inputs has one copy of it.
            *input = *fetched.entry(*input).or_insert_with(|| {
                let place = Place { layer: node.layer, phase: node.phase };
                route[1..].iter().fold(*input, |from, &to| push_move(&mut g, from, to, place))
            });
        }
        push_node(&mut g, node);
        stores.insert(&mut g, Some(id), route);
    }
    in_order_of(graph, &mut g);
    g
}

/// The spaces through which what is kept in the space `from` comes into the arena, from the first to the last.
pub(super) fn route(from: Space, arena_in_host: bool) -> &'static [Space] {
    match (from, arena_in_host) {
        (Space::File, false) => &[Space::File, Space::Host, Space::Device],
        (Space::File, true) => &[Space::File, Space::Device],
        (Space::Host, _) => &[Space::Host, Space::Device],
        (Space::Device, _) => &[Space::Device],
    }
}

/// Brings the updates of `g` into the order of those of `graph`, which are of the same states.
fn in_order_of(graph: &Graph, g: &mut Graph) {
    let of_state: BTreeMap<ValueId, usize> =
        graph.updates.iter().enumerate().map(|(k, (state, _))| (*state, k)).collect();
    g.updates.sort_by_key(|(state, _)| of_state.get(state).copied());
}

/// Layer and phase of the node for which a move is made.
#[derive(Clone, Copy)]
pub(super) struct Place {
    pub(super) layer: Option<u32>,
    pub(super) phase: Phase,
}

/// The updates of a graph by the node after which the new value may be stored: it exists, and no later node reads the old
/// value.
struct Stores {
    /// Updates (state, new) after each node.
    after: BTreeMap<NodeId, Vec<(ValueId, ValueId)>>,
    /// Updates before the first node.
    before: Vec<(ValueId, ValueId)>,
}

impl Stores {
    fn of(graph: &Graph) -> Self {
        let last = last_reads(graph);
        let mut stores = Self { after: BTreeMap::new(), before: vec![] };
        for &(state, new) in &graph.updates {
            let defined = match graph.value(new).def {
                Def::Node(id, _) => Some(id),
                Def::Source => None,
            };
            match last[state.index()].max(defined) {
                Some(id) => stores.after.entry(id).or_default().push((state, new)),
                None => stores.before.push((state, new)),
            }
        }
        stores
    }

    /// Adds the updates behind a node to the new graph, with the moves that store the new values of offloaded states.
    fn insert(&mut self, g: &mut Graph, after: Option<NodeId>, route: &[Space]) {
        let updates = match after {
            Some(id) => self.after.remove(&id).unwrap_or_default(),
            None => std::mem::take(&mut self.before),
        };
        for (state, new) in updates {
            let place = g.nodes.last().map_or(Place { layer: None, phase: Phase::Update }, |node| Place {
                layer: node.layer,
                phase: node.phase,
            });
            let stored = match g.spec(state).space {
                Space::Device => new,
                Space::Host | Space::File => {
                    route.iter().rev().skip(1).fold(new, |from, &to| push_move(g, from, to, place))
                }
            };
            g.updates.push((state, stored));
        }
    }
}

/// Adds a move of `from` to the space `to`, and returns its result.
pub(super) fn push_move(g: &mut Graph, from: ValueId, to: Space, place: Place) -> ValueId {
    let operand = g.spec(from).clone();
    let v = ValueId::at(g.values.len());
    let spec = operand.clone().with_role(Move::role(operand.role)).in_space(to);
    g.values.push(Value { spec, def: Def::Source });
    let Place { layer, phase } = place;
    push_node(g, Node { op: Op::Move(Move { to }), inputs: vec![from], outputs: vec![Some(v)], layer, phase });
    v
}

/// Adds a move within the arena for each update whose new value cannot be written into the storage of its state: the old
/// value is read later, or the new value is an input, a parameter, or the new value of another state too. In the returned
/// graph the new value of every update is written there.
pub fn store_updates(graph: Graph) -> Graph {
    let last = last_reads(&graph);
    let mut stores = Stores { after: BTreeMap::new(), before: vec![] };
    let mut homes = vec![false; graph.values.len()];
    let mut moved = vec![];
    for &(state, new) in &graph.updates {
        let defined = match graph.value(new).def {
            Def::Node(id, k) => {
                let is_first = !homes[new.index()];
                if is_first && is_written_there(&graph, state, (id, k as usize), last[state.index()]) {
                    homes[new.index()] = true;
                    continue;
                }
                Some(id)
            }
            Def::Source => None,
        };
        moved.push((state, new));
        match last[state.index()].max(defined) {
            Some(id) => stores.after.entry(id).or_default().push((state, new)),
            None => stores.before.push((state, new)),
        }
    }
    if moved.is_empty() {
        return graph;
    }
    let updates: Vec<_> = graph.updates.iter().copied().filter(|update| !moved.contains(update)).collect();
    let mut g = Graph { nodes: vec![], updates, ..graph.clone() };
    let store = |g: &mut Graph, updates: Vec<(ValueId, ValueId)>, place: Place| {
        for (state, new) in updates {
            let stored = push_move(g, new, g.spec(state).space, place);
            g.updates.push((state, stored));
        }
    };
    store(&mut g, std::mem::take(&mut stores.before), Place { layer: None, phase: Phase::Update });
    for (id, node) in graph.nodes() {
        push_node(&mut g, node.clone());
        let place = Place { layer: node.layer, phase: node.phase };
        store(&mut g, stores.after.remove(&id).unwrap_or_default(), place);
    }
    in_order_of(&graph, &mut g);
    g
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

/// Whether output `k` of node `id` can be written directly into the storage of `state`, whose last read is by node `read`.
fn is_written_there(graph: &Graph, state: ValueId, (id, k): (NodeId, usize), read: Option<NodeId>) -> bool {
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
