//! Packs token sequences end to end, without padding, into steps that are as full as the plan's bounds allow.
//! Invariant: every sequence pushed comes out in exactly one pack, whole, and no pack exceeds the bounds; the packs
//! are a function of the sequences and the calls alone.
//!
//! The packer holds a pool of about [`POOL`] packs' worth of sequences. A pack is filled in two parts. First come the
//! oldest sequences of the pool, in order, up to half of the tokens. Thus the pool keeps the length distribution of the
//! input, and **no sequence starves**: it leaves at the latest [`MAX_PACKS`] packs after it was pushed. The rest is
//! filled with the combination of pending sequences (longest first, finished by the best pair) that leaves the fewest
//! tokens unused: a subset-sum problem, whose optimum this search misses by a token or two.
//!
//! After the input ends, [`Packer::next_pack`] with `flush` empties the pool; only then are packs less full.
//!
//! This is [`Order::ByLength`]. With [`Order::Input`] there is no search: a pack consists of the oldest sequences up to
//! the first that does not fit.

use crate::{DataError, DataErrorKind};

/// The pool is ready for a pack when it holds this number of packs' worth of tokens or of sequences.
pub const POOL: usize = 4;

/// Maximum number of packs until a pushed sequence leaves the pool. At most `POOL` packs' worth of sequences precede
/// it. A pack takes from the old end half a pack's tokens (at most `2 POOL` times), or the maximum number of sequences
/// (at most `POOL` times), or stops at a sequence longer than half a pack, with which the next pack starts (at most
/// `2 POOL` times); one more pack is the sequence's own.
pub const MAX_PACKS: usize = 6 * POOL;

/// The order in which sequences are packed. Results of a sequence do not depend on it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Order {
    /// Reordered by length, so that packs are full.
    #[default]
    ByLength,
    /// In input order: packs are less full, but no sequence waits for later ones.
    Input,
}

/// The token sequences of one step.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TokenPack {
    /// The tokens of all sequences, end to end.
    pub tokens: Vec<i32>,
    /// Start and end of each sequence in `tokens`; each sequence starts where the one before ends.
    pub spans: Vec<[i32; 2]>,
    /// The `owner` passed to [`Packer::push`] for each sequence.
    pub owners: Vec<u64>,
}

impl TokenPack {
    /// Divides the pack into packs of at most `max_tokens` tokens and `max_sequences` sequences, in order. A sequence that is
    /// longer than `max_tokens` gets a pack of its own.
    pub fn divided(self, max_tokens: usize, max_sequences: usize) -> Vec<Self> {
        if self.tokens.len() <= max_tokens && self.owners.len() <= max_sequences {
            return vec![self];
        }
        let mut packs: Vec<Self> = vec![];
        for (&[start, end], &owner) in self.spans.iter().zip(&self.owners) {
            let tokens = &self.tokens[start as usize..end as usize];
            if !packs.last().is_some_and(|pack| {
                pack.tokens.len() + tokens.len() <= max_tokens && pack.owners.len() < max_sequences
            }) {
                packs.push(Self::default());
            }
            if let Some(pack) = packs.last_mut() {
                let start = pack.tokens.len() as i32;
                pack.tokens.extend_from_slice(tokens);
                pack.spans.push([start, pack.tokens.len() as i32]);
                pack.owners.push(owner);
            }
        }
        packs
    }
}

/// Statistics of how full the packs were.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Fill {
    /// Packs made.
    pub packs: u64,
    /// Sequences in all packs.
    pub sequences: u64,
    /// Tokens in all packs.
    pub tokens: u64,
    /// Tokens in the last pack.
    pub last_tokens: u64,
    /// Token capacity of all packs.
    pub capacity: u64,
    /// Token capacity of the last pack.
    pub last_capacity: u64,
}

impl Fill {
    /// Returns the used fraction of the token capacity, 0 to 1; 1 if there was no pack.
    pub fn all(&self) -> f64 {
        ratio(self.tokens, self.capacity)
    }

    /// Returns the used fraction of the token capacity without the last pack, which holds only the remainder.
    pub fn but_last(&self) -> f64 {
        ratio(self.tokens - self.last_tokens, self.capacity - self.last_capacity)
    }
}

/// Makes packs. Memory: about [`POOL`] packs of tokens, reserved at the start; in the steady state, with packs returned
/// by [`Packer::recycle`], nothing is allocated.
pub struct Packer {
    max_tokens: usize,
    max_sequences: usize,
    longest: usize,
    order: Order,
    /// The tokens of the pending sequences, oldest first, without gaps.
    tokens: Vec<i32>,
    pending: Vec<PooledSequence>,
    /// Scratch of a selection: indices into `pending`, ascending by length.
    by_length: Vec<u32>,
    free: Vec<TokenPack>,
    fill: Fill,
}

