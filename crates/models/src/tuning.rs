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

/// The part of a fine-tuned model that a tensor belongs to. Names of tensors are read here alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TunedPart<'a> {
    /// The model that is tuned.
    Base,
    /// The classifier over it.
    Classifier,
    /// The matrix A of the adapter of a module, which reads the module's input.
    AdapterA {
        /// The module.
        module: &'a str,
    },
    /// The matrix B of the adapter of a module, which is added to the module's output.
    AdapterB {
        /// The module.
        module: &'a str,
    },
}

impl<'a> TunedPart<'a> {
    /// The part of the tensor of this name.
    pub fn of(name: &'a str) -> Self {
        if let Some(module) = name.strip_suffix(".lora_A.weight") {
            Self::AdapterA { module }
        } else if let Some(module) = name.strip_suffix(".lora_B.weight") {
            Self::AdapterB { module }
        } else if name.starts_with("classifier.") {
            Self::Classifier
        } else {
            Self::Base
        }
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
    let part = TunedPart::of(&param.name);
    let chosen = match tuning {
        Tuning::Full => true,
        Tuning::Head => part == TunedPart::Classifier,
        Tuning::Adapters => part != TunedPart::Base,
    };
    chosen && group(param) != Group::Buffer
}
