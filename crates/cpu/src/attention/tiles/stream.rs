//! Strips of a narrow head whose scores are bounded, and leave the tiles as last places: two tiles of keys after two.
//!
//! Invariant: the bits are those of whole rows (`Task::soften`): a row's sum of weights and a strip's sums over keys take their
//! steps in ascending order.
//!
//! Nothing has to be known of a row before its first weight, so scores and weights live for some turns only, in rings that stay
//! in L1 beside keys and values. A product takes 17 cycles, but what waits for it 52, and the CPU looks ahead no farther than about
//! one turn (a tile that is stored fills a sixth of its window). So scores are stored one turn after their product, the weights
//! of eight rows behind it, and nobody waits for either.

use super::products::{add, each, pairs};
use super::registers::Registers;
use super::weights::{BEGIN, Running, soften_rest, soften_rows};
use super::{Keys, LINE, SCORES, SIDE, STEP, STEPS, STRIPS, TILE, Task};
use core::arch::x86_64::*;

/// Pairs by which scores are ahead of weights.
const AHEAD: usize = 2;
/// Pairs in a ring: those ahead, that of now, and the one before.
const RING: usize = 4;

// Lines of scores and of weights, in the part of whole rows.
const _: () = assert!(3 * RING * TILE <= 8 * SIDE * SCORES);

/// A pair of tiles of a strip; how many came before it.
#[derive(Clone, Copy, Default)]
struct Turn {
    strip: usize,
    pair: usize,
    count: usize,
}

impl Turn {
    #[inline(always)]
    fn next(self, pairs: usize) -> Turn {
        let end = self.pair + 1 == pairs;
        let (strip, pair) = if end { (self.strip + 1, 0) } else { (self.strip, self.pair + 1) };
        Turn { strip, pair, count: self.count + 1 }
    }
}

