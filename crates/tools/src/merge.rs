//! `plimsoll merge`: merges an adapter into its base model, `W + alpha / r B A` (Hu et al. 2021). Invariant: nothing is
//! written unless every tensor of the adapter matches a weight; the output folder appears complete or not at all.

use crate::ToolError;
use plimsoll_data::atomic::{AtomicFile, sync_folder};
use plimsoll_data::outputs::InputFiles;
use plimsoll_data::weights::{
    FileDType, HubEnv, StoredTensor, Weights, f32_to_bf16, f32_to_f16, safetensors_header,
};
use plimsoll_models::{Encoder, TrainingTask, TunedPart};
use plimsoll_runtime::adapter::{self, Adapter};
use plimsoll_runtime::hub::tokenizer_files;
use plimsoll_runtime::hub::{self, CONFIG};
use plimsoll_runtime::lock::{self, Lock};
use plimsoll_runtime::report::path_text;
use plimsoll_runtime::{EncoderModel, Level, Observer, RuntimeError};
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};

/// Number of elements of a tensor in memory at a time.
const PART: u64 = 1 << 18;

/// Options of a merge.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MergeOptions {
    /// The adapter's folder.
    pub adapter: PathBuf,
    /// The base model; `None` uses the model named by the adapter.
    pub base: Option<String>,
    /// The folder to create.
    pub output: PathBuf,
}

impl MergeOptions {
    /// The files that the merge reads.
    pub fn input_files(&self) -> InputFiles {
        let mut files = InputFiles::default();
        files.add_model(&self.adapter);
        self.base.iter().for_each(|base| hub::add_model_files(base, &mut files));
        files
    }
}

/// Result of a merge.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct MergeReport {
    /// The folder.
    #[serde(serialize_with = "path_text")]
    pub output: PathBuf,
    /// Number of weights to which an adapter was added.
    pub adapted: u64,
    /// Number of tensors in the output file.
    pub tensors: u64,
}

/// Merges an adapter into its base model and writes a model folder.
pub fn merge(options: &MergeOptions, observer: &mut dyn Observer) -> Result<MergeReport, ToolError> {
    let MergeOptions { adapter: folder, base, output } = options;
    // A link that leads nowhere is somebody's too.
    if fs::symlink_metadata(output).is_ok() {
        return Err(ToolError::Exists { path: output.clone(), advice: "another name" });
    }
    let adapter = Adapter::open(folder)?;
    let tensors = Weights::open(&folder.join(adapter::WEIGHTS))?;
    let name = base.clone().unwrap_or_else(|| adapter.base.clone());
    let model = EncoderModel::open(&name, &HubEnv::from_process(), observer)?;
    let merging = Merging::new(&model, &adapter, &tensors)?;
    let adapted = merging.pairs.len() as u64;
    let count = merging.written().len() as u64;
    observer.say(Level::Info, &format!("{adapted} adapters of rank {} into {}", adapter.rank, model.name));
    // The folder is filled under a temporary name beside the output and then renamed, so that an interrupted
    // merge never leaves a partial model under the output's name.
    let temporary =
        output.with_file_name(format!(".{}.part", output.file_name().unwrap_or_default().to_string_lossy()));
    // Held until the folder has its name: the lock tells a running merge from the remains of a killed one.
    let _lock = claim(&temporary, output)?;
    let done = merging.fill(&temporary, folder).and_then(|()| {
        fs::rename(&temporary, output).map_err(RuntimeError::io(output))?;
        Ok(sync_folder(output).map_err(RuntimeError::io(output))?)
    });
    if done.is_err() {
        // Best effort: an error of the removal must not hide the first error.
        let _ = fs::remove_dir_all(&temporary);
    }
    done.map(|()| MergeReport { output: output.clone(), adapted, tensors: count })
}

/// Creates and locks the temporary folder of a merge into `output`. A folder that a killed merge left behind is emptied
/// and used; `Err` if another merge holds its lock, or if nobody can tell because the file system has no locks.
fn claim(temporary: &Path, output: &Path) -> Result<Lock, ToolError> {
    let is_left = match fs::create_dir(temporary) {
        Ok(()) => false,
        Err(e) if e.kind() == ErrorKind::AlreadyExists => true,
        Err(e) => return Err(RuntimeError::io(output)(e).into()),
    };
    // A link could lead to a folder that is not a merge's.
    if !fs::symlink_metadata(temporary).is_ok_and(|facts| facts.is_dir()) {
        return Err(ToolError::LeftBehind { path: temporary.to_owned() });
    }
    let lock = lock::take(temporary, &[])?;
    // Another merge may have ended, and renamed the folder, between the first look at `output` and the lock.
    if fs::symlink_metadata(output).is_ok() {
        return Err(ToolError::Exists { path: output.to_owned(), advice: "another name" });
    }
    if is_left && !lock.is_held() {
        return Err(ToolError::LeftBehind { path: temporary.to_owned() });
    }
    for entry in fs::read_dir(temporary).map_err(RuntimeError::io(temporary))? {
        let path = entry.map_err(RuntimeError::io(temporary))?.path();
        // A merge writes no folders: one in it is somebody else's, and an error.
        fs::remove_file(&path).map_err(RuntimeError::io(&path))?;
    }
    Ok(lock)
}

