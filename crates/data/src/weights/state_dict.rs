//! From a pickle's objects to tensors with dotted names. Invariant: it visits a bounded number of
//! objects however they are shared or nested, so a small pickle cannot stand for a huge dict.

use std::collections::BTreeMap;

use super::pickle::{Node, NodeId, Pickle};
use crate::printable::Name;

/// Keys under which training code wraps a state dict (`model` in fair-esm's files).
const WRAPPERS: [&str; 3] = ["model", "state_dict", "model_state_dict"];
/// Modules nested deeper than this are no model.
const MAX_DEPTH: usize = 32;
/// Longer than any parameter's name.
const MAX_NAME: usize = 512;

/// The tensors of a state dict, of a dict that wraps one, or of a whole pickled module; an error
/// says what the file holds instead.
pub(super) fn named_tensors(pickle: &Pickle) -> Result<BTreeMap<String, NodeId>, String> {
    let mut found = Walk { pickle, visits: 4 * pickle.len() + 1024, tensors: BTreeMap::new() };
    found.state(pickle.root(), 0)?;
    Ok(found.tensors)
}

struct Walk<'a> {
    pickle: &'a Pickle,
    /// Visits left: shared modules and tied tensors are visited again, endless sharing is not.
    visits: usize,
    tensors: BTreeMap<String, NodeId>,
}

impl Walk<'_> {
    fn state(&mut self, root: NodeId, depth: usize) -> Result<(), String> {
        match self.pickle.node(root) {
            Node::Object { .. } => self.module(root, "", 0),
            Node::Dict(entries) if entries.iter().any(|&(_, value)| self.is_tensor(value)) => {
                self.table(root, "")
            }
            Node::Dict(entries) if depth < WRAPPERS.len() => {
                let wrapped: Vec<NodeId> =
                    WRAPPERS.iter().filter_map(|key| self.pickle.get(root, key)).collect();
                match wrapped[..] {
                    [one] => self.state(one, depth + 1),
                    [] => Err(format!("it holds a dict without tensors, with the keys {}", self.keys(entries))),
                    _ => Err(format!(
                        "it is not clear which of {} is the model; save that one alone",
                        self.keys(entries)
                    )),
                }
            }
            _ => Err("it holds neither a state dict nor a module; save model.state_dict()".to_owned()),
        }
    }

    /// A module's own tensors, then its children's. Source: torch/nn/modules/module.py,
    /// `named_parameters` and `state_dict`.
    fn module(&mut self, module: NodeId, prefix: &str, depth: usize) -> Result<(), String> {
        if depth > MAX_DEPTH {
            return Err(format!("its modules are nested deeper than {MAX_DEPTH}"));
        }
        let Node::Object { class, state } = *self.pickle.node(module) else {
            return Err(format!("its module `{}` is none", Name(prefix)));
        };
        let state = state.filter(|&state| self.pickle.get(state, "_parameters").is_some());
        let Some(state) = state else {
            let class = self.pickle.global_name(class).unwrap_or_default();
            return Err(format!("it holds a `{}` without parameters; save model.state_dict()", Name(&class)));
        };
        // Each look-up below passes over the whole state.
        if let Node::Dict(entries) = self.pickle.node(state) {
            self.visit(entries.len())?;
        }
        for group in ["_parameters", "_buffers"] {
            if let Some(table) = self.pickle.get(state, group) {
                self.table(table, prefix)?;
            }
        }
        let children = self.pickle.get(state, "_modules").map(|id| self.pickle.node(id));
        let Some(Node::Dict(children)) = children else { return Ok(()) };
        for &(key, child) in children {
            self.visit(1)?;
            if matches!(self.pickle.node(child), Node::None) {
                continue;
            }
            let name = self.dotted(prefix, key)?;
            self.module(child, &name, depth + 1)?;
        }
        Ok(())
    }

    /// The tensors among a dict's values.
    fn table(&mut self, table: NodeId, prefix: &str) -> Result<(), String> {
        let Node::Dict(entries) = self.pickle.node(table) else { return Ok(()) };
        for &(key, value) in entries {
            self.visit(1)?;
            if self.is_tensor(value) {
                let name = self.dotted(prefix, key)?;
                self.tensors.insert(name, value);
            }
        }
        Ok(())
    }

    fn is_tensor(&self, id: NodeId) -> bool {
        matches!(self.pickle.node(id), Node::Tensor { .. })
    }

    fn dotted(&self, prefix: &str, key: NodeId) -> Result<String, String> {
        let key = self.pickle.str(key).ok_or("a tensor's name is no string")?;
        if prefix.len() + key.len() > MAX_NAME {
            return Err(format!("a tensor's name is longer than {MAX_NAME} bytes"));
        }
        Ok(if prefix.is_empty() { key.to_owned() } else { format!("{prefix}.{key}") })
    }

    fn visit(&mut self, count: usize) -> Result<(), String> {
        let left = self.visits.checked_sub(count);
        self.visits = left.ok_or("its modules share each other without end")?;
        Ok(())
    }

    /// The first few string keys, for a message.
    fn keys(&self, entries: &[(NodeId, NodeId)]) -> String {
        let keys = entries.iter().filter_map(|&(key, _)| self.pickle.str(key)).take(8);
        let quoted: Vec<String> = keys.map(|key| format!("`{}`", Name(key))).collect();
        quoted.join(", ")
    }
}
