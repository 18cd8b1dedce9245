//! What all linear layers with packed weights share: their operands, and the epilogue that turns sums into outputs.

use crate::element::Element;
use crate::matmul::register_tile::PANEL;
use crate::simd::{LANES, Simd};
use crate::view::{Rows, RowsMut};

/// Operations applied to a matrix product, in this order: add the bias, apply `act`, add the residual.
#[derive(Clone, Copy, Default)]
pub struct MatmulEpilogue<'a, E = f32> {
    /// N values, added to each row.
    pub bias: Option<&'a [E]>,
    /// Applied after the bias.
    pub act: Act,
    /// (M, N), added last. It may be exactly the memory of `y`.
    pub residual: Option<Rows<'a, E>>,
}

impl<'a, E: Element> MatmulEpilogue<'a, E> {
    /// Panics unless bias and residual fit an output of (m, n).
    pub(crate) fn check(&self, m: usize, n: usize) {
        assert!(self.bias.is_none_or(|bias| bias.len() == n), "bias of {n}");
        assert!(self.residual.is_none_or(|r| r.rows() == m && r.cols() == n), "residual of ({m}, {n})");
    }
}

/// Activation function of a [`MatmulEpilogue`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Act {
    /// No activation.
    #[default]
    None,
    /// GELU, x Phi(x), with the exact error function.
    Gelu,
}

/// A linear layer with a packed weight: y (M, N) = residual + act(x (M, K) W^T + bias). `x` and `y` must not overlap.
pub struct LinearCall<'a, E = f32> {
    /// Input (M, K).
    pub x: Rows<'a, E>,
    /// Weight (N, K), packed as the kernel documents.
    pub w: &'a [E],
    /// Bias, activation and residual.
    pub epilogue: MatmulEpilogue<'a, E>,
    /// Output (M, N).
    pub y: RowsMut<'a, E>,
}

impl<E: Element> LinearCall<'_, E> {
    /// The operands as the tasks share them. Panics if their sizes are inconsistent.
    pub(crate) fn operands(&self) -> LinearOperands<'_, E> {
        LinearOperands::new(self.x, self.w, self.epilogue, &self.y)
    }
}

/// Operands of a linear layer, shared by its tasks.
#[derive(Clone, Copy)]
pub(crate) struct LinearOperands<'a, E = f32> {
    pub(crate) x: Rows<'a, E>,
    pub(crate) w: &'a [E],
    pub(crate) epilogue: MatmulEpilogue<'a, E>,
    pub(crate) y: &'a RowsMut<'a, E>,
}

impl<'a, E: Element> LinearOperands<'a, E> {
    /// Panics if the sizes of x, y, bias and residual are inconsistent. The size of `w` depends on its layout
    /// and is checked by the caller.
    pub(crate) fn new(
        x: Rows<'a, E>,
        w: &'a [E],
        epilogue: MatmulEpilogue<'a, E>,
        y: &'a RowsMut<'a, E>,
    ) -> Self {
        assert_eq!(y.rows(), x.rows(), "rows of y");
        epilogue.check(x.rows(), y.cols());
        Self { x, w, epilogue, y }
    }

    /// Rows `row..row + rows` of one panel of y.
    #[inline(always)]
    pub(crate) fn output(&self, row: usize, rows: usize, panel: usize) -> OutputStrip<'_, E> {
        OutputStrip { epilogue: &self.epilogue, y: self.y, row, rows, panel }
    }
}

/// Rows `row..row + rows` of one panel of y, and the epilogue of their sums.
pub(crate) struct OutputStrip<'a, E> {
    pub(crate) epilogue: &'a MatmulEpilogue<'a, E>,
    pub(crate) y: &'a RowsMut<'a, E>,
    pub(crate) row: usize,
    pub(crate) rows: usize,
    pub(crate) panel: usize,
}

impl<E: Element> OutputStrip<'_, E> {
    /// Applies the epilogue to the strip's sums and writes y.
    ///
    /// # Safety
    /// `sum` must hold `rows` rows of 32 sums; the rows of y must belong to the calling task.
    #[inline(always)]
    pub(crate) unsafe fn finish<S: Simd>(self, s: S, sum: *const f32) {
        // SAFETY: guaranteed by the caller.
        unsafe { self.finish_by(s, |r, column| s.load(sum.add(r * PANEL + column))) };
    }

    /// As `finish`, but takes the sums from `number(r, column)`: sixteen values of row `r` of the strip, from
    /// `column` of the panel on.
    ///
    /// # Safety
    /// The rows of y must belong to the calling task.
    #[inline(always)]
    pub(crate) unsafe fn finish_by<S: Simd>(self, s: S, number: impl Fn(usize, usize) -> S::V) {
        let OutputStrip { epilogue, y, row, rows, panel } = self;
        for column in [0, LANES] {
            let j = panel * PANEL + column;
            // The last panel may have fewer than 32 columns of y; packed weights are zero past them.
            let width = y.cols().saturating_sub(j).min(LANES);
            if width == 0 {
                break;
            }
            // SAFETY: columns j..j + width lie inside bias, residual and y; the caller guarantees the rows.
            unsafe {
                let bias = match epilogue.bias {
                    Some(bias) => E::load_n(s, bias.as_ptr().add(j), width),
                    None => s.splat(0.0),
                };
                for r in 0..rows {
                    let v = s.add(number(r, column), bias);
                    let v = match epilogue.act {
                        Act::None => v,
                        Act::Gelu => E::gelu(s, v),
                    };
                    let v = match epilogue.residual {
                        Some(x) => s.add(E::load_n(s, x.row(row + r).add(j), width), v),
                        None => v,
                    };
                    E::store_n(s, y.row(row + r).add(j), v, width);
                }
            }
        }
    }
}
