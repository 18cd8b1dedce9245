//! `plimsoll list`: the flags.

use super::print;
use crate::error::CliError;
use clap::Args;
use std::process::ExitCode;
use tools::list;

/// Show the models that can be run: size, and which are in the local caches
///
/// Known models, and others of their families that the Hugging Face cache has; checkpoints of fair-esm in the torch hub cache
/// (~/.cache/torch/hub/checkpoints) stand beside their models. A model that is not complete is fetched by the
/// first command that needs it.
#[derive(Debug, Args)]
pub struct List {
    /// Print JSON
    #[arg(long)]
    json: bool,
}

impl List {
    /// Runs the command.
    pub fn run(self) -> Result<ExitCode, CliError> {
        let list = list::list()?;
        print(&if self.json { format!("{:#}", list.to_json()) } else { list.to_string() })?;
        Ok(ExitCode::SUCCESS)
    }
}
