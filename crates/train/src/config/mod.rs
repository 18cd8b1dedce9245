//! The configuration of a training run: one typed schema, read from YAML, flags over it, presets under it. Invariant:
//! what is resolved holds every key; an unknown key or an impossible value is an error that names all of them.

mod auto;
mod data;
mod error;
pub mod foreign;
mod initial;
mod model;
mod optimizer;
mod rules;
mod run;
pub mod schema;
mod translate;
pub mod yaml;

pub use auto::Auto;
pub use data::{BinType, Data, Document, Format, Masking};
pub use error::ConfigError;
pub use foreign::{Answer, counterpart};
pub use initial::Initial;
pub use model::{Activation, Attention, Experts, Lora, MaskKind, Model, ModelKind, Norm, Position, Preset};
pub use optimizer::{
    Decay, DecayShape, Loss, Optimizer, OptimizerKind, Precision, PrecisionKind, Scaling, Schedule,
    ScheduleKind, Unit, Warmup,
};
pub(crate) use run::PROCESS;
pub use run::{Batch, Device, Interval, Memory, Remat, RematPolicy, Run};
pub use translate::{Source, Translated, translate};

use crate::TrainError;
use ::data::bounded;
use ::data::printable::Place;
use runtime::{Observer, RuntimeError, Silent};
use schema::Wrong;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};
use yaml::Node;

/// A training run.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct TrainConfig {
    /// Which network is trained, from which weights, and which part of it.
    pub model: Model,
    /// What is trained on, and how it is read.
    pub data: Data,
    /// The update.
    pub optimizer: Optimizer,
    /// The learning rate over the steps.
    pub schedule: Schedule,
    /// What is minimised beside the cross-entropy.
    pub loss: Loss,
    /// Number formats.
    pub precision: Precision,
    /// The line, and what is given up to stay under it.
    pub memory: Memory,
    /// What a step holds.
    pub batch: Batch,
    /// How long, and what is kept.
    pub run: Run,
}

/// Larger than any configuration.
const LARGEST: u64 = 1 << 20;

impl TrainConfig {
    /// The configuration in a file, with `a.b=c` of the flags over it. The configuration of a model that `model.from` names
    /// and that is not on this machine is fetched from the hub, which `observer` sees.
    pub fn read(path: &Path, flags: &[String], observer: &mut dyn Observer) -> Result<Self, TrainError> {
        let text = bounded::read_text(path, LARGEST).map_err(RuntimeError::io(path))?;
        Self::parse_with(&text, &Place(path).to_string(), flags, observer)
    }

    /// The configuration in a text that is called `name`, with `a.b=c` of the flags over it.
    pub fn parse(text: &str, name: &str, flags: &[String]) -> Result<Self, TrainError> {
        Self::parse_with(text, name, flags, &mut Silent)
    }

    fn parse_with(
        text: &str,
        name: &str,
        flags: &[String],
        observer: &mut dyn Observer,
    ) -> Result<Self, TrainError> {
        let mut tree =
            yaml::parse(text).map_err(|error| ConfigError::Syntax { name: name.to_owned(), error })?;
        for flag in flags {
            let (path, value) = override_of(flag)?;
            tree.set(&path.split('.').collect::<Vec<_>>(), value);
        }
        let faults = schema::faults(&tree, &schema::schema());
        if !faults.is_empty() {
            return Err(ConfigError::Keys { name: name.to_owned(), faults }.into());
        }
        let config = resolve(&tree, name, observer)?;
        let broken = rules::broken(&config);
        match broken.is_empty() {
            true => Ok(config),
            false => Err(ConfigError::Rules { name: name.to_owned(), broken }.into()),
        }
    }

    /// Why the section `model` is not that of the model which `model.from` names; `None` where it is, or where nothing is
    /// named.
    pub fn contradiction(&self, observer: &mut dyn Observer) -> Result<Option<String>, TrainError> {
        let Some(from) = &self.model.from else { return Ok(None) };
        let initial = Initial::open(from, Some(self.model.kind), observer)?;
        let usual = usual(initial.kind(), None).model;
        initial.difference(&self.model, &usual).map_err(|e| unheld("the configuration", &e).into())
    }

    /// With values at keys, which replace what is there.
    pub fn with<'a>(
        &self,
        values: impl IntoIterator<Item = (&'a String, &'a serde_json::Value)>,
    ) -> Result<Self, TrainError> {
        let mut tree = Node::of(self)?;
        for (path, value) in values {
            tree.set(&path.split('.').collect::<Vec<_>>(), Node::of(value)?);
        }
        serde_json::from_value(tree.to_json()).map_err(|e| unheld("the configuration", &e).into())
    }

    /// Whether its keys go together.
    pub fn is_sound(&self) -> bool {
        rules::broken(self).is_empty()
    }

    /// The run's folder, where the command names none: run.output, or the name of the configuration in `path` with _run.
    pub fn folder(&self, path: &Path) -> PathBuf {
        let stem = path.file_stem().unwrap_or_default().to_string_lossy();
        self.run.output.as_ref().map_or_else(|| PathBuf::from(format!("{stem}_run")), PathBuf::from)
    }

    /// As YAML with every key, in the order of the schema.
    pub fn to_yaml(&self) -> Result<String, TrainError> {
        Ok(Node::of(self)?.to_yaml())
    }
}

