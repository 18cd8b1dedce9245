//! Verifier: checks the rules that every pass may rely on and must preserve. Invariant: it trusts no recorded
//! type; all types are inferred again and compared.

use crate::limits::{MAX_GRAPH, check_logits};
use crate::{
    Bytes, DType, Def, Dim, Graph, Layout, Node, NodeId, Op, Role, Space, TensorSpec, TooLarge, Value, ValueId,
    node_label,
};
use std::collections::BTreeSet;
use std::fmt;

/// Error for a graph that violates a rule of the IR, which indicates a bug in this program, or that exceeds the limits of
/// [`crate::limits`], because it was built for sizes that are too large.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct VerifyError {
    /// The offending node, if the rule concerns one node.
    pub node: Option<NodeId>,
    /// Label of the node, or `graph`.
    pub label: String,
    /// The violated rule.
    pub rule: String,
    /// Whether a size exceeds the limits.
    pub is_too_large: bool,
}

impl VerifyError {
    pub(crate) fn rule(node: NodeId, label: &str, rule: impl Into<String>) -> Self {
        Self { node: Some(node), label: label.to_owned(), rule: rule.into(), is_too_large: false }
    }

    fn graph(rule: impl Into<String>) -> Self {
        Self { node: None, label: "graph".to_owned(), rule: rule.into(), is_too_large: false }
    }
}

impl From<TooLarge> for VerifyError {
    fn from(error: TooLarge) -> Self {
        Self { is_too_large: true, ..Self::graph(error.to_string()) }
    }
}

impl fmt::Display for VerifyError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.node {
            Some(node) => write!(f, "node {node} ({}): {}", self.label, self.rule),
            None => write!(f, "{}", self.rule),
        }
    }
}

impl std::error::Error for VerifyError {}

impl Graph {
    /// Checks every rule of the IR.
    pub fn verify(&self) -> Result<(), VerifyError> {
        self.verify_values()?;
        self.verify_sizes()?;
        let mut defined: Vec<bool> = self.values.iter().map(|v| v.def == Def::Source).collect();
        for (id, _) in self.nodes() {
            self.verify_node(id, &mut defined)?;
        }
        self.verify_joins()?;
        self.verify_interface(&defined)
    }

    /// Checks that every operand of a join can lie in the result: it has no address for another reason, and one join.
    fn verify_joins(&self) -> Result<(), VerifyError> {
        let mut joined = vec![false; self.values.len()];
        for (id, node) in self.nodes().filter(|(_, node)| matches!(node.op, Op::Join(_))) {
            for &v in &node.inputs {
                // The bytes of the operand are bytes of the result. A source has a fixed address, a part lies in another value, and
                // two joins would need the operand at two addresses.
                let why = match self.value(v).def {
                    Def::Source => "exists before the step",
                    Def::Node(of, _) if matches!(self.node(of).op, Op::Part(_)) => "is a part of another value",
                    Def::Node(..) if joined[v.index()] => "is joined twice",
                    Def::Node(..) => {
                        joined[v.index()] = true;
                        continue;
                    }
                };
                return Err(VerifyError::rule(id, &node_label(self, id), format!("joins {v}, which {why}")));
            }
        }
        Ok(())
    }

    /// The value that `v` is a part of, over any number of parts; `v` itself if it is none.
    fn whole(&self, mut v: ValueId) -> ValueId {
        while let Def::Node(id, _) = self.value(v).def
            && let (Op::Part(_), &[operand]) = (&self.node(id).op, &self.node(id).inputs[..])
        {
            v = operand;
        }
        v
    }

    fn verify_values(&self) -> Result<(), VerifyError> {
        for (id, value) in self.values() {
            if let Some(bad) = malformed(&value.spec) {
                return Err(VerifyError::graph(format!("{id} {}: {bad}", value.spec)));
            }
            let source = value.def == Def::Source;
            // A parameter or state may have copies in other spaces, and parts; `verify_node` compares them with their
            // operand.
            let fits = match value.spec.role {
                Role::Param(p) => (source || self.is_copy(value)) && p.index() < self.params.len(),
                Role::State(s) => (source || self.is_copy(value)) && s.index() < self.states.len(),
                Role::Input => source && value.spec.space == Space::Device,
                Role::Activation | Role::Grad => !source,
            };
            if !fits {
                return Err(VerifyError::graph(format!(
                    "{id} has role {:?} but {:?}",
                    value.spec.role, value.def
                )));
            }
        }
        Ok(())
    }

