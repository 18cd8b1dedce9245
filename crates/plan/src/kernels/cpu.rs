//! Kernel table of CPUs. Invariant: each workspace is large enough for the block sizes of its kernel, which the
//! crate `cpu` asserts at compile time.
#![expect(
    clippy::arithmetic_side_effects,
    reason = "sizes of tensors within the limits of graphs, times constants"
)]

use super::{GateFusion, chunk_words, columns, output_columns, rows, table};
use plimsoll_graph::ops::{Attention, Prologue};
use plimsoll_graph::{Bytes, DType, Graph, Layout, Node, Op};
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
    CpuKernel: (Takes, Scratch) {
        AccumulateF32 = "accumulate_f32": Accumulate (Takes::Native, Scratch::None),
        AdafactorF32 = "adafactor_f32": Adafactor (Takes::Native, Scratch::None),
        AdamWF32 = "adamw_f32": AdamW (Takes::Native, Scratch::None),
        AdamW8bitF32 = "adamw_8bit_f32": AdamW8bit (Takes::Native, Scratch::None),
        AddF32 = "add_f32": Add (Takes::WidenedF16, Scratch::None),
        AddBf16 = "add_bf16": Add (Takes::Bf16, Scratch::None),
        FlashF32 = "flash_f32": Attention (Takes::WidenedF16, Scratch::Flash),
        FlashBf16 = "flash_bf16": Attention (Takes::Bf16, Scratch::Flash),
        FlashGradF32 = "flash_grad_f32": AttentionGrad (Takes::Widened, Scratch::FlashGrad),
        BatchNormF32 = "batch_norm_f32": BatchNorm (Takes::Widened, Scratch::None),
        BatchNormGradF32 = "batch_norm_grad_f32": BatchNormGrad (Takes::Widened, Scratch::None),
        BatchNormTrainF32 = "batch_norm_train_f32": BatchNormTrain (Takes::Widened, Scratch::None),
        BatchNormTrainGradF32 = "batch_norm_train_grad_f32": BatchNormTrainGrad (Takes::Widened, Scratch::None),
        Cast = "cast": Cast (Takes::Native, Scratch::None),
        CombineF32 = "combine_f32": Combine (Takes::Widened, Scratch::None),
        CombineGradF32 = "combine_grad_f32": CombineGrad (Takes::Widened, Scratch::None),
        CopyF32 = "copy_f32": Concat (Takes::WidenedF16, Scratch::None),
        CopyBf16 = "copy_bf16": Concat (Takes::Bf16, Scratch::None),
        ConcatGradF32 = "concat_grad_f32": ConcatGrad (Takes::Widened, Scratch::None),
        CountStepsF32 = "count_steps_f32": CountSteps (Takes::Native, Scratch::None),
        DispatchF32 = "dispatch_f32": Dispatch (Takes::Widened, Scratch::None),
        DispatchGradF32 = "dispatch_grad_f32": DispatchGrad (Takes::Widened, Scratch::None),
        DropoutF32 = "dropout_f32": Dropout (Takes::Widened, Scratch::None),
        EmaF32 = "ema_f32": Ema (Takes::Native, Scratch::None),
        EmbedF32 = "gather_f32": Embed (Takes::WidenedF16, Scratch::None),
        EmbedBf16 = "gather_bf16": Embed (Takes::Bf16, Scratch::None),
        EmbedGradF32 = "embed_grad_f32": EmbedGrad (Takes::Widened, Scratch::None),
        GeluF32 = "gelu_erf_f32": Gelu (Takes::WidenedF16, Scratch::None),
        GeluBf16 = "gelu_erf_bf16": Gelu (Takes::Bf16, Scratch::None),
        GeluGradF32 = "gelu_grad_f32": GeluGrad (Takes::Widened, Scratch::None),
        GluF32 = "geglu_f32": Glu (Takes::WidenedF16, Scratch::None),
        GluBf16 = "geglu_bf16": Glu (Takes::Bf16, Scratch::None),
        GluGradF32 = "glu_grad_f32": GluGrad (Takes::Widened, Scratch::None),
        GradScaleF32 = "grad_scale_f32": GradScale (Takes::Native, Scratch::None),
        GroupedLinearF32 = "grouped_linear_f32": GroupedLinear (Takes::Widened, Scratch::Product),
        GroupedLinearInputGradF32 = "grouped_linear_input_grad_f32": GroupedLinearInputGrad (Takes::Widened, Scratch::Product),
        GroupedLinearWeightGradF32 = "grouped_linear_weight_grad_f32": GroupedLinearWeightGrad (Takes::Widened, Scratch::Product),
        KlDivergenceF32 = "kl_divergence_f32": KlDivergence (Takes::Widened, Scratch::None),
        KlDivergenceGradF32 = "kl_divergence_grad_f32": KlDivergenceGrad (Takes::Widened, Scratch::None),
        LayerNormF32 = "layer_norm_f32": LayerNorm (Takes::WidenedF16, Scratch::None),
        LayerNormBf16 = "layer_norm_bf16": LayerNorm (Takes::Bf16, Scratch::None),
        LayerNormGradF32 = "layer_norm_grad_f32": LayerNormGrad (Takes::Widened, Scratch::None),
        GemmF32 = "gemm_f32": Linear (Takes::Panels, Scratch::Gemm),
        GemmBf16 = "gemm_bf16": Linear (Takes::Tiles, Scratch::Tiles),
        GemmInt8 = "gemm_int8": Linear (Takes::Quantized, Scratch::Tiles),
        ProductF32 = "product_f32": Linear (Takes::Widened, Scratch::Product),
        LinearCrossEntropyF32 = "linear_cross_entropy_f32": LinearCrossEntropy (Takes::Widened, Scratch::Loss),
        LinearCrossEntropyGradF32 = "linear_cross_entropy_grad_f32": LinearCrossEntropyGrad (Takes::Widened, Scratch::Loss),
        LinearInputGradF32 = "linear_input_grad_f32": LinearInputGrad (Takes::Widened, Scratch::Product),
        LinearWeightGradF32 = "linear_weight_grad_f32": LinearWeightGrad (Takes::Widened, Scratch::Product),
        QuantizeF32 = "quantize_f32": Quantize (Takes::WidenedF16, Scratch::Columns),
        QuantizeBf16 = "quantize_bf16": Quantize (Takes::Bf16, Scratch::Columns),
        ReluF32 = "relu_f32": Relu (Takes::WidenedF16, Scratch::None),
        ReluBf16 = "relu_bf16": Relu (Takes::Bf16, Scratch::None),
        ReluGradF32 = "relu_grad_f32": ReluGrad (Takes::Widened, Scratch::None),
        RmsNormF32 = "rms_norm_f32": RmsNorm (Takes::WidenedF16, Scratch::None),
        RmsNormBf16 = "rms_norm_bf16": RmsNorm (Takes::Bf16, Scratch::None),
        RmsNormGradF32 = "rms_norm_grad_f32": RmsNormGrad (Takes::Widened, Scratch::None),
        RotaryTableF32 = "rotary_table_f32": RotaryTable (Takes::Widened, Scratch::None),
        RouteF32 = "route_f32": Route (Takes::Widened, Scratch::Experts),
        RouteGradF32 = "route_grad_f32": RouteGrad (Takes::Widened, Scratch::None),
        RouterLossF32 = "router_loss_f32": RouterLoss (Takes::Widened, Scratch::Rows),
        RouterLossGradF32 = "router_loss_grad_f32": RouterLossGrad (Takes::Widened, Scratch::Shares),
        ScaleF32 = "scale_f32": Scale (Takes::WidenedF16, Scratch::None),
        ScaleBf16 = "scale_bf16": Scale (Takes::Bf16, Scratch::None),
        SegmentMeanF32 = "segment_mean_f32": SegmentMean (Takes::WidenedF16, Scratch::None),
        SegmentMeanBf16 = "segment_mean_bf16": SegmentMean (Takes::Bf16, Scratch::None),
        SegmentMeanGradF32 = "segment_mean_grad_f32": SegmentMeanGrad (Takes::Widened, Scratch::None),
        SelectRowsF32 = "gather_f32": SelectRows (Takes::WidenedF16, Scratch::None),
        SelectRowsBf16 = "gather_bf16": SelectRows (Takes::Bf16, Scratch::None),
        SelectRowsGradF32 = "select_rows_grad_f32": SelectRowsGrad (Takes::Widened, Scratch::None),
        SgdF32 = "sgd_f32": Sgd (Takes::Native, Scratch::None),
        SoftmaxF32 = "softmax_f32": Softmax (Takes::Widened, Scratch::None),
        SoftmaxGradF32 = "softmax_grad_f32": SoftmaxGrad (Takes::Widened, Scratch::None),
    }
}

