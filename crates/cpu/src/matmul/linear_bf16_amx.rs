//! GEMM on AMX tiles, of bf16 or of int8 values, two of which take the place of one bf16.
//!
//! Invariant: the sum of an element starts at zero and takes the steps of 32 k (64 for int8) in ascending order,
//! each accumulated as the tile instruction does. Where K is cut into slices, the sum is stored and loaded again
//! without rounding; zeros past M and K add zero. So the bits of a row depend only on that row and on the
//! weights. Sums of int8 products are exact; multiplication by the scales of the row of x and of the row of W
//! makes them f32.
//!
//! Loop order: a task computes a block of rows times a group of panels. The factor that the next tile of sums
//! needs again stays in L1, while the other factor streams past it.
//!
//! - If most of a strip of 32 rows fits in L1, all panels pass over the strip, one strip after another. The
//!   strip is read directly from x or, where its rows do not consist of whole aligned cache lines, copied into
//!   tiles.
//! - Longer strips are copied into tiles in L2, all strips of the block at once, and pass over each panel, whose
//!   first steps stay in L1. (Read directly from x they arrive slowly from L2, because the lines of one step are
//!   a row apart.)
//! - If too few of these longer strips fit in the workspace, panels pass over strips as in the first case, slice
//!   by slice of K.
//!
//! While the tile unit multiplies, the core prefetches the next operands (not for strips copied at once, where
//! that was slower) and applies the epilogue to the previous sums: bias, activation, residual, one rounding.

use crate::Cpu;
use crate::element::Bf16;
use crate::matmul::amx_epilogue::{GateSums, PendingEpilogue, lay, prefetch_output};
use crate::matmul::linear_f32::GemmCall;
use crate::matmul::linear_int8::Scales;
use crate::matmul::register_tile::PANEL;
use crate::rows::elementwise::Gate;
use crate::simd::amx::{NEAR, Near, SIDE, STEP, STRIP, TILE, TileUnit};
use crate::simd::x86::Avx512;
use crate::simd::{LANES, Simd};
use core::marker::PhantomData;
use core::ops::Range;

/// Maximum rows of a task, maximum steps of a slice, and maximum panels of a task where K has several slices,
/// because their sums are stored in the workspace between slices.
const ROWS: usize = 512;
const DEPTH: usize = 40;
const GROUP: usize = 10;
/// Maximum number of steps of all panels of a task in a slice: 800 KB of weights, which stay in L2 beside the
/// streamed data. (Twice as many were a fifth slower where the stored sums are in L2 too.)
const WEIGHTS: usize = DEPTH * GROUP;

/// Maximum number of steps of a strip that panels pass over (measured against copying all strips: 24 steps were
/// a sixth faster, 40 steps a tenth slower), and minimum number of strips of a block for copying them all at
/// once: each panel is loaded from L3 for every block.
const SHORT: usize = 32;
const MIN_STRIPS: usize = 4;

/// For a strip copied into tiles: bytes from step to step, and from row to row.
const TILES: [usize; 2] = [2 * TILE, STEP * size_of::<Bf16>()];

/// Bytes of a slice of a strip, and of the sums of one strip and one panel.
const SLICE: usize = DEPTH * 2 * TILE;
const SUMS: usize = STRIP * PANEL * 4;
/// Bytes of workspace per thread: the sums being finished, one strip, and the stored sums. If all strips of a
/// block are copied, they follow the first sums instead.
pub(crate) const EACH: usize = SUMS + SLICE + ROWS / STRIP * GROUP * SUMS;

/// Maximum K of `gated`: longer strips are not multiplied by all panels, or in more than one slice.
pub(crate) const LONGEST_GATED: usize = SHORT * STEP;

const _: () = assert!(SHORT <= DEPTH && plimsoll_plan::LONGEST_GATED as usize == LONGEST_GATED);