    /// Whether the value is the result of a move or a view.
    fn is_copy(&self, value: &Value) -> bool {
        match value.def {
            Def::Node(id, _) => self.nodes.get(id.index()).is_some_and(is_copy),
            Def::Source => false,
        }
    }

    /// Checks that every size is within the limits, and with them every sum and product of sizes that a plan computes.
    fn verify_sizes(&self) -> Result<(), VerifyError> {
        self.bounds.check()?;
        let mut sum = Bytes::ZERO;
        for (id, value) in self.values() {
            sum = self.add_limited(sum, id, value)?;
        }
        for node in &self.nodes {
            // Ids are not checked yet, so an input may not exist.
            let existing = node.inputs.iter().filter_map(|v| self.values.get(v.index()));
            let ins: Vec<&TensorSpec> = existing.map(|value| &value.spec).collect();
            check_logits(&node.op, &ins, self.bounds.full())?;
        }
        Ok(())
    }

    /// Adds the bytes of `value`, which is or becomes value `id`, to the sum of all values before it.
    pub(crate) fn add_limited(&self, sum: Bytes, id: ValueId, value: &Value) -> Result<Bytes, TooLarge> {
        let bytes = value.spec.limited_bytes(&|| self.name_of(id, value), &self.bounds)?;
        let sum = sum.checked_add(bytes).filter(|sum| *sum <= MAX_GRAPH);
        sum.ok_or_else(|| TooLarge::bytes("the size of all tensors of the graph together", MAX_GRAPH))
    }

    /// Name of a value in messages: of its parameter, state or input, or else of its op.
    fn name_of(&self, id: ValueId, value: &Value) -> String {
        let name = match value.spec.role {
            Role::Param(p) => self.params.get(p.index()).map(|param| param.name.clone()),
            Role::State(s) => self.states.get(s.index()).map(|state| state.role.to_string()),
            Role::Input => self.inputs.iter().find(|(_, v)| *v == id).map(|(name, _)| name.clone()),
            Role::Activation | Role::Grad => None,
        };
        if let Some(name) = name {
            return name;
        }
        match value.def {
            Def::Node(node, _) if node.index() < self.nodes.len() => node_label(self, node),
            Def::Node(..) | Def::Source => id.to_string(),
        }
    }

    fn verify_node(&self, id: NodeId, defined: &mut [bool]) -> Result<(), VerifyError> {
        let node = self.node(id);
        for &v in &node.inputs {
            match defined.get(v.index()) {
                Some(true) => {}
                Some(false) => return Err(self.broken(id, format!("reads {v} before it is defined"))),
                None => return Err(self.broken(id, format!("reads {v}, which does not exist"))),
            }
        }
        let specs: Vec<&TensorSpec> = node.inputs.iter().map(|&v| self.spec(v)).collect();
        let is_copy = is_copy(node);
        if let Some(v) = node.inputs.iter().find(|&&v| !is_copy && self.spec(v).space != Space::Device) {
            let space = self.spec(*v).space.name();
            return Err(self.broken(id, format!("reads {v}, which kernels cannot: it is in space {space}")));
        }
        let wanted = match node.op.rules().infer(&specs, &self.bounds) {
            Ok(wanted) => wanted,
            Err(rule) => return Err(self.broken(id, rule.0)),
        };
        if wanted.len() != node.outputs.len() {
            return Err(self.broken(id, format!("has {} outputs, not {}", wanted.len(), node.outputs.len())));
        }
        for (i, (out, want)) in node.outputs.iter().zip(&wanted).enumerate() {
            let Some(v) = *out else { continue };
            let Some(value) = self.values.get(v.index()) else {
                return Err(self.broken(id, format!("writes {v}, which does not exist")));
            };
            if value.def != Def::Node(id, i as u32) || defined[v.index()] {
                return Err(self.broken(id, format!("{v} is defined twice or elsewhere")));
            }
            if value.spec.shape != want.shape || value.spec.dtype != want.dtype {
                return Err(self.broken(id, format!("{v} is {}, the op gives {want}", value.spec)));
            }
            if value.spec.space != want.space {
                let found = value.spec.space.name();
                let wanted = want.space.name();
                return Err(self.broken(id, format!("{v} is in space {found}, the op gives it in {wanted}")));
            }
            if is_copy && value.spec != *want {
                let rule = format!("{v} has another role or layout than the operand of its move or view");
                return Err(self.broken(id, rule));
            }
            defined[v.index()] = true;
        }
        Ok(())
    }

