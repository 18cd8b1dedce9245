//! Launches of matmuls whose operands change in every step: gradients of linear layers, expert matmuls and the fused
//! cross-entropy loss. Invariant: every precondition of a kernel is checked here.

use crate::launch::operands::LaunchOperands;
use crate::matmul::MatmulEpilogue;
use crate::matmul::grouped::{self, ExpertInputGrad, ExpertLinear, ExpertWeightGrad};
use crate::matmul::row_major::{Factor, MatmulCall, column_sums, matmul};
use crate::training::cross_entropy::{self, CrossEntropyHead, HeadGradients, SavedLoss};
use crate::{Cpu, Rows};
use plimsoll_exec::DeviceError;
use plimsoll_graph::ops::*;

pub(crate) fn grouped_linear(l: &LaunchOperands<'_>, cpu: &Cpu, op: &GroupedLinear) -> Result<(), DeviceError> {
    let x = l.input(0)?;
    let bias = op.bias.then(|| l.vector(2)).transpose()?;
    let offsets = offsets(l, 2 + usize::from(op.bias), x.rows())?;
    let layer = ExpertLinear { x, w: l.input(1)?, bias, offsets, y: l.output(0)? };
    grouped::linear(cpu, layer, l.workspace()?);
    Ok(())
}

pub(crate) fn grouped_linear_input_grad(
    l: &LaunchOperands<'_>,
    cpu: &Cpu,
    _: &GroupedLinearInputGrad,
) -> Result<(), DeviceError> {
    let dy = l.input(0)?;
    let offsets = offsets(l, 2, dy.rows())?;
    let grad = ExpertInputGrad { dy, w: l.input(1)?, offsets, dx: l.output(0)? };
    grouped::input_grad(cpu, grad, l.workspace()?);
    Ok(())
}

pub(crate) fn grouped_linear_weight_grad(
    l: &LaunchOperands<'_>,
    cpu: &Cpu,
    op: &GroupedLinearWeightGrad,
) -> Result<(), DeviceError> {
    let dy = l.input(0)?;
    let offsets = offsets(l, 2, dy.rows())?;
    let dw = l.output_if(0)?;
    let db = if op.bias { l.vector_out(1)? } else { None };
    grouped::weight_grad(cpu, ExpertWeightGrad { dy, x: l.input(1)?, offsets, dw, db }, l.workspace()?);
    Ok(())
}

pub(crate) fn linear_cross_entropy(
    l: &LaunchOperands<'_>,
    cpu: &Cpu,
    op: &LinearCrossEntropy,
) -> Result<(), DeviceError> {
    let head = head(l, op, 0)?;
    let losses = cross_entropy::loss(cpu, head, l.vector_out(1)?, l.workspace()?);
    let terms = [(2, losses.cross_entropy), (3, losses.z)];
    let terms = terms.into_iter().filter(|_| op.z_loss != 0.0);
    for (k, value) in std::iter::once((0, losses.sum)).chain(terms) {
        if let Some(out) = l.vector_out(k)? {
            out[0] = value;
        }
    }
    Ok(())
}

pub(crate) fn linear_cross_entropy_grad(
    l: &LaunchOperands<'_>,
    cpu: &Cpu,
    op: &LinearCrossEntropyGrad,
) -> Result<(), DeviceError> {
    let head = head(l, &op.forward, 1)?;
    let lse = l.vector(4 + usize::from(op.forward.bias))?;
    let db = if op.forward.bias { l.vector_out(2)? } else { None };
    let to = HeadGradients { dx: l.output_if(0)?, dw: l.output_if(1)?, db };
    let saved = SavedLoss { dloss: l.vector(0)?[0], lse };
    cross_entropy::gradients(cpu, head, saved, to, l.workspace()?);
    Ok(())
}

pub(crate) fn linear_input_grad(
    l: &LaunchOperands<'_>,
    cpu: &Cpu,
    _: &LinearInputGrad,
) -> Result<(), DeviceError> {
    let call = MatmulCall {
        a: Factor::Stored(l.input(0)?),
        b: Factor::Stored(l.input(1)?),
        epilogue: MatmulEpilogue::default(),
        y: l.output(0)?,
    };
    matmul(cpu, call, l.workspace()?);
    Ok(())
}

pub(crate) fn linear_weight_grad(
    l: &LaunchOperands<'_>,
    cpu: &Cpu,
    op: &LinearWeightGrad,
) -> Result<(), DeviceError> {
    let dy: Rows<'_> = l.input(0)?;
    let x = l.input(1)?;
    if l.launch.outs[0].is_some() {
        let call = MatmulCall {
            a: Factor::Transposed(dy),
            b: Factor::Stored(x),
            epilogue: MatmulEpilogue::default(),
            y: l.output(0)?,
        };
        matmul(cpu, call, l.workspace()?);
    }
    if op.bias
        && let Some(db) = l.vector_out(1)?
    {
        column_sums(cpu, dy, false, db);
    }
    Ok(())
}

/// Operands of a fused cross-entropy whose x is input `x`. `Err` if a target is not below the number of classes;
/// negative targets are ignored positions.
fn head<'a>(
    l: &LaunchOperands<'a>,
    op: &LinearCrossEntropy,
    x: usize,
) -> Result<CrossEntropyHead<'a>, DeviceError> {
    let w = l.input(x + 1)?;
    let bias = op.bias.then(|| l.vector(x + 2)).transpose()?;
    let targets: &[i32] = bytemuck::cast_slice(l.words(x + 2 + usize::from(op.bias))?);
    if let Some(target) = targets.iter().find(|&&t| t >= 0 && t as usize >= w.rows()) {
        return Err(l.refuse(format!("target {target} of {} classes", w.rows())));
    }
    let chunk = op.chunk as usize;
    Ok(CrossEntropyHead { x: l.input(x)?, w, bias, targets, chunk, z_loss: op.z_loss })
}

/// Row offsets of the experts: expert `e` has rows `offsets[e]..offsets[e + 1]`. `Err` unless they start at 0, ascend
/// and end within `rows`.
fn offsets<'a>(l: &LaunchOperands<'a>, i: usize, rows: usize) -> Result<&'a [u32], DeviceError> {
    let offsets = l.words(i)?;
    let ascending = offsets.first() == Some(&0) && offsets.is_sorted();
    if !offsets.last().is_some_and(|&end| ascending && end as usize <= rows) {
        return Err(l.refuse(format!("offsets {offsets:?} of {rows} rows")));
    }
    Ok(offsets)
}
