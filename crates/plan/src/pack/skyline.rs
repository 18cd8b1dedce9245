//! Skyline heuristic of strip packing (Burke, Kendall & Whitwell 2004), with fixed positions in time: the lowest step
//! of the skyline receives the block of highest priority that fits on it, so that the packing grows evenly and leaves
//! few holes below long-lived blocks.
//!
//! Invariant: a block is placed only on a step that covers its lifetime, so no two blocks overlap.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use super::solve::PackBlock;

/// Packs `blocks` with the given priority and returns the offset of each block; `None` if a block would end above
/// `limit`. Takes O(n log n) for lifetimes as in layers; for random long lifetimes the time is quadratic.
pub(super) fn pack(blocks: &[PackBlock], priority: &[u32], limit: u64) -> Option<Vec<u64>> {
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
    /// Steps by first instant.
    by_time: BTreeMap<u32, SkylineStep>,
    /// Steps by height, as (height, first instant): the first is the earliest of the lowest ones.
    by_floor: BTreeSet<(u64, u32)>,
}

impl Skyline {
    fn new(last: u32) -> Self {
        let ground = SkylineStep { first: 0, last, floor: 0 };
        Self { by_time: BTreeMap::from([(0, ground)]), by_floor: BTreeSet::from([(0, 0)]) }
    }

    /// The lowest step; the earliest of equally low ones.
    fn lowest(&self) -> SkylineStep {
        let (_, first) = self.by_floor.first().expect("time has a step");
        self.by_time[first]
    }

    /// The steps before and after a step.
    fn neighbours(&self, step: &SkylineStep) -> [Option<SkylineStep>; 2] {
        let before = self.by_time.range(..step.first).next_back();
        let after = self.by_time.range(step.last + 1..).next();
        [before, after].map(|neighbour| neighbour.map(|(_, step)| *step))
    }

    fn remove(&mut self, step: &SkylineStep) {
        self.by_time.remove(&step.first);
        self.by_floor.remove(&(step.floor, step.first));
    }

    fn insert(&mut self, step: &SkylineStep) {
        self.by_time.insert(step.first, *step);
        self.by_floor.insert((step.floor, step.first));
    }

    /// Raises a step on which no further block fits to the height of its lower neighbour, and merges them.
    fn fill(&mut self, step: SkylineStep) {
        self.remove(&step);
        // There is a neighbour: on a step that covers all time every waiting block would fit. Each call merges
        // two steps, so the loop of `pack` ends.
        let floor = self.neighbours(&step).iter().flatten().map(|s| s.floor).min().unwrap_or(u64::MAX);
        self.join(SkylineStep { floor, ..step });
    }

    /// Places a block on a step, which divides it into up to three steps.
    fn build(&mut self, old: SkylineStep, block: &PackBlock, end: u64) {
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
            step.first = step.first.min(neighbour.first);
            step.last = step.last.max(neighbour.last);
        }
        self.insert(&step);
    }
}

/// The blocks that are not placed yet, in a segment tree.
struct Waiting<'a> {
    blocks: &'a [PackBlock],
    /// Number of leaves of the tree; node 1 is the root, and block i is leaf `leaves + i`.
    leaves: usize,
    /// Minima of the subtree of each node; [`Minima::NONE`] if all of its blocks are placed.
    tree: Vec<Minima>,
    /// Index of the block of each rank.
    priority: &'a [u32],
}

/// Least priority rank and least death of the waiting blocks of a subtree.
#[derive(Clone, Copy)]
struct Minima {
    rank: u32,
    death: u32,
}

impl Minima {
    /// Minima of no blocks: the neutral element of [`Minima::join`].
    const NONE: Self = Self { rank: u32::MAX, death: u32::MAX };

    /// Minima of the blocks of two subtrees.
    fn join(self, other: Self) -> Self {
        Self { rank: self.rank.min(other.rank), death: self.death.min(other.death) }
    }
}

impl<'a> Waiting<'a> {
    fn new(blocks: &'a [PackBlock], priority: &'a [u32]) -> Self {
        let leaves = blocks.len().next_power_of_two();
        let mut tree = vec![Minima::NONE; 2 * leaves];
        for (rank, &i) in (0..).zip(priority) {
            tree[leaves + i as usize] = Minima { rank, death: blocks[i as usize].death };
        }
        for node in (1..leaves).rev() {
            tree[node] = tree[2 * node].join(tree[2 * node + 1]);
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
            self.tree[node] = Minima::NONE;
            while node > 1 {
                node /= 2;
                self.tree[node] = self.tree[2 * node].join(self.tree[2 * node + 1]);
            }
        }
        next
    }

    /// Lowers `best` to the least rank among the blocks of `range` in this subtree that die by `last`. `span` is the
    /// range of blocks of the subtree.
    fn search(&self, node: usize, span: Range<usize>, range: &Range<usize>, last: u32, best: &mut u32) {
        let Minima { rank, death } = self.tree[node];
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
        halves.sort_by_key(|(node, _)| self.tree[*node].rank);
        for (node, span) in halves {
            self.search(node, span, range, last, best);
        }
    }
}
