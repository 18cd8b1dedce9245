//! `plimsoll classify`: the flags.

use super::embed::{letters, prefetch};
use super::machine::{Machine, Sorting, Streaming};
use super::print;
use super::voice::Voice;
use crate::error::CliError;
use crate::report;
use clap::Args;
use embed::classify::{Options, classify};
use runtime::Settings;
use std::path::PathBuf;
use std::process::ExitCode;

/// Classify each sequence with a classifier that was trained by `plimsoll train`
///
/// Writes a table with a line for each sequence, in the order of the input: its id, the likeliest class, and the score
/// of every class; scores are between 0 and 1 and sum to 1.
#[derive(Debug, Args)]
pub struct Classify {
    /// Sequence files, FASTA or FASTQ, plain or as .gz, .bz2, .zst or .xz; - is standard input
    #[arg(required = true, value_name = "INPUT")]
    inputs: Vec<PathBuf>,

    /// The classifier: a checkpoint of a run with model.classes, or what `plimsoll merge` made of one
    #[arg(long, value_name = "PATH")]
    model: String,

    /// The table
    #[arg(short, long, value_name = "OUT.tsv")]
    output: PathBuf,

    /// Replace a table that is there
    #[arg(long)]
    force: bool,

    /// Letters of the longest sequence [default: 1022 residues for ESM-2, no limit for DNABERT-S]
    #[arg(long, value_name = "N", value_parser = letters)]
    max_length: Option<u64>,

    /// Cut longer sequences there; without this, a longer one is an error
    #[arg(long)]
    truncate: bool,

    #[command(flatten)]
    machine: Machine,

    #[command(flatten)]
    streaming: Streaming,

    /// Batches of input that are prepared ahead
    #[arg(long, default_value_t = 2, value_name = "N", value_parser = prefetch, help_heading = "Machine")]
    prefetch: u64,

    #[command(flatten)]
    sorting: Sorting,

    #[command(flatten)]
    voice: Voice,
}

impl Classify {
    /// Runs the command.
    pub fn run(self) -> Result<ExitCode, CliError> {
        let mut terminal = self.voice.terminal()?;
        terminal.listen()?;
        let options = self.options()?;
        let done = classify(&options, &mut terminal);
        terminal.finish();
        let report = done.map_err(CliError::from).inspect_err(|error| terminal.log(&error.chain()))?;
        if self.voice.json() {
            print(&format!("{:#}", report.to_json()))?;
        } else if !self.voice.quiet() {
            print(&report::embedded(&report, "classes"))?;
        }
        Ok(ExitCode::SUCCESS)
    }

    fn options(&self) -> Result<Options, CliError> {
        Ok(Options {
            model: self.model.clone(),
            inputs: virus::files(&self.inputs)?,
            output: self.output.clone(),
            force: self.force,
            sort_by_length: self.sorting.by_length(),
            max_length: self.max_length.map(|n| n as usize),
            truncate: self.truncate,
            prefetch: self.prefetch as usize,
            settings: Settings { stream: self.streaming.stream(), ..self.machine.settings(self.prefetch)? },
        })
    }
}
