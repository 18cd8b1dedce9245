//! Keys of other trainers, and what stands for them here. Invariant: one table, `foreign.toml`; error messages,
//! `--from-config`, docs/training-keys.md and the tests read it, and every key of ours that it names is in the schema.

use super::schema::{Fault, Wrong, leaves, properties, schema};
use serde::Deserialize;
use serde_json::Value;
use std::collections::BTreeMap;
use std::sync::LazyLock;

/// The counterpart of a key of another trainer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// A key of ours, and how it differs.
    Key(&'static str, &'static str),
    /// Nothing, since it is not needed: why.
    Needless(&'static str),
    /// Nothing: why it cannot be honoured.
    No(&'static str),
}

use Answer::{Key, Needless, No};

/// The table as its file has it.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    trainer: Vec<Trainer>,
}

/// The keys of another trainer.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Trainer {
    /// Its name.
    pub name: String,
    /// Its keys.
    pub keys: Vec<Row>,
}

/// A key of another trainer: see the head of `foreign.toml`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Row {
    /// The key; a path counts from its end, and `*` is any key of a section.
    pub key: String,
    /// The key of ours.
    becomes: Option<String>,
    /// Why nothing stands for it.
    needless: Option<String>,
    /// Why it cannot be honoured.
    no: Option<String>,
    /// How the key of ours differs.
    #[serde(default)]
    note: String,
    /// Values that ask for nothing.
    #[serde(default)]
    pub(super) idle: Vec<Value>,
    /// The value of ours for `true`.
    pub(super) true_is: Option<String>,
    /// The values of ours for words.
    pub(super) words: Option<BTreeMap<String, String>>,
    /// Another rule for values.
    pub(super) convert: Option<Convert>,
}

/// How a value of another trainer becomes one of ours, where it is neither the same value nor a word for a word.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Convert {
    /// A number of gigabytes becomes a size.
    Gigabytes,
    /// A share becomes a percentage.
    Share,
    /// Sequences become tokens: times `data.longest`.
    Sequences,
    /// Micro-steps of a step become tokens of a step.
    Accumulation,
    /// The exponent of two becomes the number.
    PowerOfTwo,
    /// The first of `optimizer.betas`.
    Beta1,
    /// The second of `optimizer.betas`.
    Beta2,
    /// A learning rate becomes a share of `optimizer.lr`.
    OfLr,
    /// 0 becomes null.
    ZeroIsNull,
    /// A number without a fraction becomes a whole number.
    Whole,
    /// `no` becomes null; `steps` leaves the number to another key.
    Strategy,
    /// A value becomes a list of it.
    One,
    /// torchtitan's `selective_ac_option`.
    RematOption,
    /// The value is not needed, for the reason of the note.
    Needless,
    /// No rule: a person decides.
    ByHand,
}

/// The table, by the trainer whose keys they are. That the file can be read is tested.
static TABLE: LazyLock<Vec<Trainer>> =
    LazyLock::new(|| toml::from_str::<File>(include_str!("foreign.toml")).unwrap_or_default().trainer);

/// The keys of other trainers, by trainer.
pub fn table() -> &'static [Trainer] {
    &TABLE
}

/// The counterpart of a key that is not ours.
pub fn counterpart(path: &str) -> Option<Answer> {
    row(path, None).map(Row::answer)
}

/// The row of a key: of `trainer` where it has one, else of any.
pub(super) fn row(path: &str, trainer: Option<&str>) -> Option<&'static Row> {
    let path: Vec<String> = path.split('.').map(|key| key.to_lowercase().replace('-', "_")).collect();
    let all =
        table().iter().flat_map(|t| t.keys.iter().map(move |row| (Some(t.name.as_str()) == trainer, row)));
    all.filter(|(_, row)| row.matches(&path)).max_by_key(|(own, row)| (*own, row.weight())).map(|(_, row)| row)
}

impl Row {
    /// What stands for the key.
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
            // A section of theirs, whatever is in it.
            [section, "*"] => path.iter().any(|key| key == section),
            keys => path.len() >= keys.len() && path[path.len() - keys.len()..].iter().eq(keys.iter()),
        }
    }

    /// A key is closer than a section, a longer path than a shorter one.
    fn weight(&self) -> (bool, usize) {
        (!self.key.ends_with(".*"), self.key.matches('.').count())
    }
}

impl Answer {
    /// As the end of a sentence about the key.
    pub fn sentence(self) -> String {
        match self {
            Key(ours, "") => format!("here it is `{ours}`"),
            Key(ours, note) => format!("here it is `{ours}` ({note})"),
            Needless(why) => format!("not needed: {why}"),
            No(why) => format!("cannot be honoured: {why}"),
        }
    }
}

/// All that is wrong in a file, as one message.
pub fn complaint(name: &str, faults: &[Fault]) -> String {
    let lines: Vec<String> = faults.iter().map(|fault| sentence(name, fault)).collect();
    match lines.as_slice() {
        [only] => only.clone(),
        many => format!("{name}: {} keys cannot be used\n{}", many.len(), many.join("\n")),
    }
}

fn sentence(name: &str, fault: &Fault) -> String {
    let path = &fault.path;
    let place = if fault.line == 0 { "--set".to_owned() } else { format!("{name}, line {}", fault.line) };
    match &fault.what {
        Wrong::Value { found, allowed } if path.is_empty() => format!("{place}: {found} is no {allowed}"),
        Wrong::Value { found, allowed } => format!("{place}: `{path}` is {found}; it is {allowed}"),
        Wrong::Unknown => {
            let answer = match (counterpart(path), nearest(path)) {
                (Some(answer), _) => answer.sentence(),
                (None, Some(near)) => format!("there is no such key; did you mean `{near}`?"),
                (None, None) => "there is no such key; plimsoll train --schema lists all".to_owned(),
            };
            format!("{place}: `{path}`: {answer}")
        }
    }
}

/// The key of ours that a misspelt one is nearest to.
fn nearest(path: &str) -> Option<String> {
    let schema = schema();
    let mut known: Vec<String> = leaves(&schema).into_iter().map(|leaf| leaf.path).collect();
    known.extend(properties(&schema).into_iter().flatten().map(|(section, _)| section.clone()));
    let last = |path: &str| path.rsplit('.').next().unwrap_or_default().to_lowercase().replace('-', "_");
    let wanted = last(path);
    let distance = |ours: &String| {
        let (by_key, by_path) = (strsim::osa_distance(&wanted, &last(ours)), strsim::osa_distance(path, ours));
        (by_key.min(by_path), by_path)
    };
    let near = known.into_iter().min_by_key(distance)?;
    // A third of the letters: more is another word.
    (distance(&near).0 <= (wanted.chars().count() / 3).max(1)).then_some(near)
}
