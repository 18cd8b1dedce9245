//! Room for steps that are open at a time: their inputs wait in the arena for their turn, and their outputs for the way
//! out. Invariant: it is staging as any other, so it is in the ledger; the host's side is a figure of its own.

use crate::{Plan, Program, Staging};
use graph::{Bytes, DType, Graph, ValueId};

/// Elements of a weight that travel at once.
pub const PIECE: u64 = 1 << 18;

/// Pieces of weights that wait in the host's memory: one is made while others travel.
const PIECES: u64 = 4;

/// Streamed weights, as wide as the widest, that fit there: one is read while another waits for the launches before it.
const WEIGHTS: u64 = 2;

/// Steps for which there is room where nothing else was asked for: one runs, the next waits behind it.
pub const OPEN_STEPS: usize = 2;

/// The most steps for which there can be room.
const MOST: usize = 32;

/// Where open steps have their inputs and outputs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Ring {
    depth: usize,
    /// The first of its two stagings; none for a depth of one, where a step has the plan's own places.
    first: usize,
    /// Bytes of a step's inputs and of its outputs, of the plan that has the most.
    step: [Bytes; 2],
}

/// Which half of the ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// Inputs.
    In,
    /// Outputs.
    Out,
}

impl Program {
    /// The same with room for `depth` open steps, where the arena is not the host's memory.
    pub fn with_ring(mut self, depth: usize) -> Self {
        if self.target().space == HOST {
            return self;
        }
        let depth = depth.clamp(1, MOST);
        let inputs = |g: &Graph| self.all_padded(g, &g.inputs);
        let outputs = |g: &Graph| self.all_padded(g, &g.outputs);
        let widest = |of: &dyn Fn(&Graph) -> Bytes| self.plans().iter().map(|(_, p)| of(&p.graph)).max();
        let step = [widest(&inputs).unwrap_or_default(), widest(&outputs).unwrap_or_default()];
        let first = self.ring.map_or(self.staging.len(), |ring| ring.first);
        self.staging.truncate(first);
        if depth > 1 {
            let waits = |label: &str, bytes: Bytes| Staging {
                label: label.to_owned(),
                bytes: Bytes(bytes.0 * depth as u64),
            };
            self.staging.extend([waits("inputs ahead", step[0]), waits("outputs waiting", step[1])]);
        }
        self.ring = Some(Ring { depth, first, step });
        self
    }

    /// Steps that may be open at a time.
    pub fn depth(&self) -> usize {
        self.ring.map_or(1, |ring| ring.depth)
    }

    /// Where in the arena step `number` has its inputs or outputs; none where it has the plan's own places.
    pub fn ring_address(&self, number: u64, way: Way) -> Option<u64> {
        let ring = self.ring.filter(|ring| ring.depth > 1)?;
        let slot = number % ring.depth as u64;
        Some(self.staging_address(ring.first + way as usize) + slot * ring.step[way as usize].0)
    }

    /// Memory of the host through which open steps travel: inputs with weights, and outputs. Not in the ledger,
    /// which is the arena's.
    pub fn host_staging(&self) -> [Bytes; 2] {
        let Some(Ring { depth, step: [inputs, outputs], .. }) = self.ring else { return [Bytes::ZERO; 2] };
        let of_plan = |p: &Plan| p.schedule.loads().map(|v| p.graph.spec(v).bytes(&p.graph.bounds)).max();
        let weight = self.plans().iter().filter_map(|(_, p)| of_plan(p)).max().unwrap_or_default();
        // One step more than there are: where the end of the ring is too short for what comes, it stays free.
        let of = |step: Bytes| Bytes(step.0 * (depth as u64 + 1));
        let weights = Bytes((weight.0 * WEIGHTS).max(PIECES * PIECE * DType::F32.size()));
        [of(inputs) + weights, of(outputs)]
    }

    /// The bytes of the ring that a value of `bytes` takes: the next one begins behind them.
    pub fn padded(&self, bytes: Bytes) -> Bytes {
        bytes.align_up(self.target().alignment)
    }

    fn all_padded(&self, graph: &Graph, values: &[(String, ValueId)]) -> Bytes {
        values.iter().map(|&(_, v)| self.padded(graph.spec(v).bytes(&graph.bounds))).sum()
    }
}

/// The memory space of machines whose arena is the host's memory.
pub const HOST: &str = "host";
