//! Quantization of rows to 8 bits with one scale per row, the operands of 8-bit matmuls.

use super::terminal::GradientOrUpdateOp;
use super::*;
use serde::{Deserialize, Serialize};

/// Computes `y = f(x)` and quantizes it to e4m3, whose largest value is L = 448, or to 8-bit integers, L = 127.
/// For each row: `m = max(max |y|, 2^-100)`, `scale = m / L`, `q = y (L / m)`, rounded to nearest even and
/// limited to L, all in f32; a number is approximately `scale q`. NaN stays NaN in e4m3. Integers have no NaN:
/// such an element becomes 0 and the scale of its row becomes NaN.
///
/// Inputs: the inputs of f. Outputs: the quantized q: (R, N); and, unless f is the identity, y: (R, N) of x's type,
/// for other readers; `dce` removes y if nothing reads it. q is computed from y before y is rounded to that
/// type.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Quantize {
    /// f, the function applied before quantization.
    pub of: Quantized,
    /// Element type of q.
    pub to: DType,
}

/// Function applied to rows before they are quantized, while they are in registers.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Quantized {
    /// The identity.
    Rows,
    /// Layer normalisation.
    LayerNorm(LayerNorm),
    /// GELU.
    Gelu(Gelu),
    /// Gated linear unit.
    Glu(Glu),
}

impl Quantized {
    /// Rules of the function as an op of its own; `None` for the identity.
    pub fn rules(&self) -> Option<&dyn OpRules> {
        match self {
            Self::Rows => None,
            Self::LayerNorm(op) => Some(op),
            Self::Gelu(op) => Some(op),
            Self::Glu(op) => Some(op),
        }
    }
}

impl GradientOrUpdateOp for Quantize {
    fn types(&self, ins: &[&TensorSpec], bounds: &Bounds) -> Result<Vec<TensorSpec>, RuleError> {
        let y = match self.of.rules() {
            Some(op) => Some(op.infer(ins, bounds)?.swap_remove(0)),
            None => {
                arity(ins, 1)?;
                float("x", ins[0])?;
                None
            }
        };
        let rows = y.as_ref().unwrap_or(ins[0]);
        matrix("x", rows)?;
        if !self.to.is_scaled() {
            return Err(RuleError(format!("codes are f8 or i8, not {}", self.to.name())));
        }
        let q = TensorSpec::activation(rows.shape.clone(), self.to);
        Ok([Some(q), y].into_iter().flatten().collect())
    }

    fn flops(&self, _: &[&TensorSpec], outs: &[&TensorSpec], counts: Counts) -> f64 {
        let before = match self.of {
            Quantized::Rows => 0.0,
            Quantized::LayerNorm(_) => 8.0,
            Quantized::Gelu(_) | Quantized::Glu(_) => gelu::TRANSCENDENTAL,
        };
        (3.0 + before) * elements(outs[0], counts)
    }

    fn in_place(&self, output: usize) -> &'static [usize] {
        // A whole row is read before its y is written.
        match (self.of, output) {
            (Quantized::LayerNorm(_) | Quantized::Gelu(_), 1) => &[0],
            (Quantized::Rows | Quantized::LayerNorm(_) | Quantized::Gelu(_) | Quantized::Glu(_), _) => &[],
        }
    }

    fn class(&self) -> PrecisionClass {
        PrecisionClass::Sensitive
    }
}
