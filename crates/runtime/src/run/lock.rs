//! Exclusive locks on an output folder and on an output file. Invariant: two runs never write into one folder, or to one
//! file, at once, and a run that failed before producing output leaves behind no folder that it created.

use crate::{OutputError, RequestError, RuntimeError};
use plimsoll_data::journal::Blocks;
use plimsoll_data::{DataError, DataErrorKind};
use std::fs::{self, File, OpenOptions, TryLockError};
use std::os::unix::fs::MetadataExt;
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
    let folder = match File::open(dir) {
        Ok(folder) => match folder.try_lock() {
            Ok(()) => Some(folder),
            Err(TryLockError::WouldBlock) => return Err(RequestError::Locked { folder: dir.to_owned() }.into()),
            Err(TryLockError::Error(_)) => None,
        },
        Err(_) => None,
    };
    Ok(Lock { dir: dir.to_owned(), folder, is_new, journals })
}

/// An exclusive advisory lock on an output file, held until the value is dropped or the process ends: the lock of the
/// file `.NAME.lock` beside it, which is removed at the end.
#[derive(Debug)]
pub struct FileLock {
    path: PathBuf,
    /// The locked file; `None` where files cannot be locked, as on some network file systems.
    file: Option<File>,
}

impl FileLock {
    /// Whether the lock is in force, so that a second run on the file would be refused.
    pub fn is_held(&self) -> bool {
        self.file.is_some()
    }
}

impl Drop for FileLock {
    fn drop(&mut self) {
        // Removed while the lock is held: a run that waits with the removed file open sees that it is another file. A
        // file that cannot be removed does no harm.
        let _ = fs::remove_file(&self.path);
    }
}

/// Locks the output file `target`.
///
/// # Errors
/// Another run holds the lock, or the folder of the file cannot be written. Where files cannot be locked, the call succeeds
/// and [`FileLock::is_held`] is false.
pub fn take_file(target: &Path) -> Result<FileLock, RuntimeError> {
    let name = target.file_name().unwrap_or_default().to_string_lossy();
    let path = target.with_file_name(format!(".{name}.lock"));
    loop {
        let file = OpenOptions::new().write(true).create(true).truncate(false).open(&path);
        let file = file.map_err(|e| unwritable(target, e))?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                return Err(RequestError::FileLocked { path: target.to_owned() }.into());
            }
            Err(TryLockError::Error(_)) => return Ok(FileLock { path, file: None }),
        }
        // A run that ended after this one had opened the file has removed it, and a third run may have made another.
        let held = file.metadata().map_err(|e| unwritable(target, e))?;
        let is_there =
            fs::metadata(&path).is_ok_and(|there| (there.dev(), there.ino()) == (held.dev(), held.ino()));
        if is_there {
            return Ok(FileLock { path, file: Some(file) });
        }
    }
}

fn unwritable(target: &Path, error: std::io::Error) -> RuntimeError {
    DataError::at(target, DataErrorKind::Write(error)).into()
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_has_one_writer() {
        let folder = std::env::temp_dir().join(format!("plimsoll-lock-{}", std::process::id()));
        fs::create_dir_all(&folder).expect("created");
        let target = folder.join("e.npy");
        let lock = take_file(&target).expect("free");
        assert!(lock.is_held());
        let error = take_file(&target).expect_err("taken").to_string();
        assert!(error.contains("another run is writing to") && error.contains("e.npy"), "{error}");
        take_file(&folder.join("f.npy")).expect("another file");
        drop(lock);
        drop(take_file(&target).expect("free again"));
        assert_eq!(fs::read_dir(&folder).expect("listed").count(), 0);
        let error = take_file(&folder.join("absent/e.npy")).expect_err("no folder").to_string();
        assert!(error.contains("create the folder first"), "{error}");
        fs::remove_dir_all(folder).expect("removed");
    }
}
