//! Reads the embedding files that `plimsoll embed` writes, row by row. Invariant: the names and the number of rows come
//! from headers and name lists alone, and sizes are checked against the file before memory is allocated for them.
//! Values are returned as stored and may be NaN or infinite.
//!
//! Formats, for n rows of d values:
//! * `X.npy` with an (n, d) array, and a list of names `X.ids.txt` beside it;
//! * `.safetensors` with an (n, d) tensor `embeddings`, and the names in the metadata entry `ids`;
//! * `.safetensors` with one tensor per row, of shape (d) or (1, d).

use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use crate::bounded;
use crate::printable::Name;
use crate::weights::{Weights, WeightsError};
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
    /// An `.npy` file and the byte offset of its values.
    Npy(File, u64),
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
        let weights = Weights::open(path).map_err(unreadable)?;
        match weights.get(MATRIX).is_some() && weights.metadata().contains_key("ids") {
            true => Self::matrix(path, weights),
            false => Self::tensors(path, weights, pattern),
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
            RowFileKind::Npy(file, offset) => read_f32(file, offset + start * 4, out)
                .map_err(|e| DataError::at(&self.path, DataErrorKind::Read(e))),
        }
    }

    fn npy(path: &Path) -> Result<Self, DataError> {
        let fail = |e| DataError::at(path, DataErrorKind::Read(e));
        let refuse = |what: String| DataError::at(path, DataErrorKind::Malformed(what));
        let mut file = bounded::open(path).map_err(fail)?;
        let (header, offset) = npy_header(&mut file).map_err(fail)?.ok_or_else(|| {
            refuse("not an array as numpy.save writes it; write it again, or give .safetensors".to_owned())
        })?;
        let [rows, width] = npy_shape(&header).map_err(&refuse)?;
        let size = file.metadata().map_err(fail)?.len();
        let expected =
            rows.checked_mul(width).and_then(|n| n.checked_mul(4)).and_then(|n| n.checked_add(offset));
        if width == 0 || expected != Some(size) {
            return Err(refuse(format!("its header promises {rows} rows of {width}; it has {size} bytes")));
        }
        let list = path.with_extension("ids.txt");
        let text = bounded::read_text(&list, LONGEST_NAMES)
            .map_err(|e| DataError::at(&list, DataErrorKind::Read(e)))?;
        let names: Vec<String> = text.lines().map(str::to_owned).collect();
        if names.len() as u64 != rows {
            let what = format!("{} names for {rows} rows of the array beside it", names.len());
            return Err(DataError::at(&list, DataErrorKind::Malformed(what)));
        }
        Ok(RowFile {
            path: path.to_owned(),
            width: width as usize,
            names,
            kind: RowFileKind::Npy(file, offset),
        })
    }

    fn matrix(path: &Path, weights: Weights) -> Result<Self, DataError> {
        let refuse = |what: String| DataError::at(path, DataErrorKind::Malformed(what));
        let shape = weights.tensor(MATRIX).map_err(unreadable)?.shape().to_vec();
        let names: Vec<String> = serde_json::from_str(&weights.metadata()["ids"])
            .map_err(|_| refuse("its ids are not a list of names".to_owned()))?;
        match shape[..] {
            [rows, width] if rows == names.len() as u64 && width > 0 => Ok(RowFile {
                path: path.to_owned(),
                width: width as usize,
                names,
                kind: RowFileKind::Matrix(weights),
            }),
            _ => Err(refuse(format!(
                "{} ids for a matrix of {shape:?}; rows of one width are needed",
                names.len()
            ))),
        }
    }

    fn tensors(path: &Path, weights: Weights, pattern: &str) -> Result<Self, DataError> {
        let refuse = |what: String| DataError::at(path, DataErrorKind::Malformed(what));
        let Some((before, after)) = pattern.split_once(ANY) else {
            return Err(refuse(format!("the pattern '{}' has no *, the name of a row", Name(pattern))));
        };
        let (mut names, mut tensors, mut width) = (Vec::new(), Vec::new(), None);
        for tensor in weights.tensors() {
            let name = tensor.name().strip_prefix(before).and_then(|name| name.strip_suffix(after));
            let Some(name) = name else { continue };
            let &last = match tensor.shape() {
                [last] | [1, last] if *last > 0 => last,
                other => {
                    let what = format!("the tensor '{}' of {other:?} is no row", Name(tensor.name()));
                    return Err(refuse(what + "; name those that are by a pattern, such as *.mean"));
                }
            };
            if *width.get_or_insert(last) != last {
                return Err(refuse(format!("'{}' has {last} values, others have not", Name(tensor.name()))));
            }
            names.push(name.to_owned());
            tensors.push(tensor.name().to_owned());
        }
        let none = || refuse(format!("no tensor is called '{}'", Name(pattern)));
        let width = width.ok_or_else(none)? as usize;
        Ok(RowFile { path: path.to_owned(), width, names, kind: RowFileKind::Tensors(weights, tensors) })
    }
}

/// Header dictionary of an `.npy` file, and the byte offset of the values; `None` if the file has another format or a
/// header over 64 KiB.
///
/// Source: numpy's `numpy/lib/format.py`, versions 1 to 3.
fn npy_header(file: &mut File) -> io::Result<Option<(String, u64)>> {
    let mut start = [0; 12];
    file.read_exact(&mut start)?;
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
    file.read_exact_at(&mut header, from)?;
    Ok(Some((String::from_utf8_lossy(&header).into_owned(), from + len)))
}

/// Numbers of rows and columns from the header of a 2-D array of little-endian f32 in C order; `Err` has the message
/// for other arrays.
fn npy_shape(header: &str) -> Result<[u64; 2], String> {
    let value = |key: &str| header.split_once(&format!("'{key}':")).map(|(_, rest)| rest.trim_start());
    let starts = |key: &str, expected: &str| value(key).is_some_and(|rest| rest.starts_with(expected));
    if !starts("descr", "'<f4'") || !starts("fortran_order", "False") {
        return Err(
            "its values are not f32 in C order; save it as numpy.ascontiguousarray(x, '<f4')".to_owned()
        );
    }
    let shape = value("shape").and_then(|rest| rest.strip_prefix('(')?.split_once(')')).map(|(shape, _)| shape);
    let sizes: Option<Vec<u64>> = shape.map(|shape| {
        shape.split(',').map(str::trim).filter(|s| !s.is_empty()).map_while(|s| s.parse().ok()).collect()
    });
    match sizes.as_deref() {
        Some(&[rows, width]) => Ok([rows, width]),
        Some(_) | None => Err("it is not a matrix of rows".to_owned()),
    }
}

/// Reads `out.len()` little-endian f32 values from byte `offset` on.
fn read_f32(file: &File, offset: u64, out: &mut [f32]) -> io::Result<()> {
    let mut buffer = [0; 4096];
    let mut at = offset;
    for part in out.chunks_mut(buffer.len() / 4) {
        let bytes = &mut buffer[..4 * part.len()];
        file.read_exact_at(bytes, at)?;
        at += bytes.len() as u64;
        for (value, bytes) in part.iter_mut().zip(bytes.as_chunks().0) {
            *value = f32::from_le_bytes(*bytes);
        }
    }
    Ok(())
}

/// Converts an error without adding a path, because the message of a [`WeightsError`] names the file.
fn unreadable(error: WeightsError) -> DataError {
    DataError::new(DataErrorKind::Malformed(error.to_string()))
}
