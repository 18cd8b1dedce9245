//! The VirNucPro head: two embeddings side by side, one hidden layer, two classes (class 1 is virus).

use graph::ops::{BatchNorm, Concat, Relu, Softmax};
use graph::{Bounds, Builder, DType, Dim, Graph, Op, VerifyError};

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

/// softmax(output_layer(relu(bn1(hidden_layer(dna ++ protein))))). Dropout is off.
/// Inputs `dna`: (S, dna), `protein`: (S, protein); output `scores`: (S, classes).
pub fn mlp_head(c: &HeadConfig, bounds: Bounds) -> Result<Graph, VerifyError> {
    let mut g = Builder::new(bounds);
    let rows = Dim::Sequences(1);
    let dna = g.input("dna", &[rows, Dim::Fixed(c.dna)], DType::F32);
    let protein = g.input("protein", &[rows, Dim::Fixed(c.protein)], DType::F32);
    let x = g.one(Op::Concat(Concat {}), &[dna, protein]);
    let x = g.linear(x, "hidden_layer", c.hidden, true);
    let statistics = ["weight", "bias", "running_mean", "running_var"];
    let [gamma, beta, mean, var] = statistics.map(|n| g.param(&format!("bn1.{n}"), &[c.hidden]));
    // torch's BatchNorm1d default.
    let x = g.one(Op::BatchNorm(BatchNorm { eps: 1e-5 }), &[x, gamma, beta, mean, var]);
    let x = g.one(Op::Relu(Relu {}), &[x]);
    let x = g.linear(x, "output_layer", c.classes, true);
    let scores = g.one(Op::Softmax(Softmax {}), &[x]);
    g.output("scores", scores);
    g.finish()
}
