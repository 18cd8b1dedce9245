//! Launches of attention and its gradient. Invariant: every precondition of a kernel is checked here.

use crate::attention::{self, Gradients, Rope, SavedForward};
use crate::launch::operands::Operands;
use crate::{Cpu, Element, Rows};
use plimsoll_exec::DeviceError;
use plimsoll_graph::ops::{Attention, AttentionGrad, Bias, Qkv, alibi_slopes};

/// Maximum number of heads of a launch. Fixed, so that the ALiBi slopes fit on the stack without an allocation.
const MAX_HEADS: usize = plimsoll_plan::MAX_HEADS as usize;

pub(crate) fn attention_f32(l: &Operands<'_>, cpu: &Cpu, op: &Attention) -> Result<(), DeviceError> {
    let mut slopes = [0.0; MAX_HEADS];
    let config = config(l, op, 0, &mut slopes)?;
    let [q, k, v] = qkv(l, op, 0)?;
    let spans = l.spans(op.operands(), q.rows())?;
    attention::attention::<f32>(cpu, config, q, k, v, spans, l.output(0)?, l.output_if(1)?, l.workspace()?);
    Ok(())
}

pub(crate) fn attention_bf16(l: &Operands<'_>, cpu: &Cpu, op: &Attention) -> Result<(), DeviceError> {
    let mut slopes = [0.0; MAX_HEADS];
    let config = config(l, op, 0, &mut slopes)?;
    let [q, k, v] = qkv(l, op, 0)?;
    let spans = l.spans(op.operands(), q.rows())?;
    attention::attention_bf16(cpu, config, q, k, v, spans, l.output(0)?, l.output_if(1)?, l.workspace()?);
    Ok(())
}

pub(crate) fn attention_grad(l: &Operands<'_>, cpu: &Cpu, op: &AttentionGrad) -> Result<(), DeviceError> {
    let op = &op.forward;
    let [q, k, v] = qkv(l, op, 1)?;
    let o = l.input(1 + op.inputs())?;
    let lse = l.input(2 + op.inputs())?;
    let given = SavedForward { q, k, v, o, lse, gradient: l.input(0)? };
    let spans = l.spans(1 + op.operands(), q.rows())?;
    let mut slopes = [0.0; MAX_HEADS];
    let config = config(l, op, 1, &mut slopes)?;
    // With fused q, k and v, three handles of one matrix are taken. They never write the same column.
    let [mut dq, mut dk, mut dv] = match op.qkv {
        Qkv::Separate => [l.output_if(0)?, l.output_if(1)?, l.output_if(2)?],
        Qkv::Fused => [l.output_if(0)?, l.output_if(0)?, l.output_if(0)?],
    };
    let [at_q, at_k, at_v] = columns(op);
    let wanted = Gradients {
        q: dq.as_mut().map(|dq| dq.columns(at_q.0, at_q.1)),
        k: dk.as_mut().map(|dk| dk.columns(at_k.0, at_k.1)),
        v: dv.as_mut().map(|dv| dv.columns(at_v.0, at_v.1)),
    };
    attention::attention_grad(cpu, config, given, spans, wanted, l.workspace()?);
    Ok(())
}

/// Views of q, k and v (T, heads x head_dim). Their inputs begin at index `first`; fused q, k and v share one input.
fn qkv<'a, E: Element>(
    l: &Operands<'a>,
    op: &Attention,
    first: usize,
) -> Result<[Rows<'a, E>; 3], DeviceError> {
    let [q, k, v] = match op.qkv {
        Qkv::Separate => [l.input(first)?, l.input(first + 1)?, l.input(first + 2)?],
        Qkv::Fused => [l.input(first)?; 3],
    };
    let [at_q, at_k, at_v] = columns(op);
    Ok([q.columns(at_q.0, at_q.1), k.columns(at_k.0, at_k.1), v.columns(at_v.0, at_v.1)])
}

/// First column and number of columns of q, k and v, each in its own matrix.
fn columns(op: &Attention) -> [(usize, usize); 3] {
    let q = op.width() as usize;
    let kv = op.kv_width() as usize;
    match op.qkv {
        Qkv::Separate => [(0, q), (0, kv), (0, kv)],
        Qkv::Fused => [(0, q), (q, kv), (q + kv, kv)],
    }
}

/// Converts the op's attributes to the kernel's configuration. The inputs of the forward pass begin at index `first`;
/// `slopes` is the storage for the ALiBi slopes.
fn config<'a>(
    l: &Operands<'a>,
    op: &Attention,
    first: usize,
    slopes: &'a mut [f32; MAX_HEADS],
) -> Result<attention::Attention<'a>, DeviceError> {
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
    let rope = if op.rotary { Some(Rope { cos: l.vector(table)?, sin: l.vector(table + 1)? }) } else { None };
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
    Ok(attention::Attention { heads, kv_heads, head_dim, scale: op.scale, mask: op.mask, rope, slopes })
}
