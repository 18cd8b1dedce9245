//! Options of a prediction. Invariant: two runs whose methods have equal `parameters`, with equal inputs, weights and
//! arithmetic, write identical bytes.

use crate::folder::JOURNALS;
use crate::methods::caller::calibration::ThresholdPreset;
use crate::methods::caller::score::{CallLimits, Threshold};
use crate::output::{EmbeddingFormat, HitsFormat};
use plimsoll_data::outputs::InputFiles;
use plimsoll_runtime::{Settings, hub, machine};
use std::path::PathBuf;
use std::time::Duration;

/// Options of a prediction.
#[derive(Clone, Debug)]
pub struct PredictOptions {
    /// Sequence files; `-` is standard input.
    pub inputs: Vec<PathBuf>,
    /// Folder of the results.
    pub output_dir: PathBuf,
    /// Whether the results of another run in that folder may be replaced.
    pub force: bool,
    /// The method with its own options.
    pub method: MethodOptions,
    /// Window length in bases.
    pub length: usize,
    /// Format of the file of records called virus.
    pub hits_format: HitsFormat,
    /// Whether notes on the input, such as duplicate ids, are errors.
    pub strict: bool,
    /// Number of threads that translate and tokenize.
    pub workers: usize,
    /// Number of jobs in flight per worker thread.
    pub prefetch: usize,
    /// Interval between two commits of the journal; 0 commits whenever a window is finished.
    pub commit_every: Duration,
    /// Shard of the windows to compute, for a later merge; `None` for all windows.
    pub shard: Option<WindowShard>,
    /// Folders of shards whose results are merged; if not empty, nothing is computed.
    pub merge: Vec<PathBuf>,
    /// Whether `predictions.tsv` and `windows.tsv` have a column `source` with the input file of each row.
    pub source: bool,
    /// Whether sequences are batched by length rather than in input order, which fills steps better. Results are the
    /// same.
    pub sort_by_length: bool,
    /// Settings of the machine.
    pub settings: Settings,
}

/// Default window length in bases.
pub const USUAL_LENGTH: usize = 500;

/// Default number of jobs in flight per worker thread, and of in-flight steps on a GPU.
pub const USUAL_PREFETCH: usize = 2;

/// Maximum default number of reading and translating threads per device.
const MAX_WORKERS_PER_DEVICE: usize = 8;

impl PredictOptions {
    /// A prediction on these machines with the usual settings: windows of [`USUAL_LENGTH`] bases, all windows, no file replaced.
    pub fn usual(inputs: Vec<PathBuf>, output_dir: PathBuf, method: MethodOptions, settings: Settings) -> Self {
        Self {
            inputs,
            output_dir,
            force: false,
            method,
            length: USUAL_LENGTH,
            hits_format: HitsFormat::Fasta,
            strict: false,
            workers: usual_workers(&settings),
            prefetch: USUAL_PREFETCH,
            commit_every: Duration::from_secs(5),
            shard: None,
            merge: vec![],
            source: false,
            sort_by_length: true,
            settings,
        }
    }
}

/// Default number of threads that read and translate.
pub fn usual_workers(settings: &Settings) -> usize {
    machine::cores().min(MAX_WORKERS_PER_DEVICE * settings.device.count())
}

/// A method of finding viral sequences, with its options.
#[derive(Clone, Debug, PartialEq)]
pub enum MethodOptions {
    /// VirNucPro's pipeline: two encoders and a head over open reading frames.
    VirNucPro(VirNucProOptions),
    /// A caller: a classifier of windows with a calibration.
    Caller(CallerOptions),
}

/// Options of VirNucPro's pipeline.
#[derive(Clone, Debug, PartialEq)]
pub struct VirNucProOptions {
    /// The models.
    pub models: Models,
    /// Whether letters are interpreted as in VirNucPro, which drops codons with U. Otherwise U is read as T.
    pub original_alphabet: bool,
    /// Minimum score of a record that is called virus.
    pub threshold: f32,
    /// Whether to write the intermediate files of VirNucPro's stages.
    pub keep_intermediate: bool,
    /// Format in which embeddings are saved; `None` to not save them.
    pub save_embeddings: Option<EmbeddingFormat>,
}

impl VirNucProOptions {
    /// Default of [`VirNucProOptions::threshold`].
    pub const USUAL_THRESHOLD: f32 = 0.5;

    /// VirNucPro's pipeline with these models and the usual settings.
    pub fn usual(models: Models) -> Self {
        Self {
            models,
            original_alphabet: false,
            threshold: Self::USUAL_THRESHOLD,
            keep_intermediate: false,
            save_embeddings: None,
        }
    }
}

/// Options of a prediction with a caller.
#[derive(Clone, Debug, PartialEq)]
pub struct CallerOptions {
    /// Folder of the caller: config.json, model.safetensors and calibration.json; `None` is the built-in caller.
    pub folder: Option<PathBuf>,
    /// The threshold from which on a record is called virus.
    pub threshold: Threshold,
    /// Largest false discovery rate of a record that is called virus; `None` without a limit.
    pub max_fdr: Option<f64>,
    /// Expected share of viral records in the input, above 0 and below 1.
    pub prevalence: f64,
    /// Whether the records are mates of pairs: in two files, or one after another.
    pub paired: bool,
    /// Limits on records that can be called.
    pub limits: CallLimits,
}

impl CallerOptions {
    /// The caller in `folder`, or the built-in one, with the usual settings.
    pub fn usual(folder: Option<PathBuf>) -> Self {
        Self {
            folder,
            threshold: Threshold::Preset(ThresholdPreset::Default),
            max_fdr: None,
            prevalence: 0.5,
            paired: false,
            limits: CallLimits::default(),
        }
    }
}

/// A shard of the windows. Groups of consecutive windows are assigned to the shards in turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WindowShard {
    /// Number of the shard, from 1.
    pub number: u64,
    /// Total number of shards.
    pub of: u64,
}

impl WindowShard {
    /// Number of consecutive windows in a group.
    const GROUP: u64 = 256;

    /// Whether window `number` of the input belongs to the shard.
    pub fn contains(self, number: u64) -> bool {
        number / Self::GROUP % self.of == self.number - 1
    }
}

/// Names of the models.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Models {
    /// Nucleotide encoder: a path or a hub id; `None` is the built-in one.
    pub dna: Option<String>,
    /// Protein encoder: a path or a hub id; `None` is the built-in one.
    pub protein: Option<String>,
    /// The head; `None` is the built-in one.
    pub head: Option<PathBuf>,
}

impl PredictOptions {
    /// The files that a run with these options reads: sequences, models, and the folders of merged shards.
    pub fn input_files(&self) -> InputFiles {
        let mut files = InputFiles::default();
        self.inputs.iter().for_each(|path| files.add(path));
        self.merge.iter().for_each(|folder| files.add_named(folder, &JOURNALS));
        match &self.method {
            MethodOptions::Caller(caller) => caller.folder.iter().for_each(|folder| files.add_model(folder)),
            MethodOptions::VirNucPro(VirNucProOptions { models, .. }) => {
                let Models { dna, protein, head } = models;
                dna.iter().chain(protein).for_each(|model| hub::add_model_files(model, &mut files));
                head.iter().for_each(|head| files.add(head));
            }
        }
        files
    }
}
