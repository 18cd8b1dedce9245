//! Column sums, the gradient of a bias. Invariant: a column's sum adds the sums of blocks of 256 consecutive rows,
//! each summed in order, so it depends on neither the threads nor the other columns.

use crate::Cpu;
use crate::simd::isa::SimdKernel;
use crate::simd::{LANES, Simd};
use crate::view::Rows;
use core::ops::Range;

/// Columns per task.
const COLUMNS: usize = 4 * LANES;
/// Rows per partial sum. The rounding error of a sum grows with its number of terms; partial sums bound it.
const BLOCK: usize = 256;

/// Sums each column: `y[j] = sum over r of x[r][j]`; with `add`, the sum is added to y. Panics unless `y` has one
/// element per column.
pub fn column_sums(cpu: &Cpu, x: Rows<'_>, add: bool, y: &mut [f32]) {
    assert_eq!(y.len(), x.cols(), "a sum for each column");
    let to = y.as_mut_ptr() as usize;
    cpu.pool().run(x.cols().div_ceil(COLUMNS), &|task, _| {
        let columns = task * COLUMNS..x.cols().min((task + 1) * COLUMNS);
        cpu.isa().run(ColumnSums { x, columns, add, y: to as *mut f32 });
    });
}

/// Sums of the columns of one task. No other task writes them.
struct ColumnSums<'a> {
    x: Rows<'a>,
    columns: Range<usize>,
    add: bool,
    y: *mut f32,
}

impl SimdKernel for ColumnSums<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        const VECS: usize = COLUMNS / LANES;
        let width: [usize; VECS] =
            core::array::from_fn(|v| self.columns.len().saturating_sub(v * LANES).min(LANES));
        let mut totals = [s.splat(0.0); VECS];
        // SAFETY: these rows and columns lie in x, and the columns in y.
        unsafe {
            for start in (0..self.x.rows()).step_by(BLOCK) {
                let mut sums = [s.splat(0.0); VECS];
                for r in start..self.x.rows().min(start + BLOCK) {
                    let row = self.x.row(r).wrapping_add(self.columns.start);
                    for v in 0..VECS {
                        sums[v] = s.add(sums[v], s.load_n(row.wrapping_add(v * LANES), width[v]));
                    }
                }
                for v in 0..VECS {
                    totals[v] = s.add(totals[v], sums[v]);
                }
            }
            for v in 0..VECS {
                let to = self.y.wrapping_add(self.columns.start + v * LANES);
                let before = if self.add { s.load_n(to, width[v]) } else { s.splat(0.0) };
                s.store_n(to, s.add(before, totals[v]), width[v]);
            }
        }
    }
}
