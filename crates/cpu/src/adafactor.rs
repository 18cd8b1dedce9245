//! Adafactor (Shazeer and Stern 2018): second moments as means of rows and columns.
//!
//! Invariant: means and the root mean square are sums in f64 in an order that the shape fixes. The gradient is read
//! four times: for rows, for columns, for the size of the update and for the update; nothing of its size is stored.

use super::Cpu;
use super::isa::Kernel;
use super::optimizer::Scale;
use super::place::{Gradient, Place};
use super::simd::{LANES, Simd};
use super::total::{GRAIN, add_squares, squares, total};
use core::ops::Range;
use graph::ops::Adafactor;

/// Columns that one task walks down together: some cache lines of every page.
const WIDTH: usize = 16 * LANES;

/// What one step updates: p (r, c) with its means of rows (r) and columns (c). A vector p is one row and has no mean
/// of rows; that of columns is its second moment.
pub struct Factored<'a> {
    /// The parameter.
    pub p: Place<'a, f32>,
    /// R.
    pub row: Option<Place<'a, f32>>,
    /// C, or V.
    pub column: Place<'a, f32>,
}

/// One step; hyper = (lr, b2).
pub fn adafactor(
    cpu: &Cpu,
    op: &Adafactor,
    g: Gradient<'_>,
    states: Factored<'_>,
    scale: Scale,
    hyper: [f32; 2],
) {
    let Factored { p, row, column } = states;
    let (rows, columns) = (row.as_ref().map_or(1, Place::len), column.len());
    assert!(g.len() == rows * columns && p.len() == g.len(), "a gradient of ({rows}, {columns})");
    if !scale.ok {
        return [Some(p), row, Some(column)].into_iter().flatten().for_each(Place::keep);
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
    let (chunks, chunk) = (rows.div_ceil(each), |i: usize| i * each..rows.min((i + 1) * each));
    if let Some(row) = &row {
        cpu.pool().run(chunks, &|i, _| cpu.isa().run(RowMeans { mean, range: chunk(i), row }));
    }
    let u = Direction { mean, row: row.as_ref().map(|row| (row, average(row))), column: &column };
    let sum = total(cpu, chunks, &|i| {
        let mut sum = 0.0;
        cpu.isa().run(Size { u, range: chunk(i), sum: &mut sum });
        sum
    });
    let (lr, rms) = (f64::from(hyper[0]), (sum / g.len() as f64).sqrt());
    let rate = (lr / (rms / f64::from(op.clip)).max(1.0)) as f32;
    let left = (1.0 - lr * f64::from(op.weight_decay)) as f32;
    cpu.pool().run(chunks, &|i, _| cpu.isa().run(Apply { u, p: &p, left, rate, range: chunk(i) }));
}

/// The mean of the new values of `row`.
fn average(row: &Place<'_, f32>) -> f64 {
    // SAFETY: elements of a place that has been updated.
    let sum: f64 = (0..row.len()).map(|r| f64::from(unsafe { *row.write(r) })).sum();
    sum / row.len() as f64
}

/// How means of squared gradients move.
#[derive(Clone, Copy)]
struct Mean<'a> {
    g: Gradient<'a>,
    columns: usize,
    factor: f32,
    eps1: f64,
    b2: f64,
}

impl Mean<'_> {
    /// `n` elements of the scaled gradient from column `j` of row `r` on.
    ///
    /// # Safety
    /// They must exist.
    #[inline(always)]
    unsafe fn load<S: Simd>(&self, s: S, r: usize, j: usize, n: usize) -> S::V {
        // SAFETY: as the caller promises.
        s.mul(s.splat(self.factor), unsafe { self.g.load(s, r * self.columns + j, n) })
    }

    /// Element `i` moves to the mean of `n` squares, whose sum is `sum`.
    ///
    /// # Safety
    /// The element must exist, and belong to the caller's task.
    #[inline(always)]
    unsafe fn update(&self, place: &Place<'_, f32>, i: usize, sum: f64, n: usize) {
        // SAFETY: as the caller promises.
        unsafe {
            let old = f64::from(*place.read(i));
            *place.write(i) = (self.b2 * old + (1.0 - self.b2) * (sum / n as f64 + self.eps1)) as f32;
        }
    }
}