/// Element types of the floating-point inputs of a kernel, how 16-bit inputs are read, and the layout of
/// weights.
#[derive(Clone, Copy)]
enum Takes {
    /// f32, bf16 and f16; 16-bit operands are converted to f32 copies.
    Widened,
    /// f32 and f16; f16 operands are converted to f32 copies, and bf16 has a separate kernel.
    WidenedF16,
    /// f32, bf16 and f16, read directly. Used by ops at the end of a step that read all gradients: f32 copies
    /// of these would cost as much memory as 16 bits save.
    Native,
    /// bf16, read directly, with f32 norm parameters, tables and statistics.
    Bf16,
    /// f32 only, with the weight in panels.
    Panels,
    /// bf16 only, with the weight in tiles.
    Tiles,
    /// 8-bit integers with their scales, and bf16, with a quantized weight in tiles.
    Quantized,
}

/// Workspace of a kernel, excluding f32 copies of operands.
#[derive(Clone, Copy)]
enum Scratch {
    None,
    /// Per worker: workspace of an f32 matmul with packed weights.
    Gemm,
    /// Per worker: workspace of a matmul with weights in tiles.
    Tiles,
    /// Per worker: workspace of a matmul whose operands both change in every step.
    Product,
    /// As `Product`, followed by the logits of a chunk of rows.
    Loss,
    /// Per worker: workspace of attention.
    Flash,
    /// Per worker: workspace of the gradient of attention.
    FlashGrad,
    /// Per worker: one word per column of the output.
    Columns,
    /// Per worker and per pack: two words per expert.
    Experts,
    /// Shared by all workers: one word per pack and expert.
    Shares,
    /// Shared by all workers: two words per row.
    Rows,
}

