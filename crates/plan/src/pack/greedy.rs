//! Search for a packing of a piece that does not decompose: first fit, skyline and best fit in several orders,
//! exhaustive search if there are few blocks, then hill climbing over the order of the best packing.
//!
//! Invariant: every packing considered is valid, and the first one is completed regardless of the step limit, so
//! there is always a result.

use std::cmp::Reverse;
use std::ops::ControlFlow;

use super::solve::{Block, loads};
use super::{exact, skyline};

/// Offset of a block that is not placed yet.
const UNPLACED: u64 = u64::MAX;

/// Returns the offsets of `blocks`, which are in order of birth. The search ends as soon as the height is at most
/// `enough` or `steps` steps have been used.
pub(super) fn search(blocks: &[Block], enough: u64, steps: u64) -> Vec<u64> {
    let mut search = Search::new(blocks, enough, steps);
    search.try_orders();
    if blocks.len() <= exact::MAX_BLOCKS {
        search.try_everything();
    }
    search.climb();
    search.best
}

/// Returns the offsets of the skyline heuristic with priority for the longest lifetimes; `None` if the height exceeds
/// `enough`. It suffices for most training steps. Takes O(n log n) for lifetimes as in layers; for items with random
/// long lifetimes the time is quadratic.
pub(super) fn rested(blocks: &[Block], enough: u64) -> Option<Vec<u64>> {
    let order = Order::Life.of(blocks, &[]);
    skyline::order(blocks, &order, enough, &mut 0).map(|(_, offsets)| offsets)
}

/// Cost of collecting and sorting one neighbour, relative to one step of a walk over the placed blocks.
const SORT_COST: usize = 6;

/// Choice among the gaps that are large enough for a block.
#[derive(Clone, Copy)]
enum Rule {
    /// First fit: the lowest gap.
    First,
    /// Best fit: the smallest gap, the lowest of equal ones; above all neighbours only if no gap is large enough.
    Best,
}

/// State of a search: the best packing so far and the buffers for the next attempt.
struct Search<'a> {
    blocks: &'a [Block],
    neighbours: Neighbours,
    /// Height that ends the search.
    enough: u64,
    /// Remaining steps.
    steps: u64,
    /// Offsets of the best packing.
    best: Vec<u64>,
    /// Height of the best packing; `u64::MAX` before the first one.
    height: u64,
    /// Order and rule of the best packing.
    order: Vec<u32>,
    rule: Rule,
    /// Offsets of the packing under construction.
    offsets: Vec<u64>,
    /// Placed blocks of the packing under construction, sorted by offset.
    placed: Vec<(u64, Block)>,
    /// Buffer of `fit`: the placed neighbours of one block as (start, end), sorted.
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

    /// Whether the goal is reached or the steps are used up. Always false before the first packing.
    fn over(&self) -> bool {
        self.height <= self.enough || (self.steps == 0 && self.height < u64::MAX)
    }

    /// Tries each order with first fit, as the priority of the skyline heuristic, and with best fit. Each attempt
    /// must be lower than the best packing so far.
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

    /// Exhaustive search, limited to half of the remaining steps.
    fn try_everything(&mut self) {
        let mut share = self.steps / 2;
        self.steps -= share;
        while !self.over() {
            match exact::below(self.blocks, self.height - 1, &mut share) {
                Some(order) => self.attempt(order, 0, Rule::First, self.height - 1),
                // The search was exhaustive: the best packing is optimal.
                None if share > 0 => self.enough = self.height,
                None => return,
            }
        }
    }

    /// Hill climbing over orders: moves a block that ends at the top, or a block that supports it, to an earlier
    /// position; the first block of the order moves to a later one. Packings of equal height are accepted too, to
    /// cross plateaus.
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

    /// Block to move: one of the highest blocks, or a block up to three supports below it. Rounds alternate among
    /// these.
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

    /// Packs in `order` and makes the result the best packing if no block ends above `limit`. The first `same` blocks
    /// of the order equal those of the best packing and keep its offsets, which saves placing them again.
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

    /// Offset of block `i` according to `rule`, given the placed blocks.
    ///
    /// Collects and sorts the neighbours if they are few compared with the placed blocks; otherwise walks over all
    /// placed blocks, which are sorted already.
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

    /// Subtracts the steps of one placement.
    fn spend(&mut self, steps: usize) {
        self.steps = self.steps.saturating_sub(1 + steps as u64);
    }
}

