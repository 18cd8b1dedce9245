//! DNABERT-S (Zhou et al. 2024, arXiv:2402.08777): a post-LN transformer encoder for nucleotide sequences with
//! symmetric ALiBi and a gated MLP. DNABERT-2 and MosaicBERT have this architecture too. The numerical
//! reference is `bert_layers.py` of the model's hub repository, run in f32.

use crate::config::{ConfigError, ConfigKeys, Output};
use crate::layers::{EncoderInputs, RequestedOutputs};
use plimsoll_graph::ops::{Activation, Attention, Bias, Embed, Glu, Mask, Qkv, SegmentMean};
use plimsoll_graph::{Bounds, Builder, Graph, Op, ValueId, VerifyError};

/// The sizes of a DNABERT-S model.
#[derive(Clone, Debug, PartialEq)]
pub struct DnabertConfig {
    /// Vocabulary size V.
    pub vocab_size: u64,
    /// Rows of the token-type embedding table; only row 0 is used.
    pub type_vocab_size: u64,
    /// Hidden size D.
    pub hidden_size: u64,
    /// Transformer layers.
    pub layers: u64,
    /// Attention heads.
    pub heads: u64,
    /// Width F of the MLP after the gated linear unit.
    pub intermediate_size: u64,
    /// Epsilon that layer norms add to the variance.
    pub eps: f32,
}

impl DnabertConfig {
    pub(crate) fn from_keys(keys: &ConfigKeys<'_>) -> Result<Self, ConfigError> {
        keys.one_of("hidden_act", &[Some("gelu"), None])?;
        let hidden_size = keys.size("hidden_size")?;
        Ok(Self {
            vocab_size: keys.size("vocab_size")?,
            type_vocab_size: keys.size("type_vocab_size")?,
            hidden_size,
            layers: keys.layers()?,
            heads: keys.heads(hidden_size)?,
            intermediate_size: keys.size("intermediate_size")?,
            eps: keys.eps("layer_norm_eps", 1e-12)?,
        })
    }

    fn attention(&self) -> Attention {
        let head_dim = self.hidden_size / self.heads;
        Attention {
            heads: self.heads as u32,
            kv_heads: self.heads as u32,
            head_dim: head_dim as u32,
            scale: (head_dim as f32).powf(-0.5),
            mask: Mask::Full,
            bias: Bias::Alibi,
            rotary: false,
            qkv: Qkv::Fused,
        }
    }
}

/// Mean pooling of DNABERT-S: over all tokens of a sequence, CLS and SEP included.
pub(crate) const MEAN: SegmentMean = SegmentMean { skip_first: 0, skip_last: 0 };

/// Builds the inference graph of the encoder with `outputs`. [`Output::Logits`] is ignored: only training graphs
/// have a masked-language-model head.
pub fn dnabert_s(c: &DnabertConfig, bounds: Bounds, outputs: &[Output]) -> Result<Graph, VerifyError> {
    let requested = RequestedOutputs { outputs, mean: MEAN };
    let g = &mut Builder::new(bounds);
    let batch = &mut EncoderInputs::inputs(g);
    let (x, _) = encode(g, c, batch, &requested);
    requested.last(g, batch, x, c.layers);
    std::mem::replace(g, Builder::new(bounds)).finish()
}

/// Builds the encoder, with the `requested` outputs of all layers but the last. Returns the last hidden state: (T,
/// D) and the embedding table: (V, D).
pub(crate) fn encode(
    g: &mut Builder,
    c: &DnabertConfig,
    batch: &mut EncoderInputs,
    requested: &RequestedOutputs<'_>,
) -> (ValueId, ValueId) {
    g.scope("embeddings.", None);
    let table = g.param("word_embeddings.weight", &[c.vocab_size, c.hidden_size]);
    let row = g.param_rows("token_type_embeddings.weight", &[c.type_vocab_size, c.hidden_size], 0..1);
    let x = g.one(Op::Embed(Embed { token_dropout: None, row: true }), &[batch.ids, table, row]);
    let mut x = g.layer_norm(x, "LayerNorm", c.eps); // (T, D)
    for i in 0..c.layers {
        requested.layer(g, batch, x, i);
        g.scope(format!("encoder.layer.{i}."), Some(i as u32));
        x = block(g, c, x, batch);
    }
    g.scope("", None);
    (x, table)
}

/// One post-LN transformer block. (T, D) -> (T, D).
fn block(g: &mut Builder, c: &DnabertConfig, x: ValueId, batch: &EncoderInputs) -> ValueId {
    let qkv = g.linear(x, "attention.self.Wqkv", 3 * c.hidden_size, true);
    let a = g.one(Op::Attention(c.attention()), &[qkv, batch.spans]);
    let a = g.linear(a, "attention.output.dense", c.hidden_size, true);
    let x = g.add(x, a);
    let x = g.layer_norm(x, "attention.output.LayerNorm", c.eps);
    let h = g.linear(x, "mlp.gated_layers", 2 * c.intermediate_size, false); // (T, 2F)
    let h = g.one(Op::Glu(Glu { activation: Activation::Gelu }), &[h]); // (T, F)
    let h = g.linear(h, "mlp.wo", c.hidden_size, true);
    let x = g.add(x, h);
    g.layer_norm(x, "mlp.layernorm", c.eps)
}
