//! Evaluation of a checkpoint without training: the loss of a language model, or the metrics of a classifier. Invariant:
//! only the forward pass is planned, so that an evaluation needs no memory for gradients and optimizer states.

use super::PreparedTraining;
use super::joined::{BatchLimit, JoinedBatch};
use super::program::{bounds, smaller_sizes};
use super::trained_model::{ClassifierOutput, TrainedModel};
use crate::classification::{ClassifierMetrics, TaskScores};
use crate::config::{CONFIG, Interval, ModelKind, TrainConfig};
use crate::feed;
use crate::{TrainConfigError, TrainError};
use plimsoll_data::atomic::AtomicFile;
use plimsoll_data::outputs::InputFiles;
use plimsoll_data::train::Split;
use plimsoll_data::weights::is_hub_id;
use plimsoll_graph::{Bounds, Bytes, OutputRole};
use plimsoll_plan::{PlanError, Policy, Program, Target, compile};
use plimsoll_runtime::adapter;
use plimsoll_runtime::machine::available;
use plimsoll_runtime::report::{path_text, to_json};
use plimsoll_runtime::session::{ForwardSession, Site, cross_entropy};
use plimsoll_runtime::{Device, Observer, RuntimeError};
use serde::Serialize;
use serde_json::json;
use std::io::Write;
use std::path::{Path, PathBuf};

/// The key of the interval of evaluations.
const EVALUATE_EVERY: &str = "run.evaluate_every";

/// Name of the configuration inside the folder of a model.
const MODEL: &str = plimsoll_runtime::hub::CONFIG;

/// A request to evaluate a checkpoint.
#[derive(Clone, Debug)]
pub struct EvaluationRequest {
    /// Folder of a checkpoint, or of averaged weights inside one; or a model that no run wrote: a folder or a hub id.
    pub checkpoint: PathBuf,
    /// Data files, all of which are evaluated; if empty, the validation data of the run is evaluated.
    pub data: Vec<String>,
    /// Overrides of configuration keys, such as `data.labels=classes.tsv`.
    pub flags: Vec<String>,
}

/// Result of an evaluation.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct EvaluationReport {
    /// Version of Plimsoll.
    #[serde(rename = "plimsoll")]
    pub version: &'static str,
    /// Folder of the checkpoint.
    #[serde(serialize_with = "path_text")]
    pub checkpoint: PathBuf,
    /// The value of `model.kind`.
    pub kind: &'static str,
    /// Number of targets: predicted tokens, or examples of the first task of a classifier.
    pub targets: u64,
    /// Mean cross-entropy per target, in nats.
    pub loss: f64,
    /// Exponential of the loss, of a language model.
    pub perplexity: Option<f64>,
    /// Metrics of each task of a classifier.
    pub tasks: Vec<ClassifierMetrics>,
    /// The device that computed.
    pub device: String,
    /// Memory budget.
    #[serde(rename = "budget_bytes")]
    pub budget: Bytes,
    /// Planned peak.
    #[serde(rename = "peak_bytes")]
    pub peak: Bytes,
}

impl EvaluationReport {
    /// Writes the report as JSON to a file, which appears complete or not at all.
    ///
    /// # Errors
    /// Errors of the file system.
    pub fn write(&self, path: &Path) -> Result<(), TrainError> {
        let mut file = AtomicFile::create(path)?;
        writeln!(file, "{:#}", to_json(self)).map_err(|e| file.error(e))?;
        Ok(file.commit()?)
    }
}

impl EvaluationRequest {
    /// Reads the configuration of the run that wrote the checkpoint, with the overrides of the request. The configuration
    /// of a model that no run wrote has default values, and the data of the request.
    ///
    /// # Errors
    /// The folder is neither a checkpoint of a run nor a model, or a model without DATA; DATA was given for a model whose
    /// data are no sequences; errors of the configuration.
    pub fn configuration(&self, observer: &mut dyn Observer) -> Result<TrainConfig, TrainError> {
        // The run held data out only if it evaluated: what a flag would hold out now, it has trained on.
        if let Some(flag) = self.flags.iter().find(|flag| flag.split('=').next() == Some(EVALUATE_EVERY)) {
            let why = "an evaluation reads what the run held out, or all of DATA; remove it".to_owned();
            return Err(TrainConfigError::Set { text: flag.clone(), why }.into());
        }
        let file = match self.config_file()? {
            Some(file) => file,
            None => return self.of_model(observer),
        };
        if self.checkpoint.join(adapter::CONFIG).is_file() {
            return Err(TrainError::EvaluationOfAdapters { path: self.checkpoint.clone() });
        }
        // The weights are those of the checkpoint. Adapters of the run were merged into them.
        let from = self.name()?.escape_default().to_string();
        let mut flags = self.flags.clone();
        flags.extend(["model.preset=null", "model.lora=null", "distillation={}"].map(str::to_owned));
        flags.push(format!("model.from=\"{from}\""));
        if !self.states("batch.micro_tokens") {
            // The memory decides; that of the run may have been another.
            flags.push("batch.micro_tokens=auto".to_owned());
        }
        let every: Option<Interval> = TrainConfig::stated(&file, EVALUATE_EVERY)?;
        let takes_all = !self.data.is_empty()
            || self.flags.iter().any(|flag| flag == "data.validation_fraction=0")
            || self.states("data.train");
        if TrainConfig::stated(&file, "model.kind")? == Some(ModelKind::Caller) {
            // Only a run that evaluates draws validation windows, which are of records that no run trains on.
            if every.is_none() {
                flags.push(format!("{EVALUATE_EVERY}=1"));
            }
        } else if takes_all {
            let all_data = ["data.validation=[]", "data.validation_fraction=0", "data.split_seed=0"];
            let no_evaluation = ["run.evaluate_every=null", "run.patience=null", "run.min_delta=0"];
            flags.extend(all_data.into_iter().chain(no_evaluation).map(str::to_owned));
        } else if every.is_none() {
            return Err(TrainError::NothingHeldOut { checkpoint: self.checkpoint.clone() });
        }
        let mut config = TrainConfig::read(&file, &flags, observer)?;
        if self.data.is_empty() {
            return Ok(config);
        }
        if config.model.kind == ModelKind::Head {
            return Err(TrainError::DataOfHead);
        }
        config.data.train.clone_from(&self.data);
        Ok(config)
    }

