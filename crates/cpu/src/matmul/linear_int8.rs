//! int8 GEMM `y = x W^T` with bias, activation and residual in bf16, over weights that are packed into tiles
//! once when they are loaded.
//!
//! Invariant: integer sums are exact; the epilogue `r + act(sum * (s_x s_w) + b)` is computed in f32 in this
//! order and rounded once at the end. So the bits of a row depend on that row and on the weights, and not on M,
//! the row's position, the number of threads or, among instruction sets with FMA (AMX included), the instruction
//! set.
//!
//! Layout of the weights: see `plimsoll_plan::INT8_STEP`. Each panel of 32 columns of y is stored in steps of 64 k of
//! two tiles each; a line of a tile holds four k of each of its 16 columns.
//!
//! Without AMX the loop order of `linear_dots` is used.

use crate::element::Bf16;
use crate::matmul::linear::{LinearOperands, MatmulEpilogue};
use crate::matmul::linear_bf16::{BLOCK, DEPTH, GROUP, WORKSPACE_WORDS};
#[cfg(target_arch = "x86_64")]
use crate::matmul::linear_bf16_amx::{self, LinearKind};
use crate::matmul::linear_dots::LinearDotTask;
use crate::matmul::quantized::{QuantizedRows, QuantizedTiles};
use crate::matmul::register_tile::PANEL;
use crate::matmul::task_grid::{GridLimits, TaskGrid};
use crate::simd::Simd;
#[cfg(target_arch = "x86_64")]
use crate::simd::amx::Tiles;
use crate::simd::isa::{Isa, SimdKernel};
use crate::{Cpu, Rows, RowsMut};
use plimsoll_exec::tiles::codes_panel;

/// Bytes of workspace per thread: as for bf16 GEMMs.
pub const WORKSPACE_BYTES: usize = crate::matmul::linear_bf16::WORKSPACE_BYTES;

/// Maximum K: its sums fit in 32 bits, even with weights shifted to 0..=255 (`dot::Vnni`).
const LONGEST: usize = 1 << 16;
/// Height of the tallest register tile of all instruction sets; tasks are cut at multiples of it.
const HEIGHT: usize = 14;

/// Dequantization scales of the sums: one for each row of x, and one for each row of W, padded with zeros to
/// whole panels.
#[derive(Clone, Copy)]
pub(crate) struct Scales<'a> {
    pub(crate) x: &'a [f32],
    pub(crate) w: &'a [f32],
}

/// A linear layer with quantized operands: y (M, N) = residual + act(x (M, K) W^T + bias), where x and W are int8
/// values times the scales of their rows. `x` and `y` must not overlap.
pub struct QuantizedLinearCall<'a> {
    /// Input (M, K).
    pub x: QuantizedRows<'a>,
    /// Weight (N, K).
    pub w: QuantizedTiles<'a>,
    /// Bias, activation and residual.
    pub epilogue: MatmulEpilogue<'a, Bf16>,
    /// Output (M, N).
    pub y: RowsMut<'a, Bf16>,
}

impl QuantizedLinearCall<'_> {
    /// The operands as a bf16 matmul with two int8 values in place of each element: steps and panels have the same
    /// bytes. Panics if their sizes are inconsistent.
    pub(crate) fn operands(&self) -> LinearOperands<'_, Bf16> {
        let pairs = self.x.stride() / 2;
        let x = Rows::new(bytemuck::cast_slice(self.x.values), self.x.scales.len(), pairs, pairs);
        LinearOperands::new(x, bytemuck::cast_slice(self.w.tiles), self.epilogue, &self.y)
    }

    /// The scales of the sums.
    pub(crate) fn scales(&self) -> Scales<'_> {
        Scales { x: self.x.scales, w: self.w.scales }
    }
}

