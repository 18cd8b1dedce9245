//! Staging buffers for in-flight steps: the inputs of a submitted step wait in the arena until it runs, and its
//! outputs until they are copied out. Invariant: these buffers are ordinary staging and therefore in the
//! ledger; the host's buffers are reported separately.

use crate::{Plan, Program, Staging};
use plimsoll_graph::{Bytes, DType, Graph, ValueId};

/// Number of weight elements that are transferred at once.
pub const PIECE: u64 = 1 << 18;

/// Number of pieces of weights buffered in host memory: one is prepared while the others are transferred.
const PIECES: u64 = 4;

/// Number of streamed weights, of the size of the largest, buffered in host memory: one is read from disk while
/// another waits for the launches that still use its destination.
const WEIGHTS: u64 = 2;

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

impl Program {
    /// Reserves buffers for `depth` in-flight steps, unless the arena is in host memory.
    pub fn with_pipeline_depth(mut self, depth: usize) -> Self {
        if self.target().space == HOST {
            return self;
        }
        let depth = depth.clamp(1, MAX_IN_FLIGHT);
        let inputs = |g: &Graph| self.all_padded(g, &g.inputs);
        let outputs = |g: &Graph| self.all_padded(g, &g.outputs);
        let widest = |of: &dyn Fn(&Graph) -> Bytes| self.plans().iter().map(|(_, p)| of(&p.graph)).max();
        let step = [widest(&inputs).unwrap_or_default(), widest(&outputs).unwrap_or_default()];
        // A repeated call replaces the buffers of the previous one, which are the last of the list.
        let first = self.in_flight.map_or(self.staging.len(), |buffers| buffers.first);
        self.staging.truncate(first);
        if depth > 1 {
            let waits =
                |label: &str, bytes: Bytes| Staging { label: label.to_owned(), bytes: bytes * depth as u64 };
            self.staging.extend([waits("inputs ahead", step[0]), waits("outputs waiting", step[1])]);
        }
        self.in_flight = Some(InFlightBuffers { depth, first, step });
        self
    }

    /// Maximum number of in-flight steps.
    pub fn depth(&self) -> usize {
        self.in_flight.map_or(1, |buffers| buffers.depth)
    }

    /// Offset in the arena of the inputs or outputs of step `number`; `None` if the step uses the plan's own
    /// addresses.
    pub fn in_flight_address(&self, number: u64, direction: Direction) -> Option<u64> {
        let buffers = self.in_flight.filter(|buffers| buffers.depth > 1)?;
        let slot = number.checked_rem(buffers.depth as u64)?;
        let first = Bytes(self.staging_address(buffers.first + direction as usize));
        Some((first + buffers.step[direction as usize] * slot).0)
    }

    /// Size of the host buffers for in-flight steps: inputs together with weights, and outputs. They are not in
    /// the ledger, which describes the arena.
    pub fn host_staging(&self) -> [Bytes; 2] {
        let Some(InFlightBuffers { depth, step: [inputs, outputs], .. }) = self.in_flight else {
            return [Bytes::ZERO; 2];
        };
        let of_plan = |p: &Plan| p.schedule.loads().map(|v| p.graph.spec(v).bytes(&p.graph.bounds)).max();
        let weight = self.plans().iter().filter_map(|(_, p)| of_plan(p)).max().unwrap_or_default();
        // One more step than the depth: if the space at the end of the host's buffer is too short for the next step, it
        // is left unused.
        let of = |step: Bytes| step * (depth as u64).saturating_add(1);
        let weights = (weight * WEIGHTS).max(Bytes(PIECES) * PIECE * DType::F32.size());
        [of(inputs) + weights, of(outputs)]
    }

    /// Size that a value of `bytes` occupies in a staging buffer, padded to the alignment of the target.
    pub fn padded(&self, bytes: Bytes) -> Bytes {
        bytes.align_up(self.target().alignment)
    }

    /// Sum of the padded sizes of values.
    fn all_padded(&self, graph: &Graph, values: &[(String, ValueId)]) -> Bytes {
        values.iter().map(|&(_, v)| self.padded(graph.spec(v).bytes(&graph.bounds))).sum()
    }
}

/// Name of the memory space of targets whose arena is in host memory.
pub const HOST: &str = "host";
