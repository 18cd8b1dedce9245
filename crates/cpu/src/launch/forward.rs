//! Launches of norms, gated activations and other small inference ops. Invariant: every precondition of a kernel is
//! checked here.

use super::Launched;
use super::backward::gate;
use crate::launch::operands::Operands;
use crate::rows::quantize::{self, Of};
use crate::{Bf16, Cpu, Element, rows::elementwise, rows::embed, rows::norm, rows::reduce, rows::rope};
use plimsoll_graph::DType;
use plimsoll_graph::ops::*;

pub(crate) fn add<E: Element>(l: &Operands<'_>, cpu: &Cpu, _: &Add) -> Launched {
    elementwise::add::<E>(cpu, l.input(0)?, l.input(1)?, l.output(0)?);
    Ok(())
}

pub(crate) fn batch_norm(l: &Operands<'_>, cpu: &Cpu, op: &BatchNorm) -> Launched {
    let [gamma, beta, mean, var] = [l.vector(1)?, l.vector(2)?, l.vector(3)?, l.vector(4)?];
    let norm = norm::BatchNorm { gamma, beta, mean, var, eps: op.eps };
    norm::batch_norm(cpu, l.input(0)?, norm, l.output(0)?);
    Ok(())
}

pub(crate) fn concat<E: Element>(l: &Operands<'_>, cpu: &Cpu, _: &Concat) -> Launched {
    let mut y = l.output::<E>(0)?;
    let mut column = 0;
    for i in 0..l.launch.ins.len() {
        let x = l.input(i)?;
        elementwise::copy(cpu, x, y.columns(column, x.cols()));
        column += x.cols();
    }
    Ok(())
}

pub(crate) fn embed<E: Element>(l: &Operands<'_>, cpu: &Cpu, op: &Embed) -> Launched {
    let table = l.input::<E>(1)?;
    let ids = l.ids(0, table.rows())?;
    let y = l.output(0)?;
    let plus = op.row.then(|| l.vector(2)).transpose()?;
    match op.token_dropout {
        Some(dropout) => {
            let spans = l.spans(2 + usize::from(op.row), ids.len())?;
            embed::gather_esm(cpu, ids, spans, dropout.mask_id as u32, dropout.keep, table, plus, y);
        }
        None => embed::gather(cpu, ids, table, plus, y),
    }
    Ok(())
}

pub(crate) fn gelu<E: Element>(l: &Operands<'_>, cpu: &Cpu, _: &Gelu) -> Launched {
    elementwise::gelu::<E>(cpu, l.input(0)?, l.output(0)?);
    Ok(())
}

pub(crate) fn glu<E: Element>(l: &Operands<'_>, cpu: &Cpu, op: &Glu) -> Launched {
    elementwise::glu::<E>(cpu, gate(op.activation), l.input(0)?, l.output(0)?);
    Ok(())
}

pub(crate) fn layer_norm<E: Element>(l: &Operands<'_>, cpu: &Cpu, op: &LayerNorm) -> Launched {
    match params_in_bf16(l) {
        true => layer_norm_by::<E, Bf16>(l, cpu, op),
        false => layer_norm_by::<E, f32>(l, cpu, op),
    }
}

/// Whether a norm reads gamma and beta as bf16. Models may store them in f32 even where activations are bf16.
fn params_in_bf16(l: &Operands<'_>) -> bool {
    !l.widened && l.launch.ins[1].spec.dtype == DType::Bf16
}

fn layer_norm_by<E: Element, P: Element>(l: &Operands<'_>, cpu: &Cpu, op: &LayerNorm) -> Launched {
    let gamma = l.vector::<P>(1)?;
    let beta = l.vector(2)?;
    let y = l.output_if::<E>(0)?;
    let mean = l.vector_out(1)?;
    let rstd = l.vector_out(2)?;
    norm::layer_norm(cpu, l.input(0)?, gamma, beta, op.eps, y, mean, rstd);
    Ok(())
}

