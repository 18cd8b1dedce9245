//! The section `model` of the configuration: the architecture, the initial weights and the parameters to train.
//! Invariant: plain data; rules on combinations of keys are in `rules`.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The model and which part of it is trained.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Model {
    /// The family.
    pub kind: ModelKind,
    /// Sizes of a moe_lm: each size that is given beside it wins.
    pub preset: Option<Preset>,
    /// The initial model: a folder, a weight file or a hub id; null starts from random weights. It fixes the keys of the architecture (kind, sizes, norm, attention, experts): one that is absent has its value, and another value is refused.
    pub from: Option<String>,
    /// Entries of the embedding table; null takes those of model.from, or the tokenizer's.
    #[schemars(range(min = 2))]
    pub vocabulary: Option<u64>,
    /// Width of the residual stream.
    #[schemars(range(min = 1))]
    pub hidden: u64,
    /// Blocks.
    #[schemars(range(min = 1))]
    pub layers: u64,
    /// Query heads.
    #[schemars(range(min = 1))]
    pub heads: u64,
    /// Key and value heads, a divisor of the heads; null takes those of model.from, or one for each query head.
    #[schemars(range(min = 1))]
    pub kv_heads: Option<u64>,
    /// Inner width of the feed-forward network, or of each expert.
    #[schemars(range(min = 1))]
    pub intermediate: u64,
    /// Which norm.
    pub norm: Norm,
    /// What the norm adds to the variance.
    #[schemars(extend("exclusiveMinimum" = 0))]
    pub norm_eps: f64,
    /// The feed-forward network's non-linearity.
    pub activation: Activation,
    /// Whether projections and the router have biases.
    pub bias: bool,
    /// How attention sees positions.
    pub position: Position,
    /// The base of rotary angles.
    #[schemars(extend("exclusiveMinimum" = 0))]
    pub rope_theta: f64,
    /// Which keys a query sees.
    pub attention: Attention,
    /// Whether the output layer is the embedding table.
    pub tied_head: bool,
    /// Share of activations set to zero while training.
    #[schemars(range(min = 0), extend("exclusiveMaximum" = 1))]
    pub dropout: f64,
    /// The experts of a moe_lm.
    pub experts: Experts,
    /// Classes of a classifier over the mean of an encoder's states; null takes those of a classifier that model.from names, and else trains the family's language model.
    #[schemars(range(min = 2))]
    pub classes: Option<u64>,
    /// Low-rank adapters, which are trained instead of the weights that they adapt.
    pub lora: Option<Lora>,
    /// Whether a classifier's encoder stays as it is.
    pub freeze_encoder: bool,
}

/// Model families that can be trained.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ModelKind {
    /// A decoder-only mixture-of-experts language model.
    MoeLm,
    /// A decoder-only dense language model with Llama's architecture.
    DenseLm,
    /// An ESM-2 protein encoder.
    Esm2,
    /// A DNABERT-S DNA encoder.
    DnabertS,
    /// VirNucPro's classifier over embeddings.
    Head,
}

impl ModelKind {
    /// The value of `model.kind` in a configuration.
    pub fn name(self) -> &'static str {
        match self {
            Self::MoeLm => "moe_lm",
            Self::DenseLm => "dense_lm",
            Self::Esm2 => "esm2",
            Self::DnabertS => "dnabert_s",
            Self::Head => "head",
        }
    }
}

/// Named model sizes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Preset {
    /// 93 M parameters: 8 layers of 384, 4 experts.
    Tiny,
    /// 317 M parameters: 14 layers of 512, 8 experts.
    Small,
    /// 1.35 B parameters: 16 layers of 768, 16 experts.
    Base,
    /// 6.68 B parameters: 24 layers of 1024, 32 experts with 4 experts per token.
    Large,
}

/// Normalisation layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Norm {
    /// Layer normalisation (Ba, Kiros and Hinton 2016), with bias.
    LayerNorm,
    /// Root-mean-square normalisation (Zhang and Sennrich 2019).
    RmsNorm,
}

/// Activations of the feed-forward network.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Activation {
    /// Exact GELU between two linear layers.
    Gelu,
    /// SwiGLU: a SiLU gate over three linear layers (Shazeer 2020).
    Swiglu,
}

