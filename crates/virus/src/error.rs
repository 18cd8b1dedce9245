//! Errors of predictions. Invariant: every message names the file, the record or the flag that it is about.
//! Errors that a user can resolve also name the next step.

use plimsoll_data::DataError;
use plimsoll_data::printable::EscapedPath;
use plimsoll_runtime::{Failure, RuntimeError};
use plimsoll_setting::{Command, Setting};
use std::path::PathBuf;

/// Error of a prediction.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum VirusError {
    /// An error of opening models, planning, reading, computing or writing.
    #[error(transparent)]
    Runtime(RuntimeError),
    /// A model of an architecture that this encoder cannot have.
    #[error("{model}: {wanted} is required, but this is {found}")]
    WrongModel {
        /// Name of the model.
        model: String,
        /// The required architecture: `DNABERT-S` or `ESM-2`.
        wanted: &'static str,
        /// The architecture of the model.
        found: &'static str,
    },
    /// A head that was trained for a window length other than `--length`.
    #[error(
        "{head} is a head for windows of {of} bases, {setting} is {length}; omit {setting}, or give the head for \
         {length} bases",
        setting = Setting::Length
    )]
    HeadLength {
        /// Name of the head.
        head: String,
        /// Window length of the head in bases.
        of: usize,
        /// Requested window length in bases.
        length: usize,
    },
    /// A caller without the task that a prediction needs, or with another vocabulary.
    #[error(
        "{model}: {what}; give the folder of a caller that was trained for `{predict}`",
        predict = Command::Predict
    )]
    CallerModel {
        /// Name of the caller.
        model: String,
        /// The missing task or vocabulary, as a part of the message.
        what: String,
    },
    /// Mates in an odd number of files.
    #[error(
        "{paired}: {files} files were given; give two files for each pair with the mates in the same order \
         (A_1.fq A_2.fq B_1.fq B_2.fq), or one file with the mates one after another",
        paired = Setting::Paired
    )]
    PairedFiles {
        /// Number of files.
        files: usize,
    },
    /// Windows that are shorter than the shortest window of a caller.
    #[error(
        "{given}: a caller computes windows from {shortest} bases on; give a larger {setting}",
        given = Setting::Length.to(length),
        setting = Setting::Length
    )]
    ShortWindows {
        /// The window length in bases.
        length: usize,
        /// Least window length in bases.
        shortest: usize,
    },
    /// A least length below the shortest window of a caller, which would change nothing.
    #[error(
        "{given}: a caller computes windows from {shortest} bases on; give a larger {setting}, or omit it",
        given = Setting::MinLength.to(length),
        setting = Setting::MinLength
    )]
    ShortMinLength {
        /// The given length in bases.
        length: u64,
        /// Least window length in bases.
        shortest: usize,
    },
    /// A caller without calibration.json, such as a checkpoint.
    #[error(
        "{}: there is no such file; a caller needs a calibration (examples/caller/calibrate.py MODEL --start writes one to begin \
            with)",
        path.display()
    )]
    NoCalibration {
        /// The file.
        path: PathBuf,
    },
    /// A window length other than that of the calibration.
    #[error(
        "{given}: the caller is calibrated for windows of {window} bases; omit {setting}",
        given = Setting::Length.to(length),
        setting = Setting::Length
    )]
    OtherWindows {
        /// Requested window length in bases.
        length: usize,
        /// Window length of the calibration.
        window: u64,
    },
    /// A calibration.json that is not the calibration of a caller.
    #[error("{}: {what}; give the folder of a caller with its own calibration.json", path.display())]
    Calibration {
        /// The file.
        path: PathBuf,
        /// The fault, as a part of the message.
        what: String,
    },
    /// A prediction to be planned for a CPU other than the local one.
    #[error(
        "{predict} {given}: a prediction can be planned only for the CPU of this machine ({target_cpu}) or for a \
         GPU; plan each encoder with {model}",
        given = Setting::Target.to(target),
        target_cpu = Setting::Target.to("cpu"),
        predict = Setting::Predict,
        model = Setting::Model
    )]
    TargetOfOtherCpu {
        /// Name of the target.
        target: String,
    },
    /// Two inputs whose results would be written to the same folder (`--per-input`).
    #[error(
        "{per_input}: {} and {} would both be written to {}; rename one, or use two commands",
        one.display(),
        other.display(),
        folder.display(),
        per_input = Setting::PerInput
    )]
    SameFolder {
        /// The first input.
        one: PathBuf,
        /// The second input.
        other: PathBuf,
        /// The output folder of both.
        folder: PathBuf,
    },
    /// `--shard` with an input that is a pipe.
    #[error("{shard}: the input must be files that every shard reads, not a pipe", shard = Setting::Shard)]
    ShardOfPipe,
    /// `--merge` with an input that is a pipe.
    #[error(
        "{merge}: the input must be the files that the shards were computed from, not a pipe",
        merge = Setting::Merge
    )]
    MergeOfPipe,
    /// A note on the input, which `--strict` makes an error.
    #[error("{strict}: '{record}': {kind}: {detail}; correct it, or omit {strict}", strict = Setting::Strict)]
    Strict {
        /// Id of the record.
        record: String,
        /// Kind of note.
        kind: &'static str,
        /// Details of the note.
        detail: String,
    },
    /// An already complete result with notes, which `--strict` makes an error.
    #[error(
        "{strict}: the result in {} has {notes} notes; see notes.tsv in that folder",
        folder.display(),
        strict = Setting::Strict
    )]
    StrictNotes {
        /// The output folder.
        folder: PathBuf,
        /// Number of notes.
        notes: u64,
    },
    /// An input file that changed during the run.
    #[error(
        "{}: the file changed while it was read; nothing was written; run again when it is complete",
        path.display()
    )]
    InputChanged {
        /// The file.
        path: PathBuf,
    },
    /// An output folder that contains files that no prediction writes.
    #[error(
        "{} contains files that do not belong to a prediction (`{name}`); choose another folder with {output}",
        folder.display(),
        output = Setting::Output
    )]
    ForeignFiles {
        /// The folder.
        folder: PathBuf,
        /// Name of one of the files.
        name: String,
    },
    /// A file with the name of a result that no run of the program wrote, or that was changed after the run.
    #[error(
        "{}: no run of plimsoll wrote this file as it is now, so it is not replaced; choose another folder with \
         {output}, or replace it with {force}",
        EscapedPath(path),
        output = Setting::Output,
        force = Setting::Force
    )]
    NotWrittenByUs {
        /// The file.
        path: PathBuf,
    },
    /// A `run.json` that is not a run record of a prediction.
    #[error(
        "{} is not a run record; use {force} or another {output}",
        path.display(),
        force = Setting::Force,
        output = Setting::Output
    )]
    NotARunRecord {
        /// The file.
        path: PathBuf,
    },
    /// The output folder has a complete result, but the input of this run is a pipe, so it cannot be checked that the
    /// result belongs to the same input.
    #[error(
        "{} contains a result, and standard input or a pipe, which can be read only once, cannot be compared with \
         its input; use {force} or another folder with {output}",
        folder.display(),
        force = Setting::Force,
        output = Setting::Output
    )]
    ResultOfPipe {
        /// The output folder.
        folder: PathBuf,
    },
    /// A complete result of another run in the output folder.
    #[error(
        "{} contains the result of another run ({what}); use {force} or another folder with {output}",
        folder.display(),
        force = Setting::Force,
        output = Setting::Output
    )]
    OtherResult {
        /// The output folder.
        folder: PathBuf,
        /// The first difference between the runs.
        what: String,
    },
    /// A complete result in the output folder of a shard.
    #[error(
        "{} contains a complete result, not a shard; choose another folder for it with {output}",
        folder.display(),
        output = Setting::Output
    )]
    ResultNoShard {
        /// The output folder.
        folder: PathBuf,
    },
    /// A complete result of inputs with the same content and different names, which appear in the tables.
    #[error(
        "{} contains the result of the same input under another name (was {before}, is {now}); use {force} or \
         another folder with {output}",
        folder.display(),
        force = Setting::Force,
        output = Setting::Output
    )]
    OtherName {
        /// The output folder.
        folder: PathBuf,
        /// Names of the inputs of the result, as a JSON array.
        before: String,
        /// Names of the inputs of this run, as a JSON array.
        now: String,
    },
    /// A journal of another run.
    #[error(
        "{} belongs to another run ({what}); {force} starts over, {output} names another folder",
        path.display(),
        force = Setting::Force,
        output = Setting::Output
    )]
    OtherRun {
        /// The journal.
        path: PathBuf,
        /// The first difference between the runs.
        what: String,
    },
    /// A journal in the output folder of a run on a pipe, which cannot be resumed.
    #[error(
        "{} belongs to another run, because this input can be read only once; {force} starts over, {output} names \
         another folder",
        path.display(),
        force = Setting::Force,
        output = Setting::Output
    )]
    JournalOfPipe {
        /// The journal.
        path: PathBuf,
    },
    /// A file that is not a journal of a prediction.
    #[error("{} is not the journal of a prediction", path.display())]
    NotAJournal {
        /// The file.
        path: PathBuf,
    },
    /// A damaged journal.
    #[error("{damage}; restore it from a backup, or use {force} to start over", force = Setting::Force)]
    DamagedJournal {
        /// The error of the journal's reader, which names the file and the damage.
        damage: DataError,
    },
    /// An inconsistent or undecodable entry in an otherwise undamaged journal.
    #[error("{}: {what}; remove it or use {force} to start over", path.display(), force = Setting::Force)]
    JournalEntry {
        /// The journal.
        path: PathBuf,
        /// Description of the inconsistency.
        what: String,
    },
    /// A window whose data is missing from the journals.
    #[error("{what} of window {window} of '{record}' are missing; run the command that computes them again")]
    MissingWindow {
        /// The missing data: results, or rows of the first encoder.
        what: &'static str,
        /// Number of the window in the record, from 1.
        window: usize,
        /// Id of the record.
        record: String,
    },
    /// A folder given to `--merge` that has no journal.
    #[error(
        "{}: the folder contains no journal of a shard; compute it with {shard_k_n} first",
        path.display(),
        shard_k_n = Setting::Shard.to("K/N")
    )]
    NoShard {
        /// Path of the missing journal.
        path: PathBuf,
    },
    /// A shard given to `--merge` that is not complete.
    #[error("{}: shard {shard} is not complete; run the command that computes it again", folder.display())]
    ShardIncomplete {
        /// The shard's folder.
        folder: PathBuf,
        /// Number of the shard and number of shards, such as `2/3`.
        shard: String,
    },
    /// Shards given to `--merge` with different numbers of shards.
    #[error(
        "{merge}: a shard is one of {of}, shard {number} is one of {other}; they do not fit",
        merge = Setting::Merge
    )]
    ShardsDiffer {
        /// Number of shards according to the first shard.
        of: u64,
        /// Number of a shard that disagrees with it.
        number: u64,
        /// Number of shards according to that shard.
        other: u64,
    },
    /// Shards missing from `--merge`.
    #[error(
        "{merge}: missing {} {}; give the folders of all shards",
        if missing.len() == 1 { "is shard" } else { "are the shards" },
        missing.join(", "),
        merge = Setting::Merge
    )]
    ShardsMissing {
        /// The missing shards, at most ten, each as number and number of shards, such as `2/3`.
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
            | Self::Calibration { .. }
            | Self::NoCalibration { .. }
            | Self::OtherWindows { .. }
            | Self::CallerModel { .. }
            | Self::PairedFiles { .. }
            | Self::ShortWindows { .. }
            | Self::ShortMinLength { .. }
            | Self::TargetOfOtherCpu { .. }
            | Self::SameFolder { .. }
            | Self::ShardOfPipe
            | Self::MergeOfPipe
            | Self::Strict { .. }
            | Self::StrictNotes { .. }
            | Self::InputChanged { .. }
            | Self::ForeignFiles { .. }
            | Self::NotWrittenByUs { .. } => 1,
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