pub(crate) fn quantize<E: Element>(l: &Operands<'_>, cpu: &Cpu, op: &Quantize) -> Launched {
    let of = match op.of {
        Quantized::Rows => Of::Rows,
        Quantized::Gelu(_) => Of::Gelu,
        Quantized::Glu(op) => Of::Glu(gate(op.activation)),
        Quantized::LayerNorm(op) => {
            return match params_in_bf16(l) {
                true => quantize_norm_by::<E, Bf16>(l, cpu, &op),
                false => quantize_norm_by::<E, f32>(l, cpu, &op),
            };
        }
    };
    quantize_as::<E, f32>(l, cpu, of)
}

fn quantize_norm_by<E: Element, P: Element>(l: &Operands<'_>, cpu: &Cpu, op: &LayerNorm) -> Launched {
    quantize_as::<E, P>(l, cpu, Of::LayerNorm { gamma: l.vector(1)?, beta: l.vector(2)?, eps: op.eps })
}

fn quantize_as<E: Element, P: Element>(l: &Operands<'_>, cpu: &Cpu, of: Of<'_, P>) -> Launched {
    // Plain rows are quantized only. The other forms also have the unquantized y as output 1.
    let y = if l.launch.outs.len() > 1 { l.output_if::<E>(1)? } else { None };
    quantize::quantize(cpu, of, l.input::<E>(0)?, l.codes_out(0)?, y, l.workspace()?);
    Ok(())
}

pub(crate) fn relu<E: Element>(l: &Operands<'_>, cpu: &Cpu, _: &Relu) -> Launched {
    elementwise::relu::<E>(cpu, l.input(0)?, l.output(0)?);
    Ok(())
}

pub(crate) fn rms_norm<E: Element>(l: &Operands<'_>, cpu: &Cpu, op: &RmsNorm) -> Launched {
    match params_in_bf16(l) {
        true => rms_norm_by::<E, Bf16>(l, cpu, op),
        false => rms_norm_by::<E, f32>(l, cpu, op),
    }
}

fn rms_norm_by<E: Element, P: Element>(l: &Operands<'_>, cpu: &Cpu, op: &RmsNorm) -> Launched {
    let heads = op.heads as usize;
    let x = l.input::<E>(0)?.by_heads(heads);
    let gamma = l.vector::<P>(1)?;
    let y = l.output_if::<E>(0)?.map(|y| y.by_heads(heads));
    norm::rms_norm(cpu, x, gamma, op.eps, y, l.vector_out(1)?);
    Ok(())
}

pub(crate) fn rotary_table(l: &Operands<'_>, _: &RotaryTable) -> Launched {
    let inv_freq = l.vector(0)?;
    let cos = l.flat_out(0)?;
    let sin = l.flat_out(1)?;
    rope::table(inv_freq, cos.len() / inv_freq.len().max(1), cos, sin);
    Ok(())
}

pub(crate) fn scale<E: Element>(l: &Operands<'_>, cpu: &Cpu, op: &Scale) -> Launched {
    elementwise::scale::<E>(cpu, op.factor, l.input(0)?, l.output(0)?);
    Ok(())
}

pub(crate) fn segment_mean<E: Element>(l: &Operands<'_>, cpu: &Cpu, op: &SegmentMean) -> Launched {
    let x = l.input::<E>(0)?;
    let first = op.skip_first as usize;
    let last = op.skip_last as usize;
    reduce::segment_mean(cpu, x, l.spans(1, x.rows())?, first, last, l.output(0)?);
    Ok(())
}

pub(crate) fn select_rows<E: Element>(l: &Operands<'_>, cpu: &Cpu, _: &SelectRows) -> Launched {
    let x = l.input::<E>(0)?;
    embed::gather(cpu, l.ids(1, x.rows())?, x, None, l.output(0)?);
    Ok(())
}
