//! bf16 `y = x W^T` with bias, activation and residual, over weights laid in tiles once at load; sums in f32, one
//! rounding at the end.
//!
//! Invariant: here each element of `x W^T` is one chain of f32 fused multiply-adds, begun at zero, over k = 1, 0, 3, 2,
//! .., which is the order of AVX512-BF16's dot products of pairs: the bits of a row depend on that row and the weights,
//! and with FMA not on the instructions (but where a sum is below 2^-126, see `dot::Pairs`). Where the tiles of AMX
//! are used, `gemm_bf16_amx` takes over: with other bits, under the same rule.
//!
//! Weights lie as `plan::TILE_STEP` says: panels of 32 columns of y, and in them steps of 32 k, two tiles each.
//!
//! Order of work: as in `gemm`, but rows and panels are widened into the workspace, slice by slice; dot products take
//! panels as they lie.

use super::element::Bf16;
use super::gemm::{Epilogue, Job, Split, finish};
use super::isa::{Isa, Kernel};
use super::simd::{LANES, Simd};
use super::tile::{Begin, PANEL, strip};
use super::{Cpu, Rows, RowsMut};
use core::ops::Range;
use exec::tiles::{self, STEP};
use plan::CpuKernel;

/// Elements of a tile.
const TILE: usize = STEP * LANES;

/// Most k per slice, the stride of the widened rows, most rows of a task and most panels where K has several
/// slices: as `gemm` has them.
pub(super) const DEPTH: usize = 768;
const STRIDE: usize = DEPTH + 16;
pub(super) const BLOCK: usize = 168;
pub(super) const GROUP: usize = 8;

/// Bytes of workspace of each thread.
pub const WORKSPACE_BYTES: usize = CpuKernel::TILES_BYTES as usize;

const _: () = assert!(4 * EACH == WORKSPACE_BYTES);

/// f32 of workspace per thread, whole cache lines: the widened rows, a group's sums, a panel's widened slice. Tiles
/// take less.
pub(super) const EACH: usize = BLOCK * (STRIDE + GROUP * PANEL) + DEPTH * PANEL;

#[cfg(target_arch = "x86_64")]
const _: () = assert!(super::gemm_bf16_amx::EACH <= 4 * EACH);

/// What follows the product.
pub type EpilogueBf16<'a> = Epilogue<'a, Bf16>;

/// A weight of rows of `k` elements, in tiles.
pub fn packed(w: &[f32], k: usize) -> Vec<Bf16> {
    tiles::packed(w, k).into_iter().map(Bf16).collect()
}

/// y (M, N) = residual + act(x (M, K) W^T + bias), rounded once. `w` is in tiles; `workspace` holds `WORKSPACE_BYTES` for
/// each thread. `x` and `y` must not overlap. Panics on sizes that do not fit together.
pub fn linear(
    cpu: &Cpu,
    x: Rows<'_, Bf16>,
    w: &[Bf16],
    epilogue: EpilogueBf16<'_>,
    y: RowsMut<'_, Bf16>,
    workspace: &mut [f32],
) {
    let (k, n) = (x.cols(), y.cols());
    assert_eq!(w.len(), n.div_ceil(PANEL) * tiles::panel(k), "weights of ({n}, {k}) in tiles");
    assert!(workspace.len() >= EACH * cpu.threads(), "workspace for {} threads", cpu.threads());
    let job = Job::new(x, w, epilogue, &y);
    #[cfg(target_arch = "x86_64")]
    if cpu.isa().has_tiles() && k > 0 {
        use super::{amx::Tiles, gemm_bf16_amx};
        // SAFETY: this CPU has tiles.
        return unsafe { gemm_bf16_amx::linear::<Tiles>(cpu, job, None, workspace.as_mut_ptr(), 4 * EACH) };
    }
    linear_by(cpu, Form::of(cpu.isa()), job, workspace);
}

