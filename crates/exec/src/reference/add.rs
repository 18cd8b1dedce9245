//! Element-wise addition, `y = a + b`. Invariant: one addition per element.

use super::{Operands, ReferenceError, Tensor};

pub(super) fn eval(ins: &mut Operands<'_>) -> Result<Vec<Tensor>, ReferenceError> {
    let (shape, a) = ins.floats("a")?;
    let b = ins.shaped("b", shape)?;
    Ok(vec![Tensor::f64(shape, a.iter().zip(b).map(|(a, b)| a + b).collect())])
}

#[cfg(test)]
mod tests {
    use super::super::testing::check;
    use super::*;
    use plimsoll_graph::{Op, ops::Add};

    #[test]
    fn adds() {
        let t = |data: [f32; 4]| Tensor::f32(&[2, 2], data.to_vec());
        let ins = [t([1.0, -2.0, 0.1, f32::INFINITY]), t([0.5, 2.0, 0.2, 1.0])];
        check(Op::Add(Add {}), &ins, &[t([1.5, 0.0, 0.1 + 0.2, f32::INFINITY])], 0.0);
    }
}