/// The matrices A and B of an adapter, held in full because their ranks are small.
struct AdapterMatrices {
    a: Vec<f32>,
    b: Vec<f32>,
}

/// The inputs of a merge, validated against each other.
struct Merging<'a> {
    model: &'a EncoderModel,
    task: TrainingTask,
    /// Tensors of a classifier that was trained together with the adapter.
    classifier: Vec<&'a StoredTensor>,
    tensors: &'a Weights,
    /// Adapter matrices by the name of the base model's weight.
    pairs: BTreeMap<String, AdapterMatrices>,
    rank: u64,
    /// Scale of B A: alpha / rank.
    scale: f64,
}

impl<'a> Merging<'a> {
    /// Matches every tensor of the adapter to a weight of the model. `Err` for a tensor without a match, or a
    /// shape that fits neither the rank nor the weight.
    fn new(model: &'a EncoderModel, adapter: &Adapter, tensors: &'a Weights) -> Result<Self, ToolError> {
        let foreign = |name: &str| ToolError::AdapterTensor {
            path: tensors.path().to_owned(),
            tensor: name.to_owned(),
            model: model.name.clone(),
        };
        let mut modules = BTreeSet::new();
        let mut classifier = vec![];
        for tensor in tensors.tensors() {
            let name = tensor.name().strip_prefix(adapter::PREFIX).ok_or_else(|| foreign(tensor.name()))?;
            match TunedPart::of(name) {
                TunedPart::AdapterA { module } | TunedPart::AdapterB { module } => {
                    modules.insert(module);
                }
                TunedPart::Classifier if ["classifier.weight", "classifier.bias"].contains(&name) => {
                    classifier.push(tensor);
                }
                TunedPart::Classifier | TunedPart::Base => return Err(foreign(tensor.name())),
            }
        }
        let mut pairs = BTreeMap::new();
        for module in modules {
            let weight = weight(model, module).ok_or_else(|| foreign(module))?;
            let &[n, k] = model.weights.tensor(&weight)?.shape() else { return Err(foreign(module)) };
            let prefix = format!("{}{module}", adapter::PREFIX);
            let a = read_matrix(tensors, &format!("{prefix}.lora_A.weight"), [adapter.rank, k])?;
            let b = read_matrix(tensors, &format!("{prefix}.lora_B.weight"), [n, adapter.rank])?;
            pairs.insert(weight, AdapterMatrices { a, b });
        }
        let classes = classifier.iter().find(|t| t.shape().len() == 2).map(|t| t.shape()[0]);
        if adapter.classifier != (classifier.len() == 2 && classes.is_some()) {
            return Err(foreign("classifier"));
        }
        let task = classes.map_or(TrainingTask::MaskedLm, TrainingTask::Classes);
        let scale = adapter.alpha / adapter.rank as f64;
        Ok(Self { model, task, classifier, tensors, pairs, rank: adapter.rank, scale })
    }

    /// The tensors to write: with a classifier, the language-model head and any earlier classifier are left out.
    fn written(&self) -> Vec<&StoredTensor> {
        let all = self.model.weights.tensors().filter(|t| {
            let head = t.name().starts_with("lm_head.") || t.name().starts_with("cls.");
            let replaced = t.name().starts_with("classifier.");
            self.task == TrainingTask::MaskedLm || !(head || replaced)
        });
        all.chain(self.classifier.iter().copied()).collect()
    }