/// `linear` after its checks, without tiles.
pub(super) fn linear_by(cpu: &Cpu, form: Form, job: Job<'_, Bf16>, workspace: &mut [f32]) {
    assert!(workspace.len() >= cpu.threads() * EACH, "workspace for {} threads", cpu.threads());
    let (m, k, panels) = (job.x.rows(), job.x.cols(), job.y.cols().div_ceil(PANEL));
    let fewest = if k > DEPTH { panels.div_ceil(GROUP) } else { 1 };
    let split = Split::new(m, panels, cpu.threads(), cpu.isa().tile_rows(), BLOCK, fewest);
    let scratch = workspace.as_mut_ptr() as usize;
    cpu.pool().run(split.tasks(), &|task, worker| {
        let (rows, panels) = split.task(task);
        // Worker indices of one run are distinct and below `threads()`.
        let scratch = (scratch as *mut f32).wrapping_add(worker * EACH);
        cpu.isa().run(Task { form, job, rows, panels, scratch });
    });
}

/// What makes the sums. A value proves that this CPU has the instructions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Form {
    /// Fused multiply-adds on the lanes.
    Lanes,
    /// Dot products of pairs.
    #[cfg(target_arch = "x86_64")]
    Dots,
}

impl Form {
    /// The faster one that `isa` has.
    pub(super) fn of(isa: Isa) -> Form {
        match isa.has_dots() {
            #[cfg(target_arch = "x86_64")]
            true => Form::Dots,
            // Of others nobody says true.
            #[cfg(not(target_arch = "x86_64"))]
            true => Form::Lanes,
            false => Form::Lanes,
        }
    }
}

/// A product of one block of rows, with the lanes `s`. `scratch` is `EACH` f32 of the caller's own.
#[inline(always)]
pub(super) fn block<S: Simd>(s: S, form: Form, job: Job<'_, Bf16>, scratch: *mut f32) {
    let (rows, panels) = (0..job.x.rows(), job.y.cols().div_ceil(PANEL));
    assert!(rows.len() <= BLOCK, "at most {BLOCK} rows");
    let group = if job.x.cols() > DEPTH { GROUP } else { panels.max(1) };
    for first in (0..panels).step_by(group) {
        let panels = first..panels.min(first + group);
        Task { form, job, rows: rows.clone(), panels, scratch }.run(s);
    }
}

/// One task, for `Isa::run`. `scratch` is `EACH` f32 of this worker's own.
struct Task<'a> {
    form: Form,
    job: Job<'a, Bf16>,
    rows: Range<usize>,
    panels: Range<usize>,
    scratch: *mut f32,
}

impl Kernel for Task<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        match self.form {
            Form::Lanes => {}
            #[cfg(target_arch = "x86_64")]
            // SAFETY: the form proves the instructions; the scratch is this worker's own.
            Form::Dots => return unsafe { self.dots() },
        }
        for ks in slices(self.job.x.cols()) {
            for row in (0..self.rows.len()).step_by(S::ROWS) {
                // SAFETY: the scratch begins with BLOCK rows of STRIDE.
                unsafe { self.widen_rows(s, row, &ks) };
            }
            for panel in self.panels.clone() {
                // SAFETY: the rows of this slice were widened just now.
                unsafe { self.panel(s, panel, &ks) };
            }
        }
    }
}

/// The slices of k: whole steps, but for the end; one for no columns.
pub(super) fn slices(k: usize) -> impl Iterator<Item = Range<usize>> {
    let depth = k.div_ceil(k.div_ceil(DEPTH).max(1)).next_multiple_of(STEP).max(STEP);
    (0..k.max(1)).step_by(depth).map(move |start| start..k.min(start + depth))
}

