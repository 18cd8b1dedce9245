//! Quantization of rows to int8 with one scale per row, fused with the op that computes them: none, a layer norm,
//! GELU or a gated activation.
//!
//! Invariant: quantized values and scales are as defined by `plimsoll_graph::ops::Quantize`, computed from the f32
//! values before any rounding to the element type. A row's values depend on that row alone and, with FMA, not on the
//! instruction set.

use crate::Cpu;
use crate::element::Element;
use crate::matmul::quantized::CodeRowsMut;
use crate::rows::elementwise::Gate;
use crate::rows::norm;
use crate::simd::isa::Kernel;
use crate::simd::{LANES, Simd};
use crate::view::{Rows, RowsMut};
use core::ops::Range;
use plimsoll_exec::scaled::{QuantizedFormat, ROUND, TINY};

/// The function f of x that is quantized.
#[derive(Clone, Copy)]
pub enum Of<'a, P> {
    /// x itself.
    Rows,
    /// Layer norm of x.
    LayerNorm {
        /// Scale.
        gamma: &'a [P],
        /// Shift.
        beta: &'a [P],
        /// Added to the variance.
        eps: f32,
    },
    /// GELU of x.
    Gelu,
    /// Gated activation: act(first half of x's columns) * second half.
    Glu(Gate),
}

/// Quantizes f(x) into `quantized` and, if given, writes f(x) unquantized to `y`, which may be exactly `x` except with a
/// gate. `workspace` holds one row of f32, rounded up to whole vectors, for each thread. Panics if the shapes do not
/// match.
pub fn quantize<E: Element, P: Element>(
    cpu: &Cpu,
    of: Of<'_, P>,
    x: Rows<'_, E>,
    codes: CodeRowsMut<'_>,
    y: Option<RowsMut<'_, E>>,
    workspace: &mut [f32],
) {
    /// Elements per task, as in `Cpu::by_rows`.
    const GRAIN: usize = 16 * 1024;
    let (rows, cols) = codes.size();
    let wide = if let Of::Glu(_) = of { 2 * cols } else { cols };
    assert!(x.rows() == rows && x.cols() == wide, "x is ({rows}, {wide})");
    assert!(y.as_ref().is_none_or(|y| y.rows() == rows && y.cols() == cols), "y is ({rows}, {cols})");
    if let Of::LayerNorm { gamma, beta, .. } = of {
        assert!(gamma.len() == cols && beta.len() == cols, "gamma and beta of {cols}");
    }
    let each = workspace.len() / cpu.threads();
    assert!(each >= cols.next_multiple_of(LANES), "workspace for {} threads", cpu.threads());
    let height = (GRAIN / wide.max(1)).max(1);
    let scratch = workspace.as_mut_ptr() as usize;
    cpu.pool().run(rows.div_ceil(height), &|task, worker| {
        // The worker indices of one run are distinct and below `threads()`, so workspaces never overlap.
        let row = (scratch as *mut f32).wrapping_add(worker * each);
        let range = task * height..rows.min((task + 1) * height);
        cpu.isa().run(Quantize { of, x, codes: &codes, y: y.as_ref(), row, range });
    });
}

/// One task. `row` is workspace for one row in whole vectors.
struct Quantize<'a, E, P> {
    of: Of<'a, P>,
    x: Rows<'a, E>,
    codes: &'a CodeRowsMut<'a>,
    y: Option<&'a RowsMut<'a, E>>,
    row: *mut f32,
    range: Range<usize>,
}

impl<E: Element, P: Element> Kernel for Quantize<'_, E, P> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for r in self.range.clone() {
            // SAFETY: row r and the workspace belong to this task.
            unsafe {
                let most = self.numbers(s, r);
                self.encode(s, r, most);
            }
        }
    }
}

impl<E: Element, P: Element> Quantize<'_, E, P> {
    /// Writes row r of f(x) to the workspace and to y; returns its largest magnitude, at least `TINY`, or NaN if a
    /// value is not finite.
    ///
    /// # Safety
    /// Row r belongs to this task; the workspace holds its columns in whole vectors.
    #[inline(always)]
    unsafe fn numbers<S: Simd>(&self, s: S, r: usize) -> f32 {
        let x = self.x.row(r);
        let cols = self.codes.size().1;
        let norm = match self.of {
            // SAFETY: row r of x holds `cols` elements.
            Of::LayerNorm { eps, .. } => unsafe { norm::statistics(s, x, cols, eps) },
            Of::Rows | Of::Gelu | Of::Glu(_) => (0.0, 1.0),
        };
        let norm = (s.splat(norm.0), s.splat(norm.1));
        // 0 v is NaN if v is NaN or infinite, else 0. The sum propagates the NaN, while a maximum may drop it.
        let mut most = s.splat(TINY);
        let mut lost = s.splat(0.0);
        for j in (0..cols).step_by(LANES) {
            let n = LANES.min(cols - j);
            // SAFETY: j + n <= cols, the columns of y and of the workspace, which has whole vectors.
            unsafe {
                let v = self.value(s, x, norm, j, n);
                most = s.max(s.abs(v), most);
                lost = s.fma(v, s.splat(0.0), lost);
                s.store(self.row.add(j), v);
                if let Some(y) = self.y {
                    E::store_n(s, y.row(r).add(j), v, n);
                }
            }
        }
        s.max_lane(most) + s.sum(lost)
    }

    /// The `n` columns of f(x) from `j` on, zeros after them.
    ///
    /// # Safety
    /// Row `x` has these columns, twice as many with a gate; `norm` is its (mean, rstd).
    #[inline(always)]
    unsafe fn value<S: Simd>(&self, s: S, x: *const E, norm: (S::V, S::V), j: usize, n: usize) -> S::V {
        // SAFETY: as the caller promises; gamma and beta have as many columns.
        unsafe {
            let v = E::load_n(s, x.add(j), n);
            match self.of {
                Of::Rows => v,
                Of::LayerNorm { gamma, beta, .. } => {
                    let v = s.mul(s.sub(v, norm.0), norm.1);
                    let gamma = P::load_n(s, gamma.as_ptr().add(j), n);
                    s.fma(v, gamma, P::load_n(s, beta.as_ptr().add(j), n))
                }
                Of::Gelu => activated::<S, E>(s, Gate::Gelu, v),
                Of::Glu(gate) => {
                    let passed = E::load_n(s, x.add(self.codes.size().1 + j), n);
                    s.mul(activated::<S, E>(s, gate, v), passed)
                }
            }
        }
    }

    /// Quantizes the workspace's row, whose largest magnitude is `most`, into row r.
    ///
    /// # Safety
    /// As for `numbers`, which must have run.
    #[inline(always)]
    unsafe fn encode<S: Simd>(&self, s: S, r: usize, most: f32) {
        let largest = QuantizedFormat::Int8.largest();
        let (codes, scale) = self.codes.row(r);
        // int8 cannot represent NaN, so all values become 0 and the scale is NaN.
        let inverse = if most.is_nan() { 0.0 } else { largest / most };
        for j in (0..self.codes.size().1).step_by(LANES) {
            // SAFETY: quantized rows are padded to whole vectors, and so is the workspace.
            unsafe {
                let v = s.mul(s.load(self.row.add(j)), s.splat(inverse));
                s.store_low(codes.add(j), s.add(v, s.splat(ROUND)));
            }
        }
        // SAFETY: the scale of row r.
        unsafe { scale.write(most / largest) };
    }
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
