//! Writers of result files with one row (or one matrix) per sequence: `.npy`, `.npz`, `.safetensors` and `.parquet`. Invariant:
//! the number of rows need not be known in advance, memory does not grow with it (except for the names, where the
//! format stores them in its header), and a file is written completely or not at all.

mod npy;
mod npz;
mod parquet;
mod safetensors;

pub use npy::NpyWriter;
pub use npz::{NpzLayout, NpzWriter};
pub use parquet::{ParquetWriter, TableLayout};
pub use safetensors::{SafetensorsLayout, SafetensorsWriter};

use crate::weights::f32_to_f16;
use crate::{DataError, DataErrorKind};

/// Element type of the values in a result file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ValueType {
    /// IEEE binary32.
    #[default]
    F32,
    /// IEEE binary16, rounded to nearest even.
    F16,
}

impl ValueType {
    /// Name on the command line and in metadata, as numpy calls it.
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "float32",
            Self::F16 => "float16",
        }
    }

    /// Bytes of a value.
    pub fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 => 2,
        }
    }

    /// Replaces `bytes` by the values of `row`, little-endian, as the file formats store them. Errors if a finite value is
    /// beyond the range of the type.
    fn encode(self, row: &[f32], bytes: &mut Vec<u8>) -> Result<(), DataErrorKind> {
        bytes.clear();
        match self {
            Self::F32 => bytes.extend(row.iter().flat_map(|x| x.to_le_bytes())),
            Self::F16 => {
                for &value in row {
                    bytes.extend(self::half(value)?.to_le_bytes());
                }
            }
        }
        Ok(())
    }
}

/// Converts a value to the bits of a binary16. Errors if it is finite and beyond the range.
fn half(value: f32) -> Result<u16, DataErrorKind> {
    let bits = f32_to_f16(value);
    if value.is_finite() && bits & 0x7fff == 0x7c00 {
        let what = format!("the value {value} is beyond the range of float16 (65504); write float32");
        return Err(DataErrorKind::Malformed(what));
    }
    Ok(bits)
}

/// Returns an error if a row of `found` values does not have the `expected` width.
fn width(found: usize, expected: usize) -> Result<(), DataErrorKind> {
    if found == expected { Ok(()) } else { Err(DataErrorKind::RowWidth { found, expected }) }
}

/// Returns an error of the file at `path` at the row named `id`.
fn at(path: &std::path::Path, id: &str, kind: DataErrorKind) -> DataError {
    DataError::at(path, kind).with_id(id)
}
