//! The head of VirNucPro: a multilayer perceptron with one hidden layer over the concatenated embeddings of a
//! nucleotide sequence and its protein; class 1 is virus.

use crate::init::{Init, default_init};
use crate::training::{DropoutBuilder, PacksInput, Training};
use plimsoll_graph::ops::{BatchNorm, BatchNormTrain, Concat, Relu, Softmax};
use plimsoll_graph::{Bounds, Builder, DType, Dim, Graph, Op, ParamPiece, ValueId, VerifyError};

/// Sizes of the head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeadConfig {
    /// Width of the nucleotide embedding, which comes first in the concatenation.
    pub dna: u64,
    /// Width of the protein embedding.
    pub protein: u64,
    /// Width of the hidden layer.
    pub hidden: u64,
    /// Number of classes.
    pub classes: u64,
}

/// Epsilon of the batch norm: the default of torch's BatchNorm1d.
const EPS: f32 = 1e-5;
/// Weight of the present batch in the running statistics: the default momentum of torch's BatchNorm1d.
const MOMENTUM: f32 = 0.1;

/// Builds the inference graph of the head: `softmax(output_layer(relu(bn1(hidden_layer(dna ++ protein)))))`,
/// without dropout. Inputs `dna`: (S, dna), `protein`: (S, protein); output `scores`: (S, classes).
pub fn mlp_head(c: &HeadConfig, bounds: Bounds) -> Result<Graph, VerifyError> {
    let mut g = Builder::new(bounds);
    let x = hidden(&mut g, c);
    let norm = norm(&mut g, c);
    let x = g.one(Op::BatchNorm(BatchNorm { eps: EPS }), &[&[x], &norm[..]].concat());
    let x = g.one(Op::Relu(Relu {}), &[x]);
    let x = g.linear(x, "output_layer", c.classes, true);
    let scores = g.one(Op::Softmax(Softmax {}), &[x]);
    g.output("scores", scores);
    g.finish()
}

impl HeadConfig {
    /// Builds the training graph: batch norm with the statistics of the batch, which update the running
    /// statistics. Inputs: the inputs of [`mlp_head`], and `targets`: i32 (S), with dropout also `seed`: i32 (2).
    /// Output `loss`: f32 (1), the sum over all targets that are not negative. VirNucPro is trained with a
    /// dropout of 0.5 before the output layer.
    pub fn train_graph(&self, bounds: Bounds, training: &Training) -> Result<Graph, VerifyError> {
        let g = &mut Builder::new(bounds);
        let x = hidden(g, self);
        let targets = g.input("targets", &[Dim::Sequences(1)], DType::I32);
        let mut dropout = DropoutBuilder::new(g, training, &mut PacksInput::default());
        let norm = norm(g, self);
        let op = BatchNormTrain { eps: EPS, momentum: MOMENTUM };
        let outs = g.node(Op::BatchNormTrain(op), &[&[x], &norm[..]].concat());
        g.update(norm[2], outs[3]);
        g.update(norm[3], outs[4]);
        let x = g.one(Op::Relu(Relu {}), &[outs[0]]);
        let x = dropout.apply(g, x);
        let [w, b] = output(g, self);
        training.loss(g, x, w, Some(b), targets);
        std::mem::replace(g, Builder::new(bounds)).finish()
    }

    /// Builds the graph of the validation loss: as [`Self::train_graph`], but with the running statistics,
    /// which it does not update, and without dropout.
    pub fn evaluation_graph(&self, bounds: Bounds, training: &Training) -> Result<Graph, VerifyError> {
        let g = &mut Builder::new(bounds);
        let x = hidden(g, self);
        let targets = g.input("targets", &[Dim::Sequences(1)], DType::I32);
        let norm = norm(g, self);
        let x = g.one(Op::BatchNorm(BatchNorm { eps: EPS }), &[&[x], &norm[..]].concat());
        let x = g.one(Op::Relu(Relu {}), &[x]);
        let [w, b] = output(g, self);
        training.loss(g, x, w, Some(b), targets);
        std::mem::replace(g, Builder::new(bounds)).finish()
    }

    /// Initialisation of a tensor, as in torch's Linear and BatchNorm1d.
    pub fn init(&self, piece: &ParamPiece) -> Init {
        match piece.tensor.split('.').next() {
            Some("hidden_layer") => Init::Uniform(((self.dna + self.protein) as f32).powf(-0.5)),
            Some("output_layer") => Init::Uniform((self.hidden as f32).powf(-0.5)),
            Some(_) | None => default_init(piece),
        }
    }
}

/// Parameters of the output layer: weight (classes, hidden) and bias (classes). The loss op applies them.
fn output(g: &mut Builder, c: &HeadConfig) -> [ValueId; 2] {
    let parts = [("weight", &[c.classes, c.hidden][..]), ("bias", &[c.classes])];
    parts.map(|(leaf, shape)| g.param(&format!("output_layer.{leaf}"), shape))
}

/// Concatenates both embeddings and applies the hidden layer: (S, hidden).
fn hidden(g: &mut Builder, c: &HeadConfig) -> ValueId {
    let rows = Dim::Sequences(1);
    let dna = g.input("dna", &[rows, Dim::Fixed(c.dna)], DType::F32);
    let protein = g.input("protein", &[rows, Dim::Fixed(c.protein)], DType::F32);
    let x = g.one(Op::Concat(Concat {}), &[dna, protein]);
    g.linear(x, "hidden_layer", c.hidden, true)
}

/// Parameters of the batch norm: gamma, beta, running mean and running variance, (hidden) each.
fn norm(g: &mut Builder, c: &HeadConfig) -> [ValueId; 4] {
    ["weight", "bias", "running_mean", "running_var"].map(|n| g.param(&format!("bn1.{n}"), &[c.hidden]))
}
