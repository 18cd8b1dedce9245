//! Batch norm in training: the forward pass with batch statistics, and the gradients of batch norm with batch or
//! running statistics.
//!
//! Invariant: a column's results depend on that column alone. Sums over rows are added in the order of `columns`;
//! the variance is computed in two passes, from differences to the mean.

use crate::Cpu;
use crate::rows::columns::{self, ColumnTerms};
use crate::simd::isa::SimdKernel;
use crate::simd::{LANES, Simd};
use crate::view::{Rows, RowsMut};

/// Inputs and attributes of batch norm in training. The vectors have one value per column.
#[derive(Clone, Copy)]
pub struct TrainedBatchNorm<'a> {
    /// Rows to normalise (N, C), at least two.
    pub x: Rows<'a>,
    /// Scale.
    pub gamma: &'a [f32],
    /// Shift.
    pub beta: &'a [f32],
    /// Running mean and running variance before this step.
    pub running: [&'a [f32]; 2],
    /// Added to the variance.
    pub eps: f32,
    /// Weight of this batch's statistics in the new running statistics.
    pub momentum: f32,
}

/// Batch norm in training: y = (x - mean) rstd gamma + beta, with the mean and the biased variance of each column
/// (Ioffe and Szegedy, 2015) and rstd = 1 / sqrt(var + eps). `statistics` are the outputs mean, rstd, new running
/// mean and new running variance, which uses the unbiased variance; each is written if given. Panics if there are
/// fewer than two rows or the shapes do not match.
pub fn batch_norm_train(
    cpu: &Cpu,
    norm: TrainedBatchNorm<'_>,
    y: Option<RowsMut<'_>>,
    statistics: [Option<&mut [f32]>; 4],
) {
    let rows = norm.x.rows();
    let cols = norm.x.cols();
    assert!(rows >= 2, "the variance of a batch needs two rows");
    assert!(y.as_ref().is_none_or(|y| y.rows() == rows && y.cols() == cols), "y is ({rows}, {cols})");
    let read = [norm.gamma, norm.beta, norm.running[0], norm.running[1]];
    assert!(read.iter().all(|v| v.len() == cols), "vectors of {cols} columns");
    let outs = statistics.map(|out| columns::start_of(out, cols));
    by_columns(cpu, cols, &|columns| {
        cpu.isa().run(BatchNormTrainColumns { norm, y: y.as_ref(), outs, columns })
    });
}

/// Inputs of the gradient of batch norm. The vectors have one value per column.
#[derive(Clone, Copy)]
pub struct BatchNormGradInputs<'a> {
    /// Gradient of the output (N, C).
    pub dy: Rows<'a>,
    /// Input of the batch norm (N, C).
    pub x: Rows<'a>,
    /// Scale.
    pub gamma: &'a [f32],
    /// Mean that was subtracted.
    pub mean: &'a [f32],
    /// Statistics that the columns were divided by.
    pub spread: BatchStatistics<'a>,
}

