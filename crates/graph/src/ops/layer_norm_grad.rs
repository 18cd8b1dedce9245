//! Gradient of layer normalisation.

use super::*;
use serde::{Deserialize, Serialize};

/// Gradient of [`LayerNorm`]. With `h = (x - mean) rstd` and `g = dy gamma`, per row: `dx = rstd (g - sum g / D
/// - h sum (g h) / D)`; over rows: `dgamma = sum dy h`, `dbeta = sum dy`.
///
/// Inputs: dy, x: (R, D), mean, rstd: (R), gamma: (D). Outputs: dx: (R, D), dgamma, dbeta: (D).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct LayerNormGrad {}

impl OpRules for LayerNormGrad {
    fn infer(&self, ins: &[&TensorSpec], _: &Bounds) -> Result<Vec<TensorSpec>, RuleError> {
        arity(ins, 5)?;
        float("dy", ins[0])?;
        let (rows, columns) = matrix("dy", ins[0])?;
        alike("x", ins[1], ins[0])?;
        shape_is("mean", ins[2], &[rows])?;
        shape_is("rstd", ins[3], &[rows])?;
        shape_is("gamma", ins[4], &[Dim::Fixed(columns)])?;
        let column = TensorSpec::activation([Dim::Fixed(columns)], ins[4].dtype);
        Ok(vec![TensorSpec::activation(ins[0].shape.clone(), ins[0].dtype), column.clone(), column])
    }

    fn vjp(&self, _: &mut Vjp<'_>) -> Result<(), NotDifferentiable> {
        Err(NotDifferentiable)
    }

    fn cost(&self, ins: &[&TensorSpec], outs: &[&TensorSpec], _: &Bounds, counts: Counts) -> Cost {
        elementwise(16.0, ins, outs, counts)
    }

    fn alias(&self, output: usize) -> &'static [usize] {
        if output == 0 { &[0, 1] } else { &[] }
    }

    fn precision(&self) -> PrecisionClass {
        PrecisionClass::Sensitive
    }
}
