//! Checkpoints of a run: folders `checkpoints/step-00000020`. Invariant: a folder appears under its name whole, on disk,
//! or not at all, and one that is removed loses its name first; so whatever a kill leaves, each name is a whole one.

mod read;
mod write;

pub use read::Checkpoint;

use super::state::State;
use super::trainable::Trainable;
use crate::TrainError;
use data::atomic::sync_folder;
use runtime::RuntimeError;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// The file that says what a checkpoint is; it is written last.
const RECORD: &str = "trainer.json";
/// Before the step's number in a name.
const PREFIX: &str = "step-";

/// What a checkpoint holds beside tensors.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Record {
    /// Who wrote it.
    pub plimsoll: String,
    /// Where the run is.
    pub state: State,
    /// The configuration, all keys.
    pub config: Value,
    /// What was decided where it says auto, by key.
    pub choices: BTreeMap<String, Value>,
}

/// The file [`RECORD`].
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Sealed {
    record: Record,
    /// The other files.
    files: BTreeMap<String, Digest>,
    /// Of both, as JSON without blanks.
    sha256: String,
}

/// A file's size and hash.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Digest {
    bytes: u64,
    sha256: String,
}

/// The checkpoints of a run.
#[derive(Debug)]
pub struct Checkpoints {
    folder: PathBuf,
}

/// A checkpoint by its name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Named {
    /// Its step.
    pub step: u64,
    /// Its folder.
    pub path: PathBuf,
}

impl Checkpoints {
    /// Of the run in `folder`, which nobody else writes to. Removes what a kill left half written.
    pub fn open(folder: &Path) -> Result<Self, TrainError> {
        let folder = folder.join("checkpoints");
        fs::create_dir_all(&folder).map_err(RuntimeError::io(&folder))?;
        let this = Self { folder };
        for (name, path) in this.entries()? {
            if name.starts_with(&format!(".{PREFIX}")) {
                fs::remove_dir_all(&path).map_err(RuntimeError::io(&path))?;
            }
        }
        Ok(this)
    }

    /// All that are there, the oldest first.
    pub fn list(&self) -> Result<Vec<Named>, TrainError> {
        let mut found: Vec<Named> = vec![];
        for (name, path) in self.entries()? {
            if let Some(step) = name.strip_prefix(PREFIX).and_then(|number| number.parse().ok()) {
                found.push(Named { step, path });
            }
        }
        found.sort_by_key(|named| named.step);
        Ok(found)
    }

    /// Writes one. Another of the same step, which was damaged, goes.
    pub fn save(&self, record: &Record, model: &mut dyn Trainable) -> Result<PathBuf, TrainError> {
        let name = name(record.state.step);
        let (path, temporary) = (self.folder.join(&name), self.folder.join(format!(".{name}.part")));
        fs::create_dir(&temporary).map_err(RuntimeError::io(&temporary))?;
        let written = write::fill(&temporary, record, model).and_then(|()| {
            if path.exists() {
                self.remove(&path)?;
            }
            fs::rename(&temporary, &path).map_err(RuntimeError::io(&path))?;
            Ok(sync_folder(&path).map_err(RuntimeError::io(&self.folder))?)
        });
        if written.is_err() {
            // Best effort: the error that matters is the first one.
            let _ = fs::remove_dir_all(&temporary);
        }
        written.map(|()| path)
    }

    /// Removes all but the newest `last` and the one of step `best`.
    pub fn rotate(&self, last: u64, best: Option<u64>) -> Result<(), TrainError> {
        let mut old = self.list()?;
        old.truncate(old.len().saturating_sub(last as usize));
        old.iter().filter(|named| Some(named.step) != best).try_for_each(|named| self.remove(&named.path))
    }

    /// It loses its name in one moment, and its files then.
    fn remove(&self, path: &Path) -> Result<(), TrainError> {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let condemned = self.folder.join(format!(".{name}.gone"));
        fs::rename(path, &condemned).map_err(RuntimeError::io(path))?;
        sync_folder(&condemned).map_err(RuntimeError::io(&self.folder))?;
        Ok(fs::remove_dir_all(&condemned).map_err(RuntimeError::io(&condemned))?)
    }

    fn entries(&self) -> Result<Vec<(String, PathBuf)>, TrainError> {
        let entries = fs::read_dir(&self.folder).map_err(RuntimeError::io(&self.folder))?;
        let name = |entry: fs::DirEntry| (entry.file_name().to_string_lossy().into_owned(), entry.path());
        Ok(entries
            .map(|entry| entry.map(name))
            .collect::<std::io::Result<Vec<_>>>()
            .map_err(RuntimeError::io(&self.folder))?)
    }
}

fn name(step: u64) -> String {
    format!("{PREFIX}{step:08}")
}
