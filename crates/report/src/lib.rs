//! HTML pages: the results of a prediction or training runs (`plimsoll report`), and the memory of a plan ([`timeline`]), without
//! references to other files or the network. Reads the run record, and each table once or twice from its start to its end.
//! Invariant: results are not recomputed or changed; a page has at most 5 MB; memory is bounded for any number of records, at
//! about 60 MB with names of 200 characters (see `survey.rs`), and for any number of training steps (see
//! `plimsoll_train::history`).
//!
//! `page.rs`, `table.rs` and `chart.rs` know nothing of viral calls: other reports use the same frame, table and charts.
#![forbid(unsafe_code)]

mod calls;
mod chart;
mod columns;
mod curves;
mod error;
mod html;
mod page;
mod results;
mod survey;
mod table;
#[cfg(test)]
mod tests;
pub mod timeline;
mod training;

pub use error::ReportError;

use plimsoll_data::atomic::AtomicFile;
use plimsoll_data::outputs::{InputFiles, OutputGuard};
use plimsoll_train::history;
use plimsoll_virus::output::FILES;
use results::PredictionResults;
use std::io::Write;
use std::path::PathBuf;

/// Options of [`report()`].
#[derive(Clone, Debug)]
pub struct ReportOptions {
    /// The folder that `predict` wrote, or the folders of training runs.
    pub results: Vec<PathBuf>,
    /// The page to write.
    pub output: PathBuf,
    /// Title of the page; `None` for the names of the input files or of the runs.
    pub title: Option<String>,
    /// Whether an existing file may be replaced.
    pub force: bool,
}

/// The files that are read from folders of results: those that predictions and training runs write.
fn results_read(folders: &[PathBuf]) -> InputFiles {
    InputFiles::named_in(folders, FILES.iter().chain(&history::FILES))
}

/// Writes the page of the results of a prediction, or of training runs.
///
/// # Errors
/// - [`ReportError::Mixture`], [`ReportError::SeveralPredictions`]: folders that cannot be on one
///   page.
/// - [`ReportError::Training`]: a training run cannot be read, or there are too many.
/// - [`ReportError::NoFolder`], [`ReportError::NoResult`], [`ReportError::NotARunRecord`]: the folder has no complete results of a prediction.
/// - [`ReportError::Runtime`]: a table is damaged or contradicts another one, or the page cannot be written: it is one of
///   the tables, or the output exists and `force` is not set.
pub fn report(options: &ReportOptions) -> Result<(), ReportError> {
    OutputGuard::new(results_read(&options.results), options.force).file(&options.output)?;
    let title = options.title.as_deref();
    let page = if history::are_training_runs(&options.results).map_err(ReportError::Mixture)? {
        training::page(&options.results, title)?.html()
    } else {
        let [folder] = &options.results[..] else { return Err(ReportError::SeveralPredictions) };
        calls::page(PredictionResults::open(folder)?, title)?.html()
    };
    let mut file = AtomicFile::create(&options.output)?;
    file.write_all(page.as_bytes()).map_err(|error| file.error(error))?;
    Ok(file.commit()?)
}
