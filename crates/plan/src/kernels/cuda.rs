//! Kernel table of NVIDIA GPUs. Invariant: the accepted ops depend on the compute capability only, so a plan
//! for a GPU can be made on any machine.

use super::{Fusions, WIDEST_HEAD, rows, table};
use plimsoll_graph::ops::{Attention, Epilogue, Prologue};
use plimsoll_graph::{Bytes, DType, Graph, Layout, Node, Op};
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
        Accumulate = "accumulate": Accumulate Operands::Rows,
        Adafactor = "adafactor": Adafactor Operands::Optimizer,
        AdamW = "adamw": AdamW Operands::Optimizer,
        AdamW8bit = "adamw_8bit": AdamW8bit Operands::Optimizer,
        Add = "rows": Add Operands::Rows,
        Flash = "flash": Attention Operands::Rows,
        FlashGrad = "flash_grad": AttentionGrad Operands::FlashGrad,
        BatchNorm = "rows": BatchNorm Operands::Rows,
        BatchNormGrad = "batch_norm_grad": BatchNormGrad Operands::Sums,
        BatchNormTrain = "batch_norm_train": BatchNormTrain Operands::Sums,
        BatchNormTrainGrad = "batch_norm_train_grad": BatchNormTrainGrad Operands::Sums,
        Cast = "rows": Cast Operands::Rows,
        Combine = "combine": Combine Operands::Experts,
        CombineGrad = "combine_grad": CombineGrad Operands::Experts,
        Concat = "rows": Concat Operands::Rows,
        ConcatGrad = "concat_grad": ConcatGrad Operands::Rows,
        Dispatch = "dispatch": Dispatch Operands::Experts,
        DispatchGrad = "dispatch_grad": DispatchGrad Operands::Experts,
        Dropout = "dropout": Dropout Operands::Rows,
        Embed = "rows": Embed Operands::Rows,
        EmbedGrad = "embed_grad": EmbedGrad Operands::Sums,
        Gelu = "rows": Gelu Operands::Rows,
        GeluGrad = "gelu_grad": GeluGrad Operands::Rows,
        Glu = "rows": Glu Operands::Rows,
        GluGrad = "glu_grad": GluGrad Operands::Rows,
        GradScale = "grad_scale": GradScale Operands::Optimizer,
        GroupedGemm = "grouped_gemm": GroupedLinear Operands::Experts,
        GroupedGemmInputGrad = "grouped_gemm_input_grad": GroupedLinearInputGrad Operands::Experts,
        GroupedGemmWeightGrad = "grouped_gemm_weight_grad": GroupedLinearWeightGrad Operands::Experts,
        LayerNorm = "rows": LayerNorm Operands::Rows,
        LayerNormGrad = "layer_norm_grad": LayerNormGrad Operands::Sums,
        Gemm = "gemm": Linear Operands::Matmul,
        GemmFp8 = "gemm": Linear Operands::Quantized,
        LinearCrossEntropy = "linear_cross_entropy": LinearCrossEntropy Operands::Loss,
        LinearCrossEntropyGrad = "linear_cross_entropy_grad": LinearCrossEntropyGrad Operands::Loss,
        GemmInputGrad = "gemm_input_grad": LinearInputGrad Operands::GemmGrad,
        GemmWeightGrad = "gemm_weight_grad": LinearWeightGrad Operands::GemmGrad,
        Quantize = "rows": Quantize Operands::Rows,
        Relu = "rows": Relu Operands::Rows,
        ReluGrad = "relu_grad": ReluGrad Operands::Rows,
        RmsNorm = "rms_norm": RmsNorm Operands::Rows,
        RmsNormGrad = "rms_norm_grad": RmsNormGrad Operands::Sums,
        RotaryTable = "sequence": RotaryTable Operands::Rows,
        Route = "route": Route Operands::Experts,
        RouteGrad = "route_grad": RouteGrad Operands::Experts,
        RouterLoss = "router_loss": RouterLoss Operands::Experts,
        RouterLossGrad = "router_loss_grad": RouterLossGrad Operands::Experts,
        Scale = "scale": Scale Operands::Rows,
        SegmentMean = "sequence": SegmentMean Operands::Rows,
        SegmentMeanGrad = "segment_mean_grad": SegmentMeanGrad Operands::Rows,
        SelectRows = "rows": SelectRows Operands::Rows,
        SelectRowsGrad = "select_rows_grad": SelectRowsGrad Operands::Sums,
        Sgd = "sgd": Sgd Operands::Optimizer,
        Softmax = "rows": Softmax Operands::Rows,
        SoftmaxGrad = "softmax_grad": SoftmaxGrad Operands::Rows,
    }
}

