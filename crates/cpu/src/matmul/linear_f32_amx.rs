//! f32 GEMM on AMX bf16 tiles: each operand is split into three bf16 values (`bf16x3`), and six tile products
//! replace one f32 product.
//!
//! Invariant: the sum of an element takes the steps of 32 k in ascending order, and in each step the six
//! products in one fixed order, each accumulated as the tile instruction does. Where K is cut into slices, the
//! f32 sum is stored and loaded again without rounding; zeros past M and K add zero. So the bits of a row depend
//! only on that row and on the weights. They differ from the bits of the chain of fused multiply-adds in `linear_f32`,
//! but are no less accurate: a step makes 6 roundings where the chain makes 32, and the omitted products are at
//! most 2^-24 of |x| |w| (see `bf16x3`).
//!
//! Loop order: a task computes a block of rows times a group of panels. For each slice of K it splits the rows
//! into its workspace (they stay in L2), then multiplies all strips of rows by one split panel slice after
//! another. A K of at most `WHOLE` steps is a single slice: then no sums are stored between slices, and the rows
//! are split once for all panels. While the tile unit multiplies, the core splits the next panel line by line,
//! prefetches later operands, and applies the epilogue to the previous strip.

use crate::Cpu;
use crate::matmul::bf16x3::{BYTES, LINES, PanelSlice, split_panel, split_strip};
use crate::matmul::linear::LinearOperands;
use crate::matmul::register_tile::PANEL;
use crate::matmul::task_grid::{GridLimits, TaskGrid};
use crate::simd::amx::{Bf16x3Matmul, STEP, STRIP, TileUnit};
use crate::simd::x86::Avx512;
use crate::simd::{LANES, Simd};
use core::ops::Range;

/// Maximum rows of a task.
const BLOCK: usize = 288;
/// Maximum number of steps of a K that is a single slice, and of a slice of a longer K.
const WHOLE: usize = 20;
const DEPTH: usize = 10;
/// Maximum panels of a task where K has several slices: the sums of all of them are stored in the workspace
/// between slices.
const GROUP: usize = 20;
/// Tile products per step; `SplitCoreWork::turn` is called after each.
const TURNS: usize = 6;

/// Bytes of the sums of one strip and one panel.
const SUMS: usize = STRIP * PANEL * 4;
/// Bytes of workspace per thread, a whole number of cache lines: enough for one slice and for several.
pub(crate) const WORKSPACE_BYTES: usize = {
    let one = Slicing::bytes(WHOLE, 2);
    let several = Slicing::bytes(DEPTH, GROUP);
    if one > several { one } else { several }
};

/// How K is cut: number of slices, maximum steps of a slice, and number of panels whose sums the workspace
/// holds.
#[derive(Clone, Copy)]
struct Slicing {
    slices: usize,
    steps: usize,
    sum_buffers: usize,
}

impl Slicing {
    fn of(k: usize) -> Self {
        let steps = k.div_ceil(STEP);
        let slices = if steps <= WHOLE { 1 } else { steps.div_ceil(DEPTH) };
        // With one slice, the sums of a panel are finished during the next panel, so the buffers of two panels
        // alternate.
        Self { slices, steps: steps.div_ceil(slices), sum_buffers: if slices == 1 { 2 } else { GROUP } }
    }

    /// Bytes of the split rows, of two split panel slices, and of the sums of `sum_buffers` panels.
    const fn bytes(steps: usize, sum_buffers: usize) -> usize {
        (BLOCK / STRIP + 2) * steps * BYTES + sum_buffers * (BLOCK / STRIP * SUMS)
    }
}

