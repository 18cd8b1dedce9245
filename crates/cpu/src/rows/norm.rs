//! Layer norm, RMS norm, and batch norm with running statistics, row by row.
//!
//! Invariant: a row's mean and variance are two passes of sixty-four interleaved f32 partial sums, which are added in
//! a fixed tree, so the order of additions depends on the row's length only.

use crate::Cpu;
use crate::element::Element;
use crate::simd::isa::SimdKernel;
use crate::simd::{LANES, Simd};
use crate::view::{Rows, RowsMut};
use core::ops::Range;

/// Parameters of a layer norm. The vectors have one value per column.
#[derive(Clone, Copy)]
pub struct LayerNormParams<'a, P> {
    /// Scale.
    pub gamma: &'a [P],
    /// Shift.
    pub beta: &'a [P],
    /// Added to the variance.
    pub eps: f32,
}

/// Outputs of a layer norm; each is written if given: recomputation may need only a row's statistics.
pub struct LayerNormOutputs<'a, E> {
    /// Normalised rows. They may be exactly `x`.
    pub y: Option<RowsMut<'a, E>>,
    /// Mean of each row.
    pub mean: Option<&'a mut [f32]>,
    /// 1 / sqrt(var + eps) of each row.
    pub rstd: Option<&'a mut [f32]>,
}

/// Layer norm: y = (x - mean) * rstd * gamma + beta for each row, rstd = 1 / sqrt(var + eps) with the biased variance
/// (Ba et al., 2016; PyTorch's LayerNorm).
pub fn layer_norm<E: Element, P: Element>(
    cpu: &Cpu,
    x: Rows<'_, E>,
    params: LayerNormParams<'_, P>,
    outputs: LayerNormOutputs<'_, E>,
) {
    let LayerNormOutputs { y, mean, rstd } = outputs;
    let rows = x.rows();
    let cols = x.cols();
    assert!(y.as_ref().is_none_or(|y| y.rows() == rows && y.cols() == cols), "y is ({rows}, {cols})");
    assert!(params.gamma.len() == cols && params.beta.len() == cols, "gamma and beta of {cols}");
    let mean = start_of_statistic(mean, rows);
    let rstd = start_of_statistic(rstd, rows);
    cpu.by_rows(rows, cols, &|range| {
        let mean = mean as *mut f32;
        let rstd = rstd as *mut f32;
        cpu.isa().run(LayerNormRows { x, params, y: y.as_ref(), mean, rstd, range });
    });
}

/// Address of an output with one statistic per row, of which tasks write disjoint parts; 0 for `None`.
fn start_of_statistic(statistic: Option<&mut [f32]>, rows: usize) -> usize {
    assert!(statistic.as_ref().is_none_or(|v| v.len() == rows), "one statistic per row");
    statistic.map_or(0, |v| v.as_mut_ptr() as usize)
}

/// Parameters of an RMS norm.
#[derive(Clone, Copy)]
pub struct RmsNormParams<'a, P> {
    /// Scale of each column.
    pub gamma: &'a [P],
    /// Added to the mean square.
    pub eps: f32,
}

/// RMS norm: y = x * rstd * gamma for each row, rstd = 1 / sqrt(mean(x^2) + eps) (Zhang and Sennrich, 2019). `y` may
/// be exactly `x`. `y` and `rstd` (one value per row) are written if given.
pub fn rms_norm<E: Element, P: Element>(
    cpu: &Cpu,
    x: Rows<'_, E>,
    params: RmsNormParams<'_, P>,
    y: Option<RowsMut<'_, E>>,
    rstd: Option<&mut [f32]>,
) {
    let rows = x.rows();
    let cols = x.cols();
    assert!(y.as_ref().is_none_or(|y| y.rows() == rows && y.cols() == cols), "y is ({rows}, {cols})");
    assert!(params.gamma.len() == cols, "gamma of {cols}");
    let rstd = start_of_statistic(rstd, rows);
    cpu.by_rows(rows, cols, &|range| {
        cpu.isa().run(RmsNormRows { x, params, y: y.as_ref(), rstd: rstd as *mut f32, range });
    });
}

/// Running statistics and affine parameters of a batch norm, one value per column.
#[derive(Clone, Copy)]
pub struct RunningBatchNorm<'a> {
    /// Scale.
    pub gamma: &'a [f32],
    /// Shift.
    pub beta: &'a [f32],
    /// Running mean.
    pub mean: &'a [f32],
    /// Running variance.
    pub var: &'a [f32],
    /// Added to the variance.
    pub eps: f32,
}

/// Batch norm with running statistics: y = (x - mean) / sqrt(var + eps) * gamma + beta for each column (Ioffe and
/// Szegedy, 2015). `y` may be exactly `x`.
pub fn batch_norm(cpu: &Cpu, x: Rows<'_>, norm: RunningBatchNorm<'_>, y: RowsMut<'_>) {
    let rows = x.rows();
    let cols = x.cols();
    assert!(y.rows() == rows && y.cols() == cols, "y is ({rows}, {cols})");
    let all = [norm.gamma, norm.beta, norm.mean, norm.var];
    assert!(all.iter().all(|v| v.len() == cols), "statistics of {cols} columns");
    cpu.by_rows(rows, cols, &|range| cpu.isa().run(BatchNormRows { x, norm, y: &y, range }));
}

