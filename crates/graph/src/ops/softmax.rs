//! Softmax over rows, used for classifier scores (attention computes its own softmax), and its gradient.

use super::gelu::TRANSCENDENTAL;
use super::terminal::{GradientOrUpdateOp, like};
use super::*;
use crate::Op;
use serde::{Deserialize, Serialize};

/// Row softmax: `y[r, c] = exp(x[r, c] - max_r) / sum_c exp(x[r, c] - max_r)`. Input x: (R, C); output y: (R,
/// C).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Softmax {}

/// Gradient of [`Softmax`]: `dx[r, c] = y[r, c] (dy[r, c] - sum_j dy[r, j] y[r, j])`. Inputs: dy, y: (R, C);
/// output dx: (R, C).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct SoftmaxGrad {}

impl OpRules for Softmax {
    fn infer(&self, ins: &[&TensorSpec], _: &Bounds) -> Result<Vec<TensorSpec>, RuleError> {
        arity(ins, 1)?;
        float("x", ins[0])?;
        matrix("x", ins[0])?;
        Ok(vec![TensorSpec::activation(ins[0].shape.clone(), ins[0].dtype)])
    }

    fn vjp(&self, cx: &mut Vjp<'_>) -> Result<(), NotDifferentiable> {
        let inputs = [cx.dy()?, cx.output(0)?];
        cx.input_grads[0] = Some(cx.builder.one(Op::SoftmaxGrad(SoftmaxGrad {}), &inputs));
        Ok(())
    }

    fn cost(&self, ins: &[&TensorSpec], outs: &[&TensorSpec], _: &Bounds, counts: Counts) -> Cost {
        elementwise(TRANSCENDENTAL + 3.0, ins, outs, counts)
    }

    fn alias(&self, _: usize) -> &'static [usize] {
        &[0]
    }

    fn precision(&self) -> PrecisionClass {
        PrecisionClass::Sensitive
    }
}

impl GradientOrUpdateOp for SoftmaxGrad {
    fn types(&self, ins: &[&TensorSpec], _: &Bounds) -> Result<Vec<TensorSpec>, RuleError> {
        arity(ins, 2)?;
        float("dy", ins[0])?;
        matrix("dy", ins[0])?;
        alike("y", ins[1], ins[0])?;
        Ok(vec![like(ins[0])])
    }

    fn flops(&self, _: &[&TensorSpec], outs: &[&TensorSpec], counts: Counts) -> f64 {
        4.0 * elements(outs[0], counts)
    }

    fn in_place(&self, _: usize) -> &'static [usize] {
        // A whole row is read before it is written.
        &[0, 1]
    }

    fn class(&self) -> PrecisionClass {
        PrecisionClass::Sensitive
    }
}
