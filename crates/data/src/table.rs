//! Cells of tab-separated tables, and a reader of the tables of result folders. Invariants: a cell is one line without a
//! tab, no spreadsheet runs it as a formula, and a cell that is read is the text that was written, apart from escapes; a
//! file that is not a complete table of the expected form is an error with path and line, and a line uses at most 1 MiB of
//! memory.

use crate::bounded;
use crate::printable::{Name, is_printable};
use crate::{DataError, DataErrorKind};
use plimsoll_setting::Command;
use std::fmt::{self, Display, Formatter, Write};
use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

/// Maximum bytes of a line. Lines of results contain an id and a few numbers, so longer lines are errors.
const LONGEST: u64 = 1 << 20;

/// A text as a cell of a table that people open in spreadsheets. Unprintable characters are escaped as in Rust (`\t`, `\n`,
/// `\u{202e}`). A text that a spreadsheet would run as a formula gets an apostrophe in front, as spreadsheets themselves
/// quote texts, and so does a text that looks like a quoted one; [`TableReader`] removes it.
#[derive(Clone, Copy, Debug)]
pub struct Field<'a>(pub &'a str);

impl Display for Field<'_> {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        if is_formula(self.0.trim_start_matches(QUOTE)) {
            f.write_char(QUOTE)?;
        }
        PlainField(self.0).fmt(f)
    }
}

/// A text as a cell of a table that only programs read, such as BED, with the escapes of [`Field`] and without quotes.
#[derive(Clone, Copy, Debug)]
pub struct PlainField<'a>(pub &'a str);

impl Display for PlainField<'_> {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let mut rest = self.0;
        while let Some(at) = rest.find(|c: char| !is_printable(c)) {
            let (clean, tail) = rest.split_at(at);
            f.write_str(clean)?;
            let mut tail = tail.chars();
            tail.next().into_iter().flat_map(char::escape_default).try_for_each(|c| f.write_char(c))?;
            rest = tail.as_str();
        }
        f.write_str(rest)
    }
}

/// Character before a text that would be a formula.
const QUOTE: char = '\'';

/// Whether spreadsheets run a text: it starts with the sign of a formula, also in full width, and goes on. A sign alone,
/// such as `-` for standard input, is a text.
fn is_formula(text: &str) -> bool {
    let mut chars = text.chars();
    let first = chars.next();
    first.is_some_and(|c| "=+-@\u{ff1d}\u{ff0b}\u{ff0d}\u{ff20}".contains(c)) && chars.next().is_some()
}

/// The text that [`Field`] wrote to a cell, apart from escapes.
fn unquoted(cell: &str) -> &str {
    cell.strip_prefix(QUOTE).filter(|text| is_formula(text.trim_start_matches(QUOTE))).unwrap_or(cell)
}

/// Reader of a tab-separated table with column names in its first line.
pub struct TableReader {
    path: PathBuf,
    reader: BufReader<File>,
    line: String,
    number: u64,
    /// Names of all columns, as in the header.
    names: Vec<String>,
    /// Indices of the requested columns.
    places: Vec<usize>,
}

impl TableReader {
    /// Opens a table and locates the columns `wanted`, which may be in any order and among others.
    pub fn open(path: &Path, wanted: &[&str]) -> Result<Self, DataError> {
        let mut table = Self::open_all(path)?;
        table.select(wanted)?;
        Ok(table)
    }

    /// Opens a table with all its columns, in the order of its header.
    pub fn open_all(path: &Path) -> Result<Self, DataError> {
        let file = bounded::open(path).map_err(|e| DataError::at(path, DataErrorKind::Read(e)))?;
        let reader = BufReader::with_capacity(1 << 16, file);
        let mut table = TableReader {
            path: path.to_owned(),
            reader,
            line: String::new(),
            number: 0,
            names: vec![],
            places: vec![],
        };
        if !table.advance()? {
            let text = format!("it is empty, without a header; run {} again", Command::Predict);
            return Err(table.error(text));
        }
        table.names = table.line.split('\t').map(str::to_owned).collect();
        table.places = (0..table.names.len()).collect();
        Ok(table)
    }

    /// Restricts the following rows to the columns `wanted`, in this order.
    pub fn select(&mut self, wanted: &[&str]) -> Result<(), DataError> {
        let mut places = vec![];
        for column in wanted {
            let Some(place) = self.names.iter().position(|name| name == column) else {
                let text =
                    format!("there is no column `{column}`: this is not a table of {}", Command::Predict);
                return Err(self.error(text));
            };
            places.push(place);
        }
        self.places = places;
        Ok(())
    }

    /// Names of all columns, as in the header.
    pub fn names(&self) -> &[String] {
        &self.names
    }

    /// Passes the requested cells of the next row to `parse` and returns its result; `None` at the end of the
    /// table. An error of `parse` is extended by path and line.
    pub fn next<const N: usize, T>(
        &mut self,
        parse: impl FnOnce([&str; N]) -> Result<T, String>,
    ) -> Result<Option<T>, DataError> {
        self.next_row(|cells| {
            let mut wanted = [""; N];
            for (place, cell) in wanted.iter_mut().zip(cells) {
                *place = cell;
            }
            parse(wanted)
        })
    }

