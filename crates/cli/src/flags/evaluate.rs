//! Flags of `plimsoll evaluate`. Invariant: a flag that stands for a configuration key sets that key, and an existing
//! file is replaced only with `--force`.

use super::at_least_one;
use super::gpu::training_options;
use super::messages::MessageFlags;
use super::precision::trained;
use super::print_summary;
use super::train::device;
use crate::error::{CliError, usage};
use clap::Args;
use plimsoll_runtime::report::to_json;
use plimsoll_runtime::{EscapedPath, OutputGuard, Precision, RuntimeError};
use plimsoll_train::classification::{CalibrationBin, ClassMetrics, ClassifierMetrics};
use plimsoll_train::{EvaluationReport, EvaluationRequest, evaluate};
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Evaluate a checkpoint: perplexity of a language model, or accuracy, AUROC, F1 and calibration of a classifier
///
/// Data settings are those of the run that wrote the checkpoint, from the config.yaml in its folder; DATA and flags
/// override them. Without DATA, the run's validation data are evaluated, and all data of a run without validation data.
///
/// A model that no run wrote, a folder or a name on the hub, is evaluated on DATA with the default settings of `plimsoll
/// train`: the loss of the next token for a language model, of masked tokens for an encoder.
///
/// With DATA, all of it is evaluated. The exception are the windows of a caller: those of the records whose split is
/// `validation` in the table of records (data.labels).
///
/// Exit codes: 0 evaluated; 1 failure, bad usage, configuration or data; 4 does not fit in memory; 130 and 143
/// interrupted.
#[derive(Debug, Args)]
pub struct EvaluateCommand {
    /// Checkpoint of a run, such as RUN/best or RUN/checkpoints/step-00000100, or its folder `ema` of averaged weights; or
    /// a model: its folder or its name on the hub
    #[arg(value_name = "CHECKPOINT")]
    checkpoint: PathBuf,

    /// Data files in the format of the run's training data; the data of a head are given with --set
    #[arg(value_name = "DATA")]
    data: Vec<PathBuf>,

    /// Override the value of a configuration key, such as data.labels=classes.tsv; can be given several times
    #[arg(long, value_name = "KEY=VALUE")]
    set: Vec<String>,

    /// Write the results to this file as JSON
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,

    /// Replace an existing file
    #[arg(long)]
    force: bool,

    /// Fail with an error if the data have an oddity: characters that are dropped from sequences, letters that the tokenizer does not
    /// know, a file without a record; sets the key data.strict
    #[arg(long)]
    strict: bool,

    /// Device: auto is the first GPU that can be used, or else the CPU; cpu; cuda, the first GPU; or cuda:N; sets the
    /// key run.device
    #[arg(long, value_name = "DEVICE", default_value = "auto", help_heading = "Machine")]
    device: String,

    /// Number format of weights and activations; sets the key precision.kind [default: that of the run]
    #[arg(long, value_parser = trained(), help_heading = "Machine")]
    precision: Option<Precision>,

    /// Memory budget, such as 2GiB or 80% of the free memory; sets the key memory.budget [default: that of the run]
    #[arg(long, alias = "budget", value_name = "SIZE", help_heading = "Machine")]
    memory_budget: Option<String>,

    /// Compute threads of the CPU, 1 to 1024; sets the key run.threads [default: all cores available to this process]
    #[arg(long, value_name = "N", value_parser = at_least_one, help_heading = "Machine")]
    threads: Option<u64>,

    #[command(flatten)]
    messages: MessageFlags,
}

impl EvaluateCommand {
    /// Runs the command.
    pub fn run(self) -> Result<ExitCode, CliError> {
        let mut terminal = self.messages.terminal_without_log();
        terminal.listen()?;
        let request = EvaluationRequest {
            checkpoint: self.checkpoint.clone(),
            data: self.data.iter().map(|path| utf8(path)).collect::<Result<_, _>>()?,
            flags: self.flags(),
        };
        let done = request.configuration(&mut terminal).map_err(CliError::from).and_then(|config| {
            let mut guard = OutputGuard::new(request.input_files(&config), self.force);
            self.output.iter().try_for_each(|path| guard.file(path)).map_err(RuntimeError::from)?;
            terminal.open_log(&mut guard)?;
            let device = device(&config, training_options())?;
            Ok(evaluate(&request, &config, device, &mut terminal)?)
        });
        terminal.finish();
        let report = done.inspect_err(|error| terminal.log(&error.chain()))?;
        let json = format!("{:#}", to_json(&report));
        if let Some(path) = &self.output {
            report.write(path)?;
        }
        let outputs = self.output.as_slice();
        match (self.messages.json(), self.messages.quiet()) {
            (true, _) => print_summary(outputs, &json)?,
            (false, true) => {}
            (false, false) => print_summary(outputs, summary(&report).trim_end())?,
        }
        Ok(ExitCode::SUCCESS)
    }

