//! Kernel tables: for each kernel the op that it computes, the operands that it accepts, the layout of its
//! weights, the fusions it supports and its workspace. Invariant: each of these facts is stated here only, in the
//! [`KernelRow`] of the kernel. A plan contains the [`KernelId`] of every node and devices `match` on it, so a kernel that
//! can be planned but is not implemented is a compile error.
//!
//! A kernel id denotes the arithmetic together with the instruction set or compute capability of its table,
//! which the target of every plan contains: f32 matmuls on AMX have the same id as those in vector registers,
//! but different bits.

mod cpu;
mod cuda;
mod reference;

pub use cpu::{
    CpuKernel, INT8_STEP, InstructionSet, LONGEST_GATED, MAX_HEADS, TILE_STEP, WIDEST_HEAD as WIDEST_CPU_HEAD,
    flash_bytes, flash_grad_bytes,
};
pub use cuda::{
    ADAFACTOR_ROWS, BIAS_ROWS, Capability, CudaKernel, GRAD_ROWS, LossSizes, MAX_EXPERTS, ROUTE_CHUNK,
    ROUTER_LOSS_CHUNK, RUN_ROWS, SORT_CHUNK, SQUARES, SUM_ROWS, WIDEST_HEAD as WIDEST_CUDA_HEAD,
    WORKSPACE_ALIGN, column_sums_parts, flash_grad_parts as cuda_flash_grad_parts, indexed_sums_parts,
    input_grad_parts, library_sums_rows, route_bytes, router_loss_bytes, router_loss_grad_bytes,
    weight_grad_parts,
};
pub use reference::ReferenceKernel;

use plimsoll_graph::ops::{Attention, AttentionGrad, Mask};
use plimsoll_graph::{Bytes, Counts, DType, Graph, Layout, Node, Op, TensorSpec};
use serde::{Deserialize, Serialize};

/// Defines a kernel table: an enum with one variant per kernel, its name in records and target files, the op
/// that it computes, and its [`KernelRow`]. Where several kernels accept a node, earlier ones are preferred.
macro_rules! table {
    ($(#[$about:meta])* $Kernel:ident { $($variant:ident = $name:literal: $op:ident $row:expr,)* }) => {
        $(#[$about])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
        #[serde(rename_all = "snake_case")]
        #[allow(missing_docs, reason = "each is its op and its element type")]
        pub enum $Kernel {
            $($variant,)*
        }

        impl $Kernel {
            /// All kernels, preferred ones first.
            pub const ALL: &[Self] = &[$(Self::$variant,)*];

            /// Name in records and target files.
            pub fn name(self) -> &'static str {
                match self {
                    $(Self::$variant => $name,)*
                }
            }

            /// The op that the kernel computes.
            pub fn op(self) -> plimsoll_graph::OpKind {
                match self {
                    $(Self::$variant => plimsoll_graph::OpKind::$op,)*
                }
            }

            pub(super) fn row(self) -> &'static dyn super::AnyKernelRow {
                match self {
                    $(Self::$variant => {
                        static ROW: KernelRow<plimsoll_graph::ops::$op> = $row;
                        &ROW
                    })*
                }
            }
        }
    };
}
use table;

/// Identifies the kernel of a node, and with it the arithmetic: a device may only choose among implementations
/// with identical bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum KernelId {
    /// A kernel of the reference, which defines every op.
    Reference(ReferenceKernel),
    /// A kernel for CPUs.
    Cpu(CpuKernel),
    /// A kernel for NVIDIA GPUs.
    Cuda(CudaKernel),
    /// No kernel: a copy in a queue of the device.
    Move,
    /// No kernel: a view has an address alone.
    View,
}

