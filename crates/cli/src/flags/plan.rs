//! Flags of `plimsoll plan`. Invariant: a flag that has no meaning for the planned work (a model, a prediction or
//! training) is refused.

use super::device::DeviceName;
use super::gpu;
use super::machine::{StreamingFlags, host_budget, threads};
use super::precision::{PrecisionFlag, precision_flag};
use super::predict::{ModelFlags, length, usual_options};
use super::train::{ForeignConfig, source_parser};
use super::{at_least_one, print_summary, step_tokens};
use crate::error::{CliError, usage};
use crate::terminal::{Terminal, Verbosity};
use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use clap::{Arg, Args, Command, Error, ValueEnum};
use plimsoll_report::timeline::PlannedTimeline;
use plimsoll_runtime::explain::{self, Effect};
use plimsoll_runtime::largest::{self, LargestStep, TrialCommand};
use plimsoll_runtime::price::{self, ModelPlanReport, PriceRequest};
use plimsoll_runtime::report::to_json;
use plimsoll_runtime::timeline;
use plimsoll_runtime::{
    Bytes, Device, InputFiles, OutputGuard, Precision, Room, RuntimeError, Settings, Silent, Streaming, Target,
    hub, machine,
};
use plimsoll_train::config::TrainConfig;
use plimsoll_train::confirm::TrainConfirmation;
use plimsoll_train::priced::{PlannedRun, TrainPlanReport};
use plimsoll_train::{self, RunMemory, TrainingChoice, priced};
use plimsoll_virus::{
    CallerOptions, MethodOptions, Models, USUAL_PREFETCH, caller_window, nucleotide_files, planned,
};
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Plan the memory of a model, a prediction or a training run on a machine, to the byte, from its configuration alone
///
/// The machine and the weights are not needed. A plan that does not fit is refused with exit code 4, the memory it
/// needs, and flags that make it fit.
#[derive(Debug, Args)]
pub struct PlanCommand {
    /// Model: a Hugging Face hub id such as facebook/esm2_t36_3B_UR50D, a folder, or a config.json
    #[arg(long, value_name = "PATH|HUB_ID", required_unless_present_any = ["train", "from_config", "predict"])]
    model: Option<String>,

    /// Plan a whole prediction instead: both encoders, the head and the queues, as `plimsoll predict` would plan them
    /// under the same budget, with the expected reads per second
    #[arg(long, conflicts_with_all = ["model", "train", "dump_after"])]
    predict: bool,

    /// Plan a training run instead: the fastest plan inside the budget, which chooses values for the keys that the
    /// configuration leaves at auto
    #[arg(long, value_name = "CONFIG.yaml", conflicts_with_all = ["model", "tokens", "stream_weights", "disk", "host_memory", "dump_after"])]
    train: Option<PathBuf>,

    /// Plan a training run with the configuration of another trainer, as `plimsoll train --from-config` reads it
    #[arg(long, value_name = "FILE", conflicts_with_all = ["train", "model", "predict", "tokens", "stream_weights", "disk", "host_memory", "dump_after"])]
    from_config: Option<PathBuf>,

    /// Trainer that the file of --from-config is for; needed only if the keys in the file do not show it
    #[arg(long, value_name = "TRAINER", requires = "from_config", value_parser = source_parser())]
    from_format: Option<String>,

    /// Override the value of a key of --train or --from-config, such as optimizer.kind=adamw8bit; can be given several times,
    /// and the last value of a key is used
    #[arg(long, value_name = "KEY=VALUE", conflicts_with_all = ["model", "predict"])]
    set: Vec<String>,

    /// Find the largest value that fits the budget: the tokens of a step of --model; of --train the tokens of a micro-batch,
    /// the layers, or the width
    #[arg(long, value_enum, value_name = "tokens|layers|hidden", conflicts_with_all = ["predict", "tokens", "dump_after"])]
    largest: Option<LargestFlag>,

    /// Run the answer of --largest on this machine in a process of its own under the same budget, and show why the next larger
    /// value is refused: a step of --model, which needs its weights; of --train at most two micro-steps and the update, which
    /// need the training data
    #[arg(long, requires = "largest")]
    confirm: bool,

