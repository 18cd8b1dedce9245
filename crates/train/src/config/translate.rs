//! Translation of configuration files of other trainers to this program's schema (`--from-config`). Invariant:
//! for every key of the file the result states the equivalent key, that the key is not needed, or that it is
//! not supported; the translated configuration is valid.

use super::foreign::{Answer, ForeignKey, ValueConversion, row, with_words};
use super::run::{DynamicSection, Profile};
use super::schema::{faults, properties, schema};
use super::yaml::{NodeKind, YamlNode, parse};
use super::{
    Interval, LARGEST, ModelPreset, ModelSection, Offload, OffloadPart, OffloadTo, TrainConfig, Wrong,
};
use crate::TrainConfigError;
use crate::TrainError;
use plimsoll_data::bounded;
use plimsoll_data::printable::EscapedPath;
use plimsoll_runtime::RuntimeError;
use plimsoll_setting::Setting;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::path::Path;

/// States of an optimizer and what it updates, as other trainers offload them.
const STATES: &[OffloadPart] = &[OffloadPart::Optimizer, OffloadPart::Masters];

const PARAMETERS: &[OffloadPart] = &[OffloadPart::Parameters];

/// A trainer whose configuration files can be translated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TrainerFormat {
    /// YAML file of the Ava guide.
    Ava,
    /// JSON file of DeepSpeed.
    DeepSpeed,
    /// Hugging Face's `TrainingArguments`, as JSON or YAML.
    HuggingFace,
    /// TOML file of torchtitan.
    Torchtitan,
}

impl TrainerFormat {
    /// All supported trainers.
    pub const ALL: [Self; 4] = [Self::Ava, Self::DeepSpeed, Self::HuggingFace, Self::Torchtitan];

    /// Name on the command line, for `--from-format`.
    pub fn word(self) -> &'static str {
        match self {
            Self::Ava => "ava",
            Self::DeepSpeed => "deepspeed",
            Self::HuggingFace => "huggingface",
            Self::Torchtitan => "torchtitan",
        }
    }

    /// Name in the table of equivalent keys, `foreign.toml`.
    pub(super) fn trainer(self) -> &'static str {
        match self {
            Self::Ava => "Ava guide",
            Self::DeepSpeed => "DeepSpeed",
            Self::HuggingFace => "Hugging Face Trainer",
            Self::Torchtitan => "torchtitan",
        }
    }

    /// Top-level keys by which a file is recognised: a file with any of them is taken for a file of this
    /// trainer. `recognise` determines the order in which trainers are tried.
    fn signs(self) -> &'static [&'static str] {
        match self {
            Self::DeepSpeed => &[
                "train_micro_batch_size_per_gpu",
                "train_batch_size",
                "zero_optimization",
                "zero_allow_untested_optimizer",
            ],
            Self::HuggingFace => &[
                "per_device_train_batch_size",
                "num_train_epochs",
                "lr_scheduler_type",
                "gradient_checkpointing",
                "save_strategy",
                "eval_strategy",
                "evaluation_strategy",
                "output_dir",
            ],
            Self::Torchtitan => &["job", "lr_scheduler", "activation_checkpoint", "parallelism"],
            Self::Ava => {
                &["model", "training", "memory", "deepspeed", "data", "gpu_memory", "dynamic_batching"]
            }
        }
    }
}

/// A translated configuration.
#[derive(Debug)]
pub struct Translated {
    /// The trainer of the original file.
    pub source: TrainerFormat,
    /// The configuration in this program's schema.
    pub config: TrainConfig,
    /// One sentence for each key that was translated, is not needed, or was added.
    pub became: Vec<String>,
    /// One sentence for each key that is not supported, and for each key that the user still has to set.
    pub missing: Vec<String>,
    /// Keys that the user has to set before the configuration can be trained: it has placeholders or defaults for them.
    pub placeholders: Vec<String>,
}

impl Translated {
    /// The configuration, if nothing is left to set.
    ///
    /// # Errors
    /// The configuration has placeholders.
    pub fn complete(self, path: &Path) -> Result<TrainConfig, TrainError> {
        if self.placeholders.is_empty() {
            Ok(self.config)
        } else {
            let name = EscapedPath(path).to_string();
            Err(TrainConfigError::Placeholders { name, missing: self.placeholders }.into())
        }
    }
}

/// Translates the configuration file at `path`. `flags` are settings `key=value` in this program's schema,
/// which override the translated values. If `source` is `None`, the trainer is recognised by the keys of the
/// file.
///
/// # Errors
/// The file cannot be read or parsed, its trainer is not recognised, or the translated values violate a rule of
/// the schema.
pub fn translate(
    path: &Path,
    source: Option<TrainerFormat>,
    flags: &[String],
) -> Result<Translated, TrainError> {
    let text = bounded::read_text(path, LARGEST).map_err(RuntimeError::io(path))?;
    translate_text(&text, &EscapedPath(path).to_string(), source, flags)
}

