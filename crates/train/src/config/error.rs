//! Why a configuration cannot be used. Invariant: every message names the file and line, or the flag, and the key.

use super::foreign::complaint;
use super::schema::Fault;
use super::yaml::SyntaxError;

/// Why a configuration cannot be used.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// A text that is no YAML.
    #[error("{name}, {error}")]
    Syntax {
        /// The configuration.
        name: String,
        /// The line and what is wrong there.
        error: SyntaxError,
    },
    /// Keys that do not exist, or whose values cannot be.
    #[error("{}", complaint(name, faults))]
    Keys {
        /// The configuration.
        name: String,
        /// The faults.
        faults: Vec<Fault>,
    },
    /// Keys that do not go together.
    #[error("{name}:{}", listed(broken))]
    Rules {
        /// The configuration.
        name: String,
        /// The rules that are broken.
        broken: Vec<String>,
    },
    /// A value that the schema admits and the configuration cannot hold.
    #[error("{name}: {why}")]
    Value {
        /// The configuration.
        name: String,
        /// What the parser says.
        why: String,
    },
    /// A flag `--set` that is no key and value.
    #[error("--set {flag}: {why}")]
    Set {
        /// The flag's value.
        flag: String,
        /// What is wrong with it.
        why: String,
    },
    /// Sizes that are given twice.
    #[error("{name}: model.preset and model.from both determine the sizes of the model; remove one of them")]
    PresetAndModel {
        /// The configuration.
        name: String,
    },
    /// Keys that contradict the model that `model.from` names.
    #[error("{}", keys.join("\n"))]
    Contradiction {
        /// Each key with its place and what it contradicts.
        keys: Vec<String>,
    },
    /// A weight file to start from without its configuration.
    #[error(
        "model.from {from}: no config.json was found beside this weight file; give the folder of the model, or, \
            if the file is a head, set model.kind head"
    )]
    NoConfig {
        /// The weight file.
        from: String,
    },
    /// A configuration of another trainer that cannot be read.
    #[error("{name}: {why}")]
    Foreign {
        /// The configuration.
        name: String,
        /// What is wrong with it.
        why: String,
    },
    /// A configuration of a trainer that is not known.
    #[error(
        "{name}: its keys do not belong to a supported trainer; name the trainer with --from-format: {known}"
    )]
    UnknownTrainer {
        /// The configuration.
        name: String,
        /// The trainers that are known.
        known: String,
    },
    /// A key of a translation that does not exist.
    #[error("{written}: there is no key `{key}`")]
    NoSuchKey {
        /// The key as it was written.
        written: String,
        /// The key that it should become.
        key: String,
    },
}

/// One rule behind a blank, or several on a line each.
fn listed(broken: &[String]) -> String {
    match broken {
        [only] => format!(" {only}"),
        many => format!("\n  {}", many.join("\n  ")),
    }
}
