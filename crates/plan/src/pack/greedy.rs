//! The search for a packing of a piece that cannot be cut: first fit, lowest place first and best
//! fit in several orders, every packing if the blocks are few, then small changes to the best order.
//!
//! Invariant: every packing it looks at is valid, and the first one is finished whatever it costs,
//! so there is always an answer.

use std::cmp::Reverse;
use std::ops::ControlFlow;

use super::solve::{Block, loads};
use super::{exact, skyline};

/// Offset of a block that has none yet.
const UNPLACED: u64 = u64::MAX;

/// Offsets for `blocks` (in order of birth), as low as the effort allows: the search ends when the
/// height is at most `enough` or `steps` are used up.
pub(super) fn search(blocks: &[Block], enough: u64, steps: u64) -> Vec<u64> {
    let mut search = Search::new(blocks, enough, steps);
    search.try_orders();
    if blocks.len() <= exact::MOST_BLOCKS {
        search.try_everything();
    }
    search.climb();
    search.best
}

/// Offsets at which many `blocks` rest on each other, the longest lives first, where their height is at most `enough`: what
/// is high enough for most steps of training, in O(n log n) for the lives of layers (items with random long lives: four times the time for twice of them).
pub(super) fn rested(blocks: &[Block], enough: u64) -> Option<Vec<u64>> {
    let order = Order::Life.of(blocks, &[]);
    skyline::order(blocks, &order, enough, &mut 0).map(|(_, offsets)| offsets)
}

/// What it costs to collect and sort a neighbour, in steps of a walk.
const SORT_COST: usize = 6;

/// Where a block goes among the gaps that hold it.
#[derive(Clone, Copy)]
enum Rule {
    /// The lowest gap.
    First,
    /// The smallest gap, then the lowest; above everything only when there is no other.
    Best,
}

/// The best packing so far, and what is needed to try another.
struct Search<'a> {
    blocks: &'a [Block],
    neighbours: Neighbours,
    enough: u64,
    steps: u64,
    /// Offsets of the best packing.
    best: Vec<u64>,
    /// Its height, `u64::MAX` before the first.
    height: u64,
    /// The order and the rule that made it.
    order: Vec<u32>,
    rule: Rule,
    /// Offsets of the packing under construction.
    offsets: Vec<u64>,
    /// Its blocks by offset.
    placed: Vec<(u64, Block)>,
    /// Some placed neighbours of one block by offset: (start, end).
    busy: Vec<(u64, u64)>,
}

impl<'a> Search<'a> {
    fn new(blocks: &'a [Block], enough: u64, steps: u64) -> Self {
        Self {
            blocks,
            neighbours: Neighbours::new(blocks),
            enough,
            steps,
            best: Vec::new(),
            height: u64::MAX,
            order: Vec::new(),
            rule: Rule::First,
            offsets: Vec::new(),
            placed: Vec::new(),
            busy: Vec::new(),
        }
    }

    /// Whether there is nothing left to gain or to spend. Never before the first packing.
    fn over(&self) -> bool {
        self.height <= self.enough || (self.steps == 0 && self.height < u64::MAX)
    }

    /// Each order as it is under each rule, and as the priority among the blocks that can rest lowest.
    fn try_orders(&mut self) {
        let loads = loads(self.blocks);
        for order in ORDERS {
            let order = order.of(self.blocks, &loads);
            self.attempt(order.clone(), 0, Rule::First, self.height - 1);
            if self.over() {
                return;
            }
            if let Some((lowest, _)) = skyline::order(self.blocks, &order, self.height - 1, &mut self.steps) {
                self.attempt(lowest, 0, Rule::First, self.height - 1);
            }
            if self.over() {
                return;
            }
            self.attempt(order, 0, Rule::Best, self.height - 1);
            if self.over() {
                return;
            }
        }
    }

    /// The whole space of packings, for half of the effort.
    fn try_everything(&mut self) {
        let mut share = self.steps / 2;
        self.steps -= share;
        while !self.over() {
            match exact::below(self.blocks, self.height - 1, &mut share) {
                Some(order) => self.attempt(order, 0, Rule::First, self.height - 1),
                // The whole space was seen: this is the optimum.
                None if share > 0 => self.enough = self.height,
                None => return,
            }
        }
    }

