//! What stands before and behind products on tiles: strips laid out, and sums on their way out.
//!
//! Invariant: an element is one sum, its bias, what follows, and one rounding; in which strip it stands says nothing.

use super::amx::{STEP, TILE};
use super::element::Bf16;
use super::math::gelu_bf16;
use super::simd::{LANES, Simd};
use super::simd_x86::Avx512;
use super::tile::PANEL;
use super::{Rows, RowsMut};
use core::arch::x86_64::*;
use core::ops::Range;

/// Sums of 32 columns of some rows, and what becomes of them.
#[derive(Clone, Copy)]
pub(super) struct Sums {
    s: Avx512,
    /// Rows of 32 f32.
    at: *mut f32,
    rows: usize,
    /// Where the sums are integers: what each row is scaled by, and each column.
    scales: Option<(*const f32, [__m512; 2])>,
    bias: [__m512; 2],
    then: Then,
    /// Added last: its first row, and elements from one row to the next.
    residual: Option<(*const Bf16, usize)>,
    /// The first row, elements from one row to the next, and the columns that there are.
    to: *mut Bf16,
    ld: usize,
    mask: __mmask32,
}

/// What follows the bias.
#[derive(Clone, Copy)]
pub(super) enum Then {
    /// Nothing.
    Nothing,
    /// GELU.
    Gelu,
    /// max(x, 0).
    Relu,
    /// Rounded; GELU of that stays where the sums are, for the columns that it is the gate of.
    Open,
    /// Rounded, and times the gate that stands here.
    Through(*const f32),
}

impl Sums {
    /// None yet.
    #[inline(always)]
    pub(super) fn none(s: Avx512) -> Sums {
        let (at, to, bias) = (core::ptr::null_mut(), core::ptr::null_mut(), [s.splat(0.0); 2]);
        Sums { s, at, rows: 0, scales: None, bias, then: Then::Nothing, residual: None, to, ld: 0, mask: 0 }
    }

    /// `rows` rows of sums for the first `columns` (at most 32) columns at `to`, its rows `ld` elements apart; past the end
    /// of the bias it is zero.
    ///
    /// # Safety
    /// When `finish` is called, the sums are complete and what it
    /// reads and writes is there.
    #[inline(always)]
    pub(super) unsafe fn new(
        s: Avx512,
        (at, rows): (*mut f32, usize),
        scales: Option<(&[f32], &[f32])>,
        bias: Option<&[Bf16]>,
        then: Then,
        residual: Option<(*const Bf16, usize)>,
        (to, ld, columns): (*mut Bf16, usize, usize),
    ) -> Sums {
        let mask = first(columns);
        let scales = match scales {
            Some((x, w)) => {
                assert!(x.len() >= rows && w.len() >= PANEL, "scales of rows and columns");
                // SAFETY: there are 32.
                Some((x.as_ptr(), unsafe { [s.load(w.as_ptr()), s.load(w.as_ptr().add(LANES))] }))
            }
            None => None,
        };
        let bias = match bias {
            // SAFETY: no more than it has.
            Some(bias) => unsafe { widen(bias.as_ptr(), first(bias.len().min(PANEL))) },
            None => [s.splat(0.0); 2],
        };
        Sums { s, at, rows, scales, bias, then, residual, to, ld, mask }
    }

    /// A row of the sums as numbers.
    ///
    /// # Safety
    /// 32 sums at `sum`, of row `r` of them.
    #[inline(always)]
    unsafe fn numbers(&self, sum: *const f32, r: usize) -> [__m512; 2] {
        let s = self.s;
        // SAFETY: as the caller promises; `s` proves AVX-512.
        unsafe {
            let Some((x, w)) = self.scales else { return [s.load(sum), s.load(sum.add(LANES))] };
            let of = s.splat(*x.add(r));
            let low = _mm512_cvtepi32_ps(_mm512_loadu_si512(sum.cast()));
            let high = _mm512_cvtepi32_ps(_mm512_loadu_si512(sum.add(LANES).cast()));
            [s.mul(low, s.mul(of, w[0])), s.mul(high, s.mul(of, w[1]))]
        }
    }

