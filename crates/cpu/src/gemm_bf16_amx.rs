//! Products on tiles: of bf16, or of codes, two of which lie where a bf16 would.
//!
//! Invariant: an element's sum takes its steps of 32 k in ascending order, each as one tile product does it, begun at
//! zero. Cutting K into slices stores and reloads that f32 sum exactly; zeros past M and K add zero. So the bits of a
//! row depend on that row and the weights alone. Of codes every sum is exact; it becomes a number by the scales of its
//! row of x and of W.
//!
//! Order of work: a task takes a block of rows and a group of panels. What the next block of sums needs again stays in L1,
//! the other factor streams past it. Where most of a strip of 32 rows fits there, the panels pass over it, strip by strip; it is
//! read where it lies or, where its lines are not whole, laid out as tiles. Longer strips are laid out in L2, those of a block
//! at once, and pass over each panel, whose first steps stay in L1. (Read where they lie they come slowly from L2: lines
//! of one step are a row apart.) Where too few fit in the workspace, the panels pass over strips again, slice by slice of K.
//! While the tiles multiply, the core asks for what comes next, but for laid out strips, where that was slower, and finishes
//! the sums before: bias, activation, residual, one rounding.

use super::Cpu;
use super::amx::{NEAR, Near, SIDE, STEP, STRIP, TILE, Unit};
use super::amx_sums::{Sums, Then, ask_out, lay};
use super::element::Bf16;
use super::gemm::{Act, Job};
use super::gemm_int8::Scales;
use super::simd::{LANES, Simd};
use super::simd_x86::Avx512;
use super::tile::PANEL;
use core::marker::PhantomData;
use core::ops::Range;

/// Most rows of a task, steps of a slice, and panels of a task where K has several slices, whose sums wait in the workspace.
const ROWS: usize = 512;
const DEPTH: usize = 40;
const GROUP: usize = 10;
/// Most steps of all panels of a task in a slice: 800 KB of weights, which stay in L2 beside what passes. (Twice as many
/// were a fifth slower where sums wait there too.)
const WEIGHTS: usize = DEPTH * GROUP;

/// Most steps of a strip that panels pass over (24 were a sixth faster so, 40 a tenth slower), and fewest strips of a block
/// that are laid out at once: each panel comes from L3 for every block.
const SHORT: usize = 32;
const FEWEST: usize = 4;

/// Bytes from step to step of a strip laid out, and from row to row.
const TILES: [usize; 2] = [2 * TILE, STEP * size_of::<Bf16>()];

/// Bytes of a strip's slice, and of the sums of a strip and a panel.
const SLICE: usize = DEPTH * 2 * TILE;
const SUMS: usize = STRIP * PANEL * 4;
/// Bytes of workspace of a thread: sums on their way out, a strip, all sums; or behind the first the strips of a block.
pub(super) const EACH: usize = SUMS + SLICE + ROWS / STRIP * GROUP * SUMS;

