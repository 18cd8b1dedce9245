//! `plimsoll classify`: predicts the class of every sequence with a linear classifier over the mean of an
//! encoder's hidden states. Reads, plans and computes as [`embed`](crate::embed) does, and writes a table of
//! scores. Invariant: the table has one line per sequence, in input order; the scores are the softmax of the
//! logits.

use crate::input::SequenceRecord;
use crate::journaled::{Committing, FileRows, NameSizes, ResultFacts};
use crate::output::{Targets, WrittenResult};
use crate::{
    BackgroundDigests, EmbedDestination, EmbedError, EmbedJob, EmbedOptions, EmbedReport, Pooling, listed, run,
};
use plimsoll_data::DataErrorKind;
use plimsoll_data::atomic::AtomicFile;
use plimsoll_data::destination::is_stream;
use plimsoll_data::names::written;
use plimsoll_data::outputs::{InputFiles, OutputGuard};
use plimsoll_data::rows::ValueType;
use plimsoll_data::sequence::{Listing, Reader};
use plimsoll_data::table::Field;
use plimsoll_data::weights::HubEnv;
use plimsoll_graph::{Bounds, Graph, VerifyError};
use plimsoll_models::{Encoder, Output, SequenceModel};
use plimsoll_runtime::hub::CONFIG;
use plimsoll_runtime::model::read_config;
use plimsoll_runtime::session::{SessionModel, WeightSource};
use plimsoll_runtime::{EncoderModel, Observer, RuntimeError, Settings, Tokenizer};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Options of [`classify`].
#[derive(Clone, Debug, PartialEq)]
pub struct ClassifyOptions {
    /// Folder of a classifier checkpoint.
    pub model: String,
    /// Sequence files, and folders of them; `-` is standard input.
    pub inputs: Vec<PathBuf>,
    /// Path of the table (TSV).
    pub output: PathBuf,
    /// Whether an existing table is overwritten; otherwise it is an error.
    pub force: bool,
    /// Whether anomalies of the input are errors, as in [`embed`](crate::EmbedOptions::strict).
    pub strict: bool,
    /// Whether sequences are reordered by length when they are packed into steps, which fills the steps better. The
    /// results are identical and in input order.
    pub sort_by_length: bool,
    /// Maximum sequence length in letters (residues or bases); `None` is [`ESM_LENGTH`](crate::ESM_LENGTH) for ESM-2
    /// and no limit for DNABERT-S.
    pub max_length: Option<usize>,
    /// Whether longer sequences are truncated to `max_length`; otherwise they are errors.
    pub truncate: bool,
    /// Whether a protein model classifies sequences whose letters are those of DNA; otherwise they are errors.
    pub allow_dna: bool,
    /// Number of batches, per tokenizer thread, that tokenization may run ahead of the encoder.
    pub prefetch: usize,
    /// Whether finished rows are kept in a journal, from which an interrupted run resumes.
    pub journal: bool,
    /// Time between two commits of finished rows to the journal.
    pub commit_every: Duration,
    /// Device, threads, memory budget and precision.
    pub settings: Settings,
}

/// Classifies all sequences of `options.inputs` and writes the scores to `options.output`.
pub fn classify(options: &ClassifyOptions, observer: &mut dyn Observer) -> Result<EmbedReport, EmbedError> {
    let start = Instant::now();
    let guard = OutputGuard::new(options.input_files(), options.force);
    let targets = Targets::file(vec![options.output.clone()], guard)?;
    // Open the inputs first, so that a missing file is an error before the model is loaded.
    Reader::open(Listing::of(&options.inputs, None)?.paths())?;
    let model = EncoderModel::open(&options.model, &HubEnv::from_process(), observer)?;
    let options =
        &ClassifyOptions { inputs: listed(&options.inputs, &model.tokenizer, observer)?, ..options.clone() };
    let names = classes(&model)?;
    let width = names.len();
    let digests = BackgroundDigests::start(&model.weights, &model.described_by)?;
    let results = ScoreTable { targets, file: None, names, sequences: 0 };
    let model = &Classifier { encoder: model, classes: width as u64 };
    // The graph of a classifier has the scores as its only output.
    let job = EmbedJob { command: "classify", start, model, digests, outputs: vec![], width, results };
    run(&options.as_embedding(), job, observer)
}

/// A linear classifier over the mean of an encoder's hidden states.
struct Classifier {
    encoder: EncoderModel,
    classes: u64,
}

impl SessionModel for Classifier {
    fn architecture(&self) -> SequenceModel {
        self.encoder.architecture()
    }

