//! Batch normalisation with the statistics of the batch (Ioffe and Szegedy 2015), the form used in training,
//! and the gradients of both forms. Numerics follow torch.nn.BatchNorm1d.

use super::terminal::{GradientOrUpdateOp, f32_is, f32s, like};
use super::*;
use crate::Op;
use serde::{Deserialize, Serialize};

/// Batch normalisation in training. `mean` and the biased `var` are taken over the rows of x; `rstd = 1 /
/// sqrt(var + eps)`; `y = (x - mean) rstd gamma + beta`; `new = (1 - momentum) running + momentum statistic`,
/// where the statistic is the mean, or the unbiased variance.
///
/// Inputs: x: (R, C), gamma, beta, running_mean, running_var: (C). Outputs: y: (R, C), mean, rstd, new_mean,
/// new_var: (C) in f32.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct BatchNormTrain {
    /// Added to the variance.
    pub eps: f32,
    /// Weight of this batch in the running statistics.
    pub momentum: f32,
}

/// Gradient of [`BatchNormTrain`]. With `h = (x - mean) rstd`: `dx = gamma rstd (dy - mean_r dy - h mean_r (dy
/// h))`, `dgamma = sum_r dy h`, `dbeta = sum_r dy`.
///
/// Inputs: dy, x: (R, C), mean, rstd, gamma: (C). Outputs: dx: (R, C), dgamma, dbeta: (C).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct BatchNormTrainGrad {}

/// The gradient of [`BatchNorm`] with running statistics: `dx = dy gamma / sqrt(var + eps)`,
/// `dgamma = sum_r dy (x - mean) / sqrt(var + eps)`, `dbeta = sum_r dy`.
///
/// Inputs dy, x: (R, C), gamma, mean, var: (C). Outputs dx: (R, C), dgamma, dbeta: (C).
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct BatchNormGrad {
    /// Added to the variance.
    pub eps: f32,
}

impl OpRules for BatchNormTrain {
    fn infer(&self, ins: &[&TensorSpec], bounds: &Bounds) -> Result<Vec<TensorSpec>, RuleError> {
        let y = BatchNorm { eps: self.eps }.infer(ins, bounds)?;
        let column = f32s(ins[0].row_elements());
        f32_is("running_mean", ins[3], &column.shape)?;
        f32_is("running_var", ins[4], &column.shape)?;
        Ok(y.into_iter().chain(std::iter::repeat_n(column, 4)).collect())
    }

    fn vjp(&self, cx: &mut Vjp<'_>) -> Result<(), NotDifferentiable> {
        if cx.output_grads[1..].iter().any(Option::is_some) {
            return Err(NotDifferentiable);
        }
        let inputs = [cx.dy()?, cx.input(0), cx.output(1)?, cx.output(2)?, cx.input(1)];
        let grads = cx.builder.node(Op::BatchNormTrainGrad(BatchNormTrainGrad {}), &inputs);
        cx.input_grads[..3].copy_from_slice(&[Some(grads[0]), Some(grads[1]), Some(grads[2])]);
        Ok(())
    }

    fn cost(&self, ins: &[&TensorSpec], outs: &[&TensorSpec], _: &Bounds, counts: Counts) -> Cost {
        elementwise(8.0, ins, outs, counts)
    }

    fn alias(&self, _: usize) -> &'static [usize] {
        &[]
    }

    fn precision(&self) -> PrecisionClass {
        PrecisionClass::Sensitive
    }
}

impl GradientOrUpdateOp for BatchNormTrainGrad {
    fn types(&self, ins: &[&TensorSpec], _: &Bounds) -> Result<Vec<TensorSpec>, RuleError> {
        gradient_types(ins, &["mean", "rstd", "gamma"], 4)
    }

    fn flops(&self, _: &[&TensorSpec], outs: &[&TensorSpec], counts: Counts) -> f64 {
        12.0 * elements(outs[0], counts)
    }

    fn in_place(&self, _: usize) -> &'static [usize] {
        &[]
    }

    fn class(&self) -> PrecisionClass {
        PrecisionClass::Sensitive
    }
}

impl GradientOrUpdateOp for BatchNormGrad {
    fn types(&self, ins: &[&TensorSpec], _: &Bounds) -> Result<Vec<TensorSpec>, RuleError> {
        gradient_types(ins, &["gamma", "mean", "var"], 2)
    }

    fn flops(&self, _: &[&TensorSpec], outs: &[&TensorSpec], counts: Counts) -> f64 {
        6.0 * elements(outs[0], counts)
    }

    fn in_place(&self, _: usize) -> &'static [usize] {
        &[]
    }

    fn class(&self) -> PrecisionClass {
        PrecisionClass::Sensitive
    }
}

/// Output types of a batch-norm gradient with inputs dy, x: (R, C) and three vectors `names`: (C). dx has the
/// type of dy; dgamma and dbeta have the type of gamma, which is input number `gamma`.
fn gradient_types(ins: &[&TensorSpec], names: &[&str], gamma: usize) -> Result<Vec<TensorSpec>, RuleError> {
    arity(ins, 5)?;
    float("dy", ins[0])?;
    let (_, columns) = matrix("dy", ins[0])?;
    alike("x", ins[1], ins[0])?;
    for (what, spec) in names.iter().zip(&ins[2..]) {
        shape_is(what, spec, &[Dim::Fixed(columns)])?;
    }
    Ok(vec![like(ins[0]), like(ins[gamma]), like(ins[gamma])])
}
