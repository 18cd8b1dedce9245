//! What training data is and how it is handed out, as plain data. Invariant: [`Settings::check`] refuses what
//! contradicts itself before a file is opened; no field has a hidden default.

use std::path::PathBuf;

use super::labels::{Classes, LabelsFrom};
use crate::{DataError, DataErrorKind};

/// Everything that decides which batches come.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Files and folders, in this order; the files of a folder in the order of their names.
    pub train: Vec<PathBuf>,
    /// What is validated on.
    pub validation: Validation,
    /// How files are read.
    pub format: Format,
    /// How text becomes tokens.
    pub tokens: Tokens,
    /// What is predicted.
    pub task: Task,
    /// The most that one micro-batch holds.
    pub bounds: Bounds,
    /// Of the order of the documents, and of what is masked.
    pub seed: u64,
    /// How far documents move.
    pub shuffle: Shuffle,
    /// The bytes that a document may have; a longer one is an error.
    pub longest_document: usize,
    /// Threads that make tokens. The batches do not depend on it.
    pub workers: usize,
    /// Parcels of documents that wait for each worker, or for whoever takes the batches.
    pub prefetch: usize,
}

/// What is validated on.
#[derive(Clone, Debug, PartialEq)]
pub enum Validation {
    /// Nothing.
    None,
    /// About this part of the documents, by the hash of what is in them: equal documents are on one side.
    Fraction {
        /// Above 0 and below 1.
        fraction: f64,
        /// Another seed is another choice.
        seed: u64,
    },
    /// Files and folders of their own. A document of theirs that is trained on is dropped and counted.
    Files(Vec<PathBuf>),
}

/// How files are read. Texts, lines of JSON and sequences may be compressed (`.gz`, `.bz2`, `.zst`, `.xz`),
/// which their first bytes tell.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Format {
    /// Plain text; line ends of any kind are read as LF.
    Text(TextDocuments),
    /// A JSON object in each line.
    JsonLines {
        /// The field with the text.
        field: String,
    },
    /// Token ids, little-endian, without a header, as nanoGPT writes them.
    Ids {
        /// Their size.
        width: IdWidth,
        /// The id that ends a document and belongs to it; without one a file is a document.
        end: Option<i32>,
    },
    /// FASTA or FASTQ: proteins, or nucleotides.
    Sequences,
}

/// What a document of a text is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TextDocuments {
    /// The whole file.
    Files,
    /// Lines between blank lines.
    Paragraphs,
    /// A line.
    Lines,
    /// Lines between lines that are exactly this text, such as `<|endoftext|>`.
    Separated(String),
}

/// The size of an id in a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IdWidth {
    /// Two bytes.
    U16,
    /// Four bytes.
    U32,
}

impl IdWidth {
    /// Its bytes.
    pub fn bytes(self) -> usize {
        match self {
            IdWidth::U16 => 2,
            IdWidth::U32 => 4,
        }
    }
}

/// How text becomes tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Tokens {
    /// A byte is its own id, 0 to 255.
    Bytes {
        /// Whether a document ends with the id 256.
        end: bool,
    },
    /// ESM-2's alphabet: `<cls> residues <eos>`.
    Esm,
    /// DNABERT-S's byte pairs, from its `tokenizer.json`: `[CLS] pieces [SEP]`.
    Dna(PathBuf),
    /// Byte pairs over bytes (GPT-2's kind) or a SentencePiece model, from a `tokenizer.json`.
    BytePairs {
        /// The file.
        file: PathBuf,
        /// The special token that ends a document.
        end: Option<String>,
    },
    /// The files hold ids already.
    Ids {
        /// All ids are less.
        vocab: usize,
    },
}

/// What is predicted.
#[derive(Clone, Debug, PartialEq)]
pub enum Task {
    /// The next token.
    Causal,
    /// Tokens that were masked.
    Masked(MaskRates),
    /// A class of each sequence.
    Classify {
        /// Where the labels stand.
        labels: LabelsFrom,
        /// Which there are.
        classes: Classes,
        /// Whether a sequence of more than `longest` tokens loses those at its end; else it is an error.
        truncate: bool,
    },
}

