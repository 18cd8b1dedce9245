//! Ops that nobody differentiates: gradients and updates. Invariant: what they share is said once; each states
//! its types, its work and its aliases.

use super::*;

/// The rules in which gradients and updates differ.
pub(super) trait Terminal {
    /// As [`OpRules::infer`].
    fn types(&self, ins: &[&TensorSpec], bounds: &Bounds) -> Result<Vec<TensorSpec>, RuleError>;

    /// Operations of a step of `counts`, each operand crossing the bus once.
    fn flops(&self, ins: &[&TensorSpec], outs: &[&TensorSpec], counts: Counts) -> u64;

    /// As [`OpRules::alias`].
    fn in_place(&self, output: usize) -> &'static [usize];

    /// As [`OpRules::precision`].
    fn class(&self) -> PrecisionClass;
}

impl<T: Terminal> OpRules for T {
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

    fn shard(&self, ins: &[Placement]) -> Result<Vec<Placement>, ShardError> {
        match ins.iter().all(|&p| p == Placement::Replicate) {
            true => Ok(vec![Placement::Replicate; 8]),
            false => Err(ShardError("it needs whole tensors")),
        }
    }
}

/// Like `x`, element type included.
pub(super) fn like(x: &TensorSpec) -> TensorSpec {
    TensorSpec::activation(x.shape.clone(), x.dtype)
}

/// An f32 vector of fixed length: statistics, scalars.
pub(super) fn f32s(n: u64) -> TensorSpec {
    TensorSpec::activation([Dim::Fixed(n)], DType::F32)
}

/// f32 of this shape.
pub(super) fn f32_is(what: &str, spec: &TensorSpec, shape: &[Dim]) -> Result<(), RuleError> {
    shape_is(what, spec, shape)?;
    match spec.dtype {
        DType::F32 => Ok(()),
        DType::Bf16 | DType::F16 | DType::F8 | DType::I8 | DType::I32 | DType::U8 => {
            Err(RuleError(format!("{what} must be f32, not {spec}")))
        }
    }
}

/// i32 of this shape.
pub(super) fn i32_is(what: &str, spec: &TensorSpec, shape: &[Dim]) -> Result<(), RuleError> {
    integers(what, spec)?;
    shape_is(what, spec, shape)
}
