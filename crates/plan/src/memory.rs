//! Addresses: where every value of a plan lies. Invariant: offsets of what is persistent depend on the graph's
//! parameters and the policy alone, not on bounds, so that several plans can share one set of weights.

use graph::{Bytes, ValueId};
use serde::{Deserialize, Serialize};

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
