//! The fused MLP of a layer in bf16: `y = r + (f(n(x) W1^T + b1) W2^T + b2)`, computed in blocks of rows. The hidden
//! layer never leaves the workspace.
//!
//! Invariant: every element has the bits that `norm`, `gemm_bf16` and `elementwise` give when they run one after the
//! other. The number of rows of a block only decides which thread computes which rows.

use super::element::Bf16;
use super::elementwise::{self, Gate};
use super::gemm::{Act, GemmCall, PANEL, Split};
use super::gemm_bf16::{self, EpilogueBf16, Instructions};
use super::isa::Kernel;
use super::norm;
use super::simd::Simd;
use super::{Cpu, Rows, RowsMut};
use core::ops::Range;
use plimsoll_exec::tiles;
use plimsoll_graph::ops::Hidden;
use plimsoll_plan::CpuKernel;

/// Workspace in bytes per thread, for an MLP whose widest layer has `columns` columns.
pub const fn workspace_bytes(columns: usize) -> usize {
    CpuKernel::mlp_bytes(columns as u64).next_multiple_of(64) as usize
}

/// Maximum number of rows of a block.
const BLOCK: usize = 168;

/// Parameters and residual of an MLP: every operand but x and y. K input columns, F hidden columns, N output columns.
#[derive(Clone, Copy)]
pub struct Mlp<'a> {
    /// The norm n; `None` for the identity.
    pub norm: Option<Norm<'a>>,
    /// The hidden activation f: GELU, or a GELU gate.
    pub hidden: Hidden,
    /// F, the number of columns of the hidden layer.
    pub columns: usize,
    /// W1 (F, K) packed in tiles; (2F, K) with a gate.
    pub w1: &'a [Bf16],
    /// b1, one value per row of W1.
    pub b1: Option<&'a [Bf16]>,
    /// W2 (N, F) packed in tiles.
    pub w2: &'a [Bf16],
    /// b2 (N).
    pub b2: Option<&'a [Bf16]>,
    /// Residual r (M, N). It may be the same matrix as `y`, and the same matrix as `x`.
    pub residual: Option<Rows<'a, Bf16>>,
}

/// Parameters of a layer norm over K columns.
#[derive(Clone, Copy)]
pub struct Norm<'a> {
    /// Scale (K).
    pub gamma: &'a [f32],
    /// Shift (K).
    pub beta: &'a [f32],
    /// Added to the variance.
    pub eps: f32,
}

impl Mlp<'_> {
    /// Number of rows of W1: F, or 2F with a gate.
    pub(super) fn width(&self) -> usize {
        match self.hidden {
            Hidden::Gelu => self.columns,
            Hidden::Gate => 2 * self.columns,
        }
    }

    /// Panics if the shapes of the operands do not match.
    fn check(&self, x: Rows<'_, Bf16>, y: &RowsMut<'_, Bf16>) {
        let (m, k, n, width) = (x.rows(), x.cols(), y.cols(), self.width());
        let tiles = |n: usize, k: usize| n.div_ceil(PANEL) * tiles::panel(k);
        assert_eq!(y.rows(), m, "rows of y");
        assert!(self.norm.is_none_or(|n| n.gamma.len() == k && n.beta.len() == k), "gamma and beta of {k}");
        assert!(self.hidden == Hidden::Gelu || self.columns.is_multiple_of(PANEL), "halves of whole panels");
        assert_eq!(self.w1.len(), tiles(width, k), "weights of ({width}, {k}) in tiles");
        assert_eq!(self.w2.len(), tiles(n, self.columns), "weights of ({n}, {}) in tiles", self.columns);
        assert!(self.b1.is_none_or(|b| b.len() == width) && self.b2.is_none_or(|b| b.len() == n), "biases");
        assert!(self.residual.is_none_or(|r| r.rows() == m && r.cols() == n), "residual of ({m}, {n})");
    }
}

