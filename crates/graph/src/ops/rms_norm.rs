//! Root-mean-square normalisation (Zhang and Sennrich 2019) and its gradient.

use super::terminal::{GradientOrUpdateOp, f32_is, like};
use super::*;
use crate::Op;
use serde::{Deserialize, Serialize};

/// Root-mean-square normalisation, per row: `rstd = 1 / sqrt(sum x^2 / D + eps)`, `y = x rstd gamma`.
///
/// Inputs: x: (R, D), gamma: (D). Outputs: y: (R, D), and rstd: (R) in f32 for the backward pass.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct RmsNorm {
    /// Added to the mean square.
    pub eps: f32,
}

/// Gradient of [`RmsNorm`]. With `h = x rstd` and `g = dy gamma`, per row: `dx = rstd (g - h sum (g h) / D)`;
/// over rows: `dgamma = sum dy h`.
///
/// Inputs: dy, x: (R, D), rstd: (R), gamma: (D). Outputs: dx: (R, D), dgamma: (D).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct RmsNormGrad {}

impl OpRules for RmsNorm {
    fn infer(&self, ins: &[&TensorSpec], _: &Bounds) -> Result<Vec<TensorSpec>, RuleError> {
        arity(ins, 2)?;
        float("x", ins[0])?;
        let (rows, columns) = matrix("x", ins[0])?;
        shape_is("gamma", ins[1], &[Dim::Fixed(columns)])?;
        Ok(vec![like(ins[0]), TensorSpec::activation([rows], DType::F32)])
    }

    fn vjp(&self, cx: &mut Vjp<'_>) -> Result<(), NotDifferentiable> {
        if cx.output_grads[1].is_some() {
            return Err(NotDifferentiable);
        }
        let inputs = [cx.dy()?, cx.input(0), cx.output(1)?, cx.input(1)];
        let grads = cx.builder.node(Op::RmsNormGrad(RmsNormGrad {}), &inputs);
        cx.input_grads.copy_from_slice(&[Some(grads[0]), Some(grads[1])]);
        Ok(())
    }

    fn cost(&self, ins: &[&TensorSpec], outs: &[&TensorSpec], _: &Bounds, counts: Counts) -> Cost {
        elementwise(5.0, ins, outs, counts)
    }

    fn alias(&self, output: usize) -> &'static [usize] {
        if output == 0 { &[0] } else { &[] }
    }

    fn precision(&self) -> PrecisionClass {
        PrecisionClass::Sensitive
    }

    fn shard(&self, ins: &[Placement]) -> Result<Vec<Placement>, ShardError> {
        Ok(vec![row_parallel(&ins[..1], &ins[1..])?; 2])
    }
}

impl GradientOrUpdateOp for RmsNormGrad {
    fn types(&self, ins: &[&TensorSpec], _: &Bounds) -> Result<Vec<TensorSpec>, RuleError> {
        arity(ins, 4)?;
        float("dy", ins[0])?;
        let (rows, columns) = matrix("dy", ins[0])?;
        alike("x", ins[1], ins[0])?;
        f32_is("rstd", ins[2], &[rows])?;
        shape_is("gamma", ins[3], &[Dim::Fixed(columns)])?;
        Ok(vec![like(ins[0]), like(ins[3])])
    }

    fn flops(&self, _: &[&TensorSpec], outs: &[&TensorSpec], counts: Counts) -> f64 {
        10.0 * elements(outs[0], counts)
    }

    fn in_place(&self, output: usize) -> &'static [usize] {
        if output == 0 { &[0, 1] } else { &[] }
    }

    fn class(&self) -> PrecisionClass {
        PrecisionClass::Sensitive
    }
}