/// `gemm_bf16::linear` after its checks, for K > 0, or with the scales of codes, of which x has two where it has an
/// element; a thread's workspace is `each` bytes.
///
/// # Safety
/// The CPU has AVX-512 with BF16, and the registers of `U`, which multiplies integers where there are scales.
pub(super) unsafe fn linear<U: Unit>(
    cpu: &Cpu,
    job: Job<'_, Bf16>,
    scales: Option<Scales<'_>>,
    workspace: *mut f32,
    each: usize,
) {
    assert!(job.x.cols() > 0 && each >= EACH, "columns and workspace");
    let (m, panels) = (job.x.rows(), job.y.cols().div_ceil(PANEL));
    let steps = job.x.cols().div_ceil(STEP);
    let laid = (steps > SHORT).then(|| (each - SUMS) / (steps * 2 * TILE)).filter(|&strips| strips >= FEWEST);
    let (rows, most) = match laid {
        Some(strips) => (ROWS.min(strips * STRIP), panels),
        None if steps > DEPTH => (ROWS, GROUP),
        None => (ROWS, WEIGHTS / steps),
    };
    // As many blocks as a multiple of the threads, of equal size; few rows: the threads share the panels too.
    let wanted = m.div_ceil(rows).next_multiple_of(cpu.threads()).max(1);
    let height = m.div_ceil(wanted).next_multiple_of(STRIP).clamp(1, rows);
    let blocks = m.div_ceil(height);
    let shares = if blocks >= cpu.threads() { 1 } else { (2 * cpu.threads()).div_ceil(blocks.max(1)) };
    let groups = panels.div_ceil(most).max(shares).min(panels);
    let (workspace, laid) = (workspace as usize, laid.is_some());
    cpu.pool().run(blocks * groups, &|task, worker| {
        // Group after group: a thread's next task is likely to take the same weights.
        let rows = |task: usize| (task % blocks * height).min(m)..m.min((task % blocks + 1) * height);
        let first = |group: usize| group * panels / groups;
        let panels = first(task / blocks)..first(task / blocks + 1);
        let (rows, next) = (rows(task), rows(task + cpu.threads()).start);
        // Its own: worker indices of one run are distinct.
        let scratch = (workspace + worker * each) as *mut u8;
        // SAFETY: as the caller promises; a thread runs one task at a time.
        unsafe { Task::<U> { job, scales, rows, panels, next, laid, scratch, unit: PhantomData }.run() };
    });
}

/// One task. `scratch` is `EACH` bytes of this worker's own; `next` most likely its next block's first row.
struct Task<'a, U> {
    job: Job<'a, Bf16>,
    scales: Option<Scales<'a>>,
    rows: Range<usize>,
    panels: Range<usize>,
    next: usize,
    /// Whether all strips are laid out.
    laid: bool,
    scratch: *mut u8,
    unit: PhantomData<U>,
}

/// Where in a task's work a block stands: its strip of how many, their rows, its panel, the steps of the slice.
struct Block<'a> {
    strip: usize,
    strips: usize,
    rows: &'a Range<usize>,
    /// What `lay` says of it.
    at: (*const u8, [usize; 2]),
    panel: usize,
    steps: &'a Range<usize>,
    /// Which of both L1 keeps, and how many steps of it.
    near: (Near, usize),
}

