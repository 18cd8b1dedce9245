//! Gradients of layer norm and RMS norm with respect to the rows, the scale and the shift.
//!
//! Invariant: a row's gradient depends on that row alone, with sums in a fixed tree. The gradients of scale and shift
//! are sums over rows, in the order of `columns`.

use crate::Cpu;
use crate::rows::columns::{self, ColumnTerms};
use crate::simd::isa::SimdKernel;
use crate::simd::{LANES, Simd};
use crate::view::{Rows, RowsMut};
use core::ops::Range;

/// Inputs of a norm's gradient.
#[derive(Clone, Copy)]
pub struct NormGradInputs<'a> {
    /// Gradient of the norm's output.
    pub dy: Rows<'a>,
    /// Input of the norm.
    pub x: Rows<'a>,
    /// Mean of each row; `None` for RMS norm.
    pub mean: Option<&'a [f32]>,
    /// 1 / standard deviation of each row (for RMS norm 1 / root mean square).
    pub rstd: &'a [f32],
    /// Scale of each column.
    pub gamma: &'a [f32],
}

/// Computes the gradients of layer norm and RMS norm. With h = (x - mean) rstd and g = dy gamma: dx = rstd (g - sum g
/// / D - h sum (g h) / D), without the term sum g / D for RMS norm; dgamma = sum dy h and dbeta = sum dy over rows.
/// `dx` may be exactly `dy` or `x`.
pub fn norm_grad(
    cpu: &Cpu,
    norm: NormGradInputs<'_>,
    dx: Option<RowsMut<'_>>,
    dgamma: Option<&mut [f32]>,
    dbeta: Option<&mut [f32]>,
) {
    let rows = norm.dy.rows();
    let cols = norm.dy.cols();
    assert!(norm.x.rows() == rows && norm.x.cols() == cols, "x is ({rows}, {cols})");
    let statistics = norm.rstd.len() == rows && norm.mean.is_none_or(|mean| mean.len() == rows);
    assert!(statistics && norm.gamma.len() == cols, "one statistic per row, one scale per column");
    // Must come before dx, which may overwrite the inputs of these sums.
    columns::sums(cpu, rows, cols, NormGradTerms(norm), [dgamma, dbeta]);
    if let Some(dx) = dx {
        assert!(dx.rows() == rows && dx.cols() == cols, "dx is ({rows}, {cols})");
        cpu.by_rows(rows, cols, &|range| cpu.isa().run(InputGradRows { norm, dx: &dx, range }));
    }
}

/// Terms of dgamma and dbeta: dy h and dy.
#[derive(Clone, Copy)]
struct NormGradTerms<'a>(NormGradInputs<'a>);

impl NormGradInputs<'_> {
    /// The normalised input h of row `r`, columns `j..j + n`.
    ///
    /// # Safety
    /// The row and the columns must exist.
    #[inline(always)]
    unsafe fn normalised<S: Simd>(&self, s: S, r: usize, j: usize, n: usize) -> S::V {
        // SAFETY: the caller's promise.
        let x = unsafe { s.load_n(self.x.row(r).add(j), n) };
        let centred = self.mean.map_or(x, |mean| s.sub(x, s.splat(mean[r])));
        s.mul(centred, s.splat(self.rstd[r]))
    }

    /// g = dy gamma of row `r`, columns `j..j + n`; zero in the lanes past `n`.
    ///
    /// # Safety
    /// The row and the columns must exist.
    #[inline(always)]
    unsafe fn weighted<S: Simd>(&self, s: S, r: usize, j: usize, n: usize) -> S::V {
        // SAFETY: the caller's promise.
        unsafe { s.mul(s.load_n(self.dy.row(r).add(j), n), s.load_n(self.gamma.as_ptr().add(j), n)) }
    }
}

impl ColumnTerms for NormGradTerms<'_> {
    #[inline(always)]
    unsafe fn at<S: Simd>(&self, s: S, r: usize, j: usize, n: usize) -> [S::V; 2] {
        // SAFETY: the caller's promise.
        unsafe {
            let dy = s.load_n(self.0.dy.row(r).add(j), n);
            [s.mul(dy, self.0.normalised(s, r, j, n)), dy]
        }
    }
}

/// dx of the rows `range`, for `Isa::run`.
struct InputGradRows<'a> {
    norm: NormGradInputs<'a>,
    dx: &'a RowsMut<'a>,
    range: Range<usize>,
}

impl SimdKernel for InputGradRows<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let cols = self.dx.cols();
        let norm = self.norm;
        for r in self.range.clone() {
            let mut sum_g = s.splat(0.0);
            let mut sum_gh = s.splat(0.0);
            for j in (0..cols).step_by(LANES) {
                let n = LANES.min(cols - j);
                // Lanes past n are 0 in g, and finite in h if the row's statistics are, so they add 0 to the sum.
                // SAFETY: j + n <= cols.
                unsafe {
                    let g = norm.weighted(s, r, j, n);
                    sum_g = s.add(sum_g, g);
                    sum_gh = s.fma(g, norm.normalised(s, r, j, n), sum_gh);
                }
            }
            let mean_g = if norm.mean.is_some() { s.sum(sum_g) / cols as f32 } else { 0.0 };
            let mean_g = s.splat(mean_g);
            let minus_gh = s.splat(-s.sum(sum_gh) / cols as f32);
            for j in (0..cols).step_by(LANES) {
                let n = LANES.min(cols - j);
                // SAFETY: j + n <= cols; the elements at j are read before they are written.
                unsafe {
                    let h = norm.normalised(s, r, j, n);
                    let d = s.fma(h, minus_gh, s.sub(norm.weighted(s, r, j, n), mean_g));
                    s.store_n(self.dx.row(r).add(j), s.mul(d, s.splat(norm.rstd[r])), n);
                }
            }
        }
    }
}
