//! Downloads the missing files of a model's repository into the Hugging Face cache. Invariant: a blob gets its final
//! name (its digest) only after its bytes were synced to disk and their digest was verified; all files of a snapshot
//! are of one commit; `refs/main` of a model that was not in the cache is written last, after all requested files.
//!
//! Layout, locks and names are as in huggingface_hub ("Understand caching"), so both programs can use a cache at
//! the same time.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::Write;
use std::ops::ControlFlow;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use super::client::{Client, FileMetadata, HubFile, HubRequestError, content_range};
use super::digest::Digest;
use super::error::{HubError, HubErrorKind as Kind};
use super::patience::{BodyParts, TICK, patiently, pause};
use super::{HubEnv, cached_commit, is_commit, repository_folder, revision_of};
use crate::atomic::AtomicFile;
use crate::weights::WeightsError;
use crate::{DataError, DataErrorKind};

/// An attempt that received at least this many bytes resets the count of failed attempts, so that a long file arrives
/// also over an unreliable connection.
const PROGRESS: u64 = 1 << 20;

/// A progress event of fetching a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FetchEvent {
    /// Another process holds the file's lock; this process waits for it.
    Waiting,
    /// A request failed, or the digest was wrong, and the request is repeated.
    Again,
    /// The hub asks for this pause before the request is repeated.
    Pause(Duration),
    /// Nothing happened: reported at least ten times a second while the fetch waits or checks, so that the callback can
    /// end it.
    Idle,
    /// Number of bytes received so far, including those of an earlier attempt.
    Bytes(u64),
    /// All bytes were received; their digest is being computed.
    Checking,
}

/// Progress callback, called with the file's name, its size in bytes (0 while unknown) and the event. If it returns
/// [`ControlFlow::Break`], the fetch ends with [`HubErrorKind::Stopped`](super::HubErrorKind::Stopped). The bytes
/// received so far stay in the cache, and the next fetch of the file continues after them.
pub type FetchProgress<'a> = &'a mut dyn FnMut(&str, u64, FetchEvent) -> ControlFlow<()>;

/// Progress callback for one file, called with its size in bytes and the event; `Err(Stopped)` ends the fetch.
type Tell<'a> = &'a mut dyn FnMut(u64, FetchEvent) -> Result<(), Kind>;

/// A model's repository: its folder in the cache, and a client of the hub for files that are missing there.
pub struct Repository {
    id: String,
    /// A branch, a tag or a commit.
    revision: String,
    folder: PathBuf,
    locks: PathBuf,
    commit: Option<String>,
    client: Arc<Client>,
}

impl Repository {
    /// Opens the repository of the hub id `id`. Makes no requests.
    ///
    /// # Errors
    /// `NotAModel`, `NotInCache` where no cache folder is known, `Hub` where a setting cannot be used.
    pub fn open(id: &str, env: &HubEnv) -> Result<Repository, WeightsError> {
        let folder = repository_folder(id, env)?;
        let locks = folder
            .parent()
            .unwrap_or(Path::new(""))
            .join(".locks")
            .join(folder.file_name().unwrap_or_default());
        let client = Client::new(env).map_err(|kind| {
            WeightsError::Hub(HubError { id: id.to_owned(), file: "config.json".to_owned(), kind })
        })?;
        let (id, revision) = revision_of(id);
        // If the reference is missing or unreadable, the commit that the hub has for it is used.
        let commit = cached_commit(&folder, revision).ok();
        let client = Arc::new(client);
        Ok(Repository { id: id.to_owned(), revision: revision.to_owned(), folder, locks, commit, client })
    }

    /// The snapshot's folder; `None` until the commit is known, from `refs/main` or from the first fetched file.
    pub fn snapshot(&self) -> Option<PathBuf> {
        Some(self.folder.join("snapshots").join(self.commit.as_ref()?))
    }

    /// Returns the path of `file` in the snapshot, and fetches the file if it is not in the cache; `None` if the
    /// repository has no such file.
    ///
    /// # Errors
    /// `Hub`.
    pub fn fetch(&mut self, file: &str, told: FetchProgress<'_>) -> Result<Option<PathBuf>, WeightsError> {
        if let Some(place) = self.snapshot().map(|folder| folder.join(file)).filter(|path| path.exists()) {
            return Ok(Some(place));
        }
        let mut tell = |size, step| match told(file, size, step) {
            ControlFlow::Continue(()) => Ok(()),
            ControlFlow::Break(()) => Err(Kind::Stopped),
        };
        self.fetch_missing(file, &mut tell).map_err(|kind| self.error(file, kind))
    }

