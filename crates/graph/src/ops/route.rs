//! Mixture-of-experts routing (Shazeer et al. 2017, Fedus et al. 2022), its gradient, and the losses that
//! balance the load of the experts. Routing drops no rows unless a capacity is given (Gale et al. 2023), so all
//! experts together always have tokens x top_k rows and the plan's sizes are exact.

use super::gelu::TRANSCENDENTAL;
use super::terminal::{GradientOrUpdateOp, f32_is, f32s, i32_is, like};
use super::*;
use crate::Op;
use serde::{Deserialize, Serialize};

/// Chooses for each token the `top_k` largest of `softmax(logits)`, with ties to the lower expert index, and
/// sorts the chosen rows by expert and, within an expert, by token.
///
/// Inputs: logits: (T, E); with a capacity also packs: i32 (P, 6), see [`crate::packs`]. Outputs: gates: f32 (T, k), divided by their sum with `renormalise`; experts: i32 (T,
/// k), largest probability first; order: i32 (kT), the index `t k + j` that sorted row r comes from, -1 after
/// the last row; places: i32 (kT), the inverse of order, -1 where the row was dropped; offsets: i32 (E + 1),
/// the first row of every expert; dropped: i32 (1), the number of dropped rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Route {
    /// E, the number of experts.
    pub experts: u32,
    /// k, the number of experts per token.
    pub top_k: u32,
    /// Whether the gates of a token are normalised to sum to 1.
    pub renormalise: bool,
    /// Largest number of rows of one expert from one pack, in thousandths of `T k / E` with the T tokens of the pack,
    /// rounded up; rows beyond it are dropped, with gate 0. 0 means no limit.
    pub capacity: u32,
}

impl Route {
    /// Largest number of rows of one expert from a pack of `tokens` tokens, if there is a limit.
    pub fn limit(&self, tokens: u64) -> Option<u64> {
        // In u128, which holds the product of a 64-bit and two 32-bit numbers.
        let rows = u128::from(self.capacity) * u128::from(tokens) * u128::from(self.top_k);
        let limit = rows.div_ceil(1000 * u128::from(self.experts));
        (self.capacity > 0).then_some(u64::try_from(limit).unwrap_or(u64::MAX))
    }
}

/// Gradient of the gates of [`Route`]. A dropped row has no gradient but contributes to the sum by which its
/// token's gates were divided, so the gates are recomputed from the logits. Inputs: dgates: f32 (T, k), logits:
/// (T, E), experts: i32 (T, k), places: i32 (kT); output dlogits: (T, E).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct RouteGrad {
    /// Whether the forward op normalises the gates.
    pub renormalise: bool,
}

/// Auxiliary router loss: the sum over packs of `n (balance E sum_e f_e P_e + z mean_t lse_t^2)`, where n is the number of
/// targets of the pack, `f_e` the fraction of the T k choices of its T tokens that fall on expert e, `P_e` the mean
/// probability of e, and `lse_t` the log-sum-exp of the logits of token t (Fedus et al. 2022; Zoph et al. 2022). The first
/// term is n x balance where all experts are used equally. f is a count, so it has no gradient. A pack without tokens adds
/// nothing.
///
/// Inputs: logits: (T, E), experts: i32 (T, k), packs: i32 (P, 6), see [`crate::packs`]. Outputs: loss: f32 (1), and its two
/// weighted terms, balance: f32 (1) and z: f32 (1). The terms are for reporting: only `loss` has a gradient.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct RouterLoss {
    /// Weight of the load-balance loss.
    pub balance: f32,
    /// Weight of the z-loss.
    pub z: f32,
}

/// Gradient of [`RouterLoss`]. Inputs: dloss: f32 (1), logits: (T, E), experts: i32 (T, k), packs: i32 (P, 6); output
/// dlogits: (T, E).
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct RouterLossGrad {
    /// Weight of the load-balance loss in the forward op.
    pub balance: f32,
    /// Weight of the z-loss in the forward op.
    pub z: f32,
}

impl OpRules for Route {
    fn infer(&self, ins: &[&TensorSpec], _: &Bounds) -> Result<Vec<TensorSpec>, RuleError> {
        arity(ins, 1 + usize::from(self.capacity > 0))?;
        float("logits", ins[0])?;
        ins[1..].iter().try_for_each(|spec| packs(spec))?;
        let e = u64::from(self.experts);
        let k = u64::from(self.top_k);
        shape_is("logits", ins[0], &[Dim::Tokens(1), Dim::Fixed(e)])?;
        if k == 0 || k > e {
            return Err(RuleError(format!("cannot choose {k} of {e} experts")));
        }
        let choices = [Dim::Tokens(1), Dim::Fixed(k)];
        Ok(vec![
            TensorSpec::activation(choices, DType::F32),
            TensorSpec::activation(choices, DType::I32),
            TensorSpec::activation([Dim::Tokens(k)], DType::I32),
            TensorSpec::activation([Dim::Tokens(k)], DType::I32),
            TensorSpec::activation([Dim::Fixed(e.saturating_add(1))], DType::I32),
            TensorSpec::activation([Dim::Fixed(1)], DType::I32),
        ])
    }