    /// Rows `low..high` of the sums, as far as there are, to where they go.
    ///
    /// # Safety
    /// As `new` says.
    #[inline(always)]
    pub(super) unsafe fn finish(&self, low: usize, high: usize) {
        let s = self.s;
        for r in low..high.min(self.rows) {
            let sum = self.at.wrapping_add(r * PANEL);
            // SAFETY: a row of the sums and, under the mask, of the residual and of what is written.
            unsafe {
                let v = self.numbers(sum, r);
                let v = [s.add(v[0], self.bias[0]), s.add(v[1], self.bias[1])];
                // Not by `map`: its closure would be a function without these instructions.
                let mut v = match self.then {
                    Then::Nothing => v,
                    Then::Gelu => [gelu_bf16(s, v[0]), gelu_bf16(s, v[1])],
                    Then::Relu => [s.max(s.splat(0.0), v[0]), s.max(s.splat(0.0), v[1])],
                    Then::Open => {
                        let x = wide(round(v));
                        s.store(sum, gelu_bf16(s, x[0]));
                        s.store(sum.add(LANES), gelu_bf16(s, x[1]));
                        continue;
                    }
                    Then::Through(gate) => {
                        let (x, gate) = (wide(round(v)), gate.add(r * PANEL));
                        [s.mul(s.load(gate), x[0]), s.mul(s.load(gate.add(LANES)), x[1])]
                    }
                };
                if let Some((residual, ld)) = self.residual {
                    let x = widen(residual.add(r * ld), self.mask);
                    v = [s.add(x[0], v[0]), s.add(x[1], v[1])];
                }
                _mm512_mask_storeu_epi16(self.to.add(r * self.ld).cast(), self.mask, round(v));
            }
        }
    }
}

/// Asks for what 32 columns of some rows will read and write when their sums are finished.
#[inline(always)]
pub(super) fn ask_out(
    s: Avx512,
    rows: Range<usize>,
    panel: usize,
    y: &RowsMut<'_, Bf16>,
    residual: Option<Rows<'_, Bf16>>,
) {
    for r in rows.clone() {
        s.prefetch_far(y.row(r).wrapping_add(panel * PANEL).cast());
    }
    if let Some(x) = residual {
        for r in rows {
            s.prefetch(x.row(r).wrapping_add(panel * PANEL).cast());
        }
    }
}

/// Lays a row's columns of some steps where its strip's tiles have them, with zeros past the last of `columns`.
///
/// # Safety
/// `columns` elements are readable at `row`; at `to` are two tiles for each step, of which this row's 64 bytes are first.
#[inline(always)]
pub(super) unsafe fn lay(row: *const Bf16, columns: usize, steps: &Range<usize>, to: *mut u8) {
    for (i, step) in steps.clone().enumerate() {
        let left = columns.saturating_sub(step * STEP).min(STEP);
        // SAFETY: `left` columns are left of the row; the row's line of step i.
        unsafe {
            let v = _mm512_maskz_loadu_epi16(first(left), row.wrapping_add(step * STEP).cast());
            _mm512_storeu_si512(to.add(i * 2 * TILE).cast(), v);
        }
    }
}

/// The first `n` of 32 columns.
#[inline(always)]
fn first(n: usize) -> __mmask32 {
    ((1_u64 << n) - 1) as __mmask32
}

/// 32 columns as f32, zeros where the mask has none.
///
/// # Safety
/// Those columns that the mask has are readable at `p`, and the CPU has AVX-512.
#[inline(always)]
unsafe fn widen(p: *const Bf16, mask: __mmask32) -> [__m512; 2] {
    // SAFETY: as the caller promises.
    unsafe { wide(_mm512_maskz_loadu_epi16(mask, p.cast())) }
}

/// bf16 as f32.
///
/// # Safety
/// The CPU has AVX-512.
#[inline(always)]
unsafe fn wide(v: __m512i) -> [__m512; 2] {
    // SAFETY: as the caller promises.
    unsafe {
        let low = _mm512_cvtepu16_epi32(_mm512_castsi512_si256(v));
        let high = _mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64::<1>(v));
        [_mm512_castsi512_ps(_mm512_slli_epi32::<16>(low)), _mm512_castsi512_ps(_mm512_slli_epi32::<16>(high))]
    }
}

/// 32 columns in bf16, to nearest, ties to even.
///
/// # Safety
/// The CPU has AVX-512 with BF16.
#[inline(always)]
unsafe fn round(v: [__m512; 2]) -> __m512i {
    // SAFETY: as the caller promises; both are 64 bytes.
    unsafe { core::mem::transmute::<__m512bh, __m512i>(_mm512_cvtne2ps_pbh(v[1], v[0])) }
}
