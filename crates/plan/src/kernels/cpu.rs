//! Kernel table of CPUs. Invariant: each workspace is large enough for the block sizes of its kernel, which the
//! crate `cpu` asserts at compile time.
#![expect(
    clippy::arithmetic_side_effects,
    reason = "sizes of tensors within the limits of graphs, times constants"
)]

use super::{CACHE_LINE, Fusions, GateFusion, KernelRow, NodeContext, chunk_words, table};
use plimsoll_graph::ops::{Attention, Linear, LinearCrossEntropy, OperandFormat, Prologue};
use plimsoll_graph::{Bytes, DType, Layout};
use serde::{Deserialize, Serialize};

/// Vector instructions used by the kernels, in ascending order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum InstructionSet {
    /// Portable code for any CPU.
    Portable,
    /// AVX2 and FMA.
    Avx2,
    /// AVX-512.
    Avx512,
    /// AVX-512 with AMX tile matmuls.
    Amx,
}

table! {
    /// A kernel for CPUs.
    CpuKernel {
        AccumulateF32 = "accumulate_f32": Accumulate KernelRow::NATIVE,
        AdafactorF32 = "adafactor_f32": Adafactor KernelRow::NATIVE,
        AdamWF32 = "adamw_f32": AdamW KernelRow::NATIVE,
        AdamW8bitF32 = "adamw_8bit_f32": AdamW8bit KernelRow::NATIVE,
        AddF32 = "add_f32": Add KernelRow::WIDENED_F16,
        AddBf16 = "add_bf16": Add KernelRow::BF16,
        FlashF32 = "flash_f32": Attention KernelRow {
            accepts: |op, _| accepts_heads(op),
            worker_workspace: |op, _| flash_workspace(op),
            ..KernelRow::WIDENED_F16
        },
        FlashBf16 = "flash_bf16": Attention KernelRow {
            accepts: |op, _| accepts_heads(op),
            worker_workspace: |op, _| flash_workspace(op),
            ..KernelRow::BF16
        },
        FlashGradF32 = "flash_grad_f32": AttentionGrad KernelRow {
            accepts: |op, _| accepts_heads(&op.forward),
            worker_workspace: |op, _| Bytes(flash_grad_bytes(op.forward.head_dim as usize) as u64),
            ..KernelRow::WIDENED
        },
        BatchNormF32 = "batch_norm_f32": BatchNorm KernelRow::WIDENED,
        BatchNormGradF32 = "batch_norm_grad_f32": BatchNormGrad KernelRow::WIDENED,
        BatchNormTrainF32 = "batch_norm_train_f32": BatchNormTrain KernelRow::WIDENED,
        BatchNormTrainGradF32 = "batch_norm_train_grad_f32": BatchNormTrainGrad KernelRow::WIDENED,
        Cast = "cast": Cast KernelRow::NATIVE,
        CombineF32 = "combine_f32": Combine KernelRow::WIDENED,
        CombineGradF32 = "combine_grad_f32": CombineGrad KernelRow::WIDENED,
        CopyF32 = "copy_f32": Concat KernelRow::WIDENED_F16,
        CopyBf16 = "copy_bf16": Concat KernelRow::BF16,
        ConcatGradF32 = "concat_grad_f32": ConcatGrad KernelRow::WIDENED,
        CountStepsF32 = "count_steps_f32": CountSteps KernelRow::NATIVE,
        DispatchF32 = "dispatch_f32": Dispatch KernelRow::WIDENED,
        DispatchGradF32 = "dispatch_grad_f32": DispatchGrad KernelRow::WIDENED,
        DropoutF32 = "dropout_f32": Dropout KernelRow::WIDENED,
        EmaF32 = "ema_f32": Ema KernelRow::NATIVE,
        EmbedF32 = "gather_f32": Embed KernelRow::WIDENED_F16,
        EmbedBf16 = "gather_bf16": Embed KernelRow::BF16,
        EmbedGradF32 = "embed_grad_f32": EmbedGrad KernelRow::WIDENED,
        GeluF32 = "gelu_erf_f32": Gelu KernelRow::WIDENED_F16,
        GeluBf16 = "gelu_erf_bf16": Gelu KernelRow::BF16,
        GeluGradF32 = "gelu_grad_f32": GeluGrad KernelRow::WIDENED,
        GluF32 = "geglu_f32": Glu KernelRow::WIDENED_F16,
        GluBf16 = "geglu_bf16": Glu KernelRow::BF16,
        GluGradF32 = "glu_grad_f32": GluGrad KernelRow::WIDENED,
        GradScaleF32 = "grad_scale_f32": GradScale KernelRow::NATIVE,
        GroupedLinearF32 = "grouped_linear_f32": GroupedLinear KernelRow::PRODUCT,
        GroupedLinearInputGradF32 = "grouped_linear_input_grad_f32": GroupedLinearInputGrad KernelRow::PRODUCT,
        GroupedLinearWeightGradF32 = "grouped_linear_weight_grad_f32": GroupedLinearWeightGrad KernelRow::PRODUCT,
        KlDivergenceF32 = "kl_divergence_f32": KlDivergence KernelRow::WIDENED,
        KlDivergenceGradF32 = "kl_divergence_grad_f32": KlDivergenceGrad KernelRow::WIDENED,
        LayerNormF32 = "layer_norm_f32": LayerNorm KernelRow::WIDENED_F16,
        LayerNormBf16 = "layer_norm_bf16": LayerNorm KernelRow::BF16,
        LayerNormGradF32 = "layer_norm_grad_f32": LayerNormGrad KernelRow::WIDENED,
        GemmF32 = "gemm_f32": Linear KernelRow {
            dtypes: &[DType::F32],
            weights: Layout::Packed { rows: PANEL, columns: 1 },
            accepts: |op, _| accepts_ungated(op, OperandFormat::Stored),
            worker_workspace: |_, cx| Bytes(cx.kernels.instructions().gemm_f32()),
            ..KernelRow::PLAIN
        },
        GemmBf16 = "gemm_bf16": Linear KernelRow {
            dtypes: &[DType::Bf16],
            weights: Layout::Packed { rows: TILE_STEP, columns: TILE_STEP },
            accepts: accepts_in_tiles,
            worker_workspace: |_, _| Bytes(GEMM_TILES),
            fusions: |kernels| Fusions { fuse_gates: gates(kernels.instructions()), ..Fusions::NONE },
            ..KernelRow::PLAIN
        },
        GemmInt8 = "gemm_int8": Linear KernelRow {
            dtypes: &[DType::I8, DType::Bf16],
            weights: Layout::Packed { rows: TILE_STEP, columns: INT8_STEP },
            accepts: |op, _| accepts_ungated(op, OperandFormat::Int8),
            worker_workspace: |_, _| Bytes(GEMM_TILES),
            ..KernelRow::PLAIN
        },
        ProductF32 = "product_f32": Linear KernelRow {
            accepts: |op, _| accepts_ungated(op, OperandFormat::Stored),
            ..KernelRow::PRODUCT
        },
        LinearCrossEntropyF32 = "linear_cross_entropy_f32": LinearCrossEntropy KernelRow {
            workspace: |op, cx| chunk_bytes(op, cx, 0),
            ..KernelRow::PRODUCT
        },
        LinearCrossEntropyGradF32 = "linear_cross_entropy_grad_f32": LinearCrossEntropyGrad KernelRow {
            // The gradient of the loss precedes the rows.
            workspace: |op, cx| chunk_bytes(&op.forward, cx, 1),
            ..KernelRow::PRODUCT
        },
        LinearInputGradF32 = "linear_input_grad_f32": LinearInputGrad KernelRow {
            accepts: |op, _| op.operands == OperandFormat::Stored,
            ..KernelRow::PRODUCT
        },
        LinearWeightGradF32 = "linear_weight_grad_f32": LinearWeightGrad KernelRow {
            accepts: |op, _| op.operands == OperandFormat::Stored,
            ..KernelRow::PRODUCT
        },
        QuantizeF32 = "quantize_f32": Quantize KernelRow {
            accepts: |op, _| op.to == DType::I8,
            worker_workspace: |_, cx| Bytes(WORD * cx.output_columns()),
            ..KernelRow::WIDENED_F16
        },
        QuantizeBf16 = "quantize_bf16": Quantize KernelRow {
            accepts: |op, _| op.to == DType::I8,
            worker_workspace: |_, cx| Bytes(WORD * cx.output_columns()),
            ..KernelRow::BF16
        },
        ReluF32 = "relu_f32": Relu KernelRow::WIDENED_F16,
        ReluBf16 = "relu_bf16": Relu KernelRow::BF16,
        ReluGradF32 = "relu_grad_f32": ReluGrad KernelRow::WIDENED,
        RmsNormF32 = "rms_norm_f32": RmsNorm KernelRow::WIDENED_F16,
        RmsNormBf16 = "rms_norm_bf16": RmsNorm KernelRow::BF16,
        RmsNormGradF32 = "rms_norm_grad_f32": RmsNormGrad KernelRow::WIDENED,
        RotaryTableF32 = "rotary_table_f32": RotaryTable KernelRow::WIDENED,
        RouteF32 = "route_f32": Route KernelRow {
            worker_workspace: |_, cx| route_bytes(cx),
            workspace: |_, cx| route_bytes(cx) * route_packs(cx),
            ..KernelRow::WIDENED
        },
        RouteGradF32 = "route_grad_f32": RouteGrad KernelRow::WIDENED,
        RouterLossF32 = "router_loss_f32": RouterLoss KernelRow {
            // Two words for each row.
            workspace: |_, cx| Bytes(2 * WORD * cx.rows(0)),
            ..KernelRow::WIDENED
        },
        RouterLossGradF32 = "router_loss_grad_f32": RouterLossGrad KernelRow {
            // One word for each pack and expert.
            workspace: |_, cx| Bytes(WORD * cx.columns(1) * cx.rows(3)),
            ..KernelRow::WIDENED
        },
        ScaleF32 = "scale_f32": Scale KernelRow::WIDENED_F16,
        ScaleBf16 = "scale_bf16": Scale KernelRow::BF16,
        SegmentMeanF32 = "segment_mean_f32": SegmentMean KernelRow::WIDENED_F16,
        SegmentMeanBf16 = "segment_mean_bf16": SegmentMean KernelRow::BF16,
        SegmentMeanGradF32 = "segment_mean_grad_f32": SegmentMeanGrad KernelRow::WIDENED,
        SelectRowsF32 = "gather_f32": SelectRows KernelRow::WIDENED_F16,
        SelectRowsBf16 = "gather_bf16": SelectRows KernelRow::BF16,
        SelectRowsGradF32 = "select_rows_grad_f32": SelectRowsGrad KernelRow::WIDENED,
        SgdF32 = "sgd_f32": Sgd KernelRow::NATIVE,
        SoftmaxF32 = "softmax_f32": Softmax KernelRow::WIDENED,
        SoftmaxGradF32 = "softmax_grad_f32": SoftmaxGrad KernelRow::WIDENED,
    }
}