    fn vjp(&self, cx: &mut Vjp<'_>) -> Result<(), NotDifferentiable> {
        let op = Op::RouteGrad(RouteGrad { renormalise: self.renormalise });
        let inputs = [cx.dy()?, cx.input(0), cx.output(1)?, cx.output(3)?];
        cx.input_grads[0] = Some(cx.builder.one(op, &inputs));
        Ok(())
    }

    fn cost(&self, ins: &[&TensorSpec], outs: &[&TensorSpec], _: &Bounds, counts: Counts) -> Cost {
        let per_logit = TRANSCENDENTAL + f64::from(self.top_k);
        streaming(per_logit * elements(ins[0], counts), ins, outs, counts)
    }

    fn alias(&self, _: usize) -> &'static [usize] {
        &[]
    }

    fn precision(&self) -> PrecisionClass {
        PrecisionClass::Sensitive
    }
}

impl GradientOrUpdateOp for RouteGrad {
    fn types(&self, ins: &[&TensorSpec], _: &Bounds) -> Result<Vec<TensorSpec>, RuleError> {
        arity(ins, 4)?;
        choices(&ins[1..3])?;
        let (_, k) = matrix("dgates", ins[0])?;
        f32_is("dgates", ins[0], &[Dim::Tokens(1), Dim::Fixed(k)])?;
        i32_is("experts", ins[2], &[Dim::Tokens(1), Dim::Fixed(k)])?;
        i32_is("places", ins[3], &[Dim::Tokens(k)])?;
        Ok(vec![like(ins[1])])
    }

    fn flops(&self, ins: &[&TensorSpec], _: &[&TensorSpec], counts: Counts) -> f64 {
        TRANSCENDENTAL * elements(ins[1], counts)
    }

    fn in_place(&self, _: usize) -> &'static [usize] {
        &[]
    }

    fn class(&self) -> PrecisionClass {
        PrecisionClass::Sensitive
    }
}

/// Checks logits: (T, E) and experts: i32 (T, k) of one step.
fn choices(ins: &[&TensorSpec]) -> Result<(), RuleError> {
    float("logits", ins[0])?;
    let (_, e) = matrix("logits", ins[0])?;
    let (_, k) = matrix("experts", ins[1])?;
    shape_is("logits", ins[0], &[Dim::Tokens(1), Dim::Fixed(e)])?;
    i32_is("experts", ins[1], &[Dim::Tokens(1), Dim::Fixed(k)])
}

impl OpRules for RouterLoss {
    fn infer(&self, ins: &[&TensorSpec], _: &Bounds) -> Result<Vec<TensorSpec>, RuleError> {
        arity(ins, 3)?;
        choices(&ins[..2])?;
        packs(ins[2])?;
        Ok(vec![f32s(1), f32s(1), f32s(1)])
    }

    fn vjp(&self, cx: &mut Vjp<'_>) -> Result<(), NotDifferentiable> {
        if cx.output_grads[1..].iter().any(Option::is_some) {
            return Err(NotDifferentiable);
        }
        let op = Op::RouterLossGrad(RouterLossGrad { balance: self.balance, z: self.z });
        let inputs = [cx.dy()?, cx.input(0), cx.input(1), cx.input(2)];
        cx.input_grads[0] = Some(cx.builder.one(op, &inputs));
        Ok(())
    }

    fn cost(&self, ins: &[&TensorSpec], outs: &[&TensorSpec], _: &Bounds, counts: Counts) -> Cost {
        streaming(TRANSCENDENTAL * elements(ins[0], counts), ins, outs, counts)
    }

    fn alias(&self, _: usize) -> &'static [usize] {
        &[]
    }

    fn precision(&self) -> PrecisionClass {
        PrecisionClass::Sensitive
    }
}

impl GradientOrUpdateOp for RouterLossGrad {
    fn types(&self, ins: &[&TensorSpec], _: &Bounds) -> Result<Vec<TensorSpec>, RuleError> {
        arity(ins, 4)?;
        f32_is("dloss", ins[0], &[Dim::Fixed(1)])?;
        choices(&ins[1..3])?;
        packs(ins[3])?;
        Ok(vec![like(ins[1])])
    }

    fn flops(&self, ins: &[&TensorSpec], _: &[&TensorSpec], counts: Counts) -> f64 {
        TRANSCENDENTAL * elements(ins[1], counts)
    }

    fn in_place(&self, _: usize) -> &'static [usize] {
        &[]
    }

    fn class(&self) -> PrecisionClass {
        PrecisionClass::Sensitive
    }
}