/// Standard deviation of each column, from the batch or from running statistics.
#[derive(Clone, Copy)]
pub enum BatchStatistics<'a> {
    /// rstd = 1 / sqrt(var + eps) of this batch. Mean and rstd are functions of x, so dx has their terms too.
    Batch(&'a [f32]),
    /// Running variance and eps. Mean and variance are constants with respect to x.
    Running(&'a [f32], f32),
}

/// Computes the gradients of batch norm. With h = (x - mean) rstd: dgamma = sum dy h and dbeta = sum dy over rows; dx
/// = gamma rstd dy for running statistics and gamma rstd (dy - mean(dy) - h mean(dy h)) for batch statistics. Each
/// output is written if given. Panics if the shapes do not match.
pub fn batch_norm_grad(
    cpu: &Cpu,
    norm: BatchNormGradInputs<'_>,
    dx: Option<RowsMut<'_>>,
    dgamma: Option<&mut [f32]>,
    dbeta: Option<&mut [f32]>,
) {
    let rows = norm.dy.rows();
    let cols = norm.dy.cols();
    assert!(norm.x.rows() == rows && norm.x.cols() == cols, "x is ({rows}, {cols})");
    assert!(dx.as_ref().is_none_or(|dx| dx.rows() == rows && dx.cols() == cols), "dx is ({rows}, {cols})");
    let (BatchStatistics::Batch(spread) | BatchStatistics::Running(spread, _)) = norm.spread;
    assert!([norm.gamma, norm.mean, spread].iter().all(|v| v.len() == cols), "vectors of {cols} columns");
    let outs = [dgamma, dbeta].map(|out| columns::start_of(out, cols));
    by_columns(cpu, cols, &|columns| {
        cpu.isa().run(BatchNormGradColumns { norm, dx: dx.as_ref(), outs, columns })
    });
}

/// Runs `work` in parallel, one task for each group of at most [`LANES`] columns.
fn by_columns(cpu: &Cpu, cols: usize, work: &(dyn Fn(ColumnGroup) + Sync)) {
    cpu.pool().run(cols.div_ceil(LANES), &|task, _| {
        let j = task * LANES;
        work(ColumnGroup { j, n: LANES.min(cols - j) });
    });
}

/// The columns `j..j + n` of one task; `n` is at most [`LANES`].
#[derive(Clone, Copy)]
struct ColumnGroup {
    j: usize,
    n: usize,
}

impl ColumnGroup {
    /// Loads the elements of `v`, a vector with one element per column; zeros in the lanes past `n`.
    #[inline(always)]
    fn of<S: Simd>(self, s: S, v: &[f32]) -> S::V {
        let v = &v[self.j..self.j + self.n];
        // SAFETY: the slice has n elements.
        unsafe { s.load_n(v.as_ptr(), self.n) }
    }

    /// Loads these columns of row `r`; zeros in the lanes past `n`.
    ///
    /// # Safety
    /// `x` must have the row and the columns.
    #[inline(always)]
    unsafe fn row<S: Simd>(self, s: S, x: Rows<'_>, r: usize) -> S::V {
        // SAFETY: guaranteed by the caller.
        unsafe { s.load_n(x.row(r).add(self.j), self.n) }
    }

    /// Stores these columns of a per-column output that starts at address `out`; does nothing if `out` is 0.
    ///
    /// # Safety
    /// `out` is 0 or the start of an output with one element per column, of which only this task accesses these
    /// columns.
    #[inline(always)]
    unsafe fn put<S: Simd>(self, s: S, out: usize, v: S::V) {
        if out != 0 {
            // SAFETY: guaranteed by the caller.
            unsafe { s.store_n((out as *mut f32).add(self.j), v, self.n) };
        }
    }
}

/// Terms of mean and variance: x - mean and (x - mean)^2. `mean` holds the values of the task's columns.
#[derive(Clone, Copy)]
struct Moments<'a> {
    x: Rows<'a>,
    mean: [f32; LANES],
}

impl ColumnTerms for Moments<'_> {
    #[inline(always)]
    unsafe fn at<S: Simd>(&self, s: S, r: usize, j: usize, n: usize) -> [S::V; 2] {
        // SAFETY: the caller promises the row and the columns; the mean has all lanes.
        unsafe {
            let d = s.sub(s.load_n(self.x.row(r).add(j), n), s.load(self.mean.as_ptr()));
            [d, s.mul(d, d)]
        }
    }
}

/// Forward pass for the columns of one task, for `Isa::run`. An output with address 0 is not written.
struct BatchNormTrainColumns<'a> {
    norm: TrainedBatchNorm<'a>,
    y: Option<&'a RowsMut<'a>>,
    outs: [usize; 4],
    columns: ColumnGroup,
}

impl SimdKernel for BatchNormTrainColumns<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let norm = self.norm;
        let columns = self.columns;
        let rows = norm.x.rows();
        let n = s.splat(rows as f32);
        // With a mean of zero, the first term is x itself.
        let [sum, _] = self.moments(s, [0.0; LANES]);
        let mean = s.div(sum, n);
        let mut centre = [0.0; LANES];
        // SAFETY: the array holds sixteen f32.
        unsafe { s.store(centre.as_mut_ptr(), mean) };
        let [_, squares] = self.moments(s, centre);
        let rstd = s.div(s.splat(1.0), s.sqrt(s.add(s.div(squares, n), s.splat(norm.eps))));
        let new_mean = self.moved(s, norm.running[0], mean);
        // The running variance is the unbiased one.
        let new_var = self.moved(s, norm.running[1], s.div(squares, s.splat((rows - 1) as f32)));
        for (out, v) in self.outs.into_iter().zip([mean, rstd, new_mean, new_var]) {
            // SAFETY: each output has one element per column, and only this task accesses these columns.
            unsafe { columns.put(s, out, v) };
        }
        let Some(y) = self.y else { return };
        let gamma = columns.of(s, norm.gamma);
        let beta = columns.of(s, norm.beta);
        for r in 0..rows {
            // SAFETY: row r of x and y has these columns, which only this task writes.
            unsafe {
                let h = s.mul(s.sub(columns.row(s, norm.x, r), mean), rstd);
                s.store_n(y.row(r).add(columns.j), s.fma(h, gamma, beta), columns.n);
            }
        }
    }
}

