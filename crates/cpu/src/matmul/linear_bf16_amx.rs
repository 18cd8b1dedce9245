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
use crate::matmul::amx_epilogue::{
    Bf16Rows, CompleteSums, GateSums, PendingEpilogue, pack_row, prefetch_output,
};
use crate::matmul::linear::LinearOperands;
use crate::matmul::linear_int8::Scales;
use crate::matmul::register_tile::PANEL;
use crate::rows::elementwise::Gate;
use crate::simd::amx::{L1_STEPS, L1Factor, SIDE, STEP, STRIP, TILE, TileUnit};
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

/// Bytes of a line of a tile: one step of a row.
const LINE: usize = STEP * size_of::<Bf16>();

/// Bytes of a slice of a strip, and of the sums of one strip and one panel.
const SLICE: usize = DEPTH * 2 * TILE;
const SUMS: usize = STRIP * PANEL * 4;
/// Bytes of workspace per thread: the sums being finished, one strip, and the stored sums. If all strips of a
/// block are copied, they follow the first sums instead.
pub(crate) const WORKSPACE_BYTES: usize = SUMS + SLICE + ROWS / STRIP * GROUP * SUMS;

/// Maximum K of `gated`: longer strips are not multiplied by all panels, or in more than one slice.
pub(crate) const LONGEST_GATED: usize = SHORT * STEP;

const _: () = assert!(SHORT <= DEPTH && plimsoll_plan::LONGEST_GATED as usize == LONGEST_GATED);

/// Kind of a linear layer: the element type of its operands, and whether it is gated.
#[derive(Clone, Copy)]
pub(crate) enum LinearKind<'a> {
    /// bf16.
    Plain,
    /// int8, with these scales: each bf16 element stands for two int8 values.
    Scaled(Scales<'a>),
    /// A gated linear unit: y (M, F) = f(s[.., ..F]) s[.., F..] for the sums s (M, 2F).
    Gated {
        /// f.
        gate: Gate,
        /// Bias (2F), added to each row of s; that of the epilogue is not used.
        bias: Option<&'a [Bf16]>,
    },
}

impl LinearKind<'_> {
    /// Panels of the weight for each panel of y.
    fn halves(&self) -> usize {
        match self {
            LinearKind::Plain | LinearKind::Scaled(_) => 1,
            LinearKind::Gated { .. } => 2,
        }
    }
}

/// `linear_bf16::linear` after its checks, for K > 0; or, with scales, `linear_int8::linear`, where the operands have
/// one element for two int8 values; or `linear_bf16::gated`. Each thread has `bytes_per_thread` bytes of workspace.
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
    operands: LinearOperands<'_, Bf16>,
    form: LinearKind<'_>,
    workspace: *mut f32,
    bytes_per_thread: usize,
) {
    assert!(operands.x.cols() > 0 && bytes_per_thread >= WORKSPACE_BYTES, "columns and workspace");
    let m = operands.x.rows();
    let panels = operands.y.cols().div_ceil(PANEL);
    let steps = operands.x.cols().div_ceil(STEP);
    assert!(
        form.halves() == 1 || operands.y.cols().is_multiple_of(PANEL) && steps <= SHORT,
        "a gate's columns"
    );
    // Strips of a block that are packed at once, where that is faster and enough of them fit.
    let packed_strips = (steps > SHORT)
        .then(|| (bytes_per_thread - SUMS) / (steps * 2 * TILE))
        .filter(|&strips| strips >= MIN_STRIPS);
    let (max_rows, max_panels) = match packed_strips {
        // At least one, because a matmul may have no panels.
        Some(strips) => (ROWS.min(strips * STRIP), panels.max(1)),
        None if steps > DEPTH => (ROWS, GROUP),
        None => (ROWS, (WEIGHTS / steps / form.halves()).max(1)),
    };
    // Blocks of equal size, their number a multiple of the threads. With few rows, threads also divide the
    // panels.
    let min_blocks = m.div_ceil(max_rows).next_multiple_of(cpu.threads()).max(1);
    let block_rows = m.div_ceil(min_blocks).next_multiple_of(STRIP).clamp(1, max_rows);
    let blocks = m.div_ceil(block_rows);
    let shares = if blocks >= cpu.threads() { 1 } else { (2 * cpu.threads()).div_ceil(blocks.max(1)) };
    let groups = panels.div_ceil(max_panels).max(shares).min(panels);
    let workspace = workspace as usize;
    cpu.pool().run(blocks * groups, &|task, worker| {
        // Tasks are numbered group by group, so that the next task of a thread most likely uses the weights that
        // are in its L2.
        let group = task / blocks;
        let first_row = (task % blocks * block_rows).min(m);
        let end_row = m.min((task % blocks + 1) * block_rows);
        // The workers of one run have distinct indices, so no two tasks share scratch.
        let task = LinearAmxTask::<U> {
            operands,
            form,
            rows: first_row..end_row,
            panels: group * panels / groups..(group + 1) * panels / groups,
            next_row: ((task + cpu.threads()) % blocks * block_rows).min(m),
            packs_strips: packed_strips.is_some(),
            scratch: (workspace + worker * bytes_per_thread) as *mut u8,
            unit: PhantomData,
        };
        // SAFETY: guaranteed by the caller; a thread runs one task at a time.
        unsafe { task.run() };
    });
}

