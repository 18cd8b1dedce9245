//! Softmax over rows and its gradient. Invariant: the largest score is subtracted first, so no exponential overflows.

use super::{Operands, ReferenceError, Tensor, dot};

pub(super) fn eval(ins: &mut Operands<'_>) -> Result<Vec<Tensor>, ReferenceError> {
    let x = ins.matrix("x")?;
    let mut y = Vec::with_capacity(x.data.len());
    for row in x.iter_rows() {
        y.extend(normalise(row).0);
    }
    Ok(vec![Tensor::f64(&[x.rows, x.columns], y)])
}

pub(super) fn eval_grad(ins: &mut Operands<'_>) -> Result<Vec<Tensor>, ReferenceError> {
    let dy = ins.matrix("dy")?;
    let y = ins.same("y", dy)?;
    let mut dx = Vec::with_capacity(y.data.len());
    for (dy, y) in dy.iter_rows().zip(y.iter_rows()) {
        let mean = dot(dy, y);
        dx.extend(dy.iter().zip(y).map(|(dy, y)| y * (dy - mean)));
    }
    Ok(vec![Tensor::f64(&[dy.rows, dy.columns], dx)])
}

/// The softmax of `scores`, and `ln sum exp(score)`.
pub(super) fn normalise(scores: &[f64]) -> (Vec<f64>, f64) {
    let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let mut weights: Vec<f64> = scores.iter().map(|&s| libm::exp(s - max)).collect();
    let sum: f64 = weights.iter().sum();
    for w in &mut weights {
        *w /= sum;
    }
    (weights, max + libm::log(sum))
}

#[cfg(test)]
mod tests {
    use super::super::testing::{check, check_gradient, random, run};
    use super::*;
    use plimsoll_graph::Op;
    use plimsoll_graph::ops::{Softmax, SoftmaxGrad};

    #[test]
    fn known_rows() {
        let ln2 = std::f32::consts::LN_2;
        let x = vec![0.0, ln2, 2.0 * ln2, 1000.0, 1000.0, -1000.0, f32::NAN, 0.0, 0.0];
        let sevenths = [1.0, 2.0, 4.0].map(|n| n / 7.0);
        let nan = [f32::NAN; 3];
        let y = [sevenths, [0.5, 0.5, 0.0], nan].concat();
        check(Op::Softmax(Softmax {}), &[Tensor::f32(&[3, 3], x)], &[Tensor::f32(&[3, 3], y)], 6e-8);
    }

    #[test]
    fn gradient() {
        let x = random(1, &[3, 5]);
        let dy = random(2, &[3, 5]);
        let op = Op::Softmax(Softmax {});
        let y = run(op, std::slice::from_ref(&x), &[&[3, 5]]).remove(0);
        let grad = run(Op::SoftmaxGrad(SoftmaxGrad {}), &[dy.clone(), y], &[&[3, 5]]);
        check_gradient(op, &[x], 0, &dy, &grad[0], &[&[3, 5]]);
    }

    #[test]
    fn lse_is_the_log_of_the_sum() {
        let (weights, lse) = normalise(&[3.0, 1.0, -2.0]);
        let sum = 3.0_f64.exp() + 1.0_f64.exp() + (-2.0_f64).exp();
        assert!((lse - sum.ln()).abs() < 1e-15);
        assert!((weights[1] - 1.0_f64.exp() / sum).abs() < 1e-15);
    }
}
