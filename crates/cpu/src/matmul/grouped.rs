//! Linear layers of a mixture of experts over rows sorted by expert, and their gradients: one matmul per expert.
//!
//! Invariant: rows `offsets[e]..offsets[e + 1]` belong to expert e. Rows past the last offset belong to no
//! expert: they are not read, and their outputs are zero. Each element has the bits of a separate matmul for its
//! expert.

use crate::matmul::linear_f32::Epilogue;
use crate::matmul::row_major::{Operand, column_sums, matmul};
use crate::view::{Rows, RowsMut};
use crate::{Cpu, rows::elementwise};

/// Linear layers of the experts: y = x W_e^T + b_e for the rows of each expert e. x (R, K), w (E N, K), bias (E N),
/// offsets (E + 1), y (R, N). `workspace` as for `matmul`. Panics if the shapes do not match, or unless the offsets
/// start at 0, ascend and end within R.
pub fn linear(
    cpu: &Cpu,
    x: Rows<'_>,
    w: Rows<'_>,
    bias: Option<&[f32]>,
    offsets: &[u32],
    mut y: RowsMut<'_>,
    workspace: &mut [f32],
) {
    let n = y.cols();
    for (e, (start, rows)) in groups(offsets, x.rows(), w.rows(), n).enumerate() {
        let w = Operand::Transposed(w.part(e * n, n));
        let epilogue = Epilogue { bias: bias.map(|b| &b[e * n..][..n]), ..Default::default() };
        matmul(cpu, Operand::Stored(x.part(start, rows)), w, epilogue, y.part(start, rows), workspace);
    }
    zero_rest(cpu, offsets, y);
}

/// Gradient with respect to the rows: dx = dy W_e for the rows of each expert e. dy (R, N), w (E N, K), offsets
/// (E + 1), dx (R, K). `workspace` and panics as for [`linear`].
pub fn input_grad(
    cpu: &Cpu,
    dy: Rows<'_>,
    w: Rows<'_>,
    offsets: &[u32],
    mut dx: RowsMut<'_>,
    workspace: &mut [f32],
) {
    let n = dy.cols();
    for (e, (start, rows)) in groups(offsets, dy.rows(), w.rows(), n).enumerate() {
        let dy = Operand::Stored(dy.part(start, rows));
        let w = Operand::Stored(w.part(e * n, n));
        matmul(cpu, dy, w, Epilogue::default(), dx.part(start, rows), workspace);
    }
    zero_rest(cpu, offsets, dx);
}

/// Gradients with respect to weights and biases: dW_e = dy^T x and db_e = sum of dy over the rows of each expert
/// e; zero for an expert without rows. dy (R, N), x (R, K), offsets (E + 1), dw (E N, K), db (E N); each output
/// is written if given. `workspace` and panics as for [`linear`].
pub fn weight_grad(
    cpu: &Cpu,
    dy: Rows<'_>,
    x: Rows<'_>,
    offsets: &[u32],
    dw: Option<RowsMut<'_>>,
    db: Option<&mut [f32]>,
    workspace: &mut [f32],
) {
    let n = dy.cols();
    let experts = offsets.len() - 1;
    if let Some(mut dw) = dw {
        for (e, (start, rows)) in groups(offsets, dy.rows(), dw.rows(), n).enumerate() {
            let dy = Operand::Transposed(dy.part(start, rows));
            let x = Operand::Stored(x.part(start, rows));
            matmul(cpu, dy, x, Epilogue::default(), dw.part(e * n, n), workspace);
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
