//! Flags of `plimsoll train`. Invariant: a flag that stands for a configuration key sets that key, so the file, --set
//! and the flag are parsed by one schema.

use super::device::DeviceName;
use super::gpu::{GpuOptions, training_options};
use super::messages::{MessageFlags, MonitorFlag};
use super::{print, print_summary};
use crate::error::{CliError, usage};
use crate::terminal::Terminal;
use clap::Args;
use clap::builder::PossibleValuesParser;
use plimsoll_report::timeline::{self, PlannedTimeline};
use plimsoll_runtime::report::to_json;
use plimsoll_runtime::{Device, EscapedPath, InputFiles, Level, Observer, OutputGuard, RuntimeError};
use plimsoll_train::config::schema::schema;
use plimsoll_train::config::{DeviceChoice, TrainConfig, TrainerFormat, translate};
use plimsoll_train::{self, Resume, TrainReport, TrainRequest};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Train a model inside a memory budget: a language model, an encoder, adapters, or a head over embeddings
///
/// The memory is planned before anything is allocated; a run that does not fit is refused with exit code 4, the memory
/// it needs, and settings that make it fit. An interrupted run resumes from its newest checkpoint. The configuration
/// keys are described by --schema and in docs/configuration.md.
///
/// Exit codes: 0 trained; 1 failure, bad usage, configuration or data; 3 the run's folder contains checkpoints of
/// another configuration, checkpoints newer than the checkpoint to resume from, or only unreadable checkpoints; 4 does
/// not fit in memory; 129, 130, 138, 140 and 143 interrupted (SIGHUP, Ctrl-C, SIGUSR1, SIGUSR2, SIGTERM): the current step is
/// saved in a checkpoint, from which the same command resumes.
#[derive(Debug, Args)]
pub struct TrainCommand {
    /// Configuration file, YAML; the config.yaml in the folder of a run resumes that run
    #[arg(value_name = "CONFIG.yaml", required_unless_present_any = ["schema", "from_config"])]
    config: Option<PathBuf>,

    /// Override the value of a key, such as optimizer.lr=1e-4; can be given several times, and the last value of a key
    /// is used
    #[arg(long, value_name = "KEY=VALUE")]
    set: Vec<String>,

    /// Memory budget of the run, such as 22GiB or 80% of the free memory; sets the key memory.budget
    #[arg(long, alias = "memory-budget", value_name = "SIZE")]
    budget: Option<String>,

    /// Fail with an error if the data have an oddity: characters that are dropped from sequences, letters that the tokenizer does not
    /// know, a file without a record; sets the key data.strict
    #[arg(long)]
    strict: bool,

    /// Output folder of the run; sets the key run.output [default: the name of the configuration file with _run
    /// appended]
    #[arg(short, long, value_name = "FOLDER")]
    output: Option<PathBuf>,

    /// Checkpoint to start from: auto is the newest checkpoint in the output folder if there is one, never starts a new
    /// run in a folder without checkpoints (or with --force deletes those of the earlier run), and a path selects a checkpoint
    #[arg(long, value_name = "auto|never|CHECKPOINT", default_value = "auto")]
    resume: String,

    /// After the run, measure one micro-step more and write an HTML page of it, as plan --html writes it, with the measured
    /// time of every instruction beside the expected time, and the measured memory over the planned; replaces an existing
    /// file
    #[arg(long, value_name = "FILE.html", conflicts_with_all = ["print_config", "schema"])]
    timeline: Option<PathBuf>,

    /// With --resume never, delete the checkpoints and metrics of the run in the output folder, and start over; with
    /// --timeline, replace its file if it exists and this run did not write it
    #[arg(long)]
    force: bool,

    /// Print the configuration with the values of all keys, and do not train
    #[arg(long, conflicts_with_all = ["resume", "json"])]
    print_config: bool,

    /// Train with the configuration of another trainer: Ava YAML, DeepSpeed JSON, Hugging Face TrainingArguments JSON,
    /// or torchtitan TOML. The translation of each key and the unsupported keys are reported on standard error; with
    /// --print-config the translation is printed
    #[arg(long, value_name = "FILE", conflicts_with_all = ["config", "schema"])]
    from_config: Option<PathBuf>,

    /// Trainer that the file of --from-config is for; needed only if the keys in the file do not show it
    #[arg(long, value_name = "TRAINER", requires = "from_config", value_parser = source_parser())]
    from_format: Option<String>,

