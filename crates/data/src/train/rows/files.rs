//! Reads the embedding files that `plimsoll embed` writes, row by row. Invariant: the names and the number of rows come
//! from headers and name lists alone, and sizes are checked against the file before memory is allocated for them.
//! Values are returned as stored and may be NaN or infinite.
//!
//! Formats, for n rows of d values:
//! * `X.npy` with an (n, d) array of f32 or f16, and a list of names `X.ids.txt` beside it;
//! * `.npz` without compression, with an (n, d) array `embeddings` of f32 or f16, and an (n) array of texts `ids`;
//! * `.safetensors` with an (n, d) tensor `embeddings`, and the names in the metadata entry `ids`;
//! * `.safetensors` with one tensor per row, of shape (d) or (1, d).

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use crate::bounded;
use crate::printable::Name;
use crate::rows::ValueType;
use crate::weights::{StoredEntry, Weights, WeightsError, f16_to_f32, stored_entry};
use crate::{DataError, DataErrorKind};

/// Maximum size of a list of names in bytes.
const LONGEST_NAMES: u64 = 1 << 30;
/// Name of the tensor with all rows, in files of this form.
const MATRIX: &str = "embeddings";
/// Placeholder for the name of a row in a pattern of tensor names.
const ANY: char = '*';

/// An open file of rows.
pub(super) struct RowFile {
    path: PathBuf,
    width: usize,
    /// Names of the rows. [`RowSet::open`](super::RowSet::open) takes them, after which the list is empty.
    pub names: Vec<String>,
    kind: RowFileKind,
}

enum RowFileKind {
    /// A file with an array, also in an archive.
    Array { file: File, values: ValueType, offset: u64 },
    /// A safetensors file with the tensor [`MATRIX`].
    Matrix(Weights),
    /// A safetensors file with one tensor per row, and the names of the tensors by row.
    Tensors(Weights, Vec<String>),
}

impl RowFile {
    /// Opens the file at `path`. In a file with one tensor per row, rows are the tensors with names that match
    /// `pattern`, and the part of the name at `*` is the name of the row.
    ///
    /// # Errors
    /// A file of another format; rows of different or zero width; a number of names that differs from the number of
    /// rows; a pattern without `*` or without a matching tensor.
    pub(super) fn open(path: &Path, pattern: &str) -> Result<Self, DataError> {
        if path.extension().is_some_and(|e| e == "npy") {
            return Self::npy(path);
        }
        if path.extension().is_some_and(|e| e == "npz") {
            return Self::npz(path);
        }
        let weights = Weights::open(path).map_err(unreadable)?;
        if weights.get(MATRIX).is_some() && weights.metadata().contains_key("ids") {
            Self::matrix(path, weights)
        } else {
            Self::tensors(path, weights, pattern)
        }
    }

    /// Returns the number of values in a row.
    pub(super) fn width(&self) -> usize {
        self.width
    }

    /// Reads a row into `out`, which has [`width`](Self::width) elements.
    pub(super) fn read(&self, row: usize, out: &mut [f32]) -> Result<(), DataError> {
        let start = row as u64 * self.width as u64;
        let range = start..start + self.width as u64;
        match &self.kind {
            RowFileKind::Matrix(weights) => weights.read_f32(MATRIX, range, out).map_err(unreadable),
            RowFileKind::Tensors(weights, names) => {
                weights.read_f32(&names[row], 0..self.width as u64, out).map_err(unreadable)
            }
            RowFileKind::Array { file, values, offset } => {
                read_values(file, *values, offset + start * values.bytes() as u64, out)
                    .map_err(DataError::reading(&self.path))
            }
        }
    }

    fn npy(path: &Path) -> Result<Self, DataError> {
        let file = bounded::open(path).map_err(DataError::reading(path))?;
        let size = file.metadata().map_err(DataError::reading(path))?.len();
        let array = Array::read(path, &file, StoredEntry { offset: 0, size })?;
        let [rows, width] = array.matrix(path)?;
        let list = path.with_extension("ids.txt");
        let text = bounded::read_text(&list, LONGEST_NAMES).map_err(DataError::reading(&list))?;
        let names: Vec<String> = text.lines().map(str::to_owned).collect();
        if names.len() as u64 != rows {
            let what = format!("{} names for {rows} rows of the array beside it", names.len());
            return Err(DataError::at(&list, DataErrorKind::Malformed(what)));
        }
        Ok(array.rows(path, file, names, width))
    }

    fn npz(path: &Path) -> Result<Self, DataError> {
        let file = File::open(path).map_err(DataError::reading(path))?;
        let array = Array::of_archive(path, &file, "embeddings")?;
        let [rows, width] = array.matrix(path)?;
        let names = Array::of_archive(path, &file, "ids")?.texts(path, &file)?;
        if names.len() as u64 != rows {
            return Err(DataError::malformed(
                path,
                format!("{} ids for {rows} rows of `embeddings`", names.len()),
            ));
        }
        Ok(array.rows(path, file, names, width))
    }

