//! The bf16x3 split: f32 values as sums of three bf16 values, laid out for AMX tiles.
//!
//! Invariant: for a normal x of at least 2^-102, hi + mid + lo = x exactly. Below that the error is less than 2^-126,
//! because bf16 tile products take denormals as zero. An infinity or NaN gives at least one value that is not finite;
//! a finite x never does.
//!
//! hi is x rounded to 8 significant bits, but at most the largest finite bf16; mid is the remainder rounded to 8
//! bits; lo is the rest, which has at most 8 bits. So |mid| <= 2^-8 |x| and |lo| <= 2^-17 |x|. Source: G. Henry, P.
//! T. P. Tang, A. Heinecke, "Leveraging the bfloat16 artificial intelligence datatype for higher-precision
//! computations", ARITH 2019.
//!
//! Within a step of 32 k, a tile product's pairs are (k, k + 16) for both operands rather than neighbours: then
//! neither operand needs a lane permutation.

use crate::matmul::register_tile::PANEL;
use crate::simd::amx::{SIDE, STEP, STRIP, TILE};
use crate::simd::x86::Avx512;
use crate::simd::{LANES, Simd};
use crate::view::Rows;
use core::arch::x86_64::*;
use core::ops::Range;

/// Bytes of one k step of a strip of rows, or of a panel: hi, mid and lo of two tiles each.
pub(crate) const BYTES: usize = 6 * TILE;

/// Lines of one k step of a panel; a line holds the pairs of k of 16 columns, in hi, mid and lo.
pub(crate) const LINES: usize = 2 * SIDE;

/// A slice of K of a panel of packed weights.
pub(crate) struct PanelSlice {
    /// `depth` rows of `PANEL`.
    pub(crate) panel: *const f32,
    pub(crate) depth: usize,
    /// Steps of the slice.
    pub(crate) steps: Range<usize>,
}

impl PanelSlice {
    /// Loads sixteen columns of row `k`, zeros past `depth`, and prefetches the same position of the next panel.
    ///
    /// # Safety
    /// `panel` holds `depth` rows of `PANEL`.
    #[inline(always)]
    unsafe fn load(&self, s: Avx512, k: usize, column: usize) -> __m512 {
        let at = self.panel.wrapping_add(k * PANEL + column);
        s.prefetch_far(at.wrapping_add(self.depth * PANEL));
        // SAFETY: inside the panel, as the caller promises.
        if k < self.depth { unsafe { s.load(at) } } else { s.splat(0.0) }
    }
}

/// Splits some lines of a slice of a panel, step by step: (hi, mid, lo), two tiles of 16 columns each, zeros past
/// `depth`. Prefetches the same positions of the next panel.
///
/// # Safety
/// The slice is readable; `to` has space for its steps, and `lines` are lines of these steps.
#[inline(always)]
pub(crate) unsafe fn split_panel(s: Avx512, slice: &PanelSlice, lines: Range<usize>, to: *mut u8) {
    for line in lines {
        // Lines of a step in order: for each of 16 pairs (k, k + 16), the left and the right 16 columns.
        let step = line / LINES;
        let j = line / 2 % SIDE;
        let half = line % 2;
        let k = (slice.steps.start + step) * STEP + j;
        let column = half * SIDE;
        // SAFETY: guaranteed by the caller; row j of tile `half` of hi, mid and lo of the step.
        unsafe {
            let [hi, mid, lo] = parts(s, slice.load(s, k, column), slice.load(s, k + SIDE, column));
            store(to.wrapping_add(step * BYTES + half * TILE + j * 64), [hi, mid, lo]);
        }
    }
}

