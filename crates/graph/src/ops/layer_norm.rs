//! Layer normalisation (Ba, Kiros and Hinton 2016).

use super::*;
use crate::Op;
use serde::{Deserialize, Serialize};

/// Layer normalisation, per row: `mean = sum x / D`, `rstd = 1 / sqrt(sum (x - mean)^2 / D + eps)`, `y = (x -
/// mean) rstd gamma + beta`.
///
/// Inputs: x: (R, D), gamma, beta: (D). Outputs: y: (R, D), and mean, rstd: (R) in f32 for the backward pass;
/// the pass `dce` removes outputs that are never read.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct LayerNorm {
    /// Added to the variance.
    pub eps: f32,
}

impl OpRules for LayerNorm {
    fn infer(&self, ins: &[&TensorSpec], _: &Bounds) -> Result<Vec<TensorSpec>, RuleError> {
        arity(ins, 3)?;
        float("x", ins[0])?;
        let (rows, columns) = matrix("x", ins[0])?;
        shape_is("gamma", ins[1], &[Dim::Fixed(columns)])?;
        shape_is("beta", ins[2], &[Dim::Fixed(columns)])?;
        let row = TensorSpec::activation([rows], DType::F32);
        Ok(vec![TensorSpec::activation(ins[0].shape.clone(), ins[0].dtype), row.clone(), row])
    }

    fn vjp(&self, cx: &mut Vjp<'_>) -> Result<(), NotDifferentiable> {
        // Only y has a gradient. Mean and rstd are outputs so that the backward node can read them; a graph that
        // computes a loss from them is refused, because its gradient through them would be missing.
        if cx.output_grads[1].is_some() || cx.output_grads[2].is_some() {
            return Err(NotDifferentiable);
        }
        let inputs = [cx.dy()?, cx.input(0), cx.output(1)?, cx.output(2)?, cx.input(1)];
        let grads = cx.builder.node(Op::LayerNormGrad(LayerNormGrad {}), &inputs);
        cx.input_grads.copy_from_slice(&[Some(grads[0]), Some(grads[1]), Some(grads[2])]);
        Ok(())
    }

    fn cost(&self, ins: &[&TensorSpec], outs: &[&TensorSpec], _: &Bounds, counts: Counts) -> Cost {
        // Operations per element: 1 for the mean, 3 for the variance, and 4 for (x - mean) rstd gamma + beta.
        elementwise(8.0, ins, outs, counts)
    }

    fn alias(&self, output: usize) -> &'static [usize] {
        // y may take the storage of x: a kernel reads a whole row before it writes the row.
        if output == 0 { &[0] } else { &[] }
    }

    fn precision(&self) -> PrecisionClass {
        PrecisionClass::Sensitive
    }
}
