//! Any object that `torch.save` wrote (lists, dicts, numbers, tensors), for result files that are
//! no weights. Invariant: nothing is executed; a value is a cursor into a table, so shared and
//! cyclic objects cost nothing and traversals are the caller's to bound.

use std::path::Path;

use super::pickle::{Node, NodeId};
use super::source::Source;
use super::torch::{OBJECT_LIMIT, TorchFile};
use super::{Tensor, WeightsError, dtype};

/// A torch file's object.
#[derive(Debug)]
pub struct PtObject {
    file: TorchFile,
}

/// A place in a `PtObject`.
#[derive(Debug, Clone, Copy)]
pub struct Value<'a> {
    object: &'a PtObject,
    id: NodeId,
}

/// What a `Value` is.
#[derive(Debug, Clone, PartialEq)]
pub enum Kind<'a> {
    /// `None`.
    None,
    /// A truth value.
    Bool(bool),
    /// An integer of at most 64 bits.
    Int(i64),
    /// A wider integer; its value is not kept.
    BigInt,
    /// A float.
    Float(f64),
    /// Text.
    Str(&'a str),
    /// Bytes.
    Bytes(&'a [u8]),
    /// A list of this many items.
    List(usize),
    /// A tuple of this many items.
    Tuple(usize),
    /// A set of this many items.
    Set(usize),
    /// A dict of this many entries.
    Dict(usize),
    /// A tensor; `PtObject::read_f32` reads it.
    Tensor,
    /// A storage, which only tensors refer to.
    Storage,
    /// An instance of this class, never made.
    Object(String),
    /// A class, function or constant by name.
    Global(String),
}

/// Opens a torch zip file as a generic object. Errors as `Weights::open` does on such a file.
pub fn read_pt_object(path: &Path) -> Result<PtObject, WeightsError> {
    let file = TorchFile::open(Source::open(path)?, OBJECT_LIMIT)?;
    Ok(PtObject { file })
}

impl PtObject {
    /// The outermost object.
    pub fn root(&self) -> Value<'_> {
        Value { object: self, id: self.file.pickle.root() }
    }

    /// A tensor's description; an error for any other value.
    pub fn tensor(&self, value: Value<'_>) -> Result<Tensor, WeightsError> {
        self.file.tensor("value".to_owned(), value.id, 0)
    }

    /// All elements of a tensor of floats in C order. Its bytes were checked to be in the file.
    pub fn read_f32(&self, value: Value<'_>) -> Result<Vec<f32>, WeightsError> {
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
        let mut out = vec![0.0; tensor.elements() as usize];
        tensor.read(&self.file.source, 0..tensor.elements(), &mut out, dtype::to_f32)?;
        Ok(out)
    }
}

impl<'a> Value<'a> {
    /// What the value is.
    pub fn kind(self) -> Kind<'a> {
        let name = |id| self.object.file.pickle.global_name(id).unwrap_or_default();
        match self.node() {
            Node::None => Kind::None,
            Node::Bool(value) => Kind::Bool(*value),
            Node::Int(value) => Kind::Int(*value),
            Node::BigInt => Kind::BigInt,
            Node::Float(value) => Kind::Float(*value),
            Node::Str(text) => Kind::Str(text),
            Node::Bytes(bytes) => Kind::Bytes(bytes),
            Node::List(items) => Kind::List(items.len()),
            Node::Tuple(items) => Kind::Tuple(items.len()),
            Node::Set(items) => Kind::Set(items.len()),
            Node::Dict(entries) => Kind::Dict(entries.len()),
            Node::Tensor { .. } => Kind::Tensor,
            Node::Storage { .. } => Kind::Storage,
            Node::Object { class, .. } => Kind::Object(name(*class)),
            Node::Global { .. } => Kind::Global(name(self.id)),
        }
    }

    /// A dict's value under a string key.
    pub fn get(self, key: &str) -> Option<Value<'a>> {
        self.object.file.pickle.get(self.id, key).map(|id| self.at(id))
    }

    /// An attribute of an instance, from the state that the pickle holds for it.
    pub fn attribute(self, name: &str) -> Option<Value<'a>> {
        match self.node() {
            Node::Object { state: Some(state), .. } => self.at(*state).get(name),
            _ => None,
        }
    }

    /// The items of a list, tuple or set; none of anything else.
    pub fn items(self) -> impl ExactSizeIterator<Item = Value<'a>> {
        let items = match self.node() {
            Node::List(items) | Node::Tuple(items) | Node::Set(items) => &items[..],
            _ => &[],
        };
        items.iter().map(move |&id| self.at(id))
    }

    /// The keys and values of a dict in file order; none of anything else.
    pub fn entries(self) -> impl ExactSizeIterator<Item = (Value<'a>, Value<'a>)> {
        let entries = match self.node() {
            Node::Dict(entries) => &entries[..],
            _ => &[],
        };
        entries.iter().map(move |&(key, value)| (self.at(key), self.at(value)))
    }

    /// Text, if it is text.
    pub fn as_str(self) -> Option<&'a str> {
        self.object.file.pickle.str(self.id)
    }

    /// An integer, if it is one of at most 64 bits.
    pub fn as_i64(self) -> Option<i64> {
        match self.node() {
            Node::Int(value) => Some(*value),
            _ => None,
        }
    }

    /// A float, if it is one.
    pub fn as_f64(self) -> Option<f64> {
        match self.node() {
            Node::Float(value) => Some(*value),
            _ => None,
        }
    }

    fn node(self) -> &'a Node {
        self.object.file.pickle.node(self.id)
    }

    fn at(self, id: NodeId) -> Value<'a> {
        Value { object: self.object, id }
    }
}
