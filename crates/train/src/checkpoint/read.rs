//! Opens a checkpoint and puts it back. Invariant: nothing of it is used before every byte of it is what was written.

use super::write::{parts, seal};
use super::{Digest, RECORD, Record, Sealed};
use crate::error::{CheckpointError, ModelDifference, TrainError};
use crate::trainable::{Part, Trainable};
use data::bounded;
use data::hex::hex;
use data::weights::Weights;
use sha2::{Digest as _, Sha256};
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

/// Larger than any record.
const LARGEST: u64 = 16 << 20;

/// A checkpoint whose every byte is what was written.
#[derive(Debug)]
pub struct Checkpoint {
    /// Its folder.
    pub path: PathBuf,
    /// What it holds beside tensors.
    pub record: Record,
}

impl Checkpoint {
    /// Opens a checkpoint and hashes all of its files.
    ///
    /// # Errors
    /// A file that cannot be read, or that is not what was written.
    pub fn open(path: &Path) -> Result<Self, CheckpointError> {
        let unreadable = |file: &str| {
            let file = file.to_owned();
            move |source| CheckpointError::Unreadable { file, source }
        };
        let damaged = |file: &str| CheckpointError::Damaged { file: file.to_owned() };
        let text = bounded::read_text(&path.join(RECORD), LARGEST).map_err(unreadable(RECORD))?;
        let sealed: Sealed = serde_json::from_str(&text)
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

    /// Puts its tensors and its place in the data back.
    pub fn restore(&self, model: &mut dyn Trainable) -> Result<(), TrainError> {
        let mut buffer = vec![];
        for part in Part::ALL {
            let file = model.file(part);
            let weights = Weights::open(&self.path.join(file))?;
            let tensors = model.tensors(part);
            let (found, wanted) = (weights.tensors().count(), tensors.len());
            if found != wanted {
                let difference = ModelDifference::Count { file: file.to_owned(), found, wanted };
                return Err(self.other_model(difference));
            }
            for (number, tensor) in tensors.iter().enumerate() {
                let there = weights.expect(&tensor.name, &tensor.shape)?;
                if there.dtype() != tensor.dtype {
                    let (was, is) = (there.dtype().name(), tensor.dtype.name());
                    let difference = ModelDifference::ElementType { tensor: tensor.name.clone(), was, is };
                    return Err(self.other_model(difference));
                }
                for range in parts(tensor) {
                    let start = range.start;
                    weights.read_bytes(&tensor.name, range, &mut buffer)?;
                    model.write(part, number, start, &buffer)?;
                }
            }
        }
        model.seek(&self.record.state.position)
    }

    fn other_model(&self, difference: ModelDifference) -> TrainError {
        TrainError::OtherModel { path: self.path.clone(), difference }
    }
}

fn digest(path: &Path) -> io::Result<Digest> {
    let (mut file, mut hash, mut buffer, mut bytes) = (File::open(path)?, Sha256::new(), vec![0; 1 << 20], 0);
    loop {
        match file.read(&mut buffer)? {
            0 => return Ok(Digest { bytes, sha256: hex(&hash.finalize()) }),
            n => {
                hash.update(&buffer[..n]);
                bytes += n as u64;
            }
        }
    }
}
