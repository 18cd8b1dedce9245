//! Flags of `plimsoll merge`. Invariant: every flag has its default and help here.

use super::messages::MessageFlags;
use super::print;
use crate::error::CliError;
use clap::Args;
use plimsoll_runtime::OutputGuard;
use plimsoll_runtime::report::to_json;
use plimsoll_tools::merge::{MergeOptions, merge};
use std::path::PathBuf;
use std::process::ExitCode;

/// Merge an adapter (LoRA) into its base model
///
/// The adapter is a checkpoint of a run with model.lora, or a folder written by the peft library. The result is a model
/// folder in the hub's format, which plimsoll and transformers can load.
#[derive(Debug, Args)]
pub struct MergeCommand {
    /// Adapter folder, which contains adapter_config.json
    #[arg(value_name = "ADAPTER")]
    adapter: PathBuf,

    /// Output folder, which must not exist
    #[arg(short, long, value_name = "FOLDER")]
    output: PathBuf,

    /// Base model: a folder or a Hugging Face hub id [default: the base model named in adapter_config.json]
    #[arg(long, value_name = "PATH|HUB_ID")]
    base: Option<String>,

    #[command(flatten)]
    messages: MessageFlags,
}

impl MergeCommand {
    /// Runs the command.
    pub fn run(self) -> Result<ExitCode, CliError> {
        let options = MergeOptions { adapter: self.adapter, base: self.base, output: self.output };
        let mut terminal = self.messages.terminal(&mut OutputGuard::new(options.input_files(), false))?;
        let done = merge(&options, &mut terminal);
        terminal.finish();
        let report = done.map_err(CliError::from).inspect_err(|error| terminal.log(&error.chain()))?;
        if self.messages.json() {
            print(&format!("{:#}", to_json(&report)))?;
        } else if !self.messages.quiet() {
            let adapted = report.adapted;
            let tensors = report.tensors;
            let place = plimsoll_runtime::EscapedPath(&report.output);
            print(&format!("{tensors} tensors in {place}, {adapted} of them merged with the adapter"))?;
        }
        Ok(ExitCode::SUCCESS)
    }
}
