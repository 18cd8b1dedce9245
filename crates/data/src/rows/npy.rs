//! A matrix of f32 as numpy's `.npy`, version 1.0. Invariant: the header is 128 bytes for any number
//! of rows, so that the number can be written when it is known.
//!
//! Source: numpy's `numpy/lib/format.py`.

use std::io::Write;
use std::path::Path;

use super::little_endian;
use crate::DataError;
use crate::atomic::AtomicFile;

/// The whole header: magic, version, length and a padded dictionary; room for any two 64-bit sizes.
const HEADER: usize = 128;

/// Writes `[n, width]` f32, a row at a time.
#[derive(Debug)]
pub struct NpyWriter {
    file: AtomicFile,
    width: usize,
    rows: u64,
    bytes: Vec<u8>,
}

impl NpyWriter {
    /// Starts the file that will be `path`, with rows of `width` values.
    pub fn create(path: impl AsRef<Path>, width: usize) -> Result<Self, DataError> {
        let mut file = AtomicFile::create(path)?;
        file.write_all(&header(0, width)).map_err(|e| file.error(e))?;
        Ok(NpyWriter { file, width, rows: 0, bytes: Vec::new() })
    }

    /// Appends a row of `width` values.
    pub fn row(&mut self, values: &[f32]) -> Result<(), DataError> {
        super::width(values.len(), self.width).map_err(|kind| DataError::at(self.file.target(), kind))?;
        little_endian(values, &mut self.bytes);
        self.file.write_all(&self.bytes).map_err(|e| self.file.error(e))?;
        self.rows += 1;
        Ok(())
    }

    /// Completes the file; the number of its rows.
    pub fn finish(mut self) -> Result<u64, DataError> {
        self.file.patch(0, &header(self.rows, self.width))?;
        self.file.commit()?;
        Ok(self.rows)
    }
}

fn header(rows: u64, width: usize) -> [u8; HEADER] {
    let dictionary = format!("{{'descr': '<f4', 'fortran_order': False, 'shape': ({rows}, {width}), }}");
    let mut bytes = [b' '; HEADER];
    bytes[..8].copy_from_slice(b"\x93NUMPY\x01\x00");
    bytes[8..10].copy_from_slice(&(HEADER as u16 - 10).to_le_bytes());
    bytes[10..10 + dictionary.len()].copy_from_slice(dictionary.as_bytes());
    bytes[HEADER - 1] = b'\n';
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_header_is_numpys() {
        let text = b"\x93NUMPY\x01\x00\x76\x00{'descr': '<f4', 'fortran_order': False, \
                     'shape': (3, 2560), }";
        let bytes = header(3, 2560);
        assert!(bytes.starts_with(text));
        assert!(bytes[text.len()..HEADER - 1].iter().all(|&b| b == b' '));
        assert_eq!(bytes[HEADER - 1], b'\n');
    }

    #[test]
    fn the_largest_sizes_fit() {
        let bytes = header(u64::MAX, usize::MAX);
        let text = String::from_utf8_lossy(&bytes[10..]).into_owned();
        assert!(text.trim_end().ends_with("18446744073709551615), }"), "{text}");
    }
}
