//! The affine map, with what may be fused behind it.

use super::gelu::TRANSCENDENTAL;
use super::*;
use crate::Op;
use serde::{Deserialize, Serialize};

/// `y = f(x W^T + b)`, W as (N, K) rows like every weight file has it.
///
/// Inputs x: (R, K), w: (N, K), with `bias` b: (N), with `Epilogue::Residual` r: (R, N). Output y: (R, N), with
/// `Epilogue::Gate` (R, N / 2).
/// The K order of every sum is fixed by (N, K, dtype), so a row's bits do not depend on the other rows.
///
/// Where x and w are both codes of one type, each with a scale for each row, `y = f(sx sw (codes of x)(codes of w)^T + b)`
/// is bf16, as b and r are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Linear {
    /// Whether b is there.
    pub bias: bool,
    /// f: what is done with the sum while it is in registers. Models build `None`; fusion sets it.
    pub epilogue: Epilogue,
}

/// What is done with `s = x W^T + b` before it is written.
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
    fn residual(&self) -> bool {
        match self.epilogue {
            Epilogue::Residual => true,
            Epilogue::None | Epilogue::Gelu | Epilogue::Gate => false,
        }
    }
}

impl OpRules for Linear {
    fn infer(&self, ins: &[&TensorSpec], _: &Bounds) -> Result<Vec<TensorSpec>, RuleError> {
        arity(ins, 2 + usize::from(self.bias) + usize::from(self.residual()))?;
        let [x, w] = [ins[0].dtype, ins[1].dtype];
        let dtype = match w.is_scaled() {
            true if x == w => DType::Bf16,
            true => return Err(RuleError(format!("x must be {} as w is, not {}", w.name(), ins[0]))),
            false => float("x", ins[0]).map(|()| x)?,
        };
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
        // Fusion comes after autodiff, so only the plain form is differentiated.
        if self.epilogue != Epilogue::None {
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
        streaming(per_output * outs[0].elements_at(counts), ins, outs, counts)
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
            (Placement::Shard(1), Placement::Shard(1), _) if !self.bias && self.epilogue == Epilogue::None => {
                Ok(vec![Placement::Partial])
            }
            (Placement::Replicate | Placement::Shard(_) | Placement::Partial, _, _) => {
                Err(ShardError("x, w and b are cut along dimensions that do not meet"))
            }
        }
    }
}
