//! bf16 products on tiles.
//!
//! Invariant: an element's sum takes its steps of 32 k in ascending order, each as one tile product does it, begun at
//! zero. Cutting K into slices stores and reloads that f32 sum exactly; zeros past M and K add zero. So the bits of a
//! row depend on that row and the weights alone.
//!
//! Order of work: a task takes a block of rows and a group of panels. Slice by slice, few panels at a time, it passes
//! all strips of 32 rows over them: the panels' slice stays in L1, the rows stream from L2. They are read where they
//! lie; only those that are no whole tile, or whose stride would put them into few sets of the cache, are copied.
//! While the tiles multiply, the core asks for what comes next and finishes the strip before.

use super::Cpu;
use super::amx::{SIDE, STEP, STRIP, TILE, Unit};
use super::element::Bf16;
use super::gemm::{Job, Split, finish};
use super::isa::Kernel;
use super::simd::{LANES, Simd};
use super::tile::PANEL;
use core::marker::PhantomData;
use core::ops::Range;

/// How a product is cut: most rows of a task, steps of a slice, panels of a task where K has several slices (their
/// sums wait in the workspace), and panels that a strip passes at once.
#[derive(Clone, Copy, Debug)]
pub(super) struct Blocking {
    pub(super) rows: usize,
    pub(super) depth: usize,
    pub(super) group: usize,
    pub(super) pair: usize,
    /// Whether rows are read where they lie.
    pub(super) direct: bool,
    /// What is asked for ahead: 0 nothing, 1 rows, 2 weights too, 3 sums and y too.
    pub(super) prefetch: usize,
}

/// The slices of a panel and of a strip, 20 KB each, share L1; the sums take 1 MB of L2.
pub(super) const BLOCKING: Blocking =
    Blocking { rows: 512, depth: 10, group: 16, pair: 1, direct: true, prefetch: 3 };

impl Blocking {
    /// Bytes of the copied rows.
    const fn packed(&self) -> usize {
        self.rows * self.depth * STEP * 2
    }

    /// Bytes of workspace of a thread: besides, the sums, and rooms for those of two strips.
    pub(super) const fn each(&self) -> usize {
        self.packed() + 4 * PANEL * self.rows * self.group + 2 * 4 * PANEL * STRIP
    }
}

/// Where a strip of rows lies: its first row of this slice, bytes from row to row and from step to step.
#[derive(Clone, Copy)]
struct Strip {
    at: *const u8,
    row: usize,
    step: usize,
}

/// `gemm_bf16::linear` after its checks, for K > 0; a thread's workspace is `each` bytes.
///
/// # Safety
/// The CPU has the registers of `U`.
pub(super) unsafe fn linear<U: Unit>(cpu: &Cpu, job: Job<'_, Bf16>, workspace: *mut f32, each: usize) {
    // SAFETY: as the caller promises.
    unsafe { linear_in::<U>(cpu, job, BLOCKING, workspace, each) }
}

/// The same, cut as `blocking` says.
///
/// # Safety
/// As `linear`.
pub(super) unsafe fn linear_in<U: Unit>(
    cpu: &Cpu,
    job: Job<'_, Bf16>,
    blocking: Blocking,
    workspace: *mut f32,
    each: usize,
) {
    assert!(job.x.cols() > 0 && each >= blocking.each(), "columns and workspace");
    let (m, panels) = (job.x.rows(), job.y.cols().div_ceil(PANEL));
    let fewest = if job.x.cols() > blocking.depth * STEP { panels.div_ceil(blocking.group) } else { 1 };
    let split = Split::new(m, panels, cpu.threads(), STRIP, blocking.rows, fewest);
    let workspace = workspace as usize;
    cpu.pool().run(split.tasks(), &|task, worker| {
        let (rows, panels) = split.task(task);
        // Its own: worker indices of one run are distinct.
        let scratch = (workspace + worker * each) as *mut u8;
        cpu.isa().run(Task::<U> { job, blocking, rows, panels, scratch, unit: PhantomData });
    });
}

/// One task. `scratch` is `EACH` bytes of this worker's own.
struct Task<'a, U> {
    job: Job<'a, Bf16>,
    blocking: Blocking,
    rows: Range<usize>,
    panels: Range<usize>,
    scratch: *mut u8,
    unit: PhantomData<U>,
}

