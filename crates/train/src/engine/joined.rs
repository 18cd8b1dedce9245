//! Micro-batches: packs of the data, joined end to end. Invariant: packs are joined in the order of the data, so the samples of
//! a step and their order do not depend on how many packs a micro-batch has.

use crate::TrainError;
use crate::feed::TrainFeed;
use crate::opened_model::Taken;
use plimsoll_data::train::Split;
use plimsoll_graph::{Bounds, packs};
use plimsoll_runtime::RuntimeError;
use plimsoll_runtime::session::TrainingBatch;

/// A micro-batch of whole packs. Its buffers are reused.
pub(super) struct JoinedBatch {
    /// The packs as training graphs read them: (P, 6).
    packs: Vec<[i32; packs::WORDS]>,
    ids: Vec<i32>,
    spans: Vec<[i32; 2]>,
    /// Embeddings, of each part (R, D); empty for tokens.
    parts: Vec<Vec<f32>>,
    /// Targets of each task.
    targets: Vec<Vec<i32>>,
    /// Maximum number of packs.
    max_packs: u64,
    /// Whether the data of each split ended behind the last pack, which the caller has not been told yet.
    at_end: [bool; 2],
}

/// Limits on the packs and targets of a micro-batch.
#[derive(Clone, Copy)]
pub(super) struct BatchLimit {
    /// Number of packs.
    pub packs: u64,
    /// Number of targets from which no further pack is added.
    pub targets: u64,
}

impl JoinedBatch {
    /// An empty micro-batch with memory for `bounds` and for the tasks or embeddings of `feed`.
    pub fn new(bounds: Bounds, feed: &TrainFeed) -> Self {
        let tokens = bounds.tokens as usize;
        // Embeddings have neither ids nor spans.
        let of_tokens = usize::from(feed.widths().is_empty());
        Self {
            packs: Vec::with_capacity(bounds.packs as usize),
            ids: Vec::with_capacity(of_tokens * tokens),
            spans: Vec::with_capacity(of_tokens * bounds.sequences as usize),
            parts: feed.widths().iter().map(|width| Vec::with_capacity(tokens * width)).collect(),
            // A clone of an empty vector has no capacity.
            targets: (0..feed.tasks()).map(|_| Vec::with_capacity(tokens)).collect(),
            max_packs: bounds.packs,
            at_end: [false; 2],
        }
    }

    /// Bytes of host memory that [`JoinedBatch::new`] allocates.
    pub fn host_bytes(bounds: Bounds, feed: &TrainFeed) -> u64 {
        let Bounds { tokens, sequences, packs, .. } = bounds;
        let all_packs = packs * size_of::<[i32; packs::WORDS]>() as u64;
        let targets = 4 * tokens * feed.tasks() as u64;
        let width: u64 = feed.widths().iter().map(|&width| width as u64).sum();
        let content = if width == 0 { 4 * tokens + 8 * sequences } else { 4 * tokens * width };
        all_packs + targets + content
    }

    /// Replaces the packs by the next ones of `feed`, up to its number of packs and to `limit`, or to the end of the data.
    /// Returns their size; `None` if the data has ended before, which is an epoch of training.
    pub fn fill(
        &mut self,
        feed: &mut TrainFeed,
        split: Split,
        limit: BatchLimit,
    ) -> Result<Option<Taken>, TrainError> {
        self.clear();
        if std::mem::take(&mut self.at_end[split as usize]) {
            return Ok(None);
        }
        let mut all = Taken { tokens: 0, targets: 0, packs: 0 };
        while all.packs < self.max_packs.min(limit.packs) && all.targets < limit.targets {
            let next = match split {
                Split::Train => feed.take()?,
                Split::Validation => feed.take_validation()?,
            };
            let Some(pack) = next else {
                // The end is reported by the next call.
                self.at_end[split as usize] = all.packs > 0;
                break;
            };
            self.add(feed, pack)?;
            all = Taken {
                tokens: all.tokens + pack.tokens,
                targets: all.targets + pack.targets,
                packs: all.packs + 1,
            };
        }
        Ok((all.packs > 0).then_some(all))
    }

    /// The data of a split was moved to another position.
    pub fn moved(&mut self, split: Split) {
        self.at_end[split as usize] = false;
    }

    fn clear(&mut self) {
        self.packs.clear();
        self.ids.clear();
        self.spans.clear();
        self.parts.iter_mut().for_each(Vec::clear);
        self.targets.iter_mut().for_each(Vec::clear);
    }

    /// Adds the pack that was taken last from `feed` behind the others.
    fn add(&mut self, feed: &TrainFeed, taken: Taken) -> Result<(), TrainError> {
        let [first_token, first_sequence] = self.ends();
        let number = match feed {
            TrainFeed::Tokens(feed) => {
                let pack = &feed.pack;
                self.add_tokens(&pack.ids, &pack.spans, std::slice::from_ref(&pack.targets))?;
                pack.number
            }
            TrainFeed::Crops(feed) => {
                let pack = &feed.pack;
                self.add_tokens(&pack.ids, &pack.spans, &pack.targets)?;
                pack.number
            }
            TrainFeed::Rows(feed) => {
                self.parts.iter_mut().zip(&feed.pack.parts).for_each(|(all, one)| all.extend_from_slice(one));
                self.targets[0].extend_from_slice(&feed.pack.targets);
                feed.pack.number
            }
        };
        let [tokens, sequences] = self.ends();
        let mut row = [0; packs::WORDS];
        // Ends are exclusive, so a pack ends where the next one begins.
        row[packs::TOKENS] = first_token;
        row[packs::TOKENS + 1] = tokens;
        row[packs::SEQUENCES] = first_sequence;
        row[packs::SEQUENCES + 1] = sequences;
        row[packs::TARGETS] = taken.targets as i32;
        // Modulo 2^32, as the random numbers of dropout count packs.
        row[packs::NUMBER] = number as u32 as i32;
        self.packs.push(row);
        Ok(())
    }

    /// Numbers of tokens and of sequences. Of embeddings each row is both.
    fn ends(&self) -> [i32; 2] {
        if self.parts.is_empty() {
            return [self.ids.len() as i32, self.spans.len() as i32];
        }
        [self.targets[0].len() as i32; 2]
    }

    fn add_tokens(&mut self, ids: &[i32], spans: &[[i32; 2]], targets: &[Vec<i32>]) -> Result<(), TrainError> {
        if targets.len() != self.targets.len() {
            return Err(RuntimeError::bug("a pack has the targets of other tasks").into());
        }
        // Spans of a pack count from its first token, those of the batch from the first token of all packs.
        let first = self.ids.len() as i32;
        self.ids.extend_from_slice(ids);
        self.spans.extend(spans.iter().map(|[start, end]| [start + first, end + first]));
        self.targets.iter_mut().zip(targets).for_each(|(all, one)| all.extend_from_slice(one));
        Ok(())
    }

    /// The packs as one batch.
    pub fn batch(&self) -> TrainingBatch<'_> {
        let packs = &self.packs;
        if self.parts.is_empty() {
            return TrainingBatch::Tokens { packs, ids: &self.ids, spans: &self.spans, targets: &self.targets };
        }
        TrainingBatch::Rows { packs, parts: &self.parts, targets: &self.targets[0] }
    }

    /// The targets of each task.
    pub fn targets(&self) -> &[Vec<i32>] {
        &self.targets
    }
}
