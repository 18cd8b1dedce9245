//! The flags: one file per command, and one per group of shared flags. Invariant: every flag of a command is defined in
//! one file, with its default and its help.

pub mod bench;
mod caller;
pub mod classify;
pub mod completions;
pub mod convert;
mod device;
pub mod doctor;
pub mod embed;
pub mod evaluate;
mod gpu;
pub mod licenses;
pub mod list;
pub mod machine;
pub mod man;
pub mod merge;
pub mod messages;
pub mod monitor;
pub mod plan;
pub mod plot;
mod precision;
pub mod predict;
pub mod report;
mod sequences;
pub mod train;
pub mod verify;
mod virnucpro;

use crate::error::CliError;
use plimsoll_runtime::RuntimeError;
use std::io::{ErrorKind, Write, stdout};
use std::path::PathBuf;

/// Writes to standard output. A closed pipe, such as after `head`, is not an error. Names in the text come from files
/// and must not control the terminal, so unprintable characters are written as JSON escapes.
pub fn print(text: &str) -> Result<(), CliError> {
    let mut shown = String::with_capacity(text.len());
    for c in text.chars() {
        if plimsoll_runtime::is_printable(c) || matches!(c, '\n' | '\t') {
            shown.push(c);
        } else {
            shown += &format!("\\u{:04x}", u32::from(c));
        }
    }
    // Flushed here: an error of the flush at the end of the process would be lost.
    let mut out = stdout().lock();
    match writeln!(out, "{shown}").and_then(|()| out.flush()) {
        Err(source) if source.kind() != ErrorKind::BrokenPipe => {
            Err(RuntimeError::Io { path: "standard output".into(), source }.into())
        }
        Ok(()) | Err(_) => Ok(()),
    }
}

/// Writes a summary to standard output, or to standard error if one of `outputs`, the files of the command, is standard
/// output.
pub fn print_summary(outputs: &[PathBuf], text: &str) -> Result<(), CliError> {
    if outputs.iter().any(|path| plimsoll_runtime::is_standard_output(path)) {
        crate::terminal::print_error(text);
        Ok(())
    } else {
        print(text)
    }
}

/// Parses a whole number of at least 1.
fn at_least_one(text: &str) -> Result<u64, String> {
    at_least(1, text)
}

fn at_least(min: u64, text: &str) -> Result<u64, String> {
    let number = text.parse::<u64>().ok().filter(|n| (min..=MAX_NUMBER).contains(n));
    number.ok_or_else(|| format!("give a whole number from {min} to {MAX_NUMBER}"))
}

/// Parses a number of tokens of a step.
fn step_tokens(text: &str) -> Result<u64, String> {
    let number = at_least_one(text).ok().filter(|n| *n <= MAX_TOKENS);
    number.ok_or_else(|| format!("give a number of tokens from 1 to {MAX_TOKENS}"))
}

/// Largest number of tokens of a step, which are numbered by 32-bit integers.
const MAX_TOKENS: u64 = i32::MAX as u64;

/// Largest accepted number of any flag, small enough that sums of such numbers cannot overflow.
const MAX_NUMBER: u64 = 1 << 40;
