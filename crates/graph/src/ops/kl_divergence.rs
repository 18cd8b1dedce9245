//! Divergence of a classifier from another one on the same rows, the loss of distillation, and its gradient.
//! Source: Hinton, Vinyals and Dean 2015, "Distilling the knowledge in a neural network", section 2.

use super::gelu::TRANSCENDENTAL;
use super::terminal::{GradientOrUpdateOp, f32_is, f32s, like};
use super::*;
use crate::Op;
use serde::{Deserialize, Serialize};

/// Kullback-Leibler divergence of the softmax of x from that of y, summed over rows: `loss = sum_r sum_c q[r, c] (ln q[r,
/// c] - ln p[r, c])` with `p = softmax(x)` and `q = softmax(y)`. Inputs: x: (R, C), the logits that are trained, and y:
/// (R, C), the logits of the target, which is a constant. Output: loss: f32 (1).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct KlDivergence {}

/// Gradient of [`KlDivergence`] by x: `dx = dloss (softmax(x) - softmax(y))`. Inputs: dloss: f32 (1), x, y: (R, C);
/// output dx: (R, C).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct KlDivergenceGrad {}

/// Checks x and y: (R, C) of one type.
fn logits(ins: &[&TensorSpec]) -> Result<(), RuleError> {
    float("x", ins[0])?;
    matrix("x", ins[0])?;
    alike("y", ins[1], ins[0])
}

impl OpRules for KlDivergence {
    fn infer(&self, ins: &[&TensorSpec], _: &Bounds) -> Result<Vec<TensorSpec>, RuleError> {
        arity(ins, 2)?;
        logits(ins)?;
        Ok(vec![f32s(1)])
    }

    fn vjp(&self, cx: &mut Vjp<'_>) -> Result<(), NotDifferentiable> {
        let inputs = [cx.dy()?, cx.input(0), cx.input(1)];
        cx.input_grads[0] = Some(cx.builder.one(Op::KlDivergenceGrad(KlDivergenceGrad {}), &inputs));
        Ok(())
    }

    fn cost(&self, ins: &[&TensorSpec], outs: &[&TensorSpec], _: &Bounds, counts: Counts) -> Cost {
        streaming((2.0 * TRANSCENDENTAL + 4.0) * elements(ins[0], counts), ins, outs, counts)
    }

    fn alias(&self, _: usize) -> &'static [usize] {
        &[]
    }

    fn precision(&self) -> PrecisionClass {
        PrecisionClass::Sensitive
    }
}

impl GradientOrUpdateOp for KlDivergenceGrad {
    fn types(&self, ins: &[&TensorSpec], _: &Bounds) -> Result<Vec<TensorSpec>, RuleError> {
        arity(ins, 3)?;
        f32_is("dloss", ins[0], &[Dim::Fixed(1)])?;
        logits(&ins[1..])?;
        Ok(vec![like(ins[1])])
    }

    fn flops(&self, _: &[&TensorSpec], outs: &[&TensorSpec], counts: Counts) -> f64 {
        (2.0 * TRANSCENDENTAL + 4.0) * elements(outs[0], counts)
    }

    fn in_place(&self, _: usize) -> &'static [usize] {
        // The sums over a row are complete before it is written, and then an element depends on its own place alone.
        &[1, 2]
    }

    fn class(&self) -> PrecisionClass {
        PrecisionClass::Sensitive
    }
}
