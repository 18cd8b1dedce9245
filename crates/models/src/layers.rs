//! Inputs and pooled outputs of encoder graphs, shared by all encoder families.

use crate::Output;
use plimsoll_graph::ops::{SegmentMean, SelectRows};
use plimsoll_graph::{Builder, DType, Dim, Op, ValueId};

/// Graph inputs of a packed batch without padding: `ids`: i32 (T), the tokens of all sequences, and `spans`: i32
/// (S, 2), the first row and the row after the last of each sequence.
pub(crate) struct EncoderInputs {
    pub(crate) ids: ValueId,
    pub(crate) spans: ValueId,
    /// `rows`: i32 (S), the first row of each sequence. `None` until an output reads it: graphs without such an
    /// output do not have this input.
    rows: Option<ValueId>,
    /// `lasts`: i32 (S), the last row of each sequence; `None` like `rows`.
    lasts: Option<ValueId>,
}

impl EncoderInputs {
    pub(crate) fn inputs(g: &mut Builder) -> Self {
        let ids = g.input("ids", &[Dim::Tokens(1)], DType::I32);
        let spans = g.input("spans", &[Dim::Sequences(1), Dim::Fixed(2)], DType::I32);
        Self { ids, spans, rows: None, lasts: None }
    }

    /// The input `rows`, declared on the first call.
    fn rows(&mut self, g: &mut Builder) -> ValueId {
        *self.rows.get_or_insert_with(|| g.input("rows", &[Dim::Sequences(1)], DType::I32))
    }

    /// The input `lasts`, declared on the first call.
    fn lasts(&mut self, g: &mut Builder) -> ValueId {
        *self.lasts.get_or_insert_with(|| g.input("lasts", &[Dim::Sequences(1)], DType::I32))
    }
}

/// The outputs requested of an encoder graph, and the mean pooling of the model family.
pub(crate) struct RequestedOutputs<'a> {
    pub(crate) outputs: &'a [Output],
    pub(crate) mean: SegmentMean,
}

impl RequestedOutputs<'_> {
    /// Adds the requested outputs of the hidden state `x`: (T, D) of `layer`. Callers do so before they build the
    /// next block, so that a hidden state of which only a pooled row is requested can be freed early.
    pub(crate) fn layer(&self, g: &mut Builder, batch: &mut EncoderInputs, x: ValueId, layer: u64) {
        for output in self.outputs {
            let kind = match output {
                Output::HiddenOf(i) if u64::from(*i) == layer => Some(Output::Hidden),
                Output::MeanOf(i) if u64::from(*i) == layer => Some(Output::Mean),
                Output::ClsOf(i) if u64::from(*i) == layer => Some(Output::Cls),
                Output::LastOf(i) if u64::from(*i) == layer => Some(Output::Last),
                Output::HiddenOf(_) | Output::MeanOf(_) | Output::ClsOf(_) | Output::LastOf(_) => None,
                Output::Hidden | Output::Mean | Output::Cls | Output::Last | Output::Logits => None,
            };
            if let Some(kind) = kind {
                self.add(g, batch, x, kind, &output.name());
            }
        }
    }

    /// Adds the requested outputs of the last hidden state `x`: (T, D), both as the last hidden state and as the
    /// hidden state of `layer`, the index of the last layer. The caller adds the logits.
    pub(crate) fn last(&self, g: &mut Builder, batch: &mut EncoderInputs, x: ValueId, layer: u64) {
        self.layer(g, batch, x, layer);
        for output in self.outputs {
            self.add(g, batch, x, *output, &output.name());
        }
    }

    /// Adds the output `name`: `x` itself, its mean over each sequence, or the first or last row of each sequence. Does
    /// nothing for logits and for outputs of a layer, which [`Self::layer`] adds.
    fn add(&self, g: &mut Builder, batch: &mut EncoderInputs, x: ValueId, output: Output, name: &str) {
        match output {
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
            Output::Last => {
                let rows = batch.lasts(g);
                let y = g.one(Op::SelectRows(SelectRows {}), &[x, rows]);
                g.output(name, y);
            }
            Output::Logits | Output::HiddenOf(_) | Output::MeanOf(_) | Output::ClsOf(_) | Output::LastOf(_) => {
            }
        }
    }
}
