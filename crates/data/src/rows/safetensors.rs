//! Writer of rows in the safetensors format: one tensor with the names in the metadata, or one tensor per name.
//! Invariant: the header, which precedes the data and contains every name, is written when all rows are known. Until
//! then the rows are in a temporary file beside the output, not in memory.
//!
//! Source: the safetensors format: header length (u64, little-endian), header (JSON, padded with
//! spaces to 8 bytes), data.

use std::fmt::Write as _;
use std::io::Write;
use std::path::{Path, PathBuf};

use super::{ValueType, at, width};
use crate::atomic::AtomicFile;
use crate::ids::IdSet;
use crate::{DataError, DataErrorKind};

/// Maximum length of the header in bytes: that of the format's reference reader, and of
/// [`Weights::open`](crate::weights::Weights::open), so that every file can be read by both.
const LONGEST_HEADER: usize = crate::weights::LONGEST_HEADER as usize;
/// Maximum number of header bytes for the names, which leaves 1 MiB for the other entries.
const LONGEST_NAMES: usize = LONGEST_HEADER - (1 << 20);

/// Name of the tensor in [`SafetensorsLayout::Matrix`].
const MATRIX: &str = "embeddings";
/// Key of the metadata in the header, which the format reserves.
const METADATA: &str = "__metadata__";

/// Writes named rows of f32 or f16 to a safetensors file.
pub struct SafetensorsWriter {
    target: PathBuf,
    spool: AtomicFile,
    /// Shape of a row.
    row: Vec<usize>,
    layout: SafetensorsLayout,
    values: ValueType,
    /// Names in their form in the header, each followed by a comma: the elements of the JSON array that the metadata
    /// contains as a string, or the entries of the tensors.
    names: String,
    seen: IdSet,
    /// Upper bound of the bytes of the names in the header.
    name_bytes: u64,
    sequences: u64,
    /// Number of bytes of data written.
    end: u64,
    bytes: Vec<u8>,
}

/// Arrangement of the rows in tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SafetensorsLayout {
    /// One tensor with a row for each name, and the names in the metadata.
    Matrix,
    /// A tensor for each name.
    TensorPerId,
}

impl SafetensorsLayout {
    /// Upper bound of the bytes that a name takes in the header.
    pub fn name_bytes(self, name: &str) -> u64 {
        /// Bytes of a tensor's entry without its name: keys, three sizes and two offsets of up to 20 digits.
        const ENTRY: usize = 160;
        let quoted = quoted(name);
        let bytes = match self {
            Self::Matrix => self::quoted(&quoted).len(),
            Self::TensorPerId => quoted.len() + ENTRY,
        };
        bytes as u64
    }

    /// Errors if names that take `bytes` in the header, by [`name_bytes`](Self::name_bytes), do not fit.
    pub fn check_names(self, bytes: u64) -> Result<(), DataErrorKind> {
        if bytes <= LONGEST_NAMES as u64 {
            return Ok(());
        }
        let what = format!(
            "the names of the records need {bytes} bytes, and the header of a safetensors file may have \
             {LONGEST_HEADER}; write .parquet, or .npy with one row for each sequence"
        );
        Err(DataErrorKind::Malformed(what))
    }
}

impl SafetensorsWriter {
    /// Starts writing the file `path`, which appears at [`finish`](Self::finish): a tensor `embeddings` of shape
    /// `[n, ..row]` with one row per name, and the metadata entry `ids`, a JSON array of the names in the order of the
    /// rows. `row` is the shape of a row: `[d]` or `[k, d]`.
    pub fn matrix(path: impl AsRef<Path>, row: &[usize]) -> Result<Self, DataError> {
        Self::create(path.as_ref(), row, SafetensorsLayout::Matrix)
    }

    /// Starts writing the file `path`, which appears at [`finish`](Self::finish): one tensor per name with the rows of
    /// this name, of shape `[n, d]` if `row` is `[d]`, and `[k, n, d]` if `row` is `[k, d]`.
    pub fn tensor_per_id(path: impl AsRef<Path>, row: &[usize]) -> Result<Self, DataError> {
        Self::create(path.as_ref(), row, SafetensorsLayout::TensorPerId)
    }

    fn create(path: &Path, row: &[usize], layout: SafetensorsLayout) -> Result<Self, DataError> {
        Ok(SafetensorsWriter {
            target: path.to_owned(),
            spool: AtomicFile::create(path)?,
            row: row.to_vec(),
            layout,
            values: ValueType::F32,
            names: String::new(),
            seen: IdSet::new(),
            name_bytes: 0,
            sequences: 0,
            end: 0,
            bytes: Vec::new(),
        })
    }

    /// Sets the type of the values, f32 by default. Call it before the first row.
    #[must_use]
    pub fn with_values(mut self, values: ValueType) -> Self {
        self.values = values;
        self
    }

