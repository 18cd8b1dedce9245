//! The digests that the hub names files by. Invariant: what is digested is what is on disk, whoever wrote it.
//! Source: git's object format (`blob LENGTH\0` before the content) and Git LFS (plain SHA-256).

use crate::hex::hex;
use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

use sha1::Sha1;
use sha2::{Digest as _, Sha256};

/// Bytes digested at a time.
const BUFFER: usize = 128 << 10;

/// What an etag is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Digest {
    /// Of a large file: SHA-256 of its content.
    Sha256,
    /// Of a small file: SHA-1 of the git object that it is.
    GitBlob,
}

impl Digest {
    /// The kind of a hexadecimal etag, by its length.
    pub(super) fn of_etag(etag: &str) -> Option<Digest> {
        match etag.len() {
            64 => Some(Digest::Sha256),
            40 => Some(Digest::GitBlob),
            _ => None,
        }
    }

    /// The digest of the file at `path`, of `size` bytes, in hexadecimal.
    pub(super) fn of(self, path: &Path, size: u64) -> io::Result<String> {
        match self {
            Digest::Sha256 => {
                let mut hash = Sha256::new();
                each(path, |part| hash.update(part))?;
                Ok(hex(&hash.finalize()))
            }
            Digest::GitBlob => {
                let mut hash = Sha1::new();
                hash.update(format!("blob {size}\0"));
                each(path, |part| hash.update(part))?;
                Ok(hex(&hash.finalize()))
            }
        }
    }
}

fn each(path: &Path, mut digest: impl FnMut(&[u8])) -> io::Result<()> {
    let mut file = File::open(path)?;
    let mut buffer = vec![0; BUFFER];
    loop {
        match file.read(&mut buffer)? {
            0 => return Ok(()),
            n => digest(&buffer[..n]),
        }
    }
}
