//! Inspection of the output folder: empty, with complete results, or with foreign files. Invariant: results of
//! another run are never touched without `--force`, complete results are never computed twice, foreign files are never
//! removed, and no file of the folder that a run would write or remove is an input of the run.

use crate::VirusError;
use crate::output::{COMMIT, FILES, RUN_RECORD};
use crate::pipeline::resume;
use plimsoll_data::atomic::{remove_leftover, target_of_temporary};
use plimsoll_data::bounded;
use plimsoll_data::outputs::{InputFiles, WrittenFiles};
pub use plimsoll_runtime::identity::difference;
use plimsoll_runtime::{RuntimeError, live};
use serde_json::Value;
use std::fs;
use std::path::Path;

/// Names of the journals, from which an interrupted run is resumed.
pub const JOURNALS: [&str; 2] = [resume::RESULTS_JOURNAL, resume::EMBEDDINGS_JOURNAL];

/// Maximum size of a run record in bytes; a longer file is no record.
const LONGEST_RECORD: u64 = 256 << 20;

/// State of the output folder.
pub enum FolderState {
    /// Nothing that prevents writing results.
    Writable,
    /// The run record of complete results.
    Record(Value),
}

/// Checks that no file that a run writes to the folder, or removes from it, is an input of the run. A merge may write into
/// the folder of one of its shards, whose journal it reads and removes at its end.
///
/// # Errors
/// An input at the place of a result file, whether it is replaced by force or not.
pub fn check_inputs(dir: &Path, inputs: &InputFiles, is_shard: bool) -> Result<(), VirusError> {
    let journals = if is_shard { &[][..] } else { &JOURNALS };
    let names = FILES.iter().chain(journals).chain(&[live::FILE, COMMIT]);
    for name in names {
        inputs.check(&dir.join(name))?;
    }
    Ok(())
}

/// Inspects the folder. With `force`, existing results are ignored; they stay until the new results replace them.
/// Temporary files of a killed process are removed unless the folder has foreign files.
///
/// # Errors
/// A file that is neither a result of a run, a journal nor a temporary file of a prediction; with `force`, files with the
/// names of results may be replaced, whoever wrote them. A `run.json` that is not JSON.
pub fn inspect(dir: &Path, force: bool) -> Result<FolderState, VirusError> {
    let record = dir.join(RUN_RECORD);
    if record.exists() && !force {
        let text = bounded::read_text(&record, LONGEST_RECORD).map_err(RuntimeError::io(&record))?;
        let value =
            serde_json::from_str(&text).map_err(|_| VirusError::NotARunRecord { path: record.clone() })?;
        return Ok(FolderState::Record(value));
    }
    let written = written_by_runs(dir);
    let mut leftovers = vec![];
    for entry in fs::read_dir(dir).map_err(RuntimeError::io(dir))? {
        let path = entry.map_err(RuntimeError::io(dir))?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if is_leftover(&name) {
            leftovers.push(path);
        } else if name == live::FILE && live::LiveState::read(dir).is_some_and(|state| state.process_id > 0) {
            // The state of a killed run.
        } else if FILES.contains(&name.as_str()) {
            if !force && !is_unchanged(&written, dir, &name) {
                return Err(VirusError::NotWrittenByUs { path });
            }
        } else if name == COMMIT && !written.is_empty() {
            // Left by a run that was killed while it gave its files their names.
        } else if !JOURNALS.contains(&name.as_str()) {
            return Err(VirusError::ForeignFiles { folder: dir.to_owned(), name });
        }
    }
    // Only after the whole folder was inspected: nothing is removed from a folder with foreign files.
    leftovers.iter().for_each(|path| remove_leftover(path));
    Ok(FolderState::Writable)
}

/// Checks that all result files in a folder with the record of an earlier run were written by runs, because a run that
/// continues a run with `--force` replaces them without the flag.
///
/// # Errors
/// A file with the name of a result that no run wrote, or that was changed since.
pub fn check_written(dir: &Path) -> Result<(), VirusError> {
    let written = written_by_runs(dir);
    for name in FILES.into_iter().filter(|name| *name != RUN_RECORD) {
        let path = dir.join(name);
        if path.exists() && !is_unchanged(&written, dir, name) {
            return Err(VirusError::NotWrittenByUs { path });
        }
    }
    Ok(())
}

