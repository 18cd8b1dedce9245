//! Reads the documents of a file sequentially, in any [`DatasetFormat`]. Invariant: only one document is in memory, a document
//! longer than allowed is an error with its location, and reading an unchanged file again gives equal documents.

mod ids;
mod json;
mod text;

use std::path::Path;

use self::ids::Ids;
use self::json::JsonLines;
use self::text::PlainTextReader;
use super::labels::{Classes, Labels, LabelsFrom};
use super::settings::{DatasetFormat, DatasetSettings, Objective};
use crate::alphabet::Alphabet;
use crate::sequence::{InputNote, Reader, Record};
use crate::{DataError, DataErrorKind};

/// A document before tokenization.
#[derive(Debug, Default)]
pub(super) struct RawDocument {
    /// Text, sequence letters, or little-endian token ids.
    pub bytes: Vec<u8>,
    /// Class label; 0 if the task has none.
    pub class: i32,
}

/// Reader of the documents of one file.
pub(super) struct Documents {
    reader: DocumentReader,
    /// Alphabet of the documents, which are brought into its form; `None` for text.
    alphabet: Option<Alphabet>,
}

/// Reader of one format.
enum DocumentReader {
    Text(PlainTextReader),
    JsonLines(JsonLines),
    Ids(Ids),
    Sequences(Box<Sequences>),
}

impl Documents {
    pub(super) fn open(path: &Path, settings: &DatasetSettings, labels: &Labels) -> Result<Self, DataError> {
        let max_bytes = settings.longest_document;
        let alphabet = settings.tokens.alphabet();
        let reader = match &settings.format {
            DatasetFormat::Text(how) => {
                DocumentReader::Text(PlainTextReader::open(path, how.clone(), max_bytes)?)
            }
            DatasetFormat::JsonLines { field } => {
                let label = match &settings.task {
                    Objective::Classify { labels: LabelsFrom::Field(name), classes, .. } => {
                        Some((name.clone(), classes.clone()))
                    }
                    Objective::Classify { .. } | Objective::Causal | Objective::Masked(_) => None,
                };
                DocumentReader::JsonLines(JsonLines::open(path, field.clone(), label, max_bytes)?)
            }
            DatasetFormat::Ids { width, end } => DocumentReader::Ids(Ids::open(path, *width, *end, max_bytes)?),
            DatasetFormat::Sequences => {
                DocumentReader::Sequences(Box::new(Sequences::open(path, alphabet, labels.clone(), max_bytes)?))
            }
        };
        Ok(Self { reader, alphabet })
    }

    /// Reads the next document, which may be empty, into `document`, reusing its buffer. Returns `false` after the last
    /// document.
    pub(super) fn read(&mut self, document: &mut RawDocument) -> Result<bool, DataError> {
        document.bytes.clear();
        let more = match &mut self.reader {
            DocumentReader::Text(text) => text.read(document),
            DocumentReader::JsonLines(lines) => lines.read(document),
            DocumentReader::Ids(ids) => ids.read(document),
            DocumentReader::Sequences(sequences) => sequences.read(document),
        }?;
        if let Some(alphabet) = self.alphabet.filter(|_| more) {
            alphabet.normalize(&mut document.bytes);
        }
        Ok(more)
    }

    /// Id of the last document, of a file of sequences.
    pub(super) fn id(&self) -> Option<&str> {
        match &self.reader {
            DocumentReader::Sequences(sequences) => Some(&sequences.record.id),
            DocumentReader::Text(_) | DocumentReader::JsonLines(_) | DocumentReader::Ids(_) => None,
        }
    }

    /// Notes on a file of sequences that was read to its end.
    pub(super) fn take_notes(&mut self) -> Vec<InputNote> {
        match &mut self.reader {
            DocumentReader::Sequences(sequences) => sequences.reader.take_notes(),
            DocumentReader::Text(_) | DocumentReader::JsonLines(_) | DocumentReader::Ids(_) => vec![],
        }
    }

    /// Capacity in bytes of the buffers that grow with the length of documents, apart from the document itself.
    pub(super) fn buffer_bytes(&self) -> usize {
        match &self.reader {
            DocumentReader::Text(text) => text.line.capacity(),
            DocumentReader::JsonLines(lines) => lines.buffer_bytes(),
            DocumentReader::Ids(_) => 0,
            DocumentReader::Sequences(sequences) => sequences.record.seq.capacity(),
        }
    }
}

/// Reader of FASTA or FASTQ files: each record is a document.
pub(super) struct Sequences {
    reader: Reader,
    record: Record,
    labels: Labels,
    /// Maximum length of a sequence.
    max_bytes: usize,
}

impl Sequences {
    fn open(
        path: &Path,
        alphabet: Option<Alphabet>,
        labels: Labels,
        max_bytes: usize,
    ) -> Result<Self, DataError> {
        let mut reader = Reader::open([path])?;
        // A language model may be trained on sequences of either kind; those of proteins have more characters.
        reader.set_alphabet(alphabet.unwrap_or(Alphabet::AminoAcids));
        Ok(Sequences { reader, record: Record::default(), labels, max_bytes })
    }

    fn read(&mut self, document: &mut RawDocument) -> Result<bool, DataError> {
        if !self.reader.read_into(&mut self.record)? {
            return Ok(false);
        }
        if self.record.seq.len() > self.max_bytes {
            return Err(self.reader.error_at(&self.record, too_long(self.max_bytes)));
        }
        let class = self.labels.of(&self.record.id);
        document.class = class.map_err(|error| self.reader.error_at(&self.record, error))?;
        // Copied, not swapped: the document's buffer keeps the capacity that the memory ledger counts.
        document.bytes.extend_from_slice(&self.record.seq);
        Ok(true)
    }
}

/// Name of the JSON field that holds the class label, and the classes; `None` if the task has no such field.
type Label = Option<(String, Classes)>;

/// Error for a document of more than `max_bytes` bytes.
fn too_long(max_bytes: usize) -> DataError {
    let what = format!("a document of more than {max_bytes} bytes; divide it, or raise data.longest_document");
    DataError::new(DataErrorKind::Malformed(what))
}
