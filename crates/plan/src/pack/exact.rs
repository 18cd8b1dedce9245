//! Depth-first search over all packings of a few blocks.
//!
//! Invariant: only packings in canonical form are considered: blocks in order of offset, each directly above another
//! block or at offset 0. Every packing can be pushed down into a canonical one, so `None` with steps left proves that
//! no packing within the limit exists. (The approach of MiniMalloc: Moffitt, ASPLOS 2023.)

use super::solve::{Block, loads};

/// Largest number of blocks for which the search is tried; with more it rarely completes.
pub(super) const MAX_BLOCKS: usize = 32;

/// Returns an order in which first fit keeps the end of every block at or below `limit`; `None` if there is no such
/// order or if `steps` ran out, in which case it is 0.
///
/// The order is that of the offsets in the packing found. First fit places each block at or below its offset in that
/// packing: by induction no earlier block is higher than there, so that offset is still free.
pub(super) fn below(blocks: &[Block], limit: u64, steps: &mut u64) -> Option<Vec<u32>> {
    let waiting = loads(blocks);
    let floor = vec![0; waiting.len()];
    let mut tree =
        Tree { blocks, limit, steps, floor, waiting, placed: vec![false; blocks.len()], order: Vec::new() };
    tree.descend(0, 0).then_some(tree.order)
}

/// A partial packing: the current node of the search tree.
struct Tree<'a> {
    blocks: &'a [Block],
    limit: u64,
    steps: &'a mut u64,
    /// End of the highest placed block at each instant.
    floor: Vec<u64>,
    /// Sum of the sizes of the unplaced blocks at each instant.
    waiting: Vec<u64>,
    placed: Vec<bool>,
    /// Placed blocks in order of offset.
    order: Vec<u32>,
}

impl Tree<'_> {
    /// Places the remaining blocks at or above offset `level`; at `level` itself only blocks with index `next` or
    /// higher. Blocks of equal offset are placed in order of index, so that each packing is considered once. Returns
    /// whether all blocks are placed.
    fn descend(&mut self, level: u64, next: usize) -> bool {
        if self.order.len() == self.blocks.len() {
            return true;
        }
        *self.steps = self.steps.saturating_sub((self.blocks.len() + self.floor.len()) as u64);
        if *self.steps == 0 || !self.roomy(level) {
            return false;
        }
        for (offset, i) in self.candidates(level, next) {
            let (undo, block) = (self.floor.clone(), self.blocks[i]);
            let life = block.birth as usize..=block.death as usize;
            self.floor[life.clone()].fill(block.end(offset));
            self.waiting[life.clone()].iter_mut().for_each(|w| *w -= block.size);
            self.placed[i] = true;
            self.order.push(i as u32);
            if self.descend(offset, i + 1) {
                return true;
            }
            self.order.pop();
            self.placed[i] = false;
            self.waiting[life].iter_mut().for_each(|w| *w += block.size);
            self.floor = undo;
        }
        false
    }

    /// Whether the unplaced blocks at each instant still fit between `level` and the limit.
    fn roomy(&self, level: u64) -> bool {
        let fits = |(&floor, &waiting): (&u64, &u64)| waiting == 0 || floor.max(level) + waiting <= self.limit;
        self.floor.iter().zip(&self.waiting).all(fits)
    }

    /// Each unplaced block that may come next and its offset directly above the placed ones, in order of offset.
    fn candidates(&self, level: u64, next: usize) -> Vec<(u64, usize)> {
        let rest =
            |b: &Block| self.floor[b.birth as usize..=b.death as usize].iter().max().copied().unwrap_or(0);
        let waiting = (0..self.blocks.len()).filter(|&i| !self.placed[i]);
        let mut found: Vec<(u64, usize)> = waiting.map(|i| (rest(&self.blocks[i]), i)).collect();
        found.retain(|&(offset, i)| offset > level || (offset == level && i >= next));
        found.sort_unstable();
        found
    }
}
