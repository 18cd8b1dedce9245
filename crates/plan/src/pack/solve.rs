//! The packer: divides a problem into independent parts and solves each distinct part once.
//!
//! Invariant: the packing is a function of the problem alone; effort is counted in steps, never in time.
//!
//! The decomposition preserves an optimal packing, so a part that reaches its lower bound is optimal:
//! - *instants*: only the maximal live sets matter, so time is renumbered by them, once;
//! - *gaps*: intervals of time without an item across their ends are independent and are solved separately;
//! - *floors*: an item that is live during a whole part is at the bottom of some optimal packing.
//!
//! Activations that a training step stores for its backward pass are nested floors, layer within layer; a residual
//! stream that is updated in place is a floor too. The items above the floors decompose into equal parts, of which
//! each distinct one is solved once and its offsets are reused. Decomposing n items takes O(n log n) for any depth of
//! nesting. If an additional item is live across the layers, the problem does not decompose. A part of at least
//! `SEARCH_LATER` items is then packed with the skyline heuristic, which takes O(n log n) for lifetimes as in layers, and
//! is searched only if the result is too high.

use std::collections::BTreeMap;

use super::greedy;
use super::problem::Problem;

/// Solution of a packing problem: the offsets of its items in one region.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Packing {
    /// Offset of each item in bytes, in the order of `Problem::items`; 0 for items of size 0.
    pub offsets: Vec<u64>,
    /// Size of the region in bytes: the end of the highest item, rounded up to the alignment.
    pub height: u64,
}

/// An item inside the solver: size in units of the alignment, renumbered instants, `death` inclusive.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Block {
    pub(super) size: u64,
    pub(super) birth: u32,
    pub(super) death: u32,
}

impl Block {
    /// End of the block if it starts at `offset`.
    pub(super) fn end(&self, offset: u64) -> u64 {
        offset + self.size
    }

    /// Whether both blocks are live at a common instant.
    pub(super) fn meets(&self, other: &Self) -> bool {
        self.birth <= other.death && other.birth <= self.death
    }
}

/// Packs the items of a problem. Equal problems give equal packings on every machine.
///
/// # Panics
/// If `align` is zero, an item dies before its birth, or the sizes together exceed `u64`.
pub fn solve(problem: &Problem) -> Packing {
    assert!(problem.items.iter().all(|i| i.birth <= i.death), "an item dies before its birth");
    let units = |i: usize| problem.footprint(i) / problem.align;
    let total = (0..problem.items.len()).try_fold(0u64, |sum, i| sum.checked_add(problem.footprint(i)));
    assert!(total.is_some(), "the sizes together exceed u64");

    let part: Vec<IndexedBlock> = (0..problem.items.len())
        .filter(|&i| problem.items[i].size > 0)
        .map(|i| IndexedBlock {
            item: i,
            block: Block { size: units(i), birth: problem.items[i].birth, death: problem.items[i].death },
        })
        .collect();
    let mut solver = Solver { offsets: vec![0; problem.items.len()], solved: BTreeMap::new() };
    let height = solver.place(part);
    let offsets = solver.offsets.iter().map(|units| units * problem.align).collect();
    Packing { offsets, height: height * problem.align }
}

/// Maximum number of search steps for a piece of `blocks` blocks; a step takes about 1 ns. Grows as n sqrt(n): the
/// hardest problem of 1000 items takes about 15 ms, of 5000 items about 130 ms.
fn effort(blocks: usize) -> u64 {
    let n = blocks as u64;
    50_000 + n * (160 * n.isqrt()).max(4_000)
}

/// Pieces with at least this number of blocks are searched only if the skyline heuristic does not reach the goal.
const SEARCH_LATER: usize = 1024;

/// A block and the index of its item.
#[derive(Clone, Copy)]
struct IndexedBlock {
    item: usize,
    block: Block,
}

/// Key of a solved piece: the height that suffices for it, and its blocks without item indices.
type Kind = (u64, Vec<Block>);

/// State of a call of [`solve`].
struct Solver {
    /// Offset of each item, in units of the alignment.
    offsets: Vec<u64>,
    /// Offsets of the pieces solved so far.
    solved: BTreeMap<Kind, Vec<u64>>,
}