    /// Whether a flag states a key.
    fn states(&self, key: &str) -> bool {
        self.flags.iter().any(|flag| flag.split('=').next() == Some(key))
    }

    /// The files that the evaluation reads, of which `config` is the configuration.
    pub fn input_files(&self, config: &TrainConfig) -> InputFiles {
        let mut files = config.input_files();
        files.add_model(&self.checkpoint);
        if let Ok(Some(file)) = self.config_file() {
            files.add(&file);
        }
        files
    }

    /// The configuration of a model that no run wrote.
    fn of_model(&self, observer: &mut dyn Observer) -> Result<TrainConfig, TrainError> {
        if self.data.is_empty() {
            return Err(TrainError::EvaluationWithoutData { model: self.name()?.to_owned() });
        }
        if self.checkpoint.join(adapter::CONFIG).is_file() && !self.checkpoint.join(MODEL).is_file() {
            return Err(TrainError::EvaluationOfAdapters { path: self.checkpoint.clone() });
        }
        let text = json!({
            "model": {"from": self.name()?},
            "data": {"train": self.data},
            "run": {"steps": 1},
        });
        TrainConfig::parse_with(&text.to_string(), self.name()?, &self.flags, observer)
    }

    /// The checkpoint as text.
    fn name(&self) -> Result<&str, TrainError> {
        let name = self.checkpoint.to_str();
        name.ok_or_else(|| TrainError::CheckpointName { path: self.checkpoint.clone() })
    }

    /// The configuration of the run: in the folder that contains `checkpoints`, or the link `best`. `None` for a model that
    /// no run wrote.
    fn config_file(&self) -> Result<Option<PathBuf>, TrainError> {
        if !self.checkpoint.exists() && self.checkpoint.to_str().is_some_and(is_hub_id) {
            return Ok(None);
        }
        let full = self.checkpoint.canonicalize().map_err(RuntimeError::io(&self.checkpoint))?;
        let found = full.ancestors().skip(1).take(3).map(|folder| folder.join(CONFIG));
        let found = found.into_iter().find(|file: &PathBuf| file.is_file());
        if found.is_none() && !self.checkpoint.join(MODEL).is_file() {
            return Err(TrainError::NoRunOfCheckpoint { path: self.checkpoint.clone() });
        }
        Ok(found)
    }
}

