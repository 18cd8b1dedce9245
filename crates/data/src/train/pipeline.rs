//! The threads of a stream: one reads documents, the others make tokens of them. Invariant: parcels come back in
//! the order they were read in, for any number of workers; there are as many parcels as were made at the start,
//! and whoever needs one waits for one that is given back.
//!
//! Parcel n goes to worker n modulo their number and is taken from there: the order needs no bookkeeping.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::JoinHandle;

use super::dataset::Inner;
use super::position::{Position, Window};
use super::split::Split;
use super::windows::{Entry, Windows};
use crate::limits::spawn;
use crate::{DataError, DataErrorKind};

/// Bytes of a parcel, whose last document may go beyond.
pub(super) const PARCEL: usize = 32 << 10;
/// Documents of a parcel.
pub(super) const DOCUMENTS: usize = 256;

/// Documents on their way.
pub(super) struct Parcel {
    pub epoch: u64,
    pub window: Window,
    /// The place of the first document in its window.
    pub place: u32,
    pub documents: Vec<Carried>,
    text: Vec<u8>,
    pub tokens: Vec<i32>,
    /// Whether the epoch ends behind it.
    pub ends_epoch: bool,
    /// What ended the reading behind its documents.
    pub error: Option<DataError>,
}

/// A document of a parcel.
pub(super) struct Carried {
    pub entry: Entry,
    /// Where its text ends.
    text: usize,
    /// Where its tokens end.
    pub end: usize,
    /// Tokens that the vocabulary does not know.
    pub unknown: usize,
}

/// The threads, and the ends of their channels.
pub(super) struct Pipeline {
    outputs: Vec<Receiver<Parcel>>,
    free: SyncSender<Parcel>,
    next: usize,
    threads: Vec<JoinHandle<()>>,
}

/// Parcels of a stream: one with the reader, one with whoever takes them, one with each worker, and those that
/// wait.
pub(super) fn parcels(workers: usize, prefetch: usize) -> usize {
    2 + workers * (1 + prefetch)
}

impl Pipeline {
    pub(super) fn start(inner: &Arc<Inner>, split: Split, from: Position) -> Result<Self, DataError> {
        let refused = |error| DataError::new(DataErrorKind::Thread(error));
        let workers = inner.settings.workers;
        let count = parcels(workers, inner.settings.prefetch);
        let (free, pool) = sync_channel(count);
        let longest = inner.census.longest;
        for _ in 0..count {
            // The channel holds as many as there are.
            let _ = free.send(Parcel::new(PARCEL + longest, inner.vocabulary.most_tokens(PARCEL + longest)));
        }
        let (mut inputs, mut outputs, mut threads) = (Vec::new(), Vec::new(), Vec::new());
        for _ in 0..workers {
            let (input, work) = sync_channel::<Parcel>(count);
            let (done, output) = sync_channel(count);
            let inner = inner.clone();
            let worker = spawn("tokenizer", move || {
                while let Ok(mut parcel) = work.recv() {
                    parcel.tokenize(&inner, split);
                    if done.send(parcel).is_err() {
                        break;
                    }
                }
            });
            threads.push(worker.map_err(refused)?);
            inputs.push(input);
            outputs.push(output);
        }
        let reader = Reader { inner: inner.clone(), split, pool, inputs, next: 0 };
        threads.push(spawn("reader", move || reader.run(&from)).map_err(refused)?);
        Ok(Pipeline { outputs, free, next: 0, threads })
    }

    /// The next parcel; none when there are no more.
    pub(super) fn next(&mut self) -> Option<Parcel> {
        let parcel = self.outputs[self.next].recv().ok();
        self.next = (self.next + 1) % self.outputs.len();
        parcel
    }

    /// Gives a parcel back.
    pub(super) fn give_back(&self, parcel: Parcel) {
        // A reader that has ended needs none.
        let _ = self.free.send(parcel);
    }
}

impl Drop for Pipeline {
    fn drop(&mut self) {
        // Without its other ends every thread stops at its next step.
        self.outputs.clear();
        self.free = sync_channel(0).0;
        for thread in self.threads.drain(..) {
            // A panic of a thread was printed when it happened.
            let _ = thread.join();
        }
    }
}

