//! Liveness analysis: the lifetime of every value, and which values share storage. Invariant: an output reuses
//! the storage of an input only if the op's alias rule allows it and the input is not read later.

use crate::schedule::{Instr, Schedule};
use crate::sharing::Sharing;
use crate::updates::Updates;
use plimsoll_graph::{Bytes, Graph, Node, NodeId, Role, ValueId};

/// Storage used by one value, or by several values one after another.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Buffer {
    /// Pairs (first instant at which the value is in this buffer, value), in order of time.
    pub(crate) values: Vec<(u32, ValueId)>,
    pub(crate) bytes: Bytes,
    /// Lifetime in instants: 0 is the upload of the inputs, i + 1 is instruction i, and the last instant is the
    /// download of the outputs.
    pub(crate) birth: u32,
    pub(crate) death: u32,
}

impl Buffer {
    /// Returns the value that the buffer holds at an instant of its lifetime.
    pub(crate) fn holder(&self, instant: u32) -> ValueId {
        let held = self.values.iter().rev().find(|(from, _)| *from <= instant);
        held.unwrap_or(&self.values[0]).1
    }
}

/// Computes the transient buffers of a schedule.
pub(crate) fn buffers(graph: &Graph, schedule: &Schedule, sharing: Sharing) -> Vec<Buffer> {
    let deaths = deaths(graph, schedule);
    let home = Updates::of(graph, sharing).home;
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
        // An input lives at least until the first instruction, even if it is never read. Everything alive at
        // the upload is therefore also alive at that instruction, and the peak always falls on an instruction.
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
            // Storage is free if this instruction is the last reader. A value that is written directly into the
            // storage of a state is in the persistent region, so its storage is not available.
            let free = |old: ValueId| deaths[old.index()] == instant && home[old.index()].is_none();
            match reusable(graph, id, k, v, free, &taken).filter(|_| sharing.operands) {
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
    if !sharing.lifetimes {
        let end = schedule.instrs.len() as u32 + 1;
        buffers.iter_mut().for_each(|buffer| (buffer.birth, buffer.death) = (0, end));
    }
    buffers
}

/// Instant of the last read of every value, indexed by value.
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
    // Outputs are downloaded after the last instruction.
    let end = schedule.instrs.len() as u32 + 1;
    for (_, v) in &graph.outputs {
        deaths[v.index()] = end;
    }
    deaths
}

/// Returns the input whose storage output `k` = `v` of a node may reuse, among the values that are `free` after
/// this instruction.
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
            Role::Param(_) | Role::Input | Role::State(_) => false,
        };
        // If the value is also an operand at a position without an alias rule, it may still be read after its
        // storage has been overwritten.
        let elsewhere = (0..node.inputs.len()).any(|j| node.inputs[j] == *old && !allowed.contains(&j));
        computed
            && !elsewhere
            && !taken.contains(old)
            && free(*old)
            && graph.spec(*old).bytes(&graph.bounds) == bytes
            && graph.spec(*old).shape == graph.spec(v).shape
    })
}
