//! Configuration keys of other trainers and their equivalents in this schema. Invariant: `foreign.toml` is the only
//! table; error messages, `--from-config`, docs/configuration.md and the tests all read it, and every key of this
//! schema that the table names exists.

use super::schema::{SchemaFault, Wrong, leaves, properties, schema};
use plimsoll_setting::{Command, Setting};
use serde::Deserialize;
use serde_json::Value;
use std::collections::BTreeMap;
use std::sync::LazyLock;

/// Equivalent of another trainer's configuration key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// The equivalent key of this schema, and a note on how it differs (may be empty).
    Key(&'static str, &'static str),
    /// No equivalent because the setting is not needed; the reason.
    Needless(&'static str),
    /// No equivalent because the setting is not supported; the reason.
    No(&'static str),
}

use Answer::{Key, Needless, No};

/// Contents of `foreign.toml`.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct ForeignTable {
    trainer: Vec<TrainerKeys>,
}

/// Configuration keys of one other trainer.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TrainerKeys {
    /// Name of the trainer.
    pub name: String,
    /// The trainer's keys.
    pub keys: Vec<ForeignKey>,
}

/// Table row for one key of another trainer; the format is described at the top of `foreign.toml`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ForeignKey {
    /// The key. A dotted path matches the end of a full path, and `*` matches any key of a section.
    pub key: String,
    /// The equivalent key of this schema.
    becomes: Option<String>,
    /// Why the setting is not needed.
    needless: Option<String>,
    /// Why the setting is not supported.
    no: Option<String>,
    /// How the equivalent key differs.
    #[serde(default)]
    note: String,
    /// Values that request nothing, so that the key can be ignored.
    #[serde(default)]
    pub(super) idle: Vec<Value>,
    /// Why the values of `idle` request nothing.
    pub(super) idle_why: Option<String>,
    /// A key of this schema that must be given if the value cannot be honoured: no default may replace it.
    pub(super) must: Option<String>,
    /// The value of the equivalent key that stands for `true`.
    pub(super) true_is: Option<String>,
    /// Mapping from words of the other trainer to values of the equivalent key.
    pub(super) words: Option<BTreeMap<String, String>>,
    /// Conversion applied to the value, if it is neither copied nor mapped by `words`.
    pub(super) convert: Option<ValueConversion>,
}

/// Conversion of another trainer's value where it is neither copied nor mapped word by word.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum ValueConversion {
    /// Number of gigabytes to a size such as `22GB`.
    Gigabytes,
    /// Fraction to a percentage.
    Share,
    /// Number of sequences to a number of tokens: multiplied by `data.longest`.
    Sequences,
    /// Number of gradient-accumulation steps to the number of tokens of an optimizer step.
    Accumulation,
    /// Exponent of two to the number itself.
    PowerOfTwo,
    /// First element of `optimizer.betas`.
    Beta1,
    /// Second element of `optimizer.betas`.
    Beta2,
    /// Absolute learning rate to a fraction of `optimizer.lr`.
    OfLr,
    /// 0 to null; other values are copied.
    ZeroIsNull,
    /// A number with no fractional part to an integer.
    Whole,
    /// `no` to null, `epoch` to an epoch; for `steps` the interval is taken from another key.
    Strategy,
    /// A share of the memory, or a percentage above 1, to a share.
    Threshold,
    /// Micro-steps of several sizes: true is the default profile, and false turns them off.
    Dynamic,
    /// A share of the steps, if no number of steps is given.
    WarmupShare,
    /// A number of epochs, if no number of steps is given.
    Epochs,
    /// A number of steps, or a share of all steps.
    Interval,
    /// A number of epochs between two events.
    EveryEpochs,
    /// Names of experiment trackers, of which TensorBoard is one here.
    Trackers,
    /// Precision of f32 matmuls.
    MatmulPrecision,
    /// Whether a model has experts.
    Moe,
    /// A number of experts; 0 and 1 are a model without experts.
    Experts,
    /// Name of the sizes of a model.
    Flavor,
    /// torchtitan's converters of modules, some of which are number formats.
    Converters,
    /// Read together with another key.
    Later,
    /// A single value to a list with that value.
    One,
    /// torchtitan's `selective_ac_option`: `op` or a number of layers.
    RematOption,
    /// True keeps optimizer states and masters in host memory.
    OffloadStates,
    /// True keeps optimizer states and masters on disk.
    OffloadStatesToDisk,
    /// True keeps optimizer states, masters and parameters in host memory.
    OffloadAll,
    /// `cpu` or `nvme`, where optimizer states and masters are kept.
    OffloadStatesTo,
    /// `cpu` or `nvme`, where parameters are kept.
    OffloadParametersTo,
    /// The value is not needed; the reason is the note.
    Needless,
    /// Not converted automatically; the user has to set the key.
    ByHand,
}

/// The parsed table, one entry per trainer. A test checks that the file parses.
static TABLE: LazyLock<Vec<TrainerKeys>> =
    LazyLock::new(|| toml::from_str::<ForeignTable>(include_str!("foreign.toml")).unwrap_or_default().trainer);

/// Returns the keys of all other trainers, one entry per trainer.
pub fn table() -> &'static [TrainerKeys] {
    &TABLE
}

/// Returns the equivalent of a key that is not in this schema; `None` if no trainer's table has the key.
pub fn counterpart(path: &str) -> Option<Answer> {
    row(path, None).map(ForeignKey::answer)
}

