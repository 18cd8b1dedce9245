//! Conversion of the element type, such as from f32 master weights to 16-bit weights, or back to f32 at the end
//! of the 16-bit part of a graph.

use super::*;
use crate::Op;
use serde::{Deserialize, Serialize};

/// `y = x`, rounded to nearest even where `to` is narrower. Input x: any shape; output y: the shape of x.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Cast {
    /// The element type of y.
    pub to: DType,
}

impl OpRules for Cast {
    fn infer(&self, ins: &[&TensorSpec], _: &Bounds) -> Result<Vec<TensorSpec>, RuleError> {
        arity(ins, 1)?;
        float("x", ins[0])?;
        let y = TensorSpec::activation(ins[0].shape.clone(), self.to);
        float("y", &y)?;
        Ok(vec![y])
    }

    fn vjp(&self, cx: &mut Vjp<'_>) -> Result<(), NotDifferentiable> {
        let to = cx.builder.graph().spec(cx.input(0)).dtype;
        let dy = cx.dy()?;
        cx.input_grads[0] = Some(cx.builder.one(Op::Cast(Cast { to }), &[dy]));
        Ok(())
    }

    fn cost(&self, ins: &[&TensorSpec], outs: &[&TensorSpec], _: &Bounds, counts: Counts) -> Cost {
        elementwise(1.0, ins, outs, counts)
    }

    fn alias(&self, _: usize) -> &'static [usize] {
        &[]
    }

    fn precision(&self) -> PrecisionClass {
        PrecisionClass::Elementwise
    }
}
