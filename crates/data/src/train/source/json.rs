//! Reads the documents of JSON Lines files: one object per line with a text field and, for classification, a label
//! field. Invariant: other fields are skipped without being stored; a line in which either field is missing or occurs
//! twice is an error.

use std::fmt;
use std::path::Path;

use serde::de::{DeserializeSeed, Error, IgnoredAny, MapAccess, Visitor};
use serde_json::Value;

use super::{Label, RawDocument};
use crate::printable::Name;
use crate::sequence::source::LineSource;
use crate::{DataError, DataErrorKind};

/// Reader of a JSON Lines file.
pub(crate) struct JsonLines {
    source: LineSource,
    /// Name of the text field.
    field: String,
    label: Label,
    /// Maximum length of a text in bytes.
    max_bytes: usize,
    line: Vec<u8>,
    /// Length in bytes of the longest text so far.
    longest: usize,
}

impl JsonLines {
    pub(super) fn open(path: &Path, field: String, label: Label, max_bytes: usize) -> Result<Self, DataError> {
        let mut source = LineSource::open(path)?;
        source.skip_byte_order_mark()?;
        source.refuse_foreign(true)?;
        Ok(JsonLines { source, field, label, max_bytes, line: Vec::new(), longest: 0 })
    }

    /// Reads the text and the label of the next line that is not blank into `document`, reusing its buffer. Returns
    /// `false` after the last line.
    ///
    /// # Errors
    /// A line that is too long, is not a JSON object with the expected fields, or has a text longer than allowed.
    pub(super) fn read(&mut self, document: &mut RawDocument) -> Result<bool, DataError> {
        loop {
            let line = self.source.line();
            if self.source.peek()?.is_none() {
                return Ok(false);
            }
            let max_line_bytes = self.max_bytes.saturating_mul(2);
            if !self.read_line(max_line_bytes)? {
                let what = format!(
                    "a line of more than {max_line_bytes} bytes, twice data.longest_document; remove fields other than \
                     the text, divide the text, or raise data.longest_document"
                );
                let error = DataError::at(self.source.path(), DataErrorKind::Malformed(what));
                return Err(error.with_line(line));
            }
            if self.line.trim_ascii().is_empty() {
                continue;
            }
            let parsed = self.parse().map_err(|e| {
                DataError::malformed(self.source.path(), Name(&e.to_string()).to_string()).with_line(line)
            })?;
            if parsed.text.len() > self.max_bytes {
                let error =
                    DataError { path: Some(self.source.path().into()), ..super::too_long(self.max_bytes) };
                return Err(error.with_line(line));
            }
            self.longest = self.longest.max(parsed.text.len());
            document.bytes.extend_from_slice(parsed.text.as_bytes());
            if let Some((_, classes)) = &self.label {
                document.class = classes
                    .of_json(&parsed.label)
                    .map_err(|what| DataError::malformed(self.source.path(), what).with_line(line))?;
            }
            return Ok(true);
        }
    }

    /// Bytes held apart from the document: the line, and up to three times the longest text, since the parser unescapes
    /// into a buffer that grows by doubling and copies the result to a string.
    pub(super) fn buffer_bytes(&self) -> usize {
        self.line.capacity() + 3 * self.longest
    }

    /// Reads a line into `line`. Returns `false` for a line of more than `max_line_bytes` bytes, of which the excess is skipped.
    ///
    /// A line may be twice as long as a text, for other fields and for short escapes. Escapes of the form `\uXXXX`,
    /// which can have six bytes for one byte of text, are replaced by their characters as soon as a line reaches the
    /// limit, so that they do not count. Not earlier: messages of the parser name a column of the line.
    fn read_line(&mut self, max_line_bytes: usize) -> Result<bool, DataError> {
        self.line.clear();
        let line = &mut self.line;
        let mut escapes = Escapes::default();
        let mut fits = true;
        self.source.line_pieces(|mut piece| {
            while fits && !piece.is_empty() {
                if line.len() == max_line_bytes {
                    escapes.replace(line);
                    fits = line.len() < max_line_bytes;
                }
                let (head, tail) = piece.split_at(piece.len().min(max_line_bytes - line.len()));
                line.extend_from_slice(head);
                piece = tail;
            }
        })?;
        Ok(fits)
    }

    /// Parses the current line.
    fn parse(&self) -> serde_json::Result<ExtractedFields> {
        let label = self.label.as_ref().map(|(name, _)| name.as_str());
        let mut json = serde_json::Deserializer::from_slice(&self.line);
        let line = Fields { text: &self.field, label }.deserialize(&mut json)?;
        json.end()?;
        Ok(line)
    }
}

/// Replaces escapes in the strings of a line that is still growing.
#[derive(Default)]
struct Escapes {
    /// Length of the beginning of the line that is finished.
    done: usize,
    /// Whether the rest of the line begins inside of a string.
    inside: bool,
}