fn translate_text(
    text: &str,
    name: &str,
    source: Option<TrainerFormat>,
    flags: &[String],
) -> Result<Translated, TrainError> {
    let tree = tree(text).map_err(|why| TrainConfigError::Foreign { name: name.to_owned(), why })?;
    let is_ours = matches!(&tree.kind, NodeKind::Map(entries) if !entries.is_empty())
        && faults(&tree, &schema()).is_empty();
    if source.is_none() && is_ours {
        return Err(TrainConfigError::Ours { name: name.to_owned() }.into());
    }
    let Some(source) = source.or_else(|| recognise(&tree)) else {
        let known = TrainerFormat::ALL.map(TrainerFormat::word).join(", ");
        return Err(TrainConfigError::UnknownTrainer { name: name.to_owned(), known }.into());
    };
    let mut leaves = vec![];
    flatten(&tree, "", &mut leaves);
    let mut leaves: Vec<(String, &YamlNode, Option<&'static ForeignKey>)> = leaves
        .into_iter()
        .map(|(path, node)| (path.clone(), node, row(&path, Some(source.trainer()))))
        .collect();
    // Conversions read keys that other conversions set: a number of sequences needs `data.longest`, a fraction
    // of the learning rate needs `optimizer.lr`, a remat option needs `memory.remat`, a number of accumulation steps needs
    // the number of tokens of a micro-batch, which may itself come from a number of sequences, and of two keys for one
    // setting one takes precedence.
    leaves.sort_by_key(|(_, _, row)| match row.and_then(|row| row.convert) {
        Some(
            ValueConversion::Sequences
            | ValueConversion::OfLr
            | ValueConversion::RematOption
            | ValueConversion::WarmupShare
            | ValueConversion::Epochs,
        ) => 1,
        Some(ValueConversion::Accumulation | ValueConversion::Interval) => 2,
        Some(ValueConversion::Strategy | ValueConversion::MatmulPrecision) => 3,
        _ => 0,
    });
    // Keys that a flag sets are not reported as missing.
    let set: Vec<&str> = flags.iter().filter_map(|flag| flag.split_once('=')).map(|(key, _)| key).collect();
    let mut made = Translation::new(tree.clone())?;
    for (path, node, row) in leaves {
        made.take(&path, node, row)?;
    }
    let refused: Vec<String> = made
        .refused
        .iter()
        .filter(|(key, _)| !set.contains(&key.as_str()))
        .map(|(_, why)| why.clone())
        .collect();
    if !refused.is_empty() {
        return Err(TrainConfigError::Untranslatable { name: name.to_owned(), keys: refused }.into());
    }
    made.complete(source)?;
    let name = format!("{name}, translated");
    let mut config = match TrainConfig::parse(&made.tree.to_yaml(), &name, flags) {
        Err(TrainError::Config(TrainConfigError::Rules { broken, .. }))
            if made.has_dynamic() && broken.iter().any(|rule| rule.starts_with(DYNAMIC)) =>
        {
            made.drop_dynamic(&broken);
            TrainConfig::parse(&made.tree.to_yaml(), &name, flags)?
        }
        other => other?,
    };
    // Other trainers name all states as one, and masters exist only beside 16-bit parameters.
    if let Offload::Parts(parts) = &mut config.memory.offload
        && config.precision.kind.policy().masters.is_none()
        && !set.iter().any(|key| key.starts_with("memory.offload"))
    {
        parts.retain(|part| *part != OffloadPart::Masters);
    }
    let names_model = set.iter().any(|key| key.starts_with("model."));
    made.unset.retain(|(key, _)| !set.contains(key) && (*key != "model.from" || !names_model));
    let unset_keys = made.unset.iter().map(|(key, _)| (*key).to_owned()).collect();
    made.missing.extend(made.unset.iter().map(|(key, why)| format!("`{key}`: {why}")));
    if made.idle > 0 {
        made.became.push(format!(
            "{} further keys are null, false, 0 or empty, ask for nothing, and have no counterpart",
            made.idle
        ));
    }
    let placeholders = unset_keys;
    Ok(Translated { source, config, became: made.became, missing: made.missing, placeholders })
}

/// The section of micro-steps of several sizes.
const DYNAMIC: &str = "memory.dynamic";

/// The number of values in a tree.
pub(super) fn count_leaves(tree: &YamlNode) -> usize {
    let mut leaves = vec![];
    flatten(tree, "", &mut leaves);
    leaves.len()
}

/// The trainer that a configuration file in another program's format belongs to; `None` for files of this program and of no
/// known trainer. The sections `model`, `memory` and `data` alone do not tell: they are sections here, too.
pub(super) fn trainer_of(text: &str) -> Option<TrainerFormat> {
    let tree = tree(text).ok()?;
    let ours = schema();
    // Sections that only files of this program have; a mistake in another section does not make it a foreign file.
    let own = ["run", "batch", "schedule", "precision", "loss", "distillation"];
    if own.iter().any(|section| matches!(tree.get(section).map(|node| &node.kind), Some(NodeKind::Map(_)))) {
        return None;
    }
    let source = recognise(&tree)?;
    let ours = properties(&ours);
    let mut signs = source.signs().iter().filter(|key| tree.get(key).is_some());
    signs.any(|key| ours.is_none_or(|keys| !keys.contains_key(*key))).then_some(source)
}

/// Parses a text as JSON, TOML or YAML.
fn tree(text: &str) -> Result<YamlNode, String> {
    if text.trim_start().starts_with('{') {
        let value: Value = serde_json::from_str(text).map_err(|e| format!("not JSON: {e}"))?;
        return YamlNode::of(&value).map_err(|e| e.to_string());
    }
    // TOML first: a YAML mapping `key: value` is not valid TOML, so the formats cannot be confused.
    match toml::from_str::<Value>(text) {
        Ok(value) => YamlNode::of(&value).map_err(|e| e.to_string()),
        Err(_) => parse(text).map_err(|e| e.to_string()),
    }
}

/// Finds the trainer of a file by its top-level keys.
fn recognise(tree: &YamlNode) -> Option<TrainerFormat> {
    use TrainerFormat::{Ava, DeepSpeed, HuggingFace, Torchtitan};
    // Files of Ava have sections such as `model` and `training`, which files of other trainers have too, so Ava is
    // tried last.
    let mut sources = [Torchtitan, DeepSpeed, HuggingFace, Ava].into_iter();
    sources.find(|source| source.signs().iter().any(|key| tree.get(key).is_some()))
}

/// Appends all values of a tree with their dotted paths to `found`; lists are values.
fn flatten<'a>(node: &'a YamlNode, path: &str, found: &mut Vec<(String, &'a YamlNode)>) {
    match &node.kind {
        NodeKind::Map(entries) => {
            for (key, value) in entries {
                let path = if path.is_empty() { key.clone() } else { format!("{path}.{key}") };
                flatten(value, &path, found);
            }
        }
        _ => found.push((path.to_owned(), node)),
    }
}

/// A translation in progress.
struct Translation {
    /// The other trainer's file.
    theirs: YamlNode,
    /// The translated configuration.
    tree: YamlNode,
    /// Sentences on translated, unneeded and added keys ([`Translated::became`]).
    became: Vec<String>,
    /// Sentences on unsupported keys and on keys that are left to set ([`Translated::missing`]).
    missing: Vec<String>,
    /// Keys that the file does not set and that have no good default, each with the reason.
    unset: Vec<(&'static str, String)>,
    /// Values that must not be replaced by a default: the key that replaces them if a flag sets it, and the reason.
    refused: Vec<(String, String)>,
    /// Number of keys without a counterpart whose values ask for nothing.
    idle: u64,
    /// Whether the file turns changes of the micro-batch off.
    is_not_dynamic: bool,
    /// The size of micro-batches that changes of it replace.
    micro: Option<YamlNode>,
}

/// Translation of one key and its value.
enum KeyTranslation {
    /// Keys of this program's schema with values.
    Values(Vec<(String, Value)>),
    /// Not needed, with the reason.
    Idle(String),
    /// Not supported, with the reason.
    No(String),
    /// Read when all keys are known, together with another key.
    Later,
}

/// Whether a value asks for nothing: null, false, zero, or empty.
fn is_idle(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => true,
        Value::Bool(true) => false,
        Value::Number(number) => number.as_f64() == Some(0.0),
        Value::String(text) => text.is_empty(),
        Value::Array(values) => values.is_empty(),
        Value::Object(values) => values.is_empty(),
    }
}

/// Whether a value is `word` of the table of equivalent keys: equal numbers, or texts that differ in case alone.
fn is_same_word(word: &Value, value: &Value) -> bool {
    match (word.as_f64(), value.as_f64()) {
        (Some(a), Some(b)) => a == b,
        (_, _) => {
            let lower = value.as_str().map(str::to_lowercase);
            word == value || (lower.is_some() && word.as_str() == lower.as_deref())
        }
    }
}

/// The number that a value of another trainer is.
fn number_of(value: &Value) -> Result<f64, String> {
    value.as_f64().ok_or_else(|| "it is not a number".to_owned())
}

/// The positive whole number that a value of another trainer is.
fn count_of(value: &Value) -> Result<u64, String> {
    value.as_u64().filter(|n| *n > 0).ok_or_else(|| "it is not a whole number from 1 on".to_owned())
}

impl Translation {
    fn new(theirs: YamlNode) -> Result<Self, TrainError> {
        Ok(Self {
            theirs,
            tree: YamlNode::of(&json!({}))?,
            became: vec![],
            missing: vec![],
            unset: vec![],
            refused: vec![],
            idle: 0,
            is_not_dynamic: false,
            micro: None,
        })
    }

    /// Translates one key of the file, `row` being its row in the table of equivalent keys, and records the
    /// outcome.
    fn take(
        &mut self,
        path: &str,
        node: &YamlNode,
        row: Option<&'static ForeignKey>,
    ) -> Result<(), TrainError> {
        let written = format!("`{path}` {}", node.inline());
        let outcome = match row {
            None if is_idle(&node.to_json()) => {
                self.idle += 1;
                return Ok(());
            }
            None => KeyTranslation::No("plimsoll has no such setting".to_owned()),
            Some(row) => self.outcome(row, path, node),
        };
        match outcome {
            KeyTranslation::Later => {}
            KeyTranslation::Idle(why) => self.became.push(format!("{written}: not needed: {why}")),
            KeyTranslation::No(why) => match row.and_then(|row| row.must.as_ref()) {
                Some(key) => {
                    let choice = Setting::key(key.clone()).to("VALUE");
                    let text = format!("{written}: not supported: {why}; choose a value with {choice}");
                    self.refused.push((key.clone(), text));
                }
                None => self.missing.push(format!("{written}: not supported: {why}")),
            },
            KeyTranslation::Values(values) => {
                for (key, value) in values {
                    let node = YamlNode::of(&value)?;
                    // Checked alone, so that a fault is attributed to the original key.
                    let mut alone = YamlNode::of(&json!({}))?;
                    alone.set(&key.split('.').collect::<Vec<_>>(), node.clone());
                    match faults(&alone, &schema()).into_iter().next().map(|fault| fault.what) {
                        None => {
                            self.became.push(format!("{written}: `{key}` {}", node.inline()));
                            self.tree.set(&key.split('.').collect::<Vec<_>>(), node);
                        }
                        Some(Wrong::Value { allowed, .. }) => {
                            self.missing.push(format!("{written}: not supported: `{key}` is {allowed}"))
                        }
                        Some(Wrong::Unknown) => {
                            return Err(TrainConfigError::NoSuchKey { written, key }.into());
                        }
                    }
                }
            }
        }
        Ok(())
    }

    /// Translates a value by its row of the table.
    fn outcome(&mut self, row: &'static ForeignKey, path: &str, node: &YamlNode) -> KeyTranslation {
        let value = node.to_json();
        let auto = value.as_str() == Some("auto");
        let turns_off = matches!(row.convert, Some(ValueConversion::Dynamic)) && value == Value::Bool(false);
        self.is_not_dynamic |= turns_off;
        match row.answer() {
            Answer::Needless(why) => KeyTranslation::Idle(with_words(why)),
            _ if value.is_null() || row.idle.iter().any(|idle| is_same_word(idle, &value)) => {
                let why = row.idle_why.as_deref().unwrap_or("this value has no effect");
                KeyTranslation::Idle(why.to_owned())
            }
            Answer::No(_) if is_idle(&value) => KeyTranslation::Idle("this value has no effect".to_owned()),
            Answer::No(why) => KeyTranslation::No(with_words(why)),
            Answer::Key(..) if auto && row.words.is_none() => {
                KeyTranslation::Idle("with auto the value comes from another file".to_owned())
            }
            Answer::Key(ours, note) => match self.converted(row, path, ours, note, &value) {
                Ok(outcome) => outcome,
                Err(why) => KeyTranslation::No(why),
            },
        }
    }

    /// Translates a value to key `ours`, by the row's table of words or its conversion. `Err` has the reason
    /// why this value is not supported.
    fn converted(
        &mut self,
        row: &ForeignKey,
        path: &str,
        ours: &str,
        note: &str,
        value: &Value,
    ) -> Result<KeyTranslation, String> {
        let one = |value: Value| Ok(KeyTranslation::Values(vec![(ours.to_owned(), value)]));
        if let Some(words) = &row.words {
            let word = value.as_str().map(str::to_lowercase).unwrap_or_default();
            return match words.get(&word) {
                Some(word) => one(json!(word)),
                None => Err(format!("`{ours}` has no value for it; known are {}", listed(words.keys()))),
            };
        }
        if let Some(word) = &row.true_is {
            return match value {
                Value::Bool(true) => one(json!(word)),
                _ => Err(format!("true would be `{ours}` {word}; set it by hand")),
            };
        }
        let Some(convert) = row.convert else { return one(value.clone()) };
        match convert {
            ValueConversion::Gigabytes => Ok(self.limited(ours, format!("{}GB", number_of(value)?))),
            ValueConversion::Share => {
                let share = number_of(value)?;
                // A budget is a whole number of percent; less is the safe side.
                let percent = (if share <= 1.0 { share * 100.0 } else { share } + 1e-9).floor();
                Ok(self.limited(ours, format!("{percent}%")))
            }
            ValueConversion::Threshold => {
                let share = number_of(value)?;
                one(json!(if share > 1.0 { share / 100.0 } else { share }))
            }
            ValueConversion::Dynamic => match value {
                Value::String(_) => one(value.clone()),
                _ => one(json!("balanced")),
            },
            ValueConversion::WarmupShare => match number_of(value)? {
                _ if self.has("schedule.warmup") => {
                    Ok(KeyTranslation::Idle("the number of warm-up steps takes precedence".to_owned()))
                }
                share if share > 0.0 && share < 1.0 => one(json!(share)),
                _ => Err(format!("as a share, `{ours}` is above 0 and below 1")),
            },
            ValueConversion::Epochs => match number_of(value)? {
                _ if self.has("run.steps") => {
                    Ok(KeyTranslation::Idle("the number of steps takes precedence".to_owned()))
                }
                n if n >= 1.0 && n.fract() == 0.0 => one(json!(n as u64)),
                _ => Err(format!("`{ours}` is a whole number; give run.steps for a part of an epoch")),
            },
            ValueConversion::Interval => match (number_of(value)?, self.whole("run.steps")) {
                // As in Hugging Face's Trainer, a number below 1 is a share of the steps.
                (share, Some(steps)) if share > 0.0 && share < 1.0 => {
                    one(json!((share * steps as f64).ceil() as u64))
                }
                (share, None) if share > 0.0 && share < 1.0 => {
                    Err("it is a share of the steps, which the file does not state".to_owned())
                }
                (n, _) if n >= 1.0 && n.fract() == 0.0 => one(json!(n as u64)),
                _ => Err("it is neither a number of steps nor a share of them".to_owned()),
            },
            ValueConversion::EveryEpochs => one(json!(Interval::of_epochs(count_of(value)?))),
            ValueConversion::Trackers => {
                let names: Vec<String> = match value {
                    Value::Array(names) => {
                        names.iter().filter_map(Value::as_str).map(str::to_lowercase).collect()
                    }
                    other => other.as_str().map(str::to_lowercase).into_iter().collect(),
                };
                let others: Vec<&String> = names
                    .iter()
                    .filter(|name| !["tensorboard", "all", "none"].contains(&name.as_str()))
                    .collect();
                if !others.is_empty() {
                    let others = listed(others.into_iter());
                    self.became.push(format!("`{path}` {others}: not needed: {note}"));
                }
                if names.iter().any(|name| name == "tensorboard" || name == "all") {
                    one(json!(true))
                } else if names.iter().all(|name| name == "none") {
                    Ok(KeyTranslation::Idle("this value has no effect".to_owned()))
                } else {
                    Ok(KeyTranslation::Later)
                }
            }
            ValueConversion::MatmulPrecision => {
                let kind = self.tree.at(ours).map(YamlNode::to_json).unwrap_or(json!("f32"));
                match kind.as_str() {
                    Some("f32" | "tf32") => {
                        let what =
                            "f32 matmuls of linear layers in TF32 need a GPU: on a CPU set precision.kind f32";
                        self.became.push(format!(
                            "`{path}` {}: {what}",
                            YamlNode::of(value).map_or_else(|_| String::new(), |node| node.inline())
                        ));
                        one(json!("tf32"))
                    }
                    _ => Ok(KeyTranslation::Idle(format!(
                        "it is of f32 matmuls, and precision.kind is {}",
                        kind.as_str().unwrap_or_default()
                    ))),
                }
            }
            ValueConversion::Experts => match value.as_u64() {
                Some(0 | 1) => Ok(KeyTranslation::Values(vec![("model.kind".to_owned(), json!("dense_lm"))])),
                Some(_) => one(value.clone()),
                None => Err("it is not a whole number".to_owned()),
            },
            ValueConversion::Moe => match value {
                Value::Bool(true) => one(json!("moe_lm")),
                Value::Bool(false) => one(json!("dense_lm")),
                _ => Err("it is neither true nor false".to_owned()),
            },
            ValueConversion::Flavor => {
                let flavor = value.as_str().unwrap_or_default();
                let name = self.theirs.at("model.name").map(YamlNode::to_json).unwrap_or_default();
                let name = name.as_str().unwrap_or("llama3").to_owned();
                let found = FLAVORS.iter().find(|f| f.family == name && f.name.eq_ignore_ascii_case(flavor));
                found.map(|flavor| KeyTranslation::Values(flavor.keys())).ok_or_else(|| {
                    "sizes are stated by model.hidden, model.layers, model.heads and the others, or taken from model.from"
                        .to_owned()
                })
            }
            ValueConversion::Later => Ok(KeyTranslation::Later),
            ValueConversion::Converters => {
                let text = value.to_string().to_lowercase();
                if text.contains("float8") || text.contains("fp8") || text.contains("mx") {
                    Err("training has the number formats f32, tf32, bf16 and fp16".to_owned())
                } else {
                    Ok(KeyTranslation::No("number formats cannot be chosen for single modules".to_owned()))
                }
            }
            ValueConversion::Sequences => {
                let longest = self.whole("data.longest").unwrap_or(TrainConfig::default().data.longest);
                one(json!(count_of(value)?.saturating_mul(longest)))
            }
            ValueConversion::Accumulation => {
                let steps = count_of(value)?;
                match (self.whole("batch.micro_tokens"), self.whole("batch.tokens")) {
                    (Some(micro), _) => one(json!(micro.saturating_mul(steps))),
                    (None, Some(tokens)) if tokens.is_multiple_of(steps) => Ok(KeyTranslation::Values(vec![(
                        "batch.micro_tokens".to_owned(),
                        json!(tokens / steps),
                    )])),
                    (None, _) => Err("the file does not say how large a micro-batch is".to_owned()),
                }
            }
            ValueConversion::PowerOfTwo => one(json!(2f64.powf(number_of(value)?))),
            ValueConversion::Beta1 | ValueConversion::Beta2 => {
                // If the file sets only one of the two, the other has the default of Kingma and Ba 2015
                // (arXiv:1412.6980), as in these trainers.
                let mut betas = match self.tree.at(ours).map(YamlNode::to_json) {
                    Some(Value::Array(betas)) if betas.len() == 2 => betas,
                    _ => vec![json!(0.9), json!(0.999)],
                };
                betas[usize::from(convert == ValueConversion::Beta2)] = value.clone();
                one(Value::Array(betas))
            }
            ValueConversion::OfLr => {
                match self.tree.at("optimizer.lr").map(YamlNode::to_json).and_then(|lr| lr.as_f64()) {
                    Some(lr) => one(json!(number_of(value)? / lr)),
                    None => Err("the file does not state the learning rate that it is a share of".to_owned()),
                }
            }
            ValueConversion::ZeroIsNull => {
                one(if number_of(value)? == 0.0 { Value::Null } else { value.clone() })
            }
            ValueConversion::Whole => match number_of(value)? {
                n if n >= 1.0 && n.fract() == 0.0 => one(json!(n as u64)),
                _ => Err(format!("`{ours}` is a whole number")),
            },
            ValueConversion::Strategy => match value.as_str() {
                Some("no") => one(Value::Null),
                Some("epoch") => one(json!(Interval::of_epochs(1))),
                Some("steps") if self.has(ours) => Ok(KeyTranslation::Idle(
                    "the interval is taken from the key that counts the steps".to_owned(),
                )),
                // The defaults of Hugging Face's Trainer: evaluations as often as lines of the log, which are 500 steps apart.
                Some("steps") => one(json!(self.whole("run.log_every").unwrap_or(500))),
                _ => Err(format!("`{ours}` is a number of steps or of epochs")),
            },
            ValueConversion::One => one(json!([value])),
            ValueConversion::RematOption => {
                let selective = self.tree.at(ours).map(YamlNode::to_json) == Some(json!("selective"));
                let every = value.as_u64().or_else(|| value.as_str()?.parse().ok());
                match (selective, every, value.as_str()) {
                    (false, ..) => Ok(KeyTranslation::Idle("it is of the mode selective".to_owned())),
                    (true, Some(n), _) => Ok(KeyTranslation::Values(vec![
                        (ours.to_owned(), json!("every_n")),
                        ("memory.remat_every".to_owned(), json!(n)),
                    ])),
                    (true, None, Some("op")) => one(json!("selective")),
                    (true, None, _) => Err("it is neither op nor a number of layers".to_owned()),
                }
            }
            ValueConversion::OffloadStates
            | ValueConversion::OffloadStatesToDisk
            | ValueConversion::OffloadAll => {
                let to = if convert == ValueConversion::OffloadStatesToDisk {
                    OffloadTo::Disk
                } else {
                    OffloadTo::Host
                };
                match (value.as_bool(), convert) {
                    (Some(true), ValueConversion::OffloadAll) => {
                        self.offload(&[STATES, PARAMETERS].concat(), to)
                    }
                    (Some(true), _) => self.offload(STATES, to),
                    (Some(false) | None, _) => Err(format!("set `{ours}` by hand")),
                }
            }
            ValueConversion::OffloadStatesTo | ValueConversion::OffloadParametersTo => {
                let parts = if convert == ValueConversion::OffloadStatesTo { STATES } else { PARAMETERS };
                match value.as_str() {
                    Some("cpu") => self.offload(parts, OffloadTo::Host),
                    Some("nvme") => self.offload(parts, OffloadTo::Disk),
                    Some(_) | None => Err("it is neither cpu nor nvme".to_owned()),
                }
            }
            ValueConversion::Needless => Ok(KeyTranslation::Idle(note.to_owned())),
            ValueConversion::ByHand => {
                Err(format!("set `{ours}` by hand{}{note}", if note.is_empty() { "" } else { ": " }))
            }
        }
    }

    /// Adds `parts` to what is kept outside the memory of the device.
    fn offload(&self, parts: &[OffloadPart], to: OffloadTo) -> Result<KeyTranslation, String> {
        let earlier = self.tree.at("memory.offload").map(YamlNode::to_json);
        let earlier: Vec<OffloadPart> =
            earlier.and_then(|list| serde_json::from_value(list).ok()).unwrap_or_default();
        let is_on_disk =
            self.tree.at("memory.offload_to").is_some_and(|to| to.to_json() == json!(OffloadTo::Disk));
        let earlier_to = if is_on_disk { OffloadTo::Disk } else { OffloadTo::Host };
        if !earlier.is_empty() && earlier_to != to {
            return Err(format!(
                "`memory.offload_to` is one place for all, and another key asks for {}",
                json!(earlier_to)
            ));
        }
        let all: BTreeSet<OffloadPart> = earlier.iter().chain(parts).copied().collect();
        let mut values = vec![("memory.offload".to_owned(), json!(all))];
        if to == OffloadTo::Disk {
            values.push(("memory.offload_to".to_owned(), json!(to)));
        }
        Ok(KeyTranslation::Values(values))
    }

    /// A limit of the memory budget, together with an earlier one: the smaller of both counts.
    fn limited(&self, ours: &str, limit: String) -> KeyTranslation {
        let earlier = self.tree.at(ours).map(YamlNode::to_json);
        let both = match earlier.as_ref().and_then(Value::as_str) {
            Some(earlier) => format!("{earlier} and {limit}"),
            None => limit,
        };
        KeyTranslation::Values(vec![(ours.to_owned(), json!(both))])
    }

    /// A value of the other trainer's file, null if there is none; `key` counts from the end of its path.
    fn their(&self, key: &str) -> Value {
        let mut leaves = vec![];
        flatten(&self.theirs, "", &mut leaves);
        let dotted = format!(".{key}");
        let found = leaves.into_iter().find(|(path, _)| path == key || path.ends_with(&dotted));
        found.map(|(_, node)| node.to_json()).unwrap_or_default()
    }

    /// Whether the translation has micro-steps of several sizes.
    fn has_dynamic(&self) -> bool {
        self.has(DYNAMIC)
    }

    /// Removes the micro-steps of several sizes, which rules of the configuration exclude.
    fn drop_dynamic(&mut self, broken: &[String]) {
        self.remove("memory", "dynamic");
        if let Some(micro) = self.micro.take() {
            self.tree.set(&["batch", "micro_tokens"], micro);
            self.became.retain(|line| !line.starts_with("`batch.micro_tokens`: not needed"));
        }
        let rules = broken.iter().filter(|rule| rule.starts_with(DYNAMIC));
        self.missing.extend(rules.map(|rule| format!("dynamic batching: not supported here: {rule}")));
    }

    /// Value of a translated key, if it is a non-negative integer.
    fn whole(&self, key: &str) -> Option<u64> {
        self.tree.at(key)?.to_json().as_u64()
    }

    /// Whether the translation has set a key to a value other than null.
    fn has(&self, key: &str) -> bool {
        self.tree.at(key).is_some_and(|node| node.kind != NodeKind::Null)
    }

    /// Sets a key of the translation.
    fn set(&mut self, key: &str, value: &Value) -> Result<(), TrainError> {
        self.tree.set(&key.split('.').collect::<Vec<_>>(), YamlNode::of(value)?);
        Ok(())
    }

    /// Removes a key of a section from the translation.
    fn remove(&mut self, section: &str, key: &str) {
        let NodeKind::Map(sections) = &mut self.tree.kind else { return };
        for (name, node) in sections {
            if let (true, NodeKind::Map(keys)) = (name == section, &mut node.kind) {
                keys.retain(|(name, _)| name != key);
            }
        }
    }

    /// Adds the keys that this program's schema requires and the file does not set, with placeholders that are
    /// reported as missing, and removes keys that contradict the others.
    fn complete(&mut self, source: TrainerFormat) -> Result<(), TrainError> {
        if self.has("batch.micro_tokens") && !self.has("batch.tokens") {
            let micro = self.whole("batch.micro_tokens");
            self.set("batch.tokens", &json!(micro))?;
        }
        let step = self.whole("batch.tokens").unwrap_or(TrainConfig::default().batch.tokens);
        if let Some(micro) = self.whole("batch.micro_tokens") {
            let pack = self.pack(step);
            let whole_packs = (micro.min(step) / pack).max(1) * pack;
            if whole_packs != micro {
                let why = format!(
                    "instead of {micro}: a micro-step is whole packs of {pack} tokens, which changes no result"
                );
                self.add("batch.micro_tokens", &json!(whole_packs), &why)?;
            }
        }
        let fp16 = self.tree.at("precision.kind").map(YamlNode::to_json) == Some(json!("fp16"));
        for key in ["initial_scale", "growth_interval"] {
            if !fp16 && self.has(&format!("precision.{key}")) {
                self.remove("precision", key);
                self.became
                    .push(format!("`precision.{key}`: not needed: only precision.kind fp16 has a loss scale"));
            }
        }
        self.complete_schedule(source)?;
        self.complete_dynamic()?;
        self.complete_preset()?;
        let model = ["hidden", "layers", "heads", "vocabulary", "from", "kind", "experts", "preset"];
        if !model.iter().any(|key| self.has(&format!("model.{key}"))) {
            let why = "the file does not name the model; set model.from, or model.kind and the sizes";
            self.unset.push(("model.from", why.to_owned()));
        } else if !self.has("model.kind") && !self.has("model.from") {
            let is_moe = self.has("model.experts") || self.has("model.preset");
            let kind = if is_moe { "moe_lm" } else { "dense_lm" };
            self.set("model.kind", &json!(kind))?;
            self.became.push(format!("`model.kind` {kind}, by the keys of its sizes"));
        }
        if !self.has("data.train") {
            self.set("data.train", &json!(["train.txt"]))?;
            let why = "the file names no files to train on; train.txt is written as a placeholder";
            self.unset.push(("data.train", why.to_owned()));
        }
        let ends = ["run.steps", "run.max_tokens", "schedule.steps"].iter().any(|key| self.has(key));
        if !ends && !self.has("run.epochs") {
            self.set("run.steps", &json!(1000))?;
            let why = "the file does not say how long to train; 1000 steps are written as a placeholder";
            self.unset.push(("run.steps", why.to_owned()));
        }
        let text = format!(
            "keys that the file does not contain have the defaults of plimsoll, which may differ from the \
                defaults of {}",
            source.trainer()
        );
        self.became.push(text);
        Ok(())
    }
}

/// Sizes of a model that another trainer knows by name.
struct Flavor {
    /// Family of models, as `model.name` has it.
    family: &'static str,
    /// Name of the size.
    name: &'static str,
    hidden: u64,
    layers: u64,
    heads: u64,
    kv_heads: u64,
    intermediate: u64,
    vocabulary: u64,
}

/// Llama 3 (Grattafiori et al. 2024, table 3), as torchtitan names its sizes.
const FLAVORS: [Flavor; 3] = [
    Flavor {
        family: "llama3",
        name: "8B",
        hidden: 4096,
        layers: 32,
        heads: 32,
        kv_heads: 8,
        intermediate: 14_336,
        vocabulary: 128_256,
    },
    Flavor {
        family: "llama3",
        name: "70B",
        hidden: 8192,
        layers: 80,
        heads: 64,
        kv_heads: 8,
        intermediate: 28_672,
        vocabulary: 128_256,
    },
    Flavor {
        family: "llama3",
        name: "405B",
        hidden: 16_384,
        layers: 126,
        heads: 128,
        kv_heads: 8,
        intermediate: 53_248,
        vocabulary: 128_256,
    },
];

impl Flavor {
    /// The sizes as keys of this program's schema.
    fn keys(&self) -> Vec<(String, Value)> {
        let sizes = [
            ("model.hidden", json!(self.hidden)),
            ("model.layers", json!(self.layers)),
            ("model.heads", json!(self.heads)),
            ("model.kv_heads", json!(self.kv_heads)),
            ("model.intermediate", json!(self.intermediate)),
            ("model.vocabulary", json!(self.vocabulary)),
            ("model.rope_theta", json!(500_000.0)),
        ];
        sizes.into_iter().map(|(key, value)| (key.to_owned(), value)).collect()
    }
}

fn listed<'a>(words: impl Iterator<Item = &'a String>) -> String {
    words.map(String::as_str).collect::<Vec<_>>().join(", ")
}

