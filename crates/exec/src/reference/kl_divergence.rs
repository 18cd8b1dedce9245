//! Kullback-Leibler divergence between the softmaxes of two rows of logits, and its gradient. Invariant: the largest logit
//! is subtracted first, so no exponential overflows.

use super::operands::Matrix;
use super::softmax::normalise;
use super::{Operands, ReferenceError, Tensor};

pub(super) fn eval(ins: &mut Operands<'_>) -> Result<Vec<Tensor>, ReferenceError> {
    let (x, y) = logits(ins)?;
    let mut loss = 0.0;
    for (x, y) in x.iter_rows().zip(y.iter_rows()) {
        let (_, lse_x) = normalise(x);
        let (q, lse_y) = normalise(y);
        let terms = q.iter().zip(x.iter().zip(y)).map(|(q, (x, y))| q * ((y - lse_y) - (x - lse_x)));
        loss += terms.sum::<f64>();
    }
    Ok(vec![Tensor::f64(&[1], vec![loss])])
}

pub(super) fn eval_grad(ins: &mut Operands<'_>) -> Result<Vec<Tensor>, ReferenceError> {
    let dloss = ins.shaped("dloss", &[1])?[0];
    let (x, y) = logits(ins)?;
    let mut dx = Vec::with_capacity(x.data.len());
    for (x, y) in x.iter_rows().zip(y.iter_rows()) {
        let p = normalise(x).0;
        let q = normalise(y).0;
        dx.extend(p.iter().zip(&q).map(|(p, q)| dloss * (p - q)));
    }
    Ok(vec![Tensor::f64(&[x.rows, x.columns], dx)])
}

fn logits<'a>(ins: &mut Operands<'a>) -> Result<(Matrix<'a>, Matrix<'a>), ReferenceError> {
    let x = ins.matrix("x")?;
    let y = ins.same("y", x)?;
    Ok((x, y))
}

#[cfg(test)]
mod tests {
    use super::super::testing::{check, check_gradient, random, run};
    use super::*;
    use plimsoll_graph::Op;
    use plimsoll_graph::ops::{KlDivergence, KlDivergenceGrad};

    const OP: Op = Op::KlDivergence(KlDivergence {});

    #[test]
    fn known_divergences() {
        let ln = |x: f32| x.ln();
        // Target (3/4, 1/4) against (1/2, 1/2); equal rows, whose scores would overflow; a certain target.
        let x = Tensor::f32(&[3, 2], vec![5.0, 5.0, 1000.0, 1001.0, 0.0, 0.0]);
        let y = Tensor::f32(&[3, 2], vec![ln(3.0), 0.0, -1000.0, -999.0, 0.0, -1000.0]);
        let wanted = 0.75 * 1.5_f64.ln() + 0.25 * 0.5_f64.ln() + 2.0_f64.ln();
        check(OP, &[x.clone(), y.clone()], &[Tensor::f32(&[1], vec![wanted as f32])], 1e-7);
        let dx = vec![-0.5, 0.5, 0.0, 0.0, -1.0, 1.0];
        let ins = [Tensor::f32(&[1], vec![2.0]), x, y];
        check(Op::KlDivergenceGrad(KlDivergenceGrad {}), &ins, &[Tensor::f32(&[3, 2], dx)], 1e-7);
    }

    #[test]
    fn gradient() {
        let x = random(1, &[4, 5]);
        let y = random(2, &[4, 5]);
        let dloss = Tensor::f32(&[1], vec![0.75]);
        let ins = [dloss.clone(), x.clone(), y.clone()];
        let grad = run(Op::KlDivergenceGrad(KlDivergenceGrad {}), &ins, &[&[4, 5]]);
        check_gradient(OP, &[x, y], 0, &dloss, &grad[0], &[&[1]]);
    }
}
