//! Kernel table of NVIDIA GPUs. Invariant: the accepted ops depend on the compute capability only, so a plan
//! for a GPU can be made on any machine.
#![expect(
    clippy::arithmetic_side_effects,
    reason = "sizes of tensors within the limits of graphs, times constants"
)]

use super::{Fusions, GateFusion, KernelRow, NodeContext, table};
use plimsoll_graph::ops::{
    Attention, AttentionGrad, EmbedGrad, Epilogue, Linear, LinearCrossEntropy, LinearWeightGrad, OperandFormat,
    Prologue, RmsNormGrad, Route,
};
use plimsoll_graph::{Bytes, Counts, DType, Layout};
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
    CudaKernel {
        Accumulate = "accumulate": Accumulate KernelRow::PLAIN,
        Adafactor = "adafactor": Adafactor KernelRow { workspace: |_, cx| adafactor_bytes(cx), ..KernelRow::PLAIN },
        AdamW = "adamw": AdamW KernelRow::PLAIN,
        AdamW8bit = "adamw_8bit": AdamW8bit KernelRow::PLAIN,
        Add = "rows": Add KernelRow::PLAIN,
        Flash = "flash": Attention KernelRow { accepts: |op, _| op.head_dim <= WIDEST_HEAD, ..KernelRow::PLAIN },
        FlashGrad = "flash_grad": AttentionGrad KernelRow {
            accepts: |op, _| op.forward.head_dim <= WIDEST_HEAD,
            workspace: flash_grad_bytes,
            ..KernelRow::PLAIN
        },
        BatchNorm = "rows": BatchNorm KernelRow::PLAIN,
        BatchNormGrad = "batch_norm_grad": BatchNormGrad KernelRow {
            workspace: |_, cx| column_sums_of(cx, 2, 0),
            ..KernelRow::PLAIN
        },
        BatchNormTrain = "batch_norm_train": BatchNormTrain KernelRow {
            workspace: |_, cx| column_sums_of(cx, 1, 2),
            ..KernelRow::PLAIN
        },
        BatchNormTrainGrad = "batch_norm_train_grad": BatchNormTrainGrad KernelRow {
            // The rows of dx need the finished sums.
            workspace: |_, cx| column_sums_of(cx, 2, 2),
            ..KernelRow::PLAIN
        },
        Cast = "rows": Cast KernelRow::PLAIN,
        Combine = "combine": Combine KernelRow::PLAIN,
        CombineGrad = "combine_grad": CombineGrad KernelRow::PLAIN,
        Concat = "rows": Concat KernelRow::PLAIN,
        ConcatGrad = "concat_grad": ConcatGrad KernelRow::PLAIN,
        CountSteps = "count_steps": CountSteps KernelRow::PLAIN,
        Dispatch = "dispatch": Dispatch KernelRow::PLAIN,
        DispatchGrad = "dispatch_grad": DispatchGrad KernelRow::PLAIN,
        Dropout = "dropout": Dropout KernelRow::PLAIN,
        Ema = "ema": Ema KernelRow::PLAIN,
        Embed = "rows": Embed KernelRow::PLAIN,
        EmbedGrad = "embed_grad": EmbedGrad KernelRow { workspace: embed_grad_bytes, ..KernelRow::PLAIN },
        Gelu = "rows": Gelu KernelRow::PLAIN,
        GeluGrad = "gelu_grad": GeluGrad KernelRow::PLAIN,
        Glu = "rows": Glu KernelRow::PLAIN,
        GluGrad = "glu_grad": GluGrad KernelRow::PLAIN,
        GradScale = "grad_scale": GradScale KernelRow { workspace: |_, cx| grad_scale_bytes(cx), ..KernelRow::PLAIN },
        GroupedGemm = "grouped_gemm": GroupedLinear KernelRow::PLAIN,
        GroupedGemmInputGrad = "grouped_gemm_input_grad": GroupedLinearInputGrad KernelRow::PLAIN,
        GroupedGemmWeightGrad = "grouped_gemm_weight_grad": GroupedLinearWeightGrad KernelRow::PLAIN,
        KlDivergence = "kl_divergence": KlDivergence KernelRow::PLAIN,
        KlDivergenceGrad = "kl_divergence_grad": KlDivergenceGrad KernelRow::PLAIN,
        LayerNorm = "rows": LayerNorm KernelRow::PLAIN,
        LayerNormGrad = "layer_norm_grad": LayerNormGrad KernelRow {
            workspace: |_, cx| column_sums_of(cx, 2, 0),
            ..KernelRow::PLAIN
        },
        Gemm = "gemm": Linear KernelRow {
            accepts: |op, cx| has_one_dtype(cx) && op.epilogue != Epilogue::SiluGate,
            workspace: |_, _| GEMM,
            fusions: |kernels| gemm_fusions(kernels.capability()),
            ..KernelRow::PLAIN
        },
        GemmFp8 = "gemm": Linear KernelRow {
            dtypes: &[DType::F8, DType::Bf16],
            weights: Layout::Scaled,
            accepts: accepts_fp8,
            workspace: |_, _| GEMM,
            ..KernelRow::PLAIN
        },
        LinearCrossEntropy = "linear_cross_entropy": LinearCrossEntropy KernelRow {
            workspace: |op, cx| total(&LossSizes::of(op, cx, 0).loss_parts()),
            ..KernelRow::PLAIN
        },
        LinearCrossEntropyGrad = "linear_cross_entropy_grad": LinearCrossEntropyGrad KernelRow {
            // The gradient of the loss precedes the rows.
            workspace: |op, cx| total(&LossSizes::of(&op.forward, cx, 1).grad_parts()),
            ..KernelRow::PLAIN
        },
        GemmInputGrad = "gemm_input_grad": LinearInputGrad KernelRow {
            accepts: |_, cx| has_one_dtype(cx),
            workspace: |_, cx| gemm_input_grad_bytes(cx),
            ..KernelRow::PLAIN
        },
        GemmWeightGrad = "gemm_weight_grad": LinearWeightGrad KernelRow {
            accepts: |_, cx| has_one_dtype(cx),
            workspace: gemm_weight_grad_bytes,
            ..KernelRow::PLAIN
        },
        Quantize = "rows": Quantize KernelRow {
            accepts: |op, cx| op.to == DType::F8 && cx.kernels.capability() >= Capability::FP8,
            ..KernelRow::PLAIN
        },
        Relu = "rows": Relu KernelRow::PLAIN,
        ReluGrad = "relu_grad": ReluGrad KernelRow::PLAIN,
        RmsNorm = "rms_norm": RmsNorm KernelRow::PLAIN,
        RmsNormGrad = "rms_norm_grad": RmsNormGrad KernelRow { workspace: rms_norm_grad_bytes, ..KernelRow::PLAIN },
        RotaryTable = "sequence": RotaryTable KernelRow::PLAIN,
        Route = "route": Route KernelRow {
            accepts: |op, _| op.experts <= MAX_EXPERTS,
            workspace: route_workspace,
            ..KernelRow::PLAIN
        },
        RouteGrad = "route_grad": RouteGrad KernelRow::PLAIN,
        RouterLoss = "router_loss": RouterLoss KernelRow {
            workspace: |_, cx| router_loss_bytes(router_counts(cx, 0), cx.columns(0)).bytes(),
            ..KernelRow::PLAIN
        },
        RouterLossGrad = "router_loss_grad": RouterLossGrad KernelRow {
            // The gradient of the loss precedes the logits.
            workspace: |_, cx| router_loss_grad_bytes(router_counts(cx, 1), cx.columns(1)).bytes(),
            ..KernelRow::PLAIN
        },
        Scale = "scale": Scale KernelRow::PLAIN,
        SegmentMean = "sequence": SegmentMean KernelRow::PLAIN,
        SegmentMeanGrad = "segment_mean_grad": SegmentMeanGrad KernelRow::PLAIN,
        SelectRows = "rows": SelectRows KernelRow::PLAIN,
        SelectRowsGrad = "select_rows_grad": SelectRowsGrad KernelRow {
            workspace: |_, cx| select_rows_grad_bytes(cx),
            ..KernelRow::PLAIN
        },
        Sgd = "sgd": Sgd KernelRow::PLAIN,
        Softmax = "rows": Softmax KernelRow::PLAIN,
        SoftmaxGrad = "softmax_grad": SoftmaxGrad KernelRow::PLAIN,
    }
}

