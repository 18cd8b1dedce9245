//! What the data of a training run holds on the host. Invariant: each number is the size of a buffer that is made
//! with that size at the start, or a bound of what a library holds; `tests/it/train/memory.rs` measures it.

use super::dataset::{Dataset, Side};
use super::pieces::Batch;
use super::pipeline::{self, Carried};
use super::settings::{Bounds, Format, Settings};
use super::vocabulary::Vocabulary;
use super::windows::{self, Entry};

/// The decoded text and the stored bytes that a reader holds, and a decoder's tables.
const READER: u64 = 512 << 10;
/// The most that a decoder of compressed text holds: what the readers allow a stream to ask for.
const DECODER: u64 = 128 << 20;

/// Bytes on the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Held {
    /// What they are for.
    pub what: &'static str,
    /// How many at most.
    pub bytes: u64,
}

impl Settings {
    /// What a stream holds on the host at most, beside batches: before the data was read, for the longest
    /// documents that are allowed.
    pub fn host_bytes(&self, vocabulary: &Vocabulary) -> Vec<Held> {
        held(
            self,
            vocabulary,
            &Known {
                longest: self.longest_document,
                side: Side { documents: u64::MAX, bytes: u64::MAX },
                reader: document(&self.format, self.longest_document),
                compressed: !matches!(self.format, Format::Ids { .. }),
            },
        )
    }
}

impl Dataset {
    /// The bytes of all of [`Dataset::host_bytes`].
    pub fn host_total(&self) -> u64 {
        self.host_bytes().iter().map(|held| held.bytes).sum()
    }
}

impl Batch {
    /// Bytes of a batch with these bounds.
    pub fn host_bytes(bounds: &Bounds) -> u64 {
        (bounds.tokens * 2 * size_of::<i32>() + bounds.sequences * size_of::<[i32; 2]>()) as u64
    }
}

/// What is known of the data.
pub(super) struct Known {
    /// Bytes of the longest document.
    pub longest: usize,
    /// The most on one side.
    pub side: Side,
    /// What a reader's buffers grow to.
    pub reader: usize,
    /// Whether a decoder is needed.
    pub compressed: bool,
}

pub(super) fn held(settings: &Settings, vocabulary: &Vocabulary, known: &Known) -> Vec<Held> {
    let Settings { shuffle, workers, prefetch, .. } = settings;
    let (bytes, documents) = windows::room(shuffle, known.longest, &known.side);
    let count = pipeline::parcels(*workers, *prefetch) as u64;
    let text = pipeline::PARCEL + known.longest;
    let one = parcel(text, vocabulary.most_tokens(text), pipeline::DOCUMENTS);
    vec![
        Held { what: "reader", bytes: READER + known.reader as u64 },
        Held { what: "decompression", bytes: if known.compressed { DECODER } else { 0 } },
        Held { what: "shuffle window", bytes: (bytes + documents * size_of::<Entry>()) as u64 },
        Held { what: "parcels", bytes: count * one },
        Held { what: "tokenizers", bytes: *workers as u64 * vocabulary.scratch(known.longest) },
    ]
}

/// Bytes of a parcel's buffers.
pub(super) fn parcel(text: usize, tokens: usize, documents: usize) -> u64 {
    (text + tokens * size_of::<i32>() + documents * size_of::<Carried>()) as u64
}

/// Bytes that the buffers of a reader grow to: a buffer that grows is doubled.
fn document(format: &Format, most: usize) -> usize {
    match format {
        // A line and the document.
        Format::Text(_) => 4 * most,
        // A line of twice the document; the document as the parser makes it, and as it is handed on.
        Format::JsonLines { .. } => 4 * most + 3 * most + 2 * most,
        Format::Ids { .. } => 2 * most,
        // A record grows by an eighth.
        Format::Sequences => 4 * most,
    }
}
