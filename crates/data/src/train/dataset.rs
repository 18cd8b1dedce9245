//! Data sets. Opening a [`Dataset`] reads all its documents once, so that errors in the data are found before training
//! starts. Invariant: an open data set has at least one training document, and at least one validation document if
//! validation is requested.

use std::collections::HashSet;
use std::path::PathBuf;
use std::sync::Arc;

use sha2::{Digest, Sha256};

use super::block;
use super::files;
use super::labels::{Labels, LabelsFrom};
use super::ledger::{self, DataMemory, Known};
use super::position::{DataPosition, LARGEST_PACK, ShuffleWindow};
use super::settings::{DatasetFormat, DatasetSettings, Objective, TokenizerKind, Validation};
use super::source::{Documents, RawDocument};
use super::split::{DocumentSplitter, Split};
use super::stream::DatasetStream;
use super::vocabulary::Vocabulary;
use crate::alphabet::{UnknownLetters, is_nucleotides};
use crate::hex::hex;
use crate::sequence::{InputNote, Listing};
use crate::{DataError, DataErrorKind, bounded};
use plimsoll_setting::Setting;

/// An open data set: its settings, tokenizer and statistics, and the source of [`DatasetStream`]s. Cheap to clone.
#[derive(Clone)]
pub struct Dataset {
    pub(super) inner: Arc<SharedDataset>,
}

/// State of a data set, shared with the threads of its streams.
pub(super) struct SharedDataset {
    pub settings: DatasetSettings,
    pub vocabulary: Vocabulary,
    pub labels: Labels,
    pub splitter: DocumentSplitter,
    pub train: Files,
    /// Validation files; empty if the validation documents are a fraction of the training files, or if there are none.
    pub validation: Files,
    pub census: DatasetStats,
    /// Largest capacity in bytes of a reader's growing buffers, and of its document buffer alone.
    pub reader: [usize; 2],
    /// Whether any file is compressed.
    pub compressed: bool,
    /// Digest of the documents and the settings, as [`Dataset::digest`] defines it.
    pub digest: String,
    /// Notes on the files, and a line that names what was skipped in folders.
    pub notes: Vec<InputNote>,
    pub skipped: Option<String>,
}

/// Files and their numbers of documents.
#[derive(Default)]
pub(super) struct Files {
    pub paths: Vec<PathBuf>,
    /// Number of documents of each file, empty documents included.
    pub documents: Vec<u64>,
}

/// Statistics of the documents, collected when the data set is opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DatasetStats {
    /// Training split.
    pub train: SplitSize,
    /// Validation split.
    pub validation: SplitSize,
    /// Number of empty documents; they are skipped.
    pub empty: u64,
    /// Number of documents excluded from the validation files because they also occur in the training files.
    pub dropped: u64,
    /// Length of the longest document in bytes.
    pub longest: usize,
    /// Bytes of the documents that were tokenized to estimate the number of tokens.
    pub sampled_bytes: u64,
    /// Tokens of these documents.
    pub sampled_tokens: u64,
    /// Number of FASTA and FASTQ records whose letters are those of DNA or RNA.
    pub nucleotides: u64,
}

/// Size of a split.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SplitSize {
    /// Number of documents.
    pub documents: u64,
    /// Total bytes of the documents as passed to the tokenizer: decompressed, without JSON or FASTA syntax.
    pub bytes: u64,
}

impl Dataset {
    /// Opens a data set: checks the settings, opens the tokenizer and reads all documents once.
    ///
    /// # Errors
    /// Contradictory settings; a file that cannot be read; a document that the tokenizer or the task rejects; a
    /// training split, or a requested validation split, without documents.
    pub fn open(settings: DatasetSettings) -> Result<Self, DataError> {
        settings.check()?;
        let vocabulary = Vocabulary::open(&settings)?;
        check_task(&settings, &vocabulary)?;
        let labels = match &settings.task {
            Objective::Classify { labels: LabelsFrom::Table(path), classes, .. } => {
                Labels::read(path, classes)?
            }
            Objective::Classify { .. } | Objective::Causal | Objective::Masked(_) => Labels::default(),
        };
        let mut scan = Scan::new(&settings, &vocabulary, &labels);
        let (train, validation) = scan.both()?;
        let Scan { splitter, census, hash, reader, compressed, notes, listing, .. } = scan;
        let skipped = listing.skipped_line();
        refuse_notes(settings.strict, &notes)?;
        census.check(&settings, train.paths.len() + validation.paths.len())?;
        let digest = digest(hash, &settings)?;
        let inner = SharedDataset {
            settings,
            vocabulary,
            labels,
            splitter,
            train,
            validation,
            census,
            reader,
            compressed,
            digest,
            notes,
            skipped,
        };
        Ok(Dataset { inner: Arc::new(inner) })
    }