    /// Key assignments that correspond to the flags.
    fn flags(&self) -> Vec<String> {
        let mut flags = self.set.clone();
        flags.push(format!("run.device=\"{}\"", self.device.escape_default()));
        flags.push(self.threads.map_or("run.threads=auto".to_owned(), |n| format!("run.threads={n}")));
        flags.extend(self.precision.map(|kind| format!("precision.kind={}", kind.name())));
        flags.extend(self.strict.then(|| "data.strict=true".to_owned()));
        flags.extend(
            self.memory_budget.as_ref().map(|size| format!("memory.budget=\"{}\"", size.escape_default())),
        );
        flags
    }
}

fn utf8(path: &Path) -> Result<String, CliError> {
    path.to_str()
        .map(str::to_owned)
        .ok_or_else(|| usage(format!("{}: a configuration can only hold a name in UTF-8", EscapedPath(path))))
}

/// The results as text.
fn summary(report: &EvaluationReport) -> String {
    let EvaluationReport { kind, targets, loss, perplexity, tasks, device, budget, peak, .. } = report;
    let mut text = format!("{kind}, {targets} targets on {device}; plan {peak} of the budget of {budget}\n");
    if let Some(perplexity) = perplexity {
        let _ = writeln!(text, "loss        {loss:.6} nats per target\nperplexity  {perplexity:.4}");
    }
    for task in tasks {
        add_task(&mut text, task);
    }
    text
}

fn add_task(text: &mut String, task: &ClassifierMetrics) {
    let ClassifierMetrics { task: name, examples, loss, accuracy, auroc, f1, macro_f1, classes, .. } = task;
    let binary = classes.len() == 2;
    let positive = classes.get(1).map_or("", |class| class.name.as_str());
    let scope = if binary { positive } else { "mean of classes" };
    let mut rows = vec![
        ("loss".to_owned(), format!("{loss:.6} nats")),
        ("accuracy".to_owned(), format!("{accuracy:.4}")),
        (format!("AUROC ({scope})"), share(*auroc)),
        (format!("F1 ({scope})"), share(*f1)),
    ];
    if binary {
        rows.push(("F1 (mean of classes)".to_owned(), share(*macro_f1)));
    }
    rows.push(("expected calibration error".to_owned(), format!("{:.4}", task.expected_calibration_error)));
    // Writing to a String cannot fail.
    let _ = writeln!(text, "\ntask {name}: {examples} examples");
    for (label, value) in rows {
        let _ = writeln!(text, "{label:<28}{value}");
    }
    let width = classes.iter().map(|class| class.name.chars().count()).max().unwrap_or(0).max(5);
    let _ = writeln!(text, "\n{:<width$}  examples  precision  recall  F1      AUROC", "class");
    for ClassMetrics { name, examples, precision, recall, f1, auroc } in classes {
        let [p, r, f, a] = [precision, recall, f1, auroc].map(|x| share(*x));
        let _ = writeln!(text, "{name:<width$}  {examples:>8}  {p:<9}  {r:<6}  {f:<6}  {a}");
    }
    text.push_str("\nprobability   examples  mean    right\n");
    for CalibrationBin { from, to, examples, confidence, accuracy } in &task.calibration {
        if *examples > 0 {
            let p = share(*confidence);
            let right = share(*accuracy);
            let _ = writeln!(text, "{from:.3}-{to:.3}   {examples:>8}  {p}  {right}");
        }
    }
}

/// A number with four digits, or a dash where it is not defined.
fn share(x: Option<f64>) -> String {
    x.map_or_else(|| "-".to_owned(), |x| format!("{x:.4}"))
}