/// Computes the MLP of x (M, K) into y (M, N). `y` may be exactly `x`. `workspace` holds `workspace_bytes` for each
/// thread. Panics if the shapes do not match.
pub fn mlp(cpu: &Cpu, x: Rows<'_, Bf16>, op: Mlp<'_>, y: RowsMut<'_, Bf16>, workspace: &mut [f32]) {
    op.check(x, &y);
    let each = workspace.len() / cpu.threads() / LINE * LINE;
    #[cfg(target_arch = "x86_64")]
    if cpu.isa().has_tiles() && x.cols() > 0 && op.columns > 0 {
        use super::{amx::Tiles, mlp_bf16_amx};
        // SAFETY: `has_tiles` says that this CPU has AMX tiles, and AVX-512 with BF16.
        return unsafe { mlp_bf16_amx::mlp::<Tiles>(cpu, x, op, &y, workspace.as_mut_ptr(), 4 * each) };
    }
    // Workspace per row, in bf16 elements: n(x) and the result of the first matmul.
    let row = op.norm.map_or(0, |_| x.cols()) + op.width();
    let height = cpu.isa().tile_rows();
    let most = each.saturating_sub(gemm_bf16::EACH) * 2 / row.max(1) / height * height;
    assert!(most > 0, "workspace for a tile of rows");
    let split = Split::new(x.rows(), 1, cpu.threads(), height, most.min(BLOCK), 1);
    let (form, scratch) = (Instructions::of(cpu.isa()), workspace.as_mut_ptr() as usize);
    cpu.pool().run(split.tasks(), &|task, worker| {
        let (rows, _) = split.task(task);
        // The worker indices of one run are distinct and below `threads()`, so workspaces never overlap.
        let scratch = (scratch as *mut f32).wrapping_add(worker * each);
        cpu.isa().run(MlpTile { form, x, op, y: &y, rows, scratch });
    });
}

/// Number of f32 per cache line.
const LINE: usize = 16;

/// The work on one block of rows, for `Isa::run`. `scratch` is this worker's workspace: the matmul's scratch, n(x)
/// and the hidden layer, in this order.
struct MlpTile<'a> {
    form: Instructions,
    x: Rows<'a, Bf16>,
    op: Mlp<'a>,
    y: &'a RowsMut<'a, Bf16>,
    rows: Range<usize>,
    scratch: *mut f32,
}

impl Kernel for MlpTile<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let (rows, op, k, n) = (self.rows.len(), self.op, self.x.cols(), self.y.cols());
        let space = self.scratch.wrapping_add(gemm_bf16::EACH).cast::<Bf16>();
        let mut x = self.x.part(self.rows.start, rows);
        let mut hidden = space;
        if let Some(norm) = op.norm {
            // SAFETY: the block's rows of n(x) are at the start of this worker's workspace, which no other thread
            // uses.
            let normed = unsafe { RowsMut::from_raw(space, rows, k, k) };
            norm::layer_norm_rows(s, x, norm.gamma, norm.beta, norm.eps, &normed);
            // SAFETY: the same rows, which are no longer written.
            x = unsafe { Rows::from_raw(space, rows, k, k) };
            hidden = space.wrapping_add(rows * k);
        }
        let width = op.width();
        // SAFETY: the rows of the first matmul's result follow the rows of n(x) in the workspace.
        let sums = unsafe { RowsMut::from_raw(hidden, rows, width, width) };
        let act = match op.hidden {
            Hidden::Gelu => Act::Gelu,
            Hidden::Gate => Act::None,
        };
        let e = EpilogueBf16 { bias: op.b1, act, residual: None };
        gemm_bf16::block(s, self.form, GemmCall::new(x, op.w1, e, &sums), self.scratch);
        // SAFETY: `gated` covers the first F columns of the same rows, where the gate's result is written over the
        // gate's input; `values` is read only after that.
        let (gated, values) = unsafe {
            (
                RowsMut::from_raw(hidden, rows, op.columns, width),
                Rows::from_raw(hidden, rows, op.columns, width),
            )
        };
        if op.hidden == Hidden::Gate {
            elementwise::glu_rows(s, Gate::Gelu, sums.as_rows(), &gated);
        }
        let residual = op.residual.map(|r| r.part(self.rows.start, rows));
        let e = EpilogueBf16 { bias: op.b2, act: Act::None, residual };
        // SAFETY: the block's rows of y, which only this task writes.
        let y = unsafe { RowsMut::from_raw(self.y.row(self.rows.start), rows, n, self.y.ld()) };
        gemm_bf16::block(s, self.form, GemmCall::new(values, op.w2, e, &y), self.scratch);
    }
}
