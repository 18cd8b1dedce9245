//! Layer norm, RMS norm, and batch norm with running statistics, row by row.
//!
//! Invariant: a row's mean and variance are two passes of sixty-four interleaved f32 partial sums, which are added in
//! a fixed tree, so the order of additions depends on the row's length only.

use crate::Cpu;
use crate::element::Element;
use crate::simd::isa::Kernel;
use crate::simd::{LANES, Simd};
use crate::view::{Rows, RowsMut};
use core::ops::Range;

/// Layer norm: y = (x - mean) * rstd * gamma + beta for each row, rstd = 1 / sqrt(var + eps) with the biased variance
/// (Ba et al., 2016; PyTorch's LayerNorm). `y` may be exactly `x`. `y`, `mean` and `rstd` (one value per row each)
/// are written if given: recomputation may need only a row's statistics.
#[allow(clippy::too_many_arguments)] // the op's inputs and outputs, each once
pub fn layer_norm<E: Element, P: Element>(
    cpu: &Cpu,
    x: Rows<'_, E>,
    gamma: &[P],
    beta: &[P],
    eps: f32,
    y: Option<RowsMut<'_, E>>,
    mean: Option<&mut [f32]>,
    rstd: Option<&mut [f32]>,
) {
    let rows = x.rows();
    let cols = x.cols();
    assert!(y.as_ref().is_none_or(|y| y.rows() == rows && y.cols() == cols), "y is ({rows}, {cols})");
    assert!(gamma.len() == cols && beta.len() == cols, "gamma and beta of {cols}");
    let column = |v: Option<&mut [f32]>| {
        assert!(v.as_ref().is_none_or(|v| v.len() == rows), "one statistic per row");
        v.map_or(0, |v| v.as_mut_ptr() as usize)
    };
    let mean = column(mean);
    let rstd = column(rstd);
    cpu.by_rows(rows, cols, &|range| {
        let mean = mean as *mut f32;
        let rstd = rstd as *mut f32;
        cpu.isa().run(LayerNorm { x, gamma, beta, eps, y: y.as_ref(), mean, rstd, range });
    });
}

/// RMS norm: y = x * rstd * gamma for each row, rstd = 1 / sqrt(mean(x^2) + eps) (Zhang and Sennrich, 2019). `y` may
/// be exactly `x`. `y` and `rstd` (one value per row) are written if given.
pub fn rms_norm<E: Element, P: Element>(
    cpu: &Cpu,
    x: Rows<'_, E>,
    gamma: &[P],
    eps: f32,
    y: Option<RowsMut<'_, E>>,
    rstd: Option<&mut [f32]>,
) {
    let rows = x.rows();
    let cols = x.cols();
    assert!(y.as_ref().is_none_or(|y| y.rows() == rows && y.cols() == cols), "y is ({rows}, {cols})");
    assert!(gamma.len() == cols, "gamma of {cols}");
    assert!(rstd.as_ref().is_none_or(|v| v.len() == rows), "one statistic per row");
    let rstd = rstd.map_or(0, |v| v.as_mut_ptr() as usize);
    cpu.by_rows(rows, cols, &|range| {
        cpu.isa().run(RmsNorm { x, gamma, eps, y: y.as_ref(), rstd: rstd as *mut f32, range });
    });
}

/// Running statistics and affine parameters of a batch norm, one value per column.
#[derive(Clone, Copy)]
pub struct BatchNorm<'a> {
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
pub fn batch_norm(cpu: &Cpu, x: Rows<'_>, norm: BatchNorm<'_>, y: RowsMut<'_>) {
    let rows = x.rows();
    let cols = x.cols();
    assert!(y.rows() == rows && y.cols() == cols, "y is ({rows}, {cols})");
    let all = [norm.gamma, norm.beta, norm.mean, norm.var];
    assert!(all.iter().all(|v| v.len() == cols), "statistics of {cols} columns");
    cpu.by_rows(rows, cols, &|range| cpu.isa().run(Batch { x, norm, y: &y, range }));
}

/// Number of rows whose statistics are computed before the first of them is written: the reductions and square roots of
/// one row alone are a chain of latencies as long as the rest of its work.
const TOGETHER: usize = 4;

/// Layer norm of the rows `range`, for `Isa::run`. Null pointers stand for statistics that are not stored.
struct LayerNorm<'a, E, P> {
    x: Rows<'a, E>,
    gamma: &'a [P],
    beta: &'a [P],
    eps: f32,
    y: Option<&'a RowsMut<'a, E>>,
    mean: *mut f32,
    rstd: *mut f32,
    range: Range<usize>,
}

