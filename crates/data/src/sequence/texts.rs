//! Texts as records, for models of text: a file with a text on each line, or with a JSON object on each line. Invariant: a
//! file is read as texts because of its extension, never because of its content.

use super::source::LineSource;
use super::{LONGEST_NAME, Record, without_compression};
use crate::printable::Name;
use crate::{DataError, DataErrorKind};
use serde::Deserialize;
use serde_json::Value;
use std::path::Path;

/// Format of a file of texts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Texts {
    /// `.txt`: a text on each line; the id is the number of the line.
    Lines,
    /// `.jsonl`: a JSON object on each line, with the text in the field `text`, and the id in the field `id` or else the
    /// number of the line.
    JsonLines,
}

/// A line of a JSON Lines file.
#[derive(Deserialize)]
struct JsonLine {
    text: String,
    id: Option<Value>,
}

impl Texts {
    /// The format that the extension of a file selects; `None` for a file of sequences.
    pub(super) fn of(path: &Path) -> Option<Self> {
        let name = path.file_name()?.to_string_lossy();
        // A FASTA file to which a program appended `.txt` holds sequences.
        if super::ending(&name).is_some() {
            return None;
        }
        match Path::new(without_compression(&name)).extension()?.to_str()?.to_ascii_lowercase().as_str() {
            "txt" => Some(Self::Lines),
            "jsonl" => Some(Self::JsonLines),
            _ => None,
        }
    }

    /// Reads the next line that is not blank into `record`, and returns its number; `None` at the end of the file. Stops
    /// reading a line after `max_bytes` bytes, or twice as many of a JSON object, which the caller reports.
    pub(super) fn read(
        self,
        source: &mut LineSource,
        record: &mut Record,
        max_bytes: usize,
    ) -> Result<Option<u64>, DataError> {
        let max_bytes = match self {
            Self::Lines => max_bytes,
            Self::JsonLines => max_bytes.saturating_mul(2),
        };
        loop {
            let line = source.line();
            if source.peek()?.is_none() {
                return Ok(None);
            }
            let seq = &mut record.seq;
            seq.clear();
            source.line_pieces(|piece| {
                if seq.len() <= max_bytes {
                    super::reserve(seq, piece.len());
                    seq.extend_from_slice(piece);
                }
            })?;
            if seq.trim_ascii().is_empty() {
                continue;
            }
            record.id = line.to_string();
            if self == Self::JsonLines && seq.len() <= max_bytes {
                self.parse(record).map_err(|what| {
                    DataError::at(source.path(), DataErrorKind::Malformed(what)).with_line(line)
                })?;
            }
            return Ok(Some(line));
        }
    }

    /// Replaces the letters of a record, a JSON object, by its text, and the id by its own.
    fn parse(self, record: &mut Record) -> Result<(), String> {
        let parsed: JsonLine =
            serde_json::from_slice(&record.seq).map_err(|e| Name(&e.to_string()).to_string())?;
        record.seq.clear();
        record.seq.extend_from_slice(parsed.text.as_bytes());
        match parsed.id {
            None | Some(Value::Null) => {}
            Some(Value::String(id)) => record.id = id,
            Some(Value::Number(id)) => record.id = id.to_string(),
            Some(other) => return Err(format!("the id must be a string or a number, found {}", kind(&other))),
        }
        match record.id.len() {
            0..=LONGEST_NAME => Ok(()),
            bytes => Err(format!("an id of {bytes} bytes, at most {LONGEST_NAME}")),
        }
    }
}

fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

#[cfg(test)]
mod tests {
    use crate::sequence::{Reader, Record};

    fn read(name: &str, text: &str) -> Result<Vec<(String, String)>, String> {
        let folder = std::env::temp_dir().join(format!("plimsoll-texts-{}-{name}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let path = folder.join(name);
        std::fs::write(&path, text).unwrap();
        let mut reader = Reader::open([&path]).unwrap();
        reader.accept_texts();
        let mut record = Record::default();
        let mut found = vec![];
        let done = loop {
            match reader.read_into(&mut record) {
                Ok(true) => found.push((record.id.clone(), String::from_utf8(record.seq.clone()).unwrap())),
                Ok(false) => break Ok(found),
                Err(error) => break Err(error.to_string()),
            }
        };
        std::fs::remove_dir_all(folder).unwrap();
        done
    }

    #[test]
    fn the_extension_decides_how_a_file_is_read() {
        let pairs = |all: &[(&str, &str)]| Ok(all.iter().map(|(a, b)| ((*a).into(), (*b).into())).collect());
        assert_eq!(read("a.txt", "> no title\n\n a b \n"), pairs(&[("1", "> no title"), ("3", " a b ")]));
        assert_eq!(read("a.fa", ">x y\nAC\nG\n"), pairs(&[("x", "ACG")]));
        let json = "{\"text\": \"one\\n\", \"more\": 1}\n{\"id\": \"b\", \"text\": \"\"}\n{\"id\": 7, \"text\": \"t\"}\n";
        assert_eq!(read("a.jsonl", json), pairs(&[("1", "one\n"), ("b", ""), ("7", "t")]));
    }

    #[test]
    fn lines_that_are_no_texts_are_refused_with_their_place() {
        for (line, wanted) in [
            ("{\"id\": 1}", "missing field `text`"),
            ("text", "expected"),
            ("{\"text\": 1}", "expected a string"),
            ("{\"text\": \"a\", \"id\": [1]}", "the id must be a string or a number, found a list"),
        ] {
            let error = read("b.jsonl", &format!("{{\"text\": \"a\"}}\n{line}\n")).unwrap_err();
            assert!(error.contains("line 2") && error.contains(wanted), "{error}");
        }
    }
}
