//! Reads the documents of a plain text file. Invariant: lines are joined by LF, whatever their line ending in the file;
//! leading blank lines and trailing whitespace are removed, so that documents that differ only in these hash equally.

use std::path::Path;

use super::{RawDocument, too_long};
use crate::DataError;
use crate::sequence::source::LineSource;
use crate::train::settings::TextDocuments;

/// Reader of a text file.
pub(crate) struct PlainTextReader {
    source: LineSource,
    how: TextDocuments,
    /// Maximum length of a document in bytes.
    max_bytes: usize,
    pub(super) line: Vec<u8>,
    /// Whether the end of the file was reached.
    ended: bool,
}

impl PlainTextReader {
    pub(super) fn open(path: &Path, how: TextDocuments, max_bytes: usize) -> Result<Self, DataError> {
        let mut source = LineSource::open(path)?;
        source.skip_byte_order_mark()?;
        source.refuse_foreign(true)?;
        Ok(PlainTextReader { source, how, max_bytes, line: Vec::new(), ended: false })
    }

    /// Reads the next document into `document`, reusing its buffer. Returns `false` after the last document.
    pub(super) fn read(&mut self, document: &mut RawDocument) -> Result<bool, DataError> {
        if self.ended {
            return Ok(false);
        }
        let text = &mut document.bytes;
        loop {
            if !bounded_line(&mut self.source, &mut self.line, self.max_bytes)? {
                self.ended = true;
                trim(text);
                // With one document per file, an empty file is an empty document, which the statistics count.
                return Ok(!text.is_empty() || self.how == TextDocuments::Files);
            }
            let blank = self.line.trim_ascii().is_empty();
            let ends = match &self.how {
                TextDocuments::Files => false,
                TextDocuments::Paragraphs => blank,
                TextDocuments::Lines => true,
                TextDocuments::Separated(mark) => self.line.trim_ascii_end() == mark.as_bytes(),
            };
            // The line that ends a document, a blank line or a separator, is part of it only if each line is a
            // document. Blank lines before the first text of a document are skipped.
            if (!ends || self.how == TextDocuments::Lines) && !(blank && text.is_empty()) {
                if text.len() + self.line.len() >= self.max_bytes.saturating_add(1) {
                    // `line` already counts the line that was just read.
                    return Err(DataError {
                        path: Some(self.source.path().into()),
                        ..too_long(self.max_bytes)
                    }
                    .with_line(self.source.line() - 1));
                }
                text.extend_from_slice(&self.line);
                text.push(b'\n');
            }
            if ends {
                trim(text);
                if !text.is_empty() {
                    return Ok(true);
                }
            }
        }
    }
}

/// Reads the next line into `line`, without its line ending. Returns `false` at the end of the file.
///
/// # Errors
/// A line of more than `max_bytes` bytes; the excess is skipped and not stored.
pub(super) fn bounded_line(
    source: &mut LineSource,
    line: &mut Vec<u8>,
    max_bytes: usize,
) -> Result<bool, DataError> {
    line.clear();
    if source.peek()?.is_none() {
        return Ok(false);
    }
    let at = source.line();
    let mut fits = true;
    source.line_pieces(|piece| {
        fits &= line.len() + piece.len() <= max_bytes;
        if fits {
            line.extend_from_slice(piece);
        }
    })?;
    if fits {
        Ok(true)
    } else {
        Err(DataError { path: Some(source.path().into()), ..too_long(max_bytes) }.with_line(at))
    }
}

/// Removes trailing ASCII whitespace.
fn trim(text: &mut Vec<u8>) {
    text.truncate(text.trim_ascii_end().len());
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(how: TextDocuments, text: &'static str, expected: &[&str]) {
        let source = LineSource::new(Path::new("t"), Box::new(text.as_bytes())).unwrap();
        let mut text = PlainTextReader { source, how, max_bytes: 20, line: Vec::new(), ended: false };
        let mut document = RawDocument::default();
        let mut found = Vec::new();
        while text.read(&mut document).unwrap() {
            found.push(String::from_utf8(std::mem::take(&mut document.bytes)).unwrap());
        }
        assert_eq!(found, expected);
    }

    #[test]
    fn documents_are_what_is_asked_for() {
        const TEXT: &str = "\n\na one\r\nb  \n \nc\n\n\n--\nd\n";
        check(TextDocuments::Paragraphs, TEXT, &["a one\nb", "c", "--\nd"]);
        check(TextDocuments::Lines, TEXT, &["a one", "b", "c", "--", "d"]);
        check(TextDocuments::Files, TEXT, &["a one\nb  \n \nc\n\n\n--\nd"]);
        check(TextDocuments::Separated("--".into()), TEXT, &["a one\nb  \n \nc", "d"]);
        check(TextDocuments::Paragraphs, "", &[]);
        check(TextDocuments::Paragraphs, "  \n\n", &[]);
        check(TextDocuments::Files, "", &[""]);
        check(TextDocuments::Lines, "x", &["x"]);
    }

    #[test]
    fn a_long_document_is_refused_with_its_line() {
        for (text, line) in [("0123456789\n\n0123456789012345678901234567", 3), ("0123456789\n0123456789\n", 2)]
        {
            let source = LineSource::new(Path::new("t"), Box::new(text.as_bytes())).unwrap();
            let how = TextDocuments::Paragraphs;
            let mut text = PlainTextReader { source, how, max_bytes: 20, line: Vec::new(), ended: false };
            let mut document = RawDocument::default();
            let error = loop {
                match text.read(&mut document) {
                    Ok(_) => document.bytes.clear(),
                    Err(error) => break error,
                }
            };
            assert_eq!(error.line, Some(line), "{error}");
            assert!(error.to_string().contains("more than 20 bytes"), "{error}");
        }
    }
}
