//! Concatenation of matrices along the columns, used to join the embeddings of the two encoders in the
//! classification head, and its gradient.

use super::terminal::GradientOrUpdateOp;
use super::*;
use crate::Op;
use serde::{Deserialize, Serialize};

/// Concatenation: `y[r] = x0[r] ++ x1[r] ++ ...`. Inputs: (R, Di) each; output y: (R, sum Di).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Concat {}

/// Gradient of one input of [`Concat`]: columns `first..first + count` of dy. Input dy: (R, D); output dx: (R,
/// count).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct ConcatGrad {
    /// First column of the input in the concatenated matrix.
    pub first: u64,
    /// Number of columns of the input.
    pub count: u64,
}

impl OpRules for Concat {
    fn infer(&self, ins: &[&TensorSpec], _: &Bounds) -> Result<Vec<TensorSpec>, RuleError> {
        let Some(first) = ins.first() else {
            return Err(RuleError("takes at least one input".into()));
        };
        let (rows, _) = matrix("every input", first)?;
        let mut columns = 0;
        for x in ins {
            float("every input", x)?;
            let (r, c) = matrix("every input", x)?;
            if r != rows || x.dtype != first.dtype {
                return Err(RuleError(format!("cannot put {x} beside {first}")));
            }
            // A saturated sum is above the limit of a dimension, which the graph is checked against.
            columns = c.saturating_add(columns);
        }
        Ok(vec![TensorSpec::activation([rows, Dim::Fixed(columns)], first.dtype)])
    }

    fn vjp(&self, cx: &mut Vjp<'_>) -> Result<(), NotDifferentiable> {
        let dy = cx.dy()?;
        let mut first = 0;
        for (i, &x) in cx.node.inputs.iter().enumerate() {
            let count = cx.builder.graph().spec(x).row_elements();
            cx.input_grads[i] = Some(cx.builder.one(Op::ConcatGrad(ConcatGrad { first, count }), &[dy]));
            first = count.saturating_add(first);
        }
        Ok(())
    }

    fn cost(&self, ins: &[&TensorSpec], outs: &[&TensorSpec], _: &Bounds, counts: Counts) -> Cost {
        streaming(0.0, ins, outs, counts)
    }

    fn alias(&self, _: usize) -> &'static [usize] {
        &[]
    }

    fn precision(&self) -> PrecisionClass {
        PrecisionClass::Elementwise
    }
}

impl GradientOrUpdateOp for ConcatGrad {
    fn types(&self, ins: &[&TensorSpec], _: &Bounds) -> Result<Vec<TensorSpec>, RuleError> {
        arity(ins, 1)?;
        float("dy", ins[0])?;
        let (rows, columns) = matrix("dy", ins[0])?;
        if self.first.checked_add(self.count).is_none_or(|end| end > columns) {
            return Err(RuleError(format!("{} has no columns {} and {} more", ins[0], self.first, self.count)));
        }
        Ok(vec![TensorSpec::activation([rows, Dim::Fixed(self.count)], ins[0].dtype)])
    }

    fn flops(&self, _: &[&TensorSpec], _: &[&TensorSpec], _: Counts) -> f64 {
        0.0
    }

    fn in_place(&self, _: usize) -> &'static [usize] {
        &[]
    }

    fn class(&self) -> PrecisionClass {
        PrecisionClass::Elementwise
    }
}
