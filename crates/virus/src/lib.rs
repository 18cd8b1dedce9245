//! `plimsoll predict`: calls viral sequences in reads and contigs. Checks the output folder, opens and plans the models
//! within the memory budget, loads the weights, streams the input through both encoders and the head, and writes
//! results in input order. Invariant: results depend on the inputs, the weights, `Options::result_key` and the device's
//! arithmetic only.
#![forbid(unsafe_code)]

mod error;
mod folder;
mod methods;
mod options;
pub mod output;
mod pipeline;
pub mod planned;

pub use caller::score::LengthThreshold;
pub use error::VirusError;
pub use methods::caller;
pub use options::{CallerOptions, Models, Options, Shard};
pub use output::{CallsSummary, VirusRow};
pub use plimsoll_data::sequence::{Listing, stem};

use folder::FolderState;
use methods::caller::calibration::Calibration;
use methods::caller::results::LogitLayout;
use methods::caller::windows::SHORTEST_WINDOW;
use output::Counts;
use pipeline::journal::InputStamps;
use pipeline::queues::QueueSizes;
use pipeline::resume::Keys;
use pipeline::run::Run;
use pipeline::shape::{Architecture, Shape, VirNucProShape};
use pipeline::stage::PredictStage;
use plimsoll_data::alphabet::Alphabet;
use plimsoll_data::codons::VOCABULARY;
use plimsoll_data::outputs::InputFiles;
use plimsoll_data::sequence::{Input, Reader, digests, extent};
use plimsoll_data::weights::HubEnv;
use plimsoll_exec::Executor;
use plimsoll_models::Encoder;
use plimsoll_plan::Staging;
use plimsoll_runtime::RuntimeError;
use plimsoll_runtime::observer::stopped;
use plimsoll_runtime::process::Process;
use plimsoll_runtime::watch::Watch;
use plimsoll_runtime::{Budget, CallerModel, EncoderModel, HeadModel, Level, Observer, replicas_for_input};
use serde_json::Value;
use std::cell::Cell;
use std::path::{Path, PathBuf};
use std::time::Instant;

/// Summary of a prediction.
#[derive(Debug)]
pub struct PredictReport {
    /// Whether the results were already complete, so that nothing was computed.
    pub already_complete: bool,
    /// The shard that was computed; its journal is the result, to be merged later.
    pub shard: Option<Shard>,
    /// Number of open reading frames with non-finite values.
    pub failed: u64,
    /// Number of rows of notes.tsv.
    pub notes: u64,
    /// Contents of run.json.
    pub run_record: Value,
    /// Counts of records, windows and calls.
    pub counts: Counts,
    /// Folder of the results.
    pub output_dir: PathBuf,
    /// Whether the head has trained weights.
    pub trained: bool,
    /// Duration of the run in seconds.
    pub seconds: f64,
    /// Tokens of both encoders divided by the duration of the run.
    pub tokens_per_second: f64,
    /// Calls of a caller and their expected errors; `None` for VirNucPro's pipeline, for shards and for complete results.
    pub calls: Option<CallsSummary>,
    /// Packing fill of the nucleotide and the protein encoder (of a caller: the first), without their last packs; `None` if there was only one
    /// pack.
    pub fill: [Option<f64>; 2],
    /// One line that compares the plan with the budget.
    pub memory_line: String,
}

/// The models of VirNucPro's pipeline.
pub(crate) struct VirNucProModels {
    pub(crate) dna: EncoderModel,
    pub(crate) protein: EncoderModel,
    pub(crate) head: HeadModel,
}

/// A caller with its calibration.
pub(crate) struct OpenedCaller {
    pub(crate) model: CallerModel,
    pub(crate) calibration: Calibration,
    pub(crate) layout: LogitLayout,
}

/// The models of a prediction.
pub(crate) enum OpenedModels {
    VirNucPro(Box<VirNucProModels>),
    Caller(Box<OpenedCaller>),
}

/// The opened models of a prediction.
pub(crate) struct Opened {
    pub(crate) models: OpenedModels,
    /// Digests of the model files. Computed once, because the files can have many gigabytes.
    pub(crate) digests: Value,
}

