//! `plimsoll convert`: the flags.

use super::messages::MessageFlags;
use super::print;
use crate::error::CliError;
use clap::Args;
use plimsoll_runtime::report::to_json;
use plimsoll_runtime::{OutputGuard, RuntimeError};
use plimsoll_tools::convert::{ConvertOptions, convert};
use std::path::PathBuf;
use std::process::ExitCode;

/// Convert weights to one safetensors file, from PyTorch's .bin, .pt or .pth, from shards, or from a model's folder
///
/// No code in the input is executed. Names, types, shapes and values of the tensors are unchanged; the result is read
/// back and compared with the input before it gets its name. A fair-esm checkpoint (esm2_t*_UR50D.pt) gets the hub's
/// tensor names, and a config.json beside the result.
#[derive(Debug, Args)]
pub struct ConvertCommand {
    /// Weights: a file, an index of shards, or a model's folder
    #[arg(value_name = "INPUT")]
    input: PathBuf,

    /// Output file
    #[arg(short, long, value_name = "OUT.safetensors")]
    output: PathBuf,

    /// Replace an existing output file
    #[arg(long)]
    force: bool,

    #[command(flatten)]
    messages: MessageFlags,
}

impl ConvertCommand {
    /// Runs the command.
    pub fn run(self) -> Result<ExitCode, CliError> {
        let options = ConvertOptions { input: self.input, output: self.output, force: self.force };
        let mut guard = OutputGuard::new(options.input_files(), false);
        guard.own_file(&options.output).map_err(RuntimeError::from)?;
        let mut terminal = self.messages.terminal(&mut guard)?;
        let done = convert(&options, &mut terminal);
        terminal.finish();
        let report = done.map_err(CliError::from).inspect_err(|error| terminal.log(&error.chain()))?;
        if self.messages.json() {
            print(&format!("{:#}", to_json(&report)))?;
        } else if !self.messages.quiet() {
            print(&format!(
                "{} tensors in {}, compared with the input",
                report.tensors,
                plimsoll_runtime::EscapedPath(&report.output)
            ))?;
        }
        Ok(ExitCode::SUCCESS)
    }
}
