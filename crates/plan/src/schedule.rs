//! Execution order of a plan: kernel launches, and moves that are started early and waited for late, so that copies and
//! kernels overlap. Invariant: an instruction may rely on everything that an earlier launch wrote and on every move that
//! was waited for before it, and on nothing else. A move starts after all launches and waits before it; two moves that are
//! both started and not waited for have no order.

use crate::views::Views;
use plimsoll_graph::{Bytes, Graph, Node, NodeId, Op, Phase, Role, Space, ValueId};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, VecDeque};

/// One instruction of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Instr {
    /// Execute a node that is neither a move nor a view.
    Launch(NodeId),
    /// Begin to copy the operand of a move node to its result.
    Start(NodeId),
    /// Wait until the copy of a move node is complete.
    Wait(NodeId),
}

/// The instructions of a step, in execution order.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Schedule {
    /// Instructions in execution order.
    pub instrs: Vec<Instr>,
}

/// The queue of a device in which a move runs. Moves of one queue run one after another; queues run concurrently.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Queue {
    /// The queue of kernels: copies within the arena.
    Compute,
    /// From pinned host memory to the arena.
    In,
    /// From the arena to pinned host memory.
    Out,
    /// From the scratch file, to host memory or to an arena in host memory.
    Read,
    /// To the scratch file.
    Write,
}

impl Queue {
    /// All queues.
    pub const ALL: [Self; 5] = [Self::Compute, Self::In, Self::Out, Self::Read, Self::Write];

    /// The queue of copies from one space to another.
    pub fn of(from: Space, to: Space) -> Self {
        match (from, to) {
            (Space::File, _) => Self::Read,
            (_, Space::File) => Self::Write,
            (Space::Host, Space::Device) => Self::In,
            (Space::Device, Space::Host) => Self::Out,
            (Space::Device, Space::Device) | (Space::Host, Space::Host) => Self::Compute,
        }
    }

    /// Name in traces and timelines.
    pub fn name(self) -> &'static str {
        match self {
            Self::Compute => "compute",
            Self::In => "in",
            Self::Out => "out",
            Self::Read => "read",
            Self::Write => "write",
        }
    }
}

/// Operand and result of a move node; `None` for other nodes.
pub fn moved(graph: &Graph, id: NodeId) -> Option<(ValueId, ValueId)> {
    let node = graph.node(id);
    if let (Op::Move(_), &[from], &[Some(to)]) = (&node.op, &node.inputs[..], &node.outputs[..]) {
        return Some((from, to));
    }
    None
}

/// The queue of a move node.
pub fn queue(graph: &Graph, id: NodeId) -> Option<Queue> {
    moved(graph, id).map(|(from, to)| Queue::of(graph.spec(from).space, graph.spec(to).space))
}

/// Bytes that are fetched ahead of the launch that reads them, and bytes that are stored behind the launch that wrote
/// them, so that copies and kernels overlap: all parameters and states that one layer needs in one phase, and all that
/// two nodes need. A layer computes for about as long as the next layer's weights take to arrive; an update of the optimizer computes for a
/// much shorter time than its states take, so that the queue must have the next copy when one ends. What nodes need is their
/// mean weighted by bytes: the embedding of a large vocabulary alone would demand several times the memory of a layer.
pub fn full_window(graph: &Graph) -> Bytes {
    let mut of_layer: BTreeMap<(u32, u8), u64> = BTreeMap::new();
    // Mean weighted by bytes: the sum of squares divided by the sum.
    let mut sum = 0.0;
    let mut squares = 0.0;
    let fetched: Vec<bool> = fetched_values(graph);
    for node in graph.nodes.iter().filter(|node| is_launched(node)) {
        let mut bytes = 0_u64;
        let mut persistent = 0_u64;
        for (k, &v) in node.inputs.iter().enumerate() {
            if !fetched[v.index()] || node.inputs[..k].contains(&v) {
                continue;
            }
            let value_bytes = graph.spec(v).bytes(&graph.bounds).0;
            bytes = bytes.saturating_add(value_bytes);
            if matches!(graph.spec(v).role, Role::Param(_) | Role::State(_)) {
                persistent = persistent.saturating_add(value_bytes);
            }
        }
        sum += bytes as f64;
        squares += bytes as f64 * bytes as f64;
        if let Some(layer) = node.layer {
            let sum = of_layer.entry((layer, phase_index(node.phase))).or_default();
            *sum = sum.saturating_add(persistent);
        }
    }
    let two_readers = if sum > 0.0 { 2.0 * squares / sum } else { 0.0 };
    Bytes(of_layer.into_values().max().unwrap_or(0).max(two_readers as u64))
}