impl<U: Unit> Kernel for Task<'_, U> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        // SAFETY: `linear`'s caller promises the registers; a thread runs one task at a time.
        let mut unit = unsafe { U::configure() };
        let slices = self.job.x.cols().div_ceil(STEP).div_ceil(self.blocking.depth);
        let mut chores = Chores::new(self.job, self.blocking.prefetch);
        let strips = self.rows.len().div_ceil(STRIP);
        let mut blocks = 0;
        for slice in 0..slices {
            let steps = self.steps(slice, slices);
            for strip in 0..strips {
                if !self.lies_well(strip) {
                    // SAFETY: a strip of this task's rows, and its room in the scratch.
                    unsafe { self.pack(s, strip, &steps) };
                }
            }
            for first in self.panels.clone().step_by(self.blocking.pair) {
                let pair = first..self.panels.end.min(first + self.blocking.pair);
                let next = pair.end..self.panels.end.min(pair.end + self.blocking.pair);
                let lines = next.len() * steps.len() * 2 * TILE / 64;
                chores.weights = Ask::new(
                    self.weights(next.start, &steps),
                    self.panel_bytes(),
                    next.len(),
                    steps.len() * 2 * TILE,
                );
                chores.weights_each = lines.div_ceil(strips * pair.len() * steps.len());
                for strip in 0..strips {
                    for panel in pair.clone() {
                        let at = (panel - pair.start, pair.len());
                        // SAFETY: the rows of this slice lie where `strip` says.
                        unsafe {
                            self.block(
                                s,
                                &mut unit,
                                &mut chores,
                                (strip, strips),
                                panel,
                                at,
                                &steps,
                                slices,
                                blocks,
                            )
                        };
                        blocks += 1;
                    }
                }
            }
        }
        chores.finish(s, STRIP);
    }
}

impl<U: Unit> Task<'_, U> {
    #[inline(always)]
    #[allow(clippy::too_many_arguments)] // where in the loops of `run` it stands
    unsafe fn block<S: Simd>(
        &self,
        s: S,
        unit: &mut U,
        chores: &mut Chores<'_>,
        (strip, strips): (usize, usize),
        panel: usize,
        (part, parts): (usize, usize),
        steps: &Range<usize>,
        slices: usize,
        blocks: usize,
    ) {
        let (more, last) = (steps.start > 0, steps.end == self.job.x.cols().div_ceil(STEP));
        let a = self.strip(strip, steps);
        let b = self.weights(panel, steps);
        let rooms = self.scratch.wrapping_add(self.blocking.packed()).cast::<f32>();
        let sums = rooms.wrapping_add(2 * STRIP * PANEL);
        let place = |panel: usize, strip: usize| {
            sums.wrapping_add(((panel - self.panels.start) * strips + strip) * STRIP * PANEL)
        };
        let c = if slices > 1 { place(panel, strip) } else { rooms };
        let to = if last { rooms.wrapping_add(blocks % 2 * STRIP * PANEL) } else { c };
        let ahead = self.strip((strip + 1) % strips, steps);
        let share = STRIP / parts;
        chores.ahead = Strip { at: ahead.at.wrapping_add(part * share * ahead.row), ..ahead };
        chores.share = share;
        let more_lines = if slices > 1 { STRIP * PANEL } else { 0 };
        let (next_panel, next_strip) =
            if part + 1 < parts { (panel + 1, strip) } else { (panel - part, strip + 1) };
        chores.sums = Ask::new(place(next_panel, next_strip).cast(), 0, 1, 4 * more_lines);
        let rows = self.strip_rows(strip);
        if last {
            let y = self.job.y;
            chores.out = Ask::new(
                y.row(rows.start).wrapping_add(panel * PANEL).cast(),
                2 * y.ld(),
                rows.len(),
                2 * PANEL,
            );
            if let Some(r) = self.job.epilogue.residual {
                chores.residual = Ask::new(
                    r.row(rows.start).wrapping_add(panel * PANEL).cast(),
                    2 * r.ld(),
                    rows.len(),
                    2 * PANEL,
                );
            }
        }
        chores.rate = STRIP.div_ceil(steps.len());
        // SAFETY: `steps` steps of the strip and of the panel; the sums' place or a room.
        unsafe {
            if more {
                unit.begin(c)
            } else {
                unit.zero()
            }
            for step in 0..steps.len() {
                unit.load_a(a.at.add(step * a.step), a.row);
                unit.load_b(b.add(step * 2 * TILE));
                unit.multiply();
                chores.turn(s);
            }
            unit.end(to);
        }
        if last {
            chores.finish(s, STRIP);
            chores.done = Done { row: rows.start, rows: rows.len(), panel, sum: to };
        }
    }

    fn steps(&self, slice: usize, slices: usize) -> Range<usize> {
        let steps = self.job.x.cols().div_ceil(STEP);
        slice * steps / slices..(slice + 1) * steps / slices
    }

    fn strip_rows(&self, strip: usize) -> Range<usize> {
        let start = self.rows.start + strip * STRIP;
        start..self.rows.end.min(start + STRIP)
    }

    fn panel_bytes(&self) -> usize {
        self.job.x.cols().div_ceil(STEP) * 2 * TILE
    }

    fn weights(&self, panel: usize, steps: &Range<usize>) -> *const u8 {
        self.job.w.as_ptr().cast::<u8>().wrapping_add(panel * self.panel_bytes() + steps.start * 2 * TILE)
    }

    fn lies_well(&self, strip: usize) -> bool {
        self.blocking.direct && self.job.x.cols().is_multiple_of(STEP) && self.strip_rows(strip).len() == STRIP
    }

    fn strip(&self, strip: usize, steps: &Range<usize>) -> Strip {
        let x = self.job.x;
        if self.lies_well(strip) {
            let at = x.row(self.rows.start + strip * STRIP).wrapping_add(steps.start * STEP);
            Strip { at: at.cast(), row: 2 * x.ld(), step: 2 * STEP }
        } else {
            let at = self.scratch.wrapping_add(strip * self.blocking.depth * 2 * TILE);
            Strip { at, row: 64, step: 2 * TILE }
        }
    }

    /// Copies steps of a strip to tiles, with zeros past the last row and column.
    #[inline(always)]
    unsafe fn pack<S: Simd>(&self, _: S, strip: usize, steps: &Range<usize>) {
        let (x, rows) = (self.job.x, self.strip_rows(strip));
        let to = self.scratch.wrapping_add(strip * self.blocking.depth * 2 * TILE);
        for r in 0..STRIP {
            for (i, step) in steps.clone().enumerate() {
                let left = if r < rows.len() { (x.cols() - step * STEP).min(STEP) } else { 0 };
                let from = x.row(rows.start + r).wrapping_add(step * STEP);
                let to = to.wrapping_add(i * 2 * TILE + r * 64).cast::<[Bf16; STEP]>();
                let mut line = [Bf16(0); STEP];
                // SAFETY: `left` columns are left of a row in x; row r of step i.
                unsafe {
                    if left == STEP {
                        line = from.cast::<[Bf16; STEP]>().read_unaligned();
                    } else {
                        line.as_mut_ptr().copy_from_nonoverlapping(from, left);
                    }
                    to.write_unaligned(line);
                }
            }
        }
    }
}

