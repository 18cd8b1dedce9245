//! Matrices side by side: how the two encoders' embeddings meet in the head.

use super::*;
use serde::{Deserialize, Serialize};

/// `y[r] = x0[r] ++ x1[r] ++ ...`. Inputs: (R, Di) each; output y: (R, sum Di).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Concat {}

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
            columns += c;
        }
        Ok(vec![TensorSpec::activation([rows, Dim::Fixed(columns)], first.dtype)])
    }

    fn vjp(&self, _: &mut Vjp<'_>) -> Result<(), NotDifferentiable> {
        Err(NotDifferentiable)
    }

    fn cost(&self, ins: &[&TensorSpec], outs: &[&TensorSpec], _: &Bounds, counts: Counts) -> Cost {
        streaming(0, ins, outs, counts)
    }

    fn alias(&self, _: usize) -> &'static [usize] {
        &[]
    }

    fn precision(&self) -> PrecisionClass {
        PrecisionClass::Elementwise
    }

    fn shard(&self, ins: &[Placement]) -> Result<Vec<Placement>, ShardError> {
        Ok(vec![row_parallel(ins, &[])?])
    }
}
