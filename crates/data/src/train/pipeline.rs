//! Threads of a stream: one reader and several tokenizer workers, which exchange parcels (groups of documents). The tokenized
//! parcels go to the thread that packs them ([`super::packer`]).
//! Invariant: parcels are returned in the order in which they were read, for any number of workers; all parcels are
//! allocated at the start and recycled, so a reader without a free parcel blocks until one is given back.
//!
//! Parcel `n` is sent to worker `n % workers` and received from that worker, so the order is preserved without
//! sequence numbers.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::JoinHandle;

use super::dataset::SharedDataset;
use super::position::{DataPosition, ShuffleWindow};
use super::split::Split;
use super::windows::{ShuffledDocument, WindowReader};
use crate::limits::spawn;
use crate::{DataError, DataErrorKind};

/// Nominal size of a parcel's text in bytes; its last document may exceed it.
pub(super) const PARCEL: usize = 32 << 10;
/// Maximum number of documents in a parcel.
pub(super) const DOCUMENTS: usize = 256;

/// A group of consecutive documents of one shuffle window: text and tokens in reusable buffers.
pub(super) struct DocumentGroup {
    pub epoch: u64,
    pub window: ShuffleWindow,
    /// Index of the first document in its window.
    pub place: u32,
    pub documents: Vec<Carried>,
    /// Concatenated text of the documents.
    text: Vec<u8>,
    /// Concatenated tokens of the documents.
    pub tokens: Vec<i32>,
    /// Whether the shuffle window ends with the last document of this parcel.
    pub ends_window: bool,
    /// Whether the epoch ends after this parcel.
    pub ends_epoch: bool,
    /// Error that occurred after the documents of this parcel.
    pub error: Option<DataError>,
}

/// A document of a parcel.
pub(super) struct Carried {
    pub entry: ShuffledDocument,
    /// End of its text in the parcel's text; it starts at the end of the preceding document.
    text: usize,
    /// End of its tokens in the parcel's tokens.
    pub end: usize,
    /// Number of unknown tokens.
    pub unknown: usize,
}

/// The threads of a stream and the consumer's ends of their channels.
pub(super) struct Pipeline {
    /// Tokenized parcels, by worker.
    outputs: Vec<Receiver<DocumentGroup>>,
    /// Returns parcels to the reader.
    free: SyncSender<DocumentGroup>,
    /// The worker from which the next parcel is received.
    next: usize,
    threads: Vec<JoinHandle<()>>,
}

/// Number of parcels of a stream: one in use by the reader, one by the consumer, one by each worker, and `prefetch`
/// queued parcels per worker.
pub(super) fn parcels(workers: usize, prefetch: usize) -> usize {
    2 + workers * (1 + prefetch)
}

impl Pipeline {
    /// Allocates the parcels and starts the threads at a position.
    ///
    /// # Errors
    /// A thread that cannot be started. Errors of the data arrive as [`DocumentGroup::error`].
    pub(super) fn start(
        inner: &Arc<SharedDataset>,
        split: Split,
        from: DataPosition,
    ) -> Result<Self, DataError> {
        let workers = inner.settings.workers;
        let count = parcels(workers, inner.settings.prefetch);
        let (free, pool) = sync_channel(count);
        let longest = inner.census.longest;
        for _ in 0..count {
            // Cannot block: the capacity of the channel is the number of parcels.
            let _ =
                free.send(DocumentGroup::new(PARCEL + longest, inner.vocabulary.most_tokens(PARCEL + longest)));
        }
        let mut inputs = Vec::new();
        let mut outputs = Vec::new();
        let mut threads = Vec::new();
        for _ in 0..workers {
            let (input, work) = sync_channel::<DocumentGroup>(count);
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
            threads.push(worker.map_err(|error| DataError::new(DataErrorKind::Thread(error)))?);
            inputs.push(input);
            outputs.push(output);
        }
        let reader = ReaderThread { inner: inner.clone(), split, pool, inputs, next: 0 };
        threads.push(
            spawn("reader", move || reader.run(&from))
                .map_err(|error| DataError::new(DataErrorKind::Thread(error)))?,
        );
        Ok(Pipeline { outputs, free, next: 0, threads })
    }

    /// Waits for the next parcel in reading order; `None` after the last parcel.
    pub(super) fn next(&mut self) -> Option<DocumentGroup> {
        let parcel = self.outputs[self.next].recv().ok();
        self.next = (self.next + 1) % self.outputs.len();
        parcel
    }

