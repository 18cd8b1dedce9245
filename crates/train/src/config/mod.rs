//! The configuration of a training run: one typed schema. Values come from the YAML file, are overridden by flags and
//! completed by presets and defaults. Invariant: a resolved configuration has a value for every key; unknown keys and
//! invalid values give an error that lists all of them.

mod auto;
mod data;
mod effect;
mod error;
pub mod foreign;
mod initial;
mod model;
mod optimizer;
mod rules;
mod run;
pub mod schema;
mod translate;
mod unread;
pub mod yaml;

pub use auto::Auto;
pub use data::{
    BinType, CropLevelSection, CropsSection, DataFormat, DataSection, DocumentUnit, MaskUnit, MaskingSection,
};
pub use error::TrainConfigError;
pub use foreign::{Answer, counterpart};
pub use initial::Initial;
pub use model::{
    ActivationChoice, AttentionSection, ExpertsSection, LoraSection, MaskKind, ModelKind, ModelPreset,
    ModelSection, NormChoice, PositionChoice, TaskSection,
};
pub use optimizer::{
    Decay, DecayShape, DistillationSection, LossSection, OptimizerKind, OptimizerSection, PrecisionSection,
    Scaling, ScheduleKind, ScheduleSection, ScheduleUnit, Warmup,
};
pub(crate) use rules::halves;
pub(crate) use run::PROCESS;
pub use run::training_on;
pub use run::{
    BatchSection, DeviceChoice, DynamicSection, Interval, MemorySection, Offload, OffloadPart, OffloadPolicy,
    OffloadTo, Profile, Remat, RematPolicy, RunSection,
};
pub use translate::{TrainerFormat, Translated, translate};

use crate::TrainError;
use crate::checkpoint::CHECKPOINTS;
use plimsoll_data::bounded;
use plimsoll_data::printable::{EscapedPath, Name};
use plimsoll_runtime::{Observer, RuntimeError, Silent, metrics};
use plimsoll_setting::Setting;
use schema::Wrong;
use schemars::JsonSchema;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};
use yaml::YamlNode;

/// The configuration of a training run.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct TrainConfig {
    /// The model, its initial weights, and which parameters are trained.
    pub model: ModelSection,
    /// Training data and how it is read.
    pub data: DataSection,
    /// The optimizer.
    pub optimizer: OptimizerSection,
    /// The learning-rate schedule.
    pub schedule: ScheduleSection,
    /// Loss terms in addition to the cross-entropy.
    pub loss: LossSection,
    /// Trained models whose predictions a caller learns besides the classes of the records.
    pub distillation: DistillationSection,
    /// Floating-point formats.
    pub precision: PrecisionSection,
    /// The memory budget, and what may be recomputed to stay within it.
    pub memory: MemorySection,
    /// Size of an optimizer step and of its micro-steps.
    pub batch: BatchSection,
    /// Length of the run, evaluation, checkpoints and logging.
    pub run: RunSection,
}

/// Name of the configuration inside the folder of a run.
pub(crate) const CONFIG: &str = "config.yaml";

/// Name of the record inside the folder of a run.
const RECORD: &str = "run.json";

/// Upper limit in bytes for the size of a configuration file.
const LARGEST: u64 = 1 << 20;

impl TrainConfig {
    /// Reads the configuration file at `path`, with the `a.b=c` overrides of `flags` applied. If `model.from` names a
    /// model that is not on this machine, its `config.json` is downloaded from the hub and the download is reported to
    /// `observer`.
    pub fn read(path: &Path, flags: &[String], observer: &mut dyn Observer) -> Result<Self, TrainError> {
        let text = bounded::read_text(path, LARGEST).map_err(RuntimeError::io(path))?;
        Self::parse_with(&text, &EscapedPath(path).to_string(), flags, observer)
    }