    /// Appends the row, or the elements of the row-major tensor, of `id`. Errors if `values` has a wrong length, if
    /// `id` was written before, or if the names no longer fit the header.
    pub fn write(&mut self, id: &str, values: &[f32]) -> Result<(), DataError> {
        let rows = self
            .check(id, values)
            .and_then(|rows| self.values.encode(values, &mut self.bytes).map(|()| rows))
            .map_err(|kind| at(&self.target, id, kind))?;
        let start = self.end;
        self.end += self.bytes.len() as u64;
        let name = quoted(id);
        // Writing to a String cannot fail.
        let _ = match self.layout {
            SafetensorsLayout::Matrix => {
                // Quoted twice: the metadata value is a string that contains JSON. Its outer quotes are added once,
                // around the whole array.
                let again = quoted(&name);
                write!(self.names, "{},", &again[1..again.len() - 1])
            }
            SafetensorsLayout::TensorPerId => {
                let mut shape: Vec<u64> = self.row.iter().map(|&n| n as u64).collect();
                shape.insert(shape.len().saturating_sub(1), rows);
                let entry = entry(self.values, &shape, [start, self.end]);
                write!(self.names, "{name}:{entry},")
            }
        };
        self.spool.write_all(&self.bytes).map_err(|e| self.spool.error(e))?;
        self.sequences += 1;
        Ok(())
    }

    /// Returns the number of rows in `values`; errors if `values` or `id` is not acceptable.
    fn check(&mut self, id: &str, values: &[f32]) -> Result<u64, DataErrorKind> {
        let row: usize = self.row.iter().product();
        let rows = match self.layout {
            SafetensorsLayout::Matrix => 1,
            SafetensorsLayout::TensorPerId => values.len() / row.max(1),
        };
        width(values.len(), rows * row)?;
        if self.layout == SafetensorsLayout::TensorPerId && id == METADATA {
            return Err(DataErrorKind::Malformed(
                "the format reserves this name; rename the record".to_owned(),
            ));
        }
        self.name_bytes += self.layout.name_bytes(id);
        self.layout.check_names(self.name_bytes)?;
        if !self.seen.insert(id) {
            return Err(DataErrorKind::Malformed("two results for this name; each is written once".to_owned()));
        }
        Ok(rows as u64)
    }

    /// Completes the file with `metadata` as further metadata entries, gives it its final path, and returns the number
    /// of names.
    pub fn finish(self, metadata: &[(&str, &str)]) -> Result<u64, DataError> {
        let sequences = self.sequences;
        self.into_file(metadata)?.commit()?;
        Ok(sequences)
    }

    /// Completes the file with `metadata` as further metadata entries and returns it, ready to be committed.
    pub fn into_file(self, metadata: &[(&str, &str)]) -> Result<AtomicFile, DataError> {
        let mut header = self.header(metadata);
        header.extend(std::iter::repeat_n(' ', header.len().next_multiple_of(8) - header.len()));
        if header.len() > LONGEST_HEADER {
            let what = "more metadata than a safetensors header may hold; write .npy instead";
            return Err(DataError::at(&self.target, DataErrorKind::Malformed(what.to_owned())));
        }
        let mut file = AtomicFile::create(&self.target)?;
        file.write_all(&(header.len() as u64).to_le_bytes())
            .and_then(|()| file.write_all(header.as_bytes()))
            .map_err(|e| file.error(e))?;
        file.append(self.spool)?;
        Ok(file)
    }

    fn header(&self, metadata: &[(&str, &str)]) -> String {
        let mut pairs: Vec<String> =
            metadata.iter().map(|(key, value)| format!("{}:{}", quoted(key), quoted(value))).collect();
        let names = self.names.strip_suffix(',').unwrap_or_default();
        match self.layout {
            SafetensorsLayout::Matrix => {
                pairs.insert(0, format!("\"ids\":\"[{names}]\""));
                let mut shape = vec![self.sequences];
                shape.extend(self.row.iter().map(|&n| n as u64));
                let matrix = entry(self.values, &shape, [0, self.end]);
                format!("{{\"{METADATA}\":{{{}}},\"{MATRIX}\":{matrix}}}", pairs.join(","))
            }
            SafetensorsLayout::TensorPerId => {
                let comma = if names.is_empty() { "" } else { "," };
                format!("{{\"{METADATA}\":{{{}}}{comma}{names}}}", pairs.join(","))
            }
        }
    }
}

/// Returns the header entry of a tensor: type, shape and byte range in the data.
fn entry(values: ValueType, shape: &[u64], [start, end]: [u64; 2]) -> String {
    let dtype = match values {
        ValueType::F32 => "F32",
        ValueType::F16 => "F16",
    };
    let shape: Vec<String> = shape.iter().map(u64::to_string).collect();
    let shape = shape.join(",");
    format!("{{\"dtype\":\"{dtype}\",\"shape\":[{shape}],\"data_offsets\":[{start},{end}]}}")
}

/// Returns `text` as a JSON string with its quotes.
fn quoted(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}