/// `linear_f32::linear` after its checks, for K > 0; each thread has `bytes_per_thread` bytes of workspace.
///
/// # Safety
/// The CPU must have AVX-512 and the tile registers of `U`.
pub(crate) unsafe fn linear<U: TileUnit>(
    cpu: &Cpu,
    operands: LinearOperands<'_>,
    workspace: *mut f32,
    bytes_per_thread: usize,
) {
    assert!(operands.x.cols() > 0 && bytes_per_thread >= WORKSPACE_BYTES, "columns and workspace");
    let m = operands.x.rows();
    let panels = operands.y.cols().div_ceil(PANEL);
    let slicing = Slicing::of(operands.x.cols());
    let min_groups = if slicing.slices > 1 { panels.div_ceil(slicing.sum_buffers) } else { 1 };
    let limits = GridLimits { tile_rows: STRIP, max_rows: BLOCK, min_groups };
    let grid = TaskGrid::new(m, panels, cpu.threads(), limits);
    let workspace = workspace as usize;
    cpu.pool().run(grid.tasks(), &|task, worker| {
        let (rows, panels) = grid.task(task);
        // Most likely the next block of this worker, for prefetching; empty rows past the last task.
        let (next_rows, _) = grid.task(task + cpu.threads());
        let scratch = (workspace + worker * bytes_per_thread) as *mut u8;
        let task = LinearF32AmxTask { operands, slicing, rows, panels, next_rows, scratch };
        // SAFETY: guaranteed by the caller; a worker runs one task at a time, and its index, hence its scratch,
        // is unique.
        unsafe { task.run::<U>() };
    });
}

/// One task. `scratch` is `WORKSPACE_BYTES` bytes that no other task uses meanwhile; `next_rows` is a guess at the
/// worker's next rows, for prefetching only.
struct LinearF32AmxTask<'a> {
    operands: LinearOperands<'a>,
    slicing: Slicing,
    rows: Range<usize>,
    panels: Range<usize>,
    next_rows: Range<usize>,
    scratch: *mut u8,
}

impl<'a> LinearF32AmxTask<'a> {
    /// Computes the task.
    ///
    /// # Safety
    /// The CPU must have AVX-512 and the tile registers of `U`, and this thread must hold no other value of `U`.
    #[target_feature(enable = "avx2,fma,avx512f,avx512bw,avx512dq,avx512vl")]
    unsafe fn run<U: TileUnit>(self) {
        // SAFETY: guaranteed by the caller.
        let (s, mut unit) = unsafe { (Avx512::assume(), U::configure()) };
        let mut core_work = SplitCoreWork::new(self.operands, self.panel_split(0));
        core_work.split_all(s);
        for slice in 0..self.slicing.slices {
            let steps = self.steps(slice);
            for strip in 0..self.strips() {
                // SAFETY: a strip of this task's rows, and its space among the split rows.
                unsafe {
                    split_strip(s, self.operands.x, self.strip(strip), &steps, self.split(strip, &steps))
                };
            }
            core_work.rows = self.next_input(slice);
            for panel in 0..self.panels.len() {
                core_work.panel = self.panel_split(slice * self.panels.len() + panel + 1);
                // SAFETY: the rows of this slice were split above; this panel slice was split during the
                // previous panel, or before the first, and completed by `split_all`.
                unsafe { self.panel(&mut unit, &mut core_work, panel, slice) };
                core_work.split_all(s);
            }
        }
        core_work.finish_all();
    }

    /// Adds the products of all strips with one slice of one panel to their sums.
    ///
    /// # Safety
    /// Only for `run`: this slice of the strips and of the panel must have been split.
    #[inline(always)]
    unsafe fn panel<U: TileUnit>(
        &self,
        unit: &mut U,
        core_work: &mut SplitCoreWork<'_>,
        panel: usize,
        slice: usize,
    ) {
        let steps = self.steps(slice);
        let last = slice + 1 == self.slicing.slices;
        let b = self.buffer_at((slice * self.panels.len() + panel) % 2);
        let sums = self
            .buffer_at(2)
            .wrapping_add(panel % self.slicing.sum_buffers * (BLOCK / STRIP * SUMS))
            .cast::<f32>();
        let panel = self.panels.start + panel;
        for strip in 0..self.strips() {
            let a = self.split(strip, &steps);
            let c = sums.wrapping_add(strip * STRIP * PANEL);
            let rows = self.strip(strip);
            let lines = if slice > 0 { STRIP * PANEL } else { 0 };
            core_work.sums = CacheLines::new(c.wrapping_add(STRIP * PANEL), 0, 1, lines);
            if last {
                let at = self.operands.y.row(rows.start).wrapping_add(panel * PANEL);
                core_work.out = CacheLines::new(at, self.operands.y.ld(), rows.len(), PANEL);
            }
            // SAFETY: `a` and `b` hold `steps` split steps, `c` the strip's sums. Meanwhile `turn` splits into
            // the other panel buffer, and finishes the sums of another strip or of the other panel, so it does
            // not touch `c`.
            unsafe {
                let matmul = Bf16x3Matmul { a, b, c, steps: steps.len(), continues: slice > 0 };
                unit.bf16x3_matmul(matmul, || core_work.turn());
            }
            if last {
                // The rows of the strip before must be finished first: only one strip is pending.
                core_work.finish_all();
                core_work.pending = PendingStrip { row: rows.start, rows: rows.len(), panel, sum: c };
            }
        }
    }

