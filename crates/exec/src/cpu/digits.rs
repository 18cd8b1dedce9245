//! f32 as integers of three digits of eight bits, laid out for the tiles of integers.
//!
//! Invariant: a row of x, and a column of W, in a slice of K, is its integers times one number: x[k] = m[k] s, m[k]
//! rounded to nearest, |m| below 2^23, so what is lost of an element is at most 2^-23 of the largest one. m is hi 2^16 +
//! mid 2^8 + lo, digits from -128 to 127. Of nine products of digits the six largest are taken, sums of integers without
//! any rounding; what is left out is at most 2^-23 of |x| |w| again, and of no preferred sign. A row or a column with an
//! infinity or NaN has the scale NaN.
//!
//! Few elements of a row far above the others would cost those their digits: up to `OUTLIERS` of them are taken out, and
//! their products added in f32 by `gather`.
//! The idea: H. Ootomo, K. Ozaki, R. Yokota, "DGEMM on integer matrix multiplication unit", IJHPCA 2024.
//!
//! No closure here goes through a function of std: that would be compiled without the vector instructions, and ten times slower.
//!
//! In a step of 64 k, the four that a tile product takes together are (k, k + 32, k + 16, k + 48), for both factors: then
//! neither needs its lanes moved.

use super::amx::{SIDE, TILE};
use super::simd::{LANES, Simd};
use super::simd_x86::Avx512;
use super::tile::PANEL;
use super::view::Rows;
use core::arch::x86_64::*;
use core::ops::Range;

/// k that a tile product takes.
pub(super) const STEP: usize = 64;
/// Bytes of one step of 16 rows, and of a panel: (hi, mid, lo), one tile each and two.
pub(super) const OF_ROWS: usize = 3 * TILE;
pub(super) const OF_PANEL: usize = 6 * TILE;
/// Sums of one order of 16 rows and a panel.
pub(super) const ORDER: usize = SIDE * PANEL;
/// Most elements of a row's slice that are taken out.
const OUTLIERS: usize = 3;

/// Largest integer, less one for the roundings of a scale and of a product with it: 0x7f7f7f is three times 127.
const LARGEST: f32 = (0x7f_7f7f - 1) as f32;
/// 2^-104. Scales are those of a largest element of at least this, so that they and one over them are normal numbers.
const SMALLEST: f32 = f32::from_bits(23 << 23);
/// The bits of infinity.
const INFINITY: i32 = 0x7f80_0000;

/// How many k of a panel ahead of its use a line is asked for.
const AHEAD: usize = 64;

/// What a row's slice is besides its digits.
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct Row {
    scale: f32,
    outliers: u32,
    k: [u32; OUTLIERS],
    x: [f32; OUTLIERS],
}

/// Steps `steps` of a panel of packed weights (`PANEL` a k, `depth` k): zeros past `depth`; and its columns' scales.
///
/// # Safety
/// `panel` holds `depth` rows of `PANEL`; `to` has room for `steps.len()` steps, `to_scales` for `PANEL`.
#[inline(always)]
pub(super) unsafe fn split_panel(
    s: Avx512,
    panel: *const f32,
    depth: usize,
    steps: &Range<usize>,
    to: *mut u8,
    to_scales: *mut f32,
) {
    let load = |k: usize, half: usize| {
        let at = panel.wrapping_add(k * PANEL + half * LANES);
        // SAFETY: inside the panel, as the caller promises.
        if k < depth { unsafe { s.load(at) } } else { s.splat(0.0) }
    };
    let mut largest = [zero(s); 2];
    for k in steps.start * STEP..steps.end * STEP {
        s.prefetch(panel.wrapping_add((k + AHEAD) * PANEL));
        s.prefetch(panel.wrapping_add((k + AHEAD) * PANEL + LANES));
        for (half, largest) in largest.iter_mut().enumerate() {
            *largest = larger(s, *largest, load(k, half));
        }
    }
    for (half, largest) in largest.into_iter().enumerate() {
        let (scale, inverse) = scales(s, largest);
        // SAFETY: half of the scales.
        unsafe { s.store(to_scales.wrapping_add(half * LANES), scale) };
        for (i, step) in steps.clone().enumerate() {
            for j in 0..SIDE {
                let k = step * STEP + j;
                let at = |q: usize| integers(s, load(k + q * SIDE, half), inverse);
                // SAFETY: row j of tile `half` of each digit of step i.
                unsafe {
                    store::<2>(
                        to.wrapping_add(i * OF_PANEL + half * TILE + j * 64),
                        digits(s, [at(0), at(1), at(2), at(3)]),
                    )
                };
            }
        }
    }
}

