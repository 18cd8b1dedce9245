//! Flags about what a command says, shared by the commands that take a while.

use crate::error::CliError;
use crate::terminal::{Loudness, Terminal};
use clap::Args;
use std::path::PathBuf;

/// Flags about what is said.
#[derive(Debug, Args)]
#[command(next_help_heading = "Messages")]
pub struct Voice {
    /// Show no progress, neither as a bar nor as lines
    #[arg(long)]
    no_progress: bool,

    /// Say nothing but warnings and errors
    #[arg(short, long, conflicts_with = "verbose")]
    quiet: bool,

    /// Say more: device, memory and every skipped record
    #[arg(short, long)]
    verbose: bool,

    /// Append every message, details included, to this file, with the time
    #[arg(long, value_name = "FILE")]
    log_file: Option<PathBuf>,

    /// Print the summary to standard output as JSON
    #[arg(long)]
    json: bool,
}

impl Voice {
    /// The terminal that speaks so.
    pub fn terminal(&self) -> Result<Terminal, CliError> {
        let loudness = match (self.quiet, self.verbose) {
            (true, _) => Loudness::Quiet,
            (false, true) => Loudness::Verbose,
            (false, false) => Loudness::Normal,
        };
        Terminal::new(loudness, !self.no_progress && !self.quiet, self.log_file.as_deref())
    }

    /// Whether the summary is JSON.
    pub fn json(&self) -> bool {
        self.json
    }

    /// Whether there is no summary for people.
    pub fn quiet(&self) -> bool {
        self.quiet
    }
}