impl<U: Unit> Task<'_, U> {
    /// # Safety
    /// The CPU has AVX-512 with BF16 and the registers of `U`, and this thread no other `U`.
    #[target_feature(enable = "avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
    unsafe fn run(self) {
        // SAFETY: as the caller promises.
        let (s, mut unit) = unsafe { (Avx512::assume(), U::configure()) };
        let mut chores = Chores::new(self.job, self.scales, s);
        // SAFETY: as the caller promises.
        unsafe {
            if self.laid {
                self.by_panels(&mut unit, &mut chores);
            } else {
                self.by_strips(&mut unit, &mut chores);
            }
        }
        // SAFETY: sums of this task's.
        unsafe { chores.sums.finish(0, STRIP) };
    }

    /// Slice by slice, all panels over each strip.
    ///
    /// # Safety
    /// `run`'s alone.
    #[inline(always)]
    unsafe fn by_strips(&self, unit: &mut U, chores: &mut Chores<'_>) {
        let total = self.job.x.cols().div_ceil(STEP);
        let (slices, strips) = (total.div_ceil(DEPTH), self.rows.len().div_ceil(STRIP));
        for slice in 0..slices {
            let steps = &(slice * total / slices..(slice + 1) * total / slices);
            for strip in 0..strips {
                let rows = &self.strip(strip);
                // SAFETY: a strip of this task's rows; the room for one.
                let at = unsafe { self.lay(rows, steps, self.scratch.wrapping_add(SUMS)) };
                let (row, step) = match (strip + 1 < strips, slice + 1 < slices) {
                    (true, _) => (rows.end, steps.start),
                    (false, true) => (self.rows.start, steps.end),
                    (false, false) => (self.next, 0),
                };
                chores.x = self.job.x.row(row).wrapping_add(step * STEP);
                for panel in self.panels.clone() {
                    let block = Block { strip, strips, rows, at, panel, steps, near: (Near::A, DEPTH) };
                    // SAFETY: `at` is what `lay` gave for this strip and slice.
                    unsafe { self.block(unit, chores, block) };
                }
            }
        }
    }

    /// Lays all strips out, and passes each panel over them.
    ///
    /// # Safety
    /// `run`'s alone: the scratch holds the strips.
    #[inline(always)]
    unsafe fn by_panels(&self, unit: &mut U, chores: &mut Chores<'_>) {
        let steps = &(0..self.job.x.cols().div_ceil(STEP));
        let strips = self.rows.len().div_ceil(STRIP);
        let room = |strip: usize| self.scratch.wrapping_add(SUMS + strip * steps.len() * 2 * TILE);
        for strip in 0..strips {
            // SAFETY: a strip of this task's rows, and its room.
            unsafe { self.copy(&self.strip(strip), steps, room(strip)) };
        }
        for panel in self.panels.clone() {
            for strip in 0..strips {
                let (rows, at) = (&self.strip(strip), (room(strip).cast_const(), TILES));
                let block = Block { strip, strips, rows, at, panel, steps, near: (Near::B, NEAR) };
                // SAFETY: the strip was laid out there.
                unsafe { self.block(unit, chores, block) };
            }
        }
    }

    /// The rows of a strip.
    fn strip(&self, strip: usize) -> Range<usize> {
        let start = self.rows.start + strip * STRIP;
        start..self.rows.end.min(start + STRIP)
    }

    /// Adds the product of a strip and a panel, in one slice, to their sums; the last slice goes on to y.
    ///
    /// # Safety
    /// `run`'s alone: the block is at what `lay` gave for its strip and slice.
    #[inline(always)]
    unsafe fn block(&self, unit: &mut U, chores: &mut Chores<'_>, block: Block<'_>) {
        let Block { strip, strips, rows, at: (a, [step_bytes, row_bytes]), panel, steps, near: (near, most) } =
            block;
        let total = self.job.x.cols().div_ceil(STEP);
        let (more, last) = (steps.start > 0, steps.end == total);
        let b = self.job.w.as_ptr().cast::<u8>().wrapping_add((panel * total + steps.start) * 2 * TILE);
        let of = panel - self.panels.start;
        // Sums that go out do so while the next ones grow, so one room in L1 is enough.
        let room = self.scratch.cast::<f32>();
        let sums = self.scratch.wrapping_add(SUMS + SLICE + (of * strips + strip) * SUMS).cast::<f32>();
        chores.panels = (of, self.panels.len());
        chores.strips = (strip, strips);
        chores.w = if last { core::ptr::null() } else { b.wrapping_add(steps.len() * 2 * TILE) };
        let each = STRIP.div_ceil(steps.len());
        // SAFETY: `steps` steps of the strip and of the panel; the sums' place, or the room, which is free at the end.
        unsafe {
            if more {
                unit.begin(sums)
            } else {
                unit.zero()
            }
            for step in 0..steps.len() {
                unit.step(a.add(step * step_bytes), row_bytes, b.add(step * 2 * TILE), near.first(most, step));
                chores.sums.finish(step * each, (step + 1) * each);
                if last {
                    let asked = rows.start + step * each..rows.start + ((step + 1) * each).min(STRIP);
                    ask_out(chores.s, asked, panel, self.job.y, self.job.epilogue.residual);
                }
                chores.ask_in(step);
            }
            unit.end(if last { room } else { sums });
            if last {
                chores.begin(rows, panel, room);
            }
        }
    }

    /// Where a strip's slice is read: its first row, bytes from step to step, and from row to row. In x, if its lines are
    /// whole and 32 rows are left; else laid out at `to`.
    ///
    /// # Safety
    /// The rows and steps lie in x; `to` has room for them.
    #[inline(always)]
    unsafe fn lay(&self, rows: &Range<usize>, steps: &Range<usize>, to: *mut u8) -> (*const u8, [usize; 2]) {
        let x = self.job.x;
        let (row, step) = (x.ld() * size_of::<Bf16>(), STEP * size_of::<Bf16>());
        let first = x.row(rows.start).cast::<u8>();
        if rows.len() == STRIP && x.cols().is_multiple_of(STEP) && (first as usize | row).is_multiple_of(step) {
            return (first.wrapping_add(steps.start * step), [step, row]);
        }
        // SAFETY: as the caller promises.
        unsafe { self.copy(rows, steps, to) };
        (to, TILES)
    }

    /// Lays a strip's slice out as tiles, with zeros past the last row and column.
    ///
    /// # Safety
    /// As `lay`.
    #[inline(always)]
    unsafe fn copy(&self, rows: &Range<usize>, steps: &Range<usize>, to: *mut u8) {
        let x = self.job.x;
        for r in 0..STRIP {
            let columns = if r < rows.len() { x.cols() } else { 0 };
            // SAFETY: a row of x, or nothing of it; its lines of the strip's room.
            unsafe { lay(x.row(rows.start + r), columns, steps, to.add(r * TILES[1])) };
        }
    }
}

