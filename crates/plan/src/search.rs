//! Search for the largest step that fits into a memory budget, up to the size beyond which throughput no longer
//! grows, with resident or with streamed weights. Invariant: the search only compiles and compares plans; it
//! has no memory formula of its own.

use crate::{Bill, PlanError, Program, Remedy, Weights};
use plimsoll_graph::limits::MAX_ROWS;
use plimsoll_graph::{Bytes, Space};
use plimsoll_setting::{Assignment, Setting};

/// Range and budget of a search for the number of tokens of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Search {
    /// Minimum number of tokens: the longest sequence must fit.
    pub floor: u64,
    /// Number of tokens beyond which throughput no longer grows.
    pub ceiling: u64,
    /// Above the minimum, candidates are multiples of this; 0 counts as 1.
    pub step: u64,
    /// Memory budget.
    pub budget: Bytes,
    /// Limits on the bytes stored outside the arena.
    pub room: Room,
}

/// Bytes that a program may use in spaces other than the arena.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Room {
    /// Pinned host memory.
    pub host: Bytes,
    /// Scratch files.
    pub file: Bytes,
}

impl Room {
    /// No limits.
    pub const UNLIMITED: Self = Self { host: Bytes(u64::MAX), file: Bytes(u64::MAX) };

    /// The limit of a space; `None` for the arena, whose limit is the memory budget.
    fn of(&self, space: Space) -> Option<Bytes> {
        match space {
            Space::Device => None,
            Space::Host => Some(self.host),
            Space::File => Some(self.file),
        }
    }

    /// Checks that a program fits the limits outside the arena.
    ///
    /// # Errors
    /// [`PlanError::OverRoom`] with the first space that is too small.
    pub fn admits(&self, program: &Program) -> Result<(), PlanError> {
        for space in [Space::Host, Space::File] {
            let needed = program.space_bytes(space);
            if let Some(room) = self.of(space).filter(|room| needed > *room) {
                return Err(PlanError::OverRoom { space, needed, room, ledger: program.space_ledger(space) });
            }
        }
        Ok(())
    }
}

/// Whether weights are streamed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Streaming {
    /// Streamed if no step fits with resident weights.
    #[default]
    Auto,
    /// Never: a step that does not fit with resident weights is refused.
    Never,
    /// Always.
    Always,
}

/// Factor on the ceiling for streamed weights. Reading the weights once per step takes as long as the
/// arithmetic of some thousand tokens; at sixteen times the tokens of a resident step only a few per cent
/// remain to be gained.
const STREAMED_CEILING: u64 = 16;

impl Search {
    /// The search for streamed weights: they are read once per step, so throughput keeps growing up to larger
    /// steps.
    fn streamed(self) -> Self {
        Self { ceiling: self.ceiling.saturating_mul(STREAMED_CEILING), ..self }
    }
}

/// Builds the program for a number of tokens and a location of the weights.
pub type Build<'a> = &'a mut dyn FnMut(u64, Weights) -> Result<Program, PlanError>;

/// Returns the program for `tokens`, or for the most tokens that fit, with resident weights if possible and
/// otherwise with streamed weights if `stream` allows it.
///
/// # Errors
/// [`PlanError::OverBudget`] if nothing fits, with the bill of the smallest program tried. If a smaller step or
/// streaming would fit, the bill lists it with its cost. [`PlanError::OverRoom`] if weights must be streamed and no space
/// has room for them.
pub fn fit(
    tokens: Option<u64>,
    search: Search,
    stream: Streaming,
    build: Build<'_>,
) -> Result<Program, PlanError> {
    if stream == Streaming::Always {
        return streamed(tokens, search, build);
    }
    let mut refused = match place(tokens, search, &mut |t| build(t, Weights::Resident)) {
        Err(PlanError::OverBudget(bill)) => bill,
        other => return other,
    };
    if stream == Streaming::Auto && refused.remedies.is_empty() {
        return match streamed(tokens, search, build) {
            // The arena is too small for resident weights, and the other spaces for streamed ones; the first is reported.
            Err(PlanError::OverRoom { .. }) => Err(PlanError::OverBudget(refused)),
            other => other,
        };
    }
    match streamed(tokens, search, build) {
        Ok(fitting) => {
            let resident = build(tokens.unwrap_or(search.floor), Weights::Resident)?;
            offer(&mut refused, remedy(Setting::StreamWeights.to("always"), &resident, &fitting));
        }
        Err(PlanError::OverBudget(_) | PlanError::OverRoom { .. }) => {}
        Err(error) => return Err(error),
    }
    Err(PlanError::OverBudget(refused))
}

/// Returns the program with streamed weights: from pinned host memory if the target has it and it has room, otherwise from
/// a file; copied ahead if there is memory for it.
fn streamed(tokens: Option<u64>, search: Search, build: Build<'_>) -> Result<Program, PlanError> {
    let search = search.streamed();
    let smallest = tokens.unwrap_or(search.floor);
    let mut refused = None;
    for from in [Space::Host, Space::File] {
        let program = match build(smallest, Weights::Streamed { from, prefetch: false }) {
            Ok(program) => program,
            // An arena in host memory has no other host memory to stream from.
            Err(PlanError::NoSpace { .. }) if from == Space::Host => continue,
            Err(error) => return Err(error),
        };
        if let Err(error) = search.room.admits(&program) {
            refused.get_or_insert(error);
            continue;
        }
        let ahead = place(tokens, search, &mut |t| build(t, Weights::Streamed { from, prefetch: true }));
        match ahead {
            Err(PlanError::OverBudget(_)) => {}
            other => return other,
        }
        return place(tokens, search, &mut |t| build(t, Weights::Streamed { from, prefetch: false }));
    }
    Err(refused.unwrap_or_else(|| PlanError::BadPolicy {
        field: "offload",
        why: "there is no space to stream weights from".to_owned(),
    }))
}

