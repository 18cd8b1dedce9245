//! Layer norm. Invariant: the variance is computed from differences from the mean, so a large mean loses no
//! precision.

use super::operands::Matrix;
use super::{Operands, ReferenceError, Tensor};
use plimsoll_graph::ops::LayerNorm;

pub(super) fn eval(op: &LayerNorm, ins: &mut Operands<'_>) -> Result<Vec<Tensor>, ReferenceError> {
    let x = ins.matrix("x")?;
    let [y, means, rstds] = eval_of(op, &x, ins)?;
    Ok(vec![Tensor::f64(&[x.rows, x.columns], y), Tensor::f64(&[x.rows], means), Tensor::f64(&[x.rows], rstds)])
}

/// Layer norm of a matrix that was taken from the inputs already: normalised rows, means and rstds.
pub(super) fn eval_of(
    op: &LayerNorm,
    x: &Matrix<'_>,
    ins: &mut Operands<'_>,
) -> Result<[Vec<f64>; 3], ReferenceError> {
    let gamma = ins.shaped("gamma", &[x.columns])?;
    let beta = ins.shaped("beta", &[x.columns])?;
    let mut y = Vec::with_capacity(x.data.len());
    let mut means = vec![];
    let mut rstds = vec![];
    let columns = x.columns as f64;
    for row in x.iter_rows() {
        let mean = row.iter().sum::<f64>() / columns;
        let var = row.iter().map(|&x| (x - mean).powi(2)).sum::<f64>() / columns;
        let rstd = 1.0 / (var + f64::from(op.eps)).sqrt();
        let affine = gamma.iter().zip(beta);
        y.extend(row.iter().zip(affine).map(|(x, (g, b))| (x - mean) * rstd * g + b));
        means.push(mean);
        rstds.push(rstd);
    }
    Ok([y, means, rstds])
}

#[cfg(test)]
mod tests {
    use super::super::testing::check;
    use super::*;
    use plimsoll_graph::Op;

    #[test]
    fn known_rows() {
        let x = Tensor::f32(&[2, 4], vec![1.0, 3.0, 1.0, 3.0, 5.0, 5.0, 5.0, 5.0]);
        let gamma = Tensor::f32(&[4], vec![1.0, 1.0, 2.0, 2.0]);
        let beta = Tensor::f32(&[4], vec![0.0, 0.0, 0.5, 0.5]);
        // Row 0: mean 2, variance 1, rstd 1 / sqrt(1 + 3) = 1/2; row 1: variance 0, rstd 1 / sqrt 3.
        let y = Tensor::f32(&[2, 4], vec![-0.5, 0.5, -0.5, 1.5, 0.0, 0.0, 0.5, 0.5]);
        let mean = Tensor::f32(&[2], vec![2.0, 5.0]);
        let rstd = Tensor::f32(&[2], vec![0.5, 1.0 / 3.0_f32.sqrt()]);
        check(Op::LayerNorm(LayerNorm { eps: 3.0 }), &[x, gamma, beta], &[y, mean, rstd], 6e-8);
    }

    #[test]
    fn a_large_mean_costs_no_digits() {
        let row = |offset: f32| Tensor::f32(&[1, 4], vec![offset, offset + 1.0, offset + 2.0, offset + 3.0]);
        let ones = Tensor::f32(&[4], vec![1.0; 4]);
        let zeros = Tensor::f32(&[4], vec![0.0; 4]);
        let rstd = 1.0 / 1.25_f32.sqrt();
        let y = Tensor::f32(&[1, 4], [-1.5, -0.5, 0.5, 1.5].map(|d| d * rstd).to_vec());
        for offset in [0.0, 4_000_000.0] {
            let mean = Tensor::f32(&[1], vec![offset + 1.5]);
            let wanted = [y.clone(), mean, Tensor::f32(&[1], vec![rstd])];
            let ins = [row(offset), ones.clone(), zeros.clone()];
            check(Op::LayerNorm(LayerNorm { eps: 0.0 }), &ins, &wanted, 2e-7);
        }
    }
}
