//! `y = x W^T` of integers of 8 bits, with bias, activation and residual of bf16, over weights laid in tiles once at load.
//!
//! Invariant: sums are exact; what follows them, `f(sum (sx sw) + b)` and then `r +`, is in f32 in this order, with one
//! rounding at the end. So the bits of a row depend on that row and the weights: not on M, the row's position, the threads
//! or, with FMA, the instructions, tiles included.
//!
//! Weights lie as `graph::Layout::ScaledTiles` says: panels of 32 columns of y, in them steps of 64 k of two tiles each, in
//! those lines of four k.
//!
//! Order of work without tiles: a task passes each panel over its strips of rows, whose sums stay in registers.

use super::codes::{CodeRows, CodeTiles};
use super::dot::{Dot, QUAD};
use super::element::{Bf16, Element};
use super::gemm::{Act, Job, Split};
use super::gemm_bf16::EpilogueBf16;
use super::isa::Kernel;
use super::math::gelu_bf16;
use super::simd::{LANES, Simd};
use super::tile::PANEL;
use super::{Cpu, Rows, RowsMut};
use crate::tiles::{STEP, codes_panel};
use core::ops::Range;
use plan::Workspace;

/// Bytes of workspace per thread: as products of bf16 on tiles take them; others take none.
pub const WORKSPACE: Workspace = super::gemm_bf16::WORKSPACE;

/// The longest row: its sums fit 32 bits, with unsigned weights too.
const LONGEST: usize = 1 << 16;
/// Most rows of a task.
const BLOCK: usize = 168;
/// Bytes of a line of a tile, and lines of a tile.
const LINE: usize = QUAD * LANES;
const LINES: usize = LANES;

/// What makes numbers of sums of codes: a scale of each row of x, and of each of W, zeros past its last up to a whole panel.
#[derive(Clone, Copy)]
pub(super) struct Scales<'a> {
    pub(super) x: &'a [f32],
    pub(super) w: &'a [f32],
}

/// y (M, N) = residual + act(x (M, K) W^T + bias), rounded once. `workspace` holds `WORKSPACE` for each thread. `x` and `y`
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
    assert!(each as u64 >= WORKSPACE.per_unit.0, "workspace for {} threads", cpu.threads());
    #[cfg(target_arch = "x86_64")]
    if cpu.isa().has_tiles() {
        use super::{amx::Tiles, gemm_bf16_amx};
        // SAFETY: this CPU has tiles.
        return unsafe {
            gemm_bf16_amx::linear::<Tiles<true>>(cpu, job, Some(scales), workspace.as_mut_ptr(), each)
        };
    }
    in_lanes(cpu, job, scales);
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

fn in_lanes(cpu: &Cpu, job: Job<'_, Bf16>, scales: Scales<'_>) {
    let (m, panels) = (job.x.rows(), job.y.cols().div_ceil(PANEL));
    let split = Split::new(m, panels, cpu.threads(), 12, BLOCK, 1);
    cpu.pool().run(split.tasks(), &|task, _| {
        let (rows, panels) = split.task(task);
        let task = Task { job, scales, rows, panels };
        #[cfg(target_arch = "x86_64")]
        if cpu.isa().has_avx512() && is_x86_feature_detected!("avx512vnni") {
            // SAFETY: this CPU was seen to have both.
            return unsafe { task.run_vnni() };
        }
        cpu.isa().run(task);
    });
}

/// One task, for `Isa::run`.
struct Task<'a> {
    job: Job<'a, Bf16>,
    scales: Scales<'a>,
    rows: Range<usize>,
    panels: Range<usize>,
}

impl Kernel for Task<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        self.over(s, s);
    }
}

