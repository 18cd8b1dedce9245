//! Batch norm in training, by column: statistics of the batch, and the gradients of both forms.
//!
//! Invariant: a column depends on itself alone; its sums are those of `columns`, its variance that of the
//! differences from its mean.

use super::Cpu;
use super::columns::{self, Terms};
use super::isa::Kernel;
use super::simd::{LANES, Simd};
use super::view::{Rows, RowsMut};

/// What batch norm reads in training.
#[derive(Clone, Copy)]
pub struct BatchNormTrain<'a> {
    /// At least two rows.
    pub x: Rows<'a>,
    /// Scale.
    pub gamma: &'a [f32],
    /// Shift.
    pub beta: &'a [f32],
    /// Running mean and variance so far.
    pub running: [&'a [f32]; 2],
    /// Added to the variance.
    pub eps: f32,
    /// Weight of this batch in the running statistics.
    pub momentum: f32,
}

/// y = (x - mean) rstd gamma + beta with the mean and the biased variance of each column (Ioffe and Szegedy,
/// 2015); `statistics` gets mean, rstd and the new running mean and (unbiased) variance, where wanted.
pub fn batch_norm_train(
    cpu: &Cpu,
    norm: BatchNormTrain<'_>,
    y: Option<RowsMut<'_>>,
    statistics: [Option<&mut [f32]>; 4],
) {
    let (rows, cols) = (norm.x.rows(), norm.x.cols());
    assert!(rows >= 2, "the variance of a batch needs two rows");
    assert!(y.as_ref().is_none_or(|y| y.rows() == rows && y.cols() == cols), "y is ({rows}, {cols})");
    let read = [norm.gamma, norm.beta, norm.running[0], norm.running[1]];
    assert!(read.iter().all(|v| v.len() == cols), "vectors of {cols} columns");
    let outs = statistics.map(|out| columns::start_of(out, cols));
    by_columns(cpu, cols, &|columns| cpu.isa().run(Train { norm, y: y.as_ref(), outs, columns }));
}

/// What the gradients of batch norm are computed from.
#[derive(Clone, Copy)]
pub struct BatchNormGrad<'a> {
    /// The gradient of the result.
    pub dy: Rows<'a>,
    /// What was normalised.
    pub x: Rows<'a>,
    /// Scale.
    pub gamma: &'a [f32],
    /// The mean of each column.
    pub mean: &'a [f32],
    /// The spread of each column.
    pub spread: Spread<'a>,
}

/// The spread of each column.
#[derive(Clone, Copy)]
pub enum Spread<'a> {
    /// 1 / deviation, of this batch: mean and spread depend on x.
    Batch(&'a [f32]),
    /// Variance and what is added to it, of the past: constants.
    Running(&'a [f32], f32),
}

/// With h = (x - mean) rstd: dgamma = sum dy h, dbeta = sum dy; dx = gamma rstd dy for running statistics, and
/// gamma rstd (dy - mean(dy) - h mean(dy h)) for those of the batch.
pub fn batch_norm_grad(
    cpu: &Cpu,
    norm: BatchNormGrad<'_>,
    dx: Option<RowsMut<'_>>,
    dgamma: Option<&mut [f32]>,
    dbeta: Option<&mut [f32]>,
) {
    let (rows, cols) = (norm.dy.rows(), norm.dy.cols());
    assert!(norm.x.rows() == rows && norm.x.cols() == cols, "x is ({rows}, {cols})");
    assert!(dx.as_ref().is_none_or(|dx| dx.rows() == rows && dx.cols() == cols), "dx is ({rows}, {cols})");
    let (Spread::Batch(spread) | Spread::Running(spread, _)) = norm.spread;
    assert!([norm.gamma, norm.mean, spread].iter().all(|v| v.len() == cols), "vectors of {cols} columns");
    let outs = [dgamma, dbeta].map(|out| columns::start_of(out, cols));
    by_columns(cpu, cols, &|columns| cpu.isa().run(Grad { norm, dx: dx.as_ref(), outs, columns }));
}

/// Calls `work` for every vector of columns.
fn by_columns(cpu: &Cpu, cols: usize, work: &(dyn Fn(Columns) + Sync)) {
    cpu.pool().run(cols.div_ceil(LANES), &|task, _| {
        let j = task * LANES;
        work(Columns { j, n: LANES.min(cols - j) });
    });
}

/// A vector of columns: `n` of them from `j` on.
#[derive(Clone, Copy)]
struct Columns {
    j: usize,
    n: usize,
}

impl Columns {
    /// Their elements of `v`, which has one for every column.
    #[inline(always)]
    fn of<S: Simd>(self, s: S, v: &[f32]) -> S::V {
        let v = &v[self.j..self.j + self.n];
        // SAFETY: n elements.
        unsafe { s.load_n(v.as_ptr(), self.n) }
    }

    /// Their elements of row `r`.
    ///
    /// # Safety
    /// `x` must have the row and the columns.
    #[inline(always)]
    unsafe fn row<S: Simd>(self, s: S, x: Rows<'_>, r: usize) -> S::V {
        // SAFETY: the caller's promise.
        unsafe { s.load_n(x.row(r).add(self.j), self.n) }
    }

    /// Writes their elements of an output that starts at address `out`, if it is wanted.
    ///
    /// # Safety
    /// `out` is 0 or the start of an output with one element for every column, those of these
    /// columns written by nobody else.
    #[inline(always)]
    unsafe fn put<S: Simd>(self, s: S, out: usize, v: S::V) {
        if out != 0 {
            // SAFETY: the caller's promise.
            unsafe { s.store_n((out as *mut f32).add(self.j), v, self.n) };
        }
    }
}

/// x - mean, and its square. The mean is that of the columns from `j` on.
#[derive(Clone, Copy)]
struct Moments<'a> {
    x: Rows<'a>,
    mean: [f32; LANES],
}

