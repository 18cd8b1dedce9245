//! The gate of a gated MLP: GEGLU (Shazeer 2020), as in MosaicBERT and DNABERT-S.

use super::gelu::TRANSCENDENTAL;
use super::*;
use serde::{Deserialize, Serialize};

/// `y[:, j] = gelu_erf(x[:, j]) * x[:, F + j]`. Input x: (R, 2F); output y: (R, F). With the linears before
/// and after it this is the gated MLP.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Glu {}

impl OpRules for Glu {
    fn infer(&self, ins: &[&TensorSpec], _: &Bounds) -> Result<Vec<TensorSpec>, RuleError> {
        arity(ins, 1)?;
        float("x", ins[0])?;
        let (rows, columns) = matrix("x", ins[0])?;
        if !columns.is_multiple_of(2) {
            return Err(RuleError(format!("x must have an even number of columns, not {}", ins[0])));
        }
        Ok(vec![TensorSpec::activation([rows, Dim::Fixed(columns / 2)], ins[0].dtype)])
    }

    fn vjp(&self, _: &mut Vjp<'_>) -> Result<(), NotDifferentiable> {
        Err(NotDifferentiable)
    }

    fn cost(&self, ins: &[&TensorSpec], outs: &[&TensorSpec], _: &Bounds, counts: Counts) -> Cost {
        elementwise(TRANSCENDENTAL + 1, ins, outs, counts)
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
