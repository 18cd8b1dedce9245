//! From a problem to a packing: cut it into independent parts, solve each distinct part once.
//!
//! Invariant: the packing is a function of the problem alone; effort is counted in steps, never in
//! time.
//!
//! The cuts lose nothing, so a part solved to its bound is solved for good:
//! - *instants*: only the largest live sets matter, so time is renumbered by them;
//! - *gaps*: parts of time that no item crosses share nothing and are solved apart;
//! - *floors*: an item alive through the whole part lies at the bottom of some best packing.
//!
//! A residual stream that is updated in place is such a floor, and the layers above it fall apart
//! into equal parts: each kind is solved once and its offsets are repeated.

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
    let steps = effort(part.len());
    let mut solver = Solver { offsets: vec![0; problem.items.len()], steps, solved: BTreeMap::new() };
    let height = solver.place(part, 0, 0);
    let offsets = solver.offsets.iter().map(|units| units * problem.align).collect();
    Packing { offsets, height: height * problem.align }
}

/// Steps that the search for a piece may take; one is about a nanosecond. Grows as n sqrt(n): the
/// hardest problem of 1000 items takes about 15 ms, one of 5000 about 130 ms.
fn effort(blocks: usize) -> u64 {
    let n = blocks as u64;
    50_000 + n * (160 * n.isqrt()).max(4_000)
}

/// What it costs to renumber and cut one entry, in steps of the search (sorts and copies).
const CUT_COST: u64 = 160;

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
    /// What is left of the effort of cutting: deep nests of floors are better searched than cut.
    steps: u64,
    /// Offsets of the parts seen so far.
    solved: BTreeMap<Kind, Vec<u64>>,
}

impl Solver {
    /// Places `part` on top of `base` and returns its top. Nothing is gained by a top below
    /// `enough`: something else reaches that high.
    fn place(&mut self, mut part: Vec<Entry>, base: u64, enough: u64) -> u64 {
        renumber(&mut part);
        let mut pieces: Vec<(u64, &[Entry])> = split(&part).into_iter().map(|p| (load(p), p)).collect();
        // The highest piece first: the others then need only stay below it.
        pieces.sort_by_key(|&(load, _)| std::cmp::Reverse(load));
        let mut top = base;
        for (load, piece) in pieces {
            let goal = enough.max(top).max(base + load);
            top = top.max(self.place_piece(piece, base, goal));
        }
        top
    }

    /// Places a piece that no instant divides: its floors first, then what stands on them.
    fn place_piece(&mut self, piece: &[Entry], base: u64, goal: u64) -> u64 {
        let start = piece[0].block.birth;
        let last = piece.iter().map(|e| e.block.death).max().unwrap_or(start);
        let (floors, rest): (Vec<Entry>, Vec<Entry>) =
            piece.iter().partition(|e| e.block.birth == start && e.block.death == last);
        let cost = CUT_COST * piece.len() as u64;
        if floors.is_empty() || self.steps < cost {
            return self.place_whole(piece, base, goal);
        }
        self.steps -= cost;
        let mut top = base;
        for floor in floors {
            self.offsets[floor.item] = top;
            top = floor.block.end(top);
        }
        if rest.is_empty() { top } else { self.place(rest, top, goal) }
    }

    /// Searches for a packing of a piece that cannot be cut, unless its like was seen before.
    fn place_whole(&mut self, piece: &[Entry], base: u64, goal: u64) -> u64 {
        let key = (goal - base, blocks(piece));
        if !self.solved.contains_key(&key) {
            let found = greedy::search(&key.1, key.0, effort(piece.len()));
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

/// Cuts entries in order of birth where nobody is alive on both sides.
fn split(part: &[Entry]) -> Vec<&[Entry]> {
    let mut pieces = Vec::new();
    let (mut from, mut last) = (0, 0);
    for (i, entry) in part.iter().enumerate() {
        if i > from && entry.block.birth > last {
            pieces.push(&part[from..i]);
            from = i;
        }
        last = last.max(entry.block.death);
    }
    if from < part.len() {
        pieces.push(&part[from..]);
    }
    pieces
}

/// The blocks of a piece in order of birth, time counted from its start.
fn blocks(piece: &[Entry]) -> Vec<Block> {
    let start = piece.first().map_or(0, |e| e.block.birth);
    piece
        .iter()
        .map(|e| Block { birth: e.block.birth - start, death: e.block.death - start, ..e.block })
        .collect()
}

/// The largest sum of live sizes of a piece.
fn load(piece: &[Entry]) -> u64 {
    loads(&blocks(piece)).into_iter().max().unwrap_or(0)
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
