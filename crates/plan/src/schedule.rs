//! The order of work. Invariant: instructions stand in an order in which every read follows its write.

use graph::{Graph, NodeId, ValueId};
use serde::{Deserialize, Serialize};

/// One instruction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Instr {
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

/// Nodes in the order of the graph, then the updates: nobody reads the old state after them.
pub(crate) fn schedule(graph: &Graph) -> Schedule {
    let launches = graph.nodes().map(|(id, _)| Instr::Launch(id));
    let copies = graph.updates.iter().map(|&(to, from)| Instr::Copy { from, to });
    Schedule { instrs: launches.chain(copies).collect() }
}