/// What a matmul computes besides `GemmCall`.
#[derive(Clone, Copy)]
pub(crate) enum Form<'a> {
    /// Nothing.
    Plain,
    /// Operands are int8, with these scales.
    Scaled(Scales<'a>),
    /// A gated linear unit: y (M, F) = f(s[.., ..F]) s[.., F..] for the sums s (M, 2F).
    Gated {
        /// f.
        gate: Gate,
        /// Bias (2F), added to each row of s; that of `GemmCall` is not used.
        bias: Option<&'a [Bf16]>,
    },
}

impl Form<'_> {
    /// Panels of the weight for each panel of y.
    fn halves(&self) -> usize {
        match self {
            Form::Plain | Form::Scaled(_) => 1,
            Form::Gated { .. } => 2,
        }
    }
}

/// `linear_bf16::linear` after its checks, for K > 0; or, with scales, `linear_int8::linear`, where `job` has one
/// element for two int8 values; or `linear_bf16::gated`. Each thread has `each` bytes of workspace.
///
/// In a gated linear unit, the accumulators of a gate panel are kept until those of its value panel are complete. The
/// vector units apply bias, activation and product to both while the tiles compute the next two panels of the weight,
/// half of the rows during each panel, so that every panel has the same share of vector work.
///
/// # Safety
/// The CPU must have AVX-512 with BF16 and the tile registers of `U`; `U` must multiply int8 exactly if there
/// are scales.
pub(crate) unsafe fn linear<U: TileUnit>(
    cpu: &Cpu,
    job: GemmCall<'_, Bf16>,
    form: Form<'_>,
    workspace: *mut f32,
    each: usize,
) {
    assert!(job.x.cols() > 0 && each >= EACH, "columns and workspace");
    let m = job.x.rows();
    let panels = job.y.cols().div_ceil(PANEL);
    let steps = job.x.cols().div_ceil(STEP);
    assert!(form.halves() == 1 || job.y.cols().is_multiple_of(PANEL) && steps <= SHORT, "a gate's columns");
    let laid =
        (steps > SHORT).then(|| (each - SUMS) / (steps * 2 * TILE)).filter(|&strips| strips >= MIN_STRIPS);
    let (rows, most) = match laid {
        // At least one, because a matmul may have no panels.
        Some(strips) => (ROWS.min(strips * STRIP), panels.max(1)),
        None if steps > DEPTH => (ROWS, GROUP),
        None => (ROWS, (WEIGHTS / steps / form.halves()).max(1)),
    };
    // Blocks of equal size, their number a multiple of the threads. With few rows, threads also divide the
    // panels.
    let wanted = m.div_ceil(rows).next_multiple_of(cpu.threads()).max(1);
    let height = m.div_ceil(wanted).next_multiple_of(STRIP).clamp(1, rows);
    let blocks = m.div_ceil(height);
    let shares = if blocks >= cpu.threads() { 1 } else { (2 * cpu.threads()).div_ceil(blocks.max(1)) };
    let groups = panels.div_ceil(most).max(shares).min(panels);
    let workspace = workspace as usize;
    let laid = laid.is_some();
    cpu.pool().run(blocks * groups, &|task, worker| {
        // Tasks are numbered group by group, so that the next task of a thread most likely uses the weights that
        // are in its L2.
        let rows = |task: usize| (task % blocks * height).min(m)..m.min((task % blocks + 1) * height);
        let first = |group: usize| group * panels / groups;
        let panels = first(task / blocks)..first(task / blocks + 1);
        let (rows, next) = (rows(task), rows(task + cpu.threads()).start);
        // The workers of one run have distinct indices, so no two tasks share scratch.
        let scratch = (workspace + worker * each) as *mut u8;
        // SAFETY: guaranteed by the caller; a thread runs one task at a time.
        unsafe { GemmTile::<U> { job, form, rows, panels, next, laid, scratch, unit: PhantomData }.run() };
    });
}

