//! What the encoders share: inputs and pooled outputs.

use crate::Output;
use graph::ops::{SegmentMean, SelectRows};
use graph::{Builder, DType, Dim, Op, ValueId};

/// A packed batch: `ids`: i32 (T) and `spans`: i32 (S, 2), the (start, end) rows of every sequence.
pub(crate) struct Batch {
    pub(crate) ids: ValueId,
    pub(crate) spans: ValueId,
}

impl Batch {
    pub(crate) fn inputs(g: &mut Builder) -> Self {
        let ids = g.input("ids", &[Dim::Tokens(1)], DType::I32);
        let spans = g.input("spans", &[Dim::Sequences(1), Dim::Fixed(2)], DType::I32);
        Self { ids, spans }
    }
}

/// Names the asked-for outputs of the last hidden state `x`: (T, D). Logits are the caller's.
pub(crate) fn outputs(g: &mut Builder, batch: &Batch, x: ValueId, mean: SegmentMean, wanted: &[Output]) {
    for output in wanted {
        match output {
            Output::Hidden => g.output("hidden", x),
            Output::Mean => {
                let y = g.one(Op::SegmentMean(mean), &[x, batch.spans]);
                g.output("mean", y);
            }
            Output::Cls => {
                let rows = g.input("rows", &[Dim::Sequences(1)], DType::I32);
                let y = g.one(Op::SelectRows(SelectRows {}), &[x, rows]);
                g.output("cls", y);
            }
            Output::Logits => {}
        }
    }
}