/// Steps `steps` of 16 rows of x: zeros past `rows` and past the columns of x.
///
/// # Safety
/// `rows`, at most 16, lie in x; `to` has room for `steps.len()` steps, `about` for `rows.len()`.
#[inline(always)]
pub(super) unsafe fn split_strip(
    s: Avx512,
    x: Rows<'_>,
    rows: Range<usize>,
    steps: &Range<usize>,
    to: *mut u8,
    about: *mut Row,
) {
    let first = steps.start * STEP;
    for r in 0..SIDE {
        let width = if r < rows.len() { x.cols().min(steps.end * STEP) - first } else { 0 };
        let from = x.row(rows.start + r).wrapping_add(first);
        let load = |k: usize| {
            // SAFETY: what is left of the row's `width`.
            unsafe { s.load_n(from.wrapping_add(k), width.saturating_sub(k).min(LANES)) }
        };
        let mut largest = zero(s);
        for k in (0..steps.len() * STEP).step_by(LANES) {
            largest = larger(s, largest, load(k));
        }
        // SAFETY: `width` columns are readable.
        let (row, limit, inverse) = unsafe { describe(s, largest, from, width) };
        if r < rows.len() {
            // SAFETY: one of `rows.len()`.
            unsafe { about.wrapping_add(r).write(row) };
        }
        for i in 0..steps.len() {
            let at = |q: usize| integers(s, within(s, load(i * STEP + q * LANES), limit), inverse);
            // SAFETY: row r of each digit of step i.
            unsafe {
                store::<1>(to.wrapping_add(i * OF_ROWS + r * 64), digits(s, [at(0), at(1), at(2), at(3)]))
            };
        }
    }
}

/// Adds a row of 32 sums to `to`, which begins at zero unless there is `more`: the sums of digits from `sums` on, of
/// orders 0, 1 and 2 (hi hi; hi mid and mid hi; the three below), and the products of what was taken out with `w`, the
/// slice's `PANEL` columns.
///
/// # Safety
/// The sums of three orders, `ORDER` apart, `PANEL` scales and sums, and the row's k of `w` are there.
#[inline(always)]
pub(super) unsafe fn gather(
    s: Avx512,
    sums: *const i32,
    row: &Row,
    scales: *const f32,
    w: *const f32,
    to: *mut f32,
    more: bool,
) {
    for half in [0, LANES] {
        // SAFETY: as the caller promises; `s` proves the instructions.
        unsafe {
            let order = |o: usize| _mm512_cvtepi32_ps(_mm512_loadu_si512(sums.add(o * ORDER + half).cast()));
            let digit = s.splat(1.0 / 256.0);
            let sum = s.fma(s.fma(order(2), digit, order(1)), digit, order(0));
            let sum = s.mul(sum, s.load(scales.add(half)));
            let begun = if more { s.load(to.add(half)) } else { s.splat(0.0) };
            let mut sum = s.fma(sum, s.splat(row.scale), begun);
            for i in 0..row.outliers as usize {
                sum = s.fma(s.splat(row.x[i]), s.load(w.add(row.k[i] as usize * PANEL + half)), sum);
            }
            s.store(to.add(half), sum);
        }
    }
}

/// From the largest magnitudes of a row's lanes: what `gather` needs, the magnitude that is taken out above, and one over
/// the scale. An element that is 3 times above the mean of the lanes' largest is taken out, if they are few.
///
/// # Safety
/// `width` f32 are readable at `x`.
#[inline(always)]
unsafe fn describe(s: Avx512, lanes: __m512i, x: *const f32, width: usize) -> (Row, __m512, __m512) {
    // SAFETY: `s` proves the instructions.
    let (largest, sum) =
        unsafe { (_mm512_reduce_max_epi32(lanes), _mm512_reduce_add_ps(_mm512_castsi512_ps(lanes))) };
    let mut row = Row { scale: 0.0, outliers: 0, k: [0; OUTLIERS], x: [0.0; OUTLIERS] };
    let (mut limit, mut largest) = (f32::INFINITY, f32::from_bits(largest as u32));
    let above = 3.0 / LANES as f32 * sum;
    if largest > above && largest < f32::INFINITY {
        // SAFETY: as the caller promises.
        let x = unsafe { core::slice::from_raw_parts(x, width) };
        if let Some(rest) = row.take(x, above) {
            (limit, largest) = (above, rest);
        }
    }
    // SAFETY: `s` proves the instructions.
    unsafe {
        let (scale, inverse) = scales(s, _mm512_castps_si512(s.splat(largest)));
        row.scale = _mm512_cvtss_f32(scale);
        (row, s.splat(limit), inverse)
    }
}