impl Translation {
    /// A key of the translation with its value, and why it has the value.
    fn add(&mut self, key: &str, value: &Value, why: &str) -> Result<(), TrainError> {
        let written = YamlNode::of(value)?.inline();
        self.set(key, value)?;
        self.became.push(format!("`{key}` {written}: {why}"));
        Ok(())
    }

    /// The word of a translated key; empty without one.
    fn word(&self, key: &str) -> String {
        self.tree
            .at(key)
            .map(YamlNode::to_json)
            .and_then(|value| value.as_str().map(str::to_owned))
            .unwrap_or_default()
    }

    /// The learning rate that a rate of the other trainer's file is a share of.
    fn of_lr(&self, rate: f64) -> Option<f64> {
        let lr = self.tree.at("optimizer.lr").map(YamlNode::to_json)?.as_f64()?;
        Some((rate / lr).clamp(0.0, 1.0))
    }

    /// Gives the schedule the meaning that it has in the other trainer: where it ends, which is 0 there unless the file says
    /// otherwise, and what belongs to its kind.
    fn complete_schedule(&mut self, source: TrainerFormat) -> Result<(), TrainError> {
        match source {
            TrainerFormat::HuggingFace => self.schedule_of_hugging_face(),
            TrainerFormat::DeepSpeed => self.schedule_of_deepspeed(),
            TrainerFormat::Torchtitan => self.schedule_of_torchtitan(),
            TrainerFormat::Ava => {
                // Keys of Hugging Face's Trainer are common in these files, and have the same meaning.
                if self.their("lr_scheduler_type").is_string() {
                    self.schedule_of_hugging_face()
                } else {
                    Ok(())
                }
            }
        }
    }

