//! The output folder: new, complete, of another run, or somebody else's. Invariant: a result of another run
//! is never touched without `--force`, and a complete one is never computed twice.

use super::output::{FILES, RUN_RECORD};
use crate::RunError;
use serde_json::Value;
use std::fs;
use std::path::Path;

/// What is in the folder.
pub(crate) enum Found {
    /// Nothing that matters: it can be written.
    Nothing,
    /// The record of a run.
    Record(Value),
}

/// Looks at the folder; makes it where it is missing. With `force` what a prediction left there does not
/// count; it stays until the new results replace it.
pub(crate) fn look(dir: &Path, force: bool) -> Result<Found, RunError> {
    fs::create_dir_all(dir).map_err(RunError::io(dir))?;
    let record = dir.join(RUN_RECORD);
    if record.exists() && !force {
        let text = fs::read_to_string(&record).map_err(RunError::io(&record))?;
        let value = serde_json::from_str(&text).map_err(|_| {
            RunError::Refused(format!("{} is not a run record; use --force or another -o", record.display()))
        })?;
        return Ok(Found::Record(value));
    }
    for entry in fs::read_dir(dir).map_err(RunError::io(dir))? {
        let path = entry.map_err(RunError::io(dir))?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if is_leftover(&name) {
            remove(&path)?;
        } else if !FILES.contains(&name.as_str()) {
            return Err(RunError::Refused(format!(
                "{} holds files that are not of a prediction (`{name}`); choose another folder with -o",
                dir.display()
            )));
        }
    }
    Ok(Found::Nothing)
}

/// Which part of two runs differs, in words.
pub(crate) fn difference(old: &Value, new: &Value) -> Option<String> {
    for (part, name) in [("inputs", "input files"), ("models", "weights"), ("parameters", "parameters")] {
        let (a, b) = (&old["identity"][part], &new["identity"][part]);
        if a == b {
            continue;
        }
        let keys = b.as_object().into_iter().flat_map(|o| o.keys());
        let first = keys.into_iter().find(|k| a[k.as_str()] != b[k.as_str()]);
        return Some(match first {
            Some(key) => format!("{name}: `{key}` was {}, is {}", a[key.as_str()], b[key.as_str()]),
            None => name.to_owned(),
        });
    }
    None
}

/// `.predictions.tsv.123-4.part`: what a killed run left.
fn is_leftover(name: &str) -> bool {
    name.starts_with('.') && name.ends_with(".part")
}

fn remove(path: &Path) -> Result<(), RunError> {
    match fs::remove_file(path) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => Err(RunError::io(path)(e)),
        _ => Ok(()),
    }
}
