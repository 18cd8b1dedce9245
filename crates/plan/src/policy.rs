//! Options of compilation, with one field per pass. Invariant: every field is read in one place.

use crate::{Precision, RecomputePolicy};

/// Options of compilation. The default is inference with fusion and resident weights.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Policy {
    /// Element type of weights and activations of an inference graph. Training converts its graph before
    /// differentiation and leaves this at f32.
    pub precision: Precision,
    /// Outputs to differentiate; `None` for inference.
    pub autodiff: Option<AutodiffPolicy>,
    /// Values that the backward pass recomputes instead of keeping.
    pub remat: RecomputePolicy,
    /// Ops to fuse.
    pub fuse: Fuse,
    /// Where parameters are stored between uses.
    pub weights: Weights,
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

/// Where parameters are stored between uses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Weights {
    /// In the arena, read once before the first step.
    #[default]
    Resident,
    /// In the arena and updated by training: in the row order of their file, never packed for a kernel.
    Trained,
    /// In the weight file, and read in every step immediately before use: needs less memory, but costs the time
    /// to read them.
    Streamed,
}

/// Options of automatic differentiation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AutodiffPolicy {
    /// Outputs to differentiate. Their cotangents are the inputs `d {output}`; every parameter that they depend
    /// on gets an output `grad {parameter}`.
    pub outputs: Vec<String>,
}

impl Default for Policy {
    fn default() -> Self {
        Self {
            precision: Precision::F32,
            autodiff: None,
            remat: RecomputePolicy::None,
            fuse: Fuse::default(),
            weights: Weights::Resident,
        }
    }
}