/// Maximum columns of an attention head: the sums of 16 rows of a wider one do not fit into a warp's registers.
pub const WIDEST_HEAD: u32 = 256;

/// Widest rows for which Hopper's matmul fuses a preceding layer norm. Measured on an H200: with 640 columns a
/// separate norm is as fast.
const WIDEST_NORM: u64 = 480;

/// Workspace of a matmul in bytes, reserved for the algorithms of cuBLASLt.
const GEMM: Bytes = Bytes(32 << 20);

/// Fusions of the matmul.
fn gemm_fusions(capability: Capability) -> Fusions {
    let hopper = capability == Capability::HOPPER;
    // Rows of y are multiples of 16 bytes, as TMA requires of strides.
    let gates = GateFusion {
        dtypes: &[DType::Bf16, DType::F16],
        silu: false,
        bias: false,
        max_columns: u64::MAX,
        multiple: 8,
    };
    Fusions { fuse_gates: hopper.then_some(gates), fuse_norms: if hopper { WIDEST_NORM } else { 0 } }
}

/// Whether the factors of a matmul, its first two inputs, have one element type.
fn has_one_dtype(cx: &NodeContext<'_>) -> bool {
    matches!(cx.node.inputs[..], [a, b, ..] if cx.graph.spec(a).dtype == cx.graph.spec(b).dtype)
}

