//! Kernel table of NVIDIA GPUs. Invariant: the accepted ops depend on the compute capability only, so a plan
//! for a GPU can be made on any machine.

use super::{Fusions, WIDEST_HEAD, table};
use plimsoll_graph::ops::{Epilogue, Mask, Prologue};
use plimsoll_graph::{Bytes, DType, Graph, Layout, Node, Op};
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
        Accumulate = "accumulate": Accumulate Row::Rows,
        Adafactor = "adafactor": Adafactor Row::Optimizer,
        AdamW = "adamw": AdamW Row::Optimizer,
        AdamW8bit = "adamw_8bit": AdamW8bit Row::Optimizer,
        Add = "rows": Add Row::Rows,
        Flash = "flash": Attention Row::Rows,
        FlashGrad = "flash_grad": AttentionGrad Row::FlashGrad,
        BatchNorm = "rows": BatchNorm Row::Rows,
        BatchNormGrad = "batch_norm_grad": BatchNormGrad Row::Sums,
        BatchNormTrain = "batch_norm_train": BatchNormTrain Row::Sums,
        BatchNormTrainGrad = "batch_norm_train_grad": BatchNormTrainGrad Row::Sums,
        Cast = "rows": Cast Row::Rows,
        Combine = "combine": Combine Row::Experts,
        CombineGrad = "combine_grad": CombineGrad Row::Experts,
        Concat = "rows": Concat Row::Rows,
        ConcatGrad = "concat_grad": ConcatGrad Row::Rows,
        Dispatch = "dispatch": Dispatch Row::Experts,
        DispatchGrad = "dispatch_grad": DispatchGrad Row::Experts,
        Dropout = "dropout": Dropout Row::Rows,
        Embed = "rows": Embed Row::Rows,
        EmbedGrad = "embed_grad": EmbedGrad Row::Sums,
        Gelu = "rows": Gelu Row::Rows,
        GeluGrad = "gelu_grad": GeluGrad Row::Rows,
        Glu = "rows": Glu Row::Rows,
        GluGrad = "glu_grad": GluGrad Row::Rows,
        GradScale = "grad_scale": GradScale Row::Optimizer,
        GroupedGemm = "grouped_gemm": GroupedLinear Row::Experts,
        GroupedGemmInputGrad = "grouped_gemm_input_grad": GroupedLinearInputGrad Row::Experts,
        GroupedGemmWeightGrad = "grouped_gemm_weight_grad": GroupedLinearWeightGrad Row::Experts,
        LayerNorm = "rows": LayerNorm Row::Rows,
        LayerNormGrad = "layer_norm_grad": LayerNormGrad Row::Sums,
        Gemm = "gemm": Linear Row::Product,
        GemmFp8 = "gemm": Linear Row::Codes,
        LinearCrossEntropy = "linear_cross_entropy": LinearCrossEntropy Row::Loss,
        LinearCrossEntropyGrad = "linear_cross_entropy_grad": LinearCrossEntropyGrad Row::Loss,
        GemmInputGrad = "gemm_input_grad": LinearInputGrad Row::GemmGrad,
        GemmWeightGrad = "gemm_weight_grad": LinearWeightGrad Row::GemmGrad,
        Quantize = "rows": Quantize Row::Rows,
        Relu = "rows": Relu Row::Rows,
        ReluGrad = "relu_grad": ReluGrad Row::Rows,
        RmsNorm = "rms_norm": RmsNorm Row::Rows,
        RmsNormGrad = "rms_norm_grad": RmsNormGrad Row::Sums,
        RotaryTable = "sequence": RotaryTable Row::Rows,
        Route = "route": Route Row::Experts,
        RouteGrad = "route_grad": RouteGrad Row::Experts,
        RouterLoss = "router_loss": RouterLoss Row::Experts,
        RouterLossGrad = "router_loss_grad": RouterLossGrad Row::Experts,
        Scale = "scale": Scale Row::Rows,
        SegmentMean = "sequence": SegmentMean Row::Rows,
        SegmentMeanGrad = "segment_mean_grad": SegmentMeanGrad Row::Rows,
        SelectRows = "rows": SelectRows Row::Rows,
        SelectRowsGrad = "select_rows_grad": SelectRowsGrad Row::Sums,
        Sgd = "sgd": Sgd Row::Optimizer,
        Softmax = "rows": Softmax Row::Rows,
        SoftmaxGrad = "softmax_grad": SoftmaxGrad Row::Rows,
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
    /// Sums over rows: workspace for partial sums.
    Sums,
    /// Updates of parameters, and the norm of all gradients.
    Optimizer,
    /// Gradients of a matmul: workspace for transposed operands, partial sums, and cuBLASLt algorithms.
    GemmGrad,
    /// Output projection with its loss: workspace for the logits of a chunk of rows.
    Loss,
    /// Gradient of attention.
    FlashGrad,
    /// Mixture of experts.
    Experts,
}

