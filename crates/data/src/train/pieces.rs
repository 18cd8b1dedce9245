//! Cuts tokenized documents into sequences, called pieces, and joins the pieces of a pack. Invariant: pieces do not
//! overlap and depend on their document and the maximum sequence length alone; every piece has a target, and its
//! targets come from its own document; a pack has no padding and never exceeds its bounds.
//!
//! * *Causal*: the inputs are all tokens of a document but the last, the targets all tokens but the first. A piece has
//!   the maximum sequence length, unless the document ends before.
//! * *Masked*: a piece has the maximum sequence length, start and end tokens included, unless the document ends
//!   before. Pieces of special tokens alone are left out.
//! * *Classify*: each document is one sequence.

use super::block::PackedBlock;
use super::mask::TokenMasking;
use super::position::DataPosition;
use super::random::RandomKey;
use super::settings::{Objective, PackLimits};
use super::vocabulary::Vocabulary;
use crate::{DataError, DataErrorKind};

/// Target of a token that is not predicted; the default `ignore_index` of `torch.nn.CrossEntropyLoss`.
pub(super) const IGNORED: i32 = -100;

/// A pack of T tokens in S sequences. Its buffers are reused.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TrainingPack {
    /// Global pack number: number of the pack in the run, over all epochs, from 0. At the end of an epoch, where the
    /// pack is empty, the number of the next pack.
    pub number: u64,
    /// Token ids of all sequences, concatenated: (T).
    pub ids: Vec<i32>,
    /// Start and end of each sequence in `ids`, the end exclusive: (S, 2).
    pub spans: Vec<[i32; 2]>,
    /// Causal and masked tasks: the target id of each token, -100 where nothing is predicted, (T). Classification: the
    /// class of each sequence, (S).
    pub targets: Vec<i32>,
    /// Number of targets that contribute to the loss.
    pub target_tokens: u64,
    /// Position in the data after this pack; `None` until the pack is filled for the first time.
    pub position_after: Option<DataPosition>,
}

impl TrainingPack {
    /// An empty pack with buffers that are large enough for the bounds.
    pub fn with_capacity(bounds: &PackLimits) -> Self {
        TrainingPack {
            number: 0,
            ids: Vec::with_capacity(bounds.tokens),
            spans: Vec::with_capacity(bounds.sequences),
            targets: Vec::with_capacity(bounds.tokens),
            target_tokens: 0,
            position_after: None,
        }
    }

    /// Clears the contents and keeps the buffers.
    pub(super) fn clear(&mut self) {
        self.ids.clear();
        self.spans.clear();
        self.targets.clear();
        self.target_tokens = 0;
    }
}

/// A tokenized document.
pub(super) struct Tokenized<'a> {
    /// Token ids, including start and end tokens.
    pub tokens: &'a [i32],
    /// Class label; 0 if the task has none.
    pub class: i32,
    /// Index of the document in its shuffle window.
    pub place: u32,
}

/// A piece of a document.
#[derive(Clone, Copy, Debug)]
pub(super) struct Piece {
    /// Index of its first token in the tokens of the block, where pieces of masked tasks have no start and end tokens.
    pub start: usize,
    /// Number of its tokens in a pack, start and end tokens included.
    pub length: u32,
    /// Index of its first token in the document, of masked tasks without the start token.
    pub from: u32,
    /// Index of its document in the shuffle window.
    pub place: u32,
    /// Class label; 0 if the task has none.
    pub class: i32,
}

/// Cuts documents into pieces and joins pieces to packs, according to the task.
#[derive(Clone)]
pub(super) struct PieceCutter {
    task: Objective,
    longest: usize,
    /// Start and end token of a sequence.
    frame: [Option<i32>; 2],
}

impl PieceCutter {
    pub(super) fn new(task: &Objective, bounds: &PackLimits, vocabulary: &Vocabulary) -> Self {
        PieceCutter { task: task.clone(), longest: bounds.longest, frame: vocabulary.frame() }
    }

    /// Maximum number of pieces of a document of `tokens` tokens.
    pub(super) fn most_pieces(&self, tokens: usize) -> usize {
        match self.task {
            Objective::Causal => tokens.div_ceil(self.longest),
            Objective::Masked(_) => tokens.div_ceil(self.longest - self.ends()),
            Objective::Classify { .. } => 1,
        }
    }

    /// Appends the pieces of a document to a block.
    ///
    /// # Errors
    /// Classification: a document longer than a sequence may be, unless sequences are truncated.
    pub(super) fn cut(
        &self,
        document: &Tokenized<'_>,
        vocabulary: &Vocabulary,
        block: &mut PackedBlock,
    ) -> Result<(), DataError> {
        match &self.task {
            Objective::Causal => self.cut_causal(document, block),
            Objective::Masked(_) => self.cut_masked(document, vocabulary.ordinary(), block),
            Objective::Classify { truncate, .. } => self.cut_classify(document, *truncate, block)?,
        }
        Ok(())
    }

