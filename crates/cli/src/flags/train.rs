//! `plimsoll train`: the flags. Invariant: a flag that stands for a key of the configuration is that key, so the file,
//! --set and the flag are read by one schema.

use super::print;
use super::voice::Voice;
use crate::error::CliError;
use clap::Args;
use clap::builder::PossibleValuesParser;
use runtime::{Level, Observer, Place};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use train::config::schema::schema;
use train::config::{Source, TrainConfig, translate};
use train::{self, Report, Request, Resume};

/// Train a model inside a memory budget: a language model, an encoder, adapters, or a head over embeddings
///
/// The plan is made before anything is allocated: a run that does not fit is refused with its bill (exit 4). A run
/// that was broken goes on from its newest checkpoint. The keys of the configuration are described by --schema and in
/// docs/training-keys.md.
///
/// Exit codes: 0 trained; 1 failure, bad usage, configuration or data; 3 the run's folder holds checkpoints of another
/// configuration, newer ones than the one to go on from, or none that can be read; 4 it does not fit in memory; 130 and 143
/// interrupted (Ctrl-C, SIGTERM): the step reached is kept in a checkpoint, and the same command goes on from there.
#[derive(Debug, Args)]
pub struct Train {
    /// The configuration, a YAML file
    #[arg(value_name = "CONFIG.yaml", required_unless_present_any = ["schema", "from_config"])]
    config: Option<PathBuf>,

    /// Another value of a key, such as optimizer.lr=1e-4; can be given many times, and the last one wins
    #[arg(long, value_name = "KEY=VALUE")]
    set: Vec<String>,

    /// The most memory the run may take, like 22GiB or 80% of what is free: the key memory.budget
    #[arg(long, alias = "memory-budget", value_name = "SIZE")]
    budget: Option<String>,

    /// The run's folder: the key run.output; without either the configuration's name with _run
    #[arg(short, long, value_name = "FOLDER")]
    output: Option<PathBuf>,

    /// Where to begin: auto is the newest checkpoint of the folder or the start, never is the start, or a checkpoint
    #[arg(long, value_name = "auto|never|CHECKPOINT", default_value = "auto")]
    resume: String,

    /// Print the configuration with every key, as it would be run
    #[arg(long)]
    print_config: bool,

    /// Translate the configuration of another trainer: Ava YAML, DeepSpeed JSON, Hugging Face TrainingArguments JSON, torchtitan TOML. What each key became, and which cannot be honoured, is said on stderr
    #[arg(long, value_name = "FILE", requires = "print_config", conflicts_with_all = ["config", "schema"])]
    from_config: Option<PathBuf>,

    /// The trainer of --from-config, where its keys do not tell
    #[arg(long, value_name = "TRAINER", requires = "from_config", value_parser = source_parser())]
    from_format: Option<String>,

    /// Print the JSON schema of configurations, for editors
    #[arg(long)]
    schema: bool,

    #[command(flatten)]
    voice: Voice,
}

impl Train {
    /// Runs the command.
    pub fn run(self) -> Result<ExitCode, CliError> {
        if let Some(path) = &self.from_config {
            return self.translate(path);
        }
        let Some(path) = self.config.as_ref().filter(|_| !self.schema) else {
            print(&format!("{:#}", schema()))?;
            return Ok(ExitCode::SUCCESS);
        };
        let mut terminal = self.voice.terminal()?;
        terminal.listen()?;
        let config = self.configuration(path, &mut terminal)?;
        if self.print_config {
            terminal.finish();
            print(config.to_yaml()?.trim_end())?;
            return Ok(ExitCode::SUCCESS);
        }
        let output = self.output.clone().unwrap_or_else(|| config.folder(path));
        let request = Request { output, resume: self.resume(), config };
        let done =
            train::train_with(&request, &mut |config, observer| train::open(config, observer), &mut terminal);
        terminal.finish();
        let report = done.map_err(CliError::from).inspect_err(|error| terminal.log(&error.chain()))?;
        match (self.voice.json(), self.voice.quiet()) {
            (true, _) => print(&format!("{:#}", report.run_record))?,
            (false, true) => {}
            (false, false) => print(&summary(&report))?,
        }
        Ok(ExitCode::SUCCESS)
    }

    fn resume(&self) -> Resume {
        match self.resume.as_str() {
            "auto" => Resume::Auto,
            "never" => Resume::Never,
            path => Resume::From(PathBuf::from(path)),
        }
    }

    /// The file, with the flags over it.
    fn configuration(&self, path: &Path, observer: &mut dyn Observer) -> Result<TrainConfig, CliError> {
        Ok(TrainConfig::read(path, &self.flags(), observer)?)
    }

    /// The keys that flags state.
    fn flags(&self) -> Vec<String> {
        let budget = self.budget.as_ref().map(|size| format!("memory.budget=\"{}\"", size.escape_default()));
        self.set.iter().cloned().chain(budget).collect()
    }

    /// Prints the configuration of another trainer as one of ours.
    fn translate(&self, path: &Path) -> Result<ExitCode, CliError> {
        let source = Source::ALL.into_iter().find(|source| Some(source.word()) == self.from_format.as_deref());
        let translated = translate(path, source, &self.flags())?;
        let mut terminal = self.voice.terminal()?;
        terminal.say(Level::Info, &format!("{}: a file of {}", Place(path), translated.source.word()));
        translated.became.iter().for_each(|line| terminal.say(Level::Info, line));
        translated.missing.iter().for_each(|line| terminal.say(Level::Warning, line));
        terminal.finish();
        print(translated.config.to_yaml()?.trim_end())?;
        Ok(ExitCode::SUCCESS)
    }
}

/// The trainers whose files are translated.
fn source_parser() -> PossibleValuesParser {
    PossibleValuesParser::new(Source::ALL.map(Source::word))
}

fn summary(report: &Report) -> String {
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
    format!(
        "step {} ({} tokens{loss}{best}{skipped}), ended by {}; {} steps here in {:.1} s, {:.0} tokens/s\ncheckpoint {}",
        state.step,
        state.tokens,
        report.ended.key(),
        report.steps,
        report.seconds,
        report.tokens_per_second,
        Place(&report.checkpoint),
    )
}
