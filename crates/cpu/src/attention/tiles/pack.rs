//! Packing of bf16 queries, keys and values into tiles, with rotary rotation, and the inverse for the output.
//!
//! Invariant: the bits of an element depend on its row and position alone. q and k are rotated in f32 and rounded
//! once, to nearest; v is copied. Elements past the head or past the last key are zero.
//!
//! A pair of q or k is (x[j], x[half + j]), the two elements that a rotation mixes, so that no data moves between
//! SIMD lanes. Two tiles that hold 32 columns of v have them in the order that interleaving register halves produces,
//! four by four; `columns` undoes this order. Heads of 16 columns are packed in twos where possible, so that every
//! cache line of q, k and v is read once and all SIMD lanes are used.

use super::super::RotaryTables;
use super::super::pack::HeadRows;
use super::{LINE, SIDE, STEP, TILE};
use crate::element::Bf16;
use crate::simd::Simd;
use crate::simd::x86::Avx512;
use core::arch::x86_64::*;
use core::ops::Range;

/// How the columns of a head are split, and how many heads are packed together: two heads of 16 columns fill a cache
/// line.
#[derive(Clone, Copy)]
pub(super) struct HeadSplit {
    /// Columns of a head.
    pub(super) dim: usize,
    /// Columns of the first half; the second half has equally many or one less.
    pub(super) half: usize,
    /// Number of heads packed together, 1 or 2.
    pub(super) together: usize,
}

impl HeadSplit {
    /// The split for `heads` heads of `dim` columns, where `group` query heads share one key/value head.
    pub(super) const fn new(dim: usize, heads: usize, group: usize) -> HeadSplit {
        let two = dim == SIDE && heads.is_multiple_of(2) && group == 1;
        HeadSplit { dim, half: dim.div_ceil(2), together: if two { 2 } else { 1 } }
    }

    /// Columns of all heads packed together.
    pub(super) const fn columns(self) -> usize {
        self.dim * self.together
    }

    /// Steps of the product of q and k.
    pub(super) const fn steps(self) -> usize {
        self.half.div_ceil(SIDE)
    }

    /// Whether the product of q and k is a single step.
    pub(super) const fn narrow(self) -> bool {
        self.steps() == 1
    }

    /// Number of 16-column tiles of v and o for one head.
    pub(super) const fn tiles(self) -> usize {
        self.dim.div_ceil(SIDE)
    }

    /// Mask of the column pairs that belong to `head`, among the narrow heads that are packed into one tile.
    #[inline(always)]
    fn lanes(self, head: usize) -> __mmask16 {
        lanes(self.half) << (head * self.half)
    }
}

/// Permutation of the words of a row that puts the two elements of each pair of narrow heads side by side, and a mask
/// of the words that exist.
#[derive(Clone, Copy)]
pub(super) struct PairPermutation {
    words: [u16; STEP],
    there: __mmask32,
}

impl PairPermutation {
    /// The permutation for `split`; empty if the heads are wide.
    pub(super) fn new(split: HeadSplit) -> PairPermutation {
        let mut order = PairPermutation { words: [0; STEP], there: 0 };
        for at in 0..if split.narrow() { split.columns() } else { 0 } {
            let head = at / split.dim * split.dim;
            let at = at % split.dim;
            let word = head + if at < split.half { 2 * at } else { 2 * (at - split.half) + 1 };
            order.words[word] = (head + at) as u16;
            order.there |= 1 << word;
        }
        order
    }
}

/// Mask of the first `n` of 16 lanes.
#[inline(always)]
pub(super) fn lanes(n: usize) -> __mmask16 {
    ((1u32 << n.min(16)) - 1) as __mmask16
}

/// Mask of the first `n` of 32 words.
#[inline(always)]
fn words(n: usize) -> __mmask32 {
    ((1u64 << n.min(32)) - 1) as __mmask32
}

/// Rows of q or k that are read as pairs and rotated.
#[derive(Clone, Copy)]
pub(super) struct RotatedPairs<'a> {
    pub(super) split: HeadSplit,
    pub(super) head: HeadRows<'a, Bf16>,
    pub(super) rope: Option<RotaryTables<'a>>,
    /// Factor applied together with a rotation; ignored without one.
    pub(super) factor: Option<f32>,
    pub(super) order: &'a PairPermutation,
}