/// Returns the program for `tokens`, or for the most tokens that fit.
fn place(
    tokens: Option<u64>,
    search: Search,
    build: &mut dyn FnMut(u64) -> Result<Program, PlanError>,
) -> Result<Program, PlanError> {
    match tokens {
        None => largest(search, build),
        Some(tokens) => Program::exactly(tokens, search, build),
    }
}

/// Adds a remedy to a bill, in order of slowdown.
fn offer(bill: &mut Bill, remedy: Remedy) {
    bill.remedies.push(remedy);
    bill.remedies.sort_by(|a, b| a.slower.total_cmp(&b.slower));
}

/// Finds the largest number from `min` to `max` that fits, by doubling and then by bisection, if every number below one that
/// fits fits too. Returns it with the next number, which does not fit, or `None` if that is above `max`; `min` also if it does
/// not fit itself.
#[expect(clippy::arithmetic_side_effects, reason = "numbers between `min` and `max`")]
pub fn grow<E>(
    min: u64,
    max: u64,
    fits: &mut dyn FnMut(u64) -> Result<bool, E>,
) -> Result<(u64, Option<u64>), E> {
    // The invariant of the loops is that `low` fits and `high` does not.
    let mut low = min;
    let mut high = min.saturating_add(1);
    if fits(min)? {
        let mut gap = 1_u64;
        while high <= max && fits(high)? {
            low = high;
            gap = gap.saturating_mul(2);
            high = low.saturating_add(gap).min(max.saturating_add(1));
        }
        while high - low > 1 {
            let middle = low + (high - low) / 2;
            if fits(middle)? {
                low = middle;
            } else {
                high = middle;
            }
        }
    }
    Ok((low, Some(high).filter(|&high| high <= max.max(min))))
}

/// Returns the program with the most tokens that fits, or the bill of the smallest one.
#[expect(
    clippy::arithmetic_side_effects,
    reason = "multiples of a step up to a number of tokens within the limits of graphs"
)]
pub fn largest(
    search: Search,
    build: &mut dyn FnMut(u64) -> Result<Program, PlanError>,
) -> Result<Program, PlanError> {
    let step = search.step.max(1);
    // A step of more tokens than a graph may have is never tried.
    let ceiling = search.ceiling.min(MAX_ROWS).max(search.floor);
    // The largest candidate is tried first: if it fits, no other program is built.
    let largest = build(ceiling)?;
    if ceiling == search.floor || largest.peak() <= search.budget {
        return largest.within(search.budget);
    }
    let mut best = build(search.floor)?.within(search.budget)?;
    // Candidate 0 is the floor, candidate k the k-th multiple of `step` above the floor, and the last one the ceiling. Peak
    // memory grows with the number of tokens, so bisection finds the largest candidate that fits.
    let mut low = 0;
    let mut high = ceiling.div_ceil(step) - search.floor / step;
    while high - low > 1 {
        let middle = low + (high - low) / 2;
        let program = build(((search.floor / step + middle) * step).min(ceiling))?;
        if program.peak() <= search.budget {
            low = middle;
            best = program;
        } else {
            high = middle;
        }
    }
    Ok(best)
}

impl Program {
    /// Returns the program with the most tokens that fits into a budget; see [`largest`].
    pub fn largest_bounds(
        search: Search,
        build: &mut dyn FnMut(u64) -> Result<Program, PlanError>,
    ) -> Result<Program, PlanError> {
        largest(search, build)
    }

    /// Returns the program for exactly `tokens`, or a bill that states the largest number of tokens that fits.
    pub fn exactly(
        tokens: u64,
        search: Search,
        build: &mut dyn FnMut(u64) -> Result<Program, PlanError>,
    ) -> Result<Program, PlanError> {
        let program = build(tokens)?;
        if program.peak() <= search.budget {
            return Ok(program);
        }
        let smaller = Search { ceiling: tokens, ..search };
        let remedies = match largest(smaller, build) {
            Ok(fitting) => {
                vec![remedy(Setting::Tokens.to(fitting.max_tokens()), &program, &fitting)]
            }
            Err(PlanError::OverBudget(_)) => vec![],
            Err(error) => return Err(error),
        };
        Err(PlanError::OverBudget(Box::new(program.bill(search.budget, remedies))))
    }
}

/// Predicted seconds per token of a full step.
fn seconds_per_token(program: &Program) -> f64 {
    program.seconds() / program.max_tokens().max(1) as f64
}

/// Memory saved and time lost by running `fitting`, which `setting` gives, instead of `refused`.
fn remedy(setting: Assignment, refused: &Program, fitting: &Program) -> Remedy {
    Remedy {
        settings: vec![setting],
        saves: refused.peak().saturating_sub(fitting.peak()),
        slower: seconds_per_token(fitting) / seconds_per_token(refused) - 1.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_number_that_fits_is_found() {
        for most in [1_u64, 7, 8, 9, 100, 1 << 20] {
            for fitting in (0..40).chain([99, 100, 101, 1 << 19]) {
                let found = grow(3, most.max(3), &mut |n| Ok::<bool, ()>(n <= fitting)).expect("no error");
                let largest = fitting.clamp(3, most.max(3));
                // Above 3, a number is refused only if it was tried.
                let refused = Some(largest + 1).filter(|&n| n <= most.max(3));
                assert_eq!(found, (largest, refused), "{fitting} of 3 to {most}");
            }
        }
        assert_eq!(grow(1, 9, &mut |n| if n < 3 { Ok(true) } else { Err(n) }), Err(4));
    }
}
