//! `y = max(x, 0)`. Invariant: NaN stays NaN.

use super::{Operands, ReferenceError, Tensor};

pub(super) fn eval(ins: &mut Operands<'_>) -> Result<Vec<Tensor>, ReferenceError> {
    let (shape, x) = ins.floats("x")?;
    let relu = |&x: &f64| if x > 0.0 || x.is_nan() { x } else { 0.0 };
    Ok(vec![Tensor::f64(shape, x.iter().map(relu).collect())])
}

#[cfg(test)]
mod tests {
    use super::super::testing::check;
    use super::*;
    use graph::{Op, ops::Relu};

    #[test]
    fn keeps_what_is_positive() {
        let t = |data: [f32; 5]| Tensor::f32(&[1, 5], data.to_vec());
        let x = t([-1.0, 0.0, 2.5, f32::NAN, f32::NEG_INFINITY]);
        check(Op::Relu(Relu {}), &[x], &[t([0.0, 0.0, 2.5, f32::NAN, 0.0])], 0.0);
    }
}
