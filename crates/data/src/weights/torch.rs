//! Reader of PyTorch's zip files (`torch.save` since 1.6): resolves the tensors of the pickle to byte ranges of the
//! zip. Invariant: a tensor is returned only if its storage is in the file, has the length that element type and
//! number of elements require, and contains the tensor's last element. Source of the format: torch/serialization.py,
//! `_save` and
//! `_load`.

use super::pickle::{NodeId, ParsedPickle, PickleError, PickleNode};
use super::source::ByteSource;
use super::tensor::{MAX_DIMENSIONS, StoredTensor, TensorLayout};
use super::zip::{self, Zip};
use super::{FileDType, WeightsError};
use crate::printable::Name;

/// Maximum size of a pickle of weights in bytes: 28 000 tensors at about 150 bytes each.
pub(super) const STATE_LIMIT: u64 = 4 << 20;
/// Maximum size in bytes of the pickle of a result file, which contains the numbers themselves.
pub(super) const OBJECT_LIMIT: u64 = 256 << 20;
/// First bytes of PyTorch files before the zip format: PROTO 2, LONG1 of ten bytes, `MAGIC_NUMBER`.
const LEGACY_MAGIC: [u8; 14] = [0x80, 2, 0x8a, 10, 0x6c, 0xfc, 0x9c, 0x46, 0xf9, 0x20, 0x6a, 0xa8, 0x50, 0x19];

/// An opened torch zip file.
#[derive(Debug)]
pub(super) struct TorchFile {
    pub(super) source: ByteSource,
    pub(super) pickle: ParsedPickle,
    zip: Zip,
    /// Folder inside the zip that contains all entries.
    root: String,
}

impl TorchFile {
    /// Reads the zip directory and the pickle. Errors if the file is not a PyTorch zip file, if it is TorchScript or
    /// big-endian, or if the pickle has more than `limit` bytes.
    pub(super) fn open(source: ByteSource, limit: u64) -> Result<TorchFile, WeightsError> {
        let mut magic = [0; 4];
        if source.len() < 4 || source.read_at(0, &mut magic).is_err() || magic != zip::MAGIC {
            return Err(explain_foreign(&source));
        }
        let zip = Zip::open(&source)?;
        let roots: Vec<&str> = zip.names().filter_map(|name| name.strip_suffix("/data.pkl")).collect();
        let root = match roots[..] {
            [root] if !root.contains('/') => root.to_owned(),
            _ => {
                let why = "it is a zip file without the one `data.pkl` that torch.save writes".to_owned();
                return Err(WeightsError::NotWeights { path: source.path().to_owned(), why });
            }
        };
        if zip.names().any(|name| name.strip_prefix(&*root) == Some("/constants.pkl")) {
            let why = "it is TorchScript, a program; save the state dict with torch.save instead".to_owned();
            return Err(WeightsError::NotWeights { path: source.path().to_owned(), why });
        }
        let pickle = read_entry(&source, &zip, &format!("{root}/data.pkl"), limit)?.unwrap_or_default();
        let pickle = ParsedPickle::parse(&pickle).map_err(|e| at_file(e, &source))?;
        if let Some(order) = read_entry(&source, &zip, &format!("{root}/byteorder"), 16)?
            && order != b"little"
        {
            let why = "it was saved on a big-endian machine; save it again on a little-endian one".to_owned();
            return Err(WeightsError::NotWeights { path: source.path().to_owned(), why });
        }
        Ok(TorchFile { source, pickle, zip, root })
    }

    /// Returns the named tensors of the state dict or module in the file; `file` is the file number that they get.
    pub(super) fn tensors(&self, file: usize) -> Result<Vec<StoredTensor>, WeightsError> {
        let named = super::state_dict::named_tensors(&self.pickle)
            .map_err(|why| WeightsError::NotWeights { path: self.source.path().to_owned(), why })?;
        named.into_iter().map(|(name, node)| self.tensor(name, node, file)).collect()
    }

