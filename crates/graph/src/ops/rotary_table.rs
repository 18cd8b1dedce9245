//! Cosines and sines of rotary embedding (Su et al. 2021), computed once per step for all layers.

use super::gelu::TRANSCENDENTAL;
use super::*;
use serde::{Deserialize, Serialize};

/// Rotary tables: `cos[p, j] = cos(p inv_freq[j])` and `sin` likewise, with the angle rounded to f32 as in the
/// reference implementation. Input inv_freq: (d/2), read from the checkpoint, where it is rounded to fp16.
/// Outputs: cos, sin: (longest, d/2) in f32.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct RotaryTable {}

impl OpRules for RotaryTable {
    fn infer(&self, ins: &[&TensorSpec], bounds: &Bounds) -> Result<Vec<TensorSpec>, RuleError> {
        arity(ins, 1)?;
        float("inv_freq", ins[0])?;
        let [Dim::Fixed(half)] = ins[0].shape[..] else {
            return Err(RuleError(format!("inv_freq must be a fixed vector, not {}", ins[0])));
        };
        let table = TensorSpec::activation([Dim::Fixed(bounds.longest), Dim::Fixed(half)], DType::F32);
        Ok(vec![table.clone(), table])
    }

    fn vjp(&self, cx: &mut Vjp<'_>) -> Result<(), NotDifferentiable> {
        // The frequencies are constants.
        cx.input_grads.fill(None);
        Ok(())
    }

    fn cost(&self, ins: &[&TensorSpec], outs: &[&TensorSpec], _: &Bounds, counts: Counts) -> Cost {
        elementwise(2.0 * TRANSCENDENTAL, ins, outs, counts)
    }

    fn alias(&self, _: usize) -> &'static [usize] {
        &[]
    }

    fn precision(&self) -> PrecisionClass {
        PrecisionClass::Sensitive
    }
}