    /// The error for a node that violates `rule`.
    fn broken(&self, id: NodeId, rule: String) -> VerifyError {
        VerifyError::rule(id, &node_label(self, id), rule)
    }

    fn verify_interface(&self, defined: &[bool]) -> Result<(), VerifyError> {
        let inputs = self.inputs.iter().map(|(name, v)| (name as &dyn fmt::Display, *v));
        let outputs = self.outputs.iter().map(|(role, v)| (role as &dyn fmt::Display, *v));
        for (name, v) in inputs.chain(outputs) {
            if defined.get(v.index()) != Some(&true) {
                return Err(VerifyError::graph(format!("{name} is {v}, which is not defined")));
            }
            if self.spec(v).space != Space::Device {
                return Err(VerifyError::graph(format!("{name} is {v}, which is not in the arena")));
            }
        }
        let mut roles = BTreeSet::new();
        for (role, _) in &self.outputs {
            if role.is_misnamed() {
                return Err(VerifyError::graph(format!("output {role} has the name of another role")));
            }
            if !roles.insert(role) {
                return Err(VerifyError::graph(format!("there are two outputs {role}")));
            }
        }
        let mut updated = vec![false; self.values.len()];
        for &(state, new) in &self.updates {
            if [state, new].iter().any(|v| defined.get(v.index()) != Some(&true)) {
                return Err(VerifyError::graph(format!("the update ({state}, {new}) is not defined")));
            }
            let old_spec = self.spec(state);
            let new_spec = self.spec(new);
            let is_persistent = matches!(old_spec.role, Role::State(_) | Role::Param(_))
                && self.value(state).def == Def::Source;
            let is_alike = old_spec.space == new_spec.space
                && old_spec.shape == new_spec.shape
                && old_spec.dtype == new_spec.dtype;
            if !is_persistent || !is_alike || updated[state.index()] {
                return Err(VerifyError::graph(format!("{new} cannot update {state}")));
            }
            updated[state.index()] = true;
        }
        // Updates are executed as copies one after the other at the end of the step, and outputs are fetched
        // after them. A read of a state after its own update would therefore return the new value instead of
        // the old one.
        if let Some((state, new)) = self.updates.iter().find(|(_, new)| updated[self.whole(*new).index()]) {
            return Err(VerifyError::graph(format!("the update of {state} reads {new} after its own update")));
        }
        if let Some((role, v)) = self.outputs.iter().find(|(_, v)| updated[self.whole(*v).index()]) {
            return Err(VerifyError::graph(format!("output {role} reads {v} after its own update")));
        }
        Ok(())
    }
}

/// Whether the results of a node have the bytes of its operands: a move or a view.
fn is_copy(node: &Node) -> bool {
    node.op.is_view() || matches!(node.op, Op::Move(_))
}

fn malformed(spec: &TensorSpec) -> Option<&'static str> {
    if spec.shape.iter().skip(1).any(|d| d.fixed().is_none()) {
        return Some("only dimension 0 may be dynamic");
    }
    let survives = matches!(spec.role, Role::Param(_) | Role::State(_));
    if survives && spec.shape.iter().any(|d| d.fixed().is_none()) {
        return Some("what survives the step may not depend on its bounds");
    }
    let may_be_scaled = match spec.layout {
        Layout::RowMajor => !spec.dtype.is_scaled(),
        Layout::Scaled => spec.dtype.is_scaled(),
        Layout::Packed { .. } => true,
    };
    if !may_be_scaled {
        return Some("codes and scaled rows go together");
    }
    match spec.layout {
        Layout::RowMajor => None,
        Layout::Scaled => {
            let matrix = matches!(spec.shape[..], [_, Dim::Fixed(_)]);
            let is_param_or_activation = matches!(spec.role, Role::Param(_) | Role::Activation);
            (!(matrix && is_param_or_activation))
                .then_some("scaled rows hold parameters and activations that are matrices")
        }
        Layout::Packed { rows, columns } => {
            let packed = matches!(spec.shape[..], [Dim::Fixed(_), Dim::Fixed(_)])
                && matches!(spec.role, Role::Param(_))
                && matches!(spec.dtype, DType::F32 | DType::Bf16 | DType::I8)
                && rows > 0
                && columns > 0;
            (!packed).then_some("blocks hold parameters that are matrices of f32, bf16 or i8")
        }
    }
}
