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

/// The upper halves of lanes, rounded to nearest: (first, second) in each lane.
#[inline(always)]
fn paired(first: __m512, second: __m512) -> __m512i {
    // SAFETY: callers have AVX-512.
    unsafe {
        let half = _mm512_set1_epi32(0x8000);
        let first = _mm512_add_epi32(_mm512_castps_si512(first), half);
        let second = _mm512_add_epi32(_mm512_castps_si512(second), half);
        let upper = _mm512_set1_epi32(0xffff_0000_u32 as i32);
        // upper ? second : first >> 16
        _mm512_ternarylogic_epi32::<0xca>(upper, second, _mm512_srli_epi32::<16>(first))
    }
}

/// Sixteen columns or the first `n` of them, zeros after.
#[inline(always)]
unsafe fn widen(x: *const Bf16, n: usize) -> __m512 {
    // SAFETY: callers have AVX-512, and `n` readable elements.
    unsafe {
        let bits = _mm256_maskz_loadu_epi16(lanes(n), x.cast());
        _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(bits)))
    }
}

/// Step `step` of scale x[i], rotated.
///
/// # Safety
/// Position i lies in the sequence and in the tables; the CPU has AVX-512.
#[inline(always)]
unsafe fn step_of(
    cut: Cut,
    head: Head<'_, Bf16>,
    rope: Option<Rope<'_>>,
    i: usize,
    scale: Option<__m512>,
    step: usize,
) -> __m512i {
    let (x, at) = (head.row(i), step * SIDE);
    // SAFETY: `at + n` stays in each half of the row and in position i's row of the tables.
    unsafe {
        let n = cut.half - at;
        let mut a = widen(x.add(at), n);
        let mut b = widen(x.add(cut.half + at), cut.dim.saturating_sub(cut.half + at));
        if let Some(scale) = scale {
            (a, b) = (_mm512_mul_ps(a, scale), _mm512_mul_ps(b, scale));
        }
        if let Some(rope) = rope {
            let table = i * cut.half + at;
            let cos = _mm512_maskz_loadu_ps(lanes(n), rope.cos.as_ptr().add(table));
            let sin = _mm512_maskz_loadu_ps(lanes(n), rope.sin.as_ptr().add(table));
            (a, b) = (
                _mm512_fmsub_ps(a, cos, _mm512_mul_ps(b, sin)),
                _mm512_fmadd_ps(b, cos, _mm512_mul_ps(a, sin)),
            );
        }
        paired(a, b)
    }
}

/// Adds NaN to lanes of `flags` where an element is not finite, zero elsewhere.
#[inline(always)]
fn flag(flags: __m512, pairs: __m512i) -> __m512 {
    // SAFETY: callers have AVX512-BF16; both are 16 pairs of bf16 by their bits.
    unsafe { _mm512_dpbf16_ps(flags, core::mem::transmute::<__m512i, __m512bh>(pairs), core::mem::zeroed()) }
}

/// NaN if a lane is, else zero.
#[inline(always)]
pub(super) fn nan_if_any(flags: __m512) -> f32 {
    // SAFETY: callers have AVX-512.
    if unsafe { _mm512_cmpunord_ps_mask(flags, flags) } > 0 { f32::NAN } else { 0.0 }
}

/// Queries `first..first + count`, at most 16, as tiles of A, one for each step, zeros in the rows after; and for each
/// whether it is finite: zero, else NaN.
///
/// # Safety
/// They lie in the sequence and in the tables; `to` has room for the tiles, `finite` for 16 f32.
#[inline(always)]
pub(super) unsafe fn queries(
    s: Avx512,
    cut: Cut,
    head: Head<'_, Bf16>,
    rope: Option<Rope<'_>>,
    (first, count): (usize, usize),
    scale: f32,
    to: *mut u8,
    finite: *mut f32,
) {
    // SAFETY: as the caller promises.
    unsafe {
        let scale = _mm512_set1_ps(scale);
        for r in 0..SIDE {
            let mut flags = _mm512_setzero_ps();
            if r < count {
                head.prefetch(s, first + r);
            }
            for step in 0..cut.steps() {
                let mut pairs = _mm512_setzero_si512();
                if r < count {
                    pairs = step_of(cut, head, rope, first + r, Some(scale), step);
                }
                flags = flag(flags, pairs);
                _mm512_storeu_si512(to.add(step * TILE + r * LINE).cast(), pairs);
            }
            *finite.add(r) = nan_if_any(flags);
        }
    }
}

/// Keys `first..first + count`, at most 16, as tiles of B, one for each step, zeros in the columns after. Returns
/// `flags` with NaN where a key is not finite.
///
/// # Safety
/// As `queries`.
#[inline(always)]
pub(super) unsafe fn keys(
    s: Avx512,
    cut: Cut,
    head: Head<'_, Bf16>,
    rope: Option<Rope<'_>>,
    (first, count): (usize, usize),
    mut flags: __m512,
    to: *mut u8,
) -> __m512 {
    // SAFETY: as the caller promises.
    unsafe {
        for step in 0..cut.steps() {
            let mut square = [_mm512_setzero_ps(); SIDE];
            for (r, row) in square.iter_mut().enumerate().take(count) {
                if step == 0 {
                    head.prefetch(s, first + r);
                }
                let pairs = step_of(cut, head, rope, first + r, None, step);
                flags = flag(flags, pairs);
                *row = _mm512_castsi512_ps(pairs);
            }
            s.transpose(&mut square);
            for (j, line) in square.into_iter().enumerate() {
                _mm512_storeu_si512(to.add(step * TILE + j * LINE).cast(), _mm512_castps_si512(line));
            }
        }
        flags
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

/// Writes the columns of one row of sums, as the tiles of `values` leave them, times `factor`, rounded.
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
            // A NaN whose mantissa is all ones would carry into the sign.
            let nan = _mm512_cmpunord_ps_mask(x, x);
            _mm512_mask_mov_epi32(_mm512_srli_epi32::<16>(carried), nan, _mm512_set1_epi32(0x7fc0))
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
