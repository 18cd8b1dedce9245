//! The bytes of a file as they are stored. Invariant: every one of them is hashed exactly once, as it is
//! read.

use crate::hex::hex;
use std::fs::{self, File};
use std::io::{self, ErrorKind, Read};
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use crate::{DataError, DataErrorKind};

/// A file that was read to its end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Input {
    /// As it was given; `-` is standard input.
    pub path: PathBuf,
    /// Its size, as stored.
    pub bytes: u64,
    /// Of the bytes as stored.
    pub sha256: [u8; 32],
}

impl Input {
    /// The digest as 64 hexadecimal digits.
    pub fn sha256_hex(&self) -> String {
        hex(&self.sha256)
    }
}

pub(super) fn is_stdin(path: &Path) -> bool {
    path.as_os_str() == "-"
}

/// What names of sequence files end with, behind the ending of a compression.
const ENDINGS: [&str; 9] = [".fa", ".fasta", ".fas", ".fna", ".ffn", ".frn", ".faa", ".fq", ".fastq"];
/// What names of compressed files end with.
const COMPRESSED: [&str; 4] = [".gz", ".bz2", ".zst", ".xz"];

/// A name for what is made of the file at `path`: its own without what says its format, `stdin` for `-`. Never
/// dots alone, which would lead out of a folder.
pub fn stem(path: &Path) -> String {
    if is_stdin(path) {
        return "stdin".to_owned();
    }
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let without = |name: &str, endings: &[&str]| {
        let stem =
            endings.iter().find_map(|e| name.strip_suffix(e)).filter(|stem| stem.bytes().any(|b| b != b'.'));
        stem.unwrap_or(name).to_owned()
    };
    without(&without(&name, &COMPRESSED), &ENDINGS)
}

/// The sequence files that `paths` name: a file is itself, a folder the files in it whose names end as sequence files' do
/// (FASTA or FASTQ, plain or compressed), in the order of their names. Folders in a folder are left alone.
///
/// # Errors
/// A folder that cannot be read, or that has no sequence file.
pub fn files(paths: &[PathBuf]) -> Result<Vec<PathBuf>, DataError> {
    let mut files = vec![];
    for path in paths {
        if is_stdin(path) || !path.is_dir() {
            files.push(path.clone());
            continue;
        }
        let fail = |e| DataError::at(path, DataErrorKind::Read(e));
        let mut inside = vec![];
        for entry in fs::read_dir(path).map_err(fail)? {
            let file = entry.map_err(fail)?.path();
            if file.is_file() && is_sequence_file(&file) {
                inside.push(file);
            }
        }
        if inside.is_empty() {
            let what = format!(
                "a folder without a sequence file; names of sequence files end with {}, perhaps with {} behind it",
                ENDINGS.join(", "),
                COMPRESSED.join(", ")
            );
            return Err(DataError::at(path, DataErrorKind::Malformed(what)));
        }
        inside.sort();
        files.extend(inside);
    }
    Ok(files)
}

/// Whether a file's name is one of FASTA or FASTQ, plain or compressed.
fn is_sequence_file(path: &Path) -> bool {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let plain = COMPRESSED.iter().find_map(|ending| name.strip_suffix(ending)).unwrap_or(&name);
    ENDINGS.iter().any(|ending| plain.len() > ending.len() && plain.ends_with(ending))
}

/// The bytes of the file at `path`, if it is a regular one; an error if it cannot be read at all.
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

/// What the files are, without looking into them; `None` where one can be read only once: standard input, a
/// pipe.
///
/// # Errors
/// A file that cannot be read.
/// Files may be large: `between` is asked for every part of them, and its error ends the reading.
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

fn digest<E: From<DataError>>(path: &Path, between: &dyn Fn() -> Result<(), E>) -> Result<Input, E> {
    let fail = |e| DataError::at(path, DataErrorKind::Read(e));
    let mut file = File::open(path).map_err(fail)?;
    let (mut hash, mut bytes, mut buffer) = (Sha256::new(), 0, vec![0; 256 << 10]);
    loop {
        between()?;
        match file.read(&mut buffer) {
            Ok(0) => return Ok(Input { path: path.to_owned(), bytes, sha256: hash.finalize().into() }),
            Ok(n) => {
                hash.update(&buffer[..n]);
                bytes += n as u64;
            }
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            Err(e) => return Err(fail(e).into()),
        }
    }
}

/// Bytes that are read ahead: as many as tell one compression from another.
const AHEAD: usize = 6;

/// The stored bytes, hashed as they pass.
pub(super) struct Stored {
    inner: Box<dyn Read + Send>,
    hash: Sha256,
    bytes: u64,
    failed: bool,
    ahead: [u8; AHEAD],
    ahead_len: usize,
    ahead_taken: usize,
}

impl Stored {
    pub(super) fn new(inner: Box<dyn Read + Send>) -> io::Result<Self> {
        let (hash, ahead) = (Sha256::new(), [0; AHEAD]);
        let mut new = Stored { inner, hash, bytes: 0, failed: false, ahead, ahead_len: 0, ahead_taken: 0 };
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

    /// The first bytes, as many as there are up to [`AHEAD`].
    pub(super) fn start(&self) -> &[u8] {
        &self.ahead[..self.ahead_len]
    }

    /// Bytes taken so far.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Whether the file itself could not be read: then an error of a decoder is not the data's.
    pub(super) fn failed(&self) -> bool {
        self.failed
    }

    /// What was read of the file at `path`.
    pub(super) fn finish(self, path: PathBuf) -> Input {
        Input { path, bytes: self.bytes, sha256: self.hash.finalize().into() }
    }

    fn read_hashed(&mut self, out: &mut [u8]) -> io::Result<usize> {
        let n = self.inner.read(out).inspect_err(|e| self.failed |= e.kind() != ErrorKind::Interrupted)?;
        self.hash.update(&out[..n]);
        self.bytes += n as u64;
        Ok(n)
    }
}

impl Read for Stored {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        if self.ahead_taken < self.ahead_len {
            // Ahead of the rest and in one call with it, so that whoever looks at the first bytes of
            // a text (a byte order mark) sees more than these.
            let n = out.len().min(self.ahead_len - self.ahead_taken);
            out[..n].copy_from_slice(&self.ahead[self.ahead_taken..][..n]);
            self.ahead_taken += n;
            return Ok(n + self.read_hashed(&mut out[n..])?);
        }
        self.read_hashed(out)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_without_their_endings() {
        let check = |path: &str, wanted: &str| assert_eq!(stem(Path::new(path)), wanted, "{path}");
        check("examples/reads.fa", "reads");
        check("a.b.fastq.gz", "a.b");
        check("x/y.fna.zst", "y");
        check("y.faa.xz", "y");
        check("y.fa.bz2", "y");
        check("y.txt", "y.txt");
        check("y.txt.gz", "y.txt");
        check(".fa", ".fa");
        check("...fa", "...fa");
        check("..fa.gz", "..fa");
        check("-", "stdin");
    }
}
