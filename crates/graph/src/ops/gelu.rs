//! The exact Gaussian error linear unit (Hendrycks and Gimpel 2016) and its gradient.

use super::*;
use crate::Op;
use serde::{Deserialize, Serialize};

/// Exact GELU: `y = x Phi(x) = x (1 + erf(x / sqrt 2)) / 2`, never the tanh approximation. Input x: (R, D);
/// output y: (R, D).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Gelu {}

/// Gradient of [`Gelu`]: `dx = dy (Phi(x) + x phi(x))`, with phi the normal density. Inputs: dy, x: (R, D);
/// output dx: (R, D).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct GeluGrad {}

/// Estimated number of floating-point operations of one erf or exp.
pub(super) const TRANSCENDENTAL: f64 = 20.0;

impl OpRules for Gelu {
    fn infer(&self, ins: &[&TensorSpec], _: &Bounds) -> Result<Vec<TensorSpec>, RuleError> {
        arity(ins, 1)?;
        float("x", ins[0])?;
        Ok(vec![TensorSpec::activation(ins[0].shape.clone(), ins[0].dtype)])
    }

    fn vjp(&self, cx: &mut Vjp<'_>) -> Result<(), NotDifferentiable> {
        let inputs = [cx.dy()?, cx.input(0)];
        cx.input_grads[0] = Some(cx.builder.node(Op::GeluGrad(GeluGrad {}), &inputs)[0]);
        Ok(())
    }

    fn cost(&self, ins: &[&TensorSpec], outs: &[&TensorSpec], _: &Bounds, counts: Counts) -> Cost {
        elementwise(TRANSCENDENTAL, ins, outs, counts)
    }

    fn alias(&self, _: usize) -> &'static [usize] {
        &[0]
    }

    fn precision(&self) -> PrecisionClass {
        PrecisionClass::Elementwise
    }
}

impl OpRules for GeluGrad {
    fn infer(&self, ins: &[&TensorSpec], _: &Bounds) -> Result<Vec<TensorSpec>, RuleError> {
        arity(ins, 2)?;
        float("dy", ins[0])?;
        alike("x", ins[1], ins[0])?;
        Ok(vec![TensorSpec::activation(ins[0].shape.clone(), ins[0].dtype)])
    }

    fn vjp(&self, _: &mut Vjp<'_>) -> Result<(), NotDifferentiable> {
        Err(NotDifferentiable)
    }

    fn cost(&self, ins: &[&TensorSpec], outs: &[&TensorSpec], _: &Bounds, counts: Counts) -> Cost {
        elementwise(2.0 * TRANSCENDENTAL, ins, outs, counts)
    }

    fn alias(&self, _: usize) -> &'static [usize] {
        &[0, 1]
    }

    fn precision(&self) -> PrecisionClass {
        PrecisionClass::Elementwise
    }
}
