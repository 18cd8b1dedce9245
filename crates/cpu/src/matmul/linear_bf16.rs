//! bf16 GEMM `y = x W^T` with bias, activation and residual, over weights that are packed into tiles once when
//! they are loaded. Sums are f32 and are rounded to bf16 once, at the end.
//!
//! Invariant: each element of `x W^T` is one chain of f32 fused multiply-adds with initial value zero, over k in
//! the order 1, 0, 3, 2, .., in which the dot products of pairs of AVX512-BF16 add. So the bits of a row depend
//! on that row and on the weights and, among instruction sets with FMA, not on the instruction set (except where
//! a sum is below 2^-126, see `dot::Pairs`). On CPUs with AMX `linear_bf16_amx` computes the product: its bits
//! differ, but also depend on the row and the weights only.
//!
//! Layout of the weights: see `plimsoll_plan::TILE_STEP`. Each panel of 32 columns of y is stored in steps of 32 k, two
//! tiles per step.
//!
//! Loop order: as in `linear_f32`, but each slice of rows and panels is converted to f32 in the workspace first. The
//! kernel of dot products (`linear_dots`) reads panels without conversion.

use crate::element::Bf16;
use crate::matmul::linear_f32::{Epilogue, GemmCall, Split, finish};
use crate::matmul::register_tile::{Begin, PANEL, strip};
#[cfg(target_arch = "x86_64")]
use crate::rows::elementwise::Gate;
use crate::simd::isa::{Isa, Kernel};
use crate::simd::{LANES, Simd};
use crate::{Cpu, Rows, RowsMut};
use core::ops::Range;
use plimsoll_exec::tiles::{self, STEP};
use plimsoll_plan::CpuKernel;

/// Number of elements of a tile.
const TILE: usize = STEP * LANES;

/// Maximum length of a slice of K, stride of the widened rows, maximum rows of a task, and maximum panels of a
/// task where K has several slices: the values of `linear_f32`.
pub(crate) const DEPTH: usize = 768;
const STRIDE: usize = DEPTH + 16;
pub(crate) const BLOCK: usize = 168;
pub(crate) const GROUP: usize = 8;

/// Bytes of workspace per thread.
pub const WORKSPACE_BYTES: usize = CpuKernel::TILES_BYTES as usize;

const _: () = assert!(4 * EACH == WORKSPACE_BYTES);

/// f32 of workspace per thread, a whole number of cache lines: the widened rows, the sums of a group of panels,
/// and a widened slice of a panel. The kernel on AMX tiles needs less.
pub(crate) const EACH: usize = BLOCK * (STRIDE + GROUP * PANEL) + DEPTH * PANEL;

#[cfg(target_arch = "x86_64")]
const _: () = assert!(crate::matmul::linear_bf16_amx::EACH <= 4 * EACH);

/// Operations applied to the product: bias, activation and residual in bf16.
pub type EpilogueBf16<'a> = Epilogue<'a, Bf16>;

/// Packs a row-major weight with rows of `k` elements into bf16 tiles.
pub fn packed(w: &[f32], k: usize) -> Vec<Bf16> {
    tiles::packed(w, k).into_iter().map(Bf16).collect()
}

/// Computes y (M, N) = residual + act(x (M, K) W^T + bias), rounded once. `w` is packed into tiles (see
/// [`packed`]); `workspace` holds `WORKSPACE_BYTES` for each thread. `x` and `y` must not overlap. Panics if the
/// sizes are inconsistent.
pub fn linear(
    cpu: &Cpu,
    x: Rows<'_, Bf16>,
    w: &[Bf16],
    epilogue: EpilogueBf16<'_>,
    y: RowsMut<'_, Bf16>,
    workspace: &mut [f32],
) {
    let k = x.cols();
    let n = y.cols();
    assert_eq!(w.len(), n.div_ceil(PANEL) * tiles::panel(k), "weights of ({n}, {k}) in tiles");
    assert!(workspace.len() >= EACH * cpu.threads(), "workspace for {} threads", cpu.threads());
    let job = GemmCall::new(x, w, epilogue, &y);
    #[cfg(target_arch = "x86_64")]
    if cpu.isa().has_tiles() && k > 0 {
        use crate::{matmul::linear_bf16_amx, simd::amx::Tiles};
        let form = linear_bf16_amx::Form::Plain;
        // SAFETY: this CPU has tile registers and AVX512-BF16; the size of the workspace was checked above.
        return unsafe { linear_bf16_amx::linear::<Tiles>(cpu, job, form, workspace.as_mut_ptr(), 4 * EACH) };
    }
    linear_by(cpu, Instructions::of(cpu.isa()), job, workspace);
}

