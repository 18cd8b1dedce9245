//! Addresses of the values of a plan. Invariant: offsets in the persistent region depend only on the graph's
//! parameters and the policy, not on the bounds, so that several plans can share one set of weights.

use plimsoll_graph::{Bytes, Graph, Pieces, Role, TensorSpec, ValueId};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// A region of the arena.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Region {
    /// Resident parameters and states, which live for the whole run.
    Persistent,
    /// Inputs, activations, outputs, workspaces and streamed parameters, which live for at most one step.
    Transient,
}

/// An address range assigned by the planner.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Slice {
    /// Region that the range is in.
    pub region: Region,
    /// Offset in bytes from the start of the region.
    pub offset: u64,
    /// Size in bytes in the largest step.
    pub bytes: Bytes,
}

impl Slice {
    /// Offset of the first byte after the range.
    pub fn end(&self) -> u64 {
        (Bytes(self.offset) + self.bytes).0
    }

    /// Whether the two ranges share a byte; an empty range shares none.
    pub fn overlaps(&self, other: &Self) -> bool {
        self.region == other.region && self.offset.max(other.offset) < self.end().min(other.end())
    }
}

/// Addresses of all values and workspaces of a plan.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryPlan {
    /// Size of the persistent region.
    pub persistent: Bytes,
    /// Size of the transient region.
    pub transient: Bytes,
    /// Slice of each value, indexed by value; `None` for a value without storage because nothing reads it.
    pub slices: Vec<Option<Slice>>,
    /// Workspace of each instruction, indexed by instruction; `None` if it needs none.
    pub workspaces: Vec<Option<Slice>>,
    /// Largest sum of simultaneously live bytes in the transient region; no packing can be smaller.
    pub lower_bound: Bytes,
    /// Values live at that peak, one per buffer.
    pub live_at_peak: Vec<ValueId>,
    /// Index of the instruction at which the peak falls.
    pub peak_instr: usize,
}

/// Layout of a persistent region that several plans share: each parameter and state has the same address in all
/// of them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Persistent {
    rows: Vec<(PersistentSlot, Slice)>,
    by_name: BTreeMap<String, Vec<usize>>,
    end: Bytes,
}

/// Identity of a tensor in the persistent region, apart from its name.
#[derive(Clone, Debug, PartialEq, Eq)]
struct PersistentSlot {
    /// Row ranges of a parameter in the weight file; empty for a state, which is identified by its name.
    pieces: Pieces,
    spec: TensorSpec,
}

impl Persistent {
    /// Creates an empty region.
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns the address of a parameter or state, assigning the next free address if it has none; `None` for
    /// other roles.
    pub(crate) fn place(&mut self, graph: &Graph, spec: &TensorSpec, align: u64) -> Option<Slice> {
        let (name, pieces) = match spec.role {
            Role::Param(p) => (&graph.params[p.index()].name, graph.params[p.index()].pieces.clone()),
            Role::State(s) => (&graph.states[s.index()].name, Pieces::default()),
            Role::Input | Role::Activation | Role::Grad => return None,
        };
        // The role holds an index into the tables of one graph, which is meaningless in another graph, so it is
        // replaced by a role without an index before comparing.
        let resident = PersistentSlot { pieces, spec: spec.clone().with_role(Role::Input) };
        let named = self.by_name.entry(name.clone()).or_default();
        if let Some(&known) = named.iter().find(|&&k| self.rows[k].0 == resident) {
            return Some(self.rows[known].1);
        }
        named.push(self.rows.len());
        let bytes = spec.bytes(&graph.bounds);
        let slice = Slice { region: Region::Persistent, offset: self.end.0, bytes };
        self.end = (self.end + bytes).align_up(align);
        self.rows.push((resident, slice));
        Some(slice)
    }

    /// Size of the region.
    pub fn bytes(&self) -> Bytes {
        self.end
    }
}

impl MemoryPlan {
    /// Slice of a value; `None` if it has no storage.
    pub fn slice(&self, value: ValueId) -> Option<Slice> {
        self.slices[value.index()]
    }
}