    /// An option of the schedule in a file of Hugging Face's Trainer; null if there is none.
    fn scheduler_option(&self, key: &str) -> Value {
        self.their(&format!("lr_scheduler_kwargs.{key}"))
    }

    fn scheduler_number(&self, key: &str) -> Option<f64> {
        self.scheduler_option(key).as_f64()
    }

    fn schedule_of_hugging_face(&mut self) -> Result<(), TrainError> {
        let theirs = self.their("lr_scheduler_type").as_str().unwrap_or_default().to_lowercase();
        if theirs.is_empty() {
            self.add("schedule.kind", &json!("linear"), "the default of Hugging Face's Trainer")?;
        }
        let mut known = vec![];
        let mut end_ratio = Some((0.0, "there the schedule ends at 0"));
        match theirs.as_str() {
            "polynomial" => {
                known.extend(["lr_end", "power"]);
                if let Some(power) = self.scheduler_number("power") {
                    self.add("schedule.power", &json!(power), "lr_scheduler_kwargs.power")?;
                }
                let end = self.of_lr(self.scheduler_number("lr_end").unwrap_or(1e-7));
                end_ratio = Some((end.unwrap_or(0.0), "there the schedule ends at lr_end, 1e-7 by default"));
            }
            "cosine_with_min_lr" | "cosine_warmup_with_min_lr" => {
                known.extend(["min_lr", "min_lr_rate"]);
                let rate = self.scheduler_number("min_lr_rate");
                let rate = rate.or_else(|| self.of_lr(self.scheduler_number("min_lr")?));
                end_ratio = rate.map(|rate| (rate, "min_lr or min_lr_rate of lr_scheduler_kwargs"));
                if end_ratio.is_none() && !self.has("schedule.min_ratio") {
                    self.missing.push(
                        "`lr_scheduler_kwargs.min_lr`: not supported: without min_lr or min_lr_rate and learning_rate, its end \
                         is not known; set schedule.min_ratio"
                            .to_owned(),
                    );
                }
            }
            "cosine_with_restarts" => {
                known.push("num_cycles");
                self.restarts(self.scheduler_option("num_cycles").as_u64().unwrap_or(1))?;
            }
            "warmup_stable_decay" => {
                known.extend(["min_lr_ratio", "decay_type", "num_decay_steps", "num_stable_steps"]);
                if let Some(ratio) = self.scheduler_number("min_lr_ratio") {
                    end_ratio = Some((ratio, "lr_scheduler_kwargs.min_lr_ratio"));
                }
                let shape = match self.scheduler_option("decay_type").as_str() {
                    Some("linear") => "linear",
                    Some("1-sqrt") => "sqrt",
                    _ => "cosine",
                };
                self.add(
                    "schedule.decay_shape",
                    &json!(shape),
                    "decay_type of lr_scheduler_kwargs, cosine by default",
                )?;
                let steps = self.whole("run.steps");
                match (self.scheduler_option("num_decay_steps").as_u64(), steps) {
                    (Some(decay), Some(steps)) if decay > 0 && decay <= steps => {
                        let share = decay as f64 / steps as f64;
                        self.add("schedule.decay_share", &json!(share), "num_decay_steps of max_steps")?;
                    }
                    _ => self.missing.push(
                        "`lr_scheduler_kwargs.num_decay_steps`: not supported: it is no share of known steps; set \
                         schedule.decay_share"
                            .to_owned(),
                    ),
                }
            }
            "constant" => {
                end_ratio = None;
                if self.has("schedule.warmup") {
                    self.remove("schedule", "warmup");
                    self.became.push(
                        "`schedule.warmup`: not needed: there the schedule constant has no warm-up".to_owned(),
                    );
                }
            }
            "constant_with_warmup" => end_ratio = None,
            _ => {}
        }
        let kwargs = self.theirs.at("lr_scheduler_kwargs").map(|node| node.kind.clone());
        if let Some(NodeKind::Map(entries)) = kwargs {
            for (key, node) in entries.iter().filter(|(key, _)| !known.contains(&key.as_str())) {
                let written = format!("`lr_scheduler_kwargs.{key}` {}", node.inline());
                self.missing.push(format!("{written}: not supported: the schedule here has no such setting"));
            }
        }
        match end_ratio {
            Some((end_ratio, why)) if !self.has("schedule.min_ratio") => {
                self.add("schedule.min_ratio", &json!(end_ratio), why)
            }
            Some(_) | None => Ok(()),
        }
    }

