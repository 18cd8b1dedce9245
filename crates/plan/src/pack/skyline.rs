//! Skyline heuristic of strip packing (Burke, Kendall & Whitwell 2004), with fixed positions in time: the lowest step
//! of the skyline receives the block of highest priority that fits on it, so that the packing grows evenly and leaves
//! few holes below long-lived blocks.
//!
//! Invariant: a block is placed only on a step that covers its lifetime, so no two blocks overlap.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use super::solve::Block;

/// Packs `blocks` with the given priority and returns the offset of each block; `None` if a block would end above
/// `limit`. Takes O(n log n) for lifetimes as in layers; for random long lifetimes the time is quadratic.
pub(super) fn pack(blocks: &[Block], priority: &[u32], limit: u64) -> Option<Vec<u64>> {
    let mut waiting = Waiting::new(blocks, priority);
    let last = blocks.iter().map(|b| b.death).max().unwrap_or(0);
    let mut skyline = Skyline::new(last);
    let mut offsets = vec![0; blocks.len()];
    let mut placed = 0;
    while placed < blocks.len() {
        let low = skyline.lowest();
        let Some(next) = waiting.take(&low) else {
            skyline.fill(low);
            continue;
        };
        let end = blocks[next].end(low.floor);
        if end > limit {
            return None;
        }
        skyline.build(low, &blocks[next], end);
        offsets[next] = low.floor;
        placed += 1;
    }
    Some(offsets)
}

/// A maximal interval of time at constant height, `first` and `last` inclusive.
#[derive(Clone, Copy)]
struct SkylineStep {
    first: u32,
    last: u32,
    floor: u64,
}

/// Partition of all time into steps; adjacent steps differ in height.
struct Skyline {
    /// Steps by first instant, as (last instant, height).
    by_time: BTreeMap<u32, (u32, u64)>,
    /// Steps by height, as (height, first instant).
    by_floor: BTreeSet<(u64, u32)>,
}

impl Skyline {
    fn new(last: u32) -> Self {
        Self { by_time: BTreeMap::from([(0, (last, 0))]), by_floor: BTreeSet::from([(0, 0)]) }
    }

    /// The lowest step; the earliest of equally low ones.
    fn lowest(&self) -> SkylineStep {
        let &(floor, first) = self.by_floor.first().expect("time has a step");
        SkylineStep { first, last: self.by_time[&first].0, floor }
    }

    /// The steps before and after a step.
    fn neighbours(&self, step: &SkylineStep) -> [Option<SkylineStep>; 2] {
        let of = |(&first, &(last, floor)): (&u32, &(u32, u64))| SkylineStep { first, last, floor };
        [
            self.by_time.range(..step.first).next_back().map(of),
            self.by_time.range(step.last + 1..).next().map(of),
        ]
    }

    fn remove(&mut self, step: &SkylineStep) {
        self.by_time.remove(&step.first);
        self.by_floor.remove(&(step.floor, step.first));
    }

    fn insert(&mut self, step: &SkylineStep) {
        self.by_time.insert(step.first, (step.last, step.floor));
        self.by_floor.insert((step.floor, step.first));
    }

    /// Raises a step on which no further block fits to the height of its lower neighbour, and merges them.
    fn fill(&mut self, step: SkylineStep) {
        self.remove(&step);
        let floor = self.neighbours(&step).iter().flatten().map(|s| s.floor).min().unwrap_or(u64::MAX);
        self.join(SkylineStep { floor, ..step });
    }

    /// Places a block on a step, which divides it into up to three steps.
    fn build(&mut self, old: SkylineStep, block: &Block, end: u64) {
        self.remove(&old);
        if old.first < block.birth {
            self.insert(&SkylineStep { last: block.birth - 1, ..old });
        }
        if block.death < old.last {
            self.insert(&SkylineStep { first: block.death + 1, ..old });
        }
        self.join(SkylineStep { first: block.birth, last: block.death, floor: end });
    }

    /// Inserts a step and merges it with neighbours of equal height.
    fn join(&mut self, mut step: SkylineStep) {
        let floor = step.floor;
        for neighbour in self.neighbours(&step).into_iter().flatten().filter(|s| s.floor == floor) {
            self.remove(&neighbour);
            let (first, last) = (step.first.min(neighbour.first), step.last.max(neighbour.last));
            step = SkylineStep { first, last, floor };
        }
        self.insert(&step);
    }
}

/// The blocks that are not placed yet, in a segment tree.
struct Waiting<'a> {
    blocks: &'a [Block],
    /// Number of leaves of the tree; node 1 is the root, and block i is leaf `leaves + i`.
    leaves: usize,
    /// Least priority rank and least death in the subtree of each node; [`NONE`] if all of its blocks are placed.
    tree: Vec<(u32, u32)>,
    /// Block of each rank.
    priority: &'a [u32],
}

/// Node without blocks: neutral element of [`both`].
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

    /// Removes and returns the block of highest priority whose lifetime is within the step.
    fn take(&mut self, step: &SkylineStep) -> Option<usize> {
        let from = self.blocks.partition_point(|b| b.birth < step.first);
        let to = self.blocks.partition_point(|b| b.birth <= step.last);
        // Blocks are in order of birth, so those born in the step are a range of leaves.
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
        next
    }

    /// Lowers `best` to the least rank among the blocks of `range` in this subtree that die by `last`. `span` is the
    /// range of blocks of the subtree.
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
        // Searching the half with the lower rank first may prune the other half.
        halves.sort_by_key(|(node, _)| self.tree[*node].0);
        for (node, span) in halves {
            self.search(node, span, range, last, best);
        }
    }
}

/// Element-wise minimum: the tree entry of the parent of two nodes.
fn both(a: (u32, u32), b: (u32, u32)) -> (u32, u32) {
    (a.0.min(b.0), a.1.min(b.1))
}
