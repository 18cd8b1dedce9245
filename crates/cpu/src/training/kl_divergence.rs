//! Kullback-Leibler divergence between the softmaxes of rows of logits, the loss of distillation, and its gradient.
//!
//! Invariant: a row's sums have one order, fixed by its columns; the rows are added in f64, in order from the first to the
//! last.

use crate::Cpu;
use crate::simd::isa::SimdKernel;
use crate::simd::math::{exp, log_sum_exp};
use crate::simd::{LANES, Simd};
use crate::training::cross_entropy::sum_exp;
use crate::view::{Rows, RowsMut};
use core::ops::Range;

/// The sum over rows of `sum_c q (ln q - ln p)` with p = softmax(x) and q = softmax(y). One thread computes it: classifiers
/// have few rows and classes.
pub fn divergence(cpu: &Cpu, x: Rows<'_>, y: Rows<'_>) -> f32 {
    assert!(x.rows() == y.rows() && x.cols() == y.cols(), "x and y of one shape");
    let mut total = 0.0;
    if x.cols() > 0 {
        cpu.isa().run(RowDivergences { x, y, total: &mut total });
    }
    total as f32
}

/// Gradient of [`divergence`] by x: dx = dloss (softmax(x) - softmax(y)). `dx` may be exactly `x` or `y`.
pub fn gradient(cpu: &Cpu, dloss: f32, x: Rows<'_>, y: Rows<'_>, dx: RowsMut<'_>) {
    let rows = x.rows();
    let cols = x.cols();
    assert!(y.rows() == rows && y.cols() == cols, "y is ({rows}, {cols})");
    assert!(dx.rows() == rows && dx.cols() == cols, "dx is ({rows}, {cols})");
    if cols > 0 {
        cpu.by_rows(rows, cols, &|range| cpu.isa().run(DivergenceGradRows { dloss, x, y, dx: &dx, range }));
    }
}

/// Adds the divergences of all rows to `total`, for `Isa::run`.
struct RowDivergences<'a> {
    x: Rows<'a>,
    y: Rows<'a>,
    total: &'a mut f64,
}

impl SimdKernel for RowDivergences<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let cols = self.x.cols();
        for r in 0..self.x.rows() {
            let x = self.x.row(r);
            let y = self.y.row(r);
            // SAFETY: row r of x and y holds `cols` f32, and j + n <= cols.
            unsafe {
                let (top_x, sum_x) = sum_exp(s, x, cols);
                let (top_y, sum_y) = sum_exp(s, y, cols);
                // sum exp(y - top_y) (y - x), which is sum_y times the mean of y - x under q.
                let mut distance = s.splat(0.0);
                for j in (0..cols).step_by(LANES) {
                    let n = LANES.min(cols - j);
                    let x = s.load_n(x.add(j), n);
                    let y = s.load_n(y.add(j), n);
                    let term = s.mul(exp(s, s.sub(y, s.splat(top_y))), s.sub(y, x));
                    distance = s.add(distance, s.first(term, s.splat(0.0), n));
                }
                let mean = f64::from(s.sum(distance)) / sum_y;
                *self.total += mean + log_sum_exp(top_x, sum_x) - log_sum_exp(top_y, sum_y);
            }
        }
    }
}

/// Gradient of the rows `range`, for `Isa::run`.
struct DivergenceGradRows<'a> {
    dloss: f32,
    x: Rows<'a>,
    y: Rows<'a>,
    dx: &'a RowsMut<'a>,
    range: Range<usize>,
}

impl SimdKernel for DivergenceGradRows<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let cols = self.x.cols();
        for r in self.range.clone() {
            let x = self.x.row(r);
            let y = self.y.row(r);
            let dx = self.dx.row(r);
            // SAFETY: row r of x, y and dx holds `cols` f32, and j + n <= cols; elements are read before they are written.
            unsafe {
                let (top_x, sum_x) = sum_exp(s, x, cols);
                let (top_y, sum_y) = sum_exp(s, y, cols);
                let [factor_p, factor_q] =
                    [sum_x, sum_y].map(|sum| s.splat((f64::from(self.dloss) / sum) as f32));
                for j in (0..cols).step_by(LANES) {
                    let n = LANES.min(cols - j);
                    let p = exp(s, s.sub(s.load_n(x.add(j), n), s.splat(top_x)));
                    let q = exp(s, s.sub(s.load_n(y.add(j), n), s.splat(top_y)));
                    s.store_n(dx.add(j), s.sub(s.mul(factor_p, p), s.mul(factor_q, q)), n);
                }
            }
        }
    }
}
