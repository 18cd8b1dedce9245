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
use crate::matmul::bf16x3::{BYTES, LINES, split_panel, split_strip};
use crate::matmul::linear_f32::{GemmCall, Split, finish};
use crate::matmul::register_tile::PANEL;
use crate::simd::amx::{STEP, STRIP, TileUnit};
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
/// Tile products per step; `CoreWork::turn` is called after each.
const TURNS: usize = 6;

/// Bytes of the sums of one strip and one panel.
const SUMS: usize = STRIP * PANEL * 4;
/// Bytes of workspace per thread, a whole number of cache lines: enough for either shape.
pub(crate) const EACH: usize = {
    let whole = Shape::bytes(WHOLE, 2);
    let cut = Shape::bytes(DEPTH, GROUP);
    if whole > cut { whole } else { cut }
};

/// How K is cut: number of slices, maximum steps of a slice, and number of panels whose sums the workspace
/// holds.
#[derive(Clone, Copy)]
struct Shape {
    slices: usize,
    steps: usize,
    sum_buffers: usize,
}

impl Shape {
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

/// `linear_f32::linear` after its checks, for K > 0; each thread has `each` bytes of workspace.
///
/// # Safety
/// The CPU must have AVX-512 and the tile registers of `U`.
pub(crate) unsafe fn linear<U: TileUnit>(cpu: &Cpu, job: GemmCall<'_>, workspace: *mut f32, each: usize) {
    assert!(job.x.cols() > 0 && each >= EACH, "columns and workspace");
    let m = job.x.rows();
    let panels = job.y.cols().div_ceil(PANEL);
    let shape = Shape::of(job.x.cols());
    let fewest = if shape.slices > 1 { panels.div_ceil(shape.sum_buffers) } else { 1 };
    let split = Split::new(m, panels, cpu.threads(), STRIP, BLOCK, fewest);
    let workspace = workspace as usize;
    cpu.pool().run(split.tasks(), &|task, worker| {
        let (rows, panels) = split.task(task);
        // Most likely the next block of this worker, for prefetching; empty rows past the last task.
        let (next, _) = split.task(task + cpu.threads());
        let scratch = (workspace + worker * each) as *mut u8;
        // SAFETY: guaranteed by the caller; a worker runs one task at a time, and its index, hence its scratch,
        // is unique.
        unsafe { GemmTile { job, shape, rows, panels, next, scratch }.run::<U>() };
    });
}

/// One task. `scratch` is `EACH` bytes that no other task uses meanwhile; `next` is a guess at the worker's next
/// rows, for prefetching only.
struct GemmTile<'a> {
    job: GemmCall<'a>,
    shape: Shape,
    rows: Range<usize>,
    panels: Range<usize>,
    next: Range<usize>,
    scratch: *mut u8,
}

impl<'a> GemmTile<'a> {
    /// Computes the task.
    ///
    /// # Safety
    /// The CPU must have AVX-512 and the tile registers of `U`, and this thread must hold no other value of `U`.
    #[target_feature(enable = "avx2,fma,avx512f,avx512bw,avx512dq,avx512vl")]
    unsafe fn run<U: TileUnit>(self) {
        // SAFETY: guaranteed by the caller.
        let (s, mut unit) = unsafe { (Avx512::assume(), U::configure()) };
        let mut chores = CoreWork::new(self.job, self.panel_of(0));
        chores.split_all(s);
        for slice in 0..self.shape.slices {
            let steps = self.steps(slice);
            for strip in 0..self.strips() {
                // SAFETY: a strip of this task's rows, and its space among the split rows.
                unsafe { split_strip(s, self.job.x, self.strip(strip), &steps, self.split(strip, &steps)) };
            }
            chores.rows = self.next_rows(slice);
            for panel in 0..self.panels.len() {
                chores.panel = self.panel_of(slice * self.panels.len() + panel + 1);
                // SAFETY: the rows of this slice were split above; this panel slice was split during the
                // previous panel, or before the first, and completed by `split_all`.
                unsafe { self.panel(&mut unit, &mut chores, panel, slice) };
                chores.split_all(s);
            }
        }
        chores.finish_all();
    }

    /// Adds the products of all strips with one slice of one panel to their sums.
    ///
    /// # Safety
    /// Only for `run`: this slice of the strips and of the panel must have been split.
    #[inline(always)]
    unsafe fn panel<U: TileUnit>(&self, unit: &mut U, chores: &mut CoreWork<'_>, panel: usize, slice: usize) {
        let steps = self.steps(slice);
        let last = slice + 1 == self.shape.slices;
        let b = self.buffer_at((slice * self.panels.len() + panel) % 2);
        let sums = self
            .buffer_at(2)
            .wrapping_add(panel % self.shape.sum_buffers * (BLOCK / STRIP * SUMS))
            .cast::<f32>();
        let panel = self.panels.start + panel;
        for strip in 0..self.strips() {
            let a = self.split(strip, &steps);
            let c = sums.wrapping_add(strip * STRIP * PANEL);
            let rows = self.strip(strip);
            let lines = if slice > 0 { STRIP * PANEL } else { 0 };
            chores.sums = OutputPrefetch::new(c.wrapping_add(STRIP * PANEL), 0, 1, lines);
            if last {
                let at = self.job.y.row(rows.start).wrapping_add(panel * PANEL);
                chores.out = OutputPrefetch::new(at, self.job.y.ld(), rows.len(), PANEL);
            }
            // SAFETY: `a` and `b` hold `steps` split steps, `c` the strip's sums. Meanwhile `turn` splits into
            // the other panel buffer, and finishes the sums of another strip or of the other panel, so it does
            // not touch `c`.
            unsafe {
                unit.bf16x3_product(a, b, c, steps.len(), slice > 0, || chores.turn());
            }
            if last {
                chores.finish_all();
                chores.done = Done { row: rows.start, rows: rows.len(), panel, sum: c };
            }
        }
    }

