//! Checkpoints of a training run, stored as folders `checkpoints/step-00000020`. Invariant: a checkpoint folder gets
//! its final name only after all of its files are on disk, and loses that name before its files are deleted; whenever
//! the process is killed, every folder with a checkpoint name is complete. The link `best` names one of them or is absent.

mod read;
mod write;

pub use read::VerifiedCheckpoint;

use super::opened_model::{StatePart, Tensors};
use super::state::RunState;
use crate::TrainError;
use plimsoll_data::atomic::sync_folder;
use plimsoll_data::{DataError, DataErrorKind};
use plimsoll_graph::Bytes;
use plimsoll_runtime::RuntimeError;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::io::ErrorKind;
#[cfg(unix)]
use std::os::unix::fs::symlink as link_to_folder;
#[cfg(windows)]
use std::os::windows::fs::symlink_dir as link_to_folder;
use std::path::{Path, PathBuf};

/// Name of the manifest inside a checkpoint folder; it is written last.
const RECORD: &str = "trainer.json";
/// Name of the folder of checkpoints inside the folder of a run.
pub(crate) const CHECKPOINTS: &str = "checkpoints";
/// Name of the link to the best checkpoint inside the folder of a run.
pub(crate) const BEST: &str = "best";
/// Prefix of a checkpoint folder's name, before the step number.
const PREFIX: &str = "step-";

/// Contents of a checkpoint apart from the tensors.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CheckpointRecord {
    /// Version of the program that wrote the checkpoint.
    pub plimsoll: String,
    /// Position of the run: step, data position, loss scale and counters.
    pub state: RunState,
    /// The complete configuration of the run, with every key.
    pub config: Value,
    /// Values chosen for keys that the configuration leaves to `auto`, by key.
    pub choices: BTreeMap<String, Value>,
}

/// Contents of the file [`RECORD`]: the record, the digests of all other files, and a hash over both.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct SealedRecord {
    record: CheckpointRecord,
    /// Size and hash of every other file of the checkpoint, by file name.
    files: BTreeMap<String, FileDigest>,
    /// SHA-256 of `(record, files)`, serialised as JSON without whitespace.
    sha256: String,
}

/// Size and SHA-256 of a file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct FileDigest {
    bytes: u64,
    sha256: String,
}

/// The checkpoint folder of a run: lists, saves, rotates and removes checkpoints.
#[derive(Debug)]
pub struct Checkpoints {
    folder: PathBuf,
}

/// A checkpoint found by its folder name; its contents have not been verified.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Named {
    /// Optimizer step after which the checkpoint was saved.
    pub step: u64,
    /// Path of the checkpoint folder.
    pub path: PathBuf,
}

impl Checkpoints {
    /// Opens the checkpoints of the run in `folder`, which need not exist before the first is saved. Removes half-written and
    /// half-deleted checkpoints of a killed process, so no other process may be writing to the same run.
    pub fn open(folder: &Path) -> Result<Self, TrainError> {
        let folder = folder.join(CHECKPOINTS);
        let this = Self { folder };
        for (name, path) in this.entries()? {
            if name.starts_with(&format!(".{PREFIX}")) {
                fs::remove_dir_all(&path).map_err(RuntimeError::io(&path))?;
            }
        }
        Ok(this)
    }

    /// Lists the checkpoints of the run in `folder`, oldest first, and changes nothing there: another process may be
    /// writing to that run.
    pub fn list_in(folder: &Path) -> Result<Vec<Named>, TrainError> {
        Self { folder: folder.join(CHECKPOINTS) }.list()
    }

    /// The folder of the run.
    pub fn run(&self) -> &Path {
        self.folder.parent().unwrap_or(Path::new("."))
    }

    /// Removes all checkpoints, and the link `best`.
    pub fn clear(&self) -> Result<(), TrainError> {
        self.link_best(None)?;
        self.list()?.iter().try_for_each(|named| self.remove(&named.path))
    }

    /// Lists all checkpoints, oldest first.
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

    /// Bytes that a checkpoint of a model takes, without its record.
    pub fn bytes(model: &dyn Tensors) -> Result<Bytes, TrainError> {
        let tensors = StatePart::ALL.into_iter().flat_map(|part| model.tensors(part));
        let tensors: u64 = tensors.map(|tensor| tensor.elements() * tensor.dtype.size()).sum();
        let others: u64 = model.extra_files()?.iter().map(|(_, bytes)| bytes.len() as u64).sum();
        Ok(Bytes(tensors + others))
    }

