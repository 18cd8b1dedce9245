//! Multiplication by a constant, such as LoRA's alpha / rank.

use super::terminal::like;
use super::*;
use crate::Op;
use serde::{Deserialize, Serialize};

/// Multiplication by a constant: `y = factor x`. Input x: any shape; output y: the same type.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Scale {
    /// The constant.
    pub factor: f32,
}

impl OpRules for Scale {
    fn infer(&self, ins: &[&TensorSpec], _: &Bounds) -> Result<Vec<TensorSpec>, RuleError> {
        arity(ins, 1)?;
        float("x", ins[0])?;
        Ok(vec![like(ins[0])])
    }

    fn vjp(&self, cx: &mut Vjp<'_>) -> Result<(), NotDifferentiable> {
        let dy = cx.dy()?;
        cx.input_grads[0] = Some(cx.builder.one(Op::Scale(*self), &[dy]));
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
