//! Tile products of attention, split into turns that are interleaved with the softmax of another strip.
//!
//! Invariant: a strip's scores and output sums add their steps in ascending order, however turns are interleaved.
//! Registers 0 to 3 hold output sums, 4 the weights, 6 and 7 scores. A narrow head (one step of columns) has output
//! sums in 0 and 1, its queries in 2 and keys in 3 and 5, so turns of both kinds may alternate. The scores of a wide
//! head use all registers, so a strip's output sums must be stored before. Consecutive loads go to different
//! registers, because a load waits for pending reads of the register that it overwrites.

use super::registers::Registers;
use super::weights::BEGIN;
use super::{KeyBlock, LINE, QUERIES, QueryStrip, SCORES, SIDE, STEP, STEPS, TILE, TiledBlock, WIDE};

/// Progress of multiplying a strip's weights by the values.
pub(super) struct ValueProgress {
    head: usize,
    strip: usize,
    /// First column tile of the group that is being summed, and the next step of keys.
    wide: usize,
    step: usize,
}

impl ValueProgress {
    pub(super) fn new(head: usize, strip: usize) -> ValueProgress {
        ValueProgress { head, strip, wide: 0, step: 0 }
    }
}

impl TiledBlock<'_> {
    /// Computes the scores of a strip with the key tiles `2 * pair` and, if it exists, `2 * pair + 1`. Pair 0 must
    /// come first, because it loads the queries.
    ///
    /// # Safety
    /// Queries and keys are packed.
    #[inline(always)]
    pub(super) unsafe fn score<R: Registers>(
        &self,
        tiles: &mut R,
        keys: KeyBlock,
        strip: QueryStrip,
        pair: usize,
    ) {
        const BACK: isize = -4;
        let both = pair * STEP + SIDE < keys.len;
        let to = self.scores(strip.strip).wrapping_add(pair * STEP).cast::<u8>();
        // SAFETY: the tiles lie in their buffers; a stride of 0 reads the single row of `BEGIN` 16 times.
        unsafe {
            if self.call.config.slopes.is_some() {
                // Row i of the bias tile starts i entries earlier: its distances to the keys are shifted by i.
                let bias = self.at(self.layout.bias + 4 * (pair * STEP + QUERIES - strip.strip * SIDE));
                tiles.load::<6>(bias, BACK);
                tiles.load::<7>(bias.add(LINE), BACK);
            } else if strip.bounded && self.ready() {
                tiles.load::<6>(BEGIN.0.as_ptr().cast(), 0);
                tiles.load::<7>(BEGIN.0.as_ptr().cast(), 0);
            } else {
                tiles.zero::<6>();
                tiles.zero::<7>();
            }
            if self.split.narrow() {
                self.score_narrow(tiles, strip, pair, both);
            } else {
                self.score_wide(tiles, strip, pair, both);
            }
            tiles.store::<6>(to, 4 * SCORES as isize);
            if both {
                tiles.store::<7>(to.add(LINE), 4 * SCORES as isize);
            }
        }
    }

    /// Computes scores of a narrow head, whose queries stay in register 2 for the whole strip.
    ///
    /// # Safety
    /// As `score`.
    #[inline(always)]
    unsafe fn score_narrow<R: Registers>(&self, tiles: &mut R, strip: QueryStrip, pair: usize, both: bool) {
        let first = strip.head * self.split.half;
        let a = self.at(self.layout.queries + strip.strip * TILE + 4 * first);
        let b = self.at(self.layout.keys + 2 * pair * TILE + first * LINE);
        // SAFETY: as the caller promises.
        unsafe {
            if pair == 0 {
                tiles.load::<2>(a, LINE as isize);
            }
            tiles.load::<3>(b, LINE as isize);
            tiles.multiply::<6, 2, 3>();
            if both {
                tiles.load::<5>(b.add(TILE), LINE as isize);
                tiles.multiply::<7, 2, 5>();
            }
        }
    }

    /// Computes scores of a wide head. With at most two steps, the queries stay in registers 4 and 5 for the whole
    /// strip.
    ///
    /// # Safety
    /// As `score`.
    #[inline(always)]
    unsafe fn score_wide<R: Registers>(&self, tiles: &mut R, strip: QueryStrip, pair: usize, both: bool) {
        let steps = self.split.steps();
        let a = self.at(self.layout.queries + strip.strip * steps * TILE);
        let b = self.at(self.layout.keys + 2 * pair * steps * TILE);
        let line = LINE as isize;
        for step in (0..steps).step_by(2) {
            let [a, first, second] = [a, b, b.wrapping_add(steps * TILE)].map(|x| x.wrapping_add(step * TILE));
            // SAFETY: as the caller promises.
            unsafe {
                if pair == 0 || steps > 2 {
                    tiles.load::<4>(a, line);
                }
                tiles.load::<0>(first, line);
                tiles.multiply::<6, 4, 0>();
                if both {
                    tiles.load::<1>(second, line);
                    tiles.multiply::<7, 4, 1>();
                }
                if step + 1 == steps {
                    break;
                }
                if pair == 0 || steps > 2 {
                    tiles.load::<5>(a.add(TILE), line);
                }
                tiles.load::<2>(first.add(TILE), line);
                tiles.multiply::<6, 5, 2>();
                if both {
                    tiles.load::<3>(second.add(TILE), line);
                    tiles.multiply::<7, 5, 3>();
                }
            }
        }
    }

    /// Number of turns needed to multiply a strip's weights by the values.
    #[inline(always)]
    pub(super) fn turns(&self, keys: KeyBlock) -> usize {
        self.split.tiles().div_ceil(WIDE) * pairs(keys)
    }

    /// Multiplies one step of weights by the values of at most `WIDE` column tiles.
    ///
    /// # Safety
    /// The strip's weights are stored, and `progress` has turns left.
    #[inline(always)]
    pub(super) unsafe fn multiply_values<R: Registers>(
        &self,
        tiles: &mut R,
        keys: KeyBlock,
        progress: &mut ValueProgress,
    ) {
        let count = (self.split.tiles() - progress.wide).min(WIDE);
        let weights = self.scores(progress.strip).cast::<u8>().wrapping_add(progress.step * LINE);
        let column = progress.head * self.split.tiles() + progress.wide;
        let values = self.at(self.layout.values + (column * STEPS + progress.step) * TILE);
        let row = (self.split.together * self.split.tiles() * LINE) as isize;
        let out =
            self.out(progress.strip * SIDE, progress.head).cast::<u8>().wrapping_add(progress.wide * LINE);
        let first = progress.step == 0;
        let last = progress.step + 1 == pairs(keys);
        // SAFETY: the tiles lie in their buffers.
        unsafe {
            if first && keys.start == 0 {
                if_tile::<R, 0>(tiles, count, |tiles| tiles.zero::<0>());
                if_tile::<R, 1>(tiles, count, |tiles| tiles.zero::<1>());
                if_tile::<R, 2>(tiles, count, |tiles| tiles.zero::<2>());
                if_tile::<R, 3>(tiles, count, |tiles| tiles.zero::<3>());
            } else if first {
                if_tile::<R, 0>(tiles, count, |tiles| tiles.load::<0>(out, row));
                if_tile::<R, 1>(tiles, count, |tiles| tiles.load::<1>(out.add(LINE), row));
                if_tile::<R, 2>(tiles, count, |tiles| tiles.load::<2>(out.add(2 * LINE), row));
                if_tile::<R, 3>(tiles, count, |tiles| tiles.load::<3>(out.add(3 * LINE), row));
            }
            tiles.load::<4>(weights, 4 * SCORES as isize);
            match (self.split.together, self.split.narrow()) {
                (2, _) => add_values::<R, 0, 1>(tiles, values),
                (_, true) => {
                    add_values::<R, 0, 5>(tiles, values);
                    if_tile::<R, 1>(tiles, count, |tiles| add_values::<R, 1, 3>(tiles, values));
                }
                (_, false) => {
                    add_values::<R, 0, 5>(tiles, values);
                    if_tile::<R, 1>(tiles, count, |tiles| add_values::<R, 1, 6>(tiles, values));
                    if_tile::<R, 2>(tiles, count, |tiles| add_values::<R, 2, 7>(tiles, values));
                    if_tile::<R, 3>(tiles, count, |tiles| add_values::<R, 3, 5>(tiles, values));
                }
            }
            if last {
                if_tile::<R, 0>(tiles, count, |tiles| tiles.store::<0>(out, row));
                if_tile::<R, 1>(tiles, count, |tiles| tiles.store::<1>(out.add(LINE), row));
                if_tile::<R, 2>(tiles, count, |tiles| tiles.store::<2>(out.add(2 * LINE), row));
                if_tile::<R, 3>(tiles, count, |tiles| tiles.store::<3>(out.add(3 * LINE), row));
            }
        }
        progress.step += 1;
        if last {
            progress.wide += WIDE;
            progress.step = 0;
        }
    }
}

/// Number of pairs of tiles of 16 keys; each pair is one step of the output sums.
#[inline(always)]
pub(super) fn pairs(keys: KeyBlock) -> usize {
    keys.len.div_ceil(STEP)
}

/// Calls `work` if column tile `N` exists, of `count`.
#[inline(always)]
pub(super) fn if_tile<R: Registers, const N: usize>(tiles: &mut R, count: usize, work: impl FnOnce(&mut R)) {
    if N < count {
        work(tiles);
    }
}

/// Adds the weights in register 4 times the values of column tile `C` to register `C`, loading the values into
/// register `V`.
///
/// # Safety
/// The values are packed.
#[inline(always)]
pub(super) unsafe fn add_values<R: Registers, const C: usize, const V: usize>(
    tiles: &mut R,
    values: *const u8,
) {
    // SAFETY: as the caller promises.
    unsafe { tiles.load::<V>(values.add(C * STEPS * TILE), LINE as isize) };
    tiles.multiply::<C, 4, V>();
}
