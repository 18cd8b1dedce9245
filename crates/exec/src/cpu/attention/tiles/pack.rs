//! Rows of one head of bf16 in the order that the tiles take them.
//!
//! Invariant: an element's bits depend on its row and position alone. q and k are rotated in f32 and rounded once, to
//! nearest; v is copied. What lies past a head, or past the last key, is zero.
//!
//! A pair of q and k is (x[j], x[half + j]), the two that a rotation mixes, so no lane moves. A step of v pairs keys as
//! `weights` leaves them: line j of a tile holds keys `first_of(j)` and the one after it. Two tiles that hold 32 columns
//! take them as the halves of registers are interleaved, four and four: `columns` undoes it.

use super::super::super::element::Bf16;
use super::super::super::simd::Simd;
use super::super::super::simd_x86::Avx512;
use super::super::Rope;
use super::super::pack::Head;
use super::{LINE, SIDE, STEP, TILE};
use core::arch::x86_64::*;

/// How the columns of a head are cut.
#[derive(Clone, Copy)]
pub(super) struct Cut {
    /// Columns.
    pub(super) dim: usize,
    /// Columns of the first half; the second has as many or one less.
    half: usize,
}

impl Cut {
    pub(super) const fn new(dim: usize) -> Cut {
        Cut { dim, half: dim.div_ceil(2) }
    }

    /// Steps of a product of q and k.
    pub(super) const fn steps(self) -> usize {
        self.half.div_ceil(SIDE)
    }

    /// Tiles of 16 columns of v and o.
    pub(super) const fn tiles(self) -> usize {
        self.dim.div_ceil(SIDE)
    }
}

/// Where the pairs of a head of one step stand in it, and which of them are there.
#[derive(Clone, Copy)]
pub(super) struct Order {
    words: [u16; STEP],
    there: __mmask32,
}

impl Order {
    pub(super) fn new(cut: Cut) -> Order {
        let mut order = Order { words: [0; STEP], there: 0 };
        for at in 0..if cut.steps() == 1 { cut.dim } else { 0 } {
            let word = if at < cut.half { 2 * at } else { 2 * (at - cut.half) + 1 };
            order.words[word] = at as u16;
            order.there |= 1 << word;
        }
        order
    }
}

/// The first `n` of 16 lanes.
#[inline(always)]
pub(super) fn lanes(n: usize) -> __mmask16 {
    ((1u32 << n.min(16)) - 1) as __mmask16
}

/// The first `n` of 32 words.
#[inline(always)]
fn words(n: usize) -> __mmask32 {
    ((1u64 << n.min(32)) - 1) as __mmask32
}

/// Rows of q or k, to be read as pairs.
#[derive(Clone, Copy)]
pub(super) struct Pairs<'a> {
    pub(super) cut: Cut,
    pub(super) head: Head<'a, Bf16>,
    pub(super) rope: Option<Rope<'a>>,
    pub(super) order: &'a Order,
}

