//! Scores of a strip of 16 queries to the weights of a softmax, in bf16, as rows of tiles of A.
//!
//! Invariant: what becomes of a row depends on that row alone; keys that are not there weigh exactly zero.
//!
//! A weight is 2^(s log2(e) - m), s a score, m the maximum. With y = s log2(e) - m + 127 in fixed point of 7 bits, y is
//! the bits of a bf16 number, but for its fraction: x where 2^x - 1 should be, x in [0, 1). How far they are
//! apart, at most 11 last places, is looked up (the idea of exponentials by the exponent's field: N. N. Schraudolph,
//! Neural Computation 11, 1999): 32 weights take a dozen instructions, an exp in f32 forty. A weight is off by up to
//! 0.64 %, 0.22 % in the mean square, where rounding the exact one to bf16 is off by 0.39 % and 0.17 %. They are divided
//! by their own sum.
//!
//! Maxima are rounded up to whole powers of two: what was summed below an earlier one is scaled exactly.

use super::super::super::simd::Simd;
use super::super::super::simd_x86::Avx512;
use super::pack::lanes;
use super::{LINE, SCORES, SIDE, STEP};
use core::arch::x86_64::*;

/// Last places of bf16 in a power of two.
const UNITS: f32 = 128.0;
/// The exponent of 1.
const BIAS: f32 = 127.0;

#[repr(align(64))]
struct Bend([u8; 128]);

/// By x: how many last places 2^(x / 128) lies below the straight line from 1 to 2.
#[rustfmt::skip]
static BEND: Bend = Bend([
    0, 0, 1, 1, 1, 1, 2, 2, 2, 3, 3, 3, 3, 4, 4, 4, 4, 5, 5, 5, 5, 6, 6, 6, 6, 6, 7, 7, 7, 7, 7, 8,
    8, 8, 8, 8, 8, 9, 9, 9, 9, 9, 9, 9, 10, 10, 10, 10, 10, 10, 10, 10, 10, 10, 11, 11, 11, 11, 11, 11, 11, 11, 11, 11,
    11, 11, 11, 11, 11, 11, 11, 11, 11, 11, 11, 11, 11, 11, 11, 11, 11, 11, 10, 10, 10, 10, 10, 10, 10, 10, 10, 9, 9, 9, 9, 9,
    9, 9, 8, 8, 8, 8, 8, 7, 7, 7, 7, 7, 6, 6, 6, 6, 5, 5, 5, 4, 4, 4, 3, 3, 3, 3, 2, 2, 1, 1, 1, 0,
]);

/// For each row of a strip over the keys so far: the maximum, in powers of two, and the sum of the weights below it.
#[derive(Clone, Copy)]
pub(super) struct Running {
    pub(super) top: __m512,
    pub(super) sum: __m512,
}

impl Running {
    /// No keys.
    ///
    /// # Safety
    /// The CPU has AVX-512.
    #[inline(always)]
    pub(super) unsafe fn new() -> Running {
        // SAFETY: as the caller promises.
        unsafe { Running { top: _mm512_set1_ps(f32::NEG_INFINITY), sum: _mm512_setzero_ps() } }
    }

    /// Takes the maxima of `keys` scores of each row, times `scale`; returns what was summed before has to be multiplied by.
    ///
    /// # Safety
    /// `scores` holds 16 rows; the CPU has AVX-512.
    #[inline(always)]
    pub(super) unsafe fn raise(&mut self, s: Avx512, scores: *const f32, keys: usize, scale: f32) -> __m512 {
        // SAFETY: as the caller promises.
        unsafe {
            let mut tops = [_mm512_setzero_ps(); SIDE];
            let (rest, low) = (lanes(keys % SIDE), _mm512_set1_ps(f32::NEG_INFINITY));
            // Four rows at once: one row's chain of maxima would be waited for.
            for r in (0..SIDE).step_by(4) {
                let mut four = [low; 4];
                let row = scores.add(r * SCORES);
                for j in (0..keys / SIDE * SIDE).step_by(SIDE) {
                    for (i, top) in four.iter_mut().enumerate() {
                        *top = _mm512_max_ps(*top, _mm512_loadu_ps(row.add(i * SCORES + j)));
                    }
                }
                for (i, top) in four.iter_mut().enumerate() {
                    let last = row.add(i * SCORES + keys / SIDE * SIDE);
                    *top = _mm512_mask_max_ps(*top, rest, *top, _mm512_maskz_loadu_ps(rest, last));
                }
                tops[r..r + 4].copy_from_slice(&four);
            }
            let top = _mm512_mul_ps(across(s, tops, |a, b| _mm512_max_ps(a, b)), _mm512_set1_ps(scale));
            const UP: i32 = _MM_FROUND_TO_POS_INF | _MM_FROUND_NO_EXC;
            let top = _mm512_max_ps(self.top, _mm512_roundscale_ps::<UP>(top));
            let decay = _mm512_scalef_ps(_mm512_set1_ps(1.0), _mm512_sub_ps(self.top, top));
            self.top = top;
            decay
        }
    }