impl Escapes {
    /// Replaces `\uXXXX` by the character itself. Characters that must be escaped in JSON are left as they are, and so
    /// is an escape at the end of the line that may go on in the next piece.
    fn replace(&mut self, line: &mut Vec<u8>) {
        // A character is shorter than its escape, so the replaced line never overtakes what is still to be read.
        let mut from = self.done;
        let mut to = self.done;
        while let Some(&byte) = line.get(from) {
            let mut character = [0; 4];
            let (read, written): (usize, &[u8]) = match byte {
                b'\\' if self.inside => match Escape::of(&line[from..]) {
                    Escape::Unfinished => break,
                    Escape::Character(c, length) => (length, c.encode_utf8(&mut character).as_bytes()),
                    Escape::Kept(length) => {
                        line.copy_within(from..from + length, to);
                        (from, to) = (from + length, to + length);
                        continue;
                    }
                },
                _ => {
                    self.inside ^= byte == b'"';
                    character[0] = byte;
                    (1, &character[..1])
                }
            };
            line[to..to + written.len()].copy_from_slice(written);
            (from, to) = (from + read, to + written.len());
        }
        self.done = to;
        line.drain(to..from);
    }
}

/// The escape at the start of a text.
enum Escape {
    /// The text ends within the escape.
    Unfinished,
    /// A character that may stand in a JSON string without an escape, and the length of its escape.
    Character(char, usize),
    /// The length of any other escape.
    Kept(usize),
}

impl Escape {
    fn of(text: &[u8]) -> Self {
        match text.get(1) {
            None => return Self::Unfinished,
            Some(b'u') if text.len() < 6 => return Self::Unfinished,
            Some(b'u') => {}
            Some(_) => return Self::Kept(2),
        }
        let Some(first) = utf16_unit(text, 0) else { return Self::Kept(2) };
        let units = match first {
            0xd800..0xdc00 if text.len() < 12 => return Self::Unfinished,
            0xd800..0xdc00 => [Some(first), utf16_unit(text, 6)],
            _ => [Some(first), None],
        };
        let length = 6 * units.iter().flatten().count();
        match char::decode_utf16(units.into_iter().flatten()).next() {
            Some(Ok(c)) if c >= ' ' && c != '"' && c != '\\' => Self::Character(c, length),
            _ => Self::Kept(6),
        }
    }
}

/// The UTF-16 code unit of an escape `\uXXXX` at `at`.
fn utf16_unit(text: &[u8], at: usize) -> Option<u16> {
    let digits = text.get(at..at + 6)?.strip_prefix(b"\\u")?;
    // `from_str_radix` alone would accept a sign.
    let all = digits.iter().all(u8::is_ascii_hexdigit);
    u16::from_str_radix(str::from_utf8(digits).ok().filter(|_| all)?, 16).ok()
}

/// The extracted fields of a line.
struct ExtractedFields {
    text: String,
    /// `Null` if no label is read.
    label: Value,
}

/// Deserializer of a [`ExtractedFields`], with the names of the fields to extract.
struct Fields<'a> {
    text: &'a str,
    label: Option<&'a str>,
}

impl<'de> DeserializeSeed<'de> for Fields<'_> {
    type Value = ExtractedFields;

    fn deserialize<D: serde::Deserializer<'de>>(self, from: D) -> Result<ExtractedFields, D::Error> {
        from.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for Fields<'_> {
    type Value = ExtractedFields;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "an object with the text '{}'", self.text)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<ExtractedFields, A::Error> {
        let mut text = None;
        let mut label = None;
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
            (None, _) => Ok(ExtractedFields { text, label: Value::Null }),
            (Some(_), Some(label)) => Ok(ExtractedFields { text, label }),
            (Some(name), None) => Err(A::Error::custom(format_args!("no field '{name}'"))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::train::Classes;

    fn read(text: &'static str, label: Label) -> Result<Vec<(String, i32)>, String> {
        let source = LineSource::new(Path::new("t"), Box::new(text.as_bytes())).unwrap();
        let mut lines =
            JsonLines { source, field: "text".into(), label, max_bytes: 30, line: Vec::new(), longest: 0 };
        let mut document = RawDocument::default();
        let mut found = Vec::new();
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

    /// The limit of 30 bytes holds for the text, not for its escapes.
    #[test]
    fn escapes_do_not_count() {
        for (character, escape, count) in
            [("A", "\\u0041", 30), ("\u{430}", "\\u0430", 15), ("\u{1f9ec}", "\\ud83e\\uddec", 7)]
        {
            let line = |count: usize| &*format!("{{\"text\": \"{}\"}}", escape.repeat(count)).leak();
            assert_eq!(read(line(count), None).unwrap(), [(character.repeat(count), 0)]);
            let found = read(line(count + 1), None).unwrap_err();
            assert!(found.contains("line 1: a document of more than 30 bytes"), "{found}");
        }
        // Escapes that must stay, and backslashes that begin none.
        let line = format!(r#"{{"text": "{}{}"}}"#, r"\\u0041\u0022\u005c\n\u000a\/", r"\u00E9".repeat(8));
        let wanted = format!("\\u0041\"\\\n\n/{}", "\u{e9}".repeat(8));
        assert_eq!(read(line.leak(), None).unwrap(), [(wanted, 0)]);
        for (line, what) in [
            (format!(r#"{{"text": "{}\ud83e"}}"#, r"\u0041".repeat(11)), "unexpected end of hex escape"),
            (format!(r#"{{"text": "\u+041{}"}}"#, r"\u0041".repeat(11)), "invalid escape"),
            // Escapes outside of strings stay, and make the line invalid.
            (format!(r#"{{{}"text": "a"}}"#, r"\u0020".repeat(11)), "a line of more than 60 bytes"),
            (format!(r#"{{"text": "a", "other": "{}"}}"#, "b".repeat(60)), "a line of more than 60 bytes"),
        ] {
            let found = read(line.leak(), None).unwrap_err();
            assert!(found.contains(what), "{found}");
        }
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
