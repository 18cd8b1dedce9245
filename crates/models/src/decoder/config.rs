//! Configuration of decoders, read from and written to config.json. Invariant: a key that changes the
//! computation is either implemented, or an error names it.

use super::rope::{self, RopeConfig, RopeDefaults, RopeScaling};
use crate::ModelConfig;
use crate::config::{ConfigError, ConfigKeys, WIDEST_HEAD, decimal};
use crate::hub::merge_config;
use plimsoll_graph::ops::Mask;
use serde_json::{Value, json};

/// Hyperparameters of a decoder.
#[derive(Clone, Debug, PartialEq)]
pub struct DecoderConfig {
    /// Vocabulary size V.
    pub vocab_size: u64,
    /// Hidden size D.
    pub hidden_size: u64,
    /// Number of transformer layers.
    pub layers: u64,
    /// Number of query heads.
    pub heads: u64,
    /// Number of key and value heads, a divisor of `heads` (grouped-query attention).
    pub kv_heads: u64,
    /// Head dimension.
    pub head_dim: u64,
    /// Width F of the MLP, or of each expert.
    pub intermediate_size: u64,
    /// Norm before attention, before the MLP, and after the last layer.
    pub norm: Norm,
    /// Epsilon that norms add to the variance or mean square.
    pub eps: f32,
    /// Position encoding.
    pub positions: Positions,
    /// Attention mask.
    pub mask: Mask,
    /// Kind of the MLP, and of every expert.
    pub mlp: Mlp,
    /// Which linear layers have biases; the output projection never has one.
    pub bias: Biases,
    /// Whether queries and keys are normalised by an RMSNorm of each head before their rotation (Qwen3).
    pub qk_norm: bool,
    /// Scaling of the rotary frequencies; [`RopeScaling::None`] for ALiBi.
    pub scaling: RopeScaling,
    /// Whether the output projection is tied to the embedding table.
    pub tied: bool,
    /// Mixture of experts in place of the MLP; `None` for a dense model.
    pub experts: Option<Experts>,
}

/// The linear layers that have biases.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Biases {
    /// The projections of queries, keys and values.
    pub qkv: bool,
    /// The output projection of the attention.
    pub attention_output: bool,
    /// The layers of the MLP or of the experts, and the router.
    pub mlp: bool,
}

impl Biases {
    /// No layer has a bias.
    pub const NONE: Self = Self::all(false);

    /// All layers have a bias, or none has.
    pub const fn all(bias: bool) -> Self {
        Self { qkv: bias, attention_output: bias, mlp: bias }
    }
}

/// Kind of normalisation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Norm {
    /// RMSNorm (Zhang and Sennrich 2019).
    Rms,
    /// LayerNorm with bias (Ba et al. 2016).
    Layer,
}

/// Position encoding.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Positions {
    /// Rotary position embedding (Su et al. 2021), half-split, with the given base of the frequencies
    /// (`rope_theta`).
    Rotary(f32),
    /// Attention with linear biases (Press et al. 2022).
    Alibi,
}

/// Kind of MLP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mlp {
    /// `down(silu(gate(x)) * up(x))` (Shazeer 2020).
    SwiGlu,
    /// `down(gelu(up(x)))`.
    Gelu,
}

/// Hyperparameters of a mixture of experts (Shazeer et al. 2017).
#[derive(Clone, Debug, PartialEq)]
pub struct Experts {
    /// Number of experts E.
    pub experts: u64,
    /// Number of experts per token, k.
    pub top_k: u64,
    /// Number of shared experts, which process every token (Dai et al. 2024); computed as one MLP of width
    /// `shared * F`.
    pub shared: u64,
    /// Whether the gates of a token are normalised to sum to 1.
    pub renormalise: bool,
    /// Maximum number of rows of an expert, in 1/1000 of an even share; tokens beyond it are dropped. 0 means
    /// no limit.
    pub capacity: u32,
    /// Weight of the load-balancing loss, averaged over the layers.
    pub balance: f32,
    /// Weight of the router z-loss, the squared log-sum-exp of the router's logits, averaged over the layers.
    pub z: f32,
}

