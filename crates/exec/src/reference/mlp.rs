//! Fused MLP, `y = r + (f(n(x) W1^T + b1) W2^T + b2)`, composed of the definitions of its ops. Invariant:
//! intermediate results are not rounded.

use super::{Operands, ReferenceError, Tensor, layer_norm, linear};
use plimsoll_graph::ops::{Epilogue, Hidden, Linear, Mlp};

pub(super) fn eval(op: &Mlp, ins: &mut Operands<'_>) -> Result<Vec<Tensor>, ReferenceError> {
    let x = match op.norm {
        Some(norm) => layer_norm::eval(&norm, ins)?.swap_remove(0),
        None => ins.take()?.clone(),
    };
    let epilogue = match op.hidden {
        Hidden::Gelu => Epilogue::Gelu,
        Hidden::Gate => Epilogue::Gate,
    };
    let hidden = product(Linear::new(op.bias[0], epilogue), &x, ins)?;
    let epilogue = if op.residual { Epilogue::Residual } else { Epilogue::None };
    Ok(vec![product(Linear::new(op.bias[1], epilogue), &hidden, ins)?])
}

/// Linear layer of `x` with the next inputs as its parameters.
fn product(op: Linear, x: &Tensor, ins: &mut Operands<'_>) -> Result<Tensor, ReferenceError> {
    let rest = 1 + usize::from(op.bias) + usize::from(op.epilogue == Epilogue::Residual);
    let mut operands = vec![x];
    for _ in 0..rest {
        operands.push(ins.take()?);
    }
    Ok(linear::eval(&op, &mut Operands::new(&operands)?)?.swap_remove(0))
}

#[cfg(test)]
mod tests {
    use super::super::testing::check;
    use super::*;
    use plimsoll_graph::Op;
    use plimsoll_graph::ops::LayerNorm;

    #[test]
    fn every_part_has_its_place() {
        let x = Tensor::f32(&[1, 2], vec![1.0, 3.0]);
        let (w1, w2) = (Tensor::f32(&[1, 2], vec![1.0, 0.5]), Tensor::f32(&[2, 1], vec![2.0, -1.0]));
        let (b1, b2) = (Tensor::f32(&[1], vec![-0.5]), Tensor::f32(&[2], vec![1.0, 0.0]));
        let op = Mlp { norm: None, hidden: Hidden::Gelu, bias: [true; 2], residual: true };
        let y = |y: [f32; 2]| [Tensor::f32(&[1, 2], y.to_vec())];
        // s = 1 + 1.5 - 0.5 = 2; gelu(2) = 1.9544997.
        let ins = [x.clone(), w1.clone(), b1.clone(), w2.clone(), b2.clone(), x.clone()];
        check(Op::Mlp(op), &ins, &y([5.9089994, 1.0455003]), 2e-7);
        // n(x) = [-1 1] / 2 + [2 1] = [1.5 1.5]: s = 1.75; gelu(1.75) = 1.6798973.
        let (gamma, beta) = (Tensor::f32(&[2], vec![1.0; 2]), Tensor::f32(&[2], vec![2.0, 1.0]));
        let norm = Mlp { norm: Some(LayerNorm { eps: 3.0 }), ..op };
        let ins = [x.clone(), gamma, beta, w1, b1, w2, b2, x];
        check(Op::Mlp(norm), &ins, &y([5.359793, 1.3201035]), 2e-7);
    }
}
