//! Errors of planning. Invariant: each states the numbers involved and what the user can do.

use crate::{Bill, CheckError, Ledger};
use plimsoll_graph::{Bytes, DType, NodeId, Space, TooLarge, VerifyError};
use std::fmt;

/// Reasons why a graph cannot be planned.
#[derive(Debug)]
#[non_exhaustive]
pub enum PlanError {
    /// The plan exceeds the memory limit.
    OverBudget(Box<Bill>),
    /// Tensors stored outside the arena exceed the limit of their space.
    OverRoom {
        /// The space.
        space: Space,
        /// Bytes that the program stores there.
        needed: Bytes,
        /// Bytes that it may use.
        room: Bytes,
        /// The bytes by purpose; they sum to `needed`.
        ledger: Ledger,
    },
    /// The target has no such space: its arena is host memory.
    NoSpace {
        /// The space.
        space: Space,
        /// Name of the target.
        target: String,
    },
    /// A gradient is required through an op that is not differentiable.
    NotDifferentiable {
        /// The node.
        node: NodeId,
        /// Label of the node.
        label: String,
    },
    /// The target has no kernel for some ops.
    Unsupported {
        /// The unsupported ops, each with the element type of its inputs.
        ops: Vec<(&'static str, DType)>,
        /// Name of the target.
        target: String,
    },
    /// The policy contradicts itself, the graph or the target.
    BadPolicy {
        /// Name of the policy field.
        field: &'static str,
        /// Description of the error.
        why: String,
    },
    /// A target file is invalid.
    BadTarget {
        /// The name of the target.
        target: String,
        /// Description of the error.
        why: String,
    },
    /// A tensor, or all tensors together, exceed the limits of graphs, which no machine's memory reaches.
    TooLarge {
        /// The size and the limit.
        what: String,
    },
    /// The caller cancelled a search.
    Stopped,
    /// A pass produced an invalid graph, which is a bug in this program.
    Verify {
        /// Name of the pass after which the error was found.
        after: &'static str,
        /// The violated rule.
        source: VerifyError,
    },
    /// The plan does not compute what its schedule specifies, which is a bug in this program.
    Check(CheckError),
}

impl PlanError {
    /// The error for a graph that is too large or, which is a bug in this program, invalid after the pass `after`.
    pub fn of_graph(after: &'static str, source: VerifyError) -> Self {
        if source.is_too_large {
            return Self::TooLarge { what: source.rule };
        }
        Self::Verify { after, source }
    }
}

impl From<TooLarge> for PlanError {
    fn from(error: TooLarge) -> Self {
        Self::TooLarge { what: error.to_string() }
    }
}

impl fmt::Display for PlanError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::OverBudget(bill) => bill.fmt(f),
            Self::OverRoom { space, needed, room, ledger } => write!(
                f,
                "{needed} must be kept in {} between their uses, where {room} are allowed ({})",
                place_name(*space),
                ledger.line()
            ),
            Self::NoSpace { space, target } => write!(
                f,
                "nothing can be kept in {} on `{target}`, whose arena is host memory; it can be kept on disk",
                place_name(*space)
            ),
            Self::NotDifferentiable { node, label } => {
                write!(f, "node {node} ({label}) has no gradient; freeze what lies before it")
            }
            Self::Unsupported { ops, target } => {
                let ops: Vec<String> =
                    ops.iter().map(|(op, dtype)| format!("`{op}` in {}", dtype.name())).collect();
                write!(f, "target `{target}` has no kernel for {}", ops.join(", "))
            }
            Self::BadPolicy { field, why } => write!(f, "policy `{field}`: {why}"),
            Self::BadTarget { target, why } => write!(f, "target `{target}`: {why}"),
            Self::TooLarge { what } => {
                write!(
                    f,
                    "no machine has the memory for this model and step: {what}; lower the sizes that it follows from"
                )
            }
            Self::Stopped => f.write_str("the search for a plan was stopped"),
            Self::Verify { after, .. } => write!(f, "the graph is broken after `{after}`"),
            Self::Check(_) => write!(f, "the plan does not hold"),
        }
    }
}

/// Name of a space in messages.
fn place_name(space: Space) -> &'static str {
    match space {
        Space::Device => "the arena",
        Space::Host => "host memory",
        Space::File => "a file on disk",
    }
}

impl std::error::Error for PlanError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Verify { source, .. } => Some(source),
            Self::Check(error) => Some(error),
            Self::OverBudget(_)
            | Self::OverRoom { .. }
            | Self::NoSpace { .. }
            | Self::NotDifferentiable { .. }
            | Self::Unsupported { .. }
            | Self::BadPolicy { .. }
            | Self::BadTarget { .. }
            | Self::TooLarge { .. }
            | Self::Stopped => None,
        }
    }
}

impl From<CheckError> for PlanError {
    fn from(error: CheckError) -> Self {
        Self::Check(error)
    }
}
