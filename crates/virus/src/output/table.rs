//! Writer of tab-separated files. Invariant: every record is one line with as many tabs as the header, whatever its ids
//! and texts contain.

use super::OutputError;
use plimsoll_data::atomic::AtomicFile;
pub use plimsoll_data::table::{Field, PlainField};
use std::fmt;
use std::io::Write as _;
use std::path::Path;

/// A tab-separated file being written.
#[derive(Debug)]
pub struct TableWriter {
    file: AtomicFile,
}

impl TableWriter {
    /// Creates the file with its header line; `header` has tabs and no line end.
    pub fn create(folder: &Path, name: &str, header: &str) -> Result<Self, OutputError> {
        let mut table = TableWriter { file: AtomicFile::create(folder.join(name))? };
        table.row(format_args!("{header}"))?;
        Ok(table)
    }

    /// Creates a file without a header.
    pub fn bare(folder: &Path, name: &str) -> Result<Self, OutputError> {
        Ok(TableWriter { file: AtomicFile::create(folder.join(name))? })
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
