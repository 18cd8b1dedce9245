//! Lowest place first: of the blocks that can rest at the lowest place of all, the first by
//! priority comes next, so that the packing grows evenly and leaves few holes under long lives.
//! (The skyline heuristic of strip packing: Burke, Kendall & Whitwell 2004; here time is fixed.)
//!
//! Invariant: an order from here, packed by first fit, is no higher than the limit it was given.

use super::solve::Block;

/// Orders `blocks` by the offset at which each comes to rest on those before it. `None` when a
/// block would end above `limit`.
///
/// As in `exact`, first fit in this order puts no block higher than it rests here.
pub(super) fn order(blocks: &[Block], priority: &[u32], limit: u64, steps: &mut u64) -> Option<Vec<u32>> {
    let mut waiting = Waiting::new(blocks, priority);
    let last = blocks.iter().map(|b| b.death).max().unwrap_or(0);
    let mut skyline = vec![Step { first: 0, last, floor: 0 }];
    let mut order = Vec::with_capacity(blocks.len());
    while order.len() < blocks.len() {
        let low = lowest(&skyline);
        let (next, looked_at) = waiting.take(&skyline[low]);
        *steps = steps.saturating_sub((skyline.len() + looked_at) as u64);
        let Some(next) = next else {
            fill(&mut skyline, low);
            continue;
        };
        let end = blocks[next].end(skyline[low].floor);
        if end > limit {
            return None;
        }
        build(&mut skyline, low, &blocks[next], end);
        order.push(next as u32);
    }
    Some(order)
}

/// A stretch of time at one height; neighbours differ in height.
#[derive(Clone, Copy)]
struct Step {
    first: u32,
    last: u32,
    floor: u64,
}

/// The lowest step, the first of several.
fn lowest(skyline: &[Step]) -> usize {
    (0..skyline.len()).min_by_key(|&i| skyline[i].floor).unwrap_or(0)
}

/// Gives up a step that holds no more blocks: it rises to its lower neighbour and joins it.
fn fill(skyline: &mut Vec<Step>, at: usize) {
    let left = at.checked_sub(1).map_or(u64::MAX, |i| skyline[i].floor);
    let right = skyline.get(at + 1).map_or(u64::MAX, |s| s.floor);
    skyline[at].floor = left.min(right);
    join(skyline, at);
}

/// Puts a block on a step, which falls into up to three.
fn build(skyline: &mut Vec<Step>, at: usize, block: &Block, end: u64) {
    let old = skyline[at];
    let before = (old.first < block.birth).then(|| Step { last: block.birth - 1, ..old });
    let after = (block.death < old.last).then(|| Step { first: block.death + 1, ..old });
    let new = Step { first: block.birth, last: block.death, floor: end };
    skyline.splice(at..=at, before.into_iter().chain([new]).chain(after));
    join(skyline, at + usize::from(before.is_some()));
}

/// Joins a step with neighbours of the same height.
fn join(skyline: &mut Vec<Step>, mut at: usize) {
    if at > 0 && skyline[at - 1].floor == skyline[at].floor {
        skyline[at - 1].last = skyline.remove(at).last;
        at -= 1;
    }
    if at + 1 < skyline.len() && skyline[at + 1].floor == skyline[at].floor {
        skyline[at].last = skyline.remove(at + 1).last;
    }
}

/// The blocks that have no place yet.
struct Waiting<'a> {
    blocks: &'a [Block],
    /// Rank of each block in the priority, `u32::MAX` for one that has its place.
    rank: Vec<u32>,
}

impl<'a> Waiting<'a> {
    fn new(blocks: &'a [Block], priority: &[u32]) -> Self {
        let mut rank = vec![0; blocks.len()];
        priority.iter().zip(0..).for_each(|(&i, r)| rank[i as usize] = r);
        Self { blocks, rank }
    }

    /// The first block by priority whose life lies within the step, and how many were looked at.
    fn take(&mut self, step: &Step) -> (Option<usize>, usize) {
        let from = self.blocks.partition_point(|b| b.birth < step.first);
        let to = self.blocks.partition_point(|b| b.birth <= step.last);
        let fits = |&i: &usize| self.blocks[i].death <= step.last && self.rank[i] < u32::MAX;
        let next = (from..to).filter(fits).min_by_key(|&i| self.rank[i]);
        if let Some(i) = next {
            self.rank[i] = u32::MAX;
        }
        (next, to - from)
    }
}
