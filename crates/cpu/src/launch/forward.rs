//! Launches of norms, gated activations and other small inference ops. Invariant: every precondition of a kernel is
//! checked here.

use super::Launched;
use super::backward::gate;
use crate::launch::operands::LaunchOperands;
use crate::rows::embed::{self, EmbeddingTable, EsmTokenDropout};
use crate::rows::norm::{self, LayerNormOutputs, LayerNormParams, RmsNormParams};
use crate::rows::quantize::{self, FusedOp, QuantizeOutputs};
use crate::rows::reduce::{self, MeanSpans};
use crate::{Bf16, Cpu, Element, rows::elementwise, rows::rope};
use plimsoll_exec::DeviceError;
use plimsoll_graph::DType;
use plimsoll_graph::ops::*;

pub(crate) fn add<E: Element>(l: &LaunchOperands<'_>, cpu: &Cpu, _: &Add) -> Launched {
    elementwise::add::<E>(cpu, l.input(0)?, l.input(1)?, l.output(0)?);
    Ok(())
}

pub(crate) fn batch_norm(l: &LaunchOperands<'_>, cpu: &Cpu, op: &BatchNorm) -> Launched {
    let [gamma, beta, mean, var] = [l.vector(1)?, l.vector(2)?, l.vector(3)?, l.vector(4)?];
    let norm = norm::RunningBatchNorm { gamma, beta, mean, var, eps: op.eps };
    norm::batch_norm(cpu, l.input(0)?, norm, l.output(0)?);
    Ok(())
}

pub(crate) fn concat<E: Element>(l: &LaunchOperands<'_>, cpu: &Cpu, _: &Concat) -> Launched {
    let mut y = l.output::<E>(0)?;
    let mut column = 0;
    for i in 0..l.launch.ins.len() {
        let x = l.input(i)?;
        elementwise::copy(cpu, x, y.columns(column, x.cols()));
        column += x.cols();
    }
    Ok(())
}

pub(crate) fn embed<E: Element>(l: &LaunchOperands<'_>, cpu: &Cpu, op: &Embed) -> Launched {
    let table = l.input::<E>(1)?;
    let ids = l.ids(0, table.rows())?;
    let y = l.output(0)?;
    let plus = op.row.then(|| l.vector(2)).transpose()?;
    let embedding = EmbeddingTable { table, plus };
    match op.token_dropout {
        Some(dropout) => {
            let spans = l.spans(2 + usize::from(op.row), ids.len())?;
            let mask_id = dropout.mask_id as u32;
            let dropout = EsmTokenDropout { spans, mask_id, keep: dropout.keep };
            embed::gather_esm(cpu, ids, embedding, dropout, y);
        }
        None => embed::gather(cpu, ids, embedding, y),
    }
    Ok(())
}

pub(crate) fn gelu<E: Element>(l: &LaunchOperands<'_>, cpu: &Cpu, _: &Gelu) -> Launched {
    elementwise::gelu::<E>(cpu, l.input(0)?, l.output(0)?);
    Ok(())
}

pub(crate) fn glu<E: Element>(l: &LaunchOperands<'_>, cpu: &Cpu, op: &Glu) -> Launched {
    elementwise::glu::<E>(cpu, gate(op.activation), l.input(0)?, l.output(0)?);
    Ok(())
}

pub(crate) fn layer_norm<E: Element>(l: &LaunchOperands<'_>, cpu: &Cpu, op: &LayerNorm) -> Launched {
    if params_in_bf16(l) { layer_norm_by::<E, Bf16>(l, cpu, op) } else { layer_norm_by::<E, f32>(l, cpu, op) }
}

/// Whether a norm reads gamma and beta as bf16. Models may store them in f32 even where activations are bf16.
fn params_in_bf16(l: &LaunchOperands<'_>) -> bool {
    !l.widened && l.launch.ins[1].spec.dtype == DType::Bf16
}

fn layer_norm_by<E: Element, P: Element>(l: &LaunchOperands<'_>, cpu: &Cpu, op: &LayerNorm) -> Launched {
    let params = layer_norm_params::<P>(l, op)?;
    let outputs = LayerNormOutputs { y: l.output_if(0)?, mean: l.vector_out(1)?, rstd: l.vector_out(2)? };
    norm::layer_norm::<E, P>(cpu, l.input(0)?, params, outputs);
    Ok(())
}

