//! Writer of safetensors files. Invariant: equal input gives equal bytes, and a file appears at its path completely
//! or not at all. Source of the format: the README of the safetensors crate. The crate's own writer is not used,
//! because it orders metadata by a randomly seeded hash.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use super::dtype::f32_to_f16;
use super::{FileDType, WeightsError};

/// A tensor to write: values in C order.
#[derive(Debug, Clone, Copy)]
pub struct TensorData<'a> {
    /// Its name, unique in the file.
    pub name: &'a str,
    /// Its shape, outermost dimension first.
    pub shape: &'a [u64],
    /// The values; their number is the product of `shape`.
    pub data: &'a [f32],
}

/// The element type that f32 values are stored as.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StoredAs {
    /// binary32, unchanged.
    F32,
    /// binary16, rounded to nearest even; a finite value that would become infinite is an error.
    F16,
}

/// Encodes a safetensors file in memory, with the tensors in the given order.
///
/// # Errors
/// `BadTensor` for a name given twice or reserved, values that do not fill the shape, or values
/// too large for f16.
pub fn safetensors_bytes(
    tensors: &[TensorData<'_>],
    metadata: &BTreeMap<String, String>,
    stored: StoredAs,
) -> Result<Vec<u8>, WeightsError> {
    let header = header(tensors, metadata, stored)?;
    let mut bytes = Vec::new();
    write_all(&mut bytes, &header, tensors, stored).map_err(|source| WeightsError::Io {
        path: PathBuf::from("memory"),
        action: "write",
        source,
    })?;
    Ok(bytes)
}

/// Writes a safetensors file atomically: to a temporary file in the same folder, which is then renamed to `path`.
///
/// # Errors
/// As `safetensors_bytes`, and `Io`.
pub fn write_safetensors(
    path: &Path,
    tensors: &[TensorData<'_>],
    metadata: &BTreeMap<String, String>,
    stored: StoredAs,
) -> Result<(), WeightsError> {
    let header = header(tensors, metadata, stored)?;
    let mut temporary = path.as_os_str().to_owned();
    temporary.push(format!(".{}.tmp", std::process::id()));
    let temporary = PathBuf::from(temporary);
    let written = (|| {
        let mut file = BufWriter::new(File::create(&temporary)?);
        write_all(&mut file, &header, tensors, stored)?;
        // The data must be on disk before the rename, or a crash could leave a short file at `path`; the folder is
        // synced after it, so that the rename itself survives a crash.
        file.into_inner()?.sync_all()?;
        fs::rename(&temporary, path)?;
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
        File::open(folder)?.sync_all()
    })();
    written.map_err(|source| {
        // Best effort: the error to report is the first one.
        let _ = fs::remove_file(&temporary);
        WeightsError::Io { path: path.to_owned(), action: "write", source }
    })
}

/// Encodes the part of a safetensors file before the data: the header's length (u64, little-endian) and the JSON
/// header, padded with blanks to a multiple of 8 bytes. The data of the tensors must follow in the given order
/// without gaps. Names must be unique.
pub fn safetensors_header<'a>(
    tensors: impl Iterator<Item = (&'a str, FileDType, &'a [u64])>,
    metadata: &BTreeMap<String, String>,
) -> Vec<u8> {
    let mut fields = Vec::new();
    if !metadata.is_empty() {
        fields.push(format!("\"__metadata__\":{}", serde_json::json!(metadata)));
    }
    let mut start = 0;
    for (name, dtype, shape) in tensors {
        let end = start + shape.iter().product::<u64>() * dtype.size();
        fields.push(format!(
            "{}:{{\"dtype\":\"{}\",\"shape\":{shape:?},\"data_offsets\":[{start},{end}]}}",
            serde_json::json!(name),
            dtype.name(),
        ));
        start = end;
    }
    let mut header = format!("{{{}}}", fields.join(",")).into_bytes();
    header.resize(header.len().next_multiple_of(8), b' ');
    [&(header.len() as u64).to_le_bytes()[..], &header].concat()
}

/// Checks all tensors and encodes their header.
fn header(
    tensors: &[TensorData<'_>],
    metadata: &BTreeMap<String, String>,
    stored: StoredAs,
) -> Result<Vec<u8>, WeightsError> {
    let dtype = match stored {
        StoredAs::F32 => FileDType::F32,
        StoredAs::F16 => FileDType::F16,
    };
    let mut names = std::collections::BTreeSet::from(["__metadata__"]);
    for tensor in tensors {
        check(tensor, stored, names.insert(tensor.name))?;
    }
    Ok(safetensors_header(tensors.iter().map(|t| (t.name, dtype, t.shape)), metadata))
}

fn check(tensor: &TensorData<'_>, stored: StoredAs, is_new: bool) -> Result<(), WeightsError> {
    if !is_new {
        return Err(bad_tensor(tensor, "the name is given twice or is reserved".to_owned()));
    }
    let elements = tensor.shape.iter().try_fold(1u64, |product, &size| product.checked_mul(size));
    if elements != Some(tensor.data.len() as u64) {
        return Err(bad_tensor(
            tensor,
            format!("shape {:?} does not hold {} values", tensor.shape, tensor.data.len()),
        ));
    }
    match tensor
        .data
        .iter()
        .find(|value| stored == StoredAs::F16 && value.is_finite() && f32_to_f16(**value) & 0x7fff == 0x7c00)
    {
        Some(value) => Err(bad_tensor(tensor, format!("{value} is too large for F16; write it as F32"))),
        None => Ok(()),
    }
}

/// The error for a tensor that cannot be written.
fn bad_tensor(tensor: &TensorData<'_>, why: String) -> WeightsError {
    WeightsError::BadTensor { tensor: tensor.name.to_owned(), why }
}

fn write_all(
    out: &mut impl Write,
    header: &[u8],
    tensors: &[TensorData<'_>],
    stored: StoredAs,
) -> io::Result<()> {
    out.write_all(header)?;
    for value in tensors.iter().flat_map(|tensor| tensor.data) {
        match stored {
            StoredAs::F32 => out.write_all(&value.to_le_bytes())?,
            StoredAs::F16 => out.write_all(&f32_to_f16(*value).to_le_bytes())?,
        }
    }
    out.flush()
}