    /// Checks a tensor node against its storage and returns the tensor with its byte offset in the file.
    pub(super) fn tensor(&self, name: String, node: NodeId, file: usize) -> Result<StoredTensor, WeightsError> {
        let unsupported = |why: &str| WeightsError::Unsupported {
            path: self.source.path().to_owned(),
            tensor: name.clone(),
            why: why.to_owned(),
        };
        let PickleNode::Tensor { storage, offset, shape, stride } = *self.pickle.node(node) else {
            return Err(unsupported("it is not a tensor"));
        };
        let PickleNode::Storage { key, dtype, elements } = *self.pickle.node(storage) else {
            return Err(unsupported("it has no storage"));
        };
        let bad_shape = "its shape or strides are not plain sizes";
        let shape = self.sizes(shape).ok_or_else(|| unsupported(bad_shape))?;
        let stride = self.sizes(stride).filter(|stride| stride.len() == shape.len());
        let stride = stride.ok_or_else(|| unsupported(bad_shape))?;
        let last = extent(&shape, &stride).and_then(|extent| extent.checked_add(offset));
        if last.is_none_or(|last| last > elements) {
            return Err(unsupported("it reaches past the end of its storage, so the file is damaged"));
        }
        let layout = layout(&shape, &stride).ok_or_else(|| {
            unsupported(&format!(
                "shape {shape:?} with strides {stride:?} is not stored row by row; call .contiguous() on it and save again"
            ))
        })?;
        let start = self.storage_start(key, dtype, elements, &name)?;
        Ok(StoredTensor { name, dtype, shape, layout, file, offset: start + offset * dtype.size() })
    }

    /// Returns the offset of a storage's bytes in the file; errors if the storage is missing or has another length than
    /// `elements` elements of `dtype`.
    fn storage_start(
        &self,
        key: NodeId,
        dtype: FileDType,
        elements: u64,
        tensor: &str,
    ) -> Result<u64, WeightsError> {
        let key = self.pickle.str(key).unwrap_or_default();
        let entry = format!("{}/data/{key}", self.root);
        let is_name = !key.is_empty() && key.len() <= 64;
        let found = if is_name { self.zip.locate(&self.source, &entry)? } else { None };
        let Some((start, size)) = found else {
            let why = format!("the storage `{}` of tensor `{}` is missing", Name(key), Name(tensor));
            return Err(self.source.malformed(why));
        };
        if elements.checked_mul(dtype.size()) == Some(size) {
            Ok(start)
        } else {
            Err(self.source.malformed(format!(
                "the storage of tensor `{}` has {size} bytes where {elements} elements of {} are declared",
                Name(tensor),
                dtype.name()
            )))
        }
    }

    /// Returns a tuple of non-negative integers; `None` for other nodes and for more than [`MAX_DIMENSIONS`] items.
    fn sizes(&self, tuple: NodeId) -> Option<Vec<u64>> {
        let PickleNode::Tuple(items) = self.pickle.node(tuple) else { return None };
        if items.len() > MAX_DIMENSIONS {
            return None;
        }
        items
            .iter()
            .map(|&id| match self.pickle.node(id) {
                PickleNode::Int(size) => u64::try_from(*size).ok(),
                _ => None,
            })
            .collect()
    }
}

/// Returns the error for a file that is not a zip file, with the format if it is recognized.
fn explain_foreign(source: &ByteSource) -> WeightsError {
    let head_len = source.len().min(STATE_LIMIT);
    let head = match source.read_vec(0, head_len, STATE_LIMIT, "its beginning") {
        Ok(head) => head,
        Err(error) => return error,
    };
    if head.starts_with(&LEGACY_MAGIC) {
        return WeightsError::LegacyTorch { path: source.path().to_owned() };
    }
    // A bare pickle is not a supported file, but if it refers to a refused global, the error names that global.
    if let Err(error @ PickleError::Global(_)) = ParsedPickle::parse(&head) {
        return at_file(error, source);
    }
    let why = if head.is_empty() {
        "it is empty; copy or download it again"
    } else {
        "expected safetensors, or the zip file that torch.save writes"
    };
    WeightsError::NotWeights { path: source.path().to_owned(), why: why.to_owned() }
}

