//! Options of compilation, with one field per pass. Invariant: every field is read in one place.

use crate::{ActivationOffload, Offload, Precision, RecomputePolicy};
use plimsoll_graph::{Bytes, OutputRole, Space};
use serde::{Deserialize, Serialize};

/// Options of compilation. The default is inference with fusion and resident weights.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Policy {
    /// Number formats of an inference graph. Training converts its graphs itself and leaves this at f32.
    pub precision: Precision,
    /// Outputs to differentiate; `None` for inference.
    pub autodiff: Option<AutodiffPolicy>,
    /// Values that the backward pass recomputes instead of reading stored ones.
    pub remat: RecomputePolicy,
    /// Ops to fuse.
    pub fuse: Fuse,
    /// Storage and layout of the parameters between uses.
    pub weights: Weights,
    /// Tensors that a training graph stores outside the arena between their uses.
    pub offload: Offload,
    /// The activations that it stores outside the arena, if `offload` has activations.
    pub activations: ActivationOffload,
    /// Limit on the bytes of moves that run ahead of the launches that read them, or behind the launches that wrote them.
    pub window: Window,
    /// Largest number of bytes that one update of an offloaded parameter fetches at once: larger updates are split into blocks
    /// of rows. `None` takes what the update of an ordinary matrix of the model fetches, at least 64 MiB.
    pub block: Option<Bytes>,
}

/// Limit on the bytes of moves that run ahead of the launches that read them, or behind the launches that wrote them. More
/// bytes let more copies overlap with kernels, and take more memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Window {
    /// The parameters and states of a layer, or of two updates, so that a copy is always queued.
    #[default]
    Full,
    /// A fraction of [`Window::Full`]: `Part(4)` is a quarter.
    Part(u64),
    /// A number of bytes.
    Bytes(Bytes),
}

impl Window {
    /// No bytes: copies and kernels take turns.
    pub const CLOSED: Self = Self::Bytes(Bytes::ZERO);
}

/// Which ops are fused.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Fuse {
    /// No fusion: the graph as built.
    Nothing,
    /// Fusions that the kernels of every target support.
    Ops,
    /// Additionally the fusions that the kernels of this target support.
    #[default]
    Kernels,
}

/// Storage of the parameters between uses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Weights {
    /// In the arena, read once before the first step.
    #[default]
    Resident,
    /// In the arena and updated by training: in the row order of their file, never packed for a kernel.
    Trained,
    /// Outside the arena in the layout that kernels read, and copied into it in every step shortly before use: needs less
    /// memory, and costs time where the copies take longer than the kernels.
    Streamed {
        /// The space in which the weights lie between uses.
        from: Space,
        /// Whether they are copied ahead of the launches that read them, which needs memory for about two layers, or
        /// directly before.
        prefetch: bool,
    },
}

/// Options of automatic differentiation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AutodiffPolicy {
    /// Outputs to differentiate. Their cotangents are the inputs named by [`cotangent`](crate::passes::cotangent); every parameter
    /// that they depend on gets an output [`OutputRole::Gradient`].
    pub outputs: Vec<OutputRole>,
}

impl Default for Policy {
    fn default() -> Self {
        Self {
            precision: Precision::F32,
            autodiff: None,
            remat: RecomputePolicy::None,
            fuse: Fuse::default(),
            weights: Weights::Resident,
            offload: Offload::default(),
            activations: ActivationOffload::All,
            window: Window::Full,
            block: None,
        }
    }
}