impl Parcel {
    fn new(text: usize, tokens: usize) -> Self {
        Parcel {
            epoch: 0,
            window: Window::default(),
            place: 0,
            documents: Vec::with_capacity(DOCUMENTS),
            text: Vec::with_capacity(text),
            tokens: Vec::with_capacity(tokens),
            ends_epoch: false,
            error: None,
        }
    }

    fn is_full(&self) -> bool {
        self.text.len() >= PARCEL || self.documents.len() == DOCUMENTS
    }

    fn begin(&mut self, epoch: u64, window: Window, place: u32) {
        (self.epoch, self.window, self.place) = (epoch, window, place);
        self.documents.clear();
        self.text.clear();
        self.tokens.clear();
        self.ends_epoch = false;
        self.error = None;
    }

    fn tokenize(&mut self, inner: &Inner, split: Split) {
        let mut start = 0;
        for (i, document) in self.documents.iter_mut().enumerate() {
            match inner.vocabulary.encode(&self.text[start..document.text], &mut self.tokens) {
                Ok(unknown) => (document.end, document.unknown) = (self.tokens.len(), unknown),
                Err(error) => {
                    let path = inner.files(split).paths[document.entry.file].clone();
                    let id = format!("document {}", document.entry.number);
                    self.error = Some(DataError { path: Some(path), ..error }.with_id(id));
                    self.documents.truncate(i);
                    return;
                }
            }
            start = document.text;
        }
    }
}

/// The thread that reads.
struct Reader {
    inner: Arc<Inner>,
    split: Split,
    pool: Receiver<Parcel>,
    inputs: Vec<SyncSender<Parcel>>,
    next: usize,
}

/// Nobody takes parcels any more.
struct Stopped;

impl Reader {
    fn run(mut self, from: &Position) {
        // Whoever stopped the stream knows.
        let _ = match Windows::new(self.inner.clone(), self.split, from) {
            Ok(windows) => self.epochs(windows, from.place),
            Err(error) => self.fail(error),
        };
    }

    /// Sends the epochs, the first one from a place in its window on.
    fn epochs(&mut self, mut windows: Windows, mut place: u32) -> Result<(), Stopped> {
        loop {
            match windows.fill() {
                Err(error) => return self.fail(error),
                Ok(true) => self.window(&windows, place)?,
                Ok(false) => {
                    let mut parcel = self.parcel()?;
                    parcel.begin(windows.epoch(), windows.window, 0);
                    parcel.ends_epoch = true;
                    self.send(parcel)?;
                    if self.split == Split::Validation {
                        return Ok(());
                    }
                    windows.next_epoch();
                }
            }
            place = 0;
        }
    }

    fn window(&mut self, windows: &Windows, first: u32) -> Result<(), Stopped> {
        let mut open: Option<Parcel> = None;
        for (place, (entry, text)) in (0_u32..).zip(windows.documents()).skip(first as usize) {
            let mut parcel = match open.take() {
                Some(parcel) => parcel,
                None => {
                    let mut parcel = self.parcel()?;
                    parcel.begin(windows.epoch(), windows.window, place);
                    parcel
                }
            };
            parcel.text.extend_from_slice(text);
            parcel.documents.push(Carried { entry, text: parcel.text.len(), end: 0, unknown: 0 });
            match parcel.is_full() {
                true => self.send(parcel)?,
                false => open = Some(parcel),
            }
        }
        open.map_or(Ok(()), |parcel| self.send(parcel))
    }

    fn fail(&mut self, error: DataError) -> Result<(), Stopped> {
        let mut parcel = self.parcel()?;
        parcel.begin(0, Window::default(), 0);
        parcel.error = Some(error);
        self.send(parcel)
    }

    fn parcel(&self) -> Result<Parcel, Stopped> {
        self.pool.recv().map_err(|_| Stopped)
    }

    fn send(&mut self, parcel: Parcel) -> Result<(), Stopped> {
        let sent = self.inputs[self.next].send(parcel).map_err(|_| Stopped);
        self.next = (self.next + 1) % self.inputs.len();
        sent
    }
}
