//! Which part of the work a program does. Invariant: the stages together compute what `Whole` computes, to the
//! bit: a row does not depend on its company, so it does not matter when it is computed.

use super::program::{DNA, PROTEIN};

/// Which part of the work a program does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stage {
    /// Both encoders and the head.
    Whole,
    /// The nucleotide encoder alone: its embeddings go to a journal.
    Nucleotide,
    /// The protein encoder and the head: nucleotide embeddings come from that journal.
    Protein,
}

impl Stage {
    /// The encoders that run.
    pub(crate) fn runs(self, encoder: usize) -> bool {
        match self {
            Self::Whole => true,
            Self::Nucleotide => encoder == DNA,
            Self::Protein => encoder == PROTEIN,
        }
    }

    /// Whether the head runs.
    pub(crate) fn scores(self) -> bool {
        match self {
            Self::Whole | Self::Protein => true,
            Self::Nucleotide => false,
        }
    }
}