/// One task. No other task uses the `WORKSPACE_BYTES` bytes at `scratch` meanwhile.
struct LinearAmxTask<'a, U> {
    operands: LinearOperands<'a, Bf16>,
    form: LinearKind<'a>,
    rows: Range<usize>,
    /// Panels of y.
    panels: Range<usize>,
    /// Most likely the first row of this worker's next block, for prefetching.
    next_row: usize,
    /// Whether all strips are copied into tiles first.
    packs_strips: bool,
    scratch: *mut u8,
    unit: PhantomData<U>,
}

/// The slice of a strip of rows as the tile unit reads it: in x, or copied into tiles.
#[derive(Clone, Copy)]
struct StripSlice {
    first_row: *const u8,
    /// Bytes from step to step, and from row to row.
    step_bytes: usize,
    row_bytes: usize,
}

impl StripSlice {
    /// A strip copied into tiles at `tiles`: two tiles per step.
    #[inline(always)]
    fn packed(tiles: *const u8) -> StripSlice {
        StripSlice { first_row: tiles, step_bytes: 2 * TILE, row_bytes: LINE }
    }
}

/// The product of one slice of a strip and a panel of the weight.
struct AmxBlock<'a> {
    /// Index of the strip in the task, and number of strips.
    strip: usize,
    strips: usize,
    /// The strip's rows.
    rows: &'a Range<usize>,
    slice: StripSlice,
    /// Panel of y.
    panel: usize,
    /// Which of the panels of the weight for the panel of y: 0, or 1 for the value of a gate.
    half: usize,
    /// Steps of the slice.
    steps: &'a Range<usize>,
    /// The factor that stays in L1, and how many of its steps.
    l1_factor: L1Factor,
    l1_steps: usize,
}

