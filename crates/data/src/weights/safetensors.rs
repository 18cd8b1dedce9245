//! Reader of safetensors headers; the tensors' values stay in the file. Invariant: the tensors of an accepted header
//! fill the file exactly, without gap or overlap. The safetensors crate parses the header and checks the offsets; its
//! README is the source of the format.

use std::collections::BTreeMap;

use ::safetensors::tensor::{Dtype, Metadata};

use super::source::ByteSource;
use super::tensor::{MAX_DIMENSIONS, StoredTensor, TensorLayout};
use super::{FileDType, WeightsError};

/// Maximum size of a header in bytes: that of the format's reference implementation. Files of embeddings reach it with
/// the names of about a million sequences. The header must be in the file, so that the memory of the parser is a few
/// times the size of an untrusted file at most.
pub(crate) const LONGEST_HEADER: u64 = 100_000_000;
/// Size in bytes of the header's length (u64, little-endian), with which the file begins.
const LENGTH_BYTES: u64 = 8;

/// A parsed header.
pub(super) struct Header {
    pub(super) tensors: Vec<StoredTensor>,
    pub(super) metadata: BTreeMap<String, String>,
}

/// Whether a file begins like safetensors: with a header length below the file's length, followed by `{`.
pub(super) fn looks_like(source: &ByteSource) -> bool {
    let mut head = [0; 9];
    source.read_at(0, &mut head).is_ok() && header_len(&head) <= source.len() && head[8] == b'{'
}

/// Reads and checks the header of a file; `file` is its number among the opened weight files.
pub(super) fn read_header(source: &ByteSource, file: usize) -> Result<Header, WeightsError> {
    let mut head = [0; LENGTH_BYTES as usize];
    source.read_at(0, &mut head)?;
    let len = header_len(&head);
    let header = source.read_vec(LENGTH_BYTES, len, LONGEST_HEADER, "a header")?;
    let parsed: Metadata =
        serde_json::from_slice(&header).map_err(|error| WeightsError::json(source.path(), error))?;
    let start = LENGTH_BYTES + len;
    let expected = start.saturating_add(parsed.data_len() as u64);
    if expected > source.len() {
        return Err(WeightsError::Truncated { path: source.path().to_owned(), expected, found: source.len() });
    }
    if expected < source.len() {
        return Err(source.malformed(format!("{} bytes follow its last tensor", source.len() - expected)));
    }
    let mut tensors = Vec::new();
    for (name, info) in parsed.tensors() {
        let Some(dtype) = dtype(info.dtype) else {
            let why = format!("its element type {} is not supported; save it as F32, F16 or BF16", info.dtype);
            return Err(WeightsError::Unsupported { path: source.path().to_owned(), tensor: name, why });
        };
        if info.shape.len() > MAX_DIMENSIONS {
            let why = format!("it has more than {MAX_DIMENSIONS} dimensions, which no model has");
            return Err(WeightsError::Unsupported { path: source.path().to_owned(), tensor: name, why });
        }
        let shape = info.shape.iter().map(|&size| size as u64).collect();
        let offset = start + info.data_offsets.0 as u64;
        tensors.push(StoredTensor { name, dtype, shape, layout: TensorLayout::Contiguous, file, offset });
    }
    let metadata =
        parsed.metadata().iter().flatten().map(|(key, value)| (key.clone(), value.clone())).collect();
    Ok(Header { tensors, metadata })
}

fn header_len(head: &[u8]) -> u64 {
    head.first_chunk().map_or(u64::MAX, |len| u64::from_le_bytes(*len))
}

fn dtype(stored: Dtype) -> Option<FileDType> {
    Some(match stored {
        Dtype::F64 => FileDType::F64,
        Dtype::F32 => FileDType::F32,
        Dtype::F16 => FileDType::F16,
        Dtype::BF16 => FileDType::BF16,
        Dtype::I64 => FileDType::I64,
        Dtype::I32 => FileDType::I32,
        Dtype::I16 => FileDType::I16,
        Dtype::I8 => FileDType::I8,
        Dtype::U8 => FileDType::U8,
        Dtype::BOOL => FileDType::Bool,
        _ => return None,
    })
}
