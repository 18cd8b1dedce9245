//! `plimsoll convert`: rewrites a model's weights as one safetensors file. Invariant: the output appears only
//! after it was read back and every tensor had the name, element type, shape and bytes of its input.
//!
//! A fair-esm checkpoint gets the hub's tensor names, and a config.json is written beside the output; the
//! tensor names of other inputs are kept.
//!
//! Tied weights (several names that share one storage) are each written in full, because safetensors has no
//! shared storage.

use crate::ToolError;
use plimsoll_data::atomic::AtomicFile;
use plimsoll_data::outputs::{InputFiles, OutputGuard};
use plimsoll_data::weights::{StoredTensor, Weights, safetensors_header};
use plimsoll_graph::Bytes;
use plimsoll_models::from_fair_esm;
use plimsoll_runtime::hub::CONFIG;
use plimsoll_runtime::report::{optional_path_text, path_text};
use plimsoll_runtime::{FileTransfer, Level, Observer, fair_esm};
use serde::Serialize;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::io::Write;
use std::ops::Range;
use std::path::{Path, PathBuf};

/// Options of a conversion.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConvertOptions {
    /// A weight file, an index, or a model's folder.
    pub input: PathBuf,
    /// The safetensors file.
    pub output: PathBuf,
    /// Whether to replace existing output files.
    pub force: bool,
}

impl ConvertOptions {
    /// The files that the conversion reads.
    pub fn input_files(&self) -> InputFiles {
        let mut files = InputFiles::default();
        let input = &self.input;
        let is_index = input.is_file() && input.extension().is_some_and(|ending| ending == "json");
        match input.parent().filter(|_| is_index) {
            // The shards of an index lie beside it.
            Some(folder) if folder.as_os_str().is_empty() => files.add_model(Path::new(".")),
            Some(folder) => files.add_model(folder),
            None if input.is_dir() => files.add_model(input),
            // A configuration beside a weight file is not read.
            None => files.add(input),
        }
        files
    }
}

/// Result of a conversion.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ConvertReport {
    /// The safetensors file.
    #[serde(serialize_with = "path_text")]
    pub output: PathBuf,
    /// The config.json, written for a fair-esm checkpoint.
    #[serde(serialize_with = "optional_path_text")]
    pub config: Option<PathBuf>,
    /// Number of tensors in the safetensors file.
    pub tensors: u64,
    /// Total number of elements.
    pub elements: u64,
    /// Total size of the tensors in bytes, without the header.
    pub bytes: u64,
}

/// Number of elements of a tensor in memory at a time.
const PART: u64 = 1 << 18;

/// Converts `options.input` to a safetensors file and compares the written file with the input.
pub fn convert(options: &ConvertOptions, observer: &mut dyn Observer) -> Result<ConvertReport, ToolError> {
    let ConvertOptions { input, output, force } = options;
    if output.extension().is_none_or(|suffix| suffix != "safetensors") {
        return Err(ToolError::NotSafetensors { path: output.clone() });
    }
    let mut guard = OutputGuard::new(options.input_files(), *force);
    guard.file(output)?;
    let checkpoint = fair_esm::in_folder(input)?.unwrap_or_else(|| input.clone());
    let config = if fair_esm::is_checkpoint(&checkpoint)? {
        Some((output.with_file_name(CONFIG), fair_esm::config(&checkpoint)?))
    } else {
        None
    };
    if let Some((path, _)) = &config {
        guard.file(path)?;
    }
    let weights = Weights::open(&checkpoint)?;
    let names = names(&weights, config.is_some())?;
    let tensors = in_file_order(&weights)?;
    let bytes: u64 = tensors.iter().map(|t| t.bytes()).sum();
    observer.say(Level::Info, &format!("{} tensors, {}", tensors.len(), Bytes(bytes)));

    let mut file = AtomicFile::create(output)?;
    write(
        &weights,
        &tensors,
        &names,
        &mut file,
        &mut ConvertProgress { observer, file: output, bytes, done: 0 },
    )?;
    let written = Weights::open(file.written()?)?;
    observer.say(Level::Detail, "reading it back");
    compare(&weights, &written, &names, &mut ConvertProgress { observer, file: output, bytes, done: 0 })?;
    file.commit()?;
    if let Some((path, text)) = &config {
        let mut file = AtomicFile::create(path)?;
        file.write_all(text.as_bytes()).map_err(|e| file.error(e))?;
        file.commit()?;
    }
    let elements = tensors.iter().map(|t| t.elements()).sum();
    let config = config.map(|(path, _)| path);
    Ok(ConvertReport { output: output.clone(), config, tensors: tensors.len() as u64, elements, bytes })
}