/// What the core does while the tiles multiply.
struct Chores<'a> {
    job: Job<'a, Bf16>,
    ahead: Strip,
    share: usize,
    weights: Ask,
    weights_each: usize,
    sums: Ask,
    out: Ask,
    residual: Ask,
    rate: usize,
    done: Done,
    level: usize,
}

/// Sums of a strip on their way to y: so many rows from `sum` on.
struct Done {
    row: usize,
    rows: usize,
    panel: usize,
    sum: *const f32,
}

impl<'a> Chores<'a> {
    fn new(job: Job<'a, Bf16>, level: usize) -> Self {
        let none = || Ask::new(core::ptr::null(), 0, 0, 0);
        let done = Done { row: 0, rows: 0, panel: 0, sum: core::ptr::null() };
        let ahead = Strip { at: core::ptr::null(), row: 0, step: 0 };
        Self {
            job,
            ahead,
            share: 0,
            weights: none(),
            weights_each: 0,
            sums: none(),
            out: none(),
            residual: none(),
            rate: 0,
            done,
            level,
        }
    }

    #[inline(always)]
    fn turn<S: Simd>(&mut self, s: S) {
        if self.level >= 1 {
            let mut at = self.ahead.at;
            for _ in 0..self.share {
                s.prefetch(at.cast());
                at = at.wrapping_add(self.ahead.row);
            }
            self.ahead.at = self.ahead.at.wrapping_add(self.ahead.step);
        }
        if self.level >= 2 {
            for line in self.weights.by_ref().take(self.weights_each) {
                s.prefetch_far(line);
            }
        }
        if self.level >= 3 {
            for line in self.sums.by_ref().take(2 * self.rate) {
                s.prefetch(line);
            }
            for line in self.out.by_ref().take(self.rate) {
                s.prefetch(line);
            }
            for line in self.residual.by_ref().take(self.rate) {
                s.prefetch(line);
            }
        }
        self.finish(s, self.rate);
    }

    #[inline(always)]
    fn finish<S: Simd>(&mut self, s: S, most: usize) {
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
}

/// Addresses to ask for: the lines of `width` bytes of each of some rows.
struct Ask {
    at: *const u8,
    ld: usize,
    rows: usize,
    width: usize,
    column: usize,
}

impl Ask {
    fn new(at: *const u8, ld: usize, rows: usize, width: usize) -> Self {
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
        self.column += 4 * LANES;
        if self.column >= self.width {
            self.column = 0;
            self.rows -= 1;
            self.at = self.at.wrapping_add(self.ld);
        }
        Some(line.cast())
    }
}

const _: () = assert!(STRIP == PANEL && SIDE == LANES);
