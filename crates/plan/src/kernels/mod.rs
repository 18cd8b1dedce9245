//! The kernel tables: for each kernel the op it computes, what it accepts, how it wants its weights, what it fuses and its
//! workspace. Invariant: each of these facts stands here and nowhere else; a plan carries the [`KernelId`] of every node, and
//! devices `match` on it, so that a kernel that is planned but missing does not compile.
//!
//! A kernel id names the arithmetic together with the instruction set or the compute capability of its table, which the
//! target of every plan carries: f32 products on AMX have the id of those in lanes, and bits of their own.

mod cpu;
mod cuda;
mod reference;

pub use cpu::{CODES_STEP, CpuKernel, InstructionSet, MOST_HEADS, TILE_STEP, flash_bytes, flash_grad_bytes};
pub use cuda::{Capability, CudaKernel};
pub use reference::ReferenceKernel;

use graph::ops::Mask;
use graph::{Bytes, Counts, DType, Graph, Layout, Node, Op, TensorSpec};
use serde::{Deserialize, Serialize};

/// Most columns of a head in attention, on CPUs and GPUs.
pub const WIDEST_HEAD: u32 = 128;

/// Makes a kernel table: an enum with a variant for each kernel, its name in records and target files, the op that it
/// computes, and a row of facts about it. The order is that of preference, where several accept a node.
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
            /// All kernels, the preferred ones first.
            pub const ALL: &[Self] = &[$(Self::$variant,)*];

            /// The name in records and target files.
            pub fn name(self) -> &'static str {
                match self {
                    $(Self::$variant => $name,)*
                }
            }

            /// The op that it computes.
            pub fn op(self) -> graph::OpKind {
                match self {
                    $(Self::$variant => graph::OpKind::$op,)*
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

/// A kernel. It names the arithmetic of a node: a device may choose among implementations with the same bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum KernelId {
    /// A kernel of the reference, which defines every op.
    Reference(ReferenceKernel),
    /// A kernel of CPUs.
    Cpu(CpuKernel),
    /// A kernel of NVIDIA GPUs.
    Cuda(CudaKernel),
}

impl KernelId {
    /// The name in records and target files.
    pub fn name(self) -> &'static str {
        match self {
            Self::Reference(_) => "reference",
            Self::Cpu(kernel) => kernel.name(),
            Self::Cuda(kernel) => kernel.name(),
        }
    }

    /// How it wants the weights of a product.
    pub fn weights(self) -> Layout {
        match self {
            Self::Reference(kernel) => kernel.weights(),
            Self::Cpu(kernel) => kernel.weights(),
            Self::Cuda(kernel) => kernel.weights(),
        }
    }

    /// Whether it computes in f32 whatever its operands are: those of 16 bits pass through an f32 copy each, which stands
    /// before its own workspace.
    pub fn widens(self) -> bool {
        match self {
            Self::Cpu(kernel) => kernel.widens(),
            Self::Reference(_) | Self::Cuda(_) => false,
        }
    }

    /// The element types of floating-point inputs that it accepts.
    pub fn dtypes(self) -> &'static [DType] {
        match self {
            Self::Reference(kernel) => kernel.dtypes(),
            Self::Cpu(kernel) => kernel.dtypes(),
            Self::Cuda(kernel) => kernel.dtypes(),
        }
    }
}

/// Whose kernels run on a machine, with what they depend on there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Kernels {
    /// The reference: one kernel for every op.
    Reference,
    /// Those of CPUs, for an instruction set.
    Cpu(InstructionSet),
    /// Those of NVIDIA GPUs, for a compute capability.
    Cuda(Capability),
}

/// What kernels fuse beyond the ops that every machine takes together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fusions {
    /// Products of 16 bits compute the gate behind them.
    pub gates: bool,
    /// The widest rows that products of 16 bits take through a layer norm in front of them; 0 where they take none.
    pub norms: u64,
    /// A kernel keeps the hidden layer of an MLP of bf16 in its workspace.
    pub mlp: bool,
}

impl Kernels {
    /// The kernels that accept a node, the preferred one first: they differ in how they want their weights.
    pub fn accepting(self, graph: &Graph, node: &Node) -> impl Iterator<Item = KernelId> {
        self.all().filter(move |&id| self.accepts(id, graph, node))
    }

    /// All kernels, the preferred ones of an op first.
    pub fn all(self) -> Box<dyn Iterator<Item = KernelId>> {
        match self {
            Self::Reference => Box::new(ReferenceKernel::ALL.iter().copied().map(KernelId::Reference)),
            Self::Cpu(_) => Box::new(CpuKernel::ALL.iter().copied().map(KernelId::Cpu)),
            Self::Cuda(_) => Box::new(CudaKernel::ALL.iter().copied().map(KernelId::Cuda)),
        }
    }

    /// The kernel of a node: the first that accepts it and wants its weights as they lie.
    pub fn of(self, graph: &Graph, node: &Node) -> Option<KernelId> {
        let weights = node.op.weights().iter().map(|&i| graph.spec(node.inputs[i]).layout);
        let as_wanted = |id: &KernelId| match node.op.weights() {
            [] => id.weights() == Layout::RowMajor,
            _ => weights.clone().all(|layout| layout == id.weights()),
        };
        self.accepting(graph, node).find(as_wanted)
    }

