//! Kernel table of NVIDIA GPUs. Invariant: the accepted ops depend on the compute capability only, so a plan
//! for a GPU can be made on any machine.
#![expect(
    clippy::arithmetic_side_effects,
    reason = "sizes of tensors within the limits of graphs, times constants"
)]

use super::{Fusions, GateFusion, columns, rows, table};
use plimsoll_graph::ops::{Attention, Epilogue, Prologue};
use plimsoll_graph::{Bytes, Counts, DType, Graph, Layout, Node, Op};
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
        CountSteps = "count_steps": CountSteps Operands::Optimizer,
        Dispatch = "dispatch": Dispatch Operands::Experts,
        DispatchGrad = "dispatch_grad": DispatchGrad Operands::Experts,
        Dropout = "dropout": Dropout Operands::Rows,
        Ema = "ema": Ema Operands::Optimizer,
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
        KlDivergence = "kl_divergence": KlDivergence Operands::Rows,
        KlDivergenceGrad = "kl_divergence_grad": KlDivergenceGrad Operands::Rows,
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
    /// Quantized values with their scales, and bf16; both need equal workspaces.
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

/// Maximum columns of an attention head: the sums of 16 rows of a wider one do not fit into a warp's registers.
pub const WIDEST_HEAD: u32 = 256;

/// Widest rows for which Hopper's matmul fuses a preceding layer norm. Measured on an H200: with 640 columns a
/// separate norm is as fast.
const WIDEST_NORM: u64 = 480;

/// Workspace of a matmul in bytes, reserved for the algorithms of cuBLASLt.
const GEMM: Bytes = Bytes(32 << 20);

