//! `y[:, j] = f(x[:, j]) * x[:, F + j]`. Invariant: the first half is the gate.

use super::{Operands, ReferenceError, Tensor, gelu::gelu};
use graph::ops::{Activation, Glu};

pub(super) fn eval(op: &Glu, ins: &mut Operands<'_>) -> Result<Vec<Tensor>, ReferenceError> {
    let x = ins.matrix("x")?;
    if !x.columns.is_multiple_of(2) {
        return Err(ReferenceError::Attribute { why: "x must have an even number of columns" });
    }
    let half = x.columns / 2;
    let mut y = Vec::with_capacity(x.rows * half);
    for row in x.iter_rows() {
        let (gate, value) = row.split_at(half);
        y.extend(gate.iter().zip(value).map(|(&g, &v)| activate(op.activation, g) * v));
    }
    Ok(vec![Tensor::f64(&[x.rows, half], y)])
}

/// f.
pub(super) fn activate(activation: Activation, x: f64) -> f64 {
    match activation {
        Activation::Gelu => gelu(x),
        Activation::Silu => x / (1.0 + libm::exp(-x)),
    }
}

#[cfg(test)]
mod tests {
    use super::super::{eval, testing::check};
    use super::*;
    use graph::Op;

    #[test]
    fn the_first_half_is_the_gate() {
        let x = Tensor::f32(&[2, 4], vec![1.0, -1.0, 2.0, 10.0, 0.0, 3.0, 5.0, 1.0]);
        let y = Tensor::f32(&[2, 2], vec![2.0 * 0.8413447, -1.5865525, 0.0, 2.9959502]);
        check(Op::Glu(Glu { activation: Activation::Gelu }), &[x], &[y], 3e-7);
    }

    #[test]
    fn odd_columns_are_refused() {
        let x = Tensor::f32(&[1, 3], vec![0.0; 3]);
        let error =
            eval(&Op::Glu(Glu { activation: Activation::Gelu }), &[&x], &[Some(vec![1, 1])]).unwrap_err();
        assert_eq!(error.to_string(), "x must have an even number of columns");
    }
}