/// What the core does while the tiles multiply.
struct Chores<'a> {
    job: Job<'a, Bf16>,
    scales: Option<Scales<'a>>,
    s: Avx512,
    /// To be read next, asked for in L2: a strip's slice, and the panel's next slice; null if there is none.
    x: *const Bf16,
    w: *const u8,
    /// Which panel of how many, and strip: each asks for its share of the lines.
    panels: (usize, usize),
    strips: (usize, usize),
    /// On their way to y.
    sums: Sums,
}

impl<'a> Chores<'a> {
    #[inline(always)]
    fn new(job: Job<'a, Bf16>, scales: Option<Scales<'a>>, s: Avx512) -> Self {
        let (x, w) = (core::ptr::null(), core::ptr::null());
        Self { job, scales, s, x, w, panels: (0, 1), strips: (0, 1), sums: Sums::none(s) }
    }

    /// From now on these sums are to be finished.
    ///
    /// # Safety
    /// The rows and the panel are the task's.
    #[inline(always)]
    unsafe fn begin(&mut self, rows: &Range<usize>, panel: usize, sum: *mut f32) {
        let (e, y, column) = (&self.job.epilogue, self.job.y, panel * PANEL);
        let then = match e.act {
            Act::None => Then::Nothing,
            Act::Gelu => Then::Gelu,
            Act::Relu => Then::Relu,
        };
        let residual = e.residual.map(|x| (x.row(rows.start).wrapping_add(column), x.ld()));
        let bias = e.bias.map(|bias| &bias[column..]);
        let to = (y.row(rows.start).wrapping_add(column), y.ld(), (y.cols() - column).min(PANEL));
        let scales = self.scales.map(|s| (&s.x[rows.clone()], &s.w[column..]));
        // SAFETY: as the caller promises.
        self.sums = unsafe { Sums::new(self.s, (sum, rows.len()), scales, bias, then, residual, to) };
    }

    /// Asks for this block's share of a step of the next strip, and of the panel's next slice.
    #[inline(always)]
    fn ask_in(&self, step: usize) {
        if !self.x.is_null() {
            for r in (self.panels.0..STRIP).step_by(self.panels.1) {
                self.s.prefetch_far(self.x.wrapping_add(r * self.job.x.ld() + step * STEP).cast());
            }
        }
        if !self.w.is_null() {
            for line in (self.strips.0..2 * SIDE).step_by(self.strips.1) {
                self.s.prefetch_far(self.w.wrapping_add(step * 2 * TILE + line * 64).cast());
            }
        }
    }
}

const _: () = assert!(STRIP == PANEL && SIDE == LANES && ROWS.is_multiple_of(STRIP));