fn at_file(error: PickleError, source: &ByteSource) -> WeightsError {
    let path = source.path().to_owned();
    match error {
        PickleError::Global(global) => WeightsError::RefusedGlobal { path, global },
        PickleError::Opcode(opcode, position) => WeightsError::RefusedOpcode { path, opcode, position },
        PickleError::Malformed(what, position) => {
            WeightsError::Malformed { path, why: format!("its pickle has {what} at byte {position}") }
        }
    }
}

fn read_entry(source: &ByteSource, zip: &Zip, name: &str, limit: u64) -> Result<Option<Vec<u8>>, WeightsError> {
    let Some((start, size)) = zip.locate(source, name)? else { return Ok(None) };
    source.read_vec(start, size, limit, &format!("`{name}`")).map(Some)
}

/// Returns the number of storage elements from the first to the last element of a view, inclusive; 0 for an empty view.
/// `None` if the number of elements, their size in bytes or the extent overflows.
fn extent(shape: &[u64], stride: &[u64]) -> Option<u64> {
    let elements = shape.iter().try_fold(1u64, |product, &size| product.checked_mul(size))?;
    elements.checked_mul(8)?;
    if elements == 0 {
        return Some(0);
    }
    let mut steps = shape.iter().zip(stride).map(|(&size, &step)| (size - 1).checked_mul(step));
    steps.try_fold(1u64, |sum, step| sum.checked_add(step?))
}

/// Returns the layout of a view that is row-major, or that is two-dimensional with a unit stride; otherwise `None`.
fn layout(shape: &[u64], stride: &[u64]) -> Option<TensorLayout> {
    // The strides of an empty tensor are never used.
    if shape.contains(&0) {
        return Some(TensorLayout::Contiguous);
    }
    // The stride of a dimension of size 1 is never used.
    let wide: Vec<(u64, u64)> =
        shape.iter().copied().zip(stride.iter().copied()).filter(|&(size, _)| size != 1).collect();
    let mut inner = 1;
    let row_major = wide.iter().rev().all(|&(size, step)| {
        let fits = step == inner;
        inner *= size;
        fits
    });
    match wide[..] {
        _ if row_major => Some(TensorLayout::Contiguous),
        [(_, stride), (columns, 1)] if stride >= columns => Some(TensorLayout::Rows { columns, stride }),
        [(rows, 1), (columns, stride)] if stride >= rows => Some(TensorLayout::Columns { columns, stride }),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn views_are_classified() {
        let check = |shape: &[u64], stride: &[u64], expected| {
            assert_eq!(layout(shape, stride), expected, "{shape:?} {stride:?}")
        };
        check(&[], &[], Some(TensorLayout::Contiguous));
        check(&[3, 4], &[4, 1], Some(TensorLayout::Contiguous));
        check(&[1, 4], &[99, 1], Some(TensorLayout::Contiguous));
        check(&[3, 4], &[10, 1], Some(TensorLayout::Rows { columns: 4, stride: 10 }));
        check(&[3, 4], &[1, 3], Some(TensorLayout::Columns { columns: 4, stride: 3 }));
        check(&[3, 1, 4], &[1, 7, 3], Some(TensorLayout::Columns { columns: 4, stride: 3 }));
        check(&[3, 4], &[0, 1], None);
        check(&[2, 3, 4], &[1, 2, 6], None);
        check(&[0, 4], &[7, 7], Some(TensorLayout::Contiguous));
    }

    #[test]
    fn extents_never_overflow() {
        assert_eq!(extent(&[3, 4], &[4, 1]), Some(12));
        assert_eq!(extent(&[], &[]), Some(1));
        assert_eq!(extent(&[0, 4], &[u64::MAX, 1]), Some(0));
        assert_eq!(extent(&[1 << 40, 1 << 40], &[1, 1]), None);
        assert_eq!(extent(&[2, 2], &[u64::MAX, u64::MAX]), None);
    }
}
