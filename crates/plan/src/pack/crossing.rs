//! Items whose lives cross those of many others: two lives cross where they overlap and neither contains the other. The
//! gradient of a residual stream is one, a single buffer through the whole backward pass; so are the losses of the layers,
//! which are summed at the end of a step. They keep the layers of a model from being packed apart, so each is pinned: it
//! gets bytes of its own for all time, whether it is alive or not.
//!
//! Invariant: pinning does not raise the largest load. An item is pinned only where its bytes fit under that load at every
//! instant at which it is not alive.

use std::cmp::Reverse;

use super::solve::{Block, loads};

/// A pinned item's life crosses at least so many others.
const CROSSED: usize = 32;

/// Which of the blocks are pinned. They must be sorted by birth, and those of one birth by falling death.
pub(super) fn pinned(blocks: &[Block]) -> Vec<bool> {
    let mut is_pinned = vec![false; blocks.len()];
    let loads = loads(blocks);
    let Some(&most) = loads.iter().max() else { return is_pinned };
    let crossed = crossings(blocks, loads.len());
    let mut candidates: Vec<usize> = (0..blocks.len()).filter(|&i| crossed[i] >= CROSSED).collect();
    candidates.sort_by_key(|&i| (Reverse(crossed[i]), i));
    let mut loads = Maxima::of(&loads);
    for i in candidates {
        let Block { size, birth, death } = blocks[i];
        let outside = [0..birth as usize, death as usize + 1..loads.instants];
        if outside.iter().all(|range| loads.most(range.clone()) + size <= most) {
            outside.into_iter().for_each(|range| loads.add(range, size));
            is_pinned[i] = true;
        }
    }
    is_pinned
}

/// For each block, how many lives cross its own: those that are alive at its birth and end before its death, and those
/// that begin during its life and end after it.
fn crossings(blocks: &[Block], instants: usize) -> Vec<usize> {
    let mut born_by = vec![0usize; instants + 1];
    let mut dead_by = vec![0usize; instants + 1];
    for block in blocks {
        born_by[block.birth as usize] += 1;
        dead_by[block.death as usize] += 1;
    }
    for t in 1..=instants {
        born_by[t] += born_by[t - 1];
        dead_by[t] += dead_by[t - 1];
    }
    let mut deaths = Counts { tree: vec![0; instants + 1] };
    let mut crossed = vec![0; blocks.len()];
    let mut first = 0;
    while first < blocks.len() {
        // Blocks of one birth do not cross each other.
        let end = first + blocks[first..].partition_point(|b| b.birth == blocks[first].birth);
        for (i, block) in (first..).zip(&blocks[first..end]) {
            let (birth, death) = (block.birth as usize, block.death as usize);
            let (inside, after) = (deaths.below(death) - deaths.below(birth), first - deaths.below(death + 1));
            // Those alive after its death, less those that were alive before its birth or were born with it.
            let alive_behind = born_by[death] - dead_by[death];
            let born_with = blocks[first..end].partition_point(|b| b.death > block.death);
            crossed[i] = inside + (alive_behind - after - born_with);
        }
        blocks[first..end].iter().for_each(|block| deaths.add(block.death as usize));
        first = end;
    }
    crossed
}

/// Counts by number, as a Fenwick tree.
struct Counts {
    tree: Vec<usize>,
}

impl Counts {
    fn add(&mut self, number: usize) {
        let mut at = number + 1;
        while at < self.tree.len() {
            self.tree[at] += 1;
            at += at & at.wrapping_neg();
        }
    }

    /// How many numbers are below this one.
    fn below(&self, number: usize) -> usize {
        let (mut at, mut sum) = (number, 0);
        while at > 0 {
            sum += self.tree[at];
            at &= at - 1;
        }
        sum
    }
}

/// The largest load of a range of instants, where loads are added to ranges: a segment tree.
struct Maxima {
    instants: usize,
    leaves: usize,
    /// For each node of the tree, the largest load of its instants, with what was added to the node and to those below it.
    most: Vec<u64>,
    /// For each node, what was added to all of its instants at once.
    added: Vec<u64>,
}

