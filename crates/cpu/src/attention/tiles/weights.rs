//! Softmax weights in bf16 from the scores of a strip of 16 queries, stored as rows of AMX operand A.
//!
//! Invariant: a row's weights depend only on that row, or on its strip and sequence; keys beyond the sequence's end
//! have weight exactly zero.
//!
//! The weight of a score s is 2^(s log2(e) - m). With y = s log2(e) - m + 127 in fixed point with 7 fractional bits,
//! y is the bit pattern of a bf16 number that approximates it: the fraction x in [0, 1) stands where 2^x - 1 should
//! be. The difference, at most 11 units in the last place, comes from a table (the idea of computing exponentials
//! through the exponent field: N. N. Schraudolph, Neural Computation 11, 1999). A weight's relative error is at most
//! 0.72 %, 0.23 % root mean square; rounding the exact weight to bf16 would give 0.39 % and 0.17 %. The weights are
//! normalized by their own sum, not by the sum of exact weights.
//!
//! An f32 between `MAGIC` and 2^24 is a whole number, so adding to `MAGIC` rounds the sum to a whole number, which is
//! in its low bits. Scores that the tiles accumulate onto `BEGIN` are therefore already `MAGIC + y`.
//!
//! m keeps the weights in range. If the norms of queries and keys bound the scores by +-`LIMIT`
//! (Cauchy-Schwarz), m is `SHIFT` for all rows: every weight is a normal number between 2^-104 and 2^24,
//! although its product with a value below 2^-22, or of 2^104 and more, may leave the range of normal numbers.
//! (ALiBi's bias, which is not positive, is not part of this bound: it may make weights smaller, down to zero.)
//! Otherwise m is the row's maximum so far, rounded up to a whole number, so that rescaling earlier sums is
//! multiplication by a power of two, which is exact.

use super::pack::lanes;
use super::{LINE, SCORES, SIDE, STEP};
use core::arch::asm;
use core::arch::x86_64::*;

/// Units in the last place of bf16 per power of two (2^7).
pub(super) const UNITS: f32 = 128.0;
/// Exponent bias of f32 and bf16.
const BIAS: f32 = 127.0;
/// Bound of |s log2(e)| up to which no maxima are computed.
const LIMIT: f32 = 64.0;
/// Offset subtracted from bounded scores.
const SHIFT: f32 = 40.0;
/// 1.5 * 2^23. From here to 2^24 an f32 has no fraction. The low 16 bits of this constant are zero, so the low 16 bits
/// of `MAGIC + y` are y.
const MAGIC: f32 = 12_582_912.0;
/// Magnitude of m from which on scores are rounded before m is subtracted. Below it, `MAGIC` minus m in units in
/// the last place is a multiple of 128 below 2^31, hence exact in f32; beyond it, the fused operation would add
/// a constant that is itself rounded, and for large m by more than the range of weights.
const FAR: f32 = 8_388_608.0;
/// Initial value of each row of accumulators for bounded scores: `MAGIC` plus the exponent bias minus the offset.
#[repr(align(64))]
pub(super) struct AccumulatorRow(pub(super) [f32; SIDE]);
pub(super) static BEGIN: AccumulatorRow = AccumulatorRow([MAGIC + (BIAS - SHIFT) * UNITS; SIDE]);

#[repr(align(64))]
struct CorrectionTable([u8; 64]);

/// Correction table, indexed by x / 2 for the fraction x in units in the last place: by how many units
/// 2^(x / 128) lies below the chord from 1 to 2, at the middle between the two x that share an entry.
#[rustfmt::skip]
static CORRECTION: CorrectionTable = CorrectionTable([
    0, 1, 1, 2, 2, 3, 4, 4, 5, 5, 5, 6, 6, 7, 7, 8, 8, 8, 9, 9, 9, 9, 10, 10, 10, 10, 10, 11, 11, 11, 11, 11,
    11, 11, 11, 11, 11, 11, 11, 11, 11, 10, 10, 10, 10, 10, 9, 9, 9, 8, 8, 8, 7, 7, 6, 6, 5, 5, 4, 3, 3, 2, 1, 1,
]);

