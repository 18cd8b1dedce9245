//! Adafactor optimizer (Shazeer and Stern 2018): second moments factored into row means and column means.
//!
//! Invariant: the means and the root mean square of the update are f64 sums in an order fixed by the shape alone. The
//! gradient is read four times (row means, column means, size of the update, the update itself), so no temporary of
//! the gradient's size is needed.

use crate::Cpu;
use crate::simd::isa::SimdKernel;
use crate::simd::{LANES, Simd};
use crate::training::optimizer::ScaledGradient;
use crate::training::optimizer_state::{Gradient, OptimizerState};
use crate::training::total::{GRAIN, add_squares, squares, total};
use core::ops::Range;
use plimsoll_graph::ops::Adafactor;

/// Columns that one task processes together. Tasks walk down the rows, so each row contributes several whole cache
/// lines rather than a few bytes.
const WIDTH: usize = 16 * LANES;

/// Tensors that one Adafactor step updates: a parameter p of shape (r, c), its row means (r) and its column means
/// (c). A one-dimensional p is a single row: it has no row means, and `column` is its second moment.
pub struct Factored<'a> {
    /// The parameter p (r, c).
    pub p: OptimizerState<'a, f32>,
    /// Row means R (r); `None` for a vector.
    pub row: Option<OptimizerState<'a, f32>>,
    /// Column means C (c), or the second moment V of a vector.
    pub column: OptimizerState<'a, f32>,
}

/// Runs one optimizer step; `hyper` is (learning rate, beta2). If the scale is not ok the step is skipped: old values
/// are copied to the new ones. Panics if the shapes do not match.
pub fn adafactor(
    cpu: &Cpu,
    op: &Adafactor,
    gradient: ScaledGradient<'_>,
    states: Factored<'_>,
    hyper: [f32; 2],
) {
    let ScaledGradient { g, scale } = gradient;
    let Factored { p, row, column } = states;
    let rows = row.as_ref().map_or(1, OptimizerState::len);
    let columns = column.len();
    assert!(g.len() == rows * columns && p.len() == g.len(), "a gradient of ({rows}, {columns})");
    if !scale.ok {
        return [Some(p), row, Some(column)].into_iter().flatten().for_each(OptimizerState::keep);
    }
    if g.is_empty() {
        return;
    }
    let squares =
        SquareMeans { g, columns, factor: scale.factor, eps1: f64::from(op.eps1), b2: f64::from(hyper[1]) };
    cpu.pool().run(columns.div_ceil(WIDTH), &|task, _| {
        let range = task * WIDTH..columns.min((task + 1) * WIDTH);
        cpu.isa().run(ColumnMeans { squares, rows, range, column: &column });
    });
    let chunks = RowChunks { rows, rows_per_chunk: (GRAIN / columns).max(1) };
    if let Some(row) = &row {
        cpu.pool().run(chunks.count(), &|i, _| {
            cpu.isa().run(RowMeans { squares, range: chunks.rows(i), row });
        });
    }
    let row_means = row.as_ref().map(|means| RowFactors { means, average: average(means) });
    let u = UnclippedUpdate { squares, row_means, column: &column };
    let sum = total(cpu, chunks.count(), &|i| {
        let mut sum = 0.0;
        cpu.isa().run(UpdateSquares { u, range: chunks.rows(i), sum: &mut sum });
        sum
    });
    let lr = f64::from(hyper[0]);
    let rms = (sum / g.len() as f64).sqrt();
    let rate = (lr / (rms / f64::from(op.clip)).max(1.0)) as f32;
    let decay = (1.0 - lr * f64::from(op.weight_decay)) as f32;
    cpu.pool().run(chunks.count(), &|i, _| {
        cpu.isa().run(ApplyUpdate { u, p: &p, decay, rate, range: chunks.rows(i) });
    });
}

/// Division of the rows among tasks.
#[derive(Clone, Copy)]
struct RowChunks {
    rows: usize,
    rows_per_chunk: usize,
}

impl RowChunks {
    fn count(self) -> usize {
        self.rows.div_ceil(self.rows_per_chunk)
    }

    /// The rows of chunk number `i`.
    fn rows(self, i: usize) -> Range<usize> {
        i * self.rows_per_chunk..self.rows.min((i + 1) * self.rows_per_chunk)
    }
}

/// Mean of the updated row means.
fn average(row: &OptimizerState<'_, f32>) -> f64 {
    // SAFETY: r is in range, and all elements have been updated, so the new values are initialized.
    let sum: f64 = (0..row.len()).map(|r| f64::from(unsafe { *row.write(r) })).sum();
    sum / row.len() as f64
}

/// Parameters of the moving averages of squared gradients.
#[derive(Clone, Copy)]
struct SquareMeans<'a> {
    g: Gradient<'a>,
    columns: usize,
    factor: f32,
    eps1: f64,
    b2: f64,
}

impl SquareMeans<'_> {
    /// Loads `n` elements of the scaled gradient, starting at row `r`, column `j`.
    ///
    /// # Safety
    /// The elements must exist.
    #[inline(always)]
    unsafe fn load<S: Simd>(&self, s: S, r: usize, j: usize, n: usize) -> S::V {
        // SAFETY: guaranteed by the caller.
        s.mul(s.splat(self.factor), unsafe { self.g.load(s, r * self.columns + j, n) })
    }

    /// Moves the average in element `i` towards the mean of `n` squares, of which `sum` is the sum.
    ///
    /// # Safety
    /// The element must exist, and no other task may access it.
    #[inline(always)]
    unsafe fn update(&self, place: &OptimizerState<'_, f32>, i: usize, sum: f64, n: usize) {
        // SAFETY: guaranteed by the caller.
        unsafe {
            let old = f64::from(*place.read(i));
            *place.write(i) = (self.b2 * old + (1.0 - self.b2) * (sum / n as f64 + self.eps1)) as f32;
        }
    }
}

