//! `plimsoll completions`: the flags. Invariant: the script is made from the flags themselves, so it knows
//! every one of them.

use super::print;
use crate::Cli;
use crate::error::CliError;
use clap::{Args, CommandFactory};
use clap_complete::{Shell, generate};
use std::process::ExitCode;

/// Print a script that completes commands and flags in your shell
///
/// bash reads it in every new shell from here:
///
///   plimsoll completions bash > ~/.local/share/bash-completion/completions/plimsoll
///
/// zsh, from a folder of $fpath:
///
///   plimsoll completions zsh > ~/.zfunc/_plimsoll
///
/// fish:
///
///   plimsoll completions fish > ~/.config/fish/completions/plimsoll.fish
#[derive(Debug, Args)]
#[command(verbatim_doc_comment)]
pub struct Completions {
    /// The shell that will read it
    #[arg(value_enum, value_name = "SHELL")]
    shell: Shell,
}

impl Completions {
    /// Runs the command.
    pub fn run(self) -> Result<ExitCode, CliError> {
        let mut script = Vec::new();
        generate(self.shell, &mut Cli::command(), "plimsoll", &mut script);
        print(String::from_utf8_lossy(&script).trim_end())?;
        Ok(ExitCode::SUCCESS)
    }
}
