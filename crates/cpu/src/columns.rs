//! Sums over rows, column by column: gradients of scales and shifts, statistics of a batch.
//!
//! Invariant: a column's sum adds blocks of 64 rows in order, and in a block its rows in order: the number of rows
//! alone fixes it.

use super::Cpu;
use super::isa::Kernel;
use super::simd::{LANES, Simd};

/// Rows whose terms are added up before they join the total: errors grow with the root of both counts.
const BLOCK: usize = 64;

/// Vectors of columns that a task walks down together: whole cache lines side by side, sums in registers.
const WIDTH: usize = 4;

/// Two addends of every element.
pub(super) trait Terms: Copy + Send + Sync {
    /// Those of row `r` in columns `j..j + n`; what the other lanes hold does not matter.
    ///
    /// # Safety
    /// The row and the columns must exist.
    unsafe fn at<S: Simd>(&self, s: S, r: usize, j: usize, n: usize) -> [S::V; 2];
}

/// The sums of both terms over `rows` rows of `cols` columns, where wanted.
pub(super) fn sums<T: Terms>(cpu: &Cpu, rows: usize, cols: usize, terms: T, outs: [Option<&mut [f32]>; 2]) {
    let outs = outs.map(|out| start_of(out, cols));
    if outs == [0, 0] {
        return;
    }
    let width = WIDTH * LANES;
    cpu.pool().run(cols.div_ceil(width), &|task, _| {
        let outs = outs.map(|out| out as *mut f32);
        cpu.isa().run(Sums { terms, rows, columns: [task * width, cols.min((task + 1) * width)], outs });
    });
}

/// Where a vector of `cols` elements starts, which tasks write apart; 0 where it is not wanted.
pub(super) fn start_of(out: Option<&mut [f32]>, cols: usize) -> usize {
    assert!(out.as_ref().is_none_or(|out| out.len() == cols), "one element per column");
    out.map_or(0, |out| out.as_mut_ptr() as usize)
}

/// The sums of both terms over all rows in columns `j..j + n`.
///
/// # Safety
/// The columns must exist in each of the `rows` rows.
#[inline(always)]
pub(super) unsafe fn sum<S: Simd, T: Terms>(s: S, terms: &T, rows: usize, j: usize, n: usize) -> [S::V; 2] {
    // SAFETY: the caller's promise.
    let [sums] = unsafe { side_by_side::<S, T, 1>(s, terms, rows, j, j + n) };
    sums
}

/// The sums in `N` vectors of columns from `first` on; those past `end` are not touched.
///
/// # Safety
/// Columns `first..end` must exist in each of the `rows` rows.
#[inline(always)]
unsafe fn side_by_side<S: Simd, T: Terms, const N: usize>(
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
                    // SAFETY: columns j..end exist, by the caller's promise.
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

struct Sums<T> {
    terms: T,
    rows: usize,
    columns: [usize; 2],
    outs: [*mut f32; 2],
}

impl<T: Terms> Kernel for Sums<T> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let [first, end] = self.columns;
        // SAFETY: these columns exist in every row.
        let totals = unsafe { side_by_side::<S, T, WIDTH>(s, &self.terms, self.rows, first, end) };
        for (i, total) in totals.iter().enumerate() {
            let j = first + i * LANES;
            for (out, &v) in self.outs.iter().zip(total).filter(|(out, _)| !out.is_null() && j < end) {
                // SAFETY: a wanted output has one element per column; these are this task's.
                unsafe { s.store_n(out.add(j), v, LANES.min(end - j)) };
            }
        }
    }
}
