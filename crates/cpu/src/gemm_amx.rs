//! f32 products on bf16 tiles: each factor in three bf16 parts, six tile products for one.
//!
//! Invariant: an element's sum takes its steps of 32 k in ascending order, in each step the six products in
//! one order, each summed as the tiles do it. Cutting K into slices stores and reloads that f32 sum exactly;
//! zeros past M and K add zero. So the bits of a row depend on that row and the weights alone; they are not
//! those of the plain chain of multiply-adds, but no less close to the exact sum: of the chain's 32 roundings
//! a step makes 6, and what is left out is at most 2^-24 of |x| |w| (see `parts`).
//!
//! Order of work: a task takes a block of rows and a group of panels. Slice by slice of K it splits the rows into its
//! workspace (L2); panel by panel it passes all strips of rows over the panel's split slice. Up to `WHOLE` steps K is one
//! slice: then no sums wait, and the rows are split once for all panels. While the tiles multiply, the core splits the panel
//! that comes next, line by line, asks for what comes after it, and finishes the strip before.

use super::Cpu;
use super::amx::{STEP, STRIP, Unit};
use super::gemm::{Job, Split, finish};
use super::parts::{BYTES, LINES, split_panel, split_strip};
use super::simd::{LANES, Simd};
use super::simd_x86::Avx512;
use super::tile::PANEL;
use core::ops::Range;

/// Most rows of a task.
const BLOCK: usize = 288;
/// Most steps of a K that is one slice, and of a slice of a longer one.
const WHOLE: usize = 20;
const DEPTH: usize = 10;
/// Most panels of a task where K has several slices: their sums wait in the workspace.
const GROUP: usize = 20;
/// Products, after each of which there is a turn, of a step.
const TURNS: usize = 6;

/// Bytes of a strip's sums of a panel.
const SUMS: usize = STRIP * PANEL * 4;
/// Bytes of workspace of a thread; whole cache lines.
pub(super) const EACH: usize = {
    let (whole, cut) = (Shape::bytes(WHOLE, 2), Shape::bytes(DEPTH, GROUP));
    if whole > cut { whole } else { cut }
};

/// How K is cut: slices, the most steps of one, and for how many panels sums have room.
#[derive(Clone, Copy)]
struct Shape {
    slices: usize,
    steps: usize,
    rooms: usize,
}

impl Shape {
    fn of(k: usize) -> Self {
        let steps = k.div_ceil(STEP);
        let slices = if steps <= WHOLE { 1 } else { steps.div_ceil(DEPTH) };
        // Sums of one slice go on at once: two panels' rooms take turns.
        Self { slices, steps: steps.div_ceil(slices), rooms: if slices == 1 { 2 } else { GROUP } }
    }

    /// Of the rows and of two panels, split, and of sums.
    const fn bytes(steps: usize, rooms: usize) -> usize {
        (BLOCK / STRIP + 2) * steps * BYTES + rooms * (BLOCK / STRIP * SUMS)
    }
}

/// `gemm::linear` after its checks, for K > 0; a thread's workspace is `each` bytes.
///
/// # Safety
/// The CPU has AVX-512 and the registers of `U`.
pub(super) unsafe fn linear<U: Unit>(cpu: &Cpu, job: Job<'_>, workspace: *mut f32, each: usize) {
    assert!(job.x.cols() > 0 && each >= EACH, "columns and workspace");
    let (m, panels) = (job.x.rows(), job.y.cols().div_ceil(PANEL));
    let shape = Shape::of(job.x.cols());
    let fewest = if shape.slices > 1 { panels.div_ceil(shape.rooms) } else { 1 };
    let split = Split::new(m, panels, cpu.threads(), STRIP, BLOCK, fewest);
    let workspace = workspace as usize;
    cpu.pool().run(split.tasks(), &|task, worker| {
        let (rows, panels) = split.task(task);
        // Most likely this worker's next block, if there is one.
        let (next, _) = split.task(task + cpu.threads());
        let scratch = (workspace + worker * each) as *mut u8;
        // SAFETY: as the caller promises; a thread runs one task at a time, and a worker's index, hence its scratch, is
        // its own.
        unsafe { Task { job, shape, rows, panels, next, scratch }.run::<U>() };
    });
}

