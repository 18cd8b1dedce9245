//! Gradients of a linear layer: `dx = dy W`, `dw = dy^T x`, `db = sum dy`. Invariant: sums are in the order of the
//! rows summed over.

use super::{Operands, ReferenceError, Tensor};
use plimsoll_graph::ops::LinearWeightGrad;

pub(super) fn eval_input(ins: &mut Operands<'_>) -> Result<Vec<Tensor>, ReferenceError> {
    let dy = ins.matrix("dy")?;
    let w = ins.matrix("w")?;
    if w.rows != dy.columns {
        let wanted = vec![dy.columns, w.columns];
        let found = vec![w.rows, w.columns];
        return Err(ReferenceError::Shape { what: "w", wanted, found });
    }
    let mut dx = Vec::with_capacity(dy.rows * w.columns);
    for dy in dy.iter_rows() {
        let mut sums = vec![0.0; w.columns];
        for (&dy, w) in dy.iter().zip(w.iter_rows()) {
            add_scaled(&mut sums, dy, w);
        }
        dx.extend(sums);
    }
    Ok(vec![Tensor::f64(&[dy.rows, w.columns], dx)])
}

pub(super) fn eval_weight(
    op: &LinearWeightGrad,
    ins: &mut Operands<'_>,
) -> Result<Vec<Tensor>, ReferenceError> {
    let dy = ins.matrix("dy")?;
    let x = ins.matrix("x")?;
    if x.rows != dy.rows {
        let wanted = vec![dy.rows, x.columns];
        let found = vec![x.rows, x.columns];
        return Err(ReferenceError::Shape { what: "x", wanted, found });
    }
    let mut dw = Vec::with_capacity(dy.columns * x.columns);
    let mut db = Vec::with_capacity(dy.columns);
    for n in 0..dy.columns {
        let mut sums = vec![0.0; x.columns];
        let mut sum = 0.0;
        for (dy, x) in dy.iter_rows().zip(x.iter_rows()) {
            add_scaled(&mut sums, dy[n], x);
            sum += dy[n];
        }
        dw.extend(sums);
        db.push(sum);
    }
    let mut outs = vec![Tensor::f64(&[dy.columns, x.columns], dw)];
    if op.bias {
        outs.push(Tensor::f64(&[dy.columns], db));
    }
    Ok(outs)
}

/// Adds a scaled vector, `sums += a x`.
pub(super) fn add_scaled(sums: &mut [f64], a: f64, x: &[f64]) {
    for (sum, &x) in sums.iter_mut().zip(x) {
        *sum += a * x;
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{check, check_gradient, random, run};
    use super::*;
    use plimsoll_graph::Op;
    use plimsoll_graph::ops::{Epilogue, Linear, LinearInputGrad, OperandFormat};

    #[test]
    fn known_products() {
        let dy = Tensor::f32(&[2, 1], vec![2.0, -1.0]);
        let w = Tensor::f32(&[1, 3], vec![1.0, 2.0, 3.0]);
        let dx = Tensor::f32(&[2, 3], vec![2.0, 4.0, 6.0, -1.0, -2.0, -3.0]);
        check(
            Op::LinearInputGrad(LinearInputGrad { operands: OperandFormat::Stored }),
            &[dy.clone(), w],
            &[dx],
            0.0,
        );
        let x = Tensor::f32(&[2, 2], vec![1.0, 0.5, 3.0, -1.0]);
        let dw = Tensor::f32(&[1, 2], vec![-1.0, 2.0]);
        let db = Tensor::f32(&[1], vec![1.0]);
        let weight = |bias| Op::LinearWeightGrad(LinearWeightGrad { bias, operands: OperandFormat::Stored });
        check(weight(false), &[dy.clone(), x.clone()], std::slice::from_ref(&dw), 0.0);
        check(weight(true), &[dy, x], &[dw, db], 0.0);
    }

    #[test]
    fn gradients() {
        for (r, n, k) in [(1, 1, 1), (3, 2, 5), (4, 6, 3)] {
            let op = Op::Linear(Linear::new(true, Epilogue::None));
            let ins = [random(1, &[r, k]), random(2, &[n, k]), random(3, &[n])];
            let dy = random(4, &[r, n]);
            let inputs = [dy.clone(), ins[1].clone()];
            let dx = run(
                Op::LinearInputGrad(LinearInputGrad { operands: OperandFormat::Stored }),
                &inputs,
                &[&[r, k]],
            );
            check_gradient(op, &ins, 0, &dy, &dx[0], &[&[r, n]]);
            let inputs = [dy.clone(), ins[0].clone()];
            let weight = Op::LinearWeightGrad(LinearWeightGrad { bias: true, operands: OperandFormat::Stored });
            let grads = run(weight, &inputs, &[&[n, k], &[n]]);
            check_gradient(op, &ins, 1, &dy, &grads[0], &[&[r, n]]);
            check_gradient(op, &ins, 2, &dy, &grads[1], &[&[r, n]]);
        }
    }
}
