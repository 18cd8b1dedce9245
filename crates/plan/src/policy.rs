//! What a caller decides about a plan: one field per pass. Invariant: every field is read by one pass.

/// What a caller decides. The default is inference with fusion.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Policy {
    /// Gradients of these outputs; `None` is inference.
    pub autodiff: Option<AutodiffPolicy>,
    /// Whether ops are fused.
    pub fuse: bool,
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
        Self { autodiff: None, fuse: true }
    }
}
