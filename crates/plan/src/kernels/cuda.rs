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
    pub const MIN: Self = Self(8, 0);
    /// Minimum compute capability of e4m3 matmuls.
    pub const FP8: Self = Self(8, 9);
    /// Hopper: warpgroup matmuls, with fused gates and layer norms.
    pub const HOPPER: Self = Self(9, 0);
}

table! {
    /// A kernel for NVIDIA GPUs.
    CudaKernel: Operands {
        Add = "rows": Add Operands::Rows,
        Flash = "flash": Attention Operands::Rows,
        BatchNorm = "rows": BatchNorm Operands::Rows,
        Cast = "rows": Cast Operands::Rows,
        Concat = "rows": Concat Operands::Rows,
        Embed = "rows": Embed Operands::Rows,
        Gelu = "rows": Gelu Operands::Rows,
        Glu = "rows": Glu Operands::Rows,
        LayerNorm = "rows": LayerNorm Operands::Rows,
        Gemm = "gemm": Linear Operands::Matmul,
        GemmFp8 = "gemm": Linear Operands::Quantized,
        Quantize = "rows": Quantize Operands::Rows,
        Relu = "rows": Relu Operands::Rows,
        RotaryTable = "sequence": RotaryTable Operands::Rows,
        SegmentMean = "sequence": SegmentMean Operands::Rows,
        SelectRows = "rows": SelectRows Operands::Rows,
        Softmax = "rows": Softmax Operands::Rows,
    }
}

/// Accepted element types and workspace of a kernel.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Operands {
    /// Rows of one floating-point type; no workspace.
    Rows,
    /// Rows of one floating-point type, and workspace for cuBLASLt algorithms.
    Matmul,
    /// Quantized values with their scales, and bf16; both need equal workspaces.
    Quantized,
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
            Operands::Rows | Operands::Matmul => &[DType::F32, DType::Bf16, DType::F16],
            Operands::Quantized => &[DType::F8, DType::Bf16],
        }
    }

    pub(super) fn weights(self) -> Layout {
        match self.row() {
            Operands::Rows | Operands::Matmul => Layout::RowMajor,
            Operands::Quantized => Layout::Scaled,
        }
    }

    /// Whether the kernel accepts a node's op and attributes; the element types of the inputs are checked
    /// separately.
    pub(super) fn accepts(self, capability: Capability, node: &Node) -> bool {
        let has_fp8 = self.row() != Operands::Quantized || capability >= Capability::FP8;
        self.op() == node.op.kind() && has_fp8 && self.has(capability, &node.op)
    }

    /// Whether the kernel implements an op with these attributes.
    fn has(self, capability: Capability, op: &Op) -> bool {
        if let Op::Attention(op) = op {
            matches!(op.mask, Mask::Full | Mask::Causal) && op.head_dim <= WIDEST_HEAD
        } else if let Op::Linear(op) = op {
            let plain = op.epilogue != Epilogue::Gate && op.prologue == Prologue::None;
            self.row() != Operands::Quantized || plain
        } else if let Op::Quantize(op) = op {
            op.to == DType::F8 && capability >= Capability::FP8
        } else {
            true
        }
    }

    pub(super) fn workspace(self) -> Bytes {
        match self.row() {
            Operands::Rows => Bytes::ZERO,
            Operands::Matmul | Operands::Quantized => GEMM,
        }
    }
}
