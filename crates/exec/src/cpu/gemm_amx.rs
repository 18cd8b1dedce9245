//! f32 products on tiles of integers: each factor in three digits of eight bits, six tile products for one.
//!
//! Invariant: slice by slice of K in ascending order, an element's sum takes one number: the exact sums of integers of its
//! row's and its column's slice, put together and scaled in one order (see `digits`), and after it the row's few elements
//! that were taken out. Where K is cut depends on K alone; zeros past M and K add zero. So the bits of a row depend on that
//! row and the weights alone; they are not those of the plain chain of multiply-adds, but no less close to the exact sum.
//! Relative L2 error against f64, weights normal (`tests/gemm_amx.rs` prints all):
//!
//! | rows of x | K | digits | chain |
//! |---|---|---|---|
//! | normal | 320, 640, 2560, 5120 | 3.2e-7, 3.1e-7, 3.2e-7, 3.2e-7 | 3.2e-7, 4.7e-7, 9.2e-7, 1.3e-6 |
//! | GELU | the same | 4.1e-7, 3.8e-7, 4.0e-7, 4.1e-7 | 3.1e-7, 4.4e-7, 9.4e-7, 1.2e-6 |
//! | one element 100 times the others | | 6e-8, 8e-8, 1.7e-7, 2.2e-7 | 3.1e-7, 4.7e-7, 1.1e-6, 1.5e-6 |
//! | magnitudes over 2^20 | | 4.4e-7, 4.2e-7, 4.7e-7, 5.1e-7 | 3.2e-7, 4.2e-7, 9.8e-7, 1.2e-6 |
//!
//! This is relative to |x| |w|: where large elements of x meet small ones of W and the other way round throughout, more is
//! lost than by the chain.
//!
//! Order of work: a task takes a block of rows and a group of panels. Slice by slice of at most `DEPTH` steps,
//! it splits the rows into its workspace (L2); panel by panel it splits the weights' slice (L1) and passes all
//! strips of rows over it. While the tiles multiply, the core asks for what comes next and finishes the strip
//! before. Splitting at that time too was slower: its stores hold up the tiles' loads at equal page offsets.

use super::Cpu;
use super::amx::{SIDE, ThreeDigits};
use super::digits::{OF_PANEL, OF_ROWS, ORDER, Row, STEP, gather, split_panel, split_strip};
use super::gemm::{Job, Split, finish};
use super::simd::{LANES, Simd};
use super::simd_x86::Avx512;
use super::tile::PANEL;
use core::marker::PhantomData;
use core::ops::Range;

/// Most rows of a task.
const BLOCK: usize = 464;
/// Most steps of a slice: a panel's 18 KB, a strip's 9, which stream, and its sums share L1. (Shorter ones have
/// closer scales, longer ones fewer sums to finish: at 2 the tiles' part was 6 % slower, at 4 no faster.)
const DEPTH: usize = 3;
/// Most panels of a task where K has several slices: their sums wait in the workspace.
const GROUP: usize = 20;

/// Bytes of a task's rows cut into digits and of what else there is to know of them; of a panel's slice and of two
/// panels' scales; of sums of integers, and of f32.
const ROWS: usize = BLOCK / SIDE * DEPTH * OF_ROWS;
const ABOUT: usize = BLOCK * size_of::<Row>();
const WEIGHTS: usize = DEPTH * OF_PANEL;
const SCALES: usize = PANEL * 4;
const INTEGERS: usize = 3 * ORDER * 4;
const SUMS: usize = BLOCK * GROUP * PANEL * 4;
/// Bytes of workspace of a thread; whole cache lines.
pub(super) const EACH: usize = ROWS + ABOUT + WEIGHTS + 2 * SCALES + INTEGERS + SUMS;

