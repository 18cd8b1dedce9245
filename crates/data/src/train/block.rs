//! Blocks: consecutive documents of a shuffle window whose pieces are packed together, by best-fit decreasing.
//! Invariant: a block and its packs are a function of its first document, the data and the settings; every piece is in
//! one pack; no pack exceeds the bounds; nothing is allocated after the start.
//!
//! Best-fit decreasing (Johnson 1973) places the pieces in the order of descending length, each into the pack with the
//! fewest free tokens that it fits, or into a new pack.

use std::cmp::Reverse;
use std::ops::Range;

use super::pieces::{Piece, PieceCutter};
use super::position::ShuffleWindow;
use super::random::RandomKey;
use super::settings::PackLimits;
use super::vocabulary::Vocabulary;
use crate::DataError;

/// Size of a block in full packs: a block ends with the document that reaches the tokens, or the sequences, of this
/// number of packs. The last packs of a block are partly empty, so a larger block fills packs better, and takes more
/// memory. Tokens in packs of 1024 tokens, of proteins with lengths exp N(5.6, 0.75): 97.6 % with 32 packs, 98.8 % with
/// 64, 99.3 % with 128, 99.6 % with 256.
pub(super) const PACKS: usize = 128;

/// No pack, in lists of packs.
const NONE: u32 = u32::MAX;

/// Sizes of the buffers of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct BlockCapacity {
    tokens: usize,
    pieces: usize,
    packs: usize,
}

/// Sizes of documents from which the buffers of a block are sized.
#[derive(Clone, Copy, Debug)]
pub(super) struct WindowCapacity {
    /// Maximum size of a shuffle window in bytes.
    pub bytes: usize,
    /// Maximum number of documents of a shuffle window.
    pub documents: usize,
    /// Length of the longest document in bytes.
    pub longest: usize,
}

impl BlockCapacity {
    /// The largest block: the documents up to the size of a block, and one document of the maximum length beyond it, but
    /// at most a shuffle window.
    pub(super) fn new(
        bounds: &PackLimits,
        cutter: &PieceCutter,
        vocabulary: &Vocabulary,
        window: &WindowCapacity,
    ) -> Self {
        let PackLimits { tokens, sequences, longest } = *bounds;
        let document = vocabulary.most_tokens(window.longest);
        let beyond = cutter.most_pieces(document);
        // `most_tokens` is linear in the bytes apart from a constant for each document.
        let in_window =
            vocabulary.most_tokens(window.bytes) + window.documents.saturating_mul(vocabulary.most_tokens(0));
        // A block stores one token more than its pieces have for each document of a causal task, the last target.
        let in_block = PACKS.saturating_mul(tokens).saturating_add(window.documents);
        let stored = in_window.min(in_block.saturating_add(document));
        // Each document has at most one piece that is shorter than the others.
        let pieces = window.documents.saturating_add(cutter.most_pieces(stored));
        let pieces = pieces.min(PACKS.saturating_mul(sequences).saturating_add(beyond));
        // Of the packs that are not full of sequences, any two have more tokens together than one may have, or the
        // later one would not have been opened; so all but one of them are more than half full.
        let half_full = 2 * (PACKS + beyond.saturating_mul(longest).div_ceil(tokens)) + 1;
        let packs = pieces.min(half_full + pieces / sequences);
        BlockCapacity { tokens: stored, pieces, packs }
    }

    /// Size in bytes of the buffers of a block.
    pub(super) fn bytes(&self) -> u64 {
        let piece = size_of::<Piece>() + size_of::<u32>();
        (self.tokens * size_of::<i32>() + self.pieces * piece + self.packs * size_of::<Range<u32>>()) as u64
    }

