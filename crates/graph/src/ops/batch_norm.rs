//! Batch normalisation with running statistics (Ioffe and Szegedy 2015), the form used at inference.

use super::*;
use crate::Op;
use serde::{Deserialize, Serialize};

/// `y = (x - mean) / sqrt(var + eps) * gamma + beta`. Inputs x: (R, C), gamma, beta, mean, var: (C);
/// output y: (R, C).
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct BatchNorm {
    /// Added to the variance.
    pub eps: f32,
}

impl OpRules for BatchNorm {
    fn infer(&self, ins: &[&TensorSpec], _: &Bounds) -> Result<Vec<TensorSpec>, RuleError> {
        arity(ins, 5)?;
        float("x", ins[0])?;
        let (_, columns) = matrix("x", ins[0])?;
        for (what, spec) in ["gamma", "beta", "mean", "var"].iter().zip(&ins[1..]) {
            shape_is(what, spec, &[Dim::Fixed(columns)])?;
        }
        Ok(vec![TensorSpec::activation(ins[0].shape.clone(), ins[0].dtype)])
    }

    fn vjp(&self, cx: &mut Vjp<'_>) -> Result<(), NotDifferentiable> {
        let inputs = [cx.dy()?, cx.input(0), cx.input(1), cx.input(3), cx.input(4)];
        let grads = cx.builder.node(Op::BatchNormGrad(BatchNormGrad { eps: self.eps }), &inputs);
        cx.input_grads[..3].copy_from_slice(&[Some(grads[0]), Some(grads[1]), Some(grads[2])]);
        Ok(())
    }

    fn cost(&self, ins: &[&TensorSpec], outs: &[&TensorSpec], _: &Bounds, counts: Counts) -> Cost {
        elementwise(4.0, ins, outs, counts)
    }

    fn alias(&self, _: usize) -> &'static [usize] {
        &[0]
    }

    fn precision(&self) -> PrecisionClass {
        PrecisionClass::Sensitive
    }
}
