//! `plimsoll predict`: calls viral sequences in reads and contigs. Checks the output folder, opens the models of a method
//! (`methods`), plans them within the memory budget, loads the weights, streams the input through the models (`pipeline`), and
//! writes results in input order. Invariant: results depend on the inputs, the weights, the parameters of the method and the
//! device's arithmetic only.
#![forbid(unsafe_code)]

mod error;
mod folder;
mod methods;
mod options;
pub mod output;
mod pipeline;
pub mod planned;

pub use error::VirusError;
pub use methods::caller;
pub use methods::caller::score::LengthThreshold;
pub use options::{
    CallerOptions, MethodOptions, Models, PredictOptions, USUAL_LENGTH, USUAL_PREFETCH, VirNucProOptions,
    WindowShard, usual_workers,
};
pub use output::{CallsSummary, VirusRow};
pub use pipeline::record::{
    CallingRecord, MethodRecord, ModelsRecord, PredictRecord, RunRecord, SecondsRecord, SequenceCounts,
    SettingsRecord, ShardRecord, ShardSeconds,
};
pub use plimsoll_data::sequence::{Listing, stem};

use folder::FolderState;
use methods::Method;
use output::ResultCounts;
use pipeline::journal::InputStamps;
use pipeline::queues::{HostWork, QueueCandidate};
use pipeline::record;
use pipeline::resume::{self, JournalKeys};
use pipeline::run::PredictRun;
use plimsoll_data::alphabet::Alphabet;
use plimsoll_data::outputs::InputFiles;
use plimsoll_data::sequence::{Input, Reader, digests, extent};
use plimsoll_exec::Executor;
use plimsoll_runtime::RuntimeError;
use plimsoll_runtime::observer::stopped;
use plimsoll_runtime::process::ProcessMemory;
use plimsoll_runtime::report::to_json;
use plimsoll_runtime::watch::Watch;
use plimsoll_runtime::{Budget, Level, Observer, replicas_for_input};
use std::cell::Cell;
use std::path::{Path, PathBuf};
use std::time::Instant;

/// Summary of a prediction.
#[derive(Debug)]
pub struct PredictReport {
    /// Whether the results were already complete, so that nothing was computed.
    pub already_complete: bool,
    /// The shard that was computed; its journal is the result, to be merged later.
    pub shard: Option<WindowShard>,
    /// Number of sequences (open reading frames, or windows of a caller) with non-finite values.
    pub failed: u64,
    /// Number of rows of notes.tsv.
    pub notes: u64,
    /// Contents of run.json.
    pub run_record: PredictRecord,
    /// Counts of records, windows and calls.
    pub counts: ResultCounts,
    /// Folder of the results.
    pub output_dir: PathBuf,
    /// Whether the models have trained weights.
    pub trained: bool,
    /// Duration of the run in seconds.
    pub seconds: f64,
    /// Tokens of all encoders divided by the duration of the run.
    pub tokens_per_second: f64,
    /// Calls of a caller and their expected errors; `None` for VirNucPro's pipeline, for shards and for complete results.
    pub calls: Option<CallsSummary>,
    /// Packing fill of each encoder without its last pack; `None` for one with a single pack, and for encoders that the method does
    /// not have.
    pub fill: [Option<f64>; 2],
    /// One line that compares the plan with the budget.
    pub memory_line: String,
}

/// Runs a prediction over all inputs into one folder.
///
/// # Errors
/// See [`VirusError`]. After an error or an interruption, finished windows are in the journal in the output
/// folder, and an equal call without `force` resumes from it, unless the input can be read only once.
pub fn predict(options: &PredictOptions, observer: &mut dyn Observer) -> Result<PredictReport, VirusError> {
    let start = Instant::now();
    check_sequence_files(options)?;
    let method = methods::open(options, observer)?;
    let prediction = FolderPrediction { options, method: &*method, shared: None, start };
    predict_one(&prediction, &mut None, observer)
}