    /// Size in bytes of the buffers of a [`BestFit`].
    pub(super) fn packing_bytes(&self, bounds: &PackLimits) -> u64 {
        let lists = (bounds.tokens + 1) * size_of::<u32>() + (bounds.tokens / 64 + 1) * size_of::<u64>();
        (lists + self.pieces * 2 * size_of::<u32>() + self.packs * size_of::<OpenPack>()) as u64
    }
}

/// A block: the pieces of its documents, and their packs.
pub(super) struct PackedBlock {
    pub epoch: u64,
    pub window: ShuffleWindow,
    /// Index in its window of the first document.
    pub place: u32,
    /// Number of documents.
    pub documents: u32,
    /// Number of unknown tokens in the documents.
    pub unknown: u64,
    /// Tokens of the pieces.
    pub tokens: Vec<i32>,
    /// Pieces in the order of the documents.
    pieces: Vec<Piece>,
    /// Number of tokens that the pieces have in packs.
    size: usize,
    /// Indices of pieces: those of a pack follow each other, in the order of the documents.
    members: Vec<u32>,
    /// Range in `members` of each pack, in the order in which packs come.
    packs: Vec<Range<u32>>,
    /// Whether the epoch ends here; such a block has no documents.
    pub ends_epoch: bool,
    /// Error instead of documents.
    pub error: Option<DataError>,
}

impl PackedBlock {
    /// An empty block.
    pub(super) fn with_capacity(capacity: &BlockCapacity) -> Self {
        PackedBlock {
            epoch: 0,
            window: ShuffleWindow::default(),
            place: 0,
            documents: 0,
            unknown: 0,
            tokens: Vec::with_capacity(capacity.tokens),
            pieces: Vec::with_capacity(capacity.pieces),
            size: 0,
            members: Vec::with_capacity(capacity.pieces),
            packs: Vec::with_capacity(capacity.packs),
            ends_epoch: false,
            error: None,
        }
    }

    /// Clears the contents and keeps the buffers.
    pub(super) fn clear(&mut self) {
        self.documents = 0;
        self.unknown = 0;
        self.tokens.clear();
        self.pieces.clear();
        self.size = 0;
        self.members.clear();
        self.packs.clear();
        self.ends_epoch = false;
        self.error = None;
    }

    /// Appends tokens; returns the index of the first.
    pub(super) fn append(&mut self, tokens: &[i32]) -> usize {
        let start = self.tokens.len();
        self.tokens.extend_from_slice(tokens);
        start
    }

    /// Appends a piece.
    pub(super) fn push(&mut self, piece: Piece) {
        self.size += piece.length as usize;
        self.pieces.push(piece);
    }

    /// Whether no further document belongs to the block.
    pub(super) fn is_full(&self, bounds: &PackLimits) -> bool {
        self.size >= PACKS * bounds.tokens || self.pieces.len() >= PACKS * bounds.sequences
    }

    /// Number of packs.
    pub(super) fn count(&self) -> usize {
        self.packs.len()
    }

    /// The pieces of a pack.
    pub(super) fn pack(&self, number: usize) -> impl Iterator<Item = &Piece> {
        let Range { start, end } = self.packs[number];
        self.members[start as usize..end as usize].iter().map(|&piece| &self.pieces[piece as usize])
    }
}

/// Packs the pieces of blocks.
pub(super) struct BestFit {
    bounds: PackLimits,
    /// Indices of the pieces in the order in which they are placed.
    order: Vec<u32>,
    /// The pack of each piece, by the order in which packs are opened.
    pack_of: Vec<u32>,
    packs: Vec<OpenPack>,
    /// First pack of the list of open packs with i free tokens; packs of one list are linked by [`OpenPack::next`].
    lists: Vec<u32>,
    /// One bit for each list: whether it has a pack.
    has_pack: Vec<u64>,
}

/// A pack while pieces are placed.
struct OpenPack {
    /// Number of free tokens.
    free: u32,
    /// Number of pieces.
    pieces: u32,
    /// Next pack of its list.
    next: u32,
    /// Number of the pack in the order of the first piece.
    rank: u32,
}

