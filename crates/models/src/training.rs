//! The loss and the dropout that all training graphs share. Invariant: the inputs of training graphs have the names, and
//! the outputs the roles, that the trainer expects, for every model.

use plimsoll_graph::ops::{Dropout, LinearCrossEntropy};
use plimsoll_graph::{Builder, DType, Dim, Op, OutputRole, ValueId, packs};

/// Training options that change the graph.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Training {
    /// Number of rows whose logits are computed at a time, which bounds the memory of logits; the planner may
    /// choose another number.
    pub chunk: u32,
    /// Weight of the z-loss: the squared log-sum-exp of the logits (Chowdhery et al. 2022).
    pub z_loss: f32,
    /// Dropout probability: after the token embedding of decoders, on the branches that a block adds to the
    /// residual stream, and before a classifier. With 0 the graph has no input `seed`, and dropout does not need `packs`.
    pub dropout: f32,
}

impl Default for Training {
    fn default() -> Self {
        Self { chunk: 256, z_loss: 0.0, dropout: 0.0 }
    }
}

impl Training {
    /// Adds the cross-entropy over the rows of x: (R, K), with output projection w: (V, K) and b: (V), and
    /// targets: i32 (R), as [`OutputRole::Loss`]. With a z-loss, this is the sum of both terms, which are also
    /// outputs: [`OutputRole::CrossEntropy`] and [`OutputRole::ZLoss`].
    pub(crate) fn loss(&self, g: &mut Builder, x: ValueId, w: ValueId, b: Option<ValueId>, targets: ValueId) {
        let inputs: Vec<ValueId> = [x, w].into_iter().chain(b).chain([targets]).collect();
        let op = LinearCrossEntropy { bias: b.is_some(), chunk: self.chunk, z_loss: self.z_loss };
        let outs = g.node(Op::LinearCrossEntropy(op), &inputs);
        g.output(OutputRole::Loss, outs[0]);
        if let [_, _, cross_entropy, z] = outs[..] {
            g.output(OutputRole::CrossEntropy, cross_entropy);
            g.output(OutputRole::ZLoss, z);
        }
    }
}

/// The input `packs`: i32 (P, 6), see [`plimsoll_graph::packs`], which a graph has only if one of its ops reads it.
#[derive(Default)]
pub(crate) struct PacksInput(Option<ValueId>);

impl PacksInput {
    /// Returns the input, which is added at the first call.
    pub(crate) fn get(&mut self, g: &mut Builder) -> ValueId {
        let shape = [Dim::Packs(1), Dim::Fixed(packs::WORDS as u64)];
        *self.0.get_or_insert_with(|| g.input("packs", &shape, DType::I32))
    }
}

/// Adds dropout ops; each has its own stream of random numbers, so that masks are independent.
pub(crate) struct DropoutBuilder {
    p: f32,
    /// The inputs `seed` and `packs`; `None` if the probability is 0.
    inputs: Option<[ValueId; 2]>,
    streams: u32,
}

impl DropoutBuilder {
    /// Adds the inputs `seed`: i32 (2) and `packs`, unless the probability is 0.
    pub(crate) fn new(g: &mut Builder, training: &Training, packs: &mut PacksInput) -> Self {
        let p = training.dropout;
        let inputs = (p != 0.0).then(|| [g.input("seed", &[Dim::Fixed(2)], DType::I32), packs.get(g)]);
        Self { p, inputs, streams: 0 }
    }

    /// Applies dropout to `x` with the next stream; returns `x` if the probability is 0.
    pub(crate) fn apply(&mut self, g: &mut Builder, x: ValueId) -> ValueId {
        let Some([seed, packs]) = self.inputs else { return x };
        let stream = self.streams;
        self.streams += 1;
        g.one(Op::Dropout(Dropout { p: self.p, stream }), &[x, seed, packs])
    }
}
