//! f32 matmuls whose operands change in every step, each stored as is or transposed: `y = residual + act(A B +
//! bias)`. Training uses these; `linear_f32` is for weights that were packed when they were loaded.
//!
//! Invariant: as in `linear_f32`, each element of A B is one chain of fused multiply-adds over k = 0, 1, .., K - 1 that
//! begins at zero and is never divided among threads. So the bits of an element depend on its row of A and its column
//! of B alone, and a linear layer has the same bits with row-major and with packed weights.
//!
//! Order of work, after Goto and van de Geijn (2008): a task takes a block of rows and a group of panels of 32
//! columns. For each slice of at most `DEPTH` k it packs the rows (L2); for each panel it packs the columns' slice
//! (L1) and passes all strips of rows over it. The partial sums of the group stay in L2 until the next slice. Every
//! element of B is packed once per block of rows, every element of A once per group.

mod column_sums;
mod pack;

use crate::Cpu;
use crate::matmul::linear::{MatmulEpilogue, OutputStrip};
use crate::matmul::register_tile::{InitialSums, PANEL, PrefetchPlan, StripMatmul, strip};
use crate::matmul::task_grid::{GridLimits, TaskGrid};
use crate::simd::isa::SimdKernel;
use crate::simd::{LANES, Simd};
use crate::view::{Rows, RowsMut};
use core::ops::Range;
use plimsoll_plan::CpuKernel;

pub use column_sums::column_sums;

/// Maximum k of a slice, a multiple of the vector length, and the stride of the packed rows (`STRIDE`), which must
/// not be a multiple of a page, so that rows do not compete for the same cache sets.
const DEPTH: usize = 352;
const STRIDE: usize = DEPTH + 16;
/// Maximum rows of a task: a multiple of 14 and of 6, the heights of tiles. With tiles of 4 rows, the last tile has 2
/// rows and 2 of padding.
const BLOCK: usize = 294;
/// Maximum panels of a task if K has several slices.
const GROUP: usize = 12;

/// f32 of the packed rows, of a panel's packed slice (`SLICE`), and of the partial sums (`SUMS`).
const ROWS: usize = (BLOCK + 2) * STRIDE;
const SLICE: usize = DEPTH * PANEL;
const SUMS: usize = BLOCK * GROUP * PANEL;
/// f32 of workspace per thread, a multiple of the cache line.
const WORKSPACE_WORDS: usize = ROWS + SLICE + SUMS;

const _: () = assert!(BLOCK.is_multiple_of(14) && BLOCK.is_multiple_of(6));
const _: () = assert!(DEPTH.is_multiple_of(LANES) && WORKSPACE_WORDS.is_multiple_of(LANES));

/// Bytes of workspace per thread.
pub const WORKSPACE_BYTES: usize = CpuKernel::PRODUCT_BYTES as usize;

const _: () = assert!(4 * WORKSPACE_WORDS == WORKSPACE_BYTES);

/// Multiply-adds up to which a matmul takes less time than waking a thread: some microseconds.
const ALONE: usize = 64 * 1024;

/// A factor of a matmul.
#[derive(Clone, Copy)]
pub enum Factor<'a> {
    /// The matrix as stored.
    Stored(Rows<'a>),
    /// The transpose of the stored matrix.
    Transposed(Rows<'a>),
}

impl Factor<'_> {
    /// (rows, columns) of the factor, after transposition.
    pub fn shape(self) -> (usize, usize) {
        match self {
            Factor::Stored(x) => (x.rows(), x.cols()),
            Factor::Transposed(x) => (x.cols(), x.rows()),
        }
    }
}

/// A matmul: y (M, N) = residual + act(a (M, K) b (K, N) + bias). The residual may be exactly `y`, which accumulates
/// into `y`; `a` and `b` must not overlap `y`.
pub struct MatmulCall<'a> {
    /// Left factor (M, K).
    pub a: Factor<'a>,
    /// Right factor (K, N).
    pub b: Factor<'a>,
    /// Bias, activation and residual.
    pub epilogue: MatmulEpilogue<'a>,
    /// Output (M, N).
    pub y: RowsMut<'a>,
}

/// Computes a matmul. `workspace` holds `WORKSPACE_BYTES` for each thread. Panics if the shapes do not match.
pub fn matmul(cpu: &Cpu, call: MatmulCall<'_>, workspace: &mut [f32]) {
    let MatmulCall { a, b, epilogue, y } = call;
    let (m, k) = a.shape();
    let n = y.cols();
    assert_eq!(y.rows(), m, "rows of y");
    assert_eq!(b.shape(), (k, n), "shape of b");
    epilogue.check(m, n);
    assert!(workspace.len() >= WORKSPACE_WORDS * cpu.threads(), "workspace for {} threads", cpu.threads());
    let operands = MatmulOperands { a, b, k, epilogue, y: &y };
    let grid = task_grid(operands, cpu.threads(), cpu.isa().tile_rows());
    let workspace = workspace.as_mut_ptr() as usize;
    cpu.pool().run(grid.tasks(), &|task, worker| {
        let (rows, panels) = grid.task(task);
        // The worker indices of one run are distinct and below `threads()`, so workspaces never overlap.
        let scratch = (workspace as *mut f32).wrapping_add(worker * WORKSPACE_WORDS);
        cpu.isa().run(RowMajorTask { operands, rows, panels, scratch });
    });
}

