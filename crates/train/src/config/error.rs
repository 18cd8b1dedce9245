//! Errors of training configurations. Invariant: every message names the configuration or the setting, and the key
//! if it is about one key.
use super::foreign::complaint;
use super::schema::SchemaFault;
use super::yaml::SyntaxError;
use plimsoll_setting::{Command, Setting};

/// Error of reading, checking or translating a training configuration.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum TrainConfigError {
    /// The text is not YAML of the accepted subset.
    #[error("{name}, {error}")]
    Syntax {
        /// Name of the configuration.
        name: String,
        /// The line and the error.
        error: SyntaxError,
    },
    /// Keys that are not in the schema, or values that the schema does not allow.
    #[error("{}", complaint(name, faults))]
    Keys {
        /// Name of the configuration.
        name: String,
        /// The invalid keys and values.
        faults: Vec<SchemaFault>,
    },
    /// Values that are valid individually but contradict each other.
    #[error("{name}:{}", listed(broken))]
    Rules {
        /// Name of the configuration.
        name: String,
        /// One sentence per violated rule.
        broken: Vec<String>,
    },
    /// A value that the schema allows but the configuration's types cannot represent.
    #[error("{name}: {why}")]
    Value {
        /// Name of the configuration.
        name: String,
        /// Message of the deserializer.
        why: String,
    },
    /// An override is not of the form `key=value`.
    #[error("{given}: {why}", given = Setting::key(text.clone()))]
    Set {
        /// The override.
        text: String,
        /// Description of the error.
        why: String,
    },
    /// The sizes of the model are given both by `model.preset` and by `model.from`.
    #[error("{name}: model.preset and model.from both determine the sizes of the model; remove one of them")]
    PresetAndModel {
        /// Name of the configuration.
        name: String,
    },
    /// Keys contradict the model of `model.from`.
    #[error("{}", keys.join("\n"))]
    Contradiction {
        /// One message per key, with the line or flag, the key's value and the model's value.
        keys: Vec<String>,
    },
    /// `model.from` names a weight file without a config.json beside it.
    #[error(
        "model.from {from}: no config.json was found beside this weight file; give the folder of the model, or, \
            if the file is a head, set model.kind head"
    )]
    NoConfig {
        /// Value of `model.from`.
        from: String,
    },
    /// Another trainer's configuration is not valid JSON, TOML or YAML.
    #[error("{name}: {why}")]
    Foreign {
        /// Name of the configuration.
        name: String,
        /// Message of the parser.
        why: String,
    },
    /// A configuration has the keys of no supported trainer.
    #[error(
        "{name}: its keys do not belong to a supported trainer; name the trainer with {from_format}: {known}",
        from_format = Setting::FromFormat
    )]
    UnknownTrainer {
        /// Name of the configuration.
        name: String,
        /// The supported trainers, separated by commas.
        known: String,
    },
    /// Another trainer's configuration has values that no default may replace.
    #[error("{name}: cannot be translated:{}", listed(keys))]
    Untranslatable {
        /// Name of the configuration.
        name: String,
        /// One sentence for each value.
        keys: Vec<String>,
    },
    /// A configuration of another trainer was given as one of this program.
    #[error(
        "{name}: this is a configuration of {trainer}; give it as {from_config_file}, or translate it with \
         `{train} {from_config_file} {print_config}`",
        from_config_file = Setting::FromConfig.to("FILE"),
        print_config = Setting::PrintConfig,
        train = Command::Train
    )]
    OfTrainer {
        /// Name of the configuration.
        name: String,
        /// The trainer.
        trainer: &'static str,
    },
    /// The translation of another trainer's configuration has placeholders.
    #[error(
        "{name}: the file does not have all that a run needs:{}; give them with {overrides}",
        listed(missing),
        overrides = Setting::Overrides
    )]
    Placeholders {
        /// Name of the configuration.
        name: String,
        /// The keys.
        missing: Vec<String>,
    },
    /// A configuration to translate has only keys and values of this schema.
    #[error(
        "{name}: this is a configuration of plimsoll already; give it without {from_config}",
        from_config = Setting::FromConfig
    )]
    Ours {
        /// Name of the configuration.
        name: String,
    },
    /// The table of equivalent keys maps a key to a key that is not in the schema.
    #[error("{written}: there is no key `{key}`")]
    NoSuchKey {
        /// The other trainer's key and value.
        written: String,
        /// The missing key.
        key: String,
    },
}

/// Formats a single rule on the same line, and several rules on one line each.
fn listed(broken: &[String]) -> String {
    match broken {
        [only] => format!(" {only}"),
        many => format!("\n  {}", many.join("\n  ")),
    }
}
