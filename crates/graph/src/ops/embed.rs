//! Token embedding: rows of a table, with ESM's token-dropout scale or BERT's token-type row.

use super::*;
use crate::Op;
use serde::{Deserialize, Serialize};

/// Embedding lookup: `x[t] = table[ids[t]]`, followed by the options below.
///
/// Inputs: ids: i32 (T); table: (V, D); with `row` a row: (1, D) that is added to every token (BERT's token
/// type 0); with `token_dropout` spans: (S, 2). Output x: (T, D).
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Embed {
    /// Token-dropout scale of ESM-2.
    pub token_dropout: Option<TokenDropout>,
    /// Whether a row is added to every token.
    pub row: bool,
}

/// ESM-2's token dropout, which is active at inference too: rows of `mask_id` are set to zero, and all rows of
/// a sequence are multiplied by `keep / (1 - masked / tokens)`, where `tokens` includes BOS and EOS (fair-esm
/// 2.0.0, `esm2.py`).
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct TokenDropout {
    /// The id of `<mask>`.
    pub mask_id: i32,
    /// Fraction of tokens that are unmasked in training: `1 - 0.15 * 0.8 = 0.88`.
    pub keep: f32,
}

impl OpRules for Embed {
    fn infer(&self, ins: &[&TensorSpec], _: &Bounds) -> Result<Vec<TensorSpec>, RuleError> {
        arity(ins, 2 + usize::from(self.row) + usize::from(self.token_dropout.is_some()))?;
        integers("ids", ins[0])?;
        shape_is("ids", ins[0], &[Dim::Tokens(1)])?;
        float("table", ins[1])?;
        let (_, columns) = matrix("table", ins[1])?;
        if self.row {
            shape_is("row", ins[2], &[Dim::Fixed(1), Dim::Fixed(columns)])?;
        }
        if self.token_dropout.is_some() {
            spans(ins[2 + usize::from(self.row)])?;
        }
        Ok(vec![TensorSpec::activation([Dim::Tokens(1), Dim::Fixed(columns)], ins[1].dtype)])
    }

    fn vjp(&self, cx: &mut Vjp<'_>) -> Result<(), NotDifferentiable> {
        let table = cx.builder.graph().spec(cx.input(1));
        let vocab = table.shape[0].fixed().ok_or(NotDifferentiable)?;
        let dtype = table.dtype;
        let op = EmbedGrad { token_dropout: self.token_dropout, row: self.row, vocab, dtype };
        let mut inputs = vec![cx.dy()?, cx.input(0)];
        if self.token_dropout.is_some() {
            inputs.push(cx.input(2 + usize::from(self.row)));
        }
        let grads = cx.builder.node(Op::EmbedGrad(op), &inputs);
        for (grad, &d) in cx.input_grads[1..].iter_mut().zip(&grads) {
            *grad = Some(d);
        }
        Ok(())
    }

    fn cost(&self, ins: &[&TensorSpec], outs: &[&TensorSpec], _: &Bounds, counts: Counts) -> Cost {
        // Only the looked-up rows of the table are read, as many as are written.
        let written = traffic(outs[0], counts);
        Cost { flops: elements(outs[0], counts), bytes: 2.0 * written + traffic(ins[0], counts) }
    }

    fn alias(&self, _: usize) -> &'static [usize] {
        &[]
    }

    fn precision(&self) -> PrecisionClass {
        PrecisionClass::Elementwise
    }
}
