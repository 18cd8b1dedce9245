//! Quantization of rows to int8 with one scale per row, fused with the op that computes them: none, a layer norm,
//! GELU or a gated activation.
//!
//! Invariant: quantized values and scales are as defined by `plimsoll_graph::ops::Quantize`, computed from the f32
//! values before any rounding to the element type. A row's values depend on that row alone and, with FMA, not on the
//! instruction set.

use crate::Cpu;
use crate::element::Element;
use crate::matmul::quantized::QuantizedRowsMut;
use crate::rows::elementwise::Gate;
use crate::rows::norm::{self, LayerNormParams, RowStatistics};
use crate::simd::isa::SimdKernel;
use crate::simd::{LANES, Simd};
use crate::view::{Rows, RowsMut};
use core::ops::Range;
use plimsoll_exec::scaled::{QuantizedFormat, ROUND, TINY};

/// The function f of x that is quantized.
#[derive(Clone, Copy)]
pub enum FusedOp<'a, P> {
    /// x itself.
    None,
    /// Layer norm of x.
    LayerNorm(LayerNormParams<'a, P>),
    /// GELU of x.
    Gelu,
    /// Gated activation: act(first half of x's columns) * second half.
    Glu(Gate),
}

/// Outputs of a quantization.
pub struct QuantizeOutputs<'a, E> {
    /// f(x), quantized.
    pub quantized: QuantizedRowsMut<'a>,
    /// f(x), written if given. It may be exactly `x` except with a gate.
    pub y: Option<RowsMut<'a, E>>,
}

/// Quantizes f(x). `workspace` holds one row of f32, rounded up to whole vectors, for each thread. Panics if the shapes
/// do not match.
pub fn quantize<E: Element, P: Element>(
    cpu: &Cpu,
    op: FusedOp<'_, P>,
    x: Rows<'_, E>,
    outputs: QuantizeOutputs<'_, E>,
    workspace: &mut [f32],
) {
    /// Elements per task, as in `Cpu::by_rows`.
    const GRAIN: usize = 16 * 1024;
    let QuantizeOutputs { quantized, y } = outputs;
    let rows = quantized.rows();
    let cols = quantized.cols();
    let wide = if let FusedOp::Glu(_) = op { 2 * cols } else { cols };
    assert!(x.rows() == rows && x.cols() == wide, "x is ({rows}, {wide})");
    assert!(y.as_ref().is_none_or(|y| y.rows() == rows && y.cols() == cols), "y is ({rows}, {cols})");
    if let FusedOp::LayerNorm(LayerNormParams { gamma, beta, .. }) = op {
        assert!(gamma.len() == cols && beta.len() == cols, "gamma and beta of {cols}");
    }
    let words_per_thread = workspace.len() / cpu.threads();
    assert!(words_per_thread >= cols.next_multiple_of(LANES), "workspace for {} threads", cpu.threads());
    let rows_per_task = (GRAIN / wide.max(1)).max(1);
    let scratch = workspace.as_mut_ptr() as usize;
    cpu.pool().run(rows.div_ceil(rows_per_task), &|task, worker| {
        // The worker indices of one run are distinct and below `threads()`, so workspaces never overlap.
        let row = (scratch as *mut f32).wrapping_add(worker * words_per_thread);
        let range = task * rows_per_task..rows.min((task + 1) * rows_per_task);
        cpu.isa().run(QuantizeRowsTask { op, x, quantized: &quantized, y: y.as_ref(), row, range });
    });
}

/// One task. `row` is workspace for one row in whole vectors.
struct QuantizeRowsTask<'a, E, P> {
    op: FusedOp<'a, P>,
    x: Rows<'a, E>,
    quantized: &'a QuantizedRowsMut<'a>,
    y: Option<&'a RowsMut<'a, E>>,
    row: *mut f32,
    range: Range<usize>,
}

impl<E: Element, P: Element> SimdKernel for QuantizeRowsTask<'_, E, P> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for r in self.range.clone() {
            // SAFETY: row r and the workspace belong to this task.
            unsafe {
                let absmax = self.compute(s, r);
                self.encode(s, r, absmax);
            }
        }
    }
}

