//! Chosen rows of a matrix: the first token of every sequence (CLS pooling), or the masked tokens on which
//! a masked-language-model head runs.

use super::*;
use serde::{Deserialize, Serialize};

/// `y[i] = x[rows[i]]`. Inputs x: (T, D), rows: i32 (R); output y: (R, D).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct SelectRows {}

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

    fn vjp(&self, _: &mut Vjp<'_>) -> Result<(), NotDifferentiable> {
        Err(NotDifferentiable)
    }

    fn cost(&self, ins: &[&TensorSpec], outs: &[&TensorSpec], _: &Bounds, counts: Counts) -> Cost {
        let written = outs[0].bytes_at(counts).0;
        Cost { flops: 0, bytes: 2 * written + ins[1].bytes_at(counts).0 }
    }

    fn alias(&self, _: usize) -> &'static [usize] {
        &[]
    }

    fn precision(&self) -> PrecisionClass {
        PrecisionClass::Elementwise
    }

    fn shard(&self, ins: &[Placement]) -> Result<Vec<Placement>, ShardError> {
        match ins[0] {
            Placement::Replicate | Placement::Shard(1) => Ok(vec![ins[0]]),
            Placement::Shard(_) | Placement::Partial => Err(ShardError("it needs all rows of its columns")),
        }
    }
}
