//! Torch zip files (`torch.save` since 1.6): the pickle's tensors joined to the zip's storages.
//! Invariant: a tensor is handed out only when its storage is in the file with the length that
//! type and count ask for, and the tensor's last element lies inside it. Source of the layout:
//! torch/serialization.py, `_save` and `_load`.

use super::pickle::{Node, NodeId, Pickle, PickleError};
use super::source::Source;
use super::tensor::{Layout, MAX_DIMENSIONS, Tensor};
use super::zip::{self, Zip};
use super::{DType, WeightsError};
use crate::printable::Name;

/// A pickle of weights names tensors, about 150 bytes each; this much would be 28 000 of them.
pub(super) const STATE_LIMIT: u64 = 4 << 20;
/// Result files hold numbers in the pickle itself.
pub(super) const OBJECT_LIMIT: u64 = 256 << 20;
/// torch's first bytes before the zip format: PROTO 2, LONG1 of ten bytes, `MAGIC_NUMBER`.
const LEGACY_MAGIC: [u8; 14] = [0x80, 2, 0x8a, 10, 0x6c, 0xfc, 0x9c, 0x46, 0xf9, 0x20, 0x6a, 0xa8, 0x50, 0x19];
const LFS_POINTER: &[u8] = b"version https://git-lfs";

/// An opened torch zip file.
#[derive(Debug)]
pub(super) struct TorchFile {
    pub(super) source: Source,
    pub(super) pickle: Pickle,
    zip: Zip,
    /// The folder inside the zip that everything lies in.
    root: String,
}

impl TorchFile {
    /// Reads the directory and the pickle, at most `limit` bytes of it.
    pub(super) fn open(source: Source, limit: u64) -> Result<TorchFile, WeightsError> {
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
        let pickle = Pickle::parse(&pickle).map_err(|e| at_file(e, &source))?;
        if let Some(order) = read_entry(&source, &zip, &format!("{root}/byteorder"), 16)?
            && order != b"little"
        {
            let why = "it was saved on a big-endian machine; save it again on a little-endian one".to_owned();
            return Err(WeightsError::NotWeights { path: source.path().to_owned(), why });
        }
        Ok(TorchFile { source, pickle, zip, root })
    }

    /// The tensors of the state dict or module in the file, by name; `file` is their file number.
    pub(super) fn tensors(&self, file: usize) -> Result<Vec<Tensor>, WeightsError> {
        let named = super::state_dict::named_tensors(&self.pickle)
            .map_err(|why| WeightsError::NotWeights { path: self.source.path().to_owned(), why })?;
        named.into_iter().map(|(name, node)| self.tensor(name, node, file)).collect()
    }

    /// Checks a tensor node against its storage and gives it a place in the file.
    pub(super) fn tensor(&self, name: String, node: NodeId, file: usize) -> Result<Tensor, WeightsError> {
        let unsupported = |why: &str| WeightsError::Unsupported {
            path: self.source.path().to_owned(),
            tensor: name.clone(),
            why: why.to_owned(),
        };
        let Node::Tensor { storage, offset, shape, stride } = *self.pickle.node(node) else {
            return Err(unsupported("it is not a tensor"));
        };
        let Node::Storage { key, dtype, elements } = *self.pickle.node(storage) else {
            return Err(unsupported("it has no storage"));
        };
        let bad_shape = || unsupported("its shape or strides are not plain sizes");
        let shape = self.sizes(shape).ok_or_else(bad_shape)?;
        let stride = self.sizes(stride).filter(|stride| stride.len() == shape.len()).ok_or_else(bad_shape)?;
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
        Ok(Tensor { name, dtype, shape, layout, file, offset: start + offset * dtype.size() })
    }

    /// Where a storage's bytes begin, once its length is what it should be.
    fn storage_start(
        &self,
        key: NodeId,
        dtype: DType,
        elements: u64,
        tensor: &str,
    ) -> Result<u64, WeightsError> {
        let key = self.pickle.str(key).unwrap_or_default();
        let missing = || {
            self.source.malformed(format!(
                "the storage `{}` of tensor `{}` is missing",
                Name(key),
                Name(tensor)
            ))
        };
        if key.is_empty() || key.len() > 64 {
            return Err(missing());
        }
        let entry = format!("{}/data/{key}", self.root);
        let (start, size) = self.zip.locate(&self.source, &entry)?.ok_or_else(missing)?;
        match elements.checked_mul(dtype.size()) == Some(size) {
            true => Ok(start),
            false => Err(self.source.malformed(format!(
                "the storage of tensor `{}` has {size} bytes where {elements} elements of {} are declared",
                Name(tensor),
                dtype.name()
            ))),
        }
    }

