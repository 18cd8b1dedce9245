//! Weight files of a model: safetensors, torch zip files and sharded indexes, opened as an index of tensors that are
//! read on demand. Invariant: reading never executes content of a file, a size is compared with the file's length
//! before memory is allocated for it, and memory holds the index of the tensors, not their values.

mod dtype;
mod error;
mod globals;
mod hub;
mod index;
mod object;
mod pickle;
mod safetensors;
mod source;
mod state_dict;
mod tensor;
mod torch;
mod unpickle;
mod write;
mod zip;

use crate::hex::hex;
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

pub use dtype::{FileDType, f16_to_f32, f32_to_bf16, f32_to_f16};
pub use error::WeightsError;
pub use hub::{
    FetchEvent, FetchProgress, HubEnv, HubError, HubErrorKind, ModelPath, Repository, RetryPolicy, Token,
    find_in_hub, is_hub_id, missing_path, resolve_model,
};
pub use index::shard_files;
pub use object::{ObjectKind, PickleValue, PtObject, read_pt_object};
pub use tensor::StoredTensor;
pub use write::{StoredAs, TensorData, safetensors_bytes, safetensors_header, write_safetensors};

pub(crate) use self::safetensors::LONGEST_HEADER;
use source::ByteSource;
use torch::{STATE_LIMIT, TorchFile};

/// File names that `Weights::open` looks for in a model's folder, in this order.
pub const FOLDER_FILES: [&str; 4] =
    ["model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json"];

/// Place of the bytes of an entry of a zip file.
pub(crate) struct StoredEntry {
    /// File offset.
    pub(crate) offset: u64,
    /// Number of bytes.
    pub(crate) size: u64,
}

/// Returns the place of the entry `name` of the zip file at `path`; `None` if there is no such entry.
///
/// # Errors
/// A file that cannot be read or is damaged; a compressed entry.
pub(crate) fn stored_entry(path: &Path, name: &str) -> Result<Option<StoredEntry>, WeightsError> {
    let source = ByteSource::open(path)?;
    let place = zip::Zip::open(&source)?.locate(&source, name)?;
    Ok(place.map(|(offset, size)| StoredEntry { offset, size }))
}

/// Size in bytes of the buffer through which files are hashed.
const HASH_BUFFER: usize = 64 * 1024;

/// A model's weights: an index of tensors over open files. Several threads may read at the same time, because
/// every read is positioned (`pread`) and no file offset is shared.
#[derive(Debug)]
pub struct Weights {
    path: PathBuf,
    files: Vec<PathBuf>,
    /// The index file of sharded weights; `sha256` includes it.
    index: Option<ByteSource>,
    sources: Vec<ByteSource>,
    tensors: BTreeMap<String, StoredTensor>,
    metadata: BTreeMap<String, String>,
}

impl Weights {
    /// Opens a folder (see `FOLDER_FILES`), a safetensors file, a `*.index.json`, or a torch zip file with a state
    /// dict or a whole module (`.bin`, `.pt`, `.pth`). A file named `*.safetensors` is read as safetensors; the
    /// format of any other weight file is detected from its first bytes. Reads headers and pickles, but no tensors.
    ///
    /// # Errors
    /// Any `WeightsError` of opening a file: each names the file, the problem and a remedy.
    pub fn open(path: &Path) -> Result<Weights, WeightsError> {
        let file = if path.is_dir() { find_in_folder(path)? } else { path.to_owned() };
        let mut weights = if file.to_string_lossy().ends_with(".index.json") {
            Weights::open_index(&file)?
        } else if file.extension().is_some_and(|extension| extension == "json") {
            let why = "it is JSON; give the model's folder, or its weight file".to_owned();
            return Err(WeightsError::NotWeights { path: file, why });
        } else {
            Weights::open_sources(vec![ByteSource::open(&file)?], |_, _| true)?
        };
        path.clone_into(&mut weights.path);
        Ok(weights)
    }

    /// Opens safetensors that are compiled into the program; messages show `label` in place of a path.
    ///
    /// # Errors
    /// The errors of `open` for a safetensors file.
    pub fn from_bytes(label: &str, bytes: &'static [u8]) -> Result<Weights, WeightsError> {
        let mut weights = Weights::open_sources(vec![ByteSource::memory(label, bytes)], |_, _| true)?;
        weights.files.clear();
        Ok(weights)
    }