/// One task. `scratch` is `EACH` bytes of this worker's own.
struct Task<'a> {
    job: Job<'a>,
    shape: Shape,
    rows: Range<usize>,
    panels: Range<usize>,
    next: Range<usize>,
    scratch: *mut u8,
}

impl<'a> Task<'a> {
    /// # Safety
    /// The CPU has AVX-512 and the registers of `U`, and this thread no other `U`.
    #[target_feature(enable = "avx2,fma,avx512f,avx512bw,avx512dq,avx512vl")]
    unsafe fn run<U: Unit>(self) {
        // SAFETY: as the caller promises.
        let (s, mut unit) = unsafe { (Avx512::assume(), U::configure()) };
        let mut chores = Chores::new(self.job, self.panel_of(0));
        chores.split_all(s);
        for slice in 0..self.shape.slices {
            let steps = self.steps(slice);
            for strip in 0..self.strips() {
                // SAFETY: a strip of this task's rows, and its room among the split rows.
                unsafe { split_strip(s, self.job.x, self.strip(strip), &steps, self.split(strip, &steps)) };
            }
            chores.rows = self.next_rows(slice);
            for panel in 0..self.panels.len() {
                chores.panel = self.panel_of(slice * self.panels.len() + panel + 1);
                // SAFETY: this slice of the rows was split just now, and of the panel while the one before was multiplied.
                unsafe { self.panel(&mut unit, &mut chores, panel, slice) };
                chores.split_all(s);
            }
        }
        chores.finish_all();
    }

    /// Adds the product of one slice of one panel with all strips to their sums.
    ///
    /// # Safety
    /// `run`'s alone: the strips' slice and the panel's are split.
    #[inline(always)]
    unsafe fn panel<U: Unit>(&self, unit: &mut U, chores: &mut Chores<'_>, panel: usize, slice: usize) {
        let (steps, last) = (self.steps(slice), slice + 1 == self.shape.slices);
        let b = self.room((slice * self.panels.len() + panel) % 2);
        let sums = self.room(2).wrapping_add(panel % self.shape.rooms * (BLOCK / STRIP * SUMS)).cast::<f32>();
        let panel = self.panels.start + panel;
        for strip in 0..self.strips() {
            let (a, c) = (self.split(strip, &steps), sums.wrapping_add(strip * STRIP * PANEL));
            let rows = self.strip(strip);
            let lines = if slice > 0 { STRIP * PANEL } else { 0 };
            chores.sums = Ask::new(c.wrapping_add(STRIP * PANEL), 0, 1, lines);
            if last {
                let at = self.job.y.row(rows.start).wrapping_add(panel * PANEL);
                chores.out = Ask::new(at, self.job.y.ld(), rows.len(), PANEL);
            }
            // SAFETY: `steps` steps of the strip and of the panel, and the strip's sums; what is being split meanwhile is
            // the other room's, what is being finished another strip's or the other room's.
            unsafe {
                unit.six(a, b, c, steps.len(), slice > 0, || chores.turn());
            }
            if last {
                chores.finish_all();
                chores.done = Done { row: rows.start, rows: rows.len(), panel, sum: c };
            }
        }
    }

    /// The `at`-th slice of a panel of this task, to be split; nothing past the last.
    fn panel_of(&self, at: usize) -> Panel {
        let (slice, panel) = (at / self.panels.len(), self.panels.start + at % self.panels.len());
        let (depth, steps) = (self.job.x.cols(), self.steps(slice));
        let lines = if slice < self.shape.slices { steps.len() * LINES } else { 0 };
        let from = self.job.w.as_ptr().wrapping_add(panel * depth * PANEL);
        Panel { from, depth, steps, to: self.room(at % 2), next: 0, lines, turns: 0, of: TURNS * self.strips() }
    }

