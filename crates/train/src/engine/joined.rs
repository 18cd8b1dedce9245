//! Micro-batches of `memory.dynamic`: several packs of the data, joined. Invariant: packs are joined in the order of the
//! data, so the samples of a step and their order do not depend on how many packs a micro-batch has.

use crate::TrainError;
use plimsoll_graph::Bounds;
use plimsoll_runtime::RuntimeError;
use plimsoll_runtime::session::Batch;

/// A micro-batch of several packs.
pub(super) struct JoinedBatch {
    ids: Vec<i32>,
    spans: Vec<[i32; 2]>,
    targets: Vec<Vec<i32>>,
    /// Maximum number of packs.
    pub most: u64,
    /// Number of packs.
    pub packs: u64,
    /// Whether the epoch ended behind the last pack, which the caller has not been told yet.
    pub at_end: bool,
}

impl JoinedBatch {
    /// An empty micro-batch with memory for `bounds` and for targets of `tasks` tasks.
    pub fn new(bounds: Bounds, tasks: usize, most: u64) -> Self {
        let (tokens, sequences) = (bounds.tokens as usize, bounds.sequences as usize);
        Self {
            ids: Vec::with_capacity(tokens),
            spans: Vec::with_capacity(sequences),
            // A clone of an empty vector has no capacity.
            targets: (0..tasks).map(|_| Vec::with_capacity(tokens)).collect(),
            most,
            packs: 0,
            at_end: false,
        }
    }

    /// Bytes of host memory that [`JoinedBatch::new`] allocates.
    pub fn host_bytes(bounds: Bounds, tasks: usize) -> u64 {
        4 * bounds.tokens * (1 + tasks as u64) + 8 * bounds.sequences
    }

    /// Removes all packs.
    pub fn clear(&mut self) {
        self.ids.clear();
        self.spans.clear();
        self.targets.iter_mut().for_each(Vec::clear);
        self.packs = 0;
    }

    /// Adds a pack behind the others.
    pub fn add(&mut self, pack: Batch<'_>) -> Result<(), TrainError> {
        let Batch::Tokens { ids, spans, targets } = pack else {
            return Err(RuntimeError::bug("packs of rows cannot be joined").into());
        };
        if targets.len() != self.targets.len() {
            return Err(RuntimeError::bug("a pack has the targets of other tasks").into());
        }
        let first = self.ids.len() as i32;
        self.ids.extend_from_slice(ids);
        self.spans.extend(spans.iter().map(|[start, end]| [start + first, end + first]));
        self.targets.iter_mut().zip(targets).for_each(|(all, one)| all.extend_from_slice(one));
        self.packs += 1;
        Ok(())
    }

    /// The packs as one batch.
    pub fn batch(&self) -> Batch<'_> {
        Batch::Tokens { ids: &self.ids, spans: &self.spans, targets: &self.targets }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_follow_their_tokens() {
        let bounds = Bounds { tokens: 8, sequences: 4, longest: 4 };
        let mut joined = JoinedBatch::new(bounds, 1, 2);
        for _ in 0..2 {
            joined.clear();
            let targets = [vec![2, 3, -1]];
            let first = Batch::Tokens { ids: &[1, 2, 3], spans: &[[0, 2], [2, 3]], targets: &targets };
            joined.add(first).expect("tokens");
            let targets = [vec![5, -1]];
            let second = Batch::Tokens { ids: &[4, 5], spans: &[[0, 2]], targets: &targets };
            joined.add(second).expect("tokens");
            let Batch::Tokens { ids, spans, targets } = joined.batch() else { panic!("tokens") };
            assert_eq!((ids, spans), (&[1, 2, 3, 4, 5][..], &[[0, 2], [2, 3], [3, 5]][..]));
            assert_eq!((targets, joined.packs), (&[vec![2, 3, -1, 5, -1]][..], 2));
        }
        joined.add(Batch::Rows { parts: &[], targets: &[] }).expect_err("rows");
        joined.add(Batch::Tokens { ids: &[], spans: &[], targets: &[] }).expect_err("no task");
    }
}
