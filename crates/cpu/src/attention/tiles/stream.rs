//! Attention of a narrow head with bounded scores: scores, weights and output sums are computed in alternation, 32 keys
//! (two tiles) at a time. Scores leave the tiles as `Scores::Ready`.
//!
//! Invariant: results are bit-equal to `TiledBlock::softmax_strip`, because each row's sum of weights and each strip's
//! output sums add their steps in ascending order of keys.
//!
//! With bounded scores, a weight needs no maximum over its row. Scores and weights are therefore needed for a few turns
//! only, and live in circular buffers that stay in L1 beside keys and values. A tile product occupies the tile unit for
//! 17 cycles, but its result is available after 52, and out-of-order execution looks ahead about one turn only (storing
//! one tile fills a sixth of its window). So the scores of a product are stored one turn later, and eight rows of
//! weights are computed behind that store, which hides both latencies.

use super::matmuls::{add_values, if_tile, pairs};
use super::registers::Registers;
use super::weights::{BEGIN, RunningSoftmax, softmax_rest, softmax_rows};
use super::{HeadStrips, KeyBlock, LINE, SCORES, SIDE, STEP, STEPS, STRIPS, TILE, TiledBlock};
use core::arch::x86_64::*;

/// Number of pairs by which scores are computed ahead of weights.
const AHEAD: usize = 2;
/// Capacity of the circular buffers in pairs: `AHEAD` pairs of scores, the current pair and the previous one.
const BUFFERED_PAIRS: usize = 4;

// Per pair, the scores take two tiles and the weights one tile; both buffers lie in the memory for the scores of two
// whole strips.
const _: () = assert!(3 * BUFFERED_PAIRS * TILE <= 8 * SIDE * SCORES);

/// A position of the loop over all pairs of key tiles of all strips.
#[derive(Clone, Copy, Default)]
struct Turn {
    /// Strip of queries.
    strip: usize,
    /// Pair of key tiles within the strip.
    pair: usize,
    /// Number of earlier turns, over all strips.
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

impl TiledBlock<'_> {
    /// Processes all strips of a head against one block of keys; with `last`, also writes the strips to o.
    ///
    /// # Safety
    /// Queries, keys and values are packed, `TiledBlock::ready` holds, and the scores of all strips are bounded.
    #[inline(always)]
    pub(super) unsafe fn stream<R: Registers>(
        &self,
        tiles: &mut R,
        keys: KeyBlock,
        head_strips: HeadStrips,
        running: &mut [[RunningSoftmax; STRIPS]; 2],
    ) {
        let HeadStrips { head, strips, last } = head_strips;
        let pairs = pairs(keys);
        let end = strips * pairs;
        let mut ahead = Turn::default();
        let mut now = Turn::default();
        let mut behind = Turn::default();
        // SAFETY: as the caller promises; the circular buffers fit in the memory for scores (asserted above).
        unsafe {
            for _ in 0..AHEAD {
                self.make_scores::<R, 6, 3>(tiles, keys, head, end, ahead);
                self.make_scores::<R, 7, 5>(tiles, keys, head, end, ahead);
                ahead = ahead.next(pairs);
            }
            // Three positions advance together: `ahead` (scores), `now` (weights) and `behind` (products with the
            // values, one pair late). Vector and tile instructions alternate so that neither unit waits for the other.
            for strip in 0..strips {
                let mut sums = [[_mm512_setzero_ps(); 4]; 4];
                for pair in 0..pairs {
                    let rest = if pair + 1 == pairs { keys.rest } else { 0 };
                    self.make_scores::<R, 6, 3>(tiles, keys, head, end, ahead);
                    self.make_weights::<0>(now, rest, &mut sums);
                    self.make_scores::<R, 7, 5>(tiles, keys, head, end, ahead);
                    ahead = ahead.next(pairs);
                    if now.count > 0 {
                        self.use_weights(tiles, keys, head, behind);
                    }
                    self.make_weights::<2>(now, rest, &mut sums);
                    if now.count > 0 {
                        // `use_weights` has stored the sums of the strip before `behind.strip`, so that strip is
                        // complete.
                        if last && behind.pair == 0 && behind.strip > 0 {
                            self.finish(behind.strip - 1, running);
                        }
                        behind = behind.next(pairs);
                    }
                    now = now.next(pairs);
                    if head == 0 && keys.start == 0 {
                        for r in pair * SIDE / pairs..(pair + 1) * SIDE / pairs {
                            self.prefetch(strip * SIDE + r);
                        }
                    }
                }
                // The offset never changes while scores are bounded, so previous sums are scaled by 1.
                running[head][strip].use_fixed_offset();
                let sums = core::mem::transmute::<[[__m512; 4]; 4], [__m512; SIDE]>(sums);
                running[head][strip].add(_mm512_set1_ps(1.0), sums);
            }
            self.use_weights(tiles, keys, head, behind);
            self.put_sums(tiles, head, strips - 1);
            if last {
                // With one pair per strip, the products of the last strip come only here, and with them the
                // sums of the strip before it are stored. The loop above has therefore not written that strip.
                if pairs == 1 && strips > 1 {
                    self.finish(strips - 2, running);
                }
                self.finish(strips - 1, running);
            }
        }
    }

