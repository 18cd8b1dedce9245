//! The section `model` of the configuration: the architecture, the initial weights and the parameters to train.
//! Invariant: plain data; rules on combinations of keys are in `rules`.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The model and which part of it is trained.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct ModelSection {
    /// Model family: moe_lm (default) and dense_lm are decoder language models, esm2 and dnabert_s are
    /// encoders, head is VirNucPro's classifier over embeddings, and caller is a classifier of DNA windows over
    /// the codons of all six reading frames.
    pub kind: ModelKind,
    /// Named size of a moe_lm: tiny, small, base or large; keys that are also given take precedence. null
    /// (default) is no preset. Refused together with model.from.
    pub preset: Option<ModelPreset>,
    /// Initial model: a folder, a weight file or a hub id; null (default) starts from random weights. The
    /// initial model determines the architecture (kind, sizes, norm, attention, experts): keys that are not
    /// given take its values, and a different value is refused.
    pub from: Option<String>,
    /// Number of entries of the embedding table; null (default) is the number of model.from, or else of the
    /// tokenizer.
    #[schemars(range(min = 2, max = 16777216))]
    pub vocabulary: Option<u64>,
    /// Width of the hidden states, a multiple of model.heads (default 256; 512 for a head, 192 for a caller).
    #[schemars(range(min = 1, max = 1048576))]
    pub hidden: u64,
    /// Number of transformer blocks (default 4).
    #[schemars(range(min = 1, max = 1024))]
    pub layers: u64,
    /// Number of query heads (default 4; 3 for a caller).
    #[schemars(range(min = 1, max = 128))]
    pub heads: u64,
    /// Number of key and value heads, a divisor of model.heads; null (default) is the number of model.from,
    /// or else one for each query head.
    #[schemars(range(min = 1, max = 128))]
    pub kv_heads: Option<u64>,
    /// Inner width of the feed-forward network, or of each expert (default 1024; 768 for dense_lm, 384 for a caller).
    #[schemars(range(min = 1, max = 16777216))]
    pub intermediate: u64,
    /// Normalisation layer: layer_norm (default) or rms_norm (default of dense_lm).
    pub norm: NormChoice,
    /// Epsilon of the normalisation, which is added to the variance (default 1e-5).
    #[schemars(extend("exclusiveMinimum" = 0, "exclusiveMaximum" = 1))]
    pub norm_eps: f64,
    /// Activation of the feed-forward network: gelu (default) or swiglu (default of dense_lm).
    pub activation: ActivationChoice,
    /// Whether linear layers and the router have biases (default true; false for dense_lm).
    pub bias: bool,
    /// Position encoding: rotary (default) or alibi (default of dnabert_s).
    pub position: PositionChoice,
    /// Base of the rotary angles (default 10000).
    #[schemars(range(min = 1, max = 1000000000000_u64))]
    pub rope_theta: f64,
    /// Attention mask.
    pub attention: AttentionSection,
    /// Whether the output layer shares the weights of the embedding table (default false).
    pub tied_head: bool,
    /// Dropout probability in training, from 0 to below 1 (default 0; 0.5 for a head).
    #[schemars(range(min = 0), extend("exclusiveMaximum" = 1))]
    pub dropout: f64,
    /// Experts of a moe_lm.
    pub experts: ExpertsSection,
    /// Number of classes of a classifier over the mean of an encoder's hidden states, or of a head (default
    /// 2). null takes the number of a classifier in model.from; without it, an encoder is trained as a masked
    /// language model.
    #[schemars(range(min = 2, max = 16777216))]
    pub classes: Option<u64>,
    /// Names of the classes, in the order of their numbers, such as [host, virus]; config.json, evaluate and classify name the
    /// classes by them. If empty (default), they are the words in data.labels in alphabetical order, or without words the
    /// numbers from 0. For a caller the names are in model.tasks.
    pub class_names: Vec<String>,
    /// Tasks of a caller, which are trained together, the most important one first: the validation loss is that
    /// of the first task. If empty (default), a caller is pre-trained to predict masked codons.
    pub tasks: Vec<TaskSection>,
    /// LoRA: low-rank adapters, which are trained instead of the weights that they adapt; null trains all
    /// weights. Only for esm2 and dnabert_s, and requires model.from.
    pub lora: Option<LoraSection>,
    /// Whether a classifier over an encoder trains only its classification layer and not the encoder (default
    /// false).
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
    /// A classifier of DNA windows over the codons of all six reading frames.
    Caller,
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
            Self::Caller => "caller",
        }
    }
}

/// Named model sizes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ModelPreset {
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
pub enum NormChoice {
    /// Layer normalisation (Ba, Kiros and Hinton 2016), with bias.
    LayerNorm,
    /// Root-mean-square normalisation (Zhang and Sennrich 2019).
    RmsNorm,
}

/// Activations of the feed-forward network.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ActivationChoice {
    /// Exact GELU between two linear layers.
    Gelu,
    /// SwiGLU: a SiLU gate over three linear layers (Shazeer 2020).
    Swiglu,
}

