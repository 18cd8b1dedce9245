//! Softmax over rows: scores of a classifier. (Attention has its own, inside.)

use super::gelu::TRANSCENDENTAL;
use super::*;
use serde::{Deserialize, Serialize};

/// `y[r, c] = exp(x[r, c] - max_r) / sum_c exp(x[r, c] - max_r)`. Input x: (R, C); output y: (R, C).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Softmax {}

impl OpRules for Softmax {
    fn infer(&self, ins: &[&TensorSpec], _: &Bounds) -> Result<Vec<TensorSpec>, RuleError> {
        arity(ins, 1)?;
        float("x", ins[0])?;
        matrix("x", ins[0])?;
        Ok(vec![TensorSpec::activation(ins[0].shape.clone(), ins[0].dtype)])
    }

    fn vjp(&self, _: &mut Vjp<'_>) -> Result<(), NotDifferentiable> {
        Err(NotDifferentiable)
    }

    fn cost(&self, ins: &[&TensorSpec], outs: &[&TensorSpec], _: &Bounds, counts: Counts) -> Cost {
        elementwise(TRANSCENDENTAL + 3, ins, outs, counts)
    }

    fn alias(&self, _: usize) -> &'static [usize] {
        &[0]
    }

    fn precision(&self) -> PrecisionClass {
        PrecisionClass::Sensitive
    }

    fn shard(&self, ins: &[Placement]) -> Result<Vec<Placement>, ShardError> {
        Ok(vec![row_parallel(ins, &[])?])
    }
}