impl Opened {
    /// Whether the weights were trained; a caller has a calibration, so it was.
    pub(crate) fn is_trained(&self) -> bool {
        match &self.models {
            OpenedModels::VirNucPro(models) => models.head.trained,
            OpenedModels::Caller(_) => true,
        }
    }
}

/// Runs a prediction over all inputs into one folder.
///
/// # Errors
/// See [`VirusError`]. After an error or an interruption, finished windows are in the journal in the output
/// folder, and an equal call without `force` resumes from it, unless the input can be read only once.
pub fn predict(options: &Options, observer: &mut dyn Observer) -> Result<PredictReport, VirusError> {
    let start = Instant::now();
    look_at_inputs(options)?;
    let opened = open(options, observer)?;
    predict_one(options, &opened, None, start, &mut None, observer)
}

/// Runs a prediction for each input, into the folder `<stem>` inside the output folder, or `<stem>_plimsoll` if no
/// output folder is given. The models are loaded once.
///
/// # Errors
/// Two inputs with the same folder, before anything is computed; otherwise as [`predict`], for the first input
/// that fails.
pub fn predict_each(options: &Options, observer: &mut dyn Observer) -> Result<Vec<PredictReport>, VirusError> {
    let mut folders: Vec<(PathBuf, &PathBuf)> = vec![];
    for input in &options.inputs {
        let folder = match options.output_dir.as_os_str().is_empty() {
            true => PathBuf::from(format!("{}_plimsoll", stem(input))),
            false => options.output_dir.join(stem(input)),
        };
        if let Some((_, other)) = folders.iter().find(|(f, _)| *f == folder) {
            let (one, other) = ((*other).clone(), input.clone());
            return Err(VirusError::SameFolder { one, other, folder });
        }
        folders.push((folder, input));
    }
    let settings = &options.settings;
    let replicas = settings.most_replicas(replicas_for_input(&options.inputs));
    let budget = settings.read_budget()?;
    look_at_inputs(options)?;
    let opened = open(options, observer)?;
    let shared = Shared { budget, replicas, process: Process::of(settings), files: options.input_files() };
    let mut warm = None;
    let mut reports = vec![];
    for (output_dir, input) in folders {
        let one = Options { inputs: vec![input.clone()], output_dir, ..options.clone() };
        reports.push(predict_one(&one, &opened, Some(&shared), Instant::now(), &mut warm, observer)?);
    }
    Ok(reports)
}

/// Values shared by several inputs, so that one plan serves all of them.
struct Shared {
    budget: Budget,
    /// Maximum number of replicas.
    replicas: usize,
    /// The files that the runs read: the result of one input must not overwrite the next input.
    files: InputFiles,
    /// Memory of the process before the first arena was allocated; later measurements would include that arena.
    process: Option<Process>,
}

/// Window length in bases above which a run warns, because windows are longer than most genes.
const MAX_GENES: usize = 1500;

/// Executors with loaded weights, for the next run of the same stage with the same models.
pub(crate) type Warm = Option<(PredictStage, Vec<Executor>)>;

/// Runs a prediction over the inputs of `options` into its folder, or reports that the results are already
/// complete. `warm` holds the executors of the preceding input, and receives the executors of this input.
fn predict_one(
    options: &Options,
    opened: &Opened,
    shared: Option<&Shared>,
    start: Instant,
    warm: &mut Warm,
    observer: &mut dyn Observer,
) -> Result<PredictReport, VirusError> {
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
    let is_shard = among(&options.output_dir, &options.merge);
    let files = shared.map_or_else(|| options.input_files(), |shared| shared.files.clone());
    folder::check_inputs(&options.output_dir, &files, is_shard)?;
    // Taken before the inputs are hashed, so that a change during the hashing is detected too.
    let stamps = InputStamps::over(&options.inputs);
    let inputs = digests(&options.inputs, &|| stopped(observer, "nothing had begun"))?;
    let keys = inputs.as_deref().map(|inputs| Keys::new(options, opened, inputs, stamps)).transpose()?;
    if let Some(report) = already_there(options, opened, inputs.as_deref(), keys.as_ref())? {
        return Ok(report);
    }
    if !options.force {
        pipeline::resume::check_journals(options, keys.as_ref())?;
    }
    watch.end_stage("opened", None);
    let shape = shape(opened, options);
    let (budget, replicas) = match shared {
        Some(Shared { budget, replicas, .. }) => (budget.clone(), *replicas),
        None => {
            let replicas = options.settings.most_replicas(replicas_for_input(&options.inputs));
            (options.settings.read_budget()?, replicas)
        }
    };
    let before = shared.and_then(|shared| shared.process.as_ref());
    let hosts = hosts(options, opened, &budget, (before, inputs.is_some()), observer)?;
    let chosen = Cell::new(0);
    let run = Run { options, opened, shape: &shape, budget, replicas, keys, inputs, hosts, chosen };
    let done = match options.merge.is_empty() {
        true => run.stages(start, &mut watch, warm, observer),
        false => run.merge(start, &mut watch, observer),
    };
    // However the run ended: the folder of a run that failed before its first result must be empty.
    watch.finish();
    done
}

