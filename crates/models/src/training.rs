//! The loss and the dropout that all training graphs share. Invariant: the inputs and outputs of training
//! graphs have the names that the trainer expects, for every model.

use plimsoll_graph::ops::{Dropout, LinearCrossEntropy};
use plimsoll_graph::{Builder, DType, Dim, Op, ValueId};

/// Training options that change the graph.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Training {
    /// Number of rows whose logits are computed at a time, which bounds the memory of logits; the planner may
    /// choose another number.
    pub chunk: u32,
    /// Weight of the z-loss: the squared log-sum-exp of the logits (Chowdhery et al. 2022).
    pub z_loss: f32,
    /// Dropout probability: after the token embedding of decoders, on the branches that a block adds to the
    /// residual stream, and before a classifier. With 0 the graph has no input `seed`.
    pub dropout: f32,
}

impl Default for Training {
    fn default() -> Self {
        Self { chunk: 256, z_loss: 0.0, dropout: 0.0 }
    }
}

impl Training {
    /// Adds the cross-entropy over the rows of x: (R, K), with output projection w: (V, K) and b: (V), and
    /// targets: i32 (R), as output `loss`. With a z-loss, `loss` is the sum of both terms, which are also
    /// outputs: `cross_entropy` and `z_loss`.
    pub(crate) fn loss(&self, g: &mut Builder, x: ValueId, w: ValueId, b: Option<ValueId>, targets: ValueId) {
        let inputs: Vec<ValueId> = [x, w].into_iter().chain(b).chain([targets]).collect();
        let op = LinearCrossEntropy { bias: b.is_some(), chunk: self.chunk, z_loss: self.z_loss };
        let outs = g.node(Op::LinearCrossEntropy(op), &inputs);
        g.output("loss", outs[0]);
        if let [_, _, cross_entropy, z] = outs[..] {
            g.output("cross_entropy", cross_entropy);
            g.output("z_loss", z);
        }
    }
}

/// Adds dropout ops; each has its own stream of random numbers, so that masks are independent.
pub(crate) struct DropoutBuilder {
    p: f32,
    seed: Option<ValueId>,
    streams: u32,
}

impl DropoutBuilder {
    /// Adds the input `seed`: i32 (2), unless the probability is 0.
    pub(crate) fn new(g: &mut Builder, training: &Training) -> Self {
        let p = training.dropout;
        let seed = (p != 0.0).then(|| g.input("seed", &[Dim::Fixed(2)], DType::I32));
        Self { p, seed, streams: 0 }
    }

    /// Applies dropout to `x` with the next stream; returns `x` if the probability is 0.
    pub(crate) fn apply(&mut self, g: &mut Builder, x: ValueId) -> ValueId {
        let Some(seed) = self.seed else { return x };
        let stream = self.streams;
        self.streams += 1;
        g.one(Op::Dropout(Dropout { p: self.p, stream }), &[x, seed])
    }
}