/// `gemm::linear` after its checks, for K > 0; a thread's workspace is `each` bytes.
///
/// # Safety
/// The CPU has AVX-512 and the registers of `U`, which multiplies integers.
pub(super) unsafe fn linear<U: ThreeDigits>(cpu: &Cpu, job: Job<'_>, workspace: *mut f32, each: usize) {
    assert!(job.x.cols() > 0 && each >= EACH, "columns and workspace");
    let (m, panels) = (job.x.rows(), job.y.cols().div_ceil(PANEL));
    let fewest = if job.x.cols() > DEPTH * STEP { panels.div_ceil(GROUP) } else { 1 };
    let split = Split::new(m, panels, cpu.threads(), SIDE, BLOCK, fewest);
    let workspace = workspace as usize;
    cpu.pool().run(split.tasks(), &|task, worker| {
        let (rows, panels) = split.task(task);
        // Most likely this worker's next block, if there is one.
        let (next, _) = split.task(task + cpu.threads());
        let scratch = (workspace + worker * each) as *mut u8;
        // SAFETY: as the caller promises; a thread runs one task at a time, and a worker's index, hence its scratch, is
        // its own.
        unsafe { Task::<U> { job, rows, panels, next, scratch, unit: PhantomData }.run() };
    });
}

/// One task. `scratch` is `EACH` bytes of this worker's own.
struct Task<'a, U> {
    job: Job<'a>,
    rows: Range<usize>,
    panels: Range<usize>,
    next: Range<usize>,
    scratch: *mut u8,
    unit: PhantomData<U>,
}

