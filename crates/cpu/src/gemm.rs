//! f32 `y = x W^T` with bias, activation and residual, over weights packed once at load.
//!
//! Invariant: each element of `x W^T` is one chain of fused multiply-adds over k = 0, 1, ..,
//! K - 1, begun at zero. Cutting K into blocks stores and reloads that f32 sum exactly; the
//! cuts of rows and columns only say who computes what. So the bits of a row depend on that row
//! and the weights: not on M, the row's position, the threads, or (with FMA) the instructions.
//! Where the tiles of AMX are used, `gemm_amx` takes over: with other bits, under the same rule.
//!
//! Packed weights: panels of 32 columns; panel p holds, for k in 0..K, the 32 values
//! `W[32 p .. 32 p + 32][k]`, zeros past N. One layout for all instruction sets.
//!
//! Order of work: a task takes a block of rows and a group of panels. Slice by slice of at most
//! `DEPTH` k, it copies the rows to its workspace with a constant stride (L2) and streams the
//! panels past them; a panel's slice stays in L1 or L2 while all strips of the block pass.

use super::Cpu;
use super::Isa;
#[cfg(target_arch = "x86_64")]
use super::amx::Tiles;
use super::element::Element;
use super::isa::Kernel;
use super::simd::{LANES, Simd};
use super::tile::{Begin, Feed, strip};
use super::view::{Rows, RowsMut};
use core::ops::Range;
use plan::InstructionSet;

pub use super::tile::PANEL;

/// Most k per slice of a panel, and the row stride of the copied rows: not a multiple of a
/// page, so that the rows of a strip do not share cache sets.
const DEPTH: usize = 768;
const STRIDE: usize = DEPTH + 16;
/// Most rows of a task. A multiple of 14, the tallest tile; all tiles' heights are even.
const BLOCK: usize = 168;
/// Most panels of a task where K has several slices: their sums wait in the workspace. Rows,
/// sums and one panel's slice take 0.8 MB of L2. (16 is 2 to 3 % quicker for K > 768, at 172 032 B more.)
const GROUP: usize = 8;

/// Bytes of workspace of each thread.
pub fn workspace_bytes(isa: Isa) -> usize {
    isa.set().gemm_f32() as usize
}

// A slice of a block of rows, and a group's sums.
const _: () = assert!(4 * BLOCK * (STRIDE + GROUP * PANEL) <= InstructionSet::Portable.gemm_f32() as usize);
#[cfg(target_arch = "x86_64")]
const _: () = assert!(super::gemm_amx::EACH <= InstructionSet::Amx.gemm_f32() as usize);

/// What follows the product, in this order: `+ bias`, `act`, `residual +`.
#[derive(Clone, Copy, Default)]
pub struct Epilogue<'a, E = f32> {
    /// N values, added to each row.
    pub bias: Option<&'a [E]>,
    /// Applied after the bias.
    pub act: Act,
    /// (M, N), added last. It may be exactly `y`.
    pub residual: Option<Rows<'a, E>>,
}

/// The activation of an epilogue.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Act {
    /// None.
    #[default]
    None,
    /// x Phi(x), exact (erf).
    Gelu,
    /// max(x, 0).
    Relu,
}

/// f32 values of a packed (n, k) weight.
pub const fn packed_len(n: usize, k: usize) -> usize {
    n.div_ceil(PANEL) * PANEL * k
}

