//! Files that appear whole or not at all: written to a temporary beside the target, then fsynced,
//! renamed over it, and the folder fsynced. Invariant: at no moment does the target's name hold half
//! a file; an [`AtomicFile`] that is dropped without `commit` leaves nothing behind.

use std::fs::{self, File, OpenOptions};
use std::io::{self, BufWriter, ErrorKind, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use crate::{DataError, DataErrorKind};

const BUFFER: usize = 64 << 10;

/// A file being written beside its target. Writes are buffered.
#[derive(Debug)]
pub struct AtomicFile {
    target: PathBuf,
    temporary: PathBuf,
    /// There until the commit.
    file: Option<BufWriter<File>>,
}

impl AtomicFile {
    /// Starts a file that will be `target`. Its folder must exist. An existing target is replaced at
    /// the commit; one that is no regular file (a folder, a device, a pipe) is refused.
    ///
    /// The temporary is `.NAME.PID-N.part`; after a kill it stays, and can be deleted.
    pub fn create(target: impl AsRef<Path>) -> Result<Self, DataError> {
        let target = target.as_ref();
        let refuse = |e| DataError::at(target, DataErrorKind::Write(e));
        if let Ok(facts) = fs::metadata(target)
            && !facts.is_file()
        {
            let what = "not a regular file; name one to be written, or a new one".to_owned();
            return Err(DataError::at(target, DataErrorKind::Malformed(what)));
        }
        let Some(name) = target.file_name() else {
            return Err(refuse(ErrorKind::InvalidInput.into()));
        };
        loop {
            let temporary = target.with_file_name(temporary_name(&name.to_string_lossy()));
            match OpenOptions::new().write(true).read(true).create_new(true).open(&temporary) {
                Ok(file) => {
                    let file = Some(BufWriter::with_capacity(BUFFER, file));
                    return Ok(AtomicFile { target: target.to_owned(), temporary, file });
                }
                // Left by a killed process that had the same number.
                Err(e) if e.kind() == ErrorKind::AlreadyExists => {}
                Err(e) => return Err(refuse(e)),
            }
        }
    }

    /// The name it will have.
    pub fn target(&self) -> &Path {
        &self.target
    }

    /// All that was written so far, in the file that is not there yet under its name: to look at it before.
    pub fn written(&mut self) -> Result<&Path, DataError> {
        self.flush().map_err(|e| self.error(e))?;
        Ok(&self.temporary)
    }

    /// What failed, with the target's name: for the errors of [`Write`].
    pub fn error(&self, e: io::Error) -> DataError {
        DataError::at(&self.target, DataErrorKind::Write(e))
    }

    /// Overwrites `bytes` at `offset`, which was written before; writing goes on at the end.
    pub fn patch(&mut self, offset: u64, bytes: &[u8]) -> Result<(), DataError> {
        let patch = |file: &mut BufWriter<File>| {
            file.seek(SeekFrom::Start(offset))?;
            file.write_all(bytes)?;
            file.seek(SeekFrom::End(0)).map(|_| ())
        };
        patch(self.open()).map_err(|e| self.error(e))
    }

    /// Appends all that was written to `spool`, whose own file is then removed.
    pub fn append(&mut self, mut spool: AtomicFile) -> Result<(), DataError> {
        spool.flush().map_err(|e| spool.error(e))?;
        let mut copy = || {
            // Between the files themselves, so that Linux copies inside the kernel.
            self.open().flush()?;
            spool.open().seek(SeekFrom::Start(0))?;
            io::copy(spool.open().get_mut(), self.open().get_mut())
        };
        copy().map(drop).map_err(|e| self.error(e))
    }

    /// The file appears under its name: on disk before this returns.
    pub fn commit(mut self) -> Result<(), DataError> {
        self.try_commit().map_err(|e| self.error(e))
    }

    fn try_commit(&mut self) -> io::Result<()> {
        self.open().flush()?;
        self.open().get_ref().sync_all()?;
        fs::rename(&self.temporary, &self.target)?;
        self.file = None;
        sync_folder(&self.target)
    }

    /// The file is there until `commit` has consumed `self`.
    fn open(&mut self) -> &mut BufWriter<File> {
        self.file.as_mut().expect("open until committed")
    }
}

impl Write for AtomicFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.open().write(bytes)
    }

    fn write_all(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.open().write_all(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.open().flush()
    }
}

impl Drop for AtomicFile {
    fn drop(&mut self) {
        if let Some(file) = self.file.take() {
            // What is still in the buffer is not wanted.
            drop(file.into_parts());
            // Nobody is left to tell if this fails; the name says what the file is.
            let _ = fs::remove_file(&self.temporary);
        }
    }
}

fn temporary_name(name: &str) -> String {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let count = COUNT.fetch_add(1, Ordering::Relaxed);
    format!(".{name}.{}-{count}.part", std::process::id())
}

/// Puts the folder of `target` on disk: a rename is there when its folder is. Only Unix opens folders.
pub fn sync_folder(target: &Path) -> io::Result<()> {
    if cfg!(unix) {
        let folder = target.parent().filter(|p| !p.as_os_str().is_empty());
        File::open(folder.unwrap_or(Path::new(".")))?.sync_all()?;
    }
    Ok(())
}