/// `model_type` of decoders that no architecture of transformers describes.
const OWN: &str = "plimsoll_decoder";

/// Values of `model_type` of the decoders that are supported.
pub(crate) const DECODERS: [&str; 6] = ["llama", "mistral", "mixtral", "qwen2", "qwen3", OWN];

/// Maximum number of experts in all layers of a model: each is a tensor with a name in every graph, and the largest published
/// models have a fifth of it.
pub const MAX_EXPERTS: u64 = 1 << 17;

/// Key of config.json that names a tokenizer without a file; the only one is [`BYTES`].
const TOKENIZER: &str = "plimsoll_tokenizer";
/// The value of [`TOKENIZER`] of a model whose tokens are the bytes of a text.
const BYTES: &str = "bytes";

/// Whether a config.json states that the tokens of the model are the bytes of a text, so that it has no tokenizer file.
pub fn reads_bytes(config: &str) -> bool {
    serde_json::from_str::<Value>(config).is_ok_and(|value| value[TOKENIZER] == BYTES)
}

impl DecoderConfig {
    /// Reads a config.json of one of the [supported decoders](crate::ModelConfig).
    ///
    /// # Errors
    /// A configuration of another model, or keys that the decoder cannot have.
    pub fn from_json(text: &str) -> Result<Self, ConfigError> {
        match ModelConfig::from_json(text)? {
            ModelConfig::Decoder(decoder) => Ok(decoder),
            other => Err(ConfigError::Family { found: other.family(), wanted: "a decoder" }),
        }
    }

    /// Reads the keys of a configuration whose `model_type` is one of [`DECODERS`].
    pub(crate) fn from_keys(keys: &ConfigKeys<'_>) -> Result<Self, ConfigError> {
        match keys.0.get("model_type").and_then(Value::as_str) {
            Some(OWN) => Self::own(keys),
            other => Self::hub(keys, other.unwrap_or_default()),
        }
    }

    /// The config.json of this model. If transformers has the architecture, the file uses its `model_type` and
    /// keys, so that transformers can load the checkpoint; otherwise `plimsoll_decoder`. Other keys of
    /// `source`, the configuration of the pretrained model, are copied. Special token ids that `source` does
    /// not give are null, because the defaults of transformers would be ordinary tokens of another vocabulary.
    /// `reads_bytes` says whether the tokens are the bytes of a text, see [`reads_bytes`].
    pub fn to_json(&self, source: &str, reads_bytes: bool) -> String {
        let mut value = merge_config(source, self.as_hub().unwrap_or_else(|| self.as_own()));
        // The forms of the rotary keys of other versions of transformers would contradict those that are written.
        value.remove("rope_parameters");
        if self.scaling == RopeScaling::None {
            value.remove("rope_scaling");
        }
        value.remove(TOKENIZER);
        if reads_bytes {
            value.insert(TOKENIZER.to_owned(), json!(BYTES));
        }
        for key in ["bos_token_id", "eos_token_id", "pad_token_id"] {
            value.entry(key).or_insert(Value::Null);
        }
        format!("{:#}\n", Value::Object(value))
    }