    /// Print the JSON schema of the configuration, for editors, and do not train
    #[arg(long, conflicts_with_all = ["config", "set", "budget", "output", "resume", "force", "print_config", "json"])]
    schema: bool,

    #[command(flatten)]
    messages: MessageFlags,

    #[command(flatten)]
    monitor: MonitorFlag,
}

impl TrainCommand {
    /// Runs the command.
    pub fn run(self) -> Result<ExitCode, CliError> {
        let Some(path) = self.config.as_ref().or(self.from_config.as_ref()).filter(|_| !self.schema) else {
            print(&format!("{:#}", schema()))?;
            return Ok(ExitCode::SUCCESS);
        };
        if self.force && self.resume != "never" && self.timeline.is_none() {
            return Err(usage(
                "--force deletes an earlier run with --resume never, and replaces the page of --timeline; omit it without them",
            ));
        }
        let mut terminal = self.messages.terminal_without_log().with_monitor_if(&self.monitor);
        terminal.listen()?;
        let config = match &self.from_config {
            Some(path) => {
                let flags = self.flags();
                let request = ForeignConfig { path, trainer: self.from_format.as_deref(), flags: &flags };
                request.read(!self.print_config, &mut terminal)?
            }
            None => self.configuration(path, &mut terminal)?,
        };
        if self.print_config {
            let mut inputs = InputFiles::default();
            inputs.add(path);
            terminal.open_log(&mut OutputGuard::new(inputs, false))?;
            terminal.finish();
            return self.print(config);
        }
        // A folder that is stated on the command line is not that of the configuration file.
        let stated = self.set.iter().rev().find_map(|set| set.strip_prefix("run.output="));
        let named = stated.and(config.run.output.as_ref()).map(PathBuf::from);
        let output = self.output.clone().or(named).unwrap_or_else(|| config.folder(path));
        // The run creates its own folder.
        let page = self.timeline.as_deref().filter(|page| output.is_dir() || !page.starts_with(&output));
        self.check_outputs(&config, path, &output, &mut terminal)?;
        page.map_or(Ok(()), timeline::check)?;
        let device = device(&config, training_options())?;
        let request = TrainRequest { output, resume: self.resume(), config };
        let train = match self.timeline {
            Some(_) => plimsoll_train::train_with_timeline,
            None => plimsoll_train::train_with,
        };
        let done = train(
            &request,
            &mut |config, observer| plimsoll_train::open(config, device.clone(), observer),
            &mut terminal,
        );
        terminal.finish();
        let mut report = done.map_err(CliError::from).inspect_err(|error| terminal.log(&error.chain()))?;
        // Printed before the page is written, so that a full disk does not cost the report.
        let outputs = self.timeline.as_slice();
        match (self.messages.json(), self.messages.quiet()) {
            (true, _) => print_summary(outputs, &format!("{:#}", to_json(&report.run_record)))?,
            (false, true) => {}
            (false, false) => print_summary(outputs, &summary(&report))?,
        }
        if let (Some(page), Some(found)) = (&self.timeline, report.timeline.take()) {
            // The process is a part of the measured memory, so it is not subtracted from the budget.
            let planned =
                PlannedTimeline::measured(path.display().to_string(), found, Some(report.budget.0), 0);
            timeline::write(page, &[planned])?;
            // The same command replaces the page.
            plimsoll_train::add_written(&report.output, page)?;
        }
        Ok(ExitCode::SUCCESS)
    }

    /// Checks that the folder, the timeline and the log overwrite neither an input nor a file of somebody else, and opens
    /// the log.
    fn check_outputs(
        &self,
        config: &TrainConfig,
        path: &Path,
        output: &Path,
        terminal: &mut Terminal,
    ) -> Result<(), CliError> {
        let mut inputs = config.input_files();
        plimsoll_train::check_folder(output, &inputs)?;
        inputs.add(path);
        if let Resume::From(checkpoint) = self.resume() {
            inputs.add_model(&checkpoint);
        }
        let mut guard = OutputGuard::new(inputs, self.force);
        if let Some(page) = &self.timeline {
            let checked =
                if plimsoll_train::has_written(output, page) { guard.own_file(page) } else { guard.file(page) };
            checked.map_err(RuntimeError::from)?;
        }
        terminal.open_log(&mut guard)
    }