/// Computes the gated linear unit y (M, F) = f(s[.., ..F]) s[.., F..] of s = x (M, K) W^T + bias, rounded once. `w` has
/// 2F rows, packed into tiles; `bias` has 2F values. F is a multiple of 32, K at most 1 024; `workspace` as for
/// [`linear`]. Only on AMX tiles. Panics if the sizes are inconsistent or the CPU has no tiles.
#[cfg(target_arch = "x86_64")]
pub fn gated(
    cpu: &Cpu,
    x: Rows<'_, Bf16>,
    w: &[Bf16],
    bias: Option<&[Bf16]>,
    gate: Gate,
    y: RowsMut<'_, Bf16>,
    workspace: &mut [f32],
) {
    use crate::matmul::linear_bf16_amx::{self, Form};
    let job = gated_job(x, w, bias, &y);
    assert!(cpu.isa().has_tiles(), "a gate behind a matmul needs AMX tiles");
    assert!(workspace.len() >= EACH * cpu.threads(), "workspace for {} threads", cpu.threads());
    // SAFETY: this CPU has tile registers and AVX512-BF16; the size of the workspace was checked above.
    unsafe {
        let form = Form::Gated { gate, bias };
        linear_bf16_amx::linear::<crate::simd::amx::Tiles>(cpu, job, form, workspace.as_mut_ptr(), 4 * EACH);
    }
}

/// The operands of `gated` after its checks of their sizes.
#[cfg(target_arch = "x86_64")]
pub(crate) fn gated_job<'a>(
    x: Rows<'a, Bf16>,
    w: &'a [Bf16],
    bias: Option<&[Bf16]>,
    y: &'a RowsMut<'a, Bf16>,
) -> GemmCall<'a, Bf16> {
    let k = x.cols();
    let n = 2 * y.cols();
    assert!((1..=crate::matmul::linear_bf16_amx::LONGEST_GATED).contains(&k), "rows of {k} behind a gate");
    assert_eq!(w.len(), n.div_ceil(PANEL) * tiles::panel(k), "weights of ({n}, {k}) in tiles");
    assert!(bias.is_none_or(|bias| bias.len() == n), "bias of {n}");
    GemmCall::new(x, w, EpilogueBf16::default(), y)
}

/// `linear` after its checks, without AMX tiles.
pub(crate) fn linear_by(cpu: &Cpu, form: Instructions, job: GemmCall<'_, Bf16>, workspace: &mut [f32]) {
    assert!(workspace.len() >= cpu.threads() * EACH, "workspace for {} threads", cpu.threads());
    let m = job.x.rows();
    let k = job.x.cols();
    let panels = job.y.cols().div_ceil(PANEL);
    let fewest = if k > DEPTH { panels.div_ceil(GROUP) } else { 1 };
    let split = Split::new(m, panels, cpu.threads(), cpu.isa().tile_rows(), BLOCK, fewest);
    let scratch = workspace.as_mut_ptr() as usize;
    cpu.pool().run(split.tasks(), &|task, worker| {
        let (rows, panels) = split.task(task);
        // The workers of one run have distinct indices below `threads()`, so no two tasks share scratch.
        let scratch = (scratch as *mut f32).wrapping_add(worker * EACH);
        cpu.isa().run(GemmTile { form, job, rows, panels, scratch });
    });
}

/// Instructions that compute the sums. A value proves that this CPU has them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Instructions {
    /// Fused multiply-adds of f32 lanes.
    Lanes,
    /// Dot products of bf16 pairs (AVX512-BF16).
    #[cfg(target_arch = "x86_64")]
    Dots,
}

impl Instructions {
    /// The fastest form that `isa` supports.
    pub(crate) fn of(isa: Isa) -> Instructions {
        match isa.has_dots() {
            #[cfg(target_arch = "x86_64")]
            true => Instructions::Dots,
            // Only x86-64 has these dot products, so this arm is unreachable.
            #[cfg(not(target_arch = "x86_64"))]
            true => Instructions::Lanes,
            false => Instructions::Lanes,
        }
    }
}

/// One task, run by `Isa::run`. No other task uses the `EACH` f32 at `scratch` meanwhile.
struct GemmTile<'a> {
    form: Instructions,
    job: GemmCall<'a, Bf16>,
    rows: Range<usize>,
    panels: Range<usize>,
    scratch: *mut f32,
}

impl Kernel for GemmTile<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        match self.form {
            Instructions::Lanes => {}
            #[cfg(target_arch = "x86_64")]
            // SAFETY: the form proves the instructions; no other task uses the scratch.
            Instructions::Dots => return unsafe { self.dots() },
        }
        for ks in slices(self.job.x.cols()) {
            for row in (0..self.rows.len()).step_by(S::ROWS) {
                // SAFETY: the scratch begins with space for BLOCK rows of STRIDE f32.
                unsafe { self.widen_rows(s, row, &ks) };
            }
            for panel in self.panels.clone() {
                // SAFETY: the rows of this slice were widened above.
                unsafe { self.panel(s, panel, &ks) };
            }
        }
    }
}

