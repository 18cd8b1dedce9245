//! The model that `model.from` names: which keys of the section `model` it fixes, and to which values. Invariant: a key
//! that the configuration states is either equal to the value of the initial model, or refused by name.

use super::yaml::Node;
use super::{Activation, Attention, Experts, MaskKind, Model, ModelKind, Norm, Position};
use crate::ConfigError;
use crate::TrainError;
use data::weights::{HubEnv, ModelPath, Weights};
use graph::ops::Mask;
use models::{DecoderConfig, Encoder, Mlp, Positions};
use runtime::fair_esm;
use runtime::hub::{Need, Trainable, config_text, trainable};
use runtime::{Observer, RuntimeError};
use serde_json::Value;
use std::path::Path;

/// Keys of the section `model` that describe the architecture; the others say how it is trained.
const ARCHITECTURE: [&str; 23] = [
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
];
/// The number of shared experts, and the classes of a model that is a classifier.
const FURTHER: [&str; 2] = ["experts.shared", "classes"];

/// The architecture of an initial model.
#[derive(Clone, Debug)]
pub struct Initial {
    /// The value of `model.from`.
    name: String,
    /// The section `model` with the keys of the architecture; the keys that do not apply have their defaults.
    model: Model,
    /// The keys of `model` whose values are read from the initial model.
    read: Vec<&'static str>,
}

impl Initial {
    /// Reads the architecture of `from`: a folder, a weight file or a hub id, whose `config.json` is fetched if needed.
    /// `kind` is `model.kind` where the configuration states it: a file of a head does not say what it holds.
    ///
    /// # Errors
    /// A model that cannot be found, or that is of no family that can be trained.
    pub fn open(from: &str, kind: Option<ModelKind>, observer: &mut dyn Observer) -> Result<Self, TrainError> {
        let mut initial = Self { name: from.to_owned(), model: Model::default(), read: vec![] };
        if kind == Some(ModelKind::Head) {
            initial.head(&Weights::open(Path::new(from))?)?;
            return Ok(initial);
        }
        let place = trainable(from, Need::Config, &HubEnv::from_process(), observer)?;
        if let ModelPath::WeightFile(file) = &place
            && !place.config().exists()
            && !fair_esm::is_checkpoint(file)?
        {
            return Err(ConfigError::NoConfig { from: from.to_owned() }.into());
        }
        let (path, text) = config_text(&place)?;
        match Trainable::from_json(&text).map_err(|source| RuntimeError::Config { path, source })? {
            Trainable::Decoder(decoder) => initial.decoder(&decoder),
            Trainable::Encoder(encoder) => initial.encoder(&encoder, &text),
        }
        Ok(initial)
    }

    /// `model.kind` of the initial model.
    pub fn kind(&self) -> ModelKind {
        self.model.kind
    }