/// Whether the matmul of e4m3 values computes a linear: it fuses neither a norm nor a gate.
fn accepts_fp8(op: &Linear, cx: &NodeContext<'_>) -> bool {
    let plain = op.epilogue.gate().is_none() && op.prologue == Prologue::None;
    op.operands == OperandFormat::E4m3 && plain && cx.kernels.capability() >= Capability::FP8
}

/// Rows of which a kernel writes one partial sum, where it sums the columns of a matrix.
pub const SUM_ROWS: u64 = 32;
/// Rows of which a kernel writes at most two partial sums, where it sums rows of a matrix by an index.
pub const RUN_ROWS: u64 = 64;
/// Keys that a block of the radix sort of row indices processes.
pub const SORT_CHUNK: u64 = 1024;

/// Sizes in bytes of the parts of the workspace of sums over `rows` rows of `columns` columns: `sums` partial sums
/// of every column, and `vectors` finished sums in f32.
pub fn column_sums_parts(rows: u64, columns: u64, sums: u64, vectors: u64) -> [Bytes; 2] {
    let words = [rows.div_ceil(SUM_ROWS) * sums * columns, vectors * columns];
    words.map(|words| Bytes(4 * words).align_up(256))
}

/// Sizes in bytes of the parts of the workspace of sums by index, of `rows` rows of `columns` columns into a table of
/// `limit` rows: keys and positions, each before and after a pass of the sort; digit counts of every chunk; first
/// position of each row of the table; scales of the rows; partial sums.
pub fn indexed_sums_parts(rows: u64, columns: u64, limit: u64) -> [Bytes; 8] {
    let counts = 256 * rows.div_ceil(SORT_CHUNK);
    let partials = rows.div_ceil(RUN_ROWS) * 2 * columns;
    [rows, rows, rows, rows, counts, limit + 1, rows, partials].map(|words| Bytes(4 * words).align_up(256))
}

/// Workspace of `sums` sums over the rows of the first input and `vectors` finished sums, as in
/// [`column_sums_parts`].
fn column_sums_of(cx: &NodeContext<'_>, sums: u64, vectors: u64) -> Bytes {
    column_sums_parts(cx.rows(0), cx.columns(0), sums, vectors).into_iter().sum()
}

/// Workspace of sums by index of the rows of the first input into a table of `limit` rows.
fn indexed_sums_of(cx: &NodeContext<'_>, limit: u64) -> Bytes {
    indexed_sums_parts(cx.rows(0), cx.columns(0), limit).into_iter().sum()
}

