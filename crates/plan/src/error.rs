//! Why a request cannot be met, with numbers and the next step.

use crate::{Bill, CheckError};
use graph::{DType, NodeId, VerifyError};
use std::fmt;

/// Why a graph has no plan.
#[derive(Debug)]
#[non_exhaustive]
pub enum PlanError {
    /// It does not fit: here is the bill.
    OverBudget(Box<Bill>),
    /// A gradient goes through an op that has none.
    NotDifferentiable {
        /// The node.
        node: NodeId,
        /// Its label.
        label: String,
    },
    /// The target has no kernels for some ops.
    Unsupported {
        /// Each op with the element type of its inputs.
        ops: Vec<(&'static str, DType)>,
        /// The target.
        target: String,
    },
    /// A policy that contradicts itself or the graph.
    BadPolicy {
        /// The field.
        field: &'static str,
        /// What is wrong with it.
        why: String,
    },
    /// A target file that cannot be read.
    BadTarget {
        /// The name of the target.
        target: String,
        /// What is wrong with it.
        why: String,
    },
    /// The caller ended a search.
    Stopped,
    /// A pass broke the graph: our bug.
    Verify {
        /// The pass after which it was seen.
        after: &'static str,
        /// The broken rule.
        source: VerifyError,
    },
    /// The plan does not compute what the schedule says: our bug.
    Check(CheckError),
}

impl fmt::Display for PlanError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::OverBudget(bill) => bill.fmt(f),
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
            Self::Stopped => f.write_str("the search for a plan was stopped"),
            Self::Verify { after, .. } => write!(f, "the graph is broken after `{after}`"),
            Self::Check(_) => write!(f, "the plan does not hold"),
        }
    }
}

impl std::error::Error for PlanError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Verify { source, .. } => Some(source),
            Self::Check(error) => Some(error),
            Self::OverBudget(_)
            | Self::NotDifferentiable { .. }
            | Self::Unsupported { .. }
            | Self::BadPolicy { .. }
            | Self::BadTarget { .. }
            | Self::Stopped => None,
        }
    }
}

impl From<CheckError> for PlanError {
    fn from(error: CheckError) -> Self {
        Self::Check(error)
    }
}
