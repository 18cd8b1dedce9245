//! The right to write into an output folder. Invariant: two runs never write into one folder, and a run that failed at its start
//! leaves no folder that it made.

use crate::{OutputError, RequestError, RuntimeError};
use data::journal::Blocks;
use std::fs::{self, File, TryLockError};
use std::path::{Path, PathBuf};

/// The right to write into a folder, as long as it lives; it goes with the process, however that ends.
pub struct Lock {
    dir: PathBuf,
    /// `None` where folders cannot be locked: on some network file systems.
    folder: Option<File>,
    /// Whether the folder was not there before.
    is_new: bool,
    journals: &'static [&'static str],
}

impl Lock {
    /// Whether another run would be refused.
    pub fn is_held(&self) -> bool {
        self.folder.is_some()
    }
}

/// However the run ends, it leaves no journal without a window, and no empty folder that it made itself. What cannot be
/// removed stays: the run's own error is the one to tell. Without a lock the files may be another run's, and stay.
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

/// Makes the folder where it is missing, and takes it for this run, whose journals have these names.
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

/// Removes a file, if it is there.
pub fn remove(path: &Path) -> Result<(), RuntimeError> {
    match fs::remove_file(path) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => Err(RuntimeError::io(path)(e)),
        _ => Ok(()),
    }
}
