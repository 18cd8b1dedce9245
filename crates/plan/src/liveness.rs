//! From birth to death: which values share storage and when it is needed. Invariant: a value takes over the
//! storage of an input only where the op's alias rule allows it and nobody reads that input later.

use crate::schedule::{Instr, Schedule};
use crate::updates::Updates;
use graph::{Bytes, Graph, Node, NodeId, Role, ValueId};

/// Storage that one value, or several after each other, live in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Buffer {
    /// (the instant from which it lives here, value), in order of time.
    pub(crate) values: Vec<(u32, ValueId)>,
    pub(crate) bytes: Bytes,
    /// Instants: 0 is the upload of the inputs, i + 1 is instruction i, the last is the download.
    pub(crate) birth: u32,
    pub(crate) death: u32,
}

impl Buffer {
    /// The value that it holds at an instant of its life.
    pub(crate) fn holder(&self, instant: u32) -> ValueId {
        let held = self.values.iter().rev().find(|(from, _)| *from <= instant);
        held.unwrap_or(&self.values[0]).1
    }
}

/// The transient buffers of a schedule.
pub(crate) fn buffers(graph: &Graph, schedule: &Schedule) -> Vec<Buffer> {
    let deaths = deaths(graph, schedule);
    let home = Updates::of(graph).home;
    let mut of_value: Vec<Option<usize>> = vec![None; graph.values.len()];
    let mut buffers: Vec<Buffer> = vec![];
    let mut open = |values: &mut [Option<usize>], v: ValueId, birth: u32, death: u32| {
        values[v.index()] = Some(buffers.len());
        buffers.push(Buffer {
            values: vec![(birth, v)],
            bytes: graph.spec(v).bytes(&graph.bounds),
            birth,
            death,
        });
    };
    for &(_, v) in &graph.inputs {
        // An input stays until the first instruction at least, read or not: so whatever is alive at the upload
        // is alive at that instruction too, and the peak always falls at an instruction.
        open(&mut of_value, v, 0, deaths[v.index()].max(1));
    }
    let mut merges: Vec<(u32, ValueId, ValueId)> = vec![];
    for (i, instr) in schedule.instrs.iter().enumerate() {
        let instant = i as u32 + 1;
        let id = match *instr {
            Instr::Launch(id) => id,
            Instr::Load(v) => {
                open(&mut of_value, v, instant, deaths[v.index()].max(instant));
                continue;
            }
            Instr::Copy { .. } => continue,
        };
        let mut taken = vec![];
        for (k, out) in graph.node(id).outputs.iter().enumerate() {
            let Some(v) = *out else { continue };
            if home[v.index()].is_some() {
                continue;
            }
            let free = |old: ValueId| deaths[old.index()] == instant && home[old.index()].is_none();
            match reusable(graph, id, k, v, free, &taken) {
                Some(old) => {
                    taken.push(old);
                    merges.push((instant, old, v));
                }
                None => open(&mut of_value, v, instant, deaths[v.index()].max(instant)),
            }
        }
    }
    for (instant, old, v) in merges {
        let buffer = of_value[old.index()].expect("an earlier value has its buffer");
        of_value[v.index()] = Some(buffer);
        buffers[buffer].values.push((instant, v));
        buffers[buffer].death = buffers[buffer].death.max(deaths[v.index()]);
    }
    buffers
}

/// The instant of the last read of every value.
fn deaths(graph: &Graph, schedule: &Schedule) -> Vec<u32> {
    let mut deaths = vec![0; graph.values.len()];
    for (i, instr) in schedule.instrs.iter().enumerate() {
        let instant = i as u32 + 1;
        match *instr {
            Instr::Launch(id) => {
                for v in &graph.node(id).inputs {
                    deaths[v.index()] = instant;
                }
            }
            Instr::Copy { from, .. } => deaths[from.index()] = instant,
            Instr::Load(_) => {}
        }
    }
    let end = schedule.instrs.len() as u32 + 1;
    for (_, v) in &graph.outputs {
        deaths[v.index()] = end;
    }
    deaths
}

/// The input whose storage output `k` = `v` of a node may take over, among those that are `free` from here on.
fn reusable(
    graph: &Graph,
    id: NodeId,
    k: usize,
    v: ValueId,
    free: impl Fn(ValueId) -> bool,
    taken: &[ValueId],
) -> Option<ValueId> {
    let node: &Node = graph.node(id);
    let allowed = node.op.rules().alias(k);
    let bytes = graph.spec(v).bytes(&graph.bounds);
    allowed.iter().map(|&j| node.inputs[j]).find(|old| {
        let computed = match graph.spec(*old).role {
            Role::Activation | Role::Grad => true,
            Role::Param(_) | Role::Input | Role::State(_) | Role::Scratch => false,
        };
        // Read through another operand too, it may still be needed when its place is written.
        let elsewhere = (0..node.inputs.len()).any(|j| node.inputs[j] == *old && !allowed.contains(&j));
        computed
            && !elsewhere
            && !taken.contains(old)
            && free(*old)
            && graph.spec(*old).bytes(&graph.bounds) == bytes
            && graph.spec(*old).shape == graph.spec(v).shape
    })
}
