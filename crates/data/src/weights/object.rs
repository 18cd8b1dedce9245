//! Reader of arbitrary objects written by `torch.save` (lists, dicts, numbers, tensors), for result files that do not
//! hold weights. Invariant: nothing is executed. A [`PickleValue`] is an index into a table of nodes, so shared objects take
//! no additional memory; objects may be cyclic, so a caller that traverses them must bound the depth.

use std::path::Path;

use super::pickle::{NodeId, PickleNode};
use super::source::ByteSource;
use super::torch::{OBJECT_LIMIT, TorchFile};
use super::{StoredTensor, WeightsError, dtype};

/// The object stored in a torch zip file.
#[derive(Debug)]
pub struct PtObject {
    file: TorchFile,
}

/// A reference to one value inside a `PtObject`.
#[derive(Debug, Clone, Copy)]
pub struct PickleValue<'a> {
    object: &'a PtObject,
    id: NodeId,
}

/// The type of a `PickleValue`, with the value itself for scalars, text and bytes.
#[derive(Debug, Clone, PartialEq)]
pub enum ObjectKind<'a> {
    /// `None`.
    None,
    /// A boolean.
    Bool(bool),
    /// An integer of at most 64 bits.
    Int(i64),
    /// An integer stored in more than 64 bits, without its value.
    BigInt,
    /// A float (binary64).
    Float(f64),
    /// A string.
    Str(&'a str),
    /// A `bytes` object, or a Python 2 `str` that is not UTF-8.
    Bytes(&'a [u8]),
    /// A list, with its number of items.
    List(usize),
    /// A tuple, with its number of items.
    Tuple(usize),
    /// A set, with its number of items.
    Set(usize),
    /// A dict, with its number of entries.
    Dict(usize),
    /// A tensor; `PtObject::read_f32` reads it.
    Tensor,
    /// A storage: the memory that tensors are views of.
    Storage,
    /// An instance of a class, with the class's `module.name`. The class was neither imported nor called.
    Object(String),
    /// A class, function or constant, with its `module.name`.
    Global(String),
}

/// Opens a torch zip file as a generic object. Returns the errors that `Weights::open` returns for torch files; the
/// pickle may have up to `OBJECT_LIMIT` bytes.
pub fn read_pt_object(path: &Path) -> Result<PtObject, WeightsError> {
    let file = TorchFile::open(ByteSource::open(path)?, OBJECT_LIMIT)?;
    Ok(PtObject { file })
}

impl PtObject {
    /// The outermost object.
    pub fn root(&self) -> PickleValue<'_> {
        PickleValue { object: self, id: self.file.pickle.root() }
    }

    /// Returns name, type, shape and location of the tensor `value`; an error if `value` is not a tensor.
    pub fn tensor(&self, value: PickleValue<'_>) -> Result<StoredTensor, WeightsError> {
        self.file.tensor("value".to_owned(), value.id, 0)
    }

    /// Reads all elements of a floating-point tensor in C order, converted to f32. An error for other types.
    pub fn read_f32(&self, value: PickleValue<'_>) -> Result<Vec<f32>, WeightsError> {
        let tensor = self.tensor(value)?;
        if !tensor.dtype().is_float() {
            let path = self.file.source.path().to_owned();
            return Err(WeightsError::ElementType {
                path,
                tensor: tensor.name,
                wanted: "f32",
                found: tensor.dtype,
            });
        }
        // `tensor` has checked the elements against the storage's length in the file, so a damaged shape cannot
        // cause a huge allocation here.
        let mut out = vec![0.0; tensor.elements() as usize];
        tensor.read(&self.file.source, 0..tensor.elements(), &mut out, dtype::to_f32)?;
        Ok(out)
    }
}

impl<'a> PickleValue<'a> {
    /// The type of the value.
    pub fn kind(self) -> ObjectKind<'a> {
        match self.node() {
            PickleNode::None => ObjectKind::None,
            PickleNode::Bool(value) => ObjectKind::Bool(*value),
            PickleNode::Int(value) => ObjectKind::Int(*value),
            PickleNode::BigInt => ObjectKind::BigInt,
            PickleNode::Float(value) => ObjectKind::Float(*value),
            PickleNode::Str(text) => ObjectKind::Str(text),
            PickleNode::Bytes(bytes) => ObjectKind::Bytes(bytes),
            PickleNode::List(items) => ObjectKind::List(items.len()),
            PickleNode::Tuple(items) => ObjectKind::Tuple(items.len()),
            PickleNode::Set(items) => ObjectKind::Set(items.len()),
            PickleNode::Dict(entries) => ObjectKind::Dict(entries.len()),
            PickleNode::Tensor { .. } => ObjectKind::Tensor,
            PickleNode::Storage { .. } => ObjectKind::Storage,
            PickleNode::Object { class, .. } => {
                ObjectKind::Object(self.object.file.pickle.global_name(*class).unwrap_or_default())
            }
            PickleNode::Global { .. } => {
                ObjectKind::Global(self.object.file.pickle.global_name(self.id).unwrap_or_default())
            }
        }
    }

    /// Returns the value of the string key `key`; `None` if this is not a dict or has no such key.
    pub fn get(self, key: &str) -> Option<PickleValue<'a>> {
        self.object.file.pickle.get(self.id, key).map(|id| self.at(id))
    }

    /// Returns an attribute of an instance, looked up in the instance's pickled state; `None` if this is not an
    /// instance or has no such attribute.
    pub fn attribute(self, name: &str) -> Option<PickleValue<'a>> {
        match self.node() {
            PickleNode::Object { state: Some(state), .. } => self.at(*state).get(name),
            _ => None,
        }
    }

    /// Iterates over the items of a list, tuple or set; empty for all other types.
    pub fn items(self) -> impl ExactSizeIterator<Item = PickleValue<'a>> {
        let items = match self.node() {
            PickleNode::List(items) | PickleNode::Tuple(items) | PickleNode::Set(items) => &items[..],
            _ => &[],
        };
        items.iter().map(move |&id| self.at(id))
    }

    /// Iterates over the keys and values of a dict in the order of the file; empty for all other types.
    pub fn entries(self) -> impl ExactSizeIterator<Item = (PickleValue<'a>, PickleValue<'a>)> {
        let entries = match self.node() {
            PickleNode::Dict(entries) => &entries[..],
            _ => &[],
        };
        entries.iter().map(move |&(key, value)| (self.at(key), self.at(value)))
    }

    /// Returns the text of a string; `None` for other types.
    pub fn as_str(self) -> Option<&'a str> {
        self.object.file.pickle.str(self.id)
    }

    /// Returns an integer of at most 64 bits; `None` for other types.
    pub fn as_i64(self) -> Option<i64> {
        match self.node() {
            PickleNode::Int(value) => Some(*value),
            _ => None,
        }
    }

    /// Returns a float; `None` for other types, including integers.
    pub fn as_f64(self) -> Option<f64> {
        match self.node() {
            PickleNode::Float(value) => Some(*value),
            _ => None,
        }
    }

    fn node(self) -> &'a PickleNode {
        self.object.file.pickle.node(self.id)
    }

    fn at(self, id: NodeId) -> PickleValue<'a> {
        PickleValue { object: self.object, id }
    }
}
