//! The MLP of a layer on tiles.
//!
//! Invariant: an element of either product is summed and finished as `gemm_bf16_amx` does it, so its bits are those of the
//! separate ops; the hidden layer goes from the sums of the first product right into the order of the second one's tiles.
//!
//! Order of work: a task takes a block of rows, lays x out as tiles in L2 (normalised on the way) and passes all panels of
//! W1 over its strips, then all panels of W2 over the hidden layer; a panel's first steps stay in L1 while it passes. While
//! the tiles multiply, the core asks for the next panels and finishes the sums before. Where there are fewer blocks than
//! threads, these share the panels of one product, then of the other.

use super::amx::{NEAR, Near, STEP, STRIP, TILE, Unit};
use super::amx_sums::{Sums, Then, ask_out, lay};
use super::element::Bf16;
use super::mlp_bf16::Mlp;
use super::norm::layer_norm_rows;
use super::simd::Simd;
use super::simd_x86::Avx512;
use super::tile::PANEL;
use super::{Cpu, Rows, RowsMut};
use core::marker::PhantomData;
use core::ops::Range;
use graph::ops::Hidden;

/// Most strips of a block, steps of a slice, and panels that pass over a strip together: a gate and what it passes.
/// (More panels together, or shorter slices, were slower.)
const STRIPS: usize = 8;
const DEPTH: usize = 40;
const GROUP: usize = 2;

/// Bytes of the sums of a strip and a panel. Those that are being finished stand in L1, for each panel of a group: they are
/// done when the next ones of that panel come.
const SUMS: usize = STRIP * PANEL * 4;

/// Bytes of a thread's workspace, by what it holds: rooms for sums, a row of n(x), and for each strip the sums between
/// slices, x, the hidden layer.
#[derive(Clone, Copy)]
struct Space {
    /// Steps of k of both products.
    steps: [usize; 2],
    /// Strips of a block.
    strips: usize,
}

impl Space {
    fn of(x: Rows<'_, Bf16>, op: &Mlp<'_>, each: usize) -> Space {
        let mut space = Space { steps: [x.cols().div_ceil(STEP), op.columns.div_ceil(STEP)], strips: 1 };
        let strip = space.end() - space.strip();
        space.strips = (each.saturating_sub(space.strip()) / strip).min(STRIPS);
        assert!(space.strips > 0, "workspace for a strip");
        space
    }

    /// Where the row of n(x) starts, where what each strip takes starts, and where it ends.
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

/// `mlp_bf16::mlp` after its checks, for K > 0; a thread's workspace is `each` bytes.
///
/// # Safety
/// The CPU has AVX-512 with BF16, and the registers of `U`.
pub(super) unsafe fn mlp<U: Unit>(
    cpu: &Cpu,
    x: Rows<'_, Bf16>,
    op: Mlp<'_>,
    y: &RowsMut<'_, Bf16>,
    workspace: *mut f32,
    each: usize,
) {
    let (m, threads, space) = (x.rows(), cpu.threads(), Space::of(x, &op, each));
    let wanted = m.div_ceil(space.strips * STRIP).next_multiple_of(threads).max(1);
    let height = m.div_ceil(wanted).next_multiple_of(STRIP).max(STRIP);
    let blocks = m.div_ceil(height);
    let workspace = workspace as usize;
    // Worker indices of one run are distinct and below `threads`.
    let task = |block: usize, worker: usize, owner: usize| {
        let rows = block * height..m.min((block + 1) * height);
        let (own, hidden) = ((workspace + worker * each) as *mut u8, (workspace + owner * each) as *mut u8);
        let hidden = hidden.wrapping_add(space.hidden());
        Task::<U> { x, op, y, rows, space, own, hidden, unit: PhantomData }
    };
    if blocks >= threads {
        let all = [0..usize::MAX, 0..usize::MAX];
        // SAFETY: as the caller promises; a thread runs one task at a time.
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
            // SAFETY: as above. A block's hidden layer is in the workspace of one thread: the first product's tasks write
            // apart from each other, and the second's begin when all have ended.
            unsafe { task(block, worker, block).run(parts) };
        });
    }
}

/// The first or the second product: which panels it has, in which order.
#[derive(Clone, Copy)]
struct Product<'a> {
    of: usize,
    op: &'a Mlp<'a>,
    space: Space,
}

