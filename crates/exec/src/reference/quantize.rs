//! The values that are quantized, before quantization, which is the device's task like any rounding. Invariant: both
//! outputs hold the same numbers.

use super::{Operands, ReferenceError, Tensor, gelu, glu, layer_norm};
use plimsoll_graph::ops::{Quantize, Quantized};

pub(super) fn eval(op: &Quantize, ins: &mut Operands<'_>) -> Result<Vec<Tensor>, ReferenceError> {
    let y = match op.of {
        Quantized::Rows => {
            let x = ins.matrix("x")?;
            return Ok(vec![Tensor::f64(&[x.rows, x.columns], x.data.to_vec())]);
        }
        Quantized::LayerNorm(op) => layer_norm::eval(&op, ins)?.swap_remove(0),
        Quantized::Gelu(_) => gelu::eval(ins)?.swap_remove(0),
        Quantized::Glu(op) => glu::eval(&op, ins)?.swap_remove(0),
    };
    Ok(vec![y.clone(), y])
}
