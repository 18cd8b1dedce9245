//! The data of a run: translates the configuration into settings of the `data` crate, and reads packs from its streams.
//! Invariant: the saved position in the training data is the position after the pack taken last, regardless of evaluations
//! since.

use super::config::{BinType, DataFormat, DataSection, DocumentUnit, MaskUnit, ModelKind, TrainConfig};
use super::opened_model::Taken;
use crate::TrainError;
use plimsoll_data::codons;
use plimsoll_data::train::crops::{
    CropObjective, CropPack, CropPosition, CropSet, CropSettings, CropStream, CropTask, CropTokenizer,
    Mutations, SamplingLevel, ShuffledCrops, ValidationCrops,
};
use plimsoll_data::train::rows::{RowGroupPart, RowPack, RowPosition, RowSet, RowSettings, RowStream};
use plimsoll_data::train::{
    Classes, DataMemory, DataPosition, Dataset, DatasetSettings, DatasetStats, DatasetStream, IdWidth,
    LabelsFrom, MaskRates, NamedFormat, Objective, PackLimits, Shuffle, Split, TextDocuments, TokenizerKind,
    TrainingPack, Validation, Vocabulary, class_words,
};
use plimsoll_runtime::hub::TOKENIZER;
use plimsoll_runtime::{RuntimeError, machine};
use serde_json::Value;
use std::path::{Path, PathBuf};

/// Source of training and validation packs.
pub enum TrainFeed {
    /// Documents, tokenized.
    Tokens(Box<TokenFeed>),
    /// Embeddings with classes, for training a head.
    Rows(Box<RowFeed>),
    /// Windows of DNA records, for training a caller.
    Crops(Box<CropFeed>),
}

/// Packs of tokens.
pub struct TokenFeed {
    dataset: Dataset,
    /// Opened when the first pack is taken, so that planning holds no threads and buffers.
    train: Option<DatasetStream>,
    validation: Option<DatasetStream>,
    /// The pack taken last.
    pub pack: TrainingPack,
}

/// Packs of embeddings.
pub struct RowFeed {
    set: RowSet,
    train: Option<RowStream>,
    validation: Option<RowStream>,
    /// The pack taken last.
    pub pack: RowPack,
}

/// Packs of DNA windows.
pub struct CropFeed {
    set: CropSet,
    train: Option<CropStream>,
    validation: Option<CropStream>,
    /// The pack taken last.
    pub pack: CropPack,
}

/// Size of an epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct EpochSize {
    /// Number of packs.
    pub packs: u64,
    /// Number of their tokens; rows for a head.
    pub tokens: u64,
}

/// Sizes of the data of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DataSummary {
    /// Counted unit: `documents`, `rows` or `records`.
    pub unit: &'static str,
    /// Number that is trained on.
    pub training: u64,
    /// Number that is held out for evaluations.
    pub validation: u64,
    /// Number of validation documents that are left out because they are trained on too.
    pub dropped: u64,
    /// About how many tokens an epoch has; `None` where they are not counted, or drawn without end.
    pub tokens_of_epoch: Option<u64>,
}

impl TrainFeed {
    /// Opens the data set, reading all of it once; `bounds` are those of a pack. `tokenizer` is the tokenizer.json next to the
    /// initial weights, if there is one.
    pub fn open(
        config: &TrainConfig,
        bounds: PackLimits,
        tokenizer: Option<&Path>,
    ) -> Result<Self, TrainError> {
        if config.model.kind == ModelKind::Head {
            let set = RowSet::open(row_settings(config, bounds.tokens)?)?;
            let train = None;
            let validation = None;
            let pack = RowPack::default();
            return Ok(Self::Rows(Box::new(RowFeed { set, train, validation, pack })));
        }
        if config.model.kind == ModelKind::Caller {
            let set = CropSet::open(crop_settings(config, bounds)?)?;
            let train = None;
            let validation = None;
            let pack = set.pack();
            return Ok(Self::Crops(Box::new(CropFeed { set, train, validation, pack })));
        }
        let dataset = Dataset::open(settings(config, bounds, tokenizer)?)?;
        let records = dataset.census().nucleotides;
        if config.model.kind == ModelKind::Esm2 && !config.data.allow_dna && records > 0 {
            return Err(TrainError::Nucleotides { records, kind: config.model.kind.name() });
        }
        let pack = TrainingPack::with_capacity(&bounds);
        Ok(Self::Tokens(Box::new(TokenFeed { dataset, train: None, validation: None, pack })))
    }

