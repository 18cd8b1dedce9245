//! The batches of a side. Invariant: what comes depends on the data set and the position alone, and the position
//! behind a batch leads to the next one.

use std::sync::Arc;

use super::dataset::Inner;
use super::pieces::{Batch, Cut, Cutter, Tokenized};
use super::pipeline::{Parcel, Pipeline};
use super::position::{Position, Window};
use super::random::Key;
use super::split::Split;
use crate::{DataError, DataErrorKind};

/// The key of what is masked, apart from those of the order.
const MASKED: u64 = 0x6d61_736b;

/// Batches, made by threads of its own.
pub struct Stream {
    inner: Arc<Inner>,
    split: Split,
    pipeline: Pipeline,
    cutter: Cutter,
    parcel: Option<Parcel>,
    /// The document of the parcel that is next.
    next: usize,
    at: Position,
    counts: Counts,
    /// Whether the epoch gave a batch, or began before this stream.
    gave: bool,
    ended: bool,
}

/// What passed through a stream.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Batches.
    pub batches: u64,
    /// Documents that are wholly in them.
    pub documents: u64,
    /// Sequences in them.
    pub sequences: u64,
    /// Tokens in them.
    pub tokens: u64,
    /// Targets in them.
    pub targets: u64,
    /// Tokens of the documents that the vocabulary does not know.
    pub unknown: u64,
}

impl Stream {
    pub(super) fn new(inner: Arc<Inner>, split: Split, from: Position) -> Result<Self, DataError> {
        let pipeline = Pipeline::start(&inner, split, from.clone())?;
        let cutter = Cutter::new(&inner.settings.task, inner.settings.bounds, &inner.vocabulary);
        let gave = from.place > 0 || from.token > 0 || from.window != Window::default();
        let (parcel, counts) = (None, Counts::default());
        Ok(Stream { inner, split, pipeline, cutter, parcel, next: 0, at: from, counts, gave, ended: false })
    }

    /// Fills a batch, whose buffers are reused; false, and an empty batch, at the end of an epoch. Of the training
    /// side the next epoch follows then. After an error nothing comes.
    pub fn fill(&mut self, batch: &mut Batch) -> Result<bool, DataError> {
        batch.clear();
        let filled = if self.ended { Ok(false) } else { self.fill_from_parcels(batch) };
        self.ended |= filled.is_err();
        match &mut batch.position_after {
            Some(position) => position.clone_from(&self.at),
            none => *none = Some(self.at.clone()),
        }
        filled
    }

    /// Fills the batches of one accumulated step; how many were. Fewer come at the end of an epoch, none where it
    /// ended with the group before.
    pub fn fill_group(&mut self, batches: &mut [Batch]) -> Result<usize, DataError> {
        for (filled, batch) in batches.iter_mut().enumerate() {
            if !self.fill(batch)? {
                return Ok(filled);
            }
        }
        Ok(batches.len())
    }

    /// Where the next batch begins.
    pub fn position(&self) -> &Position {
        &self.at
    }

    /// What passed so far.
    pub fn counts(&self) -> Counts {
        self.counts
    }

    fn fill_from_parcels(&mut self, batch: &mut Batch) -> Result<bool, DataError> {
        loop {
            let Some(parcel) = self.parcel.take().or_else(|| self.pipeline.next()) else {
                return Err(lost());
            };
            let full = self.take_from(&parcel, batch)?;
            if full {
                self.parcel = Some(parcel);
                return Ok(self.given(batch));
            }
            if !parcel.ends_epoch {
                self.give_back(parcel)?;
            } else if batch.ids.is_empty() {
                self.give_back(parcel)?;
                return self.end_epoch();
            } else {
                // The end is told by the next call.
                self.parcel = Some(parcel);
                return Ok(self.given(batch));
            }
        }
    }

    /// Puts the documents of a parcel into the batch; whether it is full.
    fn take_from(&mut self, parcel: &Parcel, batch: &mut Batch) -> Result<bool, DataError> {
        let Position { epoch, window, place, .. } = &mut self.at;
        // A parcel with an error alone is nowhere.
        let placed = !parcel.documents.is_empty() || parcel.ends_epoch;
        if placed && (*epoch != parcel.epoch || *window != parcel.window) {
            (*epoch, *window, *place) = (parcel.epoch, parcel.window, 0);
            self.at.token = 0;
        }
        let key = Key::new(self.inner.settings.seed).with(MASKED).with(parcel.epoch).with(parcel.window.number);
        while let Some(document) = parcel.documents.get(self.next) {
            let start = self.next.checked_sub(1).map_or(0, |before| parcel.documents[before].end);
            let place = parcel.place + self.next as u32;
            let tokens = &parcel.tokens[start..document.end];
            let tokenized = Tokenized { tokens, class: document.entry.class, key: key.with(u64::from(place)) };
            let from = self.at.token as usize;
            let cut = self.cutter.add(&tokenized, from, &self.inner.vocabulary, batch).map_err(|error| {
                let path = self.inner.files(self.split).paths[document.entry.file].clone();
                DataError { path: Some(path), ..error }.with_id(format!("document {}", document.entry.number))
            })?;
            match cut {
                Cut::Full(token) => {
                    (self.at.place, self.at.token) = (place, token as u32);
                    return Ok(true);
                }
                Cut::Done => {
                    (self.at.place, self.at.token) = (place + 1, 0);
                    self.next += 1;
                    self.counts.documents += 1;
                    self.counts.unknown += document.unknown as u64;
                }
            }
        }
        Ok(false)
    }

    fn give_back(&mut self, mut parcel: Parcel) -> Result<(), DataError> {
        self.next = 0;
        let error = parcel.error.take();
        self.pipeline.give_back(parcel);
        error.map_or(Ok(()), Err)
    }

    fn given(&mut self, batch: &Batch) -> bool {
        self.gave = true;
        self.counts.batches += 1;
        self.counts.sequences += batch.spans.len() as u64;
        self.counts.tokens += batch.ids.len() as u64;
        self.counts.targets += batch.target_tokens;
        true
    }

    /// The epoch has ended: the position is the start of the next one.
    fn end_epoch(&mut self) -> Result<bool, DataError> {
        if !self.gave {
            let what = "no target in any document: each has fewer tokens than one to read and one to predict, or \
                        none but special ones";
            let path = &self.inner.files(self.split).paths[0];
            return Err(DataError::at(path, DataErrorKind::NoData(what.to_owned())));
        }
        self.gave = false;
        self.ended = self.split == Split::Validation;
        self.at = Position {
            data: std::mem::take(&mut self.at.data),
            epoch: self.at.epoch + 1,
            window: Window::default(),
            place: 0,
            token: 0,
        };
        Ok(false)
    }
}

/// A thread ended without saying why: it panicked.
fn lost() -> DataError {
    DataError::new(DataErrorKind::Malformed("a thread that makes batches has stopped; report this".to_owned()))
}