    /// The error for a required file that the repository does not have.
    pub fn missing_file_error(&self, file: &str) -> WeightsError {
        self.error(file, Kind::Status(404))
    }

    /// Writes the reference of the revision, such as `refs/main`, if it is missing, after which `find_in_hub` finds the
    /// model. Call it after all files were fetched: an incomplete model must not be found.
    ///
    /// # Errors
    /// `Hub` where the cache cannot be written.
    pub fn write_ref(&self) -> Result<(), WeightsError> {
        let Some(commit) = &self.commit else { return Ok(()) };
        if is_commit(&self.revision) || cached_commit(&self.folder, &self.revision).is_ok() {
            return Ok(());
        }
        let name = format!("refs/{}", self.revision);
        let reference = self.folder.join(&name);
        write_reference(&reference, commit).map_err(|kind| self.error(&name, kind))
    }

    fn error(&self, file: &str, kind: Kind) -> WeightsError {
        WeightsError::Hub(HubError { id: self.id.clone(), file: file.to_owned(), kind })
    }

    fn fetch_missing(&mut self, file: &str, tell: Tell<'_>) -> Result<Option<PathBuf>, Kind> {
        if !is_plain(file) {
            return Err(Kind::Answer("its name is a path outside the model's folder".to_owned()));
        }
        let revision = self.commit.clone().unwrap_or_else(|| self.revision.clone());
        let Some(facts) = self.facts(&revision, file, tell)? else { return Ok(None) };
        let known = RequiredMetadata::of(facts)?;
        // All further files are requested at the commit of the first file, so that a snapshot is not mixed from two
        // commits if `main` moves in the meantime.
        let commit = self.commit.get_or_insert(known.commit.clone()).clone();
        let blob = self.folder.join("blobs").join(&known.etag);
        if !blob.exists() {
            let _lock = self.lock(&known, tell)?;
            // Another process may have completed the blob while this one waited for the lock.
            if !blob.exists() {
                self.download(&self.hub_file(&commit, file), &known, &blob, tell)?;
            }
        }
        let place = self.folder.join("snapshots").join(commit).join(file);
        link(&place, Path::new("../../blobs").join(&known.etag))?;
        Ok(Some(place))
    }

    /// The address of a file of this repository.
    fn hub_file(&self, revision: &str, file: &str) -> HubFile {
        HubFile { id: self.id.clone(), revision: revision.to_owned(), name: file.to_owned() }
    }

    /// Requests a file's metadata, with retries.
    fn facts(&self, revision: &str, file: &str, tell: Tell<'_>) -> Result<Option<FileMetadata>, Kind> {
        let mut attempt = 0;
        loop {
            let client = self.client.clone();
            let file = self.hub_file(revision, file);
            match patiently(move || client.facts(&file), &mut || tell(0, FetchEvent::Idle))? {
                Ok(facts) => return Ok(facts),
                Err(trouble) => self.wait(&mut attempt, trouble, 0, tell)?,
            }
        }
    }

    /// Counts a failed attempt and sleeps before the next one. Returns the error if it is permanent or the number of
    /// attempts is exhausted.
    fn wait(&self, attempt: &mut u32, trouble: HubRequestError, size: u64, tell: Tell<'_>) -> Result<(), Kind> {
        *attempt += 1;
        let is_last = *attempt >= self.client.patience.attempts;
        let wait = match trouble {
            HubRequestError::Transient(_) if !is_last => {
                tell(size, FetchEvent::Again)?;
                self.client.patience.pause_before(*attempt)
            }
            HubRequestError::Later(_, asked) if !is_last => {
                tell(size, FetchEvent::Pause(asked))?;
                asked
            }
            HubRequestError::Transient(kind)
            | HubRequestError::Later(kind, _)
            | HubRequestError::Permanent(kind) => {
                return Err(kind);
            }
        };
        pause(wait, &mut || tell(size, FetchEvent::Idle))
    }