    /// Notes on the data files, a line each: what was skipped in folders, dropped from sequences, or is unknown to the tokenizer.
    pub fn notes(&self) -> Vec<String> {
        let (skipped, notes) = match self {
            Self::Tokens(feed) => (feed.dataset.skipped(), feed.dataset.notes()),
            Self::Crops(feed) => (feed.set.skipped(), feed.set.notes()),
            Self::Rows(_) => (None, &[][..]),
        };
        skipped.map(str::to_owned).into_iter().chain(notes.iter().map(ToString::to_string)).collect()
    }

    /// Reads the next training pack; `None` at the end of an epoch.
    pub fn take(&mut self) -> Result<Option<Taken>, TrainError> {
        match self {
            Self::Tokens(feed) => {
                let stream = match &mut feed.train {
                    Some(stream) => stream,
                    none => none.insert(feed.dataset.stream(Split::Train, &feed.dataset.start())?),
                };
                let filled = stream.fill(&mut feed.pack)?;
                Ok(filled.then(|| tokens_of(&feed.pack)))
            }
            Self::Rows(feed) => {
                let stream = match &mut feed.train {
                    Some(stream) => stream,
                    none => none.insert(feed.set.stream(Split::Train, &feed.set.start())?),
                };
                let filled = stream.fill(&mut feed.pack)?;
                Ok(filled.then(|| rows_of(&feed.pack)))
            }
            Self::Crops(feed) => {
                let stream = match &mut feed.train {
                    Some(stream) => stream,
                    none => none.insert(feed.set.stream(Split::Train, &feed.set.start())?),
                };
                let filled = stream.fill(&mut feed.pack)?;
                Ok(filled.then(|| crops_of(&feed.pack, feed.set.settings().objective)))
            }
        }
    }

    /// Reads the next validation pack; `None` at the end of the validation data.
    pub(crate) fn take_validation(&mut self) -> Result<Option<Taken>, TrainError> {
        match self {
            Self::Tokens(feed) => {
                let Some(stream) = &mut feed.validation else { return Ok(None) };
                let filled = stream.fill(&mut feed.pack)?;
                Ok(filled.then(|| tokens_of(&feed.pack)))
            }
            Self::Rows(feed) => {
                let Some(stream) = &mut feed.validation else { return Ok(None) };
                let filled = stream.fill(&mut feed.pack)?;
                Ok(filled.then(|| rows_of(&feed.pack)))
            }
            Self::Crops(feed) => {
                let Some(stream) = &mut feed.validation else { return Ok(None) };
                let filled = stream.fill(&mut feed.pack)?;
                Ok(filled.then(|| validation_crops_of(&feed.pack)))
            }
        }
    }

    /// Whether the data has a validation split.
    pub(crate) fn validates(&self, config: &TrainConfig) -> bool {
        match self {
            Self::Tokens(_) | Self::Rows(_) => validates(config),
            Self::Crops(_) => true,
        }
    }

    /// Restarts the validation data from its beginning.
    pub fn rewind(&mut self) -> Result<(), TrainError> {
        match self {
            Self::Tokens(feed) => {
                feed.validation = Some(feed.dataset.stream(Split::Validation, &feed.dataset.start())?);
            }
            Self::Rows(feed) => feed.validation = Some(feed.set.stream(Split::Validation, &feed.set.start())?),
            Self::Crops(feed) => feed.validation = Some(feed.set.stream(Split::Validation, &feed.set.start())?),
        }
        Ok(())
    }

    /// Returns the position in the training data.
    pub fn position(&self) -> Result<Value, TrainError> {
        let position = match self {
            Self::Tokens(feed) => {
                let place = feed.train.as_ref().map(|stream| stream.position().clone());
                serde_json::to_value(place.unwrap_or_else(|| feed.dataset.start()))
            }
            Self::Rows(feed) => {
                let place = feed.train.as_ref().map(|stream| stream.position().clone());
                serde_json::to_value(place.unwrap_or_else(|| feed.set.start()))
            }
            Self::Crops(feed) => {
                let place = feed.train.as_ref().map(|stream| stream.position().clone());
                serde_json::to_value(place.unwrap_or_else(|| feed.set.start()))
            }
        };
        position.map_err(|e| RuntimeError::bug(format!("the place in the data: {e}")).into())
    }

