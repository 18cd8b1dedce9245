//! Liveness analysis: the lifetime of every value, and which values share storage. Invariant: an output reuses
//! the storage of an input only if the op's alias rule allows it and the input is not read later. A group of views
//! ([`Views`]) has one buffer, which lives from the first write to the last read of any of its values.

use crate::schedule::{Instr, Schedule};
use crate::views::Views;
use plimsoll_graph::{Bytes, Def, Graph, Node, NodeId, Space, ValueId};

/// Storage used by one value, or by several values one after another.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Buffer {
    /// Pairs (first instant at which the value is in this buffer, value), in order of time.
    pub(crate) values: Vec<(u32, ValueId)>,
    pub(crate) space: Space,
    pub(crate) bytes: Bytes,
    /// Lifetime in instants: 0 is the upload of the inputs, i + 1 is instruction i, and the last instant is the
    /// download of the outputs.
    pub(crate) birth: u32,
    pub(crate) death: u32,
}

impl Buffer {
    /// Returns the value that the buffer holds at an instant of its lifetime.
    pub(crate) fn holder(&self, instant: u32) -> ValueId {
        let holder = self.values.iter().rev().find(|(from, _)| *from <= instant);
        holder.unwrap_or(&self.values[0]).1
    }
}

/// Instants of a node: the same for a launch, the start and the wait of a move. Zero for a node without instructions.
#[derive(Clone, Copy, Default)]
struct NodeInstants {
    /// Instant at which the outputs begin to be written.
    start: u32,
    /// Instant at which the inputs have been read.
    end: u32,
}

/// Instants of the instructions of a schedule.
struct Instants {
    /// Indexed by node.
    of_node: Vec<NodeInstants>,
    /// The instant after all instructions.
    end: u32,
}

impl Instants {
    fn of(graph: &Graph, schedule: &Schedule) -> Self {
        let mut of_node = vec![NodeInstants::default(); graph.nodes.len()];
        for (i, instr) in schedule.instrs.iter().enumerate() {
            let instant = i as u32 + 1;
            match *instr {
                Instr::Launch(id) => of_node[id.index()] = NodeInstants { start: instant, end: instant },
                Instr::Start(id) => of_node[id.index()].start = instant,
                Instr::Wait(id) => of_node[id.index()].end = instant,
            }
        }
        Self { of_node, end: schedule.instrs.len() as u32 + 1 }
    }

    /// Instant after which each value is not read any more, indexed by value; at least the instant at which it is complete.
    fn deaths(&self, graph: &Graph) -> Vec<u32> {
        let mut deaths = vec![0; graph.values.len()];
        for (id, node) in graph.nodes() {
            let end = self.of_node[id.index()].end;
            let outputs = node.outputs.iter().flatten();
            for v in node.inputs.iter().chain(outputs) {
                deaths[v.index()] = end.max(deaths[v.index()]);
            }
        }
        // Outputs are downloaded after the last instruction.
        for (_, v) in &graph.outputs {
            deaths[v.index()] = self.end;
        }
        deaths
    }
}

/// Buffers under construction.
struct BufferList<'a> {
    graph: &'a Graph,
    buffers: Vec<Buffer>,
    /// Buffer that each value opened, indexed by value.
    of_value: Vec<Option<usize>>,
}

impl BufferList<'_> {
    /// Adds the buffer whose first value is `v`.
    fn open(&mut self, v: ValueId, birth: u32, death: u32) {
        let spec = self.graph.spec(v);
        self.of_value[v.index()] = Some(self.buffers.len());
        self.buffers.push(Buffer {
            values: vec![(birth, v)],
            space: spec.space,
            bytes: spec.bytes(&self.graph.bounds),
            birth,
            death,
        });
    }
}

/// A value that a launch writes over one of its inputs.
struct InPlaceWrite {
    instant: u32,
    old: ValueId,
    new: ValueId,
}