impl BatchNormTrainColumns<'_> {
    /// Sums of x - mean and of (x - mean)^2 over the rows.
    #[inline(always)]
    fn moments<S: Simd>(&self, s: S, mean: [f32; LANES]) -> [S::V; 2] {
        let x = self.norm.x;
        // SAFETY: the columns exist in every row of x.
        unsafe { columns::sum(s, &Moments { x, mean }, x.rows(), self.columns.j, self.columns.n) }
    }

    /// The running statistic `old`, moved towards the batch's.
    #[inline(always)]
    fn moved<S: Simd>(&self, s: S, old: &[f32], batch: S::V) -> S::V {
        let keep = s.splat(1.0 - self.norm.momentum);
        let take = s.splat(self.norm.momentum);
        s.fma(take, batch, s.mul(keep, self.columns.of(s, old)))
    }
}

/// Terms of dgamma and dbeta: dy h and dy, with h = (x - mean) rstd. `mean` and `rstd` hold the values of the task's
/// columns.
#[derive(Clone, Copy)]
struct BatchGradTerms<'a> {
    dy: Rows<'a>,
    x: Rows<'a>,
    mean: [f32; LANES],
    rstd: [f32; LANES],
}

impl ColumnTerms for BatchGradTerms<'_> {
    #[inline(always)]
    unsafe fn at<S: Simd>(&self, s: S, r: usize, j: usize, n: usize) -> [S::V; 2] {
        // SAFETY: the caller promises the row and the columns; the vectors have all lanes.
        unsafe {
            let dy = s.load_n(self.dy.row(r).add(j), n);
            let d = s.sub(s.load_n(self.x.row(r).add(j), n), s.load(self.mean.as_ptr()));
            [s.mul(dy, s.mul(d, s.load(self.rstd.as_ptr()))), dy]
        }
    }
}

/// Gradients of the columns of one task, for `Isa::run`. An output with address 0 is not written.
struct BatchNormGradColumns<'a> {
    norm: BatchNormGradInputs<'a>,
    dx: Option<&'a RowsMut<'a>>,
    outs: [usize; 2],
    columns: ColumnGroup,
}

impl SimdKernel for BatchNormGradColumns<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let norm = self.norm;
        let columns = self.columns;
        let rows = self.norm.dy.rows();
        let one = s.splat(1.0);
        let (mean, rstd) = match norm.spread {
            BatchStatistics::Batch(rstd) => (columns.of(s, norm.mean), columns.of(s, rstd)),
            BatchStatistics::Running(var, eps) => {
                let deviation = s.sqrt(s.add(columns.of(s, var), s.splat(eps)));
                (columns.of(s, norm.mean), s.div(one, deviation))
            }
        };
        let mut terms = BatchGradTerms { dy: norm.dy, x: norm.x, mean: [0.0; LANES], rstd: [0.0; LANES] };
        // SAFETY: the arrays hold sixteen f32 each; the columns exist in every row of dy and x.
        let [dgamma, dbeta] = unsafe {
            s.store(terms.mean.as_mut_ptr(), mean);
            s.store(terms.rstd.as_mut_ptr(), rstd);
            columns::sum(s, &terms, rows, columns.j, columns.n)
        };
        for (out, v) in self.outs.into_iter().zip([dgamma, dbeta]) {
            // SAFETY: each output has one element per column, and only this task accesses these columns.
            unsafe { columns.put(s, out, v) };
        }
        let Some(dx) = self.dx else { return };
        let k = s.mul(columns.of(s, norm.gamma), rstd);
        let (mean_dy, minus_dyh) = match norm.spread {
            BatchStatistics::Batch(_) => {
                let n = s.splat(rows as f32);
                (s.div(dbeta, n), s.sub(s.splat(0.0), s.div(dgamma, n)))
            }
            BatchStatistics::Running(..) => (s.splat(0.0), s.splat(0.0)),
        };
        for r in 0..rows {
            // SAFETY: row r of dy, x and dx has these columns, which only this task writes.
            unsafe {
                let h = s.mul(s.sub(columns.row(s, norm.x, r), mean), rstd);
                let d = s.fma(h, minus_dyh, s.sub(columns.row(s, norm.dy, r), mean_dy));
                s.store_n(dx.row(r).add(columns.j), s.mul(k, d), columns.n);
            }
        }
    }
}
