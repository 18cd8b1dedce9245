//! Why a picture cannot be drawn. Invariant: every message names the file or the record that it is about, and the next step.

use data::printable::{Name, Place};
use runtime::{Failure, RuntimeError};
use std::path::PathBuf;

/// Why a picture cannot be drawn.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PlotError {
    /// Reading results or writing pictures failed.
    #[error(transparent)]
    Runtime(RuntimeError),
    /// A record that the results do not have.
    #[error("--record {id}: no such record in {}{nearest}", folder.display())]
    NoSuchRecord {
        /// The record.
        id: String,
        /// The folder of the results.
        folder: PathBuf,
        /// The record with the nearest name, in words; empty without one.
        nearest: String,
    },
    /// A picture that is there, and may not be replaced.
    #[error("{} already exists; use --force to replace it, or choose another output with -o", path.display())]
    Exists {
        /// The picture.
        path: PathBuf,
    },
    /// A folder without a complete result.
    #[error(
        "{}: there is no {} in it, so it is not a complete result; give an output folder of plimsoll predict \
            (for shards, the folder of --merge), or NAME_merged of VirNucPro",
        folder.display(),
        virus::output::RUN_RECORD
    )]
    NoResult {
        /// The folder.
        folder: PathBuf,
    },
    /// A run.json that is not of a prediction.
    #[error("{} is not the run record of a prediction (no {missing} in it); run plimsoll predict again", path.display())]
    NotARunRecord {
        /// The file.
        path: PathBuf,
        /// What it lacks.
        missing: &'static str,
    },
    /// A folder with the results of several runs of VirNucPro.
    #[error(
        "{} holds the results of several runs of VirNucPro, such as {} and {}; give one of these folders",
        Place(folder),
        Place(one),
        Place(other)
    )]
    SeveralRuns {
        /// The folder.
        folder: PathBuf,
        /// The results of a run.
        one: PathBuf,
        /// Those of another.
        other: PathBuf,
    },
    /// VirNucPro's tables without its windows.
    #[error(
        "{}: VirNucPro's tables do not contain the positions of windows; put {wanted} of that run beside the \
            folder (virnucpro-broad \
         keeps it with --keep-intermediate)",
        Place(tables)
    )]
    NoWindows {
        /// The folder of the tables.
        tables: PathBuf,
        /// The file that is missing.
        wanted: String,
    },
    /// VirNucPro's tables with the windows of several runs.
    #[error(
        "{}: its windows are in {wanted}, of which there are several: {} and {}; keep only the file of this run \
            there",
        Place(tables),
        Place(one),
        Place(other)
    )]
    SeveralWindows {
        /// The folder of the tables.
        tables: PathBuf,
        /// The name of the file with the windows.
        wanted: String,
        /// One of these files.
        one: PathBuf,
        /// Another.
        other: PathBuf,
    },
    /// A name in a file of windows that is not the name of a window.
    #[error("{}: `{}` is not a window's name, such as read_chunk_1", Place(path), Name(name))]
    NotAWindow {
        /// The file.
        path: PathBuf,
        /// The name.
        name: String,
    },
    /// A window that does not follow on the one before it.
    #[error(
        "{}: `{}` does not follow on window {number} of `{}`; the file is incomplete or belongs to other results",
        Place(path),
        Name(name),
        Name(record)
    )]
    WindowOutOfOrder {
        /// The file.
        path: PathBuf,
        /// The name of the window.
        name: String,
        /// The number of the window before it.
        number: usize,
        /// The record of the window before it.
        record: String,
    },
    /// Windows that are not those of one sequence.
    #[error(
        "{}: the windows of `{}` are not those of one sequence at {length} bases; the file is incomplete or its \
            name is wrong",
        Place(path),
        Name(record)
    )]
    TornWindows {
        /// The file.
        path: PathBuf,
        /// The record.
        record: String,
        /// Bases of a window.
        length: usize,
    },
    /// A scored window that the file of windows does not have.
    #[error(
        "{}: window `{}` is not in {}; they belong to different runs",
        Place(table),
        Name(window),
        Place(windows)
    )]
    UnknownWindow {
        /// The table.
        table: PathBuf,
        /// The window.
        window: String,
        /// The file of windows.
        windows: PathBuf,
    },
    /// Two tables of VirNucPro that contradict each other.
    #[error(
        "{}: `{}` contradicts {scores} or is missing there; the tables belong to different runs",
        Place(table),
        Name(window)
    )]
    Contradiction {
        /// The table of calls.
        table: PathBuf,
        /// The window.
        window: String,
        /// The name of the table of scores.
        scores: &'static str,
    },
}

impl<E: Into<RuntimeError>> From<E> for PlotError {
    fn from(error: E) -> Self {
        Self::Runtime(error.into())
    }
}

impl Failure for PlotError {
    fn of_runtime(&self) -> Option<&RuntimeError> {
        match self {
            Self::Runtime(error) => Some(error),
            _ => None,
        }
    }
}
