//! f32 GEMM `y = x W^T` with bias, activation and residual, over weights that are packed once when they are
//! loaded.
//!
//! Invariant: each element of `x W^T` is one chain of fused multiply-adds over k = 0, 1, .., K - 1, with initial
//! value zero. Where K is cut into slices, the f32 sum is stored and loaded again without rounding; how rows and
//! columns are cut only decides which task computes an element. So the bits of a row depend on that row and on
//! the weights, and not on M, the row's position, the number of threads or, among instruction sets with FMA, the
//! instruction set. On CPUs with AMX `linear_f32_amx` computes the product: its bits differ, but also depend on
//! the row and the weights only.
//!
//! Layout of packed weights: panels of 32 columns of y; panel p holds, for each k in 0..K, the 32 values
//! `W[32 p .. 32 p + 32][k]`, zeros past N. All instruction sets share this layout.
//!
//! Loop order: a task computes a block of rows times a group of panels. For each slice of at most `DEPTH` of K,
//! it copies the rows into its workspace with a constant stride (they stay in L2), and multiplies them by one
//! panel after another; the slice of a panel stays in L1 or L2 while all strips of the block pass over it.

use crate::Cpu;
use crate::Isa;
use crate::element::Element;
use crate::matmul::register_tile::{Begin, PrefetchPlan, strip};
#[cfg(target_arch = "x86_64")]
use crate::simd::amx::Tiles;
use crate::simd::isa::Kernel;
use crate::simd::{LANES, Simd};
use crate::view::{Rows, RowsMut};
use core::ops::Range;
use plimsoll_plan::InstructionSet;

pub use crate::matmul::register_tile::PANEL;

/// Maximum length of a slice of K, and row stride of the copied rows in f32. The stride is no multiple of a
/// page, because rows a page apart would compete for the same L1 sets.
const DEPTH: usize = 768;
const STRIDE: usize = DEPTH + 16;
/// Maximum rows of a task: a multiple of 14, the height of the tallest register tile. The heights of all tiles
/// are even.
const BLOCK: usize = 168;
/// Maximum panels of a task where K has several slices, because the sums of all its panels are stored in the
/// workspace between slices. Rows, sums and one panel's slice take 0.8 MB of L2. (16 panels are 2 to 3 % faster
/// for K > 768, but take 172 032 B more per thread.)
const GROUP: usize = 8;

/// Bytes of workspace per thread.
pub fn workspace_bytes(isa: Isa) -> usize {
    isa.set().gemm_f32() as usize
}

// The workspace holds a slice of a block of rows, and the sums of a group of panels.
const _: () = assert!(4 * BLOCK * (STRIDE + GROUP * PANEL) <= InstructionSet::Portable.gemm_f32() as usize);
#[cfg(target_arch = "x86_64")]
const _: () = assert!(crate::matmul::linear_f32_amx::EACH <= InstructionSet::Amx.gemm_f32() as usize);

/// Operations applied to the product, in this order: add the bias, apply `act`, add the residual.
#[derive(Clone, Copy, Default)]
pub struct Epilogue<'a, E = f32> {
    /// N values, added to each row.
    pub bias: Option<&'a [E]>,
    /// Applied after the bias.
    pub act: Act,
    /// (M, N), added last. It may be exactly the memory of `y`.
    pub residual: Option<Rows<'a, E>>,
}

/// Activation function of an [`Epilogue`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Act {
    /// No activation.
    #[default]
    None,
    /// GELU, x Phi(x), with the exact error function.
    Gelu,
}

/// Number of f32 of a packed (n, k) weight.
pub const fn packed_len(n: usize, k: usize) -> usize {
    n.div_ceil(PANEL) * PANEL * k
}

/// Packs up to 32 consecutive rows of a row-major (N, K) weight into one panel, so that a weight can be packed
/// while its file is read. `rows` holds `rows.len() / k` whole rows, `out` holds 32 k values. Panics on other
/// lengths.
pub fn pack_panel(rows: &[f32], k: usize, out: &mut [f32]) {
    assert!(rows.len() <= PANEL * k && out.len() == PANEL * k, "a panel is 32 x {k}");
    if k == 0 {
        return;
    }
    assert!(rows.len().is_multiple_of(k), "whole rows of {k}");
    // In blocks of 32 x 32, so that the source rows and the destination both stay in L1.
    const SIDE: usize = 32;
    for start in (0..k).step_by(SIDE) {
        for kk in start..k.min(start + SIDE) {
            let packed = &mut out[kk * PANEL..][..PANEL];
            packed.fill(0.0);
            for (value, row) in packed.iter_mut().zip(rows.chunks_exact(k)) {
                *value = row[kk];
            }
        }
    }
}