/// A sequence in the pool.
#[derive(Clone, Copy)]
struct PooledSequence {
    owner: u64,
    len: usize,
    chosen: bool,
}

impl Packer {
    /// Creates a packer for the bounds of a plan: tokens and sequences per pack, tokens per sequence.
    pub fn new(max_tokens: usize, max_sequences: usize, longest: usize, order: Order) -> Self {
        let longest = longest.min(max_tokens);
        Packer {
            max_tokens,
            max_sequences,
            longest,
            order,
            tokens: Vec::with_capacity(POOL * max_tokens + longest),
            pending: Vec::new(),
            by_length: Vec::new(),
            free: Vec::new(),
            fill: Fill::default(),
        }
    }

    /// Adds a sequence to the pool. Afterwards call [`Packer::next_pack`] until it returns `None`, otherwise the pool
    /// grows. `owner` identifies the sequence to the caller and is returned with the pack.
    ///
    /// # Errors
    /// A sequence without tokens, or with more tokens than the bounds allow.
    pub fn push(&mut self, owner: u64, tokens: &[i32]) -> Result<(), DataError> {
        if tokens.is_empty() {
            let what = "a sequence without tokens; skip empty records".to_owned();
            return Err(DataError::new(DataErrorKind::Malformed(what)));
        }
        if tokens.len() > self.longest || self.max_sequences == 0 {
            let bound = if self.max_sequences == 0 { 0 } else { self.longest };
            return Err(DataError::new(DataErrorKind::TooLong { tokens: tokens.len(), bound }));
        }
        self.tokens.extend_from_slice(tokens);
        self.pending.push(PooledSequence { owner, len: tokens.len(), chosen: false });
        Ok(())
    }

    /// Returns a pack if the pool holds enough sequences for a full one, or if `flush` says that the input has ended;
    /// otherwise, and if the pool is empty, `None`.
    pub fn next_pack(&mut self, flush: bool) -> Option<TokenPack> {
        let pool = match self.order {
            Order::ByLength => POOL,
            Order::Input => 1,
        };
        let ready = self.tokens.len() >= pool.saturating_mul(self.max_tokens)
            || self.pending.len() >= pool.saturating_mul(self.max_sequences);
        if self.pending.is_empty() || !(ready || flush) {
            return None;
        }
        match self.order {
            Order::ByLength => {
                let (tokens, sequences) = self.choose_oldest(self.max_tokens.div_ceil(2));
                self.choose_rest(self.max_tokens - tokens, self.max_sequences - sequences);
            }
            Order::Input => {
                self.choose_oldest(self.max_tokens);
            }
        }
        let pack = self.take_chosen();
        self.fill.packs += 1;
        self.fill.sequences += pack.owners.len() as u64;
        self.fill.last_tokens = pack.tokens.len() as u64;
        self.fill.tokens += self.fill.last_tokens;
        self.fill.last_capacity = self.max_tokens as u64;
        self.fill.capacity += self.fill.last_capacity;
        Some(pack)
    }

    /// Divides the rest of the pool, after the input has ended, into packs of about equal size. Their number is a
    /// multiple of `parts` (the devices), so that no device is idle at the end.
    pub fn cut(&mut self, parts: usize) {
        let left = self.tokens.len();
        let longest = self.pending.iter().map(|p| p.len).max().unwrap_or(0);
        let packs = left.div_ceil(self.max_tokens.max(1)).next_multiple_of(parts.max(1)).max(1);
        // At least the longest sequence: one that fits no pack would stay in the pool, and `next_pack` with `flush`
        // would return empty packs without end.
        self.max_tokens = left.div_ceil(packs).max(longest).min(self.max_tokens);
    }

    /// Changes the bounds of the packs that follow; the longest sequence does not change.
    pub fn resize(&mut self, max_tokens: usize, max_sequences: usize) {
        // At least `longest`, for the reason given in `cut`: sequences of this length are accepted and may be waiting.
        (self.max_tokens, self.max_sequences) = (max_tokens.max(self.longest), max_sequences);
    }

    /// Returns the buffers of a pack for reuse in a later pack.
    pub fn recycle(&mut self, mut pack: TokenPack) {
        pack.tokens.clear();
        pack.spans.clear();
        pack.owners.clear();
        self.free.push(pack);
    }

    /// Returns the number of sequences in the pool.
    pub fn pending(&self) -> usize {
        self.pending.len()
    }

    /// Returns how full the packs were so far.
    pub fn fill(&self) -> Fill {
        self.fill
    }

