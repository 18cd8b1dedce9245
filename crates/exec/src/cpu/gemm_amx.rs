//! f32 products on bf16 tiles: each factor in three bf16 parts, six tile products for one.
//!
//! Invariant: an element's sum takes its steps of 32 k in ascending order, in each step the six products in
//! one order, each summed as the tiles do it. Cutting K into slices stores and reloads that f32 sum exactly;
//! zeros past M and K add zero. So the bits of a row depend on that row and the weights alone; they are not
//! those of the plain chain of multiply-adds, but no less close to the exact sum: of the chain's 32 roundings
//! a step makes 6, and what is left out is at most 2^-24 of |x| |w| (see `parts`).
//!
//! Order of work: a task takes a block of rows and a group of panels. Slice by slice of at most `DEPTH` steps,
//! it splits the rows into its workspace (L2); panel by panel it splits the weights' slice (L1) and passes all
//! strips of rows over it. While the tiles multiply, the core asks for what comes next and finishes the strip
//! before. Splitting at that time too was slower: its stores hold up the tiles' loads at equal page offsets.

use super::Cpu;
use super::amx::{STEP, STRIP, Tiles, Unit};
use super::gemm::{Job, Split, finish};
use super::parts::{BYTES, split_panel, split_strip};
use super::simd::{LANES, Simd};
use super::simd_x86::Avx512;
use super::tile::PANEL;
use core::ops::Range;

/// Most rows of a task.
const BLOCK: usize = 384;
/// Most steps of a slice: a panel's 24 KB stay in L1, which a strip streams past.
const DEPTH: usize = 4;
/// Most panels of a task where K has several slices: their sums wait in the workspace.
const GROUP: usize = 24;

/// Bytes of the split rows, of a panel's split slice, and of the sums.
const ROWS: usize = BLOCK / STRIP * DEPTH * BYTES;
const WEIGHTS: usize = DEPTH * BYTES;
const SUMS: usize = BLOCK * GROUP * PANEL * 4;
/// Bytes of workspace of a thread; whole cache lines.
pub(super) const EACH: usize = ROWS + WEIGHTS + SUMS;

/// `gemm::linear` after its checks, for an `Isa` with tiles and K > 0; a thread's workspace is `each` bytes.
pub(super) fn linear(cpu: &Cpu, job: Job<'_>, workspace: *mut f32, each: usize) {
    assert!(cpu.isa().has_tiles() && job.x.cols() > 0 && each >= EACH, "tiles, columns and workspace");
    let (m, panels) = (job.x.rows(), job.y.cols().div_ceil(PANEL));
    let fewest = if job.x.cols() > DEPTH * STEP { panels.div_ceil(GROUP) } else { 1 };
    let split = Split::new(m, panels, cpu.threads(), STRIP, BLOCK, fewest);
    let workspace = workspace as usize;
    cpu.pool().run(split.tasks(), &|task, worker| {
        let (rows, panels) = split.task(task);
        // Most likely this worker's next block, if there is one.
        let (next, _) = split.task(task + cpu.threads());
        let scratch = (workspace + worker * each) as *mut u8;
        // SAFETY: `has_tiles` proves AVX-512 and tiles; a thread runs one task at a time, and a worker's
        // index, hence its scratch, is its own.
        unsafe { Task { job, rows, panels, next, scratch }.run() };
    });
}

/// One task. `scratch` is `EACH` bytes of this worker's own.
struct Task<'a> {
    job: Job<'a>,
    rows: Range<usize>,
    panels: Range<usize>,
    next: Range<usize>,
    scratch: *mut u8,
}

