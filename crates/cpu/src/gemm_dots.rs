//! Products by sums of dot products (`dot`): of pairs of bf16 where a CPU has AVX512-BF16 and no tiles, of quads of codes
//! wherever there are no tiles. To this file two codes are one bf16.
//!
//! Invariant: an element's sum takes its pairs, or quads, in ascending order. Cutting K into slices stores and reloads that
//! sum exactly. Rows and panels are cut as in `gemm`, which only says who computes what.
//!
//! Order of work: as in `gemm`. A line of a tile holds a pair, or quad, of each of 16 columns, so panels are read where they
//! lie; a strip's rows are copied, slice by slice, to rows of one stride: the loop then needs one address for all of them.

use super::dot::Dot;
use super::element::Bf16;
use super::gemm::{Job, finish_by};
use super::gemm_bf16::{BLOCK, DEPTH, EACH, GROUP, slices};
use super::gemm_int8::Scales;
use super::simd::{LANES, Simd};
use super::tile::PANEL;
use core::ops::Range;
use exec::tiles::STEP;

/// Words of 32 bits (pairs, or quads) of a copied row, and from one to the next: not a multiple of a page. Behind the columns
/// there is room for what the row's sums begin with.
const STRIDE: usize = DEPTH / 2 + LANES;
const OFFSET: usize = STRIDE - 1;
/// Bytes of a line of a tile, and of a tile.
const LINE: usize = 4 * LANES;
const TILE: usize = LANES * LINE;
/// How many lines of either tile ahead of its use one is asked for.
const AHEAD: usize = 8;

const _: () = assert!(BLOCK * (STRIDE + GROUP * PANEL) <= EACH);

/// One task: at most BLOCK rows and, where K has several slices, GROUP panels, of codes with the scales of all rows and panels.
/// `scratch` is `EACH` words of this worker's own.
pub(super) struct Strips<'a> {
    pub(super) job: Job<'a, Bf16>,
    pub(super) scales: Option<Scales<'a>>,
    pub(super) rows: Range<usize>,
    pub(super) panels: Range<usize>,
    pub(super) scratch: *mut f32,
}

