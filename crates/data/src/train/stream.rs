//! Streams of batches of a split. Invariant: the batches depend only on the data set and the start position, and a
//! stream started at the position after a batch continues with the next batch.

use std::sync::Arc;

use super::dataset::Inner;
use super::pieces::{Batch, Cut, Cutter, Tokenized};
use super::pipeline::{DocumentGroup, Pipeline};
use super::position::{Position, Window};
use super::random::Key;
use super::split::Split;
use crate::{DataError, DataErrorKind};

/// Key word of the random numbers for masking ("mask" in ASCII); separates them from the keys of shuffling.
const MASKED: u64 = 0x6d61_736b;

/// Stream of the batches of a split. Its own threads read and tokenize ahead.
pub struct Stream {
    inner: Arc<Inner>,
    split: Split,
    pipeline: Pipeline,
    cutter: Cutter,
    /// The parcel that is partly consumed.
    parcel: Option<DocumentGroup>,
    /// Index of the next document in the parcel.
    next: usize,
    /// Position after the last batch.
    at: Position,
    counts: Counts,
    /// Whether the current epoch has produced a batch, or started before this stream.
    gave: bool,
    /// Whether the stream is finished, after an error or at the end of the validation pass.
    ended: bool,
}

/// Counters of a stream since it was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Number of batches.
    pub batches: u64,
    /// Number of completed documents.
    pub documents: u64,
    /// Number of sequences.
    pub sequences: u64,
    /// Number of tokens.
    pub tokens: u64,
    /// Number of targets that contribute to the loss.
    pub targets: u64,
    /// Number of unknown tokens in the completed documents.
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

    /// Fills `batch` with the next micro-batch, reusing its buffers. Returns `false` and an empty batch at the end of
    /// an epoch; on a training stream the next call starts the next epoch.
    ///
    /// # Errors
    /// A document that cannot be read, tokenized or packed; an epoch without a target. After an error the stream
    /// has ended and returns `false`.
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

    /// The position of the next batch.
    pub fn position(&self) -> &Position {
        &self.at
    }

    /// The counters since the stream was opened.
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
                // This is the last batch of the epoch, and it need not be full. The parcel is stored, although all
                // of its documents are consumed: the next call finds it again, fills no batch and ends the epoch.
                self.parcel = Some(parcel);
                return Ok(self.given(batch));
            }
        }
    }

    /// Moves documents of a parcel into the batch. Returns whether the batch is full; otherwise the parcel is consumed.
    fn take_from(&mut self, parcel: &DocumentGroup, batch: &mut Batch) -> Result<bool, DataError> {
        let Position { epoch, window, place, .. } = &mut self.at;
        // A parcel that carries only an error has no valid window and must not change the position.
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

    /// Returns a consumed parcel to the pipeline, and its error, if it has one, to the caller.
    fn give_back(&mut self, mut parcel: DocumentGroup) -> Result<(), DataError> {
        self.next = 0;
        let error = parcel.error.take();
        self.pipeline.give_back(parcel);
        error.map_or(Ok(()), Err)
    }

    /// Counts a filled batch. Always returns `true`, the result of [`Stream::fill`].
    fn given(&mut self, batch: &Batch) -> bool {
        self.gave = true;
        self.counts.batches += 1;
        self.counts.sequences += batch.spans.len() as u64;
        self.counts.tokens += batch.ids.len() as u64;
        self.counts.targets += batch.target_tokens;
        true
    }

    /// Ends the epoch: moves the position to the start of the next epoch and returns `false`.
    ///
    /// # Errors
    /// An epoch without a batch; without this error a training loop over such data would never end.
    fn end_epoch(&mut self) -> Result<bool, DataError> {
        if !self.gave {
            let what = "no document contains a target: each has fewer than two tokens, or only special tokens";
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

/// Error for a pipeline thread that ended without sending an error, which means that it panicked.
pub(super) fn lost() -> DataError {
    DataError::new(DataErrorKind::Malformed(
        "a thread that makes batches has stopped; this is a bug in \
        plimsoll, please report it"
            .to_owned(),
    ))
}