    /// What is taken off the scores of each row.
    ///
    /// # Safety
    /// The CPU has AVX-512.
    #[inline(always)]
    pub(super) unsafe fn offsets(&self) -> __m512 {
        // SAFETY: as the caller promises.
        unsafe { _mm512_mul_ps(_mm512_sub_ps(self.top, _mm512_set1_ps(BIAS)), _mm512_set1_ps(UNITS)) }
    }

    /// Adds the sums of each row. A maximum that is not finite makes a sum that is NaN.
    ///
    /// # Safety
    /// The CPU has AVX-512.
    #[inline(always)]
    pub(super) unsafe fn add(&mut self, s: Avx512, decay: __m512, sums: [__m512; SIDE]) {
        // SAFETY: as the caller promises.
        unsafe {
            let sum = across(s, sums, |a, b| _mm512_add_ps(a, b));
            let sum = _mm512_fmadd_ps(self.top, _mm512_setzero_ps(), sum);
            self.sum = _mm512_fmadd_ps(self.sum, decay, sum);
        }
    }
}

/// Lane r: what `of` makes of the lanes of row r, in a tree.
#[inline(always)]
fn across(s: Avx512, mut rows: [__m512; SIDE], of: impl Fn(__m512, __m512) -> __m512) -> __m512 {
    s.transpose(&mut rows);
    for apart in [8, 4, 2, 1] {
        for i in 0..apart {
            rows[i] = of(rows[i], rows[i + apart]);
        }
    }
    rows[0]
}

/// The bits of bf16 numbers for y as the file's head has it, of twice 16 keys: quarter by quarter first ones, then
/// second ones. Zero where y is below the least exponent.
#[inline(always)]
fn bits(first: __m512i, second: __m512i, bend: [__m512i; 2]) -> __m512i {
    const LOW_BYTES: __mmask64 = 0x5555_5555_5555_5555;
    // SAFETY: callers have AVX-512 with VBMI.
    unsafe {
        let y = _mm512_max_epi16(_mm512_packs_epi32(first, second), _mm512_setzero_si512());
        _mm512_sub_epi16(y, _mm512_maskz_permutex2var_epi8(LOW_BYTES, bend[0], y, bend[1]))
    }
}

/// Turns `keys` scores of a row, times `scale`, less `offset`, into weights, over the first half of where they stand. Returns the sums
/// of the weights in lanes.
///
/// # Safety
/// `row` holds the scores, rounded up to steps; the CPU has AVX-512 with VBMI and BF16.
#[inline(always)]
pub(super) unsafe fn soften(row: *mut f32, keys: usize, scale: f32, offset: f32) -> __m512 {
    // SAFETY: as the caller promises; a step's 64 bytes lie before the scores that are still to be read.
    unsafe {
        let bend = [0, 64].map(|at| _mm512_load_si512(BEND.0.as_ptr().add(at).cast()));
        let (scale, offset) = (_mm512_set1_ps(scale * UNITS), _mm512_set1_ps(offset));
        let ones = _mm512_set1_epi16(0x3f80);
        let mut sums = _mm512_setzero_ps();
        let y = |at: usize| _mm512_cvtps_epi32(_mm512_fmsub_ps(_mm512_loadu_ps(row.add(at)), scale, offset));
        let mut put = |step: usize, weights: __m512i| {
            _mm512_storeu_si512(row.cast::<u8>().add(step * LINE).cast(), weights);
            let [a, b] = [weights, ones].map(|x| core::mem::transmute::<__m512i, __m512bh>(x));
            sums = _mm512_dpbf16_ps(sums, a, b);
        };
        let steps = keys / STEP;
        for step in 0..steps {
            put(step, bits(y(step * STEP), y(step * STEP + SIDE), bend));
        }
        if !keys.is_multiple_of(STEP) {
            let at = steps * STEP;
            let some = |n: usize, at: usize| _mm512_maskz_mov_epi32(lanes(n), y(at));
            let [first, second] = [some(keys - at, at), some((keys - at).saturating_sub(SIDE), at + SIDE)];
            put(steps, bits(first, second, bend));
        }
        sums
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_what_is_rounded() {
        for (x, &bend) in BEND.0.iter().enumerate() {
            let exact = 128.0 * ((x as f64 / 128.0).exp2() - 1.0);
            assert_eq!(x as f64 - f64::from(bend), exact.round(), "{x}");
        }
    }
}