impl Strips<'_> {
    /// All of it, by the dot products of `d`, which are of codes where there are scales.
    ///
    /// # Safety
    /// Rows, panels, scales and scratch are as said of a task.
    #[inline(always)]
    pub(super) unsafe fn run<S: Simd, D: Dot>(&self, s: S, d: D) {
        const { assert!(BLOCK.is_multiple_of(D::HEIGHT)) };
        let most = if self.job.x.cols() > DEPTH { GROUP } else { usize::MAX };
        assert!(self.rows.len() <= BLOCK && self.panels.len() <= most, "room for the rows and their sums");
        for ks in slices(self.job.x.cols()) {
            for panel in self.panels.clone() {
                // SAFETY: as the caller promises: a panel of the task's, of which the first copies the rows.
                unsafe { self.pass(s, d, panel, &ks) };
            }
        }
    }

    /// Adds the slice `ks` of one panel to the sums of all rows; the last slice goes on to y.
    ///
    /// # Safety
    /// `run`'s alone.
    #[inline(always)]
    unsafe fn pass<S: Simd, D: Dot>(&self, s: S, d: D, panel: usize, ks: &Range<usize>) {
        let total = self.job.x.cols().div_ceil(STEP);
        let ends = Ends { more: ks.start > 0, last: ks.end == self.job.x.cols() };
        let sums = self.scratch.wrapping_add(BLOCK * STRIDE);
        let b = self.job.w.as_ptr().cast::<u8>().wrapping_add((panel * total + ks.start / STEP) * 2 * TILE);
        let words = ks.len().div_ceil(2);
        for row in (0..self.rows.len()).step_by(D::HEIGHT) {
            let rows = D::HEIGHT.min(self.rows.len() - row);
            let a = self.scratch.cast::<i32>().wrapping_add(row * STRIDE);
            // With one slice the sums go on at once: one strip's room in L1 does for all.
            let apart = ends.more || !ends.last;
            let at = if apart { ((panel - self.panels.start) * BLOCK + row) * PANEL } else { 0 };
            let sum = sums.wrapping_add(at);
            // SAFETY: a strip of the scratch, whose rows past the last are zeros, a slice of a panel, and the strip's sums.
            unsafe {
                if panel == self.panels.start {
                    self.copy(d, row, rows, ks, a);
                }
                match rows {
                    9.. if D::HEIGHT >= 14 => dots::<S, D, 14>(s, d, words, a, b, sum, ends),
                    5.. if D::HEIGHT >= 8 => dots::<S, D, 8>(s, d, words, a, b, sum, ends),
                    3.. if D::HEIGHT >= 4 => dots::<S, D, 4>(s, d, words, a, b, sum, ends),
                    _ => dots::<S, D, 2>(s, d, words, a, b, sum, ends),
                }
                if ends.last {
                    self.finish(s, self.rows.start + row, rows, panel, sum);
                }
            }
        }
    }

    /// Columns `ks` of a strip of rows of x as words, with a zero behind an odd one and zero rows up to the tile's height; with
    /// the first slice what their sums begin with.
    ///
    /// # Safety
    /// `to` is the strip's place in the scratch.
    #[inline(always)]
    unsafe fn copy<D: Dot>(&self, d: D, row: usize, rows: usize, ks: &Range<usize>, to: *mut i32) {
        for r in 0..D::HEIGHT {
            let to = to.wrapping_add(r * STRIDE);
            // SAFETY: the row's columns, at most DEPTH, or nothing of it; a row of STRIDE words.
            unsafe {
                if r < rows {
                    let x = self.job.x.row(self.rows.start + row + r);
                    to.add(ks.len() / 2).write(0);
                    to.cast::<Bf16>().copy_from_nonoverlapping(x.wrapping_add(ks.start), ks.len());
                    if ks.start == 0 {
                        to.add(OFFSET).write(d.offset(x.cast(), self.job.x.cols() / 2));
                    }
                } else {
                    to.write_bytes(0, STRIDE);
                }
            }
        }
    }

    /// The epilogue of one strip of one panel, from its sums to y.
    ///
    /// # Safety
    /// As of `finish_by`, with sums of `rows` rows of 32.
    #[inline(always)]
    unsafe fn finish<S: Simd>(&self, s: S, row: usize, rows: usize, panel: usize, sum: *const f32) {
        let out = self.job.out();
        // SAFETY: the sums are there, and so are scales of all rows and, for whole panels, of all columns.
        unsafe {
            match self.scales {
                None => finish_by(s, out, row, rows, panel, |r, c| s.load(sum.add(r * PANEL + c))),
                Some(scales) => {
                    let w = scales.w.as_ptr().add(panel * PANEL);
                    let number = |r: usize, c: usize| {
                        let scale = s.mul(s.splat(scales.x[row + r]), s.load(w.add(c)));
                        s.mul(s.load(sum.add(r * PANEL + c)), scale)
                    };
                    finish_by(s, out, row, rows, panel, number);
                }
            }
        }
    }
}

/// Whether a slice goes on from sums that are there, and whether it is the last: its sums leave as numbers.
#[derive(Clone, Copy)]
struct Ends {
    more: bool,
    last: bool,
}

/// `c (+)= a b` for `ROWS` rows of words, STRIDE apart, and the 32 columns of a panel, of which `b` begins with the first
/// step.
///
/// # Safety
/// `words` words of the rows and of the panel, what the rows' sums begin with, and `ROWS` rows of 32 sums.
#[inline(always)]
unsafe fn dots<S: Simd, D: Dot, const ROWS: usize>(
    s: S,
    d: D,
    words: usize,
    mut a: *const i32,
    mut b: *const u8,
    c: *mut f32,
    ends: Ends,
) {
    // SAFETY: as the caller promises.
    unsafe {
        let mut sums: [[D::I; 2]; ROWS] = core::array::from_fn(|r| [d.begin(*a.add(r * STRIDE + OFFSET)); 2]);
        if ends.more {
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
            (a, b) = (a.add(lines), b.wrapping_add(2 * TILE));
            left -= lines;
        }
        // Each place is a constant: a sum whose place is not would be kept in memory through the loop as well.
        for (r, sums) in sums.iter().enumerate() {
            for (half, &sum) in sums.iter().enumerate() {
                let to = c.add(r * PANEL + half * LANES);
                if ends.last { d.numbers(to, sum) } else { d.keep(to, sum) }
            }
        }
    }
}

/// A line of a tile; asks for a later one.
///
/// # Safety
/// 64 bytes are readable at `p`.
#[inline(always)]
unsafe fn line<S: Simd, D: Dot>(s: S, d: D, p: *const u8) -> D::W {
    s.prefetch(p.wrapping_add(AHEAD * LINE).cast());
    // SAFETY: as the caller promises.
    unsafe { d.line(p) }
}
