//! The scratch file of a device, which holds what a plan keeps on disk, and the threads that copy from and to it while
//! kernels run. Invariant: the file has all its blocks before the first step, so that a full disk is an error at the start;
//! it has no name, so that nothing is left of it when the process ends in any way.

use crate::device::DeviceError;
use plimsoll_graph::Bytes;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{Builder, JoinHandle};

/// A file without a name, of a fixed size.
#[derive(Debug)]
pub struct ScratchFile {
    file: File,
    bytes: u64,
    folder: PathBuf,
}

impl ScratchFile {
    /// Creates a file of `bytes` in `folder`, with all its blocks.
    ///
    /// # Errors
    /// [`DeviceError::Disk`] if the folder cannot be written, or the disk has less space.
    pub fn create(folder: &Path, bytes: Bytes) -> Result<Self, DeviceError> {
        match Self::reserved(folder, bytes.0) {
            Ok(file) => Ok(Self { file, bytes: bytes.0, folder: folder.to_owned() }),
            Err(source) => Err(DeviceError::Disk { folder: folder.to_owned(), bytes, source }),
        }
    }

    /// A file without a name in `folder`, whose blocks are taken from the disk.
    fn reserved(folder: &Path, bytes: u64) -> io::Result<File> {
        let file = tempfile::tempfile_in(folder)?;
        reserve(&file, bytes)?;
        Ok(file)
    }

    /// Reads bytes from position `at`.
    pub fn read(&self, at: u64, out: &mut [u8]) -> Result<(), DeviceError> {
        self.check(at, out.len())?;
        read_exact_at(&self.file, out, at).map_err(|source| self.failed(out.len(), source))
    }

    /// Writes bytes to position `at`.
    pub fn write(&self, at: u64, bytes: &[u8]) -> Result<(), DeviceError> {
        self.check(at, bytes.len())?;
        write_all_at(&self.file, bytes, at).map_err(|source| self.failed(bytes.len(), source))
    }

    /// Writes the same byte to a range.
    pub fn fill(&self, at: u64, bytes: Bytes, byte: u8) -> Result<(), DeviceError> {
        let block = vec![byte; bytes.0.min(1 << 20) as usize];
        for first in (0..bytes.0).step_by(block.len().max(1)) {
            let length = (bytes.0 - first).min(block.len() as u64) as usize;
            self.write(at + first, &block[..length])?;
        }
        Ok(())
    }

    /// `Err` unless the range lies inside the file.
    fn check(&self, at: u64, bytes: usize) -> Result<(), DeviceError> {
        if at.checked_add(bytes as u64).is_none_or(|end| end > self.bytes) {
            return Err(DeviceError::OutsideArena { at, bytes: Bytes(bytes as u64) });
        }
        Ok(())
    }

    fn failed(&self, bytes: usize, source: io::Error) -> DeviceError {
        DeviceError::Disk { folder: self.folder.clone(), bytes: Bytes(bytes as u64), source }
    }
}

/// Takes all blocks of a file from the disk.
#[cfg(target_os = "linux")]
fn reserve(file: &File, bytes: u64) -> io::Result<()> {
    use std::os::fd::AsRawFd;
    let length = libc::off_t::try_from(bytes).map_err(|_| io::Error::from(io::ErrorKind::FileTooLarge))?;
    if length == 0 {
        return Ok(());
    }
    // SAFETY: the descriptor is open, and the call accesses no memory.
    match unsafe { libc::posix_fallocate(file.as_raw_fd(), 0, length) } {
        0 => Ok(()),
        code => Err(io::Error::from_raw_os_error(code)),
    }
}

/// Sets the size of a file. Its blocks are taken when they are written.
#[cfg(not(target_os = "linux"))]
fn reserve(file: &File, bytes: u64) -> io::Result<()> {
    file.set_len(bytes)
}

#[cfg(unix)]
fn read_exact_at(file: &File, out: &mut [u8], at: u64) -> io::Result<()> {
    std::os::unix::fs::FileExt::read_exact_at(file, out, at)
}

#[cfg(unix)]
fn write_all_at(file: &File, bytes: &[u8], at: u64) -> io::Result<()> {
    std::os::unix::fs::FileExt::write_all_at(file, bytes, at)
}

#[cfg(not(unix))]
fn read_exact_at(_: &File, _: &mut [u8], _: u64) -> io::Result<()> {
    Err(io::ErrorKind::Unsupported.into())
}