/// Accumulating matmul, y += a b. `workspace` as for [`matmul()`].
pub(crate) fn add_matmul(cpu: &Cpu, a: Factor<'_>, b: Factor<'_>, y: RowsMut<'_>, workspace: &mut [f32]) {
    // SAFETY: y's own rows; `matmul` reads each element of the residual before it writes the same element of y.
    let residual = unsafe { Rows::from_raw(y.row(0), y.rows(), y.cols(), y.ld()) };
    let epilogue = MatmulEpilogue { residual: Some(residual), ..Default::default() };
    matmul(cpu, MatmulCall { a, b, epilogue, y }, workspace);
}

/// Divides a matmul into tasks: by blocks of rows if there are several, otherwise by panels, so that each panel is
/// packed once.
fn task_grid(operands: MatmulOperands<'_>, threads: usize, tile_rows: usize) -> TaskGrid {
    let m = operands.y.rows();
    let n = operands.y.cols();
    let k = operands.k;
    let panels = n.div_ceil(PANEL);
    let min_groups = if k > DEPTH { panels.div_ceil(GROUP) } else { 1 };
    let limits = GridLimits { tile_rows, max_rows: BLOCK, min_groups };
    if m.saturating_mul(n).saturating_mul(k) <= ALONE {
        return TaskGrid::new(m, panels, 1, limits);
    }
    if m <= BLOCK && panels >= threads {
        let min_groups = min_groups.next_multiple_of(threads);
        return TaskGrid::new(m, panels, 1, GridLimits { min_groups, ..limits });
    }
    TaskGrid::new(m, panels, threads, limits)
}

/// Operands of a matmul, shared by its tasks.
#[derive(Clone, Copy)]
struct MatmulOperands<'a> {
    a: Factor<'a>,
    b: Factor<'a>,
    k: usize,
    epilogue: MatmulEpilogue<'a>,
    y: &'a RowsMut<'a>,
}

/// One task of a matmul, for `Isa::run`. `scratch` is this worker's workspace of `WORKSPACE_WORDS` f32.
struct RowMajorTask<'a> {
    operands: MatmulOperands<'a>,
    rows: Range<usize>,
    panels: Range<usize>,
    scratch: *mut f32,
}

impl SimdKernel for RowMajorTask<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let k = self.operands.k;
        let slices = k.div_ceil(DEPTH).max(1);
        let depth = k.div_ceil(slices).next_multiple_of(LANES);
        for slice in 0..slices {
            let ks = (slice * depth).min(k)..((slice + 1) * depth).min(k);
            // SAFETY: the scratch begins with space for BLOCK rows of STRIDE; the rows and k lie in a.
            unsafe { pack::rows(s, self.operands.a, &self.rows, &ks, self.scratch) };
            for panel in self.panels.clone() {
                self.panel(s, panel, &ks, slice > 0, slice + 1 == slices);
            }
        }
    }
}

impl RowMajorTask<'_> {
    /// Adds the slice `ks` of one panel to the partial sums of all rows; after the last slice the sums are finished
    /// and written to y.
    #[inline(always)]
    fn panel<S: Simd>(&self, s: S, panel: usize, ks: &Range<usize>, continues: bool, last: bool) {
        let operands = &self.operands;
        let count = self.rows.len();
        let b = self.scratch.wrapping_add(ROWS);
        let columns = panel * PANEL..operands.y.cols().min((panel + 1) * PANEL);
        // SAFETY: space for DEPTH rows of PANEL; these k and columns lie in b.
        unsafe { pack::panel(s, operands.b, &columns, ks, b) };
        let begin = if continues { InitialSums::Stored } else { InitialSums::Zero };
        let sums = self.scratch.wrapping_add(ROWS + SLICE);
        for row in (0..count).step_by(S::ROWS) {
            let rows = S::ROWS.min(count - row);
            let a = self.scratch.wrapping_add(row * STRIDE);
            // With one slice the sums are finished at once, so all strips reuse one strip's space, which stays in L1.
            let at = if continues || !last { ((panel - self.panels.start) * BLOCK + row) * PANEL } else { 0 };
            let sum = sums.wrapping_add(at);
            // SAFETY: a strip of packed rows (the tile's padding rows are zeroed and inside the block), one slice of
            // one panel, and the strip's partial sums, whose rows and columns belong to this task.
            unsafe {
                let prefetches = self.prefetches::<S>(panel, row, ks, last);
                let vecs = columns.len().div_ceil(LANES);
                let matmul = StripMatmul { rows, vecs, depth: ks.len(), a, b, c: sum, ldc: PANEL, begin };
                strip::<S, STRIDE, 2>(s, matmul, &prefetches);
                if last {
                    let epilogue = &operands.epilogue;
                    let output =
                        OutputStrip { epilogue, y: operands.y, row: self.rows.start + row, rows, panel };
                    output.finish(s, sum);
                }
            }
        }
    }

    /// Prefetches during one strip: the part of y that the strip will write, and its share of the next panel.
    #[inline(always)]
    fn prefetches<S: Simd>(
        &self,
        panel: usize,
        row: usize,
        ks: &Range<usize>,
        last: bool,
    ) -> [PrefetchPlan; 2] {
        let y = self.operands.y;
        let out = PrefetchPlan {
            at: y.row(self.rows.start + row).wrapping_add(panel * PANEL),
            step: y.ld(),
            count: S::ROWS,
            hop: LANES,
            lines: if last { PANEL / LANES * S::ROWS } else { 0 },
        };
        let next = if panel + 1 < self.panels.end { panel + 1 } else { self.panels.start };
        let columns = next * PANEL..(next + 1) * PANEL;
        let strips = self.rows.len().div_ceil(S::ROWS);
        [out, pack::prefetch_plan(self.operands.b, &columns, ks, row / S::ROWS, strips)]
    }
}
