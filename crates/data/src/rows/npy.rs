//! Writer of arrays of f32 or f16 in numpy's `.npy` format, version 1.0. Invariant: the header has 128 bytes for any number of
//! rows, so that it can be overwritten in place when the number of rows is known.
//!
//! Source: numpy's `numpy/lib/format.py`.

use std::io::Write;
use std::path::Path;

use super::ValueType;
use crate::atomic::AtomicFile;
use crate::{DataError, DataErrorKind};

/// Size of the header in bytes: magic, version, length and the padded dictionary. It fits the number of rows and either
/// one 64-bit or two 32-bit dimensions of a row.
pub(super) const HEADER: usize = 128;
/// Size in bytes of magic, version and length, which precede the dictionary.
const START: usize = 10;

/// Writes an array of shape `[n, ..row]`, one row at a time.
#[derive(Debug)]
pub struct NpyWriter {
    file: AtomicFile,
    row: Vec<usize>,
    values: ValueType,
    rows: u64,
    bytes: Vec<u8>,
}

impl NpyWriter {
    /// Starts writing the file `path`, which appears only at [`finish`](Self::finish), with f32 values. `row` is the shape
    /// of a row: `[d]` or `[k, d]`. Errors if the shape does not fit the header.
    pub fn create(path: impl AsRef<Path>, row: &[usize]) -> Result<Self, DataError> {
        Self::with_values(path, row, ValueType::F32)
    }

    /// Starts writing a file as [`create`](Self::create) does, with values of another type.
    pub fn with_values(path: impl AsRef<Path>, row: &[usize], values: ValueType) -> Result<Self, DataError> {
        let mut file = AtomicFile::create(path)?;
        check_row(row).map_err(|kind| DataError::at(file.target(), kind))?;
        file.write_all(&header(0, row, values)).map_err(|e| file.error(e))?;
        Ok(NpyWriter { file, row: row.to_vec(), values, rows: 0, bytes: Vec::new() })
    }

    /// Appends a row; errors unless `values` has the number of elements of the row's shape.
    pub fn row(&mut self, values: &[f32]) -> Result<(), DataError> {
        let wanted = self.row.iter().product();
        super::width(values.len(), wanted)
            .and_then(|()| self.values.encode(values, &mut self.bytes))
            .map_err(|kind| DataError::at(self.file.target(), kind))?;
        self.file.write_all(&self.bytes).map_err(|e| self.file.error(e))?;
        self.rows += 1;
        Ok(())
    }

    /// Writes the number of rows to the header and flushes the buffer, so that a full disk is reported before the
    /// file is renamed to its final path. No row may follow.
    pub fn complete(&mut self) -> Result<(), DataError> {
        self.file.patch(0, &header(self.rows, &self.row, self.values))?;
        self.file.flush().map_err(|e| self.file.error(e))
    }

    /// Completes the file and returns it, ready to be committed.
    pub fn into_file(mut self) -> Result<AtomicFile, DataError> {
        self.complete()?;
        Ok(self.file)
    }

    /// Completes the file, gives it its final path, and returns the number of rows.
    pub fn finish(self) -> Result<u64, DataError> {
        let rows = self.rows;
        self.into_file()?.commit()?;
        Ok(rows)
    }
}

/// Errors if the header cannot hold the shape of a row.
pub(super) fn check_row(row: &[usize]) -> Result<(), DataErrorKind> {
    if START + dictionary(u64::MAX, row, ValueType::F32).len() < HEADER {
        return Ok(());
    }
    let what = format!("rows of {row:?} are too large for an array of numpy; write .safetensors instead");
    Err(DataErrorKind::Malformed(what))
}

/// Header of an array of shape `[rows, ..row]`.
pub(super) fn header(rows: u64, row: &[usize], values: ValueType) -> [u8; HEADER] {
    let mut bytes = [b' '; HEADER];
    write_header(&dictionary(rows, row, values), &mut bytes);
    bytes
}

/// Header of an array of any type and shape; `shape` is a tuple of Python.
pub(super) fn header_of(descr: &str, shape: &str) -> Vec<u8> {
    let dictionary = format!("{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}");
    let mut bytes = vec![b' '; (START + dictionary.len() + 1).next_multiple_of(64)];
    write_header(&dictionary, &mut bytes);
    bytes
}

/// Writes magic, version, length and dictionary to the start of `bytes`, which are spaces, and a line end to their end.
fn write_header(dictionary: &str, bytes: &mut [u8]) {
    let all = bytes.len();
    bytes[..8].copy_from_slice(b"\x93NUMPY\x01\x00");
    bytes[8..START].copy_from_slice(&((all - START) as u16).to_le_bytes());
    bytes[START..START + dictionary.len()].copy_from_slice(dictionary.as_bytes());
    bytes[all - 1] = b'\n';
}

fn dictionary(rows: u64, row: &[usize], values: ValueType) -> String {
    let row: Vec<String> = row.iter().map(usize::to_string).collect();
    let descr = match values {
        ValueType::F32 => "<f4",
        ValueType::F16 => "<f2",
    };
    format!("{{'descr': '{descr}', 'fortran_order': False, 'shape': ({rows}, {}), }}", row.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_header_is_numpys() {
        let text = b"\x93NUMPY\x01\x00\x76\x00{'descr': '<f4', 'fortran_order': False, \
                     'shape': (3, 2560), }";
        let bytes = header(3, &[2560], ValueType::F32);
        assert!(bytes.starts_with(text));
        assert!(bytes[text.len()..HEADER - 1].iter().all(|&b| b == b' '));
        assert_eq!(bytes[HEADER - 1], b'\n');
    }

    #[test]
    fn the_largest_sizes_fit() {
        let check = |row: &[usize], end: &str| {
            let bytes = header(u64::MAX, row, ValueType::F16);
            let text = String::from_utf8_lossy(&bytes[START..]).into_owned();
            assert!(text.trim_end().ends_with(end), "{text}");
        };
        check(&[usize::MAX], "18446744073709551615, 18446744073709551615), }");
        check(&[u32::MAX as usize, u32::MAX as usize], "4294967295, 4294967295), }");
        assert!(check_row(&[usize::MAX; 2]).is_err());
    }
}