/// Returns the candidate queue sizes for the input, each with the memory lines of the process. With a budget
/// for host memory, input `files` are read once to measure their longest record; for a pipe, bounds derived
/// from the budget are assumed. `before` is the memory of the process before the first arena was allocated, if
/// it was measured.
fn hosts(
    options: &Options,
    opened: &Opened,
    budget: &Budget,
    (before, files): (Option<&Process>, bool),
    observer: &dyn Observer,
) -> Result<Vec<(QueueSizes, Vec<Staging>)>, RuntimeError> {
    let process = || before.cloned().or_else(|| Process::of(&options.settings));
    let measure = || match files {
        true => extent(&options.inputs, &|| stopped(observer, "nothing had begun")),
        false => Ok(budget.of_pipe().unwrap_or_default()),
    };
    planned::hosts(options, opened.is_trained(), budget, process, measure)
}

/// Whether `folder` is one of `folders`, after resolving symbolic links and relative paths.
pub(crate) fn among(folder: &Path, folders: &[PathBuf]) -> bool {
    let place = |path: &Path| path.canonicalize().unwrap_or_else(|_| path.to_owned());
    let folder = place(folder);
    folders.iter().any(|other| place(other) == folder)
}

/// Lists the files of nucleotide sequences that `paths` stand for: files, and those files of folders.
///
/// # Errors
/// A folder that cannot be read, or that has no such file.
pub fn nucleotide_files(paths: &[PathBuf]) -> Result<Listing, VirusError> {
    Ok(Listing::of(paths, Some(Alphabet::Nucleotides))?)
}

/// Checks that all inputs exist and look like sequence files, before models are opened.
fn look_at_inputs(options: &Options) -> Result<(), VirusError> {
    Reader::open(&options.inputs)?;
    for path in options.inputs.iter().filter(|p| p.is_file()) {
        plimsoll_data::sequence::look(path)?;
    }
    Ok(())
}

/// Opens the caller or VirNucPro's models, and hashes their files.
fn open(options: &Options, observer: &mut dyn Observer) -> Result<Opened, VirusError> {
    match &options.caller {
        Some(caller) => open_caller(options, caller),
        None => open_virnucpro(options, observer),
    }
}

/// Opens a caller, checks that it has the tasks of a prediction and that no option contradicts it, and hashes its files.
fn open_caller(options: &Options, caller: &CallerOptions) -> Result<Opened, VirusError> {
    let refused = [
        (options.original_alphabet, "--original-alphabet"),
        (options.keep_intermediate, "--keep-intermediate"),
        (options.save_embeddings.is_some(), "--save-embeddings"),
        (options.models != Models::default(), "a model of --weights, --dna-model, --protein-model or --head"),
    ];
    if let Some((_, option)) = refused.into_iter().find(|(given, _)| *given) {
        return Err(VirusError::NotOfCaller { option });
    }
    if let Some(length) = caller.limits.min_length.filter(|&length| length < SHORTEST_WINDOW as u64) {
        return Err(VirusError::ShortMinLength { length, shortest: SHORTEST_WINDOW });
    }
    if caller.paired && options.inputs.len() > 1 && !options.inputs.len().is_multiple_of(2) {
        return Err(VirusError::PairedFiles { files: options.inputs.len() });
    }
    let (model, calibration) = caller_for_windows(caller, options.length)?;
    let layout = layout(&model)?;
    let digests = pipeline::record::caller_digests(&model, &calibration)?;
    Ok(Opened { models: OpenedModels::Caller(Box::new(OpenedCaller { model, calibration, layout })), digests })
}