    /// Computes eight rows of weights: four each for `sums[FIRST]` and `sums[FIRST + 1]`.
    ///
    /// # Safety
    /// The requirements of `stream`, and the scores of `turn` must be stored.
    #[inline(always)]
    unsafe fn make_weights<const FIRST: usize>(
        &self,
        turn: Turn,
        rest: __mmask32,
        sums: &mut [[__m512; 4]; 4],
    ) {
        let from = self.score_slot(turn.count).cast::<f32>().wrapping_add(FIRST * 4 * STEP);
        let to = self.weight_slot(turn.count).wrapping_add(FIRST * 4 * LINE);
        // SAFETY: as the caller promises.
        unsafe {
            for (four, sums) in sums[FIRST..FIRST + 2].iter_mut().enumerate() {
                let from = from.add(four * 4 * STEP);
                let to = to.add(four * 4 * LINE);
                match rest {
                    0 => *sums = softmax_rows(from, to, *sums),
                    _ => softmax_rest(from, to, rest, sums),
                }
            }
        }
    }

    /// Stores the scores in register `C`, which belong to the previous pair: `C` is 6 for the first key tile of a
    /// pair, 7 for the second. Then computes the scores of the pair `turn` in that register, with the keys in
    /// register `B`. Columns beyond the last key are not cleared; the mask `KeyBlock::rest` removes them from the
    /// weights.
    ///
    /// # Safety
    /// The requirements of `stream`.
    #[inline(always)]
    unsafe fn make_scores<R: Registers, const C: usize, const B: usize>(
        &self,
        tiles: &mut R,
        keys: KeyBlock,
        head: usize,
        end: usize,
        turn: Turn,
    ) {
        let second = C - 6;
        let first = head * self.split.half;
        let a = self.at(self.layout.queries + turn.strip * TILE + 4 * first);
        let b = self.at(self.layout.keys + (2 * turn.pair + second) * TILE + first * LINE);
        // SAFETY: the tiles lie in their buffers; a stride of 0 reads the single row of `BEGIN` 16 times.
        unsafe {
            if (1..=end).contains(&turn.count) {
                let to = self.score_slot(turn.count - 1);
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

    /// Multiplies a pair's weights by the values. At the first pair of a strip, stores the output sums of the
    /// previous strip and loads or clears the accumulators.
    ///
    /// # Safety
    /// The requirements of `stream`, and the weights of `turn` must be stored.
    #[inline(always)]
    unsafe fn use_weights<R: Registers>(&self, tiles: &mut R, keys: KeyBlock, head: usize, turn: Turn) {
        let count = self.split.tiles();
        let values = self.at(self.layout.values + (head * count * STEPS + turn.pair) * TILE);
        let row = (self.split.together * count * LINE) as isize;
        let out = self.out(turn.strip * SIDE, head).cast::<u8>();
        // SAFETY: the tiles lie in their buffers.
        unsafe {
            if turn.pair == 0 && turn.strip > 0 {
                self.put_sums(tiles, head, turn.strip - 1);
            }
            if turn.pair == 0 && keys.start == 0 {
                tiles.zero::<0>();
                if_tile::<R, 1>(tiles, count, |tiles| tiles.zero::<1>());
            } else if turn.pair == 0 {
                tiles.load::<0>(out, row);
                if_tile::<R, 1>(tiles, count, |tiles| tiles.load::<1>(out.add(LINE), row));
            }
            tiles.load::<4>(self.weight_slot(turn.count), LINE as isize);
            match self.split.together {
                2 => add_values::<R, 0, 1>(tiles, values),
                _ => add_values::<R, 0, 5>(tiles, values),
            }
            if_tile::<R, 1>(tiles, count, |tiles| add_values::<R, 1, 5>(tiles, values));
        }
    }

    /// Stores the output sums of a strip.
    ///
    /// # Safety
    /// The requirements of `stream`, and the sums must be in their registers.
    #[inline(always)]
    unsafe fn put_sums<R: Registers>(&self, tiles: &mut R, head: usize, strip: usize) {
        let count = self.split.tiles();
        let row = (self.split.together * count * LINE) as isize;
        let out = self.out(strip * SIDE, head).cast::<u8>();
        // SAFETY: the tiles lie in the output buffer.
        unsafe {
            tiles.store::<0>(out, row);
            if_tile::<R, 1>(tiles, count, |tiles| tiles.store::<1>(out.add(LINE), row));
        }
    }

    /// Circular buffer slot for the scores of the pair number `count`: f32 (16, 32).
    #[inline(always)]
    fn score_slot(&self, count: usize) -> *mut u8 {
        self.at(self.layout.scores + count % BUFFERED_PAIRS * 2 * TILE)
    }

    /// Circular buffer slot for the weights of the pair number `count`: one tile, bf16 (16, 32).
    #[inline(always)]
    fn weight_slot(&self, count: usize) -> *mut u8 {
        self.at(self.layout.scores + BUFFERED_PAIRS * 2 * TILE + count % BUFFERED_PAIRS * TILE)
    }
}