/// One task. No other task uses the `EACH` bytes at `scratch` meanwhile; `next` is most likely the first row of
/// this worker's next block.
struct GemmTile<'a, U> {
    job: GemmCall<'a, Bf16>,
    form: Form<'a>,
    rows: Range<usize>,
    /// Panels of y.
    panels: Range<usize>,
    next: usize,
    /// Whether all strips are copied into tiles first.
    laid: bool,
    scratch: *mut u8,
    unit: PhantomData<U>,
}

/// One tile of sums within a task: index and number of strips, the strip's rows, its panel of y, which of the panels of
/// the weight for it (0, or 1 for the value of a gate), and the steps of the slice.
struct GemmBlock<'a> {
    strip: usize,
    strips: usize,
    rows: &'a Range<usize>,
    /// Address and strides of the strip's slice, as returned by `lay`.
    at: (*const u8, [usize; 2]),
    panel: usize,
    half: usize,
    steps: &'a Range<usize>,
    /// The factor that stays in L1, and how many of its steps.
    near: (Near, usize),
}

impl<U: TileUnit> GemmTile<'_, U> {
    /// Computes the task.
    ///
    /// # Safety
    /// The CPU must have AVX-512 with BF16 and the tile registers of `U`, and this thread must hold no other
    /// value of `U`.
    #[target_feature(enable = "avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
    unsafe fn run(self) {
        // SAFETY: guaranteed by the caller.
        let (s, mut unit) = unsafe { (Avx512::assume(), U::configure()) };
        let mut chores = CoreWork::new(self.job, self.form, s);
        // SAFETY: guaranteed by the caller.
        unsafe {
            if self.laid {
                self.by_panels(&mut unit, &mut chores);
            } else {
                self.by_strips(&mut unit, &mut chores);
            }
        }
        // SAFETY: the last sums of this task, which are complete.
        unsafe { chores.sums.finish(0, STRIP) };
    }

    /// Passes all panels over each strip, slice by slice of K.
    ///
    /// # Safety
    /// Only for `run`.
    #[inline(always)]
    unsafe fn by_strips(&self, unit: &mut U, chores: &mut CoreWork<'_>) {
        let total = self.job.x.cols().div_ceil(STEP);
        let slices = total.div_ceil(DEPTH);
        let strips = self.rows.len().div_ceil(STRIP);
        for slice in 0..slices {
            let steps = &(slice * total / slices..(slice + 1) * total / slices);
            for strip in 0..strips {
                let rows = &self.strip(strip);
                // SAFETY: a strip of this task's rows, and the space for one strip.
                let at = unsafe { self.lay(rows, steps, self.scratch.wrapping_add(SUMS)) };
                let (row, step) = match (strip + 1 < strips, slice + 1 < slices) {
                    (true, _) => (rows.end, steps.start),
                    (false, true) => (self.rows.start, steps.end),
                    (false, false) => (self.next, 0),
                };
                chores.x = self.job.x.row(row).wrapping_add(step * STEP);
                for panel in self.panels.clone() {
                    for half in 0..self.form.halves() {
                        let near = (Near::A, DEPTH);
                        let block = GemmBlock { strip, strips, rows, at, panel, half, steps, near };
                        // SAFETY: `at` is the result of `lay` for this strip and slice.
                        unsafe { self.block(unit, chores, block) };
                    }
                }
            }
        }
    }

    /// Copies all strips into tiles, then passes them over each panel.
    ///
    /// # Safety
    /// Only for `run`: the scratch must have space for all strips.
    #[inline(always)]
    unsafe fn by_panels(&self, unit: &mut U, chores: &mut CoreWork<'_>) {
        let steps = &(0..self.job.x.cols().div_ceil(STEP));
        let strips = self.rows.len().div_ceil(STRIP);
        let copy_of = |strip: usize| self.scratch.wrapping_add(SUMS + strip * steps.len() * 2 * TILE);
        for strip in 0..strips {
            // SAFETY: a strip of this task's rows, and its space.
            unsafe { self.copy(&self.strip(strip), steps, copy_of(strip)) };
        }
        for panel in self.panels.clone() {
            for strip in 0..strips {
                let rows = &self.strip(strip);
                let at = (copy_of(strip).cast_const(), TILES);
                // A gate has no strips that are laid out.
                let half = 0;
                let near = (Near::B, NEAR);
                let block = GemmBlock { strip, strips, rows, at, panel, half, steps, near };
                // SAFETY: the strip was copied to `copy_of(strip)` above.
                unsafe { self.block(unit, chores, block) };
            }
        }
    }

    /// The rows of a strip.
    fn strip(&self, strip: usize) -> Range<usize> {
        let start = self.rows.start + strip * STRIP;
        start..self.rows.end.min(start + STRIP)
    }

    /// Adds the product of one slice of a strip and a panel to their sums. After the last slice, the sums are
    /// handed to `chores`, which finish them during the next block.
    ///
    /// # Safety
    /// Only for `run`: `block.at` must be the address and strides of its strip and slice.
    #[inline(always)]
    unsafe fn block(&self, unit: &mut U, chores: &mut CoreWork<'_>, block: GemmBlock<'_>) {
        let GemmBlock {
            strip,
            strips,
            rows,
            at: (a, [step_bytes, row_bytes]),
            panel,
            half,
            steps,
            near: (near, most),
        } = block;
        let total = self.job.x.cols().div_ceil(STEP);
        let more = steps.start > 0;
        let last = steps.end == total;
        let of_w = panel + half * (self.job.y.cols() / PANEL);
        let b = self.job.w.as_ptr().cast::<u8>().wrapping_add((of_w * total + steps.start) * 2 * TILE);
        let halves = self.form.halves();
        let whole = half + 1 == halves;
        let of = (panel - self.panels.start) * halves + half;
        // Finished sums are written to y while the next sums accumulate in the tile registers, so one buffer in
        // L1 is enough: it is free again before `unit.end`. Those of a gate and its value are finished while the next two
        // accumulate, so two pairs of buffers take turns; they lie where sums would be stored between slices.
        let finished_sums = match halves {
            1 => self.scratch.cast::<f32>(),
            _ => self.scratch.wrapping_add(SUMS + SLICE + (2 * chores.turn + half) * SUMS).cast::<f32>(),
        };
        let sums = self.scratch.wrapping_add(SUMS + SLICE + (of * strips + strip) * SUMS).cast::<f32>();
        chores.panels = (of, self.panels.len() * halves);
        chores.strips = (strip, strips);
        chores.w = if last { core::ptr::null() } else { b.wrapping_add(steps.len() * 2 * TILE) };
        let each = STRIP.div_ceil(steps.len());
        // Rows of pending sums that are finished beside this panel: all, or half of those of a gate and its value.
        let finished = half * STRIP / halves..(half + 1) * STRIP / halves;
        let each_finished = finished.len().div_ceil(steps.len());
        // SAFETY: `steps` steps of the strip and of the panel are readable; `sums` is the place of these sums.
        // All 32 rows of `finished_sums` are finished within the loop (`each` rows per step), before `end` overwrites
        // them.
        unsafe {
            if more {
                unit.begin(sums)
            } else {
                unit.zero()
            }
            for step in 0..steps.len() {
                unit.step(a.add(step * step_bytes), row_bytes, b.add(step * 2 * TILE), near.first(most, step));
                let from = finished.start + step * each_finished;
                chores.sums.finish(from, finished.end.min(from + each_finished));
                if last && whole {
                    let asked = rows.start + step * each..rows.start + ((step + 1) * each).min(STRIP);
                    prefetch_output(chores.s, asked, panel, self.job.y, self.job.epilogue.residual);
                }
                chores.prefetch_input(step);
            }
            unit.end(if last { finished_sums } else { sums });
            if last && whole {
                chores.begin(rows, panel, finished_sums);
            }
        }
    }

    /// Returns the address of the first row of a strip's slice, and the bytes from step to step and from row to
    /// row. It lies in x if the strip has 32 rows of whole aligned cache lines; otherwise the slice is copied to
    /// `to`.
    ///
    /// # Safety
    /// The rows and steps must lie in x; `to` must have space for them.
    #[inline(always)]
    unsafe fn lay(&self, rows: &Range<usize>, steps: &Range<usize>, to: *mut u8) -> (*const u8, [usize; 2]) {
        let x = self.job.x;
        let row = x.ld() * size_of::<Bf16>();
        let step = STEP * size_of::<Bf16>();
        let first = x.row(rows.start).cast::<u8>();
        if rows.len() == STRIP && x.cols().is_multiple_of(STEP) && (first as usize | row).is_multiple_of(step) {
            return (first.wrapping_add(steps.start * step), [step, row]);
        }
        // SAFETY: guaranteed by the caller.
        unsafe { self.copy(rows, steps, to) };
        (to, TILES)
    }

    /// Copies a strip's slice into tiles, with zeros past the last row and column.
    ///
    /// # Safety
    /// As for `lay`.
    #[inline(always)]
    unsafe fn copy(&self, rows: &Range<usize>, steps: &Range<usize>, to: *mut u8) {
        let x = self.job.x;
        for r in 0..STRIP {
            let columns = if r < rows.len() { x.cols() } else { 0 };
            // SAFETY: reads a row of x, or no columns of it; writes this row's lines of the strip's space.
            unsafe { lay(x.row(rows.start + r), columns, steps, to.add(r * TILES[1])) };
        }
    }
}

