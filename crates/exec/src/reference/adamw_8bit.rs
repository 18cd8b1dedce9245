//! AdamW with 8-bit moments. Invariant: p is updated with the new moments before they are quantized.

use super::optimizer::{Scale, adamw};
use super::{Operands, ReferenceError, Tensor};
use crate::dynamic_codes::{DynamicCodes, SIGNED, UNSIGNED};
use plimsoll_graph::ops::{AdamW8bit, BLOCK};

const LENGTH: usize = BLOCK as usize;

pub(super) fn eval(op: &AdamW8bit, ins: &mut Operands<'_>) -> Result<Vec<Tensor>, ReferenceError> {
    let (shape, p) = ins.floats("p")?;
    let g = ins.shaped("g", shape)?;
    let blocks = [p.len().div_ceil(LENGTH)];
    let m = (ins.codes("m", shape)?, ins.shaped("m_absmax", &blocks)?);
    let v = (ins.codes("v", shape)?, ins.shaped("v_absmax", &blocks)?);
    let scale = Scale::take(ins)?;
    let hyper = ins.shaped("hyper", &[3])?;
    let result = |p: Vec<f64>, m: (Vec<u8>, Vec<f64>), v: (Vec<u8>, Vec<f64>)| {
        let moment = |(codes, absmax)| [Tensor::u8(shape, codes), Tensor::f64(&blocks, absmax)];
        [Tensor::f64(shape, p)].into_iter().chain(moment(m)).chain(moment(v)).collect()
    };
    let Some(g) = scale.of(g) else {
        let kept = |(codes, absmax): (&[u8], &[f64])| (codes.to_vec(), absmax.to_vec());
        return Ok(result(p.to_vec(), kept(m), kept(v)));
    };
    let mut states = [p.to_vec(), decode(&SIGNED, m), decode(&UNSIGNED, v)];
    adamw(&op.adamw, hyper, &g, &mut states);
    let [p, m, v] = states;
    Ok(result(p, encode(&SIGNED, &m), encode(&UNSIGNED, &v)))
}

fn decode(codes: &DynamicCodes, (code, absmax): (&[u8], &[f64])) -> Vec<f64> {
    let number = |(i, &code): (usize, &u8)| f64::from(codes.value(code)) * absmax[i / LENGTH];
    code.iter().enumerate().map(number).collect()
}

/// Quantized values, and the largest magnitude of each block. A block of zeros stays zero for any divisor.
fn encode(codes: &DynamicCodes, x: &[f64]) -> (Vec<u8>, Vec<f64>) {
    let largest = |block: &[f64]| block.iter().fold(0.0, |m: f64, x| m.max(x.abs()));
    let absmax: Vec<f64> = x.chunks(LENGTH).map(largest).collect();
    let code = |(i, x): (usize, &f64)| match absmax[i / LENGTH] {
        0.0 => codes.nearest_exact(0.0),
        absmax => codes.nearest_exact(x / absmax),
    };
    (x.iter().enumerate().map(code).collect(), absmax)
}
