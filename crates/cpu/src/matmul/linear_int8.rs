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
use crate::matmul::linear_bf16::{BLOCK, DEPTH, EACH, EpilogueBf16, GROUP};
use crate::matmul::linear_dots::Strips;
use crate::matmul::linear_f32::{GemmCall, Split};
use crate::matmul::quantized::{QuantizedRows, QuantizedTiles};
use crate::matmul::register_tile::PANEL;
use crate::simd::Simd;
use crate::simd::isa::{Isa, Kernel};
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

/// Computes y (M, N) = residual + act(x (M, K) W^T + bias), rounded once. `workspace` holds `WORKSPACE_BYTES`
/// for each thread. `x` and `y` must not overlap. Panics if the sizes are inconsistent.
pub fn linear(
    cpu: &Cpu,
    x: QuantizedRows<'_>,
    w: QuantizedTiles<'_>,
    epilogue: EpilogueBf16<'_>,
    y: RowsMut<'_, Bf16>,
    workspace: &mut [f32],
) {
    let k = x.columns;
    let panels = y.cols().div_ceil(PANEL);
    assert!((1..=LONGEST).contains(&k), "rows of {k} codes");
    assert_eq!(w.tiles.len(), panels * codes_panel(k), "weights of ({}, {k}) in tiles", y.cols());
    assert_eq!(w.scales.len(), panels * PANEL, "scales of {} rows", y.cols());
    let scales = Scales { x: x.scales, w: w.scales };
    let job = as_bf16_job(x, w, epilogue, &y);
    let each = 4 * workspace.len() / cpu.threads();
    assert!(each >= WORKSPACE_BYTES, "workspace for {} threads", cpu.threads());
    #[cfg(target_arch = "x86_64")]
    if cpu.isa().has_tiles() {
        use crate::{matmul::linear_bf16_amx, simd::amx::Tiles};
        // SAFETY: this CPU has tile registers and AVX512-BF16; the size of the workspace was checked above.
        return unsafe {
            let form = linear_bf16_amx::Form::Scaled(scales);
            linear_bf16_amx::linear::<Tiles<true>>(cpu, job, form, workspace.as_mut_ptr(), each)
        };
    }
    linear_by(cpu, Instructions::of(cpu.isa()), job, scales, workspace);
}

/// The operands as a bf16 GEMM with two int8 values in place of each element: steps and panels have the same
/// bytes.
pub(crate) fn as_bf16_job<'a>(
    x: QuantizedRows<'a>,
    w: QuantizedTiles<'a>,
    epilogue: EpilogueBf16<'a>,
    y: &'a RowsMut<'a, Bf16>,
) -> GemmCall<'a, Bf16> {
    let pairs = x.stride() / 2;
    let x = Rows::new(bytemuck::cast_slice(x.codes), x.scales.len(), pairs, pairs);
    GemmCall::new(x, bytemuck::cast_slice(w.tiles), epilogue, y)
}

/// Instructions that compute the sums. A value proves that this CPU has them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Instructions {
    /// Operations of the `Simd` implementation.
    Lanes,
    /// AVX-512 with VNNI.
    #[cfg(target_arch = "x86_64")]
    Vnni,
}

impl Instructions {
    /// The fastest form that `isa` supports.
    pub(crate) fn of(isa: Isa) -> Instructions {
        #[cfg(target_arch = "x86_64")]
        if isa.has_vnni() {
            return Instructions::Vnni;
        }
        let _ = isa;
        Instructions::Lanes
    }
}

/// `linear` after its checks, without AMX tiles.
pub(crate) fn linear_by(
    cpu: &Cpu,
    form: Instructions,
    job: GemmCall<'_, Bf16>,
    scales: Scales<'_>,
    workspace: &mut [f32],
) {
    assert!(workspace.len() >= cpu.threads() * EACH, "workspace for {} threads", cpu.threads());
    let m = job.x.rows();
    let panels = job.y.cols().div_ceil(PANEL);
    let fewest = if job.x.cols() > DEPTH { panels.div_ceil(GROUP) } else { 1 };
    let split = Split::new(m, panels, cpu.threads(), HEIGHT, BLOCK, fewest);
    let scratch = workspace.as_mut_ptr() as usize;
    cpu.pool().run(split.tasks(), &|task, worker| {
        let (rows, panels) = split.task(task);
        // The workers of one run have distinct indices below `threads()`, so no two tasks share scratch.
        let scratch = (scratch as *mut f32).wrapping_add(worker * EACH);
        let task = GemmTile(Strips { job, scales: Some(scales), rows, panels, scratch });
        match form {
            Instructions::Lanes => cpu.isa().run(task),
            #[cfg(target_arch = "x86_64")]
            // SAFETY: the form proves the instructions.
            Instructions::Vnni => unsafe { task.run_vnni() },
        }
    });
}

/// One task, run by `Isa::run`. No other task uses its scratch meanwhile.
struct GemmTile<'a>(Strips<'a>);

impl Kernel for GemmTile<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        // SAFETY: no other task uses the scratch.
        unsafe { self.0.run(s, s) };
    }
}

impl GemmTile<'_> {
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