impl BestFit {
    pub(super) fn with_capacity(bounds: &PackLimits, capacity: &BlockCapacity) -> Self {
        BestFit {
            bounds: *bounds,
            order: Vec::with_capacity(capacity.pieces),
            pack_of: Vec::with_capacity(capacity.pieces),
            packs: Vec::with_capacity(capacity.packs),
            lists: vec![NONE; bounds.tokens + 1],
            has_pack: vec![0; bounds.tokens / 64 + 1],
        }
    }

    /// Packs the pieces of a block. The packs come in an order shuffled by `shuffle`, or without it in the order of
    /// their first piece.
    pub(super) fn pack(&mut self, block: &mut PackedBlock, shuffle: Option<RandomKey>) {
        self.packs.clear();
        self.lists.fill(NONE);
        self.has_pack.fill(0);
        self.order.clear();
        self.order.extend(0..block.pieces.len() as u32);
        // The index makes the order of equal lengths that of the documents; a stable sort would allocate.
        self.order.sort_unstable_by_key(|&piece| (Reverse(block.pieces[piece as usize].length), piece));
        self.pack_of.clear();
        self.pack_of.resize(block.pieces.len(), NONE);
        for at in 0..self.order.len() {
            let piece = self.order[at] as usize;
            self.pack_of[piece] = self.place(block.pieces[piece].length);
        }
        self.group(block);
        if let Some(key) = shuffle {
            key.shuffle(&mut block.packs);
        }
    }

    /// Places a piece of `length` tokens; returns its pack.
    fn place(&mut self, length: u32) -> u32 {
        let pack = match self.fewest_free(length as usize) {
            Some(free) => self.unlink_first(free),
            None => {
                let free = self.bounds.tokens as u32;
                self.packs.push(OpenPack { free, pieces: 0, next: NONE, rank: NONE });
                self.packs.len() as u32 - 1
            }
        };
        let open = &mut self.packs[pack as usize];
        open.free -= length;
        open.pieces += 1;
        if (open.pieces as usize) < self.bounds.sequences {
            let free = open.free as usize;
            open.next = self.lists[free];
            self.lists[free] = pack;
            self.has_pack[free / 64] |= 1 << (free % 64);
        }
        pack
    }

    /// The smallest number of free tokens, at least `length`, of an open pack.
    fn fewest_free(&self, length: usize) -> Option<usize> {
        let first = length / 64;
        // Lists below `length` in the first word are not considered.
        let mut word = self.has_pack[first] & (u64::MAX << (length % 64));
        for at in first..self.has_pack.len() {
            if word != 0 {
                return Some(64 * at + word.trailing_zeros() as usize);
            }
            word = *self.has_pack.get(at + 1)?;
        }
        None
    }

    /// Removes the first pack of the list of packs with `free` free tokens, and returns it.
    fn unlink_first(&mut self, free: usize) -> u32 {
        let pack = self.lists[free];
        self.lists[free] = self.packs[pack as usize].next;
        if self.lists[free] == NONE {
            self.has_pack[free / 64] &= !(1 << (free % 64));
        }
        pack
    }

