//! f32 GEMM `y = x W^T` with bias, activation and residual, over weights that are packed once when they are
//! loaded.
//!
//! Invariant: each element of `x W^T` is one chain of fused multiply-adds over k = 0, 1, .., K - 1, with initial
//! value zero. Where K is cut into slices, the f32 sum is stored and loaded again without rounding; how rows and
//! columns are cut only decides which task computes an element. So the bits of a row depend on that row and on
//! the weights, and not on M, the row's position, the number of threads or, among instruction sets with FMA, the
//! instruction set. On CPUs with AMX `linear_f32_amx` computes the product: its bits differ, but also depend on
//! the row and the weights only.
//!
//! Layout of packed weights: panels of 32 columns of y; panel p holds, for each k in 0..K, the 32 values
//! `W[32 p .. 32 p + 32][k]`, zeros past N. All instruction sets share this layout.
//!
//! Loop order: a task computes a block of rows times a group of panels. For each slice of at most `DEPTH` of K,
//! it copies the rows into its workspace with a constant stride (they stay in L2), and multiplies them by one
//! panel after another; the slice of a panel stays in L1 or L2 while all strips of the block pass over it.

use crate::Cpu;
use crate::Isa;
use crate::matmul::linear::{LinearCall, LinearOperands};
#[cfg(target_arch = "x86_64")]
use crate::matmul::linear_f32_amx;
use crate::matmul::register_tile::{InitialSums, PrefetchPlan, StripMatmul, strip};
use crate::matmul::task_grid::{GridLimits, TaskGrid};
use crate::simd::Simd;
#[cfg(target_arch = "x86_64")]
use crate::simd::amx::Tiles;
use crate::simd::isa::SimdKernel;
use crate::view::Rows;
use core::ops::Range;
use plimsoll_plan::InstructionSet;

pub use crate::matmul::register_tile::PANEL;

/// Maximum length of a slice of K, and row stride of the copied rows in f32. The stride is no multiple of a
/// page, because rows a page apart would compete for the same L1 sets.
const DEPTH: usize = 768;
const STRIDE: usize = DEPTH + 16;
/// Maximum rows of a task: a multiple of 14, the height of the tallest register tile. The heights of all tiles
/// are even.
const BLOCK: usize = 168;
/// Maximum panels of a task where K has several slices, because the sums of all its panels are stored in the
/// workspace between slices. Rows, sums and one panel's slice take 0.8 MB of L2. (16 panels are 2 to 3 % faster
/// for K > 768, but take 172 032 B more per thread.)
const GROUP: usize = 8;

/// Number of f32 in a cache line.
const LINE: usize = 16;

/// Bytes of workspace per thread.
pub fn workspace_bytes(isa: Isa) -> usize {
    isa.set().gemm_f32() as usize
}

// The workspace holds a slice of a block of rows, and the sums of a group of panels.
const _: () = assert!(4 * BLOCK * (STRIDE + GROUP * PANEL) <= InstructionSet::Portable.gemm_f32() as usize);
#[cfg(target_arch = "x86_64")]
const _: () = assert!(linear_f32_amx::WORKSPACE_BYTES <= InstructionSet::Amx.gemm_f32() as usize);

/// Number of f32 of a packed (n, k) weight.
pub const fn packed_len(n: usize, k: usize) -> usize {
    n.div_ceil(PANEL) * PANEL * k
}

/// Packs up to 32 consecutive rows of a row-major (N, K) weight into one panel, so that a weight can be packed
/// while its file is read. `rows` holds `rows.len() / k` whole rows, `out` holds 32 k values. Panics on other
/// lengths.
pub fn pack_panel(rows: &[f32], k: usize, out: &mut [f32]) {
    assert!(rows.len() <= PANEL * k && out.len() == PANEL * k, "a panel is 32 x {k}");
    if k == 0 {
        return;
    }
    assert!(rows.len().is_multiple_of(k), "whole rows of {k}");
    // In blocks of 32 x 32, so that the source rows and the destination both stay in L1.
    const SIDE: usize = 32;
    for start in (0..k).step_by(SIDE) {
        for kk in start..k.min(start + SIDE) {
            let packed = &mut out[kk * PANEL..][..PANEL];
            packed.fill(0.0);
            for (value, row) in packed.iter_mut().zip(rows.chunks_exact(k)) {
                *value = row[kk];
            }
        }
    }
}

/// Computes a linear layer whose weight is packed by [`pack_panel`]. `workspace` holds `workspace_bytes` for each
/// thread. Panics if the sizes are inconsistent.
pub fn linear(cpu: &Cpu, call: LinearCall<'_>, workspace: &mut [f32]) {
    let m = call.x.rows();
    let k = call.x.cols();
    let n = call.y.cols();
    assert_eq!(call.w.len(), packed_len(n, k), "packed weights of ({n}, {k})");
    let words_per_thread = workspace_bytes(cpu.isa()) / 4;
    assert!(workspace.len() >= words_per_thread * cpu.threads(), "workspace for {} threads", cpu.threads());
    let operands = call.operands();
    #[cfg(target_arch = "x86_64")]
    if cpu.isa().has_tiles() && k > 0 {
        let bytes_per_thread = 4 * words_per_thread;
        // SAFETY: the instruction set has tiles and AVX-512; the size of the workspace was checked above.
        return unsafe {
            linear_f32_amx::linear::<Tiles>(cpu, operands, workspace.as_mut_ptr(), bytes_per_thread)
        };
    }
    let panels = n.div_ceil(PANEL);
    let min_groups = if k > DEPTH { panels.div_ceil(GROUP) } else { 1 };
    let limits = GridLimits { tile_rows: cpu.isa().tile_rows(), max_rows: BLOCK, min_groups };
    let grid = TaskGrid::new(m, panels, cpu.threads(), limits);
    let workspace = workspace.as_mut_ptr() as usize;
    cpu.pool().run(grid.tasks(), &|task, worker| {
        let (rows, panels) = grid.task(task);
        // The workers of one run have distinct indices below `threads()`, so no two tasks share scratch.
        let scratch = (workspace as *mut f32).wrapping_add(worker * words_per_thread);
        cpu.isa().run(LinearF32Task { operands, rows, panels, scratch });
    });
}