    /// Hill climbing over orders: a block that ends at the top, or one of those that it stands on,
    /// comes earlier (the first one: later). Packings of equal height are taken too, to cross plains.
    fn climb(&mut self) {
        for round in 0u64.. {
            if self.over() {
                return;
            }
            let culprit = self.culprit(round);
            let rank = self.order.iter().position(|&i| i as usize == culprit).unwrap_or(0);
            let span = if rank == 0 { self.order.len() } else { rank };
            let to = ((span as u64 * spread(round)) >> 32) as usize;
            let mut order = self.order.clone();
            order.remove(rank);
            order.insert(to, culprit as u32);
            self.spend(SORT_COST * order.len() / 2);
            self.attempt(order, rank.min(to), self.rule, self.height);
        }
    }

    /// One of the highest blocks, or a block up to three below it in a chain of supports.
    fn culprit(&self, round: u64) -> usize {
        let end = |i: usize| self.blocks[i].end(self.best[i]);
        let highest: Vec<usize> = (0..self.blocks.len()).filter(|&i| end(i) == self.height).collect();
        let mut i = highest[(round % highest.len() as u64) as usize];
        for _ in 0..round / 3 % 4 {
            let below = |&j: &usize| end(j) == self.best[i] && self.blocks[j].meets(&self.blocks[i]);
            match (0..self.blocks.len()).find(below) {
                Some(j) => i = j,
                None => break,
            }
        }
        i
    }

    /// Packs in `order` and keeps the result if no block ends above `limit`. The first `same` blocks
    /// of the order are the best packing's and stay where they are.
    fn attempt(&mut self, order: Vec<u32>, same: usize, rule: Rule, limit: u64) {
        self.placed.clear();
        self.offsets.clear();
        self.offsets.resize(self.blocks.len(), UNPLACED);
        for &i in &order[..same] {
            self.offsets[i as usize] = self.best[i as usize];
            self.placed.push((self.best[i as usize], self.blocks[i as usize]));
        }
        self.placed.sort_unstable();
        for &i in &order[same..] {
            let (i, block) = (i as usize, self.blocks[i as usize]);
            let offset = self.fit(i, rule);
            if block.end(offset) > limit {
                return;
            }
            self.offsets[i] = offset;
            let rank = self.placed.partition_point(|&(start, _)| start < offset);
            self.placed.insert(rank, (offset, block));
        }
        let height = self.placed.iter().map(|(start, block)| block.end(*start)).max().unwrap_or(0);
        std::mem::swap(&mut self.best, &mut self.offsets);
        (self.height, self.order, self.rule) = (height, order, rule);
    }

    /// The offset that `rule` gives block `i` among its placed neighbours.
    ///
    /// Few neighbours are collected and sorted; many are found by walking up all placed blocks.
    fn fit(&mut self, i: usize, rule: Rule) -> u64 {
        let block = self.blocks[i];
        let mut gaps = Gaps { size: block.size, rule, top: 0, chosen: None };
        if SORT_COST * self.neighbours.count(i) < self.placed.len() {
            let Self { blocks, neighbours, offsets, busy, .. } = self;
            busy.clear();
            neighbours.each(blocks, i, |j| {
                if offsets[j] != UNPLACED {
                    busy.push((offsets[j], blocks[j].end(offsets[j])));
                }
            });
            busy.sort_unstable();
            self.spend(SORT_COST * self.neighbours.count(i));
            let _ = self.busy.iter().try_for_each(|&(start, end)| gaps.pass(start, end));
        } else {
            let walk = self
                .placed
                .iter()
                .position(|(start, b)| b.meets(&block) && gaps.pass(*start, b.end(*start)).is_break());
            self.spend(walk.unwrap_or(self.placed.len()));
        }
        gaps.chosen.map_or(gaps.top, |(_, offset)| offset)
    }

    /// Counts the effort of one placement.
    fn spend(&mut self, steps: usize) {
        self.steps = self.steps.saturating_sub(1 + steps as u64);
    }
}

/// A walk up the gaps between the neighbours of one block.
struct Gaps {
    /// Of the block to be placed.
    size: u64,
    rule: Rule,
    /// The end of the highest neighbour passed.
    top: u64,
    /// The gap taken: its size and its start.
    chosen: Option<(u64, u64)>,
}

impl Gaps {
    /// Looks at the gap below the next neighbour; breaks when the gap is settled.
    fn pass(&mut self, start: u64, end: u64) -> ControlFlow<()> {
        let gap = start.saturating_sub(self.top);
        if gap >= self.size && self.chosen.is_none_or(|(smallest, _)| gap < smallest) {
            self.chosen = Some((gap, self.top));
            if matches!(self.rule, Rule::First) {
                return ControlFlow::Break(());
            }
        }
        self.top = self.top.max(end);
        ControlFlow::Continue(())
    }
}