    /// A tuple of sizes.
    fn sizes(&self, tuple: NodeId) -> Option<Vec<u64>> {
        let Node::Tuple(items) = self.pickle.node(tuple) else { return None };
        if items.len() > MAX_DIMENSIONS {
            return None;
        }
        let size = |&id: &NodeId| match self.pickle.node(id) {
            Node::Int(size) => u64::try_from(*size).ok(),
            _ => None,
        };
        items.iter().map(size).collect()
    }
}

/// Names a file that is no zip, without trusting anything in it.
fn explain_foreign(source: &Source) -> WeightsError {
    let head_len = source.len().min(STATE_LIMIT);
    let head = match source.read_vec(0, head_len, STATE_LIMIT, "its beginning") {
        Ok(head) => head,
        Err(error) => return error,
    };
    if head.starts_with(&LEGACY_MAGIC) {
        return WeightsError::LegacyTorch { path: source.path().to_owned() };
    }
    // A bare pickle holds no weights, but what it wanted to run deserves its name.
    if let Err(error @ PickleError::Global(_)) = Pickle::parse(&head) {
        return at_file(error, source);
    }
    let why = if head.is_empty() {
        "it is empty; copy or download it again"
    } else if head.starts_with(LFS_POINTER) {
        "it is a git-lfs pointer; fetch the file itself with `git lfs pull`"
    } else {
        "expected safetensors, or the zip file that torch.save writes"
    };
    WeightsError::NotWeights { path: source.path().to_owned(), why: why.to_owned() }
}

fn at_file(error: PickleError, source: &Source) -> WeightsError {
    let path = source.path().to_owned();
    match error {
        PickleError::Global(global) => WeightsError::RefusedGlobal { path, global },
        PickleError::Opcode(opcode, position) => WeightsError::RefusedOpcode { path, opcode, position },
        PickleError::Malformed(what, position) => {
            WeightsError::Malformed { path, why: format!("its pickle has {what} at byte {position}") }
        }
    }
}

fn read_entry(source: &Source, zip: &Zip, name: &str, limit: u64) -> Result<Option<Vec<u8>>, WeightsError> {
    let Some((start, size)) = zip.locate(source, name)? else { return Ok(None) };
    source.read_vec(start, size, limit, &format!("`{name}`")).map(Some)
}

/// Elements from a view's first to its last, both counted; 0 for an empty view. `None` when the
/// view's element count or bytes overflow.
fn extent(shape: &[u64], stride: &[u64]) -> Option<u64> {
    let elements = shape.iter().try_fold(1u64, |product, &size| product.checked_mul(size))?;
    elements.checked_mul(8)?;
    if elements == 0 {
        return Some(0);
    }
    let mut steps = shape.iter().zip(stride).map(|(&size, &step)| (size - 1).checked_mul(step));
    steps.try_fold(1u64, |sum, step| sum.checked_add(step?))
}

/// The layout, when it is row-major or a 2-D view with one unit stride.
fn layout(shape: &[u64], stride: &[u64]) -> Option<Layout> {
    // Without elements there are no steps, and sizes may be any.
    if shape.contains(&0) {
        return Some(Layout::Contiguous);
    }
    // Dimensions of one element have no step.
    let wide: Vec<(u64, u64)> =
        shape.iter().copied().zip(stride.iter().copied()).filter(|&(size, _)| size != 1).collect();
    let mut inner = 1;
    let row_major = wide.iter().rev().all(|&(size, step)| {
        let fits = step == inner;
        inner *= size;
        fits
    });
    match wide[..] {
        _ if row_major => Some(Layout::Contiguous),
        [(_, stride), (columns, 1)] if stride >= columns => Some(Layout::Rows { columns, stride }),
        [(rows, 1), (columns, stride)] if stride >= rows => Some(Layout::Columns { columns, stride }),
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
        check(&[], &[], Some(Layout::Contiguous));
        check(&[3, 4], &[4, 1], Some(Layout::Contiguous));
        check(&[1, 4], &[99, 1], Some(Layout::Contiguous));
        check(&[3, 4], &[10, 1], Some(Layout::Rows { columns: 4, stride: 10 }));
        check(&[3, 4], &[1, 3], Some(Layout::Columns { columns: 4, stride: 3 }));
        check(&[3, 1, 4], &[1, 7, 3], Some(Layout::Columns { columns: 4, stride: 3 }));
        check(&[3, 4], &[0, 1], None);
        check(&[2, 3, 4], &[1, 2, 6], None);
        check(&[0, 4], &[7, 7], Some(Layout::Contiguous));
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