    /// Marks the oldest sequences until they have `enough` tokens or the next one does not fit, at least one sequence
    /// in any case; returns the number of marked tokens and sequences.
    fn choose_oldest(&mut self, enough: usize) -> (usize, usize) {
        let mut tokens = 0;
        let mut sequences = 0;
        for p in &mut self.pending {
            let full = tokens + p.len > self.max_tokens || sequences == self.max_sequences;
            if full || tokens >= enough {
                break;
            }
            p.chosen = true;
            tokens += p.len;
            sequences += 1;
        }
        (tokens, sequences)
    }

    /// Marks, of the other sequences, those that best fill `capacity` tokens with at most `places` sequences: the k longest
    /// that fit one after the other plus one or two more, for the k that leaves the fewest tokens unused.
    fn choose_rest(&mut self, capacity: usize, places: usize) {
        let Packer { pending, by_length, .. } = self;
        by_length.clear();
        let others = (0_u32..).zip(pending.iter()).filter(|(_, p)| !p.chosen && p.len <= capacity);
        by_length.extend(others.map(|(i, _)| i));
        // Of equal lengths the oldest first, so that the order is a function of the input.
        by_length.sort_unstable_by_key(|&i| (pending[i as usize].len, i));
        let len = |at: usize| pending[by_length[at] as usize].len;
        let mut left = capacity;
        let mut end = by_length.len();
        let mut free = places;
        let mut best = PackFinish::default();
        let mut taken: usize = 0;
        // `by_length` ascends: the longest are at the end, and `end` bounds the untaken ones that may still fit.
        while free > 0 && left > 0 && best.left(capacity) > 0 {
            while end > 0 && len(end - 1) > left {
                end -= 1;
            }
            if end == 0 {
                break;
            }
            // With space for three of the longest, taking one and searching again is no worse.
            if !(left > 2 * len(end - 1) && end > 2 && free > 2) {
                let (last, sum) = best_finish(left, end, free, len);
                let used = capacity - left + sum;
                if used > best.used {
                    best = PackFinish { used, greedy: taken, last };
                }
            }
            left -= len(end - 1);
            end -= 1;
            taken += 1;
            free -= 1;
        }
        self.mark(capacity, &best);
    }

    /// Repeats the greedy selection of [`Packer::choose_rest`] up to its best combination and marks the sequences.
    fn mark(&mut self, capacity: usize, best: &PackFinish) {
        let mut left = capacity;
        let mut end = self.by_length.len();
        for _ in 0..best.greedy {
            while self.pending[self.by_length[end - 1] as usize].len > left {
                end -= 1;
            }
            end -= 1;
            let p = &mut self.pending[self.by_length[end] as usize];
            p.chosen = true;
            left -= p.len;
        }
        for at in best.last.into_iter().flatten() {
            self.pending[self.by_length[at] as usize].chosen = true;
        }
    }

    /// Moves the chosen sequences, oldest first, from the pool into a pack, and closes the gaps in the pool.
    fn take_chosen(&mut self) -> TokenPack {
        let mut pack = self.free.pop().unwrap_or_else(|| TokenPack {
            tokens: Vec::with_capacity(self.max_tokens),
            ..TokenPack::default()
        });
        let mut from = 0;
        let mut to = 0;
        for p in &self.pending {
            if p.chosen {
                let start = pack.tokens.len() as i32;
                pack.tokens.extend_from_slice(&self.tokens[from..from + p.len]);
                pack.spans.push([start, pack.tokens.len() as i32]);
                pack.owners.push(p.owner);
            } else {
                self.tokens.copy_within(from..from + p.len, to);
                to += p.len;
            }
            from += p.len;
        }
        self.tokens.truncate(to);
        self.pending.retain(|p| !p.chosen);
        pack
    }
}

/// A combination of sequences to fill a pack: the `greedy` longest that fit, then `last`, indices into `by_length`.
#[derive(Default)]
struct PackFinish {
    used: usize,
    greedy: usize,
    last: [Option<usize>; 2],
}

impl PackFinish {
    fn left(&self, capacity: usize) -> usize {
        capacity - self.used
    }
}

/// Returns the one or two of the sequences `0..end`, ascending by length, with the largest sum that is at most `left`,
/// and that sum. Two pointers move from both ends.
fn best_finish(
    left: usize,
    end: usize,
    free: usize,
    len: impl Fn(usize) -> usize,
) -> ([Option<usize>; 2], usize) {
    // The longest that fits is at `end - 1`.
    let mut best = ([Some(end - 1), None], len(end - 1));
    let mut low = 0;
    let mut high = end - 1;
    while free > 1 && low < high {
        let sum = len(low) + len(high);
        if sum > left {
            high -= 1;
            continue;
        }
        if sum > best.1 {
            best = ([Some(low), Some(high)], sum);
        }
        low += 1;
    }
    best
}

fn ratio(part: u64, whole: u64) -> f64 {
    if whole == 0 { 1.0 } else { part as f64 / whole as f64 }
}

#[cfg(test)]
mod tests;