    fn matrix(path: &Path, weights: Weights) -> Result<Self, DataError> {
        let shape = weights.tensor(MATRIX).map_err(unreadable)?.shape().to_vec();
        let names: Vec<String> = serde_json::from_str(&weights.metadata()["ids"])
            .map_err(|_| DataError::malformed(path, "its ids are not a list of names".to_owned()))?;
        match shape[..] {
            [rows, width] if rows == names.len() as u64 && width > 0 => Ok(RowFile {
                path: path.to_owned(),
                width: width as usize,
                names,
                kind: RowFileKind::Matrix(weights),
            }),
            _ => Err(DataError::malformed(
                path,
                format!("{} ids for a matrix of {shape:?}; rows of one width are needed", names.len()),
            )),
        }
    }

    fn tensors(path: &Path, weights: Weights, pattern: &str) -> Result<Self, DataError> {
        let Some((before, after)) = pattern.split_once(ANY) else {
            return Err(DataError::malformed(
                path,
                format!("the pattern '{}' has no *, the name of a row", Name(pattern)),
            ));
        };
        let mut names = Vec::new();
        let mut tensors = Vec::new();
        let mut width = None;
        for tensor in weights.tensors() {
            let name = tensor.name().strip_prefix(before).and_then(|name| name.strip_suffix(after));
            let Some(name) = name else { continue };
            let &last = match tensor.shape() {
                [last] | [1, last] if *last > 0 => last,
                other => {
                    let what = format!("the tensor '{}' of {other:?} is no row", Name(tensor.name()));
                    return Err(DataError::malformed(
                        path,
                        what + "; name those that are by a pattern, such as *.mean",
                    ));
                }
            };
            if *width.get_or_insert(last) != last {
                return Err(DataError::malformed(
                    path,
                    format!("'{}' has {last} values, others have not", Name(tensor.name())),
                ));
            }
            names.push(name.to_owned());
            tensors.push(tensor.name().to_owned());
        }
        let width = width
            .ok_or_else(|| DataError::malformed(path, format!("no tensor is called '{}'", Name(pattern))))?
            as usize;
        Ok(RowFile { path: path.to_owned(), width, names, kind: RowFileKind::Tensors(weights, tensors) })
    }
}

/// An array in a file.
struct Array {
    /// Type of the elements, as numpy writes it.
    descr: String,
    shape: Vec<u64>,
    /// Place of the elements in the file.
    elements: StoredEntry,
}

impl Array {
    /// Reads the header of the array `name` of an archive.
    fn of_archive(path: &Path, file: &File, name: &str) -> Result<Self, DataError> {
        let entry = stored_entry(path, &format!("{name}.npy")).map_err(unreadable)?;
        let Some(entry) = entry else {
            return Err(DataError::malformed(path, format!("it has no array `{name}`")));
        };
        Self::read(path, file, entry)
    }

    /// Reads the header of an array in C order.
    fn read(path: &Path, file: &File, entry: StoredEntry) -> Result<Self, DataError> {
        let header = npy_header(file, &entry).map_err(DataError::reading(path))?;
        let Some((header, len)) = header else {
            return Err(DataError::malformed(
                path,
                "not an array as numpy.save writes it; write it again, or give .safetensors",
            ));
        };
        if !header_value(&header, "fortran_order").is_some_and(|rest| rest.starts_with("False")) {
            return Err(DataError::malformed(
                path,
                "its values are not in C order; save it as numpy.ascontiguousarray(x)",
            ));
        }
        let descr = header_value(&header, "descr").and_then(|rest| rest.strip_prefix('\'')?.split_once('\''));
        let shape = header_value(&header, "shape").and_then(|rest| rest.strip_prefix('(')?.split_once(')'));
        let (Some((descr, _)), Some((shape, _))) = (descr, shape) else {
            return Err(DataError::malformed(
                path,
                "its header has no type or no shape; write it again with numpy.save",
            ));
        };
        let sizes = shape.split(',').map(str::trim).filter(|size| !size.is_empty()).map(str::parse);
        let shape = sizes
            .collect::<Result<Vec<u64>, _>>()
            .map_err(|_| DataError::malformed(path, "its shape is not numbers"))?;
        let elements = StoredEntry { offset: entry.offset + len, size: entry.size.saturating_sub(len) };
        Ok(Self { descr: descr.to_owned(), shape, elements })
    }

    /// Numbers of rows and columns of a matrix of f32 or f16.
    fn matrix(&self, path: &Path) -> Result<[u64; 2], DataError> {
        let Some(values) = self.values() else {
            return Err(DataError::malformed(
                path,
                "its values are not f32 or f16; save it as x.astype('<f4')".to_owned(),
            ));
        };
        let [rows, width] = self.shape[..] else {
            return Err(DataError::malformed(path, "it is not a matrix of rows".to_owned()));
        };
        let expected = rows.checked_mul(width).and_then(|n| n.checked_mul(values.bytes() as u64));
        if width > 0 && expected == Some(self.elements.size) {
            return Ok([rows, width]);
        }
        let size = self.elements.size;
        Err(DataError::malformed(
            path,
            format!("its header promises {rows} rows of {width}; it has {size} bytes of values"),
        ))
    }