    /// The panel slice number `at` of this task, to be split into bf16 terms. Panel slices are numbered slice by
    /// slice, and within a slice panel by panel; numbers past the last give a panel without lines.
    fn panel_split(&self, at: usize) -> PanelSplit {
        let slice = at / self.panels.len();
        let panel = self.panels.start + at % self.panels.len();
        let depth = self.operands.x.cols();
        let steps = self.steps(slice);
        let lines = if slice < self.slicing.slices { steps.len() * LINES } else { 0 };
        let panel = self.operands.w.as_ptr().wrapping_add(panel * depth * PANEL);
        PanelSplit {
            slice: PanelSlice { panel, depth, steps },
            to: self.buffer_at(at % 2),
            next_line: 0,
            lines,
            progress: 0,
            turns: TURNS * self.strips(),
        }
    }

    /// Address of the bf16 terms of `strip`'s rows of x, for the steps of one slice of K.
    fn split(&self, strip: usize, steps: &Range<usize>) -> *mut u8 {
        self.scratch.wrapping_add(strip * steps.len() * BYTES)
    }

    /// Address behind the split rows: with `at` 0 and 1, the two buffers of split panel slices, which alternate;
    /// with 2, the sums.
    fn buffer_at(&self, at: usize) -> *mut u8 {
        self.scratch.wrapping_add((BLOCK / STRIP + at) * self.slicing.steps * BYTES)
    }

    /// The steps of a slice. K is cut into slices of equal length, up to one step.
    fn steps(&self, slice: usize) -> Range<usize> {
        let steps = self.operands.x.cols().div_ceil(STEP);
        let slices = self.slicing.slices;
        slice * steps / slices..(slice + 1) * steps / slices
    }

    fn strips(&self) -> usize {
        self.rows.len().div_ceil(STRIP)
    }

    /// The rows of a strip: 32, or fewer in the last strip of the block.
    fn strip(&self, strip: usize) -> Range<usize> {
        let start = self.rows.start + strip * STRIP;
        start..self.rows.end.min(start + STRIP)
    }

    /// Addresses of the rows of x that are split next: the next slice, or the first slice of the next block.
    fn next_input(&self, slice: usize) -> CacheLines {
        let (rows, slice) =
            if slice + 1 < self.slicing.slices { (&self.rows, slice + 1) } else { (&self.next_rows, 0) };
        let steps = self.steps(slice);
        let x = self.operands.x;
        let at = x.row(rows.start).wrapping_add(steps.start * STEP);
        CacheLines::new(at, x.ld(), rows.len(), steps.len() * STEP)
    }
}

/// A panel slice that is being split line by line: one line every `turns` / LINES turns, so that the last line is
/// split at the end of the products of one panel with all strips.
struct PanelSplit {
    slice: PanelSlice,
    to: *mut u8,
    next_line: usize,
    lines: usize,
    /// Grows by LINES with each turn; a line is due whenever it reaches `turns`, so no division is needed.
    progress: usize,
    /// Turns during the products of one panel.
    turns: usize,
}

impl PanelSplit {
    /// Called after each tile product; splits one line when the lines split so far fall behind the products
    /// done.
    #[inline(always)]
    fn turn(&mut self, s: Avx512) {
        self.progress += LINES;
        if self.progress >= self.turns {
            self.progress -= self.turns;
            self.split(s, 1);
        }
    }