impl Product<'_> {
    /// Panels in the order of work: with a gate, each panel of gates before what it passes.
    fn panels(&self, y: &RowsMut<'_, Bf16>) -> usize {
        if self.of == 0 { self.op.width().div_ceil(PANEL) } else { y.cols().div_ceil(PANEL) }
    }

    fn groups(&self, y: &RowsMut<'_, Bf16>) -> usize {
        self.panels(y).div_ceil(self.group())
    }

    /// How many panels pass over a strip together.
    fn group(&self) -> usize {
        if self.gated() { GROUP } else { 1 }
    }

    fn gated(&self) -> bool {
        self.of == 0 && self.op.hidden == Hidden::Gate
    }

    /// Which panel of the weight is the `i`-th.
    fn panel(&self, i: usize) -> usize {
        if self.gated() { i / 2 + i % 2 * self.space.steps[1] } else { i }
    }

    /// The `i`-th panel of the weight.
    fn weights(&self, i: usize) -> *const u8 {
        let w = if self.of == 0 { self.op.w1 } else { self.op.w2 };
        w.as_ptr().cast::<u8>().wrapping_add(self.panel(i) * self.space.steps[self.of] * 2 * TILE)
    }
}

/// A block of rows. `own` is this worker's workspace, `hidden` where the block's hidden layer is.
struct Task<'a, U> {
    x: Rows<'a, Bf16>,
    op: Mlp<'a>,
    y: &'a RowsMut<'a, Bf16>,
    rows: Range<usize>,
    space: Space,
    own: *mut u8,
    hidden: *mut u8,
    unit: PhantomData<U>,
}

/// Where in a product the work stands: its strip, the steps of its slice, its panel and which of its group; and how many
/// rows of sums are finished with each step.
struct Block<'a> {
    strip: usize,
    steps: &'a Range<usize>,
    panel: usize,
    of: usize,
    each: usize,
}

/// Where the next group's panels are asked for, and how many lines of each with a block.
struct Next {
    panels: [*const u8; GROUP],
    lines: usize,
}

/// What the core does while the tiles multiply.
struct Chores {
    s: Avx512,
    /// On their way out, from one of the rooms.
    sums: Sums,
    /// To be read next, asked for in L2, so many lines with each step.
    ahead: *const u8,
    lines: usize,
}

