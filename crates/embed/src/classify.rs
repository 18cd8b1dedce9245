//! `plimsoll classify`: predicts the class of every sequence with a linear classifier over the mean of an
//! encoder's hidden states. Reads, plans and computes as [`embed`](crate::embed) does, and writes a table of
//! scores. Invariant: the table has one line per sequence, in input order; the scores are the softmax of the
//! logits.

use crate::engine::{FileRows, OutputLayout, Rows};
use crate::input::Sequence;
use crate::output::Written;
use crate::{Destination, EmbedError, EmbedReport, Options as Embedding, Pool, run};
use plimsoll_data::atomic::AtomicFile;
use plimsoll_data::pack::Order;
use plimsoll_data::printable::Name;
use plimsoll_data::sequence::Reader;
use plimsoll_data::weights::HubEnv;
use plimsoll_models::Encoder;
use plimsoll_runtime::hub::CONFIG;
use plimsoll_runtime::model::read_config;
use plimsoll_runtime::{EncoderModel, Observer, Settings};
use std::io::Write;
use std::path::PathBuf;
use std::time::Instant;

/// Options of [`classify`].
#[derive(Clone, Debug, PartialEq)]
pub struct Options {
    /// Folder of a classifier checkpoint.
    pub model: String,
    /// Sequence files; `-` is standard input.
    pub inputs: Vec<PathBuf>,
    /// Path of the table (TSV).
    pub output: PathBuf,
    /// Whether an existing table is overwritten; otherwise it is an error.
    pub force: bool,
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
    /// Device, threads, memory budget and precision.
    pub settings: Settings,
}

/// Classifies all sequences of `options.inputs` and writes the scores to `options.output`.
pub fn classify(options: &Options, observer: &mut dyn Observer) -> Result<EmbedReport, EmbedError> {
    let start = Instant::now();
    let output = &options.output;
    if output.exists() && !options.force {
        return Err(EmbedError::Exists { path: output.clone() });
    }
    // Open the inputs first, so that a missing file is an error before the model is loaded.
    Reader::open(&options.inputs)?;
    let model = EncoderModel::open(&options.model, &HubEnv::from_process(), observer)?;
    let names = classes(&model)?;
    let reading = OutputLayout {
        pool: Pool::Mean,
        outputs: vec!["scores".to_owned()],
        width: names.len(),
        order: if options.sort_by_length { Order::ByLength } else { Order::Input },
    };
    let count = names.len() as u64;
    let graph = &|bounds| model.encoder.classifier_graph(bounds, count);
    let table = Table::create(options, names)?;
    run(&options.as_embedding(), start, &(&model).into(), reading, table, graph, observer)
}

/// Reads the class names from `config.json`. `Err` if the model has no classes, or its classifier tensors do
/// not have the shapes `(classes, D)` and `(classes)`.
fn classes(model: &EncoderModel) -> Result<Vec<String>, EmbedError> {
    let config = model.folder.as_ref().map(|folder| read_config(&folder.join(CONFIG))).transpose()?;
    let Some(names) = config.and_then(|config| Encoder::classes(&config)) else {
        return Err(EmbedError::NoClassifier { model: model.name.clone() });
    };
    let (classes, width) = (names.len() as u64, model.encoder.hidden_size());
    model.weights.expect("classifier.weight", &[classes, width])?;
    model.weights.expect("classifier.bias", &[classes])?;
    Ok(names)
}

impl Options {
    /// The options of [`embed`](crate::embed) with these settings; pooling, layers and output are not used.
    fn as_embedding(&self) -> Embedding {
        Embedding {
            model: self.model.clone(),
            inputs: self.inputs.clone(),
            output: Destination::File(self.output.clone()),
            force: self.force,
            pool: Pool::Mean,
            layers: None,
            sort_by_length: self.sort_by_length,
            max_length: self.max_length,
            truncate: self.truncate,
            allow_dna: self.allow_dna,
            prefetch: self.prefetch,
            settings: self.settings.clone(),
        }
    }
}

/// Writer of the table: columns `id`, `label` and one score for each class.
struct Table {
    file: AtomicFile,
    names: Vec<String>,
    sequences: u64,
}

impl Table {
    fn create(options: &Options, names: Vec<String>) -> Result<Self, EmbedError> {
        let mut file = AtomicFile::create(&options.output)?;
        // Class names come from a file: escape them, because a tab would shift the columns.
        let names: Vec<String> = names.iter().map(|name| Name(name).to_string()).collect();
        let scores: String = names.iter().map(|name| format!("\tscore.{name}")).collect();
        writeln!(file, "id\tlabel{scores}").map_err(|e| file.error(e))?;
        Ok(Self { file, names, sequences: 0 })
    }
}

impl FileRows for Table {
    fn memory_bytes(&self, _: Option<u64>, _: u64) -> u64 {
        1 << 20
    }
}

impl Rows for Table {
    type Written = Vec<Written>;

    fn write(&mut self, sequence: &Sequence, scores: &[f32]) -> Result<(), EmbedError> {
        // Of equal scores the first class wins.
        let best = (1..scores.len()).fold(0, |best, c| if scores[c] > scores[best] { c } else { best });
        let columns: String = scores.iter().map(|score| format!("\t{score}")).collect();
        let file = &mut self.file;
        writeln!(file, "{}\t{}{columns}", sequence.id, self.names[best]).map_err(|e| file.error(e))?;
        self.sequences += 1;
        Ok(())
    }

    fn finish(self) -> Result<Vec<Written>, EmbedError> {
        let path = self.file.target().to_owned();
        self.file.commit()?;
        Ok(vec![Written { files: vec![path], sequences: self.sequences }])
    }
}
