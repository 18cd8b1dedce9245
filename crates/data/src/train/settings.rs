//! Settings of training data, as plain data: files, tokenizer, task, bounds of a pack, shuffling. Invariant:
//! [`DatasetSettings::check`] rejects contradictory settings before any file is opened; no field has a hidden default.

use std::path::PathBuf;

use super::labels::{Classes, LabelsFrom};
use crate::alphabet::Alphabet;
use crate::{DataError, DataErrorKind};

/// Settings of a [`Dataset`](super::Dataset): everything apart from the data that determines the packs.
#[derive(Clone, Debug)]
pub struct DatasetSettings {
    /// Training files and folders, read in this order; the files of a folder are read in the order of their names.
    pub train: Vec<PathBuf>,
    /// Source of the validation documents.
    pub validation: Validation,
    /// Format of the files.
    pub format: DatasetFormat,
    /// Tokenizer.
    pub tokens: TokenizerKind,
    /// Training objective.
    pub task: Objective,
    /// Maximum size of a pack.
    pub bounds: PackLimits,
    /// Seed of the shuffling and of the token masking.
    pub seed: u64,
    /// Size of the shuffle window.
    pub shuffle: Shuffle,
    /// Maximum length of a document in bytes; a longer document is an error.
    pub longest_document: usize,
    /// Whether a note on the files is an error (see [`Dataset::notes`](super::Dataset::notes)).
    pub strict: bool,
    /// Number of tokenizer threads. The packs do not depend on it.
    pub workers: usize,
    /// Number of parcels (groups of documents) queued per worker, before or after tokenization.
    pub prefetch: usize,
}

/// Source of the validation documents.
#[derive(Clone, Debug, PartialEq)]
pub enum Validation {
    /// No validation.
    None,
    /// Approximately this fraction of the training documents, selected by the hash of their content. Identical
    /// documents are therefore always in the same split.
    Fraction {
        /// Fraction of the documents, above 0 and below 1.
        fraction: f64,
        /// Seed of the hash that selects the documents.
        seed: u64,
    },
    /// Separate files and folders. A validation document that also occurs in the training files is removed from the
    /// validation split and counted in [`DatasetStats::dropped`](super::DatasetStats::dropped).
    Files(Vec<PathBuf>),
}

/// File format. Text, JSON lines and sequence files may be compressed (gzip, bzip2, Zstandard, xz); compression is
/// detected from the first bytes of the file, not from its name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DatasetFormat {
    /// Plain text; all line endings are read as LF.
    Text(TextDocuments),
    /// JSON Lines: one JSON object per line.
    JsonLines {
        /// Name of the field that holds the text.
        field: String,
    },
    /// Token ids, little-endian, without a header, as nanoGPT writes them.
    Ids {
        /// Size of an id.
        width: IdWidth,
        /// End-of-document id, which is the last token of its document; `None` makes each file one document.
        end: Option<i32>,
    },
    /// FASTA or FASTQ files of proteins or nucleotides; each record is a document.
    Sequences,
}

/// Rule by which a text file is split into documents.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TextDocuments {
    /// Each file is a document.
    Files,
    /// Paragraphs, separated by blank lines.
    Paragraphs,
    /// Each line that is not blank is a document.
    Lines,
    /// Documents are separated by lines equal to this text, such as `<|endoftext|>`, apart from trailing whitespace.
    Separated(String),
}

/// Size of a token id in a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IdWidth {
    /// Unsigned 16-bit integer.
    U16,
    /// Unsigned 32-bit integer.
    U32,
}

impl IdWidth {
    /// Size in bytes.
    pub fn bytes(self) -> usize {
        match self {
            IdWidth::U16 => 2,
            IdWidth::U32 => 4,
        }
    }
}

/// Tokenizer of the training data.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TokenizerKind {
    /// Byte-level tokens: the id of a byte is its value, 0 to 255.
    Bytes {
        /// Whether the end-of-document id 256 is appended to each document.
        end: bool,
    },
    /// ESM-2's alphabet: `<cls> residues <eos>`.
    Esm,
    /// DNABERT-S's byte-pair encoding, read from its `tokenizer.json`: `[CLS] tokens [SEP]`.
    Dna(PathBuf),
    /// Byte-level byte-pair encoding (GPT-2) or a SentencePiece model, read from a `tokenizer.json`.
    BytePairs {
        /// Path of the `tokenizer.json`.
        file: PathBuf,
        /// Special token appended to each document, if any.
        end: Option<String>,
    },
    /// The files hold token ids.
    Ids {
        /// Vocabulary size; every id must be below it.
        vocab: usize,
    },
}

impl TokenizerKind {
    /// Alphabet of the sequences that the tokenizer encodes; `None` for any text.
    pub fn alphabet(&self) -> Option<Alphabet> {
        match self {
            Self::Esm => Some(Alphabet::AminoAcids),
            Self::Dna(_) => Some(Alphabet::Nucleotides),
            Self::Bytes { .. } | Self::BytePairs { .. } | Self::Ids { .. } => None,
        }
    }
}