/// Whether scores are bounded by `LIMIT`. `queries` and `keys` are the largest sums of squares of a query and of a
/// key; scores are multiplied by `scale`. False if an argument is not finite.
pub(super) fn bounded(queries: f32, keys: f32, scale: f32) -> bool {
    queries * scale * scale * keys <= (LIMIT * UNITS) * (LIMIT * UNITS)
}

/// State of the online softmax for the 16 rows of a strip: the offset m (`top`) and the sum of weights.
#[derive(Clone, Copy)]
pub(super) struct RunningSoftmax {
    top: __m512,
    pub(super) sum: __m512,
    /// Whether all scores so far were bounded.
    pub(super) bounded: bool,
}

impl RunningSoftmax {
    /// State before the first key.
    ///
    /// # Safety
    /// The CPU has AVX-512.
    #[inline(always)]
    pub(super) unsafe fn new() -> RunningSoftmax {
        // SAFETY: as the caller promises.
        unsafe {
            RunningSoftmax { top: _mm512_set1_ps(f32::NEG_INFINITY), sum: _mm512_setzero_ps(), bounded: true }
        }
    }

    /// Sets the offset for another block of keys with bounded scores; all earlier scores must have been bounded.
    #[inline(always)]
    pub(super) fn use_fixed_offset(&mut self) {
        // SAFETY: a `RunningSoftmax` exists only if the CPU has AVX-512 (`new`).
        self.top = unsafe { _mm512_set1_ps(SHIFT) };
    }

    /// Sets all sums to NaN, because a key is not finite.
    #[inline(always)]
    pub(super) fn fill_nan(&mut self) {
        // SAFETY: a `RunningSoftmax` exists only if the CPU has AVX-512 (`new`).
        self.sum = unsafe { _mm512_set1_ps(f32::NAN) };
    }

    /// Raises the offset of each row to the maximum of its first `keys` scores, converted to powers of two by
    /// `scale` and rounded up to a whole number, unless the offset is higher already. Returns the factors by
    /// which earlier sums must be multiplied.
    ///
    /// # Safety
    /// `scores` holds 16 rows; the CPU has AVX-512.
    #[inline(always)]
    pub(super) unsafe fn update_max(&mut self, scores: *const f32, keys: usize, scale: f32) -> __m512 {
        // SAFETY: as the caller promises.
        unsafe {
            let mut tops = [_mm512_setzero_ps(); SIDE];
            let rest = lanes(keys % SIDE);
            let low = _mm512_set1_ps(f32::NEG_INFINITY);
            // Four independent chains hide the latency of the maximum instruction.
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
                for (i, top) in four.into_iter().enumerate() {
                    tops[r + i] = top;
                }
            }
            let top = across(tops, |a, b| _mm512_max_ps(a, b));
            // `scale` yields units in the last place, and division by UNITS is exact, so the product is rounded
            // as in `Scores::Far`.
            let top = _mm512_mul_ps(top, _mm512_set1_ps(scale / UNITS));
            const UP: i32 = _MM_FROUND_TO_POS_INF | _MM_FROUND_NO_EXC;
            let top = _mm512_max_ps(self.top, _mm512_roundscale_ps::<UP>(top));
            let decay = _mm512_scalef_ps(_mm512_set1_ps(1.0), _mm512_sub_ps(self.top, top));
            self.top = top;
            decay
        }
    }

    /// Whether the offset of some row has reached `FAR`, so that `offsets` may be rounded.
    ///
    /// # Safety
    /// The CPU has AVX-512.
    #[inline(always)]
    pub(super) unsafe fn has_far_offset(&self) -> bool {
        // SAFETY: as the caller promises.
        unsafe { _mm512_cmp_ps_mask::<_CMP_GE_OQ>(_mm512_abs_ps(self.top), _mm512_set1_ps(FAR)) > 0 }
    }

    /// The offset m of each row, in units in the last place of bf16.
    ///
    /// # Safety
    /// The CPU has AVX-512.
    #[inline(always)]
    pub(super) unsafe fn offsets_in_units(&self) -> __m512 {
        // SAFETY: as the caller promises.
        unsafe { _mm512_mul_ps(self.top, _mm512_set1_ps(UNITS)) }
    }

    /// For each row the constant `MAGIC` + (127 - m) `UNITS`. Added to a score s log2(e) in units in the last place of
    /// bf16, it gives `MAGIC + y`.
    ///
    /// # Safety
    /// The CPU has AVX-512.
    #[inline(always)]
    pub(super) unsafe fn offsets(&self) -> __m512 {
        // SAFETY: as the caller promises.
        unsafe {
            let zero = _mm512_set1_ps(MAGIC + BIAS * UNITS);
            _mm512_fnmadd_ps(self.top, _mm512_set1_ps(UNITS), zero)
        }
    }

    /// Adds each row's sum of weights, after scaling the earlier sum by `decay`. A row whose maximum is not finite
    /// gets the sum NaN.
    ///
    /// # Safety
    /// The CPU has AVX-512.
    #[inline(always)]
    pub(super) unsafe fn add(&mut self, decay: __m512, sums: [__m512; SIDE]) {
        // SAFETY: as the caller promises.
        unsafe {
            let sum = across(sums, |a, b| _mm512_add_ps(a, b));
            // top * 0 is NaN if top is not finite, and adds nothing otherwise.
            let sum = _mm512_fmadd_ps(self.top, _mm512_setzero_ps(), sum);
            self.sum = _mm512_fmadd_ps(self.sum, decay, sum);
        }
    }
}

