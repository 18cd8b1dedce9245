//! Reads a table of a result folder row by row. Invariant: a file that is not a complete table of the expected
//! form is an error with path and line, and a line uses at most [`LONGEST`] bytes of memory.

use plimsoll_data::{DataError, DataErrorKind};
use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

/// Maximum bytes of a line. Lines of results contain an id and a few numbers, so longer lines are errors.
const LONGEST: u64 = 1 << 20;

/// Reader of a tab-separated table with column names in its first line.
pub struct Rows {
    path: PathBuf,
    reader: BufReader<File>,
    line: String,
    number: u64,
    /// Number of columns in the header.
    width: usize,
    /// Indices of the requested columns.
    places: Vec<usize>,
}

impl Rows {
    /// Opens a table and locates the columns `wanted`, which may be in any order and among others.
    pub fn open(path: &Path, wanted: &[&str]) -> Result<Self, DataError> {
        let file = File::open(path).map_err(|e| DataError::at(path, DataErrorKind::Read(e)))?;
        let reader = BufReader::with_capacity(1 << 16, file);
        let line = String::new();
        let mut rows = Rows { path: path.to_owned(), reader, line, number: 0, width: 0, places: vec![] };
        if !rows.advance()? {
            return Err(rows.error("it is empty, without a header; run plimsoll predict again"));
        }
        let names: Vec<&str> = rows.line.split('\t').collect();
        let places: Vec<Option<usize>> =
            wanted.iter().map(|column| names.iter().position(|name| name == column)).collect();
        rows.width = names.len();
        for (place, column) in places.into_iter().zip(wanted) {
            let text = format!("there is no column `{column}`: this is not a table of plimsoll predict");
            rows.places.push(place.ok_or_else(|| rows.error(text))?);
        }
        Ok(rows)
    }

    /// Passes the requested cells of the next row to `parse` and returns its result; `None` at the end of the
    /// table. An error of `parse` is extended by path and line.
    pub fn next<const N: usize, T>(
        &mut self,
        parse: impl FnOnce([&str; N]) -> Result<T, String>,
    ) -> Result<Option<T>, DataError> {
        if !self.advance()? {
            return Ok(None);
        }
        let cells: Vec<&str> = self.line.split('\t').collect();
        let (found, width) = (cells.len(), self.width);
        if found != width {
            return Err(self.error(format!("{found} columns, the header has {width}; the table is incomplete")));
        }
        let mut wanted = [""; N];
        for (cell, &place) in wanted.iter_mut().zip(&self.places) {
            *cell = cells[place];
        }
        parse(wanted).map(Some).map_err(|what| self.error(what))
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
    pub(crate) fn expect_end(&mut self) -> Result<(), DataError> {
        match self.advance()? {
            true => {
                Err(self.error("the table has more rows than the other results; they belong to different runs"))
            }
            false => Ok(()),
        }
    }

    /// Error for a table that ends before its last expected row.
    pub(crate) fn ends_early(&self) -> DataError {
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
