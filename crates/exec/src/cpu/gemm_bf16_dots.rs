//! Products of bf16 by AVX512-BF16's dot products of pairs (VDPBF16PS), where a CPU has them and no tiles.
//!
//! Invariant: an element is the chain of `gemm_bf16`: such an instruction adds the product of a pair's second elements to
//! the sum, then that of its first ones, each with one rounding to nearest (Intel 64 and IA-32 Software Developer's Manual,
//! volume 2; the same on Zen 5, see the test). It takes denormals, in and out, as zero, where lanes keep them: of numbers
//! below 2^-126 the bits may differ.
//!
//! Order of work: as in `gemm`. A line of a tile holds a pair of each of 16 columns, so panels are read where they lie; a
//! strip's rows are copied, slice by slice, to rows of one stride.

use super::element::Bf16;
use super::gemm::finish;
use super::gemm_bf16::{BLOCK, DEPTH, EACH, GROUP, Task, slices};
use super::simd::{LANES, Simd};
use super::simd_x86::Avx512;
use super::tile::PANEL;
use crate::tiles::STEP;
use core::arch::x86_64::*;
use core::ops::Range;

/// Pairs of a copied row, and from one to the next: not a multiple of a page.
const STRIDE: usize = DEPTH / 2 + LANES;
/// Bytes of a line of a tile, and of a tile.
const LINE: usize = 4 * LANES;
const TILE: usize = LANES * LINE;
/// How many lines of either tile ahead of its use one is asked for.
const AHEAD: usize = 8;

const _: () =
    assert!(BLOCK * (STRIDE + GROUP * PANEL) <= EACH && Avx512::ROWS == 14 && BLOCK.is_multiple_of(14));

/// A task of `gemm_bf16`.
///
/// # Safety
/// The CPU has AVX-512 with BF16; the task's scratch is this thread's own.
#[target_feature(enable = "avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
pub(super) unsafe fn run(task: &Task<'_>) {
    // SAFETY: as the caller promises.
    let s = unsafe { Avx512::assume() };
    for ks in slices(task.job.x.cols()) {
        for panel in task.panels.clone() {
            // SAFETY: as the caller promises: a panel of the task's, of which the first copies the rows.
            unsafe { pass(s, task, panel, &ks) };
        }
    }
}

/// Adds the slice `ks` of one panel to the sums of all rows; the last slice goes on to y.
///
/// # Safety
/// `run`'s alone.
#[inline(always)]
unsafe fn pass(s: Avx512, task: &Task<'_>, panel: usize, ks: &Range<usize>) {
    let (job, total) = (task.job, task.job.x.cols().div_ceil(STEP));
    let (more, last) = (ks.start > 0, ks.end == job.x.cols());
    let sums = task.scratch.wrapping_add(BLOCK * STRIDE);
    let b = job.w.as_ptr().cast::<u8>().wrapping_add((panel * total + ks.start / STEP) * 2 * TILE);
    for row in (0..task.rows.len()).step_by(Avx512::ROWS) {
        let rows = Avx512::ROWS.min(task.rows.len() - row);
        let a = task.scratch.cast::<u32>().wrapping_add(row * STRIDE);
        // With one slice the sums go on at once: one strip's room in L1 does for all.
        let at = if more || !last { ((panel - task.panels.start) * BLOCK + row) * PANEL } else { 0 };
        let sum = sums.wrapping_add(at);
        let pairs = ks.len().div_ceil(2);
        // SAFETY: a strip of the scratch, whose rows past the last are zeros, a slice of a panel, and the strip's sums.
        unsafe {
            if panel == task.panels.start {
                copy(task, row, rows, ks, a);
            }
            match rows {
                9.. => dots::<14>(s, pairs, a, b, sum, more),
                5.. => dots::<8>(s, pairs, a, b, sum, more),
                3.. => dots::<4>(s, pairs, a, b, sum, more),
                _ => dots::<2>(s, pairs, a, b, sum, more),
            }
            if last {
                finish(s, job.out(), task.rows.start + row, rows, panel, sum);
            }
        }
    }
}

/// Columns `ks` of a strip of rows of x, in pairs, with a zero behind an odd one and zero rows up to the tile's height.
///
/// # Safety
/// `to` is the strip's place in the scratch.
#[inline(always)]
unsafe fn copy(task: &Task<'_>, row: usize, rows: usize, ks: &Range<usize>, to: *mut u32) {
    for r in 0..Avx512::ROWS {
        let to = to.wrapping_add(r * STRIDE);
        // SAFETY: the row's columns, at most DEPTH, or nothing of it; a row of STRIDE pairs.
        unsafe {
            if r < rows {
                to.add(ks.len() / 2).write(0);
                let from = task.job.x.row(task.rows.start + row + r).wrapping_add(ks.start);
                to.cast::<Bf16>().copy_from_nonoverlapping(from, ks.len());
            } else {
                to.write_bytes(0, ks.len().div_ceil(2));
            }
        }
    }
}

/// `c (+)= a b` for `ROWS` rows of pairs, STRIDE apart, and the 32 columns of a panel, of which `b` begins with the first
/// step; begins at zero unless there is `more`.
///
/// # Safety
/// `pairs` pairs of the rows and of the panel, and `ROWS` rows of 32 sums; the CPU has AVX-512 with BF16.
#[inline(always)]
unsafe fn dots<const ROWS: usize>(
    s: Avx512,
    pairs: usize,
    mut a: *const u32,
    mut b: *const u8,
    c: *mut f32,
    more: bool,
) {
    let mut sums = [[s.splat(0.0); 2]; ROWS];
    // SAFETY: as the caller promises.
    unsafe {
        if more {
            for (r, sums) in sums.iter_mut().enumerate() {
                *sums = [s.load(c.add(r * PANEL)), s.load(c.add(r * PANEL + LANES))];
            }
        }
        let mut left = pairs;
        while left > 0 {
            let lines = left.min(LANES);
            for j in 0..lines {
                let w = [line(s, b.add(j * LINE)), line(s, b.add(TILE + j * LINE))];
                for (r, sums) in sums.iter_mut().enumerate() {
                    let x = bits(_mm512_set1_epi32(*a.add(r * STRIDE + j) as i32));
                    *sums = [_mm512_dpbf16_ps(sums[0], w[0], x), _mm512_dpbf16_ps(sums[1], w[1], x)];
                }
            }
            (a, b) = (a.add(lines), b.wrapping_add(2 * TILE));
            left -= lines;
        }
        for (r, sums) in sums.iter().enumerate() {
            s.store(c.add(r * PANEL), sums[0]);
            s.store(c.add(r * PANEL + LANES), sums[1]);
        }
    }
}

/// A line of a tile; asks for a later one.
///
/// # Safety
/// 64 bytes are readable at `p`.
#[inline(always)]
unsafe fn line(s: Avx512, p: *const u8) -> __m512bh {
    s.prefetch(p.wrapping_add(AHEAD * LINE).cast());
    // SAFETY: as the caller promises.
    bits(unsafe { _mm512_loadu_si512(p.cast()) })
}

/// The same bits.
#[inline(always)]
fn bits(v: __m512i) -> __m512bh {
    // SAFETY: both are 64 bytes, and any are 32 bf16.
    unsafe { core::mem::transmute(v) }
}
