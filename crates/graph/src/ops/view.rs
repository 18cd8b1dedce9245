//! Views: values that lie inside another value. A view is neither launched nor moved; a plan gives it an address alone.
//! Invariant: a view changes no byte and copies none, so its result has the element type, space and, where all operands
//! agree, the role of its operands.

use super::*;
use crate::{Layout, Op, Role};
use serde::{Deserialize, Serialize};

/// Rows `first..first + rows` of x: `y[r] = x[first + r]`. Input x: (R, ...) with fixed dimensions, in row-major order, in
/// any space; output y: (rows, ...), which lies in the bytes of x.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Part {
    /// First row, along dimension 0.
    pub first: u64,
    /// Number of rows, at least one.
    pub rows: u64,
}

/// The value whose consecutive rows are the operands: `y = x0 ++ x1 ++ ...` along dimension 0. Inputs: (Ri, ...) each, with
/// fixed dimensions, in row-major order, in one space; output y: (sum Ri, ...). The operands lie in the bytes of y, one
/// behind another, so each must be the result of a launch, a move or another join, and may be joined once. (A source has
/// an address of its own, and a part lies in its operand.)
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Join {}

impl Op {
    /// Whether the op is a view: its result lies inside its operand ([`Part`]), or its operands inside its result
    /// ([`Join`]), and it has no instruction.
    pub fn is_view(&self) -> bool {
        matches!(self, Self::Part(_) | Self::Join(_))
    }

    /// Whether the result has the bytes of the operands, and their role: a move or a view.
    pub(crate) fn is_copy(&self) -> bool {
        self.is_view() || matches!(self, Self::Move(_))
    }

    /// The role of the result of a move or a view ([`Self::is_copy`]), from the roles of its operands: a copy or part of a parameter or
    /// state is that parameter or state. `None` for other ops, whose results have the role of their phase.
    pub(crate) fn role_of_copy(&self, operands: &[Role]) -> Option<Role> {
        let first = *operands.first().filter(|_| self.is_copy())?;
        let is_common = operands.iter().all(|role| *role == first);
        Some(if is_common { Move::role(first) } else { Role::Activation })
    }
}

/// Number of rows of an operand of a view.
fn fixed_rows(spec: &TensorSpec) -> Result<u64, RuleError> {
    match (spec.shape.first(), spec.layout) {
        (Some(&Dim::Fixed(rows)), Layout::RowMajor) => Ok(rows),
        (_, Layout::RowMajor | Layout::Packed { .. } | Layout::Scaled) => {
            Err(RuleError(format!("{spec} has no parts: a view needs fixed rows in row-major order")))
        }
    }
}

/// The type of `rows` rows of `operand`.
fn rows_of(operand: &TensorSpec, rows: u64, role: Role) -> TensorSpec {
    let mut spec = operand.clone().with_role(role);
    spec.shape[0] = Dim::Fixed(rows);
    spec
}

impl OpRules for Part {
    fn infer(&self, ins: &[&TensorSpec], _: &Bounds) -> Result<Vec<TensorSpec>, RuleError> {
        arity(ins, 1)?;
        let all = fixed_rows(ins[0])?;
        let is_inside = self.first.checked_add(self.rows).is_some_and(|end| end <= all);
        if self.rows == 0 || !is_inside {
            return Err(RuleError(format!("{} has no rows {} and {} more", ins[0], self.first, self.rows)));
        }
        Ok(vec![rows_of(ins[0], self.rows, Move::role(ins[0].role))])
    }

    /// Views are inserted after differentiation.
    fn vjp(&self, _: &mut Vjp<'_>) -> Result<(), NotDifferentiable> {
        Err(NotDifferentiable)
    }

    fn cost(&self, _: &[&TensorSpec], _: &[&TensorSpec], _: &Bounds, _: Counts) -> Cost {
        Cost::default()
    }

    /// None: alias rules are for launches, and a view has none. The planner gives its result an address in the operand.
    fn alias(&self, _: usize) -> &'static [usize] {
        &[]
    }

    fn precision(&self) -> PrecisionClass {
        PrecisionClass::Elementwise
    }
}

impl OpRules for Join {
    fn infer(&self, ins: &[&TensorSpec], _: &Bounds) -> Result<Vec<TensorSpec>, RuleError> {
        let Some(first) = ins.first() else {
            return Err(RuleError("takes at least one input".into()));
        };
        let mut rows: u64 = 0;
        for x in ins {
            // A saturated sum is above the limit of a dimension, which the graph is checked against.
            rows = rows.saturating_add(fixed_rows(x)?);
            if (&x.shape[1..], x.dtype, x.space) != (&first.shape[1..], first.dtype, first.space) {
                return Err(RuleError(format!(
                    "cannot join {x} to {first}: rows, types and spaces must be equal"
                )));
            }
        }
        let roles: Vec<Role> = ins.iter().map(|x| x.role).collect();
        let role = Op::Join(*self).role_of_copy(&roles).unwrap_or(Role::Activation);
        Ok(vec![rows_of(first, rows, role)])
    }

    /// Views are inserted after differentiation.
    fn vjp(&self, _: &mut Vjp<'_>) -> Result<(), NotDifferentiable> {
        Err(NotDifferentiable)
    }

    fn cost(&self, _: &[&TensorSpec], _: &[&TensorSpec], _: &Bounds, _: Counts) -> Cost {
        Cost::default()
    }

    /// None, as for [`Part`].
    fn alias(&self, _: usize) -> &'static [usize] {
        &[]
    }

    fn precision(&self) -> PrecisionClass {
        PrecisionClass::Elementwise
    }
}