/// Rows of the weight panels that f32 matmuls read; each panel is K x 32.
const PANEL: u32 = 32;

/// Rows of a panel of tiles, and columns of a step, for bf16 matmuls on matrix units. For each step a panel
/// holds two tiles of 16 rows; line j of a tile holds columns 2j and 2j + 1 of its rows, row after row.
pub const TILE_STEP: u32 = 32;

/// Columns of a step of 8-bit matmuls: line j of a tile holds columns 4j to 4j + 3 of its rows.
pub const INT8_STEP: u32 = 64;

/// Maximum columns of x of a matmul that computes a gated linear unit.
pub const LONGEST_GATED: u64 = 1024;

/// Layout of bf16 weights in tiles.
const TILES: Layout = Layout::Packed { rows: TILE_STEP, columns: TILE_STEP };

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

    pub(super) fn dtypes(self) -> &'static [DType] {
        match self.row().0 {
            Takes::Widened | Takes::Native => &[DType::F32, DType::Bf16, DType::F16],
            Takes::WidenedF16 => &[DType::F32, DType::F16],
            Takes::Panels => &[DType::F32],
            Takes::Tiles => &[DType::Bf16],
            Takes::Bf16 => &[DType::Bf16, DType::F32],
            Takes::Quantized => &[DType::I8, DType::Bf16],
        }
    }

    /// Whether the kernel converts 16-bit operands to f32 copies.
    pub fn widens(self) -> bool {
        match self.row().0 {
            Takes::Widened | Takes::WidenedF16 => true,
            Takes::Native | Takes::Bf16 | Takes::Panels | Takes::Tiles | Takes::Quantized => false,
        }
    }

    pub(super) fn weights(self) -> Layout {
        match self.row().0 {
            Takes::Panels => Layout::Packed { rows: PANEL, columns: 1 },
            Takes::Tiles => TILES,
            Takes::Quantized => Layout::Packed { rows: TILE_STEP, columns: INT8_STEP },
            Takes::Widened | Takes::WidenedF16 | Takes::Native | Takes::Bf16 => Layout::RowMajor,
        }
    }

    /// Whether the kernel accepts a node's op, attributes and weights; the element types of the inputs are
    /// checked separately.
    pub(super) fn accepts(self, set: InstructionSet, graph: &Graph, node: &Node) -> bool {
        let weights = || node.op.weights().iter().map(|&i| graph.spec(node.inputs[i]).dtype);
        let in_tiles = self.weights() != TILES || weights().all(|dtype| dtype == DType::Bf16);
        self.op() == node.op.kind() && in_tiles && has(&node.op) && self.has_gate(set, graph, node)
    }

    /// Whether the kernel computes the gated linear unit after a matmul, if the node has one.
    fn has_gate(self, set: InstructionSet, graph: &Graph, node: &Node) -> bool {
        let Op::Linear(op) = &node.op else { return true };
        if op.epilogue.gate().is_none() {
            return true;
        }
        let y = node.outputs[0].map_or(0, |y| graph.spec(y).row_elements());
        gates(set).is_some_and(|gates| {
            columns(graph, node, 0) <= gates.longest
                && y.is_multiple_of(gates.multiple)
                && self.weights() == TILES
        })
    }

    /// Workspace in bytes on `workers` workers. Each worker's part starts on its own cache line; the shared
    /// part follows them.
    pub(super) fn workspace(self, set: InstructionSet, graph: &Graph, node: &Node, workers: u64) -> Bytes {
        let each = |bytes: u64| Bytes(bytes).align_up(64) * workers;
        let word = DType::F32.size();
        match self.row().1 {
            Scratch::None => Bytes::ZERO,
            Scratch::Gemm => each(set.gemm_f32()),
            Scratch::Tiles => each(GEMM_TILES),
            Scratch::Product => each(PRODUCT),
            Scratch::Loss => each(PRODUCT) + Bytes(logits(graph, node)) * word,
            Scratch::Flash => each(flash_bytes(head_dim(&node.op)) as u64),
            Scratch::FlashGrad => each(flash_grad_bytes(head_dim(&node.op)) as u64),
            Scratch::Columns => each(word * output_columns(graph, node)),
            Scratch::Experts => {
                // Without a capacity there is no input `packs`, and all tokens count as one pack.
                let packs = if node.inputs.len() > 1 { rows(graph, node, 1) } else { 1 };
                Bytes(word * columns(graph, node, 0)).align_up(64) * (2 * (workers + packs))
            }
            Scratch::Shares => Bytes(word * columns(graph, node, 1) * rows(graph, node, 3)),
            Scratch::Rows => Bytes(rows(graph, node, 0)) * (2 * word),
        }
    }
}

