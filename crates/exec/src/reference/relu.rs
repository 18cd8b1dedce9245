//! ReLU, `y = max(x, 0)`, and its gradient. Invariant: NaN stays NaN, and where x is NaN the gradient dy passes
//! unchanged.

use super::{Operands, ReferenceError, Tensor};

pub(super) fn eval(ins: &mut Operands<'_>) -> Result<Vec<Tensor>, ReferenceError> {
    let (shape, x) = ins.floats("x")?;
    let y = x.iter().map(|&x| if x > 0.0 || x.is_nan() { x } else { 0.0 });
    Ok(vec![Tensor::f64(shape, y.collect())])
}

pub(super) fn eval_grad(ins: &mut Operands<'_>) -> Result<Vec<Tensor>, ReferenceError> {
    let (shape, dy) = ins.floats("dy")?;
    let x = ins.shaped("x", shape)?;
    let dx = dy.iter().zip(x).map(|(&dy, &x)| if x <= 0.0 { 0.0 } else { dy });
    Ok(vec![Tensor::f64(shape, dx.collect())])
}

#[cfg(test)]
mod tests {
    use super::super::testing::check;
    use super::*;
    use plimsoll_graph::Op;
    use plimsoll_graph::ops::{Relu, ReluGrad};

    #[test]
    fn keeps_what_is_positive() {
        let t = |data: [f32; 5]| Tensor::f32(&[1, 5], data.to_vec());
        let x = t([-1.0, 0.0, 2.5, f32::NAN, f32::NEG_INFINITY]);
        check(Op::Relu(Relu {}), &[x], &[t([0.0, 0.0, 2.5, f32::NAN, 0.0])], 0.0);
        let dy = t([1.0, 2.0, 3.0, 4.0, 5.0]);
        let x = t([-1.0, 0.0, 2.5, f32::NAN, f32::INFINITY]);
        check(Op::ReluGrad(ReluGrad {}), &[dy, x], &[t([0.0, 0.0, 3.0, 4.0, 5.0])], 0.0);
    }
}
