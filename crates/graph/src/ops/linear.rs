//! The affine map, with what may be fused in front of it and behind it.

use super::gelu::TRANSCENDENTAL;
use super::*;
use crate::Op;
use serde::{Deserialize, Serialize};

/// `y = f(p(x) W^T + b)`, W as (N, K) rows like every weight file has it.
///
/// Inputs x: (R, K), w: (N, K), with `bias` b: (N), with `Epilogue::Residual` r: (R, N), with `Prologue::LayerNorm` gamma,
/// beta: (K). Output y: (R, N), with `Epilogue::Gate` (R, N / 2).
/// The K order of every sum is fixed by (N, K, dtype), so a row's bits do not depend on the other rows.
///
/// Where x and w are both codes of one type, each with a scale for each row, `y = f(sx sw (codes of x)(codes of w)^T + b)`
/// is bf16, as b and r are.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Linear {
    /// Whether b is there.
    pub bias: bool,
    /// p: what is done with rows of x before. Models build `None`; fusion sets it.
    pub prologue: Prologue,
    /// f: what is done with the sum while it is in registers. Models build `None`; fusion sets it.
    pub epilogue: Epilogue,
    /// Whether the factors, of f32, may be cut to TF32 (10 bits of mantissa) before they are multiplied, where the device has
    /// such a product of this shape; sums stay f32. Models build `false`; the precision of a plan sets it.
    #[serde(default, skip_serializing_if = "is_false")]
    pub tf32: bool,
}

/// For serde: what no plan has that did not ask for it stays out of its text and digest.
#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde gives a reference")]
fn is_false(value: &bool) -> bool {
    !value
}

/// What is done with rows of x before they are multiplied.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Prologue {
    /// Nothing.
    None,
    /// A layer norm, rounded to x's type.
    LayerNorm(LayerNorm),
}

/// What is done with `s = p(x) W^T + b` before it is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Epilogue {
    /// `s`.
    None,
    /// `gelu_erf(s)`.
    Gelu,
    /// `r + s`.
    Residual,
    /// `gelu_erf(s[:, j]) * s[:, N / 2 + j]`: a [`Glu`] behind its linear.
    Gate,
}

impl Linear {
    /// Without a prologue, on whole factors.
    pub const fn new(bias: bool, epilogue: Epilogue) -> Self {
        Self { bias, prologue: Prologue::None, epilogue, tf32: false }
    }

    /// Where gamma and beta of the norm stand among the inputs.
    pub fn norm_at(&self) -> usize {
        2 + usize::from(self.bias) + usize::from(self.residual())
    }

    fn residual(&self) -> bool {
        match self.epilogue {
            Epilogue::Residual => true,
            Epilogue::None | Epilogue::Gelu | Epilogue::Gate => false,
        }
    }
}

impl OpRules for Linear {
    fn infer(&self, ins: &[&TensorSpec], bounds: &Bounds) -> Result<Vec<TensorSpec>, RuleError> {
        match self.prologue {
            Prologue::None => arity(ins, self.norm_at())?,
            Prologue::LayerNorm(norm) => {
                arity(ins, self.norm_at() + 2)?;
                norm.infer(&[ins[0], ins[self.norm_at()], ins[self.norm_at() + 1]], bounds)?;
            }
        }
        let [x, w] = [ins[0].dtype, ins[1].dtype];
        let dtype = match w.is_scaled() {
            true if x == w => DType::Bf16,
            true => return Err(RuleError(format!("x must be {} as w is, not {}", w.name(), ins[0]))),
            false => float("x", ins[0]).map(|()| x)?,
        };
        if self.tf32 && (x, w) != (DType::F32, DType::F32) {
            return Err(RuleError(format!(
                "x and w must be f32 to be cut to TF32, not {} and {}",
                ins[0], ins[1]
            )));
        }
        let (rows, k) = matrix("x", ins[0])?;
        let (n, _) = matrix("w", ins[1])?;
        shape_is("w", ins[1], &[n, Dim::Fixed(k)])?;
        if self.bias {
            shape_is("b", ins[2], &[n])?;
        }
        if self.residual() {
            shape_is("r", ins[2 + usize::from(self.bias)], &[rows, n])?;
        }
        let columns = match (self.epilogue, n) {
            (Epilogue::Gate, Dim::Fixed(n)) if n.is_multiple_of(2) => Dim::Fixed(n / 2),
            (Epilogue::Gate, _) => {
                return Err(RuleError(format!("w must have an even number of rows, not {n}")));
            }
            (Epilogue::None | Epilogue::Gelu | Epilogue::Residual, _) => n,
        };
        Ok(vec![TensorSpec::activation([rows, columns], dtype)])
    }