    /// The keys that the initial model fixes, with their values, below `usual`, the defaults of its kind.
    pub fn keys(&self, usual: &Model) -> Result<Vec<(&'static str, Value)>, serde_json::Error> {
        let (read, usual) = (serde_json::to_value(&self.model)?, serde_json::to_value(usual)?);
        let value = |key: &'static str| match self.read.contains(&key) {
            true => Some((key, at(&read, key).clone())),
            // Whether an encoder classifies is decided by the run, unless the initial model is a classifier.
            false if key == "classes" => None,
            false => Some((key, at(&usual, key).clone())),
        };
        Ok(ARCHITECTURE.into_iter().chain(FURTHER).filter_map(value).collect())
    }

    /// Why a stated value of a key of `model` cannot be honoured; `None` where it is that of the initial model, or null,
    /// which leaves the key to the initial model.
    pub fn contradiction(&self, key: &str, stated: &Value, own: &Value) -> Option<String> {
        let equal = match (stated.as_f64(), own.as_f64()) {
            (Some(a), Some(b)) => a == b,
            (_, _) => stated == own || stated.is_null(),
        };
        if equal {
            return None;
        }
        let (stated, name) = (word(stated), &self.name);
        Some(match self.read.contains(&key) {
            true => format!(
                "`model.{key}` is {stated}, and {} in {name}, which model.from names; remove the key, or train from other \
                 weights",
                word(own)
            ),
            false => format!(
                "`model.{key}` is {stated}, and {name}, which model.from names, is a {} without such a setting; remove the \
                 key",
                self.model.kind.name()
            ),
        })
    }

    /// Why the section `model` of a configuration is not that of the initial model; `None` where it is.
    pub fn difference(&self, model: &Model, usual: &Model) -> Result<Option<String>, serde_json::Error> {
        let stated = serde_json::to_value(model)?;
        let keys = self.keys(usual)?;
        Ok(keys.iter().find_map(|(key, own)| self.contradiction(key, at(&stated, key), own)))
    }

    fn decoder(&mut self, c: &DecoderConfig) {
        let attention = Attention::default();
        let (mask, of_mask): (_, &[&'static str]) = match c.mask {
            Mask::Full => (Attention { mask: MaskKind::Full, ..attention }, &[]),
            Mask::Causal => (Attention { mask: MaskKind::Causal, ..attention }, &[]),
            Mask::Window(n) => {
                (Attention { mask: MaskKind::Window, window: n.into(), ..attention }, &["attention.window"])
            }
            Mask::BlockSparse { block, local, global } => (
                Attention {
                    mask: MaskKind::BlockSparse,
                    block: block.into(),
                    local: local.into(),
                    global: global.into(),
                    ..attention
                },
                &["attention.block", "attention.local", "attention.global"],
            ),
        };
        let experts = c.experts.as_ref().map(|e| Experts {
            count: e.experts,
            top_k: e.top_k,
            capacity: (e.capacity != 0).then(|| f64::from(e.capacity) / 1000.0),
            renormalise: e.renormalise,
            shared: e.shared,
        });
        let (position, rope_theta) = match c.positions {
            Positions::Rotary(theta) => (Position::Rotary, shortest(theta)),
            Positions::Alibi => (Position::Alibi, self.model.rope_theta),
        };
        self.read.extend([
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
            "attention.mask",
            "tied_head",
        ]);
        self.read.extend(of_mask);
        self.read.extend((position == Position::Rotary).then_some("rope_theta"));
        if experts.is_some() {
            self.read.extend([
                "experts.count",
                "experts.top_k",
                "experts.capacity",
                "experts.renormalise",
                "experts.shared",
            ]);
        }
        self.model = Model {
            kind: if experts.is_some() { ModelKind::MoeLm } else { ModelKind::DenseLm },
            vocabulary: Some(c.vocab_size),
            hidden: c.hidden_size,
            layers: c.layers,
            heads: c.heads,
            kv_heads: Some(c.kv_heads),
            intermediate: c.intermediate_size,
            norm: if c.norm == models::Norm::Rms { Norm::RmsNorm } else { Norm::LayerNorm },
            norm_eps: shortest(c.eps),
            activation: if c.mlp == Mlp::Gelu { Activation::Gelu } else { Activation::Swiglu },
            bias: c.bias,
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
        let classes = Encoder::classes(text).map(|names| names.len() as u64);
        self.read.extend(["kind", "vocabulary", "hidden", "layers", "heads", "intermediate", "norm_eps"]);
        self.read.extend(classes.map(|_| "classes"));
        self.model = Model {
            kind,
            vocabulary: Some(encoder.vocab_size()),
            hidden,
            layers,
            heads,
            intermediate,
            norm_eps: shortest(eps),
            classes,
            ..self.model.clone()
        };
    }

    /// The widths of a head are those of its two linear maps.
    fn head(&mut self, weights: &Weights) -> Result<(), TrainError> {
        let rows =
            |name: &str| Ok::<_, RuntimeError>(weights.tensor(name)?.shape().first().copied().unwrap_or(0));
        let (hidden, classes) = (rows("hidden_layer.weight")?, rows("output_layer.weight")?);
        self.read.extend(["kind", "hidden", "classes"]);
        self.model = Model { kind: ModelKind::Head, hidden, classes: Some(classes), ..self.model.clone() };
        Ok(())
    }
}

/// The value at a key with points.
pub(super) fn at<'a>(value: &'a Value, key: &str) -> &'a Value {
    key.split('.').fold(value, |value, key| &value[key])
}

/// The shortest decimal number that is read as this one, which is what a file says.
fn shortest(x: f32) -> f64 {
    x.to_string().parse().unwrap_or(f64::from(x))
}

/// A value as a configuration has it.
fn word(value: &Value) -> String {
    Node::of(value).map_or_else(|_| value.to_string(), |node| node.inline())
}
