//! Mixture-of-experts dispatch and combine: moves rows of tokens to their experts (gather) and back (weighted
//! sum), and the gradients of both.

use super::terminal::{GradientOrUpdateOp, f32_is, i32_is, like};
use super::*;
use crate::Op;
use serde::{Deserialize, Serialize};

/// Gathers token rows in expert order: `rows[r] = x[order[r] / k]`, zero where order is -1. Inputs: x: (T, D),
/// order, places: i32 (kT) of [`Route`]; output rows: (kT, D). `places` is used only by the gradient.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Dispatch {
    /// k, the number of experts per token.
    pub top_k: u32,
}

/// Gradient of [`Dispatch`]: `dx[t] = sum_j drows[places[t k + j]]` in order of j, skipping dropped rows.
/// Inputs: drows: (kT, D), places: i32 (kT); output dx: (T, D).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct DispatchGrad {
    /// k, the number of experts per token.
    pub top_k: u32,
}

/// Weighted sum of the experts' results: `y[t] = sum_j gates[t, j] rows[places[t k + j]]` in order of j,
/// skipping dropped rows. Inputs: rows: (kT, D), gates: f32 (T, k), order, places: i32 (kT); output y: (T, D).
/// `order` is used only by the gradient.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Combine {
    /// k, the number of experts per token.
    pub top_k: u32,
}

/// Gradient of [`Combine`]: `drows[r] = gates[order[r]] dy[order[r] / k]`, zero where order is -1; `dgates[t,
/// j] = dy[t] . rows[places[t k + j]]`, zero where the row was dropped. Inputs: dy: (T, D), rows: (kT, D),
/// gates: f32 (T, k), order, places: i32 (kT); outputs: drows: (kT, D), dgates: f32 (T, k).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct CombineGrad {
    /// k, the number of experts per token.
    pub top_k: u32,
}

/// Number of columns of an operand that has `per_token` rows per token.
fn columns_of(what: &str, spec: &TensorSpec, per_token: u32) -> Result<u64, RuleError> {
    float(what, spec)?;
    let (_, columns) = matrix(what, spec)?;
    shape_is(what, spec, &[Dim::Tokens(u64::from(per_token)), Dim::Fixed(columns)])?;
    Ok(columns)
}

fn indices(what: &str, spec: &TensorSpec, k: u32) -> Result<(), RuleError> {
    if k == 0 {
        return Err(RuleError("a token must choose at least one expert".to_owned()));
    }
    i32_is(what, spec, &[Dim::Tokens(u64::from(k))])
}

fn gates(spec: &TensorSpec, k: u32) -> Result<(), RuleError> {
    f32_is("gates", spec, &[Dim::Tokens(1), Dim::Fixed(u64::from(k))])
}

fn rows(per_token: u32, columns: u64, dtype: DType) -> TensorSpec {
    TensorSpec::activation([Dim::Tokens(u64::from(per_token)), Dim::Fixed(columns)], dtype)
}

impl OpRules for Dispatch {
    fn infer(&self, ins: &[&TensorSpec], _: &Bounds) -> Result<Vec<TensorSpec>, RuleError> {
        arity(ins, 3)?;
        let columns = columns_of("x", ins[0], 1)?;
        indices("order", ins[1], self.top_k)?;
        indices("places", ins[2], self.top_k)?;
        Ok(vec![rows(self.top_k, columns, ins[0].dtype)])
    }

    fn vjp(&self, cx: &mut Vjp<'_>) -> Result<(), NotDifferentiable> {
        let inputs = [cx.dy()?, cx.input(2)];
        let op = Op::DispatchGrad(DispatchGrad { top_k: self.top_k });
        cx.input_grads[0] = Some(cx.builder.one(op, &inputs));
        Ok(())
    }

    fn cost(&self, ins: &[&TensorSpec], outs: &[&TensorSpec], _: &Bounds, counts: Counts) -> Cost {
        streaming(0.0, ins, outs, counts)
    }

    fn alias(&self, _: usize) -> &'static [usize] {
        &[]
    }

    fn precision(&self) -> PrecisionClass {
        PrecisionClass::Elementwise
    }
}

impl GradientOrUpdateOp for DispatchGrad {
    fn types(&self, ins: &[&TensorSpec], _: &Bounds) -> Result<Vec<TensorSpec>, RuleError> {
        arity(ins, 2)?;
        let columns = columns_of("drows", ins[0], self.top_k)?;
        indices("places", ins[1], self.top_k)?;
        Ok(vec![rows(1, columns, ins[0].dtype)])
    }

    fn flops(&self, ins: &[&TensorSpec], _: &[&TensorSpec], counts: Counts) -> f64 {
        elements(ins[0], counts)
    }

    fn in_place(&self, _: usize) -> &'static [usize] {
        &[]
    }

    fn class(&self) -> PrecisionClass {
        PrecisionClass::Elementwise
    }
}

impl OpRules for Combine {
    fn infer(&self, ins: &[&TensorSpec], _: &Bounds) -> Result<Vec<TensorSpec>, RuleError> {
        arity(ins, 4)?;
        let columns = columns_of("rows", ins[0], self.top_k)?;
        gates(ins[1], self.top_k)?;
        indices("order", ins[2], self.top_k)?;
        indices("places", ins[3], self.top_k)?;
        Ok(vec![rows(1, columns, ins[0].dtype)])
    }

    fn vjp(&self, cx: &mut Vjp<'_>) -> Result<(), NotDifferentiable> {
        let inputs = [cx.dy()?, cx.input(0), cx.input(1), cx.input(2), cx.input(3)];
        let grads = cx.builder.node(Op::CombineGrad(CombineGrad { top_k: self.top_k }), &inputs);
        cx.input_grads[0] = Some(grads[0]);
        cx.input_grads[1] = Some(grads[1]);
        Ok(())
    }

    fn cost(&self, ins: &[&TensorSpec], outs: &[&TensorSpec], _: &Bounds, counts: Counts) -> Cost {
        streaming(2.0 * elements(ins[0], counts), ins, outs, counts)
    }

    fn alias(&self, _: usize) -> &'static [usize] {
        &[]
    }

    fn precision(&self) -> PrecisionClass {
        PrecisionClass::Elementwise
    }
}

impl GradientOrUpdateOp for CombineGrad {
    fn types(&self, ins: &[&TensorSpec], _: &Bounds) -> Result<Vec<TensorSpec>, RuleError> {
        arity(ins, 5)?;
        let columns = columns_of("dy", ins[0], 1)?;
        alike("rows", ins[1], &rows(self.top_k, columns, ins[0].dtype))?;
        gates(ins[2], self.top_k)?;
        indices("order", ins[3], self.top_k)?;
        indices("places", ins[4], self.top_k)?;
        Ok(vec![like(ins[1]), like(ins[2])])
    }

    fn flops(&self, ins: &[&TensorSpec], _: &[&TensorSpec], counts: Counts) -> f64 {
        3.0 * elements(ins[1], counts)
    }

    /// Row r of drows is written only after the gradient of the single gate that depends on row r of `rows` has
    /// been computed.
    fn in_place(&self, output: usize) -> &'static [usize] {
        if output == 0 { &[1] } else { &[] }
    }

    fn class(&self) -> PrecisionClass {
        PrecisionClass::Elementwise
    }
}
