//! Dropout (Srivastava et al. 2014) with a counter-based generator (Philox4x32-10, Salmon et al. 2011): the
//! mask is a function of seed, pack and position in the pack, so recomputation gives identical bits, no mask is stored, and
//! the mask of a pack does not depend on the packs that a step joins.

use super::terminal::{i32_is, like};
use super::*;
use crate::Op;
use serde::{Deserialize, Serialize};

/// Dropout: `y = x keep / (1 - p)`. The element in column c of row r of pack number n, where r counts from the first row of
/// the pack, is kept if word `c % 4` of `Philox4x32-10(counter = (c / 4, r, stream, n), key = seed)` is at least `p 2^32`.
///
/// Inputs: x: (T, D) or (S, D), seed: i32 (2), packs: i32 (P, 6), see [`crate::packs`]. Output y: as x.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Dropout {
    /// Probability of setting an element to zero, in 0..1.
    pub p: f32,
    /// Distinguishes the dropouts of one graph, which share a seed.
    pub stream: u32,
}

impl Dropout {
    /// The word of a row of `packs` that has the first row of a pack in `x`.
    ///
    /// # Errors
    /// Rows that are neither tokens nor sequences.
    pub fn pack_word(x: &TensorSpec) -> Result<usize, RuleError> {
        match x.shape.first() {
            Some(Dim::Tokens(1)) => Ok(crate::packs::TOKENS),
            Some(Dim::Sequences(1)) => Ok(crate::packs::SEQUENCES),
            _ => Err(RuleError(format!("x must have a row for each token or each sequence, not {x}"))),
        }
    }
}

impl OpRules for Dropout {
    fn infer(&self, ins: &[&TensorSpec], _: &Bounds) -> Result<Vec<TensorSpec>, RuleError> {
        arity(ins, 3)?;
        float("x", ins[0])?;
        matrix("x", ins[0])?;
        Self::pack_word(ins[0])?;
        i32_is("seed", ins[1], &[Dim::Fixed(2)])?;
        packs(ins[2])?;
        if !(0.0..1.0).contains(&self.p) {
            return Err(RuleError(format!("cannot drop a share of {}", self.p)));
        }
        Ok(vec![like(ins[0])])
    }

    fn vjp(&self, cx: &mut Vjp<'_>) -> Result<(), NotDifferentiable> {
        // The op is linear in x with a fixed mask, so its gradient is the same op applied to dy.
        let inputs = [cx.dy()?, cx.input(1), cx.input(2)];
        cx.input_grads[0] = Some(cx.builder.one(Op::Dropout(*self), &inputs));
        Ok(())
    }

    fn cost(&self, ins: &[&TensorSpec], outs: &[&TensorSpec], _: &Bounds, counts: Counts) -> Cost {
        elementwise(12.0, ins, outs, counts)
    }

    fn alias(&self, _: usize) -> &'static [usize] {
        &[0]
    }

    fn precision(&self) -> PrecisionClass {
        PrecisionClass::Elementwise
    }
}
