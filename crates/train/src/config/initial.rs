//! The initial model named by `model.from`: the keys of the section `model` that it determines, and their values.
//! Invariant: a key stated in the configuration either equals the initial model's value or is rejected by name.

use super::yaml::YamlNode;
use super::{
    ActivationChoice, AttentionSection, ExpertsSection, MaskKind, ModelKind, ModelSection, NormChoice,
    PositionChoice,
};
use crate::TrainConfigError;
use crate::TrainError;
use plimsoll_data::weights::{HubEnv, ModelPath, Weights};
use plimsoll_graph::ops::Mask;
use plimsoll_models::{Biases, CallerConfig, DecoderConfig, Encoder, Mlp, ModelConfig, Positions};
use plimsoll_runtime::fair_esm;
use plimsoll_runtime::hub::{Need, config_text, trainable};
use plimsoll_runtime::{Observer, RuntimeError};
use serde_json::Value;
use std::path::Path;

/// Keys of the section `model` that describe the architecture; the remaining keys describe how the model is trained. The last
/// three are determined only by some models: the number of shared experts, and the number and names of the classes of a
/// classifier. Contradictions are reported in this order.
const ARCHITECTURE: [&str; 26] = [
    "kind",
    "vocabulary",
    "hidden",
    "layers",
    "heads",
    "kv_heads",
    "intermediate",
    "norm",
    "norm_eps",
    "activation",
    "bias",
    "position",
    "rope_theta",
    "attention.mask",
    "attention.window",
    "attention.block",
    "attention.local",
    "attention.global",
    "tied_head",
    "experts.count",
    "experts.top_k",
    "experts.capacity",
    "experts.renormalise",
    "experts.shared",
    "classes",
    "class_names",
];

/// Keys that every initial model but a head determines.
const TRANSFORMER: [&str; 7] = ["kind", "vocabulary", "hidden", "layers", "heads", "intermediate", "norm_eps"];

/// Further keys that a decoder determines.
const DECODER: [&str; 6] = ["kv_heads", "norm", "activation", "position", "attention.mask", "tied_head"];

/// Keys that a mixture of experts determines.
const EXPERTS: [&str; 5] =
    ["experts.count", "experts.top_k", "experts.capacity", "experts.renormalise", "experts.shared"];

/// Architecture of an initial model.
#[derive(Clone, Debug)]
pub struct Initial {
    /// Value of `model.from`.
    name: String,
    /// The section `model` with the architecture keys filled in; keys that do not apply to this model keep their
    /// defaults.
    model: ModelSection,
    /// Keys of the section `model` whose values were read from the initial model.
    read: Vec<&'static str>,
}

impl Initial {
    /// Reads the architecture of `from`: a folder, a weight file or a hub id, whose `config.json` is downloaded if it
    /// is not cached. `kind` is the value of `model.kind` if the configuration states it; a head requires it, because
    /// the weight file of a head does not identify its contents.
    ///
    /// # Errors
    /// A model that cannot be found, or a model of a family that cannot be trained.
    pub fn open(from: &str, kind: Option<ModelKind>, observer: &mut dyn Observer) -> Result<Self, TrainError> {
        let mut initial = Self { name: from.to_owned(), model: ModelSection::default(), read: vec![] };
        if kind == Some(ModelKind::Head) {
            initial.head(&Weights::open(Path::new(from))?)?;
            return Ok(initial);
        }
        let place = trainable(from, Need::Config, &HubEnv::from_process(), observer)?;
        if let ModelPath::WeightFile(file) = &place
            && !place.config().exists()
            && !fair_esm::is_checkpoint(file)?
        {
            return Err(TrainConfigError::NoConfig { from: from.to_owned() }.into());
        }
        let (path, text) = config_text(&place)?;
        match ModelConfig::from_json(&text).map_err(|source| RuntimeError::Config { path, source })? {
            ModelConfig::Decoder(decoder) => initial.decoder(&decoder),
            ModelConfig::Encoder(encoder) => initial.encoder(&encoder, &text),
            ModelConfig::Caller(caller) => initial.caller(&caller),
        }
        Ok(initial)
    }

    /// Returns the kind of the initial model.
    pub fn kind(&self) -> ModelKind {
        self.model.kind
    }

