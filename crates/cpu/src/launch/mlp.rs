//! Launch of the fused MLP. Invariant: preconditions are checked here or by the kernel itself.

use super::super::Cpu;
use super::super::mlp_bf16::{self, Mlp, Norm};
use super::super::operands::Operands;
use super::Launched;
use plimsoll_graph::ops;

pub(in super::super) fn mlp(l: &Operands<'_>, cpu: &Cpu, op: &ops::Mlp) -> Launched {
    let [first, second] = *op.weights();
    let norm = match op.norm {
        Some(norm) => Some(Norm { gamma: l.vector(1)?, beta: l.vector(2)?, eps: norm.eps }),
        None => None,
    };
    let mlp = Mlp {
        norm,
        hidden: op.hidden,
        columns: l.launch.ins[second].spec.row_elements() as usize,
        w1: l.vector(first)?,
        b1: op.bias[0].then(|| l.vector(first + 1)).transpose()?,
        w2: l.vector(second)?,
        b2: op.bias[1].then(|| l.vector(second + 1)).transpose()?,
        residual: op.residual().map(|r| l.input(r)).transpose()?,
    };
    mlp_bf16::mlp(cpu, l.input(0)?, mlp, l.output(0)?, l.workspace()?);
    Ok(())
}
