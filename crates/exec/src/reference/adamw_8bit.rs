//! AdamW with 8-bit moments. Invariant: p is updated with the new moments before they are quantized.

use super::optimizer::{StepScale, adamw};
use super::{Operands, ReferenceError, Tensor};
use crate::dynamic_codes::{DynamicCodes, SIGNED, UNSIGNED};
use plimsoll_graph::ops::{AdamW8bit, BLOCK};

const LENGTH: usize = BLOCK as usize;

pub(super) fn eval(op: &AdamW8bit, ins: &mut Operands<'_>) -> Result<Vec<Tensor>, ReferenceError> {
    let (shape, p) = ins.floats("p")?;
    let g = ins.shaped("g", shape)?;
    let blocks = [p.len().div_ceil(LENGTH)];
    let m_codes = ins.codes("m", shape)?;
    let m = QuantizedState { codes: m_codes.to_vec(), absmax: ins.shaped("m_absmax", &blocks)?.to_vec() };
    let v_codes = ins.codes("v", shape)?;
    let v = QuantizedState { codes: v_codes.to_vec(), absmax: ins.shaped("v_absmax", &blocks)?.to_vec() };
    let scale = StepScale::take(ins)?;
    let hyper = ins.shaped("hyper", &[3])?;
    let Some(g) = scale.of(g) else {
        return Ok(tensors(shape, p.to_vec(), [m, v]));
    };
    let mut states = [p.to_vec(), m.decode(&SIGNED), v.decode(&UNSIGNED)];
    adamw(&op.adamw, hyper, &g, &mut states);
    let [p, m, v] = states;
    let moments = [QuantizedState::encode(&SIGNED, &m), QuantizedState::encode(&UNSIGNED, &v)];
    Ok(tensors(shape, p, moments))
}

/// The outputs: the parameter, and the codes and magnitudes of both moments.
fn tensors(shape: &[usize], p: Vec<f64>, moments: [QuantizedState; 2]) -> Vec<Tensor> {
    let mut outs = vec![Tensor::f64(shape, p)];
    for QuantizedState { codes, absmax } in moments {
        outs.push(Tensor::u8(shape, codes));
        outs.push(Tensor::f64(&[absmax.len()], absmax));
    }
    outs
}

/// A moment in 8 bits a value, and the largest magnitude of each block.
struct QuantizedState {
    codes: Vec<u8>,
    absmax: Vec<f64>,
}

impl QuantizedState {
    fn decode(&self, numbers: &DynamicCodes) -> Vec<f64> {
        let codes = self.codes.iter().enumerate();
        codes.map(|(i, &code)| f64::from(numbers.value(code)) * self.absmax[i / LENGTH]).collect()
    }

    /// Quantizes values. A block of zeros stays zero for any divisor.
    fn encode(numbers: &DynamicCodes, x: &[f64]) -> Self {
        let mut codes = Vec::with_capacity(x.len());
        let mut absmax = vec![];
        for block in x.chunks(LENGTH) {
            let largest = block.iter().fold(0.0, |largest: f64, x| largest.max(x.abs()));
            absmax.push(largest);
            for x in block {
                let share = if largest == 0.0 { 0.0 } else { x / largest };
                codes.push(numbers.nearest_exact(share));
            }
        }
        Self { codes, absmax }
    }
}
