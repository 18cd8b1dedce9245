//! The packer: the skyline heuristic and first fit in two orders, until a packing reaches the lower bound.
//!
//! Invariant: the packing is a function of the problem alone.
//!
//! The first heuristic already reaches the lower bound on nearly every plan of a supported model, and one of the four
//! on all of them; the figures are in `docs/decisions/0018-checker-and-packer.md`.
#![expect(
    clippy::arithmetic_side_effects,
    reason = "the sum of all sizes fits 64 bits, which `solve` checks first"
)]

use super::problem::Problem;
use super::{first_fit, skyline};
use std::cmp::Reverse;

/// Solution of a packing problem: the offsets of its items in one region.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Packing {
    /// Offset of each item in bytes, in the order of `Problem::items`; 0 for items of size 0.
    pub offsets: Vec<u64>,
    /// Size of the region in bytes: the end of the highest item, rounded up to the alignment.
    pub height: u64,
}

/// An item inside the solver: size in units of the alignment, renumbered instants, `death` inclusive.
#[derive(Clone, Copy)]
pub(super) struct PackBlock {
    pub(super) size: u64,
    pub(super) birth: u32,
    pub(super) death: u32,
}

impl PackBlock {
    /// End of the block if it starts at `offset`.
    pub(super) fn end(&self, offset: u64) -> u64 {
        offset + self.size
    }

    /// Whether both blocks are live at a common instant.
    pub(super) fn meets(&self, other: &Self) -> bool {
        self.birth <= other.death && other.birth <= self.death
    }
}

/// Packs the items of a problem. Equal problems give equal packings on every machine. `None` if the sizes, rounded up to the
/// alignment, together exceed 64 bits; of other problems, no sum of sizes and no offset does.
///
/// # Panics
/// If `align` is zero, or an item dies before its birth.
pub fn solve(problem: &Problem) -> Option<Packing> {
    assert!(problem.items.iter().all(|i| i.birth <= i.death), "an item dies before its birth");
    problem.total()?;
    let mut entries: Vec<IndexedBlock> = vec![];
    for (i, item) in problem.items.iter().enumerate().filter(|(_, item)| item.size > 0) {
        let size = problem.footprint(i) / problem.align;
        entries.push(IndexedBlock { item: i, block: PackBlock { size, birth: item.birth, death: item.death } });
    }
    renumber(&mut entries);
    let blocks: Vec<PackBlock> = entries.iter().map(|e| e.block).collect();
    let offsets = pack(&blocks);
    let mut packing = Packing { offsets: vec![0; problem.items.len()], height: 0 };
    for (entry, offset) in entries.iter().zip(offsets) {
        packing.offsets[entry.item] = offset * problem.align;
        packing.height = packing.height.max(entry.block.end(offset) * problem.align);
    }
    Some(packing)
}

/// A block and the index of its item.
#[derive(Clone, Copy)]
struct IndexedBlock {
    item: usize,
    block: PackBlock,
}

/// A way to place blocks in an order below a limit.
type Heuristic = fn(&[PackBlock], &[u32], u64) -> Option<Vec<u64>>;

/// Maximum number of blocks for first fit: it compares each block with all blocks before it, which takes 0.1 s for as many.
const MAX_FIRST_FIT: usize = 1 << 13;

/// Returns the offset of each block in the lowest packing found. The heuristics are tried in turn, and the first
/// packing that reaches the lower bound is optimal and ends the search.
fn pack(blocks: &[PackBlock]) -> Vec<u64> {
    let loads = loads(blocks);
    let bound = loads.iter().copied().max().unwrap_or(0);
    let mut best = vec![];
    let mut height = u64::MAX;
    for order in ORDERS {
        let order = order.of(blocks, &loads);
        // First fit takes quadratic time.
        let tries_first_fit = blocks.len() <= MAX_FIRST_FIT;
        for (heuristic, is_tried) in [(skyline::pack as Heuristic, true), (first_fit::pack, tries_first_fit)] {
            if is_tried
                && height > bound
                && let Some(offsets) = heuristic(blocks, &order, height - 1)
            {
                height =
                    blocks.iter().zip(&offsets).map(|(block, &offset)| block.end(offset)).max().unwrap_or(0);
                best = offsets;
            }
        }
    }
    best
}

/// Order in which blocks are placed: by the first key, then by the second, then by birth.
#[derive(Clone, Copy)]
enum BlockOrder {
    /// Longest lifetime, largest size.
    Life,
    /// Nearest to the instant of the peak, longest lifetime.
    PeakLife,
}

/// The orders that are tried. The first gives an optimal packing of nearly all graphs of transformers.
const ORDERS: [BlockOrder; 2] = [BlockOrder::Life, BlockOrder::PeakLife];

impl BlockOrder {
    /// Returns the indices of the blocks in this order; `loads` is the sum of live sizes at each instant.
    fn of(self, blocks: &[PackBlock], loads: &[u64]) -> Vec<u32> {
        let peak = (0u32..).zip(loads).max_by_key(|&(i, load)| (load, Reverse(i))).map_or(0, |(i, _)| i);
        let mut order: Vec<(Reverse<(u64, u64)>, u32)> =
            blocks.iter().zip(0u32..).map(|(b, i)| (Reverse(self.key(b, peak)), i)).collect();
        order.sort_unstable();
        order.into_iter().map(|(_, i)| i).collect()
    }

    /// Sort key of a block; larger keys come first.
    fn key(self, b: &PackBlock, peak: u32) -> (u64, u64) {
        let life = u64::from(b.death - b.birth) + 1;
        let distance = b.birth.saturating_sub(peak).max(peak.saturating_sub(b.death));
        match self {
            Self::Life => (life, b.size),
            Self::PeakLife => (u64::MAX - u64::from(distance), life),
        }
    }
}

/// Renumbers instants by maximal live sets; a set begins with the first birth after a death. Two blocks overlap in
/// time exactly if they share a maximal set (intervals have the Helly property), so the problem is unchanged, and
/// lifetimes that differ only in irrelevant instants become equal. Sorts the entries by birth, then longest lifetime,
/// then largest size.
fn renumber(entries: &mut [IndexedBlock]) {
    let mut events: Vec<(u32, bool, usize)> = Vec::with_capacity(2 * entries.len());
    for (i, IndexedBlock { block, .. }) in entries.iter().enumerate() {
        events.push((block.birth, false, i));
        events.push((block.death, true, i));
    }
    events.sort_unstable();
    let mut set = 0;
    let mut shrunk = false;
    for (_, dies, i) in events {
        // Births sort before deaths at the same instant, because lifetimes include their last instant.
        if dies {
            entries[i].block.death = set;
            shrunk = true;
        } else {
            set += u32::from(shrunk);
            entries[i].block.birth = set;
            shrunk = false;
        }
    }
    entries.sort_by_key(|e| (e.block.birth, std::cmp::Reverse((e.block.death, e.block.size)), e.item));
}

/// Sum of live sizes at each instant.
fn loads(blocks: &[PackBlock]) -> Vec<u64> {
    let instants = blocks.iter().map(|b| b.death as usize + 1).max().unwrap_or(0);
    let mut born = vec![0u64; instants];
    let mut dead = vec![0u64; instants + 1];
    for block in blocks {
        born[block.birth as usize] += block.size;
        dead[block.death as usize + 1] += block.size;
    }
    let mut live = 0;
    born.iter()
        .zip(&dead)
        .map(|(born, dead)| {
            live = live + born - dead;
            live
        })
        .collect()
}