    /// Where a strip's slice lies, split.
    fn split(&self, strip: usize, steps: &Range<usize>) -> *mut u8 {
        self.scratch.wrapping_add(strip * steps.len() * BYTES)
    }

    /// Where a panel's slice lies, split, by turns at 0 and 1; at 2, the sums.
    fn room(&self, at: usize) -> *mut u8 {
        self.scratch.wrapping_add((BLOCK / STRIP + at) * self.shape.steps * BYTES)
    }

    /// The steps of a slice: K in equal parts.
    fn steps(&self, slice: usize) -> Range<usize> {
        let (steps, slices) = (self.job.x.cols().div_ceil(STEP), self.shape.slices);
        slice * steps / slices..(slice + 1) * steps / slices
    }

    fn strips(&self) -> usize {
        self.rows.len().div_ceil(STRIP)
    }

    /// The rows of a strip: 32, or what is left.
    fn strip(&self, strip: usize) -> Range<usize> {
        let start = self.rows.start + strip * STRIP;
        start..self.rows.end.min(start + STRIP)
    }

    /// The rows of x that will be split next: the next slice, or the first one of the next block.
    fn next_rows(&self, slice: usize) -> Ask {
        let (rows, slice) =
            if slice + 1 < self.shape.slices { (&self.rows, slice + 1) } else { (&self.next, 0) };
        let (steps, x) = (self.steps(slice), self.job.x);
        let at = x.row(rows.start).wrapping_add(steps.start * STEP);
        Ask::new(at, x.ld(), rows.len(), steps.len() * STEP)
    }
}

/// A slice of a panel that is being split, line by line, as many as bring all of them in `of` turns.
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
    /// A line, when its turn has come.
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
        // SAFETY: lines of a panel of the packed weights, and the room for its slice.
        unsafe { split_panel(s, self.from, self.depth, &self.steps, lines, self.to) };
    }
}

/// What the core does while the tiles multiply.
struct Chores<'a> {
    job: Job<'a>,
    /// What is multiplied next.
    panel: Panel,
    /// To be split next, asked for in L2.
    rows: Ask,
    /// To be read by the next strip and written by this one, asked for in L1.
    sums: Ask,
    out: Ask,
    done: Done,
}

/// Sums of a strip on their way to y: so many rows from `sum` on.
struct Done {
    row: usize,
    rows: usize,
    panel: usize,
    sum: *const f32,
}

impl<'a> Chores<'a> {
    fn new(job: Job<'a>, panel: Panel) -> Self {
        let [rows, sums, out] = [(); 3].map(|()| Ask::new(core::ptr::null(), 0, 0, 0));
        let done = Done { row: 0, rows: 0, panel: 0, sum: core::ptr::null() };
        Self { job, panel, rows, sums, out, done }
    }

    /// A few of each: a strip has 6 turns a step, and 64 lines of y, 64 of sums, 32 rows to finish.
    ///
    /// # Safety
    /// The CPU has AVX-512.
    #[inline(never)]
    #[target_feature(enable = "avx2,fma,avx512f,avx512bw,avx512dq,avx512vl")]
    unsafe fn turn(&mut self) {
        // SAFETY: as the caller promises.
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

    /// What is left of the panel.
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

    /// The rest.
    #[inline(always)]
    fn finish_all(&mut self) {
        // SAFETY: only `Task::run` has chores, with AVX-512.
        self.finish(unsafe { Avx512::assume() }, STRIP);
    }
}

/// Addresses to ask for: the lines of `width` f32 of each of some rows.
struct Ask {
    at: *const f32,
    ld: usize,
    rows: usize,
    width: usize,
    column: usize,
}

impl Ask {
    fn new(at: *const f32, ld: usize, rows: usize, width: usize) -> Self {
        Self { at, ld, rows: if width > 0 { rows } else { 0 }, width, column: 0 }
    }
}

impl Iterator for Ask {
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
