//! `y = x W^T` of integers of 8 bits, with bias, activation and residual of bf16, over weights laid in tiles once at load.
//!
//! Invariant: sums are exact; what follows them, `f(sum (sx sw) + b)` and then `r +`, is in f32 in this order, with one
//! rounding at the end. So the bits of a row depend on that row and the weights: not on M, the row's position, the threads
//! or, with FMA, the instructions, tiles included.
//!
//! Weights lie as `plan::CODES_STEP` says: panels of 32 columns of y, in them steps of 64 k of two tiles each, in
//! those lines of four k.
//!
//! Order of work without tiles: that of `gemm_dots`.

use super::codes::{CodeRows, CodeTiles};
use super::element::Bf16;
use super::gemm::{Job, Split};
use super::gemm_bf16::{BLOCK, DEPTH, EACH, EpilogueBf16, GROUP};
use super::gemm_dots::Strips;
use super::isa::{Isa, Kernel};
use super::simd::Simd;
use super::tile::PANEL;
use super::{Cpu, Rows, RowsMut};
use exec::tiles::codes_panel;

/// Bytes of workspace per thread: as products of bf16 take them.
pub const WORKSPACE_BYTES: usize = super::gemm_bf16::WORKSPACE_BYTES;

/// The longest row: its sums fit 32 bits, with unsigned weights too.
const LONGEST: usize = 1 << 16;
/// Rows of the tallest register tile of all, by which tasks are cut.
const HEIGHT: usize = 14;

/// What makes numbers of sums of codes: a scale of each row of x, and of each of W, zeros past its last up to a whole panel.
#[derive(Clone, Copy)]
pub(super) struct Scales<'a> {
    pub(super) x: &'a [f32],
    pub(super) w: &'a [f32],
}

/// y (M, N) = residual + act(x (M, K) W^T + bias), rounded once. `workspace` holds `WORKSPACE_BYTES` for each thread. `x` and `y`
/// must not overlap. Panics on sizes that do not fit together.
pub fn linear(
    cpu: &Cpu,
    x: CodeRows<'_>,
    w: CodeTiles<'_>,
    epilogue: EpilogueBf16<'_>,
    y: RowsMut<'_, Bf16>,
    workspace: &mut [f32],
) {
    let (k, panels) = (x.columns, y.cols().div_ceil(PANEL));
    assert!((1..=LONGEST).contains(&k), "rows of {k} codes");
    assert_eq!(w.tiles.len(), panels * codes_panel(k), "weights of ({}, {k}) in tiles", y.cols());
    assert_eq!(w.scales.len(), panels * PANEL, "scales of {} rows", y.cols());
    let scales = Scales { x: x.scales, w: w.scales };
    let job = in_pairs(x, w, epilogue, &y);
    let each = 4 * workspace.len() / cpu.threads();
    assert!(each >= WORKSPACE_BYTES, "workspace for {} threads", cpu.threads());
    #[cfg(target_arch = "x86_64")]
    if cpu.isa().has_tiles() {
        use super::{amx::Tiles, gemm_bf16_amx};
        // SAFETY: this CPU has tiles.
        return unsafe {
            gemm_bf16_amx::linear::<Tiles<true>>(cpu, job, Some(scales), workspace.as_mut_ptr(), each)
        };
    }
    linear_by(cpu, Form::of(cpu.isa()), job, scales, workspace);
}

/// The operands with two codes where bf16 has an element: steps and panels are then the same bytes.
pub(super) fn in_pairs<'a>(
    x: CodeRows<'a>,
    w: CodeTiles<'a>,
    epilogue: EpilogueBf16<'a>,
    y: &'a RowsMut<'a, Bf16>,
) -> Job<'a, Bf16> {
    let pairs = x.stride() / 2;
    let x = Rows::new(bytemuck::cast_slice(x.codes), x.scales.len(), pairs, pairs);
    Job::new(x, bytemuck::cast_slice(w.tiles), epilogue, y)
}

/// What makes the sums. A value proves that this CPU has the instructions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Form {
    /// What the lanes have.
    Lanes,
    /// AVX-512 with VNNI.
    #[cfg(target_arch = "x86_64")]
    Vnni,
}

impl Form {
    /// The faster one that `isa` has.
    pub(super) fn of(isa: Isa) -> Form {
        #[cfg(target_arch = "x86_64")]
        if isa.has_vnni() {
            return Form::Vnni;
        }
        let _ = isa;
        Form::Lanes
    }
}

/// `linear` after its checks, without tiles.
pub(super) fn linear_by(cpu: &Cpu, form: Form, job: Job<'_, Bf16>, scales: Scales<'_>, workspace: &mut [f32]) {
    assert!(workspace.len() >= cpu.threads() * EACH, "workspace for {} threads", cpu.threads());
    let (m, panels) = (job.x.rows(), job.y.cols().div_ceil(PANEL));
    let fewest = if job.x.cols() > DEPTH { panels.div_ceil(GROUP) } else { 1 };
    let split = Split::new(m, panels, cpu.threads(), HEIGHT, BLOCK, fewest);
    let scratch = workspace.as_mut_ptr() as usize;
    cpu.pool().run(split.tasks(), &|task, worker| {
        let (rows, panels) = split.task(task);
        // Worker indices of one run are distinct and below `threads()`.
        let scratch = (scratch as *mut f32).wrapping_add(worker * EACH);
        let task = Task(Strips { job, scales: Some(scales), rows, panels, scratch });
        match form {
            Form::Lanes => cpu.isa().run(task),
            #[cfg(target_arch = "x86_64")]
            // SAFETY: the form proves the instructions.
            Form::Vnni => unsafe { task.run_vnni() },
        }
    });
}

/// One task, for `Isa::run`, whose scratch is this worker's own.
struct Task<'a>(Strips<'a>);

impl Kernel for Task<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        // SAFETY: the scratch is this worker's own.
        unsafe { self.0.run(s, s) };
    }
}

impl Task<'_> {
    /// # Safety
    /// The CPU has AVX-512 F, BW, DQ, VL and VNNI, AVX2 and FMA.
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
    unsafe fn run_vnni(self) {
        // SAFETY: as the caller promises; the scratch is this worker's own.
        unsafe { self.0.run(super::simd_x86::Avx512::assume(), super::dot::Vnni::assume()) };
    }
}