/// One task, run by `Isa::run`. No other task uses `scratch` meanwhile.
struct LinearF32Task<'a> {
    operands: LinearOperands<'a>,
    rows: Range<usize>,
    panels: Range<usize>,
    scratch: *mut f32,
}

impl SimdKernel for LinearF32Task<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let k = self.operands.x.cols();
        let slices = k.div_ceil(DEPTH).max(1);
        let depth = k.div_ceil(slices).max(1);
        for (slice, start) in (0..k.max(1)).step_by(depth).enumerate() {
            let ks = start..k.min(start + depth);
            for panel in self.panels.clone() {
                self.panel(s, panel, &ks, slice > 0, slice + 1 == slices);
            }
        }
    }
}

impl LinearF32Task<'_> {
    /// Adds the products over the slice `ks` of one panel to the sums of all rows of the task. `continues`: the sums
    /// of earlier slices are in the scratch; `last`: this is the last slice, so the sums go through the epilogue
    /// to y.
    #[inline(always)]
    fn panel<S: Simd>(&self, s: S, panel: usize, ks: &Range<usize>, continues: bool, last: bool) {
        let k = self.operands.x.cols();
        let count = self.rows.len();
        let b = self.operands.w.as_ptr().wrapping_add((panel * k + ks.start) * PANEL);
        let begin = if continues { InitialSums::Stored } else { InitialSums::Zero };
        for row in (0..count).step_by(S::ROWS) {
            let rows = S::ROWS.min(count - row);
            let a = self.scratch.wrapping_add(row * STRIDE);
            if panel == self.panels.start {
                // SAFETY: the scratch has space for BLOCK rows of STRIDE; these rows and columns lie in x.
                unsafe { copy_rows::<S>(self.operands.x, self.rows.start + row, rows, ks, a) };
            }
            let sums = self.scratch.wrapping_add(BLOCK * STRIDE);
            // With one slice a strip's sums are finished immediately, so all strips share one buffer, which
            // stays in L1.
            let at = if continues || !last { ((panel - self.panels.start) * BLOCK + row) * PANEL } else { 0 };
            let sum = sums.wrapping_add(at);
            // SAFETY: `a` is a strip of copied rows (the padding rows of the last tile are zeroed and lie inside
            // the block), `b` is one slice of one panel, and the strip's sums and output rows belong to this
            // task.
            unsafe {
                let prefetches = self.prefetches::<S>(panel, row, ks, last);
                let matmul = StripMatmul { rows, vecs: 2, depth: ks.len(), a, b, c: sum, ldc: PANEL, begin };
                strip::<S, STRIDE, 2>(s, matmul, &prefetches);
                if last {
                    self.operands.output(self.rows.start + row, rows, panel).finish(s, sum);
                }
            }
        }
    }

    /// Cache lines to prefetch during one strip: first the part of y that the strip will write, then the data
    /// needed next: while rows are still being copied, the rows of the next strip; after that, this strip's
    /// share of the next panel.
    #[inline(always)]
    fn prefetches<S: Simd>(
        &self,
        panel: usize,
        row: usize,
        ks: &Range<usize>,
        last: bool,
    ) -> [PrefetchPlan; 2] {
        let k = self.operands.x.cols();
        let count = self.rows.len();
        let operands = &self.operands;
        let out = PrefetchPlan {
            at: operands.y.row(self.rows.start + row).wrapping_add(panel * PANEL),
            step: operands.y.ld(),
            count: S::ROWS,
            hop: LINE,
            lines: if last { PANEL / LINE * S::ROWS } else { 0 },
        };
        let next_row = row + S::ROWS;
        if panel == self.panels.start && next_row < count {
            let at = operands.x.row(self.rows.start + next_row).wrapping_add(ks.start);
            let lines = S::ROWS * ks.len().div_ceil(LINE);
            return [out, PrefetchPlan { at, step: operands.x.ld(), count: S::ROWS, hop: LINE, lines }];
        }
        let lines = (ks.len() * PANEL / LINE).div_ceil(count.div_ceil(S::ROWS));
        let slice = operands.w.as_ptr().wrapping_add(((panel + 1) * k + ks.start) * PANEL);
        let at = slice.wrapping_add(row / S::ROWS * lines * LINE);
        [out, PrefetchPlan { at, step: LINE, count: lines, hop: 0, lines }]
    }
}

/// Copies columns `ks` of a strip of rows of x to rows of stride STRIDE, and zeroes the rows from `rows` up to
/// the tile's height.
///
/// # Safety
/// The rows and columns must lie in x, `rows` must be at most the tile's height and `ks` at most DEPTH long; the
/// tile's height of rows of STRIDE f32 must be writable at `to`.
#[inline(always)]
unsafe fn copy_rows<S: Simd>(x: Rows<'_>, row: usize, rows: usize, ks: &Range<usize>, to: *mut f32) {
    for r in 0..S::ROWS {
        let to = to.wrapping_add(r * STRIDE);
        // SAFETY: guaranteed by the caller.
        unsafe {
            if r < rows {
                to.copy_from_nonoverlapping(x.row(row + r).wrapping_add(ks.start), ks.len());
            } else {
                to.write_bytes(0, ks.len());
            }
        }
    }
}
