//! Files that are written completely or not at all: the data goes to a temporary file beside the target, which is
//! fsynced and renamed to the target, and then the folder is fsynced. Invariants: the target never holds a partial file;
//! an [`AtomicFile`] dropped without `commit` removes its temporary file; a file that appears at the target while the
//! temporary file is written is not replaced; a symbolic link at the target stays, and the file that it names is written.

mod together;

pub use together::commit_together;

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, BufReader, BufWriter, ErrorKind, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::destination::ResolvedPath;
use crate::outputs::WrittenFile;
use crate::{DataError, DataErrorKind};

const BUFFER: usize = 64 << 10;

/// A file that is written to a temporary file beside its target. Writes are buffered.
#[derive(Debug)]
pub struct AtomicFile {
    /// The path that the caller gave.
    target: PathBuf,
    /// The place of the target after all symbolic links.
    destination: ResolvedPath,
    temporary: PathBuf,
    /// The open temporary file; `None` after the commit.
    file: Option<BufWriter<File>>,
    /// Whether a file at the target is replaced by the commit: there was one when this file was created.
    replaces: bool,
}

impl AtomicFile {
    /// Starts writing the file `target`. Its folder must exist. A file that exists now is replaced at the commit, so the
    /// caller must have checked that it may be replaced; a file that appears later makes the commit fail. A symbolic link
    /// is followed. The bytes for a character device or a pipe are copied to it at the commit.
    ///
    /// The temporary file is named `.NAME.PID-N.part`. It is locked while it is written, and remains if the process is
    /// killed; the next process that writes the same target removes it.
    ///
    /// # Errors
    /// A folder that does not exist or cannot be written; a target that is a folder, a block device or a socket.
    pub fn create(target: impl AsRef<Path>) -> Result<Self, DataError> {
        let target = target.as_ref();
        if target.file_name().is_none() {
            return Err(DataError::writing(target)(ErrorKind::InvalidInput.into()));
        }
        let destination = ResolvedPath::of(target).map_err(DataError::writing(target))?;
        let neighbour = match &destination {
            ResolvedPath::File(place) => {
                remove_leftovers(place);
                place.clone()
            }
            ResolvedPath::Stream(_) => std::env::temp_dir().join("plimsoll"),
            ResolvedPath::Unsuitable => {
                let what = "not a regular file; give the path of a regular file or of a new file".to_owned();
                return Err(DataError::at(target, DataErrorKind::Malformed(what)));
            }
        };
        let replaces = match &destination {
            ResolvedPath::File(place) => place.exists(),
            ResolvedPath::Stream(_) | ResolvedPath::Unsuitable => true,
        };
        let (temporary, file) = create_temporary(&neighbour).map_err(DataError::writing(target))?;
        let file = Some(BufWriter::with_capacity(BUFFER, file));
        Ok(AtomicFile { target: target.to_owned(), destination, temporary, file, replaces })
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

    /// Writes the data so far to disk and returns its size and time, which the file keeps at the commit; `None` for a
    /// device or a pipe.
    pub fn synced(&mut self) -> Result<Option<WrittenFile>, DataError> {
        let facts = self.sync().and_then(|()| self.open().get_ref().metadata()).map_err(|e| self.error(e))?;
        Ok(WrittenFile::of_metadata(&facts).filter(|_| matches!(self.destination, ResolvedPath::File(_))))
    }

    /// Converts an I/O error of [`Write`] to an error that names the target.
    pub fn error(&self, e: io::Error) -> DataError {
        DataError::at(&self.target, DataErrorKind::Write(e))
    }

    /// Overwrites `bytes` at `offset`, which must have been written before; later writes continue at the end.
    pub fn patch(&mut self, offset: u64, bytes: &[u8]) -> Result<(), DataError> {
        overwrite(self.open(), offset, bytes).map_err(|e| self.error(e))
    }

    /// Appends all data written to `spool`, whose temporary file is then removed.
    pub fn append(&mut self, mut spool: AtomicFile) -> Result<(), DataError> {
        spool.flush().map_err(|e| spool.error(e))?;
        let copied = self.copy_from(&mut spool);
        // The spool was created first: a file that appeared after it is not replaced either.
        if self.target == spool.target {
            self.replaces &= spool.replaces;
        }
        copied.map_err(|e| self.error(e))
    }

    /// Flushes the data written so far and returns a reader of it from the start. Nothing may be written afterwards.
    pub fn read_back(&mut self) -> Result<BufReader<&mut File>, DataError> {
        self.flush().map_err(|e| self.error(e))?;
        self.open().rewind().map_err(|e| self.error(e))?;
        Ok(BufReader::with_capacity(BUFFER, self.open().get_mut()))
    }

    /// Moves the file to its target; it is on disk when this returns.
    ///
    /// # Errors
    /// The file cannot be written; [`DataErrorKind::Exists`] if a file appeared at the target since this file was created.
    pub fn commit(mut self) -> Result<(), DataError> {
        self.try_commit().map_err(|e| match e.kind() {
            ErrorKind::AlreadyExists => DataError::at(&self.target, DataErrorKind::Exists),
            _ => self.error(e),
        })
    }

    /// Appends all data written to `spool`.
    fn copy_from(&mut self, spool: &mut AtomicFile) -> io::Result<()> {
        // Copies between the unbuffered files, so that Linux copies inside the kernel.
        self.open().flush()?;
        spool.open().seek(SeekFrom::Start(0))?;
        io::copy(spool.open().get_mut(), self.open().get_mut()).map(drop)
    }

    /// Writes all data to the disk.
    fn sync(&mut self) -> io::Result<()> {
        self.open().flush()?;
        self.open().get_ref().sync_all()
    }

    fn try_commit(&mut self) -> io::Result<()> {
        match self.destination.clone() {
            ResolvedPath::File(place) => {
                self.sync()?;
                if self.replaces {
                    fs::rename(&self.temporary, &place)?
                } else {
                    rename_to_new(&self.temporary, &place)?
                }
                self.file = None;
                sync_folder(&place)
            }
            ResolvedPath::Stream(stream) => {
                self.open().seek(SeekFrom::Start(0))?;
                stream.write_all_of(self.open().get_mut())
            }
            ResolvedPath::Unsuitable => Err(ErrorKind::InvalidInput.into()),
        }
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
            // An error cannot be reported from `drop`; the name of the file shows that it is temporary. It is removed
            // before it is closed, because a file without a lock may be removed by another process.
            let _ = fs::remove_file(&self.temporary);
            // Drops the buffered bytes instead of writing them.
            drop(file.into_parts());
        }
    }
}