/// Position encodings.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum PositionChoice {
    /// Rotary position embedding of queries and keys (Su et al. 2021).
    Rotary,
    /// Attention with linear biases by distance (Press et al. 2021).
    Alibi,
}

/// The attention mask.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct AttentionSection {
    /// Attention mask: causal (default), window or block_sparse for language models, and full for encoders.
    pub mask: MaskKind,
    /// With mask window, the number of keys that a query attends to, including its own position (default
    /// 1024).
    #[schemars(range(min = 1, max = 2147483647))]
    pub window: u64,
    /// With mask block_sparse, the tokens of a block (default 64).
    #[schemars(range(min = 1, max = 2147483647))]
    pub block: u64,
    /// With mask block_sparse, the number of nearest blocks that a query attends to, including its own
    /// (default 4).
    #[schemars(range(min = 1, max = 2147483647))]
    pub local: u64,
    /// With mask block_sparse, the number of blocks at the start of a sequence that every query attends to
    /// (default 1).
    #[schemars(range(min = 0, max = 2147483647))]
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
pub struct ExpertsSection {
    /// Number of experts in a layer (default 8).
    #[schemars(range(min = 1, max = 1024))]
    pub count: u64,
    /// Number of experts that a token is routed to, at most model.experts.count (default 2).
    #[schemars(range(min = 1, max = 1024))]
    pub top_k: u64,
    /// Capacity factor: maximum number of tokens of an expert as a multiple of the mean, up to 1000, rounded
    /// to thousandths. null (default) drops no tokens.
    #[schemars(range(min = 0.001, max = 1000))]
    pub capacity: Option<f64>,
    /// Whether the weights of a token's experts are scaled to sum to 1 (default true).
    pub renormalise: bool,
    /// Number of shared experts, which every token passes through in addition (default 0).
    #[schemars(range(min = 0, max = 1024))]
    pub shared: u64,
}

/// A classification of DNA windows.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct TaskSection {
    /// Name of the task, and of the column of the table data.labels with the class of each record: letters, digits
    /// and _. Required.
    pub name: String,
    /// Names of the classes, at least two, as they are written in the column; a record without a class has ? there.
    /// Required.
    pub classes: Vec<String>,
    /// Factor of the task's loss (default 1).
    #[schemars(extend("exclusiveMinimum" = 0, "maximum" = 1000000))]
    pub weight: f64,
}

/// Low-rank adapters (Hu et al. 2021).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct LoraSection {
    /// Rank of an adapter (default 8).
    #[schemars(range(min = 1, max = 1048576))]
    pub rank: u64,
    /// Scale of an adapter: its output is multiplied by alpha / rank (default 16).
    #[schemars(extend("exclusiveMinimum" = 0, "maximum" = 1000000))]
    pub alpha: f64,
    /// Linear layers to adapt, by the ends of their names; if empty (default), the query and value
    /// projections.
    pub targets: Vec<String>,
}

impl Default for ModelSection {
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
            norm: NormChoice::LayerNorm,
            norm_eps: 1e-5,
            activation: ActivationChoice::Gelu,
            bias: true,
            position: PositionChoice::Rotary,
            rope_theta: 10_000.0,
            attention: AttentionSection::default(),
            tied_head: false,
            dropout: 0.0,
            experts: ExpertsSection::default(),
            classes: None,
            class_names: vec![],
            tasks: vec![],
            lora: None,
            freeze_encoder: false,
        }
    }
}

impl Default for AttentionSection {
    fn default() -> Self {
        Self { mask: MaskKind::Causal, window: 1024, block: 64, local: 4, global: 1 }
    }
}

impl Default for ExpertsSection {
    fn default() -> Self {
        Self { count: 8, top_k: 2, capacity: None, renormalise: true, shared: 0 }
    }
}

impl Default for TaskSection {
    fn default() -> Self {
        Self { name: String::new(), classes: vec![], weight: 1.0 }
    }
}

impl Default for LoraSection {
    fn default() -> Self {
        Self { rank: 8, alpha: 16.0, targets: vec![] }
    }
}

impl ModelSection {
    /// Applies the sizes of a preset. Source: the table of the Ava guide, whose models have non-gated GELU experts,
    /// biases, LayerNorm and a vocabulary of 65 536.
    pub fn sized(self, preset: ModelPreset) -> Self {
        let (hidden, layers, heads, intermediate, count, top_k) = match preset {
            ModelPreset::Tiny => (384, 8, 6, 1536, 4, 2),
            ModelPreset::Small => (512, 14, 8, 2048, 8, 2),
            ModelPreset::Base => (768, 16, 12, 3072, 16, 2),
            ModelPreset::Large => (1024, 24, 16, 4096, 32, 4),
        };
        let experts = ExpertsSection { count, top_k, ..self.experts };
        let preset = Some(preset);
        let vocabulary = Some(65_536);
        Self { preset, vocabulary, hidden, layers, heads, intermediate, experts, ..self }
    }
}