    /// Continues the training data at a position.
    pub fn seek(&mut self, position: &Value) -> Result<(), TrainError> {
        if position.is_object() && position.get("pack").is_none() {
            return Err(TrainError::PositionBeforePacks);
        }
        match self {
            Self::Tokens(feed) => {
                let position: DataPosition =
                    serde_json::from_value(position.clone()).map_err(damaged_position)?;
                feed.train = Some(feed.dataset.stream(Split::Train, &position)?);
            }
            Self::Rows(feed) => {
                let position: RowPosition =
                    serde_json::from_value(position.clone()).map_err(damaged_position)?;
                feed.train = Some(feed.set.stream(Split::Train, &position)?);
            }
            Self::Crops(feed) => {
                let position: CropPosition =
                    serde_json::from_value(position.clone()).map_err(damaged_position)?;
                feed.train = Some(feed.set.stream(Split::Train, &position)?);
            }
        }
        Ok(())
    }

    /// Returns upper bounds of the host memory that the data holds, including one pack; if the run `evaluates`,
    /// including a second stream.
    pub fn host_bytes(&self, evaluates: bool) -> Vec<DataMemory> {
        let (mut held, pack) = match self {
            Self::Tokens(feed) => {
                (feed.dataset.host_bytes(), TrainingPack::host_bytes(&feed.dataset.settings().bounds))
            }
            Self::Rows(feed) => (feed.set.host_bytes(), feed.set.pack_bytes()),
            Self::Crops(feed) => (feed.set.host_bytes(), feed.set.pack_bytes()),
        };
        let stream = held.iter().map(|h| h.bytes).sum();
        held.push(DataMemory { what: "pack", bytes: pack });
        held.extend(evaluates.then_some(DataMemory { what: "data of evaluations", bytes: stream }));
        held
    }

    /// Counts the packs of the next epoch of training data, and their tokens, by taking all of them; `between` is called after
    /// each and may end the count with an error. Must be called before the first pack is trained on, and followed by
    /// [`TrainFeed::restart`].
    pub(crate) fn count_epoch(
        &mut self,
        between: &mut dyn FnMut() -> Result<(), TrainError>,
    ) -> Result<EpochSize, TrainError> {
        if let Self::Rows(feed) = self {
            return Ok(EpochSize {
                packs: feed.set.packs_of_epoch(),
                tokens: feed.set.census().train.documents,
            });
        }
        let mut size = EpochSize { packs: 0, tokens: 0 };
        while let Some(taken) = self.take()? {
            size.packs += 1;
            size.tokens += taken.tokens;
            between()?;
        }
        match size.packs {
            0 => Err(TrainError::EmptyEpoch),
            _ => Ok(size),
        }
    }

    /// Restarts the training data from its beginning.
    pub(crate) fn restart(&mut self) {
        match self {
            Self::Tokens(feed) => feed.train = None,
            Self::Rows(feed) => feed.train = None,
            Self::Crops(feed) => feed.train = None,
        }
    }

    /// Sizes of the data: documents, rows or records.
    pub fn summary(&self) -> DataSummary {
        match self {
            Self::Tokens(feed) => {
                let tokens = feed.dataset.tokens_of_epoch();
                summary_of("documents", feed.dataset.census(), (tokens > 0).then_some(tokens))
            }
            Self::Rows(feed) => summary_of("rows", feed.set.census(), None),
            Self::Crops(feed) => {
                let stats = feed.set.stats();
                DataSummary {
                    unit: "records",
                    training: stats.train.records,
                    validation: stats.validation.records,
                    dropped: 0,
                    tokens_of_epoch: None,
                }
            }
        }
    }

    /// Number of lists of targets that a pack has.
    pub fn tasks(&self) -> usize {
        match self {
            Self::Tokens(_) | Self::Rows(_) => 1,
            Self::Crops(feed) => feed.pack.targets.len(),
        }
    }

