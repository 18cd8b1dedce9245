//! `plimsoll doctor`: the flags.

use super::print;
use clap::Args;
use run::{RunError, doctor};
use std::process::ExitCode;

/// Show what this machine offers: processor, memory, kernels, models in the hub cache, GPUs
#[derive(Debug, Args)]
pub struct Doctor {
    /// Print JSON
    #[arg(long)]
    json: bool,
}

impl Doctor {
    /// Runs the command.
    pub fn run(self) -> Result<ExitCode, RunError> {
        let (report, gpus) = (doctor::report()?, super::device::gpus());
        if self.json {
            let mut json = report.to_json();
            json["gpu"] = gpus.into();
            print(&format!("{json:#}"))?;
        } else {
            let lines: String = gpus.iter().map(|line| format!("  {line}\n")).collect();
            print(&format!("{}\n\ngpu\n{}", report.to_string().trim_end(), lines.trim_end()))?;
        }
        Ok(ExitCode::SUCCESS)
    }
}
