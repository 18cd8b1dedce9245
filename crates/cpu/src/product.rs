//! f32 products whose factors change from step to step, each as it is stored or transposed:
//! `y = residual + act(A B + bias)`. What training runs on; `gemm` is for weights packed at load.
//!
//! Invariant: as in `gemm`, each element of A B is one chain of fused multiply-adds over k = 0, 1, .., K - 1,
//! begun at zero, and never divided among threads. So the bits of an element depend on its row of A and its
//! column of B alone, and with row-major weights a linear has the bits that it has with packed ones.
//!
//! Order of work, after Goto and van de Geijn (2008): a task takes a block of rows and a group of panels of 32
//! columns. Slice by slice of at most `DEPTH` k it packs the rows (L2); panel by panel it packs the columns'
//! slice (L1) and passes all strips of rows over it. The sums of the group wait in L2 for the next slice.
//! Every element of B is packed once for a block of rows, every one of A once for a group.

mod pack;
mod sums;

use super::Cpu;
use super::gemm::{Epilogue, Split, finish};
use super::isa::Kernel;
use super::simd::{LANES, Simd};
use super::tile::{Begin, Feed, PANEL, strip};
use super::view::{Rows, RowsMut};
use core::ops::Range;
use plan::CpuKernel;

pub use sums::column_sums;

/// Most k of a slice, whole vectors, and the stride of the packed rows: not a multiple of a page.
const DEPTH: usize = 352;
const STRIDE: usize = DEPTH + 16;
/// Most rows of a task: whole tiles of 14 and of 6 rows; where tiles have 4, the last has 2 and 2 of padding.
const BLOCK: usize = 294;
/// Most panels of a task where K has several slices.
const GROUP: usize = 12;

/// f32 of packed rows, of a panel's packed slice, of sums.
const ROWS: usize = (BLOCK + 2) * STRIDE;
const SLICE: usize = DEPTH * PANEL;
const SUMS: usize = BLOCK * GROUP * PANEL;
/// f32 of workspace per thread, whole cache lines.
const EACH: usize = ROWS + SLICE + SUMS;

const _: () = assert!(BLOCK.is_multiple_of(14) && BLOCK.is_multiple_of(6));
const _: () = assert!(DEPTH.is_multiple_of(LANES) && EACH.is_multiple_of(LANES));

/// Bytes of workspace of each thread.
pub const WORKSPACE_BYTES: usize = CpuKernel::PRODUCT_BYTES as usize;

const _: () = assert!(4 * EACH == WORKSPACE_BYTES);

/// Multiply-adds below which a product takes less time than waking a thread: some microseconds.
const ALONE: usize = 64 * 1024;

/// A factor of a product.
#[derive(Clone, Copy)]
pub enum Factor<'a> {
    /// The matrix.
    Stored(Rows<'a>),
    /// The matrix with rows and columns exchanged.
    Transposed(Rows<'a>),
}

impl Factor<'_> {
    /// Rows and columns of the factor, after the exchange if there is one.
    pub fn shape(self) -> (usize, usize) {
        match self {
            Factor::Stored(x) => (x.rows(), x.cols()),
            Factor::Transposed(x) => (x.cols(), x.rows()),
        }
    }
}

/// y (M, N) = residual + act(a (M, K) b (K, N) + bias). `workspace` holds `WORKSPACE_BYTES` for each thread. The
/// residual may be exactly `y`, which adds to what stands there; `a` and `b` must not overlap `y`. Panics on
/// sizes that do not fit together.
pub fn product(
    cpu: &Cpu,
    a: Factor<'_>,
    b: Factor<'_>,
    epilogue: Epilogue<'_>,
    y: RowsMut<'_>,
    workspace: &mut [f32],
) {
    let ((m, k), n) = (a.shape(), y.cols());
    assert_eq!(y.rows(), m, "rows of y");
    assert_eq!(b.shape(), (k, n), "shape of b");
    assert!(epilogue.bias.is_none_or(|b| b.len() == n), "bias of {n}");
    let fits = |r: Rows<'_>| r.rows() == m && r.cols() == n;
    assert!(epilogue.residual.is_none_or(fits), "residual of ({m}, {n})");
    assert!(workspace.len() >= EACH * cpu.threads(), "workspace for {} threads", cpu.threads());
    let job = Job { a, b, k, epilogue, y: &y };
    let split = split((m, k, n), cpu.threads(), cpu.isa().tile_rows());
    let scratch = workspace.as_mut_ptr() as usize;
    cpu.pool().run(split.tasks(), &|task, worker| {
        let (rows, panels) = split.task(task);
        // Worker indices of one run are distinct and below `threads()`.
        let scratch = (scratch as *mut f32).wrapping_add(worker * EACH);
        cpu.isa().run(Task { job, rows, panels, scratch });
    });
}

