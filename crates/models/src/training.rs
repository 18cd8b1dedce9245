//! What every training graph ends in, and dropout on the way. Invariant: names of inputs and outputs are those that
//! the trainer knows, whatever the model.

use graph::ops::{Dropout, LinearCrossEntropy};
use graph::{Builder, DType, Dim, Op, ValueId};

/// How a model is trained, as far as the graph depends on it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Training {
    /// Rows of logits that exist at a time; the planner may choose another number.
    pub chunk: u32,
    /// Weight of the squared log-sum of the output's exponentials (Chowdhery et al. 2022).
    pub z_loss: f32,
    /// The share of activations that dropout sets to zero, where a block adds to the stream and before a
    /// classifier. 0 is none: then there is no input `seed`.
    pub dropout: f32,
}

impl Default for Training {
    fn default() -> Self {
        Self { chunk: 256, z_loss: 0.0, dropout: 0.0 }
    }
}

impl Training {
    /// Output `loss` over the rows of x: (R, K), w: (V, K), b: (V), targets: (R). With a z-loss, `loss` is what is
    /// minimized, and its terms are the outputs `cross_entropy` and `z_loss`.
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

/// Dropout, each time with a stream of its own.
pub(crate) struct Dropping {
    p: f32,
    seed: Option<ValueId>,
    streams: u32,
}

impl Dropping {
    /// Adds the input `seed`: i32 (2), where something is dropped.
    pub(crate) fn new(g: &mut Builder, training: &Training) -> Self {
        let p = training.dropout;
        let seed = (p != 0.0).then(|| g.input("seed", &[Dim::Fixed(2)], DType::I32));
        Self { p, seed, streams: 0 }
    }

    pub(crate) fn apply(&mut self, g: &mut Builder, x: ValueId) -> ValueId {
        let Some(seed) = self.seed else { return x };
        let stream = self.streams;
        self.streams += 1;
        g.one(Op::Dropout(Dropout { p: self.p, stream }), &[x, seed])
    }
}
