//! Host memory used by the training data. Invariant: each figure is the size of a buffer that is allocated with that
//! size at the start, or an upper bound of a library's allocations; `tests/it/train/memory.rs` measures them.

use super::block::{BlockCapacity, WindowCapacity};
use super::dataset::SplitSize;
use super::packer;
use super::pieces::{PieceCutter, TrainingPack};
use super::pipeline::{self, Carried};
use super::settings::{DatasetFormat, DatasetSettings, PackLimits};
use super::vocabulary::Vocabulary;
use super::windows::{self, ShuffledDocument};

/// Bytes of a reader's fixed buffers: raw and decompressed input, and the tables of a decoder.
pub(super) const READER: u64 = 512 << 10;
/// Upper bound in bytes of a decompressor's memory; the readers reject streams that require more.
pub(super) const DECODER: u64 = 128 << 20;

/// Host memory for one purpose.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DataMemory {
    /// Purpose of the memory.
    pub what: &'static str,
    /// Maximum number of bytes.
    pub bytes: u64,
}

impl DatasetSettings {
    /// Maximum host memory of a stream by purpose, apart from its packs. It is computed before the data is read and
    /// assumes documents of the maximum allowed length.
    pub fn host_bytes(&self, vocabulary: &Vocabulary) -> Vec<DataMemory> {
        memory_by_purpose(
            self,
            vocabulary,
            &Known {
                longest: self.longest_document,
                side: SplitSize { documents: u64::MAX, bytes: u64::MAX },
                reader: document(&self.format, self.longest_document),
                compressed: !matches!(self.format, DatasetFormat::Ids { .. }),
            },
        )
    }
}

impl TrainingPack {
    /// Size in bytes of the buffers of a pack with these bounds: ids, targets and spans.
    pub fn host_bytes(bounds: &PackLimits) -> u64 {
        (bounds.tokens * 2 * size_of::<i32>() + bounds.sequences * size_of::<[i32; 2]>()) as u64
    }
}

/// Sizes of the data, or upper bounds of them if the data has not been read.
pub(super) struct Known {
    /// Length of the longest document in bytes.
    pub longest: usize,
    /// Size of the larger split.
    pub side: SplitSize,
    /// Final size in bytes of a reader's growing buffers.
    pub reader: usize,
    /// Whether any file is compressed.
    pub compressed: bool,
}

/// Maximum host memory of a stream, by purpose, apart from its packs.
pub(super) fn memory_by_purpose(
    settings: &DatasetSettings,
    vocabulary: &Vocabulary,
    known: &Known,
) -> Vec<DataMemory> {
    let DatasetSettings { bounds, task, shuffle, workers, prefetch, .. } = settings;
    let (bytes, documents) = windows::window_capacity(shuffle, known.longest, &known.side);
    let count = pipeline::parcels(*workers, *prefetch) as u64;
    let text = pipeline::PARCEL + known.longest;
    let one = parcel(text, vocabulary.most_tokens(text), pipeline::DOCUMENTS);
    let cutter = PieceCutter::new(task, bounds, vocabulary);
    let window = WindowCapacity { bytes, documents, longest: known.longest };
    let block = BlockCapacity::new(bounds, &cutter, vocabulary, &window);
    let packing = packer::BLOCKS as u64 * block.bytes() + block.packing_bytes(bounds);
    vec![
        DataMemory { what: "reader", bytes: READER + known.reader as u64 },
        DataMemory { what: "decompression", bytes: if known.compressed { DECODER } else { 0 } },
        DataMemory {
            what: "shuffle window",
            bytes: (bytes + documents * size_of::<ShuffledDocument>()) as u64,
        },
        DataMemory { what: "parcels", bytes: count * one },
        DataMemory { what: "packing", bytes: packing },
        DataMemory { what: "tokenizers", bytes: *workers as u64 * vocabulary.scratch(known.longest) },
    ]
}

/// Size in bytes of a parcel's buffers for `text` bytes of text, `tokens` token ids and `documents` documents.
pub(super) fn parcel(text: usize, tokens: usize, documents: usize) -> u64 {
    (text + tokens * size_of::<i32>() + documents * size_of::<Carried>()) as u64
}

/// Upper bound in bytes of a reader's growing buffers for documents of at most `max_document` bytes. A `Vec` doubles its
/// capacity when it grows, so its capacity is less than twice its longest content.
fn document(format: &DatasetFormat, max_document: usize) -> usize {
    match format {
        // Line and document, 2 * `max_document` each.
        DatasetFormat::Text(_) => 4 * max_document,
        // A line may be 2 * `max_document` long. The parser unescapes the text into a doubling buffer and copies it to a
        // string, and the document is a copy of that string.
        DatasetFormat::JsonLines { .. } => 4 * max_document + 3 * max_document + 2 * max_document,
        DatasetFormat::Ids { .. } => 2 * max_document,
        // The record's buffer grows by an eighth at a time and the document doubles: less than 4 * `max_document` together.
        DatasetFormat::Sequences => 4 * max_document,
    }
}