    /// Run the trial of --confirm, and print what it measured
    #[arg(long, hide = true, conflicts_with_all = ["largest", "explain", "html", "memory_viz", "trace"])]
    trial: bool,

    /// Maximum number of tokens in a step, which is one batch through the model [default: the most that fit the budget
    /// and increase speed]
    #[arg(long, value_name = "N", value_parser = step_tokens)]
    tokens: Option<u64>,

    /// Memory budget, such as 22GiB or 80% of the target's memory [default: the target's memory; for this machine's CPU
    /// 80% of the free memory; with --train the key memory.budget]
    #[arg(long, alias = "memory-budget", value_name = "SIZE")]
    budget: Option<String>,

    /// Target machine: a name, a FILE.toml written by `plimsoll bench --calibrate`, or a GPU of this machine: device
    /// (the first) or cuda:N
    #[arg(long, default_value = "cpu", value_name = "NAME|FILE.toml|device", value_parser = TargetParser)]
    target: String,

    /// Threads of the target CPU; three or more are divided among replicas, which compute separate steps, as in
    /// `plimsoll embed` [default: all cores available to this process; for a FILE.toml the threads it was measured with; with --train the key
    /// run.threads]
    #[arg(long, value_name = "N", value_parser = threads, conflicts_with_all = ["train", "from_config"])]
    threads: Option<u64>,

    /// Number format of the model: auto is the default of a run on the target, which is bf16 on GPUs and CPUs with AMX,
    /// and f32 on other CPUs
    #[arg(long, value_parser = precision_flag(), default_value = "auto", conflicts_with_all = ["train", "from_config"])]
    precision: PrecisionFlag,

    #[command(flatten)]
    streaming: StreamingFlags,

    /// Host memory beside a GPU in which streamed weights may be kept, such as 64GiB [default: no limit]
    #[arg(long, value_name = "SIZE", conflicts_with = "predict")]
    host_memory: Option<String>,

    /// Output format of the plan
    #[arg(long, value_enum, default_value_t = PlanFormat::Text)]
    format: PlanFormat,

    /// Same as --format json
    #[arg(long, conflicts_with_all = ["format", "dump_after"])]
    json: bool,

    /// List the optimisations in effect, each with the bytes it saves and the time it costs, found by planning with and
    /// without it
    #[arg(long, conflicts_with = "dump_after")]
    explain: bool,

    /// Print the graph after this compiler pass instead of the plan; an unknown name lists the passes
    #[arg(long, value_name = "PASS", conflicts_with = "format")]
    dump_after: Option<String>,

    // The headings of these flags would apply to all flags after them.
    #[command(flatten)]
    timeline: TimelineFlags,

    #[command(flatten)]
    prediction: PredictionFlags,
}

/// Flags excluded by --predict. clap does not require a flag that is excluded, so flags that require --predict exclude
/// these too.
const OTHERS: [&str; 3] = ["model", "train", "from_config"];

/// Flags of VirNucPro's models, excluded by a caller.
const OF_VIRNUCPRO: [&str; 5] = ["weights", "dna_model", "protein_model", "head", "orfs"];

/// Inputs of a prediction, for --predict.
#[derive(Debug, Args)]
#[command(next_help_heading = "With --predict (without model flags: the configurations of VirNucPro's models)")]
struct PredictionFlags {
    /// Plan the built-in caller, which `plimsoll predict` uses without a model, or the caller in this folder
    #[arg(long, value_name = "DIR", num_args = 0..=1, requires = "predict", conflicts_with_all = OTHERS, conflicts_with_all = OF_VIRNUCPRO)]
    caller: Option<Option<PathBuf>>,

    /// Folder that contains all models, as for `plimsoll predict`
    #[arg(long, value_name = "DIR", requires = "predict", conflicts_with_all = OTHERS)]
    weights: Option<PathBuf>,

    /// DNA model: a folder or a hub id [default: zhihan1996/DNABERT-S]
    #[arg(long, value_name = "PATH|HUB_ID", requires = "predict", conflicts_with_all = OTHERS)]
    dna_model: Option<String>,

