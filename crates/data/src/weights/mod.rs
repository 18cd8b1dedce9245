//! Weight files: finding a model's weights and streaming their tensors. Invariant: reading never
//! executes what it reads, sizes are checked before they are trusted, and memory holds the index
//! of the tensors, never the tensors.

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

pub use dtype::{DType, f16_to_f32, f32_to_bf16, f32_to_f16};
pub use error::WeightsError;
pub use hub::{
    HubEnv, HubError, HubErrorKind, ModelPath, Patience, Repository, Step, Token, Told, find_in_hub, is_hub_id,
    resolve_model,
};
pub use index::shard_files;
pub use object::{Kind, PtObject, Value, read_pt_object};
pub use tensor::Tensor;
pub use write::{StoredAs, TensorData, safetensors_bytes, safetensors_header, write_safetensors};

use source::Source;
use torch::{STATE_LIMIT, TorchFile};

/// What a model's folder is searched for, in this order.
pub const FOLDER_FILES: [&str; 4] =
    ["model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json"];

/// Bytes hashed at a time.
const HASH_BUFFER: usize = 64 * 1024;

/// A model's weights: an index of tensors over open files. Shared between threads freely; each
/// read is positioned and independent.
#[derive(Debug)]
pub struct Weights {
    path: PathBuf,
    files: Vec<PathBuf>,
    /// The index file, if there is one: hashed with the shards.
    index: Option<Source>,
    sources: Vec<Source>,
    tensors: BTreeMap<String, Tensor>,
    metadata: BTreeMap<String, String>,
}

impl Weights {
    /// Opens a folder (see `FOLDER_FILES`), a `.safetensors` file, a `*.index.json`, or a torch zip
    /// file with a state dict or a whole module (`.bin`, `.pt`, `.pth`); the kind is told by the
    /// contents. Reads headers and pickles, no tensors.
    ///
    /// # Errors
    /// Each says what was wrong with which file, and what to do.
    pub fn open(path: &Path) -> Result<Weights, WeightsError> {
        let file = if path.is_dir() { find_in_folder(path)? } else { path.to_owned() };
        let mut weights = if file.to_string_lossy().ends_with(".index.json") {
            Weights::open_index(&file)?
        } else if file.extension().is_some_and(|extension| extension == "json") {
            let why = "it is JSON; give the model's folder, or its weight file".to_owned();
            return Err(WeightsError::NotWeights { path: file, why });
        } else {
            Weights::open_sources(vec![Source::open(&file)?], |_, _| true)?
        };
        path.clone_into(&mut weights.path);
        Ok(weights)
    }

    /// Safetensors compiled into the program; `label` stands for the path in messages.
    ///
    /// # Errors
    /// As `open` on a safetensors file.
    pub fn from_bytes(label: &str, bytes: &'static [u8]) -> Result<Weights, WeightsError> {
        let mut weights = Weights::open_sources(vec![Source::memory(label, bytes)], |_, _| true)?;
        weights.files.clear();
        Ok(weights)
    }

