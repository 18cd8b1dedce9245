//! What waits for its scores, in input order. Invariant: items leave in the order in which they came, and
//! only when nothing of them is missing.

use super::kept::{Entry, KeptOrf};
use super::output::{OrfScore, RecordText};
use data::chunk::Chunk;
use data::translate::Frame;
use std::collections::VecDeque;
use std::sync::Arc;

/// Frames of a chunk.
const FRAMES: usize = 6;

/// Something that becomes a row of the results.
pub(crate) enum Item {
    /// A chunk and its open reading frames.
    Window(Window),
    /// The end of a record.
    End { record: Arc<str>, length: usize, text: Option<Arc<RecordText>> },
    /// Something odd.
    Note(super::output::Note),
    /// What follows comes from this input.
    Source(Arc<str>),
    /// Text of the intermediate files.
    Text([Vec<u8>; 3]),
}

/// A chunk whose open reading frames are on their way.
pub(crate) struct Window {
    /// Its number among all windows of the input.
    pub(crate) number: u64,
    pub(crate) record: Arc<str>,
    pub(crate) chunk: Chunk,
    orfs: [Option<PendingOrf>; FRAMES],
    waiting: usize,
    /// The embeddings of its frames, where they come from a journal.
    pub(crate) rows: Vec<f32>,
    /// Whether it comes from the journal that this run writes.
    pub(crate) kept: bool,
}

/// An open reading frame on its way.
#[derive(Clone, Copy)]
pub(crate) struct PendingOrf {
    pub(crate) frame: Frame,
    pub(crate) bases: u32,
    /// The slot that holds its embeddings; `None` where they come from a journal.
    slot: Option<u32>,
    pub(crate) state: State,
}

impl PendingOrf {
    pub(crate) fn slot(&self) -> Option<usize> {
        self.slot.map(|slot| slot as usize)
    }
}

/// How far an open reading frame is.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum State {
    /// In a packer, or between the encoders and the head.
    Waiting,
    /// Through.
    Scored([f32; 2]),
    /// Not computable: it gave a value that is no number.
    Failed,
    /// Through the nucleotide encoder, of a run that does the rest later.
    Embedded,
}

impl Window {
    /// A chunk with so many open reading frames. It waits for all of them from the start: those that are
    /// through must not let it go while others still want a slot.
    pub(crate) fn new(number: u64, record: Arc<str>, chunk: Chunk, orfs: usize) -> Self {
        let (orfs, waiting) = ([None; FRAMES], orfs);
        Self { number, record, chunk, orfs, waiting, rows: vec![], kept: false }
    }

    /// A chunk whose results were found in a journal.
    pub(crate) fn kept(record: Arc<str>, chunk: Chunk, entry: Entry) -> Self {
        let Entry { number, orfs, rows, .. } = entry;
        let mut window = Self { rows, kept: true, ..Self::new(number, record, chunk, 0) };
        for KeptOrf { frame, bases, state } in orfs {
            window.orfs[frame.index()] = Some(PendingOrf { frame, bases, slot: None, state });
        }
        window
    }

    /// All of its open reading frames.
    pub(crate) fn orfs(&self) -> impl Iterator<Item = &PendingOrf> {
        self.orfs.iter().flatten()
    }

    /// Those that have embeddings, in the order of frames.
    pub(crate) fn embedded(&self) -> impl Iterator<Item = &PendingOrf> {
        self.orfs().filter(|orf| matches!(orf.state, State::Scored(_) | State::Embedded))
    }

    /// The scores of those that have some, in the order of frames.
    pub(crate) fn scores(&self) -> impl Iterator<Item = OrfScore> {
        self.orfs().filter_map(|orf| match orf.state {
            State::Scored(scores) => Some(OrfScore { frame: orf.frame, scores }),
            State::Waiting | State::Failed | State::Embedded => None,
        })
    }
}

/// Where an open reading frame waits.
#[derive(Clone, Copy, Default)]
pub(crate) struct Place {
    item: u64,
    frame: usize,
}

/// Items in input order.
#[derive(Default)]
pub(crate) struct Queue {
    items: VecDeque<Item>,
    /// The number of the first item.
    first: u64,
    /// Bytes of sequences and texts of the items.
    bytes: usize,
}

impl Item {
    /// Bytes that it holds outside of the queue, where they can be many.
    fn bytes(&self) -> usize {
        match self {
            Item::End { text, .. } => text.as_ref().map_or(0, |text| text.bytes()),
            Item::Text(text) => text.iter().map(Vec::len).sum(),
            Item::Window(_) | Item::Note(_) | Item::Source(_) => 0,
        }
    }
}

impl Queue {
    pub(crate) fn len(&self) -> usize {
        self.items.len()
    }

    /// Bytes of sequences and texts that wait.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    pub(crate) fn push(&mut self, item: Item) {
        self.bytes += item.bytes();
        self.items.push_back(item);
    }

    /// Adds an open reading frame to the window that was pushed last, and is still the last item: nothing
    /// else may be pushed before all of its frames are in.
    pub(crate) fn push_orf(&mut self, frame: Frame, bases: u32, slot: usize) -> Place {
        let item = self.first + self.items.len() as u64 - 1;
        if let Some(Item::Window(window)) = self.items.back_mut() {
            window.orfs[frame.index()] =
                Some(PendingOrf { frame, bases, slot: Some(slot as u32), state: State::Waiting });
        }
        Place { item, frame: frame.index() }
    }

    /// An open reading frame is through.
    pub(crate) fn settle(&mut self, place: Place, state: State) {
        if let Some(Item::Window(window)) = self.items.get_mut((place.item - self.first) as usize)
            && let Some(orf) = window.orfs[place.frame].as_mut()
        {
            orf.state = state;
            window.waiting -= 1;
        }
    }

    /// The first item, if nothing of it is missing.
    pub(crate) fn pop_complete(&mut self) -> Option<Item> {
        if let Some(Item::Window(window)) = self.items.front()
            && window.waiting > 0
        {
            return None;
        }
        let item = self.items.pop_front()?;
        self.first += 1;
        self.bytes -= item.bytes();
        Some(item)
    }
}