impl<U: ThreeDigits> Task<'_, U> {
    /// # Safety
    /// The CPU has AVX-512 and the registers of `U`, and this thread no other `U`.
    #[target_feature(enable = "avx2,fma,avx512f,avx512bw,avx512dq,avx512vl")]
    unsafe fn run(self) {
        // SAFETY: as the caller promises.
        let (s, mut unit) = unsafe { (Avx512::assume(), U::configure()) };
        let slices = self.job.x.cols().div_ceil(STEP).div_ceil(DEPTH);
        let mut chores = Chores::new(self.job);
        for slice in 0..slices {
            // What is known of the slice before is about to be overwritten.
            chores.finish_all();
            let steps = self.steps(slice, slices);
            for strip in 0..self.strips() {
                let to = self.scratch.wrapping_add(strip * steps.len() * OF_ROWS);
                let about = self.about().wrapping_add(strip * SIDE);
                // SAFETY: a strip of this task's rows, and its room among the rows of digits and what is known of them.
                unsafe { split_strip(s, self.job.x, self.strip(strip), &steps, to, about) };
            }
            chores.rows = self.next_rows(slice, slices);
            for panel in self.panels.clone() {
                // SAFETY: the rows of this slice were split just now.
                unsafe { self.panel(s, &mut unit, &mut chores, panel, slice, slices) };
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
        unit: &mut U,
        chores: &mut Chores<'_>,
        panel: usize,
        slice: usize,
        slices: usize,
    ) {
        let (k, steps, last) = (self.job.x.cols(), self.steps(slice, slices), slice + 1 == slices);
        let w = self.job.w.as_ptr().wrapping_add(panel * k * PANEL);
        let b = self.scratch.wrapping_add(ROWS + ABOUT);
        let scales = b.wrapping_add(WEIGHTS + panel % 2 * SCALES).cast::<f32>();
        // SAFETY: a panel of the packed weights, and the room for its slice.
        unsafe { split_panel(s, w, k, &steps, b, scales) };
        let lines = if panel + 1 < self.panels.end { steps.len() * STEP * PANEL } else { 0 };
        chores.weights = Ask::new(w.wrapping_add((k + steps.start * STEP) * PANEL), 0, 1, lines);
        let integers = b.wrapping_add(WEIGHTS + 2 * SCALES).cast::<f32>();
        let sums = integers.wrapping_add(3 * ORDER + (panel - self.panels.start) * BLOCK * PANEL);
        for strip in 0..self.strips() {
            let a = self.scratch.wrapping_add(strip * steps.len() * OF_ROWS);
            // With one slice the sums go on at once: room in L1 for a strip of them does.
            let sum = if slices == 1 {
                integers.wrapping_add(3 * ORDER)
            } else {
                sums.wrapping_add(strip * SIDE * PANEL)
            };
            let rows = self.strip(strip);
            let lines = if slice > 0 { SIDE * PANEL } else { 0 };
            chores.sums = Ask::new(sum, 0, 1, lines);
            if last {
                let at = self.job.y.row(rows.start).wrapping_add(panel * PANEL);
                chores.out = Ask::new(at, self.job.y.ld(), rows.len(), PANEL);
            }
            let each = SIDE.div_ceil(3 * steps.len());
            // SAFETY: `steps` steps of the strip and of the panel, and room for three orders, whose sums of the strip before
            // are gathered in the turns: all stores come after them.
            unsafe { unit.orders(a, b, integers.cast(), steps.len(), || chores.turn(each)) };
            let about = self.about().wrapping_add(strip * SIDE);
            let w = w.wrapping_add(steps.start * STEP * PANEL);
            let (row, rows) = (rows.start, rows.len());
            chores.done = Done { row, rows, panel, integers, about, scales, w, sum, more: slice > 0, last };
        }
    }

    /// What is known of the rows besides their digits.
    fn about(&self) -> *mut Row {
        self.scratch.wrapping_add(ROWS).cast()
    }

    /// The steps of a slice: K in equal parts.
    fn steps(&self, slice: usize, slices: usize) -> Range<usize> {
        let steps = self.job.x.cols().div_ceil(STEP);
        slice * steps / slices..(slice + 1) * steps / slices
    }

    fn strips(&self) -> usize {
        self.rows.len().div_ceil(SIDE)
    }

    /// The rows of a strip: 16, or what is left.
    fn strip(&self, strip: usize) -> Range<usize> {
        let start = self.rows.start + strip * SIDE;
        start..self.rows.end.min(start + SIDE)
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

/// Sums of a strip on their way to those of f32, and in the last slice to y: so many rows from `row` on.
struct Done {
    row: usize,
    rows: usize,
    panel: usize,
    integers: *const f32,
    about: *const Row,
    scales: *const f32,
    w: *const f32,
    sum: *mut f32,
    more: bool,
    last: bool,
}

impl Done {
    fn nothing() -> Self {
        let (at, sum) = (core::ptr::null(), core::ptr::null_mut());
        let about = core::ptr::null();
        Self {
            row: 0,
            rows: 0,
            panel: 0,
            integers: at,
            about,
            scales: at,
            w: at,
            sum,
            more: false,
            last: false,
        }
    }
}

impl<'a> Chores<'a> {
    fn new(job: Job<'a>) -> Self {
        let [weights, rows, sums, out] = [(); 4].map(|()| Ask::new(core::ptr::null(), 0, 0, 0));
        Self { job, weights, rows, sums, out, done: Done::nothing() }
    }

    /// A few of each, and `rows` rows: a strip has 9 turns at full depth, and 32 lines of y, 32 of sums.
    ///
    /// # Safety
    /// The CPU has AVX-512.
    #[inline(never)]
    #[target_feature(enable = "avx2,fma,avx512f,avx512bw,avx512dq,avx512vl")]
    unsafe fn turn(&mut self, rows: usize) {
        // SAFETY: as the caller promises.
        let s = unsafe { Avx512::assume() };
        for ask in [&mut self.weights, &mut self.rows] {
            for line in ask.by_ref().take(2) {
                s.prefetch_far(line);
            }
        }
        for ask in [&mut self.sums, &mut self.out] {
            for line in ask.by_ref().take(4) {
                s.prefetch(line);
            }
        }
        self.finish(s, rows);
    }

    #[inline(always)]
    fn finish(&mut self, s: Avx512, most: usize) {
        let done = &mut self.done;
        for _ in 0..done.rows.min(most) {
            // SAFETY: rows of this task, whose products are complete.
            unsafe {
                gather(s, done.integers.cast(), &*done.about, done.scales, done.w, done.sum, done.more);
                if done.last {
                    finish(s, self.job.out(), done.row, 1, done.panel, done.sum);
                }
            }
            done.row += 1;
            done.rows -= 1;
            done.integers = done.integers.wrapping_add(PANEL);
            done.about = done.about.wrapping_add(1);
            done.sum = done.sum.wrapping_add(PANEL);
        }
    }

    /// The rest.
    #[inline(always)]
    fn finish_all(&mut self) {
        // SAFETY: only `Task::run` has chores, with AVX-512.
        self.finish(unsafe { Avx512::assume() }, SIDE);
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