pub(super) fn fusions(capability: Capability) -> Fusions {
    let hopper = capability == Capability::HOPPER;
    // Rows of y are multiples of 16 bytes, as TMA requires of strides.
    let gates = GateFusion {
        dtypes: &[DType::Bf16, DType::F16],
        silu: false,
        bias: false,
        longest: u64::MAX,
        multiple: 8,
    };
    Fusions { fuse_gates: hopper.then_some(gates), fuse_norms: if hopper { WIDEST_NORM } else { 0 } }
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

    /// Whether the kernel accepts a node's op and attributes, and the factors of a matmul have one element type. Which
    /// element types it accepts is checked separately.
    pub(super) fn accepts(self, capability: Capability, graph: &Graph, node: &Node) -> bool {
        let accepts_factors = match self.row() {
            Operands::Quantized => capability >= Capability::FP8,
            Operands::Matmul | Operands::GemmGrad => {
                matches!(node.inputs[..], [a, b, ..] if graph.spec(a).dtype == graph.spec(b).dtype)
            }
            Operands::Rows
            | Operands::Sums
            | Operands::Optimizer
            | Operands::Loss
            | Operands::FlashGrad
            | Operands::Experts => true,
        };
        self.op() == node.op.kind() && accepts_factors && self.has(capability, &node.op)
    }

    /// Whether the kernel implements an op with these attributes.
    fn has(self, capability: Capability, op: &Op) -> bool {
        if let Op::Attention(op) = op {
            op.head_dim <= WIDEST_HEAD
        } else if let Op::AttentionGrad(op) = op {
            op.forward.head_dim <= WIDEST_HEAD
        } else if let Op::Linear(op) = op {
            let plain = op.epilogue.gate().is_none() && op.prologue == Prologue::None;
            op.epilogue != Epilogue::SiluGate && (self.row() != Operands::Quantized || plain)
        } else if let Op::Quantize(op) = op {
            op.to == DType::F8 && capability >= Capability::FP8
        } else if let Op::Route(op) = op {
            op.experts <= MAX_EXPERTS
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

/// Workspace of sums over rows.
fn sums_bytes(graph: &Graph, node: &Node) -> Bytes {
    let (rows, columns) = (rows(graph, node, 0), columns(graph, node, 0));
    let columns_of = |sums, vectors| column_sums_parts(rows, columns, sums, vectors).into_iter().sum::<Bytes>();
    let by_index = |limit| indexed_sums_parts(rows, columns, limit).into_iter().sum::<Bytes>();
    if let Op::EmbedGrad(op) = &node.op {
        by_index(op.vocab) + if op.row { columns_of(1, 0) } else { Bytes::ZERO }
    } else if let Op::SelectRowsGrad(_) = &node.op {
        let table = node.outputs.iter().flatten().next();
        by_index(table.map_or(0, |&v| graph.spec(v).rows(graph.bounds.full())))
    } else if let Op::BatchNormTrain(_) = &node.op {
        columns_of(1, 2)
    } else if let Op::RmsNormGrad(op) = &node.op {
        let heads = u64::from(op.heads);
        column_sums_parts(rows * heads, columns / heads, 2, 0).into_iter().sum()
    } else if let Op::LayerNormGrad(_) | Op::BatchNormGrad(_) = &node.op {
        columns_of(2, 0)
    } else {
        // BatchNormTrainGrad, whose rows need the finished sums.
        columns_of(2, 2)
    }
}

/// Elements whose squares a block of threads adds before the partial sums are added in order.
pub const SQUARES: u64 = 1 << 16;

/// Rows of a gradient whose squares are added per column before the partial sums are added in order.
pub const ADAFACTOR_ROWS: u64 = 256;

/// Workspace of updates and of the norm of all gradients: partial sums in f64.
fn optimizer_bytes(graph: &Graph, node: &Node) -> Bytes {
    let elements = |input: usize| graph.spec(node.inputs[input]).elements_at(graph.bounds.full());
    let ranges = |elements: u64| 8 * elements.div_ceil(SQUARES);
    if let Op::GradScale(_) = node.op {
        Bytes((0..node.inputs.len() - 1).map(elements).map(ranges).sum())
    } else if let Op::Adafactor(_) = node.op {
        // Three numbers in 32 bytes, the squares of the update, and the squares of each column.
        let vector = graph.spec(node.inputs[0]).shape.len() == 1;
        let (r, c) = if vector { (1, elements(0)) } else { (rows(graph, node, 0), columns(graph, node, 0)) };
        Bytes(32 + ranges(r * c) + 8 * r.div_ceil(ADAFACTOR_ROWS) * c)
    } else {
        Bytes::ZERO
    }
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
pub fn library_sums_rows(dtype: DType, tf32: bool, columns: [u64; 2]) -> bool {
    let on_tensor_cores = dtype.size() == 2 || tf32;
    on_tensor_cores && columns.iter().all(|columns| (columns * dtype.size()).is_multiple_of(16))
}

/// Bytes of the partial sums of the columns of a matrix.
fn column_sums_bytes(rows: u64, columns: u64) -> Bytes {
    Bytes(rows.div_ceil(BIAS_ROWS) * columns * DType::F32.size())
}

/// Bytes of the transposes of two matrices with these columns, whose product is summed over `rows` rows, [`GRAD_ROWS`]
/// at a time; none if cuBLASLt computes it.
fn transposed_bytes(rows: u64, columns: [u64; 2], dtype: DType, tf32: bool) -> [Bytes; 2] {
    let library = library_sums_rows(dtype, tf32, columns);
    let padded = if library { 0 } else { rows.min(GRAD_ROWS).next_multiple_of(8) };
    columns.map(|columns| Bytes(columns * padded * dtype.size()))
}

/// Parts of the workspace of a matmul's input gradient, with w: (n, k): w transposed, and cuBLASLt's.
pub fn input_grad_parts(n: u64, k: u64, dtype: DType) -> [Bytes; 2] {
    [Bytes(n * k * dtype.size()), GEMM]
}

/// Parts of the workspace of a matmul's weight gradient, with dy: (rows, n) and x: (rows, k): dy and x transposed, dw
/// in f32, partial sums of db, and cuBLASLt's.
pub fn weight_grad_parts(rows: u64, n: u64, k: u64, dtype: DType, tf32: bool) -> [Bytes; 5] {
    let library = library_sums_rows(dtype, tf32, [n, k]);
    let [dy, x] = transposed_bytes(rows, [n, k], dtype, tf32);
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
        let (rows, padded, size) = (self.chunk_rows(), self.padded(), self.dtype.size());
        let [g, x] = transposed_bytes(rows, [padded, self.k], self.dtype, false);
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

/// Workspace of the gradients of a matmul.
fn gemm_grad_bytes(graph: &Graph, node: &Node) -> Bytes {
    let (rows, n, k) = (rows(graph, node, 0), columns(graph, node, 0), columns(graph, node, 1));
    let dtype = graph.spec(node.inputs[0]).dtype;
    if let Op::LinearWeightGrad(op) = node.op {
        total(&weight_grad_parts(rows, n, k, dtype, op.tf32))
    } else {
        total(&input_grad_parts(n, k, dtype))
    }
}

/// Workspace of an output projection with its loss.
fn loss_bytes(graph: &Graph, node: &Node) -> Bytes {
    let sizes = |x: usize, chunk: u32| LossSizes {
        rows: rows(graph, node, x),
        k: columns(graph, node, x),
        classes: rows(graph, node, x + 1),
        chunk: u64::from(chunk),
        dtype: graph.spec(node.inputs[x]).dtype,
    };
    if let Op::LinearCrossEntropyGrad(op) = &node.op {
        total(&sizes(1, op.forward.chunk).grad_parts())
    } else if let Op::LinearCrossEntropy(op) = &node.op {
        total(&sizes(0, op.chunk).loss_parts())
    } else {
        Bytes::ZERO
    }
}

/// Workspace of the gradient of attention.
fn flash_grad_bytes(graph: &Graph, node: &Node) -> Bytes {
    let Op::AttentionGrad(op) = &node.op else { return Bytes::ZERO };
    let dtype = graph.spec(node.inputs[1]).dtype;
    flash_grad_parts(&op.forward, rows(graph, node, 0), dtype).into_iter().sum()
}

/// Parts of the workspace of the gradient of attention in a step of `tokens` tokens: lse and delta of every row and head
/// in f32; with rotary embedding the rotated q and k; two counters of work items.
pub fn flash_grad_parts(op: &Attention, tokens: u64, dtype: DType) -> [Bytes; 4] {
    let stats = 2 * u64::from(op.heads) * DType::F32.size();
    let rotated = |width: u64| if op.rotary { width * dtype.size() } else { 0 };
    let counters = 2 * DType::I32.size();
    let rows = [stats, rotated(op.width()), rotated(op.kv_width())].map(|row| tokens * row);
    [rows[0], rows[1], rows[2], counters].map(|bytes| Bytes(bytes).align_up(256))
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

/// Workspace of the ops of a mixture of experts.
fn experts_bytes(graph: &Graph, node: &Node) -> Bytes {
    let counts = |logits, packs| Counts { tokens: rows(graph, node, logits), packs, ..graph.bounds.full() };
    let packs = graph.bounds.packs;
    if let Op::Route(op) = &node.op {
        let counts = counts(0, if op.capacity > 0 { packs } else { 0 });
        route_bytes(counts, u64::from(op.experts), u64::from(op.top_k)).bytes()
    } else if let Op::RouterLoss(_) = &node.op {
        router_loss_bytes(counts(0, packs), columns(graph, node, 0)).bytes()
    } else if let Op::RouterLossGrad(_) = &node.op {
        router_loss_grad_bytes(counts(1, packs), columns(graph, node, 1)).bytes()
    } else {
        Bytes::ZERO
    }
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
        for (dtype, tf32) in [(DType::F32, false), (DType::F32, true), (DType::Bf16, false)] {
            for (n, k) in [(33, 40), (40, 24)] {
                let loss = |rows| LossSizes { rows, k, classes: n, chunk: 300, dtype };
                for rows in [0, 1, 127, 128, 129, 300, 301, GRAD_ROWS, full] {
                    let fits = |step: &[Bytes], full: &[Bytes]| {
                        assert!(step.iter().zip(full).all(|(step, full)| step <= full), "{rows} rows");
                    };
                    let grad = |rows| weight_grad_parts(rows, n, k, dtype, tf32);
                    fits(&grad(rows), &grad(full));
                    fits(&loss(rows).loss_parts(), &loss(full).loss_parts());
                    fits(&loss(rows).grad_parts(), &loss(full).grad_parts());
                }
            }
        }
    }
}
