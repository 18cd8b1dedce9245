//! A source of bytes: a file that is read at given positions, or bytes compiled into the program. Invariant: no read
//! extends past the length that the file had when it was opened. Files are neither memory-mapped nor cached, so
//! reading does not increase resident memory beyond the caller's buffers.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use super::WeightsError;
use crate::foreign;

/// A readable sequence of bytes of known length.
#[derive(Debug)]
pub(super) struct ByteSource {
    path: PathBuf,
    len: u64,
    bytes: SourceBytes,
}

#[derive(Debug)]
enum SourceBytes {
    File(File),
    Memory(&'static [u8]),
}

impl ByteSource {
    /// Opens a regular file. Other types are refused before `open`, because opening a pipe would block.
    pub(super) fn open(path: &Path) -> Result<ByteSource, WeightsError> {
        let metadata = fs::metadata(path).map_err(unreadable(path))?;
        if !metadata.is_file() {
            let why = "it is not a regular file; give a file or a model's folder".to_owned();
            return Err(WeightsError::NotWeights { path: path.to_owned(), why });
        }
        let file = File::open(path).map_err(unreadable(path))?;
        let source = ByteSource { path: path.to_owned(), len: metadata.len(), bytes: SourceBytes::File(file) };
        let mut start = [0; 48];
        let known = &mut start[..metadata.len().min(48) as usize];
        source.read_at(0, known)?;
        if foreign::is_lfs_pointer(known) {
            Err(WeightsError::NotWeights { path: path.to_owned(), why: foreign::LFS_POINTER.to_owned() })
        } else {
            Ok(source)
        }
    }

    /// A source over bytes in memory; messages show `label` in place of a path.
    pub(super) fn memory(label: &str, bytes: &'static [u8]) -> ByteSource {
        ByteSource { path: PathBuf::from(label), len: bytes.len() as u64, bytes: SourceBytes::Memory(bytes) }
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    pub(super) fn len(&self) -> u64 {
        self.len
    }

    /// Fills `out` with the bytes from `offset` on; `Truncated` if the file ends before `out` is full.
    pub(super) fn read_at(&self, offset: u64, out: &mut [u8]) -> Result<(), WeightsError> {
        let expected = offset.saturating_add(out.len() as u64);
        if expected > self.len {
            return Err(self.truncated(expected));
        }
        match &self.bytes {
            SourceBytes::Memory(bytes) => out.copy_from_slice(&bytes[offset as usize..expected as usize]),
            SourceBytes::File(file) => {
                file.read_exact_at(out, offset).map_err(|source| match source.kind() {
                    io::ErrorKind::UnexpectedEof => self.truncated(expected),
                    _ => WeightsError::Io { path: self.path.clone(), action: "read", source },
                })?
            }
        }
        Ok(())
    }

    /// Reads `len` bytes at `offset` into a new vector. `Malformed` if `len` exceeds `limit`, `Truncated` if the file
    /// is shorter: `len` usually is a field of an untrusted file, so both are checked before memory is allocated.
    pub(super) fn read_vec(
        &self,
        offset: u64,
        len: u64,
        limit: u64,
        what: &str,
    ) -> Result<Vec<u8>, WeightsError> {
        if len > limit {
            let why = format!("{what} of {len} bytes; at most {limit} are accepted");
            return Err(WeightsError::Malformed { path: self.path.clone(), why });
        }
        let expected = offset.saturating_add(len);
        if expected > self.len {
            return Err(self.truncated(expected));
        }
        let mut bytes = vec![0; len as usize];
        self.read_at(offset, &mut bytes)?;
        Ok(bytes)
    }

    /// A `Truncated` error for this source, which should have at least `expected` bytes.
    fn truncated(&self, expected: u64) -> WeightsError {
        WeightsError::Truncated { path: self.path.clone(), expected, found: self.len }
    }

    /// A `Malformed` error for this source.
    pub(super) fn malformed(&self, why: impl Into<String>) -> WeightsError {
        WeightsError::Malformed { path: self.path.clone(), why: why.into() }
    }
}

/// Returns a function that makes an error of reading the file at `path` from its cause.
fn unreadable(path: &Path) -> impl Fn(io::Error) -> WeightsError {
    move |source| WeightsError::Io { path: path.to_owned(), action: "read", source }
}
