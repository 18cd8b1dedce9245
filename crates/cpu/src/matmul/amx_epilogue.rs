//! Prologue and epilogue of GEMMs on AMX tiles: packing rows of A into strips, and finishing accumulators (scale,
//! bias, activation, residual) on their way to memory.
//!
//! Invariant: an output element is one sum, its bias, the activation, the residual, and one rounding; the position of
//! its row within a strip does not affect its bits.

use crate::element::Bf16;
use crate::matmul::linear::Act;
use crate::matmul::linear_int8::Scales;
use crate::matmul::register_tile::PANEL;
use crate::rows::elementwise::Gate;
use crate::simd::amx::{STEP, TILE};
use crate::simd::math::{gelu_bf16, silu_bf16};
use crate::simd::x86::Avx512;
use crate::simd::{LANES, Simd};
use crate::{Rows, RowsMut};
use core::arch::x86_64::*;
use core::ops::Range;

/// Accumulators of a gate, whose activation the accumulators of a gated linear unit's value are multiplied by.
#[derive(Clone, Copy)]
pub(crate) struct GateSums {
    activation: Gate,
    /// Rows of 32 f32 accumulators.
    sums: *const f32,
    bias: [__m512; 2],
}

impl GateSums {
    /// The accumulators at `sums`. Columns past the end of `bias` get a bias of zero.
    #[inline(always)]
    pub(crate) fn new(s: Avx512, activation: Gate, sums: *const f32, bias: Option<&[Bf16]>) -> GateSums {
        GateSums { activation, sums, bias: bias_of(s, bias) }
    }

    /// Row `r` of the gate: the activation of accumulators and bias.
    ///
    /// # Safety
    /// Row `r` of the accumulators must be readable.
    #[inline(always)]
    unsafe fn row(&self, s: Avx512, r: usize) -> [__m512; 2] {
        let sum = self.sums.wrapping_add(r * PANEL);
        // SAFETY: guaranteed by the caller.
        let v = unsafe { [s.add(s.load(sum), self.bias[0]), s.add(s.load(sum.add(LANES)), self.bias[1])] };
        match self.activation {
            Gate::Gelu => [gelu_bf16(s, v[0]), gelu_bf16(s, v[1])],
            Gate::Silu => [silu_bf16(s, v[0]), silu_bf16(s, v[1])],
        }
    }
}

/// The first 32 values of a bias as f32, zeros where it has fewer.
#[inline(always)]
fn bias_of(s: Avx512, bias: Option<&[Bf16]>) -> [__m512; 2] {
    match bias {
        // SAFETY: the mask covers no more elements than the slice has.
        Some(bias) => unsafe { widen(bias.as_ptr(), first(bias.len().min(PANEL))) },
        None => [s.splat(0.0); 2],
    }
}

/// Rows of bf16 in memory.
#[derive(Clone, Copy)]
pub(crate) struct Bf16Rows {
    /// First row.
    pub(crate) first: *const Bf16,
    /// Elements from one row to the next.
    pub(crate) ld: usize,
}

/// Complete accumulators of up to 32 columns of some rows, and what their epilogue needs.
pub(crate) struct CompleteSums<'a> {
    /// Rows of 32 accumulators, f32 or i32.
    pub(crate) sums: *mut f32,
    /// Number of rows.
    pub(crate) rows: usize,
    /// For integer accumulators, the scales of these rows, and those of at least 32 columns.
    pub(crate) scales: Option<Scales<'a>>,
    /// Bias of the columns; zero for columns past its end.
    pub(crate) bias: Option<&'a [Bf16]>,
    pub(crate) act: Act,
    /// Residual added last.
    pub(crate) residual: Option<Bf16Rows>,
    pub(crate) gate: Option<GateSums>,
    /// First row of the output.
    pub(crate) output: *mut Bf16,
    /// Elements from one row of the output to the next.
    pub(crate) ld: usize,
    /// Columns of the output, at most 32.
    pub(crate) columns: usize,
}

/// Accumulators of 32 columns of some rows, together with the epilogue still to be applied to them.
#[derive(Clone, Copy)]
pub(crate) struct PendingEpilogue {
    s: Avx512,
    /// Rows of 32 accumulators, f32 or i32.
    sums: *mut f32,
    rows: usize,
    /// Of integer accumulators.
    scales: Option<LoadedScales>,
    bias: [__m512; 2],
    act: Act,
    /// Residual added last.
    residual: Option<Bf16Rows>,
    gate: Option<GateSums>,
    /// First row of the output.
    output: *mut Bf16,
    /// Elements from one row of the output to the next.
    ld: usize,
    /// The columns of the output that exist.
    mask: __mmask32,
}

/// Scales of integer accumulators: one per row in memory, one per column in registers.
#[derive(Clone, Copy)]
struct LoadedScales {
    rows: *const f32,
    columns: [__m512; 2],
}

impl PendingEpilogue {
    /// An empty set of accumulators; `finish` does nothing.
    #[inline(always)]
    pub(crate) fn none(s: Avx512) -> PendingEpilogue {
        PendingEpilogue {
            s,
            sums: core::ptr::null_mut(),
            rows: 0,
            scales: None,
            bias: [s.splat(0.0); 2],
            act: Act::None,
            residual: None,
            gate: None,
            output: core::ptr::null_mut(),
            ld: 0,
            mask: 0,
        }
    }