    /// Reads the value of one key from the configuration file at `path`; `None` if the file does not state it, or as null.
    pub(crate) fn stated<T: DeserializeOwned>(path: &Path, key: &str) -> Result<Option<T>, TrainError> {
        let text = bounded::read_text(path, LARGEST).map_err(RuntimeError::io(path))?;
        let name = EscapedPath(path).to_string();
        let tree =
            yaml::parse(&text).map_err(|error| TrainConfigError::Syntax { name: name.clone(), error })?;
        stated_value(&tree, key).map_err(|error| unheld(&name, &error).into())
    }

    /// Parses a configuration from text, with the `a.b=c` overrides of `flags` applied. `name` stands for the file in
    /// error messages.
    pub fn parse(text: &str, name: &str, flags: &[String]) -> Result<Self, TrainError> {
        Self::parse_with(text, name, flags, &mut Silent)
    }

    pub(crate) fn parse_with(
        text: &str,
        name: &str,
        flags: &[String],
        observer: &mut dyn Observer,
    ) -> Result<Self, TrainError> {
        let mut tree = yaml::parse(text).map_err(|error| {
            of_trainer(text, name).unwrap_or_else(|| TrainConfigError::Syntax { name: name.to_owned(), error })
        })?;
        // A file with a key of this program is one of this program, with mistakes that are named one by one.
        let is_foreign = schema::faults(&tree, &schema::schema()).len() >= translate::count_leaves(&tree);
        for flag in flags {
            let (path, value) = override_of(flag)?;
            tree.set(&path.split('.').collect::<Vec<_>>(), value);
        }
        let faults = schema::faults(&tree, &schema::schema());
        if !faults.is_empty()
            && is_foreign
            && let Some(error) = of_trainer(text, name)
        {
            return Err(error.into());
        }
        if !faults.is_empty() {
            return Err(TrainConfigError::Keys { name: name.to_owned(), faults }.into());
        }
        let config = resolve(&tree, name, observer)?;
        let broken = rules::broken(&config);
        if broken.is_empty() {
            Ok(config)
        } else {
            Err(TrainConfigError::Rules { name: name.to_owned(), broken }.into())
        }
    }

    /// Explains why the section `model` differs from the model named by `model.from`; `None` if it agrees, or if
    /// `model.from` is null.
    pub fn contradiction(&self, observer: &mut dyn Observer) -> Result<Option<String>, TrainError> {
        let Some(from) = &self.model.from else { return Ok(None) };
        let initial = Initial::open(from, Some(self.model.kind), observer)?;
        let usual = usual(initial.kind(), None).model;
        initial.difference(&self.model, &usual).map_err(|e| unheld("the configuration", &e).into())
    }

    /// Returns the configuration with the values at the given dotted keys replaced.
    pub fn with<'a>(
        &self,
        values: impl IntoIterator<Item = (&'a String, &'a serde_json::Value)>,
    ) -> Result<Self, TrainError> {
        let mut tree = YamlNode::of(self)?;
        for (path, value) in values {
            tree.set(&path.split('.').collect::<Vec<_>>(), YamlNode::of(value)?);
        }
        serde_json::from_value(tree.to_json()).map_err(|e| unheld("the configuration", &e).into())
    }

    /// Whether the configuration satisfies all rules on combinations of keys.
    pub fn is_sound(&self) -> bool {
        rules::broken(self).is_empty()
    }

    /// Returns the run's folder for a command line that names none: the folder of `path` if that is the config.yaml of a run,
    /// otherwise `run.output`, or the file stem of `path` followed by `_run`.
    pub fn folder(&self, path: &Path) -> PathBuf {
        if let Some(run) = run_of(path) {
            return run;
        }
        let stem = path.file_stem().unwrap_or_default().to_string_lossy();
        self.run.output.as_ref().map_or_else(|| PathBuf::from(format!("{stem}_run")), PathBuf::from)
    }

    /// Formats the configuration as YAML with every key, in the order of the schema.
    pub fn to_yaml(&self) -> Result<String, TrainError> {
        Ok(YamlNode::of(self)?.to_yaml())
    }
}

