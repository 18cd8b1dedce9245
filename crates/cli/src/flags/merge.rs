//! `plimsoll merge`: the flags.

use super::print;
use super::voice::Voice;
use crate::error::CliError;
use clap::Args;
use std::path::PathBuf;
use std::process::ExitCode;
use tools::merge::{Options, merge};

/// Make one model of an adapter and the model that it adapts
///
/// The adapter is a checkpoint of a run with model.lora, or a folder of peft. The result is a model's folder as the hub
/// has it, for plimsoll and for transformers.
#[derive(Debug, Args)]
pub struct Merge {
    /// The adapter's folder, with its adapter_config.json
    #[arg(value_name = "ADAPTER")]
    adapter: PathBuf,

    /// The result, which is not there yet
    #[arg(short, long, value_name = "FOLDER")]
    output: PathBuf,

    /// The model that was adapted, a folder or a hub id [default: the one that the adapter names]
    #[arg(long, value_name = "PATH|HUB_ID")]
    base: Option<String>,

    #[command(flatten)]
    voice: Voice,
}

impl Merge {
    /// Runs the command.
    pub fn run(self) -> Result<ExitCode, CliError> {
        let mut terminal = self.voice.terminal()?;
        let options = Options { adapter: self.adapter, base: self.base, output: self.output };
        let done = merge(&options, &mut terminal);
        terminal.finish();
        let report = done.map_err(CliError::from).inspect_err(|error| terminal.log(&error.chain()))?;
        if self.voice.json() {
            print(&format!("{:#}", report.to_json()))?;
        } else if !self.voice.quiet() {
            let (adapted, tensors) = (report.adapted, report.tensors);
            let place = runtime::Place(&report.output);
            print(&format!("{tensors} tensors in {place}, {adapted} of them with their adapter"))?;
        }
        Ok(ExitCode::SUCCESS)
    }
}
