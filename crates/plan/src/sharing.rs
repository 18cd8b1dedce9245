//! The memory of a program whose values share less: `plimsoll plan --explain` prints what each kind of sharing saves.
//! Invariant: only sizes are computed here; every plan that runs shares memory in all ways.

use crate::compile::{Workspace, item, packed, workspaces};
use crate::liveness::{Buffer, buffers, new_states};
use crate::pack::{PackItem, Problem};
use crate::{Plan, PlanError, Program};
use plimsoll_graph::{Bytes, Space};

/// A kind of sharing between the values of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sharing {
    /// Values and workspaces share addresses if their lifetimes do not overlap. Without, each has its addresses for the
    /// whole step.
    Lifetimes,
    /// An op writes its result over an operand that is not read later, if its alias rule allows it.
    Operands,
    /// An update writes the new value of a parameter or state over the old one. Without, it writes to other addresses, and
    /// a copy follows.
    States,
}

impl Sharing {
    /// All kinds.
    pub const ALL: [Self; 3] = [Self::Lifetimes, Self::Operands, Self::States];
}

impl Program {
    /// Returns the peak of the program if its values did not share memory in one of the ways.
    pub fn peak_without(&self, sharing: Sharing) -> Result<Bytes, PlanError> {
        let mut program = self.clone();
        for (_, plan) in &mut program.plans {
            plan.memory.device.transient = self.transient_without(plan, sharing)?;
        }
        Ok(program.peak())
    }

    /// Size of the transient region of the arena of a plan without a kind of sharing.
    fn transient_without(&self, plan: &Plan, sharing: Sharing) -> Result<Bytes, PlanError> {
        let Plan { graph, schedule, kernels, .. } = plan;
        let target = self.target();
        let mut all = buffers(graph, schedule, sharing != Sharing::Operands);
        if sharing == Sharing::States {
            all.extend(new_states(graph, schedule));
        }
        let mut items: Vec<PackItem> =
            all.iter().filter(|buffer: &&Buffer| buffer.space == Space::Device).map(item).collect();
        items.extend(workspaces(graph, schedule, kernels, target).iter().map(Workspace::item));
        if sharing == Sharing::Lifetimes {
            let end = schedule.instrs.len() as u32 + 1;
            items.iter_mut().for_each(|item| (item.birth, item.death) = (0, end));
        }
        Ok(Bytes(packed(&Problem { items, align: target.alignment })?.height))
    }
}