/// Opens a caller and its calibration for windows of `length` bases.
fn caller_for_windows(caller: &CallerOptions, length: usize) -> Result<(CallerModel, Calibration), VirusError> {
    if length < SHORTEST_WINDOW {
        return Err(VirusError::ShortWindows { length, shortest: SHORTEST_WINDOW });
    }
    let (model, calibration) = caller_files(caller.folder.as_deref())?;
    match calibration.window {
        window if window == length as u64 => Ok((model, calibration)),
        window => Err(VirusError::OtherWindows { length, window }),
    }
}

/// Opens a caller and its calibration; without a folder, the built-in ones.
fn caller_files(folder: Option<&Path>) -> Result<(CallerModel, Calibration), VirusError> {
    match folder {
        // The model first: of the folder of another model, its family is what is wrong.
        Some(folder) => Ok((CallerModel::open(folder)?, Calibration::open(folder)?)),
        None => Ok((CallerModel::builtin()?, Calibration::builtin()?)),
    }
}

/// Returns the window length in bases for which the caller in `folder` is calibrated; without a folder, that of the
/// built-in caller.
///
/// # Errors
/// A folder that is not that of a caller with its calibration.
pub fn caller_window(folder: Option<&Path>) -> Result<usize, VirusError> {
    Ok(caller_files(folder)?.1.window as usize)
}

/// Finds the tasks of a prediction in a caller's logits.
fn layout(caller: &CallerModel) -> Result<LogitLayout, VirusError> {
    let refuse = |what: String| VirusError::CallerModel { model: caller.name.clone(), what };
    let vocabulary = caller.config.vocab_size;
    if vocabulary != VOCABULARY as u64 {
        return Err(refuse(format!("its vocabulary has {vocabulary} tokens, and codons have {VOCABULARY}")));
    }
    let (mut first, mut virus, mut classes) = (0, None, None);
    for task in &caller.config.tasks {
        let logits = first..first + task.classes.len();
        first = logits.end;
        match &*task.name {
            "virus" => {
                let position = |name: &str| task.classes.iter().position(|class| class == name);
                let found = position("other").zip(position("virus")).filter(|_| task.classes.len() == 2);
                let (other, is_virus) = found.ok_or_else(|| {
                    refuse("the classes of its task `virus` are not `other` and `virus`".to_owned())
                })?;
                virus = Some((logits.start + other, logits.start + is_virus));
            }
            "class" => classes = Some((logits, task.classes.clone())),
            _ => {}
        }
    }
    let (other, virus) = virus.ok_or_else(|| refuse("its config.json has no task `virus`".to_owned()))?;
    let (classes, names) = classes.unwrap_or_default();
    Ok(LogitLayout { other, virus, classes, names })
}