/// Computes a quantized linear layer, rounded once. `workspace` holds `WORKSPACE_BYTES` for each thread. Panics if the
/// sizes are inconsistent.
pub fn linear(cpu: &Cpu, call: QuantizedLinearCall<'_>, workspace: &mut [f32]) {
    let k = call.x.columns;
    let n = call.y.cols();
    let panels = n.div_ceil(PANEL);
    assert!((1..=LONGEST).contains(&k), "rows of {k} codes");
    assert_eq!(call.w.tiles.len(), panels * codes_panel(k), "weights of ({n}, {k}) in tiles");
    assert_eq!(call.w.scales.len(), panels * PANEL, "scales of {n} rows");
    let scales = call.scales();
    let operands = call.operands();
    let bytes_per_thread = 4 * workspace.len() / cpu.threads();
    assert!(bytes_per_thread >= WORKSPACE_BYTES, "workspace for {} threads", cpu.threads());
    #[cfg(target_arch = "x86_64")]
    if cpu.isa().has_tiles() {
        let form = LinearKind::Scaled(scales);
        // SAFETY: this CPU has tile registers and AVX512-BF16; the size of the workspace was checked above.
        return unsafe {
            linear_bf16_amx::linear::<Tiles<true>>(
                cpu,
                operands,
                form,
                workspace.as_mut_ptr(),
                bytes_per_thread,
            )
        };
    }
    linear_by(cpu, Int8Instructions::of(cpu.isa()), operands, scales, workspace);
}

/// Instructions that compute the sums. A value proves that this CPU has them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Int8Instructions {
    /// Operations of the `Simd` implementation.
    Lanes,
    /// AVX-512 with VNNI.
    #[cfg(target_arch = "x86_64")]
    Vnni,
}

impl Int8Instructions {
    /// The fastest form that `isa` supports.
    pub(crate) fn of(isa: Isa) -> Int8Instructions {
        #[cfg(target_arch = "x86_64")]
        if isa.has_vnni() {
            return Int8Instructions::Vnni;
        }
        let _ = isa;
        Int8Instructions::Lanes
    }
}

/// `linear` after its checks, without AMX tiles.
pub(crate) fn linear_by(
    cpu: &Cpu,
    instructions: Int8Instructions,
    operands: LinearOperands<'_, Bf16>,
    scales: Scales<'_>,
    workspace: &mut [f32],
) {
    assert!(workspace.len() >= cpu.threads() * WORKSPACE_WORDS, "workspace for {} threads", cpu.threads());
    let m = operands.x.rows();
    let panels = operands.y.cols().div_ceil(PANEL);
    let min_groups = if operands.x.cols() > DEPTH { panels.div_ceil(GROUP) } else { 1 };
    let limits = GridLimits { tile_rows: HEIGHT, max_rows: BLOCK, min_groups };
    let grid = TaskGrid::new(m, panels, cpu.threads(), limits);
    let workspace = workspace.as_mut_ptr() as usize;
    cpu.pool().run(grid.tasks(), &|task, worker| {
        let (rows, panels) = grid.task(task);
        // The workers of one run have distinct indices below `threads()`, so no two tasks share scratch.
        let scratch = (workspace as *mut f32).wrapping_add(worker * WORKSPACE_WORDS);
        let task = LinearInt8Task(LinearDotTask { operands, scales: Some(scales), rows, panels, scratch });
        match instructions {
            Int8Instructions::Lanes => cpu.isa().run(task),
            #[cfg(target_arch = "x86_64")]
            // SAFETY: the value proves the instructions.
            Int8Instructions::Vnni => unsafe { task.run_vnni() },
        }
    });
}

/// One task, run by `Isa::run`. No other task uses its scratch meanwhile.
struct LinearInt8Task<'a>(LinearDotTask<'a>);

impl SimdKernel for LinearInt8Task<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        // SAFETY: no other task uses the scratch.
        unsafe { self.0.run(s, s) };
    }
}

impl LinearInt8Task<'_> {
    /// Computes the task with VNNI.
    ///
    /// # Safety
    /// The CPU must have AVX-512 F, BW, DQ, VL and VNNI, AVX2 and FMA.
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
    unsafe fn run_vnni(self) {
        // SAFETY: guaranteed by the caller; no other task uses the scratch.
        unsafe { self.0.run(crate::simd::x86::Avx512::assume(), crate::simd::dot::Vnni::assume()) };
    }
}
