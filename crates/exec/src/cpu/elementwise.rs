//! Ops that look at one element at a time: add, GELU, ReLU, the gated product, copy, fill.
//!
//! Invariant: an output element depends on the input elements at its own place only.

use super::Cpu;
use super::isa::Kernel;
use super::math;
use super::simd::{LANES, Simd};
use super::view::{Rows, RowsMut};
use core::ops::Range;

/// y = a + b. `y` may be exactly `a` or `b`.
pub fn add(cpu: &Cpu, a: Rows<'_>, b: Rows<'_>, y: RowsMut<'_>) {
    assert!(a.rows() == b.rows() && a.cols() == b.cols(), "a and b of one shape");
    each(cpu, Op::Add, a, b, y);
}

/// y = x Phi(x), exact GELU (erf). `y` may be exactly `x`.
pub fn gelu(cpu: &Cpu, x: Rows<'_>, y: RowsMut<'_>) {
    each(cpu, Op::Gelu, x, x, y);
}

/// y = max(x, 0); NaN stays NaN. `y` may be exactly `x`.
pub fn relu(cpu: &Cpu, x: Rows<'_>, y: RowsMut<'_>) {
    each(cpu, Op::Relu, x, x, y);
}

/// y (T, F) = gelu(x[.., ..F]) * x[.., F..] for x (T, 2F): MosaicBERT's gated linear unit
/// (Shazeer, 2020). `y` may be exactly the first F columns of `x`.
pub fn glu(cpu: &Cpu, x: Rows<'_>, y: RowsMut<'_>) {
    let half = y.cols();
    assert_eq!(x.cols(), 2 * half, "columns of x");
    each(cpu, Op::Glu, x.columns(0, half), x.columns(half, half), y);
}

/// y = x, for example into some columns of a concatenation.
pub fn copy(cpu: &Cpu, x: Rows<'_>, y: RowsMut<'_>) {
    each(cpu, Op::Copy, x, x, y);
}

/// y = value everywhere, for example zeros in the rows past the count.
pub fn fill(cpu: &Cpu, value: f32, y: RowsMut<'_>) {
    // SAFETY: no column of this view is ever read.
    let nothing = unsafe { Rows::from_raw(core::ptr::null(), y.rows(), y.cols(), y.cols()) };
    each(cpu, Op::Fill(value), nothing, nothing, y);
}

#[derive(Clone, Copy)]
enum Op {
    Add,
    Gelu,
    Relu,
    Glu,
    Copy,
    Fill(f32),
}

fn each(cpu: &Cpu, op: Op, a: Rows<'_>, b: Rows<'_>, y: RowsMut<'_>) {
    let (rows, cols) = (y.rows(), y.cols());
    assert!(a.rows() == rows && a.cols() == cols, "x and y of one shape, ({rows}, {cols})");
    cpu.by_rows(rows, cols, &|range| cpu.isa().run(Each { op, a, b, y: &y, range }));
}

struct Each<'a> {
    op: Op,
    a: Rows<'a>,
    b: Rows<'a>,
    y: &'a RowsMut<'a>,
    range: Range<usize>,
}

impl Kernel for Each<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let cols = self.y.cols();
        for r in self.range.clone() {
            for j in (0..cols).step_by(LANES) {
                let n = LANES.min(cols - j);
                // SAFETY: columns j..j + n of row r, inside each view.
                let a = || unsafe { s.load_n(self.a.row(r).add(j), n) };
                // SAFETY: as above.
                let b = || unsafe { s.load_n(self.b.row(r).add(j), n) };
                let v = match self.op {
                    Op::Add => s.add(a(), b()),
                    Op::Gelu => math::gelu(s, a()),
                    Op::Relu => s.max(s.splat(0.0), a()),
                    Op::Glu => s.mul(math::gelu(s, a()), b()),
                    Op::Copy => a(),
                    Op::Fill(value) => s.splat(value),
                };
                // SAFETY: as above; this task alone writes row r.
                unsafe { s.store_n(self.y.row(r).add(j), v, n) };
            }
        }
    }
}