    /// Widths of the inputs of a head; empty for tokens.
    pub fn widths(&self) -> &[usize] {
        match self {
            Self::Tokens(_) | Self::Crops(_) => &[],
            Self::Rows(feed) => feed.set.widths(),
        }
    }
}

fn tokens_of(pack: &TrainingPack) -> Taken {
    Taken { tokens: pack.ids.len() as u64, targets: pack.target_tokens, packs: 1 }
}

fn rows_of(pack: &RowPack) -> Taken {
    let rows = pack.targets.len() as u64;
    Taken { tokens: rows, targets: rows, packs: 1 }
}

/// Training divides the loss of all tasks by the number of windows, each of which has a target in some task or is predicted by
/// the teachers.
fn crops_of(pack: &CropPack, objective: CropObjective) -> Taken {
    match objective {
        CropObjective::Classify => {
            Taken { tokens: pack.ids.len() as u64, targets: pack.spans.len() as u64, packs: 1 }
        }
        CropObjective::Masked(_) | CropObjective::MaskedBases { .. } => validation_crops_of(pack),
    }
}

/// The validation loss is that of the first task alone, or of masked tokens.
fn validation_crops_of(pack: &CropPack) -> Taken {
    let targets = pack.target_counts.first().copied().unwrap_or(0);
    Taken { tokens: pack.ids.len() as u64, targets, packs: 1 }
}

/// Whether a run holds documents or rows out: it does so only for evaluations.
fn validates(config: &TrainConfig) -> bool {
    let has_data = !config.data.validation.is_empty() || config.data.validation_fraction > 0.0;
    config.run.evaluate_every.is_some() && has_data
}

/// Returns the number of entries of the embedding table: the configured number, or else the size of the tokenizer's
/// vocabulary. A configured number must not be smaller than that size.
pub fn vocabulary(config: &TrainConfig, tokenizer: Option<&Path>) -> Result<u64, TrainError> {
    if config.model.kind == ModelKind::Caller {
        return Ok(codons::VOCABULARY as u64);
    }
    let bounds = PackLimits { tokens: 2, sequences: 1, longest: 2 };
    let known = match config.model.vocabulary {
        // Without the data files only planning is possible, and a plan then needs no tokenizer.
        Some(entries) if !config.data.train.iter().any(|path| Path::new(path).exists()) => return Ok(entries),
        other => other,
    };
    let tokens = Vocabulary::open(&settings(config, bounds, tokenizer)?)?.size() as u64;
    match known {
        Some(entries) if entries < tokens => Err(TrainError::Vocabulary { entries, tokens }),
        Some(entries) => Ok(entries),
        None => Ok(tokens),
    }
}

/// The error of a position that a checkpoint has, and the data cannot have.
fn damaged_position(source: serde_json::Error) -> TrainError {
    TrainError::DataPosition { source }
}

/// Sizes of documents or rows; `tokens_of_epoch` if they are known.
fn summary_of(unit: &'static str, stats: &DatasetStats, tokens_of_epoch: Option<u64>) -> DataSummary {
    DataSummary {
        unit,
        training: stats.train.documents,
        validation: stats.validation.documents,
        dropped: stats.dropped,
        tokens_of_epoch,
    }
}

fn paths(names: &[String]) -> Vec<PathBuf> {
    names.iter().map(PathBuf::from).collect()
}

/// Translates the configuration into settings of the token pipeline.
pub fn settings(
    config: &TrainConfig,
    bounds: PackLimits,
    tokenizer: Option<&Path>,
) -> Result<DatasetSettings, TrainError> {
    let d = &config.data;
    let format = format(config)?;
    let validation = if !validates(config) {
        Validation::None
    } else if !d.validation.is_empty() {
        Validation::Files(paths(&d.validation))
    } else {
        Validation::Fraction { fraction: d.validation_fraction, seed: d.split_seed }
    };
    Ok(DatasetSettings {
        train: paths(&d.train),
        validation,
        tokens: tokens(config, &format, tokenizer)?,
        format,
        task: task(config),
        bounds,
        seed: config.run.seed,
        shuffle: Shuffle { documents: d.shuffle_buffer as usize, bytes: d.shuffle_bytes as usize },
        longest_document: d.longest_document as usize,
        strict: d.strict,
        workers: d.workers.0.map_or_else(|| machine::cores().min(8), |n| n as usize),
        prefetch: d.prefetch as usize,
    })
}

