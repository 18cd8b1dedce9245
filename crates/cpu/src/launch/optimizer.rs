//! Launches of optimizer ops: gradient accumulation, gradient scaling and parameter updates. Invariant: every
//! precondition of a kernel is checked here. Element types follow the kernel table, shapes the rules of the ops.

use crate::Cpu;
use crate::launch::operands::LaunchOperands;
use crate::rows::cast::Float16;
use crate::training::accumulate::{Accumulator, accumulate as add};
use crate::training::adafactor::{Factored, adafactor as factored};
use crate::training::optimizer::{self, GradientScale, ScaledGradient};
use crate::training::optimizer_8bit::{self, QuantizedAdamWStates, QuantizedMoment};
use crate::training::optimizer_state::{Gradient, OptimizerState};
use plimsoll_exec::DeviceError;
use plimsoll_graph::DType;
use plimsoll_graph::ops::*;

pub(crate) fn accumulate(l: &LaunchOperands<'_>, cpu: &Cpu, _: &Accumulate) -> Result<(), DeviceError> {
    let acc = match l.launch.ins[0].spec.dtype {
        DType::F32 => Accumulator::F32(state(l, 0, 0, DType::F32)?),
        DType::Bf16 => Accumulator::Float16(Float16::Bf16, state(l, 0, 0, DType::Bf16)?),
        DType::F16 => Accumulator::Float16(Float16::F16, state(l, 0, 0, DType::F16)?),
        DType::F8 | DType::I8 | DType::I32 | DType::U8 => {
            return Err(l.refuse(format!("{} are not gradients", l.launch.ins[0].spec)));
        }
    };
    add(cpu, acc, gradient(l, 1)?, l.vector::<f32>(2)?[0] != 0.0);
    Ok(())
}

pub(crate) fn adafactor(l: &LaunchOperands<'_>, cpu: &Cpu, op: &Adafactor) -> Result<(), DeviceError> {
    let p = state(l, 0, 0, DType::F32)?;
    let matrix = l.launch.ins[0].spec.shape.len() == 2;
    let row = matrix.then(|| state(l, 2, 1, DType::F32)).transpose()?;
    let last = usize::from(matrix);
    let column = state(l, 2 + last, 1 + last, DType::F32)?;
    let scale = scale(l, 3 + last)?;
    let hyper = numbers(l, 4 + last)?;
    let gradient = ScaledGradient { g: gradient(l, 1)?, scale };
    factored(cpu, op, gradient, Factored { p, row, column }, hyper);
    Ok(())
}

pub(crate) fn adamw(l: &LaunchOperands<'_>, cpu: &Cpu, op: &AdamW) -> Result<(), DeviceError> {
    let states = [state(l, 0, 0, DType::F32)?, state(l, 2, 1, DType::F32)?, state(l, 3, 2, DType::F32)?];
    let gradient = ScaledGradient { g: gradient(l, 1)?, scale: scale(l, 4)? };
    optimizer::adamw(cpu, op, gradient, states, numbers(l, 5)?);
    Ok(())
}

pub(crate) fn adamw_8bit(l: &LaunchOperands<'_>, cpu: &Cpu, op: &AdamW8bit) -> Result<(), DeviceError> {
    let p = state(l, 0, 0, DType::F32)?;
    let states = QuantizedAdamWStates { p, m: moment(l, 2, 1)?, v: moment(l, 4, 3)? };
    let gradient = ScaledGradient { g: gradient(l, 1)?, scale: scale(l, 6)? };
    optimizer_8bit::adamw_8bit(cpu, &op.adamw, gradient, states, numbers(l, 7)?);
    Ok(())
}

/// A quantized moment: inputs `i` and `i + 1`, outputs `k` and `k + 1`.
fn moment<'a>(l: &LaunchOperands<'a>, i: usize, k: usize) -> Result<QuantizedMoment<'a>, DeviceError> {
    let values = state(l, i, k, DType::U8)?;
    Ok(QuantizedMoment { values, absmax: state(l, i + 1, k + 1, DType::F32)? })
}

pub(crate) fn ema(l: &LaunchOperands<'_>, cpu: &Cpu, op: &Ema) -> Result<(), DeviceError> {
    let [steps] = numbers(l, 3)?;
    let parameter = gradient(l, 1)?;
    optimizer::ema(cpu, op.weight(steps), parameter, state(l, 0, 0, DType::F32)?, scale(l, 2)?.ok);
    Ok(())
}

pub(crate) fn count_steps(l: &LaunchOperands<'_>, _: &CountSteps) -> Result<(), DeviceError> {
    let [steps] = numbers(l, 0)?;
    let scale = scale(l, 1)?;
    if let Some(out) = l.vector_out(0)? {
        out[0] = if scale.ok { (steps + 1.0).min(CountSteps::MOST) } else { steps };
    }
    Ok(())
}