    fn resume(&self) -> Resume {
        match self.resume.as_str() {
            "auto" => Resume::Auto,
            "never" if self.force => Resume::StartOver,
            "never" => Resume::Never,
            path => Resume::From(PathBuf::from(path)),
        }
    }

    /// Reads the configuration file and applies the flags.
    fn configuration(&self, path: &Path, observer: &mut dyn Observer) -> Result<TrainConfig, CliError> {
        Ok(TrainConfig::read(path, &self.flags(), observer)?)
    }

    /// Key assignments that correspond to the flags.
    fn flags(&self) -> Vec<String> {
        let budget = self.budget.as_ref().map(|size| format!("memory.budget=\"{}\"", size.escape_default()));
        let strict = self.strict.then(|| "data.strict=true".to_owned());
        self.set.iter().cloned().chain(budget).chain(strict).collect()
    }

    /// Prints a configuration, with the folder of --output. A run does not record its own folder as that key, so that
    /// the checkpoints of equal runs in two folders are equal.
    fn print(&self, mut config: TrainConfig) -> Result<ExitCode, CliError> {
        if let Some(path) = &self.output {
            let Some(text) = path.to_str() else {
                let path = EscapedPath(path);
                return Err(usage(format!("--output {path}: a configuration can only hold a name in UTF-8")));
            };
            config.run.output = Some(text.to_owned());
        }
        print(config.to_yaml()?.trim_end())?;
        Ok(ExitCode::SUCCESS)
    }
}

/// A configuration file of another trainer.
pub struct ForeignConfig<'a> {
    /// The file.
    pub path: &'a Path,
    /// The trainer, if its name was given.
    pub trainer: Option<&'a str>,
    /// Key assignments that override the translated values.
    pub flags: &'a [String],
}

impl ForeignConfig<'_> {
    /// Translates the file, and reports what each key became. If the configuration `is_used`, it must have no placeholders.
    pub fn read(&self, is_used: bool, observer: &mut dyn Observer) -> Result<TrainConfig, CliError> {
        let source = TrainerFormat::ALL.into_iter().find(|source| Some(source.word()) == self.trainer);
        let translated = translate(self.path, source, self.flags)?;
        let path = EscapedPath(self.path);
        observer.say(Level::Info, &format!("{path}: a configuration of {}", translated.source.word()));
        translated.became.iter().for_each(|line| observer.say(Level::Info, line));
        translated.missing.iter().for_each(|line| observer.say(Level::Warning, line));
        if is_used { Ok(translated.complete(self.path)?) } else { Ok(translated.config) }
    }
}

/// Opens the device of `run.device`.
pub fn device(config: &TrainConfig, options: GpuOptions) -> Result<Device, CliError> {
    let name = match DeviceChoice::parse(&config.run.device) {
        Some(DeviceChoice::Cpu) => DeviceName::Cpu,
        Some(DeviceChoice::Cuda(ordinal)) => DeviceName::Cuda(vec![ordinal]),
        // Other words were refused when the configuration was read.
        Some(DeviceChoice::Auto) | None => DeviceName::Auto,
    };
    name.open_one(options)
}

/// Parser of the names of trainers with supported configuration files.
pub fn source_parser() -> PossibleValuesParser {
    PossibleValuesParser::new(TrainerFormat::ALL.map(TrainerFormat::word))
}

fn summary(report: &TrainReport) -> String {
    let state = &report.state;
    let loss = report.loss.map_or_else(String::new, |loss| format!(", loss {loss:.4}"));
    let best = state
        .best
        .map_or_else(String::new, |b| format!("; lowest validation loss {:.4} at step {}", b.loss, b.step));
    let skipped = match state.skipped {
        0 => String::new(),
        1 => "; 1 step skipped".to_owned(),
        n => format!("; {n} steps skipped"),
    };
    let checkpoint = match &report.checkpoint {
        Some(path) => format!("checkpoint {}", EscapedPath(path)),
        None => "no checkpoint (run.save_every never)".to_owned(),
    };
    format!(
        "step {} ({} tokens{loss}{best}{skipped}), ended by {}; {} steps here in {:.1} s, {:.0} tokens/s\n{checkpoint}",
        state.step,
        state.tokens,
        report.ended.key(),
        report.steps,
        report.seconds,
        report.tokens_per_second,
    )
}