    /// The folder or file given to `open`, or the label of compiled-in bytes.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Iterates over all tensors, sorted by name.
    pub fn tensors(&self) -> impl Iterator<Item = &StoredTensor> {
        self.tensors.values()
    }

    /// Returns the tensor named `name`, or `None` if the weights have no such tensor.
    pub fn get(&self, name: &str) -> Option<&StoredTensor> {
        self.tensors.get(name)
    }

    /// Returns the tensor named `name`.
    ///
    /// # Errors
    /// `MissingTensor`, which lists up to three tensors with a similar name.
    pub fn tensor(&self, name: &str) -> Result<&StoredTensor, WeightsError> {
        self.get(name).ok_or_else(|| WeightsError::MissingTensor {
            path: self.path.clone(),
            tensor: name.to_owned(),
            similar: self.similar(name),
        })
    }

    /// Returns the tensor named `name` and checks its shape.
    ///
    /// # Errors
    /// `MissingTensor`, or `Shape` with the expected and the found shape.
    pub fn expect(&self, name: &str, shape: &[u64]) -> Result<&StoredTensor, WeightsError> {
        let tensor = self.tensor(name)?;
        if tensor.shape() == shape {
            Ok(tensor)
        } else {
            Err(WeightsError::Shape {
                path: self.path.clone(),
                tensor: name.to_owned(),
                expected: shape.to_vec(),
                found: tensor.shape().to_vec(),
            })
        }
    }

    /// Reads the range `elements` (indices in C order) of a floating-point tensor into `out`, converted to f32. `out`
    /// must have the length of the range. F16, BF16 and F32 are converted exactly, F64 is rounded to nearest.
    ///
    /// # Errors
    /// `MissingTensor`, `ElementType` for integer tensors, `Range`, `Io`, `Truncated`.
    pub fn read_f32(&self, name: &str, elements: Range<u64>, out: &mut [f32]) -> Result<(), WeightsError> {
        let tensor = self.tensor(name)?;
        self.check_type(tensor, tensor.dtype.is_float(), "f32")?;
        tensor.read(&self.sources[tensor.file], elements, out, dtype::to_f32)
    }

    /// Reads the range `elements` (indices in C order) of an integer or boolean tensor into `out`, converted to i64.
    /// `out` must have the length of the range.
    ///
    /// # Errors
    /// `MissingTensor`, `ElementType` for floating-point tensors, `Range`, `Io`, `Truncated`.
    pub fn read_i64(&self, name: &str, elements: Range<u64>, out: &mut [i64]) -> Result<(), WeightsError> {
        let tensor = self.tensor(name)?;
        self.check_type(tensor, !tensor.dtype.is_float(), "i64")?;
        tensor.read(&self.sources[tensor.file], elements, out, dtype::to_i64)
    }

    /// Reads the range `elements` (indices in C order) of a tensor of any type as little-endian bytes, without
    /// conversion. `out` is resized to the bytes of the range.
    ///
    /// # Errors
    /// `MissingTensor`, `Range`, `Io`, `Truncated`.
    pub fn read_bytes(&self, name: &str, elements: Range<u64>, out: &mut Vec<u8>) -> Result<(), WeightsError> {
        let tensor = self.tensor(name)?;
        match tensor.dtype.size() {
            1 => self.read_raw::<1>(tensor, elements, out),
            2 => self.read_raw::<2>(tensor, elements, out),
            4 => self.read_raw::<4>(tensor, elements, out),
            _ => self.read_raw::<8>(tensor, elements, out),
        }
    }

    fn read_raw<const N: usize>(
        &self,
        tensor: &StoredTensor,
        elements: Range<u64>,
        out: &mut Vec<u8>,
    ) -> Result<(), WeightsError>
    where
        [u8; N]: Default,
    {
        let asked = elements.end.saturating_sub(elements.start);
        // Before the allocation, whose size would otherwise be whatever the caller computed from another file.
        tensor.check_range(&self.sources[tensor.file], &elements, asked)?;
        out.resize(asked as usize * N, 0);
        let (groups, _) = out.as_chunks_mut::<N>();
        tensor.read(&self.sources[tensor.file], elements, groups, dtype::to_raw)
    }

    /// The `__metadata__` of the safetensors header (for shards: of the first shard); empty for torch files.
    pub fn metadata(&self) -> &BTreeMap<String, String> {
        &self.metadata
    }

    /// Paths of all opened files, with the index of sharded weights first; empty for compiled-in bytes.
    pub fn files(&self) -> &[PathBuf] {
        &self.files
    }

