//! Packs: token sequences laid end to end, without padding, as full as the plan's bounds allow.
//! Invariant: every sequence pushed comes out in exactly one pack, whole, and no pack exceeds the
//! bounds; the packs are a function of the sequences and the calls alone.
//!
//! The packer holds a pool of about [`POOL`] packs' worth of sequences. A pack is filled in two
//! parts. First the oldest sequences of the pool, in order, up to half of the tokens: so the pool
//! keeps the mix of lengths of the input, and **nothing starves**: a sequence leaves at the latest
//! [`MOST_PACKS`] packs after it came. Then, for the rest, the combination of pending sequences
//! (longest first, finished by the best pair) that leaves the least room: a subset sum, of which
//! this search misses a token or two.
//!
//! After the input ends, [`Packer::next_pack`] with `flush` empties the pool; only then are packs
//! emptier.
//!
//! That is [`Order::ByLength`]. With [`Order::Input`] there is no search: a pack is the oldest sequences
//! up to the first that does not fit.

use crate::{DataError, DataErrorKind};

/// The pool is ready for a pack when it holds this many packs' worth of tokens or of sequences.
pub const POOL: usize = 4;

/// A sequence leaves in one of this many packs, counted from its push. Before it in the pool are at
/// most `POOL` packs' worth. A pack takes from the old end half a pack's tokens (at most `2 POOL`
/// times), or all the sequences allowed (at most `POOL` times), or stops at a sequence longer than
/// half a pack, with which the next one starts (at most `2 POOL` times); one pack is its own.
pub const MOST_PACKS: usize = 6 * POOL;

/// In which order sequences are packed. What is computed of a sequence does not depend on it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Order {
    /// Out of turn, by their lengths, so that packs are full.
    #[default]
    ByLength,
    /// As they came: emptier packs, but nothing waits for what came later.
    Input,
}

/// Sequences for one step.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Pack {
    /// The tokens of all sequences, end to end.
    pub tokens: Vec<i32>,
    /// Start and end of each sequence in `tokens`; the end of one is the start of the next.
    pub spans: Vec<[i32; 2]>,
    /// What [`Packer::push`] was given for each sequence.
    pub owners: Vec<u64>,
}

/// How full the packs were.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Fill {
    /// Packs made.
    pub packs: u64,
    /// Sequences in them.
    pub sequences: u64,
    /// Tokens in them.
    pub tokens: u64,
    /// Tokens in the last of them.
    pub last_tokens: u64,
    /// Tokens that all of them could hold.
    pub room: u64,
    /// Tokens that the last of them could hold.
    pub last_room: u64,
}

impl Fill {
    /// The part of all places for tokens that was used, 0 to 1; 1 when there was no pack.
    pub fn all(&self) -> f64 {
        ratio(self.tokens, self.room)
    }

    /// The same without the last pack, which holds what was left over.
    pub fn but_last(&self) -> f64 {
        ratio(self.tokens - self.last_tokens, self.room - self.last_room)
    }
}

/// Makes packs. Memory: about [`POOL`] packs of tokens, reserved at the start; in the steady state,
/// with packs given back by [`Packer::recycle`], nothing is allocated.
pub struct Packer {
    max_tokens: usize,
    max_sequences: usize,
    longest: usize,
    order: Order,
    /// The tokens of the pending sequences, oldest first, without gaps.
    tokens: Vec<i32>,
    pending: Vec<Pending>,
    /// Scratch of a selection: places in `pending`, by length.
    by_length: Vec<u32>,
    free: Vec<Pack>,
    fill: Fill,
}

#[derive(Clone, Copy)]
struct Pending {
    owner: u64,
    len: usize,
    chosen: bool,
}

impl Packer {
    /// A packer for the bounds of a plan: tokens and sequences of one pack, tokens of one sequence.
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

