//! The bounds of steps, and what a run holds beside its arena for each step in flight. Invariant: runs and `plan` ask here
//! alone, so what is planned is what is held.

use graph::{Bounds, Bytes, Graph};
use plan::HOST;
use plan::{Program, Staging};

/// Tokens that bounds are a multiple of.
pub const TOKEN_STEP: u64 = 128;

/// Tokens up to which the steps of a replica may grow, however many replicas there are.
pub const LEAST_OF_REPLICA: u64 = 1024;

/// Tokens for each sequence that a step can hold: with sequences shorter than this on average, a step is
/// bounded by its sequences.
const TOKENS_PER_SEQUENCE: u64 = 8;

/// The bounds of a step of `tokens`.
pub fn bounds(tokens: u64, longest: u64) -> Bounds {
    Bounds { tokens, sequences: (tokens / TOKENS_PER_SEQUENCE).max(1), longest }
}

/// Steps in flight so that this many replicas of the CPU always have one.
pub fn in_flight_target(replicas: usize) -> usize {
    if replicas == 1 { 1 } else { 2 * replicas }
}

/// Adds the outputs of full steps that an encoder's run holds beside its arena, where plans are in the host's memory:
/// `copies` of them, and the rows that wait for an older one where steps are out of turn, which are those of up to `turns`
/// steps and not more than those of all `sequences`.
pub fn with_outputs(program: Program, copies: u64, turns: u64, sequences: Option<u64>) -> Program {
    if program.target().space != HOST {
        return program;
    }
    let bytes = Bytes(output_bytes(&program).0 * copies);
    let mut beside = vec![Staging { label: "outputs on their way".to_owned(), bytes }];
    if turns > 0 {
        let full = output_bytes(&program).0;
        let packed = program.plans().iter().map(|(_, plan)| plan.graph.bounds).max_by_key(|b| b.tokens);
        // A sequence has a row, or one for each of its tokens.
        let row = packed.map_or(full, |b| (full / b.sequences.max(1)).max(full / b.tokens.max(1) * b.longest));
        let all = sequences.map_or(u64::MAX, |sequences| sequences.saturating_mul(row));
        let bytes = Bytes((full * turns).min(all));
        beside.push(Staging { label: "rows that wait for their turn".to_owned(), bytes });
    }
    program.beside(beside)
}

/// Full steps whose outputs a run holds at a time: those in flight, and what each replica has not handed out yet.
pub fn copies(replicas: usize) -> u64 {
    (in_flight_target(replicas) + replicas) as u64
}

/// The bytes of the outputs of a full step.
pub fn output_bytes(program: &Program) -> Bytes {
    let of = |graph: &Graph| graph.outputs.iter().map(|(_, v)| graph.spec(*v).bytes(&graph.bounds)).sum();
    program.plans().iter().map(|(_, plan)| of(&plan.graph)).max().unwrap_or_default()
}

/// The most tokens of a step of the program's plans.
pub fn tokens(program: &Program) -> u64 {
    program.plans().iter().map(|(_, plan)| plan.graph.bounds.tokens).max().unwrap_or(0)
}