    /// Computes the SHA-256 of each file (or of the compiled-in bytes). Returns pairs of file name (or label) and
    /// hexadecimal digest in the order of `files`. Reads every file completely.
    ///
    /// # Errors
    /// `Io`, `Truncated`.
    pub fn sha256(&self) -> Result<Vec<(String, String)>, WeightsError> {
        self.index.iter().chain(&self.sources).map(sha256_of).collect()
    }

    fn open_index(path: &Path) -> Result<Weights, WeightsError> {
        let index = index::read_index(path)?;
        let shards = index.shards.iter().map(|shard| ByteSource::open(shard)).collect::<Result<_, _>>()?;
        let mut weights = Weights::open_sources(shards, |name, shard| index.tensors.get(name) == Some(&shard))?;
        if let Some((name, &shard)) = index.tensors.iter().find(|(name, _)| weights.get(name).is_none()) {
            let path = index.shards[shard].clone();
            let tensor = name.clone();
            return Err(WeightsError::MissingTensor { path, tensor, similar: Vec::new() });
        }
        weights.files.insert(0, path.to_owned());
        weights.index = Some(ByteSource::open(path)?);
        Ok(weights)
    }

    /// Opens each source in its format and merges the tensors for which `keep(name, file number)` is true.
    fn open_sources(
        sources: Vec<ByteSource>,
        keep: impl Fn(&str, usize) -> bool,
    ) -> Result<Weights, WeightsError> {
        let path = sources.first().map(|source| source.path().to_owned()).unwrap_or_default();
        let files = sources.iter().map(|source| source.path().to_owned()).collect();
        let mut weights = Weights {
            path,
            files,
            index: None,
            sources: Vec::new(),
            tensors: BTreeMap::new(),
            metadata: BTreeMap::new(),
        };
        for (number, source) in sources.into_iter().enumerate() {
            let is_named = source.path().extension().is_some_and(|extension| extension == "safetensors");
            let tensors = if is_named || safetensors::looks_like(&source) {
                let header = safetensors::read_header(&source, number)?;
                if number == 0 {
                    weights.metadata = header.metadata;
                }
                weights.sources.push(source);
                header.tensors
            } else {
                let file = TorchFile::open(source, STATE_LIMIT)?;
                let tensors = file.tensors(number)?;
                weights.sources.push(file.source);
                tensors
            };
            let kept = tensors.into_iter().filter(|tensor| keep(&tensor.name, number));
            weights.tensors.extend(kept.map(|tensor| (tensor.name.clone(), tensor)));
        }
        Ok(weights)
    }

    fn check_type(
        &self,
        tensor: &StoredTensor,
        matches: bool,
        wanted: &'static str,
    ) -> Result<(), WeightsError> {
        if matches {
            return Ok(());
        }
        let path = self.path.clone();
        let name = tensor.name.clone();
        Err(WeightsError::ElementType { path, tensor: name, wanted, found: tensor.dtype })
    }

    /// Up to three names with the same last two dotted components as `name`. Names usually differ in a prefix such
    /// as `model.` that a training framework adds.
    fn similar(&self, name: &str) -> Vec<String> {
        let similar = self.tensors.keys().filter(|known| last_components(known).eq(last_components(name)));
        similar.take(3).cloned().collect()
    }
}

/// The last two dotted components of a name, the last one first.
fn last_components(name: &str) -> impl Iterator<Item = &str> {
    name.rsplitn(3, '.').take(2)
}

fn find_in_folder(folder: &Path) -> Result<PathBuf, WeightsError> {
    let found = FOLDER_FILES.iter().map(|name| folder.join(name)).find(|path| path.exists());
    found.ok_or_else(|| WeightsError::NoWeights { folder: folder.to_owned(), looked_for: &FOLDER_FILES })
}

fn sha256_of(source: &ByteSource) -> Result<(String, String), WeightsError> {
    let mut hash = Sha256::new();
    let mut buffer = [0; HASH_BUFFER];
    let mut at = 0;
    while at < source.len() {
        let part = &mut buffer[..(source.len() - at).min(HASH_BUFFER as u64) as usize];
        source.read_at(at, part)?;
        hash.update(&*part);
        at += part.len() as u64;
    }
    let name = source.path().file_name().unwrap_or(source.path().as_os_str());
    Ok((name.to_string_lossy().into_owned(), hex(&hash.finalize())))
}
