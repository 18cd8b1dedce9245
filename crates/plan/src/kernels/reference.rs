//! Kernel table of the reference. Invariant: it accepts every op in every element type and needs no workspace.

use plimsoll_graph::{DType, Graph, Layout, Node, Op};
use serde::{Deserialize, Serialize};

/// A kernel of the reference device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ReferenceKernel {
    /// Every op on floating-point operands.
    Any,
    /// Matmul of 8-bit quantized operands, whose weights are stored by rows with their scales.
    Quantized,
}

impl ReferenceKernel {
    pub(super) const ALL: &[Self] = &[Self::Any, Self::Quantized];

    pub(super) fn weights(self) -> Layout {
        match self {
            Self::Any => Layout::RowMajor,
            Self::Quantized => Layout::Scaled,
        }
    }

    pub(super) fn dtypes(self) -> &'static [DType] {
        match self {
            Self::Any => &[DType::F32, DType::Bf16, DType::F16],
            Self::Quantized => &[DType::F8, DType::I8, DType::Bf16],
        }
    }

    /// Whether the kernel accepts a node's op and attributes; the element types of the inputs are checked
    /// separately.
    pub(super) fn accepts(self, graph: &Graph, node: &Node) -> bool {
        let is_quantized =
            |op: &Op| matches!(op, Op::Linear(_)) && graph.spec(node.inputs[0]).dtype.size() == 1;
        match self {
            Self::Any => true,
            Self::Quantized => is_quantized(&node.op),
        }
    }
}
