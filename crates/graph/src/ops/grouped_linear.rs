//! Linear maps of all experts in one op, over rows sorted by expert, and their gradients.

use super::terminal::{GradientOrUpdateOp, i32_is};
use super::*;
use crate::Op;
use serde::{Deserialize, Serialize};

/// Grouped linear map: for rows `offsets[e]..offsets[e + 1]` of x, `y = x W_e^T + b_e`; rows after the last
/// offset are zero.
///
/// Inputs: x: (kT, K), w: (E N, K) with expert e in the N rows from `e N`, with `bias` b: (E N), offsets: i32
/// (E + 1) of [`Route`]. Output y: (kT, N).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct GroupedLinear {
    /// E, the number of experts.
    pub experts: u32,
    /// Whether the op has the bias input b.
    pub bias: bool,
}

/// Gradient of [`GroupedLinear`] with respect to x: `dx = dy W_e`, zero in rows after the last offset. Inputs:
/// dy: (kT, N), w: (E N, K), offsets: i32 (E + 1); output dx: (kT, K).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct GroupedLinearInputGrad {
    /// E, the number of experts.
    pub experts: u32,
}

/// Gradient of [`GroupedLinear`] with respect to w and b: `dW_e = dy^T x`, `db_e = sum_r dy` over the rows of
/// expert e, zero for an expert without rows. Inputs: dy: (kT, N), x: (kT, K), offsets: i32 (E + 1); outputs:
/// dw: (E N, K), with `bias` db: (E N).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct GroupedLinearWeightGrad {
    /// E, the number of experts.
    pub experts: u32,
    /// Whether to compute db.
    pub bias: bool,
}

/// Returns N, the rows per expert, of a stacked weight (E N, K).
#[expect(clippy::arithmetic_side_effects, reason = "divided by a positive number")]
fn rows_of_one(w: &TensorSpec, k: u64, experts: u32) -> Result<u64, RuleError> {
    let experts = u64::from(experts);
    match w.shape[..] {
        [Dim::Fixed(rows), Dim::Fixed(columns)] if columns == k && experts > 0 && rows % experts == 0 => {
            Ok(rows / experts)
        }
        _ => Err(RuleError(format!("w must hold {experts} matrices of {k} columns under each other, not {w}"))),
    }
}

fn offsets(spec: &TensorSpec, experts: u32) -> Result<(), RuleError> {
    i32_is("offsets", spec, &[Dim::Fixed(u64::from(experts).saturating_add(1))])
}

impl OpRules for GroupedLinear {
    fn infer(&self, ins: &[&TensorSpec], _: &Bounds) -> Result<Vec<TensorSpec>, RuleError> {
        arity(ins, 3 + usize::from(self.bias))?;
        float("x", ins[0])?;
        let (rows, k) = matrix("x", ins[0])?;
        float("w", ins[1])?;
        let n = rows_of_one(ins[1], k, self.experts)?;
        if self.bias {
            shape_is("b", ins[2], &ins[1].shape[..1])?;
        }
        offsets(ins[2 + usize::from(self.bias)], self.experts)?;
        Ok(vec![TensorSpec::activation([rows, Dim::Fixed(n)], ins[0].dtype)])
    }

    fn vjp(&self, cx: &mut Vjp<'_>) -> Result<(), NotDifferentiable> {
        let Self { experts, bias } = *self;
        let dy = cx.dy()?;
        let x = cx.input(0);
        let w = cx.input(1);
        let offsets = cx.input(2 + usize::from(bias));
        let op = Op::GroupedLinearInputGrad(GroupedLinearInputGrad { experts });
        cx.input_grads[0] = Some(cx.builder.one(op, &[dy, w, offsets]));
        let op = Op::GroupedLinearWeightGrad(GroupedLinearWeightGrad { experts, bias });
        let dw = cx.builder.node(op, &[dy, x, offsets]);
        for (grad, &d) in cx.input_grads[1..].iter_mut().zip(&dw) {
            *grad = Some(d);
        }
        Ok(())
    }

    fn cost(&self, ins: &[&TensorSpec], outs: &[&TensorSpec], _: &Bounds, counts: Counts) -> Cost {
        streaming(2.0 * columns(ins[0]) * elements(outs[0], counts), ins, outs, counts)
    }

    fn alias(&self, _: usize) -> &'static [usize] {
        &[]
    }

    fn precision(&self) -> PrecisionClass {
        PrecisionClass::Matmul
    }
}

impl GradientOrUpdateOp for GroupedLinearInputGrad {
    fn types(&self, ins: &[&TensorSpec], _: &Bounds) -> Result<Vec<TensorSpec>, RuleError> {
        arity(ins, 3)?;
        float("dy", ins[0])?;
        let (rows, n) = matrix("dy", ins[0])?;
        let (_, k) = matrix("w", ins[1])?;
        if rows_of_one(ins[1], k, self.experts)? != n {
            return Err(RuleError(format!("{} is not a gradient of rows times {}", ins[0], ins[1])));
        }
        offsets(ins[2], self.experts)?;
        Ok(vec![TensorSpec::activation([rows, Dim::Fixed(k)], ins[0].dtype)])
    }

    fn flops(&self, ins: &[&TensorSpec], outs: &[&TensorSpec], counts: Counts) -> f64 {
        2.0 * columns(ins[0]) * elements(outs[0], counts)
    }

    fn in_place(&self, _: usize) -> &'static [usize] {
        &[]
    }

    fn class(&self) -> PrecisionClass {
        PrecisionClass::Matmul
    }
}

impl GradientOrUpdateOp for GroupedLinearWeightGrad {
    fn types(&self, ins: &[&TensorSpec], _: &Bounds) -> Result<Vec<TensorSpec>, RuleError> {
        arity(ins, 3)?;
        float("dy", ins[0])?;
        let (rows, n) = matrix("dy", ins[0])?;
        let (_, k) = matrix("x", ins[1])?;
        shape_is("x", ins[1], &[rows, Dim::Fixed(k)])?;
        offsets(ins[2], self.experts)?;
        // A saturated product is above the limit of a dimension, which the graph is checked against.
        let stacked = Dim::Fixed(u64::from(self.experts).saturating_mul(n));
        let mut outs = vec![TensorSpec::activation([stacked, Dim::Fixed(k)], ins[0].dtype)];
        if self.bias {
            outs.push(TensorSpec::activation([stacked], ins[0].dtype));
        }
        Ok(outs)
    }

    fn flops(&self, ins: &[&TensorSpec], _: &[&TensorSpec], counts: Counts) -> f64 {
        2.0 * elements(ins[0], counts) * columns(ins[1])
    }

    fn in_place(&self, _: usize) -> &'static [usize] {
        &[]
    }

    fn class(&self) -> PrecisionClass {
        PrecisionClass::Matmul
    }
}