/// How tokens are masked (Devlin et al. 2019, section 3.1).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MaskRates {
    /// The part of the tokens that are predicted.
    pub select: f64,
    /// Of these, the part that becomes the mask token.
    pub mask: f64,
    /// Of these, the part that becomes a random token; the rest stays.
    pub random: f64,
}

impl MaskRates {
    /// Those of BERT and of ESM-2.
    pub const BERT: MaskRates = MaskRates { select: 0.15, mask: 0.8, random: 0.1 };
}

/// The most that one micro-batch holds: the bounds of its plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bounds {
    /// Tokens.
    pub tokens: usize,
    /// Sequences.
    pub sequences: usize,
    /// Tokens of one sequence.
    pub longest: usize,
}

/// How far documents move: those of a window of the data change places, and the files do. Windows begin
/// elsewhere in every epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shuffle {
    /// Documents of a window; 0 or 1 keeps the order of the data.
    pub documents: usize,
    /// Bytes of a window, whose last document may go beyond.
    pub bytes: usize,
}

impl Shuffle {
    /// Whether anything moves.
    pub fn moves(&self) -> bool {
        self.documents > 1
    }
}

impl Settings {
    /// Refuses what contradicts itself.
    pub fn check(&self) -> Result<(), DataError> {
        let Bounds { tokens, sequences, longest } = self.bounds;
        let ids = matches!(self.format, Format::Ids { .. });
        let rates = match self.task {
            Task::Masked(rates) => rates,
            Task::Causal | Task::Classify { .. } => MaskRates::BERT,
        };
        let part = |x: f64| (0.0..=1.0).contains(&x);
        let rules = [
            (!self.train.is_empty(), "no training data is named"),
            (
                self.has_fraction(),
                "the validation fraction must be above 0 and below 1; without validation say none",
            ),
            (sequences > 0 && longest > 0, "a micro-batch must hold a sequence of a token"),
            (longest <= tokens, "the longest sequence has more tokens than a micro-batch"),
            (tokens <= i32::MAX as usize, "a micro-batch has more tokens than spans can count"),
            (
                ids == matches!(self.tokens, Tokens::Ids { .. }),
                "token ids go with files of ids, and only with them",
            ),
            (
                !ids || self.task == Task::Causal,
                "files of ids are for the next token: they do not say which ids are special",
            ),
            (rates.select > 0.0 && part(rates.select), "the masked part must be above 0, at most 1"),
            (
                part(rates.mask) && part(rates.random) && part(rates.mask + rates.random),
                "the masked and random parts must be 0 to 1 together",
            ),
            (self.workers > 0 && self.prefetch > 0, "at least one worker and one parcel for it"),
            (self.longest_document > 0 && self.shuffle.bytes > 0, "documents and windows need bytes"),
            (self.longest_document <= 1 << 30, "a document may have at most 1 GiB"),
            (
                self.labels_are_there(),
                "a label is a field of lines of JSON, or a line of a table by the name of a sequence",
            ),
        ];
        match rules.into_iter().find(|(kept, _)| !kept) {
            Some((_, why)) => Err(DataError::new(DataErrorKind::Malformed(why.to_owned()))),
            None => Ok(()),
        }
    }

    fn has_fraction(&self) -> bool {
        match self.validation {
            Validation::Fraction { fraction, .. } => fraction > 0.0 && fraction < 1.0,
            Validation::None | Validation::Files(_) => true,
        }
    }

    fn labels_are_there(&self) -> bool {
        match &self.task {
            Task::Causal | Task::Masked(_) => true,
            Task::Classify { labels: LabelsFrom::Field(_), .. } => {
                matches!(self.format, Format::JsonLines { .. })
            }
            Task::Classify { labels: LabelsFrom::Table(_), .. } => self.format == Format::Sequences,
        }
    }
}
