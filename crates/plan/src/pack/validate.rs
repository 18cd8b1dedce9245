//! Validator of packings, written from the definition of the problem.
//!
//! Invariant: it shares no code with the solver, not even the rounding of sizes, so that an error of the solver
//! cannot be repeated here.
#![expect(
    clippy::arithmetic_side_effects,
    reason = "the packings that are checked were made by `solve`, or are those of tests"
)]

use std::collections::BTreeMap;
use std::error::Error;
use std::fmt;

use super::problem::Problem;
use super::solve::Packing;

/// Error for a packing that is not a solution of its problem. Indicates a bug in the code that computed the packing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum PackingError {
    /// The number of offsets differs from the number of items.
    Count {
        /// Number of items of the problem.
        items: usize,
        /// Number of offsets of the packing.
        offsets: usize,
    },
    /// Two items are live at the same time and share bytes.
    Overlap {
        /// Index of the item that is born first.
        a: usize,
        /// Index of the item that is born later.
        b: usize,
    },
    /// The item's offset is not a multiple of the alignment.
    Misaligned {
        /// Index of the item.
        item: usize,
    },
    /// The item's end exceeds the height.
    Outside {
        /// Index of the item.
        item: usize,
    },
    /// The height is not the end of the highest item rounded up to the alignment.
    Slack {
        /// Height of the packing in bytes.
        height: u64,
        /// End of the highest item in bytes.
        top: u64,
    },
}

impl fmt::Display for PackingError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Count { items, offsets } => write!(f, "{offsets} offsets for {items} items"),
            Self::Overlap { a, b } => write!(f, "items {a} and {b} are alive together and share bytes"),
            Self::Misaligned { item } => write!(f, "the offset of item {item} is not aligned"),
            Self::Outside { item } => write!(f, "item {item} reaches beyond the height"),
            Self::Slack { height, top } => {
                write!(f, "the height is {height} B, the highest item ends at {top} B")
            }
        }
    }
}

impl Error for PackingError {}

/// Checks that items that are live at the same time share no byte, that offsets are aligned, and that the height is
/// the end of the highest item rounded up to the alignment. O(n log n), by a sweep over time.
///
/// # Errors
/// The first violation in this order: number of offsets, alignment and end of each item, height, overlaps in order of
/// time.
pub fn validate(problem: &Problem, packing: &Packing) -> Result<(), PackingError> {
    let items = problem.items.len();
    let offsets = packing.offsets.len();
    if items != offsets {
        return Err(PackingError::Count { items, offsets });
    }
    check_bounds(problem, packing)?;
    check_overlaps(problem, packing)
}

/// Checks that each offset is aligned, that every item ends within the height, and that the height is the aligned end
/// of the highest item.
fn check_bounds(problem: &Problem, packing: &Packing) -> Result<(), PackingError> {
    let align = problem.align;
    let height = packing.height;
    let mut top = 0;
    for (item, (it, &offset)) in problem.items.iter().zip(&packing.offsets).enumerate() {
        if offset % align != 0 {
            return Err(PackingError::Misaligned { item });
        }
        match offset.checked_add(it.size) {
            Some(end) if end <= height => top = top.max(if it.size == 0 { 0 } else { end }),
            _ => return Err(PackingError::Outside { item }),
        }
    }
    if !height.is_multiple_of(align) || height - top >= align {
        return Err(PackingError::Slack { height, top });
    }
    Ok(())
}

/// Checks for overlaps by a sweep over time with the live items in order of offset. They are disjoint before the
/// first overlap, so an item that is born is compared with its two neighbours only.
fn check_overlaps(problem: &Problem, packing: &Packing) -> Result<(), PackingError> {
    // Lifetimes include both ends, so births sort before deaths at the same instant.
    let mut events: Vec<(u32, bool, usize)> = Vec::with_capacity(2 * problem.items.len());
    for (i, item) in problem.items.iter().enumerate().filter(|(_, item)| item.size > 0) {
        events.push((item.birth, false, i));
        events.push((item.death, true, i));
    }
    events.sort_unstable();
    let mut live: BTreeMap<u64, usize> = BTreeMap::new();
    for (_, dies, b) in events {
        let start = packing.offsets[b];
        if dies {
            live.remove(&start);
            continue;
        }
        let end = start + problem.items[b].size;
        if let Some((&other, &a)) = live.range(..end).next_back()
            && other + problem.items[a].size > start
        {
            return Err(PackingError::Overlap { a, b });
        }
        live.insert(start, b);
    }
    Ok(())
}
