//! Errors of plotting. Invariant: every message names the file or the record that is wrong, and what the user
//! can do.

use plimsoll_data::printable::{EscapedPath, Name};
use plimsoll_runtime::{Failure, RuntimeError};
use plimsoll_setting::{Command, Setting};
use plimsoll_train::TrainError;
use plimsoll_train::history::MixedFolders;
use std::path::PathBuf;

/// Error of [`plot`](crate::plot()).
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PlotError {
    /// Reading results or writing pictures failed.
    #[error(transparent)]
    Runtime(RuntimeError),
    /// A training run cannot be read.
    #[error(transparent)]
    Training(TrainError),
    /// Some of the folders are training runs, and others are not.
    #[error(transparent)]
    Mixture(MixedFolders),
    /// Several folders are given, none of which is a training run.
    #[error("the pictures of a prediction are of one folder; give one folder, or the folders of training runs")]
    SeveralPredictions,
    /// An option for training runs is given for a prediction.
    #[error("{setting} is for training runs, and {} is not one; omit {setting}", EscapedPath(folder))]
    OfTraining {
        /// The option.
        setting: Setting,
        /// The folder.
        folder: PathBuf,
    },
    /// An option for predictions is given for training runs.
    #[error(
        "{setting} is for predictions, and {} is a training run; omit {setting}, or choose charts with {series}",
        EscapedPath(folder),
        series = Setting::Series
    )]
    OfPrediction {
        /// The option.
        setting: Setting,
        /// The folder.
        folder: PathBuf,
    },
    /// The training runs do not have the requested series.
    #[error(
        "{given}: no such series in these runs{hint}; there are {}",
        known.join(", "),
        given = Setting::Series.to(name)
    )]
    UnknownSeries {
        /// The name.
        name: String,
        /// The nearest name, as a part of the message.
        hint: String,
        /// All names.
        known: Vec<String>,
    },
    /// Charts and the load of the experts are requested in a single file.
    #[error(
        "{series_expert_load} is a picture of its own; give a folder with {output}, or omit the other series",
        series_expert_load = Setting::Series.to("expert_load"),
        output = Setting::Output
    )]
    TwoPictures,
    /// A logarithmic axis is requested, and suits none of the charts.
    #[error(
        "{log}: none of {} can have a logarithmic axis; omit {log}, or choose with {series} from loss, auxiliary, \
         lr, grad_norm and loss_scale",
        charts.join(", "),
        log = Setting::Log,
        series = Setting::Series
    )]
    NoLogarithm {
        /// Names of the charts.
        charts: Vec<String>,
    },
    /// The training runs have no numbers yet.
    #[error("{}: metrics.jsonl has no number yet; wait for the first logged step", EscapedPath(folder))]
    NothingToDraw {
        /// Folder of the first run.
        folder: PathBuf,
    },
    /// The results do not contain the requested record.
    #[error("{given}: no such record in {}{nearest}", folder.display(), given = Setting::Records.to(id))]
    NoSuchRecord {
        /// Id of the record.
        id: String,
        /// Folder of the results.
        folder: PathBuf,
        /// End of the message: the nearest ids in the results.
        nearest: String,
    },
    /// The folder does not exist.
    #[error("{}: there is no such folder; check the path", EscapedPath(folder))]
    NoFolder {
        /// The folder.
        folder: PathBuf,
    },
    /// The folder contains no complete results.
    #[error(
        "{}: there is no {} in it, so it is not a complete result; give an output folder of {predict} (for \
         shards, the folder of {merge}), or NAME_merged of VirNucPro",
        folder.display(),
        plimsoll_virus::output::RUN_RECORD,
        merge = Setting::Merge,
        predict = Command::Predict
    )]
    NoResult {
        /// The folder.
        folder: PathBuf,
    },
    /// The run.json does not belong to a prediction.
    #[error(
        "{} is not the run record of a prediction (no {missing} in it); run {predict} again",
        path.display(),
        predict = Command::Predict
    )]
    NotARunRecord {
        /// Path of the file.
        path: PathBuf,
        /// The missing key, or `JSON` if the file is not JSON.
        missing: &'static str,
    },
    /// The folder contains the results of several runs of VirNucPro.
    #[error(
        "{} holds the results of several runs of VirNucPro, such as {} and {}; give one of these folders",
        EscapedPath(folder),
        EscapedPath(one),
        EscapedPath(other)
    )]
    SeveralRuns {
        /// The folder.
        folder: PathBuf,
        /// Results of one run.
        one: PathBuf,
        /// Results of another run.
        other: PathBuf,
    },
    /// The tables of VirNucPro are present without the file of windows, so positions are unknown.
    #[error(
        "{}: VirNucPro's tables do not contain the positions of windows; put {wanted} of that run beside the \
            folder (virnucpro-broad \
         keeps it with --keep-intermediate)",
        EscapedPath(tables)
    )]
    NoWindows {
        /// Folder of the tables.
        tables: PathBuf,
        /// Name of the missing file.
        wanted: String,
    },
    /// The tables of VirNucPro are present with the windows of several runs.
    #[error(
        "{}: its windows are in {wanted}, of which there are several: {} and {}; keep only the file of this run \
            there",
        EscapedPath(tables),
        EscapedPath(one),
        EscapedPath(other)
    )]
    SeveralWindows {
        /// Folder of the tables.
        tables: PathBuf,
        /// Name pattern of the file of windows.
        wanted: String,
        /// A file that matches.
        one: PathBuf,
        /// Another file that matches.
        other: PathBuf,
    },
    /// A record in a file of windows does not have the name of a window.
    #[error("{}: `{}` is not a window's name, such as read_chunk_1", EscapedPath(path), Name(name))]
    NotAWindow {
        /// Path of the file.
        path: PathBuf,
        /// Name of the record.
        name: String,
    },
    /// The windows in a file are not numbered consecutively.
    #[error(
        "{}: `{}` does not follow on window {number} of `{}`; the file is incomplete or belongs to other results",
        EscapedPath(path),
        Name(name),
        Name(record)
    )]
    WindowOutOfOrder {
        /// Path of the file.
        path: PathBuf,
        /// Name of the window that is out of order.
        name: String,
        /// Number of the preceding window.
        number: usize,
        /// Record of the preceding window.
        record: String,
    },
    /// The windows of a record cannot have been cut from one sequence.
    #[error(
        "{}: the windows of `{}` are not those of one sequence at {length} bases; the file is incomplete or its \
            name is wrong",
        EscapedPath(path),
        Name(record)
    )]
    TornWindows {
        /// Path of the file.
        path: PathBuf,
        /// Id of the record.
        record: String,
        /// Window length in bases.
        length: usize,
    },
    /// A table contains scores of a window that the file of windows does not contain.
    #[error(
        "{}: window `{}` is not in {}; they belong to different runs",
        EscapedPath(table),
        Name(window),
        EscapedPath(windows)
    )]
    UnknownWindow {
        /// Path of the table.
        table: PathBuf,
        /// Name of the window.
        window: String,
        /// Path of the file of windows.
        windows: PathBuf,
    },
    /// The two tables of VirNucPro contradict each other.
    #[error(
        "{}: `{}` contradicts {scores} or is missing there; the tables belong to different runs",
        EscapedPath(table),
        Name(window)
    )]
    Contradiction {
        /// Path of the table of calls.
        table: PathBuf,
        /// Name of the window.
        window: String,
        /// File name of the table of scores.
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
            Self::Training(error) => error.of_runtime(),
            _ => None,
        }
    }
}