    /// Reads the keys that all kinds share; `kv_heads` is the default for `num_key_value_heads`, `None` for
    /// `heads`; `head_dim` that for `head_dim`, `None` for an even share of the hidden size.
    fn sizes(keys: &ConfigKeys<'_>, kv_heads: Option<u64>, head_dim: Option<u64>) -> Result<Self, ConfigError> {
        let hidden_size = keys.size("hidden_size")?;
        let heads = keys.size("num_attention_heads")?;
        let head_dim = keys.or("head_dim", head_dim.unwrap_or(hidden_size / heads))?;
        if heads > 128 || head_dim > WIDEST_HEAD || !head_dim.is_multiple_of(2) {
            let wanted = format!("at most 128 heads of an even size up to {WIDEST_HEAD}");
            return Err(keys.bad("num_attention_heads", wanted));
        }
        let kv_heads = keys.or("num_key_value_heads", kv_heads.unwrap_or(heads))?;
        if !heads.is_multiple_of(kv_heads) {
            return Err(keys.bad("num_key_value_heads", format!("a divisor of num_attention_heads {heads}")));
        }
        Ok(Self {
            vocab_size: keys.size("vocab_size")?,
            hidden_size,
            layers: keys.layers()?,
            heads,
            kv_heads,
            head_dim,
            intermediate_size: keys.size("intermediate_size")?,
            norm: Norm::Rms,
            eps: 1e-5,
            positions: Positions::Rotary(10_000.0),
            mask: Mask::Causal,
            mlp: Mlp::SwiGlu,
            bias: Biases::NONE,
            qk_norm: false,
            scaling: RopeScaling::None,
            tied: keys.flag("tie_word_embeddings", false)?,
            experts: None,
        })
    }

    /// Reads a configuration of an architecture of transformers.
    fn hub(keys: &ConfigKeys<'_>, model_type: &str) -> Result<Self, ConfigError> {
        let mixtral = model_type == "mixtral";
        let qwen = matches!(model_type, "qwen2" | "qwen3");
        keys.one_of("hidden_act", &[Some("silu"), None])?;
        keys.plain_attention()?;
        let llama = model_type == "llama";
        let qwen3 = model_type == "qwen3";
        // Other architectures have no such biases; classes of transformers ignore the key there.
        let attention = keys.flag("attention_bias", false)?;
        if attention && !llama && !qwen3 {
            return Err(keys.bad("attention_bias", "false"));
        }
        let mlp = keys.flag("mlp_bias", false)?;
        if mlp && !llama {
            return Err(keys.bad("mlp_bias", "false"));
        }
        // Missing keys have the defaults of the configuration classes of transformers.
        let kv_heads = match model_type {
            "llama" => None,
            "qwen2" | "qwen3" => Some(32),
            _ => Some(8),
        };
        // A null says one for each query head; only a missing key has the default of the class.
        let kv_heads = kv_heads.filter(|_| !keys.0.contains_key("num_key_value_heads"));
        let mut c = Self::sizes(keys, kv_heads, qwen3.then_some(128))?;
        c.bias = Biases { qkv: attention || model_type == "qwen2", attention_output: attention, mlp };
        c.qk_norm = qwen3;
        c.eps = keys.eps("rms_norm_eps", if mixtral { 1e-5 } else { 1e-6 })?;
        let theta = if mixtral { 1e6 } else { 1e4 };
        let longest = match model_type {
            "llama" => 2048,
            "qwen2" | "qwen3" => 32_768,
            _ => 131_072,
        };
        let RopeConfig { theta, scaling } = rope::read(keys, RopeDefaults { theta, longest })?;
        c.positions = Positions::Rotary(theta);
        c.scaling = scaling;
        if qwen {
            // The first layers of these models would attend to whole sequences and the others to a window.
            keys.must_be("use_sliding_window", false)?;
        } else if !llama && keys.has("sliding_window") {
            c.mask = Mask::Window(keys.size("sliding_window")? as u32);
        } else if model_type == "mistral" && !keys.0.contains_key("sliding_window") {
            c.mask = Mask::Window(4096);
        }
        if mixtral {
            c.experts = Some(Experts {
                experts: keys.or("num_local_experts", 8)?,
                top_k: keys.or("num_experts_per_tok", 2)?,
                shared: 0,
                renormalise: true,
                capacity: 0,
                balance: keys.number("router_aux_loss_coef", 0.001)?,
                z: 0.0,
            });
        }
        c.checked(keys)
    }

