//! The packer: a thread that gathers tokenized documents into blocks and packs them, ahead of the stream that takes the
//! packs. Invariant: blocks come in the order of the documents, do not span shuffle windows, and do not depend on the
//! number of tokenizer threads or on timing.
//!
//! Two blocks circulate: while the stream takes the packs of one, the packer fills the other, so tokenizing overlaps
//! with training although a block is needed as a whole before its first pack is known.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::JoinHandle;

use super::block::{BestFit, BlockCapacity, PackedBlock, WindowCapacity};
use super::dataset::SharedDataset;
use super::pieces::{PieceCutter, Tokenized};
use super::pipeline::{DocumentGroup, Pipeline};
use super::position::DataPosition;
use super::random::RandomKey;
use super::split::Split;
use super::stream::lost;
use super::windows;
use crate::limits::spawn;
use crate::{DataError, DataErrorKind};

/// Number of blocks of a stream.
pub(super) const BLOCKS: usize = 2;

/// Key word of the order of the packs of a block ("pack" in ASCII).
const PACKED: u64 = 0x7061_636b;

/// The packer thread and the consumer's ends of its channels.
pub(super) struct PackerThread {
    packed: Receiver<PackedBlock>,
    /// Returns blocks for reuse.
    free: SyncSender<PackedBlock>,
    /// Tells the thread to end before its block is full.
    stops: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl PackerThread {
    /// Allocates the blocks and starts the threads at the first document of the position's block.
    ///
    /// # Errors
    /// A thread that cannot be started. Errors of the data arrive as [`PackedBlock::error`].
    pub(super) fn start(
        inner: &Arc<SharedDataset>,
        split: Split,
        from: DataPosition,
    ) -> Result<Self, DataError> {
        let bounds = &inner.settings.bounds;
        let cutter = PieceCutter::new(&inner.settings.task, bounds, &inner.vocabulary);
        let longest = inner.census.longest;
        let (bytes, documents) = windows::window_capacity(&inner.settings.shuffle, longest, inner.side(split));
        let window = WindowCapacity { bytes, documents, longest };
        let capacity = BlockCapacity::new(bounds, &cutter, &inner.vocabulary, &window);
        let (free, pool) = sync_channel(BLOCKS);
        for _ in 0..BLOCKS {
            // Cannot block: the channel has room for all blocks.
            let _ = free.send(PackedBlock::with_capacity(&capacity));
        }
        // Room for all blocks: `drop` joins the thread while the receiver still exists, so a thread that waited to send
        // a block would never end.
        let (done, packed) = sync_channel(BLOCKS);
        let stops = Arc::new(AtomicBool::new(false));
        let gatherer = Gatherer {
            pipeline: Pipeline::start(inner, split, from)?,
            best_fit: BestFit::with_capacity(bounds, &capacity),
            cutter,
            inner: inner.clone(),
            split,
            stops: stops.clone(),
            parcel: None,
            next: 0,
        };
        let thread = spawn("packer", move || gatherer.run(&pool, &done));
        let thread = Some(thread.map_err(|error| DataError::new(DataErrorKind::Thread(error)))?);
        Ok(PackerThread { packed, free, stops, thread })
    }

    /// Waits for the next block; `None` after the last block.
    pub(super) fn next(&self) -> Option<PackedBlock> {
        self.packed.recv().ok()
    }

    /// Returns a block for reuse.
    pub(super) fn give_back(&self, block: PackedBlock) {
        // Fails only after the thread has ended, and then the block can be dropped.
        let _ = self.free.send(block);
    }
}

impl Drop for PackerThread {
    fn drop(&mut self) {
        // The thread waits for a block of the pool, which ends with the channel, or for documents, which come.
        self.stops.store(true, Ordering::Relaxed);
        self.free = sync_channel(0).0;
        if let Some(thread) = self.thread.take() {
            // `join` fails if the thread panicked; the panic hook has already printed the message.
            let _ = thread.join();
        }
    }
}

/// State of the packer thread.
struct Gatherer {
    inner: Arc<SharedDataset>,
    split: Split,
    pipeline: Pipeline,
    cutter: PieceCutter,
    best_fit: BestFit,
    stops: Arc<AtomicBool>,
    /// The parcel that is partly consumed.
    parcel: Option<DocumentGroup>,
    /// Index of the next document in the parcel.
    next: usize,
}

impl Gatherer {
    fn run(mut self, pool: &Receiver<PackedBlock>, done: &SyncSender<PackedBlock>) {
        while let Ok(mut block) = pool.recv() {
            block.clear();
            if let Err(error) = self.gather(&mut block) {
                block.clear();
                block.error = Some(error);
            }
            if self.stops.load(Ordering::Relaxed) {
                return;
            }
            let order = self.order(&block);
            self.best_fit.pack(&mut block, order);
            let is_last = block.error.is_some() || (block.ends_epoch && self.split == Split::Validation);
            if done.send(block).is_err() || is_last {
                return;
            }
        }
    }

    /// Adds documents to an empty block until it is full or its shuffle window ends, or marks it as the end of the
    /// epoch.
    fn gather(&mut self, block: &mut PackedBlock) -> Result<(), DataError> {
        while !self.stops.load(Ordering::Relaxed) {
            let mut parcel = self.parcel.take().or_else(|| self.pipeline.next()).ok_or_else(lost)?;
            while self.next < parcel.documents.len() && !block.is_full(&self.inner.settings.bounds) {
                self.add(&parcel, block)?;
                self.next += 1;
            }
            if self.next < parcel.documents.len() {
                self.parcel = Some(parcel);
                return Ok(());
            }
            self.next = 0;
            block.ends_epoch = parcel.ends_epoch;
            let error = parcel.error.take();
            let ends_window = parcel.ends_window;
            self.pipeline.give_back(parcel);
            if let Some(error) = error {
                return Err(error);
            }
            // A window may end with the last document of the block before; this block is then still empty.
            let ends = ends_window || block.is_full(&self.inner.settings.bounds);
            if block.ends_epoch || (ends && block.documents > 0) {
                return Ok(());
            }
        }
        Ok(())
    }

    /// Adds the next document of a parcel to a block.
    fn add(&self, parcel: &DocumentGroup, block: &mut PackedBlock) -> Result<(), DataError> {
        let document = &parcel.documents[self.next];
        let start = self.next.checked_sub(1).map_or(0, |before| parcel.documents[before].end);
        let place = parcel.place + self.next as u32;
        if block.documents == 0 {
            block.epoch = parcel.epoch;
            block.window = parcel.window;
            block.place = place;
        }
        let tokens = &parcel.tokens[start..document.end];
        let tokenized = Tokenized { tokens, class: document.entry.class, place };
        self.cutter.cut(&tokenized, &self.inner.vocabulary, block).map_err(|error| {
            let path = self.inner.files(self.split).paths[document.entry.file].clone();
            DataError { path: Some(path), ..error }.with_id(format!("document {}", document.entry.number))
        })?;
        block.documents += 1;
        block.unknown += document.unknown as u64;
        Ok(())
    }

    /// Key of the order of the packs of a block; `None` if they keep the order of the documents.
    fn order(&self, block: &PackedBlock) -> Option<RandomKey> {
        let settings = &self.inner.settings;
        if self.split == Split::Validation || !settings.shuffle.is_enabled() {
            return None;
        }
        // The first document names the block in its window.
        let key = RandomKey::new(settings.seed).with(PACKED).with(block.epoch).with(block.window.number);
        Some(key.with(u64::from(block.place)))
    }
}