impl Terms for Moments<'_> {
    #[inline(always)]
    unsafe fn at<S: Simd>(&self, s: S, r: usize, j: usize, n: usize) -> [S::V; 2] {
        // SAFETY: the caller promises the row and the columns; the mean has all lanes.
        unsafe {
            let d = s.sub(s.load_n(self.x.row(r).add(j), n), s.load(self.mean.as_ptr()));
            [d, s.mul(d, d)]
        }
    }
}

struct Train<'a> {
    norm: BatchNormTrain<'a>,
    y: Option<&'a RowsMut<'a>>,
    outs: [usize; 4],
    columns: Columns,
}

impl Kernel for Train<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let (norm, columns) = (self.norm, self.columns);
        let rows = norm.x.rows();
        let moments = |mean: [f32; LANES]| {
            // SAFETY: the columns exist in every row of x.
            unsafe { columns::sum(s, &Moments { x: norm.x, mean }, rows, columns.j, columns.n) }
        };
        let over = |sum: S::V, n: usize| s.div(sum, s.splat(n as f32));
        let mean = over(moments([0.0; LANES])[0], rows);
        let mut centre = [0.0; LANES];
        // SAFETY: sixteen lanes.
        unsafe { s.store(centre.as_mut_ptr(), mean) };
        let squares = moments(centre)[1];
        let rstd = s.div(s.splat(1.0), s.sqrt(s.add(over(squares, rows), s.splat(norm.eps))));
        let moved = |old: &[f32], new: S::V| {
            let (keep, take) = (s.splat(1.0 - norm.momentum), s.splat(norm.momentum));
            s.fma(take, new, s.mul(keep, columns.of(s, old)))
        };
        let new_mean = moved(norm.running[0], mean);
        let new_var = moved(norm.running[1], over(squares, rows - 1));
        for (out, v) in self.outs.into_iter().zip([mean, rstd, new_mean, new_var]) {
            // SAFETY: each output has one element per column; these are this task's.
            unsafe { columns.put(s, out, v) };
        }
        let Some(y) = self.y else { return };
        let (gamma, beta) = (columns.of(s, norm.gamma), columns.of(s, norm.beta));
        for r in 0..rows {
            // SAFETY: row r of x and y has these columns, which this task alone writes.
            unsafe {
                let h = s.mul(s.sub(columns.row(s, norm.x, r), mean), rstd);
                s.store_n(y.row(r).add(columns.j), s.fma(h, gamma, beta), columns.n);
            }
        }
    }
}

/// dy h and dy, where h = (x - mean) rstd; both vectors are those of the columns from `j` on.
#[derive(Clone, Copy)]
struct Scaled<'a> {
    dy: Rows<'a>,
    x: Rows<'a>,
    mean: [f32; LANES],
    rstd: [f32; LANES],
}

impl Terms for Scaled<'_> {
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

struct Grad<'a> {
    norm: BatchNormGrad<'a>,
    dx: Option<&'a RowsMut<'a>>,
    outs: [usize; 2],
    columns: Columns,
}

impl Kernel for Grad<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let (norm, columns, rows) = (self.norm, self.columns, self.norm.dy.rows());
        let one = s.splat(1.0);
        let (mean, rstd) = match norm.spread {
            Spread::Batch(rstd) => (columns.of(s, norm.mean), columns.of(s, rstd)),
            Spread::Running(var, eps) => {
                let deviation = s.sqrt(s.add(columns.of(s, var), s.splat(eps)));
                (columns.of(s, norm.mean), s.div(one, deviation))
            }
        };
        let mut scaled = Scaled { dy: norm.dy, x: norm.x, mean: [0.0; LANES], rstd: [0.0; LANES] };
        // SAFETY: sixteen lanes each; the columns exist in every row of dy and x.
        let [dgamma, dbeta] = unsafe {
            s.store(scaled.mean.as_mut_ptr(), mean);
            s.store(scaled.rstd.as_mut_ptr(), rstd);
            columns::sum(s, &scaled, rows, columns.j, columns.n)
        };
        for (out, v) in self.outs.into_iter().zip([dgamma, dbeta]) {
            // SAFETY: each output has one element per column; these are this task's.
            unsafe { columns.put(s, out, v) };
        }
        let Some(dx) = self.dx else { return };
        let k = s.mul(columns.of(s, norm.gamma), rstd);
        let (mean_dy, minus_dyh) = match norm.spread {
            Spread::Batch(_) => {
                let n = s.splat(rows as f32);
                (s.div(dbeta, n), s.sub(s.splat(0.0), s.div(dgamma, n)))
            }
            Spread::Running(..) => (s.splat(0.0), s.splat(0.0)),
        };
        for r in 0..rows {
            // SAFETY: row r of dy, x and dx has these columns, which this task alone writes.
            unsafe {
                let h = s.mul(s.sub(columns.row(s, norm.x, r), mean), rstd);
                let d = s.fma(h, minus_dyh, s.sub(columns.row(s, norm.dy, r), mean_dy));
                s.store_n(dx.row(r).add(columns.j), s.mul(k, d), columns.n);
            }
        }
    }
}