    /// The number of tokens of an epoch, start and end tokens included: exact if all documents were tokenized when the data
    /// set was opened, otherwise estimated from those that were.
    pub fn tokens_of_epoch(&self) -> u64 {
        let DatasetStats { train, sampled_bytes, sampled_tokens, .. } = self.inner.census;
        let product = u128::from(train.bytes) * u128::from(sampled_tokens);
        u64::try_from(product / u128::from(sampled_bytes.max(1))).unwrap_or(u64::MAX)
    }

    /// The settings.
    pub fn settings(&self) -> &DatasetSettings {
        &self.inner.settings
    }

    /// The tokenizer.
    pub fn vocabulary(&self) -> &Vocabulary {
        &self.inner.vocabulary
    }

    /// The statistics of the documents.
    pub fn census(&self) -> &DatasetStats {
        &self.inner.census
    }

    /// Notes on the files: what was dropped from sequences, letters that the tokenizer does not know, files without a record.
    pub fn notes(&self) -> &[InputNote] {
        &self.inner.notes
    }

    /// A line that names what was skipped in folders; `None` if nothing was.
    pub fn skipped(&self) -> Option<&str> {
        self.inner.skipped.as_deref()
    }

    /// Digest of everything that determines the token stream and its packs, as 32 hexadecimal digits: the documents, the
    /// seed, the shuffling, the tokenizer, the task, the validation split and the bounds of a pack. A position is valid
    /// only in data of equal digest.
    pub fn digest(&self) -> &str {
        &self.inner.digest
    }

    /// Maximum host memory of one stream apart from its packs. [`DatasetSettings::host_bytes`] gives a larger bound without
    /// reading the data, for documents of the maximum allowed length.
    pub fn host_bytes(&self) -> Vec<DataMemory> {
        let inner = &self.inner;
        let DatasetStats { train, validation, longest, .. } = inner.census;
        let side = SplitSize {
            documents: train.documents.max(validation.documents),
            bytes: train.bytes.max(validation.bytes),
        };
        let known = Known { longest, side, reader: inner.reader[0], compressed: inner.compressed };
        let mut memory = ledger::memory_by_purpose(&inner.settings, &inner.vocabulary, &known);
        memory.push(DataMemory { what: "labels", bytes: inner.labels.bytes() });
        memory.push(DataMemory { what: "hashes of dropped documents", bytes: inner.splitter.bytes() });
        memory
    }

    /// The position at the start of the first epoch.
    pub fn start(&self) -> DataPosition {
        let window = ShuffleWindow::default();
        DataPosition { data: self.inner.digest.clone(), pack: 0, epoch: 0, window, place: 0, packed: 0 }
    }

    /// Streams the packs of a split, starting at a position. A training stream runs over any number of epochs; a
    /// validation stream is a single pass in file order and must begin at [`Dataset::start`].
    ///
    /// # Errors
    /// A position of a different data set; an invalid position; a validation split without documents.
    pub fn stream(&self, split: Split, from: &DataPosition) -> Result<DatasetStream, DataError> {
        let files = self.inner.files(split).paths.len();
        if from.data != self.inner.digest {
            return Err(refused(
                "the saved position belongs to other data: the documents, the seed, the shuffling, the tokenizer \
                 or the size of a pack have changed; start over, or restore what was changed",
            ));
        }
        if split == Split::Validation && self.inner.census.validation.documents == 0 {
            return Err(refused(
                "there is no validation data; set a validation fraction, or name validation files",
            ));
        }
        if split == Split::Validation && *from != self.start() {
            return Err(refused("validation begins at the start"));
        }
        if from.window.file as usize > files {
            return Err(refused("the saved position is after the last file, so it is damaged"));
        }
        if from.pack > LARGEST_PACK {
            return Err(refused("the saved position is after the last pack, so it is damaged"));
        }
        DatasetStream::new(self.inner.clone(), split, from.clone())
    }
}