    fn vjp(&self, cx: &mut Vjp<'_>) -> Result<(), NotDifferentiable> {
        // Fusion comes after autodiff and TF32 is for inference, so only the plain form is differentiated.
        if *self != Self::new(self.bias, Epilogue::None) {
            return Err(NotDifferentiable);
        }
        let (dy, x, w) = (cx.dy()?, cx.input(0), cx.input(1));
        let dx = cx.builder.node(Op::LinearInputGrad(LinearInputGrad {}), &[dy, w]);
        let dw = cx.builder.node(Op::LinearWeightGrad(LinearWeightGrad { bias: self.bias }), &[dy, x]);
        cx.input_grads[0] = Some(dx[0]);
        for (grad, &d) in cx.input_grads[1..].iter_mut().zip(&dw) {
            *grad = Some(d);
        }
        Ok(())
    }

    fn cost(&self, ins: &[&TensorSpec], outs: &[&TensorSpec], _: &Bounds, counts: Counts) -> Cost {
        let per_output = 2 * ins[0].row_elements()
            + match self.epilogue {
                Epilogue::None => 1,
                Epilogue::Residual => 2,
                Epilogue::Gelu => 1 + TRANSCENDENTAL,
                // Of each output's other product, too.
                Epilogue::Gate => 2 * ins[0].row_elements() + 2 + TRANSCENDENTAL,
            };
        let norm = match self.prologue {
            Prologue::None => 0,
            Prologue::LayerNorm(_) => 8 * ins[0].elements_at(counts),
        };
        streaming(norm + per_output * outs[0].elements_at(counts), ins, outs, counts)
    }

    fn alias(&self, _: usize) -> &'static [usize] {
        // The residual is read where y is written; its position depends on the bias.
        match (self.epilogue, self.bias) {
            (Epilogue::Residual, true) => &[3],
            (Epilogue::Residual, false) => &[2],
            (Epilogue::None | Epilogue::Gelu | Epilogue::Gate, _) => &[],
        }
    }

    fn precision(&self) -> PrecisionClass {
        PrecisionClass::Matmul
    }

    fn shard(&self, ins: &[Placement]) -> Result<Vec<Placement>, ShardError> {
        let bias = if self.bias { ins[2] } else { Placement::Replicate };
        let norm = self.prologue != Prologue::None;
        if norm && ins[self.norm_at()..].iter().any(|&p| p != Placement::Replicate) {
            return Err(ShardError("gamma and beta must be whole"));
        }
        match (ins[0], ins[1], bias) {
            (Placement::Replicate | Placement::Shard(0), Placement::Replicate, Placement::Replicate) => {
                Ok(vec![ins[0]])
            }
            // Column parallel: rows of W are cut, and with them the bias.
            (Placement::Replicate, Placement::Shard(0), b)
                if (!self.bias || b == Placement::Shard(0)) && self.epilogue != Epilogue::Gate =>
            {
                Ok(vec![Placement::Shard(1)])
            }
            // Row parallel: K is cut; a bias would be added once per device.
            (Placement::Shard(1), Placement::Shard(1), _)
                if !self.bias && !norm && self.epilogue == Epilogue::None =>
            {
                Ok(vec![Placement::Partial])
            }
            (Placement::Replicate | Placement::Shard(_) | Placement::Partial, _, _) => {
                Err(ShardError("x, w and b are cut along dimensions that do not meet"))
            }
        }
    }
}
