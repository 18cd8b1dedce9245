//! Batch norm with the statistics of the batch, and the gradients of both forms. Invariant: the variance is computed
//! from differences from the mean; sums over rows are in row order.

use super::operands::Matrix;
use super::{Operands, ReferenceError, Tensor};
use plimsoll_graph::ops::{BatchNormGrad, BatchNormTrain};

pub(super) fn eval(op: &BatchNormTrain, ins: &mut Operands<'_>) -> Result<Vec<Tensor>, ReferenceError> {
    let x = ins.matrix("x")?;
    let columns = [x.columns];
    let gamma = ins.shaped("gamma", &columns)?;
    let beta = ins.shaped("beta", &columns)?;
    let running = [ins.shaped("running_mean", &columns)?, ins.shaped("running_var", &columns)?];
    if x.rows < 2 {
        return Err(ReferenceError::Attribute { why: "the variance of a batch needs two rows" });
    }
    let rows = x.rows as f64;
    let mean: Vec<f64> = sums(x, |_, _, x| x).iter().map(|s| s / rows).collect();
    let squares = sums(x, |_, c, x| (x - mean[c]).powi(2));
    let rstd: Vec<f64> = squares.iter().map(|s| 1.0 / (s / rows + f64::from(op.eps)).sqrt()).collect();
    let y = map(x, |_, c, x| (x - mean[c]) * rstd[c] * gamma[c] + beta[c]);
    let momentum = f64::from(op.momentum);
    // The running variance is the unbiased one; the batch itself is normalized with the biased one.
    let var: Vec<f64> = squares.iter().map(|s| s / (rows - 1.0)).collect();
    let new_mean = move_average(momentum, running[0], &mean);
    let new_var = move_average(momentum, running[1], &var);
    Ok(vec![y, Tensor::f64(&columns, mean), Tensor::f64(&columns, rstd), new_mean, new_var])
}

pub(super) fn eval_train_grad(ins: &mut Operands<'_>) -> Result<Vec<Tensor>, ReferenceError> {
    let dy = ins.matrix("dy")?;
    let x = ins.same("x", dy)?;
    let columns = [dy.columns];
    let [mean, rstd, gamma] =
        [ins.shaped("mean", &columns)?, ins.shaped("rstd", &columns)?, ins.shaped("gamma", &columns)?];
    let h = |r: usize, c: usize| (x.row(r)[c] - mean[c]) * rstd[c];
    let dgamma = sums(dy, |r, c, dy| dy * h(r, c));
    let dbeta = sums(dy, |_, _, dy| dy);
    let rows = dy.rows as f64;
    let dx = map(dy, |r, c, dy| gamma[c] * rstd[c] * (dy - dbeta[c] / rows - h(r, c) * dgamma[c] / rows));
    Ok(vec![dx, Tensor::f64(&columns, dgamma), Tensor::f64(&columns, dbeta)])
}

pub(super) fn eval_grad(op: &BatchNormGrad, ins: &mut Operands<'_>) -> Result<Vec<Tensor>, ReferenceError> {
    let dy = ins.matrix("dy")?;
    let x = ins.same("x", dy)?;
    let columns = [dy.columns];
    let [gamma, mean, var] =
        [ins.shaped("gamma", &columns)?, ins.shaped("mean", &columns)?, ins.shaped("var", &columns)?];
    let rstd: Vec<f64> = var.iter().map(|v| 1.0 / (v + f64::from(op.eps)).sqrt()).collect();
    let dx = map(dy, |_, c, dy| dy * gamma[c] * rstd[c]);
    let dgamma = sums(dy, |r, c, dy| dy * (x.row(r)[c] - mean[c]) * rstd[c]);
    let dbeta = sums(dy, |_, _, dy| dy);
    Ok(vec![dx, Tensor::f64(&columns, dgamma), Tensor::f64(&columns, dbeta)])
}

/// Moves running statistics towards those of a batch.
fn move_average(momentum: f64, old: &[f64], new: &[f64]) -> Tensor {
    let moved = old.iter().zip(new).map(|(old, new)| (1.0 - momentum) * old + momentum * new);
    Tensor::f64(&[old.len()], moved.collect())
}

