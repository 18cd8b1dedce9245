//! Writer of tab-separated files. Invariant: every record is one line with as many tabs as the header, whatever its ids
//! and texts contain.

use super::OutputError;
use plimsoll_data::atomic::AtomicFile;
use std::fmt::{self, Display, Write as _};
use std::io::Write as _;
use std::path::Path;

/// A tab-separated file being written.
#[derive(Debug)]
pub struct Table {
    file: AtomicFile,
}

impl Table {
    /// Creates the file with its header line; `header` has tabs and no line end.
    pub fn create(folder: &Path, name: &str, header: &str) -> Result<Self, OutputError> {
        let mut table = Table { file: AtomicFile::create(folder.join(name))? };
        table.row(format_args!("{header}"))?;
        Ok(table)
    }

    /// Creates a file without a header.
    pub fn bare(folder: &Path, name: &str) -> Result<Self, OutputError> {
        Ok(Table { file: AtomicFile::create(folder.join(name))? })
    }

    /// Appends a line. Texts from the input must be formatted as [`Field`]s, which cannot contain tabs or line
    /// breaks.
    pub fn row(&mut self, fields: fmt::Arguments<'_>) -> Result<(), OutputError> {
        let written = self.file.write_fmt(fields).and_then(|()| self.file.write_all(b"\n"));
        written.map_err(|e| self.file.error(e).into())
    }

    /// Appends a line that is already formatted.
    pub fn line(&mut self, line: &[u8]) -> Result<(), OutputError> {
        let written = self.file.write_all(line).and_then(|()| self.file.write_all(b"\n"));
        written.map_err(|e| self.file.error(e).into())
    }

    /// Returns the file, ready to be committed.
    pub fn into_file(self) -> AtomicFile {
        self.file
    }
}

/// A text as a table cell: control characters and Unicode line separators are escaped as in Rust (`\t`, `\n`,
/// `\u{1b}`), everything else is unchanged.
#[derive(Clone, Copy, Debug)]
pub struct Field<'a>(pub &'a str);

impl Display for Field<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let breaks = |c: char| c.is_control() || matches!(c, '\u{2028}' | '\u{2029}');
        let mut rest = self.0;
        while let Some(at) = rest.find(breaks) {
            let (clean, tail) = rest.split_at(at);
            f.write_str(clean)?;
            let mut tail = tail.chars();
            tail.next().into_iter().flat_map(char::escape_default).try_for_each(|c| f.write_char(c))?;
            rest = tail.as_str();
        }
        f.write_str(rest)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(text: &str, expected: &str) {
        assert_eq!(Field(text).to_string(), expected);
    }

    #[test]
    fn a_field_stays_on_its_line() {
        check("", "");
        check("contig|7 é \\ \"", "contig|7 é \\ \"");
        check("a\tb\nc\r", "a\\tb\\nc\\r");
        check("\u{1b}[31m\u{7f}\u{85}", "\\u{1b}[31m\\u{7f}\\u{85}");
        check("é\u{2028}日", "é\\u{2028}日");
        check("\0\0", "\\u{0}\\u{0}");
    }
}