/// The gated linear units that matmuls in tiles compute with these instructions: AMX tiles leave the vector units time
/// for them. The gate and the value of a column are in panels of equal position, and no sum is stored between slices of
/// K, which is at most `LONGEST_GATED`.
pub(super) fn gates(set: InstructionSet) -> Option<GateFusion> {
    let gates = GateFusion {
        dtypes: &[DType::Bf16],
        silu: true,
        bias: true,
        longest: LONGEST_GATED,
        multiple: u64::from(TILE_STEP),
    };
    match set {
        InstructionSet::Amx => Some(gates),
        InstructionSet::Portable | InstructionSet::Avx2 | InstructionSet::Avx512 => None,
    }
}

/// Whether CPU kernels implement an op with these attributes, of a linear except its gate.
fn has(op: &Op) -> bool {
    let narrow = |op: &Attention| op.heads <= MAX_HEADS && op.head_dim <= WIDEST_HEAD;
    if op.is_tf32() {
        // TF32 is specific to GPUs.
        false
    } else if let Op::Linear(op) = op {
        // CPUs do not fuse a preceding norm.
        op.prologue == Prologue::None
    } else if let Op::Attention(op) = op {
        narrow(op)
    } else if let Op::AttentionGrad(op) = op {
        narrow(&op.forward)
    } else if let Op::Quantize(op) = op {
        // CPUs quantize to 8-bit integers only.
        op.to == DType::I8
    } else {
        true
    }
}

/// Columns of a head of attention or of its gradient; 0 for other ops.
fn head_dim(op: &Op) -> usize {
    let head_dim = if let Op::AttentionGrad(op) = op {
        op.forward.head_dim
    } else if let Op::Attention(op) = op {
        op.head_dim
    } else {
        0
    };
    head_dim as usize
}

/// Number of 4-byte words for a chunk of logits of a cross-entropy or its gradient. The gradient has the
/// gradient of the loss as an additional first input.
fn logits(graph: &Graph, node: &Node) -> u64 {
    let (most, x) = if let Op::LinearCrossEntropyGrad(op) = &node.op {
        (op.forward.chunk, 1)
    } else if let Op::LinearCrossEntropy(op) = &node.op {
        (op.chunk, 0)
    } else {
        return 0;
    };
    let chunk = u64::from(most).min(rows(graph, node, x));
    chunk_words(chunk, columns(graph, node, x), rows(graph, node, x + 1))
}