impl Pairs<'_> {
    /// Step `step` of row i, rotated.
    ///
    /// # Safety
    /// Position i lies in the sequence and in the tables; the CPU has AVX-512.
    #[inline(always)]
    unsafe fn row(&self, i: usize, step: usize) -> __m512i {
        let (half, at) = (self.cut.half, step * SIDE);
        // SAFETY: masks leave out what lies past either half; position i's row of the tables.
        unsafe {
            let pairs = self.stored(i, at);
            let Some(rope) = self.rope else { return pairs };
            let (n, table) = (lanes(half - at), i * half + at);
            let cos = _mm512_maskz_loadu_ps(n, rope.cos.as_ptr().add(table));
            let sin = _mm512_maskz_loadu_ps(n, rope.sin.as_ptr().add(table));
            let upper = _mm512_set1_epi32(0xffff_0000_u32 as i32);
            let a = _mm512_castsi512_ps(_mm512_slli_epi32::<16>(pairs));
            let b = _mm512_castsi512_ps(_mm512_and_si512(pairs, upper));
            let low = _mm512_fmsub_ps(a, cos, _mm512_mul_ps(b, sin));
            let high = _mm512_fmadd_ps(b, cos, _mm512_mul_ps(a, sin));
            // To nearest: half a last place, then the upper halves of lanes.
            let half = _mm512_set1_epi32(0x8000);
            let low = _mm512_srli_epi32::<16>(_mm512_add_epi32(_mm512_castps_si512(low), half));
            let high = _mm512_add_epi32(_mm512_castps_si512(high), half);
            _mm512_ternarylogic_epi32::<0xca>(upper, high, low)
        }
    }

    /// Sixteen pairs, or as many as there are, from column `at` of either half on, as they are stored.
    ///
    /// # Safety
    /// As `row`.
    #[inline(always)]
    unsafe fn stored(&self, i: usize, at: usize) -> __m512i {
        let (Cut { dim, half }, x) = (self.cut, self.head.row(i));
        // SAFETY: masks leave out what lies past either half.
        unsafe {
            if half <= SIDE {
                let row = _mm512_maskz_loadu_epi16(words(dim), x.cast());
                let order = _mm512_loadu_si512(self.order.words.as_ptr().cast());
                return _mm512_maskz_permutexvar_epi16(self.order.there, order, row);
            }
            let part = |at: usize, end: usize| {
                let bits = _mm256_maskz_loadu_epi16(lanes(end.saturating_sub(at)), x.wrapping_add(at).cast());
                _mm512_cvtepu16_epi32(bits)
            };
            _mm512_or_si512(part(at, half), _mm512_slli_epi32::<16>(part(half + at, dim)))
        }
    }
}

/// Queries `first..first + count`, at most 16, as tiles of A, one for each step, zeros in the rows after.
///
/// # Safety
/// They lie in the sequence and in the tables; `to` has room for the tiles; the CPU has AVX-512.
#[inline(always)]
pub(super) unsafe fn queries(s: Avx512, pairs: Pairs<'_>, (first, count): (usize, usize), to: *mut u8) {
    let Pairs { cut, head, .. } = pairs;
    // SAFETY: as the caller promises.
    unsafe {
        for r in 0..count {
            head.prefetch(s, first + r);
            for step in 0..cut.steps() {
                _mm512_storeu_si512(to.add(step * TILE + r * LINE).cast(), pairs.row(first + r, step));
            }
        }
        for step in 0..cut.steps() {
            to.add(step * TILE + count * LINE).write_bytes(0, (SIDE - count) * LINE);
        }
    }
}

/// The largest magnitudes of bf16 numbers seen, by their bits.
#[derive(Clone, Copy)]
pub(super) struct Largest(__m512i);

impl Largest {
    /// # Safety
    /// The CPU has AVX-512.
    #[inline(always)]
    pub(super) unsafe fn new() -> Self {
        // SAFETY: as the caller promises.
        Self(unsafe { _mm512_setzero_si512() })
    }

    #[inline(always)]
    fn see(&mut self, pairs: __m512i) {
        // SAFETY: who has one has AVX-512.
        self.0 = unsafe { _mm512_max_epu16(self.0, _mm512_and_si512(pairs, _mm512_set1_epi16(0x7fff))) };
    }

    /// Whether all were finite.
    #[inline(always)]
    pub(super) fn finite(self) -> bool {
        // SAFETY: who has one has AVX-512.
        unsafe { _mm512_cmpge_epu16_mask(self.0, _mm512_set1_epi16(0x7f80)) == 0 }
    }
}

