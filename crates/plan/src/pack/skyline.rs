//! Lowest place first: of the blocks that can rest at the lowest place of all, the first by
//! priority comes next, so that the packing grows evenly and leaves few holes under long lives.
//! (The skyline heuristic of strip packing: Burke, Kendall & Whitwell 2004; here time is fixed.)
//!
//! Invariant: an order from here, packed by first fit, is no higher than the limit it was given.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use super::solve::Block;

/// `blocks` in the order in which they come to rest on those before them, and the offset at which each does, by block.
/// `None` when a block would end above `limit`.
///
/// As in `exact`, first fit in this order puts no block higher than it rests here.
pub(super) fn order(
    blocks: &[Block],
    priority: &[u32],
    limit: u64,
    steps: &mut u64,
) -> Option<(Vec<u32>, Vec<u64>)> {
    let mut waiting = Waiting::new(blocks, priority);
    let last = blocks.iter().map(|b| b.death).max().unwrap_or(0);
    let mut skyline = Skyline::new(last);
    let (mut order, mut offsets) = (Vec::with_capacity(blocks.len()), vec![0; blocks.len()]);
    while order.len() < blocks.len() {
        let low = skyline.lowest();
        let (next, looked_at) = waiting.take(&low);
        *steps = steps.saturating_sub((skyline.by_floor.len() + looked_at) as u64);
        let Some(next) = next else {
            skyline.fill(low);
            continue;
        };
        let end = blocks[next].end(low.floor);
        if end > limit {
            return None;
        }
        skyline.build(low, &blocks[next], end);
        offsets[next] = low.floor;
        order.push(next as u32);
    }
    Some((order, offsets))
}

/// A stretch of time at one height.
#[derive(Clone, Copy)]
struct Step {
    first: u32,
    last: u32,
    floor: u64,
}

/// All time, in steps; neighbours differ in height.
struct Skyline {
    /// By first instant: the last one, and the floor.
    by_time: BTreeMap<u32, (u32, u64)>,
    /// (floor, first instant).
    by_floor: BTreeSet<(u64, u32)>,
}

impl Skyline {
    fn new(last: u32) -> Self {
        Self { by_time: BTreeMap::from([(0, (last, 0))]), by_floor: BTreeSet::from([(0, 0)]) }
    }

    /// The lowest step, the first of several.
    fn lowest(&self) -> Step {
        let &(floor, first) = self.by_floor.first().expect("time has a step");
        Step { first, last: self.by_time[&first].0, floor }
    }

    /// The steps before and behind one.
    fn beside(&self, step: &Step) -> [Option<Step>; 2] {
        let of = |(&first, &(last, floor)): (&u32, &(u32, u64))| Step { first, last, floor };
        [
            self.by_time.range(..step.first).next_back().map(of),
            self.by_time.range(step.last + 1..).next().map(of),
        ]
    }

    fn remove(&mut self, step: &Step) {
        self.by_time.remove(&step.first);
        self.by_floor.remove(&(step.floor, step.first));
    }

    fn insert(&mut self, step: &Step) {
        self.by_time.insert(step.first, (step.last, step.floor));
        self.by_floor.insert((step.floor, step.first));
    }

    /// Gives up a step that holds no more blocks: it rises to its lower neighbour and joins it.
    fn fill(&mut self, step: Step) {
        self.remove(&step);
        let floor = self.beside(&step).iter().flatten().map(|s| s.floor).min().unwrap_or(u64::MAX);
        self.join(Step { floor, ..step });
    }

    /// Puts a block on a step, which falls into up to three.
    fn build(&mut self, old: Step, block: &Block, end: u64) {
        self.remove(&old);
        if old.first < block.birth {
            self.insert(&Step { last: block.birth - 1, ..old });
        }
        if block.death < old.last {
            self.insert(&Step { first: block.death + 1, ..old });
        }
        self.join(Step { first: block.birth, last: block.death, floor: end });
    }

    /// Inserts a step, as one with neighbours of the same height.
    fn join(&mut self, mut step: Step) {
        let floor = step.floor;
        for neighbour in self.beside(&step).into_iter().flatten().filter(|s| s.floor == floor) {
            self.remove(&neighbour);
            let (first, last) = (step.first.min(neighbour.first), step.last.max(neighbour.last));
            step = Step { first, last, floor };
        }
        self.insert(&step);
    }
}

/// The blocks that have no place yet.
struct Waiting<'a> {
    blocks: &'a [Block],
    leaves: usize,
    /// By node of a tree over the blocks: the least rank in the priority, and the least death. Both are `u32::MAX` where
    /// every block has its place.
    tree: Vec<(u32, u32)>,
    /// By rank: the block.
    priority: &'a [u32],
}

/// No block: a rank and a death that all others are before.
const NONE: (u32, u32) = (u32::MAX, u32::MAX);

impl<'a> Waiting<'a> {
    fn new(blocks: &'a [Block], priority: &'a [u32]) -> Self {
        let leaves = blocks.len().next_power_of_two();
        let mut tree = vec![NONE; 2 * leaves];
        for (rank, &i) in (0..).zip(priority) {
            tree[leaves + i as usize] = (rank, blocks[i as usize].death);
        }
        for node in (1..leaves).rev() {
            tree[node] = both(tree[2 * node], tree[2 * node + 1]);
        }
        Self { blocks, leaves, tree, priority }
    }

    /// The first block by priority whose life lies within the step, and how many begin in it.
    fn take(&mut self, step: &Step) -> (Option<usize>, usize) {
        let from = self.blocks.partition_point(|b| b.birth < step.first);
        let to = self.blocks.partition_point(|b| b.birth <= step.last);
        let mut best = u32::MAX;
        self.search(1, 0..self.leaves, &(from..to), step.last, &mut best);
        let next = (best < u32::MAX).then(|| self.priority[best as usize] as usize);
        if let Some(i) = next {
            let mut node = self.leaves + i;
            self.tree[node] = NONE;
            while node > 1 {
                node /= 2;
                self.tree[node] = both(self.tree[2 * node], self.tree[2 * node + 1]);
            }
        }
        (next, to - from)
    }

    /// The least rank among the blocks of a range that die by `last`, where it is less than `best`.
    fn search(&self, node: usize, span: Range<usize>, range: &Range<usize>, last: u32, best: &mut u32) {
        let (rank, death) = self.tree[node];
        if span.end <= range.start || range.end <= span.start || death > last || rank >= *best {
            return;
        }
        if span.len() == 1 {
            *best = rank;
            return;
        }
        let middle = span.start.midpoint(span.end);
        let mut halves = [(2 * node, span.start..middle), (2 * node + 1, middle..span.end)];
        // The half with the lower rank first: it may rule the other one out.
        halves.sort_by_key(|(node, _)| self.tree[*node].0);
        for (node, span) in halves {
            self.search(node, span, range, last, best);
        }
    }
}

fn both(a: (u32, u32), b: (u32, u32)) -> (u32, u32) {
    (a.0.min(b.0), a.1.min(b.1))
}