    fn cut_causal(&self, document: &Tokenized<'_>, block: &mut PackedBlock) {
        // The last token has no successor: it is a target and never an input.
        let inputs = document.tokens.len().saturating_sub(1);
        if inputs == 0 {
            return;
        }
        let start = block.append(document.tokens);
        for from in (0..inputs).step_by(self.longest) {
            let length = self.longest.min(inputs - from);
            block.push(document.piece(start + from, from, length));
        }
    }

    fn cut_masked(&self, document: &Tokenized<'_>, ordinary: &[i32], block: &mut PackedBlock) {
        let inside = self.longest - self.ends();
        for (number, part) in self.without_frame(document.tokens).chunks(inside).enumerate() {
            // A piece of special tokens only has no target: it would cost time and contribute no gradient. Every other
            // piece has one, because masking selects at least one ordinary token.
            if !part.iter().any(|token| ordinary.binary_search(token).is_ok()) {
                continue;
            }
            let start = block.append(part);
            block.push(document.piece(start, number * inside, part.len() + self.ends()));
        }
    }

    /// Truncation keeps the start and end tokens.
    fn cut_classify(
        &self,
        document: &Tokenized<'_>,
        truncate: bool,
        block: &mut PackedBlock,
    ) -> Result<(), DataError> {
        let tokens = document.tokens;
        let longest = self.longest;
        if tokens.len() <= longest {
            let start = block.append(tokens);
            block.push(document.piece(start, 0, tokens.len()));
            return Ok(());
        }
        if !truncate {
            let why = format!(
                "{} tokens, and data.longest is {longest}; raise it, set data.truncate=true, or cut the sequence",
                tokens.len()
            );
            return Err(DataError::new(DataErrorKind::Malformed(why)));
        }
        let start = block.append(self.frame[0].as_slice());
        block.append(&self.without_frame(tokens)[..longest - self.ends()]);
        block.append(self.frame[1].as_slice());
        block.push(document.piece(start, 0, longest));
        Ok(())
    }

    /// Appends pack `number` of a block, in the order in which its packs come, to an empty pack. `window` is the key of
    /// the random numbers for masking of the block's shuffle window.
    pub(super) fn join(
        &self,
        block: &PackedBlock,
        number: usize,
        vocabulary: &Vocabulary,
        window: RandomKey,
        pack: &mut TrainingPack,
    ) {
        for piece in block.pack(number) {
            let start = pack.ids.len();
            let length = piece.length as usize;
            match &self.task {
                Objective::Causal => {
                    pack.ids.extend_from_slice(&block.tokens[piece.start..][..length]);
                    pack.targets.extend_from_slice(&block.tokens[piece.start + 1..][..length]);
                    pack.target_tokens += length as u64;
                }
                Objective::Masked(rates) => {
                    let ordinary = vocabulary.ordinary();
                    // `Dataset::open` rejects a vocabulary without a mask token, so the default is never used.
                    let mask = vocabulary.mask().unwrap_or(IGNORED);
                    let masking = TokenMasking { rates: *rates, mask, ordinary };
                    let tokens = &block.tokens[piece.start..][..length - self.ends()];
                    let document = window.with(u64::from(piece.place));
                    let TrainingPack { ids, targets, .. } = pack;
                    ids.extend(self.frame[0]);
                    targets.extend(self.frame[0].map(|_| IGNORED));
                    pack.target_tokens += masking.push(tokens, piece.from as usize, document, ids, targets);
                    ids.extend(self.frame[1]);
                    targets.extend(self.frame[1].map(|_| IGNORED));
                }
                Objective::Classify { .. } => {
                    pack.ids.extend_from_slice(&block.tokens[piece.start..][..length]);
                    pack.targets.push(piece.class);
                    pack.target_tokens += 1;
                }
            }
            pack.spans.push([start as i32, pack.ids.len() as i32]);
        }
    }

    /// Number of start and end tokens of a sequence.
    fn ends(&self) -> usize {
        self.frame.iter().flatten().count()
    }

    /// The tokens of a document without its start and end tokens.
    fn without_frame<'a>(&self, tokens: &'a [i32]) -> &'a [i32] {
        let [first, last] = self.frame.map(|end| usize::from(end.is_some()));
        &tokens[first..tokens.len() - last]
    }
}

impl Tokenized<'_> {
    /// A piece of the document with `length` tokens, which begins at its token `from` and at token `start` of the block.
    fn piece(&self, start: usize, from: usize, length: usize) -> Piece {
        // Documents have at most 1 GiB and less than 2^32 tokens, and a pack has less than 2^31 tokens.
        Piece { start, length: length as u32, from: from as u32, place: self.place, class: self.class }
    }
}
