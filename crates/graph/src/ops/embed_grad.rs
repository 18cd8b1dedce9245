//! Gradient of token embedding: rows summed by token id.

use super::terminal::{GradientOrUpdateOp, i32_is};
use super::*;
use serde::{Deserialize, Serialize};

/// Gradient of [`Embed`]: `dtable[v] = sum_{t: ids[t] = v} scale[t] dx[t]` in order of t, `drow = sum_t
/// scale[t] dx[t]`, where `scale[t]` is the factor of [`TokenDropout`] for token t, or 1.
///
/// Inputs: dx: (T, D), ids: i32 (T), with `token_dropout` spans: (S, 2). Outputs: dtable: (V, D), with `row`
/// drow: (1, D).
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct EmbedGrad {
    /// Token-dropout scale of the forward op.
    pub token_dropout: Option<TokenDropout>,
    /// Whether the forward op adds a row to every token.
    pub row: bool,
    /// V, the number of rows of the table.
    pub vocab: u64,
    /// Element type of the table and of its gradient.
    pub dtype: DType,
}

impl GradientOrUpdateOp for EmbedGrad {
    fn types(&self, ins: &[&TensorSpec], _: &Bounds) -> Result<Vec<TensorSpec>, RuleError> {
        arity(ins, 2 + usize::from(self.token_dropout.is_some()))?;
        float("dx", ins[0])?;
        let (_, columns) = matrix("dx", ins[0])?;
        shape_is("dx", ins[0], &[Dim::Tokens(1), Dim::Fixed(columns)])?;
        i32_is("ids", ins[1], &[Dim::Tokens(1)])?;
        if self.token_dropout.is_some() {
            spans(ins[2])?;
        }
        let columns = Dim::Fixed(columns);
        let mut outs = vec![TensorSpec::activation([Dim::Fixed(self.vocab), columns], self.dtype)];
        if self.row {
            outs.push(TensorSpec::activation([Dim::Fixed(1), columns], self.dtype));
        }
        Ok(outs)
    }

    fn flops(&self, ins: &[&TensorSpec], _: &[&TensorSpec], counts: Counts) -> f64 {
        2.0 * elements(ins[0], counts)
    }

    fn in_place(&self, _: usize) -> &'static [usize] {
        &[]
    }

    fn class(&self) -> PrecisionClass {
        PrecisionClass::Sensitive
    }
}