impl KernelId {
    /// Name in records and target files.
    pub fn name(self) -> &'static str {
        match self {
            Self::Reference(_) => "reference",
            Self::Cpu(kernel) => kernel.name(),
            Self::Cuda(kernel) => kernel.name(),
            Self::Move => "move",
            Self::View => "view",
        }
    }

    /// Layout in which the kernel reads the weights of a matmul.
    pub fn weights(self) -> Layout {
        self.row().map_or(Layout::RowMajor, |row| row.weights())
    }

    /// Whether the kernel always computes in f32: each 16-bit operand is converted to an f32 copy, stored in
    /// the workspace before the kernel's own part.
    pub fn widens(self) -> bool {
        self.row().is_some_and(|row| row.widens())
    }

    /// Element types of floating-point inputs that the kernel accepts.
    pub fn dtypes(self) -> &'static [DType] {
        self.row().map_or(&[], |row| row.dtypes())
    }

    /// The kernel's row; `None` for copies and views.
    fn row(self) -> Option<&'static dyn AnyKernelRow> {
        match self {
            Self::Reference(kernel) => Some(kernel.row()),
            Self::Cpu(kernel) => Some(kernel.row()),
            Self::Cuda(kernel) => Some(kernel.row()),
            Self::Move | Self::View => None,
        }
    }
}

/// Kernel table of a machine, with the machine property that it depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Kernels {
    /// Reference kernels, which accept every op.
    Reference,
    /// CPU kernels for an instruction set.
    Cpu(InstructionSet),
    /// CUDA kernels for a compute capability.
    Cuda(Capability),
}

/// Fusions supported by the kernels of a target, beyond those that every target supports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fusions {
    /// The subsequent gated linear units that 16-bit matmuls can compute; `None` for none.
    pub fuse_gates: Option<GateFusion>,
    /// Maximum columns of rows for which 16-bit matmuls can compute a preceding layer norm; 0 if unsupported.
    pub fuse_norms: u64,
}

impl Fusions {
    /// No fusions.
    const NONE: Self = Self { fuse_gates: None, fuse_norms: 0 };
}

/// Conditions under which a 16-bit matmul can compute a subsequent gated linear unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GateFusion {
    /// Element types that are supported.
    pub dtypes: &'static [DType],
    /// Gates with SiLU are supported, not only those with GELU.
    pub silu: bool,
    /// Matmuls with a bias are supported.
    pub bias: bool,
    /// Maximum columns of x.
    pub max_columns: u64,
    /// The columns of y must be a multiple of this number.
    pub multiple: u64,
}

impl Kernels {
    /// Kernels that accept a node, preferred ones first; they differ in the layout of weights.
    pub(crate) fn accepting(self, graph: &Graph, node: &Node) -> impl Iterator<Item = KernelId> {
        self.all().filter(move |&id| self.accepts(id, graph, node))
    }

    /// All kernels, for each op the preferred ones first.
    pub fn all(self) -> Box<dyn Iterator<Item = KernelId>> {
        match self {
            Self::Reference => Box::new(ReferenceKernel::ALL.iter().copied().map(KernelId::Reference)),
            Self::Cpu(_) => Box::new(CpuKernel::ALL.iter().copied().map(KernelId::Cpu)),
            Self::Cuda(_) => Box::new(CudaKernel::ALL.iter().copied().map(KernelId::Cuda)),
        }
    }

    /// Returns the kernel of a node: the first that accepts it and reads weights in their current layout.
    pub fn of(self, graph: &Graph, node: &Node) -> Option<KernelId> {
        if let Op::Move(_) = node.op {
            return Some(KernelId::Move);
        }
        if node.op.is_view() {
            return Some(KernelId::View);
        }
        let weights = node.op.weights();
        self.accepting(graph, node).find(|id| match weights {
            [] => id.weights() == Layout::RowMajor,
            _ => weights.iter().all(|&i| graph.spec(node.inputs[i]).layout == id.weights()),
        })
    }

