//! Mean of the rows of every sequence: the embedding of a sequence.

use super::*;
use serde::{Deserialize, Serialize};

/// `y[s] = mean of x[start+skip_first .. end-skip_last]`; zero where that is empty.
/// ESM-2 averages residues only (1, 1); DNABERT-S all tokens (0, 0).
///
/// Inputs x: (T, D), spans: (S, 2). Output y: (S, D).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct SegmentMean {
    /// Leading tokens of every sequence that do not count.
    pub skip_first: u32,
    /// Trailing tokens of every sequence that do not count.
    pub skip_last: u32,
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

    fn vjp(&self, _: &mut Vjp<'_>) -> Result<(), NotDifferentiable> {
        Err(NotDifferentiable)
    }

    fn cost(&self, ins: &[&TensorSpec], outs: &[&TensorSpec], _: &Bounds, counts: Counts) -> Cost {
        streaming(ins[0].elements_at(counts), ins, outs, counts)
    }

    fn alias(&self, _: usize) -> &'static [usize] {
        &[]
    }

    fn precision(&self) -> PrecisionClass {
        PrecisionClass::Sensitive
    }

    fn shard(&self, ins: &[Placement]) -> Result<Vec<Placement>, ShardError> {
        match ins[0] {
            Placement::Replicate | Placement::Shard(1) => Ok(vec![ins[0]]),
            Placement::Shard(_) | Placement::Partial => Err(ShardError("it needs whole sequences")),
        }
    }
}