/// The error of a configuration file of another trainer; `None` for other files.
fn of_trainer(text: &str, name: &str) -> Option<TrainConfigError> {
    let source = translate::trainer_of(text)?;
    Some(TrainConfigError::OfTrainer { name: name.to_owned(), trainer: source.trainer() })
}

/// The folder of the run that wrote the configuration file at `path`; `None` for other files.
fn run_of(path: &Path) -> Option<PathBuf> {
    let folder =
        path.parent().map(|folder| if folder.as_os_str().is_empty() { Path::new(".") } else { folder })?;
    let is_run = path.file_name().is_some_and(|name| name == CONFIG)
        && folder.join(RECORD).is_file()
        && (folder.join(CHECKPOINTS).is_dir() || folder.join(metrics::FILE).is_file());
    is_run.then(|| folder.to_owned())
}

/// Splits `a.b=c` into the path and the value, which is typed by the rules of YAML.
fn override_of(text: &str) -> Result<(&str, YamlNode), TrainError> {
    let parts = text.split_once('=').filter(|(path, _)| path.split('.').all(|key| !key.is_empty()));
    let Some((path, value)) = parts else {
        let why = "give a key and a value, such as optimizer.lr=1e-4".to_owned();
        return Err(TrainConfigError::Set { text: text.to_owned(), why }.into());
    };
    match yaml::parse(&format!("value: {value}")).map(|tree| tree.kind) {
        // One value: a line break must not add keys beside it, which would be dropped.
        Ok(yaml::NodeKind::Map(mut entries)) if entries.len() == 1 => {
            let (_, node) = entries.remove(0);
            Ok((path, unplaced(node)))
        }
        Ok(_) | Err(_) => {
            let why = format!("`{}` is not a YAML value", Name(value));
            Err(TrainConfigError::Set { text: text.to_owned(), why }.into())
        }
    }
}

/// The error for a value that the configuration types cannot represent.
fn unheld(name: &str, error: &serde_json::Error) -> TrainConfigError {
    TrainConfigError::Value { name: name.to_owned(), why: error.to_string() }
}

/// Sets all line numbers to 0: the value comes from a flag, so its lines would refer to no file.
fn unplaced(node: YamlNode) -> YamlNode {
    let kind = match node.kind {
        yaml::NodeKind::Map(entries) => {
            yaml::NodeKind::Map(entries.into_iter().map(|(k, v)| (k, unplaced(v))).collect())
        }
        other => other,
    };
    YamlNode { kind, line: 0 }
}

/// The value of a key in a tree; `None` if the tree does not have the key, or as null.
fn stated_value<T: DeserializeOwned>(tree: &YamlNode, path: &str) -> Result<Option<T>, serde_json::Error> {
    serde_json::from_value(tree.at(path).map(YamlNode::to_json).unwrap_or_default())
}

