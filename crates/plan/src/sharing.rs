//! Which values may share memory, and the memory of a program whose values share less: `plimsoll plan --explain` prints
//! what each kind of sharing saves. Invariant: every execution uses the default, in which all kinds are on.

use crate::compile::place_transient;
use crate::schedule::schedule;
use crate::{Plan, PlanError, Program, Region, Weights, check, check_target};
use plimsoll_graph::{Bytes, Def};

/// The kinds of sharing between the values of a step. The default is all of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sharing {
    /// Values and workspaces share addresses if their lifetimes do not overlap. Without, each has its addresses for the
    /// whole step.
    pub lifetimes: bool,
    /// An op writes its result over an operand that is not read later, if its alias rule allows it.
    pub operands: bool,
    /// An update writes the new value of a parameter or state over the old one. Without, it writes to other addresses, and
    /// a copy follows.
    pub states: bool,
}

impl Default for Sharing {
    fn default() -> Self {
        Self { lifetimes: true, operands: true, states: true }
    }
}

impl Program {
    /// Returns the peak of the program if its values shared memory only as in `sharing`. All steps are planned and checked
    /// again, with other addresses.
    pub fn peak_with(&self, sharing: Sharing) -> Result<Bytes, PlanError> {
        let mut program = self.clone();
        for (_, plan) in &mut program.plans {
            self.share(plan, sharing)?;
        }
        Ok(program.peak())
    }

    /// Assigns other addresses to the values of a plan that are not in the persistent region.
    fn share(&self, plan: &mut Plan, sharing: Sharing) -> Result<(), PlanError> {
        let weights = if plan.schedule.loads().next().is_some() { Weights::Streamed } else { Weights::Trained };
        plan.schedule = schedule(&plan.graph, weights, sharing);
        let values = plan.graph.values.iter().zip(&plan.memory.slices);
        let slices = values.map(|(value, slice)| {
            let stays = value.def == Def::Source || sharing.states;
            slice.filter(|slice| stays && slice.region == Region::Persistent)
        });
        let (slices, persistent) = (slices.collect(), plan.memory.persistent);
        let target = self.target();
        plan.memory =
            place_transient(&plan.graph, &plan.schedule, &plan.kernels, target, sharing, slices, persistent)?;
        check(&plan.graph, &plan.schedule, &plan.memory)?;
        check_target(plan, target)?;
        Ok(())
    }
}