impl<E: Element, P: Element> Kernel for LayerNorm<'_, E, P> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let cols = self.x.cols();
        for first in self.range.clone().step_by(TOGETHER) {
            let rows = first..self.range.end.min(first + TOGETHER);
            let mut of = [(0.0, 0.0); TOGETHER];
            for (r, of) in rows.clone().zip(&mut of) {
                // SAFETY: row r of x holds `cols` elements.
                *of = unsafe { statistics(s, self.x.row(r), cols, self.eps) };
            }
            for (r, (mean, rstd)) in rows.zip(of) {
                if let Some(y) = self.y {
                    let whole = cols - cols % LANES;
                    // SAFETY: row r of x, gamma and beta have `cols` elements, and so has row r of y, which only this
                    // task writes.
                    unsafe {
                        for j in (0..whole).step_by(LANES) {
                            self.write(s, r, y.row(r), (j, LANES), (mean, rstd));
                        }
                        if whole < cols {
                            self.write(s, r, y.row(r), (whole, cols - whole), (mean, rstd));
                        }
                    }
                }
                for (column, value) in [(self.mean, mean), (self.rstd, rstd)] {
                    if !column.is_null() {
                        // SAFETY: a given column has one value per row; row r is written by this task only.
                        unsafe { column.add(r).write(value) };
                    }
                }
            }
        }
    }
}

impl<E: Element, P: Element> LayerNorm<'_, E, P> {
    /// Writes `n` columns from `j` on of row `r`.
    ///
    /// # Safety
    /// The columns must lie in row r of x, in row `y`, in gamma and in beta.
    #[inline(always)]
    unsafe fn write<S: Simd>(
        &self,
        s: S,
        r: usize,
        y: *mut E,
        (j, n): (usize, usize),
        (mean, rstd): (f32, f32),
    ) {
        // SAFETY: guaranteed by the caller.
        unsafe {
            let x = E::load_n(s, self.x.row(r).add(j), n);
            let v = s.mul(s.sub(x, s.splat(mean)), s.splat(rstd));
            let gamma = P::load_n(s, self.gamma.as_ptr().add(j), n);
            let beta = P::load_n(s, self.beta.as_ptr().add(j), n);
            E::store_n(s, y.add(j), s.fma(v, gamma, beta), n);
        }
    }
}

/// Mean and 1 / sqrt(variance + eps) of a row.
///
/// # Safety
/// `cols` elements must be readable at `x`.
#[inline(always)]
pub(crate) unsafe fn statistics<S: Simd, E: Element>(s: S, x: *const E, cols: usize, eps: f32) -> (f32, f32) {
    // SAFETY: as the caller promises.
    unsafe {
        let mean = total::<S, E, false>(s, x, cols, s.splat(0.0)) / cols as f32;
        let var = total::<S, E, true>(s, x, cols, s.splat(mean)) / cols as f32;
        (mean, 1.0 / (var + eps).sqrt())
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
struct RmsNorm<'a, E, P> {
    x: Rows<'a, E>,
    gamma: &'a [P],
    eps: f32,
    y: Option<&'a RowsMut<'a, E>>,
    rstd: *mut f32,
    range: Range<usize>,
}

impl<E: Element, P: Element> Kernel for RmsNorm<'_, E, P> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let cols = self.x.cols();
        for first in self.range.clone().step_by(TOGETHER) {
            let rows = first..self.range.end.min(first + TOGETHER);
            let mut of = [0.0; TOGETHER];
            for (r, of) in rows.clone().zip(&mut of) {
                // SAFETY: row r of x holds `cols` elements.
                let sum = unsafe { total::<S, E, true>(s, self.x.row(r), cols, s.splat(0.0)) };
                *of = 1.0 / (sum / cols as f32 + self.eps).sqrt();
            }
            for (r, rstd) in rows.zip(of) {
                if let Some(y) = self.y {
                    let whole = cols - cols % LANES;
                    // SAFETY: row r of x and gamma have `cols` elements, and so has row r of y, which only this task
                    // writes.
                    unsafe {
                        for j in (0..whole).step_by(LANES) {
                            self.write(s, r, y.row(r), (j, LANES), rstd);
                        }
                        if whole < cols {
                            self.write(s, r, y.row(r), (whole, cols - whole), rstd);
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

impl<E: Element, P: Element> RmsNorm<'_, E, P> {
    /// Writes `n` columns from `j` on of row `r`.
    ///
    /// # Safety
    /// The columns must lie in row r of x, in row `y` and in gamma.
    #[inline(always)]
    unsafe fn write<S: Simd>(&self, s: S, r: usize, y: *mut E, (j, n): (usize, usize), rstd: f32) {
        // SAFETY: guaranteed by the caller.
        unsafe {
            let gamma = P::load_n(s, self.gamma.as_ptr().add(j), n);
            let v = s.mul(E::load_n(s, self.x.row(r).add(j), n), s.splat(rstd));
            E::store_n(s, y.add(j), s.mul(v, gamma), n);
        }
    }
}

/// Batch norm of the rows `range`, for `Isa::run`.
struct Batch<'a> {
    x: Rows<'a>,
    norm: BatchNorm<'a>,
    y: &'a RowsMut<'a>,
    range: Range<usize>,
}

impl Kernel for Batch<'_> {
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