/// Packs up to 32 consecutive rows of a row-major (N, K) weight into one panel, so that a file
/// can be packed while it is read. `rows` holds `rows.len() / k` rows; `out` holds 32 k values.
pub fn pack_panel(rows: &[f32], k: usize, out: &mut [f32]) {
    assert!(rows.len() <= PANEL * k && out.len() == PANEL * k, "a panel is 32 x {k}");
    if k == 0 {
        return;
    }
    assert!(rows.len().is_multiple_of(k), "whole rows of {k}");
    // Square tiles: both sides stay in L1.
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

/// y (M, N) = residual + act(x (M, K) W^T + bias). `w` is packed; `workspace` holds
/// `workspace_bytes` for each thread. `x` and `y` must not overlap. Panics on sizes that do
/// not fit together.
pub fn linear(
    cpu: &Cpu,
    x: Rows<'_>,
    w: &[f32],
    epilogue: Epilogue<'_>,
    y: RowsMut<'_>,
    workspace: &mut [f32],
) {
    let (m, k, n) = (x.rows(), x.cols(), y.cols());
    assert_eq!(w.len(), packed_len(n, k), "packed weights of ({n}, {k})");
    let each = workspace_bytes(cpu.isa()) / 4;
    assert!(workspace.len() >= each * cpu.threads(), "workspace for {} threads", cpu.threads());
    let job = Job::new(x, w, epilogue, &y);
    #[cfg(target_arch = "x86_64")]
    if cpu.isa().has_tiles() && k > 0 {
        // SAFETY: the instruction set has tiles and AVX-512; the workspace was checked.
        return unsafe { super::gemm_amx::linear::<Tiles>(cpu, job, workspace.as_mut_ptr(), 4 * each) };
    }
    let panels = n.div_ceil(PANEL);
    let fewest = if k > DEPTH { panels.div_ceil(GROUP) } else { 1 };
    let split = Split::new(m, panels, cpu.threads(), cpu.isa().tile_rows(), BLOCK, fewest);
    let scratch = workspace.as_mut_ptr() as usize;
    cpu.pool().run(split.tasks(), &|task, worker| {
        let (rows, panels) = split.task(task);
        let scratch = scratch as *mut f32;
        // Worker indices of one run are distinct and below `threads()`.
        let scratch = scratch.wrapping_add(worker * each);
        cpu.isa().run(Task { job, rows, panels, scratch });
    });
}

/// How the output is cut into tasks: row blocks times groups of panels.
pub(super) struct Split {
    m: usize,
    panels: usize,
    height: usize,
    blocks: usize,
    groups: usize,
}

impl Split {
    /// Blocks of at most `most` rows, in whole tiles of `height`; at least `fewest` groups.
    pub(super) fn new(
        m: usize,
        panels: usize,
        threads: usize,
        height: usize,
        most: usize,
        fewest: usize,
    ) -> Split {
        // As many blocks as a multiple of the threads, which differ by one tile.
        let blocks = m.div_ceil(most / height * height).next_multiple_of(threads).min(m.div_ceil(height));
        // Few rows: the threads share the panels too, each copying the rows for itself.
        let shares = match blocks {
            0 => 0,
            _ if threads == 1 || blocks >= 2 * threads => 1,
            _ => (2 * threads).div_ceil(blocks),
        };
        Split { m, panels, height, blocks, groups: shares.max(fewest).min(panels) }
    }

    pub(super) fn tasks(&self) -> usize {
        self.blocks * self.groups
    }

    /// The rows and panels of one task.
    pub(super) fn task(&self, task: usize) -> (Range<usize>, Range<usize>) {
        let (block, group) = (task / self.groups, task % self.groups);
        let row = |b: usize| self.m.min(b * self.m.div_ceil(self.height) / self.blocks * self.height);
        let panel = |g: usize| g * self.panels / self.groups;
        (row(block)..row(block + 1), panel(group)..panel(group + 1))
    }
}

/// The operands of a product.
#[derive(Clone, Copy)]
pub(super) struct Job<'a, E = f32> {
    pub(super) x: Rows<'a, E>,
    pub(super) w: &'a [E],
    pub(super) epilogue: Epilogue<'a, E>,
    pub(super) y: &'a RowsMut<'a, E>,
}

impl<'a, E: Element> Job<'a, E> {
    /// Panics where sizes do not fit together, but for those of `w`, which its layout knows.
    pub(super) fn new(x: Rows<'a, E>, w: &'a [E], epilogue: Epilogue<'a, E>, y: &'a RowsMut<'a, E>) -> Self {
        let (m, n) = (x.rows(), y.cols());
        assert_eq!(y.rows(), m, "rows of y");
        assert!(epilogue.bias.is_none_or(|b| b.len() == n), "bias of {n}");
        let fits = |r: Rows<'_, E>| r.rows() == m && r.cols() == n;
        assert!(epilogue.residual.is_none_or(fits), "residual of ({m}, {n})");
        Self { x, w, epilogue, y }
    }

    /// What `finish` needs of it.
    pub(super) fn out(&self) -> (&Epilogue<'a, E>, &RowsMut<'a, E>) {
        (&self.epilogue, self.y)
    }
}

/// One task, for `Isa::run`. `scratch` is this worker's own.
struct Task<'a> {
    job: Job<'a>,
    rows: Range<usize>,
    panels: Range<usize>,
    scratch: *mut f32,
}

