//! Selection of rows of a matrix by index: the first token of every sequence (CLS pooling), or the masked
//! tokens that a masked-language-model head processes.

use super::terminal::GradientOrUpdateOp;
use super::*;
use crate::Op;
use serde::{Deserialize, Serialize};

/// Row gather: `y[i] = x[rows[i]]`. Inputs: x: (T, D), rows: i32 (R); output y: (R, D).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct SelectRows {}

/// Gradient of [`SelectRows`]: `dx[t] = sum_{i: rows[i] = t} dy[i]` in order of i. Inputs: dy: (R, D), rows:
/// i32 (R); output dx: (T, D).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct SelectRowsGrad {}

impl OpRules for SelectRows {
    fn infer(&self, ins: &[&TensorSpec], _: &Bounds) -> Result<Vec<TensorSpec>, RuleError> {
        arity(ins, 2)?;
        float("x", ins[0])?;
        let (_, columns) = matrix("x", ins[0])?;
        integers("rows", ins[1])?;
        let [rows] = ins[1].shape[..] else {
            return Err(RuleError(format!("rows must be a vector, not {}", ins[1])));
        };
        Ok(vec![TensorSpec::activation([rows, Dim::Fixed(columns)], ins[0].dtype)])
    }

    fn vjp(&self, cx: &mut Vjp<'_>) -> Result<(), NotDifferentiable> {
        if cx.builder.graph().spec(cx.input(0)).shape[0] != Dim::Tokens(1) {
            return Err(NotDifferentiable);
        }
        let inputs = [cx.dy()?, cx.input(1)];
        cx.input_grads[0] = Some(cx.builder.one(Op::SelectRowsGrad(SelectRowsGrad {}), &inputs));
        Ok(())
    }

    fn cost(&self, ins: &[&TensorSpec], outs: &[&TensorSpec], _: &Bounds, counts: Counts) -> Cost {
        let written = traffic(outs[0], counts);
        Cost { flops: 0.0, bytes: 2.0 * written + traffic(ins[1], counts) }
    }

    fn alias(&self, _: usize) -> &'static [usize] {
        &[]
    }

    fn precision(&self) -> PrecisionClass {
        PrecisionClass::Elementwise
    }
}

impl GradientOrUpdateOp for SelectRowsGrad {
    fn types(&self, ins: &[&TensorSpec], _: &Bounds) -> Result<Vec<TensorSpec>, RuleError> {
        arity(ins, 2)?;
        float("dy", ins[0])?;
        let (rows, columns) = matrix("dy", ins[0])?;
        integers("rows", ins[1])?;
        shape_is("rows", ins[1], &[rows])?;
        Ok(vec![TensorSpec::activation([Dim::Tokens(1), Dim::Fixed(columns)], ins[0].dtype)])
    }

    fn flops(&self, ins: &[&TensorSpec], _: &[&TensorSpec], counts: Counts) -> f64 {
        elements(ins[0], counts)
    }

    fn in_place(&self, _: usize) -> &'static [usize] {
        &[]
    }

    fn class(&self) -> PrecisionClass {
        PrecisionClass::Elementwise
    }
}
