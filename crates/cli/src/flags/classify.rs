//! `plimsoll classify`: the flags.

use super::embed::{ResumeFlags, letters, prefetch};
use super::machine::{DynamicFlag, Machine, Sorting, StreamingFlags};
use super::print_beside;
use super::voice::Voice;
use crate::error::CliError;
use crate::report;
use clap::Args;
use plimsoll_embed::classify::{ClassifyOptions, classify};
use plimsoll_runtime::report::to_json;
use plimsoll_runtime::{OutputGuard, RuntimeError, Settings};
use std::path::PathBuf;
use std::process::ExitCode;

/// Classify each sequence with a classifier trained by `plimsoll train`
///
/// Writes a table with one line for each sequence, in the order of the input: its id, the most probable class, and the
/// probability of every class.
#[derive(Debug, Args)]
pub struct Classify {
    /// Sequence files: FASTA or FASTQ, plain or compressed (.gz, .bz2, .zst, .xz); a folder selects all sequence files
    /// in it, and - reads standard input
    #[arg(required = true, value_name = "INPUT")]
    inputs: Vec<PathBuf>,

    /// Classifier: a checkpoint of a run with model.classes, or the folder that `plimsoll merge` wrote from such a
    /// checkpoint
    #[arg(long, value_name = "PATH")]
    model: String,

    /// Output table, tab-separated
    #[arg(short, long, value_name = "OUT.tsv")]
    output: PathBuf,

    /// Replace an existing output table
    #[arg(long)]
    force: bool,

    /// Fail with an error if the input has an anomaly: an empty record or file, a repeated id, characters that are dropped
    /// (white space, digits, gaps), U in DNA, or tokens that are unknown to the model
    #[arg(long)]
    strict: bool,

    /// Maximum length of a sequence in letters (residues or bases) [default: 1022 for ESM-2, no limit for DNABERT-S]
    #[arg(long, value_name = "N", value_parser = letters)]
    max_length: Option<u64>,

    /// Truncate longer sequences to the maximum length; without this flag a longer sequence is an error
    #[arg(long)]
    truncate: bool,

    /// Give sequences whose letters are those of DNA to a protein model, which is refused without this flag
    #[arg(long)]
    allow_dna: bool,

    #[command(flatten)]
    machine: Machine,

    #[command(flatten)]
    streaming: StreamingFlags,

    #[command(flatten)]
    dynamic: DynamicFlag,

    /// Batches of input that each tokenizer thread prepares ahead, 1 to 1024; on a GPU also the number of steps
    /// that are queued on it
    #[arg(long, default_value_t = 2, value_name = "N", value_parser = prefetch, help_heading = "Machine")]
    prefetch: u64,

    #[command(flatten)]
    sorting: Sorting,

    #[command(flatten)]
    resume: ResumeFlags,

    #[command(flatten)]
    voice: Voice,
}

impl Classify {
    /// Runs the command.
    pub fn run(self) -> Result<ExitCode, CliError> {
        let options = self.options()?;
        let mut guard = OutputGuard::new(options.input_files(), false);
        guard.own_file(&self.output).map_err(RuntimeError::from)?;
        let mut terminal = self.voice.terminal(&mut guard)?;
        terminal.listen()?;
        let done = classify(&options, &mut terminal);
        terminal.finish();
        let report = done.map_err(CliError::from).inspect_err(|error| terminal.log(&error.chain()))?;
        if self.voice.json() {
            print_beside(&report.files, &format!("{:#}", to_json(&report)))?;
        } else if !self.voice.quiet() {
            print_beside(&report.files, &report::embedded(&report, "classes"))?;
        }
        Ok(ExitCode::SUCCESS)
    }

    fn options(&self) -> Result<ClassifyOptions, CliError> {
        Ok(ClassifyOptions {
            model: self.model.clone(),
            inputs: self.inputs.clone(),
            output: self.output.clone(),
            force: self.force,
            strict: self.strict,
            sort_by_length: self.sorting.by_length(),
            max_length: self.max_length.map(|n| n as usize),
            truncate: self.truncate,
            allow_dna: self.allow_dna,
            prefetch: self.prefetch as usize,
            journal: self.resume.journal(),
            commit_every: self.resume.commit_every(),
            settings: Settings {
                dynamic: self.dynamic.dynamic,
                ..self.streaming.applied_to(self.machine.settings(self.prefetch)?)?
            },
        })
    }
}
