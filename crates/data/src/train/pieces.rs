//! Documents to micro-batches: pieces laid end to end. Invariant: a batch holds no padding and is never larger
//! than its bounds; every token stands in exactly one piece; a piece has a target, and no target is of another
//! document.
//!
//! * *Next token*: the tokens of a document but the last one are inputs, those but the first one targets. A
//!   piece ends where the batch does, and the document goes on in the next one.
//! * *Masked tokens*: a piece is as long as a sequence may be, its ends included, and begins in the batch in which
//!   it fits whole.
//! * *Classes*: a document is a sequence.

use super::mask::Masking;
use super::position::Position;
use super::random::Key;
use super::settings::{Bounds, Task};
use super::vocabulary::Vocabulary;
use crate::{DataError, DataErrorKind};

/// The target of a token that is not to be predicted: torch's `ignore_index`.
pub(super) const IGNORED: i32 = -100;

/// A micro-batch. Its buffers are reused.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Batch {
    /// The tokens of all sequences, end to end: (T).
    pub ids: Vec<i32>,
    /// Start and end of each sequence in `ids`: (S, 2).
    pub spans: Vec<[i32; 2]>,
    /// Of each token what is to be predicted, or -100: (T); of each sequence its class: (S).
    pub targets: Vec<i32>,
    /// Targets that count.
    pub target_tokens: u64,
    /// Where the data goes on behind it; none before the first one.
    pub position_after: Option<Position>,
}

impl Batch {
    /// An empty one with room for all that it may hold.
    pub fn with_capacity(bounds: &Bounds) -> Self {
        Batch {
            ids: Vec::with_capacity(bounds.tokens),
            spans: Vec::with_capacity(bounds.sequences),
            targets: Vec::with_capacity(bounds.tokens),
            target_tokens: 0,
            position_after: None,
        }
    }

    /// Empties it and keeps its buffers.
    pub(super) fn clear(&mut self) {
        self.ids.clear();
        self.spans.clear();
        self.targets.clear();
        self.target_tokens = 0;
    }

    /// Closes the sequence that begins at `start`.
    fn close(&mut self, start: usize) {
        self.spans.push([start as i32, self.ids.len() as i32]);
    }
}

/// A document as tokens.
pub(super) struct Tokenized<'a> {
    /// Its special tokens included.
    pub tokens: &'a [i32],
    pub class: i32,
    /// Of its random numbers.
    pub key: Key,
}

/// What became of a document.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Cut {
    /// Nothing more of it fits; it goes on at this token.
    Full(usize),
    /// All of it is in batches.
    Done,
}

/// Cuts documents for a task.
pub(super) struct Cutter {
    task: Task,
    bounds: Bounds,
    frame: [Option<i32>; 2],
}

impl Cutter {
    pub(super) fn new(task: &Task, bounds: Bounds, vocabulary: &Vocabulary) -> Self {
        Cutter { task: task.clone(), bounds, frame: vocabulary.frame() }
    }

    /// Puts what fits of a document from its token `from` on into the batch.
    pub(super) fn add(
        &self,
        document: &Tokenized<'_>,
        mut from: usize,
        vocabulary: &Vocabulary,
        batch: &mut Batch,
    ) -> Result<Cut, DataError> {
        loop {
            let room = match batch.spans.len() < self.bounds.sequences {
                true => self.bounds.tokens - batch.ids.len(),
                false => 0,
            };
            let taken = match &self.task {
                Task::Causal => self.causal(document, from, room, batch),
                Task::Masked(rates) => {
                    let ordinary = vocabulary.ordinary();
                    // `Dataset::open` refuses a vocabulary without one.
                    let mask = vocabulary.mask().unwrap_or(IGNORED);
                    self.masked(document, from, room, &Masking { rates: *rates, mask, ordinary }, batch)
                }
                Task::Classify { truncate, .. } => self.classify(document, room, *truncate, batch)?,
            };
            match taken {
                Some(0) => return Ok(Cut::Done),
                Some(tokens) => from += tokens,
                None => return Ok(Cut::Full(from)),
            }
            if matches!(self.task, Task::Classify { .. }) {
                return Ok(Cut::Done);
            }
        }
    }

    /// How many tokens were taken: 0 if none is left, none if none fits.
    fn causal(&self, document: &Tokenized<'_>, from: usize, room: usize, batch: &mut Batch) -> Option<usize> {
        let rest = &document.tokens[from.min(document.tokens.len())..];
        // The last token is a target only.
        let left = rest.len().saturating_sub(1);
        let taken = left.min(room).min(self.bounds.longest);
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

    fn masked(
        &self,
        document: &Tokenized<'_>,
        from: usize,
        room: usize,
        masking: &Masking<'_>,
        batch: &mut Batch,
    ) -> Option<usize> {
        let inside = self.inside(document.tokens);
        let rest = &inside[from.min(inside.len())..];
        let ends = self.frame.iter().flatten().count();
        let taken = rest.len().min(self.bounds.longest - ends);
        if taken == 0 {
            return Some(0);
        }
        if taken + ends > room {
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
            // Nothing to predict: the piece would cost time and teach nothing.
            batch.ids.truncate(start);
            batch.targets.truncate(start);
            return Some(taken);
        }
        batch.target_tokens += chosen;
        batch.close(start);
        Some(taken)
    }

    fn classify(
        &self,
        document: &Tokenized<'_>,
        room: usize,
        truncate: bool,
        batch: &mut Batch,
    ) -> Result<Option<usize>, DataError> {
        let (tokens, longest) = (document.tokens, self.bounds.longest);
        if tokens.len() > longest && !truncate {
            return Err(DataError::new(DataErrorKind::TooLong { tokens: tokens.len(), bound: longest }));
        }
        if tokens.len().min(longest) > room {
            return Ok(None);
        }
        let start = batch.ids.len();
        if tokens.len() <= longest {
            batch.ids.extend_from_slice(tokens);
        } else {
            let ends = self.frame.iter().flatten().count();
            batch.ids.extend(self.frame[0]);
            batch.ids.extend_from_slice(&self.inside(tokens)[..longest - ends]);
            batch.ids.extend(self.frame[1]);
        }
        batch.targets.push(document.class);
        batch.target_tokens += 1;
        batch.close(start);
        Ok(Some(tokens.len()))
    }

    /// The tokens without their ends.
    fn inside<'a>(&self, tokens: &'a [i32]) -> &'a [i32] {
        let [first, last] = self.frame.map(|end| usize::from(end.is_some()));
        &tokens[first..tokens.len() - last]
    }
}
