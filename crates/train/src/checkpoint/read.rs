//! Opens and restores checkpoints. Invariant: nothing of a checkpoint is used before all of its files have matched
//! their recorded sizes and hashes.

use super::write::{parts, seal};
use super::{Digest, RECORD, Record, Sealed};
use crate::TrainError;
use crate::trainable::{Part, Trainable};
use data::bounded;
use data::hex::hex;
use data::weights::Weights;
use sha2::{Digest as _, Sha256};
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

/// Upper limit in bytes for the size of the manifest [`RECORD`]; no valid manifest is that large.
const LARGEST: u64 = 16 << 20;

/// A verified checkpoint: every file matched its recorded hash when the checkpoint was opened.
#[derive(Debug)]
pub struct Checkpoint {
    /// Path of the checkpoint folder.
    pub path: PathBuf,
    /// Contents of the checkpoint apart from the tensors.
    pub record: Record,
}

impl Checkpoint {
    /// Opens a checkpoint and verifies the hashes of all its files. The error says why the checkpoint cannot be used.
    pub fn open(path: &Path) -> Result<Self, String> {
        let text = bounded::read_text(&path.join(RECORD), LARGEST).map_err(|e| format!("{RECORD}: {e}"))?;
        let sealed: Sealed = serde_json::from_str(&text).map_err(|e| format!("{RECORD} is damaged: {e}"))?;
        if seal(&sealed.record, &sealed.files).ok().as_ref() != Some(&sealed.sha256) {
            return Err(format!("{RECORD} is damaged"));
        }
        for (name, wanted) in &sealed.files {
            let found = digest(&path.join(name)).map_err(|e| format!("{name}: {e}"))?;
            if found != *wanted {
                return Err(format!("{name} is damaged"));
            }
        }
        Ok(Self { path: path.to_owned(), record: sealed.record })
    }

    /// Loads the tensors into `model` and moves its data reader to the position of the checkpoint.
    /// +45 ///
    /// # Errors
    /// `TrainError::OtherModel` if the number, shapes or element types of the tensors differ from those of the model.
    pub fn restore(&self, model: &mut dyn Trainable) -> Result<(), TrainError> {
        let mut buffer = vec![];
        for part in Part::ALL {
            let file = model.file(part);
            let weights = Weights::open(&self.path.join(file))?;
            let tensors = model.tensors(part);
            let (found, wanted) = (weights.tensors().count(), tensors.len());
            if found != wanted {
                return Err(self.foreign(&format!("{file} holds {found} tensors, the model has {wanted}")));
            }
            for (number, tensor) in tensors.iter().enumerate() {
                let there = weights.expect(&tensor.name, &tensor.shape)?;
                if there.dtype() != tensor.dtype {
                    let (was, is) = (there.dtype().name(), tensor.dtype.name());
                    return Err(self.foreign(&format!("{} was {was}, is {is}", tensor.name)));
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

    fn foreign(&self, why: &str) -> TrainError {
        TrainError::OtherModel { path: self.path.clone(), why: why.to_owned() }
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
