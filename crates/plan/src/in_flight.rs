//! Buffers for in-flight steps: the inputs of a submitted step wait in the arena until it runs, and its outputs until they
//! are copied out; both have a place in pinned host memory from and to which they are copied. Invariant: the buffers in the
//! arena are ordinary staging and therefore in the ledger; those in host memory are part of the host's space.

use crate::{Location, Program, Staging};
use plimsoll_graph::{Bytes, Graph, Space, ValueId};

/// Number of weight elements that are transferred at once.
pub const PIECE: u64 = 1 << 18;

/// Default number of in-flight steps: one runs while the next is queued.
pub const PIPELINE_DEPTH: usize = 2;

/// Maximum number of in-flight steps.
const MAX_IN_FLIGHT: usize = 32;

/// Location of the inputs and outputs of in-flight steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct InFlightBuffers {
    depth: usize,
    /// Index of the first of its two staging buffers. For a depth of one there are none, and a step uses the plan's own
    /// addresses.
    first: usize,
    /// Bytes of the inputs and of the outputs of one step, for the plan with the largest.
    step: [Bytes; 2],
}

/// Direction of a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// Inputs, from host to device.
    In,
    /// Outputs, from device to host.
    Out,
}

/// Positions of the inputs or outputs of an in-flight step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InFlightPlace {
    /// Position in the arena.
    pub arena: Location,
    /// Position in pinned host memory.
    pub host: Location,
}

impl InFlightPlace {
    /// The place `bytes` bytes, which are padded, after this one.
    pub fn behind(self, bytes: Bytes) -> Self {
        Self { arena: self.arena.behind(bytes), host: self.host.behind(bytes) }
    }
}

impl Program {
    /// Reserves buffers for `depth` in-flight steps, unless the arena is in host memory.
    pub fn with_pipeline_depth(mut self, depth: usize) -> Self {
        if self.target().arena_in_host() {
            return self;
        }
        let depth = depth.clamp(1, MAX_IN_FLIGHT);
        let mut step = [Bytes::ZERO; 2];
        for (_, plan) in self.plans() {
            let inputs = self.padded_sum(&plan.graph, &plan.graph.inputs);
            let outputs = self.padded_sum(&plan.graph, &plan.graph.outputs);
            step = [step[0].max(inputs), step[1].max(outputs)];
        }
        // A repeated call replaces the buffers of the previous one, which are the last of the list.
        let first = self.in_flight.map_or(self.staging.len(), |buffers| buffers.first);
        self.staging.truncate(first);
        if depth > 1 {
            let [inputs, outputs] = step.map(|bytes| bytes * depth as u64);
            self.staging.push(Staging { label: "inputs ahead".to_owned(), bytes: inputs });
            self.staging.push(Staging { label: "outputs waiting".to_owned(), bytes: outputs });
        }
        self.in_flight = Some(InFlightBuffers { depth, first, step });
        self
    }

    /// Maximum number of in-flight steps.
    pub fn depth(&self) -> usize {
        self.in_flight.map_or(1, |buffers| buffers.depth)
    }

    /// Place of the inputs or outputs of step `number`; `None` if the step uses the plan's own addresses.
    pub fn in_flight_place(&self, number: u64, direction: Direction) -> Option<InFlightPlace> {
        let buffers = self.in_flight.filter(|buffers| buffers.depth > 1)?;
        let slot = number.checked_rem(buffers.depth as u64)?;
        let step_bytes = buffers.step[direction as usize];
        let in_arena = Bytes(self.staging_address(buffers.first + direction as usize)) + step_bytes * slot;
        // In host memory the outputs of all slots follow the inputs of all slots.
        let before = match direction {
            Direction::In => Bytes::ZERO,
            Direction::Out => buffers.step[0] * buffers.depth as u64,
        };
        let in_host = self.in_flight_base() + before + step_bytes * slot;
        Some(InFlightPlace {
            arena: Location::in_arena(in_arena.0),
            host: Location { space: Space::Host, at: in_host.0 },
        })
    }

    /// Bytes of pinned host memory for the inputs and outputs of in-flight steps.
    pub(crate) fn in_flight_bytes(&self) -> Bytes {
        let Some(InFlightBuffers { depth, step: [inputs, outputs], .. }) =
            self.in_flight.filter(|b| b.depth > 1)
        else {
            return Bytes::ZERO;
        };
        (inputs + outputs) * depth as u64
    }

    /// Size that a value of `bytes` occupies in a staging buffer, padded to the alignment of the target.
    pub fn padded(&self, bytes: Bytes) -> Bytes {
        bytes.align_up(self.target().alignment)
    }

    /// Sum of the padded sizes of values.
    fn padded_sum<N>(&self, graph: &Graph, values: &[(N, ValueId)]) -> Bytes {
        values.iter().map(|&(_, v)| self.padded(graph.spec(v).bytes(&graph.bounds))).sum()
    }
}
