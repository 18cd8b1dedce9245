//! What a pickle of weights turns into: a table of inert nodes. Invariant: a node is data in our
//! own terms, never an object of the program that wrote it; containers hold ids, so shared and
//! cyclic objects cost nothing extra.

use super::DType;
use super::globals::Global;
use super::unpickle;

/// Index of a node in its `Pickle`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct NodeId(pub(super) u32);

/// An object of the pickle.
#[derive(Debug)]
pub(super) enum Node {
    None,
    Bool(bool),
    Int(i64),
    /// An integer beyond 64 bits, which no size or offset can be.
    BigInt,
    Float(f64),
    Str(Box<str>),
    Bytes(Box<[u8]>),
    List(Vec<NodeId>),
    Tuple(Vec<NodeId>),
    Set(Vec<NodeId>),
    Dict(Vec<(NodeId, NodeId)>),
    /// A name from the allow-list.
    Global {
        global: Global,
        module: NodeId,
        name: NodeId,
    },
    /// torch's persistent id: a storage's key in the file, its type and length.
    Storage {
        key: NodeId,
        dtype: DType,
        elements: u64,
    },
    /// A tensor: a view of a storage. `shape` and `stride` are tuples of integers.
    Tensor {
        storage: NodeId,
        offset: u64,
        shape: NodeId,
        stride: NodeId,
    },
    /// An instance of a class that was never made: its class and its state.
    Object {
        class: NodeId,
        state: Option<NodeId>,
    },
}

/// Why a pickle was not accepted.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum PickleError {
    /// A global outside the allow-list, or one that was to be called though it is only data.
    Global(String),
    /// An opcode outside the allow-list, and where.
    Opcode(u8, u64),
    /// The pickle breaks its own rules at a position.
    Malformed(&'static str, u64),
}

/// A finished pickle.
#[derive(Debug)]
pub(super) struct Pickle {
    nodes: Vec<Node>,
    root: NodeId,
}

impl Pickle {
    /// Interprets `bytes` up to STOP.
    pub(super) fn parse(bytes: &[u8]) -> Result<Pickle, PickleError> {
        let (nodes, root) = unpickle::run(bytes)?;
        Ok(Pickle { nodes, root })
    }

    pub(super) fn root(&self) -> NodeId {
        self.root
    }

    pub(super) fn node(&self, id: NodeId) -> &Node {
        &self.nodes[id.0 as usize]
    }

    pub(super) fn len(&self) -> usize {
        self.nodes.len()
    }

    /// The value of a string key in a dict; the last of equal keys, as in Python.
    pub(super) fn get(&self, dict: NodeId, key: &str) -> Option<NodeId> {
        let Node::Dict(entries) = self.node(dict) else { return None };
        let found = entries.iter().rev().find(|(k, _)| self.str(*k) == Some(key));
        found.map(|&(_, value)| value)
    }

    pub(super) fn str(&self, id: NodeId) -> Option<&str> {
        match self.node(id) {
            Node::Str(text) => Some(text),
            _ => None,
        }
    }

    /// `module.name` of a global.
    pub(super) fn global_name(&self, id: NodeId) -> Option<String> {
        match self.node(id) {
            Node::Global { module, name, .. } => Some(format!("{}.{}", self.str(*module)?, self.str(*name)?)),
            _ => None,
        }
    }
}
