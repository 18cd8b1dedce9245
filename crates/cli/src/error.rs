//! What ends a command early. Invariant: the exit code and the limit of the system are those of the error of the crate that
//! knows.

use runtime::{Failure, RuntimeError};
use std::fmt;

/// The error of an application or of the runtime, or words that do not go together.
#[derive(Debug)]
pub struct CliError(Box<dyn Failure>);

impl CliError {
    /// The exit code of the command.
    pub fn exit_code(&self) -> u8 {
        self.0.exit_code()
    }

    /// The error with its causes, a line each, and the limit of the system that is behind it.
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

/// Flags that do not go together, or that name something that is not there. The text names the flag and the next step.
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

/// A refusal of the words of a command.
pub fn usage(text: impl Into<String>) -> CliError {
    UsageError(text.into()).into()
}
