//! Which experts a token goes to (Shazeer et al. 2017, Fedus et al. 2022), its gradient, and the losses that keep
//! experts evenly used. Routing is dropless unless a capacity is given (Gale et al. 2023), so the rows of all
//! experts together are always tokens x top_k and a plan stays exact.

use super::gelu::TRANSCENDENTAL;
use super::terminal::{Terminal, f32_is, f32s, i32_is, like};
use super::*;
use crate::Op;
use serde::{Deserialize, Serialize};

/// Per token the `top_k` largest of `softmax(logits)`, ties to the lower expert, and the order in which rows lie
/// when they are sorted by expert, within one by token.
///
/// Input logits: (T, E). Outputs gates: f32 (T, k), divided by their sum with `renormalise`; experts: i32 (T, k),
/// largest first; order: i32 (kT), the index `t k + j` that sorted row r comes from, -1 behind the last row;
/// places: i32 (kT), its inverse, -1 where the row was dropped; offsets: i32 (E + 1), the first row of every
/// expert; dropped: i32 (1).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Route {
    /// E.
    pub experts: u32,
    /// k.
    pub top_k: u32,
    /// Whether the gates of a token sum to 1.
    pub renormalise: bool,
    /// The most rows of one expert, in 1/1000 of `T k / E` rounded up: later rows are dropped, with gate 0.
    /// 0 is no limit.
    pub capacity: u32,
}

impl Route {
    /// The most rows of one expert in a step of so many tokens, where there is a limit.
    pub fn limit(&self, tokens: u64) -> Option<u64> {
        let rows = u128::from(self.capacity) * u128::from(tokens) * u128::from(self.top_k);
        let limit = rows.div_ceil(1000 * u128::from(self.experts));
        (self.capacity > 0).then_some(u64::try_from(limit).unwrap_or(u64::MAX))
    }
}

/// The gradient of the gates. A dropped row has none, but counts in the sum that its token was divided by, so
/// gates are computed again from the logits. Inputs dgates: f32 (T, k), logits: (T, E), experts: i32 (T, k),
/// places: i32 (kT); output dlogits: (T, E).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct RouteGrad {
    /// That of the forward op.
    pub renormalise: bool,
}

/// `balance E sum_e f_e P_e + z mean_t lse_t^2` with `f_e` the share of the T k choices that fell on expert e,
/// `P_e` the mean probability of e, and `lse_t` the log of the sum of the exponentials of token t's logits
/// (Fedus et al. 2022; Zoph et al. 2022). 1 x balance where all experts are used alike. f is counted, so it has
/// no gradient.
///
/// Inputs logits: (T, E), experts: i32 (T, k). Outputs loss: f32 (1), and its two weighted terms balance: f32 (1) and
/// z: f32 (1). The terms are for reporting: only `loss` has a gradient.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct RouterLoss {
    /// Weight of the load-balance loss.
    pub balance: f32,
    /// Weight of the z-loss.
    pub z: f32,
}

/// Inputs dloss: f32 (1), logits: (T, E), experts: i32 (T, k); output dlogits: (T, E).
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct RouterLossGrad {
    /// That of the forward op.
    pub balance: f32,
    /// That of the forward op.
    pub z: f32,
}

impl OpRules for Route {
    fn infer(&self, ins: &[&TensorSpec], _: &Bounds) -> Result<Vec<TensorSpec>, RuleError> {
        arity(ins, 1)?;
        float("logits", ins[0])?;
        let (e, k) = (u64::from(self.experts), u64::from(self.top_k));
        shape_is("logits", ins[0], &[Dim::Tokens(1), Dim::Fixed(e)])?;
        if k == 0 || k > e {
            return Err(RuleError(format!("cannot choose {k} of {e} experts")));
        }
        let choices = [Dim::Tokens(1), Dim::Fixed(k)];
        let i32s = |shape: &[Dim]| TensorSpec::activation(shape, DType::I32);
        Ok(vec![
            TensorSpec::activation(choices, DType::F32),
            i32s(&choices),
            i32s(&[Dim::Tokens(k)]),
            i32s(&[Dim::Tokens(k)]),
            i32s(&[Dim::Fixed(e + 1)]),
            i32s(&[Dim::Fixed(1)]),
        ])
    }

    fn vjp(&self, cx: &mut Vjp<'_>) -> Result<(), NotDifferentiable> {
        let op = Op::RouteGrad(RouteGrad { renormalise: self.renormalise });
        let inputs = [cx.dy()?, cx.input(0), cx.output(1)?, cx.output(3)?];
        cx.input_grads[0] = Some(cx.builder.one(op, &inputs));
        Ok(())
    }