/// Writes `bytes` at `offset`, and moves back to the end of the file.
fn overwrite(file: &mut BufWriter<File>, offset: u64, bytes: &[u8]) -> io::Result<()> {
    file.seek(SeekFrom::Start(offset))?;
    file.write_all(bytes)?;
    file.seek(SeekFrom::End(0)).map(drop)
}

/// Creates and locks a temporary file beside `place`. Where files cannot be locked, it is not locked, and no other
/// process removes it.
fn create_temporary(place: &Path) -> io::Result<(PathBuf, File)> {
    let name = place.file_name().unwrap_or_default().to_string_lossy().into_owned();
    loop {
        let temporary = place.with_file_name(temporary_name(&name));
        let file = match OpenOptions::new().write(true).read(true).create_new(true).open(&temporary) {
            Ok(file) => file,
            // Left behind by a killed process with the same process id.
            Err(e) if e.kind() == ErrorKind::AlreadyExists => continue,
            Err(e) => return Err(e),
        };
        match file.try_lock() {
            // Another process may have taken the file for a leftover before it was locked, and removed it.
            Ok(()) if !is_removed(&file) => return Ok((temporary, file)),
            Err(TryLockError::Error(_)) => return Ok((temporary, file)),
            Ok(()) | Err(TryLockError::WouldBlock) => {}
        }
    }
}

