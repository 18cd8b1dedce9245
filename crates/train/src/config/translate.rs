//! Translation of configuration files of other trainers to this program's schema (`--from-config`). Invariant:
//! for every key of the file the result states the equivalent key, that the key is not needed, or that it is
//! not supported; the translated configuration is valid.

use super::foreign::{Answer, Convert, ForeignKey, row};
use super::schema::{faults, schema};
use super::yaml::{Node, NodeKind, parse};
use super::{LARGEST, TrainConfig, Wrong};
use crate::ConfigError;
use crate::TrainError;
use plimsoll_data::bounded;
use plimsoll_data::printable::EscapedPath;
use plimsoll_runtime::RuntimeError;
use serde_json::{Value, json};
use std::path::Path;

/// A trainer whose configuration files can be translated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// YAML file of the Ava guide.
    Ava,
    /// JSON file of DeepSpeed.
    DeepSpeed,
    /// Hugging Face's `TrainingArguments`, as JSON or YAML.
    HuggingFace,
    /// TOML file of torchtitan.
    Torchtitan,
}

impl Source {
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
    fn trainer(self) -> &'static str {
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
    pub source: Source,
    /// The configuration in this program's schema.
    pub config: TrainConfig,
    /// One sentence for each key that was translated, is not needed, or was added.
    pub became: Vec<String>,
    /// One sentence for each key that is not supported, and for each key that the user still has to set.
    pub missing: Vec<String>,
}

/// Translates the configuration file at `path`. `flags` are settings `key=value` in this program's schema,
/// which override the translated values. If `source` is `None`, the trainer is recognised by the keys of the
/// file.
///
/// # Errors
/// The file cannot be read or parsed, its trainer is not recognised, or the translated values violate a rule of
/// the schema.
pub fn translate(path: &Path, source: Option<Source>, flags: &[String]) -> Result<Translated, TrainError> {
    let text = bounded::read_text(path, LARGEST).map_err(RuntimeError::io(path))?;
    translate_text(&text, &EscapedPath(path).to_string(), source, flags)
}

