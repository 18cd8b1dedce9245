//! The flags and subcommands that messages of the libraries name. Invariant: every setting of `plimsoll_setting` has a row, so
//! that a message names what its reader can type.

use plimsoll_setting::{Command, MessageWords, Setting, set_words};
use std::fmt;

/// Registers the flags and subcommands as the words of this process.
pub fn register() {
    set_words(MessageWords { setting: write_setting, command: write_command });
}

fn write_setting(setting: &Setting, value: Option<&str>, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    match (setting, value) {
        (Setting::Key(path), Some(value)) => write!(f, "--set {path}={value}"),
        (Setting::Key(path), None) => write!(f, "--set {path}"),
        // A switch is set by its presence.
        (Setting::Explain, _) => f.write_str(flag(setting)),
        (setting, None) => f.write_str(flag(setting)),
        (setting, Some(value)) => write!(f, "{} {value}", flag(setting)),
    }
}

fn write_command(command: Command, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    if f.alternate() {
        return f.write_str(subcommand(command));
    }
    write!(f, "plimsoll {}", subcommand(command))
}

fn flag(setting: &Setting) -> &'static str {
    use Setting as S;
    match setting {
        S::AllowDna => "--allow-dna",
        S::Base => "--base",
        S::Budget => "--budget",
        S::Calibrate => "--calibrate",
        S::Confirm => "--confirm",
        S::Device => "--device",
        S::DnaTokens => "--dna-tokens",
        S::Dpi => "--dpi",
        S::Dynamic => "--dynamic",
        S::Explain => "--explain",
        S::Force => "--force",
        S::Format => "--format",
        S::FromConfig => "--from-config",
        S::FromFormat => "--from-format",
        S::Head => "--head",
        S::HitsFormat => "--hits-format",
        S::HostMemory => "--host-memory",
        S::Json => "--json",
        S::Largest => "--largest",
        S::Layers => "--layers",
        S::Length => "--length",
        S::Log => "--log",
        S::MaxLength => "--max-length",
        S::MemoryBudget => "--memory-budget",
        S::MemoryViz => "--memory-viz",
        S::Merge => "--merge",
        S::MinLength => "--min-length",
        S::Model => "--model",
        S::NoProgress => "--no-progress",
        S::Output => "-o",
        S::Overrides => "--set",
        S::Paired => "--paired",
        S::PerInput => "--per-input",
        S::Pool => "--pool",
        S::Precision => "--precision",
        S::Predict => "--predict",
        S::PrintConfig => "--print-config",
        S::ProteinTokens => "--protein-tokens",
        S::Quiet => "--quiet",
        S::Records => "--record",
        S::Reference => "--reference",
        S::Resume => "--resume",
        S::Schema => "--schema",
        S::Series => "--series",
        S::Shard => "--shard",
        S::StreamWeights => "--stream-weights",
        S::Strict => "--strict",
        S::Target => "--target",
        S::Threads => "--threads",
        S::Timeline => "--timeline",
        S::Tokens => "--tokens",
        S::Trace => "--trace",
        S::Truncate => "--truncate",
        S::Verbose => "--verbose",
        S::Weights => "--weights",
        S::Width => "--width",
        // The values of keys follow this flag.
        S::Key(_) => "--set",
    }
}

fn subcommand(command: Command) -> &'static str {
    use Command as C;
    match command {
        C::Bench => "bench",
        C::Embed => "embed",
        C::Merge => "merge",
        C::Plan => "plan",
        C::Predict => "predict",
        C::Report => "report",
        C::StandardInput => "... -",
        C::Train => "train",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_name_flags_and_subcommands() {
        register();
        let key = Setting::key("optimizer.kind");
        assert_eq!(
            format!("{} {} {}", Setting::Force, Setting::Output, Setting::Overrides),
            "--force -o --set"
        );
        assert_eq!(
            format!("{} {}", Setting::Tokens.to(512), Setting::Records.to("true")),
            "--tokens 512 --record true"
        );
        assert_eq!(format!("{key} {}", key.clone().to(true)), "--set optimizer.kind --set optimizer.kind=true");
        assert_eq!(Setting::Explain.to(true).to_string(), "--explain");
        assert_eq!(format!("{} {:#}", Command::Merge, Command::Train), "plimsoll merge train");
        assert_eq!(Command::StandardInput.to_string(), "plimsoll ... -");
    }
}
