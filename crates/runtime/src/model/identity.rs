//! Identity of a run: everything that its results depend on, by which an interrupted run finds its finished results.
//! Invariant: results of a run are never taken for those of a run with another identity, nor those of an input that
//! changed while it was read.

use crate::RuntimeError;
use plimsoll_data::weights::{Weights, WeightsError};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

/// Describes the first difference between two identities, which are objects with the parts `inputs`, `models`,
/// `parameters` and `arithmetic`; `None` if they are equal.
pub fn difference(old: &Value, new: &Value) -> Option<String> {
    let parts = [
        ("inputs", "input files"),
        ("models", "weights"),
        ("parameters", "parameters"),
        ("arithmetic", "computed otherwise"),
    ];
    for (part, name) in parts {
        let a = &old[part];
        let b = &new[part];
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

/// Sizes and modification times of input files, to notice that one changes during a run.
#[derive(Clone, Debug, Default)]
pub struct InputStamps(Vec<(PathBuf, Option<(u64, SystemTime)>)>);

impl InputStamps {
    /// Records the present size and modification time of the inputs; nothing for files without them, such as a
    /// missing file.
    pub fn over(inputs: &[PathBuf]) -> Self {
        Self(inputs.iter().map(|path| (path.clone(), stamp(path).ok().flatten())).collect())
    }

    /// The first input that has changed since. A deleted file has not: its contents were read before.
    pub fn changed(&self) -> Result<Option<&Path>, RuntimeError> {
        for (path, before) in &self.0 {
            let now = stamp(path).map_err(RuntimeError::io(path))?;
            if now.is_some() && now != *before {
                return Ok(Some(path));
            }
        }
        Ok(None)
    }
}

/// Returns size and modification time of a file; `None` if it does not exist.
fn stamp(path: &PathBuf) -> std::io::Result<Option<(u64, SystemTime)>> {
    match fs::metadata(path) {
        Ok(facts) => Ok(Some((facts.len(), facts.modified()?))),
        Err(e) if e.kind() == ErrorKind::NotFound => Ok(None),
        Err(e) => Err(e),
    }
}

/// SHA-256 of every file of a model, by file name: `described_by` and the weight files.
///
/// # Errors
/// A file that cannot be read.
pub fn digests(
    weights: &Weights,
    described_by: &[(&'static str, String)],
) -> Result<BTreeMap<String, String>, WeightsError> {
    let described = described_by.iter().map(|(file, sha)| ((*file).to_owned(), sha.clone()));
    Ok(weights.sha256()?.into_iter().chain(described).collect())
}