    /// A cosine schedule with `cycles` equal cycles over the steps after the warm-up.
    fn restarts(&mut self, cycles: u64) -> Result<(), TrainError> {
        if cycles <= 1 {
            return self.add("schedule.kind", &json!("cosine"), "a single cycle has no restart");
        }
        let warmup = match self.tree.at("schedule.warmup").map(YamlNode::to_json) {
            None => Some(0),
            Some(steps) => steps.as_u64(),
        };
        let left = self.whole("run.steps").zip(warmup).and_then(|(steps, warmup)| steps.checked_sub(warmup));
        match left.filter(|left| *left > 0 && left.is_multiple_of(cycles)) {
            Some(left) => {
                let why = format!("num_cycles {cycles} after the warm-up");
                self.add("schedule.cycle", &json!(left / cycles), &why)
            }
            None => {
                self.missing.push(format!(
                    "`lr_scheduler_kwargs.num_cycles` {cycles}: not supported: the steps after the warm-up are no known multiple \
                     of it; set schedule.cycle to the steps of a cycle"
                ));
                Ok(())
            }
        }
    }

    fn schedule_of_deepspeed(&mut self) -> Result<(), TrainError> {
        let end_ratio = match self.their("scheduler.type").as_str().unwrap_or_default().to_lowercase().as_str()
        {
            "warmupdecaylr" => json!(0.0),
            "warmupcosinelr" => json!(1e-4),
            _ => return Ok(()),
        };
        if !self.has("schedule.min_ratio") {
            self.add("schedule.min_ratio", &end_ratio, "there the schedule ends at this share")?;
        }
        let is_linear = self.their("scheduler.params.warmup_type").as_str() == Some("linear");
        if self.has("schedule.warmup") && !is_linear {
            self.missing.push(
                "`scheduler.params.warmup_type` log: not supported: the warm-up is linear here; there it is logarithmic unless \
                 the file says linear"
                    .to_owned(),
            );
        }
        Ok(())
    }

    fn schedule_of_torchtitan(&mut self) -> Result<(), TrainError> {
        let shape = self.their("lr_scheduler.decay_type").as_str().unwrap_or("linear").to_lowercase();
        if !["linear", "sqrt", "cosine"].contains(&shape.as_str()) {
            self.missing.push(format!(
                "`lr_scheduler.decay_type` {shape}: not supported: known are linear, sqrt, cosine"
            ));
            return Ok(());
        }
        match (self.their("lr_scheduler.decay_ratio").as_f64(), shape.as_str()) {
            (Some(ratio), _) if ratio > 0.0 && ratio <= 1.0 => {
                self.add("schedule.kind", &json!("wsd"), "lr_scheduler.decay_ratio: constant, then a decay")?;
                self.add("schedule.decay_share", &json!(ratio), "lr_scheduler.decay_ratio")?;
                self.add("schedule.decay_shape", &json!(shape), "lr_scheduler.decay_type, linear by default")?;
            }
            (_, "sqrt") => {
                self.add(
                    "schedule.kind",
                    &json!("wsd"),
                    "without decay_ratio all steps after the warm-up decay",
                )?;
                self.add(
                    "schedule.decay_share",
                    &json!(1.0),
                    "without decay_ratio all steps after the warm-up decay",
                )?;
                self.add("schedule.decay_shape", &json!("sqrt"), "lr_scheduler.decay_type")?;
            }
            (_, kind) => {
                self.add(
                    "schedule.kind",
                    &json!(kind),
                    "without decay_ratio all steps after the warm-up decay",
                )?;
            }
        }
        if self.has("schedule.min_ratio") {
            Ok(())
        } else {
            self.add("schedule.min_ratio", &json!(0.0), "there the schedule ends at 0")
        }
    }

    /// Tokens of a pack of the translated configuration, of which a step has `step` tokens.
    fn pack(&self, step: u64) -> u64 {
        let longest = self.whole("data.longest").unwrap_or(TrainConfig::default().data.longest);
        super::rules::pack_of_step(step, longest).max(1)
    }

