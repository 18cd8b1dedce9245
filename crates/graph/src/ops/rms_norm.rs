//! Root-mean-square normalisation (Zhang and Sennrich 2019) and its gradient.

use super::terminal::{GradientOrUpdateOp, f32_is, like};
use super::*;
use crate::Op;
use serde::{Deserialize, Serialize};

/// Root-mean-square normalisation of the H heads of every row, each by itself: `rstd = 1 / sqrt(sum x^2 / D + eps)`,
/// `y = x rstd gamma`. With H = 1 whole rows are normalised.
///
/// Inputs: x: (R, H D), gamma: (D), which all heads share. Outputs: y: (R, H D), and rstd: (R H) in f32 for the backward
/// pass.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct RmsNorm {
    /// Added to the mean square.
    pub eps: f32,
    /// H, the number of heads of a row.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub heads: u32,
}

/// Gradient of [`RmsNorm`]. With `h = x rstd` and `g = dy gamma`, per head of a row: `dx = rstd (g - h sum (g h) / D)`;
/// over the heads of all rows: `dgamma = sum dy h`.
///
/// Inputs: dy, x: (R, H D), rstd: (R H), gamma: (D). Outputs: dx: (R, H D), dgamma: (D).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct RmsNormGrad {
    /// H, the number of heads of a row.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub heads: u32,
}

fn one() -> u32 {
    1
}

fn is_one(heads: &u32) -> bool {
    *heads == 1
}

/// The number of heads of all rows, and the columns of a head.
///
/// # Errors
/// A number of heads that does not divide the columns, or that the rows cannot be multiplied by.
fn by_heads(rows: Dim, columns: u64, heads: u32) -> Result<(Dim, u64), RuleError> {
    let heads = u64::from(heads);
    let width = columns.checked_div(heads).filter(|_| columns.is_multiple_of(heads));
    let width = width
        .ok_or_else(|| RuleError(format!("rows of {columns} columns have no {heads} heads of equal width")))?;
    let rows = match rows {
        Dim::Fixed(rows) => Dim::Fixed(heads_of_rows(rows, heads)?),
        Dim::Tokens(rows) => Dim::Tokens(heads_of_rows(rows, heads)?),
        Dim::Sequences(rows) => Dim::Sequences(heads_of_rows(rows, heads)?),
        Dim::Packs(rows) => Dim::Packs(heads_of_rows(rows, heads)?),
    };
    Ok((rows, width))
}

fn heads_of_rows(rows: u64, heads: u64) -> Result<u64, RuleError> {
    let all = rows.checked_mul(heads);
    all.ok_or_else(|| RuleError(format!("{rows} rows of {heads} heads are too many")))
}

impl OpRules for RmsNorm {
    fn infer(&self, ins: &[&TensorSpec], _: &Bounds) -> Result<Vec<TensorSpec>, RuleError> {
        arity(ins, 2)?;
        float("x", ins[0])?;
        let (rows, columns) = matrix("x", ins[0])?;
        let (rows, columns) = by_heads(rows, columns, self.heads)?;
        shape_is("gamma", ins[1], &[Dim::Fixed(columns)])?;
        Ok(vec![like(ins[0]), TensorSpec::activation([rows], DType::F32)])
    }

    fn vjp(&self, cx: &mut Vjp<'_>) -> Result<(), NotDifferentiable> {
        if cx.output_grads[1].is_some() {
            return Err(NotDifferentiable);
        }
        let inputs = [cx.dy()?, cx.input(0), cx.output(1)?, cx.input(1)];
        let grads = cx.builder.node(Op::RmsNormGrad(RmsNormGrad { heads: self.heads }), &inputs);
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
}

impl GradientOrUpdateOp for RmsNormGrad {
    fn types(&self, ins: &[&TensorSpec], _: &Bounds) -> Result<Vec<TensorSpec>, RuleError> {
        arity(ins, 4)?;
        float("dy", ins[0])?;
        let (rows, columns) = matrix("dy", ins[0])?;
        alike("x", ins[1], ins[0])?;
        let (rows, columns) = by_heads(rows, columns, self.heads)?;
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
