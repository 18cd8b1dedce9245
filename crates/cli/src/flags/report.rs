//! Flags of `plimsoll report`. Invariant: an existing file is replaced only with `--force`.

use super::print_summary;
use crate::error::CliError;
use clap::Args;
use plimsoll_report::{ReportOptions, report};
use std::path::PathBuf;
use std::process::ExitCode;

/// Write the results of a prediction, or training runs, as one HTML page
///
/// Recomputes nothing. Of a prediction, reads the output folder of plimsoll predict; the page has calls, scores, regions, and a
/// table to sort and search: it counts all records; its table lists up to 25 000 of them, and says which. Of training, reads
/// the output folders of one or several runs of plimsoll train, finished or not; the page has their numbers over the steps, all
/// runs in the same charts, the load of the experts, events, and the differences of their configurations. The page is one file
/// of at most 5 MB without references to other files or to the network. Its path is printed to standard output.
#[derive(Debug, Args)]
#[command(verbatim_doc_comment)]
pub struct ReportCommand {
    /// Output folder of `plimsoll predict`, or the output folders of one or several runs of `plimsoll train`
    #[arg(value_name = "RESULT_DIR", required = true)]
    results: Vec<PathBuf>,

    /// Page to write [default: the name of RESULT_DIR with _report.html appended, in the current folder; of several runs,
    /// training_report.html]
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,

    /// Title of the page [default: the names of the input files or of the runs]
    #[arg(long, value_name = "TEXT")]
    title: Option<String>,

    /// Replace an existing file
    #[arg(long)]
    force: bool,
}

impl ReportCommand {
    /// Runs the command.
    pub fn run(self) -> Result<ExitCode, CliError> {
        let output = self.output.unwrap_or_else(|| {
            let [results] = &self.results[..] else { return PathBuf::from("training_report.html") };
            let full = results.canonicalize().unwrap_or_else(|_| results.clone());
            PathBuf::from(format!("{}_report.html", full.file_name().unwrap_or_default().to_string_lossy()))
        });
        let options = ReportOptions { results: self.results, output, title: self.title, force: self.force };
        report(&options)?;
        print_summary(std::slice::from_ref(&options.output), &options.output.display().to_string())?;
        Ok(ExitCode::SUCCESS)
    }
}
