//! Flags of `plimsoll doctor`. Invariant: every flag has its default and help here.

use super::print;
use crate::error::CliError;
use clap::Args;
use plimsoll_runtime::report::to_json;
use plimsoll_tools::doctor::{DoctorOptions, report};
use std::process::ExitCode;

/// Describe this machine: processor, memory, GPUs, models in the local caches, number formats, free disk space
#[derive(Debug, Args)]
pub struct DoctorCommand {
    /// Also print the kernel table: the kernels that compute each op, and their element types
    #[arg(long)]
    kernels: bool,

    /// Print the description as JSON
    #[arg(long)]
    json: bool,
}

impl DoctorCommand {
    /// Runs the command.
    pub fn run(self) -> Result<ExitCode, CliError> {
        let report = report(DoctorOptions { gpus: super::device::gpus(), kernels: self.kernels })?;
        if self.json {
            print(&format!("{:#}", to_json(&report)))?;
        } else {
            print(report.to_string().trim_end())?;
        }
        Ok(ExitCode::SUCCESS)
    }
}
