//! The documents of a file, one after the other. Invariant: only one is held, a longer one than allowed is an
//! error with its place, and the same file gives the same documents at every reading.

mod ids;
mod json;
mod text;

use std::path::Path;

use self::ids::Ids;
use self::json::JsonLines;
use self::text::Text;
use super::labels::{Classes, Labels, LabelsFrom};
use super::settings::{Format, Settings, Task};
use crate::sequence::{Reader, Record};
use crate::{DataError, DataErrorKind};

/// A document as it is stored, not yet tokens.
#[derive(Debug, Default)]
pub(super) struct Document {
    /// Text, letters, or ids in their bytes.
    pub bytes: Vec<u8>,
    /// Its class, if the task has classes.
    pub class: i32,
}

/// A file that is being read.
pub(super) enum Documents {
    Text(Text),
    JsonLines(JsonLines),
    Ids(Ids),
    Sequences(Sequences),
}

impl Documents {
    pub(super) fn open(path: &Path, settings: &Settings, labels: &Labels) -> Result<Self, DataError> {
        let most = settings.longest_document;
        Ok(match &settings.format {
            Format::Text(how) => Self::Text(Text::open(path, how.clone(), most)?),
            Format::JsonLines { field } => {
                let label = match &settings.task {
                    Task::Classify { labels: LabelsFrom::Field(name), classes, .. } => {
                        Some((name.clone(), classes.clone()))
                    }
                    Task::Classify { .. } | Task::Causal | Task::Masked(_) => None,
                };
                Self::JsonLines(JsonLines::open(path, field.clone(), label, most)?)
            }
            Format::Ids { width, end } => Self::Ids(Ids::open(path, *width, *end, most)?),
            Format::Sequences => Self::Sequences(Sequences::open(path, labels.clone(), most)?),
        })
    }

    /// The next document into `document`, whose buffer is reused; false after the last one. It may be empty.
    pub(super) fn read(&mut self, document: &mut Document) -> Result<bool, DataError> {
        document.bytes.clear();
        match self {
            Self::Text(text) => text.read(document),
            Self::JsonLines(lines) => lines.read(document),
            Self::Ids(ids) => ids.read(document),
            Self::Sequences(sequences) => sequences.read(document),
        }
    }

    /// Bytes of the buffers that grow with what was read, beside the document.
    pub(super) fn held(&self) -> usize {
        match self {
            Self::Text(text) => text.line.capacity(),
            Self::JsonLines(lines) => lines.held(),
            Self::Ids(_) => 0,
            Self::Sequences(sequences) => sequences.record.seq.capacity(),
        }
    }
}

/// Records of FASTA or FASTQ: a document is a sequence.
pub(super) struct Sequences {
    reader: Reader,
    record: Record,
    labels: Labels,
    most: usize,
}

impl Sequences {
    fn open(path: &Path, labels: Labels, most: usize) -> Result<Self, DataError> {
        Ok(Sequences { reader: Reader::open([path])?, record: Record::default(), labels, most })
    }

    fn read(&mut self, document: &mut Document) -> Result<bool, DataError> {
        if !self.reader.read_into(&mut self.record)? {
            return Ok(false);
        }
        let placed = |error: DataError| {
            let error = error.with_id(self.record.id.as_str());
            match self.reader.position() {
                Some((path, line)) => DataError { path: Some(path.to_owned()), ..error }.with_line(line),
                None => error,
            }
        };
        if self.record.seq.len() > self.most {
            return Err(placed(too_long(self.most)));
        }
        document.class = self.labels.of(&self.record.id).map_err(placed)?;
        // A copy, so that the document's buffer keeps the size it was planned with.
        document.bytes.extend_from_slice(&self.record.seq);
        Ok(true)
    }
}

/// The class that a line of JSON names, if the task has classes.
type Label = Option<(String, Classes)>;

fn too_long(most: usize) -> DataError {
    let what = format!("a document of more than {most} bytes; part it, or raise longest_document");
    DataError::new(DataErrorKind::Malformed(what))
}