    /// Returns a parcel to the reader for reuse.
    pub(super) fn give_back(&self, parcel: DocumentGroup) {
        // Fails only after the reader has ended, and then the parcel can be dropped.
        let _ = self.free.send(parcel);
    }
}

impl Drop for Pipeline {
    fn drop(&mut self) {
        // All channel ends must be dropped before the joins: a thread that waits on a channel wakes up and ends only
        // when the opposite end is gone.
        self.outputs.clear();
        self.free = sync_channel(0).0;
        for thread in self.threads.drain(..) {
            // `join` fails if the thread panicked; the panic hook has already printed the message.
            let _ = thread.join();
        }
    }
}

impl DocumentGroup {
    /// An empty parcel with buffers for `text` bytes and `tokens` token ids.
    fn new(text: usize, tokens: usize) -> Self {
        DocumentGroup {
            epoch: 0,
            window: ShuffleWindow::default(),
            place: 0,
            documents: Vec::with_capacity(DOCUMENTS),
            text: Vec::with_capacity(text),
            tokens: Vec::with_capacity(tokens),
            ends_window: false,
            ends_epoch: false,
            error: None,
        }
    }

    fn is_full(&self) -> bool {
        self.text.len() >= PARCEL || self.documents.len() == DOCUMENTS
    }

    /// Clears the parcel for documents that start at index `place` of a window.
    fn begin(&mut self, epoch: u64, window: ShuffleWindow, place: u32) {
        (self.epoch, self.window, self.place) = (epoch, window, place);
        self.documents.clear();
        self.text.clear();
        self.tokens.clear();
        self.ends_window = false;
        self.ends_epoch = false;
        self.error = None;
    }

    /// Tokenizes the documents. At an error, the failing document and all later ones are removed.
    fn tokenize(&mut self, inner: &SharedDataset, split: Split) {
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

/// State of the reader thread.
struct ReaderThread {
    inner: Arc<SharedDataset>,
    split: Split,
    /// Free parcels.
    pool: Receiver<DocumentGroup>,
    /// Queues of the workers.
    inputs: Vec<SyncSender<DocumentGroup>>,
    /// The worker to which the next parcel is sent.
    next: usize,
}

/// The consumer has dropped its channel ends, so the reader must end.
struct Stopped;

impl ReaderThread {
    fn run(mut self, from: &DataPosition) {
        // `Stopped` means that the consumer has dropped the stream; no one is left to report it to.
        let _ = match WindowReader::new(self.inner.clone(), self.split, from) {
            Ok(windows) => self.epochs(windows, from.place),
            Err(error) => self.fail(error),
        };
    }

    /// Sends all epochs (one for validation). The first window starts at its document `place`, the others at 0.
    fn epochs(&mut self, mut windows: WindowReader, mut place: u32) -> Result<(), Stopped> {
        loop {
            match windows.fill() {
                Err(error) => return self.fail(error),
                Ok(true) if place as usize > windows.count() => {
                    let what = "the saved position is after the last document of its window, so it is damaged";
                    return self.fail(DataError::new(DataErrorKind::Malformed(what.to_owned())));
                }
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

    /// Sends the documents of a window from index `first` on. A parcel never spans two windows.
    fn window(&mut self, windows: &WindowReader, first: u32) -> Result<(), Stopped> {
        let mut open: Option<DocumentGroup> = None;
        let end = windows.count() as u32;
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
            // The packer learns here that the window ends, so that it need not wait for the next window to be read.
            parcel.ends_window = place + 1 == end;
            if parcel.is_full() || parcel.ends_window {
                self.send(parcel)?;
            } else {
                open = Some(parcel);
            }
        }
        Ok(())
    }

    /// Sends an error in a parcel without documents.
    fn fail(&mut self, error: DataError) -> Result<(), Stopped> {
        let mut parcel = self.parcel()?;
        parcel.begin(0, ShuffleWindow::default(), 0);
        parcel.error = Some(error);
        self.send(parcel)
    }

    /// Waits for a free parcel.
    fn parcel(&self) -> Result<DocumentGroup, Stopped> {
        self.pool.recv().map_err(|_| Stopped)
    }

    /// Sends a parcel to the workers in turn.
    fn send(&mut self, parcel: DocumentGroup) -> Result<(), Stopped> {
        let sent = self.inputs[self.next].send(parcel).map_err(|_| Stopped);
        self.next = (self.next + 1) % self.inputs.len();
        sent
    }
}