/// Position encodings.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Position {
    /// Rotary position embedding of queries and keys (Su et al. 2021).
    Rotary,
    /// Attention with linear biases by distance (Press et al. 2021).
    Alibi,
}

/// The attention mask.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Attention {
    /// The shape; encoders are full.
    pub mask: MaskKind,
    /// Keys of a window, itself included.
    #[schemars(range(min = 1))]
    pub window: u64,
    /// Tokens of a block of block_sparse.
    #[schemars(range(min = 1))]
    pub block: u64,
    /// Blocks before a query that it sees, its own included.
    #[schemars(range(min = 1))]
    pub local: u64,
    /// Blocks at the start of a sequence that every query sees.
    pub global: u64,
}

/// Attention masks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum MaskKind {
    /// Every key of the sequence is visible.
    Full,
    /// Causal mask: keys up to the query's own position.
    Causal,
    /// Sliding window: the last `window` keys up to the query's own position.
    Window,
    /// Block-sparse mask: the nearest `local` blocks and the first `global` blocks.
    BlockSparse,
}

/// The experts of a mixture-of-experts model.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Experts {
    /// How many.
    #[schemars(range(min = 1))]
    pub count: u64,
    /// How many a token is sent to.
    #[schemars(range(min = 1))]
    pub top_k: u64,
    /// Rows that an expert takes at most, as a multiple of the mean, to a thousandth; null drops nothing.
    #[schemars(extend("exclusiveMinimum" = 0, "maximum" = 1000))]
    pub capacity: Option<f64>,
    /// Whether the gates of a token sum to one.
    pub renormalise: bool,
    /// Experts that every token is sent to as well.
    pub shared: u64,
}

/// Low-rank adapters (Hu et al. 2021).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Lora {
    /// Rank of an adapter.
    #[schemars(range(min = 1))]
    pub rank: u64,
    /// An adapter's output is scaled by alpha / rank.
    #[schemars(extend("exclusiveMinimum" = 0))]
    pub alpha: f64,
    /// Which projections, by the end of their names; none takes those of queries and values.
    pub targets: Vec<String>,
}

impl Default for Model {
    /// Defaults: the family of the presets, with sizes that train on a laptop.
    fn default() -> Self {
        Self {
            kind: ModelKind::MoeLm,
            preset: None,
            from: None,
            vocabulary: None,
            hidden: 256,
            layers: 4,
            heads: 4,
            kv_heads: None,
            intermediate: 1024,
            norm: Norm::LayerNorm,
            norm_eps: 1e-5,
            activation: Activation::Gelu,
            bias: true,
            position: Position::Rotary,
            rope_theta: 10_000.0,
            attention: Attention::default(),
            tied_head: false,
            dropout: 0.0,
            experts: Experts::default(),
            classes: None,
            lora: None,
            freeze_encoder: false,
        }
    }
}

impl Default for Attention {
    fn default() -> Self {
        Self { mask: MaskKind::Causal, window: 1024, block: 64, local: 4, global: 1 }
    }
}

impl Default for Experts {
    fn default() -> Self {
        Self { count: 8, top_k: 2, capacity: None, renormalise: true, shared: 0 }
    }
}

impl Default for Lora {
    fn default() -> Self {
        Self { rank: 8, alpha: 16.0, targets: vec![] }
    }
}

impl Model {
    /// Applies the sizes of a preset. Source: the table of the Ava guide, whose models have non-gated GELU experts,
    /// biases, LayerNorm and a vocabulary of 65 536.
    pub fn sized(self, preset: Preset) -> Self {
        let (hidden, layers, heads, intermediate, count, top_k) = match preset {
            Preset::Tiny => (384, 8, 6, 1536, 4, 2),
            Preset::Small => (512, 14, 8, 2048, 8, 2),
            Preset::Base => (768, 16, 12, 3072, 16, 2),
            Preset::Large => (1024, 24, 16, 4096, 32, 4),
        };
        let experts = Experts { count, top_k, ..self.experts };
        let (preset, vocabulary) = (Some(preset), Some(65_536));
        Self { preset, vocabulary, hidden, layers, heads, intermediate, experts, ..self }
    }
}
