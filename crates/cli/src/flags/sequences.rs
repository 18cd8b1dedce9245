//! Flags shared by `plimsoll embed` and `plimsoll classify`, which compute one result for each sequence. Invariant: each flag
//! has one definition and default.

use super::at_least_one;
use super::machine::{DynamicFlag, MachineFlags, SortingFlags, StreamingFlags};
use super::messages::MessageFlags;
use crate::error::CliError;
use clap::Args;
use plimsoll_runtime::Settings;
use std::time::Duration;

/// Flag that turns anomalies of the input into errors.
#[derive(Debug, Args)]
pub(super) struct StrictFlag {
    /// Fail with an error if the input has an anomaly: an empty record or file, a repeated id, characters that are dropped
    /// (white space, digits, gaps), U in DNA, or tokens that are unknown to the model
    #[arg(long)]
    pub(super) strict: bool,
}

/// Flags of long sequences, of the machine, of the journal and of messages. They follow the flags of the command, because
/// their headings apply to all flags after them.
#[derive(Debug, Args)]
pub(super) struct SequenceFlags {
    /// Truncate longer sequences to the maximum length; without this flag a longer sequence is an error
    #[arg(long)]
    pub(super) truncate: bool,

    /// Give sequences whose letters are those of DNA to a protein model, which is refused without this flag
    #[arg(long)]
    pub(super) allow_dna: bool,

    #[command(flatten)]
    machine: MachineFlags,

    #[command(flatten)]
    streaming: StreamingFlags,

    #[command(flatten)]
    dynamic: DynamicFlag,

    /// Batches of input that each tokenizer thread prepares ahead, 1 to 1024; on a GPU also the number of steps
    /// that are queued on it
    #[arg(long, default_value_t = 2, value_name = "N", value_parser = prefetch, help_heading = "Machine")]
    pub(super) prefetch: u64,

    #[command(flatten)]
    sorting: SortingFlags,

    #[command(flatten)]
    resume: ResumeFlags,

    #[command(flatten)]
    pub(super) messages: MessageFlags,
}

/// Flags of the journal, of `embed` and `classify`.
#[derive(Debug, Args)]
#[command(next_help_heading = "Interrupted runs")]
struct ResumeFlags {
    /// Seconds between commits of finished rows to the journal OUT.journal, from which the same command resumes an
    /// interrupted run, 0 to 3600
    #[arg(long, default_value_t = 5, value_name = "SECONDS", value_parser = seconds, conflicts_with = "no_journal")]
    commit_every: u64,

    /// Keep no journal: an interrupted run starts over. The journal takes as much disk space as the output in float32
    /// until the run ends
    #[arg(long)]
    no_journal: bool,
}

/// Parses the seconds between two commits.
fn seconds(text: &str) -> Result<u64, String> {
    let number = text.trim().parse::<u64>().ok().filter(|&n| n <= 3600);
    number.ok_or_else(|| "give a number of seconds from 0 to 3600".to_owned())
}

impl SequenceFlags {
    /// Settings of the runtime.
    pub(super) fn settings(&self) -> Result<Settings, CliError> {
        let settings = self.streaming.applied_to(self.machine.settings(self.prefetch)?)?;
        Ok(Settings { dynamic: self.dynamic.dynamic, ..settings })
    }

    /// Whether sequences are sorted by length.
    pub(super) fn sort_by_length(&self) -> bool {
        self.sorting.by_length()
    }

    /// Whether a journal is written.
    pub(super) fn journal(&self) -> bool {
        !self.resume.no_journal
    }

    /// Time between two commits to the journal.
    pub(super) fn commit_every(&self) -> Duration {
        Duration::from_secs(self.resume.commit_every)
    }
}

/// Parses a maximum sequence length in letters.
pub(super) fn letters(text: &str) -> Result<u64, String> {
    let number = at_least_one(text).ok().filter(|&n| n <= 1 << 30);
    number.ok_or_else(|| "give a length of at least 1 letter".to_owned())
}

/// Parses a number of batches prepared ahead.
pub(super) fn prefetch(text: &str) -> Result<u64, String> {
    let number = at_least_one(text).ok().filter(|&n| n <= 1024);
    number.ok_or_else(|| "give a number of batches from 1 to 1024".to_owned())
}
