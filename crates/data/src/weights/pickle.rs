//! A parsed pickle of weights, as a table of inert nodes. Invariant: a node is plain data and never an instance of a
//! Python class; containers hold node ids, so that shared and cyclic objects need no copies.

use super::FileDType;
use super::globals::Global;
use super::unpickle;

/// Index of a node in its `ParsedPickle`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct NodeId(pub(super) u32);

/// An object of the pickle.
#[derive(Debug)]
pub(super) enum PickleNode {
    None,
    Bool(bool),
    Int(i64),
    /// An integer of more than 64 bits, which is not valid as a size or offset.
    BigInt,
    Float(f64),
    Str(Box<str>),
    Bytes(Box<[u8]>),
    List(Vec<NodeId>),
    Tuple(Vec<NodeId>),
    Set(Vec<NodeId>),
    Dict(Vec<(NodeId, NodeId)>),
    /// A global of the allow-list.
    Global {
        global: Global,
        module: NodeId,
        name: NodeId,
    },
    /// PyTorch's persistent id of a storage: its key in the file, element type and number of elements.
    Storage {
        key: NodeId,
        dtype: FileDType,
        elements: u64,
    },
    /// A tensor, which is a view of a storage. `offset` is in elements; `shape` and `stride` are tuples.
    Tensor {
        storage: NodeId,
        offset: u64,
        shape: NodeId,
        stride: NodeId,
    },
    /// An instance of a class, represented by class and state; the instance is never created.
    Object {
        class: NodeId,
        state: Option<NodeId>,
    },
}

/// Reason why a pickle is refused.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum PickleError {
    /// A global outside the allow-list, or a call of an allowed global that is not allowed to be called.
    Global(String),
    /// An opcode outside the allow-list, and its byte position.
    Opcode(u8, u64),
    /// The pickle is malformed: what is wrong, and the byte position.
    Malformed(&'static str, u64),
}

/// A parsed pickle.
#[derive(Debug)]
pub(super) struct ParsedPickle {
    nodes: Vec<PickleNode>,
    root: NodeId,
}

impl ParsedPickle {
    /// Interprets `bytes` up to STOP.
    pub(super) fn parse(bytes: &[u8]) -> Result<ParsedPickle, PickleError> {
        let (nodes, root) = unpickle::run(bytes)?;
        Ok(ParsedPickle { nodes, root })
    }

    pub(super) fn root(&self) -> NodeId {
        self.root
    }

    pub(super) fn node(&self, id: NodeId) -> &PickleNode {
        &self.nodes[id.0 as usize]
    }

    pub(super) fn len(&self) -> usize {
        self.nodes.len()
    }

    /// Returns the value of a string key in a dict; the last value if the key occurs several times, as in Python.
    pub(super) fn get(&self, dict: NodeId, key: &str) -> Option<NodeId> {
        let PickleNode::Dict(entries) = self.node(dict) else { return None };
        let found = entries.iter().rev().find(|(k, _)| self.str(*k) == Some(key));
        found.map(|&(_, value)| value)
    }

    pub(super) fn str(&self, id: NodeId) -> Option<&str> {
        match self.node(id) {
            PickleNode::Str(text) => Some(text),
            _ => None,
        }
    }

    /// Returns `module.name` of a global.
    pub(super) fn global_name(&self, id: NodeId) -> Option<String> {
        match self.node(id) {
            PickleNode::Global { module, name, .. } => {
                Some(format!("{}.{}", self.str(*module)?, self.str(*name)?))
            }
            _ => None,
        }
    }
}