impl Maxima {
    fn of(loads: &[u64]) -> Self {
        let leaves = loads.len().next_power_of_two();
        let mut most = vec![0; 2 * leaves];
        most[leaves..leaves + loads.len()].copy_from_slice(loads);
        for node in (1..leaves).rev() {
            most[node] = most[2 * node].max(most[2 * node + 1]);
        }
        Self { instants: loads.len(), leaves, most, added: vec![0; 2 * leaves] }
    }

    /// 0 for an empty range.
    fn most(&self, range: std::ops::Range<usize>) -> u64 {
        if range.is_empty() { 0 } else { self.most_below(1, 0..self.leaves, &range) }
    }

    fn most_below(&self, node: usize, span: std::ops::Range<usize>, range: &std::ops::Range<usize>) -> u64 {
        if range.start <= span.start && span.end <= range.end {
            return self.most[node];
        }
        let middle = span.start.midpoint(span.end);
        let mut most = 0;
        if range.start < middle {
            most = self.most_below(2 * node, span.start..middle, range);
        }
        if range.end > middle {
            most = most.max(self.most_below(2 * node + 1, middle..span.end, range));
        }
        most + self.added[node]
    }

    fn add(&mut self, range: std::ops::Range<usize>, size: u64) {
        if !range.is_empty() {
            self.add_below(1, 0..self.leaves, &range, size);
        }
    }

    fn add_below(
        &mut self,
        node: usize,
        span: std::ops::Range<usize>,
        range: &std::ops::Range<usize>,
        size: u64,
    ) {
        if range.start <= span.start && span.end <= range.end {
            self.most[node] += size;
            self.added[node] += size;
            return;
        }
        let middle = span.start.midpoint(span.end);
        if range.start < middle {
            self.add_below(2 * node, span.start..middle, range, size);
        }
        if range.end > middle {
            self.add_below(2 * node + 1, middle..span.end, range, size);
        }
        self.most[node] = self.most[2 * node].max(self.most[2 * node + 1]) + self.added[node];
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn block(size: u64, birth: u32, death: u32) -> Block {
        Block { size, birth, death }
    }

    /// Crossings by definition.
    fn crossed(blocks: &[Block]) -> Vec<usize> {
        let cross = |a: &Block, b: &Block| a.birth < b.birth && b.birth <= a.death && a.death < b.death;
        let count = |a: &Block| blocks.iter().filter(|b| cross(a, b) || cross(b, a)).count();
        blocks.iter().map(count).collect()
    }

    #[test]
    fn crossings_are_counted() {
        let mut state = 7u64;
        let mut random = |below: u64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 33) % below
        };
        for _ in 0..50 {
            let mut blocks: Vec<Block> = (0..40)
                .map(|_| {
                    let birth = random(20);
                    block(1 + random(9), birth as u32, (birth + random(20 - birth)) as u32)
                })
                .collect();
            blocks.sort_by_key(|b| (b.birth, Reverse(b.death)));
            let instants = loads(&blocks).len();
            assert_eq!(crossings(&blocks, instants), crossed(&blocks), "{blocks:?}");
        }
    }

    #[test]
    fn what_crosses_all_layers_is_pinned_where_the_load_allows_it() {
        // Layers nested into each other, and a gradient from the middle to the end.
        let nested = |layers: u32| (0..layers).map(move |i| block(10, i, 4 * layers - 2 * i));
        let check = |gradient: u64, early: u64, expected: bool| {
            let mut blocks: Vec<Block> =
                nested(50).chain([block(gradient, 50, 201), block(early, 0, 0)]).collect();
            blocks.sort_by_key(|b| (b.birth, Reverse(b.death)));
            let place = blocks.iter().position(|b| b.birth == 50).unwrap();
            let found = pinned(&blocks);
            assert_eq!(found[place], expected, "{gradient} {early}");
            assert_eq!(found.iter().filter(|&&is| is).count(), usize::from(expected));
        };
        check(7, 1, true);
        // At the first instant nothing else fits under the largest load, 500 and the gradient.
        check(7, 490, true);
        check(7, 491, false);
    }
}
