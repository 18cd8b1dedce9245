//! The fused bf16 MLP on AMX tiles.
//!
//! Invariant: an element of either matmul is summed and finished as in `gemm_bf16_amx`, so it has the bits of the
//! separate ops. The hidden layer is written from the accumulators of the first matmul directly into the tile order
//! of the second matmul's A operand.
//!
//! Order of work: a task takes a block of rows, packs x (normalised on the way) as tiles in L2 and passes all panels
//! of W1 over the block's strips, then all panels of W2 over the hidden layer. A panel's first k steps stay in L1
//! while it passes over the strips. While the tiles multiply, the core prefetches the next panels and finishes the
//! previous accumulators. If there are fewer blocks than threads, the threads divide the panels of the first matmul
//! among them, then the panels of the second.

use super::amx::{NEAR, Near, STEP, STRIP, TILE, TileUnit};
use super::amx_sums::{Activation, PendingEpilogue, lay, prefetch_output};
use super::element::Bf16;
use super::mlp_bf16::Mlp;
use super::norm::layer_norm_rows;
use super::simd::Simd;
use super::simd_x86::Avx512;
use super::tile::PANEL;
use super::{Cpu, Rows, RowsMut};
use core::marker::PhantomData;
use core::ops::Range;
use plimsoll_graph::ops::Hidden;

/// Maximum number of strips of a block, maximum number of k steps of a slice (`DEPTH`), and number of panels that
/// pass over a strip together (`GROUP`): a gate panel and its value panel. Measured: more panels together, or shorter
/// slices, were slower.
const STRIPS: usize = 8;
const DEPTH: usize = 40;
const GROUP: usize = 2;

/// Bytes of the accumulators of a strip and a panel. Each panel of a group has one such buffer in L1 for accumulators
/// that are being finished; they are done before the next accumulators of that panel arrive.
const SUMS: usize = STRIP * PANEL * 4;

/// Layout of a thread's workspace, in bytes: the `GROUP` buffers of accumulators, one row of n(x), and then for all
/// strips of a block the partial sums between slices, x, and the hidden layer.
#[derive(Clone, Copy)]
struct ScratchLayout {
    /// Number of k steps of the first and of the second matmul.
    steps: [usize; 2],
    /// Number of strips of a block.
    strips: usize,
}

impl ScratchLayout {
    fn of(x: Rows<'_, Bf16>, op: &Mlp<'_>, each: usize) -> ScratchLayout {
        let mut space =
            ScratchLayout { steps: [x.cols().div_ceil(STEP), op.columns.div_ceil(STEP)], strips: 1 };
        let strip = space.end() - space.strip();
        space.strips = (each.saturating_sub(space.strip()) / strip).min(STRIPS);
        assert!(space.strips > 0, "workspace for a strip");
        space
    }

    /// Byte offset of the row of n(x). The offsets of the partial sums (`strip`), x, the hidden layer, and the end
    /// follow.
    fn row(self) -> usize {
        GROUP * SUMS
    }

    fn strip(self) -> usize {
        self.row() + self.steps[0] * 2 * STEP
    }

    fn x(self) -> usize {
        self.strip() + self.strips * GROUP * SUMS
    }

    fn hidden(self) -> usize {
        self.x() + self.strips * self.steps[0] * 2 * TILE
    }

    fn end(self) -> usize {
        self.hidden() + self.strips * self.steps[1] * 2 * TILE
    }
}

