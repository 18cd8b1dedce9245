//! Rows as codes of 8 bits with a scale each: what products of 8 bits read.

use super::terminal::Terminal;
use super::*;
use serde::{Deserialize, Serialize};

/// `y = f(x)`, and y in codes: e4m3, whose largest is L = 448, or integers, L = 127. Of each row: `m = max(max |y|, 2^-100)`,
/// `scale = m / L`, `code = y (L / m)`, rounded to nearest even and at most L, all in f32; a number is about `scale code`.
/// Not a number stays that in e4m3; integers, which have none, are 0 and their row's scale is not a number.
///
/// Inputs: those of f. Outputs q: (R, N) codes; and, unless f is the identity, y: (R, N) of x's type, for other
/// readers; `dce` drops it where there are none. q is of y as it was before it was rounded to that type.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Quantize {
    /// f.
    pub of: Quantized,
    /// The type of the codes.
    pub to: DType,
}

/// What is done with rows before they are quantised, while they are in registers.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Quantized {
    /// x itself.
    Rows,
    /// Its layer norm.
    LayerNorm(LayerNorm),
    /// Its GELU.
    Gelu(Gelu),
    /// Its gated half.
    Glu(Glu),
}

impl Quantized {
    /// The op by itself, if it is one.
    pub fn rules(&self) -> Option<&dyn OpRules> {
        match self {
            Self::Rows => None,
            Self::LayerNorm(op) => Some(op),
            Self::Gelu(op) => Some(op),
            Self::Glu(op) => Some(op),
        }
    }
}

impl Terminal for Quantize {
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

    fn flops(&self, _: &[&TensorSpec], outs: &[&TensorSpec], counts: Counts) -> u64 {
        let before = match self.of {
            Quantized::Rows => 0,
            Quantized::LayerNorm(_) => 8,
            Quantized::Gelu(_) | Quantized::Glu(_) => gelu::TRANSCENDENTAL,
        };
        (3 + before) * outs[0].elements_at(counts)
    }

    fn in_place(&self, output: usize) -> &'static [usize] {
        // A row is read whole before its y is written.
        match (self.of, output) {
            (Quantized::LayerNorm(_) | Quantized::Gelu(_), 1) => &[0],
            (Quantized::Rows | Quantized::LayerNorm(_) | Quantized::Gelu(_) | Quantized::Glu(_), _) => &[],
        }
    }

    fn class(&self) -> PrecisionClass {
        PrecisionClass::Sensitive
    }
}
