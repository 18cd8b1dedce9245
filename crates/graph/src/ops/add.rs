//! Elementwise sum of two tensors of equal shape: the residual connection.

use super::*;
use serde::{Deserialize, Serialize};

/// `y = a + b`. Inputs a, b: (R, D); output y: (R, D).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Add {}

impl OpRules for Add {
    fn infer(&self, ins: &[&TensorSpec], _: &Bounds) -> Result<Vec<TensorSpec>, RuleError> {
        arity(ins, 2)?;
        float("a", ins[0])?;
        alike("b", ins[1], ins[0])?;
        Ok(vec![TensorSpec::activation(ins[0].shape.clone(), ins[0].dtype)])
    }

    fn vjp(&self, cx: &mut Vjp<'_>) -> Result<(), NotDifferentiable> {
        let dy = cx.dy()?;
        cx.input_grads.fill(Some(dy));
        Ok(())
    }

    fn cost(&self, ins: &[&TensorSpec], outs: &[&TensorSpec], _: &Bounds, counts: Counts) -> Cost {
        elementwise(1.0, ins, outs, counts)
    }

    fn alias(&self, _: usize) -> &'static [usize] {
        &[0, 1]
    }

    fn precision(&self) -> PrecisionClass {
        PrecisionClass::Elementwise
    }
}