impl<U: TileUnit> LinearAmxTask<'_, U> {
    /// Computes the task.
    ///
    /// # Safety
    /// The CPU must have AVX-512 with BF16 and the tile registers of `U`, and this thread must hold no other
    /// value of `U`.
    #[target_feature(enable = "avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
    unsafe fn run(self) {
        // SAFETY: guaranteed by the caller.
        let (s, mut unit) = unsafe { (Avx512::assume(), U::configure()) };
        let mut core_work = AmxCoreWork::new(self.operands, self.form, s);
        // SAFETY: guaranteed by the caller.
        unsafe {
            if self.packs_strips {
                self.by_panels(&mut unit, &mut core_work);
            } else {
                self.by_strips(&mut unit, &mut core_work);
            }
        }
        // SAFETY: the last sums of this task, which are complete.
        unsafe { core_work.pending.finish(0, STRIP) };
    }

    /// Passes all panels over each strip, slice by slice of K.
    ///
    /// # Safety
    /// Only for `run`.
    #[inline(always)]
    unsafe fn by_strips(&self, unit: &mut U, core_work: &mut AmxCoreWork<'_>) {
        let total = self.operands.x.cols().div_ceil(STEP);
        let slices = total.div_ceil(DEPTH);
        let strips = self.rows.len().div_ceil(STRIP);
        for slice in 0..slices {
            let steps = &(slice * total / slices..(slice + 1) * total / slices);
            for strip in 0..strips {
                let rows = &self.strip(strip);
                // SAFETY: a strip of this task's rows, and the space for one strip.
                let strip_slice = unsafe { self.strip_slice(rows, steps, self.scratch.wrapping_add(SUMS)) };
                // The next operand: the next strip of this slice, the first of the next slice, or the next block.
                let (row, step) = match (strip + 1 < strips, slice + 1 < slices) {
                    (true, _) => (rows.end, steps.start),
                    (false, true) => (self.rows.start, steps.end),
                    (false, false) => (self.next_row, 0),
                };
                core_work.next_x = self.operands.x.row(row).wrapping_add(step * STEP);
                for panel in self.panels.clone() {
                    for half in 0..self.form.halves() {
                        let block = AmxBlock {
                            strip,
                            strips,
                            rows,
                            slice: strip_slice,
                            panel,
                            half,
                            steps,
                            l1_factor: L1Factor::A,
                            l1_steps: DEPTH,
                        };
                        // SAFETY: the slice of this strip.
                        unsafe { self.block(unit, core_work, block) };
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
    unsafe fn by_panels(&self, unit: &mut U, core_work: &mut AmxCoreWork<'_>) {
        let steps = &(0..self.operands.x.cols().div_ceil(STEP));
        let strips = self.rows.len().div_ceil(STRIP);
        for strip in 0..strips {
            // SAFETY: a strip of this task's rows, and its space.
            unsafe { self.pack_strip(&self.strip(strip), steps, self.packed_strip(strip, steps.len())) };
        }
        for panel in self.panels.clone() {
            for strip in 0..strips {
                let block = AmxBlock {
                    strip,
                    strips,
                    rows: &self.strip(strip),
                    slice: StripSlice::packed(self.packed_strip(strip, steps.len())),
                    panel,
                    // A gate has no strips that are packed.
                    half: 0,
                    steps,
                    l1_factor: L1Factor::B,
                    l1_steps: L1_STEPS,
                };
                // SAFETY: the strip was packed above.
                unsafe { self.block(unit, core_work, block) };
            }
        }
    }

    /// Address of a packed strip of `steps` steps, if all strips are packed.
    #[inline(always)]
    fn packed_strip(&self, strip: usize, steps: usize) -> *mut u8 {
        self.scratch.wrapping_add(SUMS + strip * steps * 2 * TILE)
    }

    /// The rows of a strip.
    fn strip(&self, strip: usize) -> Range<usize> {
        let start = self.rows.start + strip * STRIP;
        start..self.rows.end.min(start + STRIP)
    }

    /// Adds the product of one slice of a strip and a panel to their sums. After the last slice, the sums are
    /// handed to `core_work`, which finishes them during the next block.
    ///
    /// # Safety
    /// Only for `run`: `block.slice` must be the slice of its strip.
    #[inline(always)]
    unsafe fn block(&self, unit: &mut U, core_work: &mut AmxCoreWork<'_>, block: AmxBlock<'_>) {
        let AmxBlock { strip, strips, rows, slice, panel, half, steps, l1_factor, l1_steps } = block;
        let a = slice.first_row;
        let total = self.operands.x.cols().div_ceil(STEP);
        let continues = steps.start > 0;
        let last = steps.end == total;
        // The gates of a gated linear unit are the first F rows of the weight, the values the last F.
        let weight_panel = panel + half * (self.operands.y.cols() / PANEL);
        let w = self.operands.w.as_ptr().cast::<u8>();
        let b = w.wrapping_add((weight_panel * total + steps.start) * 2 * TILE);
        let halves = self.form.halves();
        let completes_output = last && half + 1 == halves;
        let panel_index = (panel - self.panels.start) * halves + half;
        // Finished sums are written to y while the next sums accumulate in the tile registers, so one buffer in
        // L1 is enough: it is free again before `unit.end`. Those of a gate and its value are finished while the next two
        // accumulate, so two pairs of buffers take turns; they lie where sums would be stored between slices.
        let finished_sums = match halves {
            1 => self.scratch.cast::<f32>(),
            _ => self.scratch.wrapping_add(SUMS + SLICE + (2 * core_work.turn + half) * SUMS).cast::<f32>(),
        };
        let stored_sums =
            self.scratch.wrapping_add(SUMS + SLICE + (panel_index * strips + strip) * SUMS).cast::<f32>();
        core_work.panel = Share { index: panel_index, count: self.panels.len() * halves };
        core_work.strip = Share { index: strip, count: strips };
        core_work.next_w = if last { core::ptr::null() } else { b.wrapping_add(steps.len() * 2 * TILE) };
        let prefetched_rows = STRIP.div_ceil(steps.len());
        // Rows of pending sums that are finished beside this panel: all, or half of those of a gate and its value.
        let finished = half * STRIP / halves..(half + 1) * STRIP / halves;
        let finished_rows = finished.len().div_ceil(steps.len());
        // SAFETY: `steps` steps of the strip and of the panel are readable; `stored_sums` is the place of these sums.
        // All 32 rows of `finished_sums` are finished within the loop (`finished_rows` per step), before `end`
        // overwrites them.
        unsafe {
            if continues {
                unit.begin(stored_sums)
            } else {
                unit.zero()
            }
            for step in 0..steps.len() {
                let l1_factor = l1_factor.for_step(step, l1_steps);
                unit.step(a.add(step * slice.step_bytes), slice.row_bytes, b.add(step * 2 * TILE), l1_factor);
                let from = finished.start + step * finished_rows;
                core_work.pending.finish(from, finished.end.min(from + finished_rows));
                if completes_output {
                    let first = rows.start + step * prefetched_rows;
                    let end = rows.start + ((step + 1) * prefetched_rows).min(STRIP);
                    let residual = self.operands.epilogue.residual;
                    prefetch_output(core_work.s, first..end, panel, self.operands.y, residual);
                }
                core_work.prefetch_input(step);
            }
            unit.end(if last { finished_sums } else { stored_sums });
            if completes_output {
                core_work.set_pending(rows, panel, finished_sums);
            }
        }
    }

    /// A strip's slice: in x if the strip has 32 rows of whole aligned cache lines; otherwise packed at `to`.
    ///
    /// # Safety
    /// The rows and steps must lie in x; `to` must have space for them.
    #[inline(always)]
    unsafe fn strip_slice(&self, rows: &Range<usize>, steps: &Range<usize>, to: *mut u8) -> StripSlice {
        let x = self.operands.x;
        let row_bytes = x.ld() * size_of::<Bf16>();
        let first = x.row(rows.start).cast::<u8>();
        let whole_lines = x.cols().is_multiple_of(STEP) && (first as usize | row_bytes).is_multiple_of(LINE);
        if rows.len() == STRIP && whole_lines {
            let first_row = first.wrapping_add(steps.start * LINE);
            return StripSlice { first_row, step_bytes: LINE, row_bytes };
        }
        // SAFETY: guaranteed by the caller.
        unsafe { self.pack_strip(rows, steps, to) };
        StripSlice::packed(to)
    }

    /// Copies a strip's slice into tiles, with zeros past the last row and column.
    ///
    /// # Safety
    /// As for `strip_slice`.
    #[inline(always)]
    unsafe fn pack_strip(&self, rows: &Range<usize>, steps: &Range<usize>, to: *mut u8) {
        let x = self.operands.x;
        for r in 0..STRIP {
            let columns = if r < rows.len() { x.cols() } else { 0 };
            // SAFETY: reads a row of x, or no columns of it; writes this row's lines of the strip's space.
            unsafe { pack_row(x.row(rows.start + r), columns, steps, to.add(r * LINE)) };
        }
    }
}

/// Number `index` of `count` shares of some work.
#[derive(Clone, Copy)]
struct Share {
    index: usize,
    count: usize,
}

/// Work that the core does while the tile unit multiplies.
struct AmxCoreWork<'a> {
    operands: LinearOperands<'a, Bf16>,
    form: LinearKind<'a>,
    s: Avx512,
    /// Operands to prefetch into L2: the next strip's slice, and the panel's next slice. Null if there is no
    /// next one.
    next_x: *const Bf16,
    next_w: *const u8,
    /// Panel and strip of the current block: each block prefetches its share of the lines.
    panel: Share,
    strip: Share,
    /// Which of two pairs of buffers takes the next sums of a gate and its value.
    turn: usize,
    /// Sums whose epilogue is still to be applied.
    pending: PendingEpilogue,
}

impl<'a> AmxCoreWork<'a> {
    #[inline(always)]
    fn new(operands: LinearOperands<'a, Bf16>, form: LinearKind<'a>, s: Avx512) -> Self {
        Self {
            operands,
            form,
            s,
            next_x: core::ptr::null(),
            next_w: core::ptr::null(),
            panel: Share { index: 0, count: 1 },
            strip: Share { index: 0, count: 1 },
            turn: 0,
            pending: PendingEpilogue::none(s),
        }
    }

    /// Sets the sums that the following blocks finish.
    ///
    /// # Safety
    /// The rows and the panel must belong to the task.
    #[inline(always)]
    unsafe fn set_pending(&mut self, rows: &Range<usize>, panel: usize, sums: *mut f32) {
        let epilogue = &self.operands.epilogue;
        let y = self.operands.y;
        let column = panel * PANEL;
        let residual =
            epilogue.residual.map(|x| Bf16Rows { first: x.row(rows.start).wrapping_add(column), ld: x.ld() });
        let (bias, scales, gate) = match self.form {
            LinearKind::Plain => (epilogue.bias.map(|bias| &bias[column..]), None, None),
            LinearKind::Scaled(Scales { x, w }) => {
                let scales = Scales { x: &x[rows.clone()], w: &w[column..] };
                (epilogue.bias.map(|bias| &bias[column..]), Some(scales), None)
            }
            LinearKind::Gated { gate, bias } => {
                // The gate's accumulators lie in the buffer before those of its value.
                let gate_sums = sums.cast_const().wrapping_sub(SUMS / size_of::<f32>());
                let gate = GateSums::new(self.s, gate, gate_sums, bias.map(|bias| &bias[column..y.cols()]));
                (bias.map(|bias| &bias[y.cols() + column..]), None, Some(gate))
            }
        };
        self.turn = 1 - self.turn;
        let complete = CompleteSums {
            sums,
            rows: rows.len(),
            scales,
            bias,
            act: epilogue.act,
            residual,
            gate,
            output: y.row(rows.start).wrapping_add(column),
            ld: y.ld(),
            columns: (y.cols() - column).min(PANEL),
        };
        // SAFETY: guaranteed by the caller.
        self.pending = unsafe { PendingEpilogue::new(self.s, complete) };
    }

    /// Prefetches this block's share of one step of the next strip, and of the panel's next slice.
    #[inline(always)]
    fn prefetch_input(&self, step: usize) {
        if !self.next_x.is_null() {
            for r in (self.panel.index..STRIP).step_by(self.panel.count) {
                let at = self.next_x.wrapping_add(r * self.operands.x.ld() + step * STEP);
                self.s.prefetch_far(at.cast());
            }
        }
        if !self.next_w.is_null() {
            for line in (self.strip.index..2 * SIDE).step_by(self.strip.count) {
                self.s.prefetch_far(self.next_w.wrapping_add(step * 2 * TILE + line * LINE).cast());
            }
        }
    }
}

const _: () = assert!(STRIP == PANEL && SIDE == LANES && ROWS.is_multiple_of(STRIP));