    /// What they fuse.
    pub fn fusions(self) -> Fusions {
        match self {
            Self::Reference => Fusions { gates: false, norms: 0, mlp: false },
            Self::Cpu(_) => Fusions { gates: false, norms: 0, mlp: true },
            Self::Cuda(capability) => cuda::fusions(capability),
        }
    }

    /// Bytes of the workspace of a node whose kernel is `id`, on so many workers: the f32 copies of a kernel that widens, and
    /// behind them its own.
    pub fn workspace(self, id: KernelId, graph: &Graph, node: &Node, workers: u64) -> Bytes {
        let own = match id {
            KernelId::Reference(_) => Bytes::ZERO,
            KernelId::Cpu(kernel) => kernel.workspace(self.instructions(), graph, node, workers),
            KernelId::Cuda(kernel) => kernel.workspace(),
        };
        if id.widens() { widened(graph, node) + own } else { own }
    }

    /// The vector instructions of its kernels.
    fn instructions(self) -> InstructionSet {
        match self {
            Self::Cpu(set) => set,
            Self::Reference | Self::Cuda(_) => InstructionSet::Portable,
        }
    }

    fn accepts(self, id: KernelId, graph: &Graph, node: &Node) -> bool {
        let computes = match (id, self) {
            (KernelId::Reference(kernel), _) => kernel.accepts(graph, node),
            (KernelId::Cpu(kernel), _) => kernel.accepts(graph, node),
            (KernelId::Cuda(kernel), Self::Cuda(capability)) => kernel.accepts(capability, node),
            (KernelId::Cuda(_), Self::Reference | Self::Cpu(_)) => false,
        };
        let mut dtypes =
            node.inputs.iter().map(|&v| graph.spec(v).dtype).filter(|dtype| dtype.is_float()).peekable();
        computes && dtypes.peek().is_some() && dtypes.all(|dtype| id.dtypes().contains(&dtype))
    }
}

/// f32 copies of the operands of 16 bits.
pub(crate) fn widened(graph: &Graph, node: &Node) -> Bytes {
    let operands = node.inputs.iter().chain(node.outputs.iter().flatten()).map(|&v| graph.spec(v));
    operands.map(|spec| copy_bytes(spec, graph.bounds.full())).sum()
}

/// Bytes of the f32 copy of an operand in a step of `counts`, on a cache line of its own; none of one that is not of 16 bits.
pub fn copy_bytes(spec: &TensorSpec, counts: Counts) -> Bytes {
    match spec.dtype {
        DType::Bf16 | DType::F16 => Bytes(spec.elements_at(counts) * DType::F32.size()).align_up(64),
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

/// Words of 4 bytes that a linear cross-entropy keeps of a chunk of rows (rows, K) with weights (V, K): its logits, its rows
/// side by side, their lse and which they are.
pub const fn chunk_words(rows: u64, columns: u64, classes: u64) -> u64 {
    rows * (classes + columns + 2)
}

/// The op of a node with the element type of its inputs, as a refusal names it.
pub(crate) fn op_in(graph: &Graph, node: &Node) -> (&'static str, DType) {
    let mut dtypes = node.inputs.iter().map(|&v| graph.spec(v).dtype);
    (described(&node.op), dtypes.find(|d| d.is_float()).unwrap_or(DType::I32))
}

/// An op by its name, and by what of it some kernels do not have.
fn described(op: &Op) -> &'static str {
    let attention = if let Op::Attention(op) = op {
        op
    } else if let Op::AttentionGrad(op) = op {
        &op.forward
    } else {
        return op.name();
    };
    match attention.mask {
        _ if attention.head_dim > WIDEST_HEAD => "attention with heads wider than 128 columns",
        Mask::Window(_) => "attention with a sliding window",
        Mask::BlockSparse { .. } => "attention with a block-sparse mask",
        Mask::Full | Mask::Causal => op.name(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use graph::ops::{Attention, Bias, Qkv};

    #[test]
    fn a_refusal_says_what_of_attention_is_missing() {
        let of = |head_dim, mask| {
            let (bias, qkv) = (Bias::None, Qkv::Separate);
            let attention =
                Attention { heads: 2, kv_heads: 2, head_dim, scale: 1.0, mask, bias, rotary: false, qkv };
            described(&Op::Attention(attention))
        };
        assert_eq!(of(128, Mask::Full), "attention");
        assert_eq!(of(129, Mask::Full), "attention with heads wider than 128 columns");
        assert_eq!(of(64, Mask::Window(7)), "attention with a sliding window");
    }

    fn of_op(op: &str) -> Vec<CpuKernel> {
        CpuKernel::ALL.iter().copied().filter(|kernel| kernel.op().name() == op).collect()
    }

    #[test]
    fn the_cpu_has_every_op() {
        for op in Op::NAMES {
            assert!(!of_op(op).is_empty(), "{op}");
        }
    }

    /// Beside a kernel that reads bf16 as it lies, another takes f32 and f16. f32 in the list of the first is for operands
    /// beside the rows.
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
