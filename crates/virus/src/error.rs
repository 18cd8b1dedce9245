//! Why a prediction fails. Invariant: every message names the file, the record or the flag that it is about, and the next
//! step.

use data::DataError;
use runtime::{Failure, RuntimeError};
use std::path::PathBuf;

/// Why a prediction fails.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum VirusError {
    /// Opening models, planning, reading, computing or writing failed.
    #[error(transparent)]
    Runtime(RuntimeError),
    /// A model of another family than is wanted.
    #[error("{model}: {wanted} is required, but this is {found}")]
    WrongModel {
        /// The model.
        model: String,
        /// The family that is wanted.
        wanted: &'static str,
        /// Its family.
        found: &'static str,
    },
    /// A head for windows of another length.
    #[error(
        "{head} is a head for windows of {of} bases, --length is {length}; omit --length, or give the head for \
         {length} bases"
    )]
    HeadLength {
        /// The head.
        head: String,
        /// Bases of its windows.
        of: usize,
        /// Bases that were asked for.
        length: usize,
    },
    /// A prediction is planned for a CPU that is not in place.
    #[error(
        "--predict --target {target}: a prediction can be planned only for the CPU of this machine (--target \
            cpu) or for a GPU; plan each encoder with --model"
    )]
    TargetOfOtherCpu {
        /// The target.
        target: String,
    },
    /// Two inputs whose results would go to one folder.
    #[error(
        "--per-input: {} and {} would both be written to {}; rename one, or use two commands",
        one.display(),
        other.display(),
        folder.display()
    )]
    SameFolder {
        /// An input.
        one: PathBuf,
        /// A later input.
        other: PathBuf,
        /// The folder of both.
        folder: PathBuf,
    },
    /// A shard of a pipe.
    #[error("--shard: the input must be files that every shard reads, not a pipe")]
    ShardOfPipe,
    /// Shards that are put together beside a pipe.
    #[error("--merge: the input must be the files that the shards were computed from, not a pipe")]
    MergeOfPipe,
    /// An oddity of the input, under `--strict`.
    #[error("--strict: '{record}': {kind}: {detail}; correct it, or omit --strict")]
    Strict {
        /// The record.
        record: String,
        /// The kind of oddity.
        kind: &'static str,
        /// What is odd.
        detail: String,
    },
    /// A result with notes, under `--strict`.
    #[error("--strict: the result in {} has {notes} notes; see notes.tsv in that folder", folder.display())]
    StrictNotes {
        /// The output folder.
        folder: PathBuf,
        /// How many notes.
        notes: u64,
    },
    /// A file that changed while it was read.
    #[error(
        "{}: the file changed while it was read; nothing was written; run again when it is complete",
        path.display()
    )]
    InputChanged {
        /// The file.
        path: PathBuf,
    },
    /// An output folder with files of something else.
    #[error(
        "{} contains files that do not belong to a prediction (`{name}`); choose another folder with -o",
        folder.display()
    )]
    ForeignFiles {
        /// The folder.
        folder: PathBuf,
        /// One of the files.
        name: String,
    },
    /// A run.json that is no run record.
    #[error("{} is not a run record; use --force or another -o", path.display())]
    NotARunRecord {
        /// The file.
        path: PathBuf,
    },
    /// A complete result that cannot be compared with a pipe.
    #[error(
        "{} contains a result, and standard input or a pipe, which can be read only once, cannot be compared \
            with its input; use --force or another \
         folder with -o",
        folder.display()
    )]
    ResultOfPipe {
        /// The output folder.
        folder: PathBuf,
    },
    /// A complete result of another run.
    #[error("{} contains the result of another run ({what}); use --force or another folder with -o", folder.display())]
    OtherResult {
        /// The output folder.
        folder: PathBuf,
        /// What differs.
        what: String,
    },
    /// A complete result where a shard should be.
    #[error("{} contains a complete result, not a shard; choose another folder for it with -o", folder.display())]
    ResultNoShard {
        /// The output folder.
        folder: PathBuf,
    },
    /// A complete result whose inputs had other names.
    #[error(
        "{} contains the result of the same input under another name (was {before}, is {now}); use --force or \
            another \
         folder with -o",
        folder.display()
    )]
    OtherName {
        /// The output folder.
        folder: PathBuf,
        /// The names in the result.
        before: String,
        /// The names of this run.
        now: String,
    },
    /// A journal of another run.
    #[error(
        "{} belongs to another run ({what}); --force starts over, -o names another folder",
        path.display()
    )]
    OtherRun {
        /// The journal.
        path: PathBuf,
        /// What differs.
        what: String,
    },
    /// A journal beside a pipe, which no run can go on from.
    #[error(
        "{} belongs to another run, because this input can be read only once; --force starts over, -o names \
            another folder",
        path.display()
    )]
    JournalOfPipe {
        /// The journal.
        path: PathBuf,
    },
    /// A file that is not the journal of a prediction.
    #[error("{} is not the journal of a prediction", path.display())]
    NotAJournal {
        /// The file.
        path: PathBuf,
    },
    /// A journal that is damaged.
    #[error("{damage}; restore it from a backup, or use --force to start over")]
    DamagedJournal {
        /// The file and what is damaged.
        damage: DataError,
    },
    /// An entry of a journal that cannot be read.
    #[error("{}: {what}; remove it or use --force to start over", path.display())]
    JournalEntry {
        /// The journal.
        path: PathBuf,
        /// What is wrong with the entry.
        what: String,
    },
    /// A window that no journal has.
    #[error("{what} of window {window} of '{record}' are missing; run the command that computes them again")]
    MissingWindow {
        /// What is missing.
        what: &'static str,
        /// The window, from 1.
        window: usize,
        /// The record.
        record: String,
    },
    /// A folder without a shard.
    #[error("{}: the folder contains no journal of a shard; compute it with --shard K/N first", path.display())]
    NoShard {
        /// The journal that is missing.
        path: PathBuf,
    },
    /// A shard that is not complete.
    #[error("{}: shard {shard} is not complete; run the command that computes it again", folder.display())]
    ShardIncomplete {
        /// The shard's folder.
        folder: PathBuf,
        /// Its number and how many there are.
        shard: String,
    },
    /// Shards of different divisions.
    #[error("--merge: a shard is one of {of}, shard {number} is one of {other}; they do not fit")]
    ShardsDiffer {
        /// How many shards the first is one of.
        of: u64,
        /// The number of another shard.
        number: u64,
        /// How many shards that one is one of.
        other: u64,
    },
    /// Shards that were not given.
    #[error(
        "--merge: missing {} {}; give the folders of all shards",
        if missing.len() == 1 { "is shard" } else { "are the shards" },
        missing.join(", ")
    )]
    ShardsMissing {
        /// The first of them, each with how many there are.
        missing: Vec<String>,
    },
}