impl<O> KernelRow<O> {
    /// Reads f32, bf16 and f16; 16-bit operands are converted to f32 copies.
    const WIDENED: Self = Self { widens: true, ..Self::PLAIN };

    /// Reads f32 and f16; f16 operands are converted to f32 copies, and bf16 has a separate kernel.
    const WIDENED_F16: Self = Self { dtypes: &[DType::F32, DType::F16], ..Self::WIDENED };

    /// Reads f32, bf16 and f16 directly. For ops at the end of a step that read all gradients: f32 copies of
    /// these would cost as much memory as 16 bits save.
    const NATIVE: Self = Self::PLAIN;

    /// Reads bf16 directly, with f32 norm parameters, tables and statistics.
    const BF16: Self = Self { dtypes: &[DType::Bf16, DType::F32], ..Self::PLAIN };

    /// Matmul whose operands both change in every step, so that neither is packed in advance.
    const PRODUCT: Self = Self { worker_workspace: |_, _| Bytes(PRODUCT), ..Self::WIDENED };
}

/// Bytes of an f32 or i32.
const WORD: u64 = 4;

/// Rows of the weight panels that f32 matmuls read; each panel is K x 32.
const PANEL: u32 = 32;

/// Rows of a panel of tiles, and columns of a step, for bf16 matmuls on matrix units. For each step a panel
/// holds two tiles of 16 rows; line j of a tile holds columns 2j and 2j + 1 of its rows, row after row.
pub const TILE_STEP: u32 = 32;

