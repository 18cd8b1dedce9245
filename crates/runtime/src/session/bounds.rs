//! Bounds of steps, and the host memory that a run holds beside its arena for each in-flight step. Invariant: runs and
//! `plan` both use these functions, so the planned bytes are the bytes held.

use plimsoll_graph::{Bounds, Bytes, Graph};
use plimsoll_plan::{Program, Staging};

/// The search for the token bound of a step tries multiples of this number.
pub const TOKEN_STEP: u64 = 128;

/// Number of tokens up to which a step of one replica may grow for any number of replicas.
pub const MIN_TOKENS_OF_REPLICA: u64 = 1024;

/// A step of T tokens holds up to T divided by this number of sequences. If the sequences are shorter than this on
/// average, a step is full by its number of sequences before it is full by its tokens.
const TOKENS_PER_SEQUENCE: u64 = 8;

/// Bounds of a step of `tokens` tokens with sequences of up to `longest` tokens.
pub fn bounds(tokens: u64, longest: u64) -> Bounds {
    Bounds { tokens, sequences: (tokens / TOKENS_PER_SEQUENCE).max(1), longest, packs: 1 }
}

/// Number of in-flight steps that keeps `replicas` CPU replicas busy.
pub fn in_flight_target(replicas: usize) -> usize {
    if replicas == 1 { 1 } else { 2 * replicas }
}

/// Adds to a program in host memory the output buffers that an encoder's run holds beside the arena: `copies` times the
/// outputs of a full step, and the rows that wait for an older row where steps complete out of input order. At most
/// the rows of `waiting_steps` full steps, and at most the rows of all `sequences`, wait.
pub fn with_outputs(program: Program, copies: u64, waiting_steps: u64, sequences: Option<u64>) -> Program {
    if !program.target().arena_in_host() {
        return program;
    }
    let bytes = Bytes(output_bytes(&program).0 * copies);
    let mut buffers = vec![Staging { label: "outputs on their way".to_owned(), bytes }];
    if waiting_steps > 0 {
        let full = output_bytes(&program).0;
        let packed = program.plans().iter().map(|(_, plan)| plan.graph.bounds).max_by_key(|b| b.tokens);
        // An output has one row per sequence, or one per token.
        let row = packed.map_or(full, |b| (full / b.sequences.max(1)).max(full / b.tokens.max(1) * b.longest));
        let all = sequences.map_or(u64::MAX, |sequences| sequences.saturating_mul(row));
        let bytes = Bytes((full * waiting_steps).min(all));
        buffers.push(Staging { label: "rows that wait for their turn".to_owned(), bytes });
    }
    program.host_extra(buffers)
}

/// Number of full steps whose outputs a run holds at a time: the in-flight steps, and for each replica a completed step
/// that the client has not taken yet.
pub fn copies(replicas: usize) -> u64 {
    (in_flight_target(replicas) + replicas) as u64
}

/// Bytes of the outputs of a full step: the maximum over the program's plans.
pub fn output_bytes(program: &Program) -> Bytes {
    program.plans().iter().map(|(_, plan)| graph_output_bytes(&plan.graph)).max().unwrap_or_default()
}

fn graph_output_bytes(graph: &Graph) -> Bytes {
    graph.outputs.iter().map(|(_, value)| graph.spec(*value).bytes(&graph.bounds)).sum()
}

/// Maximum number of tokens of a step over the program's plans.
pub fn tokens(program: &Program) -> u64 {
    program.plans().iter().map(|(_, plan)| plan.graph.bounds.tokens).max().unwrap_or(0)
}