    /// Writes a checkpoint and returns its path. An existing checkpoint of the same step is replaced; that happens only
    /// when it was found to be damaged.
    pub fn save(&self, record: &CheckpointRecord, model: &mut dyn Tensors) -> Result<PathBuf, TrainError> {
        let name = name(record.state.step);
        let path = self.folder.join(&name);
        let temporary = self.folder.join(format!(".{name}.part"));
        if !self.folder.exists() {
            fs::create_dir(&self.folder).map_err(RuntimeError::io(&self.folder))?;
            sync_folder(&self.folder).map_err(RuntimeError::io(&self.folder))?;
        }
        fs::create_dir(&temporary).map_err(RuntimeError::io(&temporary))?;
        let written = write::fill(&temporary, record, model).and_then(|()| {
            if path.exists() {
                self.remove(&path)?;
            }
            fs::rename(&temporary, &path).map_err(RuntimeError::io(&path))?;
            Ok(sync_folder(&path).map_err(RuntimeError::io(&self.folder))?)
        });
        if written.is_err() {
            // Best effort: the first error is the one to report.
            let _ = fs::remove_dir_all(&temporary);
        }
        written.map(|()| path)
    }

    /// Makes the link `best` in the folder of the run name the checkpoint of step `best`. Removes the link if `best` is
    /// `None` or has no checkpoint. The link is replaced by a rename: at any time it names a complete checkpoint, or none.
    pub fn link_best(&self, best: Option<u64>) -> Result<(), TrainError> {
        let run = self.run();
        let link = run.join(BEST);
        let temporary = run.join(format!(".{BEST}.part"));
        let wanted = best.map(name).filter(|name| self.folder.join(name).is_dir());
        let wanted = wanted.map(|name| Path::new(CHECKPOINTS).join(name));
        let linked = match fs::read_link(&link) {
            Ok(linked) if linked.starts_with(CHECKPOINTS) => Some(linked),
            // A rename would replace a file or a link of somebody else.
            Ok(_) => return Err(DataError::at(&link, DataErrorKind::Exists).into()),
            Err(e) if e.kind() == ErrorKind::InvalidInput => {
                return Err(DataError::at(&link, DataErrorKind::Exists).into());
            }
            Err(e) if e.kind() == ErrorKind::NotFound => None,
            Err(e) => return Err(RuntimeError::io(&link)(e).into()),
        };
        if linked == wanted {
            return Ok(());
        }
        match wanted {
            None => fs::remove_file(&link).map_err(RuntimeError::io(&link))?,
            Some(wanted) => {
                // Left by a process that was killed.
                if let Err(e) = fs::remove_file(&temporary)
                    && e.kind() != ErrorKind::NotFound
                {
                    return Err(RuntimeError::io(&temporary)(e).into());
                }
                link_to_folder(&wanted, &temporary).map_err(RuntimeError::io(&temporary))?;
                fs::rename(&temporary, &link).map_err(RuntimeError::io(&link))?;
            }
        }
        Ok(sync_folder(&link).map_err(RuntimeError::io(&link))?)
    }

    /// Removes all checkpoints except the newest `last` and the checkpoint of step `best`.
    pub fn rotate(&self, last: u64, best: Option<u64>) -> Result<(), TrainError> {
        let mut old = self.list()?;
        old.truncate(old.len().saturating_sub(last as usize));
        old.iter().filter(|named| Some(named.step) != best).try_for_each(|named| self.remove(&named.path))
    }

    /// Removes a checkpoint: first renames the folder in one atomic step, then deletes its files. Deleting in place
    /// could leave a folder that has a checkpoint's name but only some of its files.
    fn remove(&self, path: &Path) -> Result<(), TrainError> {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let condemned = self.folder.join(format!(".{name}.gone"));
        fs::rename(path, &condemned).map_err(RuntimeError::io(path))?;
        sync_folder(&condemned).map_err(RuntimeError::io(&self.folder))?;
        Ok(fs::remove_dir_all(&condemned).map_err(RuntimeError::io(&condemned))?)
    }

    fn entries(&self) -> Result<Vec<(String, PathBuf)>, TrainError> {
        let entries = match fs::read_dir(&self.folder) {
            Err(e) if e.kind() == ErrorKind::NotFound => return Ok(vec![]),
            entries => entries.map_err(RuntimeError::io(&self.folder))?,
        };
        let mut found = vec![];
        for entry in entries {
            let entry = entry.map_err(RuntimeError::io(&self.folder))?;
            found.push((entry.file_name().to_string_lossy().into_owned(), entry.path()));
        }
        Ok(found)
    }
}

fn name(step: u64) -> String {
    format!("{PREFIX}{step:08}")
}