/// Evaluates a checkpoint on `device` with the configuration of [`EvaluationRequest::configuration`].
///
/// # Errors
/// Data that cannot be read or has no targets; a plan that exceeds the memory budget; errors of the device; scores that
/// are not finite.
pub fn evaluate(
    request: &EvaluationRequest,
    config: &TrainConfig,
    device: Device,
    observer: &mut dyn Observer,
) -> Result<EvaluationReport, TrainError> {
    let config = &feed::named(config)?;
    let sizes = smaller_sizes(config);
    let prepared = PreparedTraining::open(config, device, false, observer)?;
    let planned = plan(config, &prepared.model, &prepared.target, prepared.for_plans(), &sizes);
    let EvaluationPlan { program, bounds, output, classifier } =
        planned.map_err(|error| prepared.bill(error))?;
    let data = prepared.data();
    let PreparedTraining { settings, budget: process_budget, model, mut feed, .. } = prepared;
    let on_host = process_budget.on_host;
    let budget = process_budget.bytes;
    let mut joined = JoinedBatch::new(bounds, &feed);
    let peak = program.peak() + if on_host { data } else { Bytes::ZERO };
    // The scores of all examples are kept, in memory of the host that no plan has.
    let host = if on_host { budget.saturating_sub(peak) } else { available().free };
    let name = settings.machine().name();
    let site = Site::new(&settings, 1, None, process_budget);
    let source = model.source(config.run.seed);
    let mut session = ForwardSession::start(&site, program, &output, &source, observer)?;
    let split = if feed.validates(config) { Split::Validation } else { Split::Train };
    if split == Split::Validation {
        feed.rewind()?;
    }
    let max_targets = config.run.evaluate_tokens.unwrap_or(u64::MAX);
    let mut loss = 0.0;
    let mut targets = 0;
    let mut tasks = tasks_of(config);
    while targets < max_targets {
        if let Some(signal) = observer.stop() {
            let kept = "nothing was written".to_owned();
            return Err(RuntimeError::Interrupted { signal, kept }.into());
        }
        let limit = BatchLimit { packs: bounds.packs, targets: max_targets - targets };
        let Some(taken) = joined.fill(&mut feed, split, limit)? else { break };
        let values = session.compute(joined.batch())?;
        targets += taken.targets;
        match classifier {
            None => loss += f64::from(values[0]),
            Some(kind) => {
                add(&mut tasks, kind, values, joined.targets());
                let score_bytes: u64 = tasks.iter().map(|task| task.examples() * task.bytes_of_example()).sum();
                if Bytes(score_bytes) > host {
                    return Err(TrainError::TooManyScores { targets, budget });
                }
            }
        }
    }
    if targets == 0 {
        return Err(TrainError::NothingToEvaluate);
    }
    if tasks.iter().any(|task| !task.is_finite()) || !loss.is_finite() {
        return Err(TrainError::ScoresNotFinite);
    }
    let tasks: Vec<ClassifierMetrics> = match classifier {
        None => vec![],
        Some(_) => tasks.iter().filter_map(TaskScores::metrics).collect(),
    };
    let loss = tasks.first().map_or(loss / targets as f64, |task| task.loss);
    Ok(EvaluationReport {
        version: env!("CARGO_PKG_VERSION"),
        checkpoint: request.checkpoint.clone(),
        kind: config.model.kind.name(),
        targets: tasks.first().map_or(targets, |task| task.examples),
        loss,
        perplexity: classifier.is_none().then(|| loss.exp()),
        tasks,
        device: name,
        budget,
        peak,
    })
}

/// A plan of the forward pass.
struct EvaluationPlan {
    program: Program,
    bounds: Bounds,
    output: OutputRole,
    /// Values of the output of a classifier; `None` for the loss of a language model.
    classifier: Option<ClassifierOutput>,
}

/// Plans the largest batch of `sizes`, in descending order, that fits the budget.
fn plan(
    config: &TrainConfig,
    model: &TrainedModel,
    target: &Target,
    budget: Bytes,
    sizes: &[u64],
) -> Result<EvaluationPlan, TrainError> {
    let policy = Policy { precision: config.precision.kind, ..Policy::default() };
    let chunk = config.memory.loss_chunk.0.unwrap_or(64).min(u64::from(u32::MAX)) as u32;
    let mut refused = None;
    for &tokens in sizes {
        let bounds = bounds(config, tokens);
        let (graph, classifier) = match model.classifier(bounds) {
            Some((graph, kind)) => (graph.map_err(|source| PlanError::of_graph("build", source))?, Some(kind)),
            None => (model.graphs(bounds, chunk, model.layers())?.1, None),
        };
        let output = match classifier {
            Some(ClassifierOutput::Probabilities) => "scores".into(),
            Some(ClassifierOutput::Logits) => "logits".into(),
            None => cross_entropy(&graph),
        };
        let plan = compile(&graph, &policy, target)?;
        let program = Program::new(target.clone(), vec![("evaluate".to_owned(), plan)], vec![]);
        match program.within(budget) {
            Ok(program) => return Ok(EvaluationPlan { program, bounds, output, classifier }),
            Err(error) => refused = Some(error),
        }
    }
    Err(match refused {
        Some(error) => error.into(),
        None => RuntimeError::bug("an evaluation has no size of a batch").into(),
    })
}

/// The tasks of a classifier, without examples.
fn tasks_of(config: &TrainConfig) -> Vec<TaskScores> {
    if config.model.kind == ModelKind::Caller {
        let tasks = config.model.tasks.iter();
        return tasks.map(|task| TaskScores::new(task.name.clone(), task.classes.clone())).collect();
    }
    let classes = config.model.classes.map(|n| match config.model.class_names.as_slice() {
        [] => (0..n).map(|class| class.to_string()).collect(),
        names => names.to_vec(),
    });
    classes.map(|classes| TaskScores::new("class".to_owned(), classes)).into_iter().collect()
}

/// Adds a batch, in whose `values` a row has the columns of all tasks.
fn add(tasks: &mut [TaskScores], kind: ClassifierOutput, values: &[f32], targets: &[Vec<i32>]) {
    let width: usize = tasks.iter().map(TaskScores::width).sum();
    let mut first = 0;
    for (task, targets) in tasks.iter_mut().zip(targets) {
        let columns = first..first + task.width();
        for (row, &target) in values.chunks_exact(width).zip(targets) {
            match kind {
                ClassifierOutput::Probabilities => task.add_probabilities(target, &row[columns.clone()]),
                ClassifierOutput::Logits => task.add_logits(target, &row[columns.clone()]),
            }
        }
        first = columns.end;
    }
}
