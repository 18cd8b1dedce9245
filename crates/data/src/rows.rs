//! Results, one row (or one matrix) per sequence, streamed to `.npy`, `.safetensors` and `.parquet`.
//! Invariant: the number of rows need not be known before, memory does not grow with it (but for the
//! names, where the format keeps them in its header), and a file appears whole or not at all.

mod npy;
mod parquet;
mod safetensors;

pub use npy::NpyWriter;
pub use parquet::ParquetWriter;
pub use safetensors::SafetensorsWriter;

use crate::{DataError, DataErrorKind};

/// Puts the values of `row` into `bytes`, little-endian, as the formats store them.
fn little_endian(row: &[f32], bytes: &mut Vec<u8>) {
    bytes.clear();
    bytes.extend(row.iter().flat_map(|x| x.to_le_bytes()));
}

fn width(found: usize, expected: usize) -> Result<(), DataErrorKind> {
    if found == expected { Ok(()) } else { Err(DataErrorKind::RowWidth { found, expected }) }
}

fn at(path: &std::path::Path, id: &str, kind: DataErrorKind) -> DataError {
    DataError::at(path, kind).with_id(id)
}
