//! bf16 GEMM `y = x W^T` with bias, activation and residual, over weights that are packed into tiles once when
//! they are loaded. Sums are f32 and are rounded to bf16 once, at the end.
//!
//! Invariant: each element of `x W^T` is one chain of f32 fused multiply-adds with initial value zero, over k in
//! the order 1, 0, 3, 2, .., in which the dot products of pairs of AVX512-BF16 add. So the bits of a row depend
//! on that row and on the weights and, among instruction sets with FMA, not on the instruction set (except where
//! a sum is below 2^-126, see `dot::Bf16Pairs`). On CPUs with AMX `linear_bf16_amx` computes the product: its bits
//! differ, but also depend on the row and the weights only.
//!
//! Layout of the weights: see `plimsoll_plan::TILE_STEP`. Each panel of 32 columns of y is stored in steps of 32 k, two
//! tiles per step.
//!
//! Loop order: as in `linear_f32`, but each slice of rows and panels is converted to f32 in the workspace first. The
//! kernel of dot products (`linear_dots`) reads panels without conversion.

use crate::Cpu;
use crate::element::Bf16;
#[cfg(target_arch = "x86_64")]
use crate::matmul::linear::MatmulEpilogue;
use crate::matmul::linear::{LinearCall, LinearOperands};
#[cfg(target_arch = "x86_64")]
use crate::matmul::linear_bf16_amx::{self, LinearKind};
use crate::matmul::register_tile::{InitialSums, PANEL, StripMatmul, strip};
use crate::matmul::task_grid::{GridLimits, TaskGrid};
#[cfg(target_arch = "x86_64")]
use crate::rows::elementwise::Gate;
#[cfg(target_arch = "x86_64")]
use crate::simd::amx::Tiles;
use crate::simd::isa::{Isa, SimdKernel};
use crate::simd::{LANES, Simd};
#[cfg(target_arch = "x86_64")]
use crate::{Rows, RowsMut};
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

const _: () = assert!(4 * WORKSPACE_WORDS == WORKSPACE_BYTES);

/// f32 of workspace per thread, a whole number of cache lines: the widened rows, the sums of a group of panels,
/// and a widened slice of a panel. The kernel on AMX tiles needs less.
pub(crate) const WORKSPACE_WORDS: usize = BLOCK * (STRIDE + GROUP * PANEL) + DEPTH * PANEL;

#[cfg(target_arch = "x86_64")]
const _: () = assert!(linear_bf16_amx::WORKSPACE_BYTES <= WORKSPACE_BYTES);

/// Packs a row-major weight with rows of `k` elements into bf16 tiles.
pub fn packed(w: &[f32], k: usize) -> Vec<Bf16> {
    tiles::packed(w, k).into_iter().map(Bf16).collect()
}

/// Computes a linear layer, rounded once, whose weight is packed into tiles (see [`packed`]). `workspace` holds
/// `WORKSPACE_BYTES` for each thread. Panics if the sizes are inconsistent.
pub fn linear(cpu: &Cpu, call: LinearCall<'_, Bf16>, workspace: &mut [f32]) {
    let k = call.x.cols();
    let n = call.y.cols();
    assert_eq!(call.w.len(), n.div_ceil(PANEL) * tiles::panel(k), "weights of ({n}, {k}) in tiles");
    assert!(workspace.len() >= WORKSPACE_WORDS * cpu.threads(), "workspace for {} threads", cpu.threads());
    let operands = call.operands();
    #[cfg(target_arch = "x86_64")]
    if cpu.isa().has_tiles() && k > 0 {
        let workspace = workspace.as_mut_ptr();
        // SAFETY: this CPU has tile registers and AVX512-BF16; the size of the workspace was checked above.
        return unsafe {
            linear_bf16_amx::linear::<Tiles>(cpu, operands, LinearKind::Plain, workspace, WORKSPACE_BYTES)
        };
    }
    linear_by(cpu, Bf16Instructions::of(cpu.isa()), operands, workspace);
}