/// Columns of a step of 8-bit matmuls: line j of a tile holds columns 4j to 4j + 3 of its rows.
pub const INT8_STEP: u32 = 64;

/// Maximum columns of x of a matmul that computes a gated linear unit.
pub const LONGEST_GATED: u64 = 1024;

/// Maximum number of attention heads.
pub const MAX_HEADS: u32 = 128;

/// Maximum columns of an attention head.
pub const WIDEST_HEAD: u32 = 128;

/// Workspace per worker in bytes of an f32 matmul with packed weights. With AMX tiles it is larger because
/// operands are split into three bf16 terms (bf16x3).
const GEMM_F32: u64 = 698_880;
const GEMM_F32_TILES: u64 = 1_499_136;

/// Workspace per worker in bytes of a matmul with weights in tiles.
const GEMM_TILES: u64 = 797_184;

/// Workspace per worker in bytes of a matmul whose operands both change in every step.
const PRODUCT: u64 = 932_352;

/// Workspace per worker in bytes of attention with `head_dim` columns per head: keys, values and sums per
/// column, plus queries, scores, and padding of the columns. A test of the kernel checks that its buffers fit
/// for every width.
pub const fn flash_bytes(head_dim: usize) -> usize {
    (180_288 + 2432 * head_dim).next_multiple_of(64)
}

