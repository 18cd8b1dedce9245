//! Packs tokenized documents into micro-batches: documents are cut into sequences, called pieces, which are
//! concatenated. Invariant: a batch has no padding and never exceeds its bounds; pieces do not overlap; every piece has
//! a target, and its targets come from its own document.
//!
//! * *Causal*: the inputs are all tokens of a document but the last, the targets all tokens but the first. A piece
//!   ends at the end of the batch or at the maximum sequence length, and the document continues in the next piece.
//! * *Masked*: a piece has the maximum sequence length, start and end tokens included, unless the document ends
//!   before. A piece is never split between batches.
//! * *Classify*: each document is one sequence.

use super::mask::Masking;
use super::position::Position;
use super::random::Key;
use super::settings::{Bounds, Objective};
use super::vocabulary::Vocabulary;
use crate::{DataError, DataErrorKind};

/// Target of a token that is not predicted; the default `ignore_index` of `torch.nn.CrossEntropyLoss`.
pub(super) const IGNORED: i32 = -100;

/// A micro-batch of T tokens in S sequences. Its buffers are reused.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Batch {
    /// Token ids of all sequences, concatenated: (T).
    pub ids: Vec<i32>,
    /// Start and end of each sequence in `ids`, the end exclusive: (S, 2).
    pub spans: Vec<[i32; 2]>,
    /// Causal and masked tasks: the target id of each token, -100 where nothing is predicted, (T). Classification: the
    /// class of each sequence, (S).
    pub targets: Vec<i32>,
    /// Number of targets that contribute to the loss.
    pub target_tokens: u64,
    /// Position in the data after this batch; `None` until the batch is filled for the first time.
    pub position_after: Option<Position>,
}

impl Batch {
    /// An empty batch with buffers that are large enough for the bounds.
    pub fn with_capacity(bounds: &Bounds) -> Self {
        Batch {
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

    /// Ends the sequence that begins at index `start` of `ids`.
    fn close(&mut self, start: usize) {
        self.spans.push([start as i32, self.ids.len() as i32]);
    }
}

/// A tokenized document.
pub(super) struct Tokenized<'a> {
    /// Token ids, including start and end tokens.
    pub tokens: &'a [i32],
    /// Class label; 0 if the task has none.
    pub class: i32,
    /// Key of the random numbers for masking.
    pub key: Key,
}

/// Result of adding a document to a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Cut {
    /// The batch is full; the document continues at this token in the next batch.
    Full(usize),
    /// The document is consumed.
    Done,
}

/// Cuts documents into pieces according to the task.
pub(super) struct Cutter {
    task: Objective,
    bounds: Bounds,
    /// Start and end token of a sequence.
    frame: [Option<i32>; 2],
}

impl Cutter {
    pub(super) fn new(task: &Objective, bounds: Bounds, vocabulary: &Vocabulary) -> Self {
        Cutter { task: task.clone(), bounds, frame: vocabulary.frame() }
    }

    /// Appends to the batch as many pieces of a document as fit, starting at its token `from`. For masked tasks `from`
    /// does not count the start token.
    ///
    /// # Errors
    /// Classification: a document longer than a sequence may be, unless sequences are truncated.
    pub(super) fn add(
        &self,
        document: &Tokenized<'_>,
        mut from: usize,
        vocabulary: &Vocabulary,
        batch: &mut Batch,
    ) -> Result<Cut, DataError> {
        loop {
            let free_tokens = match batch.spans.len() < self.bounds.sequences {
                true => self.bounds.tokens - batch.ids.len(),
                false => 0,
            };
            let taken = match &self.task {
                Objective::Causal => self.causal(document, from, free_tokens, batch),
                Objective::Masked(rates) => {
                    let ordinary = vocabulary.ordinary();
                    // `Dataset::open` rejects a vocabulary without a mask token, so the default is never used.
                    let mask = vocabulary.mask().unwrap_or(IGNORED);
                    self.masked(document, from, free_tokens, &Masking { rates: *rates, mask, ordinary }, batch)
                }
                Objective::Classify { truncate, .. } => {
                    self.classify(document, free_tokens, *truncate, batch)?
                }
            };
            match taken {
                Some(0) => return Ok(Cut::Done),
                Some(tokens) => from += tokens,
                None => return Ok(Cut::Full(from)),
            }
            if matches!(self.task, Objective::Classify { .. }) {
                return Ok(Cut::Done);
            }
        }
    }