impl<E: Element, P: Element> QuantizeRowsTask<'_, E, P> {
    /// Writes row r of f(x) to the workspace and to y; returns its largest magnitude, at least `TINY`, or NaN if a
    /// value is not finite.
    ///
    /// # Safety
    /// Row r belongs to this task; the workspace holds its columns in whole vectors.
    #[inline(always)]
    unsafe fn compute<S: Simd>(&self, s: S, r: usize) -> f32 {
        let x = self.x.row(r);
        let cols = self.quantized.cols();
        let statistics = match self.op {
            // SAFETY: row r of x holds `cols` elements.
            FusedOp::LayerNorm(params) => unsafe { norm::row_statistics(s, x, cols, params.eps) },
            FusedOp::None | FusedOp::Gelu | FusedOp::Glu(_) => RowStatistics { mean: 0.0, rstd: 1.0 },
        };
        let statistics = SplatStatistics { mean: s.splat(statistics.mean), rstd: s.splat(statistics.rstd) };
        // 0 v is NaN if v is NaN or infinite, else 0. The sum propagates the NaN, while a maximum may drop it.
        let mut absmax = s.splat(TINY);
        let mut nan_if_lost = s.splat(0.0);
        for j in (0..cols).step_by(LANES) {
            let n = LANES.min(cols - j);
            // SAFETY: j + n <= cols, the columns of y and of the workspace, which has whole vectors.
            unsafe {
                let v = self.value(s, x, statistics, j, n);
                absmax = s.max(s.abs(v), absmax);
                nan_if_lost = s.fma(v, s.splat(0.0), nan_if_lost);
                s.store(self.row.add(j), v);
                if let Some(y) = self.y {
                    E::store_n(s, y.row(r).add(j), v, n);
                }
            }
        }
        s.max_lane(absmax) + s.sum(nan_if_lost)
    }

    /// The `n` columns of f(x) from `j` on, zeros after them.
    ///
    /// # Safety
    /// Row `x` has these columns, twice as many with a gate.
    #[inline(always)]
    unsafe fn value<S: Simd>(
        &self,
        s: S,
        x: *const E,
        statistics: SplatStatistics<S::V>,
        j: usize,
        n: usize,
    ) -> S::V {
        // SAFETY: as the caller promises; gamma and beta have as many columns.
        unsafe {
            let v = E::load_n(s, x.add(j), n);
            match self.op {
                FusedOp::None => v,
                FusedOp::LayerNorm(LayerNormParams { gamma, beta, .. }) => {
                    let v = s.mul(s.sub(v, statistics.mean), statistics.rstd);
                    let gamma = P::load_n(s, gamma.as_ptr().add(j), n);
                    s.fma(v, gamma, P::load_n(s, beta.as_ptr().add(j), n))
                }
                FusedOp::Gelu => activated::<S, E>(s, Gate::Gelu, v),
                FusedOp::Glu(gate) => {
                    let passed = E::load_n(s, x.add(self.quantized.cols() + j), n);
                    s.mul(activated::<S, E>(s, gate, v), passed)
                }
            }
        }
    }

    /// Quantizes the workspace's row, whose largest magnitude is `absmax`, into row r.
    ///
    /// # Safety
    /// As for `compute`, which must have run.
    #[inline(always)]
    unsafe fn encode<S: Simd>(&self, s: S, r: usize, absmax: f32) {
        let largest = QuantizedFormat::Int8.largest();
        let values = self.quantized.row(r);
        // int8 cannot represent NaN, so all values become 0 and the scale is NaN.
        let inverse = if absmax.is_nan() { 0.0 } else { largest / absmax };
        for j in (0..self.quantized.cols()).step_by(LANES) {
            // SAFETY: quantized rows are padded to whole vectors, and so is the workspace.
            unsafe {
                let v = s.mul(s.load(self.row.add(j)), s.splat(inverse));
                s.store_low(values.add(j), s.add(v, s.splat(ROUND)));
            }
        }
        // SAFETY: the scale of row r.
        unsafe { self.quantized.scale(r).write(absmax / largest) };
    }
}

/// [`RowStatistics`] in all lanes.
#[derive(Clone, Copy)]
struct SplatStatistics<V> {
    mean: V,
    rstd: V,
}

/// The activation in the precision of the element type: for bf16 elements an approximation whose error is below bf16
/// rounding.
#[inline(always)]
fn activated<S: Simd, E: Element>(s: S, gate: Gate, v: S::V) -> S::V {
    match gate {
        Gate::Gelu => E::gelu(s, v),
        Gate::Silu => E::silu(s, v),
    }
}
