//! Ops that are never differentiated: gradients and optimizer updates. Invariant: their common rules are
//! implemented once, in terms of each op's types, work, aliases and precision class.

use super::*;

/// The rules in which gradient and update ops differ; every implementor gets [`OpRules`] from them.
pub(super) trait GradientOrUpdateOp {
    /// Infers the output types; see [`OpRules::infer`].
    fn types(&self, ins: &[&TensorSpec], bounds: &Bounds) -> Result<Vec<TensorSpec>, RuleError>;

    /// Number of floating-point operations in a step of size `counts`. For the memory traffic, each operand
    /// crosses the bus once.
    fn flops(&self, ins: &[&TensorSpec], outs: &[&TensorSpec], counts: Counts) -> f64;

    /// Inputs that an output may overwrite; see [`OpRules::alias`].
    fn in_place(&self, output: usize) -> &'static [usize];

    /// Class of the op in the precision pass; see [`OpRules::precision`].
    fn class(&self) -> PrecisionClass;
}

impl<T: GradientOrUpdateOp> OpRules for T {
    fn infer(&self, ins: &[&TensorSpec], bounds: &Bounds) -> Result<Vec<TensorSpec>, RuleError> {
        self.types(ins, bounds)
    }

    fn vjp(&self, _: &mut Vjp<'_>) -> Result<(), NotDifferentiable> {
        Err(NotDifferentiable)
    }

    fn cost(&self, ins: &[&TensorSpec], outs: &[&TensorSpec], _: &Bounds, counts: Counts) -> Cost {
        streaming(self.flops(ins, outs, counts), ins, outs, counts)
    }

    fn alias(&self, output: usize) -> &'static [usize] {
        self.in_place(output)
    }

    fn precision(&self) -> PrecisionClass {
        self.class()
    }
}

/// Type with the shape and the element type of `x`.
pub(super) fn like(x: &TensorSpec) -> TensorSpec {
    TensorSpec::activation(x.shape.clone(), x.dtype)
}

/// Type of an f32 vector of `n` elements, for statistics and scalars.
pub(super) fn f32s(n: u64) -> TensorSpec {
    TensorSpec::activation([Dim::Fixed(n)], DType::F32)
}

/// Checks that `spec` is f32 and has the given shape.
pub(super) fn f32_is(what: &str, spec: &TensorSpec, shape: &[Dim]) -> Result<(), RuleError> {
    shape_is(what, spec, shape)?;
    match spec.dtype {
        DType::F32 => Ok(()),
        DType::Bf16 | DType::F16 | DType::F8 | DType::I8 | DType::I32 | DType::U8 => {
            Err(RuleError(format!("{what} must be f32, not {spec}")))
        }
    }
}

/// Checks that `spec` is i32 and has the given shape.
pub(super) fn i32_is(what: &str, spec: &TensorSpec, shape: &[Dim]) -> Result<(), RuleError> {
    integers(what, spec)?;
    shape_is(what, spec, shape)
}