/// Work that the core does while the tile unit multiplies.
struct CoreWork<'a> {
    job: GemmCall<'a, Bf16>,
    form: Form<'a>,
    s: Avx512,
    /// Operands to prefetch into L2: the next strip's slice, and the panel's next slice. Null if there is no
    /// next one.
    x: *const Bf16,
    w: *const u8,
    /// Index and number of panels, and of strips, of the task: each block prefetches its share of the lines.
    panels: (usize, usize),
    strips: (usize, usize),
    /// Which of two pairs of buffers takes the next sums of a gate and its value.
    turn: usize,
    /// Sums whose epilogue is still to be applied.
    sums: PendingEpilogue,
}

impl<'a> CoreWork<'a> {
    #[inline(always)]
    fn new(job: GemmCall<'a, Bf16>, form: Form<'a>, s: Avx512) -> Self {
        let x = core::ptr::null();
        let w = core::ptr::null();
        Self { job, form, s, x, w, panels: (0, 1), strips: (0, 1), turn: 0, sums: PendingEpilogue::none(s) }
    }

    /// Sets the sums that the following blocks finish.
    ///
    /// # Safety
    /// The rows and the panel must belong to the task.
    #[inline(always)]
    unsafe fn begin(&mut self, rows: &Range<usize>, panel: usize, sum: *mut f32) {
        let e = &self.job.epilogue;
        let y = self.job.y;
        let column = panel * PANEL;
        let residual = e.residual.map(|x| (x.row(rows.start).wrapping_add(column), x.ld()));
        let (bias, scales, gate) = match self.form {
            Form::Plain => (e.bias.map(|bias| &bias[column..]), None, None),
            Form::Scaled(s) => {
                (e.bias.map(|bias| &bias[column..]), Some((&s.x[rows.clone()], &s.w[column..])), None)
            }
            Form::Gated { gate, bias } => {
                let at = sum.cast_const().wrapping_sub(SUMS / size_of::<f32>());
                let gate = GateSums::new(self.s, gate, at, bias.map(|bias| &bias[column..y.cols()]));
                (bias.map(|bias| &bias[y.cols() + column..]), None, Some(gate))
            }
        };
        self.turn = 1 - self.turn;
        let to = (y.row(rows.start).wrapping_add(column), y.ld(), (y.cols() - column).min(PANEL));
        // SAFETY: guaranteed by the caller.
        self.sums =
            unsafe { PendingEpilogue::new(self.s, (sum, rows.len()), scales, bias, e.act, residual, gate, to) };
    }

    /// Prefetches this block's share of one step of the next strip, and of the panel's next slice.
    #[inline(always)]
    fn prefetch_input(&self, step: usize) {
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