/// Reduces each row with `of` and returns the result of row r in lane r. The order is a fixed tree: first inside
/// 128-bit lanes, four rows at a time, then across the four lanes.
#[inline(always)]
fn across(rows: [__m512; SIDE], of: impl Fn(__m512, __m512) -> __m512 + Copy) -> __m512 {
    let [a, b] = [four(&rows, 0, of), four(&rows, 4, of)];
    let [c, d] = [four(&rows, 8, of), four(&rows, 12, of)];
    // SAFETY: callers have AVX-512.
    unsafe {
        let ab = of(_mm512_shuffle_f32x4::<0x44>(a, b), _mm512_shuffle_f32x4::<0xee>(a, b));
        let cd = of(_mm512_shuffle_f32x4::<0x44>(c, d), _mm512_shuffle_f32x4::<0xee>(c, d));
        of(_mm512_shuffle_f32x4::<0x88>(ab, cd), _mm512_shuffle_f32x4::<0xdd>(ab, cd))
    }
}

/// Reduces each 128-bit lane of rows `first..first + 4`; element r of a lane is the result for row `first + r`.
#[inline(always)]
fn four(rows: &[__m512; SIDE], first: usize, of: impl Fn(__m512, __m512) -> __m512) -> __m512 {
    let [a, b, c, d] = [rows[first], rows[first + 1], rows[first + 2], rows[first + 3]];
    // SAFETY: callers have AVX-512.
    unsafe {
        let ab = _mm512_castps_pd(of(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b)));
        let cd = _mm512_castps_pd(of(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d)));
        let low = _mm512_unpacklo_pd(ab, cd);
        let high = _mm512_unpackhi_pd(ab, cd);
        of(_mm512_castpd_ps(low), _mm512_castpd_ps(high))
    }
}

/// How the scores of a row are converted to `MAGIC + y`.
#[derive(Clone, Copy)]
pub(super) enum Scores {
    /// The scores are `MAGIC + y` already.
    Ready,
    /// One fused multiply-add, score * first + second, raised to at least `MAGIC` (y = 0, weight 0).
    Times(f32, f32),
    /// score * first - second, where the product is rounded before the subtraction, as in `RunningSoftmax::update_max`. No
    /// score then exceeds the offset of its row.
    Far(f32, f32),
}

/// For a row of `keys` keys, the mask of the 16-bit words of its last, partial step that hold weights of keys; 0 if the
/// last step is full. The words of a step alternate between its first 16 and its second 16 keys (see `bits`).
pub(super) fn rest(keys: usize) -> __mmask32 {
    let n = keys % STEP;
    let first = n.min(SIDE);
    let second = n.saturating_sub(SIDE);
    // Two words for each key of a group, of which the group has one.
    let first_words = ((1u64 << (2 * first)) - 1) as u32 & 0x5555_5555;
    let second_words = ((1u64 << (2 * second)) - 1) as u32 & 0xaaaa_aaaa;
    first_words | second_words
}