/// Workspace per worker in bytes of the gradient of attention: per column, the sums of keys and of values,
/// their panels and the panels of a block of queries; plus parts of fixed size.
pub const fn flash_grad_bytes(head_dim: usize) -> usize {
    (564_312 + 4520 * head_dim).next_multiple_of(64)
}

impl InstructionSet {
    /// Name in target files.
    pub fn name(self) -> &'static str {
        match self {
            Self::Portable => "portable",
            Self::Avx2 => "avx2",
            Self::Avx512 => "avx512",
            Self::Amx => "amx",
        }
    }

    /// Workspace per worker in bytes of an f32 matmul with packed weights.
    pub const fn gemm_f32(self) -> u64 {
        match self {
            Self::Amx => GEMM_F32_TILES,
            Self::Portable | Self::Avx2 | Self::Avx512 => GEMM_F32,
        }
    }
}

impl CpuKernel {
    /// Workspace per worker in bytes of matmuls whose operands both change in every step.
    pub const PRODUCT_BYTES: u64 = PRODUCT;

    /// Workspace per worker in bytes of 16-bit and 8-bit matmuls with weights in tiles.
    pub const TILES_BYTES: u64 = GEMM_TILES;

    /// Whether the kernel converts 16-bit operands to f32 copies.
    pub fn widens(self) -> bool {
        self.row().widens()
    }
}

/// The gated linear units that matmuls in tiles compute with these instructions: AMX tiles leave the vector units time
/// for them. The gate and the value of a column are in panels of equal position, and no sum is stored between slices of
/// K, which is at most `LONGEST_GATED`.
fn gates(set: InstructionSet) -> Option<GateFusion> {
    let gates = GateFusion {
        dtypes: &[DType::Bf16],
        silu: true,
        bias: true,
        max_columns: LONGEST_GATED,
        multiple: u64::from(TILE_STEP),
    };
    match set {
        InstructionSet::Amx => Some(gates),
        InstructionSet::Portable | InstructionSet::Avx2 | InstructionSet::Avx512 => None,
    }
}

/// Whether f32 and 8-bit matmuls compute a linear: without a gate, which only matmuls in tiles compute.
fn accepts_ungated(op: &Linear, operands: OperandFormat) -> bool {
    accepts_linear(op, operands) && op.epilogue.gate().is_none()
}

/// Whether matmuls in tiles compute a linear: its weight is bf16, and its gate, if it has one, is one of [`gates`].
fn accepts_in_tiles(op: &Linear, cx: &NodeContext<'_>) -> bool {
    if !accepts_linear(op, OperandFormat::Stored) || cx.dtype(1) != DType::Bf16 {
        return false;
    }
    if op.epilogue.gate().is_none() {
        return true;
    }
    gates(cx.kernels.instructions()).is_some_and(|gates| {
        cx.columns(0) <= gates.max_columns && cx.output_columns().is_multiple_of(gates.multiple)
    })
}

/// Whether a kernel that multiplies `operands` computes a linear except its gate: no CPU kernel fuses a preceding norm.
fn accepts_linear(op: &Linear, operands: OperandFormat) -> bool {
    op.operands == operands && op.prologue == Prologue::None
}

/// Whether the heads of attention fit the buffers of the kernels.
fn accepts_heads(op: &Attention) -> bool {
    op.heads <= MAX_HEADS && op.head_dim <= WIDEST_HEAD
}

/// Workspace of a worker for attention.
fn flash_workspace(op: &Attention) -> Bytes {
    Bytes(flash_bytes(op.head_dim as usize) as u64)
}

/// Bytes of a chunk of logits of a cross-entropy whose rows are input `x`, followed by its weight.
fn chunk_bytes(op: &LinearCrossEntropy, cx: &NodeContext<'_>, x: usize) -> Bytes {
    let chunk = u64::from(op.chunk).min(cx.rows(x));
    Bytes(WORD * chunk_words(chunk, cx.columns(x), cx.rows(x + 1)))
}

/// Bytes of two words for each expert, which routing counts with for each worker and for each pack.
fn route_bytes(cx: &NodeContext<'_>) -> Bytes {
    Bytes(WORD * cx.columns(0)).align_up(CACHE_LINE) * 2
}

/// Number of packs of routing. Without a capacity there is no input `packs`, and all tokens count as one pack.
fn route_packs(cx: &NodeContext<'_>) -> u64 {
    if cx.node.inputs.len() > 1 { cx.rows(1) } else { 1 }
}