/// Computes y (M, N) = residual + act(x (M, K) W^T + bias). `w` is packed (see [`pack_panel`]); `workspace`
/// holds `workspace_bytes` for each thread. `x` and `y` must not overlap. Panics if the sizes are inconsistent.
pub fn linear(
    cpu: &Cpu,
    x: Rows<'_>,
    w: &[f32],
    epilogue: Epilogue<'_>,
    y: RowsMut<'_>,
    workspace: &mut [f32],
) {
    let m = x.rows();
    let k = x.cols();
    let n = y.cols();
    assert_eq!(w.len(), packed_len(n, k), "packed weights of ({n}, {k})");
    let each = workspace_bytes(cpu.isa()) / 4;
    assert!(workspace.len() >= each * cpu.threads(), "workspace for {} threads", cpu.threads());
    let job = GemmCall::new(x, w, epilogue, &y);
    #[cfg(target_arch = "x86_64")]
    if cpu.isa().has_tiles() && k > 0 {
        // SAFETY: the instruction set has tiles and AVX-512; the size of the workspace was checked above.
        return unsafe {
            crate::matmul::linear_f32_amx::linear::<Tiles>(cpu, job, workspace.as_mut_ptr(), 4 * each)
        };
    }
    let panels = n.div_ceil(PANEL);
    let fewest = if k > DEPTH { panels.div_ceil(GROUP) } else { 1 };
    let split = Split::new(m, panels, cpu.threads(), cpu.isa().tile_rows(), BLOCK, fewest);
    let scratch = workspace.as_mut_ptr() as usize;
    cpu.pool().run(split.tasks(), &|task, worker| {
        let (rows, panels) = split.task(task);
        let scratch = scratch as *mut f32;
        // The workers of one run have distinct indices below `threads()`, so no two tasks share scratch.
        let scratch = scratch.wrapping_add(worker * each);
        cpu.isa().run(GemmTile { job, rows, panels, scratch });
    });
}

/// Partition of the output into tasks: row blocks times groups of panels.
pub(crate) struct Split {
    m: usize,
    panels: usize,
    height: usize,
    blocks: usize,
    groups: usize,
}

impl Split {
    /// Row blocks of at most `most` rows, each of whole tiles of `height` rows except at the end; at least
    /// `fewest` groups of panels.
    pub(crate) fn new(
        m: usize,
        panels: usize,
        threads: usize,
        height: usize,
        most: usize,
        fewest: usize,
    ) -> Split {
        // A multiple of the thread count, so that every thread gets equally many blocks, which differ by at most
        // one tile; but no block of less than a tile.
        let blocks = m.div_ceil(most / height * height).next_multiple_of(threads).min(m.div_ceil(height));
        // With few blocks, threads also divide the panels, although each task then copies the rows for itself.
        // There are then at least two tasks per thread.
        let shares = match blocks {
            0 => 0,
            _ if threads == 1 || blocks >= 2 * threads => 1,
            _ => (2 * threads).div_ceil(blocks),
        };
        Split { m, panels, height, blocks, groups: shares.max(fewest).min(panels) }
    }

    pub(crate) fn tasks(&self) -> usize {
        self.blocks * self.groups
    }

    /// The rows and panels of task number `task`.
    pub(crate) fn task(&self, task: usize) -> (Range<usize>, Range<usize>) {
        let block = task / self.groups;
        let group = task % self.groups;
        let row = |b: usize| self.m.min(b * self.m.div_ceil(self.height) / self.blocks * self.height);
        let panel = |g: usize| g * self.panels / self.groups;
        (row(block)..row(block + 1), panel(group)..panel(group + 1))
    }
}