/// Workspace of the gradient of an embedding: sums by token, and with an added row one sum of all rows.
fn embed_grad_bytes(op: &EmbedGrad, cx: &NodeContext<'_>) -> Bytes {
    let row = if op.row { column_sums_of(cx, 1, 0) } else { Bytes::ZERO };
    indexed_sums_of(cx, op.vocab) + row
}

/// Workspace of the gradient of a selection of rows: sums by the rows of the output.
fn select_rows_grad_bytes(cx: &NodeContext<'_>) -> Bytes {
    let limit = cx.output().map_or(0, |table| table.rows(cx.graph.bounds.full()));
    indexed_sums_of(cx, limit)
}

/// Workspace of the gradient of an RMS norm, whose rows are those of single heads.
fn rms_norm_grad_bytes(op: &RmsNormGrad, cx: &NodeContext<'_>) -> Bytes {
    let heads = u64::from(op.heads);
    column_sums_parts(cx.rows(0) * heads, cx.columns(0) / heads, 2, 0).into_iter().sum()
}

/// Elements whose squares a block of threads adds before the partial sums are added in order.
pub const SQUARES: u64 = 1 << 16;

/// Rows of a gradient whose squares are added per column before the partial sums are added in order.
pub const ADAFACTOR_ROWS: u64 = 256;

/// Bytes of the partial sums in f64 of the squares of `elements` elements.
fn squares_bytes(elements: u64) -> u64 {
    8 * elements.div_ceil(SQUARES)
}

/// Workspace of the norm of all gradients, which are all inputs but the last.
fn grad_scale_bytes(cx: &NodeContext<'_>) -> Bytes {
    let gradients = 0..cx.node.inputs.len() - 1;
    Bytes(gradients.map(|input| squares_bytes(cx.elements(input))).sum())
}

/// Workspace of Adafactor: three numbers in 32 bytes, the squares of the update, and the squares of each column.
fn adafactor_bytes(cx: &NodeContext<'_>) -> Bytes {
    let is_vector = cx.input(0).shape.len() == 1;
    let rows = if is_vector { 1 } else { cx.rows(0) };
    let columns = if is_vector { cx.elements(0) } else { cx.columns(0) };
    Bytes(32 + squares_bytes(rows * columns) + 8 * rows.div_ceil(ADAFACTOR_ROWS) * columns)
}

/// Number of rows in a partial sum of columns.
pub const BIAS_ROWS: u64 = 128;
/// Largest number of rows of an operand that is transposed at a time for a product over rows by our own kernels.
pub const GRAD_ROWS: u64 = 4096;

/// Sum of the sizes of a workspace's parts, each aligned.
fn total(parts: &[Bytes]) -> Bytes {
    parts.iter().map(|part| part.align_up(WORKSPACE_ALIGN)).sum()
}

/// Alignment of every part of a workspace.
pub const WORKSPACE_ALIGN: u64 = 256;

/// Whether cuBLASLt computes the product over rows of two matrices with these columns: 16-bit elements, or f32 rounded to
/// TF32, and rows in multiples of 16 bytes.
pub fn library_sums_rows(dtype: DType, operands: OperandFormat, columns: [u64; 2]) -> bool {
    let on_tensor_cores = dtype.size() == 2 || operands == OperandFormat::Tf32;
    on_tensor_cores && columns.iter().all(|columns| (columns * dtype.size()).is_multiple_of(16))
}

/// Bytes of the partial sums of the columns of a matrix.
fn column_sums_bytes(rows: u64, columns: u64) -> Bytes {
    Bytes(rows.div_ceil(BIAS_ROWS) * columns * DType::F32.size())
}

/// Bytes of the transposes of two matrices with these columns, whose product is summed over `rows` rows, [`GRAD_ROWS`]
/// at a time; none if cuBLASLt computes it.
fn transposed_bytes(rows: u64, columns: [u64; 2], dtype: DType, operands: OperandFormat) -> [Bytes; 2] {
    let library = library_sums_rows(dtype, operands, columns);
    let padded = if library { 0 } else { rows.min(GRAD_ROWS).next_multiple_of(8) };
    columns.map(|columns| Bytes(columns * padded * dtype.size()))
}