    /// Splits at most `count` more lines.
    #[inline(always)]
    fn split(&mut self, s: Avx512, count: usize) {
        let lines = self.next_line..self.lines.min(self.next_line.saturating_add(count));
        self.next_line = lines.end;
        // SAFETY: lines of a panel of the packed weights, and the buffer for its slice.
        unsafe { split_panel(s, &self.slice, lines, self.to) };
    }
}

/// Work that the core does while the tile unit multiplies.
struct SplitCoreWork<'a> {
    operands: LinearOperands<'a>,
    /// Panel slice that is multiplied next.
    panel: PanelSplit,
    /// Rows of x that are split next, prefetched into L2.
    rows: CacheLines,
    /// Sums that the next strip reads, prefetched into L1.
    sums: CacheLines,
    /// Rows of y that this strip will write, prefetched into L1.
    out: CacheLines,
    pending: PendingStrip,
}

/// Complete sums of a strip that are still to be written to y: `rows` rows starting at `row`, whose sums start
/// at `sum`.
struct PendingStrip {
    row: usize,
    rows: usize,
    panel: usize,
    sum: *const f32,
}

impl<'a> SplitCoreWork<'a> {
    fn new(operands: LinearOperands<'a>, panel: PanelSplit) -> Self {
        let [rows, sums, out] = [(); 3].map(|()| CacheLines::new(core::ptr::null(), 0, 0, 0));
        let pending = PendingStrip { row: 0, rows: 0, panel: 0, sum: core::ptr::null() };
        Self { operands, panel, rows, sums, out, pending }
    }

    /// Does a small share of each kind of work. A strip has 6 turns per step, and in total 64 cache lines of y,
    /// 64 lines of sums and 32 rows to finish.
    ///
    /// # Safety
    /// The CPU must have AVX-512.
    #[inline(never)]
    #[target_feature(enable = "avx2,fma,avx512f,avx512bw,avx512dq,avx512vl")]
    unsafe fn turn(&mut self) {
        // SAFETY: guaranteed by the caller.
        let s = unsafe { Avx512::assume() };
        self.panel.turn(s);
        if let Some(line) = self.rows.next() {
            s.prefetch_far(line);
        }
        for lines in [&mut self.sums, &mut self.out] {
            for line in lines.by_ref().take(3) {
                s.prefetch(line);
            }
        }
        self.finish(s, 2);
    }

    /// Splits all remaining lines of the panel.
    #[inline(always)]
    fn split_all(&mut self, s: Avx512) {
        self.panel.split(s, usize::MAX);
    }

    /// Applies the epilogue to at most `count` pending rows.
    #[inline(always)]
    fn finish(&mut self, s: Avx512, count: usize) {
        let pending = &mut self.pending;
        let rows = pending.rows.min(count);
        if rows > 0 {
            let output = self.operands.output(pending.row, rows, pending.panel);
            // SAFETY: rows of this task, whose sums are complete.
            unsafe { output.finish(s, pending.sum) };
            pending.row += rows;
            pending.rows -= rows;
            pending.sum = pending.sum.wrapping_add(rows * PANEL);
        }
    }

    /// Finishes all remaining rows. Must be called before `pending` is replaced, and before the buffer is used
    /// again.
    #[inline(always)]
    fn finish_all(&mut self) {
        // SAFETY: only `LinearF32AmxTask::run`, which requires AVX-512, creates `SplitCoreWork`.
        self.finish(unsafe { Avx512::assume() }, STRIP);
    }
}

/// Iterator over the addresses of cache lines to prefetch: `width` f32 of each of `rows` rows, `ld` f32 apart.
struct CacheLines {
    at: *const f32,
    ld: usize,
    rows: usize,
    width: usize,
    column: usize,
}

impl CacheLines {
    fn new(at: *const f32, ld: usize, rows: usize, width: usize) -> Self {
        Self { at, ld, rows: if width > 0 { rows } else { 0 }, width, column: 0 }
    }
}

impl Iterator for CacheLines {
    type Item = *const f32;

    #[inline(always)]
    fn next(&mut self) -> Option<*const f32> {
        if self.rows == 0 {
            return None;
        }
        let line = self.at.wrapping_add(self.column);
        self.column += LANES;
        if self.column >= self.width {
            self.column = 0;
            self.rows -= 1;
            self.at = self.at.wrapping_add(self.ld);
        }
        Some(line)
    }
}
