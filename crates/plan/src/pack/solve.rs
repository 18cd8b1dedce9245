//! From a problem to a packing: cut it into independent parts, solve each distinct part once.
//!
//! Invariant: the packing is a function of the problem alone; effort is counted in steps, never in
//! time.
//!
//! The cuts lose nothing, so a part solved to its bound is solved for good:
//! - *instants*: only the maximal live sets matter, so time is renumbered by them, once;
//! - *gaps*: parts of time that no item crosses share nothing and are solved apart;
//! - *floors*: an item alive through the whole part lies at the bottom of some best packing.
//!
//! The activations that a training step keeps for its backward pass are such floors, nested layer in layer; a residual
//! stream that is updated in place is one too. What stands above them falls apart into equal parts: each kind is solved
//! once and its offsets are repeated. Cutting n items takes O(n log n), however deep the floors are nested. Where one item
//! more crosses the layers nothing falls apart; then so many items rest on each other, which takes O(n log n) for the lives of layers, and are
//! searched only where that is not low enough.

use std::collections::BTreeMap;

use super::greedy;
use super::problem::Problem;

/// Offsets of a problem's items in one region.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Packing {
    /// Bytes from the start of the region, in the order of `Problem::items`; 0 for items of size 0.
    pub offsets: Vec<u64>,
    /// Bytes: the least aligned size of a region that holds every item.
    pub height: u64,
}

/// An item inside the solver. Sizes are in units of the alignment; instants are renumbered, `death`
/// is inclusive.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Block {
    pub(super) size: u64,
    pub(super) birth: u32,
    pub(super) death: u32,
}

impl Block {
    /// Where the block ends when it starts at `offset`.
    pub(super) fn end(&self, offset: u64) -> u64 {
        offset + self.size
    }

    /// Whether the two are alive at the same time.
    pub(super) fn meets(&self, other: &Self) -> bool {
        self.birth <= other.death && other.birth <= self.death
    }
}

/// Packs the items; the same problem gives the same packing on every machine.
///
/// # Panics
/// If `align` is zero, an item dies before its birth, or the sizes together exceed `u64`.
pub fn solve(problem: &Problem) -> Packing {
    assert!(problem.items.iter().all(|i| i.birth <= i.death), "an item dies before its birth");
    let units = |i: usize| problem.footprint(i) / problem.align;
    let total = (0..problem.items.len()).try_fold(0u64, |sum, i| sum.checked_add(problem.footprint(i)));
    assert!(total.is_some(), "the sizes together exceed u64");

    let part: Vec<Entry> = (0..problem.items.len())
        .filter(|&i| problem.items[i].size > 0)
        .map(|i| Entry {
            item: i,
            block: Block { size: units(i), birth: problem.items[i].birth, death: problem.items[i].death },
        })
        .collect();
    let mut solver = Solver { offsets: vec![0; problem.items.len()], solved: BTreeMap::new() };
    let height = solver.place(part);
    let offsets = solver.offsets.iter().map(|units| units * problem.align).collect();
    Packing { offsets, height: height * problem.align }
}

/// Steps that the search for a piece may take; one is about a nanosecond. Grows as n sqrt(n): the
/// hardest problem of 1000 items takes about 15 ms, one of 5000 about 130 ms.
fn effort(blocks: usize) -> u64 {
    let n = blocks as u64;
    50_000 + n * (160 * n.isqrt()).max(4_000)
}

/// Pieces of so many blocks are searched only where resting each block on those before it is not low enough.
const MANY: usize = 1024;

/// A block and the item that it stands for.
#[derive(Clone, Copy)]
struct Entry {
    item: usize,
    block: Block,
}

/// A part as its blocks, without their names, and the height that is good enough for it.
type Kind = (u64, Vec<Block>);

/// The state of one solution.
struct Solver {
    /// Per item, in units of the alignment.
    offsets: Vec<u64>,
    /// Offsets of the parts seen so far.
    solved: BTreeMap<Kind, Vec<u64>>,
}

/// A part of time that no remaining item crosses the ends of, with the items alive in it alone.
#[derive(Clone, Copy)]
struct Piece {
    /// The instants, last one included.
    from: u32,
    to: u32,
    /// Its entries, a range of all.
    first: usize,
    end: usize,
    /// The largest sum of live sizes of these entries.
    load: u64,
}

/// The pieces above some floors, of which the first `done` are placed.
struct Level {
    pieces: Vec<Piece>,
    done: usize,
    /// Where the pieces start.
    base: u64,
    /// The highest end so far.
    top: u64,
    /// Nothing is gained by a top below it: something else reaches that high.
    enough: u64,
    /// Floors below the pieces: how many, and the sum of their sizes.
    floors: (usize, u64),
}