/// An interval of time without a remaining item across its ends, and the items that are live inside it only.
#[derive(Clone, Copy)]
struct TimeSlice {
    /// First and last instant, both inclusive.
    from: u32,
    to: u32,
    /// Range `first..end` of the piece's entries among all entries.
    first: usize,
    end: usize,
    /// Largest sum of live sizes of these entries.
    load: u64,
}

/// The pieces above a set of floors; the first `done` of them are placed.
struct Level {
    pieces: Vec<TimeSlice>,
    done: usize,
    /// Offset at which the pieces start.
    base: u64,
    /// Highest end of the pieces placed so far.
    top: u64,
    /// Height that suffices: a lower top does not lower the packing, because other items reach this height.
    enough: u64,
    /// Floors below the pieces: their number and the sum of their sizes.
    floors: (usize, u64),
}

impl Solver {
    /// Places all entries and returns their highest end. Floors are nested as deeply as a model has layers, so this
    /// uses an explicit stack instead of recursion.
    fn place(&mut self, mut part: Vec<IndexedBlock>) -> u64 {
        renumber(&mut part);
        let Some(last) = part.iter().map(|e| e.block.death).max() else { return 0 };
        let cuts = Cuts::of(&part);
        let whole = TimeSlice { from: 0, to: last, first: 0, end: part.len(), load: 0 };
        let mut levels = vec![Level {
            pieces: cuts.split(&part, whole, (0, 0)),
            done: 0,
            base: 0,
            top: 0,
            enough: 0,
            floors: (0, 0),
        }];
        loop {
            let depth = levels.len();
            let level = &mut levels[depth - 1];
            let Some(&piece) = level.pieces.get(level.done) else {
                let top = level.top;
                levels.pop();
                match levels.last_mut() {
                    Some(below) => below.top = below.top.max(top),
                    None => return top,
                }
                continue;
            };
            level.done += 1;
            let goal = level.enough.max(level.top).max(level.base + piece.load);
            let entries = &part[piece.first..piece.end];
            // Entries are sorted by birth, then by longest lifetime, so floors come first.
            let spans = |e: &&IndexedBlock| e.block.birth == piece.from && e.block.death == piece.to;
            let count = entries.iter().take_while(spans).count();
            if count == 0 {
                level.top = level.top.max(self.place_whole(entries, level.base, goal));
                continue;
            }
            let (mut top, (mut number, mut sum)) = (level.base, level.floors);
            for floor in &entries[..count] {
                self.offsets[floor.item] = top;
                top = floor.block.end(top);
                (number, sum) = (number + 1, sum + floor.block.size);
            }
            let rest = TimeSlice { first: piece.first + count, ..piece };
            let pieces = if rest.first < rest.end { cuts.split(&part, rest, (number, sum)) } else { vec![] };
            levels.push(Level { pieces, done: 0, base: top, top, enough: goal, floors: (number, sum) });
        }
    }

    /// Places a piece that does not decompose, reusing the solution of an equal piece if there is one. Returns its
    /// highest end.
    fn place_whole(&mut self, piece: &[IndexedBlock], base: u64, goal: u64) -> u64 {
        let key = (goal - base, blocks(piece));
        if !self.solved.contains_key(&key) {
            let rested = (piece.len() >= SEARCH_LATER).then(|| greedy::rested(&key.1, key.0)).flatten();
            let found = rested.unwrap_or_else(|| greedy::search(&key.1, key.0, effort(piece.len())));
            self.solved.insert(key.clone(), found);
        }
        let mut top = base;
        for (entry, offset) in piece.iter().zip(&self.solved[&key]) {
            self.offsets[entry.item] = base + offset;
            top = top.max(entry.block.end(base + offset));
        }
        top
    }
}

/// Instants between which a part can be divided after its floors are removed. Removing items that are live at every
/// instant of a piece keeps its live sets maximal, so instants are numbered only once, and the number of items live
/// across t and t + 1 and the sum of live sizes at t change by exactly the number and the sizes of the floors.
struct Cuts {
    /// `crossed[n]`: the instants t, ascending, at which n items are live across t and t + 1.
    crossed: Vec<Vec<u32>>,
    /// Sparse table: `loads[j][t]` is the largest sum of live sizes among the instants t to t + 2^j - 1.
    loads: Vec<Vec<u64>>,
}