/// The error for a position at which no stream can begin.
fn refused(what: &str) -> DataError {
    DataError::new(DataErrorKind::Malformed(what.to_owned()))
}

impl SharedDataset {
    /// The files that contain the documents of a split.
    pub(super) fn files(&self, split: Split) -> &Files {
        match split {
            Split::Validation if !self.validation.paths.is_empty() => &self.validation,
            Split::Train | Split::Validation => &self.train,
        }
    }

    /// The size of a split.
    pub(super) fn side(&self, split: Split) -> &SplitSize {
        match split {
            Split::Train => &self.census.train,
            Split::Validation => &self.census.validation,
        }
    }

    /// Whether a document of [`SharedDataset::files`] belongs to the split.
    pub(super) fn is_on(&self, split: Split, document: &[u8]) -> bool {
        match (&self.settings.validation, split) {
            (Validation::None, _) | (Validation::Files(_), Split::Train) => true,
            (Validation::Files(_), Split::Validation) => {
                !self.splitter.is_dropped(self.splitter.hash(document))
            }
            (Validation::Fraction { .. }, _) => self.splitter.side(self.splitter.hash(document)) == split,
        }
    }
}

/// Checks that the tokenizer and the bounds suit the task: masked language modelling needs a mask token, and a sequence
/// must fit at least one token between its start and end tokens.
fn check_task(settings: &DatasetSettings, vocabulary: &Vocabulary) -> Result<(), DataError> {
    let ends = vocabulary.frame().iter().flatten().count();
    let why = match settings.task {
        Objective::Masked(_) if vocabulary.mask().is_none() => {
            "this tokenizer has no mask token; masked tokens need the one of ESM-2 or DNABERT-S"
        }
        Objective::Masked(_) | Objective::Classify { .. } if settings.bounds.longest <= ends => {
            "the longest sequence has no room for a token between its two ends"
        }
        Objective::Causal | Objective::Masked(_) | Objective::Classify { .. } => return Ok(()),
    };
    Err(DataError::new(DataErrorKind::Malformed(why.to_owned())))
}

/// State of the pass that reads all documents when a data set is opened.
struct Scan<'a> {
    settings: &'a DatasetSettings,
    vocabulary: &'a Vocabulary,
    labels: &'a Labels,
    splitter: DocumentSplitter,
    census: DatasetStats,
    /// Digest over the content hashes and classes of all documents, in file order.
    hash: Sha256,
    reader: [usize; 2],
    compressed: bool,
    /// Bytes of the documents read so far.
    read: u64,
    notes: Vec<InputNote>,
    /// The entries of folders that were skipped.
    listing: Listing,
}

/// Bytes of documents that are tokenized in any case to estimate the number of tokens, and most bytes of a document that are.
/// Even, because a token id in a file has two or four bytes.
const SAMPLE: usize = 256 << 10;

impl<'a> Scan<'a> {
    fn new(settings: &'a DatasetSettings, vocabulary: &'a Vocabulary, labels: &'a Labels) -> Self {
        let splitter = DocumentSplitter::new(&settings.validation, &settings.format);
        let census = DatasetStats::default();
        let hash = Sha256::new();
        Scan {
            settings,
            vocabulary,
            labels,
            splitter,
            census,
            hash,
            reader: [0; 2],
            compressed: false,
            read: 0,
            notes: vec![],
            listing: Listing::default(),
        }
    }

    /// Reads all files and returns the training files and the validation files.
    fn both(&mut self) -> Result<(Files, Files), DataError> {
        let DatasetSettings { train, validation, .. } = self.settings;
        let train = self.list(train)?;
        let Validation::Files(paths) = validation else {
            return Ok((self.files(train, |scan, hash, bytes| scan.place(hash, bytes))?, Files::default()));
        };
        // Validation files are read first: the training pass then only looks up hashes and removes matching
        // validation documents from the statistics, each distinct hash once.
        let mut sizes = std::collections::HashMap::new();
        let mut trained = HashSet::new();
        let paths = self.list(paths)?;
        let validation = self.files(paths, |scan, hash, bytes| {
            let size: &mut SplitSize = sizes.entry(hash).or_default();
            size.documents += 1;
            size.bytes += bytes;
            scan.census.validation.documents += 1;
            scan.census.validation.bytes += bytes;
        })?;
        let train = self.files(train, |scan, hash, bytes| {
            scan.place(hash, bytes);
            if let Some(size) = sizes.get(&hash)
                && trained.insert(hash)
            {
                scan.census.validation.documents -= size.documents;
                scan.census.validation.bytes -= size.bytes;
                scan.census.dropped += size.documents;
            }
        })?;
        self.splitter.drop_from_validation(trained);
        Ok((train, validation))
    }