    /// Fusions that the kernels support.
    pub fn fusions(self) -> Fusions {
        let mut all = Fusions::NONE;
        for row in self.all().filter_map(KernelId::row) {
            let fusions = row.fusions(self);
            all.fuse_gates = all.fuse_gates.or(fusions.fuse_gates);
            all.fuse_norms = all.fuse_norms.max(fusions.fuse_norms);
        }
        all
    }

    /// Workspace in bytes of a node with kernel `id` on `workers` workers: the f32 copies of a widening kernel, the
    /// parts of the workers, each of which starts on its own cache line, and the part that they share.
    pub fn workspace(self, id: KernelId, graph: &Graph, node: &Node, workers: u64) -> Bytes {
        let Some(row) = id.row() else { return Bytes::ZERO };
        let cx = NodeContext { kernels: self, graph, node };
        let copies = if row.widens() { widened(graph, node) } else { Bytes::ZERO };
        copies + row.worker_workspace(&cx).align_up(CACHE_LINE) * workers + row.workspace(&cx)
    }

    /// Maximum columns of an attention head, with the name of attention with wider heads in error messages.
    fn widest_head(self) -> (u32, &'static str) {
        match self {
            Self::Reference => (u32::MAX, "attention"),
            Self::Cpu(_) => (WIDEST_CPU_HEAD, "attention with heads wider than 128 columns"),
            Self::Cuda(_) => (WIDEST_CUDA_HEAD, "attention with heads wider than 256 columns"),
        }
    }

    /// Vector instructions that the kernels use; portable code for other machines than CPUs.
    fn instructions(self) -> InstructionSet {
        match self {
            Self::Cpu(set) => set,
            Self::Reference | Self::Cuda(_) => InstructionSet::Portable,
        }
    }

    /// Compute capability of the GPU; the minimum for other machines.
    fn capability(self) -> Capability {
        match self {
            Self::Cuda(capability) => capability,
            Self::Reference | Self::Cpu(_) => Capability::MIN,
        }
    }

    fn accepts(self, id: KernelId, graph: &Graph, node: &Node) -> bool {
        let Some(row) = id.row() else { return false };
        // A kernel is chosen by the types of its floating-point inputs, so an op without any has none.
        let mut dtypes =
            node.inputs.iter().map(|&v| graph.spec(v).dtype).filter(|dtype| dtype.is_float()).peekable();
        row.accepts(&NodeContext { kernels: self, graph, node })
            && dtypes.peek().is_some()
            && dtypes.all(|dtype| row.dtypes().contains(&dtype))
    }
}

/// Bytes of a cache line of a CPU.
const CACHE_LINE: u64 = 64;