    /// Lists the pieces of each pack, with the packs in the order of their first piece.
    fn group(&mut self, block: &mut PackedBlock) {
        for &pack in &self.pack_of {
            let open = &mut self.packs[pack as usize];
            if open.rank != NONE {
                continue;
            }
            open.rank = block.packs.len() as u32;
            let start = block.packs.last().map_or(0, |before| before.end);
            block.packs.push(start..start + open.pieces);
        }
        // Each range is filled from its start; its end is set again by counting.
        block.packs.iter_mut().for_each(|range| range.end = range.start);
        block.members.resize(self.pack_of.len(), 0);
        for (piece, &pack) in (0_u32..).zip(&self.pack_of) {
            let range = &mut block.packs[self.packs[pack as usize].rank as usize];
            block.members[range.end as usize] = piece;
            range.end += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::pieces::Tokenized;
    use super::super::settings::{IdWidth, MaskRates, Objective, TokenizerKind};
    use super::*;

    fn bounds(tokens: usize, sequences: usize) -> PackLimits {
        PackLimits { tokens, sequences, longest: tokens }
    }

    /// A block of pieces of these lengths.
    fn block(lengths: &[usize], capacity: &BlockCapacity) -> PackedBlock {
        let mut block = PackedBlock::with_capacity(capacity);
        for (place, &length) in lengths.iter().enumerate() {
            block.push(Piece { start: 0, length: length as u32, from: 0, place: place as u32, class: 0 });
        }
        block
    }

    /// Packs pieces of these lengths; returns the indices of the pieces of each pack.
    fn packed(lengths: &[usize], bounds: &PackLimits, shuffle: Option<RandomKey>) -> Vec<Vec<u32>> {
        let capacity = BlockCapacity { tokens: 0, pieces: lengths.len(), packs: lengths.len() };
        let mut block = block(lengths, &capacity);
        BestFit::with_capacity(bounds, &capacity).pack(&mut block, shuffle);
        (0..block.count()).map(|pack| block.pack(pack).map(|piece| piece.place).collect()).collect()
    }

    #[test]
    fn pieces_are_packed_by_best_fit_decreasing() {
        for (lengths, bounds, expected) in [
            (&[][..], bounds(10, 9), vec![]),
            (&[10], bounds(10, 9), vec![vec![0]]),
            (&[5, 5, 3, 2, 4, 1], bounds(10, 9), vec![vec![0, 1], vec![2, 3, 4, 5]]),
            (&[5, 5, 3, 2, 4, 1], bounds(10, 2), vec![vec![0, 1], vec![2, 4], vec![3, 5]]),
            (&[1, 1, 1], bounds(10, 1), vec![vec![0], vec![1], vec![2]]),
            // The last piece fits both packs and goes where fewer tokens are free.
            (&[7, 6, 3], bounds(10, 9), vec![vec![0, 2], vec![1]]),
            // Packs come in the order of their first piece, not of their longest.
            (&[3, 6, 7], bounds(10, 9), vec![vec![0, 2], vec![1]]),
            // Numbers of free tokens in several words of the bit set, and at their edges.
            (&[100, 130, 70, 60], bounds(200, 9), vec![vec![0, 3], vec![1, 2]]),
            (&[136, 137, 128, 64, 63], bounds(200, 9), vec![vec![0, 3], vec![1, 4], vec![2]]),
            // An empty sequence takes no tokens, also of a full pack.
            (&[10, 0], bounds(10, 9), vec![vec![0, 1]]),
        ] {
            assert_eq!(packed(lengths, &bounds, None), expected, "{lengths:?} in {bounds:?}");
        }
    }

    #[test]
    fn packs_are_within_bounds_and_hold_every_piece_once() {
        for seed in 0..300 {
            let key = RandomKey::new(seed);
            let bounds = bounds(1 + key.with(0).below(300), 1 + key.with(1).below(12));
            let length = |at: u64| {
                let most = 1 + key.with(2).below(bounds.tokens);
                1 + key.with(3).with(at).below(most)
            };
            let lengths: Vec<usize> = (0..key.with(4).below(400) as u64).map(length).collect();
            let packs = packed(&lengths, &bounds, None);
            let tokens = |pack: &Vec<u32>| pack.iter().map(|&piece| lengths[piece as usize]).sum::<usize>();
            assert!(packs.iter().all(|pack| pack.len() <= bounds.sequences && tokens(pack) <= bounds.tokens));
            assert!(packs.iter().all(|pack| pack.is_sorted()) && packs.is_sorted());
            let mut all = packs.concat();
            all.sort_unstable();
            assert!(all.into_iter().eq(0..lengths.len() as u32));
            // No two packs that could hold another sequence fit together into one.
            let open = packs.iter().filter(|pack| pack.len() < bounds.sequences);
            let mut open: Vec<usize> = open.map(tokens).collect();
            open.sort_unstable();
            assert!(open.len() < 2 || open[0] + open[1] > bounds.tokens, "{open:?} of {bounds:?}");
            // Shuffling changes the order of the packs alone, as the key says.
            let shuffled = packed(&lengths, &bounds, Some(key));
            assert_eq!(shuffled, packed(&lengths, &bounds, Some(key)));
            assert!(packs.len() < 9 || shuffled != packs);
            let mut sorted = shuffled;
            sorted.sort_unstable();
            assert_eq!(sorted, packs);
        }
    }

    /// Fills blocks with documents of extreme sizes, and checks that no buffer grows.
    #[test]
    fn the_capacity_is_enough_for_any_documents() {
        let bytes = |end| TokenizerKind::Bytes { end };
        let masked = Objective::Masked(MaskRates::BERT);
        for (kind, task, (tokens, sequences, longest), letters, documents) in [
            (bytes(true), Objective::Causal, (16, 16, 16), 1, 100_000),
            (bytes(true), Objective::Causal, (16, 2, 16), 1, 100_000),
            (bytes(false), Objective::Causal, (16, 16, 16), 2, 100_000),
            (bytes(true), Objective::Causal, (16, 16, 16), 9, 100_000),
            (bytes(true), Objective::Causal, (16, 16, 1), 900, 50),
            (bytes(true), Objective::Causal, (16, 16, 9), 100_000, 3),
            (bytes(true), Objective::Causal, (1 << 20, 1000, 9), 5, 20),
            (TokenizerKind::Esm, masked.clone(), (16, 16, 16), 1, 100_000),
            (TokenizerKind::Esm, masked.clone(), (16, 16, 3), 1, 100_000),
            (TokenizerKind::Esm, masked.clone(), (16, 1, 3), 5000, 20),
            (TokenizerKind::Esm, masked.clone(), (17, 16, 9), 9, 100_000),
            (TokenizerKind::Esm, masked, (17, 16, 17), 100_000, 3),
        ] {
            let vocabulary = Vocabulary::of(&kind, IdWidth::U16).unwrap();
            let bounds = PackLimits { tokens, sequences, longest };
            let cutter = PieceCutter::new(&task, &bounds, &vocabulary);
            let window = WindowCapacity { bytes: letters * documents, documents, longest: letters };
            let capacity = BlockCapacity::new(&bounds, &cutter, &vocabulary, &window);
            let mut block = PackedBlock::with_capacity(&capacity);
            let mut best_fit = BestFit::with_capacity(&bounds, &capacity);
            let mut tokens = Vec::new();
            vocabulary.encode(&b"L".repeat(letters), &mut tokens).unwrap();
            for _ in 0..2 {
                block.clear();
                let filling = allocation_counter::measure(|| {
                    for place in 0..documents as u32 {
                        if block.is_full(&bounds) {
                            break;
                        }
                        let document = Tokenized { tokens: &tokens, class: 0, place };
                        cutter.cut(&document, &vocabulary, &mut block).unwrap();
                    }
                    best_fit.pack(&mut block, Some(RandomKey::new(1)));
                });
                let case = format!("{kind:?}, {bounds:?}, {documents} documents of {letters} letters");
                assert_eq!(filling.count_total, 0, "{case}: {capacity:?}");
                assert!(block.count() > 0, "{case}");
            }
            let made = allocation_counter::measure(|| drop(PackedBlock::with_capacity(&capacity)));
            assert_eq!(made.bytes_max, capacity.bytes());
            let made = allocation_counter::measure(|| drop(BestFit::with_capacity(&bounds, &capacity)));
            assert_eq!(made.bytes_max, capacity.packing_bytes(&bounds));
        }
    }
}
