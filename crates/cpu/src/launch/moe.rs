//! Launches of mixture-of-experts ops: routing, dispatch, combine and router losses. Invariant: every precondition of
//! a kernel is checked here: expert, row and slot indices lie inside the arrays that they index, and packs cover all
//! tokens.

use crate::launch::operands::LaunchOperands;
use crate::packs::{self, Packs};
use crate::{Cpu, moe::dispatch, moe::route, moe::router_loss};
use plimsoll_exec::DeviceError;
use plimsoll_graph::ops::*;
use plimsoll_graph::packs::TOKENS;

pub(crate) fn combine(l: &LaunchOperands<'_>, cpu: &Cpu, op: &Combine) -> Result<(), DeviceError> {
    let rows = l.input(0)?;
    let gates = l.vector(1)?;
    let outputs = dispatch::DispatchedRows { top_k: op.top_k as usize, rows, places: l.slots(3)? };
    dispatch::combine(cpu, outputs, gates, l.output(0)?);
    Ok(())
}

pub(crate) fn combine_grad(l: &LaunchOperands<'_>, cpu: &Cpu, op: &CombineGrad) -> Result<(), DeviceError> {
    let order = l.slots(3)?;
    let places = l.slots(4)?;
    let inputs = dispatch::CombineInputs {
        top_k: op.top_k as usize,
        rows: l.input(1)?,
        gates: l.vector(2)?,
        order,
        places,
    };
    dispatch::combine_grad(cpu, inputs, l.input(0)?, l.output_if(0)?, l.vector_out(1)?);
    Ok(())
}

pub(crate) fn dispatch(l: &LaunchOperands<'_>, cpu: &Cpu, op: &Dispatch) -> Result<(), DeviceError> {
    dispatch::dispatch(cpu, op.top_k as usize, l.input(0)?, l.slots(1)?, l.output(0)?);
    Ok(())
}

pub(crate) fn dispatch_grad(l: &LaunchOperands<'_>, cpu: &Cpu, op: &DispatchGrad) -> Result<(), DeviceError> {
    dispatch::dispatch_grad(cpu, op.top_k as usize, l.input(0)?, l.slots(1)?, l.output(0)?);
    Ok(())
}

pub(crate) fn route(l: &LaunchOperands<'_>, cpu: &Cpu, op: &Route) -> Result<(), DeviceError> {
    let logits = l.input(0)?;
    if i32::try_from(logits.rows() * op.top_k as usize).is_err() {
        return Err(l.refuse(format!("{} tokens with {} experts each", logits.rows(), op.top_k)));
    }
    // Without a capacity there is no input `packs`, and one pack without a limit gives the same rows as any others.
    let whole = packs::whole(logits.rows());
    let packs = if op.capacity > 0 {
        l.packs(1, TOKENS, logits.rows())?
    } else {
        Packs::new(&whole, TOKENS, logits.rows()).map_err(|error| l.refuse(error.to_string()))?
    };
    let limit = |tokens: usize| op.limit(tokens as u64).unwrap_or(u64::MAX) as usize;
    let capacity = route::ExpertCapacity { packs, limit: &limit };
    let choice = route::ExpertChoice { top_k: op.top_k as usize, renormalise: op.renormalise, capacity };
    let to = route::Routed {
        gates: l.output(0)?,
        experts: l.integers_out_if(1)?,
        order: l.integers_out(2)?,
        places: l.integers_out(3)?,
        offsets: l.integers_out(4)?,
        dropped: l.integers_out_if(5)?,
    };
    route::route(cpu, choice, logits, to, l.workspace()?);
    Ok(())
}

pub(crate) fn route_grad(l: &LaunchOperands<'_>, cpu: &Cpu, op: &RouteGrad) -> Result<(), DeviceError> {
    let logits = l.input(1)?;
    let experts = l.ids(2, logits.cols())?;
    let places = l.slots(3)?;
    let chosen = route::ChosenExperts { renormalise: op.renormalise, logits, experts, places };
    route::route_grad(cpu, chosen, l.input(0)?, l.output(0)?);
    Ok(())
}

pub(crate) fn router_loss(l: &LaunchOperands<'_>, cpu: &Cpu, op: &RouterLoss) -> Result<(), DeviceError> {
    let choices = choices(l, 0, op.balance, op.z)?;
    let losses = router_loss::router_loss(cpu, choices, l.workspace()?);
    for (k, value) in [losses.sum, losses.balance, losses.z].into_iter().enumerate() {
        if let Some(out) = l.vector_out(k)? {
            out.fill(value);
        }
    }
    Ok(())
}

pub(crate) fn router_loss_grad(
    l: &LaunchOperands<'_>,
    cpu: &Cpu,
    op: &RouterLossGrad,
) -> Result<(), DeviceError> {
    let dloss = l.vector(0)?[0];
    let choices = choices(l, 1, op.balance, op.z)?;
    router_loss::router_loss_grad(cpu, choices, dloss, l.output(0)?, l.workspace()?);
    Ok(())
}

/// The inputs logits, experts and packs of a router loss, from input `first` on, and its weights.
fn choices<'a>(
    l: &LaunchOperands<'a>,
    first: usize,
    balance: f32,
    z: f32,
) -> Result<router_loss::RouterChoices<'a>, DeviceError> {
    let logits = l.input(first)?;
    let experts = l.ids(first + 1, logits.cols())?;
    let packs = l.packs(first + 2, TOKENS, logits.rows())?;
    Ok(router_loss::RouterChoices { logits, experts, packs, balance, z })
}
