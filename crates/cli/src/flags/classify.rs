//! `plimsoll classify`: the flags.

use super::print_summary;
use super::sequences::{SequenceFlags, StrictFlag, letters};
use crate::error::CliError;
use crate::report;
use clap::Args;
use plimsoll_embed::classify::{ClassifyOptions, classify};
use plimsoll_runtime::report::to_json;
use plimsoll_runtime::{OutputGuard, RuntimeError};
use std::path::PathBuf;
use std::process::ExitCode;

/// Classify each sequence with a classifier trained by `plimsoll train`
///
/// Writes a table with one line for each sequence, in the order of the input: its id, the most probable class, and the
/// probability of every class.
#[derive(Debug, Args)]
pub struct ClassifyCommand {
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

    #[command(flatten)]
    strict: StrictFlag,

    /// Maximum length of a sequence in letters (residues or bases) [default: 1022 for ESM-2, no limit for DNABERT-S]
    #[arg(long, value_name = "N", value_parser = letters)]
    max_length: Option<u64>,

    #[command(flatten)]
    sequences: SequenceFlags,
}

impl ClassifyCommand {
    /// Runs the command.
    pub fn run(self) -> Result<ExitCode, CliError> {
        let options = self.options()?;
        let messages = &self.sequences.messages;
        let mut guard = OutputGuard::new(options.input_files(), false);
        guard.own_file(&self.output).map_err(RuntimeError::from)?;
        let mut terminal = messages.terminal(&mut guard)?;
        terminal.listen()?;
        let done = classify(&options, &mut terminal);
        terminal.finish();
        let report = done.map_err(CliError::from).inspect_err(|error| terminal.log(&error.chain()))?;
        if messages.json() {
            print_summary(&report.files, &format!("{:#}", to_json(&report)))?;
        } else if !messages.quiet() {
            print_summary(&report.files, &report::embedded(&report, "classes"))?;
        }
        Ok(ExitCode::SUCCESS)
    }

    fn options(&self) -> Result<ClassifyOptions, CliError> {
        Ok(ClassifyOptions {
            model: self.model.clone(),
            inputs: self.inputs.clone(),
            output: self.output.clone(),
            force: self.force,
            strict: self.strict.strict,
            sort_by_length: self.sequences.sort_by_length(),
            max_length: self.max_length.map(|n| n as usize),
            truncate: self.sequences.truncate,
            allow_dna: self.sequences.allow_dna,
            prefetch: self.sequences.prefetch as usize,
            journal: self.sequences.journal(),
            commit_every: self.sequences.commit_every(),
            settings: self.sequences.settings()?,
        })
    }
}
