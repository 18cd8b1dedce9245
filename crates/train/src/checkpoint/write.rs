//! Writes the files of a checkpoint. Invariant: every file is hashed while it is written and is synced to disk
//! before the folder gets its final name; tensors are streamed through one small buffer.

use super::{CheckpointRecord, FileDigest, RECORD, SealedRecord};
use crate::TrainError;
use crate::opened_model::{AVERAGE, StatePart, StoredTensor, Tensors};
use plimsoll_data::hex::hex;
use plimsoll_data::weights::safetensors_header;
use plimsoll_runtime::RuntimeError;
use sha2::{Digest as _, Sha256};
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

/// Number of elements of a tensor that are held in memory at a time.
pub(super) const PART: u64 = 1 << 18;

/// Writes all files of a checkpoint into the empty folder `folder`.
pub(super) fn fill(
    folder: &Path,
    record: &CheckpointRecord,
    model: &mut dyn Tensors,
) -> Result<(), TrainError> {
    let mut files = BTreeMap::new();
    let averages = !model.tensors(StatePart::Average).is_empty();
    for part in StatePart::ALL {
        let file = model.file(part);
        if part == StatePart::Average {
            if !averages {
                continue;
            }
            let folder = folder.join(AVERAGE);
            fs::create_dir(&folder).map_err(RuntimeError::io(&folder))?;
        }
        files.insert(file.to_owned(), tensors(&folder.join(file), part, model)?);
    }
    for (name, bytes) in model.extra_files()? {
        let digest = whole(&folder.join(&name), &bytes)?;
        files.insert(name, digest);
    }
    let sha256 = seal(record, &files)?;
    let sealed = SealedRecord { record: record.clone(), files, sha256 };
    let text = serde_json::to_vec_pretty(&sealed).map_err(unwritable)?;
    whole(&folder.join(RECORD), &text)?;
    if averages {
        sync(&folder.join(AVERAGE))?;
    }
    sync(folder)
}

/// Writes the entries of a folder to disk.
fn sync(folder: &Path) -> Result<(), TrainError> {
    Ok(File::open(folder).and_then(|folder| folder.sync_all()).map_err(RuntimeError::io(folder))?)
}

/// Computes the SHA-256 of a record together with the digests of the other files.
pub(super) fn seal(
    record: &CheckpointRecord,
    files: &BTreeMap<String, FileDigest>,
) -> Result<String, TrainError> {
    // Serialised through `Value`, whose object keys are sorted, so that a record that was read back gives the
    // same text and hash.
    let text = serde_json::to_value((record, files)).map_err(unwritable)?.to_string();
    Ok(hex(&Sha256::digest(text)))
}

fn unwritable(e: serde_json::Error) -> RuntimeError {
    RuntimeError::bug(format!("the state of the run cannot be written: {e}"))
}

/// Writes one safetensors file with all tensors of `part`, [`PART`] elements at a time.
fn tensors(path: &Path, part: StatePart, model: &mut dyn Tensors) -> Result<FileDigest, TrainError> {
    let all = model.tensors(part);
    let metadata = BTreeMap::from([("format".to_owned(), "pt".to_owned())]);
    let header = safetensors_header(all.iter().map(|t| (t.name.as_str(), t.dtype, &t.shape[..])), &metadata);
    let mut file = Hashed::create(path)?;
    file.put(&header)?;
    let mut buffer = vec![];
    for (number, tensor) in all.iter().enumerate() {
        for range in parts(tensor) {
            let bytes = (range.end - range.start) * tensor.dtype.size();
            model.read(part, number, range, &mut buffer)?;
            if buffer.len() as u64 != bytes {
                let name = &tensor.name;
                let found = buffer.len();
                let what = format!("{name}: {found} bytes of a checkpoint instead of {bytes}");
                return Err(RuntimeError::bug(what).into());
            }
            file.put(&buffer)?;
        }
    }
    file.finish()
}

/// Ranges of at most [`PART`] elements that cover a tensor.
pub(super) fn parts(tensor: &StoredTensor) -> impl Iterator<Item = std::ops::Range<u64>> + use<> {
    let elements = tensor.elements();
    (0..elements).step_by(PART as usize).map(move |start| start..(start + PART).min(elements))
}

/// Writes a file with the given contents.
fn whole(path: &Path, bytes: &[u8]) -> Result<FileDigest, TrainError> {
    let mut file = Hashed::create(path)?;
    file.put(bytes)?;
    file.finish()
}

/// A new file whose SHA-256 and size are computed while it is written.
struct Hashed {
    path: PathBuf,
    file: BufWriter<File>,
    hash: Sha256,
    bytes: u64,
}

impl Hashed {
    fn create(path: &Path) -> Result<Self, TrainError> {
        let file = File::create_new(path).map_err(RuntimeError::io(path))?;
        Ok(Self { path: path.to_owned(), file: BufWriter::new(file), hash: Sha256::new(), bytes: 0 })
    }

    fn put(&mut self, bytes: &[u8]) -> Result<(), TrainError> {
        self.hash.update(bytes);
        self.bytes += bytes.len() as u64;
        Ok(self.file.write_all(bytes).map_err(RuntimeError::io(&self.path))?)
    }

    fn finish(self) -> Result<FileDigest, TrainError> {
        let synced = self.file.into_inner().map_err(io::Error::from).and_then(|file| file.sync_all());
        synced.map_err(RuntimeError::io(&self.path))?;
        Ok(FileDigest { bytes: self.bytes, sha256: hex(&self.hash.finalize()) })
    }
}
