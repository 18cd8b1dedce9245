//! Errors of the configuration. Invariant: every message names the file and line, or the flag, and the key.

use super::foreign::complaint;
use super::schema::Fault;

/// Why a configuration was rejected.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// The text is not valid YAML.
    #[error("{name}, {why}")]
    Syntax {
        /// Name of the configuration file.
        name: String,
        /// The line number and the syntax error.
        why: String,
    },
    /// Unknown keys, or values of the wrong type or out of range.
    #[error("{}", complaint(name, faults))]
    Keys {
        /// Name of the configuration file.
        name: String,
        /// All faults that were found.
        faults: Vec<Fault>,
    },
    /// Keys whose combination is not allowed.
    #[error("{name}:{}", listed(broken))]
    Rules {
        /// Name of the configuration file.
        name: String,
        /// One message for each rule that is violated.
        broken: Vec<String>,
    },
    /// A value that the schema accepts and the configuration types cannot represent.
    #[error("{name}: {why}")]
    Value {
        /// Name of the configuration file.
        name: String,
        /// The deserialiser's message.
        why: String,
    },
    /// A `--set` flag that is not of the form `key=value`.
    #[error("--set {flag}: {why}")]
    Set {
        /// Value of the flag.
        flag: String,
        /// What is wrong with the value.
        why: String,
    },
    /// Both `model.preset` and `model.from` are set; each of them determines the sizes of the model.
    #[error(
        "{name}: model.preset gives sizes, and so does the model that model.from names; remove one of them"
    )]
    PresetAndModel {
        /// Name of the configuration file.
        name: String,
    },
    /// Keys that contradict the model named by `model.from`.
    #[error("{}", keys.join("\n"))]
    Contradiction {
        /// One message for each key, with its location and the contradicting value.
        keys: Vec<String>,
    },
    /// `model.from` names a weight file that has no `config.json` next to it.
    #[error(
        "model.from {from}: there is no config.json beside it; name the folder of the model, or, for the file of a head, \
         set model.kind head"
    )]
    NoConfig {
        /// Path of the weight file.
        from: String,
    },
    /// A configuration of another trainer that cannot be parsed.
    #[error("{name}: {why}")]
    Foreign {
        /// Name of the configuration file.
        name: String,
        /// The parse error.
        why: String,
    },
    /// The trainer that a configuration belongs to could not be recognised from its keys.
    #[error("{name}: its keys are of no trainer that is known; say which with --from-format: {known}")]
    UnknownTrainer {
        /// Name of the configuration file.
        name: String,
        /// Names of the supported trainers.
        known: String,
    },
    /// The translation table names a key that is not in the schema.
    #[error("{written}: there is no key `{key}`")]
    NoSuchKey {
        /// The source key with its value, as written in the file.
        written: String,
        /// The key of this schema named by the table.
        key: String,
    },
}

/// A single message follows on the same line; several messages get a line each.
fn listed(broken: &[String]) -> String {
    match broken {
        [only] => format!(" {only}"),
        many => format!("\n  {}", many.join("\n  ")),
    }
}