    /// Reads a configuration of `plimsoll_decoder`.
    fn own(keys: &ConfigKeys<'_>) -> Result<Self, ConfigError> {
        let mut c = Self::sizes(keys, None, None)?;
        c.norm = if keys.choice("norm", ["rms_norm", "layer_norm"])? == 0 { Norm::Rms } else { Norm::Layer };
        c.eps = keys.eps("norm_eps", 1e-5)?;
        c.positions = match keys.choice("positions", ["rotary", "alibi"])? {
            0 => Positions::Rotary(keys.above_zero("rope_theta", 10_000.0)?),
            _ => Positions::Alibi,
        };
        c.mask = mask(keys)?;
        c.mlp = if keys.choice("mlp", ["swiglu", "gelu"])? == 0 { Mlp::SwiGlu } else { Mlp::Gelu };
        let bias = keys.flag("bias", false)?;
        c.bias = Biases {
            qkv: keys.flag("qkv_bias", bias)?,
            attention_output: keys.flag("attention_output_bias", bias)?,
            mlp: keys.flag("mlp_bias", bias)?,
        };
        c.qk_norm = keys.flag("qk_norm", false)?;
        if keys.has("rope_scaling") {
            if c.positions == Positions::Alibi {
                return Err(keys.bad("rope_scaling", "left out without rotary positions"));
            }
            c.scaling = rope::read(keys, RopeDefaults { theta: 10_000.0, longest: 2048 })?.scaling;
        }
        if keys.count("num_local_experts")? > 0 {
            c.experts = Some(Experts {
                experts: keys.size("num_local_experts")?,
                top_k: keys.size("num_experts_per_tok")?,
                shared: keys.count("num_shared_experts")?,
                renormalise: keys.flag("norm_topk_prob", true)?,
                capacity: (keys.number("capacity_factor", 0.0)? * 1000.0).round() as u32,
                balance: keys.number("router_aux_loss_coef", 0.0)?,
                z: keys.number("router_z_loss_coef", 0.0)?,
            });
        }
        c.checked(keys)
    }

    /// Checks the limits of the experts.
    fn checked(self, keys: &ConfigKeys<'_>) -> Result<Self, ConfigError> {
        match &self.experts {
            Some(e) if e.experts > 1024 => Err(keys.bad("num_local_experts", "at most 1024")),
            Some(e) if e.experts.saturating_mul(self.layers) > MAX_EXPERTS => {
                Err(keys.bad("num_local_experts", format!("at most {MAX_EXPERTS} in all layers together")))
            }
            Some(e) if e.shared > 1024 => Err(keys.bad("num_shared_experts", "at most 1024")),
            Some(e) if e.top_k > e.experts => {
                Err(keys.bad("num_experts_per_tok", format!("at most num_local_experts {}", e.experts)))
            }
            Some(_) | None => Ok(self),
        }
    }