impl RotatedPairs<'_> {
    /// Loads step `step` of row i, rotated.
    ///
    /// # Safety
    /// Position i lies in the sequence and in the tables; the CPU has AVX-512.
    #[inline(always)]
    unsafe fn row(&self, i: usize, step: usize) -> __m512i {
        // SAFETY: as the caller promises.
        unsafe {
            let pairs = self.stored(i, step * SIDE);
            let Some(rope) = self.rope else { return pairs };
            let mut cos = self.table_row(rope.cos, i, step * SIDE);
            let mut sin = self.table_row(rope.sin, i, step * SIDE);
            if let Some(factor) = self.factor {
                cos = _mm512_mul_ps(cos, _mm512_set1_ps(factor));
                sin = _mm512_mul_ps(sin, _mm512_set1_ps(factor));
            }
            let upper = _mm512_set1_epi32(0xffff_0000_u32 as i32);
            let a = _mm512_castsi512_ps(_mm512_slli_epi32::<16>(pairs));
            let b = _mm512_castsi512_ps(_mm512_and_si512(pairs, upper));
            let low = _mm512_fmsub_ps(a, cos, _mm512_mul_ps(b, sin));
            let high = _mm512_fmadd_ps(b, cos, _mm512_mul_ps(a, sin));
            // Rounds to nearest: adds half a bf16 last place, then keeps the upper half of each lane.
            let half = _mm512_set1_epi32(0x8000);
            let low = _mm512_srli_epi32::<16>(_mm512_add_epi32(_mm512_castps_si512(low), half));
            let high = _mm512_add_epi32(_mm512_castps_si512(high), half);
            _mm512_ternarylogic_epi32::<0xca>(upper, high, low)
        }
    }

    /// Loads up to sixteen entries of position i's row of a table, from entry `at` on; for two heads together, the
    /// eight entries twice.
    ///
    /// # Safety
    /// As `row`.
    #[inline(always)]
    unsafe fn table_row(&self, table: &[f32], i: usize, at: usize) -> __m512 {
        let half = self.split.half;
        // SAFETY: position i's row of the table; with two heads a row has eight entries, otherwise a mask limits the
        // load.
        unsafe {
            let row = table.as_ptr().add(i * half + at);
            match self.split.together {
                2 => _mm512_broadcast_f32x8(_mm256_loadu_ps(row)),
                _ => _mm512_maskz_loadu_ps(lanes(half - at), row),
            }
        }
    }

    /// Loads up to sixteen pairs without rotation, from column `at` of either half on.
    ///
    /// # Safety
    /// As `row`.
    #[inline(always)]
    unsafe fn stored(&self, i: usize, at: usize) -> __m512i {
        let HeadSplit { dim, half, .. } = self.split;
        let x = self.head.row(i);
        // SAFETY: masks exclude the elements past either half.
        unsafe {
            if half <= SIDE {
                let row = _mm512_maskz_loadu_epi16(words(self.split.columns()), x.cast());
                let order = _mm512_loadu_si512(self.order.words.as_ptr().cast());
                return _mm512_maskz_permutexvar_epi16(self.order.there, order, row);
            }
            let first = stored_half(x, at, half);
            let second = stored_half(x, half + at, dim);
            _mm512_or_si512(first, _mm512_slli_epi32::<16>(second))
        }
    }
}

/// Loads up to sixteen elements of the row `x` from column `at` on, before column `end`, each into the low half of a lane.
///
/// # Safety
/// The columns must lie in the row; the CPU has AVX-512.
#[inline(always)]
unsafe fn stored_half(x: *const Bf16, at: usize, end: usize) -> __m512i {
    // SAFETY: as the caller promises; the mask excludes the columns from `end` on.
    unsafe {
        let bits = _mm256_maskz_loadu_epi16(lanes(end.saturating_sub(at)), x.wrapping_add(at).cast());
        _mm512_cvtepu16_epi32(bits)
    }
}

/// Packs the queries `positions`, at most 16, as tiles of A, one per step, with zeros in the remaining rows.
/// Returns, for each head, an upper bound of the largest sum of squares of a row.
///
/// # Safety
/// The queries must lie in the sequence and in the rotary tables; the tiles must be writable at `to`; the CPU must
/// have AVX-512 with BF16.
#[inline(always)]
pub(super) unsafe fn queries(
    s: Avx512,
    pairs: RotatedPairs<'_>,
    positions: Range<usize>,
    to: *mut u8,
) -> [f32; 2] {
    let RotatedPairs { split, head, .. } = pairs;
    let first = positions.start;
    let count = positions.len();
    // SAFETY: as the caller promises.
    unsafe {
        let mut squares = _mm512_setzero_ps();
        for step in 0..split.steps() {
            let mut largest = _mm512_setzero_ps();
            for r in 0..count {
                if step == 0 {
                    head.prefetch(s, first + r);
                }
                let row = pairs.row(first + r, step);
                _mm512_storeu_si512(to.add(step * TILE + r * LINE).cast(), row);
                // Lane by lane over the rows: the sum of these maxima is at least the sum of squares of every
                // row, and needs a single sum across lanes for the strip. A bound that is too high costs time,
                // not accuracy (`bounded`).
                largest = larger(largest, square(row, _mm512_setzero_ps()));
            }
            squares = _mm512_add_ps(squares, largest);
            for r in count..SIDE {
                _mm512_storeu_si512(to.add(step * TILE + r * LINE).cast(), _mm512_setzero_si512());
            }
        }
        match split.together {
            2 => {
                let [first, second] = [split.lanes(0), split.lanes(1)];
                [_mm512_mask_reduce_add_ps(first, squares), _mm512_mask_reduce_add_ps(second, squares)]
            }
            _ => [_mm512_reduce_add_ps(squares); 2],
        }
    }
}