    fn tokenizer(&self) -> &Tokenizer {
        &self.encoder.tokenizer
    }

    fn weights(&self) -> &dyn WeightSource {
        &self.encoder
    }

    fn graph(&self, bounds: Bounds, _: &[Output]) -> Result<Graph, VerifyError> {
        self.encoder.encoder.classifier_graph(bounds, self.classes)
    }
}

/// Reads the class names from `config.json`. `Err` if the model has no classes, or its classifier tensors do
/// not have the shapes `(classes, D)` and `(classes)`.
fn classes(model: &EncoderModel) -> Result<Vec<String>, EmbedError> {
    let config = model.folder.as_ref().map(|folder| read_config(&folder.join(CONFIG))).transpose()?;
    let Some(names) = config.and_then(|config| Encoder::classes(&config)) else {
        return Err(EmbedError::NoClassifier { model: model.name.clone() });
    };
    let classes = names.len() as u64;
    let width = model.encoder.hidden_size();
    model.weights.expect("classifier.weight", &[classes, width])?;
    model.weights.expect("classifier.bias", &[classes])?;
    Ok(names)
}

impl ClassifyOptions {
    /// The files that a run with these options reads.
    pub fn input_files(&self) -> InputFiles {
        self.as_embedding().input_files()
    }

    /// The options of [`embed`](crate::embed) with these settings; pooling, layers and output are not used.
    fn as_embedding(&self) -> EmbedOptions {
        EmbedOptions {
            model: self.model.clone(),
            inputs: self.inputs.clone(),
            output: EmbedDestination::File(self.output.clone()),
            force: self.force,
            strict: self.strict,
            pool: Pooling::Mean,
            layers: None,
            values: ValueType::F32,
            sort_by_length: self.sort_by_length,
            max_length: self.max_length,
            truncate: self.truncate,
            allow_dna: self.allow_dna,
            prefetch: self.prefetch,
            // What a device or a pipe has received cannot be continued.
            journal: self.journal && !is_stream(&self.output),
            commit_every: self.commit_every,
            settings: self.settings.clone(),
        }
    }
}

/// Writer of the table: columns `id`, `label` and one score for each class.
struct ScoreTable {
    /// The table; `None` before [`FileRows::begin`].
    file: Option<AtomicFile>,
    names: Vec<String>,
    sequences: u64,
    /// Dropped last, so that the lock is released after the temporary file is gone.
    targets: Targets,
}

impl FileRows for ScoreTable {
    fn begin(&mut self, _: &ResultFacts, committed: usize) -> Result<(), EmbedError> {
        self.targets.check(committed)?;
        let mut file = AtomicFile::create(self.targets.main())?;
        // Class names come from a file: escape them, because a tab would shift the columns.
        self.names = self.names.iter().map(|name| written(name).into_owned()).collect();
        let scores: String = self.names.iter().map(|name| format!("\tscore.{name}")).collect();
        writeln!(file, "id\tlabel{scores}").map_err(|e| file.error(e))?;
        self.file = Some(file);
        Ok(())
    }

    fn write(
        &mut self,
        sequence: &SequenceRecord,
        scores: &[f32],
        _: Committing<'_>,
    ) -> Result<(), EmbedError> {
        let Some(file) = &mut self.file else { return Err(not_begun()) };
        // Of equal scores the first class wins.
        let best = (1..scores.len()).fold(0, |best, c| if scores[c] > scores[best] { c } else { best });
        let columns: String = scores.iter().map(|score| format!("\t{score}")).collect();
        let id = Field(&sequence.id);
        let label = Field(&self.names[best]);
        writeln!(file, "{id}\t{label}{columns}").map_err(|e| file.error(e))?;
        self.sequences += 1;
        Ok(())
    }

    fn finish(&mut self, committing: Committing<'_>) -> Result<Vec<WrittenResult>, EmbedError> {
        let Some(file) = self.file.take() else { return Err(not_begun()) };
        let path = file.target().to_owned();
        committing(0)?;
        file.commit()?;
        Ok(vec![WrittenResult { files: vec![path], sequences: self.sequences }])
    }

    fn memory_bytes(&self, _: Option<u64>, _: u64) -> u64 {
        1 << 20
    }

    fn name_bytes(&self, _: &str) -> u64 {
        0
    }

    fn check_names(&self, _: &NameSizes) -> Result<(), DataErrorKind> {
        Ok(())
    }

    fn journal(&self) -> &Path {
        &self.targets.journal
    }

    fn force(&self) -> bool {
        self.targets.force()
    }
}

fn not_begun() -> EmbedError {
    RuntimeError::bug("a table was written before it was begun").into()
}