impl Cuts {
    /// Computes the tables of entries that are renumbered and in order of birth.
    fn of(part: &[IndexedBlock]) -> Self {
        let all = blocks(part);
        let sums = loads(&all);
        let mut change = vec![0i64; sums.len() + 1];
        for block in &all {
            change[block.birth as usize] += 1;
            change[block.death as usize] -= 1;
        }
        let (mut crossed, mut open): (Vec<Vec<u32>>, i64) = (vec![], 0);
        for (t, change) in (0u32..).zip(&change[..sums.len()]) {
            open += change;
            let number = open as usize;
            if crossed.len() <= number {
                crossed.resize(number + 1, vec![]);
            }
            crossed[number].push(t);
        }
        let mut table = vec![sums];
        while table[table.len() - 1].len() > 1 << (table.len() - 1) {
            let (last, width) = (&table[table.len() - 1], 1 << (table.len() - 1));
            table.push((0..last.len() - width).map(|t| last[t].max(last[t + width])).collect());
        }
        Self { crossed, loads: table }
    }

    /// Largest sum of live sizes from instant `from` to `to`, both inclusive, floors included.
    fn load(&self, from: u32, to: u32) -> u64 {
        let (from, to) = (from as usize, to as usize);
        // The two ranges of length 2^level overlap, which does not change a maximum.
        let level = (to - from + 1).ilog2() as usize;
        self.loads[level][from].max(self.loads[level][to + 1 - (1 << level)])
    }

    /// Divides a part into pieces above its floors, given as their number and the sum of their sizes. The piece with
    /// the largest load comes first: the other pieces then suffice if they are no higher than it.
    fn split(&self, part: &[IndexedBlock], whole: TimeSlice, (number, sum): (usize, u64)) -> Vec<TimeSlice> {
        let none = vec![];
        let places = self.crossed.get(number).unwrap_or(&none);
        let places = &places[places.partition_point(|&t| t < whole.from)..];
        let ends = places.iter().copied().take_while(|&t| t < whole.to).chain([whole.to]);
        let (mut pieces, mut from, mut first) = (vec![], whole.from, whole.first);
        for to in ends {
            let end = first + part[first..whole.end].partition_point(|e| e.block.birth <= to);
            if end > first {
                let load = self.load(from, to) - sum;
                pieces.push(TimeSlice { from, to, first, end, load });
            }
            (from, first) = (to + 1, end);
        }
        pieces.sort_by_key(|piece| std::cmp::Reverse(piece.load));
        pieces
    }
}

/// Renumbers instants by maximal live sets; a set begins with the first birth after a death. Two blocks overlap in
/// time exactly if they share a maximal set (intervals have the Helly property), so the problem is unchanged, and
/// lifetimes that differ only in irrelevant instants become equal. Sorts the entries by birth, then longest lifetime,
/// then largest size.
fn renumber(part: &mut [IndexedBlock]) {
    let mut events: Vec<(u32, bool, usize)> = Vec::with_capacity(2 * part.len());
    for (i, IndexedBlock { block, .. }) in part.iter().enumerate() {
        events.push((block.birth, false, i));
        events.push((block.death, true, i));
    }
    events.sort_unstable();
    let (mut set, mut shrunk) = (0, false);
    for (_, dies, i) in events {
        // Births sort before deaths at the same instant, because lifetimes include their last instant.
        if dies {
            part[i].block.death = set;
            shrunk = true;
        } else {
            set += u32::from(shrunk);
            part[i].block.birth = set;
            shrunk = false;
        }
    }
    part.sort_by_key(|e| (e.block.birth, std::cmp::Reverse((e.block.death, e.block.size)), e.item));
}

/// Blocks of a piece in order of birth, with time relative to the start of the piece.
fn blocks(piece: &[IndexedBlock]) -> Vec<Block> {
    let start = piece.first().map_or(0, |e| e.block.birth);
    piece
        .iter()
        .map(|e| Block { birth: e.block.birth - start, death: e.block.death - start, ..e.block })
        .collect()
}

/// Sum of live sizes at each instant.
pub(super) fn loads(blocks: &[Block]) -> Vec<u64> {
    let instants = blocks.iter().map(|b| b.death as usize + 1).max().unwrap_or(0);
    let (mut born, mut dead) = (vec![0u64; instants], vec![0u64; instants + 1]);
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