impl<E: Into<RuntimeError>> From<E> for VirusError {
    fn from(error: E) -> Self {
        Self::Runtime(error.into())
    }
}

impl Failure for VirusError {
    fn of_runtime(&self) -> Option<&RuntimeError> {
        match self {
            Self::Runtime(error) => Some(error),
            _ => None,
        }
    }

    fn own_exit_code(&self) -> u8 {
        match self {
            Self::Runtime(_)
            | Self::WrongModel { .. }
            | Self::HeadLength { .. }
            | Self::TargetOfOtherCpu { .. }
            | Self::SameFolder { .. }
            | Self::ShardOfPipe
            | Self::MergeOfPipe
            | Self::Strict { .. }
            | Self::StrictNotes { .. }
            | Self::InputChanged { .. }
            | Self::ForeignFiles { .. } => 1,
            Self::NotARunRecord { .. }
            | Self::ResultOfPipe { .. }
            | Self::OtherResult { .. }
            | Self::ResultNoShard { .. }
            | Self::OtherName { .. }
            | Self::OtherRun { .. }
            | Self::JournalOfPipe { .. }
            | Self::NotAJournal { .. }
            | Self::DamagedJournal { .. }
            | Self::JournalEntry { .. }
            | Self::MissingWindow { .. }
            | Self::NoShard { .. }
            | Self::ShardIncomplete { .. }
            | Self::ShardsDiffer { .. }
            | Self::ShardsMissing { .. } => 3,
        }
    }
}