/// Properties of a kernel that computes the op `O`, or every op if `O` is [`Op`]. A row of a table states the
/// properties that differ from those of [`KernelRow::PLAIN`].
struct KernelRow<O> {
    /// Element types of floating-point inputs that the kernel accepts.
    dtypes: &'static [DType],
    /// Whether the kernel always computes in f32, on f32 copies of 16-bit operands.
    widens: bool,
    /// Layout in which the kernel reads the weights of a matmul.
    weights: Layout,
    /// Whether the kernel accepts a node with these attributes and operands, whose element types are in `dtypes`.
    accepts: fn(&O, &NodeContext<'_>) -> bool,
    /// Workspace of each worker, without the f32 copies.
    worker_workspace: fn(&O, &NodeContext<'_>) -> Bytes,
    /// Workspace that all workers share.
    workspace: fn(&O, &NodeContext<'_>) -> Bytes,
    /// Fusions with neighbouring nodes that the kernel supports.
    fusions: fn(Kernels) -> Fusions,
}

impl<O> KernelRow<O> {
    /// A kernel that reads every floating-point type by rows, accepts all nodes of its op, and needs no workspace.
    const PLAIN: Self = Self {
        dtypes: &[DType::F32, DType::Bf16, DType::F16],
        widens: false,
        weights: Layout::RowMajor,
        accepts: |_, _| true,
        worker_workspace: |_, _| Bytes::ZERO,
        workspace: |_, _| Bytes::ZERO,
        fusions: |_| Fusions::NONE,
    };
}

/// A node, the graph that contains it, and the kernel table for which it is planned.
struct NodeContext<'a> {
    kernels: Kernels,
    graph: &'a Graph,
    node: &'a Node,
}

impl NodeContext<'_> {
    fn input(&self, i: usize) -> &TensorSpec {
        self.graph.spec(self.node.inputs[i])
    }

    fn dtype(&self, input: usize) -> DType {
        self.input(input).dtype
    }

    /// Rows of an input in a full step.
    fn rows(&self, input: usize) -> u64 {
        self.input(input).rows(self.graph.bounds.full())
    }

    /// Columns of an input.
    fn columns(&self, input: usize) -> u64 {
        self.input(input).row_elements()
    }

    /// Elements of an input in a full step.
    fn elements(&self, input: usize) -> u64 {
        self.input(input).elements_at(self.graph.bounds.full())
    }

    /// The first output that is read.
    fn output(&self) -> Option<&TensorSpec> {
        self.node.outputs.iter().flatten().next().map(|&v| self.graph.spec(v))
    }

    /// Columns of the first output that is read; 0 without one.
    fn output_columns(&self) -> u64 {
        self.output().map_or(0, TensorSpec::row_elements)
    }
}

/// A [`KernelRow`] of any op: the same properties, without the op in their types.
trait AnyKernelRow {
    fn dtypes(&self) -> &'static [DType];
    fn widens(&self) -> bool;
    fn weights(&self) -> Layout;
    /// Whether the kernel accepts a node, apart from the element types of its inputs; `false` for other ops.
    fn accepts(&self, cx: &NodeContext<'_>) -> bool;
    /// Workspace of each worker; zero for other ops.
    fn worker_workspace(&self, cx: &NodeContext<'_>) -> Bytes;
    /// Workspace that all workers share; zero for other ops.
    fn workspace(&self, cx: &NodeContext<'_>) -> Bytes;
    fn fusions(&self, kernels: Kernels) -> Fusions;
}

impl<O> AnyKernelRow for KernelRow<O>
where
    for<'a> &'a O: TryFrom<&'a Op>,
{
    fn dtypes(&self) -> &'static [DType] {
        self.dtypes
    }

    fn widens(&self) -> bool {
        self.widens
    }

    fn weights(&self) -> Layout {
        self.weights
    }

    fn accepts(&self, cx: &NodeContext<'_>) -> bool {
        <&O>::try_from(&cx.node.op).is_ok_and(|op| (self.accepts)(op, cx))
    }

    fn worker_workspace(&self, cx: &NodeContext<'_>) -> Bytes {
        <&O>::try_from(&cx.node.op).map_or(Bytes::ZERO, |op| (self.worker_workspace)(op, cx))
    }

    fn workspace(&self, cx: &NodeContext<'_>) -> Bytes {
        <&O>::try_from(&cx.node.op).map_or(Bytes::ZERO, |op| (self.workspace)(op, cx))
    }

    fn fusions(&self, kernels: Kernels) -> Fusions {
        (self.fusions)(kernels)
    }
}

/// Bytes of the f32 copies of all 16-bit operands of a node.
pub(crate) fn widened(graph: &Graph, node: &Node) -> Bytes {
    let operands = node.inputs.iter().chain(node.outputs.iter().flatten()).map(|&v| graph.spec(v));
    operands.map(|spec| copy_bytes(spec, graph.bounds.full())).sum()
}

/// Bytes of the f32 copy of an operand in a step of size `counts`, padded to cache lines; zero for operands
/// that are not 16-bit.
pub fn copy_bytes(spec: &TensorSpec, counts: Counts) -> Bytes {
    match spec.dtype {
        DType::Bf16 | DType::F16 => (Bytes(spec.elements_at(counts)) * DType::F32.size()).align_up(CACHE_LINE),
        DType::F32 | DType::F8 | DType::I8 | DType::I32 | DType::U8 => Bytes::ZERO,
    }
}

/// Number of 4-byte words that a linear cross-entropy needs for a chunk of `rows` rows of `columns` columns
/// with `classes` classes: logits, a contiguous copy of the rows, and per row its lse and its index.
#[expect(clippy::arithmetic_side_effects, reason = "the logits of a chunk are within the limits of graphs")]
pub const fn chunk_words(rows: u64, columns: u64, classes: u64) -> u64 {
    rows * (classes + columns + 2)
}

/// Name of a node's op and the element type of its inputs, for error messages about `kernels`.
pub(crate) fn op_in(kernels: Kernels, graph: &Graph, node: &Node) -> (&'static str, DType) {
    let mut dtypes = node.inputs.iter().map(|&v| graph.spec(v).dtype);
    (described(kernels, &node.op), dtypes.find(|d| d.is_float()).unwrap_or(DType::I32))
}

/// Name of an op, including the attribute that `kernels` do not support.
fn described(kernels: Kernels, op: &Op) -> &'static str {
    let forward = <&Attention>::try_from(op).or_else(|op| <&AttentionGrad>::try_from(op).map(|op| &op.forward));
    let Ok(attention) = forward else { return op.name() };
    let (widest, wider) = kernels.widest_head();
    match attention.mask {
        _ if attention.head_dim > widest => wider,
        Mask::Window(_) => "attention with a sliding window",
        Mask::BlockSparse { .. } => "attention with a block-sparse mask",
        Mask::Full | Mask::Causal => op.name(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use plimsoll_graph::ops::{Bias, Qkv};

    #[test]
    fn a_refusal_says_what_of_attention_is_missing() {
        let of = |kernels, head_dim, mask| {
            let (bias, qkv) = (Bias::None, Qkv::Separate);
            let attention =
                Attention { heads: 2, kv_heads: 2, head_dim, scale: 1.0, mask, bias, rotary: false, qkv };
            described(kernels, &Op::Attention(attention))
        };
        let (cpu, cuda) = (Kernels::Cpu(InstructionSet::Avx2), Kernels::Cuda(Capability::MIN));
        for (kernels, (widest, wider)) in [(cpu, cpu.widest_head()), (cuda, cuda.widest_head())] {
            assert!(wider.contains(&format!("wider than {widest} columns")), "{wider}");
            assert_eq!(of(kernels, widest, Mask::Full), "attention");
            assert_eq!(of(kernels, widest + 1, Mask::Full), wider);
            assert_eq!(of(kernels, 64, Mask::Window(7)), "attention with a sliding window");
        }
    }

    fn of_op(op: &str) -> Vec<CpuKernel> {
        CpuKernel::ALL.iter().copied().filter(|kernel| kernel.op().name() == op).collect()
    }

    #[test]
    fn the_cpu_has_every_op() {
        for op in Op::NAMES.iter().filter(|op| !["join", "move", "part"].contains(op)) {
            assert!(!of_op(op).is_empty(), "{op}");
        }
    }

    /// Where one kernel reads bf16 directly, another accepts f32 and f16. The first one's list contains f32
    /// only for operands other than the rows.
    #[test]
    fn no_two_kernels_are_for_one_element_type() {
        for op in Op::NAMES {
            let kernels = of_op(op);
            for (i, a) in kernels.iter().enumerate() {
                for b in kernels.iter().skip(i + 1).filter(|b| a.row().weights() == b.row().weights()) {
                    let read_by_b = |dtype: &&DType| b.row().dtypes().contains(dtype);
                    let shared: Vec<&DType> = a.row().dtypes().iter().filter(read_by_b).collect();
                    assert!(a.widens() && !b.widens() && shared == [&DType::F32], "{a:?} and {b:?}");
                }
            }
        }
    }
}