#[cfg(not(unix))]
fn write_all_at(_: &File, _: &[u8], _: u64) -> io::Result<()> {
    Err(io::ErrorKind::Unsupported.into())
}

/// Direction of a copy between memory and a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileCopy {
    /// From the file to memory.
    Read,
    /// From memory to the file.
    Write,
}

/// A copy that a thread of [`FileQueues`] makes.
#[derive(Clone, Copy, Debug)]
struct CopyJob {
    id: usize,
    direction: FileCopy,
    /// Position in the file.
    at: u64,
    /// Address in memory. A pointer would not be `Send`.
    memory: usize,
    bytes: usize,
}

/// Called in a queue's thread before the copy of a transfer: waits until the bytes may be touched.
pub type BeforeCopy = Arc<dyn Fn(usize) -> Result<(), DeviceError> + Send + Sync>;

/// Two threads, one that reads from a scratch file and one that writes to it. Nothing is allocated after the start, but by
/// an error.
pub struct FileQueues {
    file: Arc<ScratchFile>,
    senders: [Option<SyncSender<CopyJob>>; 2],
    threads: Vec<JoinHandle<()>>,
    progress: Arc<CopyProgress>,
}

/// Which transfers are on their way, and the first error.
#[derive(Default)]
struct CopyProgress {
    state: Mutex<CopyState>,
    changed: Condvar,
}

#[derive(Default)]
struct CopyState {
    /// Whether each transfer is on its way, indexed by id.
    on_the_way: Vec<bool>,
    error: Option<DeviceError>,
}

impl CopyProgress {
    fn lock(&self) -> MutexGuard<'_, CopyState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl FileQueues {
    /// Starts the threads for at most `transfers` transfers. `before` is called in their thread before each copy.
    pub fn start(file: ScratchFile, transfers: usize, before: BeforeCopy) -> Result<Self, DeviceError> {
        let file = Arc::new(file);
        let progress = Arc::new(CopyProgress::default());
        progress.lock().on_the_way = vec![false; transfers];
        let mut queues = Self { file, senders: [None, None], threads: vec![], progress };
        for (k, name) in ["read", "write"].into_iter().enumerate() {
            let (sender, jobs) = sync_channel::<CopyJob>(transfers.max(1));
            let file = Arc::clone(&queues.file);
            let progress = Arc::clone(&queues.progress);
            let before = Arc::clone(&before);
            let thread = Builder::new().name(name.to_owned()).spawn(move || {
                for job in jobs {
                    let copied = before(job.id).and_then(|()| copy(&file, job));
                    let mut state = progress.lock();
                    state.on_the_way[job.id] = false;
                    // Only the first error is kept: the later ones mostly follow from it.
                    if let Err(error) = copied {
                        state.error.get_or_insert(error);
                    }
                    progress.changed.notify_all();
                }
            });
            queues.threads.push(thread.map_err(|source| DeviceError::Thread { source })?);
            queues.senders[k] = Some(sender);
        }
        Ok(queues)
    }

    /// The file.
    pub fn file(&self) -> &ScratchFile {
        &self.file
    }

    /// Starts to copy between `bytes` bytes of memory and position `at` of the file.
    ///
    /// # Safety
    /// Until [`FileQueues::wait_for`] has returned for `id`, the memory must stay allocated, nobody else may write it, and
    /// where the copy reads from the file nobody else may read it.
    pub unsafe fn enqueue(
        &self,
        id: usize,
        direction: FileCopy,
        at: u64,
        memory: *mut u8,
        bytes: Bytes,
    ) -> Result<(), DeviceError> {
        self.file.check(at, bytes.0 as usize)?;
        self.progress.lock().on_the_way[id] = true;
        let job = CopyJob { id, direction, at, memory: memory.expose_provenance(), bytes: bytes.0 as usize };
        let sender = self.senders[direction as usize].as_ref().ok_or_else(ended_queue)?;
        sender.send(job).map_err(|_| ended_queue())
    }

