//! Flags that control messages and summaries, shared by long-running commands. Invariant: each flag has one definition.

use crate::error::CliError;
use crate::terminal::{Terminal, Verbosity};
use clap::Args;
use plimsoll_runtime::OutputGuard;
use std::path::PathBuf;

/// Flags that control messages and summaries.
#[derive(Debug, Args)]
#[command(next_help_heading = "Messages")]
pub struct MessageFlags {
    /// Show no progress bar and print no progress lines
    #[arg(long)]
    no_progress: bool,

    /// Print only warnings and errors
    #[arg(short, long, conflicts_with = "verbose")]
    quiet: bool,

    /// Also print details: device, memory, and every skipped record
    #[arg(short, long)]
    verbose: bool,

    /// Append every message, including details, with a timestamp to this file
    #[arg(long, value_name = "FILE")]
    log_file: Option<PathBuf>,

    /// Print the summary to standard output as JSON
    #[arg(long)]
    json: bool,
}

/// The flag `--monitor` of commands that report the state of a run.
#[derive(Debug, Args)]
#[command(next_help_heading = "Messages")]
pub struct MonitorFlag {
    /// Draw progress, memory and health of the run on the terminal while it runs, as plimsoll monitor does for a run
    /// elsewhere; without a terminal, print a line from time to time
    #[arg(long, conflicts_with_all = ["no_progress", "quiet"])]
    monitor: bool,
}

impl Terminal {
    /// Shows the state of the run if the flag is given.
    pub fn with_monitor_if(self, flag: &MonitorFlag) -> Self {
        if flag.monitor { self.with_monitor() } else { self }
    }
}

impl MessageFlags {
    /// The terminal of a command; `guard` has the files that the command reads and writes.
    ///
    /// # Errors
    /// A log file that is one of these files, has other content than a log, or cannot be opened.
    pub fn terminal(&self, guard: &mut OutputGuard) -> Result<Terminal, CliError> {
        let mut terminal = self.terminal_without_log();
        terminal.open_log(guard)?;
        Ok(terminal)
    }

    /// The terminal of a command that can show the state of its run; see [`MessageFlags::terminal`].
    pub fn terminal_with(&self, flag: &MonitorFlag, guard: &mut OutputGuard) -> Result<Terminal, CliError> {
        Ok(self.terminal(guard)?.with_monitor_if(flag))
    }

    /// The terminal of a command whose inputs are not known yet. Lines for the log wait until [`Terminal::open_log`].
    pub fn terminal_without_log(&self) -> Terminal {
        let verbosity = match (self.quiet, self.verbose) {
            (true, _) => Verbosity::Quiet,
            (false, true) => Verbosity::Verbose,
            (false, false) => Verbosity::Normal,
        };
        Terminal::new(verbosity, !self.no_progress && !self.quiet, self.log_file.as_deref())
    }

    /// Whether the summary is printed as JSON.
    pub fn json(&self) -> bool {
        self.json
    }

    /// Whether the text summary is omitted.
    pub fn quiet(&self) -> bool {
        self.quiet
    }
}
