//! Column sums: sums over all rows for each column, for gradients of scales and shifts and for batch statistics.
//!
//! Invariant: rows are added in order within blocks of 64, and the sums of blocks are added in order, so the order of
//! additions depends on the number of rows only.

use crate::Cpu;
use crate::simd::isa::SimdKernel;
use crate::simd::{LANES, Simd};

/// Rows per partial sum. Two levels of sums keep the rounding error lower than one long f32 sum.
const BLOCK: usize = 64;

/// Vectors of columns per task: each row contributes adjacent whole cache lines, and the sums fit in registers.
const WIDTH: usize = 4;

/// The two terms per element that a kernel sums over rows.
pub(crate) trait ColumnTerms: Copy + Send + Sync {
    /// Computes the terms of row `r`, columns `j..j + n`; the other lanes may hold any value.
    ///
    /// # Safety
    /// The row and the columns must exist.
    unsafe fn at<S: Simd>(&self, s: S, r: usize, j: usize, n: usize) -> [S::V; 2];
}

/// Sums both terms over `rows` rows of `cols` columns, in parallel; each sum is written if its output is given.
pub(crate) fn sums<T: ColumnTerms>(
    cpu: &Cpu,
    rows: usize,
    cols: usize,
    terms: T,
    outs: [Option<&mut [f32]>; 2],
) {
    let outs = outs.map(|out| start_of(out, cols));
    if outs == [0, 0] {
        return;
    }
    let width = WIDTH * LANES;
    cpu.pool().run(cols.div_ceil(width), &|task, _| {
        let outs = outs.map(|out| out as *mut f32);
        cpu.isa().run(ColumnTermSums {
            terms,
            rows,
            columns: [task * width, cols.min((task + 1) * width)],
            outs,
        });
    });
}

/// Address of an output vector of `cols` elements, of which tasks write disjoint parts; 0 for `None`. Panics if the
/// length is wrong.
pub(crate) fn start_of(out: Option<&mut [f32]>, cols: usize) -> usize {
    assert!(out.as_ref().is_none_or(|out| out.len() == cols), "one element per column");
    out.map_or(0, |out| out.as_mut_ptr() as usize)
}

/// Sums both terms over all rows, for the columns `j..j + n` (at most one vector).
///
/// # Safety
/// The columns must exist in each of the `rows` rows.
#[inline(always)]
pub(crate) unsafe fn sum<S: Simd, T: ColumnTerms>(
    s: S,
    terms: &T,
    rows: usize,
    j: usize,
    n: usize,
) -> [S::V; 2] {
    // SAFETY: guaranteed by the caller.
    let [sums] = unsafe { side_by_side::<S, T, 1>(s, terms, rows, j, j + n) };
    sums
}

/// Sums both terms over all rows, for `N` vectors of columns from `first` on. Columns from `end` on are not read.
///
/// # Safety
/// Columns `first..end` must exist in each of the `rows` rows.
#[inline(always)]
unsafe fn side_by_side<S: Simd, T: ColumnTerms, const N: usize>(
    s: S,
    terms: &T,
    rows: usize,
    first: usize,
    end: usize,
) -> [[S::V; 2]; N] {
    let mut totals = [[s.splat(0.0); 2]; N];
    for start in (0..rows).step_by(BLOCK) {
        let mut block = [[s.splat(0.0); 2]; N];
        for r in start..rows.min(start + BLOCK) {
            for (i, sums) in block.iter_mut().enumerate() {
                let j = first + i * LANES;
                if j < end {
                    // SAFETY: the caller promises columns up to `end`, and j < end.
                    let [a, b] = unsafe { terms.at(s, r, j, LANES.min(end - j)) };
                    *sums = [s.add(sums[0], a), s.add(sums[1], b)];
                }
            }
        }
        for (total, sums) in totals.iter_mut().zip(&block) {
            *total = [s.add(total[0], sums[0]), s.add(total[1], sums[1])];
        }
    }
    totals
}

/// Sums of the columns `columns[0]..columns[1]`, for `Isa::run`. A null output is not written.
struct ColumnTermSums<T> {
    terms: T,
    rows: usize,
    columns: [usize; 2],
    outs: [*mut f32; 2],
}

impl<T: ColumnTerms> SimdKernel for ColumnTermSums<T> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let [first, end] = self.columns;
        // SAFETY: `sums` limits the columns to `cols`, which every row has.
        let totals = unsafe { side_by_side::<S, T, WIDTH>(s, &self.terms, self.rows, first, end) };
        for (i, total) in totals.iter().enumerate() {
            let j = first + i * LANES;
            for (out, &v) in self.outs.iter().zip(total).filter(|(out, _)| !out.is_null() && j < end) {
                // SAFETY: an output that is not null has one element per column, and only this task writes these
                // columns.
                unsafe { s.store_n(out.add(j), v, LANES.min(end - j)) };
            }
        }
    }
}
