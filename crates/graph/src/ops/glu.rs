//! Gated linear unit of an MLP (Shazeer 2020), GEGLU as in MosaicBERT and DNABERT-S or SwiGLU as in Llama, and
//! its gradient.

use super::gelu::TRANSCENDENTAL;
use super::terminal::{GradientOrUpdateOp, like};
use super::*;
use crate::Op;
use serde::{Deserialize, Serialize};

/// Gated linear unit: `y[:, j] = f(x[:, j]) * x[:, F + j]`. Input x: (R, 2F); output y: (R, F). Together with
/// the linears before and after it this is the gated MLP.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Glu {
    /// f, the activation of the gate.
    pub activation: Activation,
}

/// Activation function of a gate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Activation {
    /// Exact GELU, `x Phi(x)`.
    Gelu,
    /// SiLU, `x / (1 + exp(-x))`.
    Silu,
}

/// Gradient of [`Glu`]: `dx[:, j] = dy f'(x[:, j]) x[:, F + j]`, `dx[:, F + j] = dy f(x[:, j])`. Inputs: dy:
/// (R, F), x: (R, 2F); output dx: (R, 2F).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct GluGrad {
    /// f, the activation of the gate.
    pub activation: Activation,
}

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

    fn vjp(&self, cx: &mut Vjp<'_>) -> Result<(), NotDifferentiable> {
        let inputs = [cx.dy()?, cx.input(0)];
        let op = Op::GluGrad(GluGrad { activation: self.activation });
        cx.input_grads[0] = Some(cx.builder.node(op, &inputs)[0]);
        Ok(())
    }

    fn cost(&self, ins: &[&TensorSpec], outs: &[&TensorSpec], _: &Bounds, counts: Counts) -> Cost {
        elementwise(TRANSCENDENTAL + 1.0, ins, outs, counts)
    }

    fn alias(&self, _: usize) -> &'static [usize] {
        &[]
    }

    fn precision(&self) -> PrecisionClass {
        PrecisionClass::Elementwise
    }
}

impl GradientOrUpdateOp for GluGrad {
    fn types(&self, ins: &[&TensorSpec], bounds: &Bounds) -> Result<Vec<TensorSpec>, RuleError> {
        arity(ins, 2)?;
        let y = Glu { activation: self.activation }.infer(&ins[1..], bounds)?;
        alike("dy", ins[0], &y[0])?;
        Ok(vec![like(ins[1])])
    }

    fn flops(&self, _: &[&TensorSpec], outs: &[&TensorSpec], counts: Counts) -> f64 {
        TRANSCENDENTAL * elements(outs[0], counts)
    }

    fn in_place(&self, _: usize) -> &'static [usize] {
        // Both columns of a pair are read before either is written.
        &[1]
    }

    fn class(&self) -> PrecisionClass {
        PrecisionClass::Elementwise
    }
}