    /// Adds a piece of at most `free_tokens` tokens with next-token targets. Returns the number of tokens consumed: 0 at the
    /// end of the document, `None` if the batch has no space.
    fn causal(
        &self,
        document: &Tokenized<'_>,
        from: usize,
        free_tokens: usize,
        batch: &mut Batch,
    ) -> Option<usize> {
        let rest = &document.tokens[from.min(document.tokens.len())..];
        // The last token has no successor: it is a target and never an input.
        let left = rest.len().saturating_sub(1);
        let taken = left.min(free_tokens).min(self.bounds.longest);
        if left > 0 && taken == 0 {
            return None;
        }
        if taken > 0 {
            let start = batch.ids.len();
            batch.ids.extend_from_slice(&rest[..taken]);
            batch.targets.extend_from_slice(&rest[1..=taken]);
            batch.target_tokens += taken as u64;
            batch.close(start);
        }
        Some(taken)
    }

    /// Adds a masked piece. Returns the number of tokens consumed without start and end tokens: 0 at the end of the
    /// document, `None` if the piece does not fit into `free_tokens` tokens as a whole.
    fn masked(
        &self,
        document: &Tokenized<'_>,
        from: usize,
        free_tokens: usize,
        masking: &Masking<'_>,
        batch: &mut Batch,
    ) -> Option<usize> {
        let inside = self.without_frame(document.tokens);
        let rest = &inside[from.min(inside.len())..];
        let ends = self.frame.iter().flatten().count();
        let taken = rest.len().min(self.bounds.longest - ends);
        if taken == 0 {
            return Some(0);
        }
        if taken + ends > free_tokens {
            return None;
        }
        let start = batch.ids.len();
        let end = |end: Option<i32>, batch: &mut Batch| {
            batch.ids.extend(end);
            batch.targets.extend(end.map(|_| IGNORED));
        };
        end(self.frame[0], batch);
        let chosen = masking.push(&rest[..taken], from, document.key, &mut batch.ids, &mut batch.targets);
        end(self.frame[1], batch);
        if chosen == 0 {
            // A piece of special tokens only has no target: it would cost time and contribute no gradient.
            batch.ids.truncate(start);
            batch.targets.truncate(start);
            return Some(taken);
        }
        batch.target_tokens += chosen;
        batch.close(start);
        Some(taken)
    }

    /// Adds a document as one sequence. Returns `None` if it does not fit into `free_tokens` tokens; truncation keeps the
    /// start and end tokens.
    fn classify(
        &self,
        document: &Tokenized<'_>,
        free_tokens: usize,
        truncate: bool,
        batch: &mut Batch,
    ) -> Result<Option<usize>, DataError> {
        let (tokens, longest) = (document.tokens, self.bounds.longest);
        if tokens.len() > longest && !truncate {
            let why = format!(
                "{} tokens, and data.longest is {longest}; raise it, set data.truncate=true, or cut the sequence",
                tokens.len()
            );
            return Err(DataError::new(DataErrorKind::Malformed(why)));
        }
        if tokens.len().min(longest) > free_tokens {
            return Ok(None);
        }
        let start = batch.ids.len();
        if tokens.len() <= longest {
            batch.ids.extend_from_slice(tokens);
        } else {
            let ends = self.frame.iter().flatten().count();
            batch.ids.extend(self.frame[0]);
            batch.ids.extend_from_slice(&self.without_frame(tokens)[..longest - ends]);
            batch.ids.extend(self.frame[1]);
        }
        batch.targets.push(document.class);
        batch.target_tokens += 1;
        batch.close(start);
        Ok(Some(tokens.len()))
    }

    /// The tokens of a document without its start and end tokens.
    fn without_frame<'a>(&self, tokens: &'a [i32]) -> &'a [i32] {
        let [first, last] = self.frame.map(|end| usize::from(end.is_some()));
        &tokens[first..tokens.len() - last]
    }
}