impl Row {
    /// Takes out what is above `limit`, unless there is too much of it; the largest magnitude of the rest.
    #[cold]
    fn take(&mut self, x: &[f32], limit: f32) -> Option<f32> {
        let mut rest = 0f32;
        let mut taken = 0;
        for (k, &x) in x.iter().enumerate() {
            if x.abs() <= limit {
                rest = rest.max(x.abs());
                continue;
            }
            *self.k.get_mut(taken)? = k as u32;
            self.x[taken] = x;
            taken += 1;
        }
        self.outliers = taken as u32;
        Some(rest)
    }
}

#[inline(always)]
fn zero(_: Avx512) -> __m512i {
    // SAFETY: the argument proves the instructions.
    unsafe { _mm512_setzero_si512() }
}

/// The bits of the larger magnitudes: as integers, so that a NaN is above all.
#[inline(always)]
fn larger(_: Avx512, largest: __m512i, x: __m512) -> __m512i {
    // SAFETY: the first argument proves the instructions.
    unsafe { _mm512_max_epi32(largest, _mm512_castps_si512(_mm512_abs_ps(x))) }
}

/// x, or zero where it is above `limit` or a NaN.
#[inline(always)]
fn within(_: Avx512, x: __m512, limit: __m512) -> __m512 {
    // SAFETY: the first argument proves the instructions.
    unsafe { _mm512_maskz_mov_ps(_mm512_cmp_ps_mask::<_CMP_LE_OQ>(_mm512_abs_ps(x), limit), x) }
}

/// The scales of what has these largest magnitudes, by their bits, for sums in units of hi hi, 2^32; and what makes
/// integers of it.
#[inline(always)]
fn scales(s: Avx512, largest: __m512i) -> (__m512, __m512) {
    // SAFETY: the first argument proves the instructions.
    unsafe {
        let finite = _mm512_cmplt_epi32_mask(largest, _mm512_set1_epi32(INFINITY));
        let largest = s.max(_mm512_castsi512_ps(largest), s.splat(SMALLEST));
        let scale = s.mul(largest, s.splat(65_536.0 / LARGEST));
        let inverse = _mm512_maskz_div_ps(finite, s.splat(LARGEST), largest);
        (_mm512_mask_mov_ps(s.splat(f32::NAN), finite, scale), inverse)
    }
}

#[inline(always)]
fn integers(s: Avx512, x: __m512, inverse: __m512) -> __m512i {
    // SAFETY: the first argument proves the instructions.
    unsafe { _mm512_cvtps_epi32(s.mul(x, inverse)) }
}

/// (hi, mid, lo) of four vectors of integers, the bytes of a lane in the order (0, 2, 1, 3).
#[inline(always)]
fn digits(_: Avx512, m: [__m512i; 4]) -> [__m512i; 3] {
    const ODD: u32 = 0xaaaa_aaaa;
    const ODD_BYTES: u64 = 0xaaaa_aaaa_aaaa_aaaa;
    // SAFETY: the first argument proves the instructions.
    unsafe {
        // Halves up to the next digit, carried; a byte is then its digit + 128.
        let half = _mm512_set1_epi32(0x80_8080);
        let bytes = |m| _mm512_xor_si512(_mm512_add_epi32(m, half), half);
        let [a, b, c, d] = [bytes(m[0]), bytes(m[1]), bytes(m[2]), bytes(m[3])];
        let low = |a, b| _mm512_mask_mov_epi16(a, ODD, _mm512_slli_epi32::<16>(b));
        let high = |a, b| _mm512_mask_mov_epi16(_mm512_srli_epi32::<16>(a), ODD, b);
        let even_bytes = |a, b| _mm512_mask_mov_epi8(a, ODD_BYTES, _mm512_slli_epi16::<8>(b));
        let odd_bytes = |a, b| _mm512_mask_mov_epi8(_mm512_srli_epi16::<8>(a), ODD_BYTES, b);
        let (ab, cd) = (low(a, b), low(c, d));
        [even_bytes(high(a, b), high(c, d)), odd_bytes(ab, cd), even_bytes(ab, cd)]
    }
}

/// # Safety
/// 64 bytes are writable at `to`, and one and two digits, of so many tiles, on.
#[inline(always)]
unsafe fn store<const TILES: usize>(to: *mut u8, digits: [__m512i; 3]) {
    for (i, digit) in digits.into_iter().enumerate() {
        // SAFETY: as the caller promises; whoever has digits has AVX-512.
        unsafe { _mm512_storeu_si512(to.wrapping_add(i * TILES * TILE).cast(), digit) };
    }
}
