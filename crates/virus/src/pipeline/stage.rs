//! Stages of a prediction: the part of the models that runs in one pass over the input. Invariant: the stages together
//! compute the same bits as `Whole`, because a row's result does not depend on the batch that it is in.

/// The models that run in a pass over the input.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PredictStage {
    /// All encoders and the head.
    Whole,
    /// The first encoder only; its rows are written to a journal.
    First,
    /// The other encoders and the head; rows of the first encoder are read from the journal of the stage `First`.
    Rest,
}

impl PredictStage {
    /// Whether the encoder with this index runs in the stage.
    pub(crate) fn runs(self, encoder: usize) -> bool {
        match self {
            Self::Whole => true,
            Self::First => encoder == 0,
            Self::Rest => encoder > 0,
        }
    }
}
