//! Selects the parameters that are trained and the parameters that weight decay applies to. Invariant: both are pure
//! functions of a parameter's names and shapes, so that planner, optimizer and checkpoints agree.

use plimsoll_graph::Param;

/// Parameter group of an optimizer; groups differ in weight decay.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Group {
    /// A weight matrix: weight decay applies.
    Matrix,
    /// An embedding table, also if it is tied to the output projection.
    Embedding,
    /// A tensor of fewer than two dimensions, such as a norm's gain or a bias: never decays.
    Vector,
    /// A tensor that is never trained: rotary frequencies, running statistics.
    Buffer,
}

/// The group of a parameter, from the name and shape of its first piece; all pieces of a parameter have one group.
/// A parameter without pieces is a [`Group::Buffer`].
pub fn group(param: &Param) -> Group {
    let Some(piece) = param.pieces.first() else { return Group::Buffer };
    if ["inv_freq", "running_mean", "running_var"].iter().any(|n| piece.tensor.ends_with(n)) {
        return Group::Buffer;
    }
    if piece.shape.len() < 2 {
        return Group::Vector;
    }
    if ["embeddings.weight", "embed_tokens.weight"].iter().any(|n| piece.tensor.ends_with(n)) {
        return Group::Embedding;
    }
    Group::Matrix
}

/// The part of a fine-tuned model that a tensor belongs to. [`TunedPart::of`] is the only code that derives it from the
/// tensor's name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TunedPart<'a> {
    /// The base model.
    Base,
    /// The classification head.
    Classifier,
    /// Matrix A of a LoRA adapter: (rank, K), applied to the module's input.
    AdapterA {
        /// Name of the adapted module.
        module: &'a str,
    },
    /// Matrix B of a LoRA adapter: (N, rank), the factor that maps to the module's output.
    AdapterB {
        /// Name of the adapted module.
        module: &'a str,
    },
}

impl<'a> TunedPart<'a> {
    /// The part that the tensor called `name` belongs to.
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

/// Which parameters of a model are trained.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Tuning {
    /// All parameters (full fine-tuning).
    Full,
    /// The classification head over a frozen encoder.
    Head,
    /// LoRA adapters, and the classification head if the model has one.
    Adapters,
}

/// Whether `param` is trained under `tuning`. Buffers never are.
pub fn trains(tuning: Tuning, param: &Param) -> bool {
    let part = TunedPart::of(&param.name);
    let is_selected = match tuning {
        Tuning::Full => true,
        Tuning::Head => part == TunedPart::Classifier,
        Tuning::Adapters => part != TunedPart::Base,
    };
    is_selected && group(param) != Group::Buffer
}