/// Parts of the workspace of a matmul's input gradient, with w: (n, k): w transposed, and cuBLASLt's.
pub fn input_grad_parts(n: u64, k: u64, dtype: DType) -> [Bytes; 2] {
    [Bytes(n * k * dtype.size()), GEMM]
}

/// Parts of the workspace of a matmul's weight gradient, with dy: (rows, n) and x: (rows, k): dy and x transposed, dw
/// in f32, partial sums of db, and cuBLASLt's.
pub fn weight_grad_parts(rows: u64, n: u64, k: u64, dtype: DType, operands: OperandFormat) -> [Bytes; 5] {
    let library = library_sums_rows(dtype, operands, [n, k]);
    let [dy, x] = transposed_bytes(rows, [n, k], dtype, operands);
    let wide = if library || dtype == DType::F32 { 0 } else { n * k * DType::F32.size() };
    [dy, x, Bytes(wide), column_sums_bytes(rows, n), if library { GEMM } else { Bytes::ZERO }]
}

/// Sizes of an output projection with its loss.
#[derive(Clone, Copy, Debug)]
pub struct LossSizes {
    /// Number of rows.
    pub rows: u64,
    /// Columns of a row.
    pub k: u64,
    /// Number of classes.
    pub classes: u64,
    /// Number of rows whose logits are computed at a time.
    pub chunk: u64,
    /// Element type of the rows and of the weight.
    pub dtype: DType,
}

impl LossSizes {
    /// Sizes of a node whose rows are input `x`, followed by its weight.
    fn of(op: &LinearCrossEntropy, cx: &NodeContext<'_>, x: usize) -> Self {
        Self {
            rows: cx.rows(x),
            k: cx.columns(x),
            classes: cx.rows(x + 1),
            chunk: u64::from(op.chunk),
            dtype: cx.dtype(x),
        }
    }

    /// Number of rows of the largest chunk.
    pub fn chunk_rows(&self) -> u64 {
        self.chunk.min(self.rows)
    }

    /// Number of classes of a row of the logits' gradient, padded to whole 16 bytes.
    pub fn padded(&self) -> u64 {
        self.classes.next_multiple_of(8)
    }

    /// Parts of the workspace of the loss: the logits of a chunk, two numbers for each row, and cuBLASLt's.
    pub fn loss_parts(&self) -> [Bytes; 4] {
        let numbers = Bytes(self.rows * DType::F32.size());
        [self.logits(), numbers, numbers, GEMM]
    }

    /// Parts of the workspace of the loss's gradient: the logits of a chunk, their gradient, the rows of the chunk with
    /// zeros in those that do not count, w transposed, the transposes of the gradient and of the rows, dw and db in f32,
    /// partial sums of db, and cuBLASLt's.
    pub fn grad_parts(&self) -> [Bytes; 10] {
        let rows = self.chunk_rows();
        let padded = self.padded();
        let size = self.dtype.size();
        let [g, x] = transposed_bytes(rows, [padded, self.k], self.dtype, OperandFormat::Stored);
        let wide = if self.dtype == DType::F32 { 0 } else { padded * self.k * DType::F32.size() };
        [
            self.logits(),
            Bytes(rows * padded * size),
            Bytes(rows * self.k * size),
            Bytes(self.k * padded * size),
            g,
            x,
            Bytes(wide),
            Bytes(padded * DType::F32.size()),
            column_sums_bytes(rows, padded),
            GEMM,
        ]
    }

    fn logits(&self) -> Bytes {
        Bytes(self.chunk_rows() * self.classes * DType::F32.size())
    }
}

/// Workspace of a matmul's input gradient.
fn gemm_input_grad_bytes(cx: &NodeContext<'_>) -> Bytes {
    total(&input_grad_parts(cx.columns(0), cx.columns(1), cx.dtype(0)))
}

/// Workspace of a matmul's weight gradient.
fn gemm_weight_grad_bytes(op: &LinearWeightGrad, cx: &NodeContext<'_>) -> Bytes {
    total(&weight_grad_parts(cx.rows(0), cx.columns(0), cx.columns(1), cx.dtype(0), op.operands))
}