    /// Passes the requested cells of the next row to `parse` as [`TableReader::next`] does, for a number of columns that is known
    /// only from the header.
    pub fn next_row<T>(
        &mut self,
        parse: impl FnOnce(&[&str]) -> Result<T, String>,
    ) -> Result<Option<T>, DataError> {
        if !self.advance()? {
            return Ok(None);
        }
        let cells: Vec<&str> = self.line.split('\t').collect();
        let found = cells.len();
        let width = self.names.len();
        if found != width {
            return Err(self.error(format!("{found} columns, the header has {width}; the table is incomplete")));
        }
        let wanted: Vec<&str> = self.places.iter().map(|&place| unquoted(cells[place])).collect();
        parse(&wanted).map(Some).map_err(|what| self.error(what))
    }

    /// Skips `count` rows.
    pub fn skip(&mut self, count: u64) -> Result<(), DataError> {
        for _ in 0..count {
            if !self.advance()? {
                return Err(self.ends_early());
            }
        }
        Ok(())
    }

    /// `Err` if the table has another row.
    pub fn expect_end(&mut self) -> Result<(), DataError> {
        if self.advance()? {
            Err(self.error("the table has more rows than the other results; they belong to different runs"))
        } else {
            Ok(())
        }
    }

    /// Error for a table that ends before its last expected row.
    pub fn ends_early(&self) -> DataError {
        self.error(
            "the table ends here, but the other results continue; it is incomplete or belongs to another run",
        )
    }

    /// Error about the present line, with path and line number.
    pub fn error(&self, what: impl Into<String>) -> DataError {
        DataError::at(&self.path, DataErrorKind::Malformed(what.into())).with_line(self.number)
    }

    /// Reads the next line, without its line end; returns false at the end of the file.
    fn advance(&mut self) -> Result<bool, DataError> {
        self.line.clear();
        let mut bytes = std::mem::take(&mut self.line).into_bytes();
        let read = self.reader.by_ref().take(LONGEST).read_until(b'\n', &mut bytes);
        if read.map_err(|e| DataError::at(&self.path, DataErrorKind::Read(e)))? == 0 {
            return Ok(false);
        }
        self.number += 1;
        if bytes.pop() != Some(b'\n') {
            return Err(self.error("the line has no end; the table is incomplete"));
        }
        self.line = String::from_utf8(bytes).map_err(|_| self.error("not text; this is not a table"))?;
        Ok(true)
    }
}

/// Parses the whole number in a cell of `column`.
pub fn whole(column: &str, cell: &str) -> Result<u64, String> {
    cell.parse().map_err(|_| format!("{column} is `{}`, expected a whole number", Name(cell)))
}

/// Parses the finite number in a cell of `column`.
pub fn finite(column: &str, cell: &str) -> Result<f64, String> {
    let number = cell.parse::<f64>().ok().filter(|number| number.is_finite());
    number.ok_or_else(|| format!("{column} is `{}`, expected a number", Name(cell)))
}

/// Parses the number from 0 to 1 in a cell of `column`.
pub fn share(column: &str, cell: &str) -> Result<f64, String> {
    let number = cell.parse::<f64>().ok().filter(|number| (0.0..=1.0).contains(number));
    number.ok_or_else(|| format!("{column} is `{}`, expected a number from 0 to 1", Name(cell)))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A text, its cell in a table for spreadsheets, and its cell in a table for programs.
    const CELLS: [[&str; 3]; 18] = [
        ["", "", ""],
        ["contig|7 é \\ \"", "contig|7 é \\ \"", "contig|7 é \\ \""],
        ["a\tb\nc\r", "a\\tb\\nc\\r", "a\\tb\\nc\\r"],
        ["\u{1b}[31m\u{7f}\u{85}", "\\u{1b}[31m\\u{7f}\\u{85}", "\\u{1b}[31m\\u{7f}\\u{85}"],
        ["é\u{2028}日", "é\\u{2028}日", "é\\u{2028}日"],
        ["gpj.\u{202e}exe\u{2066}", "gpj.\\u{202e}exe\\u{2066}", "gpj.\\u{202e}exe\\u{2066}"],
        ["\0\0", "\\u{0}\\u{0}", "\\u{0}\\u{0}"],
        ["=cmd|' /C calc'!A0", "'=cmd|' /C calc'!A0", "=cmd|' /C calc'!A0"],
        ["=1+1", "'=1+1", "=1+1"],
        ["+x", "'+x", "+x"],
        ["-x", "'-x", "-x"],
        ["@SUM(1)", "'@SUM(1)", "@SUM(1)"],
        ["\u{ff1d}1", "'\u{ff1d}1", "\u{ff1d}1"],
        ["'=1", "''=1", "'=1"],
        ["''-1", "'''-1", "''-1"],
        ["'quoted'", "'quoted'", "'quoted'"],
        ["-", "-", "-"],
        ["a=b", "a=b", "a=b"],
    ];

    #[test]
    fn a_cell_stays_on_its_line_and_is_no_formula() {
        for [text, field, plain] in CELLS {
            assert_eq!(Field(text).to_string(), field);
            assert_eq!(PlainField(text).to_string(), plain);
            assert_eq!(unquoted(field), plain, "{text}");
        }
    }
}
