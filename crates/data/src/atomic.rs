//! Files that are written completely or not at all: the data goes to a temporary file beside the target, which is
//! fsynced and renamed to the target, and then the folder is fsynced. Invariant: the target never holds a partial file;
//! an [`AtomicFile`] dropped without `commit` removes its temporary file.

mod together;

pub use together::{commit_together, remove_temporaries};

use std::fs::{self, File, OpenOptions};
use std::io::{self, BufReader, BufWriter, ErrorKind, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use crate::{DataError, DataErrorKind};

const BUFFER: usize = 64 << 10;

/// A file that is written to a temporary file beside its target. Writes are buffered.
#[derive(Debug)]
pub struct AtomicFile {
    target: PathBuf,
    temporary: PathBuf,
    /// The open temporary file; `None` after the commit.
    file: Option<BufWriter<File>>,
}

impl AtomicFile {
    /// Starts writing the file `target`. Its folder must exist. An existing target is replaced at the commit; a target
    /// that is no regular file (a folder, a device, a pipe) is an error.
    ///
    /// The temporary file is named `.NAME.PID-N.part`; it remains if the process is killed, and can be deleted.
    pub fn create(target: impl AsRef<Path>) -> Result<Self, DataError> {
        let target = target.as_ref();
        let refuse = |e| DataError::at(target, DataErrorKind::Write(e));
        if let Ok(facts) = fs::metadata(target)
            && !facts.is_file()
        {
            let what = "not a regular file; give the path of a regular file or of a new file".to_owned();
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
                // Left behind by a killed process with the same process id.
                Err(e) if e.kind() == ErrorKind::AlreadyExists => {}
                Err(e) => return Err(refuse(e)),
            }
        }
    }

    /// Returns the path that the file will have.
    pub fn target(&self) -> &Path {
        &self.target
    }

    /// Flushes the data written so far and returns the path of the temporary file, to inspect it before the commit.
    pub fn written(&mut self) -> Result<&Path, DataError> {
        self.flush().map_err(|e| self.error(e))?;
        Ok(&self.temporary)
    }

    /// Converts an I/O error of [`Write`] to an error that names the target.
    pub fn error(&self, e: io::Error) -> DataError {
        DataError::at(&self.target, DataErrorKind::Write(e))
    }

    /// Overwrites `bytes` at `offset`, which must have been written before; later writes continue at the end.
    pub fn patch(&mut self, offset: u64, bytes: &[u8]) -> Result<(), DataError> {
        let patch = |file: &mut BufWriter<File>| {
            file.seek(SeekFrom::Start(offset))?;
            file.write_all(bytes)?;
            file.seek(SeekFrom::End(0)).map(|_| ())
        };
        patch(self.open()).map_err(|e| self.error(e))
    }

    /// Appends all data written to `spool`, whose temporary file is then removed.
    pub fn append(&mut self, mut spool: AtomicFile) -> Result<(), DataError> {
        spool.flush().map_err(|e| spool.error(e))?;
        let mut copy = || {
            // Copies between the unbuffered files, so that Linux copies inside the kernel.
            self.open().flush()?;
            spool.open().seek(SeekFrom::Start(0))?;
            io::copy(spool.open().get_mut(), self.open().get_mut())
        };
        copy().map(drop).map_err(|e| self.error(e))
    }

    /// Flushes the data written so far and returns a reader of it from the start. Nothing may be written afterwards.
    pub fn read_back(&mut self) -> Result<BufReader<&mut File>, DataError> {
        let rewind = |file: &mut BufWriter<File>| {
            file.flush()?;
            file.seek(SeekFrom::Start(0)).map(drop)
        };
        rewind(self.open()).map_err(|e| self.error(e))?;
        Ok(BufReader::with_capacity(BUFFER, self.open().get_mut()))
    }

    /// Moves the file to its target; it is on disk when this returns.
    pub fn commit(mut self) -> Result<(), DataError> {
        self.try_commit().map_err(|e| self.error(e))
    }

    /// Writes all data to the disk.
    fn sync(&mut self) -> io::Result<()> {
        self.open().flush()?;
        self.open().get_ref().sync_all()
    }

    fn try_commit(&mut self) -> io::Result<()> {
        self.sync()?;
        fs::rename(&self.temporary, &self.target)?;
        self.file = None;
        sync_folder(&self.target)
    }

    /// Returns the open temporary file, which exists until `commit` has consumed `self`.
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
            // Drops the buffered bytes instead of writing them, since the file is removed.
            drop(file.into_parts());
            // An error cannot be reported from `drop`; the name of the file shows that it is temporary.
            let _ = fs::remove_file(&self.temporary);
        }
    }
}

fn temporary_name(name: &str) -> String {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let count = COUNT.fetch_add(1, Ordering::Relaxed);
    format!(".{name}.{}-{count}.part", std::process::id())
}

/// Fsyncs the folder of `target`, without which a rename may not survive a crash. Only Unix can open folders.
pub fn sync_folder(target: &Path) -> io::Result<()> {
    if cfg!(unix) {
        let folder = target.parent().filter(|p| !p.as_os_str().is_empty());
        File::open(folder.unwrap_or(Path::new(".")))?.sync_all()?;
    }
    Ok(())
}