    /// Writes the files of the output folder.
    fn fill(&self, folder: &Path, adapter: &Path) -> Result<(), ToolError> {
        let path = folder.join("model.safetensors");
        let mut file = AtomicFile::create(&path)?;
        let tensors = self.written();
        let metadata = BTreeMap::from([("format".to_owned(), "pt".to_owned())]);
        let entries = tensors.iter().map(|tensor| {
            let name = tensor.name().strip_prefix(adapter::PREFIX).unwrap_or(tensor.name());
            (name, tensor.dtype(), tensor.shape())
        });
        file.write_all(&safetensors_header(entries, &metadata)).map_err(|e| file.error(e))?;
        for tensor in tensors {
            self.write(tensor, &mut file)?;
        }
        file.commit()?;
        let source = match &self.model.folder {
            Some(folder) => plimsoll_runtime::model::read_config(&folder.join(CONFIG))?,
            None => String::new(),
        };
        let text = self.model.encoder.to_json(self.task, &source).into_bytes();
        // The tokenizer files of the adapter's training, or else the base model's.
        let adapter_files = tokenizer_files(adapter)?;
        let files = match (adapter_files.is_empty(), &self.model.folder) {
            (true, Some(folder)) => tokenizer_files(folder)?,
            (_, _) => adapter_files,
        };
        for (name, bytes) in std::iter::once((CONFIG.to_owned(), text)).chain(files) {
            let mut file = AtomicFile::create(folder.join(name))?;
            file.write_all(&bytes).map_err(|e| file.error(e))?;
            file.commit()?;
        }
        Ok(())
    }

    /// Writes a tensor, row by row if it has an adapter, else in larger pieces.
    fn write(&self, tensor: &StoredTensor, file: &mut AtomicFile) -> Result<(), ToolError> {
        let name = tensor.name();
        let weights = if self.model.weights.get(name).is_some() { &*self.model.weights } else { self.tensors };
        let pair = self.pairs.get(name);
        // With an adapter a part is one row of the weight, so that `n` below is the row's number.
        let part = pair.and_then(|_| tensor.shape().last().copied()).unwrap_or(PART);
        let mut buffer = vec![];
        let mut values = vec![];
        for (n, first) in (0..tensor.elements()).step_by(part.max(1) as usize).enumerate() {
            let range = first..(first + part).min(tensor.elements());
            weights.read_bytes(name, range.clone(), &mut buffer)?;
            if let Some(pair) = pair {
                values.resize(part as usize, 0.0);
                weights.read_f32(name, range, &mut values)?;
                pair.add(n, self.rank as usize, self.scale, &mut values);
                store(&values, tensor.dtype(), &mut buffer);
            }
            file.write_all(&buffer).map_err(|e| file.error(e))?;
        }
        Ok(())
    }
}

impl AdapterMatrices {
    /// Adds row `n` of scale B A to the same row of W, summing in f64.
    fn add(&self, n: usize, rank: usize, scale: f64, row: &mut [f32]) {
        let b = &self.b[n * rank..(n + 1) * rank];
        for (j, w) in row.iter_mut().enumerate() {
            // A is row-major (r, k): column j is every k-th element from j, where k = len / r.
            let column = self.a.iter().skip(j).step_by(self.a.len() / rank);
            let product: f64 = b.iter().zip(column).map(|(b, a)| f64::from(*b) * f64::from(*a)).sum();
            *w = (f64::from(*w) + scale * product) as f32;
        }
    }
}

/// Reads a matrix of an adapter, whose shape must be `shape`.
fn read_matrix(tensors: &Weights, name: &str, shape: [u64; 2]) -> Result<Vec<f32>, ToolError> {
    tensors.expect(name, &shape)?;
    let mut values = vec![0.0; (shape[0] * shape[1]) as usize];
    tensors.read_f32(name, 0..values.len() as u64, &mut values)?;
    Ok(values)
}

/// The base model's name for a module's weight; adapters use the hub's module names.
fn weight(model: &EncoderModel, module: &str) -> Option<String> {
    let prefix = match model.encoder {
        Encoder::Esm2(_) => "esm.",
        Encoder::DnabertS(_) => "bert.",
    };
    model.find(&format!("{}.weight", module.strip_prefix(prefix).unwrap_or(module)))
}

/// Encodes values in a file's element type. Integer types cannot occur here, because `read_f32` refuses tensors
/// of integers.
fn store(values: &[f32], dtype: FileDType, bytes: &mut Vec<u8>) {
    bytes.clear();
    for &x in values {
        match dtype {
            FileDType::F64 => bytes.extend(f64::from(x).to_le_bytes()),
            FileDType::F32 => bytes.extend(x.to_le_bytes()),
            FileDType::F16 => bytes.extend(f32_to_f16(x).to_le_bytes()),
            FileDType::BF16 => bytes.extend(f32_to_bf16(x).to_le_bytes()),
            FileDType::I64
            | FileDType::I32
            | FileDType::I16
            | FileDType::I8
            | FileDType::U8
            | FileDType::Bool => {}
        }
    }
}
