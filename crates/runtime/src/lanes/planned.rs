//! How a CPU's threads become lanes, how far a lane's steps grow, and what waits beside their arenas. Invariant: runs and
//! `plan` ask here alone, so what is planned is what is held.

use super::{HOST, enough};
use crate::RuntimeError;
use graph::{Bytes, Graph};
use plan::{PlanError, Program, Search, Staging, Stream, Target};

/// Tokens that bounds are a multiple of.
pub const TOKEN_STEP: u64 = 128;

/// Tokens up to which a lane's steps may grow, however many lanes there are.
pub const LEAST_OF_LANE: u64 = 1024;

/// Threads up to which one lane has them all.
const ONE_LANE: usize = 2;

/// The most lanes of so many threads for what is worth so many. Streamed weights would be read by each, so they have one.
pub fn most(threads: usize, worth: usize, stream: Stream) -> usize {
    if threads <= ONE_LANE || stream == Stream::Always { 1 } else { even(threads, worth) }
}

/// When so many lanes stream their weights.
pub fn stream(lanes: usize, asked: Stream) -> Stream {
    if lanes == 1 { asked } else { Stream::Never }
}

/// At most so many lanes, of equally many threads.
fn even(threads: usize, lanes: usize) -> usize {
    threads / threads.div_ceil(lanes.clamp(1, threads))
}

/// Threads of a lane.
pub fn of_lane(threads: usize, lanes: usize) -> usize {
    (threads / lanes).max(1)
}

/// Plans with as many lanes as the line has room for, from `most` down.
pub fn fitting<T>(
    threads: usize,
    most: usize,
    mut plan: impl FnMut(usize) -> Result<T, RuntimeError>,
) -> Result<T, RuntimeError> {
    let mut lanes = most;
    while lanes > 1 {
        match plan(lanes) {
            Err(RuntimeError::Plan(PlanError::OverBudget(_))) => lanes = even(threads, lanes / 2),
            planned => return planned,
        }
    }
    plan(1)
}

/// Where to look for the tokens of a lane's step, where so many were asked for, or none; at least `longest`.
pub fn search(target: &Target, lanes: usize, longest: u64, asked: Option<u64>, budget: Bytes) -> Search {
    let (ceiling, floor) = match lanes {
        1 => (target.saturation.max(longest), longest),
        lanes => {
            let share = (target.saturation / lanes as u64).next_multiple_of(TOKEN_STEP);
            let each = share.max(LEAST_OF_LANE).max(longest);
            // Fewer lanes are better than many whose steps are short: each reads all weights.
            (each, if asked.is_none() { LEAST_OF_LANE.max(longest) } else { longest })
        }
    };
    Search { floor, ceiling, step: TOKEN_STEP, budget }
}

/// The program of an encoder's run with so many outputs of a full step, which it keeps beside its arena, where the line is
/// about the host's memory.
/// Of steps out of turn, the rows of up to `turns` more wait for an older one, and are not more than those of all `sequences`.
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

/// Full steps whose outputs a run holds at a time: those on their way, and what each lane has not handed out yet.
pub fn copies(lanes: usize) -> u64 {
    (enough(lanes) + lanes) as u64
}

/// Outputs of a full step.
pub fn output_bytes(program: &Program) -> Bytes {
    let of = |graph: &Graph| graph.outputs.iter().map(|(_, v)| graph.spec(*v).bytes(&graph.bounds)).sum();
    program.plans().iter().map(|(_, plan)| of(&plan.graph)).max().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lanes_have_equally_many_threads() {
        for (threads, worth, wanted) in [
            (1, 9, 1),
            (2, 9, 1),
            (3, 9, 3),
            (3, 2, 1),
            (4, 2, 2),
            (4, 3, 2),
            (5, 4, 2),
            (8, 0, 1),
            (8, 7, 4),
            (8, 8, 8),
            (64, 10, 9),
        ] {
            let lanes = most(threads, worth, Stream::Auto);
            assert_eq!(lanes, wanted, "{threads} threads, worth {worth}");
            assert!(lanes * of_lane(threads, lanes) <= threads);
            assert_eq!(most(threads, worth, Stream::Always), 1);
        }
    }
}