/// Finds the table row for a key, preferring rows of `trainer` over rows of other trainers.
pub(super) fn row(path: &str, trainer: Option<&str>) -> Option<&'static ForeignKey> {
    let path: Vec<String> = path.split('.').map(|key| key.to_lowercase().replace('-', "_")).collect();
    let all =
        table().iter().flat_map(|t| t.keys.iter().map(move |row| (Some(t.name.as_str()) == trainer, row)));
    all.filter(|(_, row)| row.matches(&path)).max_by_key(|(own, row)| (*own, row.weight())).map(|(_, row)| row)
}

impl ForeignKey {
    /// What the foreign key becomes here: a key of this schema, nothing because none is needed, or unsupported; with the reason.
    pub fn answer(&'static self) -> Answer {
        match (&self.becomes, &self.needless, &self.no) {
            (Some(ours), ..) => Key(ours, &self.note),
            (None, Some(why), _) => Needless(why),
            (None, None, why) => No(why.as_deref().unwrap_or_default()),
        }
    }

    fn matches(&self, path: &[String]) -> bool {
        let keys: Vec<&str> = self.key.split('.').collect();
        match keys.as_slice() {
            // A whole section of the other trainer: matches at any depth, with any keys below it.
            [section, "*"] => path.iter().any(|key| key == section),
            keys => path.len() >= keys.len() && path[path.len() - keys.len()..].iter().eq(keys.iter()),
        }
    }

    /// Specificity of a row: a key outranks a section, and a longer path outranks a shorter path.
    fn weight(&self) -> (bool, usize) {
        (!self.key.ends_with(".*"), self.key.matches('.').count())
    }
}

impl Answer {
    /// Formats the answer as the end of a sentence about the key.
    pub fn sentence(self) -> String {
        with_words(&self.text())
    }

    /// The sentence with settings and commands in braces, as in the table.
    pub(super) fn text(self) -> String {
        match self {
            Key(ours, "") => format!("use `{ours}`"),
            Key(ours, note) => format!("use `{ours}` ({note})"),
            Needless(why) => format!("not needed: {why}"),
            No(why) => format!("not supported: {why}"),
        }
    }
}

/// Replaces the settings and commands in braces of a text of the table by their words: `{resume=auto}`, `{train}`.
pub(super) fn with_words(text: &str) -> String {
    let named = [
        Setting::FromConfig,
        Setting::NoProgress,
        Setting::Quiet,
        Setting::Resume,
        Setting::Timeline,
        Setting::Verbose,
    ];
    let mut pieces = text.split('{');
    let mut written = pieces.next().unwrap_or_default().to_owned();
    for piece in pieces {
        let (inside, after) = piece.split_once('}').unwrap_or((piece, ""));
        let (name, value) = inside.split_once('=').map_or((inside, None), |(name, value)| (name, Some(value)));
        let setting = named.iter().find(|setting| setting.name() == name).cloned();
        written += &match (setting, value) {
            (Some(setting), Some(value)) => setting.to(value).to_string(),
            (Some(setting), None) => setting.to_string(),
            (None, _) if name == Command::Train.name() => format!("{:#}", Command::Train),
            (None, _) => format!("{{{inside}}}"),
        };
        written += after;
    }
    written
}

/// Formats all faults of a configuration file as one error message.
pub(crate) fn complaint(name: &str, faults: &[SchemaFault]) -> String {
    let lines: Vec<String> = faults.iter().map(|fault| sentence(name, fault)).collect();
    match lines.as_slice() {
        [only] => only.clone(),
        many => format!("{name}: {} keys cannot be used\n{}", many.len(), many.join("\n")),
    }
}

fn sentence(name: &str, fault: &SchemaFault) -> String {
    let path = &fault.path;
    let place =
        if fault.line == 0 { Setting::Overrides.to_string() } else { format!("{name}, line {}", fault.line) };
    match &fault.what {
        Wrong::Value { found, allowed } if path.is_empty() => format!("{place}: {found} is not {allowed}"),
        Wrong::Value { found, allowed } => format!("{place}: `{path}` is {found}; it must be {allowed}"),
        Wrong::Unknown => {
            let answer = match (counterpart(path), nearest(path)) {
                (Some(answer), _) => answer.sentence(),
                (None, Some(near)) => format!("there is no such key; did you mean `{near}`?"),
                (None, None) => {
                    format!("there is no such key; `{} {}` lists all keys", Command::Train, Setting::Schema)
                }
            };
            format!("{place}: `{path}`: {answer}")
        }
    }
}

/// The key of this schema with the smallest edit distance to `path`, by its last component or by the full path.
fn nearest(path: &str) -> Option<String> {
    let schema = schema();
    let mut known: Vec<String> = leaves(&schema).into_iter().map(|leaf| leaf.path).collect();
    known.extend(properties(&schema).into_iter().flatten().map(|(section, _)| section.clone()));
    let near = known.into_iter().min_by_key(|ours| distance(path, ours))?;
    // At most a third of the characters may differ; beyond that it is probably another word, not a misspelling.
    let limit = (last_component(path).chars().count() / 3).max(1);
    (distance(path, &near).0 <= limit).then_some(near)
}

/// Edit distance of two keys, by the last component or the full path; of equal distances, that of the full path decides.
fn distance(path: &str, ours: &str) -> (usize, usize) {
    let by_key = strsim::osa_distance(&last_component(path), &last_component(ours));
    let by_path = strsim::osa_distance(path, ours);
    (by_key.min(by_path), by_path)
}

/// The last component of a key, in the spelling of this schema.
fn last_component(path: &str) -> String {
    path.rsplit('.').next().unwrap_or_default().to_lowercase().replace('-', "_")
}
