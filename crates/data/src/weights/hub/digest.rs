//! Digests that a hub uses as etags of files. Invariant: a digest is computed from the file on disk, not from the bytes
//! as they arrive, so bytes that an earlier attempt or another program wrote are verified too. Source: git's object
//! format (SHA-1 of `blob LENGTH\0` and the content) and Git LFS (SHA-256 of the content).

use crate::hex::hex;
use std::fs::File;
use std::io::Read;
use std::path::Path;

use super::error::HubErrorKind as Kind;
use super::patience::GoOn;

use sha1::Sha1;
use sha2::{Digest as _, Sha256};

/// Size in bytes of the read buffer.
const BUFFER: usize = 128 << 10;

/// The kind of digest that an etag holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Digest {
    /// SHA-256 of the content, for files in Git LFS (large files).
    Sha256,
    /// SHA-1 of the git blob object, for files in git itself (small files).
    GitBlob,
}

impl Digest {
    /// The kind of a hexadecimal etag, from its length; `None` for an unknown length.
    pub(super) fn of_etag(etag: &str) -> Option<Digest> {
        match etag.len() {
            64 => Some(Digest::Sha256),
            40 => Some(Digest::GitBlob),
            _ => None,
        }
    }

    /// Computes the hexadecimal digest of the file at `path`, which has `size` bytes. Asks `go_on` before every part.
    pub(super) fn of(self, path: &Path, size: u64, go_on: GoOn<'_>) -> Result<String, Kind> {
        match self {
            Digest::Sha256 => {
                let mut hash = Sha256::new();
                each(path, |part| hash.update(part), go_on)?;
                Ok(hex(&hash.finalize()))
            }
            Digest::GitBlob => {
                let mut hash = Sha1::new();
                hash.update(format!("blob {size}\0"));
                each(path, |part| hash.update(part), go_on)?;
                Ok(hex(&hash.finalize()))
            }
        }
    }
}

fn each(path: &Path, mut digest: impl FnMut(&[u8]), go_on: GoOn<'_>) -> Result<(), Kind> {
    let mut file = File::open(path).map_err(Kind::disk(path))?;
    let mut buffer = vec![0; BUFFER];
    loop {
        go_on()?;
        match file.read(&mut buffer).map_err(Kind::disk(path))? {
            0 => return Ok(()),
            n => digest(&buffer[..n]),
        }
    }
}