/// Adds the squares of each lane's pair to `sum`.
#[inline(always)]
fn square(pairs: __m512i, sum: __m512) -> __m512 {
    // SAFETY: callers have AVX-512 with BF16.
    unsafe {
        let x = core::mem::transmute::<__m512i, __m512bh>(pairs);
        _mm512_dpbf16_ps(sum, x, x)
    }
}

/// Lane-wise maximum of sums of squares, compared by their bits: for non-negative floats this is the numeric order,
/// and NaN is greater than every number, so it is not lost.
#[inline(always)]
fn larger(a: __m512, b: __m512) -> __m512 {
    // SAFETY: callers have AVX-512.
    unsafe { _mm512_castsi512_ps(_mm512_max_epu32(_mm512_castps_si512(a), _mm512_castps_si512(b))) }
}

/// The largest lane of sums of squares, compared by their bits as in `larger`.
///
/// # Safety
/// The CPU has AVX-512.
#[inline(always)]
pub(super) unsafe fn largest(squares: __m512) -> f32 {
    // SAFETY: as the caller promises.
    f32::from_bits(unsafe { _mm512_reduce_max_epu32(_mm512_castps_si512(squares)) })
}

/// Packs the keys `positions`, at most 16, as tiles of B, one per step, with zeros in the remaining columns.
/// Updates `squares`, the lane-wise maxima of sums of squares of each head.
///
/// # Safety
/// As `queries`.
#[inline(always)]
pub(super) unsafe fn keys(
    s: Avx512,
    pairs: RotatedPairs<'_>,
    positions: Range<usize>,
    squares: &mut [__m512; 2],
    to: *mut u8,
) {
    let RotatedPairs { split, head, .. } = pairs;
    let first = positions.start;
    let count = positions.len();
    // SAFETY: as the caller promises.
    unsafe {
        let mut sums = [_mm512_setzero_ps(); 2];
        for step in 0..split.steps() {
            let mut tile = [_mm512_setzero_ps(); SIDE];
            for (r, row) in tile.iter_mut().enumerate().take(count) {
                if step == 0 {
                    head.prefetch(s, first + r);
                }
                *row = _mm512_castsi512_ps(pairs.row(first + r, step));
            }
            s.transpose(&mut tile);
            for (j, line) in tile.into_iter().enumerate() {
                let line = _mm512_castps_si512(line);
                _mm512_storeu_si512(to.add(step * TILE + j * LINE).cast(), line);
                // With two heads together each head has its own sum; with one head the two sums are independent
                // dependency chains, which halves the latency.
                let half = j / (SIDE / 2);
                sums[half] = square(line, sums[half]);
            }
        }
        if split.together == 1 {
            sums = [_mm512_add_ps(sums[0], sums[1]); 2];
        }
        *squares = [larger(squares[0], sums[0]), larger(squares[1], sums[1])];
    }
}

/// Whether all keys of one head are finite, in the `count` tiles that `keys` wrote.
///
/// # Safety
/// The tiles must have been written.
pub(super) unsafe fn finite(split: HeadSplit, head: usize, tiles: *const u8, count: usize) -> bool {
    let lines = if split.together == 2 { head * split.half..(head + 1) * split.half } else { 0..SIDE };
    (0..count * split.steps()).flat_map(|tile| lines.clone().map(move |j| tile * TILE + j * LINE)).all(|at| {
        // SAFETY: a line of the tiles.
        let line = unsafe { tiles.add(at).cast::<[u16; STEP]>().read_unaligned() };
        line.iter().all(|bits| bits & 0x7f80 != 0x7f80)
    })
}