fn translate_text(
    text: &str,
    name: &str,
    source: Option<Source>,
    flags: &[String],
) -> Result<Translated, TrainError> {
    let tree = tree(text).map_err(|why| ConfigError::Foreign { name: name.to_owned(), why })?;
    let is_ours = matches!(&tree.kind, NodeKind::Map(entries) if !entries.is_empty())
        && faults(&tree, &schema()).is_empty();
    if source.is_none() && is_ours {
        return Err(ConfigError::Ours { name: name.to_owned() }.into());
    }
    let Some(source) = source.or_else(|| recognise(&tree)) else {
        let known = Source::ALL.map(Source::word).join(", ");
        return Err(ConfigError::UnknownTrainer { name: name.to_owned(), known }.into());
    };
    let mut leaves = vec![];
    flatten(&tree, "", &mut leaves);
    let mut leaves: Vec<(String, &Node, Option<&'static ForeignKey>)> = leaves
        .into_iter()
        .map(|(path, node)| (path.clone(), node, row(&path, Some(source.trainer()))))
        .collect();
    // Conversions read keys that other conversions set: a number of sequences needs `data.longest`, a fraction
    // of the learning rate needs `optimizer.lr`, a remat option needs `memory.remat`, and a number of
    // accumulation steps needs the number of tokens of a micro-batch, which may itself come from a number of
    // sequences.
    leaves.sort_by_key(|(_, _, row)| match row.and_then(|row| row.convert) {
        Some(Convert::Sequences | Convert::OfLr | Convert::RematOption) => 1,
        Some(Convert::Accumulation) => 2,
        _ => 0,
    });
    let mut made = Translation { tree: Node::of(&json!({}))?, became: vec![], missing: vec![], unset: vec![] };
    for (path, node, row) in leaves {
        made.take(&path, node, row)?;
    }
    made.complete(source)?;
    let config = TrainConfig::parse(&made.tree.to_yaml(), &format!("{name}, translated"), flags)?;
    // Keys that a flag sets are not reported as missing.
    let set: Vec<&str> = flags.iter().filter_map(|flag| flag.split_once('=')).map(|(key, _)| key).collect();
    let unset = made.unset.into_iter().filter(|(key, _)| !set.contains(key));
    made.missing.extend(unset.map(|(key, why)| format!("`{key}`: {why}")));
    Ok(Translated { source, config, became: made.became, missing: made.missing })
}

/// Parses a text as JSON, TOML or YAML.
fn tree(text: &str) -> Result<Node, String> {
    if text.trim_start().starts_with('{') {
        let value: Value = serde_json::from_str(text).map_err(|e| format!("not JSON: {e}"))?;
        return Node::of(&value).map_err(|e| e.to_string());
    }
    // TOML first: a YAML mapping `key: value` is not valid TOML, so the formats cannot be confused.
    match toml::from_str::<Value>(text) {
        Ok(value) => Node::of(&value).map_err(|e| e.to_string()),
        Err(_) => parse(text).map_err(|e| e.to_string()),
    }
}

/// Finds the trainer of a file by its top-level keys.
fn recognise(tree: &Node) -> Option<Source> {
    use Source::{Ava, DeepSpeed, HuggingFace, Torchtitan};
    let has = |source: &Source| source.signs().iter().any(|key| tree.get(key).is_some());
    // Files of Ava have sections such as `model` and `training`, which files of other trainers have too, so Ava is
    // tried last.
    [Torchtitan, DeepSpeed, HuggingFace, Ava].into_iter().find(has)
}

/// Appends all values of a tree with their dotted paths to `found`; lists are values.
fn flatten<'a>(node: &'a Node, path: &str, found: &mut Vec<(String, &'a Node)>) {
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
    /// The translated configuration.
    tree: Node,
    /// As [`Translated::became`].
    became: Vec<String>,
    /// As [`Translated::missing`].
    missing: Vec<String>,
    /// Keys that the file does not set and that have no good default, each with the reason.
    unset: Vec<(&'static str, String)>,
}

/// Translation of one key and its value.
enum Outcome {
    /// Keys of this program's schema with values.
    Values(Vec<(String, Value)>),
    /// Not needed, with the reason.
    Idle(String),
    /// Not supported, with the reason.
    No(String),
}

impl Translation {
    /// Translates one key of the file, `row` being its row in the table of equivalent keys, and records the
    /// outcome.
    fn take(&mut self, path: &str, node: &Node, row: Option<&'static ForeignKey>) -> Result<(), TrainError> {
        let written = format!("`{path}` {}", node.inline());
        let outcome = match row {
            None => Outcome::No("plimsoll has no such setting".to_owned()),
            Some(row) => self.outcome(row, node),
        };
        match outcome {
            Outcome::Idle(why) => self.became.push(format!("{written}: not needed: {why}")),
            Outcome::No(why) => self.missing.push(format!("{written}: not supported: {why}")),
            Outcome::Values(values) => {
                for (key, value) in values {
                    let node = Node::of(&value)?;
                    // Checked alone, so that a fault is attributed to the original key.
                    let mut alone = Node::of(&json!({}))?;
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
                            return Err(ConfigError::NoSuchKey { written, key }.into());
                        }
                    }
                }
            }
        }
        Ok(())
    }

    /// Translates a value by its row of the table.
    fn outcome(&self, row: &'static ForeignKey, node: &Node) -> Outcome {
        let value = node.to_json();
        let auto = value.as_str() == Some("auto");
        let idle = |idle: &Value| match (idle.as_f64(), value.as_f64()) {
            (Some(a), Some(b)) => a == b,
            (_, _) => *idle == value,
        };
        match row.answer() {
            Answer::Needless(why) => Outcome::Idle(why.to_owned()),
            _ if value.is_null() || row.idle.iter().any(idle) => {
                Outcome::Idle("this value has no effect".to_owned())
            }
            Answer::No(why) => Outcome::No(why.to_owned()),
            Answer::Key(..) if auto && row.words.is_none() => {
                Outcome::Idle("with auto the value comes from another file".to_owned())
            }
            Answer::Key(ours, note) => match self.converted(row, ours, note, &value) {
                Ok(outcome) => outcome,
                Err(why) => Outcome::No(why),
            },
        }
    }

    /// Translates a value to key `ours`, by the row's table of words or its conversion. `Err` has the reason
    /// why this value is not supported.
    fn converted(&self, row: &ForeignKey, ours: &str, note: &str, value: &Value) -> Result<Outcome, String> {
        let one = |value: Value| Ok(Outcome::Values(vec![(ours.to_owned(), value)]));
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
        let number = || value.as_f64().ok_or_else(|| "it is not a number".to_owned());
        let whole =
            || value.as_u64().filter(|n| *n > 0).ok_or_else(|| "it is not a whole number from 1 on".to_owned());
        match convert {
            Convert::Gigabytes => one(json!(format!("{}GB", number()?))),
            Convert::Share => {
                let share = number()?;
                one(json!(format!("{}%", if share <= 1.0 { share * 100.0 } else { share })))
            }
            Convert::Sequences => {
                let longest = self.whole("data.longest").unwrap_or(TrainConfig::default().data.longest);
                one(json!(whole()?.saturating_mul(longest)))
            }
            Convert::Accumulation => {
                let steps = whole()?;
                match (self.whole("batch.micro_tokens"), self.whole("batch.tokens")) {
                    (Some(micro), _) => one(json!(micro.saturating_mul(steps))),
                    (None, Some(tokens)) if tokens.is_multiple_of(steps) => {
                        Ok(Outcome::Values(vec![("batch.micro_tokens".to_owned(), json!(tokens / steps))]))
                    }
                    (None, _) => Err("the file does not say how large a micro-batch is".to_owned()),
                }
            }
            Convert::PowerOfTwo => one(json!(2f64.powf(number()?))),
            Convert::Beta1 | Convert::Beta2 => {
                // If the file sets only one of the two, the other has the default of Kingma and Ba 2015
                // (arXiv:1412.6980), as in these trainers.
                let mut betas = match self.tree.at(ours).map(Node::to_json) {
                    Some(Value::Array(betas)) if betas.len() == 2 => betas,
                    _ => vec![json!(0.9), json!(0.999)],
                };
                betas[usize::from(convert == Convert::Beta2)] = value.clone();
                one(Value::Array(betas))
            }
            Convert::OfLr => match self.tree.at("optimizer.lr").map(Node::to_json).and_then(|lr| lr.as_f64()) {
                Some(lr) => one(json!(number()? / lr)),
                None => Err("the file does not state the learning rate that it is a share of".to_owned()),
            },
            Convert::ZeroIsNull => one(if number()? == 0.0 { Value::Null } else { value.clone() }),
            Convert::Whole => match number()? {
                n if n >= 1.0 && n.fract() == 0.0 => one(json!(n as u64)),
                _ => Err(format!("`{ours}` is a whole number")),
            },
            Convert::Strategy => match value.as_str() {
                Some("no") => one(Value::Null),
                Some("steps") => Ok(Outcome::Idle(
                    "the interval is taken from the key that counts the \
                    steps"
                        .to_owned(),
                )),
                _ => Err(format!("`{ours}` counts steps")),
            },
            Convert::One => one(json!([value])),
            Convert::RematOption => {
                let selective = self.tree.at(ours).map(Node::to_json) == Some(json!("selective"));
                let every = value.as_u64().or_else(|| value.as_str()?.parse().ok());
                match (selective, every, value.as_str()) {
                    (false, ..) => Ok(Outcome::Idle("it is of the mode selective".to_owned())),
                    (true, Some(n), _) => Ok(Outcome::Values(vec![
                        (ours.to_owned(), json!("every_n")),
                        ("memory.remat_every".to_owned(), json!(n)),
                    ])),
                    (true, None, Some("op")) => one(json!("selective")),
                    (true, None, _) => Err("it is neither op nor a number of layers".to_owned()),
                }
            }
            Convert::Needless => Ok(Outcome::Idle(note.to_owned())),
            Convert::ByHand => {
                Err(format!("set `{ours}` by hand{}{note}", if note.is_empty() { "" } else { ": " }))
            }
        }
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
        self.tree.set(&key.split('.').collect::<Vec<_>>(), Node::of(value)?);
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
    fn complete(&mut self, source: Source) -> Result<(), TrainError> {
        if self.has("batch.micro_tokens") && !self.has("batch.tokens") {
            let micro = self.whole("batch.micro_tokens");
            self.set("batch.tokens", &json!(micro))?;
        }
        let fp16 = self.tree.at("precision.kind").map(Node::to_json) == Some(json!("fp16"));
        for key in ["initial_scale", "growth_interval"] {
            if !fp16 && self.has(&format!("precision.{key}")) {
                self.remove("precision", key);
                self.became
                    .push(format!("`precision.{key}`: not needed: only precision.kind fp16 has a loss scale"));
            }
        }
        let model = ["hidden", "layers", "heads", "vocabulary", "from", "kind", "experts"];
        if !model.iter().any(|key| self.has(&format!("model.{key}"))) {
            let why = "the file does not name the model; set model.from, or model.kind and the sizes";
            self.unset.push(("model.from", why.to_owned()));
        } else if !self.has("model.kind") && !self.has("model.from") {
            let kind = if self.has("model.experts") { "moe_lm" } else { "dense_lm" };
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
        } else if !ends {
            let kind = self.tree.at("schedule.kind").map(Node::to_json);
            let kind = kind.as_ref().and_then(Value::as_str).unwrap_or("cosine").to_owned();
            if !["constant", "cosine_restarts", "step"].contains(&kind.as_str()) {
                self.set("schedule.kind", &json!("constant"))?;
                let why = format!(
                    "a schedule of the kind {kind} ends at a step, and the file states epochs; constant is \
                        written instead: set schedule.kind={kind} and schedule.steps"
                );
                self.unset.push(("schedule.steps", why));
            }
            let share = self.tree.at("schedule.warmup").map(Node::to_json);
            if share.is_some_and(|share| share.as_u64().is_none()) {
                self.remove("schedule", "warmup");
                let why = "a share of the steps needs the number of steps, but the file gives epochs; the warm-up is \
                        omitted";
                self.unset.push(("schedule.warmup", why.to_owned()));
            }
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

fn listed<'a>(words: impl Iterator<Item = &'a String>) -> String {
    words.map(String::as_str).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::super::{OptimizerKind, PrecisionKind, Remat, RematPolicy, ScheduleKind, Warmup};
    use super::*;

    fn translated(text: &str, flags: &[&str]) -> Translated {
        let flags: Vec<String> = flags.iter().map(|flag| (*flag).to_owned()).collect();
        translate_text(text, "theirs", None, &flags).unwrap_or_else(|e| panic!("{text}: {e}"))
    }

    fn said(lines: &[String], wanted: &str) {
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
        assert_eq!(t.source, Source::HuggingFace);
        assert_eq!(
            (c.run.output.as_deref(), c.optimizer.lr, c.run.steps, c.run.epochs),
            (Some("out"), 5e-5, Some(500), Some(3))
        );
        assert_eq!((c.batch.micro_tokens.0, c.batch.tokens), (Some(8 * 1024), 32 * 1024));
        assert_eq!((c.schedule.kind, c.schedule.warmup), (ScheduleKind::Linear, Warmup::Share(0.1)));
        assert_eq!(
            (c.optimizer.kind, c.optimizer.betas, c.optimizer.clip_norm),
            (OptimizerKind::Adamw, [0.9, 0.98], None)
        );
        assert_eq!(
            (c.precision.kind, &c.memory.remat),
            (PrecisionKind::Bf16, &Remat::Policy(RematPolicy::Full))
        );
        said(&t.became, "`max_grad_norm` 0: `optimizer.clip_norm` null");
        said(&t.became, "`learning_rate` 5e-5: `optimizer.lr` 5e-5");
        said(&t.became, "`fp16` false: not needed: this value has no effect");
        said(&t.missing, "`fsdp` full_shard: not supported: training uses a single device");
        said(&t.missing, "`unheard_of` 1: not supported: plimsoll has no such setting");
        assert!(t.missing.iter().any(|line| line.starts_with("`tf32` true: not supported: f32 matmuls")));
        assert!(t.missing.iter().any(|line| line.starts_with("`data.train`: ")));
        // A key set by a flag is not missing.
        let t = translated(r#"{"output_dir": "out", "max_steps": 9}"#, &["data.train=[a.txt]"]);
        assert!(!t.missing.iter().any(|line| line.starts_with("`data.train`: ")), "{:?}", t.missing);
        assert_eq!(t.config.data.train, ["a.txt"]);
    }

    #[test]
    fn epochs_have_no_step_at_which_a_schedule_ends() {
        let t =
            translated(r#"{"num_train_epochs": 3, "lr_scheduler_type": "linear", "warmup_ratio": 0.1}"#, &[]);
        assert_eq!(
            (t.config.schedule.kind, t.config.schedule.warmup),
            (ScheduleKind::Constant, Warmup::Steps(0))
        );
        assert!(t.missing.iter().any(|line| line.contains("set schedule.kind=linear and schedule.steps")));
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
            (Source::DeepSpeed, PrecisionKind::Fp16, 4096.0)
        );
        assert_eq!((c.batch.micro_tokens.0, c.batch.tokens), (Some(4096), 8192));
        assert_eq!((c.optimizer.lr, c.run.steps, c.run.log_every), (1e-3, Some(100), 5));
        assert_eq!((c.schedule.kind, c.schedule.warmup), (ScheduleKind::Linear, Warmup::Steps(10)));
        said(&t.missing, "`zero_optimization.stage` 2: not supported: training uses a single device");
        assert!(
            t.missing.iter().any(|line| line.starts_with("`zero_optimization.offload_optimizer.device` cpu: "))
        );
        let auto =
            "`optimizer.params.weight_decay` auto: not needed: with auto the value comes from another file";
        said(&t.became, auto);
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
        assert_eq!((t.source, c.model.kind.name(), c.run.steps), (Source::Torchtitan, "dense_lm", Some(1000)));
        assert_eq!((c.data.longest, c.batch.micro_tokens.0, c.optimizer.lr), (2048, Some(2048), 3e-4));
        assert_eq!((&c.memory.remat, c.memory.remat_every), (&Remat::Policy(RematPolicy::EveryN), 2));
        assert_eq!(c.schedule.warmup, Warmup::Steps(200));
        let two = "`parallelism.tensor_parallel_degree` 2: not supported: training uses a single device";
        said(&t.missing, two);
        assert!(t.missing.iter().any(|line| line.starts_with("`model.flavor` \"8B\": not supported: ")));
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
        assert_eq!((t.source, c.model.kind.name(), c.model.layers), (Source::Ava, "moe_lm", 14));
        assert_eq!(
            (c.optimizer.kind, c.precision.kind, c.data.longest),
            (OptimizerKind::Adamw, PrecisionKind::Bf16, 256)
        );
        assert_eq!((c.memory.budget.as_str(), &c.memory.remat), ("20GB", &Remat::Policy(RematPolicy::Full)));
        for key in [
            "deepspeed.zero_stage",
            "dynamic_batching.enabled",
            "memory.enable_cpu_offload",
            "memory.float32_matmul_precision",
        ] {
            let start = format!("`{key}` ");
            assert!(
                t.missing.iter().any(|line| line.starts_with(&start) && line.contains("not supported")),
                "{key}"
            );
        }
    }

    #[test]
    fn a_file_of_no_trainer_is_refused() {
        for (text, wanted) in [
            (
                "{\"a\": 1}",
                "theirs: its keys do not belong to a supported trainer; name the trainer with --from-format: \
                    ava, deepspeed",
            ),
            ("{", "theirs: not JSON: "),
            ("a: [", "theirs: line "),
        ] {
            let error = translate_text(text, "theirs", None, &[]).expect_err(wanted).to_string();
            assert!(error.starts_with(wanted), "{error}");
        }
        let error =
            translate_text("{\"max_steps\": 5, \"warmup_steps\": 9}", "theirs", Some(Source::HuggingFace), &[]);
        let error = error.expect_err("a warm-up beyond the end").to_string();
        assert!(error.starts_with("theirs, translated: schedule.warmup 9 must be shorter"), "{error}");
    }
}