fn layer_norm_params<'a, P: Element>(
    l: &LaunchOperands<'a>,
    op: &LayerNorm,
) -> Result<LayerNormParams<'a, P>, DeviceError> {
    Ok(LayerNormParams { gamma: l.vector(1)?, beta: l.vector(2)?, eps: op.eps })
}

pub(crate) fn quantize<E: Element>(l: &LaunchOperands<'_>, cpu: &Cpu, op: &Quantize) -> Launched {
    match op.of {
        Quantized::Rows => quantize_as::<E, f32>(l, cpu, FusedOp::None),
        Quantized::Gelu(_) => quantize_as::<E, f32>(l, cpu, FusedOp::Gelu),
        Quantized::Glu(op) => quantize_as::<E, f32>(l, cpu, FusedOp::Glu(gate(op.activation))),
        Quantized::LayerNorm(op) if params_in_bf16(l) => {
            quantize_as::<E, Bf16>(l, cpu, FusedOp::LayerNorm(layer_norm_params(l, &op)?))
        }
        Quantized::LayerNorm(op) => {
            quantize_as::<E, f32>(l, cpu, FusedOp::LayerNorm(layer_norm_params(l, &op)?))
        }
    }
}

fn quantize_as<E: Element, P: Element>(l: &LaunchOperands<'_>, cpu: &Cpu, op: FusedOp<'_, P>) -> Launched {
    // Plain rows are quantized only. The other forms also have the unquantized y as output 1.
    let y = if l.launch.outs.len() > 1 { l.output_if::<E>(1)? } else { None };
    let x = l.input::<E>(0)?;
    let outputs = QuantizeOutputs { quantized: l.quantized_out(0)?, y };
    quantize::quantize(cpu, op, x, outputs, l.workspace()?);
    Ok(())
}

pub(crate) fn relu<E: Element>(l: &LaunchOperands<'_>, cpu: &Cpu, _: &Relu) -> Launched {
    elementwise::relu::<E>(cpu, l.input(0)?, l.output(0)?);
    Ok(())
}

pub(crate) fn rms_norm<E: Element>(l: &LaunchOperands<'_>, cpu: &Cpu, op: &RmsNorm) -> Launched {
    if params_in_bf16(l) { rms_norm_by::<E, Bf16>(l, cpu, op) } else { rms_norm_by::<E, f32>(l, cpu, op) }
}

fn rms_norm_by<E: Element, P: Element>(l: &LaunchOperands<'_>, cpu: &Cpu, op: &RmsNorm) -> Launched {
    let heads = op.heads as usize;
    let x = l.input::<E>(0)?.by_heads(heads);
    let params = RmsNormParams { gamma: l.vector::<P>(1)?, eps: op.eps };
    let y = l.output_if::<E>(0)?.map(|y| y.by_heads(heads));
    norm::rms_norm(cpu, x, params, y, l.vector_out(1)?);
    Ok(())
}

pub(crate) fn rotary_table(l: &LaunchOperands<'_>, _: &RotaryTable) -> Launched {
    let inv_freq = l.vector(0)?;
    let cos = l.flat_out(0)?;
    let sin = l.flat_out(1)?;
    rope::table(inv_freq, cos.len() / inv_freq.len().max(1), cos, sin);
    Ok(())
}

pub(crate) fn scale<E: Element>(l: &LaunchOperands<'_>, cpu: &Cpu, op: &Scale) -> Launched {
    elementwise::scale::<E>(cpu, op.factor, l.input(0)?, l.output(0)?);
    Ok(())
}

pub(crate) fn segment_mean<E: Element>(l: &LaunchOperands<'_>, cpu: &Cpu, op: &SegmentMean) -> Launched {
    let x = l.input::<E>(0)?;
    let spans = l.spans(1, x.rows())?;
    let segments = MeanSpans { spans, skip_first: op.skip_first as usize, skip_last: op.skip_last as usize };
    reduce::segment_mean(cpu, x, segments, l.output(0)?);
    Ok(())
}

pub(crate) fn select_rows<E: Element>(l: &LaunchOperands<'_>, cpu: &Cpu, _: &SelectRows) -> Launched {
    let x = l.input::<E>(0)?;
    embed::gather(cpu, l.ids(1, x.rows())?, EmbeddingTable { table: x, plus: None }, l.output(0)?);
    Ok(())
}
