//! Reads the stored bytes of a file and hashes them. Invariant: every stored byte is hashed exactly once, as it is read.

use crate::hex::hex;
use std::fs::{self, File};
use std::io::{self, ErrorKind, Read};
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use crate::{DataError, DataErrorKind};

/// Path, size and digest of a file that was read to its end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Input {
    /// The path as it was given; `-` is standard input.
    pub path: PathBuf,
    /// Size of the stored (possibly compressed) file in bytes.
    pub bytes: u64,
    /// SHA-256 of the stored bytes.
    pub sha256: [u8; 32],
}

impl Input {
    /// Returns the digest as 64 hexadecimal digits.
    pub fn sha256_hex(&self) -> String {
        hex(&self.sha256)
    }
}

/// Returns whether `path` is `-`, which stands for standard input.
pub(super) fn is_stdin(path: &Path) -> bool {
    path.as_os_str() == "-"
}

/// Returns the size in bytes of a regular file, `None` for another kind of file; an error if it cannot be read.
pub(super) fn size(path: &Path) -> Result<Option<u64>, DataError> {
    if is_stdin(path) {
        return Ok(None);
    }
    let facts = fs::metadata(path).map_err(|e| DataError::at(path, DataErrorKind::Read(e)))?;
    if facts.is_dir() {
        let what = "a folder, not a file; name the files in it".to_owned();
        return Err(DataError::at(path, DataErrorKind::Malformed(what)));
    }
    Ok(facts.is_file().then_some(facts.len()))
}

/// Returns path, size and digest of every file, without decoding it; `None` if a file can be read only once (standard
/// input, a pipe). Files may be large: `between` is called before each block that is read, and its error aborts the
/// reading.
///
/// # Errors
/// A file that cannot be read, or an error of `between`.
pub fn digests<E: From<DataError>>(
    paths: &[PathBuf],
    between: &dyn Fn() -> Result<(), E>,
) -> Result<Option<Vec<Input>>, E> {
    let mut inputs = Vec::with_capacity(paths.len());
    for path in paths {
        if size(path)?.is_none() {
            return Ok(None);
        }
        inputs.push(digest(path, between)?);
    }
    Ok(Some(inputs))
}

/// Hashes the file at `path`, calling `between` before each block.
fn digest<E: From<DataError>>(path: &Path, between: &dyn Fn() -> Result<(), E>) -> Result<Input, E> {
    let mut file = File::open(path).map_err(DataError::reading(path))?;
    let mut hash = Sha256::new();
    let mut bytes = 0;
    let mut buffer = vec![0; 256 << 10];
    loop {
        between()?;
        match file.read(&mut buffer) {
            Ok(0) => return Ok(Input { path: path.to_owned(), bytes, sha256: hash.finalize().into() }),
            Ok(n) => {
                hash.update(&buffer[..n]);
                bytes += n as u64;
            }
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            Err(e) => return Err(DataError::reading(path)(e).into()),
        }
    }
}

/// Bytes that are read in advance: as many as are needed to detect the compression.
const AHEAD: usize = 6;

/// Reader of the stored bytes that hashes them as they pass.
pub(super) struct HashedReader {
    /// The file, standard input, or any other reader.
    inner: Box<dyn Read + Send>,
    hash: Sha256,
    /// Bytes read from `inner` so far.
    bytes: u64,
    /// Whether reading `inner` failed.
    failed: bool,
    /// The first bytes, read before the compression is known; `ahead_taken` of the `ahead_len` bytes were returned.
    ahead: [u8; AHEAD],
    ahead_len: usize,
    ahead_taken: usize,
}

impl HashedReader {
    /// Reads the first bytes of `inner`.
    pub(super) fn new(inner: Box<dyn Read + Send>) -> io::Result<Self> {
        let mut new = HashedReader {
            inner,
            hash: Sha256::new(),
            bytes: 0,
            failed: false,
            ahead: [0; AHEAD],
            ahead_len: 0,
            ahead_taken: 0,
        };
        while new.ahead_len < AHEAD {
            match new.inner.read(&mut new.ahead[new.ahead_len..]) {
                Ok(0) => break,
                Ok(n) => new.ahead_len += n,
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
        new.hash.update(&new.ahead[..new.ahead_len]);
        new.bytes = new.ahead_len as u64;
        Ok(new)
    }

    /// Returns the first bytes: [`AHEAD`] bytes, or all bytes of a shorter file.
    pub(super) fn start(&self) -> &[u8] {
        &self.ahead[..self.ahead_len]
    }

    /// Bytes read so far, including the bytes read in advance.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Whether reading the file itself failed. Then an error of the decoder does not mean corrupt data.
    pub(super) fn failed(&self) -> bool {
        self.failed
    }

    /// Returns size and digest of the bytes that were read; `path` is the name of their file.
    pub(super) fn finish(self, path: PathBuf) -> Input {
        Input { path, bytes: self.bytes, sha256: self.hash.finalize().into() }
    }

    /// Reads from the inner reader and hashes the bytes.
    fn read_hashed(&mut self, out: &mut [u8]) -> io::Result<usize> {
        let n = self.inner.read(out).inspect_err(|e| self.failed |= e.kind() != ErrorKind::Interrupted)?;
        self.hash.update(&out[..n]);
        self.bytes += n as u64;
        Ok(n)
    }
}

impl Read for HashedReader {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        if self.ahead_taken < self.ahead_len {
            // The first bytes are returned together with bytes behind them, so that a caller that inspects the start of
            // a text (a byte order mark) sees more than these few.
            let n = out.len().min(self.ahead_len - self.ahead_taken);
            out[..n].copy_from_slice(&self.ahead[self.ahead_taken..][..n]);
            self.ahead_taken += n;
            return Ok(n + self.read_hashed(&mut out[n..])?);
        }
        self.read_hashed(out)
    }
}
