//! Launches of mixture-of-experts ops: routing, dispatch, combine and router losses. Invariant: every precondition of
//! a kernel is checked here: expert, row and slot indices lie inside the arrays that they index.

use super::super::operands::Operands;
use super::super::{Cpu, dispatch, route, router_loss};
use plimsoll_exec::DeviceError;
use plimsoll_graph::ops::*;

pub(in super::super) fn combine(l: &Operands<'_>, cpu: &Cpu, op: &Combine) -> Result<(), DeviceError> {
    dispatch::combine(cpu, op.top_k as usize, l.input(0)?, l.vector(1)?, l.slots(3)?, l.output(0)?);
    Ok(())
}

pub(in super::super) fn combine_grad(l: &Operands<'_>, cpu: &Cpu, op: &CombineGrad) -> Result<(), DeviceError> {
    let (order, places) = (l.slots(3)?, l.slots(4)?);
    let of =
        dispatch::Combined { top_k: op.top_k as usize, rows: l.input(1)?, gates: l.vector(2)?, order, places };
    let drows = l.launch.outs[0].as_ref().map(|_| l.output(0)).transpose()?;
    dispatch::combine_grad(cpu, of, l.input(0)?, drows, l.vector_out(1)?);
    Ok(())
}

pub(in super::super) fn dispatch(l: &Operands<'_>, cpu: &Cpu, op: &Dispatch) -> Result<(), DeviceError> {
    dispatch::dispatch(cpu, op.top_k as usize, l.input(0)?, l.slots(1)?, l.output(0)?);
    Ok(())
}

pub(in super::super) fn dispatch_grad(
    l: &Operands<'_>,
    cpu: &Cpu,
    op: &DispatchGrad,
) -> Result<(), DeviceError> {
    dispatch::dispatch_grad(cpu, op.top_k as usize, l.input(0)?, l.slots(1)?, l.output(0)?);
    Ok(())
}

pub(in super::super) fn route(l: &Operands<'_>, cpu: &Cpu, op: &Route) -> Result<(), DeviceError> {
    let logits = l.input(0)?;
    if i32::try_from(logits.rows() * op.top_k as usize).is_err() {
        return Err(l.refuse(format!("{} tokens with {} experts each", logits.rows(), op.top_k)));
    }
    let limit = op.limit(logits.rows() as u64).unwrap_or(u64::MAX) as usize;
    let choice = route::Choice { top_k: op.top_k as usize, renormalise: op.renormalise, limit };
    let wanted = |k: usize| l.launch.outs[k].as_ref().map(|_| l.integers_out(k)).transpose();
    let to = route::Routed {
        gates: l.output(0)?,
        experts: wanted(1)?,
        order: l.integers_out(2)?,
        places: l.integers_out(3)?,
        offsets: l.integers_out(4)?,
        dropped: wanted(5)?,
    };
    route::route(cpu, choice, logits, to, l.workspace()?);
    Ok(())
}

pub(in super::super) fn route_grad(l: &Operands<'_>, cpu: &Cpu, op: &RouteGrad) -> Result<(), DeviceError> {
    let logits = l.input(1)?;
    let (experts, places) = (l.ids(2, logits.cols())?, l.slots(3)?);
    let chosen = route::Chosen { renormalise: op.renormalise, logits, experts, places };
    route::route_grad(cpu, chosen, l.input(0)?, l.output(0)?);
    Ok(())
}

pub(in super::super) fn router_loss(l: &Operands<'_>, cpu: &Cpu, op: &RouterLoss) -> Result<(), DeviceError> {
    let logits = l.input(0)?;
    let weights = router_loss::Weights { balance: op.balance, z: op.z };
    let experts = l.ids(1, logits.cols())?;
    let losses = router_loss::router_loss(cpu, weights, logits, experts, l.workspace()?);
    for (k, value) in [losses.sum, losses.balance, losses.z].into_iter().enumerate() {
        if let Some(out) = l.vector_out(k)? {
            out.fill(value);
        }
    }
    Ok(())
}

pub(in super::super) fn router_loss_grad(
    l: &Operands<'_>,
    cpu: &Cpu,
    op: &RouterLossGrad,
) -> Result<(), DeviceError> {
    let logits = l.input(1)?;
    let weights = router_loss::Weights { balance: op.balance, z: op.z };
    let (dloss, experts) = (l.vector(0)?[0], l.ids(2, logits.cols())?);
    router_loss::router_loss_grad(cpu, weights, dloss, logits, experts, l.output(0)?, l.workspace()?);
    Ok(())
}
