//! Training graphs of encoders: masked language modelling, and classification of pooled sequences. Invariant:
//! training and inference build the encoder with the same function.

use crate::config::Encoder;
use crate::hub::CONTACTS;
use crate::init::{Init, default_init};
use crate::layers::{EncoderInputs, RequestedOutputs};
use crate::lora::{Adapted, adapt};
use crate::{Lora, Training, TrainingError, derived, dnabert_s, esm2};
use plimsoll_graph::ops::{SegmentMean, Softmax};
use plimsoll_graph::{Bounds, Builder, DType, Dim, Graph, Op, ParamPiece, ValueId, VerifyError};

/// Training objective of an encoder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TrainingTask {
    /// Prediction of masked tokens (Devlin et al. 2019); `targets`: i32 (T).
    MaskedLm,
    /// Classification of sequences into this number of classes, from the mean of the last hidden states;
    /// `targets`: i32 (S).
    Classes(u64),
}

impl Encoder {
    /// Builds the training graph. Inputs `ids`: i32 (T), `spans`: i32 (S, 2), `targets`, with dropout also
    /// `seed`: i32 (2) and `packs`: i32 (P, 6). Output `loss`: f32 (1), the sum over all targets that are not negative.
    pub fn train_graph(
        &self,
        bounds: Bounds,
        task: TrainingTask,
        training: &Training,
        lora: Option<&Lora>,
    ) -> Result<Graph, TrainingError> {
        let mut plain = Builder::new(bounds);
        let batch = &mut EncoderInputs::inputs(&mut plain);
        let requested = RequestedOutputs { outputs: &[], mean: self.mean() };
        let (x, table) = self.encode(&mut plain, batch, &requested);
        let residual_maps = ["output.dense", "mlp.wo"];
        let Adapted { builder: mut g, mut dropout, values } =
            adapt(plain.graph(), training, lora, &residual_maps)?;
        let [x, table, spans] = [x, table, batch.spans].map(|v| values[v.index()]);
        match task {
            TrainingTask::MaskedLm => {
                let targets = g.input("targets", &[Dim::Tokens(1)], DType::I32);
                let (x, bias) = self.lm_head(&mut g, x);
                training.loss(&mut g, x, table, Some(bias), targets);
            }
            TrainingTask::Classes(classes) => {
                let targets = g.input("targets", &[Dim::Sequences(1)], DType::I32);
                let x = g.one(Op::SegmentMean(self.mean()), &[x, spans]); // (S, D)
                let x = dropout.apply(&mut g, x);
                let [w, b] = classifier(&mut g, classes, self.hidden_size());
                training.loss(&mut g, x, w, Some(b), targets);
            }
        }
        g.finish().map_err(TrainingError::Graph)
    }

    /// Builds the inference graph of a classifier. Inputs `ids`: i32 (T), `spans`: i32 (S, 2); output `scores`:
    /// (S, C), the softmax of the logits.
    pub fn classifier_graph(&self, bounds: Bounds, classes: u64) -> Result<Graph, VerifyError> {
        let g = &mut Builder::new(bounds);
        let batch = &mut EncoderInputs::inputs(g);
        let requested = RequestedOutputs { outputs: &[], mean: self.mean() };
        let (x, _) = self.encode(g, batch, &requested);
        let x = g.one(Op::SegmentMean(self.mean()), &[x, batch.spans]); // (S, D)
        g.scope("", None);
        let x = g.linear(x, "classifier", classes, true);
        let scores = g.one(Op::Softmax(Softmax {}), &[x]);
        g.output("scores", scores);
        std::mem::replace(g, Builder::new(bounds)).finish()
    }

    /// Builds the encoder; returns the last hidden state (T, D) and the embedding table (V, D).
    fn encode(
        &self,
        g: &mut Builder,
        batch: &mut EncoderInputs,
        requested: &RequestedOutputs<'_>,
    ) -> (ValueId, ValueId) {
        match self {
            Self::Esm2(c) => esm2::encode(g, c, batch, requested),
            Self::DnabertS(c) => dnabert_s::encode(g, c, batch, requested),
        }
    }

    /// Initialisation of a tensor that no weight file provides.
    pub fn init(&self, piece: &ParamPiece) -> Init {
        if CONTACTS.contains(&piece.tensor.as_str()) {
            return Init::Zeros;
        }
        let computed = derived(self, &piece.tensor).map(Init::Values);
        computed.or_else(|| Lora::init(piece)).unwrap_or_else(|| default_init(piece))
    }

    /// Builds the masked-language-model head before its output projection, which is tied to the embedding
    /// table; returns (T, D) and the bias (V).
    fn lm_head(&self, g: &mut Builder, x: ValueId) -> (ValueId, ValueId) {
        match self {
            Self::Esm2(c) => {
                let h = esm2::lm_transform(g, c, x);
                (h, g.param("bias", &[c.vocab_size]))
            }
            Self::DnabertS(c) => {
                g.scope("cls.predictions.", None);
                let h = g.linear(x, "transform.dense", c.hidden_size, true);
                let h = g.gelu(h);
                let h = g.layer_norm(h, "transform.LayerNorm", c.eps);
                (h, g.param("decoder.bias", &[c.vocab_size]))
            }
        }
    }

    /// Mean pooling of the family.
    fn mean(&self) -> SegmentMean {
        match self {
            Self::Esm2(_) => esm2::MEAN,
            Self::DnabertS(_) => dnabert_s::MEAN,
        }
    }
}

/// Parameters of the classifier: weight (C, D) and bias (C).
fn classifier(g: &mut Builder, classes: u64, d: u64) -> [ValueId; 2] {
    g.scope("classifier.", None);
    [g.param("weight", &[classes, d]), g.param("bias", &[classes])]
}