fn task(config: &TrainConfig) -> Objective {
    let d = &config.data;
    match (config.model.classes, config.model.kind) {
        (Some(classes), _) => Objective::Classify {
            labels: match &d.labels {
                Some(table) => LabelsFrom::Table(PathBuf::from(table)),
                None => LabelsFrom::Field(d.label_field.clone()),
            },
            classes: classes_of(config, classes),
            truncate: d.truncate,
        },
        (None, ModelKind::Esm2 | ModelKind::DnabertS) => {
            let m = d.masking;
            Objective::Masked(MaskRates { select: m.fraction, mask: m.mask, random: m.random })
        }
        (None, ModelKind::MoeLm | ModelKind::DenseLm | ModelKind::Head | ModelKind::Caller) => {
            Objective::Causal
        }
    }
}

/// The classes of a classifier of `count` classes, by name if they have names.
fn classes_of(config: &TrainConfig, count: u64) -> Classes {
    match config.model.class_names.as_slice() {
        [] => Classes::Count(count as u32),
        names => Classes::Names(names.to_vec()),
    }
}

/// Fills `model.class_names` of a classifier without names from the words in its table of labels.
///
/// # Errors
/// A table that cannot be read, or with another number of words than `model.classes`.
pub fn named(config: &TrainConfig) -> Result<TrainConfig, TrainError> {
    let mut config = config.clone();
    let is_classifier = config.model.kind != ModelKind::Caller && config.model.class_names.is_empty();
    let Some(count) = config.model.classes.filter(|_| is_classifier) else { return Ok(config) };
    let Some(table) = &config.data.labels else { return Ok(config) };
    let words = class_words(Path::new(table))?;
    if !words.is_empty() && words.len() as u64 != count {
        return Err(TrainError::ClassWords { table: PathBuf::from(table), words, classes: count });
    }
    config.model.class_names = words;
    Ok(config)
}

/// Returns the format of the data files.
pub fn format(config: &TrainConfig) -> Result<plimsoll_data::train::DatasetFormat, TrainError> {
    use plimsoll_data::train::DatasetFormat as Read;
    let d = &config.data;
    Ok(match format_of(d)? {
        DataFormat::Txt => Read::Text(match (d.document, &d.separator) {
            (DocumentUnit::File, _) => TextDocuments::Files,
            (DocumentUnit::Paragraph, _) => TextDocuments::Paragraphs,
            (DocumentUnit::Line, _) => TextDocuments::Lines,
            (DocumentUnit::Separated, line) => TextDocuments::Separated(line.clone().unwrap_or_default()),
        }),
        DataFormat::Jsonl => Read::JsonLines { field: d.field.clone() },
        DataFormat::Bin => Read::Ids {
            width: match d.bin_type {
                BinType::U16 => IdWidth::U16,
                BinType::U32 => IdWidth::U32,
            },
            end: d.bin_end.map(|id| id as i32),
        },
        DataFormat::Fasta => Read::Sequences,
        DataFormat::Auto | DataFormat::Embeddings => {
            return Err(TrainError::EmbeddingsWithoutHead);
        }
    })
}

/// Returns the format of the data files as the configuration names it, or else as the first file's name does.
pub(crate) fn format_of(data: &DataSection) -> Result<DataFormat, TrainError> {
    match data.format {
        DataFormat::Auto => by_name(&data.train),
        named => Ok(named),
    }
}

/// Determines the format from the name of the first file, or from the names of the files in the first folder.
fn by_name(train: &[String]) -> Result<DataFormat, TrainError> {
    let name = train.first().map_or("", String::as_str);
    let path = Path::new(name);
    let found =
        if path.is_dir() { NamedFormat::in_folder(path)? } else { NamedFormat::of(path).into_iter().collect() };
    match found[..] {
        [NamedFormat::Text] => Ok(DataFormat::Txt),
        [NamedFormat::JsonLines] => Ok(DataFormat::Jsonl),
        [NamedFormat::Ids] => Ok(DataFormat::Bin),
        [NamedFormat::Sequences] => Ok(DataFormat::Fasta),
        [] => Err(TrainError::UnknownFormat { name: name.to_owned() }),
        _ => Err(TrainError::SeveralFormats { folder: path.to_owned() }),
    }
}