/// y += a b: adds to what stands in y. `workspace` as for [`product`].
pub fn add_product(cpu: &Cpu, a: Factor<'_>, b: Factor<'_>, y: RowsMut<'_>, workspace: &mut [f32]) {
    // SAFETY: y's own rows, which `product` reads where it is about to write.
    let residual = unsafe { Rows::from_raw(y.row(0), y.rows(), y.cols(), y.ld()) };
    product(cpu, a, b, Epilogue { residual: Some(residual), ..Default::default() }, y, workspace);
}

/// Blocks of rows where there are several; otherwise the threads share the panels, so that each is packed once.
fn split((m, k, n): (usize, usize, usize), threads: usize, height: usize) -> Split {
    let panels = n.div_ceil(PANEL);
    let groups = if k > DEPTH { panels.div_ceil(GROUP) } else { 1 };
    if m.saturating_mul(n).saturating_mul(k) <= ALONE {
        return Split::new(m, panels, 1, height, BLOCK, groups);
    }
    match m <= BLOCK && panels >= threads {
        true => Split::new(m, panels, 1, height, BLOCK, groups.next_multiple_of(threads)),
        false => Split::new(m, panels, threads, height, BLOCK, groups),
    }
}

/// The operands of a product.
#[derive(Clone, Copy)]
struct Job<'a> {
    a: Factor<'a>,
    b: Factor<'a>,
    k: usize,
    epilogue: Epilogue<'a>,
    y: &'a RowsMut<'a>,
}

/// One task, for `Isa::run`. `scratch` is `EACH` f32 of this worker's own.
struct Task<'a> {
    job: Job<'a>,
    rows: Range<usize>,
    panels: Range<usize>,
    scratch: *mut f32,
}

impl Kernel for Task<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let k = self.job.k;
        let slices = k.div_ceil(DEPTH).max(1);
        let depth = k.div_ceil(slices).next_multiple_of(LANES);
        for slice in 0..slices {
            let ks = (slice * depth).min(k)..((slice + 1) * depth).min(k);
            // SAFETY: the scratch begins with room for BLOCK rows of STRIDE; the rows and k lie in a.
            unsafe { pack::rows(s, self.job.a, &self.rows, &ks, self.scratch) };
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
        let (job, count) = (&self.job, self.rows.len());
        let b = self.scratch.wrapping_add(ROWS);
        let columns = panel * PANEL..job.y.cols().min((panel + 1) * PANEL);
        // SAFETY: room for DEPTH rows of PANEL; these k and columns lie in b.
        unsafe { pack::panel(s, job.b, &columns, ks, b) };
        let begin = if more { Begin::Sums } else { Begin::Zero };
        let sums = self.scratch.wrapping_add(ROWS + SLICE);
        for row in (0..count).step_by(S::ROWS) {
            let rows = S::ROWS.min(count - row);
            let a = self.scratch.wrapping_add(row * STRIDE);
            // With one slice the sums go on at once: one strip's room in L1 does for all.
            let at = if more || !last { ((panel - self.panels.start) * BLOCK + row) * PANEL } else { 0 };
            let sum = sums.wrapping_add(at);
            // SAFETY: a strip of packed rows (the tile's padding rows are zeroed and inside the block), one
            // slice of one panel, and the strip's sums, whose rows and columns are this task's.
            unsafe {
                let feeds = self.feeds::<S>(panel, row, ks, last);
                let shape = (rows, columns.len().div_ceil(LANES));
                strip::<S, STRIDE, 2>(s, shape, ks.len(), a, b, sum, PANEL, begin, &feeds);
                if last {
                    finish(s, (&job.epilogue, job.y), self.rows.start + row, rows, panel, sum);
                }
            }
        }
    }

    /// What to ask for during one strip: the part of y that it will write, and its share of the next panel.
    #[inline(always)]
    fn feeds<S: Simd>(&self, panel: usize, row: usize, ks: &Range<usize>, last: bool) -> [Feed; 2] {
        let y = self.job.y;
        let out = Feed {
            at: y.row(self.rows.start + row).wrapping_add(panel * PANEL),
            step: y.ld(),
            count: S::ROWS,
            hop: LANES,
            lines: if last { PANEL / LANES * S::ROWS } else { 0 },
        };
        let next = if panel + 1 < self.panels.end { panel + 1 } else { self.panels.start };
        let columns = next * PANEL..(next + 1) * PANEL;
        let part = (row / S::ROWS, self.rows.len().div_ceil(S::ROWS));
        [out, pack::ask(self.job.b, &columns, ks, part)]
    }
}