/// Operands of a GEMM.
#[derive(Clone, Copy)]
pub(crate) struct GemmCall<'a, E = f32> {
    pub(crate) x: Rows<'a, E>,
    pub(crate) w: &'a [E],
    pub(crate) epilogue: Epilogue<'a, E>,
    pub(crate) y: &'a RowsMut<'a, E>,
}

impl<'a, E: Element> GemmCall<'a, E> {
    /// Panics if the sizes of x, y, bias and residual are inconsistent. The size of `w` depends on its layout
    /// and is checked by the caller.
    pub(crate) fn new(x: Rows<'a, E>, w: &'a [E], epilogue: Epilogue<'a, E>, y: &'a RowsMut<'a, E>) -> Self {
        let m = x.rows();
        let n = y.cols();
        assert_eq!(y.rows(), m, "rows of y");
        assert!(epilogue.bias.is_none_or(|b| b.len() == n), "bias of {n}");
        let fits = |r: Rows<'_, E>| r.rows() == m && r.cols() == n;
        assert!(epilogue.residual.is_none_or(fits), "residual of ({m}, {n})");
        Self { x, w, epilogue, y }
    }

    /// The arguments of `finish` that are common to all strips.
    pub(crate) fn out(&self) -> (&Epilogue<'a, E>, &RowsMut<'a, E>) {
        (&self.epilogue, self.y)
    }
}

/// One task, run by `Isa::run`. No other task uses `scratch` meanwhile.
struct GemmTile<'a> {
    job: GemmCall<'a>,
    rows: Range<usize>,
    panels: Range<usize>,
    scratch: *mut f32,
}

impl Kernel for GemmTile<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let k = self.job.x.cols();
        let slices = k.div_ceil(DEPTH).max(1);
        let depth = k.div_ceil(slices).max(1);
        for (slice, start) in (0..k.max(1)).step_by(depth).enumerate() {
            let ks = start..k.min(start + depth);
            for panel in self.panels.clone() {
                self.panel(s, panel, &ks, slice > 0, slice + 1 == slices);
            }
        }
    }
}

impl GemmTile<'_> {
    /// Adds the products over the slice `ks` of one panel to the sums of all rows of the task. `more`: the sums
    /// of earlier slices are in the scratch; `last`: this is the last slice, so the sums go through the epilogue
    /// to y.
    #[inline(always)]
    fn panel<S: Simd>(&self, s: S, panel: usize, ks: &Range<usize>, more: bool, last: bool) {
        let k = self.job.x.cols();
        let count = self.rows.len();
        let b = self.job.w.as_ptr().wrapping_add((panel * k + ks.start) * PANEL);
        let begin = if more { Begin::Sums } else { Begin::Zero };
        for row in (0..count).step_by(S::ROWS) {
            let rows = S::ROWS.min(count - row);
            let a = self.scratch.wrapping_add(row * STRIDE);
            if panel == self.panels.start {
                // SAFETY: the scratch has space for BLOCK rows of STRIDE; these rows and columns lie in x.
                unsafe { copy_rows::<S>(self.job.x, self.rows.start + row, rows, ks, a) };
            }
            let sums = self.scratch.wrapping_add(BLOCK * STRIDE);
            // With one slice a strip's sums are finished immediately, so all strips share one buffer, which
            // stays in L1.
            let at = if more || !last { ((panel - self.panels.start) * BLOCK + row) * PANEL } else { 0 };
            let sum = sums.wrapping_add(at);
            // SAFETY: `a` is a strip of copied rows (the padding rows of the last tile are zeroed and lie inside
            // the block), `b` is one slice of one panel, and the strip's sums and output rows belong to this
            // task.
            unsafe {
                let feeds = self.feeds::<S>(panel, row, ks, last);
                strip::<S, STRIDE, 2>(s, (rows, 2), ks.len(), a, b, sum, PANEL, begin, &feeds);
                if last {
                    finish(s, self.job.out(), self.rows.start + row, rows, panel, sum);
                }
            }
        }
    }
}

/// Number of f32 in a cache line.
const LINE: usize = 16;

