//! Launches of attention and its gradient. Invariant: every precondition of a kernel is checked here.

use crate::attention::{
    self, AttentionConfig, AttentionGradients, AttentionOperands, RotaryTables, SavedForward,
};
use crate::launch::operands::LaunchOperands;
use crate::{Cpu, Element, Rows};
use plimsoll_exec::DeviceError;
use plimsoll_graph::ops::{Attention, AttentionGrad, Bias, Qkv, alibi_slopes};

/// Maximum number of heads of a launch. Fixed, so that the ALiBi slopes fit on the stack without an allocation.
const MAX_HEADS: usize = plimsoll_plan::MAX_HEADS as usize;

pub(crate) fn attention_f32(l: &LaunchOperands<'_>, cpu: &Cpu, op: &Attention) -> Result<(), DeviceError> {
    let mut slopes = [0.0; MAX_HEADS];
    let config = config(l, op, 0, &mut slopes)?;
    attention::attention::<f32>(cpu, config, operands(l, op)?, l.workspace()?);
    Ok(())
}

pub(crate) fn attention_bf16(l: &LaunchOperands<'_>, cpu: &Cpu, op: &Attention) -> Result<(), DeviceError> {
    let mut slopes = [0.0; MAX_HEADS];
    let config = config(l, op, 0, &mut slopes)?;
    attention::attention_bf16(cpu, config, operands(l, op)?, l.workspace()?);
    Ok(())
}

/// Inputs and outputs of the forward pass.
fn operands<'a, E: Element>(
    l: &LaunchOperands<'a>,
    op: &Attention,
) -> Result<AttentionOperands<'a, E>, DeviceError> {
    let [q, k, v] = qkv(l, op, 0)?;
    let spans = l.spans(op.operands(), q.rows())?;
    Ok(AttentionOperands { q, k, v, spans, o: l.output(0)?, lse: l.output_if(1)? })
}

pub(crate) fn attention_grad(l: &LaunchOperands<'_>, cpu: &Cpu, op: &AttentionGrad) -> Result<(), DeviceError> {
    let op = &op.forward;
    let [q, k, v] = qkv(l, op, 1)?;
    let o = l.input(1 + op.inputs())?;
    let lse = l.input(2 + op.inputs())?;
    let gradient = l.input(0)?;
    let spans = l.spans(1 + op.operands(), q.rows())?;
    let saved = SavedForward { q, k, v, o, lse, gradient, spans };
    let mut slopes = [0.0; MAX_HEADS];
    let config = config(l, op, 1, &mut slopes)?;
    // With fused q, k and v, three handles of one matrix are taken. They never write the same column.
    let [mut dq, mut dk, mut dv] = match op.qkv {
        Qkv::Separate => [l.output_if(0)?, l.output_if(1)?, l.output_if(2)?],
        Qkv::Fused => [l.output_if(0)?, l.output_if(0)?, l.output_if(0)?],
    };
    let [q_columns, k_columns, v_columns] = columns(op);
    let gradients = AttentionGradients {
        q: dq.as_mut().map(|dq| dq.columns(q_columns.first, q_columns.count)),
        k: dk.as_mut().map(|dk| dk.columns(k_columns.first, k_columns.count)),
        v: dv.as_mut().map(|dv| dv.columns(v_columns.first, v_columns.count)),
    };
    attention::attention_grad(cpu, config, saved, gradients, l.workspace()?);
    Ok(())
}

/// Views of q, k and v (T, heads x head_dim). Their inputs begin at index `first`; fused q, k and v share one input.
fn qkv<'a, E: Element>(
    l: &LaunchOperands<'a>,
    op: &Attention,
    first: usize,
) -> Result<[Rows<'a, E>; 3], DeviceError> {
    let [q, k, v] = match op.qkv {
        Qkv::Separate => [l.input(first)?, l.input(first + 1)?, l.input(first + 2)?],
        Qkv::Fused => [l.input(first)?; 3],
    };
    let [q_columns, k_columns, v_columns] = columns(op);
    Ok([
        q.columns(q_columns.first, q_columns.count),
        k.columns(k_columns.first, k_columns.count),
        v.columns(v_columns.first, v_columns.count),
    ])
}

/// Columns `first..first + count` of a matrix.
struct ColumnRange {
    first: usize,
    count: usize,
}

/// Columns of q, k and v, each in its own matrix.
fn columns(op: &Attention) -> [ColumnRange; 3] {
    let q = op.width() as usize;
    let kv = op.kv_width() as usize;
    let [k_first, v_first] = match op.qkv {
        Qkv::Separate => [0, 0],
        Qkv::Fused => [q, q + kv],
    };
    [
        ColumnRange { first: 0, count: q },
        ColumnRange { first: k_first, count: kv },
        ColumnRange { first: v_first, count: kv },
    ]
}

/// Converts the op's attributes to the kernel's configuration. The inputs of the forward pass begin at index `first`;
/// `slopes` is the storage for the ALiBi slopes.
fn config<'a>(
    l: &LaunchOperands<'a>,
    op: &Attention,
    first: usize,
    slopes: &'a mut [f32; MAX_HEADS],
) -> Result<AttentionConfig<'a>, DeviceError> {
    let heads = op.heads as usize;
    let head_dim = op.head_dim as usize;
    if heads > MAX_HEADS {
        return Err(l.refuse(format!("{heads} heads are more than {MAX_HEADS}")));
    }
    if head_dim > attention::MAX_HEAD_DIM {
        let most = attention::MAX_HEAD_DIM;
        return Err(l.refuse(format!("a head of {head_dim} columns is wider than {most}")));
    }
    let table = first + op.operands() + 1;
    let rope =
        if op.rotary { Some(RotaryTables { cos: l.vector(table)?, sin: l.vector(table + 1)? }) } else { None };
    let slopes = match op.bias {
        Bias::None => None,
        Bias::Alibi => {
            for (slot, slope) in slopes.iter_mut().zip(alibi_slopes(op.heads)) {
                *slot = slope;
            }
            Some(&slopes[..heads])
        }
    };
    let kv_heads = op.kv_heads as usize;
    Ok(AttentionConfig { heads, kv_heads, head_dim, scale: op.scale, mask: op.mask, rope, slopes })
}
