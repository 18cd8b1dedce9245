//! The judge of a packing, written from the definition of the problem and from nothing else.
//!
//! Invariant: it shares no code with the solver, the rounding of sizes included, so that a mistake
//! there cannot hide here.

use std::collections::BTreeMap;
use std::error::Error;
use std::fmt;

use super::problem::Problem;
use super::solve::Packing;

/// Why a packing is no solution of its problem: a bug in whatever made it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum PackingError {
    /// The packing has offsets for another number of items.
    Count {
        /// Items in the problem.
        items: usize,
        /// Offsets in the packing.
        offsets: usize,
    },
    /// Two items are alive at the same time and share bytes.
    Overlap {
        /// The one that was there first.
        a: usize,
        /// The one that was born onto it.
        b: usize,
    },
    /// The item's offset is no multiple of the alignment.
    Misaligned {
        /// Index of the item.
        item: usize,
    },
    /// The item's last byte lies beyond the height.
    Outside {
        /// Index of the item.
        item: usize,
    },
    /// The height is not the least multiple of the alignment that holds every item.
    Slack {
        /// Bytes: the height as given.
        height: u64,
        /// Bytes: the end of the highest item.
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

/// Checks that items alive at the same time share no byte, that offsets are aligned, and that the
/// height is the least aligned one that holds every item. O(n log n): a sweep over time.
///
/// # Errors
/// The first flaw found, in this order: count, placement of single items, height, overlaps by time.
pub fn validate(problem: &Problem, packing: &Packing) -> Result<(), PackingError> {
    let (items, offsets) = (problem.items.len(), packing.offsets.len());
    if items != offsets {
        return Err(PackingError::Count { items, offsets });
    }
    check_bounds(problem, packing)?;
    check_overlaps(problem, packing)
}

/// Alignment of each offset, every end inside the height, the height no larger than it must be.
fn check_bounds(problem: &Problem, packing: &Packing) -> Result<(), PackingError> {
    let (align, height) = (problem.align, packing.height);
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
    if height % align != 0 || height - top >= align {
        return Err(PackingError::Slack { height, top });
    }
    Ok(())
}

/// Sweeps over time with the live items in order of offset. They are disjoint until the first
/// overlap, so a newborn need only be compared with its two neighbours.
fn check_overlaps(problem: &Problem, packing: &Packing) -> Result<(), PackingError> {
    // A life is a closed interval: at one instant, births come before deaths.
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