/// Keys `first..first + count`, at most 16, as tiles of B, one for each step, zeros in the columns after.
///
/// # Safety
/// As `queries`.
#[inline(always)]
pub(super) unsafe fn keys(
    s: Avx512,
    pairs: Pairs<'_>,
    (first, count): (usize, usize),
    largest: &mut Largest,
    to: *mut u8,
) {
    let Pairs { cut, head, .. } = pairs;
    // SAFETY: as the caller promises.
    unsafe {
        for step in 0..cut.steps() {
            let mut square = [_mm512_setzero_ps(); SIDE];
            for (r, row) in square.iter_mut().enumerate().take(count) {
                if step == 0 {
                    head.prefetch(s, first + r);
                }
                let pairs = pairs.row(first + r, step);
                largest.see(pairs);
                *row = _mm512_castsi512_ps(pairs);
            }
            s.transpose(&mut square);
            for (j, line) in square.into_iter().enumerate() {
                _mm512_storeu_si512(to.add(step * TILE + j * LINE).cast(), _mm512_castps_si512(line));
            }
        }
    }
}

/// The first of the two keys, of a step's 32, that line `j` of a tile of v holds: `weights` packs two registers of 16
/// keys quarter by quarter.
pub(super) const fn first_of(j: usize) -> usize {
    j / 4 * 4 + j % 2 * 2 + j % 4 / 2 * 16
}

/// Values `first..first + count`, at most 32, as the tiles of one step, `apart` bytes from one tile of columns to the
/// next; zeros past `count` and past the head.
///
/// # Safety
/// They lie in the sequence; `to` has room for the tiles.
#[inline(always)]
pub(super) unsafe fn values(
    s: Avx512,
    cut: Cut,
    head: Head<'_, Bf16>,
    (first, count): (usize, usize),
    to: *mut u8,
    apart: usize,
) {
    // SAFETY: as the caller promises; masks leave out what lies past the head.
    unsafe {
        for j in 0..SIDE {
            let key = first_of(j);
            let row = |key: usize, column: usize, n: usize| {
                let there = if key < count { words(n) } else { 0 };
                _mm512_maskz_loadu_epi16(there, head.row(first + key).wrapping_add(column).cast())
            };
            if key < count {
                head.prefetch(s, first + key);
                head.prefetch(s, first + key + 1);
            }
            let mut column = 0;
            while column < cut.dim {
                let n = cut.dim - column;
                let at = to.add(column / SIDE * apart + j * LINE);
                if n > SIDE {
                    let (even, odd) = (row(key, column, n), row(key + 1, column, n));
                    _mm512_storeu_si512(at.cast(), _mm512_unpacklo_epi16(even, odd));
                    _mm512_storeu_si512(at.add(apart).cast(), _mm512_unpackhi_epi16(even, odd));
                } else {
                    let [even, odd] = [key, key + 1].map(|key| {
                        let bits = row(key, column, n);
                        _mm512_cvtepu16_epi32(_mm512_castsi512_si256(bits))
                    });
                    _mm512_storeu_si512(at.cast(), _mm512_or_si512(even, _mm512_slli_epi32::<16>(odd)));
                }
                column += STEP;
            }
        }
    }
}

/// Writes the columns of one row of sums, as the tiles of `values` leave them, times `factor`, rounded to nearest. A NaN
/// comes from bf16 or the tiles, hence ends in zeros, and half a last place leaves it one.
///
/// # Safety
/// `sums` holds whole tiles of columns, `o` the columns of the head.
#[inline(always)]
pub(super) unsafe fn columns(cut: Cut, sums: *const f32, factor: f32, o: *mut Bf16) {
    // SAFETY: as the caller promises.
    unsafe {
        let factor = _mm512_set1_ps(factor);
        let bits = |at: usize| {
            let x = _mm512_mul_ps(_mm512_loadu_ps(sums.add(at)), factor);
            let carried = _mm512_add_epi32(_mm512_castps_si512(x), _mm512_set1_epi32(0x8000));
            _mm512_srli_epi32::<16>(carried)
        };
        let mut column = 0;
        while column < cut.dim {
            let n = cut.dim - column;
            let to = o.add(column).cast();
            if n > SIDE {
                let both = _mm512_packus_epi32(bits(column), bits(column + SIDE));
                _mm512_mask_storeu_epi16(to, words(n), both);
            } else {
                _mm256_mask_storeu_epi16(to, lanes(n), _mm512_cvtepi32_epi16(bits(column)));
            }
            column += STEP;
        }
    }
}
