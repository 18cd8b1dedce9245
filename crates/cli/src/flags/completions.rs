//! Flags of `plimsoll completions`. Invariant: the completion script is generated from the flags, so it covers every
//! flag.

use super::print;
use crate::Cli;
use crate::error::CliError;
use clap::{Args, CommandFactory};
use clap_complete::{Shell, generate};
use std::process::ExitCode;

/// Print a shell completion script
///
/// bash loads the script in every new shell from this file:
///
///   plimsoll completions bash > ~/.local/share/bash-completion/completions/plimsoll
///
/// zsh, from a folder in $fpath:
///
///   plimsoll completions zsh > ~/.zfunc/_plimsoll
///
/// fish:
///
///   plimsoll completions fish > ~/.config/fish/completions/plimsoll.fish
#[derive(Debug, Args)]
#[command(verbatim_doc_comment)]
pub struct CompletionsCommand {
    /// Shell to generate the script for
    #[arg(value_enum, value_name = "SHELL")]
    shell: Shell,
}

impl CompletionsCommand {
    /// Runs the command.
    pub fn run(self) -> Result<ExitCode, CliError> {
        let mut script = Vec::new();
        generate(self.shell, &mut Cli::command(), "plimsoll", &mut script);
        print(String::from_utf8_lossy(&script).trim_end())?;
        Ok(ExitCode::SUCCESS)
    }
}