/// Maps each input tensor's name to its output name: the hub's name for a fair-esm checkpoint, else the input
/// name. `Err` if a tensor has no name on the hub, or two tensors would get one name.
fn names(weights: &Weights, is_fair_esm: bool) -> Result<BTreeMap<String, String>, ToolError> {
    let mut names = BTreeMap::new();
    let mut sources: BTreeMap<String, String> = BTreeMap::new();
    for tensor in weights.tensors() {
        let name = tensor.name();
        let renamed = if is_fair_esm { from_fair_esm(name) } else { Some(name.to_owned()) };
        let Some(renamed) = renamed else {
            return Err(ToolError::NotOnHub { path: weights.path().to_owned(), tensor: name.to_owned() });
        };
        if let Some(one) = sources.insert(renamed.clone(), name.to_owned()) {
            return Err(ToolError::SameTensor { path: weights.path().to_owned(), one, other: name.to_owned() });
        }
        names.insert(name.to_owned(), renamed);
    }
    Ok(names)
}

/// The tensors in output order: wide element types first, as the safetensors crate writes them, so that each
/// tensor starts at a multiple of its element size. `Err` if a tensor has the reserved name `__metadata__`.
fn in_file_order(weights: &Weights) -> Result<Vec<&StoredTensor>, ToolError> {
    let mut tensors: Vec<&StoredTensor> = weights.tensors().collect();
    if let Some(tensor) = tensors.iter().find(|t| t.name() == "__metadata__") {
        let path = weights.path().to_owned();
        let tensor = tensor.name().to_owned();
        return Err(ToolError::ReservedName { path, tensor });
    }
    tensors.sort_by_key(|t| (Reverse(t.dtype().size()), t.name()));
    Ok(tensors)
}

fn write(
    weights: &Weights,
    tensors: &[&StoredTensor],
    names: &BTreeMap<String, String>,
    file: &mut AtomicFile,
    told: &mut ConvertProgress<'_>,
) -> Result<(), ToolError> {
    let metadata = BTreeMap::from([("format".to_owned(), "pt".to_owned())]);
    let header =
        safetensors_header(tensors.iter().map(|t| (&*names[t.name()], t.dtype(), t.shape())), &metadata);
    file.write_all(&header).map_err(|e| file.error(e))?;
    let mut buffer = vec![];
    for tensor in tensors {
        for part in parts(tensor) {
            weights.read_bytes(tensor.name(), part, &mut buffer)?;
            file.write_all(&buffer).map_err(|e| file.error(e))?;
            told.add(buffer.len());
        }
    }
    Ok(())
}

/// `Err` unless both files have the same tensors by name, element type, shape and bytes.
fn compare(
    input: &Weights,
    written: &Weights,
    names: &BTreeMap<String, String>,
    told: &mut ConvertProgress<'_>,
) -> Result<(), ToolError> {
    let expected: BTreeSet<&String> = names.values().collect();
    if let Some(more) = written.tensors().find(|t| !expected.contains(&t.name().to_owned())) {
        return Err(differs(input, more.name()));
    }
    let mut a = vec![];
    let mut b = vec![];
    for tensor in input.tensors() {
        let other = written.expect(&names[tensor.name()], tensor.shape())?;
        if other.dtype() != tensor.dtype() {
            return Err(differs(input, tensor.name()));
        }
        for part in parts(tensor) {
            input.read_bytes(tensor.name(), part.clone(), &mut a)?;
            written.read_bytes(other.name(), part, &mut b)?;
            if a != b {
                return Err(differs(input, tensor.name()));
            }
            told.add(a.len());
        }
    }
    Ok(())
}

fn differs(input: &Weights, tensor: &str) -> ToolError {
    ToolError::NotSameAfterWriting { path: input.path().to_owned(), tensor: tensor.to_owned() }
}

/// Consecutive element ranges of at most `PART` elements that cover a tensor.
fn parts(tensor: &StoredTensor) -> impl Iterator<Item = Range<u64>> {
    let elements = tensor.elements();
    (0..elements).step_by(PART as usize).map(move |start| start..(start + PART).min(elements))
}

/// Progress of one pass over the tensors, reported to the observer.
struct ConvertProgress<'a> {
    observer: &'a mut dyn Observer,
    file: &'a Path,
    bytes: u64,
    done: u64,
}

impl ConvertProgress<'_> {
    fn add(&mut self, bytes: usize) {
        self.done += bytes as u64;
        let file = self.file.to_string_lossy();
        self.observer.transfer(&FileTransfer { file: &file, bytes: self.done, total: self.bytes });
    }
}