    /// Takes the file lock that huggingface_hub takes for this blob. `None` if the file system has no locks: two
    /// processes may then write one partial file, which the digest detects.
    fn lock(&self, known: &RequiredMetadata, tell: Tell<'_>) -> Result<Option<File>, Kind> {
        let path = self.locks.join(format!("{}.lock", known.etag));
        make_parent(&path)?;
        let file = OpenOptions::new().create(true).append(true).open(&path).map_err(Kind::disk(&path))?;
        let mut is_told = false;
        // Asked again and again: a call that waits for the lock could not be ended.
        loop {
            match file.try_lock() {
                Ok(()) => return Ok(Some(file)),
                Err(TryLockError::WouldBlock) => {}
                Err(TryLockError::Error(error)) if error.kind() == std::io::ErrorKind::Unsupported => {
                    return Ok(None);
                }
                Err(TryLockError::Error(error)) => return Err(Kind::disk(&path)(error)),
            }
            if !std::mem::replace(&mut is_told, true) {
                tell(known.size, FetchEvent::Waiting)?;
            }
            pause(TICK, &mut || tell(known.size, FetchEvent::Idle))?;
        }
    }

    /// Downloads a blob to `ETAG.incomplete`, resuming a partial file of an earlier attempt, verifies its digest and
    /// renames it to `blob`.
    fn download(
        &self,
        file: &HubFile,
        known: &RequiredMetadata,
        blob: &Path,
        tell: Tell<'_>,
    ) -> Result<(), Kind> {
        let mut partial = PartialFile::open(blob.with_file_name(format!("{}.incomplete", known.etag)))?;
        let mut is_resumed = partial.length()? > 0;
        loop {
            self.transfer(file, known, &mut partial, tell)?;
            // Before the rename: a name in `blobs` says that the bytes are on disk.
            partial.file.sync_all().map_err(Kind::disk(&partial.path))?;
            tell(known.size, FetchEvent::Checking)?;
            let idle = &mut || tell(known.size, FetchEvent::Idle);
            let found = known.digest.of(&partial.path, known.size, idle)?;
            if found == known.etag {
                return fs::rename(&partial.path, blob).map_err(Kind::disk(blob));
            }
            partial.clear()?;
            // After a resumed download the wrong bytes may be those of the earlier attempt, so the file is downloaded
            // once more from the start; a complete download with a wrong digest is an error.
            if !is_resumed {
                // Best effort: the file is empty, and the error to report is the digest.
                let _ = fs::remove_file(&partial.path);
                return Err(Kind::Hash { found, expected: known.etag.clone() });
            }
            is_resumed = false;
            tell(known.size, FetchEvent::Again)?;
        }
    }

    /// Repeats requests until the partial file has the expected size.
    fn transfer(
        &self,
        file: &HubFile,
        known: &RequiredMetadata,
        partial: &mut PartialFile,
        tell: Tell<'_>,
    ) -> Result<(), Kind> {
        let mut attempt = 0;
        loop {
            let mut have = partial.length()?;
            if have > known.size {
                partial.clear()?;
                have = 0;
            }
            tell(known.size, FetchEvent::Bytes(have))?;
            if have == known.size {
                return Ok(());
            }
            let trouble = match self.append(file, known, partial, have, tell) {
                Ok(()) => {
                    HubRequestError::Transient(Kind::Broken { found: partial.length()?, expected: known.size })
                }
                Err(trouble) => trouble,
            };
            let length = partial.length()?;
            if length == known.size {
                continue;
            }
            if length >= have + PROGRESS {
                attempt = 0;
            }
            self.wait(&mut attempt, trouble, known.size, tell)?;
        }
    }

    /// Sends one request for the bytes from `have` on and appends the response to the partial file.
    fn append(
        &self,
        file: &HubFile,
        known: &RequiredMetadata,
        partial: &mut PartialFile,
        mut have: u64,
        tell: Tell<'_>,
    ) -> Result<(), HubRequestError> {
        let client = self.client.clone();
        let file = file.clone();
        let idle = &mut || tell(known.size, FetchEvent::Idle);
        let answer =
            patiently(move || client.body(&file, have), idle).map_err(HubRequestError::Permanent)??;
        let total = match answer.status().as_u16() {
            206 => {
                let range = content_range(answer.headers());
                let Some((_, total)) = range.filter(|(start, _)| *start == have) else {
                    let why =
                        format!("the server did not send the requested range, which starts at byte {have}");
                    return Err(HubRequestError::Permanent(Kind::Answer(why)));
                };
                Some(total)
            }
            // 200: the host ignored the range and sends the whole file. 416: it does not accept the range. Both
            // start again from an empty file.
            status => {
                if have > 0 {
                    partial.clear().map_err(HubRequestError::Permanent)?;
                    have = 0;
                }
                if status == 416 {
                    return Err(HubRequestError::Transient(Kind::Status(status)));
                }
                answer.body().content_length()
            }
        };
        if let Some(found) = total.filter(|&total| total != known.size) {
            return Err(HubRequestError::Permanent(Kind::Size { found, expected: known.size }));
        }
        let mut body = BodyParts::read(answer.into_body().into_reader()).map_err(HubRequestError::Permanent)?;
        loop {
            let idle = &mut || tell(known.size, FetchEvent::Idle);
            let Some(part) = body.next(idle).map_err(HubRequestError::Permanent)? else { return Ok(()) };
            let part = part
                .map_err(|_| HubRequestError::Transient(Kind::Broken { found: have, expected: known.size }))?;
            let found = have + part.len() as u64;
            if found > known.size {
                return Err(HubRequestError::Permanent(Kind::Size { found, expected: known.size }));
            }
            let written = partial.file.write_all(&part).map_err(Kind::disk(&partial.path));
            written.map_err(HubRequestError::Permanent)?;
            have = found;
            tell(known.size, FetchEvent::Bytes(have)).map_err(HubRequestError::Permanent)?;
        }
    }
}