/// Workspace of the gradient of attention, whose second input is q or qkv.
fn flash_grad_bytes(op: &AttentionGrad, cx: &NodeContext<'_>) -> Bytes {
    flash_grad_parts(&op.forward, cx.rows(0), cx.dtype(1)).into_iter().sum()
}

/// Parts of the workspace of the gradient of attention in a step of `tokens` tokens: lse and delta of every row and head
/// in f32; with rotary embedding the rotated q and k; two counters of work items.
pub fn flash_grad_parts(op: &Attention, tokens: u64, dtype: DType) -> [Bytes; 4] {
    let stats = 2 * u64::from(op.heads) * DType::F32.size();
    let rotated_size = if op.rotary { dtype.size() } else { 0 };
    let rotated_q = op.width() * rotated_size;
    let rotated_k = op.kv_width() * rotated_size;
    let counters = 2 * DType::I32.size();
    [tokens * stats, tokens * rotated_q, tokens * rotated_k, counters].map(|bytes| Bytes(bytes).align_up(256))
}

/// Largest number of experts of routing on GPUs: a thread of a block has an expert.
pub const MAX_EXPERTS: u32 = 256;

/// Tokens whose choices one block of a GPU counts and sorts in routing.
pub const ROUTE_CHUNK: u64 = 64;

/// Tokens that one block of a GPU sums in the router's losses.
pub const ROUTER_LOSS_CHUNK: u64 = 256;

/// Alignment in bytes of the parts of a workspace.
const PART: u64 = 256;

/// Workspace of a kernel of a router, whose blocks have chunks of tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChunkedWorkspace<const N: usize> {
    /// Number of chunks.
    pub chunks: u64,
    /// Bytes of the parts, which follow one another.
    pub parts: [u64; N],
}

impl<const N: usize> ChunkedWorkspace<N> {
    /// Aligns the sizes of the parts.
    fn new(chunks: u64, parts: [u64; N]) -> Self {
        Self { chunks, parts: parts.map(|bytes| bytes.next_multiple_of(PART)) }
    }

    fn bytes(&self) -> Bytes {
        Bytes(self.parts.iter().sum())
    }
}

/// Number of chunks of which each has up to `chunk` tokens of one pack: `first_chunk` in route.cu gives the chunks of the
/// P packs of T tokens numbers below `T / chunk + P`.
fn chunks_of_packs(counts: Counts, chunk: u64) -> u64 {
    counts.tokens / chunk + counts.packs
}

/// Workspace of routing: the chosen experts (T, k) as bytes, the choices of each expert and chunk as i32 (E, chunks), the
/// rows of each expert as i32 (E), and its rows from the packs in front of each pack as i32 (E, P). Without a capacity,
/// `counts` has no packs.
pub fn route_bytes(counts: Counts, experts: u64, top_k: u64) -> ChunkedWorkspace<4> {
    let unpacked = counts.packs == 0;
    let chunks =
        if unpacked { counts.tokens.div_ceil(ROUTE_CHUNK) } else { chunks_of_packs(counts, ROUTE_CHUNK) };
    let choices = counts.tokens * top_k;
    ChunkedWorkspace::new(chunks, [choices, 4 * experts * chunks, 4 * experts, 4 * experts * counts.packs])
}

/// Workspace of the router's losses: for each chunk the sums of E probabilities and of lse^2 as f64, and the choices of
/// each expert as i32; the two terms of each pack as f64; a counter as u32.
pub fn router_loss_bytes(counts: Counts, experts: u64) -> ChunkedWorkspace<4> {
    let chunks = chunks_of_packs(counts, ROUTER_LOSS_CHUNK);
    // Without packs there is a block as well, which writes two terms.
    let terms = 16 * counts.packs.max(1);
    ChunkedWorkspace::new(chunks, [8 * chunks * (experts + 1), 4 * chunks * experts, terms, 4])
}