    /// Protein model: a folder or a hub id [default: facebook/esm2_t36_3B_UR50D]
    #[arg(long, value_name = "PATH|HUB_ID", requires = "predict", conflicts_with_all = OTHERS)]
    protein_model: Option<String>,

    /// Head: a file [default: a head of VirNucPro's size]
    #[arg(long, value_name = "PATH", requires = "predict", conflicts_with_all = OTHERS)]
    head: Option<PathBuf>,

    /// Window length in bases, 3 to 1048576 [default: the length in the head's file name, otherwise 500; for a caller the
    /// length of its calibration]
    #[arg(long, value_name = "BASES", value_parser = length, requires = "predict", conflicts_with_all = OTHERS)]
    length: Option<u64>,

    /// Sequence file, whose records are measured so that the queues are planned to the byte; can be given several times
    /// [default: one million reads of --read-length]
    #[arg(long, value_name = "FILE", requires = "predict", conflicts_with_all = OTHERS)]
    input: Vec<PathBuf>,

    /// Read length in bases, for the expected reads per second
    #[arg(long, default_value_t = 150, value_name = "BASES", value_parser = at_least_one, requires = "predict", conflicts_with_all = OTHERS)]
    read_length: u64,

    /// Open reading frames per window, 0.01 to 6, for the expected reads per second: random bases have 0.6 in a window
    /// of 150 bases, genes 1 or more
    #[arg(long, default_value_t = 1.0, value_name = "NUMBER", value_parser = orfs, requires = "predict", conflicts_with_all = OTHERS)]
    orfs: f64,
}

/// Files that show the memory of a step over its instructions.
#[derive(Debug, Args)]
#[command(next_help_heading = "Timelines: every tensor with its address and lifetime")]
struct TimelineFlags {
    /// Write an HTML page of the memory of a step over its instructions, by line of the ledger and by layer, with the
    /// budget, the peak and the largest tensors; replaces an existing file
    #[arg(long, value_name = "FILE", conflicts_with_all = ["largest", "dump_after"])]
    html: Option<PathBuf>,

    /// Compare with a second plan on the page of --html: a second configuration of --train, or a second model
    #[arg(long, value_name = "CONFIG", requires = "html", conflicts_with = "predict")]
    compare: Option<String>,

    /// Write a snapshot for the memory viewer of PyTorch (pytorch.org/memory_viz); replaces an existing file
    #[arg(long, value_name = "FILE.pickle", conflicts_with_all = ["largest", "dump_after"])]
    memory_viz: Option<PathBuf>,

    /// Write a trace of the expected times and the bytes in use, for Perfetto (ui.perfetto.dev); replaces an existing
    /// file
    #[arg(long, value_name = "FILE.json", conflicts_with_all = ["largest", "dump_after"])]
    trace: Option<PathBuf>,

    /// Replace the files of --html, --memory-viz and --trace if they exist
    #[arg(long)]
    force: bool,
}

impl TimelineFlags {
    /// Checks before planning that the files can be written: none is an input of the command, or exists without --force.
    fn check(&self, inputs: InputFiles) -> Result<(), CliError> {
        let mut guard = OutputGuard::new(inputs, self.force);
        let mut files = self.files();
        Ok(files.try_for_each(|path| guard.file(path)).map_err(RuntimeError::from)?)
    }

    /// The files that were asked for.
    fn files(&self) -> impl Iterator<Item = &PathBuf> {
        self.html.iter().chain(&self.memory_viz).chain(&self.trace)
    }

    /// Whether a timeline is needed.
    fn is_wanted(&self) -> bool {
        self.html.is_some() || self.memory_viz.is_some() || self.trace.is_some()
    }

