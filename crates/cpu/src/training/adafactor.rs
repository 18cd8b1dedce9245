//! Adafactor optimizer (Shazeer and Stern 2018): second moments factored into row means and column means.
//!
//! Invariant: the means and the root mean square of the update are f64 sums in an order fixed by the shape alone. The
//! gradient is read four times (row means, column means, size of the update, the update itself), so no temporary of
//! the gradient's size is needed.

use crate::Cpu;
use crate::simd::isa::Kernel;
use crate::simd::{LANES, Simd};
use crate::training::optimizer::Scale;
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

/// Runs one optimizer step; `hyper` is (learning rate, beta2). If `scale.ok` is false the step is skipped: old values
/// are copied to the new ones. Panics if the shapes do not match.
pub fn adafactor(
    cpu: &Cpu,
    op: &Adafactor,
    g: Gradient<'_>,
    states: Factored<'_>,
    scale: Scale,
    hyper: [f32; 2],
) {
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
    let mean = Mean { g, columns, factor: scale.factor, eps1: f64::from(op.eps1), b2: f64::from(hyper[1]) };
    cpu.pool().run(columns.div_ceil(WIDTH), &|task, _| {
        let range = task * WIDTH..columns.min((task + 1) * WIDTH);
        cpu.isa().run(ColumnMeans { mean, rows, range, column: &column });
    });
    let each = (GRAIN / columns).max(1);
    let chunks = rows.div_ceil(each);
    let chunk = |i: usize| i * each..rows.min((i + 1) * each);
    if let Some(row) = &row {
        cpu.pool().run(chunks, &|i, _| cpu.isa().run(RowMeans { mean, range: chunk(i), row }));
    }
    let u = Direction { mean, row: row.as_ref().map(|row| (row, average(row))), column: &column };
    let sum = total(cpu, chunks, &|i| {
        let mut sum = 0.0;
        cpu.isa().run(Size { u, range: chunk(i), sum: &mut sum });
        sum
    });
    let lr = f64::from(hyper[0]);
    let rms = (sum / g.len() as f64).sqrt();
    let rate = (lr / (rms / f64::from(op.clip)).max(1.0)) as f32;
    let left = (1.0 - lr * f64::from(op.weight_decay)) as f32;
    cpu.pool().run(chunks, &|i, _| cpu.isa().run(Apply { u, p: &p, left, rate, range: chunk(i) }));
}

/// Mean of the updated row means.
fn average(row: &OptimizerState<'_, f32>) -> f64 {
    // SAFETY: r is in range, and all elements have been updated, so the new values are initialized.
    let sum: f64 = (0..row.len()).map(|r| f64::from(unsafe { *row.write(r) })).sum();
    sum / row.len() as f64
}

/// Parameters of the moving averages of squared gradients.
#[derive(Clone, Copy)]
struct Mean<'a> {
    g: Gradient<'a>,
    columns: usize,
    factor: f32,
    eps1: f64,
    b2: f64,
}

impl Mean<'_> {
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
    mean: Mean<'a>,
    rows: usize,
    range: Range<usize>,
    column: &'a OptimizerState<'a, f32>,
}

impl Kernel for ColumnMeans<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let mut sums = [[0.0_f64; LANES]; WIDTH / LANES];
        for r in 0..self.rows {
            for (sums, j) in sums.iter_mut().zip(self.range.clone().step_by(LANES)) {
                // SAFETY: the columns j.. of row r exist; the count is limited to the end of `range`.
                let g = unsafe { self.mean.load(s, r, j, LANES.min(self.range.end - j)) };
                add_squares(s, sums, g);
            }
        }
        for (j, sum) in self.range.clone().zip(sums.as_flattened()) {
            // SAFETY: column j belongs to this task alone.
            unsafe { self.mean.update(self.column, j, *sum, self.rows) };
        }
    }
}

/// Kernel that updates the row means of the rows `range`.
struct RowMeans<'a> {
    mean: Mean<'a>,
    range: Range<usize>,
    row: &'a OptimizerState<'a, f32>,
}

impl Kernel for RowMeans<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let columns = self.mean.columns;
        for r in self.range.clone() {
            // SAFETY: `squares` asks for columns of row r only.
            let sum = squares(s, 0..columns, |j, n| unsafe { self.mean.load(s, r, j, n) });
            // SAFETY: row r belongs to this task alone.
            unsafe { self.mean.update(self.row, r, sum, columns) };
        }
    }
}

/// The unclipped update `u = g / sqrt(R C / mean(R))`, computed from the updated means R and C.
#[derive(Clone, Copy)]
struct Direction<'a> {
    mean: Mean<'a>,
    /// The row means R and their mean; `None` for a vector.
    row: Option<(&'a OptimizerState<'a, f32>, f64)>,
    column: &'a OptimizerState<'a, f32>,
}

impl Direction<'_> {
    /// The row factor sqrt(mean(R) / R) of row `r`.
    ///
    /// # Safety
    /// The row must exist.
    #[inline(always)]
    unsafe fn share(&self, r: usize) -> f32 {
        // SAFETY: guaranteed by the caller.
        self.row.map_or(1.0, |(row, mean)| (mean / f64::from(unsafe { *row.write(r) })).sqrt() as f32)
    }

    /// Computes `n` elements of u, starting at row `r`, column `j`; `share` is the row factor.
    ///
    /// # Safety
    /// The elements must exist.
    #[inline(always)]
    unsafe fn load<S: Simd>(&self, s: S, share: S::V, r: usize, j: usize, n: usize) -> S::V {
        // SAFETY: guaranteed by the caller.
        let (g, column) = unsafe { (self.mean.load(s, r, j, n), s.load_n(self.column.write(j), n)) };
        // Lanes past the last column divide 0 by 1: dividing by their zero would give NaN, which a sum over all lanes
        // would spread.
        s.mul(share, s.div(g, s.first(s.sqrt(column), s.splat(1.0), n)))
    }
}

/// Kernel that adds the squares of u over the rows `range` to `sum`.
struct Size<'a> {
    u: Direction<'a>,
    range: Range<usize>,
    sum: &'a mut f64,
}

impl Kernel for Size<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for r in self.range.clone() {
            // SAFETY: row r exists.
            let share = s.splat(unsafe { self.u.share(r) });
            // SAFETY: `squares` asks for columns of row r only.
            *self.sum += squares(s, 0..self.u.mean.columns, |j, n| unsafe { self.u.load(s, share, r, j, n) });
        }
    }
}

/// Kernel that computes p = left p - rate u for the rows `range`.
struct Apply<'a> {
    u: Direction<'a>,
    p: &'a OptimizerState<'a, f32>,
    left: f32,
    rate: f32,
    range: Range<usize>,
}

impl Kernel for Apply<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let columns = self.u.mean.columns;
        for r in self.range.clone() {
            // SAFETY: row r exists.
            let share = s.splat(-self.rate * unsafe { self.u.share(r) });
            for j in (0..columns).step_by(LANES) {
                let i = r * columns + j;
                let n = LANES.min(columns - j);
                // SAFETY: the columns j.. of row r exist, and only this task writes row r.
                unsafe {
                    let u = self.u.load(s, share, r, j, n);
                    let p = s.load_n(self.p.read(i), n);
                    s.store_n(self.p.write(i), s.fma(s.splat(self.left), p, u), n);
                }
            }
        }
    }
}
