//! Rows as integers of 8 bits with a scale each, behind what makes them: nothing, a layer norm, GELU or a gate.
//!
//! Invariant: codes and scales are those of `graph::ops::Quantize` for the numbers before they are rounded to a type; a
//! row's depend on that row alone, and with FMA not on the instructions.

use super::Cpu;
use super::codes::CodeRowsMut;
use super::element::Element;
use super::elementwise::Gate;
use super::isa::Kernel;
use super::math::silu;
use super::norm;
use super::simd::{LANES, Simd};
use super::view::{Rows, RowsMut};
use core::ops::Range;
use exec::scaled::{Codes, ROUND, TINY};

/// What is quantised of x.
#[derive(Clone, Copy)]
pub enum Of<'a, P> {
    /// x.
    Rows,
    /// Its layer norm.
    LayerNorm {
        /// Scale.
        gamma: &'a [P],
        /// Shift.
        beta: &'a [P],
        /// Added to the variance.
        eps: f32,
    },
    /// Its GELU.
    Gelu,
    /// The gated product of its halves.
    Glu(Gate),
}

/// The codes of f(x), and where wanted its numbers in y, which may be exactly x but behind a gate. `workspace` holds
/// a row of f32 for each thread.
pub fn quantize<E: Element, P: Element>(
    cpu: &Cpu,
    of: Of<'_, P>,
    x: Rows<'_, E>,
    codes: CodeRowsMut<'_>,
    y: Option<RowsMut<'_, E>>,
    workspace: &mut [f32],
) {
    /// Elements of a task, as `Cpu::by_rows` has them.
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
    let (height, scratch) = ((GRAIN / wide.max(1)).max(1), workspace.as_mut_ptr() as usize);
    cpu.pool().run(rows.div_ceil(height), &|task, worker| {
        // Worker indices of one run are distinct and below `threads()`.
        let row = (scratch as *mut f32).wrapping_add(worker * each);
        let range = task * height..rows.min((task + 1) * height);
        cpu.isa().run(Quantize { of, x, codes: &codes, y: y.as_ref(), row, range });
    });
}

/// A task. `row` has room for a row of whole vectors.
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
            // SAFETY: row r is this task's, and so is the room.
            unsafe {
                let most = self.numbers(s, r);
                self.encode(s, r, most);
            }
        }
    }
}

impl<E: Element, P: Element> Quantize<'_, E, P> {
    /// Row r of f(x) to the room and to y; its largest magnitude, which is not a number where one of them is none.
    ///
    /// # Safety
    /// Row r is this task's; the room has its columns as whole vectors.
    #[inline(always)]
    unsafe fn numbers<S: Simd>(&self, s: S, r: usize) -> f32 {
        let (x, cols) = (self.x.row(r), self.codes.size().1);
        let norm = match self.of {
            // SAFETY: row r of x holds `cols` elements.
            Of::LayerNorm { eps, .. } => unsafe { norm::statistics(s, x, cols, eps) },
            Of::Rows | Of::Gelu | Of::Glu(_) => (0.0, 1.0),
        };
        let norm = (s.splat(norm.0), s.splat(norm.1));
        // 0 v is 0, or not a number as v is none or not finite: the sum keeps that, which a maximum may not.
        let (mut most, mut lost) = (s.splat(TINY), s.splat(0.0));
        for j in (0..cols).step_by(LANES) {
            let n = LANES.min(cols - j);
            // SAFETY: j + n <= cols, the columns of y and of the room, which has whole vectors.
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

    /// `n` columns of f(x) from `j` on, zeros behind them.
    ///
    /// # Safety
    /// Row `x` has those columns, twice as many where they are gated; `norm` is its mean and rstd.
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

    /// The codes of the room's row, whose largest magnitude is `most`, as row r.
    ///
    /// # Safety
    /// As `numbers`, which has run.
    #[inline(always)]
    unsafe fn encode<S: Simd>(&self, s: S, r: usize, most: f32) {
        let largest = Codes::Int8.largest();
        let (codes, scale) = self.codes.row(r);
        // No code is a number that is none: the scale says so.
        let inverse = if most.is_nan() { 0.0 } else { largest / most };
        for j in (0..self.codes.size().1).step_by(LANES) {
            // SAFETY: rows of codes are whole vectors, and so is the room.
            unsafe {
                let v = s.mul(s.load(self.row.add(j)), s.splat(inverse));
                s.store_low(codes.add(j), s.add(v, s.splat(ROUND)));
            }
        }
        // SAFETY: the scale of row r.
        unsafe { scale.write(most / largest) };
    }
}

/// What numbers of 16 bits are made of is as exact as what is rounded to them.
#[inline(always)]
fn activated<S: Simd, E: Element>(s: S, gate: Gate, v: S::V) -> S::V {
    match gate {
        Gate::Gelu => E::gelu(s, v),
        Gate::Silu => silu(s, v),
    }
}
