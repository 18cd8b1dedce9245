//! The order of work. Invariant: instructions stand in an order in which every read follows its write.

use crate::Weights;
use crate::passes::streamed;
use crate::updates::Updates;
use graph::{Graph, NodeId, ValueId};
use serde::{Deserialize, Serialize};

/// One instruction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Instr {
    /// Read a parameter from its file into its slice.
    Load(ValueId),
    /// Run a node.
    Launch(NodeId),
    /// Copy the new value of an update into its state's storage.
    Copy {
        /// The new value.
        from: ValueId,
        /// The state.
        to: ValueId,
    },
}

/// The instructions of a step, in order.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Schedule {
    /// In order of execution.
    pub instrs: Vec<Instr>,
}

/// Nodes in the order of the graph, each behind the loads of its streamed parameters and before the copies of
/// states that nobody reads after it. What is written into its state's storage needs no copy.
pub(crate) fn schedule(graph: &Graph, weights: Weights) -> Schedule {
    let streamed = match weights {
        Weights::Resident | Weights::Trained => vec![false; graph.values.len()],
        Weights::Streamed => streamed(graph),
    };
    let updates = Updates::of(graph);
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
    /// The parameters that are read from their file in every step, in the order of reading.
    pub fn loads(&self) -> impl Iterator<Item = ValueId> {
        self.instrs.iter().filter_map(|instr| match *instr {
            Instr::Load(v) => Some(v),
            Instr::Launch(_) | Instr::Copy { .. } => None,
        })
    }
}