pub(crate) fn grad_scale(l: &LaunchOperands<'_>, cpu: &Cpu, op: &GradScale) -> Result<(), DeviceError> {
    let last = l.launch.ins.len() - 1;
    // Checks all gradients first: the iterator below, which avoids an allocation, cannot return an error.
    (0..last).try_for_each(|i| gradient(l, i).map(drop))?;
    let grads = (0..last).filter_map(|i| gradient(l, i).ok());
    let (scale, norm) = optimizer::grad_scale(cpu, op, grads, l.vector(last)?[0]);
    if let Some(out) = l.vector_out(0)? {
        out.copy_from_slice(&[scale.factor, f32::from(u8::from(scale.ok))]);
    }
    if let Some(out) = l.vector_out(1)? {
        out[0] = norm;
    }
    Ok(())
}

pub(crate) fn sgd(l: &LaunchOperands<'_>, cpu: &Cpu, op: &Sgd) -> Result<(), DeviceError> {
    let p = state(l, 0, 0, DType::F32)?;
    let g = gradient(l, 1)?;
    if op.momentum == 0.0 {
        let [lr] = numbers(l, 3)?;
        optimizer::sgd(cpu, op, ScaledGradient { g, scale: scale(l, 2)? }, p, lr);
    } else {
        let [lr] = numbers(l, 4)?;
        let states = [p, state(l, 2, 1, DType::F32)?];
        optimizer::sgd_momentum(cpu, op, ScaledGradient { g, scale: scale(l, 3)? }, states, lr);
    }
    Ok(())
}

/// Pairs input `i`, the old values, with output `k`, the new values. `Err` if the input's type is not `dtype`.
fn state<'a, T>(
    l: &LaunchOperands<'a>,
    i: usize,
    k: usize,
    dtype: DType,
) -> Result<OptimizerState<'a, T>, DeviceError> {
    let old = &l.launch.ins[i];
    let new = l.wanted(k)?;
    if old.spec.dtype != dtype || dtype.size() != size_of::<T>() as u64 {
        return Err(l.refuse(format!("no kernel for {}", old.spec)));
    }
    let len = old.spec.elements_at(l.launch.counts) as usize;
    let bytes = old.bytes(l.launch.counts);
    let old = l.arena.range(old.at, bytes)?.as_ptr().cast::<T>();
    let new = l.arena.range(new.at, bytes)?.as_ptr().cast::<T>();
    // SAFETY: both ranges lie inside the arena and have the same type; the output overlaps this input exactly or no
    // operand.
    Ok(unsafe { OptimizerState::from_raw(old, new, len) })
}

/// Input `i` as a gradient, in f32, bf16 or f16.
fn gradient<'a>(l: &LaunchOperands<'a>, i: usize) -> Result<Gradient<'a>, DeviceError> {
    let o = &l.launch.ins[i];
    let start = l.arena.range(o.at, o.bytes(l.launch.counts))?.as_ptr();
    let len = o.spec.elements_at(l.launch.counts) as usize;
    match o.spec.dtype {
        // SAFETY: inside the arena, at a multiple of the target's alignment; no output may overlap a gradient.
        DType::F32 => Ok(Gradient::F32(unsafe { std::slice::from_raw_parts(start.cast(), len) })),
        DType::Bf16 => {
            // SAFETY: as above.
            let values = unsafe { std::slice::from_raw_parts(start.cast(), len) };
            Ok(Gradient::Float16(Float16::Bf16, values))
        }
        DType::F16 => {
            // SAFETY: as above.
            let values = unsafe { std::slice::from_raw_parts(start.cast(), len) };
            Ok(Gradient::Float16(Float16::F16, values))
        }
        DType::F8 | DType::I8 | DType::I32 | DType::U8 => {
            Err(l.refuse(format!("{} is not a gradient", o.spec)))
        }
    }
}

/// Input `i` as a gradient scale: two f32, (factor, whether the gradients are finite).
fn scale(l: &LaunchOperands<'_>, i: usize) -> Result<GradientScale, DeviceError> {
    let [factor, ok] = numbers(l, i)?;
    Ok(GradientScale { factor, ok: ok != 0.0 })
}

/// Input `i` as exactly `N` f32 values. `Err` if it has another length.
fn numbers<const N: usize>(l: &LaunchOperands<'_>, i: usize) -> Result<[f32; N], DeviceError> {
    let wanted = l.vector(i)?.try_into();
    wanted.map_err(|_| l.refuse(format!("{} are no {N} numbers", l.launch.ins[i].spec)))
}
