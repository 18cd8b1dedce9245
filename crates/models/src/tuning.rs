//! Which parameters are trained, and which of them decay. Invariant: a pure function of a parameter's names and
//! shapes, so plan, optimizer and checkpoint cannot disagree.

use graph::Param;

/// What a parameter is to an optimizer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Group {
    /// A weight of two dimensions: decays.
    Matrix,
    /// A table of embeddings, also where it is tied to the output.
    Embedding,
    /// Gains and biases: never decay.
    Vector,
    /// No optimizer's business: rotary frequencies, running statistics.
    Buffer,
}

/// The group of a parameter. All its pieces are of one kind.
pub fn group(param: &Param) -> Group {
    let Some(piece) = param.pieces.first() else { return Group::Buffer };
    let ends = |names: &[&str]| names.iter().any(|n| piece.tensor.ends_with(n));
    if ends(&["inv_freq", "running_mean", "running_var"]) {
        Group::Buffer
    } else if piece.shape.len() < 2 {
        Group::Vector
    } else if ends(&["embeddings.weight", "embed_tokens.weight"]) {
        Group::Embedding
    } else {
        Group::Matrix
    }
}

/// How much of a model is trained.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Tuning {
    /// All of it.
    Full,
    /// The classifier over a frozen encoder.
    Head,
    /// The adapters of LoRA, and a classifier where there is one.
    Adapters,
}

/// Whether a parameter is trained.
pub fn trains(tuning: Tuning, param: &Param) -> bool {
    let head = param.name.starts_with("classifier.");
    let chosen = match tuning {
        Tuning::Full => true,
        Tuning::Head => head,
        Tuning::Adapters => head || param.name.contains(".lora_"),
    };
    chosen && group(param) != Group::Buffer
}