impl Task<'_> {
    /// All strips of a head against one block of keys; after the `last` one they are written out.
    ///
    /// # Safety
    /// Queries, keys and values are packed, the scores are `ready`, and all strips bounded.
    #[inline(always)]
    pub(super) unsafe fn stream<R: Registers>(
        &self,
        tiles: &mut R,
        keys: Keys,
        (head, strips, last): (usize, usize, bool),
        running: &mut [[Running; STRIPS]; 2],
    ) {
        let pairs = pairs(keys);
        let end = strips * pairs;
        let (mut ahead, mut now, mut behind) = (Turn::default(), Turn::default(), Turn::default());
        // SAFETY: as the caller promises; the rings fit in the part of scores.
        unsafe {
            for _ in 0..AHEAD {
                self.make_scores::<R, 6, 3>(tiles, keys, (head, end), ahead);
                self.make_scores::<R, 7, 5>(tiles, keys, (head, end), ahead);
                ahead = ahead.next(pairs);
            }
            for strip in 0..strips {
                let mut sums = [[_mm512_setzero_ps(); 4]; 4];
                for pair in 0..pairs {
                    let rest = if pair + 1 == pairs { keys.rest } else { 0 };
                    self.make_scores::<R, 6, 3>(tiles, keys, (head, end), ahead);
                    self.make_weights::<0>(now, rest, &mut sums);
                    self.make_scores::<R, 7, 5>(tiles, keys, (head, end), ahead);
                    ahead = ahead.next(pairs);
                    if now.count > 0 {
                        self.use_weights(tiles, keys, head, behind);
                    }
                    self.make_weights::<2>(now, rest, &mut sums);
                    if now.count > 0 {
                        if last && behind.pair == 0 && behind.strip > 0 {
                            self.finish(behind.strip - 1, running);
                        }
                        behind = behind.next(pairs);
                    }
                    now = now.next(pairs);
                    if head == 0 && keys.start == 0 {
                        for r in pair * SIDE / pairs..(pair + 1) * SIDE / pairs {
                            self.ask(strip * SIDE + r);
                        }
                    }
                }
                running[head][strip].hold();
                let sums = core::mem::transmute::<[[__m512; 4]; 4], [__m512; SIDE]>(sums);
                running[head][strip].add(_mm512_set1_ps(1.0), sums);
            }
            self.use_weights(tiles, keys, head, behind);
            self.put_sums(tiles, head, strips - 1);
            if last {
                if pairs == 1 && strips > 1 {
                    self.finish(strips - 2, running);
                }
                self.finish(strips - 1, running);
            }
        }
    }

    /// Eight rows of weights: those of sums `FIRST` and the next.
    ///
    /// # Safety
    /// As `stream`; the scores are there.
    #[inline(always)]
    unsafe fn make_weights<const FIRST: usize>(
        &self,
        turn: Turn,
        rest: __mmask32,
        sums: &mut [[__m512; 4]; 4],
    ) {
        let from = self.ring_scores(turn.count).cast::<f32>().wrapping_add(FIRST * 4 * STEP);
        let to = self.ring_weights(turn.count).wrapping_add(FIRST * 4 * LINE);
        // SAFETY: as the caller promises.
        unsafe {
            for (four, sums) in sums[FIRST..FIRST + 2].iter_mut().enumerate() {
                let (from, to) = (from.add(four * 4 * STEP), to.add(four * 4 * LINE));
                match rest {
                    0 => *sums = soften_rows(from, to, *sums),
                    _ => soften_rest(from, to, rest, sums),
                }
            }
        }
    }

    /// Stores the scores that register `C`, 6 or 7, holds: of the first, or the second, tile of keys of the pair before. Then
    /// makes those of this pair, by way of register `B`; what is past the last key is left to `rest`.
    ///
    /// # Safety
    /// As `stream`.
    #[inline(always)]
    unsafe fn make_scores<R: Registers, const C: usize, const B: usize>(
        &self,
        tiles: &mut R,
        keys: Keys,
        (head, end): (usize, usize),
        turn: Turn,
    ) {
        let second = C - 6;
        let first = head * self.cut.half;
        let a = self.at(self.parts.queries + turn.strip * TILE + 4 * first);
        let b = self.at(self.parts.keys + (2 * turn.pair + second) * TILE + first * LINE);
        // SAFETY: tiles in their parts; rows of `BEGIN`, which all are one.
        unsafe {
            if (1..=end).contains(&turn.count) {
                let to = self.ring_scores(turn.count - 1);
                tiles.store::<C>(to.add(second * LINE), 2 * LINE as isize);
            }
            if turn.count >= end || turn.pair * STEP + second * SIDE >= keys.len {
                return;
            }
            if turn.pair == 0 && second == 0 {
                tiles.load::<2>(a, LINE as isize);
            }
            tiles.load::<C>(BEGIN.0.as_ptr().cast(), 0);
            tiles.load::<B>(b, LINE as isize);
            tiles.multiply::<C, 2, B>();
        }
    }

    /// Multiplies a pair's weights by the values; first of all stores the sums of the strip before.
    ///
    /// # Safety
    /// As `stream`; the weights are there.
    #[inline(always)]
    unsafe fn use_weights<R: Registers>(&self, tiles: &mut R, keys: Keys, head: usize, turn: Turn) {
        let count = self.cut.tiles();
        let values = self.at(self.parts.values + (head * count * STEPS + turn.pair) * TILE);
        let row = (self.cut.together * count * LINE) as isize;
        let out = self.out(turn.strip * SIDE, head).cast::<u8>();
        // SAFETY: tiles in their parts.
        unsafe {
            if turn.pair == 0 && turn.strip > 0 {
                self.put_sums(tiles, head, turn.strip - 1);
            }
            if turn.pair == 0 && keys.start == 0 {
                tiles.zero::<0>();
                each::<R, 1>(tiles, count, |tiles| tiles.zero::<1>());
            } else if turn.pair == 0 {
                tiles.load::<0>(out, row);
                each::<R, 1>(tiles, count, |tiles| tiles.load::<1>(out.add(LINE), row));
            }
            tiles.load::<4>(self.ring_weights(turn.count), LINE as isize);
            match self.cut.together {
                2 => add::<R, 0, 1>(tiles, values),
                _ => add::<R, 0, 5>(tiles, values),
            }
            each::<R, 1>(tiles, count, |tiles| add::<R, 1, 5>(tiles, values));
        }
    }

    /// Stores a strip's sums over keys.
    ///
    /// # Safety
    /// As `stream`; they are in their registers.
    #[inline(always)]
    unsafe fn put_sums<R: Registers>(&self, tiles: &mut R, head: usize, strip: usize) {
        let count = self.cut.tiles();
        let row = (self.cut.together * count * LINE) as isize;
        let out = self.out(strip * SIDE, head).cast::<u8>();
        // SAFETY: tiles in their part.
        unsafe {
            tiles.store::<0>(out, row);
            each::<R, 1>(tiles, count, |tiles| tiles.store::<1>(out.add(LINE), row));
        }
    }

    #[inline(always)]
    fn ring_scores(&self, count: usize) -> *mut u8 {
        self.at(self.parts.scores + count % RING * 2 * TILE)
    }

    #[inline(always)]
    fn ring_weights(&self, count: usize) -> *mut u8 {
        self.at(self.parts.scores + RING * 2 * TILE + count % RING * TILE)
    }
}