/// Runs a prediction for each input, into the folder `<stem>` inside the output folder, or `<stem>_plimsoll` if no
/// output folder is given. The models are loaded once.
///
/// # Errors
/// Two inputs with the same folder, before anything is computed; otherwise as [`predict`], for the first input
/// that fails.
pub fn predict_each(
    options: &PredictOptions,
    observer: &mut dyn Observer,
) -> Result<Vec<PredictReport>, VirusError> {
    let mut folders: Vec<(PathBuf, &PathBuf)> = vec![];
    for input in &options.inputs {
        let folder = if options.output_dir.as_os_str().is_empty() {
            PathBuf::from(format!("{}_plimsoll", stem(input)))
        } else {
            options.output_dir.join(stem(input))
        };
        if let Some((_, earlier)) = folders.iter().find(|(f, _)| *f == folder) {
            return Err(VirusError::SameFolder { one: (*earlier).clone(), other: input.clone(), folder });
        }
        folders.push((folder, input));
    }
    let settings = &options.settings;
    let replicas = settings.most_replicas(replicas_for_input(&options.inputs));
    let budget = settings.read_budget()?;
    check_sequence_files(options)?;
    let method = methods::open(options, observer)?;
    let shared = SharedAcrossInputs {
        budget,
        replicas,
        process: ProcessMemory::of(settings),
        files: options.input_files(),
    };
    let mut warm = None;
    let mut reports = vec![];
    for (output_dir, input) in folders {
        let options = &PredictOptions { inputs: vec![input.clone()], output_dir, ..options.clone() };
        let prediction =
            FolderPrediction { options, method: &*method, shared: Some(&shared), start: Instant::now() };
        reports.push(predict_one(&prediction, &mut warm, observer)?);
    }
    Ok(reports)
}

/// Values shared by several inputs, so that one plan serves all of them.
struct SharedAcrossInputs {
    budget: Budget,
    /// Maximum number of replicas.
    replicas: usize,
    /// The files that the runs read: the result of one input must not overwrite the next input.
    files: InputFiles,
    /// Memory of the process before the first arena was allocated; later measurements would include that arena.
    process: Option<ProcessMemory>,
}

/// Executors with loaded weights, for the next run with the same models.
pub(crate) type WarmExecutors = Option<Vec<Executor>>;

/// A prediction into one output folder, with the opened method.
pub(crate) struct FolderPrediction<'a> {
    options: &'a PredictOptions,
    method: &'a dyn Method,
    /// `None` for a prediction with a folder and a plan of its own.
    shared: Option<&'a SharedAcrossInputs>,
    start: Instant,
}

/// Runs a prediction, or reports that its results are already complete. `warm` holds the executors of the preceding input, and
/// receives the executors of this input.
pub(crate) fn predict_one(
    prediction: &FolderPrediction<'_>,
    warm: &mut WarmExecutors,
    observer: &mut dyn Observer,
) -> Result<PredictReport, VirusError> {
    let FolderPrediction { options, method, shared, start } = *prediction;
    let mut watch = Watch::start("predict", Some(&options.output_dir), options.settings.machines(1));
    watch.end_stage("start", None);
    // Held until the run ends: two runs in one folder would overwrite each other's files.
    let lock = plimsoll_runtime::lock::take(&options.output_dir, &folder::JOURNALS)?;
    if !lock.is_held() {
        let dir = options.output_dir.display();
        let text =
            format!("{dir} is on a file system without file locks; make sure that no other run writes to it");
        observer.say(Level::Warning, &text);
    }
    let is_shard = contains_folder(&options.merge, &options.output_dir);
    let files = shared.map_or_else(|| options.input_files(), |shared| shared.files.clone());
    folder::check_inputs(&options.output_dir, &files, is_shard)?;
    // Taken before the inputs are hashed, so that a change during the hashing is detected too.
    let stamps = InputStamps::over(&options.inputs);
    let inputs = digests(&options.inputs, &|| stopped(observer, "nothing had begun"))?;
    let keys = inputs.as_deref().map(|inputs| JournalKeys::new(options, method, inputs, stamps)).transpose()?;
    if let Some(report) = complete_results(options, method, inputs.as_deref(), keys.as_ref())? {
        return Ok(report);
    }
    if !options.force {
        resume::check_journals(options, keys.as_ref())?;
    }
    watch.end_stage("opened", None);
    let (budget, replicas) = match shared {
        Some(SharedAcrossInputs { budget, replicas, .. }) => (budget.clone(), *replicas),
        None => {
            let replicas = options.settings.most_replicas(replicas_for_input(&options.inputs));
            (options.settings.read_budget()?, replicas)
        }
    };
    let before = shared.and_then(|shared| shared.process.as_ref());
    let work = HostWork { options, costs: method.shape().host, is_trained: method.is_trained() };
    let measured = MeasuredHost { budget: &budget, before, are_files: inputs.is_some() };
    let hosts = hosts(work, &measured, observer)?;
    let chosen = Cell::new(0);
    let run = PredictRun { options, method, budget, replicas, keys, inputs, hosts, chosen };
    let report = if options.merge.is_empty() {
        run.stages(start, &mut watch, warm, observer)
    } else {
        run.merge(start, &mut watch, observer)
    };
    // However the run ended: the folder of a run that failed before its first result must be empty.
    watch.finish();
    report
}

/// Budget and measurements from which the memory lines of a process follow.
struct MeasuredHost<'a> {
    budget: &'a Budget,
    /// Memory of the process before the first arena was allocated, if it was measured.
    before: Option<&'a ProcessMemory>,
    /// Whether the inputs are files, which can be read twice.
    are_files: bool,
}

