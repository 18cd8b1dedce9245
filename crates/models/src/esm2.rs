//! ESM-2 (Lin et al. 2023, doi:10.1126/science.ade2574): a pre-LN transformer encoder for proteins with rotary
//! position embeddings. The numerical references are fair-esm 2.0.0 (`esm/model/esm2.py`) and transformers
//! (`modeling_esm.py`).
//!
//! Shapes in comments: T tokens of all sequences of a step, packed without padding; D the hidden size; F the width of
//! the feed-forward network; V the vocabulary size.

use crate::config::{ConfigError, ConfigKeys, Output};
use crate::layers::{EncoderInputs, RequestedOutputs};
use plimsoll_graph::ops::{
    Attention, Bias, Embed, Epilogue, Linear, Mask, Qkv, RotaryTable, SegmentMean, TokenDropout,
};
use plimsoll_graph::{Bounds, Builder, Graph, Op, ValueId, VerifyError};

/// Hyperparameters of an ESM-2 model.
#[derive(Clone, Debug, PartialEq)]
pub struct Esm2Config {
    /// Vocabulary size V: 33 in the released models.
    pub vocab_size: u64,
    /// Hidden size D.
    pub hidden_size: u64,
    /// Transformer layers.
    pub layers: u64,
    /// Attention heads; D / heads is the head dimension.
    pub heads: u64,
    /// Width F of the feed-forward network.
    pub intermediate_size: u64,
    /// Epsilon that layer norms add to the variance.
    pub eps: f32,
    /// Whether token embeddings are scaled for token dropout, see [`plimsoll_graph::ops::TokenDropout`].
    pub token_dropout: bool,
    /// Token id of `<mask>`.
    pub mask_token_id: u64,
}

impl Esm2Config {
    /// The configuration of a released model: vocabulary of 33 tokens, token dropout, F = 4 D.
    pub(crate) fn released(layers: u64, hidden_size: u64, heads: u64) -> Self {
        Self {
            vocab_size: 33,
            hidden_size,
            layers,
            heads,
            intermediate_size: 4 * hidden_size,
            eps: 1e-5,
            token_dropout: true,
            mask_token_id: 32,
        }
    }

    /// Reads the configuration from the keys of a `config.json`. Refuses variants that the graph does not compute.
    pub(crate) fn from_keys(keys: &ConfigKeys<'_>) -> Result<Self, ConfigError> {
        keys.one_of("position_embedding_type", &[Some("rotary")])?;
        keys.one_of("hidden_act", &[Some("gelu"), None])?;
        keys.must_be("emb_layer_norm_before", false)?;
        keys.must_be("is_folding_model", false)?;
        let hidden_size = keys.size("hidden_size")?;
        let vocab_size = keys.size("vocab_size")?;
        Ok(Self {
            vocab_size,
            hidden_size,
            layers: keys.layers()?,
            heads: keys.heads(hidden_size)?,
            intermediate_size: keys.size("intermediate_size")?,
            eps: keys.eps("layer_norm_eps", 1e-12)?,
            token_dropout: keys.flag("token_dropout", false)?,
            mask_token_id: keys.id("mask_token_id", vocab_size)?,
        })
    }

    fn head_dim(&self) -> u64 {
        self.hidden_size / self.heads
    }

    fn attention(&self) -> Attention {
        Attention {
            heads: self.heads as u32,
            kv_heads: self.heads as u32,
            head_dim: self.head_dim() as u32,
            // The factor of q k^T before the softmax, 1 / sqrt(d).
            scale: (self.head_dim() as f32).powf(-0.5),
            mask: Mask::Full,
            bias: Bias::None,
            rotary: true,
            qkv: Qkv::Separate,
        }
    }
}

/// Mean pooling of ESM-2: over the residues of a sequence, without BOS and EOS.
pub(crate) const MEAN: SegmentMean = SegmentMean { skip_first: 1, skip_last: 1 };