    fn cost(&self, ins: &[&TensorSpec], outs: &[&TensorSpec], _: &Bounds, counts: Counts) -> Cost {
        let per_logit = TRANSCENDENTAL + u64::from(self.top_k);
        streaming(per_logit * ins[0].elements_at(counts), ins, outs, counts)
    }

    fn alias(&self, _: usize) -> &'static [usize] {
        &[]
    }

    fn precision(&self) -> PrecisionClass {
        PrecisionClass::Sensitive
    }

    fn shard(&self, ins: &[Placement]) -> Result<Vec<Placement>, ShardError> {
        match ins[0] {
            Placement::Replicate => Ok(vec![ins[0]; 6]),
            Placement::Shard(_) | Placement::Partial => Err(ShardError("rows are sorted over all tokens")),
        }
    }
}

impl Terminal for RouteGrad {
    fn types(&self, ins: &[&TensorSpec], _: &Bounds) -> Result<Vec<TensorSpec>, RuleError> {
        arity(ins, 4)?;
        choices(&ins[1..3])?;
        let (_, k) = matrix("dgates", ins[0])?;
        f32_is("dgates", ins[0], &[Dim::Tokens(1), Dim::Fixed(k)])?;
        i32_is("experts", ins[2], &[Dim::Tokens(1), Dim::Fixed(k)])?;
        i32_is("places", ins[3], &[Dim::Tokens(k)])?;
        Ok(vec![like(ins[1])])
    }

    fn flops(&self, ins: &[&TensorSpec], _: &[&TensorSpec], counts: Counts) -> u64 {
        TRANSCENDENTAL * ins[1].elements_at(counts)
    }

    fn in_place(&self, _: usize) -> &'static [usize] {
        &[]
    }

    fn class(&self) -> PrecisionClass {
        PrecisionClass::Sensitive
    }
}

/// logits: (T, E) and experts: (T, k) of one step.
fn choices(ins: &[&TensorSpec]) -> Result<(), RuleError> {
    float("logits", ins[0])?;
    let ((_, e), (_, k)) = (matrix("logits", ins[0])?, matrix("experts", ins[1])?);
    shape_is("logits", ins[0], &[Dim::Tokens(1), Dim::Fixed(e)])?;
    i32_is("experts", ins[1], &[Dim::Tokens(1), Dim::Fixed(k)])
}

impl OpRules for RouterLoss {
    fn infer(&self, ins: &[&TensorSpec], _: &Bounds) -> Result<Vec<TensorSpec>, RuleError> {
        arity(ins, 2)?;
        choices(ins)?;
        Ok(vec![f32s(1), f32s(1), f32s(1)])
    }

    fn vjp(&self, cx: &mut Vjp<'_>) -> Result<(), NotDifferentiable> {
        if cx.output_grads[1..].iter().any(Option::is_some) {
            return Err(NotDifferentiable);
        }
        let op = Op::RouterLossGrad(RouterLossGrad { balance: self.balance, z: self.z });
        let inputs = [cx.dy()?, cx.input(0), cx.input(1)];
        cx.input_grads[0] = Some(cx.builder.one(op, &inputs));
        Ok(())
    }

    fn cost(&self, ins: &[&TensorSpec], outs: &[&TensorSpec], _: &Bounds, counts: Counts) -> Cost {
        streaming(TRANSCENDENTAL * ins[0].elements_at(counts), ins, outs, counts)
    }

    fn alias(&self, _: usize) -> &'static [usize] {
        &[]
    }

    fn precision(&self) -> PrecisionClass {
        PrecisionClass::Sensitive
    }

    fn shard(&self, ins: &[Placement]) -> Result<Vec<Placement>, ShardError> {
        match ins[0] {
            Placement::Replicate => Ok(vec![ins[0]; 3]),
            Placement::Shard(_) | Placement::Partial => Err(ShardError("its means are over all tokens")),
        }
    }
}

impl Terminal for RouterLossGrad {
    fn types(&self, ins: &[&TensorSpec], _: &Bounds) -> Result<Vec<TensorSpec>, RuleError> {
        arity(ins, 3)?;
        f32_is("dloss", ins[0], &[Dim::Fixed(1)])?;
        choices(&ins[1..])?;
        Ok(vec![like(ins[1])])
    }

    fn flops(&self, ins: &[&TensorSpec], _: &[&TensorSpec], counts: Counts) -> u64 {
        TRANSCENDENTAL * ins[1].elements_at(counts)
    }

    fn in_place(&self, _: usize) -> &'static [usize] {
        &[]
    }

    fn class(&self) -> PrecisionClass {
        PrecisionClass::Sensitive
    }
}