/// Returns how text is tokenized; `own` is the tokenizer that came with the model.
pub fn tokens(
    config: &TrainConfig,
    format: &plimsoll_data::train::DatasetFormat,
    own: Option<&Path>,
) -> Result<TokenizerKind, TrainError> {
    let d = &config.data;
    if matches!(format, plimsoll_data::train::DatasetFormat::Ids { .. }) {
        let vocab = config.model.vocabulary.ok_or(TrainError::IdsWithoutVocabulary)? as usize;
        return Ok(TokenizerKind::Ids { vocab });
    }
    let dna = config.model.kind == ModelKind::DnabertS;
    let bytes = TokenizerKind::Bytes { end: d.end_token.is_some() };
    match (d.tokenizer.as_str(), config.model.kind) {
        ("bytes", _) => Ok(bytes),
        ("esm2", _) | ("auto", ModelKind::Esm2) => Ok(TokenizerKind::Esm),
        ("auto", ModelKind::DnabertS) => {
            own.map(|file| TokenizerKind::Dna(file.to_owned())).ok_or(TrainError::NoTokenizer)
        }
        ("auto", ModelKind::MoeLm | ModelKind::DenseLm | ModelKind::Head | ModelKind::Caller) => {
            Ok(match own {
                Some(file) if !file.ends_with(TOKENIZER) => TokenizerKind::Esm,
                Some(file) => TokenizerKind::BytePairs { file: file.to_owned(), end: d.end_token.clone() },
                None => bytes,
            })
        }
        (file, _) if dna => Ok(TokenizerKind::Dna(PathBuf::from(file))),
        (file, _) => Ok(TokenizerKind::BytePairs { file: PathBuf::from(file), end: d.end_token.clone() }),
    }
}

/// Translates the configuration into settings of the embedding reader.
pub fn row_settings(config: &TrainConfig, rows: usize) -> Result<RowSettings, TrainError> {
    let d = &config.data;
    if !d.validation.is_empty() {
        return Err(TrainError::ValidationOfEmbeddings);
    }
    let parts =
        [&d.train, &d.proteins].map(|files| RowGroupPart { files: paths(files), tensors: d.tensors.clone() });
    Ok(RowSettings {
        parts: parts.into(),
        labels: d.labels.as_ref().map(PathBuf::from).unwrap_or_default(),
        classes: classes_of(config, config.model.classes.unwrap_or(2)),
        validation: if validates(config) { d.validation_fraction } else { 0.0 },
        validation_seed: d.split_seed,
        seed: config.run.seed,
        rows,
    })
}

