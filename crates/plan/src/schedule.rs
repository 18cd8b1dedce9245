//! Execution order of a plan. Invariant: every read comes after the write that it depends on.

use crate::Weights;
use crate::passes::streamed;
use crate::sharing::Sharing;
use crate::updates::Updates;
use plimsoll_graph::{Graph, NodeId, ValueId};
use serde::{Deserialize, Serialize};

/// One instruction of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Instr {
    /// Read a parameter from its weight file into its slice.
    Load(ValueId),
    /// Execute a node.
    Launch(NodeId),
    /// Copy the new value of an update into the storage of its state.
    Copy {
        /// The new value.
        from: ValueId,
        /// The state.
        to: ValueId,
    },
}

/// The instructions of a step, in execution order.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Schedule {
    /// Instructions in execution order.
    pub instrs: Vec<Instr>,
}

/// Schedules the nodes in the order of the graph. Each node comes after the loads of its streamed parameters
/// and before the copies to states that are not read afterwards. A new value that is written directly into its
/// state's storage needs no copy.
pub(crate) fn schedule(graph: &Graph, weights: Weights, sharing: Sharing) -> Schedule {
    let streamed = match weights {
        Weights::Resident | Weights::Trained => vec![false; graph.values.len()],
        Weights::Streamed => streamed(graph),
    };
    let updates = Updates::of(graph, sharing);
    let copy = |&(to, from): &(ValueId, ValueId)| Instr::Copy { from, to };
    let mut instrs: Vec<Instr> = updates.before.iter().map(copy).collect();
    for (id, node) in graph.nodes() {
        for (k, &v) in node.inputs.iter().enumerate() {
            if streamed[v.index()] && !node.inputs[..k].contains(&v) {
                instrs.push(Instr::Load(v));
            }
        }
        instrs.push(Instr::Launch(id));
        instrs.extend(updates.copies[id.index()].iter().map(copy));
    }
    Schedule { instrs }
}

impl Schedule {
    /// Parameters that are read from the weight file in every step, in reading order.
    pub fn loads(&self) -> impl Iterator<Item = ValueId> {
        self.instrs.iter().filter_map(|instr| match *instr {
            Instr::Load(v) => Some(v),
            Instr::Launch(_) | Instr::Copy { .. } => None,
        })
    }
}
