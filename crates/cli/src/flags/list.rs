//! Flags of `plimsoll list`. Invariant: every flag has its default and help here.

use super::print;
use crate::error::CliError;
use clap::Args;
use plimsoll_runtime::report::to_json;
use plimsoll_tools::list;
use std::process::ExitCode;

/// List supported models and which are in the local caches
///
/// Lists the models that Plimsoll knows by name, and other models of their families in the Hugging Face cache; fair-esm
/// checkpoints in the torch hub cache (~/.cache/torch/hub/checkpoints) are listed with their models. The first command
/// that needs a model downloads the files that the cache lacks.
#[derive(Debug, Args)]
pub struct ListCommand {
    /// Print the list as JSON
    #[arg(long)]
    json: bool,
}

impl ListCommand {
    /// Runs the command.
    pub fn run(self) -> Result<ExitCode, CliError> {
        let list = list::list()?;
        print(&if self.json { format!("{:#}", to_json(&list)) } else { list.to_string() })?;
        Ok(ExitCode::SUCCESS)
    }
}