impl Solver {
    /// Places all entries and returns their top. Floors are nested as deep as a model has layers, so the walk
    /// over them keeps its own stack.
    fn place(&mut self, mut part: Vec<Entry>) -> u64 {
        renumber(&mut part);
        let Some(last) = part.iter().map(|e| e.block.death).max() else { return 0 };
        let cuts = Cuts::of(&part);
        let whole = Piece { from: 0, to: last, first: 0, end: part.len(), load: 0 };
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
            // Sorted by birth, then the longest life: floors come first.
            let spans = |e: &&Entry| e.block.birth == piece.from && e.block.death == piece.to;
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
            let rest = Piece { first: piece.first + count, ..piece };
            let pieces = if rest.first < rest.end { cuts.split(&part, rest, (number, sum)) } else { vec![] };
            levels.push(Level { pieces, done: 0, base: top, top, enough: goal, floors: (number, sum) });
        }
    }

    /// Searches for a packing of a piece that cannot be cut, unless its like was seen before.
    fn place_whole(&mut self, piece: &[Entry], base: u64, goal: u64) -> u64 {
        let key = (goal - base, blocks(piece));
        if !self.solved.contains_key(&key) {
            let rested = (piece.len() >= MANY).then(|| greedy::rested(&key.1, key.0)).flatten();
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

/// Where a part can be cut when floors are taken away. Removing items that are alive at every instant of a piece keeps
/// its live sets maximal, so instants are numbered once, and "the items that cross from instant t to t + 1" and "the sum
/// of live sizes at t" change by the floors alone.
struct Cuts {
    /// By number of items that cross from an instant to the next: those instants, ascending.
    crossed: Vec<Vec<u32>>,
    /// `loads[j][t]`: the largest sum of live sizes among the instants t to t + 2^j - 1.
    loads: Vec<Vec<u64>>,
}

impl Cuts {
    /// Of entries in order of birth, whose instants are renumbered.
    fn of(part: &[Entry]) -> Self {
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

    /// The largest sum of live sizes from one instant to another, floors included.
    fn load(&self, from: u32, to: u32) -> u64 {
        let (from, to) = (from as usize, to as usize);
        let level = (to - from + 1).ilog2() as usize;
        self.loads[level][from].max(self.loads[level][to + 1 - (1 << level)])
    }

    /// What a part falls into above `floors` (their number and sum of sizes), the largest load first: the other pieces
    /// then need only stay below it.
    fn split(&self, part: &[Entry], whole: Piece, (number, sum): (usize, u64)) -> Vec<Piece> {
        let none = vec![];
        let places = self.crossed.get(number).unwrap_or(&none);
        let places = &places[places.partition_point(|&t| t < whole.from)..];
        let ends = places.iter().copied().take_while(|&t| t < whole.to).chain([whole.to]);
        let (mut pieces, mut from, mut first) = (vec![], whole.from, whole.first);
        for to in ends {
            let end = first + part[first..whole.end].partition_point(|e| e.block.birth <= to);
            if end > first {
                let load = self.load(from, to) - sum;
                pieces.push(Piece { from, to, first, end, load });
            }
            (from, first) = (to + 1, end);
        }
        pieces.sort_by_key(|piece| std::cmp::Reverse(piece.load));
        pieces
    }
}

/// Renumbers time by the maximal live sets: a new one begins with the first birth after a death.
/// Two blocks meet exactly when they share a maximal set (intervals have the Helly property), so
/// nothing is lost, and lives that differ only in instants that do not matter become equal.
/// Leaves the entries in order of birth, then the longest life, then size.
fn renumber(part: &mut [Entry]) {
    let mut events: Vec<(u32, bool, usize)> = Vec::with_capacity(2 * part.len());
    for (i, Entry { block, .. }) in part.iter().enumerate() {
        events.push((block.birth, false, i));
        events.push((block.death, true, i));
    }
    events.sort_unstable();
    let (mut set, mut shrunk) = (0, false);
    for (_, dies, i) in events {
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

/// The blocks of a piece in order of birth, time counted from its start.
fn blocks(piece: &[Entry]) -> Vec<Block> {
    let start = piece.first().map_or(0, |e| e.block.birth);
    piece
        .iter()
        .map(|e| Block { birth: e.block.birth - start, death: e.block.death - start, ..e.block })
        .collect()
}

/// The sum of live sizes at each instant, for blocks in order of birth.
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
