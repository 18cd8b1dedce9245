//! Batch norm with running statistics, `y = (x - mean) / sqrt(var + eps) * gamma + beta`. Invariant: the statistics
//! are inputs, not computed.

use super::{Operands, ReferenceError, Tensor};
use plimsoll_graph::ops::BatchNorm;

pub(super) fn eval(op: &BatchNorm, ins: &mut Operands<'_>) -> Result<Vec<Tensor>, ReferenceError> {
    let x = ins.matrix("x")?;
    let columns = [x.columns];
    let [gamma, beta, mean, var] = [
        ins.shaped("gamma", &columns)?,
        ins.shaped("beta", &columns)?,
        ins.shaped("mean", &columns)?,
        ins.shaped("var", &columns)?,
    ];
    let mut y = Vec::with_capacity(x.rows * x.columns);
    for row in x.iter_rows() {
        for (c, x) in row.iter().enumerate() {
            y.push((x - mean[c]) / (var[c] + f64::from(op.eps)).sqrt() * gamma[c] + beta[c]);
        }
    }
    Ok(vec![Tensor::f64(&[x.rows, x.columns], y)])
}

#[cfg(test)]
mod tests {
    use super::super::testing::check;
    use super::*;
    use plimsoll_graph::Op;

    #[test]
    fn known_values() {
        let v = |a: f32, b: f32| Tensor::f32(&[2], vec![a, b]);
        let x = Tensor::f32(&[2, 2], vec![3.0, 1.0, -1.0, 0.0]);
        // Column 0: (x - 1) / 2 * 10 + 0.5; column 1: (x + 1) / 0.5 * -1.
        let ins = [x, v(10.0, -1.0), v(0.5, 0.0), v(1.0, -1.0), v(3.75, 0.0)];
        let y = Tensor::f32(&[2, 2], vec![10.5, -4.0, -9.5, -2.0]);
        check(Op::BatchNorm(BatchNorm { eps: 0.25 }), &ins, &[y], 0.0);
    }
}
