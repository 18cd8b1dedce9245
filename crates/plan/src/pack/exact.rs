//! Depth-first search through all packings of a few blocks.
//!
//! Invariant: it looks at packings in canonical form only, blocks placed in order of offset, each
//! resting on another or on the ground. Every packing can be pushed down into one, so `None` within
//! the effort means that there is no lower packing. (As MiniMalloc does: Moffitt, ASPLOS 2023.)

use super::solve::{Block, loads};

/// Beyond this many blocks the search hardly ever ends.
pub(super) const MOST_BLOCKS: usize = 32;

/// An order in which first fit keeps every end at or below `limit`; `None` when there is none or
/// `steps` ran out (it is then 0).
///
/// The order is that of the offsets in the packing found. First fit puts each block at or below its
/// place there: by induction all earlier ones are no higher, so that place is still free.
pub(super) fn below(blocks: &[Block], limit: u64, steps: &mut u64) -> Option<Vec<u32>> {
    let waiting = loads(blocks);
    let floor = vec![0; waiting.len()];
    let mut tree =
        Tree { blocks, limit, steps, floor, waiting, placed: vec![false; blocks.len()], order: Vec::new() };
    tree.descend(0, 0).then_some(tree.order)
}

/// A partial packing.
struct Tree<'a> {
    blocks: &'a [Block],
    limit: u64,
    steps: &'a mut u64,
    /// Per instant, the end of the highest block placed there.
    floor: Vec<u64>,
    /// Per instant, the sizes of the blocks that are still to come.
    waiting: Vec<u64>,
    placed: Vec<bool>,
    /// The placed blocks, lowest first.
    order: Vec<u32>,
}

impl Tree<'_> {
    /// Places the remaining blocks at or above `level`. At the same offset blocks come in
    /// order of index, `next` being the first allowed: the others are the same packing again.
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

    /// Whether what waits at each instant still fits between `level` and the limit.
    fn roomy(&self, level: u64) -> bool {
        let fits = |(&floor, &waiting): (&u64, &u64)| waiting == 0 || floor.max(level) + waiting <= self.limit;
        self.floor.iter().zip(&self.waiting).all(fits)
    }

    /// Where each waiting block would rest now, lowest first.
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