/// Number of rows whose statistics are computed before the first of them is written: the reductions and square roots of
/// one row alone are a chain of latencies as long as the rest of its work.
const TOGETHER: usize = 4;

/// Layer norm of the rows `range`, for `Isa::run`. Null pointers stand for statistics that are not stored.
struct LayerNormRows<'a, E, P> {
    x: Rows<'a, E>,
    params: LayerNormParams<'a, P>,
    y: Option<&'a RowsMut<'a, E>>,
    mean: *mut f32,
    rstd: *mut f32,
    range: Range<usize>,
}

impl<E: Element, P: Element> SimdKernel for LayerNormRows<'_, E, P> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let cols = self.x.cols();
        for first in self.range.clone().step_by(TOGETHER) {
            let rows = first..self.range.end.min(first + TOGETHER);
            let mut statistics = [RowStatistics { mean: 0.0, rstd: 0.0 }; TOGETHER];
            for (r, statistics) in rows.clone().zip(&mut statistics) {
                // SAFETY: row r of x holds `cols` elements.
                *statistics = unsafe { row_statistics(s, self.x.row(r), cols, self.params.eps) };
            }
            for (r, statistics) in rows.zip(statistics) {
                if let Some(y) = self.y {
                    let x = self.x.row(r);
                    let y = y.row(r);
                    let whole = cols - cols % LANES;
                    // SAFETY: row r of x, gamma and beta have `cols` elements, and so has row r of y, which only this
                    // task writes.
                    unsafe {
                        for j in (0..whole).step_by(LANES) {
                            let v = self.normalised(s, x, statistics, j, LANES);
                            E::store_n(s, y.add(j), v, LANES);
                        }
                        if whole < cols {
                            let n = cols - whole;
                            let v = self.normalised(s, x, statistics, whole, n);
                            E::store_n(s, y.add(whole), v, n);
                        }
                    }
                }
                for (column, value) in [(self.mean, statistics.mean), (self.rstd, statistics.rstd)] {
                    if !column.is_null() {
                        // SAFETY: a given column has one value per row; row r is written by this task only.
                        unsafe { column.add(r).write(value) };
                    }
                }
            }
        }
    }
}

impl<E: Element, P: Element> LayerNormRows<'_, E, P> {
    /// Computes `n` columns from `j` on of the row `x`.
    ///
    /// # Safety
    /// The columns must lie in the row, in gamma and in beta.
    #[inline(always)]
    unsafe fn normalised<S: Simd>(
        &self,
        s: S,
        x: *const E,
        statistics: RowStatistics,
        j: usize,
        n: usize,
    ) -> S::V {
        let LayerNormParams { gamma, beta, .. } = self.params;
        // SAFETY: guaranteed by the caller.
        unsafe {
            let x = E::load_n(s, x.add(j), n);
            let v = s.mul(s.sub(x, s.splat(statistics.mean)), s.splat(statistics.rstd));
            let gamma = P::load_n(s, gamma.as_ptr().add(j), n);
            s.fma(v, gamma, P::load_n(s, beta.as_ptr().add(j), n))
        }
    }
}

/// Mean and 1 / sqrt(variance + eps) of a row.
#[derive(Clone, Copy)]
pub(crate) struct RowStatistics {
    pub(crate) mean: f32,
    pub(crate) rstd: f32,
}

/// Computes the statistics of a row.
///
/// # Safety
/// `cols` elements must be readable at `x`.
#[inline(always)]
pub(crate) unsafe fn row_statistics<S: Simd, E: Element>(
    s: S,
    x: *const E,
    cols: usize,
    eps: f32,
) -> RowStatistics {
    // SAFETY: as the caller promises.
    unsafe {
        let mean = total::<S, E, false>(s, x, cols, s.splat(0.0)) / cols as f32;
        // A second pass over the row: the one-pass formula cancels where the mean is far from zero.
        let var = total::<S, E, true>(s, x, cols, s.splat(mean)) / cols as f32;
        RowStatistics { mean, rstd: 1.0 / (var + eps).sqrt() }
    }
}

