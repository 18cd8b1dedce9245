//! Mean over the rows of each sequence (mean pooling to a sequence embedding), and its gradient.

use super::terminal::GradientOrUpdateOp;
use super::*;
use crate::Op;
use serde::{Deserialize, Serialize};

/// Mean pooling: `y[s] = mean of x[start+skip_first .. end-skip_last]`, zero where that range is empty. ESM-2
/// averages residues only (1, 1); DNABERT-S averages all tokens (0, 0).
///
/// Inputs: x: (T, D), spans: (S, 2). Output y: (S, D).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct SegmentMean {
    /// Number of leading tokens of every sequence that are excluded.
    pub skip_first: u32,
    /// Number of trailing tokens of every sequence that are excluded.
    pub skip_last: u32,
}

/// Gradient of [`SegmentMean`]: `dx[t] = dy[s] / n_s` for the n_s rows of sequence s that are averaged, 0 for
/// all other rows. Inputs: dy: (S, D), spans: (S, 2); output dx: (T, D).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct SegmentMeanGrad {
    /// Number of excluded leading tokens in the forward op.
    pub skip_first: u32,
    /// Number of excluded trailing tokens in the forward op.
    pub skip_last: u32,
    /// Element type of x and of its gradient.
    pub dtype: DType,
}

impl OpRules for SegmentMean {
    fn infer(&self, ins: &[&TensorSpec], _: &Bounds) -> Result<Vec<TensorSpec>, RuleError> {
        arity(ins, 2)?;
        float("x", ins[0])?;
        let (_, columns) = matrix("x", ins[0])?;
        shape_is("x", ins[0], &[Dim::Tokens(1), Dim::Fixed(columns)])?;
        spans(ins[1])?;
        Ok(vec![TensorSpec::activation([Dim::Sequences(1), Dim::Fixed(columns)], DType::F32)])
    }

    fn vjp(&self, cx: &mut Vjp<'_>) -> Result<(), NotDifferentiable> {
        let dtype = cx.builder.graph().spec(cx.input(0)).dtype;
        let op = SegmentMeanGrad { skip_first: self.skip_first, skip_last: self.skip_last, dtype };
        let inputs = [cx.dy()?, cx.input(1)];
        cx.input_grads[0] = Some(cx.builder.one(Op::SegmentMeanGrad(op), &inputs));
        Ok(())
    }

    fn cost(&self, ins: &[&TensorSpec], outs: &[&TensorSpec], _: &Bounds, counts: Counts) -> Cost {
        streaming(elements(ins[0], counts), ins, outs, counts)
    }

    fn alias(&self, _: usize) -> &'static [usize] {
        &[]
    }

    fn precision(&self) -> PrecisionClass {
        PrecisionClass::Sensitive
    }
}

impl GradientOrUpdateOp for SegmentMeanGrad {
    fn types(&self, ins: &[&TensorSpec], _: &Bounds) -> Result<Vec<TensorSpec>, RuleError> {
        arity(ins, 2)?;
        float("dy", ins[0])?;
        let (_, columns) = matrix("dy", ins[0])?;
        shape_is("dy", ins[0], &[Dim::Sequences(1), Dim::Fixed(columns)])?;
        spans(ins[1])?;
        Ok(vec![TensorSpec::activation([Dim::Tokens(1), Dim::Fixed(columns)], self.dtype)])
    }

    fn flops(&self, _: &[&TensorSpec], outs: &[&TensorSpec], counts: Counts) -> f64 {
        elements(outs[0], counts)
    }

    fn in_place(&self, _: usize) -> &'static [usize] {
        &[]
    }

    fn class(&self) -> PrecisionClass {
        PrecisionClass::Sensitive
    }
}
