//! Opens, verifies and restores a checkpoint. Invariant: no tensor or state is used before the sizes and hashes
//! of all files have been verified.

use super::write::{parts, seal};
use super::{CheckpointRecord, FileDigest, RECORD, SealedRecord};
use crate::error::{CheckpointError, ModelDifference, TrainError};
use crate::opened_model::{StatePart, Tensors};
use plimsoll_data::bounded;
use plimsoll_data::hex::hex;
use plimsoll_data::weights::Weights;
use sha2::{Digest as _, Sha256};
use std::io::{self, Read};
use std::path::{Path, PathBuf};

/// Maximum size of the record file in bytes; a larger file is refused.
const MAX_RECORD_BYTES: u64 = 16 << 20;

/// A checkpoint whose files have all been verified against their recorded sizes and hashes.
#[derive(Debug)]
pub struct VerifiedCheckpoint {
    /// Path of the checkpoint folder.
    pub path: PathBuf,
    /// Contents of the checkpoint apart from the tensors.
    pub record: CheckpointRecord,
}

impl VerifiedCheckpoint {
    /// Opens a checkpoint, and hashes all of its files.
    ///
    /// # Errors
    /// A file cannot be read, the record is not valid JSON, or the size or hash of a file differs from the
    /// recorded one.
    pub fn open(path: &Path) -> Result<Self, CheckpointError> {
        let text = bounded::read_text(&path.join(RECORD), MAX_RECORD_BYTES).map_err(unreadable(RECORD))?;
        let sealed: SealedRecord = serde_json::from_str(&text)
            .map_err(|source| CheckpointError::NotARecord { file: RECORD, source })?;
        if seal(&sealed.record, &sealed.files).ok().as_ref() != Some(&sealed.sha256) {
            return Err(damaged(RECORD));
        }
        for (name, wanted) in &sealed.files {
            if digest(&path.join(name)).map_err(unreadable(name))? != *wanted {
                return Err(damaged(name));
            }
        }
        Ok(Self { path: path.to_owned(), record: sealed.record })
    }

    /// Copies all tensors into `model`.
    ///
    /// # Errors
    /// The checkpoint has other tensors than the model, or tensors of another shape or element type; errors of
    /// reading and of the model.
    pub fn restore(&self, model: &mut dyn Tensors) -> Result<(), TrainError> {
        let mut buffer = vec![];
        for part in StatePart::ALL {
            let file = model.file(part);
            let tensors = model.tensors(part);
            if part == StatePart::Average && tensors.is_empty() {
                continue;
            }
            let weights = Weights::open(&self.path.join(file))?;
            let found = weights.tensors().count();
            let wanted = tensors.len();
            if found != wanted {
                let difference = ModelDifference::Count { file: file.to_owned(), found, wanted };
                return Err(self.other_model(difference));
            }
            for (number, tensor) in tensors.iter().enumerate() {
                let stored = weights.expect(&tensor.name, &tensor.shape)?;
                if stored.dtype() != tensor.dtype {
                    let was = stored.dtype().name();
                    let is = tensor.dtype.name();
                    let difference = ModelDifference::ElementType { tensor: tensor.name.clone(), was, is };
                    return Err(self.other_model(difference));
                }
                // In ranges, so that the buffer stays small whatever the size of the tensor.
                for range in parts(tensor) {
                    let start = range.start;
                    weights.read_bytes(&tensor.name, range, &mut buffer)?;
                    model.write(part, number, start, &buffer)?;
                }
            }
        }
        Ok(())
    }

    fn other_model(&self, difference: ModelDifference) -> TrainError {
        TrainError::OtherModel { path: self.path.clone(), difference }
    }
}

/// The error of a file that cannot be read.
fn unreadable(file: &str) -> impl FnOnce(io::Error) -> CheckpointError {
    let file = file.to_owned();
    move |source| CheckpointError::Unreadable { file, source }
}

/// The error of a file that differs from its record.
fn damaged(file: &str) -> CheckpointError {
    CheckpointError::Damaged { file: file.to_owned() }
}

/// Computes the size and SHA-256 of a file.
fn digest(path: &Path) -> io::Result<FileDigest> {
    let mut file = bounded::open(path)?;
    let mut hash = Sha256::new();
    let mut buffer = vec![0; 1 << 20];
    let mut bytes = 0;
    loop {
        match file.read(&mut buffer)? {
            0 => return Ok(FileDigest { bytes, sha256: hex(&hash.finalize()) }),
            n => {
                hash.update(&buffer[..n]);
                bytes += n as u64;
            }
        }
    }
}