    fn values(&self) -> Option<ValueType> {
        match self.descr.as_str() {
            "<f4" => Some(ValueType::F32),
            "<f2" => Some(ValueType::F16),
            _ => None,
        }
    }

    /// The rows of a matrix.
    fn rows(self, path: &Path, file: File, names: Vec<String>, width: u64) -> RowFile {
        let values = self.values().unwrap_or_default();
        let kind = RowFileKind::Array { file, values, offset: self.elements.offset };
        RowFile { path: path.to_owned(), width: width as usize, names, kind }
    }

    /// The elements of an array of texts.
    fn texts(&self, path: &Path, file: &File) -> Result<Vec<String>, DataError> {
        let length = self.descr.strip_prefix("<U").and_then(|n| n.parse::<u64>().ok()).filter(|&n| n > 0);
        let (Some(length), [count]) = (length, &self.shape[..]) else {
            return Err(DataError::malformed(path, "its array `ids` is not a list of texts"));
        };
        let expected = length.checked_mul(4).and_then(|n| n.checked_mul(*count));
        if expected != Some(self.elements.size) || self.elements.size > LONGEST_NAMES {
            return Err(DataError::malformed(
                path,
                "its array `ids` has another size than its header promises, or over 1 GiB",
            ));
        }
        let mut bytes = vec![0; self.elements.size as usize];
        file.read_exact_at(&mut bytes, self.elements.offset).map_err(DataError::reading(path))?;
        let texts = bytes.chunks_exact(4 * length as usize).map(utf32_text).collect::<Option<Vec<_>>>();
        texts.ok_or_else(|| DataError::malformed(path, "its array `ids` has a number that is no character"))
    }
}

/// The text behind a key in the header dictionary of an `.npy` array.
fn header_value<'a>(header: &'a str, key: &str) -> Option<&'a str> {
    header.split_once(&format!("'{key}':")).map(|(_, rest)| rest.trim_start())
}

/// Decodes little-endian UTF-32 up to the first zero; `None` for a number that is no character.
fn utf32_text(element: &[u8]) -> Option<String> {
    let numbers = element.as_chunks().0.iter().map(|bytes| u32::from_le_bytes(*bytes));
    numbers.take_while(|&number| number != 0).map(char::from_u32).collect()
}

/// Header dictionary of an `.npy` array at the start of `entry`, and the number of bytes before its elements; `None` if
/// the format is another, or the header has over 64 KiB.
///
/// Source: numpy's `numpy/lib/format.py`, versions 1 to 3.
fn npy_header(file: &File, entry: &StoredEntry) -> io::Result<Option<(String, u64)>> {
    let mut start = [0; 12];
    file.read_exact_at(&mut start, entry.offset)?;
    let (len, from) = match (&start[..6], start[6]) {
        (b"\x93NUMPY", 1) => (u64::from(u16::from_le_bytes([start[8], start[9]])), 10),
        (b"\x93NUMPY", 2 | 3) => {
            (u64::from(u32::from_le_bytes([start[8], start[9], start[10], start[11]])), 12)
        }
        _ => return Ok(None),
    };
    if len > 64 << 10 {
        return Ok(None);
    }
    let mut header = vec![0; len as usize];
    file.read_exact_at(&mut header, entry.offset + from)?;
    Ok(Some((String::from_utf8_lossy(&header).into_owned(), from + len)))
}

/// Reads `out.len()` little-endian values from byte `offset` on.
fn read_values(file: &File, values: ValueType, offset: u64, out: &mut [f32]) -> io::Result<()> {
    let mut buffer = [0; 4096];
    let mut at = offset;
    for part in out.chunks_mut(buffer.len() / 4) {
        let bytes = &mut buffer[..values.bytes() * part.len()];
        file.read_exact_at(bytes, at)?;
        at += bytes.len() as u64;
        match values {
            ValueType::F32 => {
                for (value, bytes) in part.iter_mut().zip(bytes.as_chunks().0) {
                    *value = f32::from_le_bytes(*bytes);
                }
            }
            ValueType::F16 => {
                for (value, bytes) in part.iter_mut().zip(bytes.as_chunks().0) {
                    *value = f16_to_f32(u16::from_le_bytes(*bytes));
                }
            }
        }
    }
    Ok(())
}

/// Converts an error without adding a path, because the message of a [`WeightsError`] names the file.
fn unreadable(error: WeightsError) -> DataError {
    DataError::new(DataErrorKind::Malformed(error.to_string()))
}
