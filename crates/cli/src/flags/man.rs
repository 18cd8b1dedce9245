//! Flags of `plimsoll man`. Invariant: the manual pages are generated from the help texts.

use super::print;
use crate::Cli;
use crate::error::CliError;
use clap::{Args, CommandFactory};
use clap_mangen::Man as Page;
use plimsoll_runtime::RuntimeError;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Print the manual pages, or write them to a folder
///
/// To read them:
///
///   plimsoll man | man -l -
///
/// To install them:
///
///   plimsoll man -o ~/.local/share/man/man1
#[derive(Debug, Args)]
#[command(verbatim_doc_comment)]
pub struct ManCommand {
    /// Output folder for plimsoll.1 and one page per command; without this flag the pages are printed
    #[arg(short, long, value_name = "DIR")]
    output_dir: Option<PathBuf>,

    /// Replace pages that exist and have other content
    #[arg(long, requires = "output_dir")]
    force: bool,
}

impl ManCommand {
    /// Runs the command.
    pub fn run(self) -> Result<ExitCode, CliError> {
        let output = self.output_dir.as_deref().unwrap_or(Path::new("standard output"));
        let pages = pages().map_err(io_error(output))?;
        let Some(folder) = self.output_dir else {
            let texts: Vec<&str> = pages.iter().map(|(_, text)| text.trim_end()).collect();
            print(&texts.join("\n"))?;
            return Ok(ExitCode::SUCCESS);
        };
        fs::create_dir_all(&folder).map_err(io_error(&folder))?;
        for (name, text) in pages {
            let path = folder.join(name);
            plimsoll_tools::write_text(&path, &text, self.force)?;
        }
        Ok(ExitCode::SUCCESS)
    }
}

fn io_error(path: &Path) -> impl FnOnce(io::Error) -> RuntimeError {
    let path = path.to_owned();
    move |source| RuntimeError::Io { path, source }
}

/// Generates file names and texts of the pages: the program's page, then one for each command.
fn pages() -> io::Result<Vec<(String, String)>> {
    let mut program = Cli::command().disable_help_subcommand(true);
    // `build` gives every command its full name, `plimsoll-predict`.
    program.build();
    let commands = program.get_subcommands().filter(|command| !command.is_hide_set()).cloned();
    let all: Vec<_> = std::iter::once(program.clone()).chain(commands).collect();
    all.into_iter().map(page).collect()
}

/// Generates file name and text of one command's page.
fn page(command: clap::Command) -> io::Result<(String, String)> {
    let page = Page::new(command).source(concat!("plimsoll ", env!("CARGO_PKG_VERSION")));
    let mut text = Vec::new();
    page.render(&mut text)?;
    Ok((page.get_filename(), String::from_utf8_lossy(&text).into_owned()))
}
