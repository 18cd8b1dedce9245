//! Decoder language models: dense (Llama: Touvron et al. 2023, arXiv:2302.13971; Qwen2 and Qwen3, which differ in biases
//! and in norms of queries and keys) and mixture of experts (Mixtral: Jiang et al. 2024, arXiv:2401.04088) as one pre-norm transformer with switches. Invariant: tensors
//! are named as in transformers, with one tensor for each expert. A parameter that stacks several tensors (all experts
//! of a layer) lists them as the pieces of its [`Param`].

mod config;
mod moe;
mod rope;

pub(crate) use config::DECODERS;
pub use config::{Biases, DecoderConfig, Experts, MAX_EXPERTS, Mlp, Norm, Positions, reads_bytes};
pub use moe::active_parameters;
pub use rope::RopeScaling;

use crate::Output;
use crate::init::{DEVIATION, Init, default_init};
use crate::layers::{EncoderInputs, RequestedOutputs};
use crate::training::{DropoutBuilder, PacksInput, Training};
use plimsoll_graph::ops::{
    Activation, Attention, Bias, Embed, Epilogue, Glu, Linear, Qkv, RotaryTable, SegmentMean,
};
use plimsoll_graph::{
    Bounds, Builder, DType, Dim, Graph, Op, OutputRole, Param, ParamPiece, ValueId, VerifyError,
};

/// Mean pooling of decoders: over all tokens of a sequence.
const MEAN: SegmentMean = SegmentMean { skip_first: 0, skip_last: 0 };

/// Builder of the blocks of a decoder, with the values that all blocks share.
struct DecoderBuilder<'a> {
    c: &'a DecoderConfig,
    spans: ValueId,
    /// Cosine and sine tables: (longest, d/2) each; empty without rotary position embedding.
    rotary: Vec<ValueId>,
    dropout: DropoutBuilder,
    packs: PacksInput,
    /// Auxiliary losses of each block's router; `None` for inference, which has none.
    aux: Option<Vec<moe::RouterLosses>>,
}

impl DecoderConfig {
    /// Builds the training graph for next-token prediction. Inputs `ids`: i32 (T), `spans`: i32 (S, 2),
    /// `targets`: i32 (T), with dropout also `seed`: i32 (2), and `packs`: i32 (P, 6) with dropout, with a router loss and
    /// with an expert capacity. Output [`OutputRole::Loss`]: f32 (1), the sum over all targets that are not negative. If a
    /// router loss has a nonzero weight, output [`OutputRole::Auxiliary`]: f32 (1), the weighted sum of the router losses,
    /// each times the targets of its pack. Its two terms are the outputs [`OutputRole::BalanceLoss`] and
    /// [`OutputRole::RouterZLoss`], each f32 (1) and present if its own weight is not 0. With experts,
    /// [`OutputRole::ExpertRows`]: i32 (E + 1) for each layer; with an expert capacity, [`OutputRole::DroppedRows`]: i32 (1)
    /// for each layer.
    pub fn train_graph(&self, bounds: Bounds, training: &Training) -> Result<Graph, VerifyError> {
        let g = &mut Builder::new(bounds);
        let ids = g.input("ids", &[Dim::Tokens(1)], DType::I32);
        let spans = g.input("spans", &[Dim::Sequences(1), Dim::Fixed(2)], DType::I32);
        let targets = g.input("targets", &[Dim::Tokens(1)], DType::I32);
        let mut packs = PacksInput::default();
        let dropout = DropoutBuilder::new(g, training, &mut packs);
        let mut decoder = DecoderBuilder { c: self, spans, rotary: vec![], dropout, packs, aux: Some(vec![]) };
        let x = decoder.hidden(g, ids, &mut |_, _, _| {}); // (T, D)
        let head = self.head(g);
        training.loss(g, x, head, None, targets);
        let aux = decoder.aux.unwrap_or_default();
        output_sum(g, OutputRole::Auxiliary, aux.iter().map(|losses| losses.sum));
        if self.experts.as_ref().is_some_and(|e| e.balance != 0.0) {
            output_sum(g, OutputRole::BalanceLoss, aux.iter().map(|losses| losses.balance));
        }
        if self.experts.as_ref().is_some_and(|e| e.z != 0.0) {
            output_sum(g, OutputRole::RouterZLoss, aux.iter().map(|losses| losses.z));
        }
        std::mem::replace(g, Builder::new(bounds)).finish()
    }