    /// Writes the files of the planned programs; `compared` is on the page only.
    fn write(&self, planned: Vec<PlannedTimeline>, compared: Option<PlannedTimeline>) -> Result<(), CliError> {
        let titled: Vec<_> = planned.iter().map(|plan| (plan.title.clone(), &plan.timeline)).collect();
        if let Some(path) = &self.memory_viz {
            timeline::write_memory_viz(path, &titled)?;
        }
        if let Some(path) = &self.trace {
            timeline::write_trace(path, &titled)?;
        }
        if let Some(path) = &self.html {
            let all: Vec<PlannedTimeline> = planned.into_iter().chain(compared).collect();
            plimsoll_report::timeline::write(path, &all)?;
        }
        Ok(())
    }
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum PlanFormat {
    Text,
    Json,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum LargestFlag {
    Tokens,
    Layers,
    Hidden,
}

/// Parser of `--target`: a known name (a misspelt name is refused with suggestions), a GPU of this machine, or a path
/// that ends in `.toml`.
#[derive(Clone)]
struct TargetParser;

impl TypedValueParser for TargetParser {
    type Value = String;

    fn parse_ref(&self, command: &Command, arg: Option<&Arg>, value: &OsStr) -> Result<String, Error> {
        match value.to_str() {
            Some(file) if file.ends_with(".toml") => Ok(file.to_owned()),
            Some(word) if in_place(word).is_some() => Ok(word.to_owned()),
            Some(_) | None => PossibleValuesParser::new(names()).parse_ref(command, arg, value),
        }
    }

    fn possible_values(&self) -> Option<Box<dyn Iterator<Item = PossibleValue> + '_>> {
        Some(Box::new(names().map(PossibleValue::new)))
    }
}

/// Name of this machine's first GPU.
const IN_PLACE: &str = "device";

fn names() -> impl Iterator<Item = &'static str> {
    Target::names().chain([IN_PLACE])
}

/// Returns the GPU of this machine that a word names; `None` if the word names a target.
fn in_place(word: &str) -> Option<DeviceName> {
    match word {
        IN_PLACE => Some(DeviceName::AllCuda),
        _ if word.starts_with("cuda:") => DeviceName::parse(word).ok(),
        _ => None,
    }
}

fn orfs(text: &str) -> Result<f64, String> {
    let number = text.parse::<f64>().ok().filter(|n| (0.01..=6.0).contains(n));
    number.ok_or_else(|| "give a number of open reading frames per window from 0.01 to 6".to_owned())
}

impl PlanCommand {
    /// Runs the command.
    pub fn run(self) -> Result<ExitCode, CliError> {
        if self.timeline.force && !self.timeline.is_wanted() {
            return Err(usage(
                "--force replaces the files of --html, --memory-viz and --trace; omit it without them",
            ));
        }
        self.timeline.check(self.input_files())?;
        let text = match (self.train.as_ref().or(self.from_config.as_ref()), &self.model) {
            _ if self.predict => self.prediction()?,
            (Some(path), _) => self.training(path)?,
            (None, Some(model)) => self.inference(model)?,
            (None, None) => {
                return Err(usage("plimsoll plan needs --model, --predict, --train or --from-config"));
            }
        };
        let outputs: Vec<PathBuf> = self.timeline.files().cloned().collect();
        print_summary(&outputs, text.trim_end())?;
        Ok(ExitCode::SUCCESS)
    }

    /// The files that the command reads. The data of a training run, too: a plan may read them.
    fn input_files(&self) -> InputFiles {
        let mut files = InputFiles::default();
        let PredictionFlags { caller, weights, dna_model, protein_model, head, input, .. } = &self.prediction;
        let other = self.timeline.compare.as_ref();
        for path in self.train.iter().chain(head).chain(input) {
            files.add_file_or_folder(path);
        }
        files.add(Path::new(&self.target));
        for folder in weights.iter().chain(caller.iter().flatten()) {
            files.add_model(folder);
        }
        match &self.train {
            Some(config) => {
                let configs = [Some(config.as_path()), other.map(Path::new)];
                for path in configs.into_iter().flatten() {
                    files.add(path);
                    // Errors of a configuration are reported by the plan.
                    if let Ok(config) = TrainConfig::read(path, &self.set, &mut Silent) {
                        files.extend(config.input_files());
                    }
                }
            }
            None => {
                let models = self.model.iter().chain(dna_model).chain(protein_model).chain(other);
                models.for_each(|model| hub::add_model_files(model, &mut files));
            }
        }
        files
    }