/// State of a walk over the gaps between the neighbours of a block, in order of offset.
struct Gaps {
    /// Size of the block to be placed.
    size: u64,
    rule: Rule,
    /// Highest end of the neighbours passed so far.
    top: u64,
    /// Best gap so far: its size and its start.
    chosen: Option<(u64, u64)>,
}

impl Gaps {
    /// Considers the gap below the next neighbour; breaks if the choice is final.
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

/// Low-discrepancy sequence of fractions of 2^32: multiples of the golden ratio, which cover the range evenly after
/// any number of rounds.
fn spread(round: u64) -> u64 {
    round.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 32
}

/// Order in which blocks are placed: by the first key, then by the second, then by birth.
#[derive(Clone, Copy)]
enum Order {
    /// Longest lifetime, largest size.
    Life,
    /// Nearest to the instant of the peak, longest lifetime.
    PeakLife,
    /// Nearest to the instant of the peak, largest size.
    PeakSize,
    /// Largest size, longest lifetime.
    Size,
    /// Largest product of size and lifetime, largest size.
    Area,
    /// Largest sum of live sizes during the lifetime, longest lifetime.
    PressureLife,
    /// Largest sum of live sizes during the lifetime, largest size.
    PressureSize,
    /// Earliest birth, longest lifetime.
    Birth,
    /// Latest death, longest lifetime.
    Death,
}

/// All orders to try, starting with those that most often give the best packing.
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
    /// Returns the indices of the blocks in this order; `loads` is the sum of live sizes at each instant.
    fn of(self, blocks: &[Block], loads: &[u64]) -> Vec<u32> {
        let peak = (0u32..).zip(loads).max_by_key(|&(i, load)| (load, Reverse(i))).map_or(0, |(i, _)| i);
        let mut order: Vec<(Reverse<(u64, u64)>, u32)> =
            blocks.iter().zip(0u32..).map(|(b, i)| (Reverse(self.key(b, loads, peak)), i)).collect();
        order.sort_unstable();
        order.into_iter().map(|(_, i)| i).collect()
    }

    /// Sort key of a block; larger keys come first.
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

/// Index of the neighbours of each block: the blocks that are live at a common instant. Stores the live blocks at
/// every `STRIDE`-th birth and scans the births in between, which needs 1 / `STRIDE` of the memory of a list of all
/// pairs.
struct Neighbours {
    /// `alive[k]`: the blocks before index `k * STRIDE` that are live at the birth of block `k * STRIDE`.
    alive: Vec<Vec<u32>>,
    /// For each block, one more than the index of the last block that is born during its lifetime.
    upto: Vec<u32>,
}

/// Number of births between two lists of live blocks.
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

    /// Approximate number of blocks that `each` examines.
    fn count(&self, i: usize) -> usize {
        self.alive[i / STRIDE].len() + i % STRIDE + self.upto[i] as usize - i
    }

    /// Calls `f` with the index of each neighbour of block `i`.
    fn each(&self, blocks: &[Block], i: usize, mut f: impl FnMut(usize)) {
        let (k, birth) = (i / STRIDE, blocks[i].birth);
        let older = self.alive[k].iter().map(|&j| j as usize).chain(k * STRIDE..i);
        older.filter(|&j| blocks[j].death >= birth).for_each(&mut f);
        (i + 1..self.upto[i] as usize).for_each(f);
    }
}