impl Kernel for Task<'_> {
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

impl Task<'_> {
    /// Adds the slice `ks` of one panel to the sums of all rows; the last slice goes on to y.
    #[inline(always)]
    fn panel<S: Simd>(&self, s: S, panel: usize, ks: &Range<usize>, more: bool, last: bool) {
        let (k, count) = (self.job.x.cols(), self.rows.len());
        let b = self.job.w.as_ptr().wrapping_add((panel * k + ks.start) * PANEL);
        let begin = if more { Begin::Sums } else { Begin::Zero };
        for row in (0..count).step_by(S::ROWS) {
            let rows = S::ROWS.min(count - row);
            let a = self.scratch.wrapping_add(row * STRIDE);
            if panel == self.panels.start {
                // SAFETY: the scratch holds BLOCK rows of STRIDE; these rows and columns lie in x.
                unsafe { copy_rows::<S>(self.job.x, self.rows.start + row, rows, ks, a) };
            }
            let sums = self.scratch.wrapping_add(BLOCK * STRIDE);
            // With one slice the sums go on at once: one strip's room in L1 does for all.
            let at = if more || !last { ((panel - self.panels.start) * BLOCK + row) * PANEL } else { 0 };
            let sum = sums.wrapping_add(at);
            // SAFETY: a strip of copied rows (the tile's padding rows are zeroed and inside the
            // block), one slice of one panel, and the strip's sums, whose rows are this task's.
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

/// f32 of a cache line.
const LINE: usize = 16;

impl Task<'_> {
    /// What to ask for during one strip: first the part of y that it will write, then its share of what
    /// comes next: the rows of the next strip while strips are still copied, the next panel after that.
    #[inline(always)]
    fn feeds<S: Simd>(&self, panel: usize, row: usize, ks: &Range<usize>, last: bool) -> [Feed; 2] {
        let (k, count, job) = (self.job.x.cols(), self.rows.len(), &self.job);
        let out = Feed {
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
            return [out, Feed { at, step: job.x.ld(), count: S::ROWS, hop: LINE, lines }];
        }
        let lines = (ks.len() * PANEL / LINE).div_ceil(count.div_ceil(S::ROWS));
        let slice = job.w.as_ptr().wrapping_add(((panel + 1) * k + ks.start) * PANEL);
        let at = slice.wrapping_add(row / S::ROWS * lines * LINE);
        [out, Feed { at, step: LINE, count: lines, hop: 0, lines }]
    }
}

/// Copies columns `ks` of a strip of rows of x to rows of STRIDE, with zero rows up to the tile's height.
///
/// # Safety
/// The rows and columns lie in x, at most the tile's height and DEPTH; `to` has room for them.
#[inline(always)]
unsafe fn copy_rows<S: Simd>(x: Rows<'_>, row: usize, rows: usize, ks: &Range<usize>, to: *mut f32) {
    for r in 0..S::ROWS {
        let to = to.wrapping_add(r * STRIDE);
        // SAFETY: as the caller promises.
        unsafe {
            match r < rows {
                true => to.copy_from_nonoverlapping(x.row(row + r).wrapping_add(ks.start), ks.len()),
                false => to.write_bytes(0, ks.len()),
            }
        }
    }
}

/// The epilogue of one strip of one panel, from its sums to y.
///
/// # Safety
/// `sum` holds `rows` rows of 32; rows `row..row + rows` of y belong to this task.
#[inline(always)]
pub(super) unsafe fn finish<S: Simd, E: Element>(
    s: S,
    out: (&Epilogue<'_, E>, &RowsMut<'_, E>),
    row: usize,
    rows: usize,
    panel: usize,
    sum: *const f32,
) {
    // SAFETY: as the caller promises.
    unsafe { finish_by(s, out, row, rows, panel, |r, column| s.load(sum.add(r * PANEL + column))) };
}

/// The same, from sixteen numbers of a row of the strip, from a column of the panel on.
///
/// # Safety
/// Rows `row..row + rows` of y belong to this task.
#[inline(always)]
pub(super) unsafe fn finish_by<S: Simd, E: Element>(
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
        // SAFETY: columns j..j + width are inside bias, residual and y; rows as promised.
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
                    Act::Relu => s.max(s.splat(0.0), v),
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
