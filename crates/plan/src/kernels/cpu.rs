//! Kernels of CPUs. Invariant: a workspace holds what the kernel's own sizes ask for, which the crate of the kernels asserts
//! when it is compiled.

use super::{WIDEST_HEAD, chunk_words, columns, output_columns, rows, table};
use graph::ops::{Attention, Epilogue, Prologue};
use graph::{Bytes, DType, Graph, Layout, Node, Op};
use serde::{Deserialize, Serialize};

/// The vector instructions that kernels use, the least first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum InstructionSet {
    /// What every CPU has.
    Portable,
    /// AVX2 and FMA.
    Avx2,
    /// AVX-512.
    Avx512,
    /// AVX-512, and products on the tiles of AMX.
    Amx,
}

table! {
    /// A kernel of CPUs.
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
        DispatchF32 = "dispatch_f32": Dispatch (Takes::Widened, Scratch::None),
        DispatchGradF32 = "dispatch_grad_f32": DispatchGrad (Takes::Widened, Scratch::None),
        DropoutF32 = "dropout_f32": Dropout (Takes::Widened, Scratch::None),
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
        LayerNormF32 = "layer_norm_f32": LayerNorm (Takes::WidenedF16, Scratch::None),
        LayerNormBf16 = "layer_norm_bf16": LayerNorm (Takes::Bf16, Scratch::None),
        LayerNormGradF32 = "layer_norm_grad_f32": LayerNormGrad (Takes::Widened, Scratch::None),
        GemmF32 = "gemm_f32": Linear (Takes::Panels, Scratch::Gemm),
        GemmBf16 = "gemm_bf16": Linear (Takes::Tiles, Scratch::Tiles),
        GemmInt8 = "gemm_int8": Linear (Takes::Codes, Scratch::Tiles),
        ProductF32 = "product_f32": Linear (Takes::Widened, Scratch::Product),
        LinearCrossEntropyF32 = "linear_cross_entropy_f32": LinearCrossEntropy (Takes::Widened, Scratch::Loss),
        LinearCrossEntropyGradF32 = "linear_cross_entropy_grad_f32": LinearCrossEntropyGrad (Takes::Widened, Scratch::Loss),
        LinearInputGradF32 = "linear_input_grad_f32": LinearInputGrad (Takes::Widened, Scratch::Product),
        LinearWeightGradF32 = "linear_weight_grad_f32": LinearWeightGrad (Takes::Widened, Scratch::Product),
        MlpBf16 = "mlp_bf16": Mlp (Takes::Mlp, Scratch::Mlp),
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
        RouterLossGradF32 = "router_loss_grad_f32": RouterLossGrad (Takes::Widened, Scratch::Columns),
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

/// Which element types the floating-point inputs of a kernel may have, how those of 16 bits are read, and how weights lie.
#[derive(Clone, Copy)]
enum Takes {
    /// All, those of 16 bits through f32 copies of every operand.
    Widened,
    /// The same but for bf16, for which the op has another kernel.
    WidenedF16,
    /// All as they lie. What ends a step reads gradients so: an f32 copy of all of them would cost what they save.
    Native,
    /// bf16 as it lies, beside parameters of norms, tables and statistics, which stay f32.
    Bf16,
    /// The same, with weights of bf16 in tiles.
    Mlp,
    /// f32 alone, with a weight in panels.
    Panels,
    /// bf16 alone, with a weight in tiles.
    Tiles,
    /// Integers with their scales beside bf16, with a weight of them in tiles.
    Codes,
}

/// The workspace of a kernel beside f32 copies of operands.
#[derive(Clone, Copy)]
enum Scratch {
    None,
    /// For each worker what a product with packed weights of f32 takes.
    Gemm,
    /// For each worker what a product with weights in tiles takes.
    Tiles,
    /// For each worker what a product takes whose factors change in every step.
    Product,
    /// The same, and behind them the logits of a chunk of rows.
    Loss,
    /// For each worker what an MLP takes.
    Mlp,
    /// For each worker what attention takes.
    Flash,
    /// For each worker what the gradient of attention takes.
    FlashGrad,
    /// For each worker a word for each column of the output.
    Columns,
    /// For each worker a word for each expert.
    Experts,
    /// Two words for each row.
    Rows,
}

/// Rows of the panels that products of f32 stream: each panel is K x 32.
const PANEL: u32 = 32;

/// Rows of a panel of tiles, and columns of a step: what products of bf16 on tiles of matrix units stream. A panel holds, for
/// each step, two tiles of 16 rows; line j of a tile holds columns 2j and 2j + 1 of its rows, row after row.
pub const TILE_STEP: u32 = 32;

/// Columns of a step of products of 8 bits: line j of a tile holds columns 4j to 4j + 3 of its rows.
pub const CODES_STEP: u32 = 64;

/// Weights of bf16 in tiles.
const TILES: Layout = Layout::Packed { rows: TILE_STEP, columns: TILE_STEP };

/// Most heads of attention.
pub const MOST_HEADS: u32 = 128;

/// Bytes of workspace of each worker for a product of f32 with packed weights; on tiles the factors are split in three.
const GEMM_F32: u64 = 698_880;
const GEMM_F32_TILES: u64 = 1_499_136;

/// The same for weights in tiles.
const GEMM_TILES: u64 = 797_184;

/// The same for a product whose factors change in every step.
const PRODUCT: u64 = 932_352;

/// The same for an MLP. What is for each column of its widest layer holds a strip of tiles, or the tallest tile of lanes; the
/// rest makes blocks of rows higher.
const MLP: u64 = 1120 << 10;
const MLP_COLUMN: u64 = 128;

/// Bytes of workspace of each worker for attention with heads of so many columns: keys, values and sums for each column; and
/// queries, scores, and what rounding up the columns takes. That the parts fit for every width is a test of the kernel.
pub const fn flash_bytes(head_dim: usize) -> usize {
    (180_288 + 2432 * head_dim).next_multiple_of(64)
}

/// The same for the gradient of attention: sums of keys and of values, their panels and those of a block of queries for each
/// column; and what has a fixed width.
pub const fn flash_grad_bytes(head_dim: usize) -> usize {
    (564_312 + 4520 * head_dim).next_multiple_of(64)
}

impl InstructionSet {
    /// The name in target files.
    pub fn name(self) -> &'static str {
        match self {
            Self::Portable => "portable",
            Self::Avx2 => "avx2",
            Self::Avx512 => "avx512",
            Self::Amx => "amx",
        }
    }

    /// Bytes of workspace of each worker for a product of f32 with packed weights.
    pub const fn gemm_f32(self) -> u64 {
        match self {
            Self::Amx => GEMM_F32_TILES,
            Self::Portable | Self::Avx2 | Self::Avx512 => GEMM_F32,
        }
    }
}