/// Whether a run wrote the file `name` as it is now.
fn is_unchanged(written: &[WrittenFiles], dir: &Path, name: &str) -> bool {
    written.iter().any(|list| list.has(dir, name))
}

/// The files that runs wrote to the folder: the list of the run record, and the lists that a run leaves if it is killed while
/// it gives its files their names.
pub(crate) fn written_by_runs(dir: &Path) -> Vec<WrittenFiles> {
    // Without a record, every file is foreign.
    let commit = bounded::read_text(&dir.join(COMMIT), LONGEST_RECORD).unwrap_or_default();
    let record = bounded::read_text(&dir.join(RUN_RECORD), LONGEST_RECORD).unwrap_or_default();
    let commit: Value = serde_json::from_str(&commit).unwrap_or_default();
    let mut lists: Vec<WrittenFiles> = serde_json::from_value(commit["lists"].clone()).unwrap_or_default();
    let recorded = WrittenFiles::of_record(&record);
    if recorded.names().next().is_some() {
        lists.push(recorded);
    }
    lists
}

/// Whether `name` is the name of a temporary file of a killed run, such as `.predictions.tsv.123-4.part` (file,
/// process id, count) or `.sort.123-4.part`.
fn is_leftover(name: &str) -> bool {
    target_of_temporary(name)
        .is_some_and(|file| ["sort", live::FILE, COMMIT].contains(&file) || FILES.contains(&file))
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

    /// A folder's files, and the name that a run is refused for, without and with `--force`; empty if it may write. Files in
    /// capital letters were written by a run that was killed while it named its files.
    #[test]
    fn folders_that_a_run_may_write_to() {
        const STATE: &str = r#"{"command": "predict", "process_id": 7}"#;
        for (files, without, with) in [
            (&[][..], "", ""),
            (&["PREDICTIONS.TSV", "WINDOWS.TSV"], "", ""),
            (&["PREDICTIONS.TSV", "windows.tsv"], "windows.tsv", ""),
            (&["predictions.tsv"], "predictions.tsv", ""),
            (&["virus.fna"], "virus.fna", ""),
            (&["regions.fna"], "regions.fna", ""),
            (&["chunked.fa"], "chunked.fa", ""),
            (&["thesis.tex"], "thesis.tex", "thesis.tex"),
            (&["progress.json"], "progress.json", "progress.json"),
            (&["progress.json="], "", ""),
            (&[".predictions.tsv.1-0.part", "progress.journal"], "", ""),
            (&[".thesis.tex.1-0.part"], ".thesis.tex.1-0.part", ".thesis.tex.1-0.part"),
            (&[".commit.json"], ".commit.json", ".commit.json"),
        ] {
            let folder = plimsoll_testing::Folder::new("inspected");
            let mut list = WrittenFiles::default();
            for name in files {
                let path = folder.write(
                    &name.to_lowercase().replace('=', ""),
                    if name.ends_with('=') { STATE } else { "x" },
                );
                if name.to_uppercase() == **name {
                    list.insert(&name.to_lowercase(), plimsoll_data::outputs::WrittenFile::of(&path));
                }
            }
            if list.names().next().is_some() {
                folder.write(COMMIT, serde_json::json!({"lists": [list]}).to_string());
            }
            for (force, wanted) in [(false, without), (true, with)] {
                let found = match inspect(&folder.0, force) {
                    Ok(_) => String::new(),
                    Err(VirusError::ForeignFiles { name, .. }) => name,
                    Err(VirusError::NotWrittenByUs { path }) => {
                        path.file_name().unwrap_or_default().to_string_lossy().into_owned()
                    }
                    Err(other) => panic!("{other}"),
                };
                assert_eq!(found, wanted, "{files:?}, force {force}");
            }
        }
    }
}
