//! One file per command, and one for what commands share. Invariant: every flag of a command is in its
//! file, with its default and its help.

pub mod bench;
mod card;
pub mod classify;
pub mod completions;
pub mod convert;
mod device;
pub mod doctor;
pub mod embed;
pub mod list;
pub mod machine;
pub mod man;
pub mod merge;
pub mod plan;
pub mod plot;
pub mod predict;
pub mod train;
pub mod verify;
mod virnucpro;
pub mod voice;

use crate::error::CliError;
use runtime::RuntimeError;
use std::io::{ErrorKind, Write, stdout};

/// Writes to standard output. A reader that went away, as `head` does, is no error. Names in the text come
/// from files and must not command the terminal: what is not printable stands as an escape of JSON.
pub fn print(text: &str) -> Result<(), CliError> {
    let mut shown = String::with_capacity(text.len());
    for c in text.chars() {
        match runtime::is_printable(c) || matches!(c, '\n' | '\t') {
            true => shown.push(c),
            false => shown += &format!("\\u{:04x}", u32::from(c)),
        }
    }
    let mut out = stdout().lock();
    match writeln!(out, "{shown}").and_then(|()| out.flush()) {
        Err(source) if source.kind() != ErrorKind::BrokenPipe => {
            Err(RuntimeError::Io { path: "standard output".into(), source }.into())
        }
        Ok(()) | Err(_) => Ok(()),
    }
}

/// A whole number from 1 on.
fn at_least_one(text: &str) -> Result<u64, String> {
    at_least(1, text)
}

fn at_least(least: u64, text: &str) -> Result<u64, String> {
    let number = text.parse::<u64>().ok().filter(|n| (least..=MOST).contains(n));
    number.ok_or_else(|| format!("give a whole number from {least} on"))
}

/// Beyond this no setting has a meaning, and sums of some cannot overflow.
const MOST: u64 = 1 << 40;