/// `a.b=c` as a path and a value, typed as YAML types it.
fn override_of(flag: &str) -> Result<(&str, Node), TrainError> {
    let parts = flag.split_once('=').filter(|(path, _)| path.split('.').all(|key| !key.is_empty()));
    let Some((path, value)) = parts else {
        let why = "give a key and a value, such as optimizer.lr=1e-4".to_owned();
        return Err(ConfigError::Set { flag: flag.to_owned(), why }.into());
    };
    let value =
        yaml::parse(&format!("value: {value}")).ok().and_then(|tree| tree.get("value").cloned()).ok_or_else(
            || ConfigError::Set { flag: flag.to_owned(), why: format!("`{value}` is no value in YAML") },
        )?;
    Ok((path, unplaced(value)))
}

/// A value that a configuration cannot hold.
fn unheld(name: &str, error: &serde_json::Error) -> ConfigError {
    ConfigError::Value { name: name.to_owned(), why: error.to_string() }
}

/// Without lines, which would be of no file.
fn unplaced(node: Node) -> Node {
    let kind = match node.kind {
        yaml::Kind::Map(entries) => {
            yaml::Kind::Map(entries.into_iter().map(|(k, v)| (k, unplaced(v))).collect())
        }
        other => other,
    };
    Node { kind, line: 0 }
}

/// The stated keys over the keys of the model that `model.from` names, over the defaults of the kind of model.
fn resolve(tree: &Node, name: &str, observer: &mut dyn Observer) -> Result<TrainConfig, TrainError> {
    let bad = |e: serde_json::Error| TrainError::from(unheld(name, &e));
    let written = |path: &str| tree.at(path).map(Node::to_json).unwrap_or_default();
    let kind: Option<ModelKind> = serde_json::from_value(written("model.kind")).map_err(bad)?;
    let preset: Option<Preset> = serde_json::from_value(written("model.preset")).map_err(bad)?;
    let from: Option<String> = serde_json::from_value(written("model.from")).map_err(bad)?;
    let mut stated = tree.to_json();
    let Some(from) = from else {
        let mut resolved =
            serde_json::to_value(usual(kind.unwrap_or(ModelKind::MoeLm), preset)).map_err(bad)?;
        overlay(&mut resolved, stated);
        return serde_json::from_value(resolved).map_err(bad);
    };
    if preset.is_some() {
        return Err(ConfigError::PresetAndModel { name: name.to_owned() }.into());
    }
    let initial = Initial::open(&from, kind, observer)?;
    let usual = usual(initial.kind(), None);
    let own = initial.keys(&usual.model).map_err(bad)?;
    let mut refused = vec![];
    for (key, value) in &own {
        let Some(node) = tree.at(&format!("model.{key}")) else { continue };
        let place = if node.line == 0 { "--set".to_owned() } else { format!("{name}, line {}", node.line) };
        let why = initial.contradiction(key, &node.to_json(), value);
        refused.extend(why.map(|why| format!("{place}: {why}")));
    }
    if !refused.is_empty() {
        return Err(ConfigError::Contradiction { keys: refused }.into());
    }
    let mut resolved = serde_json::to_value(usual).map_err(bad)?;
    for (key, value) in own {
        // Stated as null, a key is left to the initial model.
        place(&mut stated["model"], key, value.clone());
        place(&mut resolved["model"], key, value);
    }
    overlay(&mut resolved, stated);
    serde_json::from_value(resolved).map_err(bad)
}

/// Sets the value at a key with points.
fn place(section: &mut serde_json::Value, key: &str, value: serde_json::Value) {
    *key.split('.').fold(section, |section, key| &mut section[key]) = value;
}

fn overlay(under: &mut serde_json::Value, over: serde_json::Value) {
    match (under, over) {
        (serde_json::Value::Object(under), serde_json::Value::Object(over)) => {
            for (key, value) in over {
                overlay(under.entry(key).or_insert(serde_json::Value::Null), value);
            }
        }
        (under, over) => *under = over,
    }
}

/// What a kind of model takes where nothing is written.
fn usual(kind: ModelKind, preset: Option<Preset>) -> TrainConfig {
    let config = TrainConfig::default();
    let model = Model { kind, ..config.model };
    let model = preset.map_or(model.clone(), |preset| model.sized(preset));
    match kind {
        ModelKind::MoeLm => TrainConfig { model, ..config },
        // Touvron et al. 2023.
        ModelKind::DenseLm => {
            let (norm, activation) = (Norm::RmsNorm, Activation::Swiglu);
            TrainConfig { model: Model { norm, activation, bias: false, intermediate: 768, ..model }, ..config }
        }
        // Lin et al. 2023, appendix A: Adam with betas 0.9 and 0.98, weight decay 0.01.
        ModelKind::Esm2 | ModelKind::DnabertS => {
            let attention = Attention { mask: MaskKind::Full, ..model.attention };
            let position = if kind == ModelKind::Esm2 { Position::Rotary } else { Position::Alibi };
            let optimizer = Optimizer { lr: 1e-4, betas: [0.9, 0.98], weight_decay: 0.01, ..config.optimizer };
            TrainConfig { model: Model { attention, position, ..model }, optimizer, ..config }
        }
        ModelKind::Head => {
            let model = Model { classes: Some(2), hidden: 512, dropout: 0.5, ..model };
            let optimizer = Optimizer { lr: 1e-3, weight_decay: 0.01, ..config.optimizer };
            let batch = Batch { tokens: 256, ..config.batch };
            let data = Data { format: Format::Embeddings, ..config.data };
            TrainConfig { model, optimizer, batch, data, ..config }
        }
    }
}

#[cfg(test)]
mod tests;
