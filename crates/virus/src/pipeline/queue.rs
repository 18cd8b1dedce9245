//! The queue of items that wait for their results. Invariant: items leave in the order in which they arrived, and only
//! when they are complete.

use crate::VirusError;
use crate::output::{Note, RecordText};
use crate::pipeline::journal::JournalEntry;
use crate::pipeline::letters::WindowLetters;
use crate::pipeline::mates::Mate;
use crate::pipeline::records::TEXTS;
use crate::pipeline::shape::{HEAD_CLASSES, SEQUENCES};
use plimsoll_data::window::RecordWindow;
use std::collections::VecDeque;
use std::sync::Arc;

/// An item of the output, in input order.
pub(crate) enum OutputItem {
    /// A window and its sequences.
    Window(QueuedWindow),
    /// The end of a record.
    End { record: Arc<str>, length: usize, text: Option<Arc<RecordText>>, mate: Option<Mate> },
    /// A note on an oddity of the input.
    Note(Note),
    /// Name of the input that the following items come from.
    Source(Arc<str>),
    /// Text of the method's own files.
    Text([Vec<u8>; TEXTS]),
}

/// A window whose sequences are being computed.
pub(crate) struct QueuedWindow {
    /// Number of the window among all windows of the input, from 0.
    pub(crate) number: u64,
    pub(crate) record: Arc<str>,
    pub(crate) location: RecordWindow,
    /// The sequences that were admitted, by label.
    sequences: [Option<PendingSequence>; SEQUENCES],
    /// Number of sequences without a final state, including those that are not admitted yet.
    waiting: u8,
    /// Counts of its letters, if the method counts them.
    pub(crate) letters: WindowLetters,
    /// Concatenated rows of the sequences that did not fail, if they come from a journal; otherwise empty.
    pub(crate) rows: Vec<f32>,
    /// Whether the results come from the journal that this run writes.
    pub(crate) is_journaled: bool,
}

/// A sequence of a window with its result.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct SequenceResult {
    /// Number of the sequence in its window, below [`SEQUENCES`]. Labels of a window ascend, and may have gaps.
    pub(crate) label: u8,
    /// Length in bases.
    pub(crate) bases: u32,
    pub(crate) state: SequenceState,
}

/// A sequence being computed.
#[derive(Clone, Copy)]
struct PendingSequence {
    result: SequenceResult,
    /// Slot that holds the rows; `None` if they come from a journal.
    slot: Option<u32>,
}

/// Progress of a sequence.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum SequenceState {
    /// In a packer, or between the encoders and the head.
    Waiting,
    /// Finished, with the scores of the head, by class.
    Scored([f32; HEAD_CLASSES]),
    /// Failed: a computed value was not finite.
    Failed,
    /// Finished with the rows of its encoders: the result, or the input of a later stage.
    Encoded,
}

impl SequenceResult {
    /// Whether the sequence has rows of encoders.
    pub(crate) fn has_rows(&self) -> bool {
        match self.state {
            SequenceState::Scored(_) | SequenceState::Encoded => true,
            SequenceState::Waiting | SequenceState::Failed => false,
        }
    }
}

impl QueuedWindow {
    /// Creates a window with a number of sequences. It counts all of them as missing from the start; otherwise the window
    /// could leave the queue before its last sequences have got a slot.
    pub(crate) fn new(number: u64, record: Arc<str>, location: RecordWindow, sequences: usize) -> Self {
        Self {
            number,
            record,
            location,
            sequences: [None; SEQUENCES],
            // A window has at most `SEQUENCES` sequences.
            waiting: sequences as u8,
            letters: WindowLetters::default(),
            rows: vec![],
            is_journaled: false,
        }
    }

    /// Creates a window whose results were found in a journal.
    pub(crate) fn journaled(record: Arc<str>, location: RecordWindow, entry: JournalEntry) -> Self {
        let JournalEntry { number, sequences, rows, .. } = entry;
        let mut window = Self { rows, is_journaled: true, ..Self::new(number, record, location, 0) };
        for result in sequences {
            window.sequences[usize::from(result.label)] = Some(PendingSequence { result, slot: None });
        }
        window
    }

    /// The error for a window whose data `what` is in no journal.
    pub(crate) fn missing(&self, what: &'static str) -> VirusError {
        let record = self.record.to_string();
        VirusError::MissingWindow { what, window: self.location.index + 1, record }
    }

    /// Sets the counts of the letters.
    pub(crate) fn with_letters(self, letters: WindowLetters) -> Self {
        Self { letters, ..self }
    }

    /// All sequences that were admitted, in the order of labels.
    pub(crate) fn sequences(&self) -> impl Iterator<Item = &SequenceResult> {
        self.sequences.iter().flatten().map(|pending| &pending.result)
    }

    /// Slots of all sequences.
    pub(crate) fn slots(&self) -> impl Iterator<Item = usize> {
        self.sequences.iter().flatten().filter_map(|pending| Some(pending.slot? as usize))
    }

    /// Slots of the sequences that have rows, in the order of labels.
    pub(crate) fn slots_with_rows(&self) -> impl Iterator<Item = usize> {
        let with_rows = self.sequences.iter().flatten().filter(|pending| pending.result.has_rows());
        with_rows.filter_map(|pending| Some(pending.slot? as usize))
    }
}

/// Location of a sequence in the queue.
#[derive(Clone, Copy, Default)]
pub(crate) struct SequenceLocation {
    /// Number of the item of its window.
    item: u64,
    label: u8,
}

/// Items in input order.
#[derive(Default)]
pub(crate) struct OutputQueue {
    items: VecDeque<OutputItem>,
    /// Number of the first item among all items ever queued, so that a [`SequenceLocation`] stays valid when items leave.
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

impl OutputQueue {
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

    /// Adds a sequence to the last item, which must be its window: nothing else may be pushed before all sequences of a window
    /// were added.
    pub(crate) fn push_sequence(&mut self, label: u8, bases: u32, slot: usize) -> SequenceLocation {
        // The number among all items ever queued: indices in `items` change whenever an item leaves.
        let item = self.first + self.items.len() as u64 - 1;
        if let Some(OutputItem::Window(window)) = self.items.back_mut() {
            let result = SequenceResult { label, bases, state: SequenceState::Waiting };
            window.sequences[usize::from(label)] = Some(PendingSequence { result, slot: Some(slot as u32) });
        }
        SequenceLocation { item, label }
    }

    /// Stores the final state of a sequence. Its window is still in the queue, because the sequence counted as waiting until
    /// now.
    pub(crate) fn complete(&mut self, location: SequenceLocation, state: SequenceState) {
        if let Some(OutputItem::Window(window)) = self.items.get_mut((location.item - self.first) as usize)
            && let Some(pending) = window.sequences[usize::from(location.label)].as_mut()
        {
            pending.result.state = state;
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