/// Training objective.
#[derive(Clone, Debug, PartialEq)]
pub enum Objective {
    /// Causal language modelling: predict the next token.
    Causal,
    /// Masked language modelling: predict the masked tokens.
    Masked(MaskRates),
    /// Sequence classification: predict the class of each sequence.
    Classify {
        /// Source of the labels.
        labels: LabelsFrom,
        /// Set of classes.
        classes: Classes,
        /// Whether a sequence of more than [`PackLimits::longest`] tokens is truncated at its end; otherwise such a
        /// sequence is an error.
        truncate: bool,
    },
}

/// Rates of token masking, each in [0, 1] (Devlin et al. 2019, section 3.1).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MaskRates {
    /// Fraction of the tokens that are selected for prediction.
    pub select: f64,
    /// Fraction of the selected tokens that are replaced by the mask token.
    pub mask: f64,
    /// Fraction of the selected tokens that are replaced by a random token; the remaining ones stay unchanged.
    pub random: f64,
}

impl MaskRates {
    /// Rates of BERT and ESM-2: 15 % selected, of these 80 % masked and 10 % random.
    pub const BERT: MaskRates = MaskRates { select: 0.15, mask: 0.8, random: 0.1 };

    /// Checks that the rates are fractions; the error is the message for the user.
    pub(super) fn check(self) -> Result<(), &'static str> {
        if !(self.select > 0.0 && is_fraction(self.select)) {
            return Err("the masked part must be above 0, at most 1");
        }
        if is_fraction(self.mask) && is_fraction(self.random) && is_fraction(self.mask + self.random) {
            Ok(())
        } else {
            Err("the masked and random parts must be 0 to 1 together")
        }
    }
}

/// Whether a number is from 0 to 1.
fn is_fraction(x: f64) -> bool {
    (0.0..=1.0).contains(&x)
}

/// Maximum size of a pack: of the sequences that belong together in training. They decide what is in a pack, and do not
/// depend on memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PackLimits {
    /// Maximum total number of tokens.
    pub tokens: usize,
    /// Maximum number of sequences.
    pub sequences: usize,
    /// Maximum number of tokens of one sequence.
    pub longest: usize,
}

impl PackLimits {
    /// The limits as text for the digest of the data. Checkpoints hold the digest, so the text must not change: it has the
    /// name that the type had when the first of them were written.
    pub(super) fn digest_text(self) -> String {
        let Self { tokens, sequences, longest } = self;
        format!("Bounds {{ tokens: {tokens}, sequences: {sequences}, longest: {longest} }}")
    }
}

/// Shuffling: each epoch permutes the files, and the documents within each window of consecutive documents. The
/// first window of an epoch has a random size, so window boundaries differ between epochs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shuffle {
    /// Maximum number of documents in a window; 0 or 1 disables shuffling.
    pub documents: usize,
    /// Size of a window in bytes. A window ends with the document that reaches this size.
    pub bytes: usize,
}

impl Shuffle {
    /// Whether shuffling is enabled.
    pub(crate) fn is_enabled(&self) -> bool {
        self.documents > 1
    }
}

impl DatasetSettings {
    /// Checks the settings for contradictions, without opening a file.
    ///
    /// # Errors
    /// The first rule that the settings violate.
    pub fn check(&self) -> Result<(), DataError> {
        let PackLimits { tokens, sequences, longest } = self.bounds;
        let ids = matches!(self.format, DatasetFormat::Ids { .. });
        let rules = [
            (!self.train.is_empty(), "no training data is named"),
            (
                self.has_fraction(),
                "the validation fraction must be above 0 and below 1; omit it to train without validation",
            ),
            (sequences > 0 && longest > 0, "a pack must hold a sequence of a token"),
            (longest <= tokens, "the longest sequence has more tokens than a pack"),
            (tokens <= i32::MAX as usize, "a pack has more tokens than spans can count"),
            (
                ids == matches!(self.tokens, TokenizerKind::Ids { .. }),
                "token ids go with files of ids, and only with them",
            ),
            (
                !ids || self.task == Objective::Causal,
                "files of ids are for the next token: they do not say which ids are special",
            ),
            (self.workers > 0 && self.prefetch > 0, "at least one worker and one parcel for it"),
            (self.longest_document > 0 && self.shuffle.bytes > 0, "documents and windows need bytes"),
            (self.longest_document <= 1 << 30, "a document may have at most 1 GiB"),
            (
                self.labels_are_there(),
                "a label is a field of lines of JSON, or a line of a table by the name of a sequence",
            ),
        ];
        let rates = match self.task {
            Objective::Masked(rates) => rates.check(),
            Objective::Causal | Objective::Classify { .. } => Ok(()),
        };
        let broken = rules.into_iter().find(|(kept, _)| !kept).map(|(_, why)| why);
        match broken.or(rates.err()) {
            Some(why) => Err(DataError::new(DataErrorKind::Malformed(why.to_owned()))),
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
            Objective::Causal | Objective::Masked(_) => true,
            Objective::Classify { labels: LabelsFrom::Field(_), .. } => {
                matches!(self.format, DatasetFormat::JsonLines { .. })
            }
            Objective::Classify { labels: LabelsFrom::Table(_), .. } => self.format == DatasetFormat::Sequences,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_text_of_limits_is_that_of_older_checkpoints() {
        let limits = PackLimits { tokens: 8, sequences: 2, longest: 4 };
        assert_eq!(limits.digest_text(), "Bounds { tokens: 8, sequences: 2, longest: 4 }");
    }
}
