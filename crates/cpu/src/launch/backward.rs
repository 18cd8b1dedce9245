//! Launches of norms, gated activations and other small training ops, and of their gradients. Invariant: every
//! precondition of a kernel is checked here.

use super::Launched;
use crate::launch::operands::LaunchOperands;
use crate::launch::widening::half;
use crate::rows::batch_norm::{self, BatchStatistics};
use crate::rows::cast;
use crate::rows::elementwise::{self, Gate};
use crate::rows::embed::EsmTokenDropout;
use crate::rows::reduce::{self, MeanSpans};
use crate::training::dropout::{self, DropoutParams};
use crate::training::kl_divergence as kl;
use crate::training::scatter::{self, EmbeddingGradients};
use crate::{Cpu, rows::norm_grad};
use plimsoll_graph::ops::*;

pub(crate) fn batch_norm_grad(l: &LaunchOperands<'_>, cpu: &Cpu, op: &BatchNormGrad) -> Launched {
    let gamma = l.vector(2)?;
    let mean = l.vector(3)?;
    let spread = BatchStatistics::Running(l.vector(4)?, op.eps);
    let norm = batch_norm::BatchNormGradInputs { dy: l.input(0)?, x: l.input(1)?, gamma, mean, spread };
    batch_norm::batch_norm_grad(cpu, norm, l.output_if(0)?, l.vector_out(1)?, l.vector_out(2)?);
    Ok(())
}

pub(crate) fn batch_norm_train(l: &LaunchOperands<'_>, cpu: &Cpu, op: &BatchNormTrain) -> Launched {
    let x = l.input(0)?;
    if x.rows() < 2 {
        return Err(l.refuse("the variance of a batch needs two rows".to_owned()));
    }
    let gamma = l.vector(1)?;
    let beta = l.vector(2)?;
    let running = [l.vector(3)?, l.vector(4)?];
    let eps = op.eps;
    let momentum = op.momentum;
    let norm = batch_norm::TrainedBatchNorm { x, gamma, beta, running, eps, momentum };
    let statistics = [l.vector_out(1)?, l.vector_out(2)?, l.vector_out(3)?, l.vector_out(4)?];
    batch_norm::batch_norm_train(cpu, norm, l.output_if(0)?, statistics);
    Ok(())
}

pub(crate) fn batch_norm_train_grad(l: &LaunchOperands<'_>, cpu: &Cpu, _: &BatchNormTrainGrad) -> Launched {
    let mean = l.vector(2)?;
    let spread = BatchStatistics::Batch(l.vector(3)?);
    let gamma = l.vector(4)?;
    let norm = batch_norm::BatchNormGradInputs { dy: l.input(0)?, x: l.input(1)?, gamma, mean, spread };
    batch_norm::batch_norm_grad(cpu, norm, l.output_if(0)?, l.vector_out(1)?, l.vector_out(2)?);
    Ok(())
}

pub(crate) fn cast(l: &LaunchOperands<'_>, cpu: &Cpu, _: &Cast) -> Launched {
    let x = &l.launch.ins[0];
    let y = l.wanted(0)?;
    match (half(x.spec.dtype), half(y.spec.dtype)) {
        (None, Some(to)) => cast::narrow(cpu, to, l.stored(x)?, l.stored_mut(y)?),
        (Some(from), None) => cast::widen(cpu, from, l.stored(x)?, l.stored_mut(y)?),
        (Some(from), Some(to)) if from != to => cast::exchange(cpu, from, l.stored(x)?, l.stored_mut(y)?),
        (Some(_), Some(_)) => l.stored_mut::<u16>(y)?.copy_from_slice(l.stored(x)?),
        // Neither type has 16 bits.
        (None, None) => elementwise::copy::<f32>(cpu, l.input(0)?, l.output(0)?),
    }
    Ok(())
}

pub(crate) fn concat_grad(l: &LaunchOperands<'_>, cpu: &Cpu, op: &ConcatGrad) -> Launched {
    let columns = l.input::<f32>(0)?.columns(op.first as usize, op.count as usize);
    elementwise::copy(cpu, columns, l.output(0)?);
    Ok(())
}

pub(crate) fn dropout(l: &LaunchOperands<'_>, cpu: &Cpu, op: &Dropout) -> Launched {
    let [low, high] = *l.words(1)? else {
        return Err(l.refuse("a seed has two words".to_owned()));
    };
    let first = Dropout::pack_word(&l.launch.ins[0].spec).map_err(|rule| l.refuse(rule.to_string()))?;
    let x = l.input(0)?;
    let packs = l.packs(2, first, x.rows())?;
    let params = DropoutParams { p: op.p, stream: op.stream, seed: [low, high] };
    dropout::dropout(cpu, params, x, packs, l.output(0)?);
    Ok(())
}