/// Turns `keys` scores of a row into bf16 weights, in place: the weights occupy the first half of the scores' memory.
/// Returns 16 partial sums of the weights. `rest` must be `rest(keys)`.
///
/// # Safety
/// `row` holds the scores, readable up to a whole number of steps; the CPU has AVX-512 with VBMI and BF16.
#[inline(always)]
pub(super) unsafe fn softmax_row(row: *mut f32, keys: usize, rest: __mmask32, scores: Scores) -> __m512 {
    // SAFETY: as the caller promises; the 64 bytes written for a step lie before all scores that are still to be
    // read.
    unsafe {
        let mut sums = _mm512_setzero_ps();
        for step in 0..keys / STEP {
            let weights = step_of(row, step, scores);
            sums = put(row, step, weights, sums);
        }
        if rest > 0 {
            let weights = _mm512_maskz_mov_epi16(rest, step_of(row, keys / STEP, scores));
            sums = put(row, keys / STEP, weights, sums);
        }
        sums
    }
}

/// `softmax_row` for rows with an offset that `RunningSoftmax::has_far_offset` reports. Such offsets come only from scores beyond 2^23 in
/// magnitude.
///
/// # Safety
/// As for `softmax_row`.
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi,avx512bf16")]
#[cold]
pub(super) unsafe fn softmax_row_far(
    row: *mut f32,
    keys: usize,
    rest: __mmask32,
    scale: f32,
    taken: f32,
) -> __m512 {
    // SAFETY: as the caller promises.
    unsafe { softmax_row(row, keys, rest, Scores::Far(scale, taken)) }
}

/// Turns four rows of 32 scores (two cache lines each) in the form `Scores::Ready` into four cache lines of weights,
/// and adds the weights to each row's partial sums.
///
/// Assembly, because the compiler rebuilds the masks for each use or replaces them by separate instructions. The odd
/// words, which hold the second 16 keys, are merged by a masked load from one word (2 bytes) earlier. The correction
/// is at most the fraction, so subtracting it from the low byte alone never borrows from the high byte.
///
/// # Safety
/// `from` points to eight readable lines and `to` to four writable ones; the CPU has the features named below.
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi,avx512bf16")]
#[inline]
pub(super) unsafe fn softmax_rows(from: *const f32, to: *mut u8, sums: [__m512; 4]) -> [__m512; 4] {
    let [mut a, mut b, mut c, mut d] = sums;
    let (_y, _t): (__m512i, __m512i);
    let (_upper, _low): (u32, u64);
    // SAFETY: reads eight lines and writes four, as the caller promises.
    unsafe {
        asm!(
            "kmovd {upper}, {words:e}",
            "kmovq {low}, {bytes}",
            "vmovdqu64 {y}, [{from}]",
            "vmovdqu16 {y}{{{upper}}}, [{from} + 62]",
            "vpsrlw {t}, {y}, 1",
            "vpermb {t}, {t}, {correction}",
            "vpsubb {y}{{{low}}}, {y}, {t}",
            "vmovdqu64 [{to}], {y}",
            "vdpbf16ps {a}, {y}, {ones}",
            "vmovdqu64 {y}, [{from} + 128]",
            "vmovdqu16 {y}{{{upper}}}, [{from} + 190]",
            "vpsrlw {t}, {y}, 1",
            "vpermb {t}, {t}, {correction}",
            "vpsubb {y}{{{low}}}, {y}, {t}",
            "vmovdqu64 [{to} + 64], {y}",
            "vdpbf16ps {b}, {y}, {ones}",
            "vmovdqu64 {y}, [{from} + 256]",
            "vmovdqu16 {y}{{{upper}}}, [{from} + 318]",
            "vpsrlw {t}, {y}, 1",
            "vpermb {t}, {t}, {correction}",
            "vpsubb {y}{{{low}}}, {y}, {t}",
            "vmovdqu64 [{to} + 128], {y}",
            "vdpbf16ps {c}, {y}, {ones}",
            "vmovdqu64 {y}, [{from} + 384]",
            "vmovdqu16 {y}{{{upper}}}, [{from} + 446]",
            "vpsrlw {t}, {y}, 1",
            "vpermb {t}, {t}, {correction}",
            "vpsubb {y}{{{low}}}, {y}, {t}",
            "vmovdqu64 [{to} + 192], {y}",
            "vdpbf16ps {d}, {y}, {ones}",
            from = in(reg) from,
            to = in(reg) to,
            words = in(reg) 0xaaaa_aaaa_u32,
            bytes = in(reg) 0x5555_5555_5555_5555_u64,
            correction = in(zmm_reg) _mm512_load_si512(CORRECTION.0.as_ptr().cast()),
            ones = in(zmm_reg) _mm512_set1_epi16(0x3f80),
            upper = out(kreg) _upper,
            low = out(kreg) _low,
            y = out(zmm_reg) _y,
            t = out(zmm_reg) _t,
            a = inout(zmm_reg) a,
            b = inout(zmm_reg) b,
            c = inout(zmm_reg) c,
            d = inout(zmm_reg) d,
            options(nostack, preserves_flags),
        );
    }
    [a, b, c, d]
}

