//! Launches of norms, gates and other small ops of inference. Invariant: what a kernel relies on is checked here.

use super::super::operands::Operands;
use super::super::{Cpu, elementwise, embed, norm, reduce, rope};
use super::Launched;
use super::backward::gate;
use graph::ops::*;

pub(in super::super) fn batch_norm(l: &Operands<'_>, cpu: &Cpu, op: &BatchNorm) -> Launched {
    let [gamma, beta, mean, var] = [l.vector(1)?, l.vector(2)?, l.vector(3)?, l.vector(4)?];
    let norm = norm::BatchNorm { gamma, beta, mean, var, eps: op.eps };
    norm::batch_norm(cpu, l.input(0)?, norm, l.output(0)?);
    Ok(())
}

pub(in super::super) fn concat(l: &Operands<'_>, cpu: &Cpu, _: &Concat) -> Launched {
    let mut y = l.output(0)?;
    let mut column = 0;
    for i in 0..l.launch.ins.len() {
        let x = l.input(i)?;
        elementwise::copy(cpu, x, y.columns(column, x.cols()));
        column += x.cols();
    }
    Ok(())
}

pub(in super::super) fn glu(l: &Operands<'_>, cpu: &Cpu, op: &Glu) -> Launched {
    elementwise::glu(cpu, gate(op.activation), l.input(0)?, l.output(0)?);
    Ok(())
}

pub(in super::super) fn layer_norm(l: &Operands<'_>, cpu: &Cpu, op: &LayerNorm) -> Launched {
    let (gamma, beta, y) = (l.vector(1)?, l.vector(2)?, l.output_if(0)?);
    let (mean, rstd) = (l.vector_out(1)?, l.vector_out(2)?);
    norm::layer_norm(cpu, l.input(0)?, gamma, beta, op.eps, y, mean, rstd);
    Ok(())
}

pub(in super::super) fn rotary_table(l: &Operands<'_>, _: &RotaryTable) -> Launched {
    let inv_freq = l.vector(0)?;
    let (cos, sin) = (l.flat_out(0)?, l.flat_out(1)?);
    rope::table(inv_freq, cos.len() / inv_freq.len().max(1), cos, sin);
    Ok(())
}

pub(in super::super) fn segment_mean(l: &Operands<'_>, cpu: &Cpu, op: &SegmentMean) -> Launched {
    let x = l.input(0)?;
    let (first, last) = (op.skip_first as usize, op.skip_last as usize);
    reduce::segment_mean(cpu, x, l.spans(1, x.rows())?, first, last, l.output(0)?);
    Ok(())
}

pub(in super::super) fn select_rows(l: &Operands<'_>, cpu: &Cpu, _: &SelectRows) -> Launched {
    let x = l.input(0)?;
    embed::gather(cpu, l.ids(1, x.rows())?, x, None, l.output(0)?);
    Ok(())
}