/// Runs `mlp_bf16::mlp` after its checks, for K > 0 and F > 0. A thread's workspace is `each` bytes.
///
/// # Safety
/// The CPU has AVX-512 with BF16, and the tile registers of `U`.
pub(super) unsafe fn mlp<U: TileUnit>(
    cpu: &Cpu,
    x: Rows<'_, Bf16>,
    op: Mlp<'_>,
    y: &RowsMut<'_, Bf16>,
    workspace: *mut f32,
    each: usize,
) {
    let (m, threads, space) = (x.rows(), cpu.threads(), ScratchLayout::of(x, &op, each));
    let wanted = m.div_ceil(space.strips * STRIP).next_multiple_of(threads).max(1);
    let height = m.div_ceil(wanted).next_multiple_of(STRIP).max(STRIP);
    let blocks = m.div_ceil(height);
    let workspace = workspace as usize;
    // The worker indices of one run are distinct and below `threads`, so workspaces never overlap.
    let task = |block: usize, worker: usize, owner: usize| {
        let rows = block * height..m.min((block + 1) * height);
        let (own, hidden) = ((workspace + worker * each) as *mut u8, (workspace + owner * each) as *mut u8);
        let hidden = hidden.wrapping_add(space.hidden());
        MlpTile::<U> { x, op, y, rows, space, own, hidden, unit: PhantomData }
    };
    if blocks >= threads {
        let all = [0..usize::MAX, 0..usize::MAX];
        // SAFETY: as the caller promises; a thread runs one task at a time, in its own workspace.
        cpu.pool().run(blocks, &|block, worker| unsafe { task(block, worker, worker).run(all.clone()) });
        return;
    }
    for of in 0..2 {
        let groups = Product { of, op: &op, space }.groups(y);
        let shares = (2 * threads).div_ceil(blocks.max(1)).min(groups);
        cpu.pool().run(blocks * shares, &|i, worker| {
            let (block, share) = (i % blocks, i / blocks);
            let mut parts = [0..0, 0..0];
            parts[of] = share * groups / shares..(share + 1) * groups / shares;
            // SAFETY: as above. A block's hidden layer lies in the workspace of one thread (`owner`): the tasks of
            // the first matmul write disjoint panels of it, and the tasks of the second begin when all of them have
            // ended.
            unsafe { task(block, worker, block).run(parts) };
        });
    }
}

/// One of the two matmuls (`of` is 0 or 1) and the order of its panels.
#[derive(Clone, Copy)]
struct Product<'a> {
    of: usize,
    op: &'a Mlp<'a>,
    space: ScratchLayout,
}

impl Product<'_> {
    /// Number of panels of the weight.
    fn panels(&self, y: &RowsMut<'_, Bf16>) -> usize {
        if self.of == 0 { self.op.width().div_ceil(PANEL) } else { y.cols().div_ceil(PANEL) }
    }

    /// Number of groups of panels.
    fn groups(&self, y: &RowsMut<'_, Bf16>) -> usize {
        self.panels(y).div_ceil(self.group())
    }

    /// Number of panels that pass over a strip together.
    fn group(&self) -> usize {
        if self.gated() { GROUP } else { 1 }
    }

    fn gated(&self) -> bool {
        self.of == 0 && self.op.hidden == Hidden::Gate
    }

    /// Index in the weight of the panel that is `i`-th in the order of work. With a gate, each gate panel comes
    /// directly before its value panel; in the weight all gate panels come first, and their number is
    /// `steps[1]`, because a step has as many columns as a panel.
    fn panel(&self, i: usize) -> usize {
        if self.gated() { i / 2 + i % 2 * self.space.steps[1] } else { i }
    }

    /// Address of the weight panel that is `i`-th in the order of work.
    fn weights(&self, i: usize) -> *const u8 {
        let w = if self.of == 0 { self.op.w1 } else { self.op.w2 };
        w.as_ptr().cast::<u8>().wrapping_add(self.panel(i) * self.space.steps[self.of] * 2 * TILE)
    }
}

/// The work on one block of rows. `own` is this worker's workspace, `hidden` the block's hidden layer, which may be
/// in another worker's workspace.
struct MlpTile<'a, U> {
    x: Rows<'a, Bf16>,
    op: Mlp<'a>,
    y: &'a RowsMut<'a, Bf16>,
    rows: Range<usize>,
    space: ScratchLayout,
    own: *mut u8,
    hidden: *mut u8,
    unit: PhantomData<U>,
}

/// Position in a matmul: strip, k steps of the slice, panel, the panel's index in its group (`of`), and the number of
/// accumulator rows to finish with each step (`each`).
struct MlpBlock<'a> {
    strip: usize,
    steps: &'a Range<usize>,
    panel: usize,
    of: usize,
    each: usize,
}

/// Prefetch addresses for the next group's panels, and the number of cache lines of each to prefetch per block.
struct Next {
    panels: [*const u8; GROUP],
    lines: usize,
}

/// The core's side work while the tiles multiply: finishing accumulators and prefetching weights.
struct CoreWork {
    s: Avx512,
    /// The accumulators being finished, in one of the `GROUP` buffers.
    sums: PendingEpilogue,
    /// Weights to read next. Prefetched into L2, `lines` cache lines with each step.
    ahead: *const u8,
    lines: usize,
}

