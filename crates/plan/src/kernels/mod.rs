//! Kernel tables: for each kernel the op that it computes, the operands that it accepts, the layout of its
//! weights, the fusions it supports and its workspace. Invariant: each of these facts is stated here only. A
//! plan contains the [`KernelId`] of every node and devices `match` on it, so a kernel that can be planned but
//! is not implemented is a compile error.
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

use plimsoll_graph::ops::Mask;
use plimsoll_graph::{Bytes, Counts, DType, Graph, Layout, Node, Op, TensorSpec};
use serde::{Deserialize, Serialize};

/// Defines a kernel table: an enum with one variant per kernel, its name in records and target files, the op
/// that it computes, and a row of its properties. Where several kernels accept a node, earlier ones are
/// preferred.
macro_rules! table {
    ($(#[$about:meta])* $Kernel:ident: $Row:ty { $($variant:ident = $name:literal: $op:ident $row:expr,)* }) => {
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

            fn row(self) -> $Row {
                match self {
                    $(Self::$variant => $row,)*
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
        match self {
            Self::Reference(kernel) => kernel.weights(),
            Self::Cpu(kernel) => kernel.weights(),
            Self::Cuda(kernel) => kernel.weights(),
            Self::Move | Self::View => Layout::RowMajor,
        }
    }

    /// Whether the kernel always computes in f32: each 16-bit operand is converted to an f32 copy, stored in
    /// the workspace before the kernel's own part.
    pub fn widens(self) -> bool {
        match self {
            Self::Cpu(kernel) => kernel.widens(),
            Self::Reference(_) | Self::Cuda(_) | Self::Move | Self::View => false,
        }
    }

    /// Element types of floating-point inputs that the kernel accepts.
    pub fn dtypes(self) -> &'static [DType] {
        match self {
            Self::Reference(kernel) => kernel.dtypes(),
            Self::Cpu(kernel) => kernel.dtypes(),
            Self::Cuda(kernel) => kernel.dtypes(),
            Self::Move | Self::View => &[],
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
    pub longest: u64,
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
        let weights = node.op.weights().iter().map(|&i| graph.spec(node.inputs[i]).layout);
        let as_wanted = |id: &KernelId| match node.op.weights() {
            [] => id.weights() == Layout::RowMajor,
            _ => weights.clone().all(|layout| layout == id.weights()),
        };
        self.accepting(graph, node).find(as_wanted)
    }

    /// Fusions that the kernels support.
    pub fn fusions(self) -> Fusions {
        match self {
            Self::Reference => Fusions { fuse_gates: None, fuse_norms: 0 },
            Self::Cpu(set) => Fusions { fuse_gates: cpu::gates(set), fuse_norms: 0 },
            Self::Cuda(capability) => cuda::fusions(capability),
        }
    }

    /// Workspace in bytes of a node with kernel `id` on `workers` workers: the f32 copies of a widening kernel,
    /// followed by the kernel's own workspace.
    pub fn workspace(self, id: KernelId, graph: &Graph, node: &Node, workers: u64) -> Bytes {
        let own = match id {
            KernelId::Reference(_) => Bytes::ZERO,
            KernelId::Cpu(kernel) => kernel.workspace(self.instructions(), graph, node, workers),
            KernelId::Cuda(kernel) => kernel.workspace(graph, node),
            KernelId::Move | KernelId::View => Bytes::ZERO,
        };
        if id.widens() { widened(graph, node) + own } else { own }
    }

    /// Maximum columns of an attention head, with the name of attention with wider heads in error messages.
    fn widest_head(self) -> (u32, &'static str) {
        match self {
            Self::Reference => (u32::MAX, "attention"),
            Self::Cpu(_) => (WIDEST_CPU_HEAD, "attention with heads wider than 128 columns"),
            Self::Cuda(_) => (WIDEST_CUDA_HEAD, "attention with heads wider than 256 columns"),
        }
    }

    /// Vector instructions that the kernels use.
    fn instructions(self) -> InstructionSet {
        match self {
            Self::Cpu(set) => set,
            Self::Reference | Self::Cuda(_) => InstructionSet::Portable,
        }
    }

    fn accepts(self, id: KernelId, graph: &Graph, node: &Node) -> bool {
        let computes = match (id, self) {
            (KernelId::Reference(kernel), _) => kernel.accepts(graph, node),
            (KernelId::Cpu(kernel), _) => kernel.accepts(self.instructions(), graph, node),
            (KernelId::Cuda(kernel), Self::Cuda(capability)) => kernel.accepts(capability, graph, node),
            (KernelId::Cuda(_), Self::Reference | Self::Cpu(_)) | (KernelId::Move | KernelId::View, _) => false,
        };
        let mut dtypes =
            node.inputs.iter().map(|&v| graph.spec(v).dtype).filter(|dtype| dtype.is_float()).peekable();
        computes && dtypes.peek().is_some() && dtypes.all(|dtype| id.dtypes().contains(&dtype))
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
        DType::Bf16 | DType::F16 => (Bytes(spec.elements_at(counts)) * DType::F32.size()).align_up(64),
        DType::F32 | DType::F8 | DType::I8 | DType::I32 | DType::U8 => Bytes::ZERO,
    }
}

/// Rows of a node's input in a full step.
fn rows(graph: &Graph, node: &Node, input: usize) -> u64 {
    graph.spec(node.inputs[input]).rows(graph.bounds.full())
}

/// Columns of a node's input.
fn columns(graph: &Graph, node: &Node, input: usize) -> u64 {
    graph.spec(node.inputs[input]).row_elements()
}

/// Columns of a node's first output.
fn output_columns(graph: &Graph, node: &Node) -> u64 {
    node.outputs.iter().flatten().next().map_or(0, |&v| graph.spec(v).row_elements())
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
    let attention = if let Op::Attention(op) = op {
        op
    } else if let Op::AttentionGrad(op) = op {
        &op.forward
    } else {
        return op.name();
    };
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
    use plimsoll_graph::ops::{Attention, Bias, Qkv};

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
                for b in kernels.iter().skip(i + 1).filter(|b| a.weights() == b.weights()) {
                    let shared: Vec<&DType> = a.dtypes().iter().filter(|d| b.dtypes().contains(d)).collect();
                    assert!(a.widens() && !b.widens() && shared == [&DType::F32], "{a:?} and {b:?}");
                }
            }
        }
    }
}