    /// Expands folders to their files.
    fn list(&mut self, paths: &[PathBuf]) -> Result<Vec<PathBuf>, DataError> {
        let listing = files::list(paths, &self.settings.format, self.settings.tokens.alphabet())?;
        let files = listing.paths();
        self.listing.skipped.extend(listing.skipped);
        Ok(files)
    }

    /// Reads files and calls `found` with the hash and length in bytes of every document that is not empty.
    fn files(
        &mut self,
        paths: Vec<PathBuf>,
        mut found: impl FnMut(&mut Self, u64, u64),
    ) -> Result<Files, DataError> {
        let mut files = Files { paths, documents: Vec::new() };
        let mut document = RawDocument::default();
        let mut tokens = Vec::new();
        for path in &files.paths {
            let mut documents = Documents::open(path, self.settings, self.labels)?;
            let mut count = 0;
            let mut unknown = UnknownLetters::default();
            while documents.read(&mut document)? {
                count += 1;
                if let Some(alphabet) = self.settings.tokens.alphabet() {
                    unknown.add(alphabet, &document.bytes, || name_of(&documents, count)).map_err(|e| {
                        DataError { path: Some(path.clone()), ..e }.with_id(name_of(&documents, count))
                    })?;
                }
                let check = self.vocabulary.check(&document.bytes);
                check.map_err(|e| e.with_path(path).with_id(format!("document {count}")))?;
                let bytes = document.bytes.len();
                self.census.longest = self.census.longest.max(bytes);
                let hash = self.splitter.hash(&document.bytes);
                self.hash.update(hash.to_le_bytes());
                // The class is part of the digest: relabelled data is different data.
                self.hash.update(document.class.to_le_bytes());
                self.sample(&document, &mut tokens)
                    .map_err(|e| e.with_path(path).with_id(format!("document {count}")))?;
                match bytes {
                    0 => self.census.empty += 1,
                    _ => found(self, hash, bytes as u64),
                }
            }
            self.notes.extend(documents.take_notes());
            self.notes.extend(unknown.note(path));
            // Marks the end of a file, so that the digest also depends on how documents are distributed over files.
            self.hash.update(u64::MAX.to_le_bytes());
            let document = document.bytes.capacity();
            self.reader =
                [self.reader[0].max(documents.buffer_bytes() + document), self.reader[1].max(document)];
            self.compressed |= files::is_compressed(path, &self.settings.format)?;
            files.documents.push(count);
        }
        Ok(files)
    }

    /// Counts the letters of a sequence, and tokenizes a document if few bytes have been so far: all documents of small data,
    /// and a 64th of large data, because byte-pair encodings are slower than reading.
    fn sample(&mut self, document: &RawDocument, tokens: &mut Vec<i32>) -> Result<(), DataError> {
        let bytes = document.bytes.len() as u64;
        self.read += bytes;
        if self.settings.format == DatasetFormat::Sequences {
            self.census.nucleotides += u64::from(is_nucleotides(&document.bytes));
        }
        if self.census.sampled_bytes >= SAMPLE as u64 + self.read / 64 {
            return Ok(());
        }
        // A long document is represented by its start, which ends between two characters, so that little memory is taken.
        let mut end = document.bytes.len().min(SAMPLE);
        while document.bytes.get(end).is_some_and(|byte| byte & 0xc0 == 0x80) && end > 0 {
            end -= 1;
        }
        tokens.clear();
        self.vocabulary.encode(&document.bytes[..end], tokens)?;
        self.census.sampled_bytes += end as u64;
        self.census.sampled_tokens += tokens.len() as u64;
        Ok(())
    }

    /// Counts a document of the training files in its split.
    fn place(&mut self, hash: u64, bytes: u64) {
        let side = match self.splitter.side(hash) {
            Split::Train => &mut self.census.train,
            Split::Validation => &mut self.census.validation,
        };
        side.documents += 1;
        side.bytes += bytes;
    }
}

