//! Tile products of attention, split into turns that are interleaved with the softmax of another strip.
//!
//! Invariant: a strip's scores and output sums add their steps in ascending order, however turns are interleaved.
//! Registers 0 to 3 hold output sums, 4 the weights, 6 and 7 scores. A narrow head (one step of columns) has output
//! sums in 0 and 1, its queries in 2 and keys in 3 and 5, so turns of both kinds may alternate. The scores of a wide
//! head use all registers, so a strip's output sums must be stored before. Consecutive loads go to different
//! registers, because a load waits for pending reads of the register that it overwrites.

use super::registers::Registers;
use super::weights::BEGIN;
use super::{Keys, LINE, QUERIES, SCORES, SIDE, STEP, STEPS, Strip, TILE, TiledBlock, WIDE};

/// Progress of multiplying a strip's weights by the values.
pub(super) struct Gather {
    head: usize,
    strip: usize,
    /// First column tile of the group that is being summed, and the next step of keys.
    wide: usize,
    step: usize,
}

impl Gather {
    pub(super) fn new(head: usize, strip: usize) -> Gather {
        Gather { head, strip, wide: 0, step: 0 }
    }
}

impl TiledBlock<'_> {
    /// Computes the scores of a strip with the key tiles `2 * pair` and, if it exists, `2 * pair + 1`. Pair 0 must
    /// come first, because it loads the queries.
    ///
    /// # Safety
    /// Queries and keys are packed.
    #[inline(always)]
    pub(super) unsafe fn score<R: Registers>(&self, tiles: &mut R, keys: Keys, strip: Strip, pair: usize) {
        const BACK: isize = -4;
        let both = pair * STEP + SIDE < keys.len;
        let to = self.scores(strip.strip).wrapping_add(pair * STEP).cast::<u8>();
        // SAFETY: the tiles lie in their buffers; a stride of 0 reads the single row of `BEGIN` 16 times.
        unsafe {
            if self.job.config.slopes.is_some() {
                // Row i of the bias tile starts i entries earlier: its distances to the keys are shifted by i.
                let bias = self.at(self.parts.bias + 4 * (pair * STEP + QUERIES - strip.strip * SIDE));
                tiles.load::<6>(bias, BACK);
                tiles.load::<7>(bias.add(LINE), BACK);
            } else if strip.bounded && self.ready() {
                tiles.load::<6>(BEGIN.0.as_ptr().cast(), 0);
                tiles.load::<7>(BEGIN.0.as_ptr().cast(), 0);
            } else {
                tiles.zero::<6>();
                tiles.zero::<7>();
            }
            match self.cut.narrow() {
                true => self.score_narrow(tiles, strip, pair, both),
                false => self.score_wide(tiles, strip, pair, both),
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
    unsafe fn score_narrow<R: Registers>(&self, tiles: &mut R, strip: Strip, pair: usize, both: bool) {
        let first = strip.head * self.cut.half;
        let a = self.at(self.parts.queries + strip.strip * TILE + 4 * first);
        let b = self.at(self.parts.keys + 2 * pair * TILE + first * LINE);
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
    unsafe fn score_wide<R: Registers>(&self, tiles: &mut R, strip: Strip, pair: usize, both: bool) {
        let steps = self.cut.steps();
        let a = self.at(self.parts.queries + strip.strip * steps * TILE);
        let b = self.at(self.parts.keys + 2 * pair * steps * TILE);
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
    pub(super) fn turns(&self, keys: Keys) -> usize {
        self.cut.tiles().div_ceil(WIDE) * pairs(keys)
    }

    /// Multiplies one step of weights by the values of at most `WIDE` column tiles.
    ///
    /// # Safety
    /// The strip's weights are stored, and `at` has turns left.
    #[inline(always)]
    pub(super) unsafe fn gather<R: Registers>(&self, tiles: &mut R, keys: Keys, at: &mut Gather) {
        let count = (self.cut.tiles() - at.wide).min(WIDE);
        let weights = self.scores(at.strip).cast::<u8>().wrapping_add(at.step * LINE);
        let column = at.head * self.cut.tiles() + at.wide;
        let values = self.at(self.parts.values + (column * STEPS + at.step) * TILE);
        let row = (self.cut.together * self.cut.tiles() * LINE) as isize;
        let out = self.out(at.strip * SIDE, at.head).cast::<u8>().wrapping_add(at.wide * LINE);
        let first = at.step == 0;
        let last = at.step + 1 == pairs(keys);
        // SAFETY: the tiles lie in their buffers.
        unsafe {
            if first && keys.start == 0 {
                each::<R, 0>(tiles, count, |tiles| tiles.zero::<0>());
                each::<R, 1>(tiles, count, |tiles| tiles.zero::<1>());
                each::<R, 2>(tiles, count, |tiles| tiles.zero::<2>());
                each::<R, 3>(tiles, count, |tiles| tiles.zero::<3>());
            } else if first {
                each::<R, 0>(tiles, count, |tiles| tiles.load::<0>(out, row));
                each::<R, 1>(tiles, count, |tiles| tiles.load::<1>(out.add(LINE), row));
                each::<R, 2>(tiles, count, |tiles| tiles.load::<2>(out.add(2 * LINE), row));
                each::<R, 3>(tiles, count, |tiles| tiles.load::<3>(out.add(3 * LINE), row));
            }
            tiles.load::<4>(weights, 4 * SCORES as isize);
            match (self.cut.together, self.cut.narrow()) {
                (2, _) => add::<R, 0, 1>(tiles, values),
                (_, true) => {
                    add::<R, 0, 5>(tiles, values);
                    each::<R, 1>(tiles, count, |tiles| add::<R, 1, 3>(tiles, values));
                }
                (_, false) => {
                    add::<R, 0, 5>(tiles, values);
                    each::<R, 1>(tiles, count, |tiles| add::<R, 1, 6>(tiles, values));
                    each::<R, 2>(tiles, count, |tiles| add::<R, 2, 7>(tiles, values));
                    each::<R, 3>(tiles, count, |tiles| add::<R, 3, 5>(tiles, values));
                }
            }
            if last {
                each::<R, 0>(tiles, count, |tiles| tiles.store::<0>(out, row));
                each::<R, 1>(tiles, count, |tiles| tiles.store::<1>(out.add(LINE), row));
                each::<R, 2>(tiles, count, |tiles| tiles.store::<2>(out.add(2 * LINE), row));
                each::<R, 3>(tiles, count, |tiles| tiles.store::<3>(out.add(3 * LINE), row));
            }
        }
        (at.wide, at.step) = if last { (at.wide + WIDE, 0) } else { (at.wide, at.step + 1) };
    }
}

/// Number of pairs of tiles of 16 keys; each pair is one step of the output sums.
#[inline(always)]
pub(super) fn pairs(keys: Keys) -> usize {
    keys.len.div_ceil(STEP)
}

/// Calls `of` if `count` is greater than `N`.
#[inline(always)]
pub(super) fn each<R: Registers, const N: usize>(tiles: &mut R, count: usize, of: impl FnOnce(&mut R)) {
    if N < count {
        of(tiles);
    }
}

/// Adds the weights in register 4 times the values of column tile `C` to register `C`, loading the values into
/// register `V`.
///
/// # Safety
/// The values are packed.
#[inline(always)]
pub(super) unsafe fn add<R: Registers, const C: usize, const V: usize>(tiles: &mut R, values: *const u8) {
    // SAFETY: as the caller promises.
    unsafe { tiles.load::<V>(values.add(C * STEPS * TILE), LINE as isize) };
    tiles.multiply::<C, 4, V>();
}