pub(crate) fn embed_grad(l: &LaunchOperands<'_>, cpu: &Cpu, op: &EmbedGrad) -> Launched {
    let ids = l.ids(1, op.vocab as usize)?;
    let dropout = match op.token_dropout {
        Some(TokenDropout { mask_id, keep }) => {
            Some(EsmTokenDropout { spans: l.spans(2, ids.len())?, mask_id: mask_id as u32, keep })
        }
        None => None,
    };
    let drow = if op.row { l.vector_out(1)? } else { None };
    let gradients = EmbeddingGradients { dtable: l.output_if(0)?, drow };
    scatter::embed_grad(cpu, ids, l.input(0)?, dropout, gradients);
    Ok(())
}

pub(crate) fn gelu_grad(l: &LaunchOperands<'_>, cpu: &Cpu, _: &GeluGrad) -> Launched {
    elementwise::gelu_grad(cpu, l.input(0)?, l.input(1)?, l.output(0)?);
    Ok(())
}

/// The kernels' gate for an activation function of the graph.
pub(crate) fn gate(activation: Activation) -> Gate {
    match activation {
        Activation::Gelu => Gate::Gelu,
        Activation::Silu => Gate::Silu,
    }
}

pub(crate) fn glu_grad(l: &LaunchOperands<'_>, cpu: &Cpu, op: &GluGrad) -> Launched {
    elementwise::glu_grad(cpu, gate(op.activation), l.input(0)?, l.input(1)?, l.output(0)?);
    Ok(())
}

pub(crate) fn kl_divergence(l: &LaunchOperands<'_>, cpu: &Cpu, _: &KlDivergence) -> Launched {
    l.flat_out(0)?[0] = kl::divergence(cpu, l.input(0)?, l.input(1)?);
    Ok(())
}

pub(crate) fn kl_divergence_grad(l: &LaunchOperands<'_>, cpu: &Cpu, _: &KlDivergenceGrad) -> Launched {
    kl::gradient(cpu, l.vector(0)?[0], l.input(1)?, l.input(2)?, l.output(0)?);
    Ok(())
}

pub(crate) fn layer_norm_grad(l: &LaunchOperands<'_>, cpu: &Cpu, _: &LayerNormGrad) -> Launched {
    let mean = Some(l.vector(2)?);
    let rstd = l.vector(3)?;
    let gamma = l.vector(4)?;
    let norm = norm_grad::NormGradInputs { dy: l.input(0)?, x: l.input(1)?, mean, rstd, gamma };
    norm_grad::norm_grad(cpu, norm, l.output_if(0)?, l.vector_out(1)?, l.vector_out(2)?);
    Ok(())
}

pub(crate) fn relu_grad(l: &LaunchOperands<'_>, cpu: &Cpu, _: &ReluGrad) -> Launched {
    elementwise::relu_grad(cpu, l.input(0)?, l.input(1)?, l.output(0)?);
    Ok(())
}

pub(crate) fn rms_norm_grad(l: &LaunchOperands<'_>, cpu: &Cpu, op: &RmsNormGrad) -> Launched {
    let heads = op.heads as usize;
    let dy = l.input(0)?.by_heads(heads);
    let x = l.input(1)?.by_heads(heads);
    let norm = norm_grad::NormGradInputs { dy, x, mean: None, rstd: l.vector(2)?, gamma: l.vector(3)? };
    let dx = l.output_if(0)?.map(|dx| dx.by_heads(heads));
    norm_grad::norm_grad(cpu, norm, dx, l.vector_out(1)?, None);
    Ok(())
}

pub(crate) fn segment_mean_grad(l: &LaunchOperands<'_>, cpu: &Cpu, op: &SegmentMeanGrad) -> Launched {
    let dx = l.output(0)?;
    let spans = l.spans(1, dx.rows())?;
    let segments = MeanSpans { spans, skip_first: op.skip_first as usize, skip_last: op.skip_last as usize };
    reduce::segment_mean_grad(cpu, l.input(0)?, segments, dx);
    Ok(())
}

pub(crate) fn select_rows_grad(l: &LaunchOperands<'_>, cpu: &Cpu, _: &SelectRowsGrad) -> Launched {
    let dx = l.output(0)?;
    scatter::scatter(cpu, l.ids(1, dx.rows())?, l.input(0)?, dx);
    Ok(())
}

pub(crate) fn softmax_grad(l: &LaunchOperands<'_>, cpu: &Cpu, _: &SoftmaxGrad) -> Launched {
    reduce::softmax_grad(cpu, l.input(0)?, l.input(1)?, l.output(0)?);
    Ok(())
}
