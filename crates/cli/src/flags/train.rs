//! `plimsoll train`: the flags. Invariant: a flag that stands for a key of the configuration is that key, so the file,
//! --set and the flag are read by one schema.

use super::print;
use clap::{ArgGroup, Args};
use run::RunError;
use run::train::config::TrainConfig;
use run::train::config::schema::schema;
use std::path::PathBuf;
use std::process::ExitCode;

/// Look at the configuration of a training run, without running it
///
/// The keys are described by --schema and in docs/training-keys.md.
#[derive(Debug, Args)]
#[command(group(ArgGroup::new("what").required(true).args(["print_config", "schema"])))]
pub struct Train {
    /// The configuration, a YAML file
    #[arg(value_name = "CONFIG.yaml", required_unless_present = "schema")]
    config: Option<PathBuf>,

    /// Another value of a key, such as optimizer.lr=1e-4; can be given many times, and the last one wins
    #[arg(long, value_name = "KEY=VALUE")]
    set: Vec<String>,

    /// The most memory the run may take, like 24GiB or 80% of what is free: the key memory.budget
    #[arg(long, alias = "memory-budget", value_name = "SIZE")]
    budget: Option<String>,

    /// Print the configuration with every key, as it would be run
    #[arg(long)]
    print_config: bool,

    /// Print the JSON schema of configurations, for editors
    #[arg(long)]
    schema: bool,
}

impl Train {
    /// Runs the command.
    pub fn run(self) -> Result<ExitCode, RunError> {
        match &self.config {
            Some(path) if !self.schema => print(self.configuration(path)?.to_yaml()?.trim_end())?,
            Some(_) | None => print(&format!("{:#}", schema()))?,
        }
        Ok(ExitCode::SUCCESS)
    }

    /// The file, with the flags over it.
    fn configuration(&self, path: &std::path::Path) -> Result<TrainConfig, RunError> {
        let budget = self.budget.as_ref().map(|size| format!("memory.budget=\"{}\"", size.escape_default()));
        let flags: Vec<String> = self.set.iter().cloned().chain(budget).collect();
        TrainConfig::read(path, &flags)
    }
}