    /// Makes the section `memory.dynamic` consistent: the sizes of micro-steps are whole packs, and thresholds
    /// that the file does not state lie on the right side of those that it states.
    fn complete_dynamic(&mut self) -> Result<(), TrainError> {
        if !self.has_dynamic() {
            return Ok(());
        }
        if self.is_not_dynamic {
            self.remove("memory", "dynamic");
            self.became.push("`memory.dynamic`: not needed: the file turns dynamic batching off".to_owned());
            return Ok(());
        }
        if self.has("batch.micro_tokens") {
            self.micro = self.tree.at("batch.micro_tokens").cloned();
            self.remove("batch", "micro_tokens");
            self.became.push(
                "`batch.micro_tokens`: not needed: memory.dynamic has a smallest and a largest size".to_owned(),
            );
        }
        let step = self.whole("batch.tokens").unwrap_or(TrainConfig::default().batch.tokens);
        let min_batch = self.whole("memory.dynamic.min_batch");
        let pack = self.pack(step);
        let why = format!("micro-steps are whole packs of {pack} tokens, up to batch.tokens");
        if let Some(max_batch) = self.whole("memory.dynamic.max_batch") {
            let whole_packs = (max_batch.min(step) / pack).max(1) * pack;
            if whole_packs != max_batch {
                self.add("memory.dynamic.max_batch", &json!(whole_packs), &why)?;
            }
        }
        let max_batch = self.whole("memory.dynamic.max_batch").unwrap_or(step);
        if let Some(min_batch) = min_batch {
            let whole_packs = min_batch.div_ceil(pack).max(1).saturating_mul(pack).min(max_batch);
            if whole_packs != min_batch {
                self.add("memory.dynamic.min_batch", &json!(whole_packs), &why)?;
            }
        }
        self.order_thresholds()
    }

    /// Moves thresholds that the file does not state to the right side of those that it states.
    fn order_thresholds(&mut self) -> Result<(), TrainError> {
        const KEYS: [&str; 4] = ["target", "warning", "critical", "emergency"];
        let profile = match self.word("memory.dynamic.profile").as_str() {
            "aggressive" => Profile::Aggressive,
            "conservative" => Profile::Conservative,
            _ => Profile::Balanced,
        };
        let usual = DynamicSection { profile, ..DynamicSection::default() }.thresholds();
        let usual = [usual.target, usual.warning, usual.critical, usual.emergency];
        let stated = KEYS.map(|key| {
            self.tree.at(&format!("{DYNAMIC}.{key}")).map(YamlNode::to_json).and_then(|value| value.as_f64())
        });
        for (k, key) in KEYS.into_iter().enumerate().filter(|(k, _)| stated[*k].is_none()) {
            let lower = stated[..k].iter().flatten().fold(0.0_f64, |a, b| a.max(*b));
            let upper = stated[k + 1..].iter().flatten().fold(1.0_f64, |a, b| a.min(*b));
            if usual[k] > lower && usual[k] < upper {
                continue;
            }
            // Evenly between the stated neighbours.
            let before = (0..k).rev().take_while(|&i| stated[i].is_none()).count() as f64;
            let after = (k + 1..KEYS.len()).take_while(|&i| stated[i].is_none()).count() as f64;
            let low = if lower > 0.0 { lower } else { upper - 0.05 * (before + after + 2.0) };
            let value = low + (upper - low) * (before + 1.0) / (before + after + 2.0);
            let value = (value * 1e4).round() / 1e4;
            self.add(&format!("{DYNAMIC}.{key}"), &json!(value), "on the right side of the stated thresholds")?;
        }
        Ok(())
    }

