//! Finds the tensors of a state dict or a module in a pickle and gives them dotted names (`layer.0.weight`).
//! Invariant: the number of visited objects is linear in the pickle's number of nodes, however objects are shared or
//! nested; otherwise a small pickle of nested shared modules could describe exponentially many tensors.

use std::collections::BTreeMap;

use super::pickle::{NodeId, ParsedPickle, PickleNode};
use crate::printable::Name;

/// Keys under which training code wraps a state dict (`model` in fair-esm's files).
const WRAPPERS: [&str; 3] = ["model", "state_dict", "model_state_dict"];
/// Maximum nesting depth of modules; bounds the recursion of [`Walk::module`].
const MAX_DEPTH: usize = 32;
/// Maximum length of a tensor's dotted name, in bytes.
const MAX_NAME: usize = 512;

/// Returns the tensors of a state dict, of a dict that contains a state dict under one of [`WRAPPERS`], or of a
/// pickled module, by dotted name. The error text says what the file holds instead.
pub(super) fn named_tensors(pickle: &ParsedPickle) -> Result<BTreeMap<String, NodeId>, String> {
    let mut found = Walk { pickle, visits: 4 * pickle.len() + 1024, tensors: BTreeMap::new() };
    found.state(pickle.root(), 0)?;
    Ok(found.tensors)
}

struct Walk<'a> {
    pickle: &'a ParsedPickle,
    /// Remaining visits. A shared module or tied tensor is visited once for each of its names, so the budget is a
    /// multiple of the number of nodes; it ends cyclic and exponentially shared structures with an error.
    visits: usize,
    tensors: BTreeMap<String, NodeId>,
}

impl Walk<'_> {
    fn state(&mut self, root: NodeId, depth: usize) -> Result<(), String> {
        match self.pickle.node(root) {
            PickleNode::Object { .. } => self.module(root, "", 0),
            PickleNode::Dict(entries) if entries.iter().any(|&(_, value)| self.is_tensor(value)) => {
                self.table(root, "")
            }
            PickleNode::Dict(entries) if depth < WRAPPERS.len() => {
                let wrapped: Vec<NodeId> =
                    WRAPPERS.iter().filter_map(|key| self.pickle.get(root, key)).collect();
                match wrapped[..] {
                    [one] => self.state(one, depth + 1),
                    [] => {
                        Err(format!("it contains a dict without tensors, with the keys {}", self.keys(entries)))
                    }
                    _ => Err(format!(
                        "it is not clear which of {} is the model; save that one alone",
                        self.keys(entries)
                    )),
                }
            }
            _ => Err("it contains neither a state dict nor a module; save model.state_dict()".to_owned()),
        }
    }

    /// Collects the parameters and buffers of a module, then those of its submodules. Source:
    /// torch/nn/modules/module.py, `named_parameters` and `state_dict`.
    fn module(&mut self, module: NodeId, prefix: &str, depth: usize) -> Result<(), String> {
        if depth > MAX_DEPTH {
            return Err(format!("its modules are nested deeper than {MAX_DEPTH}"));
        }
        let PickleNode::Object { class, state } = *self.pickle.node(module) else {
            return Err(format!("its module `{}` is none", Name(prefix)));
        };
        let state = state.filter(|&state| self.pickle.get(state, "_parameters").is_some());
        let Some(state) = state else {
            let class = self.pickle.global_name(class).unwrap_or_default();
            return Err(format!(
                "it contains a `{}` without parameters; save model.state_dict()",
                Name(&class)
            ));
        };
        // `ParsedPickle::get` is a linear search over the state, so the look-ups below are charged to the budget.
        if let PickleNode::Dict(entries) = self.pickle.node(state) {
            self.visit(entries.len())?;
        }
        for group in ["_parameters", "_buffers"] {
            if let Some(table) = self.pickle.get(state, group) {
                self.table(table, prefix)?;
            }
        }
        let children = self.pickle.get(state, "_modules").map(|id| self.pickle.node(id));
        let Some(PickleNode::Dict(children)) = children else { return Ok(()) };
        for &(key, child) in children {
            self.visit(1)?;
            if matches!(self.pickle.node(child), PickleNode::None) {
                continue;
            }
            let name = self.dotted(prefix, key)?;
            self.module(child, &name, depth + 1)?;
        }
        Ok(())
    }

    /// Collects the values of the dict `table` that are tensors, named `prefix.key`.
    fn table(&mut self, table: NodeId, prefix: &str) -> Result<(), String> {
        let PickleNode::Dict(entries) = self.pickle.node(table) else { return Ok(()) };
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
        matches!(self.pickle.node(id), PickleNode::Tensor { .. })
    }

    fn dotted(&self, prefix: &str, key: NodeId) -> Result<String, String> {
        let key = self.pickle.str(key).ok_or("a tensor's name is not a string")?;
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

    /// The first eight string keys of a dict, quoted for an error message.
    fn keys(&self, entries: &[(NodeId, NodeId)]) -> String {
        let keys = entries.iter().filter_map(|&(key, _)| self.pickle.str(key)).take(8);
        let quoted: Vec<String> = keys.map(|key| format!("`{}`", Name(key))).collect();
        quoted.join(", ")
    }
}
