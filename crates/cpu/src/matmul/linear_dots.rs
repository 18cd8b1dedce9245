//! GEMM by the dot products of `dot`: of bf16 pairs on CPUs with AVX512-BF16 but without AMX, and of groups of
//! four int8 values (quads) on all CPUs without AMX. This file treats two int8 values as one bf16.
//!
//! Invariant: the sum of an element takes its pairs, or quads, in ascending order. Where K is cut into slices,
//! the sum is stored and loaded again without rounding. Rows and panels are cut as in `linear_f32`, which only decides
//! which task computes an element.
//!
//! Loop order: as in `linear_f32`. A line of a tile holds one pair, or quad, of each of 16 columns, so panels are read
//! without conversion. The rows of a strip are copied, slice by slice, to rows with a constant stride, so that
//! the inner loop needs a single address register for all of them.

use crate::element::Bf16;
use crate::matmul::linear::LinearOperands;
use crate::matmul::linear_bf16::{BLOCK, DEPTH, GROUP, WORKSPACE_WORDS, slices};
use crate::matmul::linear_int8::Scales;
use crate::matmul::register_tile::PANEL;
use crate::simd::dot::Dot;
use crate::simd::{LANES, Simd};
use core::ops::Range;
use plimsoll_exec::tiles::STEP;

/// Stride of the copied rows in 32-bit words (pairs or quads); no multiple of a page, because rows a page apart
/// would compete for the same L1 sets. The last word of a row, at OFFSET behind its columns, holds the initial
/// value of the row's sums.
const STRIDE: usize = DEPTH / 2 + LANES;
const OFFSET: usize = STRIDE - 1;
/// Bytes of a line of a tile, and of a tile.
const LINE: usize = 4 * LANES;
const TILE: usize = LANES * LINE;
/// Prefetch distance in lines, for each of the two tiles.
const AHEAD: usize = 8;

const _: () = assert!(BLOCK * (STRIDE + GROUP * PANEL) <= WORKSPACE_WORDS);

/// One task: at most BLOCK rows and, where K has several slices, at most GROUP panels. `scales` covers all rows
/// and panels of the GEMM and is present for int8. No other task uses the `WORKSPACE_WORDS` words at `scratch` meanwhile.
pub(crate) struct LinearDotTask<'a> {
    pub(crate) operands: LinearOperands<'a, Bf16>,
    pub(crate) scales: Option<Scales<'a>>,
    pub(crate) rows: Range<usize>,
    pub(crate) panels: Range<usize>,
    pub(crate) scratch: *mut f32,
}

impl LinearDotTask<'_> {
    /// Computes the task with the dot products of `d`, which must be of int8 if there are scales.
    ///
    /// # Safety
    /// The rows, panels, scales and scratch must be as documented at the type.
    #[inline(always)]
    pub(crate) unsafe fn run<S: Simd, D: Dot>(&self, s: S, d: D) {
        const { assert!(BLOCK.is_multiple_of(D::HEIGHT)) };
        let max_panels = if self.operands.x.cols() > DEPTH { GROUP } else { usize::MAX };
        assert!(
            self.rows.len() <= BLOCK && self.panels.len() <= max_panels,
            "room for the rows and their sums"
        );
        for ks in slices(self.operands.x.cols()) {
            for panel in self.panels.clone() {
                // SAFETY: guaranteed by the caller; the first panel of a slice copies the rows, which later
                // panels read.
                unsafe { self.panel(s, d, panel, &ks) };
            }
        }
    }

    /// Adds the products over the slice `ks` of one panel to the sums of all rows; after the last slice, applies
    /// the epilogue and writes y.
    ///
    /// # Safety
    /// Only for `run`.
    #[inline(always)]
    unsafe fn panel<S: Simd, D: Dot>(&self, s: S, d: D, panel: usize, ks: &Range<usize>) {
        let total = self.operands.x.cols().div_ceil(STEP);
        let continues = ks.start > 0;
        let last = ks.end == self.operands.x.cols();
        let sums = self.scratch.wrapping_add(BLOCK * STRIDE);
        let b =
            self.operands.w.as_ptr().cast::<u8>().wrapping_add((panel * total + ks.start / STEP) * 2 * TILE);
        let words = ks.len().div_ceil(2);
        for row in (0..self.rows.len()).step_by(D::HEIGHT) {
            let rows = D::HEIGHT.min(self.rows.len() - row);
            let a = self.scratch.cast::<i32>().wrapping_add(row * STRIDE);
            // With one slice a strip's sums are finished immediately, so all strips share one buffer, which
            // stays in L1.
            let stored = continues || !last;
            let at = if stored { ((panel - self.panels.start) * BLOCK + row) * PANEL } else { 0 };
            let sum = sums.wrapping_add(at);
            let strip = DotStrip { a, b, c: sum, words, continues, last };
            // SAFETY: `a` is a strip of the scratch, whose rows past the last are zeros, `b` a slice of a panel,
            // `sum` the strip's sums.
            unsafe {
                if panel == self.panels.start {
                    self.copy(d, row, rows, ks, a);
                }
                match rows {
                    9.. if D::HEIGHT >= 14 => dots::<S, D, 14>(s, d, strip),
                    5.. if D::HEIGHT >= 8 => dots::<S, D, 8>(s, d, strip),
                    3.. if D::HEIGHT >= 4 => dots::<S, D, 4>(s, d, strip),
                    _ => dots::<S, D, 2>(s, d, strip),
                }
                if last {
                    self.finish(s, self.rows.start + row, rows, panel, sum);
                }
            }
        }
    }

    /// Copies columns `ks` of a strip of rows of x as 32-bit words, with a zero after an odd last element, and
    /// zeroes the rows up to the tile's height. With the first slice it also stores the initial value of each
    /// row's sums.
    ///
    /// # Safety
    /// `to` must be the strip's place in the scratch.
    #[inline(always)]
    unsafe fn copy<D: Dot>(&self, d: D, row: usize, rows: usize, ks: &Range<usize>, to: *mut i32) {
        for r in 0..D::HEIGHT {
            let to = to.wrapping_add(r * STRIDE);
            // SAFETY: reads the row's columns, at most DEPTH, or nothing of it; writes one row of STRIDE words.
            // The zero is written first, since the copy overwrites half of it if the number of columns is odd.
            unsafe {
                if r < rows {
                    let x = self.operands.x.row(self.rows.start + row + r);
                    to.add(ks.len() / 2).write(0);
                    to.cast::<Bf16>().copy_from_nonoverlapping(x.wrapping_add(ks.start), ks.len());
                    if ks.start == 0 {
                        to.add(OFFSET).write(d.offset(x.cast(), self.operands.x.cols() / 2));
                    }
                } else {
                    to.write_bytes(0, STRIDE);
                }
            }
        }
    }

    /// Applies the epilogue to one strip of one panel: reads its sums, scaled if they are of int8, and writes y.
    ///
    /// # Safety
    /// As for `OutputStrip::finish`; `sum` must hold `rows` rows of 32 f32.
    #[inline(always)]
    unsafe fn finish<S: Simd>(&self, s: S, row: usize, rows: usize, panel: usize, sum: *const f32) {
        let output = self.operands.output(row, rows, panel);
        // SAFETY: the sums are complete; scales exist for all rows and, padded to whole panels, for all columns.
        unsafe {
            let Some(scales) = self.scales else { return output.finish(s, sum) };
            let w = scales.w.as_ptr().add(panel * PANEL);
            output.finish_by(s, |r, c| {
                let scale = s.mul(s.splat(scales.x[row + r]), s.load(w.add(c)));
                s.mul(s.load(sum.add(r * PANEL + c)), scale)
            });
        }
    }
}

