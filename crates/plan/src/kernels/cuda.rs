//! Kernel table of NVIDIA GPUs. Invariant: the accepted ops depend on the compute capability only, so a plan
//! for a GPU can be made on any machine.

use super::{Fusions, WIDEST_HEAD, table};
use plimsoll_graph::ops::{Epilogue, Mask, Prologue};
use plimsoll_graph::{Bytes, DType, Layout, Node, Op};
use serde::{Deserialize, Serialize};

/// A CUDA compute capability: (major, minor).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Capability(pub u32, pub u32);

impl Capability {
    /// Minimum compute capability of the kernels.
    pub const LEAST: Self = Self(8, 0);
    /// Minimum compute capability of e4m3 matmuls.
    pub const FP8: Self = Self(8, 9);
    /// Hopper: warpgroup matmuls, with fused gates and layer norms.
    pub const HOPPER: Self = Self(9, 0);
}

table! {
    /// A kernel for NVIDIA GPUs.
    CudaKernel: Row {
        Add = "rows": Add Row::Rows,
        Flash = "flash": Attention Row::Rows,
        BatchNorm = "rows": BatchNorm Row::Rows,
        Cast = "rows": Cast Row::Rows,
        Concat = "rows": Concat Row::Rows,
        Embed = "rows": Embed Row::Rows,
        Gelu = "rows": Gelu Row::Rows,
        Glu = "rows": Glu Row::Rows,
        LayerNorm = "rows": LayerNorm Row::Rows,
        Gemm = "gemm": Linear Row::Product,
        GemmFp8 = "gemm": Linear Row::Codes,
        Quantize = "rows": Quantize Row::Rows,
        Relu = "rows": Relu Row::Rows,
        RotaryTable = "sequence": RotaryTable Row::Rows,
        SegmentMean = "sequence": SegmentMean Row::Rows,
        SelectRows = "rows": SelectRows Row::Rows,
        Softmax = "rows": Softmax Row::Rows,
    }
}

/// Accepted element types and workspace of a kernel.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Row {
    /// Rows of one floating-point type; no workspace.
    Rows,
    /// Rows of one floating-point type, and workspace for cuBLASLt algorithms.
    Product,
    /// Quantized values with their scales, and bf16; the same workspace.
    Codes,
}

/// Widest rows for which Hopper's matmul fuses a preceding layer norm. Measured on an H200: with 640 columns a
/// separate norm is as fast.
const WIDEST_NORM: u64 = 480;

/// Workspace of a matmul in bytes, reserved for the algorithms of cuBLASLt.
const GEMM: Bytes = Bytes(32 << 20);

pub(super) fn fusions(capability: Capability) -> Fusions {
    let hopper = capability == Capability::HOPPER;
    Fusions { fuse_gates: hopper, fuse_norms: if hopper { WIDEST_NORM } else { 0 } }
}

impl CudaKernel {
    pub(super) fn dtypes(self) -> &'static [DType] {
        match self.row() {
            Row::Rows | Row::Product => &[DType::F32, DType::Bf16, DType::F16],
            Row::Codes => &[DType::F8, DType::Bf16],
        }
    }

    pub(super) fn weights(self) -> Layout {
        match self.row() {
            Row::Rows | Row::Product => Layout::RowMajor,
            Row::Codes => Layout::Scaled,
        }
    }

    /// Whether the kernel accepts a node's op and attributes; the element types of the inputs are checked
    /// separately.
    pub(super) fn accepts(self, capability: Capability, node: &Node) -> bool {
        let has_codes = self.row() != Row::Codes || capability >= Capability::FP8;
        self.op() == node.op.kind() && has_codes && self.has(capability, &node.op)
    }

    /// Whether the kernel implements an op with these attributes.
    fn has(self, capability: Capability, op: &Op) -> bool {
        if let Op::Attention(op) = op {
            matches!(op.mask, Mask::Full | Mask::Causal) && op.head_dim <= WIDEST_HEAD
        } else if let Op::Linear(op) = op {
            let plain = op.epilogue != Epilogue::Gate && op.prologue == Prologue::None;
            self.row() != Row::Codes || plain
        } else if let Op::Quantize(op) = op {
            op.to == DType::F8 && capability >= Capability::FP8
        } else {
            true
        }
    }

    pub(super) fn workspace(self) -> Bytes {
        match self.row() {
            Row::Rows => Bytes::ZERO,
            Row::Product | Row::Codes => GEMM,
        }
    }
}