/// A gated linear unit: y (M, F) = f(s[.., ..F]) s[.., F..] of s = x (M, K) W^T + bias. F is a multiple of 32, K at
/// most 1 024. `x` and `y` must not overlap.
#[cfg(target_arch = "x86_64")]
pub struct GatedLinearCall<'a> {
    /// Input (M, K).
    pub x: Rows<'a, Bf16>,
    /// Weight (2F, K), packed into tiles (see [`packed`]).
    pub w: &'a [Bf16],
    /// 2F values, added to each row of s.
    pub bias: Option<&'a [Bf16]>,
    /// f.
    pub gate: Gate,
    /// Output (M, F).
    pub y: RowsMut<'a, Bf16>,
}

#[cfg(target_arch = "x86_64")]
impl GatedLinearCall<'_> {
    /// The operands as the tasks share them, and the gate. Panics if the sizes are inconsistent.
    pub(crate) fn operands(&self) -> (LinearOperands<'_, Bf16>, LinearKind<'_>) {
        let k = self.x.cols();
        let n = 2 * self.y.cols();
        assert!((1..=linear_bf16_amx::LONGEST_GATED).contains(&k), "rows of {k} behind a gate");
        assert_eq!(self.w.len(), n.div_ceil(PANEL) * tiles::panel(k), "weights of ({n}, {k}) in tiles");
        assert!(self.bias.is_none_or(|bias| bias.len() == n), "bias of {n}");
        let operands = LinearOperands::new(self.x, self.w, MatmulEpilogue::default(), &self.y);
        (operands, LinearKind::Gated { gate: self.gate, bias: self.bias })
    }
}

/// Computes a gated linear unit, rounded once. `workspace` as for [`linear`]. Only on AMX tiles. Panics if the sizes
/// are inconsistent or the CPU has no tiles.
#[cfg(target_arch = "x86_64")]
pub fn gated(cpu: &Cpu, call: GatedLinearCall<'_>, workspace: &mut [f32]) {
    let (operands, form) = call.operands();
    assert!(cpu.isa().has_tiles(), "a gate behind a matmul needs AMX tiles");
    assert!(workspace.len() >= WORKSPACE_WORDS * cpu.threads(), "workspace for {} threads", cpu.threads());
    // SAFETY: this CPU has tile registers and AVX512-BF16; the size of the workspace was checked above.
    unsafe { linear_bf16_amx::linear::<Tiles>(cpu, operands, form, workspace.as_mut_ptr(), WORKSPACE_BYTES) };
}

/// `linear` after its checks, without AMX tiles.
pub(crate) fn linear_by(
    cpu: &Cpu,
    instructions: Bf16Instructions,
    operands: LinearOperands<'_, Bf16>,
    workspace: &mut [f32],
) {
    assert!(workspace.len() >= cpu.threads() * WORKSPACE_WORDS, "workspace for {} threads", cpu.threads());
    let m = operands.x.rows();
    let k = operands.x.cols();
    let panels = operands.y.cols().div_ceil(PANEL);
    let min_groups = if k > DEPTH { panels.div_ceil(GROUP) } else { 1 };
    let limits = GridLimits { tile_rows: cpu.isa().tile_rows(), max_rows: BLOCK, min_groups };
    let grid = TaskGrid::new(m, panels, cpu.threads(), limits);
    let workspace = workspace.as_mut_ptr() as usize;
    cpu.pool().run(grid.tasks(), &|task, worker| {
        let (rows, panels) = grid.task(task);
        // The workers of one run have distinct indices below `threads()`, so no two tasks share scratch.
        let scratch = (workspace as *mut f32).wrapping_add(worker * WORKSPACE_WORDS);
        cpu.isa().run(LinearBf16Task { instructions, operands, rows, panels, scratch });
    });
}

/// Instructions that compute the sums. A value proves that this CPU has them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Bf16Instructions {
    /// Fused multiply-adds of f32 lanes.
    Lanes,
    /// Dot products of bf16 pairs (AVX512-BF16).
    #[cfg(target_arch = "x86_64")]
    Dots,
}