/// Merges three layers of keys: the stated keys take precedence over the keys determined by the model of `model.from`,
/// and those over the defaults of the model's kind.
fn resolve(tree: &YamlNode, name: &str, observer: &mut dyn Observer) -> Result<TrainConfig, TrainError> {
    let bad = |e: serde_json::Error| TrainError::from(unheld(name, &e));
    let kind: Option<ModelKind> = stated_value(tree, "model.kind").map_err(bad)?;
    let preset: Option<ModelPreset> = stated_value(tree, "model.preset").map_err(bad)?;
    let from: Option<String> = stated_value(tree, "model.from").map_err(bad)?;
    let mut stated = tree.to_json();
    let names = stated["model"]["class_names"].as_array().map_or(0, Vec::len);
    if names > 0 && stated["model"]["classes"].is_null() {
        stated["model"]["classes"] = names.into();
    }
    let Some(from) = from else {
        let mut resolved =
            serde_json::to_value(usual(kind.unwrap_or(ModelKind::MoeLm), preset)).map_err(bad)?;
        overlay(&mut resolved, stated);
        return serde_json::from_value(resolved).map_err(bad);
    };
    if preset.is_some() {
        return Err(TrainConfigError::PresetAndModel { name: name.to_owned() }.into());
    }
    let initial = Initial::open(&from, kind, observer)?;
    let usual = usual(initial.kind(), None);
    let own = initial.keys(&usual.model).map_err(bad)?;
    let mut refused = vec![];
    for (key, value) in &own {
        let Some(node) = tree.at(&format!("model.{key}")) else { continue };
        let place =
            if node.line == 0 { Setting::Overrides.to_string() } else { format!("{name}, line {}", node.line) };
        let why = initial.contradiction(key, &node.to_json(), value);
        refused.extend(why.map(|why| format!("{place}: {why}")));
    }
    if !refused.is_empty() {
        return Err(TrainConfigError::Contradiction { keys: refused }.into());
    }
    let mut resolved = serde_json::to_value(usual).map_err(bad)?;
    for (key, value) in own {
        // A key that is stated as null is left to the initial model, so the stated tree must not overwrite it with null
        // below.
        place(&mut stated["model"], key, value.clone());
        place(&mut resolved["model"], key, value);
    }
    overlay(&mut resolved, stated);
    serde_json::from_value(resolved).map_err(bad)
}

/// Sets the value at a dotted key.
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

/// Returns the default configuration for a kind of model.
fn usual(kind: ModelKind, preset: Option<ModelPreset>) -> TrainConfig {
    let config = TrainConfig::default();
    let model = ModelSection { kind, ..config.model };
    let model = preset.map_or(model.clone(), |preset| model.sized(preset));
    match kind {
        ModelKind::MoeLm => TrainConfig { model, ..config },
        // Touvron et al. 2023.
        ModelKind::DenseLm => {
            let norm = NormChoice::RmsNorm;
            let activation = ActivationChoice::Swiglu;
            TrainConfig {
                model: ModelSection { norm, activation, bias: false, intermediate: 768, ..model },
                ..config
            }
        }
        // Lin et al. 2023, appendix A: Adam with betas 0.9 and 0.98, weight decay 0.01.
        ModelKind::Esm2 | ModelKind::DnabertS => {
            let attention = AttentionSection { mask: MaskKind::Full, ..model.attention };
            let position = if kind == ModelKind::Esm2 { PositionChoice::Rotary } else { PositionChoice::Alibi };
            let optimizer =
                OptimizerSection { lr: 1e-4, betas: [0.9, 0.98], weight_decay: 0.01, ..config.optimizer };
            TrainConfig { model: ModelSection { attention, position, ..model }, optimizer, ..config }
        }
        ModelKind::Caller => {
            let attention = AttentionSection { mask: MaskKind::Full, ..model.attention };
            // The sizes of the built-in caller.
            let sizes = ModelSection { hidden: 192, layers: 4, heads: 3, intermediate: 384, ..model };
            let norm = NormChoice::RmsNorm;
            let activation = ActivationChoice::Swiglu;
            let model =
                ModelSection { norm, activation, bias: false, attention, vocabulary: Some(66), ..sizes };
            let optimizer = OptimizerSection { lr: 1e-3, weight_decay: 0.05, ..config.optimizer };
            let data = DataSection { format: DataFormat::Fasta, ..config.data };
            TrainConfig { model, optimizer, data, ..config }
        }
        ModelKind::Head => {
            let model = ModelSection { classes: Some(2), hidden: 512, dropout: 0.5, ..model };
            let optimizer = OptimizerSection { lr: 1e-3, weight_decay: 0.01, ..config.optimizer };
            let batch = BatchSection { tokens: 256, ..config.batch };
            let data = DataSection { format: DataFormat::Embeddings, ..config.data };
            TrainConfig { model, optimizer, batch, data, ..config }
        }
    }
}

#[cfg(test)]
mod tests;