/// Fractions of 2^32 that cover the range evenly whenever one stops: multiples of the golden ratio.
fn spread(round: u64) -> u64 {
    round.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 32
}

/// What comes first; ties go to the second word, then to the earlier birth.
#[derive(Clone, Copy)]
enum Order {
    /// Long lives, large sizes.
    Life,
    /// Near the peak in time, long lives.
    PeakLife,
    /// Near the peak in time, large sizes.
    PeakSize,
    /// Large sizes, long lives.
    Size,
    /// Large size times life.
    Area,
    /// Lives through much load, long lives.
    PressureLife,
    /// Lives through much load, large sizes.
    PressureSize,
    /// Early births, long lives.
    Birth,
    /// Late deaths, long lives.
    Death,
}

/// The orders worth trying, the ones that most often win first.
const ORDERS: [Order; 9] = [
    Order::Life,
    Order::PeakLife,
    Order::PeakSize,
    Order::Size,
    Order::Area,
    Order::PressureLife,
    Order::PressureSize,
    Order::Birth,
    Order::Death,
];

impl Order {
    /// The blocks in this order; `loads` is the sum of live sizes at each instant.
    fn of(self, blocks: &[Block], loads: &[u64]) -> Vec<u32> {
        let peak = (0u32..).zip(loads).max_by_key(|&(i, load)| (load, Reverse(i))).map_or(0, |(i, _)| i);
        let mut order: Vec<(Reverse<(u64, u64)>, u32)> =
            blocks.iter().zip(0u32..).map(|(b, i)| (Reverse(self.key(b, loads, peak)), i)).collect();
        order.sort_unstable();
        order.into_iter().map(|(_, i)| i).collect()
    }

    /// Largest first.
    fn key(self, b: &Block, loads: &[u64], peak: u32) -> (u64, u64) {
        let life = u64::from(b.death - b.birth) + 1;
        let near = || u64::MAX - u64::from(b.birth.saturating_sub(peak).max(peak.saturating_sub(b.death)));
        let pressure = || loads[b.birth as usize..=b.death as usize].iter().copied().max().unwrap_or(0);
        match self {
            Self::Life => (life, b.size),
            Self::PeakLife => (near(), life),
            Self::PeakSize => (near(), b.size),
            Self::Size => (b.size, life),
            Self::Area => (b.size.saturating_mul(life), b.size),
            Self::PressureLife => (pressure(), life),
            Self::PressureSize => (pressure(), b.size),
            Self::Birth => (u64::from(u32::MAX - b.birth), life),
            Self::Death => (u64::from(b.death), life),
        }
    }
}

/// Which blocks meet, without a list of pairs: lists of who is alive at some births, the rest by
/// scanning between them. Memory is pairs / `STRIDE`.
struct Neighbours {
    /// `alive[k]`: blocks born before rank `k * STRIDE` and still alive at its birth.
    alive: Vec<Vec<u32>>,
    /// Per block, the rank after the last block born in its life.
    upto: Vec<u32>,
}

/// Births between two lists of who is alive.
const STRIDE: usize = 16;

impl Neighbours {
    fn new(blocks: &[Block]) -> Self {
        let upto = blocks.iter().map(|b| blocks.partition_point(|o| o.birth <= b.death) as u32).collect();
        let mut alive: Vec<Vec<u32>> = Vec::new();
        for k in 0..blocks.len().div_ceil(STRIDE) {
            let now = blocks[k * STRIDE].birth;
            let older = alive.last().map_or(&[][..], Vec::as_slice).iter().copied();
            let newer = (k.saturating_sub(1) * STRIDE) as u32..(k * STRIDE) as u32;
            alive.push(older.chain(newer).filter(|&j| blocks[j as usize].death >= now).collect());
        }
        Self { alive, upto }
    }

    /// About how many blocks `each` looks at.
    fn count(&self, i: usize) -> usize {
        self.alive[i / STRIDE].len() + i % STRIDE + self.upto[i] as usize - i
    }

    /// Calls `f` with each block that is alive together with block `i`.
    fn each(&self, blocks: &[Block], i: usize, mut f: impl FnMut(usize)) {
        let (k, birth) = (i / STRIDE, blocks[i].birth);
        let older = self.alive[k].iter().map(|&j| j as usize).chain(k * STRIDE..i);
        older.filter(|&j| blocks[j].death >= birth).for_each(&mut f);
        (i + 1..self.upto[i] as usize).for_each(f);
    }
}
