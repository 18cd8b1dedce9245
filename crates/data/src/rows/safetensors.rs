//! Rows as safetensors: one matrix with the names in the metadata, or one tensor per name.
//! Invariant: the header, which comes first in the file and holds every name, is written when all
//! rows are known; until then they wait in a temporary file beside the output, not in memory.
//!
//! Source: the safetensors format: header length (u64, little-endian), header (JSON, padded with
//! spaces to 8 bytes), data.

use std::fmt::Write as _;
use std::io::Write;
use std::path::{Path, PathBuf};

use super::{at, little_endian, width};
use crate::atomic::AtomicFile;
use crate::ids::IdSet;
use crate::{DataError, DataErrorKind};

/// The reference reader refuses longer headers.
const LONGEST_HEADER: usize = 100_000_000;
/// What the names may take of it, so that the rest always fits.
const LONGEST_NAMES: usize = LONGEST_HEADER - (1 << 20);

/// The name of the matrix.
const MATRIX: &str = "embeddings";
/// Where the format keeps what is no tensor.
const METADATA: &str = "__metadata__";

/// Writes f32 rows by name.
pub struct SafetensorsWriter {
    target: PathBuf,
    spool: AtomicFile,
    width: usize,
    layout: Layout,
    /// The names as they will stand in the header: the inside of the array that the metadata holds
    /// as a string, or the entries of the tensors, each with its comma.
    names: String,
    seen: IdSet,
    sequences: u64,
    rows: u64,
    bytes: Vec<u8>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Layout {
    Matrix,
    TensorPerId,
}

impl SafetensorsWriter {
    /// Starts the file that will be `path`: a tensor `embeddings [n, width]`, one row for each name,
    /// and `ids` in the metadata, a JSON array of the names in the order of the rows.
    pub fn matrix(path: impl AsRef<Path>, width: usize) -> Result<Self, DataError> {
        Self::create(path.as_ref(), width, Layout::Matrix)
    }

    /// Starts the file that will be `path`: for each name a tensor `[its rows, width]`.
    pub fn tensor_per_id(path: impl AsRef<Path>, width: usize) -> Result<Self, DataError> {
        Self::create(path.as_ref(), width, Layout::TensorPerId)
    }

    fn create(path: &Path, width: usize, layout: Layout) -> Result<Self, DataError> {
        Ok(SafetensorsWriter {
            target: path.to_owned(),
            spool: AtomicFile::create(path)?,
            width,
            layout,
            names: String::new(),
            seen: IdSet::new(),
            sequences: 0,
            rows: 0,
            bytes: Vec::new(),
        })
    }

    /// Appends the row of `id`, or its rows one after the other. An error if there is one already.
    pub fn write(&mut self, id: &str, values: &[f32]) -> Result<(), DataError> {
        let rows = self.check(id, values).map_err(|kind| at(&self.target, id, kind))?;
        let row_bytes = self.width as u64 * size_of::<f32>() as u64;
        let (start, end) = (self.rows * row_bytes, (self.rows + rows) * row_bytes);
        let name = quoted(id);
        // Writing to a String cannot fail.
        let _ = match self.layout {
            Layout::Matrix => {
                let again = quoted(&name);
                write!(self.names, "{},", &again[1..again.len() - 1])
            }
            Layout::TensorPerId => {
                write!(self.names, "{name}:{},", entry(rows, self.width, [start, end]))
            }
        };
        little_endian(values, &mut self.bytes);
        self.spool.write_all(&self.bytes).map_err(|e| self.spool.error(e))?;
        self.sequences += 1;
        self.rows += rows;
        Ok(())
    }

    /// How many rows `values` are, if `id` may have them.
    fn check(&mut self, id: &str, values: &[f32]) -> Result<u64, DataErrorKind> {
        let rows = match self.layout {
            Layout::Matrix => 1,
            Layout::TensorPerId => values.len() / self.width.max(1),
        };
        width(values.len(), rows * self.width)?;
        let refuse = |what: &str| Err(DataErrorKind::Malformed(what.to_owned()));
        if self.layout == Layout::TensorPerId && id == METADATA {
            return refuse("the format reserves this name; rename the record");
        }
        if self.names.len() + 2 * id.len() > LONGEST_NAMES {
            return refuse("more names than a safetensors header may hold; write .npy instead");
        }
        if !self.seen.insert(id) {
            return refuse("two results for this name; each is written once");
        }
        Ok(rows as u64)
    }

    /// Completes the file, with `metadata` as further pairs; the number of its names.
    pub fn finish(self, metadata: &[(&str, &str)]) -> Result<u64, DataError> {
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
        file.commit()?;
        Ok(self.sequences)
    }

    fn header(&self, metadata: &[(&str, &str)]) -> String {
        let mut pairs: Vec<String> =
            metadata.iter().map(|(key, value)| format!("{}:{}", quoted(key), quoted(value))).collect();
        let names = self.names.strip_suffix(',').unwrap_or_default();
        match self.layout {
            Layout::Matrix => {
                pairs.insert(0, format!("\"ids\":\"[{names}]\""));
                let end = self.rows * self.width as u64 * size_of::<f32>() as u64;
                let matrix = entry(self.rows, self.width, [0, end]);
                format!("{{\"{METADATA}\":{{{}}},\"{MATRIX}\":{matrix}}}", pairs.join(","))
            }
            Layout::TensorPerId => {
                let comma = if names.is_empty() { "" } else { "," };
                format!("{{\"{METADATA}\":{{{}}}{comma}{names}}}", pairs.join(","))
            }
        }
    }
}

/// A tensor's description.
fn entry(rows: u64, width: usize, [start, end]: [u64; 2]) -> String {
    format!("{{\"dtype\":\"F32\",\"shape\":[{rows},{width}],\"data_offsets\":[{start},{end}]}}")
}

/// A JSON string.
fn quoted(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}