struct ColumnMeans<'a> {
    mean: Mean<'a>,
    rows: usize,
    range: Range<usize>,
    column: &'a Place<'a, f32>,
}

impl Kernel for ColumnMeans<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let mut sums = [[0.0_f64; LANES]; WIDTH / LANES];
        for r in 0..self.rows {
            for (sums, j) in sums.iter_mut().zip(self.range.clone().step_by(LANES)) {
                // SAFETY: columns of row r.
                let g = unsafe { self.mean.load(s, r, j, LANES.min(self.range.end - j)) };
                add_squares(s, sums, g);
            }
        }
        for (j, sum) in self.range.clone().zip(sums.as_flattened()) {
            // SAFETY: a column of this task.
            unsafe { self.mean.update(self.column, j, *sum, self.rows) };
        }
    }
}

struct RowMeans<'a> {
    mean: Mean<'a>,
    range: Range<usize>,
    row: &'a Place<'a, f32>,
}

impl Kernel for RowMeans<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let columns = self.mean.columns;
        for r in self.range.clone() {
            // SAFETY: columns of row r.
            let sum = squares(s, 0..columns, |j, n| unsafe { self.mean.load(s, r, j, n) });
            // SAFETY: a row of this task.
            unsafe { self.mean.update(self.row, r, sum, columns) };
        }
    }
}

/// `u = g / sqrt(R C / mean(R))`, by means that have been updated.
#[derive(Clone, Copy)]
struct Direction<'a> {
    mean: Mean<'a>,
    /// With its mean.
    row: Option<(&'a Place<'a, f32>, f64)>,
    column: &'a Place<'a, f32>,
}

impl Direction<'_> {
    /// sqrt(mean(R) / R) of row `r`.
    ///
    /// # Safety
    /// The row must exist.
    #[inline(always)]
    unsafe fn share(&self, r: usize) -> f32 {
        // SAFETY: as the caller promises.
        self.row.map_or(1.0, |(row, mean)| (mean / f64::from(unsafe { *row.write(r) })).sqrt() as f32)
    }

    /// `n` elements from column `j` of row `r` on.
    ///
    /// # Safety
    /// They must exist.
    #[inline(always)]
    unsafe fn load<S: Simd>(&self, s: S, share: S::V, r: usize, j: usize, n: usize) -> S::V {
        // SAFETY: as the caller promises.
        let (g, column) = unsafe { (self.mean.load(s, r, j, n), s.load_n(self.column.write(j), n)) };
        // Lanes past the columns divide zero by one.
        s.mul(share, s.div(g, s.first(s.sqrt(column), s.splat(1.0), n)))
    }
}

struct Size<'a> {
    u: Direction<'a>,
    range: Range<usize>,
    sum: &'a mut f64,
}

impl Kernel for Size<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for r in self.range.clone() {
            // SAFETY: a row of this task.
            let share = s.splat(unsafe { self.u.share(r) });
            // SAFETY: columns of row r.
            *self.sum += squares(s, 0..self.u.mean.columns, |j, n| unsafe { self.u.load(s, share, r, j, n) });
        }
    }
}

struct Apply<'a> {
    u: Direction<'a>,
    p: &'a Place<'a, f32>,
    left: f32,
    rate: f32,
    range: Range<usize>,
}

impl Kernel for Apply<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let columns = self.u.mean.columns;
        for r in self.range.clone() {
            // SAFETY: a row of this task.
            let share = s.splat(-self.rate * unsafe { self.u.share(r) });
            for j in (0..columns).step_by(LANES) {
                let (i, n) = (r * columns + j, LANES.min(columns - j));
                // SAFETY: columns of row r, which this task alone writes.
                unsafe {
                    let (u, p) = (self.u.load(s, share, r, j, n), s.load_n(self.p.read(i), n));
                    s.store_n(self.p.write(i), s.fma(s.splat(self.left), p, u), n);
                }
            }
        }
    }
}