/// Returns the candidate queue sizes for the input. With a budget for host memory, input files are read once to measure their
/// longest record; for a pipe, bounds derived from the budget are assumed.
fn hosts(
    work: HostWork<'_>,
    measured: &MeasuredHost<'_>,
    observer: &dyn Observer,
) -> Result<Vec<QueueCandidate>, RuntimeError> {
    let options = work.options;
    planned::hosts(
        work,
        measured.budget,
        || measured.before.cloned().or_else(|| ProcessMemory::of(&options.settings)),
        || {
            if measured.are_files {
                extent(&options.inputs, &|| stopped(observer, "nothing had begun"))
            } else {
                Ok(measured.budget.of_pipe().unwrap_or_default())
            }
        },
    )
}

/// Whether `folder` is one of `folders`, after resolving symbolic links and relative paths.
pub(crate) fn contains_folder(folders: &[PathBuf], folder: &Path) -> bool {
    let folder = canonical(folder);
    folders.iter().any(|other| canonical(other) == folder)
}

/// The path without symbolic links; the path itself if it does not exist.
fn canonical(path: &Path) -> PathBuf {
    path.canonicalize().unwrap_or_else(|_| path.to_owned())
}

/// Returns the window length in bases for which the caller in `folder` is calibrated; without a folder, that of the
/// built-in caller.
///
/// # Errors
/// A folder that is not that of a caller with its calibration.
pub fn caller_window(folder: Option<&Path>) -> Result<usize, VirusError> {
    let (_, calibration) = caller::open_files(folder)?;
    Ok(calibration.window as usize)
}

/// Lists the files of nucleotide sequences that `paths` stand for: files, and those files of folders.
///
/// # Errors
/// A folder that cannot be read, or that has no such file.
pub fn nucleotide_files(paths: &[PathBuf]) -> Result<Listing, VirusError> {
    Ok(Listing::of(paths, Some(Alphabet::Nucleotides))?)
}

/// Checks that all inputs exist and look like sequence files, before models are opened.
fn check_sequence_files(options: &PredictOptions) -> Result<(), VirusError> {
    Reader::open(&options.inputs)?;
    for path in options.inputs.iter().filter(|p| p.is_file()) {
        plimsoll_data::sequence::check_start(path)?;
    }
    Ok(())
}

/// Returns the report of this run if it is already complete in the output folder; an error if the folder holds the
/// result of another run.
fn complete_results(
    options: &PredictOptions,
    method: &dyn Method,
    inputs: Option<&[Input]>,
    keys: Option<&JournalKeys>,
) -> Result<Option<PredictReport>, VirusError> {
    let FolderState::Record(old) = folder::inspect(&options.output_dir, options.force)? else {
        return Ok(None);
    };
    let folder = options.output_dir.clone();
    let Some(inputs) = inputs else {
        return Err(VirusError::ResultOfPipe { folder });
    };
    // A merge computes nothing, so the device's arithmetic does not matter.
    let arithmetic = if options.merge.is_empty() {
        to_json(&options.settings.arithmetic()?)
    } else {
        old["identity"]["arithmetic"].clone()
    };
    let identity = record::identity(options, method, inputs, arithmetic);
    if let Some(what) = folder::difference(&old["identity"], &identity) {
        // An interrupted run with --force left its journal here: this run resumes it and replaces the old results.
        if keys.is_some_and(|keys| keys.replaces().unwrap_or(false)) {
            folder::check_written(&options.output_dir)?;
            return Ok(None);
        }
        return Err(VirusError::OtherResult { folder, what });
    }
    if options.shard.is_some() {
        return Err(VirusError::ResultNoShard { folder });
    }
    // Tables contain the input names, which are not part of the identity.
    let names = to_json(&record::names(inputs));
    if old["inputs"] != names {
        let before = old["inputs"].to_string();
        return Err(VirusError::OtherName { folder, before, now: names.to_string() });
    }
    // The process was killed after writing run.json and before removing the journals.
    keys.map_or(Ok(()), JournalKeys::remove_leftovers)?;
    let notes = old["counts"]["notes"].as_u64().unwrap_or(0);
    if options.strict && notes > 0 {
        return Err(VirusError::StrictNotes { folder, notes });
    }
    Ok(Some(PredictReport {
        already_complete: true,
        shard: None,
        failed: old["sequences"]["failed"].as_u64().unwrap_or(0),
        notes,
        counts: ResultCounts::from_record(&old),
        output_dir: folder,
        trained: method.is_trained(),
        calls: None,
        seconds: 0.0,
        tokens_per_second: 0.0,
        fill: [None; 2],
        memory_line: String::new(),
        run_record: PredictRecord::Existing(old),
    }))
}