/// `sum_r term(r, c, x[r, c])` for every column c.
fn sums(x: Matrix<'_>, term: impl Fn(usize, usize, f64) -> f64) -> Vec<f64> {
    let mut sums = vec![0.0; x.columns];
    for (r, row) in x.iter_rows().enumerate() {
        for (c, sum) in sums.iter_mut().enumerate() {
            *sum += term(r, c, row[c]);
        }
    }
    sums
}

/// Applies `of(r, c, x[r, c])` to every element.
fn map(x: Matrix<'_>, of: impl Fn(usize, usize, f64) -> f64) -> Tensor {
    let rows = x.iter_rows().enumerate();
    let of = &of;
    let y = rows.flat_map(|(r, row)| row.iter().enumerate().map(move |(c, &x)| of(r, c, x)));
    Tensor::f64(&[x.rows, x.columns], y.collect())
}

#[cfg(test)]
mod tests {
    use super::super::{
        eval,
        testing::{check, check_gradient, random, run},
    };
    use super::*;
    use plimsoll_graph::Op;
    use plimsoll_graph::ops::{BatchNorm, BatchNormTrainGrad};

    #[test]
    fn known_batch() {
        let v = |a: f32, b: f32| Tensor::f32(&[2], vec![a, b]);
        let x = Tensor::f32(&[2, 2], vec![3.0, 1.0, -1.0, 1.0]);
        // Column 0: mean 1, variance 4 (unbiased 8), rstd 1 / sqrt(4 + 5) = 1/3; column 1: 1, 0, 1 / sqrt 5.
        let ins = [x, v(6.0, 1.0), v(0.5, 2.0), v(10.0, 0.0), v(1.0, 3.0)];
        let y = Tensor::f32(&[2, 2], vec![4.5, 2.0, -3.5, 2.0]);
        let rstd = v(1.0 / 3.0, 1.0 / 5.0_f32.sqrt());
        let wanted = [y, v(1.0, 1.0), rstd, v(7.75, 0.25), v(2.75, 2.25)];
        check(Op::BatchNormTrain(BatchNormTrain { eps: 5.0, momentum: 0.25 }), &ins, &wanted, 3e-7);
    }

    #[test]
    fn one_row_is_refused() {
        let ins = [1, 2, 3, 4, 5].map(|s| random(s, if s == 1 { &[1, 2] } else { &[2] }));
        let outs = [vec![1, 2], vec![2], vec![2], vec![2], vec![2]].map(Some);
        let op = Op::BatchNormTrain(BatchNormTrain { eps: 1e-5, momentum: 0.1 });
        let error = eval(&op, &ins.each_ref(), &outs).unwrap_err();
        assert_eq!(error.to_string(), "the variance of a batch needs two rows");
    }

    #[test]
    fn gradients() {
        for (rows, columns) in [(2, 3), (5, 1), (4, 4)] {
            let shape: [&[usize]; 5] = [&[rows, columns], &[columns], &[columns], &[columns], &[columns]];
            let dy = random(9, shape[0]);
            let positive = Tensor::f64(shape[1], vec![0.7; columns]);
            let [x, gamma, beta, mean] =
                [1, 2, 3, 4].map(|s| random(s, if s == 1 { shape[0] } else { shape[1] }));
            let ins = [x.clone(), gamma.clone(), beta, mean.clone(), positive.clone()];
            let train = Op::BatchNormTrain(BatchNormTrain { eps: 1e-2, momentum: 0.1 });
            let forward = run(train, &ins, &shape);
            let backward = [dy.clone(), x.clone(), forward[1].clone(), forward[2].clone(), gamma.clone()];
            let grads = run(Op::BatchNormTrainGrad(BatchNormTrainGrad {}), &backward, &shape[..3]);
            let running = Op::BatchNorm(BatchNorm { eps: 1e-2 });
            let backward = [dy.clone(), x, gamma, mean, positive];
            let others = run(Op::BatchNormGrad(BatchNormGrad { eps: 1e-2 }), &backward, &shape[..3]);
            for input in 0..3 {
                check_gradient(train, &ins, input, &dy, &grads[input], &shape);
                check_gradient(running, &ins, input, &dy, &others[input], &shape[..1]);
            }
        }
    }
}
