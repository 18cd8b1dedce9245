//! Multiplication by a constant, and casts. Invariant: one multiplication per element; a cast changes no value here,
//! since the device rounds.

use super::{Operands, ReferenceError, Tensor};
use plimsoll_graph::ops::Scale;

pub(super) fn eval(op: &Scale, ins: &mut Operands<'_>) -> Result<Vec<Tensor>, ReferenceError> {
    let (shape, x) = ins.floats("x")?;
    Ok(vec![Tensor::f64(shape, x.iter().map(|x| f64::from(op.factor) * x).collect())])
}

pub(super) fn eval_cast(ins: &mut Operands<'_>) -> Result<Vec<Tensor>, ReferenceError> {
    let (shape, x) = ins.floats("x")?;
    Ok(vec![Tensor::f64(shape, x.to_vec())])
}

#[cfg(test)]
mod tests {
    use super::super::testing::check;
    use super::*;
    use plimsoll_graph::ops::Cast;
    use plimsoll_graph::{DType, Op};

    #[test]
    fn products_and_casts() {
        let x = Tensor::f32(&[3], vec![1.5, -2.0, 0.1]);
        let y = Tensor::f32(&[3], vec![-0.75, 1.0, -0.05]);
        check(Op::Scale(Scale { factor: -0.5 }), std::slice::from_ref(&x), &[y], 0.0);
        check(Op::Cast(Cast { to: DType::Bf16 }), std::slice::from_ref(&x), std::slice::from_ref(&x), 0.0);
    }
}
