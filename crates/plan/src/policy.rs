//! What a caller decides about a plan: one field per pass. Invariant: every field is read in one place.

use crate::{Precision, Remat};

/// What a caller decides. The default is inference with fusion and resident weights.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Policy {
    /// The element type of weights and activations of an inference graph; training decides before it differentiates.
    pub precision: Precision,
    /// Gradients of these outputs; `None` is inference.
    pub autodiff: Option<AutodiffPolicy>,
    /// What the backward pass computes once more in place of keeping it.
    pub remat: Remat,
    /// Which ops are fused.
    pub fuse: Fuse,
    /// Where parameters are between their uses.
    pub weights: Weights,
}

/// Which ops are fused.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Fuse {
    /// None: the graph as it was built.
    Nothing,
    /// What every machine takes together.
    Ops,
    /// Also what the target's kernels take together.
    #[default]
    Kernels,
}

/// Where parameters are between their uses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Weights {
    /// In the arena, read once before the first step.
    #[default]
    Resident,
    /// In the arena and changed by training: rows as in their file, in no kernel's order.
    Trained,
    /// In their file, read in every step right before their use: less memory, and the time to read them.
    Streamed,
}

/// What is differentiated.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AutodiffPolicy {
    /// Outputs whose cotangents are given as inputs `d {output}`; every parameter that they depend on gets
    /// an output `grad {parameter}`.
    pub outputs: Vec<String>,
}

impl Default for Policy {
    fn default() -> Self {
        Self {
            precision: Precision::F32,
            autodiff: None,
            remat: Remat::None,
            fuse: Fuse::default(),
            weights: Weights::Resident,
        }
    }
}