    /// Builds the inference graph with `outputs`. Inputs `ids`: i32 (T), `spans`: i32 (S, 2). [`Output::Logits`] are those
    /// of every token: row t is the prediction of the token after t. Experts have no capacity, because a token that is
    /// dropped for others of its batch would depend on them.
    pub fn graph(&self, bounds: Bounds, outputs: &[Output]) -> Result<Graph, VerifyError> {
        let experts = self.experts.clone().map(|e| Experts { capacity: 0, ..e });
        let c = &Self { experts, ..self.clone() };
        let g = &mut Builder::new(bounds);
        let batch = &mut EncoderInputs::inputs(g);
        let requested = RequestedOutputs { outputs, mean: MEAN };
        let mut packs = PacksInput::default();
        let dropout = DropoutBuilder::new(g, &Training::default(), &mut packs);
        let mut decoder = DecoderBuilder { c, spans: batch.spans, rotary: vec![], dropout, packs, aux: None };
        let ids = batch.ids;
        let x = decoder.hidden(g, ids, &mut |g, x, layer| requested.layer(g, batch, x, layer)); // (T, D)
        requested.last(g, batch, x, self.layers);
        if outputs.contains(&Output::Logits) {
            let head = self.head(g);
            let logits = g.one(Op::Linear(Linear::new(false, Epilogue::None)), &[x, head]); // (T, V)
            g.output("logits", logits);
        }
        std::mem::replace(g, Builder::new(bounds)).finish()
    }

    /// The weight of the output projection: (V, D).
    fn head(&self, g: &mut Builder) -> ValueId {
        let name = if self.tied { "model.embed_tokens.weight" } else { "lm_head.weight" };
        g.param(name, &[self.vocab_size, self.hidden_size])
    }

    /// Initialisation of a tensor: normal; the weights that write to the residual stream are scaled by
    /// `1/sqrt(2 L)`, because each of the L layers adds to the stream twice (Radford et al. 2019).
    pub fn init(&self, piece: &ParamPiece) -> Init {
        if let Some(values) = self.derived(&piece.tensor) {
            return Init::Values(values);
        }
        let adds = ["o_proj.weight", "down_proj.weight", "w2.weight"].iter().any(|n| piece.tensor.ends_with(n));
        if adds { Init::Normal(DEVIATION / (2.0 * self.layers as f32).sqrt()) } else { default_init(piece) }
    }

    /// Computed value of a tensor that is never read from a file: the rotary frequencies in f32.
    pub fn derived(&self, tensor: &str) -> Option<Vec<f32>> {
        let Positions::Rotary(theta) = self.positions else { return None };
        tensor.ends_with("inv_freq").then(|| self.scaling.frequencies(theta, self.head_dim))
    }

    fn attention(&self) -> Attention {
        Attention {
            heads: self.heads as u32,
            kv_heads: self.kv_heads as u32,
            head_dim: self.head_dim as u32,
            scale: (self.head_dim as f32).powf(-0.5) * self.scaling.score_factor(),
            mask: self.mask,
            bias: if self.positions == Positions::Alibi { Bias::Alibi } else { Bias::None },
            rotary: self.positions != Positions::Alibi,
            qkv: Qkv::Separate,
        }
    }
}

