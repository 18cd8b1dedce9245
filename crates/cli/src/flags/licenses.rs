//! Flags of `plimsoll licenses`. Invariant: the texts are those of the packages that are linked into the binary;
//! `xtask regen licenses` collects them from Cargo.lock, and its tests compare them with it.

use super::print;
use crate::error::CliError;
use clap::Args;
use std::process::ExitCode;

/// Names, licences and licence texts of the packages in the binary, and of its font.
const TEXTS: &str = include_str!("../../licenses/texts.txt");

/// Print the licences of the libraries and of the font in this program
#[derive(Debug, Args)]
pub struct LicensesCommand {}

impl LicensesCommand {
    /// Runs the command.
    pub fn run(self) -> Result<ExitCode, CliError> {
        print(TEXTS.trim_end())?;
        Ok(ExitCode::SUCCESS)
    }
}