impl Task<'_> {
    /// # Safety
    /// The CPU has AVX-512 with BF16; the task's scratch is this thread's own.
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
    unsafe fn dots(self) {
        use super::{dot::Pairs, gemm_dots::Strips, simd_x86::Avx512};
        let Task { job, rows, panels, scratch, .. } = self;
        // SAFETY: as the caller promises.
        unsafe {
            Strips { job, scales: None, rows, panels, scratch }.run(Avx512::assume(), Pairs::assume());
        }
    }

    /// Adds the slice `ks` of one panel to the sums of all rows; the last slice goes on to y.
    ///
    /// # Safety
    /// `run`'s alone: the scratch begins with the rows' slice.
    #[inline(always)]
    unsafe fn panel<S: Simd>(&self, s: S, panel: usize, ks: &Range<usize>) {
        let (more, last) = (ks.start > 0, ks.end == self.job.x.cols());
        let begin = if more { Begin::Sums } else { Begin::Zero };
        let sums = self.scratch.wrapping_add(BLOCK * STRIDE);
        let b = sums.wrapping_add(BLOCK * GROUP * PANEL);
        // SAFETY: the scratch ends with room for a slice of a panel.
        unsafe { self.widen_panel(s, panel, ks, b) };
        for row in (0..self.rows.len()).step_by(S::ROWS) {
            let rows = S::ROWS.min(self.rows.len() - row);
            let a = self.scratch.wrapping_add(row * STRIDE);
            // With one slice the sums go on at once: one strip's room in L1 does for all.
            let at = if more || !last { ((panel - self.panels.start) * BLOCK + row) * PANEL } else { 0 };
            let sum = sums.wrapping_add(at);
            // SAFETY: a strip of widened rows (the tile's padding rows are zeros inside the block), one slice of
            // one panel, and the strip's sums, whose rows are this task's.
            unsafe {
                strip::<S, STRIDE, 0>(s, (rows, 2), ks.len().next_multiple_of(2), a, b, sum, PANEL, begin, &[]);
                if last {
                    finish(s, self.job.out(), self.rows.start + row, rows, panel, sum);
                }
            }
        }
    }

    /// Columns `ks` of a strip of rows of x as f32 rows of STRIDE, the second of each pair first, with zero rows up to the
    /// tile's height.
    ///
    /// # Safety
    /// The strip's rows of STRIDE begin at `row` in the scratch.
    #[inline(always)]
    unsafe fn widen_rows<S: Simd>(&self, s: S, row: usize, ks: &Range<usize>) {
        for r in row..row + S::ROWS {
            let from = self.job.x.row(self.rows.start + r).cast::<u16>().wrapping_add(ks.start);
            let to = self.scratch.wrapping_add(r * STRIDE);
            for k in (0..ks.len()).step_by(LANES) {
                let left = if r < self.rows.len() { (ks.len() - k).min(LANES) } else { 0 };
                let mut pairs = [0_u32; LANES / 2];
                let from = from.wrapping_add(k);
                // SAFETY: `left` columns are left of this row of x; DEPTH and STRIDE are whole vectors.
                unsafe {
                    match left {
                        LANES => pairs = from.cast::<[u32; LANES / 2]>().read_unaligned(),
                        _ => from.copy_to_nonoverlapping(pairs.as_mut_ptr().cast(), left),
                    }
                    let turned = pairs.map(|pair| pair.rotate_left(16));
                    s.store(to.add(k), s.widen(turned.as_ptr().cast()));
                }
            }
        }
    }

    /// A slice of a panel as f32, its 32 values of each k together, the second k of each pair first.
    ///
    /// # Safety
    /// `to` has room for `ks` rows of PANEL, whole steps.
    #[inline(always)]
    unsafe fn widen_panel<S: Simd>(&self, s: S, panel: usize, ks: &Range<usize>, to: *mut f32) {
        let steps = self.job.x.cols().div_ceil(STEP);
        let from = self.job.w.as_ptr().wrapping_add((panel * steps + ks.start / STEP) * 2 * TILE);
        for line in 0..ks.len().next_multiple_of(STEP) {
            let (step, half, pair) = (line / STEP, line % STEP / LANES, line % LANES);
            let at = to.wrapping_add((step * STEP + 2 * pair) * PANEL + half * LANES);
            // SAFETY: line `pair` of a tile of this step; rows 2 pair and 2 pair + 1 of the step.
            unsafe {
                let [even, odd] = s.widen_pairs(from.add(line * STEP).cast());
                s.store(at, odd);
                s.store(at.add(PANEL), even);
            }
        }
    }
}
