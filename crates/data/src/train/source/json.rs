//! Reads the documents of JSON Lines files: one object per line with a text field and, for classification, a label
//! field. Invariant: other fields are skipped without being stored; a line in which either field is missing or occurs
//! twice is an error.

use std::fmt;
use std::path::Path;

use serde::de::{DeserializeSeed, Error, IgnoredAny, MapAccess, Visitor};
use serde_json::Value;

use super::text::bounded_line;
use super::{Document, Label};
use crate::printable::Name;
use crate::sequence::source::Source;
use crate::{DataError, DataErrorKind};

/// Reader of a JSON Lines file.
pub(crate) struct JsonLines {
    source: Source,
    /// Name of the text field.
    field: String,
    label: Label,
    /// Maximum length of a text in bytes.
    most: usize,
    line: Vec<u8>,
    /// Length in bytes of the longest text so far.
    longest: usize,
}

impl JsonLines {
    pub(super) fn open(path: &Path, field: String, label: Label, most: usize) -> Result<Self, DataError> {
        let mut source = Source::open(path)?;
        source.skip_byte_order_mark()?;
        Ok(JsonLines { source, field, label, most, line: Vec::new(), longest: 0 })
    }

    /// Reads the text and the label of the next line that is not blank into `document`, reusing its buffer. Returns
    /// `false` after the last line.
    ///
    /// # Errors
    /// A line that is too long, is not a JSON object with the expected fields, or has a text longer than allowed.
    pub(super) fn read(&mut self, document: &mut Document) -> Result<bool, DataError> {
        loop {
            let line = self.source.line();
            // A line may be twice as long as a text, for escapes and other fields. This bounds memory and is not exact:
            // an escape such as `\u0000` has six bytes for one byte of text.
            if !bounded_line(&mut self.source, &mut self.line, self.most.saturating_mul(2))? {
                return Ok(false);
            }
            if self.line.trim_ascii().is_empty() {
                continue;
            }
            let at = |what: String| {
                DataError::at(self.source.path(), DataErrorKind::Malformed(what)).with_line(line)
            };
            let parsed = self.parse().map_err(|e| at(Name(&e.to_string()).to_string()))?;
            if parsed.text.len() > self.most {
                let error = DataError { path: Some(self.source.path().into()), ..super::too_long(self.most) };
                return Err(error.with_line(line));
            }
            self.longest = self.longest.max(parsed.text.len());
            document.bytes.extend_from_slice(parsed.text.as_bytes());
            if let Some((_, classes)) = &self.label {
                document.class = classes.of_json(&parsed.label).map_err(at)?;
            }
            return Ok(true);
        }
    }

    /// Bytes held apart from the document: the line, and up to three times the longest text, since the parser unescapes
    /// into a buffer that grows by doubling and copies the result to a string.
    pub(super) fn held(&self) -> usize {
        self.line.capacity() + 3 * self.longest
    }

    /// Parses the current line.
    fn parse(&self) -> serde_json::Result<Line> {
        let label = self.label.as_ref().map(|(name, _)| name.as_str());
        let mut json = serde_json::Deserializer::from_slice(&self.line);
        let line = Fields { text: &self.field, label }.deserialize(&mut json)?;
        json.end()?;
        Ok(line)
    }
}

/// The extracted fields of a line.
struct Line {
    text: String,
    /// `Null` if no label is read.
    label: Value,
}

/// Deserializer of a [`Line`], with the names of the fields to extract.
struct Fields<'a> {
    text: &'a str,
    label: Option<&'a str>,
}

impl<'de> DeserializeSeed<'de> for Fields<'_> {
    type Value = Line;

    fn deserialize<D: serde::Deserializer<'de>>(self, from: D) -> Result<Line, D::Error> {
        from.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for Fields<'_> {
    type Value = Line;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "an object with the text '{}'", self.text)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Line, A::Error> {
        let (mut text, mut label) = (None, None);
        while let Some(key) = map.next_key::<String>()? {
            let again = match (key == self.text, self.label == Some(&key)) {
                (true, _) => text.replace(map.next_value::<String>()?).is_some(),
                (_, true) => label.replace(map.next_value::<Value>()?).is_some(),
                (false, false) => {
                    map.next_value::<IgnoredAny>()?;
                    false
                }
            };
            if again {
                return Err(A::Error::custom(format_args!("two fields '{key}' in one object")));
            }
        }
        let text = text.ok_or_else(|| A::Error::custom(format_args!("no field '{}'", self.text)))?;
        match (self.label, label) {
            (None, _) => Ok(Line { text, label: Value::Null }),
            (Some(_), Some(label)) => Ok(Line { text, label }),
            (Some(name), None) => Err(A::Error::custom(format_args!("no field '{name}'"))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::train::Classes;

    fn read(text: &'static str, label: Label) -> Result<Vec<(String, i32)>, String> {
        let source = Source::new(Path::new("t"), Box::new(text.as_bytes())).unwrap();
        let mut lines =
            JsonLines { source, field: "text".into(), label, most: 30, line: Vec::new(), longest: 0 };
        let (mut document, mut found) = (Document::default(), Vec::new());
        while lines.read(&mut document).map_err(|e| e.to_string())? {
            found.push((String::from_utf8(std::mem::take(&mut document.bytes)).unwrap(), document.class));
        }
        Ok(found)
    }

    #[test]
    fn a_field_is_the_text() {
        let lines = "{\"id\": [1, {\"text\": 2}], \"text\": \"a\\n\\u00e9\"}\r\n\n{\"text\": \"\"}";
        assert_eq!(read(lines, None).unwrap(), [("a\n\u{e9}".to_owned(), 0), (String::new(), 0)]);
        let label = Some(("y".to_owned(), Classes::Names(vec!["no".into(), "yes".into()])));
        let lines = "{\"text\": \"a\", \"y\": \"yes\"}\n{\"y\": \"no\", \"text\": \"b\"}";
        assert_eq!(read(lines, label).unwrap(), [("a".to_owned(), 1), ("b".to_owned(), 0)]);
    }

    #[test]
    fn other_lines_are_refused() {
        let label = || Some(("y".to_owned(), Classes::Count(2)));
        for (lines, label, what) in [
            (
                "{\"text\": \"a\"}\n[1]",
                None,
                "t, line 2: invalid type: sequence, expected an object with the text",
            ),
            ("{\"body\": \"a\"}", None, "line 1: no field 'text'"),
            ("{\"text\": 1}", None, "invalid type: integer `1`, expected a string"),
            ("{\"text\": \"a\", \"text\": \"b\"}", None, "two fields 'text'"),
            ("{\"text\": \"a\"} {}", None, "trailing characters"),
            ("{\"text\": \"0123456789012345678901234567890\"}", None, "more than 30 bytes"),
            ("{\"text\": \"a\"}", label(), "no field 'y'"),
            ("{\"text\": \"a\", \"y\": 2}", label(), "the class 2 is not below 2"),
            ("{\"text\": \"a\", \"y\": \"x\"}", label(), "not a whole number"),
        ] {
            let found = read(lines, label).unwrap_err();
            assert!(found.contains(what), "{found}");
        }
    }
}