impl<U: TileUnit> MlpTile<'_, U> {
    /// Runs the given groups of panels of both matmuls.
    ///
    /// # Safety
    /// The CPU has AVX-512 with BF16 and the tile registers of `U`, and this thread has no other `U`.
    #[target_feature(enable = "avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
    unsafe fn run(self, groups: [Range<usize>; 2]) {
        // SAFETY: as the caller promises.
        let (s, mut unit) = unsafe { (Avx512::assume(), U::configure()) };
        let mut chores = CoreWork { s, sums: PendingEpilogue::none(s), ahead: core::ptr::null(), lines: 0 };
        if !groups[0].is_empty() {
            // SAFETY: this block's rows of x, and this worker's space for them.
            unsafe { self.lay(s) };
        }
        for (of, groups) in groups.into_iter().enumerate() {
            let product = Product { of, op: &self.op, space: self.space };
            for group in groups.start..groups.end.min(product.groups(self.y)) {
                // SAFETY: x was packed just before, or the hidden layer is complete.
                unsafe { self.group(&mut unit, &mut chores, product, group) };
            }
            // SAFETY: accumulators of this task.
            unsafe { chores.sums.finish(0, STRIP) };
            chores.sums = PendingEpilogue::none(s);
        }
    }

    /// Packs x, or n(x), as tiles, with zeros past the last row and column.
    ///
    /// # Safety
    /// To be called by `run` only.
    #[inline(always)]
    unsafe fn lay(&self, s: Avx512) {
        let (k, steps) = (self.x.cols(), self.space.steps[0]);
        let to = self.own.wrapping_add(self.space.x());
        for r in 0..self.rows.len().next_multiple_of(STRIP) {
            let mut row = self.x.row(self.rows.start + r);
            let columns = if r < self.rows.len() { k } else { 0 };
            if let Some(norm) = self.op.norm.filter(|_| columns > 0) {
                let space = self.own.wrapping_add(self.space.row()).cast::<Bf16>();
                // SAFETY: this worker's space for one row.
                let normed = unsafe { RowsMut::from_raw(space, 1, k, k) };
                layer_norm_rows(
                    s,
                    self.x.part(self.rows.start + r, 1),
                    norm.gamma,
                    norm.beta,
                    norm.eps,
                    &normed,
                );
                row = space;
            }
            let to = to.wrapping_add(r / STRIP * steps * 2 * TILE + r % STRIP * 64);
            // SAFETY: a row of x, or no column of it, and this row's lines in its strip's tiles.
            unsafe { lay(row, columns, &(0..steps), to) };
        }
    }

    /// Passes a group of panels over all strips, slice by slice.
    ///
    /// # Safety
    /// To be called by `run` only: the strips of this matmul are packed.
    #[inline(always)]
    unsafe fn group(&self, unit: &mut U, chores: &mut CoreWork, product: Product<'_>, group: usize) {
        let (total, strips) = (self.space.steps[product.of], self.rows.len().div_ceil(STRIP));
        let slices = total.div_ceil(DEPTH);
        let panels = group * product.group()..((group + 1) * product.group()).min(product.panels(self.y));
        let mut next = self.next(product, panels.end, slices * strips);
        for slice in 0..slices {
            let steps = &(slice * total / slices..(slice + 1) * total / slices);
            let (each, lines) = (STRIP.div_ceil(steps.len()), next.lines.div_ceil(steps.len()));
            for strip in 0..strips {
                for panel in panels.clone() {
                    let of = panel - panels.start;
                    (chores.ahead, chores.lines) = (next.panels[of], lines);
                    next.panels[of] = next.panels[of].wrapping_add(next.lines * 64);
                    let block = MlpBlock { strip, steps, panel, of, each };
                    // SAFETY: as the caller promises.
                    unsafe { self.block(unit, chores, product, block) };
                }
            }
        }
    }

    /// Prefetch plan for a group that takes `blocks` blocks per panel: the next group, of this matmul or, after its
    /// last group, of the other.
    #[inline(always)]
    fn next(&self, product: Product<'_>, first: usize, blocks: usize) -> Next {
        let all = product.panels(self.y);
        let (product, first) =
            if first < all { (product, first) } else { (Product { of: 1 - product.of, ..product }, 0) };
        let lines = self.space.steps[product.of] * 2 * TILE / 64;
        Next { panels: [0, 1].map(|i| product.weights(first + i)), lines: lines.div_ceil(blocks) }
    }

    /// Adds the product of a strip and a panel, over one slice of k, to their accumulators. After the last slice the
    /// accumulators go to `leave`.
    ///
    /// # Safety
    /// As for `group`.
    #[inline(always)]
    unsafe fn block(&self, unit: &mut U, chores: &mut CoreWork, product: Product<'_>, block: MlpBlock<'_>) {
        let MlpBlock { strip, steps, panel, of, each } = block;
        let total = self.space.steps[product.of];
        let (more, last) = (steps.start > 0, steps.end == total);
        let strips = if product.of == 0 { self.own.wrapping_add(self.space.x()) } else { self.hidden };
        let a = strips.wrapping_add((strip * total + steps.start) * 2 * TILE);
        let b = product.weights(panel).wrapping_add(steps.start * 2 * TILE);
        let most = NEAR / product.group();
        let sums = self.own.wrapping_add(self.space.strip() + (strip * GROUP + of) * SUMS).cast::<f32>();
        // SAFETY: `steps` steps of the strip and of the panel; the place of the partial sums, or a buffer that is
        // free.
        unsafe {
            if more {
                unit.begin(sums)
            } else {
                unit.zero()
            }
            for step in 0..steps.len() {
                unit.step(a.add(step * 2 * TILE), 64, b.add(step * 2 * TILE), Near::B.first(most, step));
                chores.sums.finish(step * each, (step + 1) * each);
                if last && product.of == 1 {
                    let first = self.rows.start + strip * STRIP;
                    let asked = first + step * each..first + ((step + 1) * each).min(STRIP);
                    prefetch_output(chores.s, asked, panel, self.y, self.op.residual);
                }
                chores.prefetch(step);
            }
            if last {
                let finished_sums = self.finished_sums(of);
                unit.end(finished_sums);
                chores.sums = self.leave(chores.s, product, strip, panel, finished_sums);
            } else {
                unit.end(sums);
                chores.sums = PendingEpilogue::none(chores.s);
            }
        }
    }

    /// Buffer of finished accumulators of the `i`-th panel of a group.
    fn finished_sums(&self, i: usize) -> *mut f32 {
        self.own.wrapping_add(i * SUMS).cast()
    }

    /// Prepares finished accumulators to be written to the hidden layer's tiles (first matmul) or to y (second).
    ///
    /// # Safety
    /// The accumulators are complete and, for a value panel, so are the accumulators of its gate panel.
    #[inline(always)]
    unsafe fn leave(
        &self,
        s: Avx512,
        product: Product<'_>,
        strip: usize,
        panel: usize,
        finished_sums: *mut f32,
    ) -> PendingEpilogue {
        let start = strip * STRIP;
        let sums = (finished_sums, STRIP.min(self.rows.len() - start));
        let column = product.panel(panel) * PANEL;
        if product.of == 1 {
            let to = self.y.row(self.rows.start + start).wrapping_add(column);
            let to = (to, self.y.ld(), (self.y.cols() - column).min(PANEL));
            let row = |r: Rows<'_, Bf16>| (r.row(self.rows.start + start).wrapping_add(column), r.ld());
            let bias = self.op.b2.map(|b| &b[column..]);
            // SAFETY: rows and columns of y and of the residual, which belong to this task.
            return unsafe {
                PendingEpilogue::new(s, sums, None, bias, Activation::Nothing, self.op.residual.map(row), to)
            };
        }
        let (then, step) = match (product.gated(), panel % 2) {
            (false, _) => (Activation::Gelu, panel),
            (true, 0) => (Activation::Open, panel / 2),
            (true, _) => (Activation::Through(self.finished_sums(0)), panel / 2),
        };
        let to = self.hidden.wrapping_add((strip * self.space.steps[1] + step) * 2 * TILE).cast();
        let bias = self.op.b1.map(|b| &b[column..]);
        // SAFETY: 32 columns of the hidden layer are one k step of its strip: one tile line per row.
        unsafe { PendingEpilogue::new(s, sums, None, bias, then, None, (to, STEP, PANEL)) }
    }
}

impl CoreWork {
    /// Prefetches this step's share of the next weights.
    #[inline(always)]
    fn prefetch(&self, step: usize) {
        for line in step * self.lines..(step + 1) * self.lines {
            self.s.prefetch_far(self.ahead.wrapping_add(line * 64).cast());
        }
    }
}

const _: () = assert!(STRIP == PANEL && STEP == PANEL && GROUP == 2);
