//! Addresses: where every value of a plan lies. Invariant: offsets of what is persistent depend on the graph's
//! parameters and the policy alone, not on bounds, so that several plans can share one set of weights.

use graph::{Bytes, Graph, Piece, Role, TensorSpec, ValueId};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// A part of the arena.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Region {
    /// Resident parameters and states: there for the whole run.
    Persistent,
    /// Inputs, activations, outputs, workspace, streamed parameters: there for a step at most.
    Transient,
}

/// A planned range.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Slice {
    /// The part of the arena.
    pub region: Region,
    /// Bytes from its start.
    pub offset: u64,
    /// Bytes in the worst case.
    pub bytes: Bytes,
}

impl Slice {
    /// The first byte behind it.
    pub fn end(&self) -> u64 {
        self.offset + self.bytes.0
    }

    /// Whether both have a byte in common; an empty slice has none.
    pub fn overlaps(&self, other: &Self) -> bool {
        self.region == other.region && self.offset.max(other.offset) < self.end().min(other.end())
    }
}

/// Addresses of all values of a plan.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryPlan {
    /// Bytes of the persistent region.
    pub persistent: Bytes,
    /// Bytes of the transient region.
    pub transient: Bytes,
    /// By value; `None` has no storage because nobody reads it.
    pub slices: Vec<Option<Slice>>,
    /// By instruction; `None` needs no scratch.
    pub workspaces: Vec<Option<Slice>>,
    /// The largest sum of bytes that are alive together in the transient region: no packing is smaller.
    pub lower_bound: Bytes,
    /// What is alive there, one value for each piece of storage.
    pub live_at_peak: Vec<ValueId>,
    /// The instruction at which that sum falls.
    pub peak_instr: usize,
}

/// The persistent region of plans that share it: what survives has one address in all of them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Persistent {
    rows: Vec<(Resident, Slice)>,
    by_name: BTreeMap<String, Vec<usize>>,
    end: Bytes,
}

/// What tells one resident of the persistent region from another.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Resident {
    /// Rows of a parameter in its file; none for a state, which has its name alone.
    pieces: Vec<Piece>,
    spec: TensorSpec,
}

impl Persistent {
    /// Nothing yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// The place of a parameter or state: the one that it has, or a new one at the end.
    pub(crate) fn place(&mut self, graph: &Graph, spec: &TensorSpec, align: u64) -> Option<Slice> {
        let (name, pieces) = match spec.role {
            Role::Param(p) => (&graph.params[p.index()].name, graph.params[p.index()].pieces.clone()),
            Role::State(s) => (&graph.states[s.index()].name, vec![]),
            Role::Input | Role::Activation | Role::Grad | Role::Scratch => return None,
        };
        // Positions in the tables of one graph say nothing in another.
        let resident = Resident { pieces, spec: spec.clone().with_role(Role::Scratch) };
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

    /// Bytes of the region.
    pub fn bytes(&self) -> Bytes {
        self.end
    }
}

impl MemoryPlan {
    /// The slice of a value that has one.
    pub fn slice(&self, value: ValueId) -> Option<Slice> {
        self.slices[value.index()]
    }

    /// Transient bytes beyond the lower bound, in parts per thousand of it.
    pub fn waste_permille(&self) -> u64 {
        let waste = self.transient.saturating_sub(self.lower_bound).0;
        (waste * 1000).div_ceil(self.lower_bound.0.max(1))
    }
}