    /// The keys of a configuration of transformers; `None` if none of its architectures describes this model.
    fn as_hub(&self) -> Option<Value> {
        let Positions::Rotary(theta) = self.positions else { return None };
        if self.norm != Norm::Rms || self.mlp != Mlp::SwiGlu {
            return None;
        }
        let mixtral = self.experts.as_ref();
        let known = mixtral.is_none_or(|e| e.shared == 0 && e.renormalise && e.capacity == 0 && e.z == 0.0);
        if !known {
            return None;
        }
        let window = match self.mask {
            Mask::Causal => None,
            Mask::Window(n) => Some(n),
            Mask::Full | Mask::BlockSparse { .. } => return None,
        };
        let Biases { qkv, attention_output, mlp } = self.bias;
        let plain = self.bias == Biases::NONE && !self.qk_norm;
        let [kind, class] = match mixtral {
            Some(_) if plain => ["mixtral", "MixtralForCausalLM"],
            Some(_) => return None,
            None if window.is_some() && plain => ["mistral", "MistralForCausalLM"],
            None if window.is_some() => return None,
            None if self.qk_norm && qkv == attention_output && !mlp => ["qwen3", "Qwen3ForCausalLM"],
            None if self.qk_norm => return None,
            None if qkv == attention_output => ["llama", "LlamaForCausalLM"],
            None if qkv && !mlp => ["qwen2", "Qwen2ForCausalLM"],
            None => return None,
        };
        let mut value = self.common(kind);
        let keys = value.as_object_mut()?;
        keys.insert("architectures".to_owned(), json!([class]));
        keys.insert("hidden_act".to_owned(), json!("silu"));
        keys.insert("rms_norm_eps".to_owned(), decimal(self.eps));
        keys.insert("rope_theta".to_owned(), decimal(theta));
        match kind {
            "mistral" | "mixtral" => drop(keys.insert("sliding_window".to_owned(), json!(window))),
            "qwen2" | "qwen3" => drop(keys.insert("use_sliding_window".to_owned(), json!(false))),
            _ => {}
        }
        if attention_output {
            keys.insert("attention_bias".to_owned(), json!(true));
        }
        if mlp {
            keys.insert("mlp_bias".to_owned(), json!(true));
        }
        if let Some(scaling) = self.scaling.to_json() {
            keys.insert("rope_scaling".to_owned(), scaling);
        }
        if let Some(e) = mixtral {
            keys.insert("num_local_experts".to_owned(), json!(e.experts));
            keys.insert("num_experts_per_tok".to_owned(), json!(e.top_k));
            keys.insert("router_aux_loss_coef".to_owned(), decimal(e.balance));
        }
        Some(value)
    }

    /// The keys of a `plimsoll_decoder` configuration.
    fn as_own(&self) -> Value {
        let mut value = self.common(OWN);
        value["norm"] = json!(if self.norm == Norm::Rms { "rms_norm" } else { "layer_norm" });
        value["norm_eps"] = decimal(self.eps);
        match self.positions {
            Positions::Rotary(theta) => {
                value["positions"] = json!("rotary");
                value["rope_theta"] = decimal(theta);
            }
            Positions::Alibi => value["positions"] = json!("alibi"),
        }
        value["mask"] = json!(self.mask);
        value["mlp"] = json!(if self.mlp == Mlp::SwiGlu { "swiglu" } else { "gelu" });
        let Biases { qkv, attention_output, mlp } = self.bias;
        value["bias"] = json!(mlp);
        if self.bias != Biases::all(mlp) {
            value["qkv_bias"] = json!(qkv);
            value["attention_output_bias"] = json!(attention_output);
        }
        if self.qk_norm {
            value["qk_norm"] = json!(true);
        }
        if let Some(scaling) = self.scaling.to_json() {
            value["rope_scaling"] = scaling;
        }
        if let Some(e) = &self.experts {
            value["num_local_experts"] = json!(e.experts);
            value["num_experts_per_tok"] = json!(e.top_k);
            value["num_shared_experts"] = json!(e.shared);
            value["norm_topk_prob"] = json!(e.renormalise);
            value["capacity_factor"] = json!(f64::from(e.capacity) / 1000.0);
            value["router_aux_loss_coef"] = decimal(e.balance);
            value["router_z_loss_coef"] = decimal(e.z);
        }
        value
    }

    /// The keys that all kinds share.
    fn common(&self, model_type: &str) -> Value {
        json!({
            "model_type": model_type,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.intermediate_size,
            "tie_word_embeddings": self.tied,
        })
    }
}

/// Reads the key `mask`; causal if it is missing.
fn mask(keys: &ConfigKeys<'_>) -> Result<Mask, ConfigError> {
    let wanted = r#""causal", {"window": n} or {"block_sparse": {"block": n, "local": n, "global": n}}"#;
    match keys.0.get("mask") {
        None => Ok(Mask::Causal),
        Some(value) => match serde_json::from_value(value.clone()) {
            Ok(mask @ (Mask::Causal | Mask::Window(_) | Mask::BlockSparse { .. })) => Ok(mask),
            Ok(Mask::Full) | Err(_) => Err(keys.bad("mask", wanted)),
        },
    }
}