fn phase_index(phase: Phase) -> u8 {
    match phase {
        Phase::Forward => 0,
        Phase::Recompute | Phase::Backward => 1,
        Phase::Update => 2,
    }
}

/// Whether a node is launched: neither a move nor a view.
pub(crate) fn is_launched(node: &Node) -> bool {
    !node.op.is_view() && !matches!(node.op, Op::Move(_))
}

/// Whether each value is a copy in the arena of a value elsewhere.
fn fetched_values(graph: &Graph) -> Vec<bool> {
    let mut fetched = vec![false; graph.values.len()];
    for (id, _) in graph.nodes() {
        let Some((from, to)) = moved(graph, id) else { continue };
        fetched[to.index()] = graph.spec(to).space == Space::Device && graph.spec(from).space != Space::Device;
    }
    fetched
}

/// Direction of a move relative to the kernels.
#[derive(Clone, Copy, PartialEq, Eq)]
enum MoveKind {
    /// Brings a value closer to the kernels: started before its first reader.
    Fetch,
    /// Takes a value away: waited for after its start.
    Store,
    /// A copy within a space: started and waited for at once.
    Local,
}

/// Schedules the nodes in the order of the graph. Fetches start early: as soon as at most `window` bytes are fetched ahead
/// of the launches that read them. Stores are waited for late: as soon as more than `window` bytes are on their way.
pub(crate) fn schedule(graph: &Graph, window: Bytes) -> Schedule {
    let mut scheduler = Scheduler::new(graph, window.0);
    scheduler.prefetch();
    for (id, _) in graph.nodes().filter(|(_, node)| !node.op.is_view()) {
        match scheduler.kind(id) {
            None => {
                scheduler.wait_for_inputs(id);
                scheduler.emit(Instr::Launch(id));
                scheduler.read_by(id);
                scheduler.prefetch();
            }
            Some(MoveKind::Fetch) => {}
            Some(MoveKind::Store) => scheduler.store(id),
            Some(MoveKind::Local) => {
                scheduler.wait_for_inputs(id);
                scheduler.emit(Instr::Start(id));
                scheduler.emit(Instr::Wait(id));
                scheduler.state[id.index()] = MoveState::Done;
            }
        }
    }
    while scheduler.wait_for_oldest_store() {}
    Schedule { instrs: scheduler.instrs }
}

/// Progress of a move node.
#[derive(Clone, Copy, PartialEq, Eq)]
enum MoveState {
    NotStarted,
    Started,
    Done,
}

struct Scheduler<'a> {
    graph: &'a Graph,
    views: Views,
    window: u64,
    instrs: Vec<Instr>,
    /// Progress of each node; of a launch `Done` after it was emitted.
    state: Vec<MoveState>,
    /// Fetches that were not started, in the order of their nodes, by queue.
    fetches: BTreeMap<Queue, VecDeque<NodeId>>,
    /// Bytes of each queue that were fetched, or are being fetched, and not read yet.
    bytes_ahead: BTreeMap<Queue, u64>,
    /// Number of nodes that have not yet read the result of each fetch, through views or not, indexed by node.
    unread_by: Vec<u32>,
    /// Started stores that were not waited for, oldest first.
    stores: VecDeque<NodeId>,
    /// Bytes of `stores`.
    store_bytes: u64,
    /// Stores whose operand is still on its way to an intermediate space, by that move.
    next_hops: BTreeMap<NodeId, Vec<NodeId>>,
}