/// The slices of K, each of whole steps except the last; one empty slice for K = 0, so that the epilogue still
/// runs.
pub(crate) fn slices(k: usize) -> impl Iterator<Item = Range<usize>> {
    let depth = k.div_ceil(k.div_ceil(DEPTH).max(1)).next_multiple_of(STEP).max(STEP);
    (0..k.max(1)).step_by(depth).map(move |start| start..k.min(start + depth))
}

impl GemmTile<'_> {
    /// Computes the task by dot products.
    ///
    /// # Safety
    /// The CPU must have AVX-512 with BF16, and no other thread may use the task's scratch.
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
    unsafe fn dots(self) {
        use crate::{matmul::linear_dots::Strips, simd::dot::Pairs, simd::x86::Avx512};
        let GemmTile { job, rows, panels, scratch, .. } = self;
        // SAFETY: guaranteed by the caller.
        unsafe {
            Strips { job, scales: None, rows, panels, scratch }.run(Avx512::assume(), Pairs::assume());
        }
    }

    /// Adds the products over the slice `ks` of one panel to the sums of all rows; after the last slice, applies
    /// the epilogue and writes y.
    ///
    /// # Safety
    /// Only for `run`: the scratch must begin with the widened rows of this slice.
    #[inline(always)]
    unsafe fn panel<S: Simd>(&self, s: S, panel: usize, ks: &Range<usize>) {
        let more = ks.start > 0;
        let last = ks.end == self.job.x.cols();
        let begin = if more { Begin::Sums } else { Begin::Zero };
        let sums = self.scratch.wrapping_add(BLOCK * STRIDE);
        let b = sums.wrapping_add(BLOCK * GROUP * PANEL);
        // SAFETY: behind the sums, the scratch has space for a widened slice of a panel.
        unsafe { self.widen_panel(s, panel, ks, b) };
        for row in (0..self.rows.len()).step_by(S::ROWS) {
            let rows = S::ROWS.min(self.rows.len() - row);
            let a = self.scratch.wrapping_add(row * STRIDE);
            // With one slice a strip's sums are finished immediately, so all strips share one buffer, which
            // stays in L1.
            let at = if more || !last { ((panel - self.panels.start) * BLOCK + row) * PANEL } else { 0 };
            let sum = sums.wrapping_add(at);
            // SAFETY: `a` is a strip of widened rows (the padding rows of the last tile are zeros inside the
            // block), `b` is one slice of one panel, and the strip's sums and output rows belong to this task.
            // An odd slice length is rounded up because the elements of a pair are swapped: the last k is stored
            // behind the zero of its pair.
            unsafe {
                strip::<S, STRIDE, 0>(s, (rows, 2), ks.len().next_multiple_of(2), a, b, sum, PANEL, begin, &[]);
                if last {
                    finish(s, self.job.out(), self.rows.start + row, rows, panel, sum);
                }
            }
        }
    }

    /// Converts columns `ks` of a strip of rows of x to f32 rows of STRIDE, with the elements of each pair
    /// swapped, and zeroes the rows up to the tile's height. Columns past the end are zero up to a whole vector.
    ///
    /// # Safety
    /// The scratch must have space for the strip's rows of STRIDE from `row` on.
    #[inline(always)]
    unsafe fn widen_rows<S: Simd>(&self, s: S, row: usize, ks: &Range<usize>) {
        for r in row..row + S::ROWS {
            let from = self.job.x.row(self.rows.start + r).cast::<u16>().wrapping_add(ks.start);
            let to = self.scratch.wrapping_add(r * STRIDE);
            for k in (0..ks.len()).step_by(LANES) {
                let left = if r < self.rows.len() { (ks.len() - k).min(LANES) } else { 0 };
                let mut pairs = [0_u32; LANES / 2];
                let from = from.wrapping_add(k);
                // SAFETY: `left` columns remain in this row of x; DEPTH and STRIDE are multiples of a vector.
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

    /// Converts a slice of a panel to f32: for each k its 32 values, with the rows of each pair of k swapped as
    /// in `widen_rows`.
    ///
    /// # Safety
    /// `to` must have space for the rows of `ks`, rounded up to whole steps, of PANEL f32 each.
    #[inline(always)]
    unsafe fn widen_panel<S: Simd>(&self, s: S, panel: usize, ks: &Range<usize>, to: *mut f32) {
        let steps = self.job.x.cols().div_ceil(STEP);
        let from = self.job.w.as_ptr().wrapping_add((panel * steps + ks.start / STEP) * 2 * TILE);
        for line in 0..ks.len().next_multiple_of(STEP) {
            let step = line / STEP;
            let half = line % STEP / LANES;
            let pair = line % LANES;
            let at = to.wrapping_add((step * STEP + 2 * pair) * PANEL + half * LANES);
            // SAFETY: line `pair` of one tile of this step is read; rows 2 pair and 2 pair + 1 of the step are
            // written.
            unsafe {
                let [even, odd] = s.widen_pairs(from.add(line * STEP).cast());
                s.store(at, odd);
                s.store(at.add(PANEL), even);
            }
        }
    }
}