/// Splits the k steps `steps` of a strip of rows of x: (lo, mid, hi), two tiles of 16 rows each, zeros past `rows`
/// and past the columns of x.
///
/// # Safety
/// `rows`, at most `STRIP`, lie in x; `to` has space for `steps.len()` steps.
#[inline(always)]
pub(crate) unsafe fn split_strip(
    s: Avx512,
    x: Rows<'_>,
    rows: Range<usize>,
    steps: &Range<usize>,
    to: *mut u8,
) {
    for (i, step) in steps.clone().enumerate() {
        let k = step * STEP;
        for r in 0..STRIP {
            let from = x.row(rows.start + r).wrapping_add(k);
            let ahead = x.row(rows.start + r + STRIP).wrapping_add(k);
            s.prefetch(ahead);
            s.prefetch(ahead.wrapping_add(LANES));
            let left = if r < rows.len() { x.cols() - k } else { 0 };
            let to = to.wrapping_add(i * BYTES + r * 64);
            // SAFETY: `left` columns remain in this row of x; row r of hi, mid and lo of step i.
            unsafe {
                let u = s.load_n(from, left.min(LANES));
                let v = s.load_n(from.wrapping_add(LANES), left.saturating_sub(LANES).min(LANES));
                let [hi, mid, lo] = parts(s, u, v);
                store(to, [lo, mid, hi]);
            }
        }
    }
}

/// Stores three vectors, two tiles apart.
///
/// # Safety
/// 64 bytes are writable at `to` and at 2 and 4 tiles behind it.
#[inline(always)]
unsafe fn store(to: *mut u8, parts: [__m512i; 3]) {
    for (i, part) in parts.into_iter().enumerate() {
        // SAFETY: as the caller promises; the vectors prove AVX-512.
        unsafe { _mm512_storeu_si512(to.wrapping_add(i * 2 * TILE).cast(), part) };
    }
}

/// (hi, mid, lo) of u and v as pairs of bf16: lane i has the value of u[i] in its low half, of v[i] in its high half.
#[inline(always)]
fn parts(_: Avx512, u: __m512, v: __m512) -> [__m512i; 3] {
    // SAFETY: the first argument proves the instructions.
    unsafe {
        let hi_u = rounded(below_infinity(u));
        let hi_v = rounded(below_infinity(v));
        let u = minus_top(u, hi_u);
        let v = minus_top(v, hi_v);
        // A NaN's mid may become zero here. Then lo = u - 0 is still NaN.
        let mid_u = rounded(u);
        let mid_v = rounded(v);
        let lo_u = minus_top(u, mid_u);
        let lo_v = minus_top(v, mid_v);
        [tops(hi_u, hi_v), tops(mid_u, mid_v), tops(_mm512_castps_si512(lo_u), _mm512_castps_si512(lo_v))]
    }
}

/// x limited to the magnitude of the largest finite bf16. NaN becomes that value as well.
///
/// # Safety
/// The CPU has AVX-512 DQ.
#[inline(always)]
unsafe fn below_infinity(x: __m512) -> __m512 {
    /// VRANGEPS: the smaller magnitude, with the sign of the first operand.
    const SMALLER: i32 = 0b0010;
    // SAFETY: as the caller promises.
    unsafe { _mm512_range_ps::<SMALLER>(x, _mm512_castsi512_ps(_mm512_set1_epi32(0x7f7f_0000))) }
}

/// Integers whose upper 16 bits are x rounded to bf16, halves away from zero: the addition carries into the upper
/// half.
///
/// # Safety
/// The CPU has AVX-512.
#[inline(always)]
unsafe fn rounded(x: __m512) -> __m512i {
    // SAFETY: as the caller promises.
    unsafe { _mm512_add_epi32(_mm512_castps_si512(x), _mm512_set1_epi32(0x8000)) }
}

/// x minus the bf16 value in the upper half of y; exact for the values used here.
///
/// # Safety
/// The CPU has AVX-512.
#[inline(always)]
unsafe fn minus_top(x: __m512, y: __m512i) -> __m512 {
    // SAFETY: as the caller promises.
    unsafe {
        let top = _mm512_and_si512(y, _mm512_set1_epi32(0xffff_0000_u32 as i32));
        _mm512_sub_ps(x, _mm512_castsi512_ps(top))
    }
}

/// The upper halves of two vectors combined per lane: of u in the low half, of v in the high half.
///
/// # Safety
/// The CPU has AVX-512 BW.
#[inline(always)]
unsafe fn tops(u: __m512i, v: __m512i) -> __m512i {
    // SAFETY: as the caller promises.
    unsafe { _mm512_mask_mov_epi16(v, 0x5555_5555, _mm512_srli_epi32::<16>(u)) }
}