impl<'a> Scheduler<'a> {
    fn new(graph: &'a Graph, window: u64) -> Self {
        let mut scheduler = Self {
            graph,
            views: Views::of(graph),
            window,
            instrs: Vec::with_capacity(graph.nodes.len()),
            state: vec![MoveState::NotStarted; graph.nodes.len()],
            fetches: BTreeMap::new(),
            bytes_ahead: BTreeMap::new(),
            unread_by: vec![0; graph.nodes.len()],
            stores: VecDeque::new(),
            store_bytes: 0,
            next_hops: BTreeMap::new(),
        };
        for (id, _) in graph.nodes() {
            if let (Some(MoveKind::Fetch), Some(queue)) = (scheduler.kind(id), queue(graph, id)) {
                scheduler.fetches.entry(queue).or_default().push_back(id);
            }
        }
        for (id, _) in graph.nodes().filter(|(_, node)| !node.op.is_view()) {
            for from in scheduler.operands(id) {
                scheduler.unread_by[from.index()] += 1;
            }
        }
        scheduler
    }

    fn emit(&mut self, instr: Instr) {
        self.instrs.push(instr);
        if let Instr::Launch(id) = instr {
            self.state[id.index()] = MoveState::Done;
        }
    }

    /// `None` for a launch.
    fn kind(&self, id: NodeId) -> Option<MoveKind> {
        let (from, to) = moved(self.graph, id)?;
        // Spaces are ordered by their distance from the kernels.
        let [from, to] = [from, to].map(|v| self.graph.spec(v).space);
        Some(match from.cmp(&to) {
            std::cmp::Ordering::Greater => MoveKind::Fetch,
            std::cmp::Ordering::Less => MoveKind::Store,
            std::cmp::Ordering::Equal => MoveKind::Local,
        })
    }

    fn bytes(&self, id: NodeId) -> u64 {
        moved(self.graph, id).map_or(0, |(from, _)| self.graph.spec(from).bytes(&self.graph.bounds).0)
    }

    /// The launches and moves whose results a node reads, in the order of its inputs, each once.
    fn operands(&self, id: NodeId) -> Vec<NodeId> {
        let mut operands = vec![];
        for &v in &self.graph.node(id).inputs {
            for from in self.views.writers(self.graph, v) {
                if !operands.contains(&from) {
                    operands.push(from);
                }
            }
        }
        operands
    }

    /// Makes the inputs of a node available: starts the moves that bring them, if nothing did before, and waits.
    fn wait_for_inputs(&mut self, id: NodeId) {
        let operands = self.operands(id);
        // All of them are started before the first wait, so that they come together.
        for &from in &operands {
            self.start_fetch(from);
        }
        for from in operands {
            self.wait_for(from);
        }
    }

    /// Starts a fetch that was not started.
    fn start_fetch(&mut self, id: NodeId) {
        if self.kind(id) != Some(MoveKind::Fetch) || self.state[id.index()] != MoveState::NotStarted {
            return;
        }
        let Some(queue) = queue(self.graph, id) else { return };
        self.wait_for_inputs(id);
        self.emit(Instr::Start(id));
        self.state[id.index()] = MoveState::Started;
        if let Some(waiting) = self.fetches.get_mut(&queue) {
            waiting.retain(|&other| other != id);
        }
        let bytes = self.bytes(id);
        let ahead = self.bytes_ahead.entry(queue).or_default();
        *ahead = ahead.saturating_add(bytes);
        // The bytes of an intermediate space were read by this move.
        self.read_by(id);
    }