    /// Room for streamed weights.
    fn room(&self) -> Result<Room, CliError> {
        let host = self.host_memory.as_deref().map(host_budget).transpose()?;
        Ok(Room {
            host: host.unwrap_or(Room::UNLIMITED.host),
            file: self.streaming.disk_of_plan()?.unwrap_or(Room::UNLIMITED.file),
        })
    }

    /// Plans a step that computes embeddings.
    fn inference(&self, model: &str) -> Result<String, CliError> {
        let target = match (self.target()?, self.threads) {
            (target, Some(threads)) => price::with_threads(target, threads as usize)?,
            (target, None) => target,
        };
        let budget = self.budget.as_deref().map(|text| price::parse_budget(text, &target)).transpose()?;
        let request = PriceRequest {
            tokens: self.tokens,
            budget,
            stream: self.streaming.stream(),
            room: self.room()?,
            precision: self.precision,
            target,
        };
        let process = price::process(&request);
        if self.trial {
            let device = device_of(&self.target)?;
            return Ok(to_json(&largest::trial(model, &request, device, &mut Silent)?).to_string());
        }
        if let Some(pass) = &self.dump_after {
            return self.dump(model, pass, request);
        }
        let grown = match self.largest {
            None => None,
            Some(LargestFlag::Tokens) => Some(largest::largest(model, &request)?),
            Some(LargestFlag::Layers | LargestFlag::Hidden) => {
                return Err(usage(
                    "--largest layers and --largest hidden need --train; with --model give --largest tokens",
                ));
            }
        };
        let request = grown.as_ref().map_or(request, |grown| grown.request.clone());
        let program = match &grown {
            Some(grown) => grown.program.clone(),
            None => price::program(model, &request)?,
        };
        let confirmed = match &grown {
            Some(grown) if self.confirm => Some(largest::confirm(grown, &self.step_trial(model, grown)?)?),
            _ => None,
        };
        if self.timeline.is_wanted() {
            let budget = price::budget(&request)?;
            let compared = match &self.timeline.compare {
                Some(other) => {
                    let timeline = price::program(other, &request)?.timeline();
                    Some(planned_step(other, timeline, budget, process.total()))
                }
                None => None,
            };
            let planned = planned_step(model, program.timeline(), budget, process.total());
            self.timeline.write(vec![planned], compared)?;
        }
        let effects = if self.explain { Some(price::explain(model, &request, &program)?) } else { None };
        match self.format() {
            PlanFormat::Text => {
                let head = grown.as_ref().map_or_else(String::new, LargestStep::to_text);
                let text = format!("{head}{}\n{}", price::to_text(model, &program)?, process.to_text());
                let text = with_effects(text, effects.as_deref());
                let confirmed = confirmed.map_or_else(String::new, |confirmed| confirmed.to_text());
                Ok(format!("{}\n{confirmed}", text.trim_end()))
            }
            PlanFormat::Json => {
                let report = ModelPlanReport {
                    plan: price::report(&program)?,
                    process: process.lines().to_vec(),
                    largest: grown.as_ref().map(LargestStep::report),
                    confirmed: confirmed.map(|confirmed| confirmed.report()),
                    explain: effects,
                };
                Ok(format!("{:#}", to_json(&report)))
            }
        }
    }

