//! Element-wise ops: addition, GELU, ReLU, gated linear units and their gradients, scaling, copy and fill.
//!
//! Invariant: an output element depends only on input elements of its own row, at its own column (gated linear units:
//! at that column of both halves).

use crate::Cpu;
use crate::element::Element;
use crate::simd::isa::SimdKernel;
use crate::simd::math;
use crate::simd::{LANES, Simd};
use crate::view::{Rows, RowsMut};
use core::ops::Range;

/// Addition: y = a + b. `y` may be exactly `a` or `b`.
pub fn add<E: Element>(cpu: &Cpu, a: Rows<'_, E>, b: Rows<'_, E>, y: RowsMut<'_, E>) {
    assert!(a.rows() == b.rows() && a.cols() == b.cols(), "a and b of one shape");
    each(cpu, ElementwiseOp::Add, a, b, y);
}

/// GELU: y = x Phi(x) with the exact normal distribution Phi (erf), not its tanh approximation. `y` may be exactly
/// `x`.
pub fn gelu<E: Element>(cpu: &Cpu, x: Rows<'_, E>, y: RowsMut<'_, E>) {
    each(cpu, ElementwiseOp::Gelu, x, x, y);
}

/// ReLU: y = max(x, 0). NaN stays NaN. `y` may be exactly `x`.
pub fn relu<E: Element>(cpu: &Cpu, x: Rows<'_, E>, y: RowsMut<'_, E>) {
    each(cpu, ElementwiseOp::Relu, x, x, y);
}

/// Activation function of a gated linear unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gate {
    /// x Phi(x), with the exact normal distribution Phi.
    Gelu,
    /// x / (1 + e^-x).
    Silu,
}

/// Gated linear unit: y (T, F) = f(x[.., ..F]) * x[.., F..] for x (T, 2F) (Shazeer, 2020). `y` may be exactly the
/// first F columns of `x`.
pub fn glu<E: Element>(cpu: &Cpu, gate: Gate, x: Rows<'_, E>, y: RowsMut<'_, E>) {
    let half = y.cols();
    assert_eq!(x.cols(), 2 * half, "columns of x");
    each(cpu, ElementwiseOp::Glu(gate), x.columns(0, half), x.columns(half, half), y);
}

/// Gradient of [`glu`]: dx[.., ..F] = dy f'(x[.., ..F]) x[.., F..] and dx[.., F..] = dy f(x[.., ..F]) for x (T, 2F).
/// `dx` may be exactly `x`.
pub fn glu_grad(cpu: &Cpu, gate: Gate, dy: Rows<'_>, x: Rows<'_>, dx: RowsMut<'_>) {
    let rows = dy.rows();
    let half = dy.cols();
    assert!(x.rows() == rows && x.cols() == 2 * half, "x is ({rows}, {})", 2 * half);
    assert!(dx.rows() == rows && dx.cols() == 2 * half, "dx is ({rows}, {})", 2 * half);
    cpu.by_rows(rows, 2 * half, &|range| cpu.isa().run(GluGradRows { gate, dy, x, dx: &dx, range }));
}

/// Gradient of [`gelu`]: dx = dy (Phi(x) + x phi(x)). `dx` may be exactly `dy` or `x`.
pub fn gelu_grad(cpu: &Cpu, dy: Rows<'_>, x: Rows<'_>, dx: RowsMut<'_>) {
    assert!(dy.rows() == x.rows() && dy.cols() == x.cols(), "dy and x of one shape");
    each(cpu, ElementwiseOp::GeluGrad, dy, x, dx);
}

/// Gradient of [`relu`]: dx = dy, and 0 where x <= 0. `dx` may be exactly `dy` or `x`.
pub fn relu_grad(cpu: &Cpu, dy: Rows<'_>, x: Rows<'_>, dx: RowsMut<'_>) {
    assert!(dy.rows() == x.rows() && dy.cols() == x.cols(), "dy and x of one shape");
    each(cpu, ElementwiseOp::ReluGrad, dy, x, dx);
}

/// Scaling: y = factor x. `y` may be exactly `x`.
pub fn scale<E: Element>(cpu: &Cpu, factor: f32, x: Rows<'_, E>, y: RowsMut<'_, E>) {
    each(cpu, ElementwiseOp::Scale(factor), x, x, y);
}

/// Copy: y = x, for example into some columns of a concatenation.
pub fn copy<E: Element>(cpu: &Cpu, x: Rows<'_, E>, y: RowsMut<'_, E>) {
    each(cpu, ElementwiseOp::Copy, x, x, y);
}

/// Sets all elements of `y` to `value`, for example zeros in rows past the last used row.
pub fn fill(cpu: &Cpu, value: f32, y: RowsMut<'_>) {
    // SAFETY: `ElementwiseOp::Fill` reads no element of this view.
    let nothing = unsafe { Rows::from_raw(core::ptr::null(), y.rows(), y.cols(), y.cols()) };
    each(cpu, ElementwiseOp::Fill(value), nothing, nothing, y);
}