impl DecoderBuilder<'_> {
    /// Builds the decoder; returns the last hidden state, after the final norm: (T, D). Calls `before` with the input of
    /// each layer and the number of the layer.
    fn hidden(
        &mut self,
        g: &mut Builder,
        ids: ValueId,
        before: &mut dyn FnMut(&mut Builder, ValueId, u64),
    ) -> ValueId {
        let c = self.c;
        g.scope("model.", None);
        let table = g.param("embed_tokens.weight", &[c.vocab_size, c.hidden_size]);
        let x = g.one(Op::Embed(Embed { token_dropout: None, row: false }), &[ids, table]);
        let mut x = self.dropout.apply(g, x);
        if c.positions != Positions::Alibi {
            let inv_freq = g.param("rotary_emb.inv_freq", &[c.head_dim / 2]);
            self.rotary = g.node(Op::RotaryTable(RotaryTable {}), &[inv_freq]);
        }
        for i in 0..c.layers {
            let prefix = format!("model.layers.{i}.");
            before(g, x, i);
            g.scope(&prefix, Some(i as u32));
            x = self.attention_block(g, x);
            x = self.mlp_block(g, &prefix, x, i);
        }
        g.scope("", None);
        self.norm(g, x, "model.norm")
    }

    /// Attention with residual: x + attention(norm(x)). x: (T, D).
    fn attention_block(&mut self, g: &mut Builder, x: ValueId) -> ValueId {
        let c = self.c;
        let h = self.norm(g, x, "input_layernorm");
        let parts = [("q", c.heads), ("k", c.kv_heads), ("v", c.kv_heads)];
        let [mut q, mut k, v] =
            parts.map(|(n, heads)| g.linear(h, &format!("self_attn.{n}_proj"), heads * c.head_dim, c.bias.qkv));
        if c.qk_norm {
            q = g.rms_norm_of_heads(q, "self_attn.q_norm", c.eps, c.heads as u32);
            k = g.rms_norm_of_heads(k, "self_attn.k_norm", c.eps, c.kv_heads as u32);
        }
        let mut inputs = vec![q, k, v, self.spans];
        inputs.extend(&self.rotary);
        let a = g.one(Op::Attention(c.attention()), &inputs);
        let a = g.linear(a, "self_attn.o_proj", c.hidden_size, c.bias.attention_output);
        let a = self.dropout.apply(g, a);
        g.add(x, a)
    }

    /// MLP or mixture of experts with residual: x + mlp(norm(x)). x: (T, D).
    fn mlp_block(&mut self, g: &mut Builder, prefix: &str, x: ValueId, layer: u64) -> ValueId {
        let h = self.norm(g, x, "post_attention_layernorm");
        let y = match &self.c.experts {
            Some(experts) => self.moe(g, prefix, h, experts, layer),
            None => {
                let names = ["gate_proj", "up_proj", "down_proj"].map(|n| format!("mlp.{n}"));
                self.mlp(g, prefix, h, names, self.c.intermediate_size)
            }
        };
        let y = self.dropout.apply(g, y);
        g.add(x, y)
    }

    /// A dense MLP of `width`; `names` are its modules gate, up and down. (T, D) -> (T, D).
    fn mlp(&self, g: &mut Builder, prefix: &str, x: ValueId, names: [String; 3], width: u64) -> ValueId {
        let c = self.c;
        let [gate, up, down] = names;
        let h = match c.mlp {
            Mlp::SwiGlu => {
                let h = self.gate_and_up(g, prefix, x, [&gate, &up], width); // (T, 2F)
                g.one(Op::Glu(Glu { activation: Activation::Silu }), &[h])
            }
            Mlp::Gelu => {
                let h = g.linear(x, &up, width, c.bias.mlp);
                g.gelu(h)
            }
        };
        g.linear(h, &down, c.hidden_size, c.bias.mlp)
    }

    /// Gate and up projections as one GEMM over the stacked weights of both: (T, D) -> (T, 2 `width`).
    fn gate_and_up(&self, g: &mut Builder, prefix: &str, x: ValueId, names: [&str; 2], width: u64) -> ValueId {
        let weight = stacked(prefix, names, "weight", &[width, self.c.hidden_size]);
        let mut inputs = vec![x, g.param_of(weight, DType::F32)];
        if self.c.bias.mlp {
            inputs.push(g.param_of(stacked(prefix, names, "bias", &[width]), DType::F32));
        }
        g.one(Op::Linear(Linear::new(self.c.bias.mlp, Epilogue::None)), &inputs)
    }

    fn norm(&self, g: &mut Builder, x: ValueId, name: &str) -> ValueId {
        match self.c.norm {
            Norm::Rms => g.rms_norm(x, name, self.c.eps),
            Norm::Layer => g.layer_norm(x, name, self.c.eps),
        }
    }
}

/// Adds the sum of `terms` as an output, if there are any.
fn output_sum(g: &mut Builder, role: OutputRole, terms: impl Iterator<Item = ValueId>) {
    if let Some(sum) = terms.reduce(|a, b| g.add(a, b)) {
        g.output(role, sum);
    }
}

/// The piece that holds all rows of a tensor.
fn whole(tensor: String, shape: &[u64]) -> ParamPiece {
    ParamPiece { tensor, shape: shape.to_vec(), rows: (0, shape[0]) }
}

/// The parameter that stacks the tensors `leaf` of two modules.
fn stacked(prefix: &str, names: [&str; 2], leaf: &str, shape: &[u64]) -> Param {
    let pieces = names.map(|n| whole(format!("{prefix}{n}.{leaf}"), shape));
    Param { name: format!("{prefix}{}+{}.{leaf}", names[0], last(names[1])), pieces: pieces.into() }
}

/// The last component of a module name.
fn last(name: &str) -> &str {
    name.rsplit('.').next().unwrap_or(name)
}