/// Metadata that is required before a file is fetched.
struct RequiredMetadata {
    commit: String,
    etag: String,
    digest: Digest,
    size: u64,
}

impl RequiredMetadata {
    fn of(facts: FileMetadata) -> Result<RequiredMetadata, Kind> {
        let commit = facts.commit.filter(|commit| is_hex(commit)).ok_or_else(|| lacks("the commit"))?;
        let size = facts.size.ok_or_else(|| lacks("the size of the file"))?;
        let etag = facts.etag.filter(|etag| is_hex(etag));
        let digest = etag.as_deref().and_then(Digest::of_etag);
        let (etag, digest) = etag.zip(digest).ok_or_else(|| lacks("the digest of the file (etag)"))?;
        Ok(RequiredMetadata { commit, etag, digest, size })
    }
}

/// The error for a response without a required value.
fn lacks(what: &str) -> Kind {
    Kind::Answer(format!("the response does not state {what}"))
}

/// Whether `file` is a plain file name, without folders, that needs no escaping in an address.
fn is_plain(file: &str) -> bool {
    !file.is_empty()
        && !file.starts_with('.')
        && file.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.'))
}

fn is_hex(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'))
}

/// The bytes of a blob that were received so far, on disk.
struct PartialFile {
    file: File,
    path: PathBuf,
}

impl PartialFile {
    /// Opens the file for appending; an existing one is of an earlier attempt.
    fn open(path: PathBuf) -> Result<Self, Kind> {
        make_parent(&path)?;
        let file = OpenOptions::new().create(true).append(true).open(&path).map_err(Kind::disk(&path))?;
        Ok(Self { file, path })
    }

    /// Number of bytes.
    fn length(&self) -> Result<u64, Kind> {
        self.file.metadata().map(|facts| facts.len()).map_err(Kind::disk(&self.path))
    }

    /// Removes all bytes.
    fn clear(&mut self) -> Result<(), Kind> {
        self.file.set_len(0).map_err(Kind::disk(&self.path))
    }
}

/// Writes a reference with its commit, unless another process has written it meanwhile.
fn write_reference(reference: &Path, commit: &str) -> Result<(), Kind> {
    make_parent(reference)?;
    let mut file = AtomicFile::create(reference).map_err(|error| not_written(reference, error))?;
    file.write_all(commit.as_bytes()).map_err(Kind::disk(reference))?;
    match file.commit() {
        Err(error) if matches!(error.kind, DataErrorKind::Exists) => Ok(()),
        done => done.map_err(|error| not_written(reference, error)),
    }
}

/// The error for a file that cannot be written, with its cause.
fn not_written(path: &Path, error: DataError) -> Kind {
    Kind::disk(path)(std::io::Error::other(error))
}

fn make_parent(path: &Path) -> Result<(), Kind> {
    let folder = path.parent().unwrap_or(Path::new("."));
    fs::create_dir_all(folder).map_err(Kind::disk(folder))
}

/// Creates the symbolic link `place` to `target` atomically, and replaces an existing (also a dangling) link.
fn link(place: &Path, target: PathBuf) -> Result<(), Kind> {
    make_parent(place)?;
    let name = place.file_name().unwrap_or_default().to_string_lossy();
    // The temporary name must be unique among threads of this process (`count`), and among processes with the same
    // id on different hosts of a shared disk (`now`).
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let count = COUNT.fetch_add(1, Ordering::Relaxed);
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.subsec_nanos());
    let temporary = place.with_file_name(format!(".{name}.{}-{count}-{now}.part", std::process::id()));
    symlink(target, &temporary).and_then(|()| fs::rename(&temporary, place)).map_err(Kind::disk(place))
}
