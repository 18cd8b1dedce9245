//! Gradients of the linear map with respect to its input, and with respect to its weight and bias.

use super::*;
use serde::{Deserialize, Serialize};

/// Gradient of [`Linear`] with respect to x: `dx = dy W`. Inputs: dy: (R, N), w: (N, K); output dx: (R, K).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct LinearInputGrad {
    /// As [`Linear::operands`].
    #[serde(default, skip_serializing_if = "OperandFormat::is_stored")]
    pub operands: OperandFormat,
}

/// Gradient of [`Linear`] with respect to w and b: `dw = dy^T x`, `db = sum_r dy`. Inputs: dy: (R, N), x: (R,
/// K); outputs: dw: (N, K), with `bias` db: (N).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct LinearWeightGrad {
    /// Whether to compute db.
    pub bias: bool,
    /// As [`Linear::operands`]; db is a plain sum in f32.
    #[serde(default, skip_serializing_if = "OperandFormat::is_stored")]
    pub operands: OperandFormat,
}

impl OpRules for LinearInputGrad {
    fn infer(&self, ins: &[&TensorSpec], _: &Bounds) -> Result<Vec<TensorSpec>, RuleError> {
        arity(ins, 2)?;
        let dtype = self.operands.infer(["dy", "w"], ins)?;
        let (rows, n) = matrix("dy", ins[0])?;
        let (_, k) = matrix("w", ins[1])?;
        shape_is("w", ins[1], &[Dim::Fixed(n), Dim::Fixed(k)])?;
        Ok(vec![TensorSpec::activation([rows, Dim::Fixed(k)], dtype)])
    }

    fn vjp(&self, _: &mut Vjp<'_>) -> Result<(), NotDifferentiable> {
        Err(NotDifferentiable)
    }

    fn cost(&self, ins: &[&TensorSpec], outs: &[&TensorSpec], _: &Bounds, counts: Counts) -> Cost {
        streaming(2.0 * columns(ins[0]) * elements(outs[0], counts), ins, outs, counts)
    }

    fn alias(&self, _: usize) -> &'static [usize] {
        &[]
    }

    fn precision(&self) -> PrecisionClass {
        PrecisionClass::Matmul
    }
}

impl OpRules for LinearWeightGrad {
    fn infer(&self, ins: &[&TensorSpec], _: &Bounds) -> Result<Vec<TensorSpec>, RuleError> {
        arity(ins, 2)?;
        let dtype = self.operands.infer(["dy", "x"], ins)?;
        let (rows, n) = matrix("dy", ins[0])?;
        let (_, k) = matrix("x", ins[1])?;
        shape_is("x", ins[1], &[rows, Dim::Fixed(k)])?;
        let mut outs = vec![TensorSpec::activation([Dim::Fixed(n), Dim::Fixed(k)], dtype)];
        if self.bias {
            outs.push(TensorSpec::activation([Dim::Fixed(n)], dtype));
        }
        Ok(outs)
    }

    fn vjp(&self, _: &mut Vjp<'_>) -> Result<(), NotDifferentiable> {
        Err(NotDifferentiable)
    }

    fn cost(&self, ins: &[&TensorSpec], outs: &[&TensorSpec], _: &Bounds, counts: Counts) -> Cost {
        streaming(2.0 * ins[0].rows(counts) as f64 * elements(outs[0], counts), ins, outs, counts)
    }

    fn alias(&self, _: usize) -> &'static [usize] {
        &[]
    }

    fn precision(&self) -> PrecisionClass {
        PrecisionClass::Matmul
    }
}
