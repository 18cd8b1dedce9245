//! The copy of a tensor to another memory space, or within the arena. Invariant: a move changes no byte, and its result
//! has the type, layout and, for a parameter or state, the role of its operand.

use super::*;
use crate::Role;
use serde::{Deserialize, Serialize};

/// `y = x` in the space `to`. Input x: any type, in any space; output y: the type of x. A move is not a kernel launch: a
/// plan starts it and later waits for it, and the device copies while kernels run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Move {
    /// The space of y.
    pub to: Space,
}

impl Move {
    /// The role of the result: a copy or view of a parameter or state is that parameter or state.
    pub fn role(operand: Role) -> Role {
        match operand {
            Role::Param(_) | Role::State(_) | Role::Activation | Role::Grad => operand,
            Role::Input => Role::Activation,
        }
    }
}

impl OpRules for Move {
    fn infer(&self, ins: &[&TensorSpec], _: &Bounds) -> Result<Vec<TensorSpec>, RuleError> {
        arity(ins, 1)?;
        Ok(vec![ins[0].clone().with_role(Self::role(ins[0].role)).in_space(self.to)])
    }

    /// Moves are inserted after differentiation.
    fn vjp(&self, _: &mut Vjp<'_>) -> Result<(), NotDifferentiable> {
        Err(NotDifferentiable)
    }

    fn cost(&self, ins: &[&TensorSpec], outs: &[&TensorSpec], _: &Bounds, counts: Counts) -> Cost {
        streaming(0.0, ins, outs, counts)
    }

    fn alias(&self, _: usize) -> &'static [usize] {
        &[]
    }

    fn precision(&self) -> PrecisionClass {
        PrecisionClass::Elementwise
    }
}