/// Operands of the dot products of one strip of rows and one slice of a panel.
#[derive(Clone, Copy)]
struct DotStrip {
    /// Rows of words, STRIDE apart.
    a: *const i32,
    /// First step of the panel's slice.
    b: *const u8,
    /// Rows of 32 sums.
    c: *mut f32,
    /// Words of each row.
    words: usize,
    /// Whether the slice continues from the sums in `c`.
    continues: bool,
    /// Whether it is the last slice, so its sums are stored as f32 values.
    last: bool,
}

/// Computes `c (+)= a b` for `ROWS` rows of words, STRIDE apart, and the 32 columns of a panel; `b` points to
/// the first step.
///
/// # Safety
/// `words` words of each row and of the panel, and the initial values of the rows' sums, must be readable; `c`
/// must hold `ROWS` rows of 32 sums.
#[inline(always)]
unsafe fn dots<S: Simd, D: Dot, const ROWS: usize>(s: S, d: D, strip: DotStrip) {
    let DotStrip { mut a, mut b, c, words, continues, last } = strip;
    // SAFETY: guaranteed by the caller.
    unsafe {
        let mut sums: [[D::I; 2]; ROWS] = core::array::from_fn(|r| [d.begin(*a.add(r * STRIDE + OFFSET)); 2]);
        if continues {
            for (r, sums) in sums.iter_mut().enumerate() {
                *sums = [d.resume(c.add(r * PANEL)), d.resume(c.add(r * PANEL + LANES))];
            }
        }
        let mut left = words;
        while left > 0 {
            let lines = left.min(LANES);
            for j in 0..lines {
                let w = [line(s, d, b.add(j * LINE)), line(s, d, b.add(TILE + j * LINE))];
                for (r, sums) in sums.iter_mut().enumerate() {
                    let x = *a.add(r * STRIDE + j);
                    *sums = [d.dot(sums[0], x, w[0]), d.dot(sums[1], x, w[1])];
                }
            }
            a = a.add(lines);
            b = b.wrapping_add(2 * TILE);
            left -= lines;
        }
        // The loops unroll to constant indices. If an element of `sums` were stored through a run-time index,
        // the whole array would live in memory during the loop above.
        for (r, sums) in sums.iter().enumerate() {
            for (half, &sum) in sums.iter().enumerate() {
                let to = c.add(r * PANEL + half * LANES);
                if last { d.store_f32(to, sum) } else { d.suspend(to, sum) }
            }
        }
    }
}

/// Loads a line of a tile and prefetches a later one.
///
/// # Safety
/// 64 bytes must be readable at `p`.
#[inline(always)]
unsafe fn line<S: Simd, D: Dot>(s: S, d: D, p: *const u8) -> D::W {
    s.prefetch(p.wrapping_add(AHEAD * LINE).cast());
    // SAFETY: guaranteed by the caller.
    unsafe { d.line(p) }
}