/// Computes the transient buffers of a schedule, in all spaces. With `reuses_operands`, a launch writes an output over an
/// input that is not read later, if the op's alias rule allows it.
pub(crate) fn buffers(graph: &Graph, schedule: &Schedule, reuses_operands: bool) -> Vec<Buffer> {
    let instants = Instants::of(graph, schedule);
    let views = Views::of(graph);
    let deaths = views.largest(instants.deaths(graph));
    let home = homes(graph);
    let mut list = BufferList { graph, buffers: vec![], of_value: vec![None; graph.values.len()] };
    for &(_, v) in &graph.inputs {
        // An input lives at least until the first instruction, even if it is never read. Everything alive at
        // the upload is therefore also alive at that instruction, and the peak always falls on an instruction.
        list.open(v, 0, deaths[v.index()].max(1));
    }
    let mut in_place: Vec<InPlaceWrite> = vec![];
    for instr in &schedule.instrs {
        let (id, is_launch) = match *instr {
            Instr::Launch(id) => (id, true),
            Instr::Start(id) => (id, false),
            Instr::Wait(_) => continue,
        };
        let instant = instants.of_node[id.index()].start;
        let mut taken: Vec<ValueId> = vec![];
        for (k, out) in graph.node(id).outputs.iter().enumerate() {
            let Some(v) = *out else { continue };
            let root = views.root(v);
            // A new value that is written into the storage of its state lives in the persistent region.
            if home[root.index()].is_some() {
                continue;
            }
            // The instructions are visited in order, so the first value of a group is the first that is written.
            if views.is_shared(v) {
                if list.of_value[root.index()].is_none() {
                    list.open(root, instant, deaths[root.index()].max(instant));
                }
                continue;
            }
            // An old value that was written into a state's storage is in the persistent region, so its storage is not
            // available. That of a group is not reused, because the other values lie around the old one.
            let reused = overwritable_inputs(graph, id, k).find(|old| {
                !taken.contains(old)
                    && deaths[old.index()] == instant
                    && home[old.index()].is_none()
                    && !views.is_shared(*old)
            });
            match reused.filter(|_| reuses_operands && is_launch) {
                Some(old) => {
                    taken.push(old);
                    in_place.push(InPlaceWrite { instant, old, new: v });
                }
                None => list.open(v, instant, deaths[v.index()].max(instant)),
            }
        }
    }
    // Writes are in order of time, so a buffer that several values take over in turn is found through the last one.
    let BufferList { mut buffers, mut of_value, .. } = list;
    for InPlaceWrite { instant, old, new } in in_place {
        let buffer = of_value[old.index()].expect("an earlier value has its buffer");
        of_value[new.index()] = Some(buffer);
        buffers[buffer].values.push((instant, new));
        buffers[buffer].death = buffers[buffer].death.max(deaths[new.index()]);
    }
    buffers
}

/// The buffers that the new values of the states in the arena would need if they were not written over the old values: each
/// lives from its launch to the copy after the last read of it and of the old value.
pub(crate) fn new_states(graph: &Graph, schedule: &Schedule) -> Vec<Buffer> {
    let instants = Instants::of(graph, schedule);
    let views = Views::of(graph);
    let deaths = views.largest(instants.deaths(graph));
    let computed = graph.updates.iter().filter_map(|&(state, new)| match graph.value(new).def {
        Def::Node(..) if graph.spec(state).space == Space::Device => Some((state, new)),
        Def::Node(..) | Def::Source => None,
    });
    computed
        .map(|(state, new)| {
            let births = views.writers(graph, new).into_iter().map(|id| instants.of_node[id.index()].start);
            let birth = births.min().unwrap_or(0);
            Buffer {
                values: vec![(birth, new)],
                space: Space::Device,
                bytes: graph.spec(new).bytes(&graph.bounds),
                birth,
                death: birth.max(deaths[new.index()]).max(deaths[state.index()]),
            }
        })
        .collect()
}

/// The state into whose storage each value is written, indexed by value: the new value of every update.
pub(crate) fn homes(graph: &Graph) -> Vec<Option<ValueId>> {
    let mut homes = vec![None; graph.values.len()];
    for &(state, new) in &graph.updates {
        homes[new.index()] = Some(state);
    }
    homes
}

/// The inputs of a node over which its output `k` may be written if they are not read later.
fn overwritable_inputs(graph: &Graph, id: NodeId, k: usize) -> impl Iterator<Item = ValueId> {
    let node: &Node = graph.node(id);
    let output = node.outputs[k].map(|v| graph.spec(v));
    let allowed = node.op.rules().alias(k);
    allowed.iter().map(move |&j| node.inputs[j]).filter(move |&old| {
        // A fetched copy of a state may be overwritten; what exists before the step may not.
        let computed = graph.value(old).def != Def::Source;
        // If the value is also an operand at a position without an alias rule, it may still be read after its
        // storage has been overwritten.
        let elsewhere = (0..node.inputs.len()).any(|j| node.inputs[j] == old && !allowed.contains(&j));
        let spec = graph.spec(old);
        computed
            && !elsewhere
            && output.is_some_and(|output| {
                spec.bytes(&graph.bounds) == output.bytes(&graph.bounds) && spec.shape == output.shape
            })
    })
}
