//! Inspection of the output folder: empty, with complete results, or with foreign files. Invariant: results of
//! another run are never touched without `--force`, complete results are never computed twice, and foreign
//! files are never removed.

use super::output::{FILES, RUN_RECORD};
use super::resume;
use crate::VirusError;
pub use plimsoll_runtime::identity::difference;
use plimsoll_runtime::lock::remove;
use plimsoll_runtime::{RuntimeError, live};
use serde_json::Value;
use std::fs;
use std::path::Path;

/// Names of the journals, from which an interrupted run is resumed.
pub const JOURNALS: [&str; 2] = [resume::RESULTS, resume::EMBEDDINGS];

/// State of the output folder.
pub enum FolderState {
    /// Nothing that prevents writing results.
    Nothing,
    /// The run record of complete results.
    Record(Value),
}

/// Inspects the folder. With `force`, existing results are ignored; they stay until the new results replace them.
/// Temporary files of a killed process are removed unless the folder has foreign files.
///
/// # Errors
/// A file that is neither a result, a journal nor a temporary file of a prediction; a `run.json` that is not JSON.
pub fn inspect(dir: &Path, force: bool) -> Result<FolderState, VirusError> {
    let record = dir.join(RUN_RECORD);
    if record.exists() && !force {
        let text = fs::read_to_string(&record).map_err(RuntimeError::io(&record))?;
        let value =
            serde_json::from_str(&text).map_err(|_| VirusError::NotARunRecord { path: record.clone() })?;
        return Ok(FolderState::Record(value));
    }
    let mut leftovers = vec![];
    for entry in fs::read_dir(dir).map_err(RuntimeError::io(dir))? {
        let path = entry.map_err(RuntimeError::io(dir))?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if is_leftover(&name) {
            leftovers.push(path);
        } else if ![&FILES[..], &JOURNALS, &[live::FILE]].concat().contains(&name.as_str()) {
            return Err(VirusError::ForeignFiles { folder: dir.to_owned(), name });
        }
    }
    // Only after the whole folder was inspected: nothing is removed from a folder with foreign files.
    leftovers.iter().try_for_each(|path| remove(path))?;
    Ok(FolderState::Nothing)
}

/// Whether `name` is the name of a temporary file of a killed run, such as `.predictions.tsv.123-4.part` (file,
/// process id, count) or `.sort.123-4.part`.
fn is_leftover(name: &str) -> bool {
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    let parts = || {
        let (file, number) = name.strip_prefix('.')?.strip_suffix(".part")?.rsplit_once('.')?;
        let (process, count) = number.split_once('-')?;
        Some(
            (["sort", live::FILE].contains(&file) || FILES.contains(&file))
                && is_number(process)
                && is_number(count),
        )
    };
    parts() == Some(true)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_killed_run_leaves() {
        let check = |name: &str, wanted: bool| assert_eq!(is_leftover(name), wanted, "{name}");
        check(".predictions.tsv.123-4.part", true);
        check(".run.json.1-0.part", true);
        check(".progress.json.1-0.part", true);
        check(".embeddings.ids.txt.9-12.part", true);
        check(".sort.77-0.part", true);
        check(".thesis.tex.123-4.part", false);
        check(".predictions.tsv.part", false);
        check(".predictions.tsv.12x-4.part", false);
        check(".predictions.tsv.12-.part", false);
        check("predictions.tsv", false);
        check(".part", false);
    }
}