impl GemmTile<'_> {
    /// Cache lines to prefetch during one strip: first the part of y that the strip will write, then the data
    /// needed next: while rows are still being copied, the rows of the next strip; after that, this strip's
    /// share of the next panel.
    #[inline(always)]
    fn feeds<S: Simd>(&self, panel: usize, row: usize, ks: &Range<usize>, last: bool) -> [PrefetchPlan; 2] {
        let k = self.job.x.cols();
        let count = self.rows.len();
        let job = &self.job;
        let out = PrefetchPlan {
            at: job.y.row(self.rows.start + row).wrapping_add(panel * PANEL),
            step: job.y.ld(),
            count: S::ROWS,
            hop: LINE,
            lines: if last { PANEL / LINE * S::ROWS } else { 0 },
        };
        let next_row = row + S::ROWS;
        if panel == self.panels.start && next_row < count {
            let at = job.x.row(self.rows.start + next_row).wrapping_add(ks.start);
            let lines = S::ROWS * ks.len().div_ceil(LINE);
            return [out, PrefetchPlan { at, step: job.x.ld(), count: S::ROWS, hop: LINE, lines }];
        }
        let lines = (ks.len() * PANEL / LINE).div_ceil(count.div_ceil(S::ROWS));
        let slice = job.w.as_ptr().wrapping_add(((panel + 1) * k + ks.start) * PANEL);
        let at = slice.wrapping_add(row / S::ROWS * lines * LINE);
        [out, PrefetchPlan { at, step: LINE, count: lines, hop: 0, lines }]
    }
}

/// Copies columns `ks` of a strip of rows of x to rows of stride STRIDE, and zeroes the rows from `rows` up to
/// the tile's height.
///
/// # Safety
/// The rows and columns must lie in x, `rows` must be at most the tile's height and `ks` at most DEPTH long; the
/// tile's height of rows of STRIDE f32 must be writable at `to`.
#[inline(always)]
unsafe fn copy_rows<S: Simd>(x: Rows<'_>, row: usize, rows: usize, ks: &Range<usize>, to: *mut f32) {
    for r in 0..S::ROWS {
        let to = to.wrapping_add(r * STRIDE);
        // SAFETY: guaranteed by the caller.
        unsafe {
            match r < rows {
                true => to.copy_from_nonoverlapping(x.row(row + r).wrapping_add(ks.start), ks.len()),
                false => to.write_bytes(0, ks.len()),
            }
        }
    }
}

/// Applies the epilogue to one strip of one panel: reads its sums and writes y.
///
/// # Safety
/// `sum` must hold `rows` rows of 32 sums; rows `row..row + rows` of y must belong to the calling task.
#[inline(always)]
pub(crate) unsafe fn finish<S: Simd, E: Element>(
    s: S,
    out: (&Epilogue<'_, E>, &RowsMut<'_, E>),
    row: usize,
    rows: usize,
    panel: usize,
    sum: *const f32,
) {
    // SAFETY: guaranteed by the caller.
    unsafe { finish_by(s, out, row, rows, panel, |r, column| s.load(sum.add(r * PANEL + column))) };
}

/// As `finish`, but takes the sums from `number(r, column)`: sixteen values of row `r` of the strip, from
/// `column` of the panel on.
///
/// # Safety
/// Rows `row..row + rows` of y must belong to the calling task.
#[inline(always)]
pub(crate) unsafe fn finish_by<S: Simd, E: Element>(
    s: S,
    (e, y): (&Epilogue<'_, E>, &RowsMut<'_, E>),
    row: usize,
    rows: usize,
    panel: usize,
    number: impl Fn(usize, usize) -> S::V,
) {
    for column in [0, LANES] {
        let j = panel * PANEL + column;
        let width = y.cols().saturating_sub(j).min(LANES);
        if width == 0 {
            break;
        }
        // SAFETY: columns j..j + width lie inside bias, residual and y; the caller guarantees the rows.
        unsafe {
            let bias = match e.bias {
                Some(bias) => E::load_n(s, bias.as_ptr().add(j), width),
                None => s.splat(0.0),
            };
            for r in 0..rows {
                let v = s.add(number(r, column), bias);
                let v = match e.act {
                    Act::None => v,
                    Act::Gelu => E::gelu(s, v),
                };
                let v = match e.residual {
                    Some(x) => s.add(E::load_n(s, x.row(row + r).add(j), width), v),
                    None => v,
                };
                E::store_n(s, y.row(row + r).add(j), v, width);
            }
        }
    }
}
