//! Gated activation, `y[:, j] = f(x[:, j]) * x[:, F + j]`, and its gradient. Invariant: the first half of the columns
//! is the gate.

use super::{Operands, ReferenceError, Tensor, gelu};
use plimsoll_graph::ops::{Activation, Glu, GluGrad};

pub(super) fn eval(op: &Glu, ins: &mut Operands<'_>) -> Result<Vec<Tensor>, ReferenceError> {
    let x = ins.matrix("x")?;
    if !x.columns.is_multiple_of(2) {
        return Err(ReferenceError::Attribute { why: "x must have an even number of columns" });
    }
    let half = x.columns / 2;
    let mut y = Vec::with_capacity(x.rows * half);
    for row in x.iter_rows() {
        let (gate, value) = row.split_at(half);
        y.extend(gate.iter().zip(value).map(|(&g, v)| activate(op.activation, g).0 * v));
    }
    Ok(vec![Tensor::f64(&[x.rows, half], y)])
}

pub(super) fn eval_grad(op: &GluGrad, ins: &mut Operands<'_>) -> Result<Vec<Tensor>, ReferenceError> {
    let dy = ins.matrix("dy")?;
    let half = dy.columns;
    let x = ins.shaped("x", &[dy.rows, 2 * half])?;
    let mut dx = vec![0.0; x.len()];
    for (r, dy) in dy.iter_rows().enumerate() {
        for (j, dy) in dy.iter().enumerate() {
            let gate = 2 * r * half + j;
            let value = (2 * r + 1) * half + j;
            let (f, slope) = activate(op.activation, x[gate]);
            dx[gate] = dy * slope * x[value];
            dx[value] = dy * f;
        }
    }
    Ok(vec![Tensor::f64(&[dy.rows, 2 * half], dx)])
}

/// f(x) of a gate.
pub(super) fn activation(activation: Activation, x: f64) -> f64 {
    activate(activation, x).0
}

/// f(x) and f'(x). For SiLU, with the logistic function s: x s and s (1 + x (1 - s)).
fn activate(activation: Activation, x: f64) -> (f64, f64) {
    match activation {
        Activation::Gelu => (gelu::gelu(x), gelu::slope(x)),
        Activation::Silu => {
            let s = 1.0 / (1.0 + libm::exp(-x));
            (x * s, s * (1.0 + x * (1.0 - s)))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{
        eval,
        testing::{check, check_gradient, random, run},
    };
    use super::*;
    use plimsoll_graph::Op;

    #[test]
    fn the_first_half_is_the_gate() {
        let x = Tensor::f32(&[2, 4], vec![1.0, -1.0, 2.0, 10.0, 0.0, 3.0, 5.0, 1.0]);
        let gelu = [2.0 * 0.8413447, -1.5865525, 0.0, 2.9959502];
        // torch.nn.functional.silu(torch.tensor([1., -1, 3])): 0.7310586, -0.26894143, 2.8577223.
        let silu = [2.0 * 0.7310586, -2.6894143, 0.0, 2.8577223];
        for (activation, y) in [(Activation::Gelu, gelu), (Activation::Silu, silu)] {
            let y = Tensor::f32(&[2, 2], y.to_vec());
            check(Op::Glu(Glu { activation }), std::slice::from_ref(&x), &[y], 3e-7);
        }
    }

    #[test]
    fn gradients() {
        for activation in [Activation::Gelu, Activation::Silu] {
            let x = random(1, &[3, 10]);
            let dy = random(2, &[3, 5]);
            let grad = run(Op::GluGrad(GluGrad { activation }), &[dy.clone(), x.clone()], &[&[3, 10]]);
            check_gradient(Op::Glu(Glu { activation }), &[x], 0, &dy, &grad[0], &[&[3, 5]]);
        }
    }

    #[test]
    fn odd_columns_are_refused() {
        let x = Tensor::f32(&[1, 3], vec![0.0; 3]);
        let op = Op::Glu(Glu { activation: Activation::Gelu });
        let error = eval(&op, &[&x], &[Some(vec![1, 1])]).unwrap_err();
        assert_eq!(error.to_string(), "x must have an even number of columns");
    }
}