    /// Plans a whole prediction.
    fn prediction(&self) -> Result<String, CliError> {
        let PredictionFlags {
            caller,
            weights,
            dna_model,
            protein_model,
            head,
            length,
            input,
            read_length,
            orfs,
        } = &self.prediction;
        let target = self.target()?;
        let budget = match self.budget.as_deref() {
            Some(text) => Some(price::parse_budget(text, &target)?),
            None => Some(target.memory).filter(|memory| memory.0 > 0),
        };
        let named = ModelFlags {
            weights: weights.clone(),
            dna_model: dna_model.clone(),
            protein_model: protein_model.clone(),
            head: head.clone(),
        };
        // Without a head, use encoders of VirNucPro's size instead of the built-in models.
        let models = match (weights, head) {
            (None, None) => Models { dna: dna_model.clone(), protein: protein_model.clone(), head: None },
            _ => named.models(*length)?,
        };
        if let (Some(threads), true) = (self.threads, target.name != "cpu") {
            price::with_threads(target.clone(), threads as usize)?;
        }
        let name = target.name.clone();
        let is_sized = target.memory.0 > 0;
        let device = planned::device(target, USUAL_PREFETCH)?;
        if budget.is_none() && !is_sized && !matches!(device, Device::Cpu) {
            let text =
                format!("--target {name} does not specify the memory of the GPU; give --budget, such as 24GB");
            return Err(usage(text));
        }
        let threads = self.threads.map_or_else(machine::cores, |n| n as usize);
        let settings = Settings {
            device,
            threads,
            budget,
            precision: self.precision,
            tokens: self.tokens,
            ..self.streaming.applied_to(Settings::default())?
        };
        let inputs = if input.is_empty() { vec![] } else { nucleotide_files(input)?.paths() };
        let mut options = usual_options(inputs, models, *length, settings);
        if let Some(folder) = caller {
            options.method = MethodOptions::Caller(CallerOptions::usual(folder.clone()));
            options.length = length.map_or_else(|| caller_window(folder.as_deref()), |n| Ok(n as usize))?;
        }
        let explain = self.explain;
        let request = planned::PredictPlanRequest { options, read_length: *read_length, orfs: *orfs, explain };
        let planned = planned::plan(&request)?;
        if self.timeline.is_wanted() {
            let budget = Some(planned.budget().0);
            let process = planned.process().0;
            let stages = planned.stages().map(|(title, program)| PlannedTimeline {
                title: title.to_owned(),
                timeline: program.timeline(),
                budget,
                process,
                measured: None,
            });
            self.timeline.write(stages.collect(), None)?;
        }
        match self.format() {
            PlanFormat::Text => Ok(planned.to_text()?),
            PlanFormat::Json => Ok(format!("{:#}", to_json(&planned.report()?))),
        }
    }

    /// Plans a training run.
    fn training(&self, path: &Path) -> Result<String, CliError> {
        let budget = self.budget.as_ref().map(|size| format!("memory.budget=\"{}\"", size.escape_default()));
        let flags: Vec<String> = self.set.iter().cloned().chain(budget).collect();
        let config = match &self.from_config {
            // The command that started this trial has reported the translation.
            Some(path) if self.trial => self.foreign(path, &flags).read(true, &mut Silent)?,
            Some(path) => {
                let mut terminal = Terminal::new(Verbosity::Normal, false, None);
                self.foreign(path, &flags).read(true, &mut terminal)?
            }
            None => TrainConfig::read(path, &flags, &mut Silent)?,
        };
        if self.trial {
            let device = super::train::device(&config, gpu::training_options())?;
            let trial = plimsoll_train::confirm::trial(&config, device, &mut Silent)?;
            return Ok(to_json(&trial).to_string());
        }
        let target = self.training_target(&config)?;
        let Some(size) = self.largest.map(LargestFlag::size) else {
            let run = priced::planned(&config, &target, &mut Silent)?;
            let found = &run.found;
            if self.timeline.is_wanted() {
                let title = path.display().to_string();
                let planned = Self::planned_training(title, &config, &target, &run)?;
                let compared = match &self.timeline.compare {
                    Some(other) => {
                        let config = TrainConfig::read(Path::new(other), &flags, &mut Silent)?;
                        let target = self.training_target(&config)?;
                        let run = priced::planned(&config, &target, &mut Silent)?;
                        Some(Self::planned_training(other.clone(), &config, &target, &run)?)
                    }
                    None => None,
                };
                self.timeline.write(vec![planned], compared)?;
            }
            let effects = self.effects(&config, &target, found)?;
            return match self.format() {
                PlanFormat::Text => Ok(with_effects(run.to_text(&config)?, effects.as_deref())),
                PlanFormat::Json => {
                    let report = TrainPlanReport { explain: effects, ..run.report(&config)? };
                    Ok(format!("{:#}", to_json(&report)))
                }
            };
        };
        let budget = priced::budget(&config, &target)?;
        let process = RunMemory::of(&config, &target, budget, &mut Silent)?;
        let largest = plimsoll_train::largest(&config, size, &target, process, &mut Silent)?;
        let confirmed = if self.confirm { Some(self.confirmed(path, &largest)?) } else { None };
        let effects = self.effects(&largest.config, &target, &largest.found)?;
        match self.format() {
            PlanFormat::Text => {
                let text = with_effects(priced::largest_to_text(&largest)?, effects.as_deref());
                let confirmed = confirmed.map_or_else(String::new, |confirmed| confirmed.to_text(&largest));
                Ok(format!("{}\n{confirmed}", text.trim_end()))
            }
            PlanFormat::Json => {
                let report = TrainPlanReport {
                    confirmed: confirmed.map(|confirmed| confirmed.report()),
                    explain: effects,
                    ..priced::largest_report(&largest)?
                };
                Ok(format!("{:#}", to_json(&report)))
            }
        }
    }