    /// The panel slice number `at` of this task, to be split into bf16 terms. Panel slices are numbered slice by
    /// slice, and within a slice panel by panel; numbers past the last give a panel without lines.
    fn panel_of(&self, at: usize) -> Panel {
        let slice = at / self.panels.len();
        let panel = self.panels.start + at % self.panels.len();
        let depth = self.job.x.cols();
        let steps = self.steps(slice);
        let lines = if slice < self.shape.slices { steps.len() * LINES } else { 0 };
        let from = self.job.w.as_ptr().wrapping_add(panel * depth * PANEL);
        Panel {
            from,
            depth,
            steps,
            to: self.buffer_at(at % 2),
            next: 0,
            lines,
            turns: 0,
            of: TURNS * self.strips(),
        }
    }

    /// Address of the bf16 terms of `strip`'s rows of x, for the steps of one slice of K.
    fn split(&self, strip: usize, steps: &Range<usize>) -> *mut u8 {
        self.scratch.wrapping_add(strip * steps.len() * BYTES)
    }

    /// Address behind the split rows: with `at` 0 and 1, the two buffers of split panel slices, which alternate;
    /// with 2, the sums.
    fn buffer_at(&self, at: usize) -> *mut u8 {
        self.scratch.wrapping_add((BLOCK / STRIP + at) * self.shape.steps * BYTES)
    }

    /// The steps of a slice. K is cut into slices of equal length, up to one step.
    fn steps(&self, slice: usize) -> Range<usize> {
        let steps = self.job.x.cols().div_ceil(STEP);
        let slices = self.shape.slices;
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
    fn next_rows(&self, slice: usize) -> OutputPrefetch {
        let (rows, slice) =
            if slice + 1 < self.shape.slices { (&self.rows, slice + 1) } else { (&self.next, 0) };
        let steps = self.steps(slice);
        let x = self.job.x;
        let at = x.row(rows.start).wrapping_add(steps.start * STEP);
        OutputPrefetch::new(at, x.ld(), rows.len(), steps.len() * STEP)
    }
}

/// A panel slice that is being split line by line: one line every `of` / LINES turns, so that the last line is
/// split at the end of the products of one panel with all strips.
struct Panel {
    from: *const f32,
    depth: usize,
    steps: Range<usize>,
    to: *mut u8,
    next: usize,
    lines: usize,
    turns: usize,
    of: usize,
}

impl Panel {
    /// Called after each tile product; splits one line when the lines split so far fall behind the products
    /// done.
    #[inline(always)]
    fn turn(&mut self, s: Avx512) {
        self.turns += LINES;
        if self.turns >= self.of {
            self.turns -= self.of;
            self.split(s, 1);
        }
    }

    #[inline(always)]
    fn split(&mut self, s: Avx512, most: usize) {
        let lines = self.next..self.lines.min(self.next.saturating_add(most));
        self.next = lines.end;
        // SAFETY: lines of a panel of the packed weights, and the buffer for its slice.
        unsafe { split_panel(s, self.from, self.depth, &self.steps, lines, self.to) };
    }
}

/// Work that the core does while the tile unit multiplies.
struct CoreWork<'a> {
    job: GemmCall<'a>,
    /// Panel slice that is multiplied next.
    panel: Panel,
    /// Rows of x that are split next, prefetched into L2.
    rows: OutputPrefetch,
    /// Sums that the next strip reads, prefetched into L1.
    sums: OutputPrefetch,
    /// Rows of y that this strip will write, prefetched into L1.
    out: OutputPrefetch,
    done: Done,
}

/// Finished sums of a strip that are still to be written to y: `rows` rows starting at `row`, whose sums start
/// at `sum`.
struct Done {
    row: usize,
    rows: usize,
    panel: usize,
    sum: *const f32,
}

impl<'a> CoreWork<'a> {
    fn new(job: GemmCall<'a>, panel: Panel) -> Self {
        let [rows, sums, out] = [(); 3].map(|()| OutputPrefetch::new(core::ptr::null(), 0, 0, 0));
        let done = Done { row: 0, rows: 0, panel: 0, sum: core::ptr::null() };
        Self { job, panel, rows, sums, out, done }
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
        for ask in [&mut self.sums, &mut self.out] {
            for line in ask.by_ref().take(3) {
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

    #[inline(always)]
    fn finish(&mut self, s: Avx512, most: usize) {
        let done = &mut self.done;
        let rows = done.rows.min(most);
        if rows > 0 {
            // SAFETY: rows of this task, whose sums are complete.
            unsafe { finish(s, self.job.out(), done.row, rows, done.panel, done.sum) };
            done.row += rows;
            done.rows -= rows;
            done.sum = done.sum.wrapping_add(rows * PANEL);
        }
    }

    /// Finishes all remaining rows. Must be called before `done` is replaced, and before the buffer is used
    /// again.
    #[inline(always)]
    fn finish_all(&mut self) {
        // SAFETY: only `GemmTile::run`, which requires AVX-512, creates `CoreWork`.
        self.finish(unsafe { Avx512::assume() }, STRIP);
    }
}

/// Iterator over the addresses of cache lines to prefetch: `width` f32 of each of `rows` rows, `ld` f32 apart.
struct OutputPrefetch {
    at: *const f32,
    ld: usize,
    rows: usize,
    width: usize,
    column: usize,
}

impl OutputPrefetch {
    fn new(at: *const f32, ld: usize, rows: usize, width: usize) -> Self {
        Self { at, ld, rows: if width > 0 { rows } else { 0 }, width, column: 0 }
    }
}

impl Iterator for OutputPrefetch {
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