    /// Blocks until a transfer is complete.
    ///
    /// # Errors
    /// The first error of any copy that was not returned yet.
    pub fn wait_for(&self, id: usize) -> Result<(), DeviceError> {
        let mut state = self.progress.lock();
        // Also after an error: the caller may free or change the memory of a transfer that was waited for.
        while state.on_the_way[id] {
            state = self.progress.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.error.take().map_or(Ok(()), Err)
    }

    /// Blocks until all transfers are complete.
    pub fn wait_for_all(&self) -> Result<(), DeviceError> {
        let mut state = self.progress.lock();
        while state.on_the_way.contains(&true) {
            state = self.progress.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.error.take().map_or(Ok(()), Err)
    }
}

/// The error for a copy that no thread takes any more.
fn ended_queue() -> DeviceError {
    DeviceError::Kernel { op: "move", why: "the thread of its queue has ended".to_owned() }
}

impl Drop for FileQueues {
    fn drop(&mut self) {
        // The threads end when nothing more can be sent; their memory must outlive them.
        self.senders = [None, None];
        for thread in self.threads.drain(..) {
            // A panic of the thread was an error of a transfer, or happens while the process ends anyway.
            let _ = thread.join();
        }
    }
}

fn copy(file: &ScratchFile, job: CopyJob) -> Result<(), DeviceError> {
    let memory: *mut u8 = std::ptr::with_exposed_provenance_mut(job.memory);
    match job.direction {
        FileCopy::Read => {
            // SAFETY: `enqueue` demands that the memory is allocated, and that nobody else accesses it.
            let out = unsafe { std::slice::from_raw_parts_mut(memory, job.bytes) };
            file.read(job.at, out)
        }
        FileCopy::Write => {
            // SAFETY: `enqueue` demands that the memory is allocated, and that nobody writes it.
            let bytes = unsafe { std::slice::from_raw_parts(memory.cast_const(), job.bytes) };
            file.write(job.at, bytes)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_come_back_and_no_name_is_left() {
        let folder = tempfile::tempdir().expect("a folder");
        let file = ScratchFile::create(folder.path(), Bytes(1 << 20)).expect("created");
        assert_eq!(std::fs::read_dir(folder.path()).expect("read").count(), 0);
        let queues = FileQueues::start(file, 3, Arc::new(|_| Ok(()))).expect("started");
        let mut written: Vec<u8> = (0..100_000).map(|i| i as u8).collect();
        let mut read = vec![0; 100_000];
        // SAFETY: both vectors live until the transfers were waited for, and are not touched before.
        unsafe {
            queues.enqueue(1, FileCopy::Write, 77, written.as_mut_ptr(), Bytes(100_000)).expect("sent");
            queues.wait_for(1).expect("written");
            queues.enqueue(2, FileCopy::Read, 77, read.as_mut_ptr(), Bytes(100_000)).expect("sent");
            queues.wait_for(2).expect("read");
            assert!(
                queues.enqueue(0, FileCopy::Read, 1 << 20, read.as_mut_ptr(), Bytes(1)).is_err(),
                "outside"
            );
        }
        assert!(written == read);
        queues.file().fill(5, Bytes(3 << 18), 9).expect("filled");
        queues.file().read(5 + (3 << 18) - 1, &mut read[..2]).expect("read");
        assert_eq!(read[..2], [9, 0]);
        queues.wait_for_all().expect("nothing is on its way");
    }

    #[test]
    fn an_error_before_a_copy_is_that_of_the_wait() {
        let folder = tempfile::tempdir().expect("a folder");
        let file = ScratchFile::create(folder.path(), Bytes(64)).expect("created");
        let fail = |id| match id {
            0 => Err(DeviceError::Kernel { op: "move", why: "planted".to_owned() }),
            _ => Ok(()),
        };
        let queues = FileQueues::start(file, 2, Arc::new(fail)).expect("started");
        let mut bytes = [7; 64];
        // SAFETY: the array lives until the transfer was waited for.
        unsafe { queues.enqueue(0, FileCopy::Write, 0, bytes.as_mut_ptr(), Bytes(64)).expect("sent") };
        let error = queues.wait_for(0).expect_err("planted").to_string();
        assert!(error.contains("planted"), "{error}");
    }

    #[test]
    fn a_folder_that_is_missing_and_a_disk_that_is_too_small_are_errors() {
        let folder = tempfile::tempdir().expect("a folder");
        let missing = folder.path().join("missing");
        let error = ScratchFile::create(&missing, Bytes(64)).expect_err("no such folder").to_string();
        assert!(error.contains("missing") && error.contains("64 B"), "{error}");
        let error = ScratchFile::create(folder.path(), Bytes(u64::MAX)).expect_err("no such disk");
        assert!(matches!(error, DeviceError::Disk { .. }), "{error}");
        assert_eq!(std::fs::read_dir(folder.path()).expect("read").count(), 0);
    }
}