    /// The file of --from-config.
    fn foreign<'a>(&'a self, path: &'a Path, flags: &'a [String]) -> ForeignConfig<'a> {
        ForeignConfig { path, trainer: self.from_format.as_deref(), flags }
    }

    /// The device of this machine that the target names.
    fn device_of_trial(&self) -> Result<&str, CliError> {
        match (self.target.as_str(), in_place(&self.target)) {
            ("cpu", _) => Ok("cpu"),
            (IN_PLACE, _) => Ok("cuda"),
            (gpu, Some(_)) => Ok(gpu),
            (other, None) => Err(usage(format!(
                "--confirm runs the answer on this machine, which --target {other} may not be; use --target cpu or \
                 --target device"
            ))),
        }
    }

    /// The command that runs the answer of --largest for a model on the target, which must be this machine.
    fn step_trial(&self, model: &str, grown: &LargestStep) -> Result<TrialCommand, CliError> {
        self.device_of_trial()?;
        let stream = match grown.request.stream {
            Streaming::Always => "always",
            Streaming::Auto | Streaming::Never => "never",
        };
        let precision = self.precision.map_or("auto", Precision::name);
        let budget = price::budget(&grown.request)?.0.to_string();
        let words = ["plan", "--trial", "--model", model, "--target", &self.target, "--budget", &budget]
            .into_iter()
            .chain(["--stream-weights", stream, "--precision", precision, "--tokens"])
            .map(str::to_owned)
            .chain([grown.tokens.to_string()])
            .chain(self.threads.into_iter().flat_map(|n| ["--threads".to_owned(), n.to_string()]));
        Ok(TrialCommand { program: this_program()?, arguments: words.collect(), override_flag: "--set" })
    }

    /// Runs the answer of --largest on the target, which must be this machine.
    fn confirmed(
        &self,
        path: &Path,
        largest: &plimsoll_train::LargestRun,
    ) -> Result<TrainConfirmation, CliError> {
        let device = format!("run.device={}", self.device_of_trial()?);
        let set = self.set.iter().flat_map(|setting| ["--set", setting]);
        let path =
            path.to_str().ok_or_else(|| usage("--confirm: the name of the configuration must be UTF-8"))?;
        let flag = if self.from_config.is_some() { "--from-config" } else { "--train" };
        let format = self.from_format.iter().flat_map(|name| ["--from-format", name]);
        let words =
            ["plan", flag, path, "--trial"].into_iter().chain(format).chain(set).chain(["--set", &device]);
        let arguments = words.map(str::to_owned).collect();
        let command = TrialCommand { program: this_program()?, arguments, override_flag: "--set" };
        Ok(plimsoll_train::confirm::confirm(largest, &command)?)
    }

    /// The optimisations in effect in a training plan, if they are asked for.
    fn effects(
        &self,
        config: &TrainConfig,
        target: &Target,
        found: &TrainingChoice,
    ) -> Result<Option<Vec<Effect>>, CliError> {
        if self.explain {
            Ok(Some(plimsoll_train::explain(config, target, found, &mut Silent)?))
        } else {
            Ok(None)
        }
    }

    /// The timeline of a training run with its budget.
    fn planned_training(
        title: String,
        config: &TrainConfig,
        target: &Target,
        run: &PlannedRun,
    ) -> Result<PlannedTimeline, CliError> {
        let budget = Some(priced::budget(config, target)?.0);
        let process = run.process.lines().iter().map(|line| line.bytes.0).sum();
        Ok(PlannedTimeline { title, timeline: run.found.program.timeline(), budget, process, measured: None })
    }

    /// Target of inference.
    fn target(&self) -> Result<Target, CliError> {
        match in_place(&self.target) {
            Some(gpu) => self.target_of(gpu),
            None => Ok(price::target(&self.target)?),
        }
    }

    /// Target of a training run.
    fn training_target(&self, config: &TrainConfig) -> Result<Target, CliError> {
        match in_place(&self.target) {
            Some(gpu) => Ok(priced::training_on(self.target_of(gpu)?)),
            None => Ok(priced::target(config, &self.target)?),
        }
    }

    /// Target of a GPU of this machine.
    fn target_of(&self, gpu: DeviceName) -> Result<Target, CliError> {
        let refused = |why: String| usage(format!("--target {}: {why}", self.target));
        match gpu.open_one(gpu::GpuOptions::default()).map_err(|error| refused(error.to_string()))? {
            Device::Machines(machines) => Ok(machines[0].target().map_err(RuntimeError::Device)?),
            Device::Cpu => Err(refused("this machine has no GPU that can be used".to_owned())),
        }
    }

    fn format(&self) -> PlanFormat {
        if self.json { PlanFormat::Json } else { self.format }
    }

    /// Returns the graph after a pass, for the plan that the other formats print.
    fn dump(&self, model: &str, pass: &str, mut request: PriceRequest) -> Result<String, CliError> {
        let program = price::program(model, &request)?;
        // The search also builds graphs of other sizes and with other weight placement; with the found sizes fixed, it
        // builds one graph for each number of replicas tried, the last of which fits.
        request.tokens = program.plans().first().map(|(_, plan)| plan.graph.bounds.tokens);
        request.stream = if program.is_streamed() { Streaming::Always } else { Streaming::Never };
        let mut passes = vec![];
        let mut text = None;
        price::program_with(model, &request, &mut |name, graph| {
            if !passes.contains(&name) {
                passes.push(name);
            }
            if name == pass {
                text = Some(graph.to_string());
            }
        })?;
        text.ok_or_else(|| {
            let passes = passes.join(", ");
            usage(format!(
                "--dump-after {pass}: the compiler has no such pass for this model; its passes are {passes}"
            ))
        })
    }
}

