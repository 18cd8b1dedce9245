//! Stages of a prediction: the part of the work that a program does. Invariant: the stages together compute the same
//! bits as `Whole`, because a row's result does not depend on the batch that it is in.

use crate::pipeline::shape::{DNA, PROTEIN};

/// The part of the work that a program does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PredictStage {
    /// Both encoders and the head.
    Whole,
    /// The nucleotide encoder only; its embeddings are written to a journal.
    Nucleotide,
    /// The protein encoder and the head; nucleotide embeddings are read from the journal of the `Nucleotide` stage.
    Protein,
    /// A caller. It takes the place of the nucleotide encoder, and its logits that of the embeddings: a window is one
    /// sequence, whose row of logits is the result.
    Caller,
}

impl PredictStage {
    /// Whether `encoder` ([`DNA`] or [`PROTEIN`]) runs in this stage.
    pub(crate) fn runs(self, encoder: usize) -> bool {
        match self {
            Self::Whole => true,
            Self::Nucleotide | Self::Caller => encoder == DNA,
            Self::Protein => encoder == PROTEIN,
        }
    }

    /// Whether the head runs in this stage.
    pub(crate) fn scores(self) -> bool {
        match self {
            Self::Whole | Self::Protein => true,
            Self::Nucleotide | Self::Caller => false,
        }
    }
}