/// The tiles of one step of values, one for each 16 columns.
#[derive(Clone, Copy)]
pub(super) struct ValueTiles {
    pub(super) first: *mut u8,
    /// Bytes from one tile of columns to the next.
    pub(super) stride: usize,
}

/// Packs the values `positions`, at most 32, with zeros past the last and past the head. Line j of a tile holds keys j and 16 + j, the order
/// in which `weights` stores weights.
///
/// # Safety
/// The values must lie in the sequence; the tiles must be writable at `to`.
#[inline(always)]
pub(super) unsafe fn values(
    s: Avx512,
    split: HeadSplit,
    head: HeadRows<'_, Bf16>,
    positions: Range<usize>,
    to: ValueTiles,
) {
    let first = positions.start;
    let count = positions.len();
    // SAFETY: guaranteed by the caller; masks exclude the columns past the head.
    unsafe {
        for j in 0..SIDE {
            if j < count {
                head.prefetch(s, first + j);
            }
            if j + SIDE < count {
                head.prefetch(s, first + j + SIDE);
            }
            for column in (0..split.columns()).step_by(STEP) {
                let at = to.first.add(column / SIDE * to.stride + j * LINE);
                let n = split.columns() - column;
                let mut a = value(head, first + j, column, if j < count { n } else { 0 });
                let mut b = value(head, first + j + SIDE, column, if j + SIDE < count { n } else { 0 });
                if n <= SIDE {
                    a = _mm512_cvtepu16_epi32(_mm512_castsi512_si256(a));
                    b = _mm512_cvtepu16_epi32(_mm512_castsi512_si256(b));
                    _mm512_storeu_si512(at.cast(), _mm512_or_si512(a, _mm512_slli_epi32::<16>(b)));
                    continue;
                }
                if split.together == 2 {
                    // Four columns of one head, four of the other, and so on: then the low halves of the 128-bit
                    // quarters, which `unpacklo` takes, are those of the first head, the high halves of the second.
                    let interleaved = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
                    a = _mm512_permutexvar_epi64(interleaved, a);
                    b = _mm512_permutexvar_epi64(interleaved, b);
                }
                _mm512_storeu_si512(at.cast(), _mm512_unpacklo_epi16(a, b));
                _mm512_storeu_si512(at.add(to.stride).cast(), _mm512_unpackhi_epi16(a, b));
            }
        }
    }
}

/// Loads the first `n`, at most 32, elements of a row from column `column` on, zeros after them.
///
/// # Safety
/// The elements must lie in the row.
#[inline(always)]
unsafe fn value(head: HeadRows<'_, Bf16>, row: usize, column: usize, n: usize) -> __m512i {
    // SAFETY: as the caller promises.
    unsafe { _mm512_maskz_loadu_epi16(words(n), head.row(row).wrapping_add(column).cast()) }
}

/// Writes the columns of one row of sums, in the order that the tiles of `values` leave them, times the factor of
/// their head and rounded to nearest. Adding half a last place keeps a NaN a NaN: it comes from bf16 or from the
/// tiles, so its low bits are zero and no carry can overflow.
///
/// # Safety
/// `sums` holds whole tiles of columns, `o` the columns of the head.
#[inline(always)]
pub(super) unsafe fn columns(split: HeadSplit, sums: *const f32, factors: [f32; 2], o: *mut Bf16) {
    // SAFETY: as the caller promises.
    unsafe {
        for column in (0..split.columns()).step_by(STEP) {
            let n = split.columns() - column;
            let to = o.add(column).cast();
            let low = rounded(sums.add(column), factors[0]);
            if n <= SIDE {
                _mm256_mask_storeu_epi16(to, lanes(n), _mm512_cvtepi32_epi16(low));
                continue;
            }
            let high = rounded(sums.add(column + SIDE), factors[split.together - 1]);
            let mut both = _mm512_packus_epi32(low, high);
            if split.together == 2 {
                both = _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7), both);
            }
            _mm512_mask_storeu_epi16(to, words(n), both);
        }
    }
}

/// Multiplies 16 sums by the factor and rounds them to bf16, whose bits are returned in the low half of each lane.
///
/// # Safety
/// The sums are readable; the CPU has AVX-512.
#[inline(always)]
unsafe fn rounded(sums: *const f32, factor: f32) -> __m512i {
    // SAFETY: as the caller promises.
    unsafe {
        let x = _mm512_mul_ps(_mm512_loadu_ps(sums), _mm512_set1_ps(factor));
        let carried = _mm512_add_epi32(_mm512_castps_si512(x), _mm512_set1_epi32(0x8000));
        _mm512_srli_epi32::<16>(carried)
    }
}