/// Translates the configuration into settings of the reader of DNA windows.
pub fn crop_settings(config: &TrainConfig, bounds: PackLimits) -> Result<CropSettings, TrainError> {
    let d = &config.data;
    let c = &config.data.crops;
    let m = d.masking;
    let tasks: Vec<CropTask> = config
        .model
        .tasks
        .iter()
        .map(|task| CropTask { name: task.name.clone(), classes: task.classes.clone() })
        .collect();
    let rates = MaskRates { select: m.fraction, mask: m.mask, random: m.random };
    let objective = match (tasks.is_empty(), m.unit) {
        (false, _) => CropObjective::Classify,
        (true, MaskUnit::Token) => CropObjective::Masked(rates),
        (true, MaskUnit::Nucleotide) => CropObjective::MaskedBases { rates, span: m.span as usize },
    };
    let of_shuffled = tasks.first().zip(c.shuffled_class.as_ref());
    let of_shuffled = of_shuffled.map(|(task, class)| (task.name.clone(), class.clone()));
    Ok(CropSettings {
        files: d.train.iter().map(PathBuf::from).collect(),
        table: d.labels.as_ref().map(PathBuf::from).unwrap_or_default(),
        tasks,
        tokens: CropTokenizer::Codons,
        objective,
        shortest: c.shortest as usize,
        longest: c.longest as usize,
        mutations: Mutations { substitutions: c.substitutions, indels: c.indels },
        shuffled: ShuffledCrops { share: c.shuffled, targets: of_shuffled.into_iter().collect() },
        levels: c
            .levels
            .iter()
            .map(|level| SamplingLevel { column: level.column.clone(), power: level.power })
            .collect(),
        unlabelled: !config.distillation.teacher.is_empty(),
        strict: d.strict,
        validation: config.run.evaluate_every.as_ref().map(|_| ValidationCrops {
            crops: c.validation_windows,
            lengths: c.validation_lengths.iter().map(|&n| n as usize).collect(),
        }),
        seed: config.run.seed,
        bounds,
        workers: d.workers.0.map_or_else(|| machine::cores().min(8), |n| n as usize),
        prefetch: d.prefetch as usize,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(flags: &str) -> TrainConfig {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        let flags: Vec<String> =
            flags.split_whitespace().map(|flag| flag.replace("ROOT", &root.display().to_string())).collect();
        TrainConfig::parse("run: {steps: 1, evaluate_every: 1}\nbatch: {tokens: 2048}\n", "test", &flags)
            .expect("a configuration")
    }

    const BOUNDS: PackLimits = PackLimits { tokens: 512, sequences: 64, longest: 128 };

    /// Reads batches of a feed and checks that the feed continues from a saved position as if it had not been
    /// interrupted. Returns the tokens and targets of the first batch.
    fn check(flags: &str, bounds: PackLimits, own: Option<&Path>) -> (u64, u64) {
        let mut feed = TrainFeed::open(&config(flags), bounds, own).unwrap_or_else(|e| panic!("{flags}: {e}"));
        let first = feed.take().expect("data").expect("a batch");
        let place = feed.position().expect("a place");
        let second = feed.take().expect("data");
        feed.rewind().expect("validation");
        let mut validated = 0;
        while let Some(taken) = feed.take_validation().expect("data") {
            validated += taken.targets;
        }
        assert!(validated > 0, "{flags}");
        feed.seek(&place).expect("the place");
        assert_eq!(feed.take().expect("data"), second, "{flags}");
        (first.tokens, first.targets)
    }

    #[test]
    fn every_kind_of_data_is_fed() {
        let proteins =
            "model.kind=esm2 data.train=[ROOT/fixtures/goldens/esm2/proteins.faa] data.validation_fraction=0.4";
        let (tokens, targets) = check(proteins, BOUNDS, None);
        assert!(tokens > 0 && targets > 0 && targets < tokens);
        let head = "model.kind=head data.train=[ROOT/examples/head/dna.npy] \
                    data.proteins=[ROOT/examples/head/proteins.npy] data.labels=ROOT/examples/head/labels.tsv \
                    data.validation_fraction=0.2";
        let bounds = PackLimits { tokens: 16, sequences: 16, longest: 1 };
        assert_eq!(check(head, bounds, None), (16, 16));
        let feed = TrainFeed::open(&config(head), bounds, None).expect("rows");
        assert_eq!(feed.widths(), [96, 40]);
        assert!(feed.host_bytes(true).iter().any(|held| held.bytes > 0));
        let text = "data.train=[ROOT/examples/corpus.txt] data.validation_fraction=0.3 data.longest=64";
        let (tokens, targets) = check(text, BOUNDS, None);
        assert_eq!((tokens, targets), (512, 512));
    }

    #[test]
    fn vocabularies() {
        let check = |flags: &str, wanted: Result<u64, &str>| {
            let found = vocabulary(&config(flags), None).map_err(|e| e.to_string());
            assert_eq!(found, wanted.map_err(str::to_owned), "{flags}");
        };
        check("data.train=[ROOT/examples/corpus.txt]", Ok(256));
        check("data.train=[ROOT/examples/corpus.txt] data.end_token=end", Ok(257));
        check("data.train=[ROOT/examples/corpus.txt] model.vocabulary=300", Ok(300));
        let few = "model.vocabulary 200: the tokenizer has 256 tokens; give at least as many";
        check("data.train=[ROOT/examples/corpus.txt] model.vocabulary=200", Err(few));
        check("data.train=[nowhere.jsonl] data.tokenizer=none.json model.vocabulary=65536", Ok(65_536));
        let text =
            "data.train: the name `x` does not tell its format; give data.format txt, jsonl, bin or fasta";
        check("data.train=[x]", Err(text));
        let ids = "data.format bin contains token ids without a tokenizer; give model.vocabulary";
        check("data.train=[x.bin]", Err(ids));
    }
}