    /// Loads bias and scales of the columns. Panics if there are fewer than `rows` row scales or 32 column scales.
    ///
    /// # Safety
    /// When `finish` is called, the accumulators must be complete, and the memory it reads and writes must be valid.
    #[inline(always)]
    pub(crate) unsafe fn new(s: Avx512, complete: CompleteSums<'_>) -> PendingEpilogue {
        let CompleteSums { sums, rows, scales, bias, act, residual, gate, output, ld, columns } = complete;
        let scales = match scales {
            Some(Scales { x, w }) => {
                assert!(x.len() >= rows && w.len() >= PANEL, "scales of rows and columns");
                // SAFETY: the assertion above guarantees 32 column scales.
                let columns = unsafe { [s.load(w.as_ptr()), s.load(w.as_ptr().add(LANES))] };
                Some(LoadedScales { rows: x.as_ptr(), columns })
            }
            None => None,
        };
        let bias = bias_of(s, bias);
        PendingEpilogue { s, sums, rows, scales, bias, act, residual, gate, output, ld, mask: first(columns) }
    }

    /// Loads row `r` of the accumulators as f32, with the scales applied to integer accumulators.
    ///
    /// # Safety
    /// `sum` must point to the 32 accumulators of row `r`.
    #[inline(always)]
    unsafe fn scaled(&self, sum: *const f32, r: usize) -> [__m512; 2] {
        let s = self.s;
        // SAFETY: guaranteed by the caller; `s` proves AVX-512.
        unsafe {
            let Some(LoadedScales { rows, columns }) = self.scales else {
                return [s.load(sum), s.load(sum.add(LANES))];
            };
            let scale = s.splat(*rows.add(r));
            let low = _mm512_cvtepi32_ps(_mm512_loadu_si512(sum.cast()));
            let high = _mm512_cvtepi32_ps(_mm512_loadu_si512(sum.add(LANES).cast()));
            [s.mul(low, s.mul(scale, columns[0])), s.mul(high, s.mul(scale, columns[1]))]
        }
    }

    /// Applies the epilogue to rows `low..high`, as far as they exist, and writes them to the output.
    ///
    /// # Safety
    /// As stated at `new`.
    #[inline(always)]
    pub(crate) unsafe fn finish(&self, low: usize, high: usize) {
        let s = self.s;
        for r in low..high.min(self.rows) {
            let sum = self.sums.wrapping_add(r * PANEL);
            // SAFETY: one row of the accumulators and, under the mask, of the residual and of the output.
            unsafe {
                let v = self.scaled(sum, r);
                let v = [s.add(v[0], self.bias[0]), s.add(v[1], self.bias[1])];
                // Not written with `map`: its closure would be compiled as a function without the AVX-512 target
                // features.
                let mut v = match self.act {
                    Act::None => v,
                    Act::Gelu => [gelu_bf16(s, v[0]), gelu_bf16(s, v[1])],
                };
                if let Some(residual) = self.residual {
                    let x = widen(residual.first.add(r * residual.ld), self.mask);
                    v = [s.add(x[0], v[0]), s.add(x[1], v[1])];
                }
                if let Some(gate) = &self.gate {
                    let gate = gate.row(s, r);
                    v = [s.mul(gate[0], v[0]), s.mul(gate[1], v[1])];
                }
                _mm512_mask_storeu_epi16(self.output.add(r * self.ld).cast(), self.mask, round(v));
            }
        }
    }
}

/// Prefetches the 32 columns of some rows of output and residual that `finish` will write and read: output rows to
/// L2, residual rows to L1.
#[inline(always)]
pub(crate) fn prefetch_output(
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

/// Packs some steps of one row of A into its lines of the tiles of a strip, with zeros from column `columns` on.
///
/// # Safety
/// `columns` elements must be readable at `row`; `to` must point to this row's 64 bytes in the first of two tiles per
/// step.
#[inline(always)]
pub(crate) unsafe fn pack_row(row: *const Bf16, columns: usize, steps: &Range<usize>, to: *mut u8) {
    for (i, step) in steps.clone().enumerate() {
        let left = columns.saturating_sub(step * STEP).min(STEP);
        // SAFETY: the mask covers the columns that the row still has; the 64 bytes written are this row's line of
        // step i.
        unsafe {
            let v = _mm512_maskz_loadu_epi16(first(left), row.wrapping_add(step * STEP).cast());
            _mm512_storeu_si512(to.add(i * 2 * TILE).cast(), v);
        }
    }
}

/// Mask of the first `n` of 32 columns.
#[inline(always)]
fn first(n: usize) -> __mmask32 {
    ((1_u64 << n) - 1) as __mmask32
}

/// Loads 32 bf16 as f32; columns outside the mask are zero and are not read.
///
/// # Safety
/// The columns in the mask must be readable at `p`, and the CPU must have AVX-512.
#[inline(always)]
unsafe fn widen(p: *const Bf16, mask: __mmask32) -> [__m512; 2] {
    // SAFETY: guaranteed by the caller.
    unsafe { wide(_mm512_maskz_loadu_epi16(mask, p.cast())) }
}

/// Converts 32 bf16 to f32: the low 16 and the high 16.
///
/// # Safety
/// The CPU must have AVX-512.
#[inline(always)]
unsafe fn wide(v: __m512i) -> [__m512; 2] {
    // SAFETY: guaranteed by the caller.
    unsafe {
        let low = _mm512_cvtepu16_epi32(_mm512_castsi512_si256(v));
        let high = _mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64::<1>(v));
        [_mm512_castsi512_ps(_mm512_slli_epi32::<16>(low)), _mm512_castsi512_ps(_mm512_slli_epi32::<16>(high))]
    }
}

/// Rounds 32 f32 to bf16, to nearest, ties to even.
///
/// # Safety
/// The CPU must have AVX-512 with BF16.
#[inline(always)]
unsafe fn round(v: [__m512; 2]) -> __m512i {
    // SAFETY: guaranteed by the caller; both types are 64 bytes.
    unsafe { core::mem::transmute::<__m512bh, __m512i>(_mm512_cvtne2ps_pbh(v[1], v[0])) }
}