/// Whether a file has no name any more.
fn is_removed(file: &File) -> bool {
    #[cfg(unix)]
    {
        use std::os::unix::fs::MetadataExt;
        file.metadata().is_ok_and(|facts| facts.nlink() == 0)
    }
    #[cfg(not(unix))]
    {
        let _ = file;
        false
    }
}

/// Renames `temporary` to `place`.
///
/// # Errors
/// `AlreadyExists` if `place` exists; it is never replaced.
fn rename_to_new(temporary: &Path, place: &Path) -> io::Result<()> {
    match fs::hard_link(temporary, place) {
        Ok(()) => fs::remove_file(temporary),
        Err(e) if e.kind() == ErrorKind::AlreadyExists => Err(e),
        // A file system without hard links: an empty file reserves the name, which only this process then replaces.
        Err(_) => {
            File::create_new(place)?;
            fs::rename(temporary, place).inspect_err(|_| drop(fs::remove_file(place)))
        }
    }
}

fn temporary_name(name: &str) -> String {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let count = COUNT.fetch_add(1, Ordering::Relaxed);
    format!(".{name}.{}-{count}.part", std::process::id())
}

/// The name of the target of a temporary file: `a.npy` for `.a.npy.123-4.part`, for `.a.npy.123.part` of earlier versions,
/// and for `.a.npy.123-4.old`, an older file that [`commit_together`] moved aside; `None` for other names.
pub fn target_of_temporary(name: &str) -> Option<&str> {
    let name = name.strip_prefix('.')?;
    let (target, number) =
        name.strip_suffix(".part").or_else(|| name.strip_suffix(".old"))?.rsplit_once('.')?;
    let (process, count) = number.split_once('-').unwrap_or((number, "0"));
    (!target.is_empty() && is_number(process) && is_number(count)).then_some(target)
}

/// Whether a text consists of digits.
fn is_number(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit())
}

/// Removes the temporary files of `place` that processes left behind when they were killed. Files of running processes
/// are locked and stay; errors are ignored, because the files only take space.
pub fn remove_leftovers(place: &Path) {
    /// Temporary files that a folder had when this process first wrote a file into it: a run that writes many files reads
    /// the folder once.
    static FOUND: Mutex<BTreeMap<PathBuf, Vec<String>>> = Mutex::new(BTreeMap::new());
    let folder = place.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let name = place.file_name().unwrap_or_default().to_string_lossy();
    let mut found = FOUND.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let names = found.entry(folder.to_owned()).or_insert_with(|| {
        let entries = fs::read_dir(folder).into_iter().flatten().flatten();
        let names = entries.map(|entry| entry.file_name().to_string_lossy().into_owned());
        names.filter(|name| target_of_temporary(name).is_some()).collect()
    });
    names.retain(|leftover| {
        let is_of_place = target_of_temporary(leftover) == Some(&*name);
        if is_of_place {
            remove_leftover(&folder.join(leftover));
        }
        !is_of_place
    });
}

/// Removes a temporary file unless the process that writes it runs and holds its lock. Errors are ignored.
pub fn remove_leftover(path: &Path) {
    let Ok(file) = File::open(path) else { return };
    if file.try_lock().is_ok() {
        // Locked until it is removed: a process that has just created it sees the lock and takes another name.
        let _ = fs::remove_file(path);
    }
}

/// Fsyncs the folder of `target`, without which a rename may not survive a crash. Only Unix can open folders.
pub fn sync_folder(target: &Path) -> io::Result<()> {
    if cfg!(unix) {
        let folder = target.parent().filter(|p| !p.as_os_str().is_empty());
        File::open(folder.unwrap_or(Path::new(".")))?.sync_all()?;
    }
    Ok(())
}
