//! The queue of items that wait for their scores. Invariant: items leave in the order in which they arrived, and only
//! when they are complete.

use crate::output::{OrfScore, RecordText};
use crate::pipeline::journal::{JournalEntry, OrfEntry};
use crate::pipeline::letters::WindowLetters;
use crate::pipeline::records::Mate;
use plimsoll_data::chunk::Chunk;
use plimsoll_data::translate::Frame;
use std::collections::VecDeque;
use std::sync::Arc;

/// Reading frames of a window: three on each strand.
const FRAMES: usize = 6;

/// An item of the output, in input order.
pub(crate) enum OutputItem {
    /// A window and its open reading frames.
    Window(Window),
    /// The end of a record.
    End { record: Arc<str>, length: usize, text: Option<Arc<RecordText>>, mate: Option<Mate> },
    /// A note on an oddity of the input.
    Note(crate::output::Note),
    /// Name of the input that the following items come from.
    Source(Arc<str>),
    /// Text of the intermediate files.
    Text([Vec<u8>; 3]),
}

/// A window whose open reading frames are being computed.
pub(crate) struct Window {
    /// Number of the window among all windows of the input, from 0.
    pub(crate) number: u64,
    pub(crate) record: Arc<str>,
    pub(crate) chunk: Chunk,
    /// The open reading frames that were admitted, by frame.
    orfs: [Option<PendingOrf>; FRAMES],
    /// Number of open reading frames without a final state, including those that are not admitted yet.
    waiting: u8,
    /// Counts of its letters; only with a caller.
    pub(crate) letters: WindowLetters,
    /// Concatenated embeddings of the frames that did not fail, if they come from a journal; otherwise empty.
    pub(crate) rows: Vec<f32>,
    /// Whether the results come from the journal that this run writes.
    pub(crate) kept: bool,
}

/// An open reading frame being computed.
#[derive(Clone, Copy)]
pub(crate) struct PendingOrf {
    pub(crate) frame: Frame,
    /// Length of its nucleotide sequence in bases.
    pub(crate) bases: u32,
    /// Slot that holds the embeddings; `None` if they come from a journal.
    slot: Option<u32>,
    pub(crate) state: OrfState,
}

impl PendingOrf {
    pub(crate) fn slot(&self) -> Option<usize> {
        self.slot.map(|slot| slot as usize)
    }
}

/// Progress of an open reading frame.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum OrfState {
    /// In a packer, or between the encoders and the head.
    Waiting,
    /// Finished, with the probabilities of other and virus.
    Scored([f32; 2]),
    /// Failed: a computed value was not finite.
    Failed,
    /// Finished with a row of values: a nucleotide embedding, of which a later stage computes the rest, or the logits of a
    /// caller.
    Embedded,
}

impl Window {
    /// Creates a window with `orfs` open reading frames. It counts all of them as missing from the start; otherwise the
    /// window could leave the queue before its last frames have got a slot.
    pub(crate) fn new(number: u64, record: Arc<str>, chunk: Chunk, orfs: usize) -> Self {
        // A window has at most six frames.
        let (orfs, waiting, letters) = ([None; FRAMES], orfs as u8, WindowLetters::default());
        Self { number, record, chunk, orfs, waiting, letters, rows: vec![], kept: false }
    }

    /// Creates a window whose results were found in a journal.
    pub(crate) fn kept(record: Arc<str>, chunk: Chunk, entry: JournalEntry) -> Self {
        let JournalEntry { number, orfs, rows, .. } = entry;
        let mut window = Self { rows, kept: true, ..Self::new(number, record, chunk, 0) };
        for OrfEntry { frame, bases, state } in orfs {
            window.orfs[frame.index()] = Some(PendingOrf { frame, bases, slot: None, state });
        }
        window
    }

    /// Sets the counts of the letters.
    pub(crate) fn with_letters(self, letters: WindowLetters) -> Self {
        Self { letters, ..self }
    }

    /// All open reading frames that were admitted, in the order of frames.
    pub(crate) fn orfs(&self) -> impl Iterator<Item = &PendingOrf> {
        self.orfs.iter().flatten()
    }

    /// Frames that have embeddings, in the order of frames.
    pub(crate) fn embedded(&self) -> impl Iterator<Item = &PendingOrf> {
        self.orfs().filter(|orf| matches!(orf.state, OrfState::Scored(_) | OrfState::Embedded))
    }

    /// Scores of the scored frames, in the order of frames.
    pub(crate) fn scores(&self) -> impl Iterator<Item = OrfScore> {
        self.orfs().filter_map(|orf| match orf.state {
            OrfState::Scored(scores) => Some(OrfScore { frame: orf.frame, scores }),
            OrfState::Waiting | OrfState::Failed | OrfState::Embedded => None,
        })
    }
}

/// Location of an open reading frame in the queue: item number and frame.
#[derive(Clone, Copy, Default)]
pub(crate) struct OrfLocation {
    item: u64,
    frame: usize,
}

/// Items in input order.
#[derive(Default)]
pub(crate) struct Queue {
    items: VecDeque<OutputItem>,
    /// Number of the first item among all items ever queued, so that a [`OrfLocation`] stays valid when items leave.
    first: u64,
    /// Bytes of sequences and texts held by the items.
    bytes: usize,
}

impl OutputItem {
    /// Heap bytes held by the item, for the kinds of items where they can be many.
    fn bytes(&self) -> usize {
        match self {
            OutputItem::End { text, .. } => text.as_ref().map_or(0, |text| text.bytes()),
            OutputItem::Text(text) => text.iter().map(Vec::len).sum(),
            OutputItem::Window(_) | OutputItem::Note(_) | OutputItem::Source(_) => 0,
        }
    }
}

impl Queue {
    pub(crate) fn len(&self) -> usize {
        self.items.len()
    }

    /// Bytes of sequences and texts that are waiting.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    pub(crate) fn push(&mut self, item: OutputItem) {
        self.bytes += item.bytes();
        self.items.push_back(item);
    }

    /// Adds an open reading frame to the last item, which must be its window: nothing else may be pushed before all
    /// frames of a window were added.
    pub(crate) fn push_orf(&mut self, frame: Frame, bases: u32, slot: usize) -> OrfLocation {
        let item = self.first + self.items.len() as u64 - 1;
        if let Some(OutputItem::Window(window)) = self.items.back_mut() {
            window.orfs[frame.index()] =
                Some(PendingOrf { frame, bases, slot: Some(slot as u32), state: OrfState::Waiting });
        }
        OrfLocation { item, frame: frame.index() }
    }

    /// Stores the final state of an open reading frame. Its window is still in the queue, because the frame
    /// counted as waiting until now.
    pub(crate) fn complete(&mut self, place: OrfLocation, state: OrfState) {
        if let Some(OutputItem::Window(window)) = self.items.get_mut((place.item - self.first) as usize)
            && let Some(orf) = window.orfs[place.frame].as_mut()
        {
            orf.state = state;
            window.waiting -= 1;
        }
    }

    /// Removes the first item if it is complete.
    pub(crate) fn pop_complete(&mut self) -> Option<OutputItem> {
        if let Some(OutputItem::Window(window)) = self.items.front()
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