/// Workspace of their gradient: for each chunk the choices of each expert as i32; for each pack the share of each expert
/// in its choices, and its targets for each token, as f32.
pub fn router_loss_grad_bytes(counts: Counts, experts: u64) -> ChunkedWorkspace<2> {
    let chunks = chunks_of_packs(counts, ROUTER_LOSS_CHUNK);
    ChunkedWorkspace::new(chunks, [4 * chunks * experts, 4 * counts.packs * (experts + 1)])
}

/// Workspace of routing.
fn route_workspace(op: &Route, cx: &NodeContext<'_>) -> Bytes {
    let counts = router_counts(cx, 0);
    // Packs matter to a capacity only.
    let packs = if op.capacity > 0 { counts.packs } else { 0 };
    route_bytes(Counts { packs, ..counts }, u64::from(op.experts), u64::from(op.top_k)).bytes()
}

/// Counts of a full step of a router whose logits are input `logits`.
fn router_counts(cx: &NodeContext<'_>, logits: usize) -> Counts {
    Counts { tokens: cx.rows(logits), packs: cx.graph.bounds.packs, ..cx.graph.bounds.full() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts(tokens: u64, packs: u64) -> Counts {
        Counts { tokens, packs, sequences: 1 }
    }

    /// A kernel writes the chunks of packs one by one, in any order.
    #[test]
    fn every_chunk_of_a_pack_has_its_own_number_below_their_count() {
        let chunk = ROUTE_CHUNK;
        for lengths in [&[0][..], &[1], &[64], &[65, 63], &[0, 0, 640], &[1, 1, 1], &[63, 66, 0, 127, 300, 0]] {
            let tokens = lengths.iter().sum();
            let packs = lengths.len() as u64;
            let mut first = 0;
            let mut next = 0;
            for (pack, length) in (0..).zip(lengths) {
                // `first_chunk` of route.cu.
                let number = first / chunk + pack;
                assert!(number >= next, "{lengths:?}: pack {pack}");
                first += length;
                next = number + length.div_ceil(chunk);
            }
            assert!(next <= chunks_of_packs(counts(tokens, packs), chunk), "{lengths:?}");
        }
    }

    #[test]
    fn the_workspace_of_fewer_tokens_and_packs_fits_into_that_of_more() {
        let parts = |counts: Counts| {
            let unpacked = Counts { packs: 0, ..counts };
            let routes = [route_bytes(unpacked, 8, 2), route_bytes(counts, 8, 2)];
            let losses = [router_loss_bytes(counts, 8).bytes(), router_loss_grad_bytes(counts, 8).bytes()];
            [routes[0].bytes(), routes[1].bytes(), losses[0], losses[1]]
        };
        let full = parts(counts(1000, 7));
        for (tokens, packs) in [(0, 0), (0, 1), (1, 1), (64, 7), (999, 7), (1000, 1), (1000, 6)] {
            let step = parts(counts(tokens, packs));
            assert!(step.iter().zip(full).all(|(&step, full)| step <= full), "{tokens} tokens, {packs} packs");
        }
    }

    /// A launch divides the workspace by the rows of its step.
    #[test]
    fn parts_of_a_smaller_step_fit_into_those_of_a_full_one() {
        let full = GRAD_ROWS + 200;
        let stored = OperandFormat::Stored;
        let kinds = [(DType::F32, stored), (DType::F32, OperandFormat::Tf32), (DType::Bf16, stored)];
        for (dtype, operands) in kinds {
            for (n, k) in [(33, 40), (40, 24)] {
                let loss = |rows| LossSizes { rows, k, classes: n, chunk: 300, dtype };
                for rows in [0, 1, 127, 128, 129, 300, 301, GRAD_ROWS, full] {
                    let fits = |step: &[Bytes], full: &[Bytes]| {
                        assert!(step.iter().zip(full).all(|(step, full)| step <= full), "{rows} rows");
                    };
                    let grad = |rows| weight_grad_parts(rows, n, k, dtype, operands);
                    fits(&grad(rows), &grad(full));
                    fits(&loss(rows).loss_parts(), &loss(full).loss_parts());
                    fits(&loss(rows).grad_parts(), &loss(full).grad_parts());
                }
            }
        }
    }
}
