//! Kernels of the reference. Invariant: they accept every op in every element type, without workspace.

use graph::{DType, Graph, Layout, Node, Op};
use serde::{Deserialize, Serialize};

/// A kernel of the reference.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ReferenceKernel {
    /// Any op.
    Any,
    /// A product of codes of 8 bits, whose weights lie in rows with their scales.
    Codes,
}

impl ReferenceKernel {
    pub(super) const ALL: &[Self] = &[Self::Any, Self::Codes];

    pub(super) fn weights(self) -> Layout {
        match self {
            Self::Any => Layout::RowMajor,
            Self::Codes => Layout::Scaled,
        }
    }

    pub(super) fn dtypes(self) -> &'static [DType] {
        match self {
            Self::Any => &[DType::F32, DType::Bf16, DType::F16],
            Self::Codes => &[DType::F8, DType::I8, DType::Bf16],
        }
    }

    /// Whether it accepts a node, as far as op and attributes tell; the element types of inputs are checked apart.
    pub(super) fn accepts(self, graph: &Graph, node: &Node) -> bool {
        let of_codes = |op: &Op| matches!(op, Op::Linear(_)) && graph.spec(node.inputs[0]).dtype.size() == 1;
        match self {
            Self::Any => true,
            Self::Codes => of_codes(&node.op),
        }
    }
}
