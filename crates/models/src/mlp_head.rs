//! The VirNucPro head: two embeddings side by side, one hidden layer, two classes (class 1 is virus).

use crate::init::{Init, usual};
use crate::training::{Dropping, Training};
use graph::ops::{BatchNorm, BatchNormTrain, Concat, Relu, Softmax};
use graph::{Bounds, Builder, DType, Dim, Graph, Op, Piece, ValueId, VerifyError};

/// The sizes of the head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeadConfig {
    /// Columns of the nucleotide embedding, which comes first.
    pub dna: u64,
    /// Columns of the protein embedding.
    pub protein: u64,
    /// Hidden units.
    pub hidden: u64,
    /// Classes.
    pub classes: u64,
}

/// torch's BatchNorm1d default.
const EPS: f32 = 1e-5;
/// torch's default weight of a batch in the running statistics.
const MOMENTUM: f32 = 0.1;

/// softmax(output_layer(relu(bn1(hidden_layer(dna ++ protein))))). Dropout is off.
/// Inputs `dna`: (S, dna), `protein`: (S, protein); output `scores`: (S, classes).
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
    /// The head with the statistics of the batch, which move the running ones. Inputs as [`mlp_head`], and
    /// `targets`: i32 (S), with dropout `seed`: i32 (2). Output `loss`: f32 (1), the sum over targets that are
    /// not negative. The head's authors train with a dropout of 0.5 before the output layer.
    pub fn train_graph(&self, bounds: Bounds, training: &Training) -> Result<Graph, VerifyError> {
        let g = &mut Builder::new(bounds);
        let x = hidden(g, self);
        let targets = g.input("targets", &[Dim::Sequences(1)], DType::I32);
        let mut dropping = Dropping::new(g, training);
        let norm = norm(g, self);
        let op = BatchNormTrain { eps: EPS, momentum: MOMENTUM };
        let outs = g.node(Op::BatchNormTrain(op), &[&[x], &norm[..]].concat());
        g.update(norm[2], outs[3]);
        g.update(norm[3], outs[4]);
        let x = g.one(Op::Relu(Relu {}), &[outs[0]]);
        let x = dropping.apply(g, x);
        let [w, b] = [("weight", &[self.classes, self.hidden][..]), ("bias", &[self.classes])]
            .map(|(leaf, shape)| g.param(&format!("output_layer.{leaf}"), shape));
        training.loss(g, x, w, Some(b), targets);
        std::mem::replace(g, Builder::new(bounds)).finish()
    }

    /// How a tensor starts: as torch's Linear and BatchNorm1d do.
    pub fn init(&self, piece: &Piece) -> Init {
        match piece.tensor.split('.').next() {
            Some("hidden_layer") => Init::Uniform(((self.dna + self.protein) as f32).powf(-0.5)),
            Some("output_layer") => Init::Uniform((self.hidden as f32).powf(-0.5)),
            Some(_) | None => usual(piece),
        }
    }
}

/// Both embeddings through the hidden layer: (S, hidden).
fn hidden(g: &mut Builder, c: &HeadConfig) -> ValueId {
    let rows = Dim::Sequences(1);
    let dna = g.input("dna", &[rows, Dim::Fixed(c.dna)], DType::F32);
    let protein = g.input("protein", &[rows, Dim::Fixed(c.protein)], DType::F32);
    let x = g.one(Op::Concat(Concat {}), &[dna, protein]);
    g.linear(x, "hidden_layer", c.hidden, true)
}

/// gamma, beta, running mean and variance of the norm.
fn norm(g: &mut Builder, c: &HeadConfig) -> [ValueId; 4] {
    ["weight", "bias", "running_mean", "running_var"].map(|n| g.param(&format!("bn1.{n}"), &[c.hidden]))
}