/// The timeline of a model's step with its budget and the memory of the process outside the plan.
fn planned_step(model: &str, timeline: timeline::Timeline, budget: Bytes, process: Bytes) -> PlannedTimeline {
    PlannedTimeline {
        title: model.to_owned(),
        timeline,
        budget: Some(budget.0),
        process: process.0,
        measured: None,
    }
}

/// The executable of this process.
fn this_program() -> Result<PathBuf, RuntimeError> {
    std::env::current_exe().map_err(RuntimeError::io("the program"))
}

/// The device of this machine that a target names, for a trial.
fn device_of(target: &str) -> Result<Device, CliError> {
    match in_place(target) {
        Some(gpu) => Ok(gpu.open_one(gpu::GpuOptions::default())?),
        None => Ok(Device::Cpu),
    }
}

/// Adds the table of the optimisations in effect to a plan as text.
fn with_effects(plan: String, effects: Option<&[Effect]>) -> String {
    match effects {
        Some(effects) => format!("{}\n{}", plan.trim_end(), explain::to_text(effects)),
        None => plan,
    }
}

impl LargestFlag {
    /// The quantity to grow, as the training planner's type.
    fn size(self) -> plimsoll_train::LargestDimension {
        match self {
            Self::Tokens => plimsoll_train::LargestDimension::Tokens,
            Self::Layers => plimsoll_train::LargestDimension::Layers,
            Self::Hidden => plimsoll_train::LargestDimension::Hidden,
        }
    }
}
