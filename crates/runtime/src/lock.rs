//! Exclusive lock on an output folder. Invariant: two runs never write into one folder at once, and a run that failed
//! before producing output leaves behind no folder that it created.

use crate::{OutputError, RequestError, RuntimeError};
use plimsoll_data::journal::Blocks;
use std::fs::{self, File, TryLockError};
use std::path::{Path, PathBuf};

/// An exclusive advisory lock on an output folder, held until the value is dropped. The operating system releases the
/// lock when the process ends, including after a crash or a kill.
pub struct Lock {
    dir: PathBuf,
    /// The locked folder's handle; `None` where folders cannot be locked, as on some network file systems.
    folder: Option<File>,
    /// Whether this run created the folder.
    is_new: bool,
    /// File names of the run's journals, relative to `dir`.
    journals: &'static [&'static str],
}

impl Lock {
    /// Whether the lock is in force, so that a second run on the folder would be refused.
    pub fn is_held(&self) -> bool {
        self.folder.is_some()
    }
}

/// Removes journals without any block, and the folder if this run created it and it is empty. Failures to remove are
/// ignored, so that they do not hide the run's own error. Without a lock nothing is removed: the files may belong to
/// another run.
impl Drop for Lock {
    fn drop(&mut self) {
        if !self.is_held() {
            return;
        }
        for path in self.journals.iter().map(|name| self.dir.join(name)) {
            if let Ok(Some(mut blocks)) = Blocks::open(&path)
                && matches!(blocks.next_into(&mut vec![]), Ok(false))
            {
                let _ = fs::remove_file(&path);
            }
        }
        if self.is_new {
            let _ = fs::remove_dir(&self.dir);
        }
    }
}

/// Creates the folder if it is missing and locks it for a run with the given journal file names.
///
/// # Errors
/// The folder cannot be created, or another run holds its lock. Where folders cannot be locked, the call succeeds and
/// [`Lock::is_held`] is false.
pub fn take(dir: &Path, journals: &'static [&'static str]) -> Result<Lock, RuntimeError> {
    let is_new = !dir.exists();
    fs::create_dir_all(dir).map_err(|source| {
        let path = dir.to_owned();
        RuntimeError::Output(OutputError::Folder { path, source })
    })?;
    let lock = |folder| Ok(Lock { dir: dir.to_owned(), folder, is_new, journals });
    let Ok(folder) = File::open(dir) else { return lock(None) };
    match folder.try_lock() {
        Ok(()) => lock(Some(folder)),
        Err(TryLockError::WouldBlock) => Err(RequestError::Locked { folder: dir.to_owned() }.into()),
        Err(TryLockError::Error(_)) => lock(None),
    }
}

/// Whether a run holds the lock of a folder; `None` where that cannot be known. A run that takes the lock at the moment of
/// the call would be refused, so call this only for a run that gives no other sign of life.
pub fn is_taken(dir: &Path) -> Option<bool> {
    let folder = File::open(dir).ok()?;
    match folder.try_lock_shared() {
        Ok(()) => Some(false),
        Err(TryLockError::WouldBlock) => Some(true),
        Err(TryLockError::Error(_)) => None,
    }
}

/// Removes a file; a missing file is not an error.
pub fn remove(path: &Path) -> Result<(), RuntimeError> {
    match fs::remove_file(path) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => Err(RuntimeError::io(path)(e)),
        _ => Ok(()),
    }
}