impl<U: Unit> Task<'_, U> {
    /// These groups of panels of both products.
    ///
    /// # Safety
    /// The CPU has AVX-512 with BF16 and the registers of `U`, and this thread no other `U`.
    #[target_feature(enable = "avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
    unsafe fn run(self, groups: [Range<usize>; 2]) {
        // SAFETY: as the caller promises.
        let (s, mut unit) = unsafe { (Avx512::assume(), U::configure()) };
        let mut chores = Chores { s, sums: Sums::none(s), ahead: core::ptr::null(), lines: 0 };
        if !groups[0].is_empty() {
            // SAFETY: this block's rows of x, and this worker's room for them.
            unsafe { self.lay(s) };
        }
        for (of, groups) in groups.into_iter().enumerate() {
            let product = Product { of, op: &self.op, space: self.space };
            for group in groups.start..groups.end.min(product.groups(self.y)) {
                // SAFETY: x was laid out just now, or the hidden layer is complete.
                unsafe { self.group(&mut unit, &mut chores, product, group) };
            }
            // SAFETY: sums of this task's.
            unsafe { chores.sums.finish(0, STRIP) };
            chores.sums = Sums::none(s);
        }
    }

    /// Lays x out, or n(x), with zeros past the last row and column.
    ///
    /// # Safety
    /// `run`'s alone.
    #[inline(always)]
    unsafe fn lay(&self, s: Avx512) {
        let (k, steps) = (self.x.cols(), self.space.steps[0]);
        let to = self.own.wrapping_add(self.space.x());
        for r in 0..self.rows.len().next_multiple_of(STRIP) {
            let mut row = self.x.row(self.rows.start + r);
            let columns = if r < self.rows.len() { k } else { 0 };
            if let Some(norm) = self.op.norm.filter(|_| columns > 0) {
                let space = self.own.wrapping_add(self.space.row()).cast::<Bf16>();
                // SAFETY: this worker's room for a row.
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
            // SAFETY: a row, or nothing of it; its lines of its strip's tiles.
            unsafe { lay(row, columns, &(0..steps), to) };
        }
    }

    /// Passes a group of panels over all strips, slice by slice.
    ///
    /// # Safety
    /// `run`'s alone: the strips of this product are laid out.
    #[inline(always)]
    unsafe fn group(&self, unit: &mut U, chores: &mut Chores, product: Product<'_>, group: usize) {
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
                    let block = Block { strip, steps, panel, of, each };
                    // SAFETY: as the caller promises.
                    unsafe { self.block(unit, chores, product, block) };
                }
            }
        }
    }

    /// What is asked for while a group passes in so many blocks for each of its panels: the next group, of this product or
    /// the other.
    #[inline(always)]
    fn next(&self, product: Product<'_>, first: usize, blocks: usize) -> Next {
        let all = product.panels(self.y);
        let (product, first) =
            if first < all { (product, first) } else { (Product { of: 1 - product.of, ..product }, 0) };
        let lines = self.space.steps[product.of] * 2 * TILE / 64;
        Next { panels: [0, 1].map(|i| product.weights(first + i)), lines: lines.div_ceil(blocks) }
    }

    /// Adds the product of a strip and a panel, in one slice, to their sums; those of the last slice go out.
    ///
    /// # Safety
    /// As `group`.
    #[inline(always)]
    unsafe fn block(&self, unit: &mut U, chores: &mut Chores, product: Product<'_>, block: Block<'_>) {
        let Block { strip, steps, panel, of, each } = block;
        let total = self.space.steps[product.of];
        let (more, last) = (steps.start > 0, steps.end == total);
        let strips = if product.of == 0 { self.own.wrapping_add(self.space.x()) } else { self.hidden };
        let a = strips.wrapping_add((strip * total + steps.start) * 2 * TILE);
        let b = product.weights(panel).wrapping_add(steps.start * 2 * TILE);
        let most = NEAR / product.group();
        let sums = self.own.wrapping_add(self.space.strip() + (strip * GROUP + of) * SUMS).cast::<f32>();
        // SAFETY: `steps` steps of the strip and of the panel; the sums' place, or a room that is free.
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
                    ask_out(chores.s, asked, panel, self.y, self.op.residual);
                }
                chores.ask(step);
            }
            if last {
                let room = self.room(of);
                unit.end(room);
                chores.sums = self.leave(chores.s, product, strip, panel, room);
            } else {
                unit.end(sums);
                chores.sums = Sums::none(chores.s);
            }
        }
    }

    fn room(&self, i: usize) -> *mut f32 {
        self.own.wrapping_add(i * SUMS).cast()
    }

    /// Where sums go: the hidden layer's tiles, or y.
    ///
    /// # Safety
    /// The sums are complete, and so are those of the gate before them.
    #[inline(always)]
    unsafe fn leave(
        &self,
        s: Avx512,
        product: Product<'_>,
        strip: usize,
        panel: usize,
        room: *mut f32,
    ) -> Sums {
        let start = strip * STRIP;
        let sums = (room, STRIP.min(self.rows.len() - start));
        let column = product.panel(panel) * PANEL;
        if product.of == 1 {
            let to = self.y.row(self.rows.start + start).wrapping_add(column);
            let to = (to, self.y.ld(), (self.y.cols() - column).min(PANEL));
            let row = |r: Rows<'_, Bf16>| (r.row(self.rows.start + start).wrapping_add(column), r.ld());
            let bias = self.op.b2.map(|b| &b[column..]);
            // SAFETY: rows and columns of y and of the residual, which are this task's.
            return unsafe { Sums::new(s, sums, None, bias, Then::Nothing, self.op.residual.map(row), to) };
        }
        let (then, step) = match (product.gated(), panel % 2) {
            (false, _) => (Then::Gelu, panel),
            (true, 0) => (Then::Open, panel / 2),
            (true, _) => (Then::Through(self.room(0)), panel / 2),
        };
        let to = self.hidden.wrapping_add((strip * self.space.steps[1] + step) * 2 * TILE).cast();
        let bias = self.op.b1.map(|b| &b[column..]);
        // SAFETY: 32 columns of the hidden layer are a step of its strip: a line of a tile for each row.
        unsafe { Sums::new(s, sums, None, bias, then, None, (to, STEP, PANEL)) }
    }
}

impl Chores {
    /// Asks for this step's share of what comes next.
    #[inline(always)]
    fn ask(&self, step: usize) {
        for line in step * self.lines..(step + 1) * self.lines {
            self.s.prefetch_far(self.ahead.wrapping_add(line * 64).cast());
        }
    }
}

const _: () = assert!(STRIP == PANEL && STEP == PANEL && GROUP == 2);
