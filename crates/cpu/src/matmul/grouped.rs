//! Linear layers of a mixture of experts over rows sorted by expert, and their gradients: one matmul per expert.
//!
//! Invariant: rows `offsets[e]..offsets[e + 1]` belong to expert e. Rows past the last offset belong to no
//! expert: they are not read, and their outputs are zero. Each element has the bits of a separate matmul for its
//! expert.

use crate::matmul::linear::MatmulEpilogue;
use crate::matmul::row_major::{Factor, MatmulCall, column_sums, matmul};
use crate::view::{Rows, RowsMut};
use crate::{Cpu, rows::elementwise};

/// Linear layers of E experts: y = x W_e^T + b_e for the rows of each expert e.
pub struct ExpertLinear<'a> {
    /// Rows sorted by expert (R, K).
    pub x: Rows<'a>,
    /// Weights (E N, K).
    pub w: Rows<'a>,
    /// Biases (E N).
    pub bias: Option<&'a [f32]>,
    /// First row of each expert, and the end of the last (E + 1).
    pub offsets: &'a [u32],
    /// Output (R, N).
    pub y: RowsMut<'a>,
}

/// Computes the linear layers of the experts. `workspace` as for `matmul`. Panics if the shapes do not match, or unless
/// the offsets start at 0, ascend and end within R.
pub fn linear(cpu: &Cpu, layer: ExpertLinear<'_>, workspace: &mut [f32]) {
    let ExpertLinear { x, w, bias, offsets, mut y } = layer;
    let n = y.cols();
    for (e, (start, rows)) in groups(offsets, x.rows(), w.rows(), n).enumerate() {
        let epilogue = MatmulEpilogue { bias: bias.map(|b| &b[e * n..][..n]), ..Default::default() };
        let call = MatmulCall {
            a: Factor::Stored(x.part(start, rows)),
            b: Factor::Transposed(w.part(e * n, n)),
            epilogue,
            y: y.part(start, rows),
        };
        matmul(cpu, call, workspace);
    }
    zero_rest(cpu, offsets, y);
}

/// Gradient of the experts' linear layers with respect to the rows: dx = dy W_e for the rows of each expert e.
pub struct ExpertInputGrad<'a> {
    /// Gradient of the output (R, N).
    pub dy: Rows<'a>,
    /// Weights (E N, K).
    pub w: Rows<'a>,
    /// As [`ExpertLinear::offsets`].
    pub offsets: &'a [u32],
    /// Gradient of the rows (R, K).
    pub dx: RowsMut<'a>,
}

/// Computes the gradient with respect to the rows. `workspace` and panics as for [`linear`].
pub fn input_grad(cpu: &Cpu, grad: ExpertInputGrad<'_>, workspace: &mut [f32]) {
    let ExpertInputGrad { dy, w, offsets, mut dx } = grad;
    let n = dy.cols();
    for (e, (start, rows)) in groups(offsets, dy.rows(), w.rows(), n).enumerate() {
        let call = MatmulCall {
            a: Factor::Stored(dy.part(start, rows)),
            b: Factor::Stored(w.part(e * n, n)),
            epilogue: MatmulEpilogue::default(),
            y: dx.part(start, rows),
        };
        matmul(cpu, call, workspace);
    }
    zero_rest(cpu, offsets, dx);
}

/// Gradients of the experts' linear layers with respect to weights and biases: dW_e = dy^T x and db_e = sum of dy over
/// the rows of each expert e; zero for an expert without rows. Each output is written if given.
pub struct ExpertWeightGrad<'a> {
    /// Gradient of the output (R, N).
    pub dy: Rows<'a>,
    /// Rows sorted by expert (R, K).
    pub x: Rows<'a>,
    /// As [`ExpertLinear::offsets`].
    pub offsets: &'a [u32],
    /// Gradient of the weights (E N, K).
    pub dw: Option<RowsMut<'a>>,
    /// Gradient of the biases (E N).
    pub db: Option<&'a mut [f32]>,
}

/// Computes the gradients with respect to weights and biases. `workspace` and panics as for [`linear`].
pub fn weight_grad(cpu: &Cpu, grad: ExpertWeightGrad<'_>, workspace: &mut [f32]) {
    let ExpertWeightGrad { dy, x, offsets, dw, db } = grad;
    let n = dy.cols();
    let experts = offsets.len() - 1;
    if let Some(mut dw) = dw {
        for (e, (start, rows)) in groups(offsets, dy.rows(), dw.rows(), n).enumerate() {
            let call = MatmulCall {
                a: Factor::Transposed(dy.part(start, rows)),
                b: Factor::Stored(x.part(start, rows)),
                epilogue: MatmulEpilogue::default(),
                y: dw.part(e * n, n),
            };
            matmul(cpu, call, workspace);
        }
    }
    if let Some(db) = db {
        for (e, (start, rows)) in groups(offsets, dy.rows(), experts * n, n).enumerate() {
            column_sums(cpu, dy.part(start, rows), false, &mut db[e * n..][..n]);
        }
    }
}

/// (first row, number of rows) of each expert. Panics unless there are `stacked / n` experts and the offsets
/// start at 0, ascend and end within `rows`.
fn groups(offsets: &[u32], rows: usize, stacked: usize, n: usize) -> impl Iterator<Item = (usize, usize)> {
    assert!(offsets.len() > 1 && (offsets.len() - 1) * n == stacked, "{} offsets", offsets.len());
    assert!(offsets[0] == 0 && offsets.is_sorted(), "offsets from 0 on, ascending");
    assert!(offsets[offsets.len() - 1] as usize <= rows, "offsets inside of {rows} rows");
    offsets.windows(2).map(|pair| (pair[0] as usize, (pair[1] - pair[0]) as usize))
}

/// Zeroes the rows past the last offset.
fn zero_rest(cpu: &Cpu, offsets: &[u32], mut y: RowsMut<'_>) {
    let end = offsets[offsets.len() - 1] as usize;
    let rest = y.rows() - end;
    elementwise::fill(cpu, 0.0, y.part(end, rest));
}