/// `softmax_rows` for a partial step: words outside `rest` become zero.
///
/// # Safety
/// As for `softmax_rows`.
#[inline(always)]
pub(super) unsafe fn softmax_rest(from: *const f32, to: *mut u8, rest: __mmask32, sums: &mut [__m512; 4]) {
    // SAFETY: as the caller promises.
    unsafe {
        for (r, sums) in sums.iter_mut().enumerate() {
            let weights = _mm512_maskz_mov_epi16(rest, step_of(from.add(r * STEP), 0, Scores::Ready));
            *sums = put(to.add(r * LINE).cast(), 0, weights, *sums);
        }
    }
}

/// Computes the weights of a step, without masking missing keys.
///
/// # Safety
/// As for `softmax_row`.
#[inline(always)]
unsafe fn step_of(row: *const f32, step: usize, scores: Scores) -> __m512i {
    // SAFETY: as the caller promises.
    unsafe {
        let [first, second] = [row.add(step * STEP), row.add(step * STEP + SIDE)];
        bits(last_places(first, scores), last_places(second, scores))
    }
}

/// Reads 16 scores and returns the bits of `MAGIC + y`.
///
/// # Safety
/// As for `softmax_row`.
#[inline(always)]
unsafe fn last_places(from: *const f32, scores: Scores) -> __m512i {
    // SAFETY: as the caller promises.
    unsafe {
        let score = _mm512_loadu_ps(from);
        _mm512_castps_si512(match scores {
            Scores::Ready => score,
            Scores::Times(scale, offset) => {
                let y = _mm512_fmadd_ps(score, _mm512_set1_ps(scale), _mm512_set1_ps(offset));
                _mm512_max_ps(y, _mm512_set1_ps(MAGIC))
            }
            Scores::Far(scale, taken) => {
                let y = _mm512_sub_ps(_mm512_mul_ps(score, _mm512_set1_ps(scale)), _mm512_set1_ps(taken));
                _mm512_max_ps(_mm512_add_ps(y, _mm512_set1_ps(MAGIC + BIAS * UNITS)), _mm512_set1_ps(MAGIC))
            }
        })
    }
}

/// Stores a step's weights and adds them to the partial sums.
///
/// # Safety
/// As for `softmax_row`.
#[inline(always)]
unsafe fn put(row: *mut f32, step: usize, weights: __m512i, sums: __m512) -> __m512 {
    // SAFETY: as the caller promises.
    unsafe {
        _mm512_storeu_si512(row.cast::<u8>().add(step * LINE).cast(), weights);
        let [a, b] = [weights, _mm512_set1_epi16(0x3f80)];
        _mm512_dpbf16_ps(
            sums,
            core::mem::transmute::<__m512i, __m512bh>(a),
            core::mem::transmute::<__m512i, __m512bh>(b),
        )
    }
}

