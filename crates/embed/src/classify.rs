//! `plimsoll classify`: from sequences to classes, by a classifier over the mean of an encoder's states. The story is
//! that of `embed`, with a table of scores at its end. Invariant: a line for each sequence, in the order of the input;
//! its scores are the softmax of the logits that training saw.

use crate::engine::{FileRows, Reading, Rows};
use crate::front::Sequence;
use crate::output::Written;
use crate::{Destination, EmbedError, Options as Embedding, Pool, Report, run};
use data::atomic::AtomicFile;
use data::pack::Order;
use data::printable::Name;
use data::sequence::Reader;
use data::weights::HubEnv;
use models::Encoder;
use runtime::hub::CONFIG;
use runtime::model::read_config;
use runtime::{EncoderModel, Observer, Settings};
use std::io::Write;
use std::path::PathBuf;
use std::time::Instant;

/// What a classification is asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// A checkpoint of a classifier: a folder.
    pub model: String,
    /// Sequence files; `-` is standard input.
    pub inputs: Vec<PathBuf>,
    /// The table.
    pub output: PathBuf,
    /// Whether a table that is there may be replaced.
    pub force: bool,
    /// As [`Embedding::sort_by_length`].
    pub sort_by_length: bool,
    /// As [`Embedding::max_length`].
    pub max_length: Option<usize>,
    /// Whether longer sequences are cut; otherwise they are errors.
    pub truncate: bool,
    /// Batches of tokens that reading may be ahead of computing.
    pub prefetch: usize,
    /// The machine.
    pub settings: Settings,
}

/// Classifies.
pub fn classify(options: &Options, observer: &mut dyn Observer) -> Result<Report, EmbedError> {
    let start = Instant::now();
    let output = &options.output;
    if output.exists() && !options.force {
        return Err(EmbedError::Exists { path: output.clone() });
    }
    // Missing files are found before anything else happens.
    Reader::open(&options.inputs)?;
    let model = EncoderModel::open(&options.model, &HubEnv::from_process(), observer)?;
    let names = classes(&model)?;
    let reading = Reading {
        pool: Pool::Mean,
        outputs: vec!["scores".to_owned()],
        width: names.len(),
        order: if options.sort_by_length { Order::ByLength } else { Order::Input },
    };
    let count = names.len() as u64;
    let graph = &|bounds| model.encoder.classifier_graph(bounds, count);
    let table = Table::create(options, names)?;
    run(&options.as_embedding(), start, &model, reading, table, graph, observer)
}

/// The names of a model's classes, whose tensors are there.
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
    /// How sequences are read and steps are planned.
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
            prefetch: self.prefetch,
            settings: self.settings.clone(),
        }
    }
}

/// `id`, `label`, and the score of every class.
struct Table {
    file: AtomicFile,
    names: Vec<String>,
    sequences: u64,
}

impl Table {
    fn create(options: &Options, names: Vec<String>) -> Result<Self, EmbedError> {
        let mut file = AtomicFile::create(&options.output)?;
        // A name is what a file says: a tab in it would be a column.
        let names: Vec<String> = names.iter().map(|name| Name(name).to_string()).collect();
        let scores: String = names.iter().map(|name| format!("\tscore.{name}")).collect();
        writeln!(file, "id\tlabel{scores}").map_err(|e| file.error(e))?;
        Ok(Self { file, names, sequences: 0 })
    }
}

impl FileRows for Table {
    fn held(&self, _: Option<u64>, _: u64) -> u64 {
        1 << 20
    }
}

impl Rows for Table {
    type Written = Vec<Written>;

    fn write(&mut self, sequence: &Sequence, scores: &[f32]) -> Result<(), EmbedError> {
        // The first of equal ones.
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
