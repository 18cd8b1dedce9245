//! Writers of result files with one row (or one matrix) per sequence: `.npy`, `.safetensors` and `.parquet`. Invariant:
//! the number of rows need not be known in advance, memory does not grow with it (except for the names, where the
//! format stores them in its header), and a file is written completely or not at all.

mod npy;
mod parquet;
mod safetensors;

pub use npy::NpyWriter;
pub use parquet::ParquetWriter;
pub use safetensors::SafetensorsWriter;

use crate::{DataError, DataErrorKind};

/// Writes the values of `row` to `bytes`, little-endian, as the file formats store them.
fn little_endian(row: &[f32], bytes: &mut Vec<u8>) {
    bytes.clear();
    bytes.extend(row.iter().flat_map(|x| x.to_le_bytes()));
}

/// Returns an error if a row of `found` values does not have the `expected` width.
fn width(found: usize, expected: usize) -> Result<(), DataErrorKind> {
    if found == expected { Ok(()) } else { Err(DataErrorKind::RowWidth { found, expected }) }
}

/// Returns an error of the file at `path` at the row named `id`.
fn at(path: &std::path::Path, id: &str, kind: DataErrorKind) -> DataError {
    DataError::at(path, kind).with_id(id)
}
