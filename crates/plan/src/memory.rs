//! Addresses of the values of a plan, in each memory space. Invariant: offsets in the persistent regions depend only on
//! the graph's parameters and states and the policy, not on the bounds, so that several plans can share one set of
//! weights.

use plimsoll_graph::{Bytes, Graph, Pieces, Role, Space, StateRole, TensorSpec, ValueId};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// A region of a memory space.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Region {
    /// Parameters and states between their uses, which live for the whole run.
    Persistent,
    /// Inputs, activations, outputs, workspaces and copies of parameters and states, which live for at most one step.
    Transient,
}

/// An address range assigned by the planner.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Slice {
    /// Memory space that the range is in.
    pub space: Space,
    /// Region of the space that the range is in.
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
        (self.space, self.region) == (other.space, other.region)
            && self.offset.max(other.offset) < self.end().min(other.end())
    }
}

/// Sizes of the two regions of a space.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RegionSizes {
    /// Size of the persistent region.
    pub persistent: Bytes,
    /// Size of the transient region.
    pub transient: Bytes,
}

impl RegionSizes {
    /// Size of one of the regions.
    pub fn of(&self, region: Region) -> Bytes {
        match region {
            Region::Persistent => self.persistent,
            Region::Transient => self.transient,
        }
    }
}

/// Addresses of all values and workspaces of a plan.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryPlan {
    /// Sizes of the regions of the arena.
    pub device: RegionSizes,
    /// Sizes of the regions of pinned host memory.
    pub host: RegionSizes,
    /// Sizes of the regions of the scratch file.
    pub file: RegionSizes,
    /// Slice of each value, indexed by value; `None` for a value without storage because nothing reads it.
    pub slices: Vec<Option<Slice>>,
    /// Workspace of each instruction, indexed by instruction; `None` if it needs none.
    pub workspaces: Vec<Option<Slice>>,
    /// Largest sum of simultaneously live bytes in the transient region of the arena; no packing can be smaller.
    pub lower_bound: Bytes,
    /// Values live in the arena at that peak, one per buffer.
    pub live_at_peak: Vec<ValueId>,
    /// Index of the instruction at which the peak falls.
    pub peak_instr: usize,
}

impl MemoryPlan {
    /// Slice of a value; `None` if it has no storage.
    pub fn slice(&self, value: ValueId) -> Option<Slice> {
        self.slices[value.index()]
    }

    /// Slice of a value that lives for the whole run; `None` for all other values.
    pub fn persistent_slice(&self, value: ValueId) -> Option<Slice> {
        self.slice(value).filter(|slice| slice.region == Region::Persistent)
    }

    /// Sizes of the regions of a space.
    pub fn region_sizes(&self, space: Space) -> RegionSizes {
        match space {
            Space::Device => self.device,
            Space::Host => self.host,
            Space::File => self.file,
        }
    }
}

/// Layout of the persistent regions that several plans share: each parameter and state has the same address in all
/// of them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Persistent {
    slots: Vec<(PersistentSlot, Slice)>,
    /// Indices in `slots`.
    by_name: BTreeMap<PersistentName, Vec<usize>>,
    /// Size of the region in each space.
    ends: BTreeMap<Space, Bytes>,
}

/// Name of a tensor in a persistent region.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum PersistentName {
    Param(String),
    State(StateRole),
}

/// Identity of a tensor in a persistent region, apart from its name.
#[derive(Clone, Debug, PartialEq, Eq)]
struct PersistentSlot {
    /// Row ranges of a parameter in the weight file; empty for a state, which is identified by its role.
    pieces: Pieces,
    spec: TensorSpec,
}

impl Persistent {
    /// Creates empty regions.
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns the address of a parameter or state in the space of its type, assigning the next free address if it has
    /// none; `None` for other roles.
    pub(crate) fn place(&mut self, graph: &Graph, spec: &TensorSpec, align: u64) -> Option<Slice> {
        let (name, pieces) = match spec.role {
            Role::Param(p) => {
                let param = &graph.params[p.index()];
                (PersistentName::Param(param.name.clone()), param.pieces.clone())
            }
            Role::State(s) => (PersistentName::State(graph.states[s.index()].role.clone()), Pieces::default()),
            Role::Input | Role::Activation | Role::Grad => return None,
        };
        // The role holds an index into the tables of one graph, which is meaningless in another graph, so it is
        // replaced by a role without an index before comparing.
        let slot = PersistentSlot { pieces, spec: spec.clone().with_role(Role::Input) };
        let named = self.by_name.entry(name).or_default();
        if let Some(&known) = named.iter().find(|&&k| self.slots[k].0 == slot) {
            return Some(self.slots[known].1);
        }
        named.push(self.slots.len());
        let bytes = spec.bytes(&graph.bounds);
        let end = self.ends.entry(spec.space).or_default();
        let slice = Slice { space: spec.space, region: Region::Persistent, offset: end.0, bytes };
        *end = (*end + bytes).align_up(align);
        self.slots.push((slot, slice));
        Some(slice)
    }

    /// Size of the region in a space.
    pub fn bytes(&self, space: Space) -> Bytes {
        self.ends.get(&space).copied().unwrap_or_default()
    }
}