/// Accepted element types and workspace of a kernel.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Operands {
    /// Rows of one floating-point type; no workspace.
    Rows,
    /// Rows of one floating-point type, and workspace for cuBLASLt algorithms.
    Matmul,
    /// Quantized values with their scales, and bf16; the same workspace.
    Quantized,
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
            Operands::Rows
            | Operands::Matmul
            | Operands::Sums
            | Operands::Optimizer
            | Operands::GemmGrad
            | Operands::Loss
            | Operands::FlashGrad
            | Operands::Experts => &[DType::F32, DType::Bf16, DType::F16],
            Operands::Quantized => &[DType::F8, DType::Bf16],
        }
    }

    pub(super) fn weights(self) -> Layout {
        match self.row() {
            Operands::Quantized => Layout::Scaled,
            Operands::Rows
            | Operands::Matmul
            | Operands::Sums
            | Operands::Optimizer
            | Operands::GemmGrad
            | Operands::Loss
            | Operands::FlashGrad
            | Operands::Experts => Layout::RowMajor,
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
            op.head_dim <= WIDEST_HEAD
        } else if let Op::AttentionGrad(op) = op {
            op.forward.head_dim <= WIDEST_HEAD
        } else if let Op::Linear(op) = op {
            let plain = op.epilogue != Epilogue::Gate && op.prologue == Prologue::None;
            self.row() != Operands::Quantized || plain
        } else if let Op::Quantize(op) = op {
            op.to == DType::F8 && capability >= Capability::FP8
        } else {
            true
        }
    }

    /// Workspace in bytes of a node in a full step.
    pub(super) fn workspace(self, graph: &Graph, node: &Node) -> Bytes {
        match self.row() {
            Operands::Rows => Bytes::ZERO,
            Operands::Matmul | Operands::Quantized => GEMM,
            Operands::Sums => sums_bytes(graph, node),
            Operands::Optimizer => optimizer_bytes(graph, node),
            Operands::GemmGrad => gemm_grad_bytes(graph, node),
            Operands::Loss => loss_bytes(graph, node),
            Operands::FlashGrad => flash_grad_bytes(graph, node),
            Operands::Experts => experts_bytes(graph, node),
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
fn flash_grad_bytes(graph: &Graph, node: &Node) -> Bytes {
    let Op::AttentionGrad(op) = &node.op else { return Bytes::ZERO };
    let dtype = graph.spec(node.inputs[1]).dtype;
    flash_grad_parts(&op.forward, rows(graph, node, 0), dtype).into_iter().sum()
}

/// Parts of the workspace of the gradient of attention in a step of `tokens` tokens: lse and delta of every row and head
/// in f32, and with rotary embedding the rotated q and k.
pub fn flash_grad_parts(op: &Attention, tokens: u64, dtype: DType) -> [Bytes; 3] {
    let stats = 2 * u64::from(op.heads) * DType::F32.size();
    let rotated = |width: u64| if op.rotary { width * dtype.size() } else { 0 };
    [stats, rotated(op.width()), rotated(op.kv_width())].map(|row| Bytes(tokens * row).align_up(256))
}

/// Workspace of the ops of a mixture of experts.
fn experts_bytes(_: &Graph, _: &Node) -> Bytes {
    Bytes::ZERO
}