/// With `strict`, returns the first note as an error.
pub(super) fn refuse_notes(strict: bool, notes: &[InputNote]) -> Result<(), DataError> {
    match notes.first().filter(|_| strict) {
        Some(note) => {
            let what = format!(
                "{}, and data.strict ({}) refuses it; correct it, or omit it",
                note.detail(),
                Setting::Strict
            );
            Err(DataError::at(&note.path, DataErrorKind::Malformed(what)))
        }
        None => Ok(()),
    }
}

/// Name of the last document of a file, the `count`-th.
fn name_of(documents: &Documents, count: u64) -> String {
    documents.id().map_or_else(|| format!("document {count}"), str::to_owned)
}

impl DatasetStats {
    /// Reports an empty training split or an empty requested validation split as an error with the cause.
    fn check(&self, settings: &DatasetSettings, files: usize) -> Result<(), DataError> {
        let all = self.train.documents + self.validation.documents;
        let DatasetStats { train, validation, empty, dropped, .. } = self;
        let why = match &settings.validation {
            _ if all + dropped == 0 => format!(
                "no document to train on in {files} files, of which {empty} documents are empty; {}",
                look_at(&settings.format)
            ),
            Validation::Fraction { fraction, .. } if train.documents == 0 => format!(
                "no document to train on: with the validation fraction {fraction} all {all} are validated on; \
                 lower it, or divide the data into more documents"
            ),
            Validation::Fraction { fraction, .. } if validation.documents == 0 => format!(
                "no document to validate on: with the validation fraction {fraction} all {all} are trained on; \
                 raise it, divide the data into more documents, or name validation files"
            ),
            Validation::Files(_) if train.documents == 0 => {
                format!("no document to train on: the training files are empty ({empty} empty documents)")
            }
            Validation::Files(_) if validation.documents == 0 && *dropped > 0 => format!(
                "no document to validate on: all {dropped} of the validation files are also training documents; \
                    give other files"
            ),
            Validation::Files(_) if validation.documents == 0 => {
                format!("no document to validate on: the validation files are empty ({empty} empty documents)")
            }
            Validation::None | Validation::Fraction { .. } | Validation::Files(_) => return Ok(()),
        };
        Err(DataError::at(&settings.train[0], DataErrorKind::NoData(why)))
    }
}

/// Advice for the error that no document was found.
fn look_at(format: &DatasetFormat) -> &'static str {
    match format {
        DatasetFormat::Text(_) | DatasetFormat::Ids { .. } => "check the paths",
        DatasetFormat::JsonLines { .. } => "check the paths and the field of the text",
        DatasetFormat::Sequences => "check the paths; a record needs letters",
    }
}

/// Completes the digest of the data: documents and all settings that determine their order, their tokens and what is in
/// a pack.
fn digest(mut hash: Sha256, settings: &DatasetSettings) -> Result<String, DataError> {
    let DatasetSettings { format, tokens, task, bounds, seed, shuffle, validation, .. } = settings;
    if let TokenizerKind::Dna(path) | TokenizerKind::BytePairs { file: path, .. } = tokens {
        let bytes = bounded::read(path, crate::tokenize::bpe::LARGEST);
        hash.update(bytes.map_err(|e| DataError::at(path, DataErrorKind::Read(e)))?);
    }
    let validation = match validation {
        Validation::None => "none".to_owned(),
        Validation::Fraction { fraction, seed } => format!("{fraction} {seed}"),
        // The hash already covers the documents of the validation files.
        Validation::Files(_) => "files".to_owned(),
    };
    let tokens = match tokens {
        TokenizerKind::Bytes { end } => format!("bytes {end}"),
        TokenizerKind::Esm => "esm".to_owned(),
        TokenizerKind::Dna(_) => "dna".to_owned(),
        TokenizerKind::BytePairs { end, .. } => format!("pairs {end:?}"),
        TokenizerKind::Ids { vocab } => format!("ids {vocab}"),
    };
    let task = match task {
        Objective::Causal => "causal",
        Objective::Masked(_) => "masked",
        Objective::Classify { .. } => "classify",
    };
    let blocks = block::PACKS;
    let bounds = bounds.digest_text();
    hash.update(format!("{format:?} {tokens} {task} {bounds} {blocks} {seed} {shuffle:?} {validation}"));
    let digest: [u8; 32] = hash.finalize().into();
    Ok(hex(&digest[..16]))
}
