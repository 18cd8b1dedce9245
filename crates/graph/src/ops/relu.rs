//! The rectified linear unit and its gradient.

use super::terminal::GradientOrUpdateOp;
use super::*;
use crate::Op;
use serde::{Deserialize, Serialize};

/// Rectified linear unit: `y = max(x, 0)`; NaN stays NaN. Input x: (R, D); output y: (R, D).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Relu {}

/// Gradient of [`Relu`]: `dx = dy` where `x > 0`, else 0. Inputs: dy, x: (R, D); output dx: (R, D).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct ReluGrad {}

impl OpRules for Relu {
    fn infer(&self, ins: &[&TensorSpec], bounds: &Bounds) -> Result<Vec<TensorSpec>, RuleError> {
        Gelu {}.infer(ins, bounds)
    }

    fn vjp(&self, cx: &mut Vjp<'_>) -> Result<(), NotDifferentiable> {
        let inputs = [cx.dy()?, cx.input(0)];
        cx.input_grads[0] = Some(cx.builder.one(Op::ReluGrad(ReluGrad {}), &inputs));
        Ok(())
    }

    fn cost(&self, ins: &[&TensorSpec], outs: &[&TensorSpec], _: &Bounds, counts: Counts) -> Cost {
        elementwise(1.0, ins, outs, counts)
    }

    fn alias(&self, _: usize) -> &'static [usize] {
        &[0]
    }

    fn precision(&self) -> PrecisionClass {
        PrecisionClass::Elementwise
    }
}

impl GradientOrUpdateOp for ReluGrad {
    fn types(&self, ins: &[&TensorSpec], bounds: &Bounds) -> Result<Vec<TensorSpec>, RuleError> {
        GeluGrad {}.infer(ins, bounds)
    }

    fn flops(&self, _: &[&TensorSpec], outs: &[&TensorSpec], counts: Counts) -> f64 {
        elements(outs[0], counts)
    }

    fn in_place(&self, _: usize) -> &'static [usize] {
        &[0, 1]
    }

    fn class(&self) -> PrecisionClass {
        PrecisionClass::Elementwise
    }
}