/// Kernel that updates the column means of the columns `range`.
struct ColumnMeans<'a> {
    squares: SquareMeans<'a>,
    rows: usize,
    range: Range<usize>,
    column: &'a OptimizerState<'a, f32>,
}

impl SimdKernel for ColumnMeans<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let mut sums = [[0.0_f64; LANES]; WIDTH / LANES];
        for r in 0..self.rows {
            for (sums, j) in sums.iter_mut().zip(self.range.clone().step_by(LANES)) {
                // SAFETY: the columns j.. of row r exist; the count is limited to the end of `range`.
                let g = unsafe { self.squares.load(s, r, j, LANES.min(self.range.end - j)) };
                add_squares(s, sums, g);
            }
        }
        for (j, sum) in self.range.clone().zip(sums.as_flattened()) {
            // SAFETY: column j belongs to this task alone.
            unsafe { self.squares.update(self.column, j, *sum, self.rows) };
        }
    }
}

/// Kernel that updates the row means of the rows `range`.
struct RowMeans<'a> {
    squares: SquareMeans<'a>,
    range: Range<usize>,
    row: &'a OptimizerState<'a, f32>,
}

impl SimdKernel for RowMeans<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let columns = self.squares.columns;
        for r in self.range.clone() {
            // SAFETY: `squares` asks for columns of row r only.
            let sum = squares(s, 0..columns, |j, n| unsafe { self.squares.load(s, r, j, n) });
            // SAFETY: row r belongs to this task alone.
            unsafe { self.squares.update(self.row, r, sum, columns) };
        }
    }
}

/// The updated row means R, and their mean.
#[derive(Clone, Copy)]
struct RowFactors<'a> {
    means: &'a OptimizerState<'a, f32>,
    average: f64,
}

/// The unclipped update `u = g / sqrt(R C / mean(R))`, computed from the updated means R and C.
#[derive(Clone, Copy)]
struct UnclippedUpdate<'a> {
    squares: SquareMeans<'a>,
    /// The row means; `None` for a vector.
    row_means: Option<RowFactors<'a>>,
    column: &'a OptimizerState<'a, f32>,
}

impl UnclippedUpdate<'_> {
    /// The row factor sqrt(mean(R) / R) of row `r`.
    ///
    /// # Safety
    /// The row must exist.
    #[inline(always)]
    unsafe fn row_factor(&self, r: usize) -> f32 {
        let Some(RowFactors { means, average }) = self.row_means else { return 1.0 };
        // SAFETY: guaranteed by the caller.
        let mean = f64::from(unsafe { *means.write(r) });
        (average / mean).sqrt() as f32
    }

    /// Computes `n` elements of u, starting at row `r`, column `j`; `row_factor` is that of the row.
    ///
    /// # Safety
    /// The elements must exist.
    #[inline(always)]
    unsafe fn load<S: Simd>(&self, s: S, row_factor: S::V, r: usize, j: usize, n: usize) -> S::V {
        // SAFETY: guaranteed by the caller.
        let (g, column) = unsafe { (self.squares.load(s, r, j, n), s.load_n(self.column.write(j), n)) };
        // Lanes past the last column divide 0 by 1: dividing by their zero would give NaN, which a sum over all lanes
        // would spread.
        s.mul(row_factor, s.div(g, s.first(s.sqrt(column), s.splat(1.0), n)))
    }
}

/// Kernel that adds the squares of u over the rows `range` to `sum`.
struct UpdateSquares<'a> {
    u: UnclippedUpdate<'a>,
    range: Range<usize>,
    sum: &'a mut f64,
}

impl SimdKernel for UpdateSquares<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for r in self.range.clone() {
            // SAFETY: row r exists.
            let factor = s.splat(unsafe { self.u.row_factor(r) });
            // SAFETY: `squares` asks for columns of row r only.
            *self.sum +=
                squares(s, 0..self.u.squares.columns, |j, n| unsafe { self.u.load(s, factor, r, j, n) });
        }
    }
}

/// Kernel that computes p = decay p - rate u for the rows `range`.
struct ApplyUpdate<'a> {
    u: UnclippedUpdate<'a>,
    p: &'a OptimizerState<'a, f32>,
    decay: f32,
    rate: f32,
    range: Range<usize>,
}

impl SimdKernel for ApplyUpdate<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let columns = self.u.squares.columns;
        for r in self.range.clone() {
            // SAFETY: row r exists.
            let factor = s.splat(-self.rate * unsafe { self.u.row_factor(r) });
            for j in (0..columns).step_by(LANES) {
                let i = r * columns + j;
                let n = LANES.min(columns - j);
                // SAFETY: the columns j.. of row r exist, and only this task writes row r.
                unsafe {
                    let u = self.u.load(s, factor, r, j, n);
                    let p = s.load_n(self.p.read(i), n);
                    s.store_n(self.p.write(i), s.fma(s.splat(self.decay), p, u), n);
                }
            }
        }
    }
}