impl Bf16Instructions {
    /// The fastest form that `isa` supports.
    pub(crate) fn of(isa: Isa) -> Bf16Instructions {
        #[cfg(target_arch = "x86_64")]
        if isa.has_dots() {
            return Bf16Instructions::Dots;
        }
        // Only x86-64 has these dot products.
        let _ = isa;
        Bf16Instructions::Lanes
    }
}

/// One task, run by `Isa::run`. No other task uses the `WORKSPACE_WORDS` f32 at `scratch` meanwhile.
struct LinearBf16Task<'a> {
    instructions: Bf16Instructions,
    operands: LinearOperands<'a, Bf16>,
    rows: Range<usize>,
    panels: Range<usize>,
    scratch: *mut f32,
}

impl SimdKernel for LinearBf16Task<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        match self.instructions {
            Bf16Instructions::Lanes => {}
            #[cfg(target_arch = "x86_64")]
            // SAFETY: the value proves the instructions; no other task uses the scratch.
            Bf16Instructions::Dots => return unsafe { self.dots() },
        }
        for ks in slices(self.operands.x.cols()) {
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

impl LinearBf16Task<'_> {
    /// Computes the task by dot products.
    ///
    /// # Safety
    /// The CPU must have AVX-512 with BF16, and no other thread may use the task's scratch.
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
    unsafe fn dots(self) {
        use crate::{matmul::linear_dots::LinearDotTask, simd::dot::Bf16Pairs, simd::x86::Avx512};
        let LinearBf16Task { operands, rows, panels, scratch, .. } = self;
        // SAFETY: guaranteed by the caller.
        unsafe {
            let task = LinearDotTask { operands, scales: None, rows, panels, scratch };
            task.run(Avx512::assume(), Bf16Pairs::assume());
        }
    }

    /// Adds the products over the slice `ks` of one panel to the sums of all rows; after the last slice, applies
    /// the epilogue and writes y.
    ///
    /// # Safety
    /// Only for `run`: the scratch must begin with the widened rows of this slice.
    #[inline(always)]
    unsafe fn panel<S: Simd>(&self, s: S, panel: usize, ks: &Range<usize>) {
        let continues = ks.start > 0;
        let last = ks.end == self.operands.x.cols();
        let begin = if continues { InitialSums::Stored } else { InitialSums::Zero };
        let sums = self.scratch.wrapping_add(BLOCK * STRIDE);
        let b = sums.wrapping_add(BLOCK * GROUP * PANEL);
        // SAFETY: behind the sums, the scratch has space for a widened slice of a panel.
        unsafe { self.widen_panel(s, panel, ks, b) };
        for row in (0..self.rows.len()).step_by(S::ROWS) {
            let rows = S::ROWS.min(self.rows.len() - row);
            let a = self.scratch.wrapping_add(row * STRIDE);
            // With one slice a strip's sums are finished immediately, so all strips share one buffer, which
            // stays in L1.
            let at = if continues || !last { ((panel - self.panels.start) * BLOCK + row) * PANEL } else { 0 };
            let sum = sums.wrapping_add(at);
            // SAFETY: `a` is a strip of widened rows (the padding rows of the last tile are zeros inside the
            // block), `b` is one slice of one panel, and the strip's sums and output rows belong to this task.
            // An odd slice length is rounded up because the elements of a pair are swapped: the last k is stored
            // behind the zero of its pair.
            unsafe {
                let depth = ks.len().next_multiple_of(2);
                let matmul = StripMatmul { rows, vecs: 2, depth, a, b, c: sum, ldc: PANEL, begin };
                strip::<S, STRIDE, 0>(s, matmul, &[]);
                if last {
                    self.operands.output(self.rows.start + row, rows, panel).finish(s, sum);
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
            let from = self.operands.x.row(self.rows.start + r).cast::<u16>().wrapping_add(ks.start);
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
        let steps = self.operands.x.cols().div_ceil(STEP);
        let from = self.operands.w.as_ptr().wrapping_add((panel * steps + ks.start / STEP) * 2 * TILE);
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