/// An element-wise op.
#[derive(Clone, Copy)]
enum ElementwiseOp {
    Add,
    Gelu,
    GeluGrad,
    Relu,
    ReluGrad,
    Scale(f32),
    Glu(Gate),
    Copy,
    Fill(f32),
}

/// Runs an op over all rows, in parallel. Ops with one input receive it as both `a` and `b`. Panics if the shapes of
/// `a` and `y` differ.
fn each<E: Element>(cpu: &Cpu, op: ElementwiseOp, a: Rows<'_, E>, b: Rows<'_, E>, y: RowsMut<'_, E>) {
    let rows = y.rows();
    let cols = y.cols();
    assert!(a.rows() == rows && a.cols() == cols, "x and y of one shape, ({rows}, {cols})");
    cpu.by_rows(rows, cols, &|range| cpu.isa().run(ElementwiseRows { op, a, b, y: &y, range }));
}

/// The smallest positive f32: a number is below it exactly if it is at most 0.
const SMALLEST_POSITIVE: f32 = f32::from_bits(1);

/// An op on the rows `range`, for `Isa::run`.
struct ElementwiseRows<'a, E> {
    op: ElementwiseOp,
    a: Rows<'a, E>,
    b: Rows<'a, E>,
    y: &'a RowsMut<'a, E>,
    range: Range<usize>,
}

impl<E: Element> SimdKernel for ElementwiseRows<'_, E> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let cols = self.y.cols();
        for r in self.range.clone() {
            for j in (0..cols).step_by(LANES) {
                let n = LANES.min(cols - j);
                let a = self.a.row(r).wrapping_add(j);
                let b = self.b.row(r).wrapping_add(j);
                // SAFETY: columns j..j + n of row r lie inside each view that the op reads, and only this task writes
                // row r of y.
                unsafe { E::store_n(s, self.y.row(r).add(j), value(s, self.op, a, b, n), n) };
            }
        }
    }
}

/// Computes an op on the `n` elements at `a` and, if it has two inputs, at `b`. A function rather than a closure,
/// because only a function can be forced to be inlined into the caller that enables the target features.
///
/// # Safety
/// `n` elements, at most 16, must be readable at each place that the op reads.
#[inline(always)]
unsafe fn value<S: Simd, E: Element>(s: S, op: ElementwiseOp, a: *const E, b: *const E, n: usize) -> S::V {
    // SAFETY: as the caller promises.
    unsafe {
        match op {
            ElementwiseOp::Add => s.add(E::load_n(s, a, n), E::load_n(s, b, n)),
            ElementwiseOp::Gelu => E::gelu(s, E::load_n(s, a, n)),
            ElementwiseOp::GeluGrad => s.mul(E::load_n(s, a, n), math::gelu_slope(s, E::load_n(s, b, n))),
            ElementwiseOp::Relu => s.max(s.splat(0.0), E::load_n(s, a, n)),
            ElementwiseOp::ReluGrad => {
                s.zero_below(E::load_n(s, a, n), E::load_n(s, b, n), s.splat(SMALLEST_POSITIVE))
            }
            ElementwiseOp::Scale(factor) => s.mul(E::load_n(s, a, n), s.splat(factor)),
            ElementwiseOp::Glu(Gate::Gelu) => s.mul(E::gelu(s, E::load_n(s, a, n)), E::load_n(s, b, n)),
            ElementwiseOp::Glu(Gate::Silu) => s.mul(E::silu(s, E::load_n(s, a, n)), E::load_n(s, b, n)),
            ElementwiseOp::Copy => E::load_n(s, a, n),
            ElementwiseOp::Fill(value) => s.splat(value),
        }
    }
}

/// Gradient of a gated linear unit for the rows `range`, for `Isa::run`.
struct GluGradRows<'a> {
    gate: Gate,
    dy: Rows<'a>,
    x: Rows<'a>,
    dx: &'a RowsMut<'a>,
    range: Range<usize>,
}

impl SimdKernel for GluGradRows<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let half = self.dy.cols();
        for r in self.range.clone() {
            let dy = self.dy.row(r);
            let x = self.x.row(r);
            let dx = self.dx.row(r);
            for j in (0..half).step_by(LANES) {
                let n = LANES.min(half - j);
                // SAFETY: columns j..j + n of row r exist in dy and in both halves of x and dx; both halves are read
                // before they are written, and only this task writes row r.
                unsafe {
                    let dy = s.load_n(dy.add(j), n);
                    let gate = s.load_n(x.add(j), n);
                    let value = s.load_n(x.add(half + j), n);
                    let (f, slope) = match self.gate {
                        Gate::Gelu => (math::gelu(s, gate), math::gelu_slope(s, gate)),
                        Gate::Silu => (math::silu(s, gate), math::silu_slope(s, gate)),
                    };
                    s.store_n(dx.add(j), s.mul(s.mul(dy, slope), value), n);
                    s.store_n(dx.add(half + j), s.mul(dy, f), n);
                }
            }
        }
    }
}
