//! One file per command, and one for what commands share. Invariant: every flag of a command is in its
//! file, with its default and its help.

pub mod bench;
pub mod doctor;
pub mod embed;
pub mod machine;
pub mod plan;
pub mod plot;
pub mod predict;
pub mod voice;

use run::RunError;
use std::io::{ErrorKind, Write, stdout};

/// Writes to standard output. A reader that went away, as `head` does, is no error.
pub fn print(text: &str) -> Result<(), RunError> {
    let mut out = stdout().lock();
    match writeln!(out, "{text}").and_then(|()| out.flush()) {
        Err(source) if source.kind() != ErrorKind::BrokenPipe => {
            Err(RunError::Io { path: "standard output".into(), source })
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