/// Opens the encoders and the head, checks that they fit each other and the window length, and hashes their files.
fn open_virnucpro(options: &Options, observer: &mut dyn Observer) -> Result<Opened, VirusError> {
    let env = HubEnv::from_process();
    let models = &options.models;
    let dna = match &models.dna {
        Some(name) => EncoderModel::open(name, &env, observer)?,
        None => EncoderModel::builtin_dna()?,
    };
    let protein = match &models.protein {
        Some(name) => EncoderModel::open(name, &env, observer)?,
        None => EncoderModel::builtin_protein()?,
    };
    for (model, wanted) in [(&dna, "DNABERT-S"), (&protein, "ESM-2")] {
        let fits = match &model.encoder {
            Encoder::DnabertS(_) => wanted == "DNABERT-S",
            Encoder::Esm2(_) => wanted == "ESM-2",
        };
        if !fits {
            let (model, found) = (model.name.clone(), model.encoder.family());
            return Err(VirusError::WrongModel { model, wanted, found });
        }
    }
    let (d, p) = (dna.encoder.hidden_size(), protein.encoder.hidden_size());
    let head = match &models.head {
        Some(path) => HeadModel::open(path, d, p)?,
        None => HeadModel::builtin(d, p)?,
    };
    if !head.trained {
        let text = "the built-in test models are UNTRAINED: scores are NA and calls read `untrained`; give trained \
            models with --weights";
        observer.say(Level::Warning, text);
    }
    if let Some(of) = head.named_length().filter(|&l| l != options.length) {
        return Err(VirusError::HeadLength { head: head.name, of, length: options.length });
    }
    let digests = pipeline::record::digests(&dna, &protein, &head)?;
    if options.length > MAX_GENES {
        let text = format!(
            "windows of {} bases are longer than most genes: a frame is scored only if it has no stop codon in \
                the whole window, so most windows will have no call; VirNucPro's heads are for 300 and 500 bases",
            options.length
        );
        observer.say(Level::Warning, &text);
    }
    Ok(Opened { models: OpenedModels::VirNucPro(Box::new(VirNucProModels { dna, protein, head })), digests })
}

/// Returns the report of this run if it is already complete in the output folder; an error if the folder holds the
/// result of another run.
fn already_there(
    options: &Options,
    opened: &Opened,
    inputs: Option<&[Input]>,
    keys: Option<&Keys>,
) -> Result<Option<PredictReport>, VirusError> {
    let FolderState::Record(old) = folder::inspect(&options.output_dir, options.force)? else {
        return Ok(None);
    };
    let output_dir = || options.output_dir.clone();
    let Some(inputs) = inputs else {
        return Err(VirusError::ResultOfPipe { folder: output_dir() });
    };
    // A merge computes nothing, so the device's arithmetic does not matter.
    let arithmetic = match options.merge.is_empty() {
        true => options.settings.arithmetic()?,
        false => old["identity"]["arithmetic"].clone(),
    };
    let identity = pipeline::record::identity(options, opened, inputs, arithmetic);
    if let Some(what) = folder::difference(&old["identity"], &identity) {
        // An interrupted run with --force left its journal here: this run resumes it and replaces the old results.
        if keys.is_some_and(|keys| keys.replaces().unwrap_or(false)) {
            folder::check_written(&options.output_dir)?;
            return Ok(None);
        }
        return Err(VirusError::OtherResult { folder: output_dir(), what });
    }
    if options.shard.is_some() {
        return Err(VirusError::ResultNoShard { folder: output_dir() });
    }
    // Tables contain the input names, which are not part of the identity.
    let names = pipeline::record::names(inputs);
    if old["inputs"] != names {
        let (before, now) = (old["inputs"].to_string(), names.to_string());
        return Err(VirusError::OtherName { folder: output_dir(), before, now });
    }
    // The process was killed after writing run.json and before removing the journals.
    keys.map_or(Ok(()), Keys::remove_left)?;
    let notes = old["counts"]["notes"].as_u64().unwrap_or(0);
    if options.strict && notes > 0 {
        return Err(VirusError::StrictNotes { folder: output_dir(), notes });
    }
    Ok(Some(PredictReport {
        already_complete: true,
        shard: None,
        failed: old["sequences"]["failed"].as_u64().unwrap_or(0),
        notes,
        counts: Counts::from_record(&old),
        output_dir: options.output_dir.clone(),
        trained: opened.is_trained(),
        calls: None,
        seconds: 0.0,
        tokens_per_second: 0.0,
        fill: [None; 2],
        memory_line: String::new(),
        run_record: old,
    }))
}

fn shape(opened: &Opened, options: &Options) -> Shape {
    let models = match &opened.models {
        OpenedModels::VirNucPro(models) => Architecture::VirNucPro(Box::new(VirNucProShape {
            dna: models.dna.encoder.clone(),
            protein: models.protein.encoder.clone(),
            head: models.head.config,
        })),
        OpenedModels::Caller(caller) => Architecture::Caller(caller.model.config.clone()),
    };
    Shape { models, length: options.length as u64 }
}