/// Combines the y of two groups of 16 keys (low 16 bits of each lane) into bf16 bit patterns, with the correction of
/// the module's documentation: lane j holds key j of the first group in its low word and of the second in its high
/// word.
#[inline(always)]
fn bits(first: __m512i, second: __m512i) -> __m512i {
    const LOW_BYTES: __mmask64 = 0x5555_5555_5555_5555;
    // SAFETY: callers have AVX-512 with VBMI.
    unsafe {
        let low = _mm512_set1_epi32(0xffff);
        let correction = _mm512_load_si512(CORRECTION.0.as_ptr().cast());
        // second << 16 | low & first
        let y = _mm512_ternarylogic_epi32::<0xf8>(_mm512_slli_epi32::<16>(second), low, first);
        let x = _mm512_srli_epi16::<1>(y);
        // The table is indexed by x / 2 in the low byte of each word; its entry is subtracted in the low byte.
        _mm512_sub_epi16(y, _mm512_maskz_permutexvar_epi8(LOW_BYTES, x, correction))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_what_is_rounded() {
        for (half, &correction) in CORRECTION.0.iter().enumerate() {
            let x = 2.0 * half as f64 + 0.5;
            let exact = x - 128.0 * ((x / 128.0).exp2() - 1.0);
            assert_eq!(f64::from(correction), exact.round(), "{x}");
        }
    }
    /// Over the whole range of bounded scores, `Scores::Ready` and `Scores::Times` give equal weights, which are normal
    /// numbers with a relative error below 0.73 %.
    #[test]
    fn weights_are_powers_of_two_over_the_whole_range() {
        if !super::super::has_lanes() {
            println!("skipped: no AVX-512 with VBMI and BF16 here");
            return;
        }
        let end = (LIMIT * UNITS) as i32;
        for first in (-end..=end).step_by(STEP) {
            let score = |j: usize| (first + j as i32).min(end) as f32;
            let found = [Scores::Ready, Scores::Times(1.0, MAGIC + (BIAS - SHIFT) * UNITS)].map(|form| {
                let begin = if matches!(form, Scores::Ready) { BEGIN.0[0] } else { 0.0 };
                let mut row: [f32; STEP] = core::array::from_fn(|j| begin + score(j));
                // SAFETY: `has_lanes`; a step of scores.
                unsafe { softmax_row(row.as_mut_ptr(), STEP, 0, form) };
                core::array::from_fn::<u32, SIDE, _>(|lane| row[lane].to_bits())
            });
            assert_eq!(found[0], found[1]);
            for j in 0..STEP {
                let weight = f32::from_bits(found[0][j % SIDE] >> (j / SIDE * 16) << 16);
                let exact = f64::from(score(j) / UNITS - SHIFT).exp2();
                assert!(weight.is_normal(), "{}", score(j));
                assert!((f64::from(weight) / exact - 1.0).abs() < 0.0073, "{}: {weight}", score(j));
            }
        }
    }

    #[test]
    fn rows_of_a_pair_are_steps_of_whole_rows() {
        if !super::super::has_lanes() {
            println!("skipped: no AVX-512 with VBMI and BF16 here");
            return;
        }
        for keys in [5, 16, 17, 31, 32] {
            let scores: [[f32; STEP]; 4] = core::array::from_fn(|r| {
                core::array::from_fn(|j| BEGIN.0[0] + (r * 977 + j * 3571) as f32 % 8000.0 - 4000.0)
            });
            let mut lines = [0u8; 4 * LINE];
            // SAFETY: `has_lanes`; four rows of a step.
            unsafe {
                let from = scores.as_ptr().cast();
                let to = lines.as_mut_ptr();
                let mut sums = [_mm512_set1_ps(3.0); 4];
                match keys == STEP {
                    false => softmax_rest(from, to, rest(keys), &mut sums),
                    true => sums = softmax_rows(from, to, sums),
                }
                for (r, mut row) in scores.into_iter().enumerate() {
                    let whole = softmax_row(row.as_mut_ptr(), keys, rest(keys), Scores::Ready);
                    let weights: Vec<u8> = row[..SIDE].iter().flat_map(|x| x.to_le_bytes()).collect();
                    assert_eq!(lines[r * LINE..][..LINE], weights[..], "row {r} of {keys} keys");
                    let sum = |x| _mm512_reduce_add_ps(x);
                    assert!((sum(sums[r]) - 48.0 - sum(whole)).abs() <= 1e-5 * sum(whole).max(48.0));
                }
            }
        }
    }

    #[test]
    fn what_is_not_there_is_masked_and_what_is_not_finite_is_not_bounded() {
        assert_eq!(rest(64), 0);
        assert_eq!(rest(33), 1);
        assert_eq!(rest(16), 0x5555_5555);
        assert_eq!(rest(18), 0x5555_555f);
        let most = LIMIT * UNITS;
        assert!(bounded(most, most, 1.0) && bounded(most, 1.0, most.sqrt()));
        assert!(!bounded(most * 1.1, most, 1.0));
        for bad in [f32::NAN, f32::INFINITY] {
            assert!(!bounded(bad, 1.0, 1.0) && !bounded(0.0, bad, 1.0));
        }
    }
}