    /// Waits for a started move, or for a store that follows a started one.
    fn wait_for(&mut self, id: NodeId) {
        // A store to a file is started only when its hop to host memory is waited for.
        let previous =
            self.next_hops.iter().find(|(_, next)| next.contains(&id)).map(|(previous, _)| *previous);
        if let Some(previous) = previous {
            self.wait_for(previous);
        }
        if self.state[id.index()] != MoveState::Started {
            return;
        }
        self.emit(Instr::Wait(id));
        self.state[id.index()] = MoveState::Done;
        if let Some(at) = self.stores.iter().position(|&store| store == id) {
            self.stores.remove(at);
            self.store_bytes = self.store_bytes.saturating_sub(self.bytes(id));
        }
        for next in self.next_hops.remove(&id).unwrap_or_default() {
            self.store(next);
        }
    }

    /// Counts the fetched inputs of a node, which was emitted, as read, if no other node is to read them.
    fn read_by(&mut self, id: NodeId) {
        for from in self.operands(id) {
            let unread_by = &mut self.unread_by[from.index()];
            *unread_by = unread_by.saturating_sub(1);
            if *unread_by == 0
                && self.kind(from) == Some(MoveKind::Fetch)
                && let Some(queue) = queue(self.graph, from)
            {
                let bytes = self.bytes(from);
                let ahead = self.bytes_ahead.entry(queue).or_default();
                *ahead = ahead.saturating_sub(bytes);
            }
        }
    }

    /// Starts the next fetches of every queue, in order, as far as the window allows. The queue that is farthest from the
    /// kernels is last: it fills the space that the others have freed.
    fn prefetch(&mut self) {
        if self.window == 0 {
            return;
        }
        for queue in Queue::ALL {
            while let Some(&next) = self.fetches.get(&queue).and_then(VecDeque::front) {
                let ahead = self.bytes_ahead.get(&queue).copied().unwrap_or(0);
                let fits = ahead.saturating_add(self.bytes(next)) <= self.window;
                // The fetches behind it are not tried: they would take its place in the window, although they
                // are read later. A fetch larger than the window never fits; its reader starts it
                // (`wait_for_inputs`).
                if !fits || !self.is_available(next) {
                    break;
                }
                self.start_fetch(next);
            }
        }
    }

    /// Whether the operand of a fetch is there, or on its way to the space it is fetched from by an earlier fetch.
    fn is_available(&self, id: NodeId) -> bool {
        self.operands(id).into_iter().all(|from| match self.kind(from) {
            Some(MoveKind::Fetch) => self.state[from.index()] != MoveState::NotStarted,
            Some(MoveKind::Store | MoveKind::Local) | None => self.state[from.index()] == MoveState::Done,
        })
    }

    /// Starts a store, after making room for it in the window. A store from an intermediate space follows when the move
    /// there is waited for.
    fn store(&mut self, id: NodeId) {
        // A join has several operands, for which this move would have to wait one after another: it waits for all at once.
        if let [from] = self.operands(id)[..]
            && self.kind(from) == Some(MoveKind::Store)
            && self.state[from.index()] == MoveState::Started
        {
            self.next_hops.entry(from).or_default().push(id);
            return;
        }
        let bytes = self.bytes(id);
        while self.store_bytes.saturating_add(bytes) > self.window && self.wait_for_oldest_store() {}
        self.wait_for_inputs(id);
        self.emit(Instr::Start(id));
        self.state[id.index()] = MoveState::Started;
        self.stores.push_back(id);
        self.store_bytes = self.store_bytes.saturating_add(bytes);
        if self.window == 0 {
            self.wait_for(id);
        }
    }

    /// Waits for the oldest store; false if there is none.
    fn wait_for_oldest_store(&mut self) -> bool {
        let Some(&oldest) = self.stores.front() else { return false };
        self.wait_for(oldest);
        true
    }
}

impl Schedule {
    /// Number of instructions that start a move.
    pub fn moves(&self) -> usize {
        self.instrs.iter().filter(|instr| matches!(instr, Instr::Start(_))).count()
    }
}