impl CpuKernel {
    /// Bytes of workspace of each worker for products whose factors change in every step.
    pub const PRODUCT_BYTES: u64 = PRODUCT;

    /// The same for products of 16 and of 8 bits with weights in tiles.
    pub const TILES_BYTES: u64 = GEMM_TILES;

    /// The same for an MLP whose widest layer has so many columns.
    pub const fn mlp_bytes(columns: u64) -> u64 {
        MLP + MLP_COLUMN * columns
    }

    pub(super) fn dtypes(self) -> &'static [DType] {
        match self.row().0 {
            Takes::Widened | Takes::Native => &[DType::F32, DType::Bf16, DType::F16],
            Takes::WidenedF16 => &[DType::F32, DType::F16],
            Takes::Panels => &[DType::F32],
            Takes::Tiles => &[DType::Bf16],
            Takes::Bf16 | Takes::Mlp => &[DType::Bf16, DType::F32],
            Takes::Codes => &[DType::I8, DType::Bf16],
        }
    }

    /// Whether it works on f32 copies of operands of 16 bits.
    pub fn widens(self) -> bool {
        match self.row().0 {
            Takes::Widened | Takes::WidenedF16 => true,
            Takes::Native | Takes::Bf16 | Takes::Mlp | Takes::Panels | Takes::Tiles | Takes::Codes => false,
        }
    }

    pub(super) fn weights(self) -> Layout {
        match self.row().0 {
            Takes::Panels => Layout::Packed { rows: PANEL, columns: 1 },
            Takes::Tiles | Takes::Mlp => TILES,
            Takes::Codes => Layout::Packed { rows: TILE_STEP, columns: CODES_STEP },
            Takes::Widened | Takes::WidenedF16 | Takes::Native | Takes::Bf16 => Layout::RowMajor,
        }
    }

    /// Whether it accepts a node, as far as op, attributes and weights tell; the element types of inputs are checked apart.
    pub(super) fn accepts(self, graph: &Graph, node: &Node) -> bool {
        let weights = || node.op.weights().iter().map(|&i| graph.spec(node.inputs[i]).dtype);
        let in_tiles = self.weights() != TILES || weights().all(|dtype| dtype == DType::Bf16);
        self.op() == node.op.kind() && in_tiles && has(&node.op)
    }

    /// Bytes on so many workers; each starts on a cache line of its own, and what all share stands behind them.
    pub(super) fn workspace(self, set: InstructionSet, graph: &Graph, node: &Node, workers: u64) -> Bytes {
        let each = |bytes: u64| Bytes(Bytes(bytes).align_up(64).0 * workers);
        let word = DType::F32.size();
        match self.row().1 {
            Scratch::None => Bytes::ZERO,
            Scratch::Gemm => each(set.gemm_f32()),
            Scratch::Tiles => each(GEMM_TILES),
            Scratch::Product => each(PRODUCT),
            Scratch::Loss => each(PRODUCT) + Bytes(word * logits(graph, node)),
            Scratch::Mlp => {
                // The second weight has the hidden layer as its columns.
                let hidden = node.op.weights().last().map_or(0, |&i| columns(graph, node, i));
                each(Self::mlp_bytes(columns(graph, node, 0).max(hidden).max(output_columns(graph, node))))
            }
            Scratch::Flash => each(flash_bytes(head_dim(&node.op)) as u64),
            Scratch::FlashGrad => each(flash_grad_bytes(head_dim(&node.op)) as u64),
            Scratch::Columns => each(word * output_columns(graph, node)),
            Scratch::Experts => each(word * columns(graph, node, 0)),
            Scratch::Rows => Bytes(2 * word * rows(graph, node, 0)),
        }
    }
}

/// Whether CPUs have an op with these attributes.
fn has(op: &Op) -> bool {
    let narrow = |op: &Attention| op.heads <= MOST_HEADS && op.head_dim <= WIDEST_HEAD;
    if let Op::Linear(op) = op {
        // Nothing in front of products or gated behind them, and no TF32, which is of GPUs.
        !op.tf32 && op.prologue == Prologue::None && op.epilogue != Epilogue::Gate
    } else if let Op::Attention(op) = op {
        narrow(op)
    } else if let Op::AttentionGrad(op) = op {
        narrow(&op.forward)
    } else if let Op::Quantize(op) = op {
        // The codes of CPUs are integers.
        op.to == DType::I8
    } else {
        true
    }
}

/// Columns of a head of attention or of its gradient.
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

/// Words of a chunk of logits of a cross-entropy, or of its gradient, which has the gradient of the loss in front of its
/// inputs.
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