    /// Returns the keys that the initial model determines with their values; keys without a value in the initial model
    /// take it from `usual`, the defaults of the model's kind.
    pub fn keys(&self, usual: &ModelSection) -> Result<Vec<(&'static str, Value)>, serde_json::Error> {
        let read = serde_json::to_value(&self.model)?;
        let usual = serde_json::to_value(usual)?;
        let mut keys = vec![];
        for key in ARCHITECTURE {
            if self.read.contains(&key) {
                keys.push((key, at(&read, key).clone()));
            } else if key != "classes" && key != "class_names" {
                keys.push((key, at(&usual, key).clone()));
            }
            // A plain encoder does not determine `classes`: the run decides whether to train a classifier on top of it.
        }
        Ok(keys)
    }

    /// Explains why the stated value of a key of `model` cannot be honoured; `None` if the stated value equals the
    /// initial model's, or is null, which leaves the key to the initial model.
    pub fn contradiction(&self, key: &str, stated: &Value, own: &Value) -> Option<String> {
        let equal = match (stated.as_f64(), own.as_f64()) {
            (Some(a), Some(b)) => a == b,
            (_, _) => {
                stated == own || stated.is_null() || (key == "class_names" && *stated == Value::Array(vec![]))
            }
        };
        if equal {
            return None;
        }
        let stated = word(stated);
        let name = &self.name;
        Some(if self.read.contains(&key) {
            format!(
                "`model.{key}` is {stated}, and {} in {name}, the model of model.from; remove the key, or start \
                 from other weights",
                word(own)
            )
        } else {
            format!(
                "`model.{key}` is {stated}, and {name}, the model of model.from, is a {} without such a \
                 setting; remove the key",
                self.model.kind.name()
            )
        })
    }

    /// Explains why the section `model` of a configuration differs from the initial model; `None` if it agrees.
    pub fn difference(
        &self,
        model: &ModelSection,
        usual: &ModelSection,
    ) -> Result<Option<String>, serde_json::Error> {
        let stated = serde_json::to_value(model)?;
        let keys = self.keys(usual)?;
        Ok(keys.iter().find_map(|(key, own)| self.contradiction(key, at(&stated, key), own)))
    }