impl Task<'_> {
    /// # Safety
    /// The CPU has AVX-512 and tiles, and this thread no other `Tiles`.
    #[target_feature(enable = "avx2,fma,avx512f,avx512bw,avx512dq,avx512vl")]
    unsafe fn run(self) {
        // SAFETY: as the caller promises.
        let (s, mut tiles) = unsafe { (Avx512::assume(), <Tiles>::configure()) };
        let slices = self.job.x.cols().div_ceil(STEP).div_ceil(DEPTH);
        let mut chores = Chores::new(self.job);
        for slice in 0..slices {
            let steps = self.steps(slice, slices);
            for strip in 0..self.strips() {
                let to = self.scratch.wrapping_add(strip * steps.len() * BYTES);
                // SAFETY: a strip of this task's rows, and its room among the split rows.
                unsafe { split_strip(s, self.job.x, self.strip(strip), &steps, to) };
            }
            chores.rows = self.next_rows(slice, slices);
            for panel in self.panels.clone() {
                // SAFETY: the rows of this slice were split just now.
                unsafe { self.panel(s, &mut tiles, &mut chores, panel, slice, slices) };
            }
        }
        chores.finish_all();
    }

    /// Splits one slice of one panel and adds its product with all strips to their sums.
    ///
    /// # Safety
    /// `run`'s alone: the scratch begins with the strips' slice, split.
    #[inline(always)]
    unsafe fn panel(
        &self,
        s: Avx512,
        tiles: &mut Tiles,
        chores: &mut Chores<'_>,
        panel: usize,
        slice: usize,
        slices: usize,
    ) {
        let (k, steps, last) = (self.job.x.cols(), self.steps(slice, slices), slice + 1 == slices);
        let w = self.job.w.as_ptr().wrapping_add(panel * k * PANEL);
        let b = self.scratch.wrapping_add(ROWS);
        // SAFETY: a panel of the packed weights, and the room for its slice.
        unsafe { split_panel(s, w, k, &steps, b) };
        let lines = if panel + 1 < self.panels.end { steps.len() * STEP * PANEL } else { 0 };
        chores.weights = Ask::new(w.wrapping_add((k + steps.start * STEP) * PANEL), 0, 1, lines);
        // With one slice the sums go on at once: two panels' rooms take turns.
        let room = if slices == 1 { panel % 2 } else { panel - self.panels.start };
        let sums = self.scratch.wrapping_add(ROWS + WEIGHTS).cast::<f32>().wrapping_add(room * BLOCK * PANEL);
        for strip in 0..self.strips() {
            let a = self.scratch.wrapping_add(strip * steps.len() * BYTES);
            let c = sums.wrapping_add(strip * STRIP * PANEL);
            let rows = self.strip(strip);
            chores.sums =
                Ask::new(c.wrapping_add(STRIP * PANEL), 0, 1, if slice > 0 { STRIP * PANEL } else { 0 });
            if last {
                let at = self.job.y.row(rows.start).wrapping_add(panel * PANEL);
                chores.out = Ask::new(at, self.job.y.ld(), rows.len(), PANEL);
            }
            // SAFETY: `steps` steps of the strip and of the panel, and the strip's sums; what is being finished
            // meanwhile is another strip's, or the other room's.
            unsafe {
                tiles.six(a, b, c, steps.len(), slice > 0, || chores.turn());
            }
            if last {
                chores.finish_all();
                chores.done = Done { row: rows.start, rows: rows.len(), panel, sum: c };
            }
        }
    }

    /// The steps of a slice: K in equal parts.
    fn steps(&self, slice: usize, slices: usize) -> Range<usize> {
        let steps = self.job.x.cols().div_ceil(STEP);
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
    fn next_rows(&self, slice: usize, slices: usize) -> Ask {
        let (rows, slice) = if slice + 1 < slices { (&self.rows, slice + 1) } else { (&self.next, 0) };
        let (steps, x) = (self.steps(slice, slices), self.job.x);
        let at = x.row(rows.start).wrapping_add(steps.start * STEP);
        Ask::new(at, x.ld(), rows.len(), steps.len() * STEP)
    }
}

/// What the core does while the tiles multiply.
struct Chores<'a> {
    job: Job<'a>,
    /// To be split next, asked for in L2.
    weights: Ask,
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
    fn new(job: Job<'a>) -> Self {
        let [weights, rows, sums, out] = [(); 4].map(|()| Ask::new(core::ptr::null(), 0, 0, 0));
        let done = Done { row: 0, rows: 0, panel: 0, sum: core::ptr::null() };
        Self { job, weights, rows, sums, out, done }
    }

    /// A few of each: a strip has 24 turns at full depth, and 64 lines of y, 64 of sums, 32 rows to finish.
    ///
    /// # Safety
    /// The CPU has AVX-512.
    #[inline(never)]
    #[target_feature(enable = "avx2,fma,avx512f,avx512bw,avx512dq,avx512vl")]
    unsafe fn turn(&mut self) {
        // SAFETY: as the caller promises.
        let s = unsafe { Avx512::assume() };
        for ask in [&mut self.weights, &mut self.rows] {
            if let Some(line) = ask.next() {
                s.prefetch_far(line);
            }
        }
        for ask in [&mut self.sums, &mut self.out] {
            for line in ask.by_ref().take(3) {
                s.prefetch(line);
            }
        }
        self.finish(s, 2);
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
