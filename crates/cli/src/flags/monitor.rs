//! Flags of `plimsoll monitor`. Invariant: the command only reads.

use super::print;
use crate::error::CliError;
use crate::screen::Screen;
use crate::terminal::{Terminal, Verbosity};
use clap::Args;
use plimsoll_runtime::Observer;
use plimsoll_tools::monitor::{End, RunView, Watched, frame, line};
use std::io::{IsTerminal, stdout};
use std::path::PathBuf;
use std::process::ExitCode;
use std::thread::sleep;
use std::time::{Duration, Instant};

/// Show a run of train or predict while it runs: progress, loss, memory and health
///
/// Reads the files of the run's output folder and draws them on the terminal until the run ends; without a terminal,
/// prints a line every ten seconds. The run is not disturbed. Ctrl-C ends the display, and the run goes on.
///
/// Exit codes: 0 the run has finished, or --once; 1 failure, bad usage, or the run was interrupted, failed or was
/// killed; 130 and 143 interrupted (Ctrl-C, SIGTERM).
#[derive(Debug, Args)]
pub struct MonitorCommand {
    /// Output folder of the run
    #[arg(value_name = "FOLDER")]
    run: PathBuf,

    /// Print the present state once, and do not wait
    #[arg(long)]
    once: bool,
}

/// Width of a frame where there is no terminal.
pub const COLUMNS: usize = 80;

/// Interval between two looks at the files.
const LOOK: Duration = Duration::from_millis(500);

/// Interval between two lines where there is no terminal.
const BETWEEN_LINES: Duration = Duration::from_secs(10);

impl MonitorCommand {
    /// Runs the command.
    pub fn run(self) -> Result<ExitCode, CliError> {
        let mut watched = Watched::open(&self.run)?;
        let mut screen = stdout().is_terminal().then(Screen::on_stdout);
        if self.once {
            let width = screen.as_ref().map_or(COLUMNS, Screen::width);
            print(&frame(watched.update()?, width).join("\n"))?;
            return Ok(ExitCode::SUCCESS);
        }
        let signals = Terminal::new(Verbosity::Normal, false, None);
        signals.listen()?;
        let mut printed = None;
        loop {
            let view = watched.update()?;
            match &mut screen {
                Some(screen) => screen.draw(frame(view, screen.width())),
                None => print_line(view, &mut printed)?,
            }
            let end = view.end.clone();
            if end.is_some() || signals.stop().is_some() {
                // A run that has ended decides the exit code, also if a signal arrives at the same time.
                return Ok(match (end, signals.stop()) {
                    (Some(End::Finished), _) => ExitCode::SUCCESS,
                    (Some(End::Interrupted | End::Failed(_) | End::Gone), _) => ExitCode::FAILURE,
                    (None, signal) => ExitCode::from(128 + signal.unwrap_or_default()),
                });
            }
            sleep(LOOK);
        }
    }
}

/// Prints the first and the last line, and one every ten seconds between them.
fn print_line(view: &RunView, printed: &mut Option<Instant>) -> Result<(), CliError> {
    if view.end.is_none() && printed.is_some_and(|at| at.elapsed() < BETWEEN_LINES) {
        return Ok(());
    }
    *printed = Some(Instant::now());
    print(&line(view))
}