/// Sum of a row or, with `SQUARES`, of its squared distances from `middle`. Four vectors of partial sums hide the
/// latency of additions; the remainder of the row is added to the first.
///
/// # Safety
/// `cols` elements must be readable at `x`.
#[inline(always)]
unsafe fn total<S: Simd, E: Element, const SQUARES: bool>(s: S, x: *const E, cols: usize, middle: S::V) -> f32 {
    let mut sums = [s.splat(0.0); SUMS];
    let whole = cols - cols % (SUMS * LANES);
    for j in (0..whole).step_by(SUMS * LANES) {
        for (k, sum) in sums.iter_mut().enumerate() {
            // SAFETY: inside the row.
            let v = unsafe { E::load(s, x.add(j + k * LANES)) };
            *sum = add::<S, SQUARES>(s, *sum, v, middle, LANES);
        }
    }
    for j in (whole..cols).step_by(LANES) {
        let n = LANES.min(cols - j);
        // SAFETY: at most the rest of the row.
        let v = unsafe { E::load_n(s, x.add(j), n) };
        sums[0] = add::<S, SQUARES>(s, sums[0], v, middle, n);
    }
    s.sum(s.add(s.add(sums[0], sums[1]), s.add(sums[2], sums[3])))
}

/// Adds one vector to a vector of partial sums. `n` lanes of `v` are valid, the others are zero; for squares they
/// must be masked, because zero minus `middle` is not zero.
#[inline(always)]
fn add<S: Simd, const SQUARES: bool>(s: S, sum: S::V, v: S::V, middle: S::V, n: usize) -> S::V {
    if !SQUARES {
        return s.add(sum, v);
    }
    let d = s.first(s.sub(v, middle), s.splat(0.0), n);
    s.fma(d, d, sum)
}

/// Number of vectors of partial sums per row.
const SUMS: usize = 4;

/// RMS norm of the rows `range`, for `Isa::run`. A null `rstd` is not stored.
struct RmsNormRows<'a, E, P> {
    x: Rows<'a, E>,
    params: RmsNormParams<'a, P>,
    y: Option<&'a RowsMut<'a, E>>,
    rstd: *mut f32,
    range: Range<usize>,
}

impl<E: Element, P: Element> SimdKernel for RmsNormRows<'_, E, P> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let cols = self.x.cols();
        for first in self.range.clone().step_by(TOGETHER) {
            let rows = first..self.range.end.min(first + TOGETHER);
            let mut rstds = [0.0; TOGETHER];
            for (r, rstd) in rows.clone().zip(&mut rstds) {
                // SAFETY: row r of x holds `cols` elements.
                let sum = unsafe { total::<S, E, true>(s, self.x.row(r), cols, s.splat(0.0)) };
                *rstd = 1.0 / (sum / cols as f32 + self.params.eps).sqrt();
            }
            for (r, rstd) in rows.zip(rstds) {
                if let Some(y) = self.y {
                    let x = self.x.row(r);
                    let y = y.row(r);
                    let whole = cols - cols % LANES;
                    // SAFETY: row r of x and gamma have `cols` elements, and so has row r of y, which only this task
                    // writes.
                    unsafe {
                        for j in (0..whole).step_by(LANES) {
                            E::store_n(s, y.add(j), self.normalised(s, x, rstd, j, LANES), LANES);
                        }
                        if whole < cols {
                            let n = cols - whole;
                            E::store_n(s, y.add(whole), self.normalised(s, x, rstd, whole, n), n);
                        }
                    }
                }
                if !self.rstd.is_null() {
                    // SAFETY: a given column has one value per row; row r is written by this task only.
                    unsafe { self.rstd.add(r).write(rstd) };
                }
            }
        }
    }
}

impl<E: Element, P: Element> RmsNormRows<'_, E, P> {
    /// Computes `n` columns from `j` on of the row `x`.
    ///
    /// # Safety
    /// The columns must lie in the row and in gamma.
    #[inline(always)]
    unsafe fn normalised<S: Simd>(&self, s: S, x: *const E, rstd: f32, j: usize, n: usize) -> S::V {
        // SAFETY: guaranteed by the caller.
        unsafe {
            let gamma = P::load_n(s, self.params.gamma.as_ptr().add(j), n);
            let v = s.mul(E::load_n(s, x.add(j), n), s.splat(rstd));
            s.mul(v, gamma)
        }
    }
}

/// Batch norm of the rows `range`, for `Isa::run`.
struct BatchNormRows<'a> {
    x: Rows<'a>,
    norm: RunningBatchNorm<'a>,
    y: &'a RowsMut<'a>,
    range: Range<usize>,
}

impl SimdKernel for BatchNormRows<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let cols = self.x.cols();
        let norm = self.norm;
        for j in (0..cols).step_by(LANES) {
            let n = LANES.min(cols - j);
            // SAFETY: j + n <= cols, the length of all four columns.
            let [gamma, beta, mean, var] =
                unsafe { [norm.gamma, norm.beta, norm.mean, norm.var].map(|v| s.load_n(v.as_ptr().add(j), n)) };
            let rstd = s.div(s.splat(1.0), s.sqrt(s.add(var, s.splat(norm.eps))));
            for r in self.range.clone() {
                // SAFETY: row r of x and y holds `cols` f32.
                unsafe {
                    let v = s.mul(s.sub(s.load_n(self.x.row(r).add(j), n), mean), rstd);
                    s.store_n(self.y.row(r).add(j), s.fma(v, gamma, beta), n);
                }
            }
        }
    }
}
