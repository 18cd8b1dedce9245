//! `plimsoll report`: the results of a prediction as one HTML page.
#![forbid(unsafe_code)]

mod error;

pub use error::ReportError;

use std::path::PathBuf;

/// Options of [`report()`].
#[derive(Clone, Debug)]
pub struct Options {
    /// The folder that `predict` wrote.
    pub results: PathBuf,
    /// The page to write.
    pub output: PathBuf,
    /// Title of the page; `None` for the names of the input files.
    pub title: Option<String>,
    /// Whether an existing file may be replaced.
    pub force: bool,
}

/// Writes the page.
pub fn report(_options: &Options) -> Result<(), ReportError> {
    Ok(())
}