impl Task<'_> {
    /// # Safety
    /// The CPU has AVX-512 F, BW, DQ, VL and VNNI, AVX2 and FMA.
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
    unsafe fn run_vnni(self) {
        // SAFETY: as the caller promises.
        let (s, d) = unsafe { (super::simd_x86::Avx512::assume(), super::dot::Vnni::assume()) };
        self.over(s, d);
    }

    #[inline(always)]
    fn over<S: Simd, D: Dot>(&self, s: S, d: D) {
        for panel in self.panels.clone() {
            let mut row = self.rows.start;
            while row < self.rows.end {
                let left = self.rows.end - row;
                // SAFETY: rows and a panel of this task's.
                row += unsafe {
                    match D::HEIGHT {
                        12 if left > 4 => self.strip::<S, D, 12>(s, d, row, left, panel),
                        8 if left > 4 => self.strip::<S, D, 8>(s, d, row, left, panel),
                        2 => self.strip::<S, D, 2>(s, d, row, left, panel),
                        _ => self.strip::<S, D, 4>(s, d, row, left, panel),
                    }
                };
            }
        }
    }

    /// Up to `ROWS` rows, of `left`, from `row` on, of one panel; how many they were. Past the last, that one stands again.
    ///
    /// # Safety
    /// The rows and the panel are this task's, and there is a row.
    #[inline(always)]
    unsafe fn strip<S: Simd, D: Dot, const ROWS: usize>(
        &self,
        s: S,
        d: D,
        row: usize,
        left: usize,
        panel: usize,
    ) -> usize {
        let (x, rows) = (self.job.x, left.min(ROWS));
        let quads = x.cols() * size_of::<Bf16>() / QUAD;
        let at: [*const u8; ROWS] = core::array::from_fn(|r| x.row(row + r.min(rows - 1)).cast());
        let steps = x.cols().div_ceil(STEP);
        let mut w = self.job.w.as_ptr().cast::<u8>().wrapping_add(panel * steps * 2 * LINES * LINE);
        let mut numbers = [0.0_f32; PANEL];
        // SAFETY: rows of `quads` times four codes, and the lines of the panel, which has as many or more.
        unsafe {
            let mut sums = [[d.begin(at[0], quads); 2]; ROWS];
            for r in 1..ROWS {
                sums[r] = [d.begin(at[r], quads); 2];
            }
            for quad in 0..quads {
                let line = [d.line(w), d.line(w.add(LINES * LINE))];
                for r in 0..ROWS {
                    let x = at[r].add(quad * QUAD).cast::<i32>().read_unaligned();
                    sums[r] = [d.dot(sums[r][0], x, line[0]), d.dot(sums[r][1], x, line[1])];
                }
                // A step's second tile was passed beside the first.
                w = w.wrapping_add(if quad % LINES == LINES - 1 { (LINES + 1) * LINE } else { LINE });
            }
            for (r, sums) in sums.iter().enumerate().take(rows) {
                d.numbers(sums[0], numbers.as_mut_ptr());
                d.numbers(sums[1], numbers.as_mut_ptr().add(LANES));
                self.finish(s, row + r, panel, &numbers);
            }
        }
        rows
    }

    /// A row of one panel from its sums to y.
    ///
    /// # Safety
    /// The row and the panel are this task's.
    #[inline(always)]
    unsafe fn finish<S: Simd>(&self, s: S, row: usize, panel: usize, sums: &[f32; PANEL]) {
        let (e, y) = self.job.out();
        let of = s.splat(self.scales.x[row]);
        for column in [0, LANES] {
            let j = panel * PANEL + column;
            let width = y.cols().saturating_sub(j).min(LANES);
            if width == 0 {
                break;
            }
            // SAFETY: columns j..j + width are inside scales, bias, residual and y; the row as promised.
            unsafe {
                let scale = s.mul(of, s.load(self.scales.w.as_ptr().add(j)));
                let v = s.mul(s.load(sums.as_ptr().add(column)), scale);
                let v = match e.bias {
                    Some(bias) => s.add(v, Bf16::load_n(s, bias.as_ptr().add(j), width)),
                    None => s.add(v, s.splat(0.0)),
                };
                let v = match e.act {
                    Act::None => v,
                    Act::Gelu => gelu_bf16(s, v),
                    Act::Relu => s.max(s.splat(0.0), v),
                };
                let v = match e.residual {
                    Some(x) => s.add(Bf16::load_n(s, x.row(row).add(j), width), v),
                    None => v,
                };
                Bf16::store_n(s, y.row(row).add(j), v, width);
            }
        }
    }
}
