//! Launches of attention and of its gradient. Invariant: what a kernel relies on is checked here.

use super::super::Cpu;
use super::super::attention::{self, Rope};
use super::super::operands::Operands;
use crate::device::DeviceError;
use graph::ops::{Attention, AttentionGrad, Bias, Mask, Qkv, alibi_slopes};

/// As many heads as a launch can have without allocating their slopes.
const MAX_HEADS: usize = 128;

pub(in super::super) fn attention(l: &Operands<'_>, cpu: &Cpu, op: &Attention) -> Result<(), DeviceError> {
    if op.mask != Mask::Full || op.kv_heads != op.heads {
        return Err(l.refuse("the CPU's kernel has no masks and no shared heads".to_owned()));
    }
    let width = op.width() as usize;
    let [q, k, v] = match op.qkv {
        Qkv::Separate => [l.input(0)?, l.input(1)?, l.input(2)?],
        Qkv::Fused => {
            let qkv = l.input(0)?;
            [0, 1, 2].map(|i| qkv.columns(i * width, width))
        }
    };
    let after = op.operands();
    let spans = l.spans(after, q.rows())?;
    let rope =
        if op.rotary { Some(Rope { cos: l.vector(after + 1)?, sin: l.vector(after + 2)? }) } else { None };
    let mut slopes = [0.0; MAX_HEADS];
    let heads = op.heads as usize;
    if heads > MAX_HEADS {
        return Err(l.refuse(format!("{heads} heads are more than {MAX_HEADS}")));
    }
    let slopes = match op.bias {
        Bias::None => None,
        Bias::Alibi => {
            for (slot, slope) in slopes.iter_mut().zip(alibi_slopes(op.heads)) {
                *slot = slope;
            }
            Some(&slopes[..heads])
        }
    };
    let shape = attention::Attention { heads, head_dim: op.head_dim as usize, scale: op.scale, rope, slopes };
    let lse = l.launch.outs[1].as_ref().map(|_| l.output(1)).transpose()?;
    attention::attention(cpu, shape, q, k, v, spans, l.output(0)?, lse, l.workspace()?);
    Ok(())
}

pub(in super::super) fn attention_grad(
    l: &Operands<'_>,
    _: &Cpu,
    _: &AttentionGrad,
) -> Result<(), DeviceError> {
    Err(l.refuse("the CPU has no kernel for it".to_owned()))
}