/// Builds the inference graph of the encoder with `outputs`; [`Output::Logits`] adds the masked-language-model head.
pub fn esm2(c: &Esm2Config, bounds: Bounds, outputs: &[Output]) -> Result<Graph, VerifyError> {
    let requested = RequestedOutputs { outputs, mean: MEAN };
    let g = &mut Builder::new(bounds);
    let batch = &mut EncoderInputs::inputs(g);
    let (x, table) = encode(g, c, batch, &requested);
    requested.last(g, batch, x, c.layers);
    if outputs.contains(&Output::Logits) {
        let h = lm_transform(g, c, x);
        let bias = g.param("bias", &[c.vocab_size]);
        // Written as a node, not with `g.linear`, which would create a weight of its own: this weight is `table`.
        let logits = g.one(Op::Linear(Linear::new(true, Epilogue::None)), &[h, table, bias]);
        g.output("logits", logits);
    }
    // `finish` consumes the builder, and `g` is a reference: an empty builder takes its place.
    std::mem::replace(g, Builder::new(bounds)).finish()
}

/// Builds the encoder, with the `requested` outputs of all layers except the last, which [`RequestedOutputs::last`] adds. Returns
/// the last hidden state, after the final layer norm: (T, D), and the embedding table: (V, D).
pub(crate) fn encode(
    g: &mut Builder,
    c: &Esm2Config,
    batch: &mut EncoderInputs,
    requested: &RequestedOutputs<'_>,
) -> (ValueId, ValueId) {
    let table = g.param("embeddings.word_embeddings.weight", &[c.vocab_size, c.hidden_size]);
    let mut x = embed(g, c, batch, table); // (T, D)
    // Checkpoints store the frequencies once per layer with equal values; all layers use those of layer 0.
    // `tied_tensors` lists the copies, which are checked when weights are loaded.
    g.scope("encoder.layer.0.attention.self.", None);
    let inv_freq = g.param("rotary_embeddings.inv_freq", &[c.head_dim() / 2]);
    let rotary = g.node(Op::RotaryTable(RotaryTable {}), &[inv_freq]); // cos, sin: (longest, d/2)
    for i in 0..c.layers {
        requested.layer(g, batch, x, i);
        g.scope(format!("encoder.layer.{i}."), Some(i as u32));
        x = block(g, c, x, batch, &rotary);
    }
    g.scope("encoder.", None);
    let x = g.layer_norm(x, "emb_layer_norm_after", c.eps);
    g.scope("", None);
    (x, table)
}

/// Looks up the token embeddings: (T, D), scaled by ESM-2's token dropout if the model has it.
fn embed(g: &mut Builder, c: &Esm2Config, batch: &EncoderInputs, table: ValueId) -> ValueId {
    // 0.88 = 1 - 0.15 * 0.8: pretraining selected 15 % of the tokens and replaced 80 % of the selected by `<mask>`.
    let dropout = TokenDropout { mask_id: c.mask_token_id as i32, keep: 0.88 };
    if c.token_dropout {
        let op = Embed { token_dropout: Some(dropout), row: false };
        return g.one(Op::Embed(op), &[batch.ids, table, batch.spans]);
    }
    g.one(Op::Embed(Embed { token_dropout: None, row: false }), &[batch.ids, table])
}

/// One pre-LN transformer block. (T, D) -> (T, D). `rotary` holds the cosine and sine tables.
fn block(g: &mut Builder, c: &Esm2Config, x: ValueId, batch: &EncoderInputs, rotary: &[ValueId]) -> ValueId {
    let h = g.layer_norm(x, "attention.LayerNorm", c.eps);
    let [q, k, v] =
        ["query", "key", "value"].map(|n| g.linear(h, &format!("attention.self.{n}"), c.hidden_size, true));
    let a = g.one(Op::Attention(c.attention()), &[q, k, v, batch.spans, rotary[0], rotary[1]]);
    let a = g.linear(a, "attention.output.dense", c.hidden_size, true);
    let x = g.add(x, a);
    let h = g.layer_norm(x, "LayerNorm", c.eps);
    let h = g.linear(h, "intermediate.dense", c.intermediate_size, true); // (T, F)
    let h = g.gelu(h);
    let h = g.linear(h, "output.dense", c.hidden_size, true);
    g.add(x, h)
}

/// The masked-language-model head without its output projection: linear map, GELU, layer norm. (T, D) -> (T, D). The
/// caller adds the projection, whose weight is the embedding table.
pub(crate) fn lm_transform(g: &mut Builder, c: &Esm2Config, x: ValueId) -> ValueId {
    g.scope("lm_head.", None);
    let h = g.linear(x, "dense", c.hidden_size, true);
    let h = g.gelu(h);
    g.layer_norm(h, "layer_norm", c.eps)
}
