//! Reads the text files of the workspace. Invariant: the list is sorted and its paths are relative with `/`, so
//! every report is identical on every machine. Build outputs, results and fixtures are not read.

use std::fs;
use std::path::Path;

use crate::source::File;

/// Names that are not read: version control (in a worktree of git, `.git` is a file), test data, caches, and data of other projects.
const SKIPPED: &[&str] = &[".git", "fixtures", "shared", "__pycache__", "node_modules"];

/// Reads every file under `root` that is valid UTF-8.
///
/// # Errors
/// A folder or file cannot be read; the error names it.
pub fn read(root: &Path) -> Result<Vec<File>, String> {
    let mut files = Vec::new();
    walk(root, "", &mut files)?;
    files.sort_by(|a, b| a.path.cmp(&b.path));
    Ok(files)
}

/// Adds the files of `folder`, recursively, with `prefix` before their relative paths.
fn walk(folder: &Path, prefix: &str, files: &mut Vec<File>) -> Result<(), String> {
    let entries = fs::read_dir(folder).map_err(|e| format!("{}: {e}", folder.display()))?;
    for entry in entries {
        let entry = entry.map_err(|e| format!("{}: {e}", folder.display()))?;
        let name = entry.file_name().to_string_lossy().into_owned();
        let path = format!("{prefix}{name}");
        let kind = entry.file_type().map_err(|e| format!("{path}: {e}"))?;
        if kind.is_dir() && !skipped(&name) {
            walk(&entry.path(), &format!("{path}/"), files)?;
        } else if kind.is_file() && !skipped(&name) {
            let bytes = fs::read(entry.path()).map_err(|e| format!("{path}: {e}"))?;
            files.extend(String::from_utf8(bytes).ok().map(|text| File::new(path, text)));
        }
    }
    Ok(())
}

/// Whether an entry is a build output, a result of `predict`, or in [`SKIPPED`].
fn skipped(folder: &str) -> bool {
    let build = folder == "target" || folder.starts_with("target-");
    build || folder.ends_with("_plimsoll") || SKIPPED.contains(&folder)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn builds_results_and_fixtures_are_skipped() {
        for folder in ["target", "target-ci", "reads_plimsoll", ".git", "fixtures"] {
            assert!(skipped(folder), "{folder}");
        }
        for folder in ["crates", "src", ".ci", "targets", "bench"] {
            assert!(!skipped(folder), "{folder}");
        }
    }
}
