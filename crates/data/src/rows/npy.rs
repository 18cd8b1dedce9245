//! An array of f32 as numpy's `.npy`, version 1.0. Invariant: the header is 128 bytes for any number
//! of rows, so that the number can be written when it is known.
//!
//! Source: numpy's `numpy/lib/format.py`.

use std::io::Write;
use std::path::Path;

use super::little_endian;
use crate::atomic::AtomicFile;
use crate::{DataError, DataErrorKind};

/// The whole header: magic, version, length and a padded dictionary; room for any two 64-bit sizes, or
/// for one and two of 32 bits.
const HEADER: usize = 128;
/// What comes before the dictionary.
const START: usize = 10;

/// Writes `[n, ..row]` f32, a row at a time.
#[derive(Debug)]
pub struct NpyWriter {
    file: AtomicFile,
    row: Vec<usize>,
    rows: u64,
    bytes: Vec<u8>,
}

impl NpyWriter {
    /// Starts the file that will be `path`; `row` is the shape of a row: `[d]`, or `[k, d]`.
    pub fn create(path: impl AsRef<Path>, row: &[usize]) -> Result<Self, DataError> {
        let mut file = AtomicFile::create(path)?;
        if START + dictionary(u64::MAX, row).len() >= HEADER {
            let what = format!("rows of {row:?} are too large for an .npy; write .safetensors instead");
            return Err(DataError::at(file.target(), DataErrorKind::Malformed(what)));
        }
        file.write_all(&header(0, row)).map_err(|e| file.error(e))?;
        Ok(NpyWriter { file, row: row.to_vec(), rows: 0, bytes: Vec::new() })
    }

    /// Appends a row: as many values as its shape has.
    pub fn row(&mut self, values: &[f32]) -> Result<(), DataError> {
        let wanted = self.row.iter().product();
        super::width(values.len(), wanted).map_err(|kind| DataError::at(self.file.target(), kind))?;
        little_endian(values, &mut self.bytes);
        self.file.write_all(&self.bytes).map_err(|e| self.file.error(e))?;
        self.rows += 1;
        Ok(())
    }

    /// Writes what is left: a full disk shows here, before the file has its name. No row may follow.
    pub fn complete(&mut self) -> Result<(), DataError> {
        self.file.patch(0, &header(self.rows, &self.row))?;
        self.file.flush().map_err(|e| self.file.error(e))
    }

    /// Completes the file; the number of its rows.
    pub fn finish(mut self) -> Result<u64, DataError> {
        self.complete()?;
        self.file.commit()?;
        Ok(self.rows)
    }
}

fn header(rows: u64, row: &[usize]) -> [u8; HEADER] {
    let dictionary = dictionary(rows, row);
    let mut bytes = [b' '; HEADER];
    bytes[..8].copy_from_slice(b"\x93NUMPY\x01\x00");
    bytes[8..START].copy_from_slice(&((HEADER - START) as u16).to_le_bytes());
    bytes[START..START + dictionary.len()].copy_from_slice(dictionary.as_bytes());
    bytes[HEADER - 1] = b'\n';
    bytes
}

fn dictionary(rows: u64, row: &[usize]) -> String {
    let row: Vec<String> = row.iter().map(usize::to_string).collect();
    format!("{{'descr': '<f4', 'fortran_order': False, 'shape': ({rows}, {}), }}", row.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_header_is_numpys() {
        let text = b"\x93NUMPY\x01\x00\x76\x00{'descr': '<f4', 'fortran_order': False, \
                     'shape': (3, 2560), }";
        let bytes = header(3, &[2560]);
        assert!(bytes.starts_with(text));
        assert!(bytes[text.len()..HEADER - 1].iter().all(|&b| b == b' '));
        assert_eq!(bytes[HEADER - 1], b'\n');
    }

    #[test]
    fn the_largest_sizes_fit() {
        let check = |row: &[usize], end: &str| {
            let bytes = header(u64::MAX, row);
            let text = String::from_utf8_lossy(&bytes[START..]).into_owned();
            assert!(text.trim_end().ends_with(end), "{text}");
        };
        check(&[usize::MAX], "18446744073709551615, 18446744073709551615), }");
        check(&[u32::MAX as usize, u32::MAX as usize], "4294967295, 4294967295), }");
        assert!(START + dictionary(u64::MAX, &[usize::MAX; 2]).len() >= HEADER);
    }
}
