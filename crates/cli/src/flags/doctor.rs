//! `plimsoll doctor`: the flags.

use super::print;
use clap::Args;
use run::{RunError, doctor};
use std::process::ExitCode;

/// Show what this machine offers: processor, memory, kernels, models in the hub cache
#[derive(Debug, Args)]
pub struct Doctor {
    /// Print JSON
    #[arg(long)]
    json: bool,
}

impl Doctor {
    /// Runs the command.
    pub fn run(self) -> Result<ExitCode, RunError> {
        let report = doctor::report()?;
        print(&if self.json { format!("{:#}", report.to_json()) } else { report.to_string() })?;
        Ok(ExitCode::SUCCESS)
    }
}