/// Widest rows for which Hopper's matmul fuses a preceding layer norm. Measured on an H200: with 640 columns a
/// separate norm is as fast.
const WIDEST_NORM: u64 = 480;

/// Workspace of a matmul in bytes, reserved for the algorithms of cuBLASLt.
const GEMM: Bytes = Bytes(32 << 20);

pub(super) fn fusions(capability: Capability) -> Fusions {
    let hopper = capability == Capability::HOPPER;
    Fusions { fuse_gates: hopper, fuse_norms: if hopper { WIDEST_NORM } else { 0 }, mlp: false }
}

impl CudaKernel {
    pub(super) fn dtypes(self) -> &'static [DType] {
        match self.row() {
            Row::Rows
            | Row::Product
            | Row::Sums
            | Row::Optimizer
            | Row::GemmGrad
            | Row::Loss
            | Row::FlashGrad
            | Row::Experts => &[DType::F32, DType::Bf16, DType::F16],
            Row::Codes => &[DType::F8, DType::Bf16],
        }
    }

    pub(super) fn weights(self) -> Layout {
        match self.row() {
            Row::Codes => Layout::Scaled,
            Row::Rows
            | Row::Product
            | Row::Sums
            | Row::Optimizer
            | Row::GemmGrad
            | Row::Loss
            | Row::FlashGrad
            | Row::Experts => Layout::RowMajor,
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

    /// Workspace in bytes of a node in a full step.
    pub(super) fn workspace(self, graph: &Graph, node: &Node) -> Bytes {
        match self.row() {
            Row::Rows => Bytes::ZERO,
            Row::Product | Row::Codes => GEMM,
            Row::Sums => sums_bytes(graph, node),
            Row::Optimizer => optimizer_bytes(graph, node),
            Row::GemmGrad => gemm_grad_bytes(graph, node),
            Row::Loss => loss_bytes(graph, node),
            Row::FlashGrad => flash_grad_bytes(graph, node),
            Row::Experts => experts_bytes(graph, node),
        }
    }
}

/// Workspace of sums over rows.
fn sums_bytes(_: &Graph, _: &Node) -> Bytes {
    Bytes::ZERO
}

/// Workspace of updates and of the norm of all gradients.
fn optimizer_bytes(_: &Graph, _: &Node) -> Bytes {
    Bytes::ZERO
}

/// Workspace of the gradients of a matmul.
fn gemm_grad_bytes(_: &Graph, _: &Node) -> Bytes {
    GEMM
}

/// Workspace of an output projection with its loss.
fn loss_bytes(_: &Graph, _: &Node) -> Bytes {
    GEMM
}

/// Workspace of the gradient of attention.
fn flash_grad_bytes(_: &Graph, _: &Node) -> Bytes {
    Bytes::ZERO
}

/// Workspace of the ops of a mixture of experts.
fn experts_bytes(_: &Graph, _: &Node) -> Bytes {
    Bytes::ZERO
}