    fn decoder(&mut self, c: &DecoderConfig) {
        let attention = AttentionSection::default();
        let (mask, mask_keys): (_, &[&'static str]) = match c.mask {
            Mask::Full => (AttentionSection { mask: MaskKind::Full, ..attention }, &[]),
            Mask::Causal => (AttentionSection { mask: MaskKind::Causal, ..attention }, &[]),
            Mask::Window(n) => (
                AttentionSection { mask: MaskKind::Window, window: n.into(), ..attention },
                &["attention.window"],
            ),
            Mask::BlockSparse { block, local, global } => (
                AttentionSection {
                    mask: MaskKind::BlockSparse,
                    block: block.into(),
                    local: local.into(),
                    global: global.into(),
                    ..attention
                },
                &["attention.block", "attention.local", "attention.global"],
            ),
        };
        let experts = c.experts.as_ref().map(|e| ExpertsSection {
            count: e.experts,
            top_k: e.top_k,
            capacity: (e.capacity != 0).then(|| f64::from(e.capacity) / 1000.0),
            renormalise: e.renormalise,
            shared: e.shared,
        });
        let (position, rope_theta) = match c.positions {
            Positions::Rotary(theta) => (PositionChoice::Rotary, shortest(theta)),
            Positions::Alibi => (PositionChoice::Alibi, self.model.rope_theta),
        };
        self.read.extend(TRANSFORMER);
        self.read.extend(DECODER);
        // Where only some layers have biases, no value of the key describes them.
        self.read.extend((c.bias == Biases::all(c.bias.mlp)).then_some("bias"));
        self.read.extend(mask_keys);
        self.read.extend((position == PositionChoice::Rotary).then_some("rope_theta"));
        if experts.is_some() {
            self.read.extend(EXPERTS);
        }
        self.model = ModelSection {
            kind: if experts.is_some() { ModelKind::MoeLm } else { ModelKind::DenseLm },
            vocabulary: Some(c.vocab_size),
            hidden: c.hidden_size,
            layers: c.layers,
            heads: c.heads,
            kv_heads: Some(c.kv_heads),
            intermediate: c.intermediate_size,
            norm: if c.norm == plimsoll_models::Norm::Rms {
                NormChoice::RmsNorm
            } else {
                NormChoice::LayerNorm
            },
            norm_eps: shortest(c.eps),
            activation: if c.mlp == Mlp::Gelu { ActivationChoice::Gelu } else { ActivationChoice::Swiglu },
            bias: c.bias.mlp,
            position,
            rope_theta,
            attention: mask,
            tied_head: c.tied,
            experts: experts.unwrap_or_default(),
            ..self.model.clone()
        };
    }

    fn encoder(&mut self, encoder: &Encoder, text: &str) {
        let (kind, sizes) = match encoder {
            Encoder::Esm2(c) => (ModelKind::Esm2, [c.hidden_size, c.layers, c.heads, c.intermediate_size]),
            Encoder::DnabertS(c) => {
                (ModelKind::DnabertS, [c.hidden_size, c.layers, c.heads, c.intermediate_size])
            }
        };
        let eps = match encoder {
            Encoder::Esm2(c) => c.eps,
            Encoder::DnabertS(c) => c.eps,
        };
        let [hidden, layers, heads, intermediate] = sizes;
        let names = Encoder::classes(text);
        let classes = names.as_ref().map(|names| names.len() as u64);
        // Numbers are no names, nor are the names that transformers gives to classes without any.
        let names = names.filter(|names| {
            let mut numbered = names.iter().enumerate();
            numbered.any(|(number, name)| name.strip_prefix("LABEL_").unwrap_or(name) != number.to_string())
        });
        self.read.extend(names.as_ref().map(|_| "class_names"));
        self.read.extend(TRANSFORMER);
        self.read.extend(classes.map(|_| "classes"));
        self.model = ModelSection {
            kind,
            vocabulary: Some(encoder.vocab_size()),
            hidden,
            layers,
            heads,
            intermediate,
            norm_eps: shortest(eps),
            classes,
            class_names: names.unwrap_or_default(),
            ..self.model.clone()
        };
    }

    /// Reads the architecture of a caller. The tasks are those of the run: heads that the model has are kept.
    fn caller(&mut self, c: &CallerConfig) {
        self.read.extend(TRANSFORMER);
        self.read.push("rope_theta");
        self.model = ModelSection {
            kind: ModelKind::Caller,
            vocabulary: Some(c.vocab_size),
            hidden: c.hidden_size,
            layers: c.layers,
            heads: c.heads,
            intermediate: c.intermediate_size,
            norm_eps: shortest(c.eps),
            rope_theta: shortest(c.rope_theta),
            ..self.model.clone()
        };
    }

    /// Reads the widths of a head from the shapes of its two linear layers.
    fn head(&mut self, weights: &Weights) -> Result<(), TrainError> {
        let hidden = rows_of(weights, "hidden_layer.weight")?;
        let classes = rows_of(weights, "output_layer.weight")?;
        self.read.extend(["kind", "hidden", "classes"]);
        self.model =
            ModelSection { kind: ModelKind::Head, hidden, classes: Some(classes), ..self.model.clone() };
        Ok(())
    }
}

/// Number of rows of a tensor.
fn rows_of(weights: &Weights, name: &str) -> Result<u64, RuntimeError> {
    Ok(weights.tensor(name)?.shape().first().copied().unwrap_or(0))
}

/// The value at a dotted key.
pub(super) fn at<'a>(value: &'a Value, key: &str) -> &'a Value {
    key.split('.').fold(value, |value, key| &value[key])
}

/// Converts to the `f64` with the shortest decimal form that reads back as the same `f32`. A plain cast would turn
/// `1e-5` into `0.000009999999747378752`, which would then not equal the value stated in a file.
fn shortest(x: f32) -> f64 {
    x.to_string().parse().unwrap_or(f64::from(x))
}

/// Formats a value as in a configuration file.
pub(super) fn word(value: &Value) -> String {
    YamlNode::of(value).map_or_else(|_| value.to_string(), |node| node.inline())
}
