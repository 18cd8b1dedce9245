//! Error of a command. Invariant: the exit code and the exceeded system limit come from the error of the crate
//! that failed.

use plimsoll_runtime::{Failure, RuntimeError};
use std::fmt;

/// Error of an application, of the runtime, or of the usage of flags.
#[derive(Debug)]
pub struct CliError(Box<dyn Failure>);

impl CliError {
    /// The exit code of the command.
    pub fn exit_code(&self) -> u8 {
        self.0.exit_code()
    }

    /// Text of the error: the error and each of its causes on its own line, and the exceeded system limit if known.
    pub fn chain(&self) -> String {
        let mut text = format!("error: {self}");
        let mut cause = self.0.source();
        while let Some(error) = cause {
            text += &format!("\ncaused by: {error}");
            cause = error.source();
        }
        if let Some(limit) = self.0.limit() {
            text += &format!("\nlimit: {}", limit.text);
        }
        text
    }
}

impl fmt::Display for CliError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl<E: Failure + 'static> From<E> for CliError {
    fn from(error: E) -> Self {
        Self(Box::new(error))
    }
}

/// Incompatible flags, or a flag that names something that does not exist. The text names the flag and how to
/// fix it.
#[derive(Debug)]
struct UsageError(String);

impl fmt::Display for UsageError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for UsageError {}

impl Failure for UsageError {
    fn of_runtime(&self) -> Option<&RuntimeError> {
        None
    }
}

/// Creates an error about the usage of flags.
pub fn usage(text: impl Into<String>) -> CliError {
    UsageError(text.into()).into()
}