    /// What was opened: the folder or file, or the label of compiled-in bytes.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// All tensors, sorted by name.
    pub fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        self.tensors.values()
    }

    /// A tensor by name, if it is there.
    pub fn get(&self, name: &str) -> Option<&Tensor> {
        self.tensors.get(name)
    }

    /// A tensor by name.
    ///
    /// # Errors
    /// `MissingTensor`, with names that end alike.
    pub fn tensor(&self, name: &str) -> Result<&Tensor, WeightsError> {
        self.get(name).ok_or_else(|| WeightsError::MissingTensor {
            path: self.path.clone(),
            tensor: name.to_owned(),
            similar: self.similar(name),
        })
    }

    /// A tensor by name, of a known shape.
    ///
    /// # Errors
    /// `MissingTensor`, or `Shape` with both shapes.
    pub fn expect(&self, name: &str, shape: &[u64]) -> Result<&Tensor, WeightsError> {
        let tensor = self.tensor(name)?;
        match tensor.shape() == shape {
            true => Ok(tensor),
            false => Err(WeightsError::Shape {
                path: self.path.clone(),
                tensor: name.to_owned(),
                expected: shape.to_vec(),
                found: tensor.shape().to_vec(),
            }),
        }
    }

    /// Reads `elements` of a tensor of floats, counted in C order, into `out` of that length,
    /// through a fixed buffer on the stack. F16, BF16 and F32 are exact, F64 is rounded.
    ///
    /// # Errors
    /// `MissingTensor`, `ElementType` for integers, `Range`, `Io`, `Truncated`.
    pub fn read_f32(&self, name: &str, elements: Range<u64>, out: &mut [f32]) -> Result<(), WeightsError> {
        let tensor = self.tensor(name)?;
        self.check_type(tensor, tensor.dtype.is_float(), "f32")?;
        tensor.read(&self.sources[tensor.file], elements, out, dtype::to_f32)
    }

    /// Reads `elements` of a tensor of integers or truth values, as `read_f32` does for floats.
    ///
    /// # Errors
    /// As `read_f32`, with `ElementType` for floats.
    pub fn read_i64(&self, name: &str, elements: Range<u64>, out: &mut [i64]) -> Result<(), WeightsError> {
        let tensor = self.tensor(name)?;
        self.check_type(tensor, !tensor.dtype.is_float(), "i64")?;
        tensor.read(&self.sources[tensor.file], elements, out, dtype::to_i64)
    }

    /// Reads `elements` of a tensor of any type, counted in C order, as the bytes that they are in little endian.
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
        tensor: &Tensor,
        elements: Range<u64>,
        out: &mut Vec<u8>,
    ) -> Result<(), WeightsError>
    where
        [u8; N]: Default,
    {
        out.resize(elements.end.saturating_sub(elements.start) as usize * N, 0);
        let (groups, _) = out.as_chunks_mut::<N>();
        tensor.read(&self.sources[tensor.file], elements, groups, dtype::to_raw)
    }

    /// The safetensors `__metadata__` (of the first shard); empty for torch files.
    pub fn metadata(&self) -> &BTreeMap<String, String> {
        &self.metadata
    }

    /// Every file that was opened, an index first; empty for compiled-in bytes.
    pub fn files(&self) -> &[PathBuf] {
        &self.files
    }

    /// The SHA-256 of each file (or of compiled-in bytes), in hexadecimal, by file name or label,
    /// in the order of `files`. Reads everything once.
    ///
    /// # Errors
    /// `Io`, `Truncated`.
    pub fn sha256(&self) -> Result<Vec<(String, String)>, WeightsError> {
        self.index.iter().chain(&self.sources).map(sha256_of).collect()
    }

    fn open_index(path: &Path) -> Result<Weights, WeightsError> {
        let index = index::read_index(path)?;
        let shards = index.shards.iter().map(|shard| Source::open(shard)).collect::<Result<_, _>>()?;
        let mut weights = Weights::open_sources(shards, |name, shard| index.tensors.get(name) == Some(&shard))?;
        if let Some((name, &shard)) = index.tensors.iter().find(|(name, _)| weights.get(name).is_none()) {
            let (path, tensor) = (index.shards[shard].clone(), name.clone());
            return Err(WeightsError::MissingTensor { path, tensor, similar: Vec::new() });
        }
        weights.files.insert(0, path.to_owned());
        weights.index = Some(Source::open(path)?);
        Ok(weights)
    }

    /// Opens each source by its kind and joins their tensors, those that `keep` takes by name and
    /// file number.
    fn open_sources(sources: Vec<Source>, keep: impl Fn(&str, usize) -> bool) -> Result<Weights, WeightsError> {
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

    fn check_type(&self, tensor: &Tensor, matches: bool, wanted: &'static str) -> Result<(), WeightsError> {
        if matches {
            return Ok(());
        }
        let (path, name) = (self.path.clone(), tensor.name.clone());
        Err(WeightsError::ElementType { path, tensor: name, wanted, found: tensor.dtype })
    }

    /// Up to three names that share the last two parts of `name`: most often a prefix differs.
    fn similar(&self, name: &str) -> Vec<String> {
        let tail = |name: &str| name.rsplitn(3, '.').take(2).map(str::to_owned).collect::<Vec<_>>();
        let wanted = tail(name);
        let alike = self.tensors.keys().filter(|known| tail(known) == wanted);
        alike.take(3).cloned().collect()
    }
}

fn find_in_folder(folder: &Path) -> Result<PathBuf, WeightsError> {
    let found = FOLDER_FILES.iter().map(|name| folder.join(name)).find(|path| path.exists());
    found.ok_or_else(|| WeightsError::NoWeights { folder: folder.to_owned(), looked_for: &FOLDER_FILES })
}

fn sha256_of(source: &Source) -> Result<(String, String), WeightsError> {
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
