//! What the encoders share: inputs and pooled outputs.

use crate::Output;
use graph::ops::{SegmentMean, SelectRows};
use graph::{Builder, DType, Dim, Op, ValueId};

/// A packed batch: `ids`: i32 (T) and `spans`: i32 (S, 2), the (start, end) rows of every sequence.
pub(crate) struct Batch {
    pub(crate) ids: ValueId,
    pub(crate) spans: ValueId,
    /// `rows`: i32 (S), the first row of every sequence; an input only where something reads it.
    rows: Option<ValueId>,
}

impl Batch {
    pub(crate) fn inputs(g: &mut Builder) -> Self {
        let ids = g.input("ids", &[Dim::Tokens(1)], DType::I32);
        let spans = g.input("spans", &[Dim::Sequences(1), Dim::Fixed(2)], DType::I32);
        Self { ids, spans, rows: None }
    }

    fn rows(&mut self, g: &mut Builder) -> ValueId {
        *self.rows.get_or_insert_with(|| g.input("rows", &[Dim::Sequences(1)], DType::I32))
    }
}

/// What is asked for of hidden states, and how the family takes their mean.
pub(crate) struct Wanted<'a> {
    pub(crate) outputs: &'a [Output],
    pub(crate) mean: SegmentMean,
}

impl Wanted<'_> {
    /// Names what is asked for of the hidden state `x`: (T, D) of `layer`. Done as soon as `x` is there: a
    /// state that is only pooled does not outlive its layer.
    pub(crate) fn layer(&self, g: &mut Builder, batch: &mut Batch, x: ValueId, layer: u64) {
        for output in self.outputs {
            let what = match output {
                Output::HiddenOf(i) if u64::from(*i) == layer => Some(Output::Hidden),
                Output::MeanOf(i) if u64::from(*i) == layer => Some(Output::Mean),
                Output::ClsOf(i) if u64::from(*i) == layer => Some(Output::Cls),
                Output::HiddenOf(_) | Output::MeanOf(_) | Output::ClsOf(_) => None,
                Output::Hidden | Output::Mean | Output::Cls | Output::Logits => None,
            };
            if let Some(what) = what {
                self.give(g, batch, x, what, &output.name());
            }
        }
    }

    /// Names what is asked for of the last hidden state, also as that of the last `layer`. Logits are the
    /// caller's.
    pub(crate) fn last(&self, g: &mut Builder, batch: &mut Batch, x: ValueId, layer: u64) {
        self.layer(g, batch, x, layer);
        for output in self.outputs {
            self.give(g, batch, x, *output, &output.name());
        }
    }

    fn give(&self, g: &mut Builder, batch: &mut Batch, x: ValueId, what: Output, name: &str) {
        match what {
            Output::Hidden => g.output(name, x),
            Output::Mean => {
                let y = g.one(Op::SegmentMean(self.mean), &[x, batch.spans]);
                g.output(name, y);
            }
            Output::Cls => {
                let rows = batch.rows(g);
                let y = g.one(Op::SelectRows(SelectRows {}), &[x, rows]);
                g.output(name, y);
            }
            Output::Logits | Output::HiddenOf(_) | Output::MeanOf(_) | Output::ClsOf(_) => {}
        }
    }
}
