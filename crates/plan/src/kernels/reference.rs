//! Kernel table of the reference. Invariant: it accepts every op in every element type and needs no workspace.

use super::{AnyKernelRow, KernelRow};
use plimsoll_graph::{DType, Layout, Op};
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

/// Row of [`ReferenceKernel::Any`].
static ANY: KernelRow<Op> = KernelRow::PLAIN;

/// Row of [`ReferenceKernel::Quantized`].
static QUANTIZED: KernelRow<Op> = KernelRow {
    dtypes: &[DType::F8, DType::I8, DType::Bf16],
    weights: Layout::Scaled,
    accepts: |op, _| matches!(op, Op::Linear(_)) && op.operands().quantized().is_some(),
    ..KernelRow::PLAIN
};

impl ReferenceKernel {
    pub(super) const ALL: &[Self] = &[Self::Any, Self::Quantized];

    pub(super) fn row(self) -> &'static dyn AnyKernelRow {
        match self {
            Self::Any => &ANY,
            Self::Quantized => &QUANTIZED,
        }
    }
}