    /// Adds a sequence to the pool. Then take packs until [`Packer::next_pack`] has none, or the
    /// pool grows.
    ///
    /// `owner` is the caller's and comes back with the pack. An error if the sequence has no token
    /// or more than the bounds allow.
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
        self.pending.push(Pending { owner, len: tokens.len(), chosen: false });
        Ok(())
    }

    /// A pack, if the pool holds enough for a full one to be found or if `flush` says that nothing
    /// more will come; none otherwise, and none when the pool is empty.
    pub fn next_pack(&mut self, flush: bool) -> Option<Pack> {
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
        self.fill.last_room = self.max_tokens as u64;
        self.fill.room += self.fill.last_room;
        Some(pack)
    }

    /// Makes packs of about one size of what is left when the input has ended: for each of `parts` as many as for the
    /// others, so that nobody waits at the end.
    pub fn cut(&mut self, parts: usize) {
        let (left, longest) = (self.tokens.len(), self.pending.iter().map(|p| p.len).max().unwrap_or(0));
        let packs = left.div_ceil(self.max_tokens.max(1)).next_multiple_of(parts.max(1)).max(1);
        self.max_tokens = left.div_ceil(packs).max(longest).min(self.max_tokens);
    }

    /// Gives the buffers of a pack back for a later one.
    pub fn recycle(&mut self, mut pack: Pack) {
        pack.tokens.clear();
        pack.spans.clear();
        pack.owners.clear();
        self.free.push(pack);
    }

    /// Sequences in the pool.
    pub fn pending(&self) -> usize {
        self.pending.len()
    }

    /// How full the packs were so far.
    pub fn fill(&self) -> Fill {
        self.fill
    }

    /// Marks the oldest sequences until they are `enough` tokens or the next does not fit, the oldest in
    /// any case; how many tokens and sequences that is.
    fn choose_oldest(&mut self, enough: usize) -> (usize, usize) {
        let (mut tokens, mut sequences) = (0, 0);
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

    /// Marks, of the others, those that best fill `room` tokens with at most `places` sequences:
    /// the k longest that fit one after the other, for the k at which one or two more leave the
    /// least room.
    fn choose_rest(&mut self, room: usize, places: usize) {
        let Packer { pending, by_length, .. } = self;
        by_length.clear();
        let others = (0_u32..).zip(pending.iter()).filter(|(_, p)| !p.chosen && p.len <= room);
        by_length.extend(others.map(|(i, _)| i));
        // Among equals the oldest first, so that the order is a function of the input.
        by_length.sort_unstable_by_key(|&i| (pending[i as usize].len, i));
        let len = |at: usize| pending[by_length[at] as usize].len;
        let (mut left, mut end, mut free) = (room, by_length.len(), places);
        let mut best = Finish::default();
        let mut taken: usize = 0;
        // The longest are at the end; `end` is where the untaken ones that may fit stop.
        while free > 0 && left > 0 && best.left(room) > 0 {
            while end > 0 && len(end - 1) > left {
                end -= 1;
            }
            if end == 0 {
                break;
            }
            // With room for three of the longest, to take one and look again is no worse.
            if !(left > 2 * len(end - 1) && end > 2 && free > 2) {
                let (last, sum) = best_finish(left, end, free, len);
                let used = room - left + sum;
                if used > best.used {
                    best = Finish { used, greedy: taken, last };
                }
            }
            left -= len(end - 1);
            end -= 1;
            taken += 1;
            free -= 1;
        }
        self.mark(room, &best);
    }

    /// Repeats the greedy walk of [`Packer::choose_rest`] up to its best finish and marks it.
    fn mark(&mut self, room: usize, best: &Finish) {
        let (mut left, mut end) = (room, self.by_length.len());
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

    /// Moves the chosen sequences, oldest first, from the pool into a pack, and closes the gaps.
    fn take_chosen(&mut self) -> Pack {
        let mut pack = self
            .free
            .pop()
            .unwrap_or_else(|| Pack { tokens: Vec::with_capacity(self.max_tokens), ..Pack::default() });
        let (mut from, mut to) = (0, 0);
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

/// A way to fill a room: the `greedy` longest, then `last`, places in `by_length`.
#[derive(Default)]
struct Finish {
    used: usize,
    greedy: usize,
    last: [Option<usize>; 2],
}

impl Finish {
    fn left(&self, room: usize) -> usize {
        room - self.used
    }
}

/// The one or two of the sequences `0..end`, ascending by length, whose sum is the largest that is
/// not over `left`, and that sum. Two pointers, from both ends.
fn best_finish(
    left: usize,
    end: usize,
    free: usize,
    len: impl Fn(usize) -> usize,
) -> ([Option<usize>; 2], usize) {
    // The longest that fits is at `end - 1`.
    let mut best = ([Some(end - 1), None], len(end - 1));
    let (mut low, mut high) = (0, end - 1);
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