    /// A preset of a model without experts becomes its sizes: presets are of mixtures of experts.
    fn complete_preset(&mut self) -> Result<(), TrainError> {
        if self.word("model.kind") != "dense_lm" || !self.has("model.preset") {
            return Ok(());
        }
        let preset: Option<ModelPreset> = serde_json::from_value(json!(self.word("model.preset"))).ok();
        self.remove("model", "preset");
        let Some(preset) = preset else { return Ok(()) };
        let sized = ModelSection::default().sized(preset);
        let sizes = [
            ("hidden", sized.hidden),
            ("layers", sized.layers),
            ("heads", sized.heads),
            ("intermediate", sized.intermediate),
        ];
        for (key, value) in sizes {
            let key = format!("model.{key}");
            if !self.has(&key) {
                self.add(&key, &json!(value), "the size of the preset, without experts")?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Offload, OffloadPolicy, OptimizerKind, Remat, RematPolicy, ScheduleKind, Warmup};
    use super::*;
    use plimsoll_plan::Precision;

    fn translated(text: &str, flags: &[&str]) -> Translated {
        let flags: Vec<String> = flags.iter().map(|flag| (*flag).to_owned()).collect();
        translate_text(text, "theirs", None, &flags).unwrap_or_else(|e| panic!("{text}: {e}"))
    }

    fn assert_has_line(lines: &[String], wanted: &str) {
        assert!(lines.iter().any(|line| line == wanted), "{wanted}: {lines:#?}");
    }

    #[test]
    fn training_arguments() {
        let t = translated(
            r#"{"output_dir": "out", "learning_rate": 5e-05, "per_device_train_batch_size": 8,
                "gradient_accumulation_steps": 4, "max_steps": 500, "num_train_epochs": 3.0, "warmup_ratio": 0.1,
                "lr_scheduler_type": "linear", "optim": "adamw_torch", "adam_beta2": 0.98, "bf16": true, "fp16": false,
                "gradient_checkpointing": true, "save_strategy": "steps", "save_steps": 100, "max_grad_norm": 0,
                "fsdp": "full_shard", "tf32": true, "seed": 7, "label_smoothing_factor": 0.0, "unheard_of": 1}"#,
            &["data.longest=512"],
        );
        let c = &t.config;
        assert_eq!(t.source, TrainerFormat::HuggingFace);
        assert_eq!(
            (c.run.output.as_deref(), c.optimizer.lr, c.run.steps, c.run.epochs),
            (Some("out"), 5e-5, Some(500), None)
        );
        assert_eq!((c.batch.micro_tokens.0, c.batch.tokens), (Some(8 * 1024), 32 * 1024));
        assert_eq!((c.schedule.kind, c.schedule.warmup), (ScheduleKind::Linear, Warmup::Share(0.1)));
        assert_eq!(
            (c.optimizer.kind, c.optimizer.betas, c.optimizer.clip_norm),
            (OptimizerKind::Adamw, [0.9, 0.98], None)
        );
        assert_eq!((c.precision.kind, &c.memory.remat), (Precision::Bf16, &Remat::Policy(RematPolicy::Full)));
        assert_has_line(&t.became, "`max_grad_norm` 0: `optimizer.clip_norm` null");
        assert_has_line(&t.became, "`learning_rate` 5e-5: `optimizer.lr` 5e-5");
        assert_has_line(&t.became, "`fp16` false: not needed: this value has no effect");
        assert_has_line(&t.missing, "`fsdp` full_shard: not supported: training uses a single device");
        assert_has_line(&t.missing, "`unheard_of` 1: not supported: plimsoll has no such setting");
        assert_has_line(&t.became, "`tf32` true: not needed: it is of f32 matmuls, and precision.kind is bf16");
        assert!(t.missing.iter().any(|line| line.starts_with("`data.train`: ")));
        // A key set by a flag is not missing.
        let t = translated(r#"{"output_dir": "out", "max_steps": 9}"#, &["data.train=[a.txt]"]);
        assert!(!t.missing.iter().any(|line| line.starts_with("`data.train`: ")), "{:?}", t.missing);
        assert_eq!(t.config.data.train, ["a.txt"]);
    }

    /// (file, keys and values of the translation as YAML shows them, parts of lines that are said, parts of lines that are not)
    #[test]
    fn values_keep_their_meaning() {
        const HF: &str = r#""output_dir": "o", "learning_rate": 1e-3, "max_steps": 20"#;
        let hf = |rest: &str| format!("{{{HF}, {rest}}}");
        let ava = |rest: &str| {
            format!("model: {{hidden_size: 64, num_heads: 4}}\ntraining: {{max_steps: 10}}\n{rest}")
        };
        let titan = |rest: &str| format!("[job]\ndump_folder = \"o\"\n[training]\nsteps = 100\n{rest}");
        for (text, keys, said) in [
            // Schedules end where they end there.
            (hf(r#""lr_scheduler_type": "linear", "warmup_steps": 2"#), vec![("schedule.kind", "linear"), ("schedule.min_ratio", "0"), ("schedule.warmup", "2")], vec![]),
            (hf(r#""lr_scheduler_type": "cosine""#), vec![("schedule.kind", "cosine"), ("schedule.min_ratio", "0")], vec![]),
            (hf(r#""seed": 1"#), vec![("schedule.kind", "linear"), ("schedule.min_ratio", "0")], vec!["the default of Hugging Face"]),
            (hf(r#""lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"power": 2.0, "lr_end": 1e-4}"#), vec![("schedule.power", "2"), ("schedule.min_ratio", "0.1")], vec![]),
            (hf(r#""lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 2e-4}"#), vec![("schedule.min_ratio", "0.2")], vec![]),
            (hf(r#""lr_scheduler_type": "cosine_with_restarts", "lr_scheduler_kwargs": {"num_cycles": 4}"#), vec![("schedule.kind", "cosine_restarts"), ("schedule.cycle", "5")], vec![]),
            (hf(r#""lr_scheduler_type": "cosine_with_restarts", "lr_scheduler_kwargs": {}"#), vec![("schedule.kind", "cosine"), ("schedule.min_ratio", "0")], vec![]),
            (hf(r#""lr_scheduler_type": "warmup_stable_decay", "lr_scheduler_kwargs": {"num_decay_steps": 5}"#), vec![("schedule.kind", "wsd"), ("schedule.decay_share", "0.25"), ("schedule.decay_shape", "cosine")], vec![]),
            (hf(r#""lr_scheduler_type": "constant", "warmup_steps": 5"#), vec![("schedule.kind", "constant"), ("schedule.warmup", "0")], vec!["has no warm-up"]),
            (hf(r#""lr_scheduler_type": "constant_with_warmup", "warmup_ratio": 0.1"#), vec![("schedule.kind", "constant"), ("schedule.warmup", "0.1")], vec![]),
            (hf(r#""lr_scheduler_kwargs": {"cooldown": 3}"#), vec![], vec!["`lr_scheduler_kwargs.cooldown` 3: not supported"]),
            (titan("[lr_scheduler]\nwarmup_steps = 10\n"), vec![("schedule.kind", "linear"), ("schedule.min_ratio", "0")], vec![]),
            (titan("[lr_scheduler]\ndecay_ratio = 0.8\ndecay_type = \"sqrt\"\nmin_lr_factor = 0.1\n"), vec![("schedule.kind", "wsd"), ("schedule.decay_share", "0.8"), ("schedule.decay_shape", "sqrt"), ("schedule.min_ratio", "0.1")], vec![]),
            (titan("[lr_scheduler]\ndecay_type = \"cosine\"\n"), vec![("schedule.kind", "cosine"), ("schedule.min_ratio", "0")], vec![]),
            (r#"{"train_batch_size": 8, "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_type": "linear", "total_num_steps": 50}}}"#.to_owned(), vec![("schedule.kind", "linear"), ("schedule.min_ratio", "0")], vec![]),
            (r#"{"train_batch_size": 8, "scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 50, "warmup_num_steps": 5}}}"#.to_owned(), vec![("schedule.kind", "cosine"), ("schedule.min_ratio", "0.0001")], vec!["`scheduler.params.warmup_type` log: not supported"]),
            // Warm-up, epochs and intervals.
            (hf(r#""warmup_ratio": 0.1, "warmup_steps": 0"#), vec![("schedule.warmup", "0.1")], vec![]),
            (hf(r#""warmup_ratio": 0.1, "warmup_steps": 3"#), vec![("schedule.warmup", "3")], vec!["warm-up steps takes precedence"]),
            (r#"{"num_train_epochs": 3, "lr_scheduler_type": "linear", "warmup_ratio": 0.1}"#.to_owned(), vec![("run.epochs", "3"), ("run.steps", "null"), ("schedule.kind", "linear"), ("schedule.warmup", "0.1"), ("schedule.steps", "null")], vec![]),
            (hf(r#""num_train_epochs": 3.0"#), vec![("run.epochs", "null"), ("run.steps", "20")], vec!["number of steps takes precedence"]),
            (hf(r#""eval_strategy": "epoch", "save_strategy": "epoch", "save_steps": 500"#), vec![("run.evaluate_every", "\"1 epoch\""), ("run.save_every", "\"1 epoch\"")], vec![]),
            (hf(r#""save_strategy": "no", "save_steps": 500, "eval_strategy": "no", "eval_steps": null"#), vec![("run.save_every", "null"), ("run.evaluate_every", "null")], vec![]),
            (hf(r#""eval_strategy": "steps", "eval_steps": 0.25"#), vec![("run.evaluate_every", "5")], vec![]),
            (hf(r#""eval_strategy": "steps", "logging_steps": 7"#), vec![("run.evaluate_every", "7")], vec![]),
            (hf(r#""report_to": ["tensorboard"]"#), vec![("run.tensorboard", "true")], vec![]),
            (hf(r#""report_to": ["wandb", "tensorboard"]"#), vec![("run.tensorboard", "true")], vec!["`report_to` wandb: not needed"]),
            (hf(r#""report_to": "none""#), vec![("run.tensorboard", "false")], vec![]),
            (hf(r#""logging_dir": "logs""#), vec![("run.output", "o")], vec![]),
            // Micro-steps of several sizes.
            (ava("dynamic_batching: {enabled: true}\n"), vec![("memory.dynamic.profile", "balanced")], vec![]),
            (ava("dynamic_batching: {enabled: true, warning_threshold: 0.85, critical_threshold: 95}\n"), vec![("memory.dynamic.warning", "0.85"), ("memory.dynamic.critical", "0.95")], vec!["`memory.dynamic.target`"]),
            (ava("memory: {warning_threshold: 0.91, target_utilization: 0.9}\n"), vec![("memory.dynamic.warning", "0.91"), ("memory.budget", "\"90%\"")], vec![]),
            (ava("dynamic_batching: {enabled: false, warning_threshold: 0.85}\n"), vec![("memory.dynamic", "null")], vec!["turns dynamic batching off"]),
            (ava("dynamic_batching: {min_batch_size: 2, max_batch_size: 7, smooth_transitions: false, adjustment_frequency: 5}\n"), vec![("memory.dynamic.min_batch", "2048"), ("memory.dynamic.max_batch", "7168"), ("memory.dynamic.smooth_transitions", "false"), ("memory.dynamic.adjustment_frequency", "5")], vec![]),
            (r#"{"train_batch_size": 12, "gradient_accumulation_steps": 8}"#.to_owned(), vec![("batch.tokens", "12288"), ("batch.micro_tokens", "1024")], vec!["instead of 1536: a micro-step is whole packs of 1024 tokens"]),
            (ava("memory: {pool_size_gb: 20, target_utilization: 0.925}\n"), vec![("memory.budget", "\"20GB and 92%\"")], vec![]),
            // Attention, number formats, sizes.
            (ava("attention_type: flash\n"), vec![("model.attention.mask", "causal")], vec!["`attention_type` flash: not needed: attention never stores"]),
            (ava("memory: {float32_matmul_precision: high}\n"), vec![("precision.kind", "tf32")], vec!["need a GPU"]),
            (ava("memory: {float32_matmul_precision: highest}\n"), vec![("precision.kind", "f32")], vec![]),
            ("model: {preset: small}\ntraining: {max_steps: 5}\n".to_owned(), vec![("model.kind", "moe_lm"), ("model.preset", "small"), ("model.layers", "14")], vec![]),
            ("model: {preset: small, num_experts: 0}\ntraining: {max_steps: 5}\n".to_owned(), vec![("model.kind", "dense_lm"), ("model.preset", "null"), ("model.layers", "14"), ("model.hidden", "512")], vec![]),
            ("model: {preset: tiny, use_moe: false}\ntraining: {max_steps: 5}\n".to_owned(), vec![("model.kind", "dense_lm"), ("model.hidden", "384")], vec![]),
            (titan("[model]\nname = \"llama3\"\nflavor = \"8B\"\n"), vec![("model.kind", "dense_lm"), ("model.hidden", "4096"), ("model.kv_heads", "8"), ("model.intermediate", "14336")], vec![]),
            // Defaults of a dump.
            (hf(r#""hub_model_id": null, "ddp_broadcast_buffers": null, "eval_on_start": false, "eval_delay": 0, "debug": [], "mp_parameters": """#), vec![], vec!["6 further keys are null, false, 0 or empty"]),
        ] {
            let t = translated(&text, &[]);
            let tree = YamlNode::of(&t.config).expect("a tree");
            for (key, wanted) in keys {
                let found = tree.at(key).map_or("null".to_owned(), YamlNode::inline);
                let is_equal = found == wanted || found.parse::<f64>().ok().zip(wanted.parse::<f64>().ok()).is_some_and(|(a, b)| (a - b).abs() < 1e-9);
                assert!(is_equal, "{text}: {key} is {found}, not {wanted}\n{:#?}\n{:#?}", t.became, t.missing);
            }
            let all: Vec<&String> = t.became.iter().chain(&t.missing).collect();
            for part in said {
                assert!(all.iter().any(|line| line.contains(part)), "{text}: {part}: {all:#?}");
            }
        }
        // The last step of the schedule of the first file, as in torch.optim.lr_scheduler.LambdaLR of transformers.
        let t = translated(&hf(r#""lr_scheduler_type": "linear", "warmup_steps": 2"#), &[]);
        let last = crate::schedule::Rate::new(&t.config).at(19, 0);
        assert!((last - 1e-3 / 18.0).abs() < 1e-12, "{last}");
    }

    /// A number format that is not supported is no other format in silence.
    #[test]
    fn values_that_no_default_replaces_are_refused() {
        for (text, key) in [
            (
                "model: {hidden_size: 64}\ntraining: {mixed_precision: fp8, max_steps: 5}\n",
                "`training.mixed_precision` fp8",
            ),
            ("{\"train_batch_size\": 8, \"fp8\": {\"enabled\": true}}", "`fp8.enabled` true"),
            ("[job]\ndump_folder = \"o\"\n[model]\nconverters = [\"float8\"]\n", "`model.converters` [float8]"),
            (
                "{\"output_dir\": \"o\", \"lr_scheduler_type\": \"inverse_sqrt\"}",
                "`lr_scheduler_type` inverse_sqrt",
            ),
        ] {
            let error = translate_text(text, "theirs", None, &[]).expect_err(key).to_string();
            assert!(error.starts_with("theirs: cannot be translated:") && error.contains(key), "{error}");
            let setting =
                if key.contains("scheduler") { "schedule.kind=cosine" } else { "precision.kind=bf16" };
            assert!(
                error.contains(&format!("choose a value with {}=", setting.split('=').next().expect("a key"))),
                "{error}"
            );
            translate_text(text, "theirs", None, &[setting.to_owned()]).expect("a value was chosen");
        }
    }

    /// A file of another trainer that is given as a configuration of this program is named.
    #[test]
    fn files_of_other_trainers_are_named() {
        for (text, wanted) in [
            ("{\"output_dir\": \"o\", \"max_steps\": 5}", Some("Hugging Face Trainer")),
            ("[job]\ndump_folder = \"o\"\n", Some("torchtitan")),
            ("{\"train_batch_size\": 8}", Some("DeepSpeed")),
            ("model: {hidden_size: 5}\ntraining: {max_steps: 5}\n", Some("Ava guide")),
            ("model: {hiden: 5}\ndata: {train: [a]}\n", None),
            ("a: [", None),
        ] {
            let error = TrainConfig::parse(text, "theirs", &[]).expect_err(text).to_string();
            let wanted = wanted.map(|trainer| {
                format!("theirs: this is a configuration of {trainer}; give it as from_config=FILE")
            });
            assert_eq!(
                error.starts_with(wanted.as_deref().unwrap_or("theirs: this is")),
                wanted.is_some(),
                "{error}"
            );
        }
    }

    #[test]
    fn deepspeed() {
        let t = translated(
            r#"{"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2, "gradient_clipping": 1.0,
                "zero_optimization": {"stage": 2, "overlap_comm": true, "offload_optimizer": {"device": "cpu"}},
                "fp16": {"enabled": true, "initial_scale_power": 12, "loss_scale": 0, "hysteresis": 2},
                "optimizer": {"type": "AdamW", "params": {"lr": 0.001, "betas": [0.9, 0.95], "weight_decay": "auto"}},
                "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 10, "total_num_steps": 100}},
                "steps_per_print": 5}"#,
            &[],
        );
        let c = &t.config;
        assert_eq!(
            (t.source, c.precision.kind, c.precision.initial_scale),
            (TrainerFormat::DeepSpeed, Precision::Fp16, 4096.0)
        );
        assert_eq!((c.batch.micro_tokens.0, c.batch.tokens), (Some(4096), 8192));
        assert_eq!((c.optimizer.lr, c.run.steps, c.run.log_every), (1e-3, Some(100), 5));
        assert_eq!((c.schedule.kind, c.schedule.warmup), (ScheduleKind::Linear, Warmup::Steps(10)));
        assert_has_line(
            &t.missing,
            "`zero_optimization.stage` 2: not supported: training uses a single device",
        );
        assert_eq!(c.memory.offload, Offload::Parts(STATES.to_vec()));
        let auto =
            "`optimizer.params.weight_decay` auto: not needed: with auto the value comes from another file";
        assert_has_line(&t.became, auto);
    }

    #[test]
    fn offload() {
        let deepspeed = |parts: &str| {
            format!(
                "{{\"train_micro_batch_size_per_gpu\": 4, \"bf16\": {{\"enabled\": true}}, \"zero_optimization\": {{{parts}}}}}"
            )
        };
        let optimizer =
            |device: &str| format!("\"offload_optimizer\": {{\"device\": \"{device}\", \"pin_memory\": true}}");
        let param = |device: &str| {
            format!("\"offload_param\": {{\"device\": \"{device}\", \"nvme_path\": \"/local\"}}")
        };
        let guide = |key: &str| {
            format!("model: {{hidden_size: 512, num_experts: 8}}\nmemory: {{pool_size_gb: 20, {key}: true}}\n")
        };
        let titan = "[job]\ndump_folder = \"out\"\n[training]\nlocal_batch_size = 1\nseq_len = 2048\nenable_cpu_offload = true\n[checkpoint]\ninterval = 500\n[model]\nflavor = \"8B\"\n";
        for (text, parts, to) in [
            (deepspeed(&optimizer("cpu")), STATES, OffloadTo::Host),
            (deepspeed(&optimizer("nvme")), STATES, OffloadTo::Disk),
            (deepspeed(&param("nvme")), PARAMETERS, OffloadTo::Disk),
            (
                deepspeed(&[optimizer("cpu"), param("cpu")].join(", ")),
                &[STATES, PARAMETERS].concat(),
                OffloadTo::Host,
            ),
            (deepspeed("\"cpu_offload\": true"), STATES, OffloadTo::Host),
            // There are no masters beside f32 parameters.
            (
                deepspeed("\"cpu_offload\": true").replace("true}, ", "false}, "),
                &[OffloadPart::Optimizer],
                OffloadTo::Host,
            ),
            (guide("enable_cpu_offload"), &[OffloadPart::Optimizer], OffloadTo::Host),
            (guide("nvme_offload"), &[OffloadPart::Optimizer], OffloadTo::Disk),
            (titan.to_owned(), &[OffloadPart::Optimizer, OffloadPart::Parameters], OffloadTo::Host),
        ] {
            let t = translated(&text, &[]);
            assert_eq!(t.config.memory.offload, Offload::Parts(parts.to_vec()), "{text}");
            assert_eq!(t.config.memory.offload_to, to, "{text}");
        }
        let t = translated(&deepspeed(&[optimizer("cpu"), param("nvme")].join(", ")), &[]);
        assert_has_line(
            &t.missing,
            "`zero_optimization.offload_param.device` nvme: not supported: `memory.offload_to` is one place for all, and another key asks for \"host\"",
        );
        let none = translated(&deepspeed(&optimizer("none")), &[]);
        assert_eq!(none.config.memory.offload, Offload::Policy(OffloadPolicy::None));
    }

    #[test]
    fn torchtitan() {
        let t = translated(
            "[job]\ndump_folder = \"./out\"\n[model]\nname = \"llama3\"\nflavor = \"8B\"\n[optimizer]\nname = \"AdamW\"\n\
             lr = 3e-4\n[lr_scheduler]\nwarmup_steps = 200\n[training]\nlocal_batch_size = 1\nseq_len = 2048\n\
             max_norm = 1.0\nsteps = 1000\ndataset = \"c4\"\n[parallelism]\ndata_parallel_shard_degree = -1\n\
             tensor_parallel_degree = 2\n[activation_checkpoint]\nmode = \"selective\"\n\
             selective_ac_option = \"2\"\n[checkpoint]\ninterval = 500\n",
            &[],
        );
        let c = &t.config;
        assert_eq!(
            (t.source, c.model.kind.name(), c.run.steps),
            (TrainerFormat::Torchtitan, "dense_lm", Some(1000))
        );
        assert_eq!((c.data.longest, c.batch.micro_tokens.0, c.optimizer.lr), (2048, Some(2048), 3e-4));
        assert_eq!((&c.memory.remat, c.memory.remat_every), (&Remat::Policy(RematPolicy::EveryN), 2));
        assert_eq!(c.schedule.warmup, Warmup::Steps(200));
        let two = "`parallelism.tensor_parallel_degree` 2: not supported: training uses a single device";
        assert_has_line(&t.missing, two);
        assert_has_line(&t.became, "`model.flavor` \"8B\": `model.hidden` 4096");
        assert!(t.missing.iter().any(|line| line.starts_with("`training.dataset` c4: not supported: ")));
    }

    #[test]
    fn the_guide() {
        let t = translated(
            "model:\n  hidden_size: 512\n  num_layers: 14\n  num_attention_heads: 8\n  num_experts: 8\n\
             training:\n  optimizer: adamw\n  max_steps: 100\n  mixed_precision: bf16\n  max_length: 256\n\
             memory:\n  pool_size_gb: 20\n  float32_matmul_precision: high\n  enable_cpu_offload: true\n\
             deepspeed:\n  zero_stage: 2\n  activation_checkpointing: true\ndynamic_batching:\n  enabled: true\n",
            &[],
        );
        let c = &t.config;
        assert_eq!((t.source, c.model.kind.name(), c.model.layers), (TrainerFormat::Ava, "moe_lm", 14));
        assert_eq!(
            (c.optimizer.kind, c.precision.kind, c.data.longest),
            (OptimizerKind::Adamw, Precision::Bf16, 256)
        );
        assert_eq!((c.memory.budget.as_str(), &c.memory.remat), ("20GB", &Remat::Policy(RematPolicy::Full)));
        assert!(c.memory.dynamic.is_some() && c.loss.balance > 0.0);
        assert_eq!(c.memory.offload, Offload::Parts(STATES.to_vec()));
        let start = "`deepspeed.zero_stage` ";
        assert!(t.missing.iter().any(|line| line.starts_with(start) && line.contains("not supported")));
    }

    #[test]
    fn a_file_of_no_trainer_is_refused() {
        for (text, wanted) in [
            (
                "{\"a\": 1}",
                "theirs: its keys do not belong to a supported trainer; name the trainer with from_format: \
                    ava, deepspeed",
            ),
            ("{", "theirs: not JSON: "),
            ("a: [", "theirs: line "),
        ] {
            let error = translate_text(text, "theirs", None, &[]).expect_err(wanted).to_string();
            assert!(error.starts_with(wanted), "{error}");
        }
        let error = translate_text(
            "{\"max_steps\": 5, \"warmup_steps\": 9}",
            "theirs",
            Some(TrainerFormat::HuggingFace),
            &[],
        );
        let error = error.expect_err("a warm-up beyond the end").to_string();
        assert!(error.starts_with("theirs, translated: schedule.warmup 9 must be shorter"), "{error}");
    }
}
