//! Table of the pairs of pieces that may be adjacent in an encoding. A piece is a token of the merge rules: a letter
//! or the result of a merge. Invariant: `fits(a, b)` is true if and only if the BPE encoding of the text of `a`
//! followed by the text of `b` is `a` `b`.
//!
//! BPE repeatedly applies the merge of lowest rank that is possible, at its leftmost position. If no merge ever crosses
//! the boundary between two letters, then neither side of the boundary affects the merges on the other side. Therefore
//! an encoding is correct if and only if every two adjacent pieces are the encoding of their own text. (Proof idea: run
//! the merges on the whole text and, in parallel, on the two sides alone; they first differ at a merge that crosses the
//! boundary.)
//!
//! Pieces are numbered in the order of the ranks of their merges. Let V(a, b) be true if no merge crosses the boundary
//! before `a` and `b` are complete. V follows by undoing the later of the two merges that made `a` and `b`:
//!
//! * `a` = (x, r) made last: V(a, b) = V(r, b), and false if (r, b) merges before `a` is made;
//! * `b` = (l, y) made last: V(a, b) = V(a, l), and false if (a, l) merges before `b` is made. When `a`
//!   and `b` are equal, `b` is made last, because it is on the right. When (a, l) is the pair that makes
//!   `b`, this merge is applied first, because it is on the left.
//!
//! `a` and `b` fit if V(a, b) is true and they do not merge. So the first part of the table row of `a` (pieces `b` with
//! lower numbers) is derived from the row of `r`, and the rest from earlier bits of the row itself.

use super::rules::MergeRules;

const BITS: usize = u64::BITS as usize;

/// Bit matrix of the pairs of pieces that fit: a row for each left piece, and a last row for the start of a word.
pub(super) struct Neighbours {
    bits: Vec<u64>,
    /// Number of 64-bit words in a row.
    width: usize,
}

/// A merge of a given left piece with `right` to the piece `product`.
struct RightMerge {
    right: usize,
    product: usize,
}

impl Neighbours {
    /// Builds the table of `rules`. Errors if a piece is not the encoding of its own text, because the argument of the
    /// module documentation holds only for pieces that can occur in an encoding.
    pub(super) fn new(rules: &MergeRules) -> Result<Self, &'static str> {
        let pieces = rules.texts.len();
        let letters = rules.letters.len();
        let width = pieces.div_ceil(BITS);
        let mut merges: Vec<Vec<RightMerge>> = (0..pieces).map(|_| Vec::new()).collect();
        for (product, &(left, right)) in (letters..).zip(&rules.merges) {
            merges[usize::from(left)].push(RightMerge { right: usize::from(right), product });
        }
        // The left part of each piece. The zeros of the letters are never read: `continue_row` starts behind them.
        let lefts: Vec<usize> = vec![0; letters]
            .into_iter()
            .chain(rules.merges.iter().map(|&(left, _)| usize::from(left)))
            .collect();
        let mut new = Neighbours { bits: vec![0; (pieces + 1) * width], width };
        for piece in 0..pieces {
            match piece.checked_sub(letters) {
                // V is true for two letters: they are complete before the first merge.
                None => (0..letters).for_each(|letter| new.set(piece, letter)),
                Some(merge) => {
                    let right = usize::from(rules.merges[merge].1);
                    new.begin_row(piece, right, &merges[right]);
                }
            }
            let row = &mut new.bits[piece * width..][..width];
            continue_row(row, piece.max(letters), &lefts, &merges[piece])?;
        }
        new.bits[pieces * width..].fill(u64::MAX);
        Ok(new)
    }

    /// Returns the row number of the start of a word, after which every piece fits.
    pub(super) fn edge(&self) -> usize {
        self.bits.len() / self.width - 1
    }

    /// Returns whether `right` may follow `left` in an encoding.
    #[inline]
    pub(super) fn fits(&self, left: usize, right: usize) -> bool {
        self.bits[left * self.width + right / BITS] >> (right % BITS) & 1 != 0
    }

    /// Sets V(piece, b) for all b < `piece`: the row of its right part, which excludes the pieces that the right part
    /// merges with, plus the pieces of these `merges` that are not applied before `piece` is made.
    fn begin_row(&mut self, piece: usize, right: usize, merges: &[RightMerge]) {
        let [from, to] = [right, piece].map(|p| p * self.width);
        self.bits.copy_within(from..=from + piece / BITS, to);
        self.bits[to + piece / BITS] &= (1 << (piece % BITS)) - 1;
        for merge in merges.iter().filter(|merge| merge.product >= piece && merge.right < piece) {
            self.set(piece, merge.right);
        }
    }

    fn set(&mut self, left: usize, right: usize) {
        self.bits[left * self.width + right / BITS] |= 1 << (right % BITS);
    }
}

/// Completes the row of a piece, which holds V(piece, b) for all b < `from`, to the pieces that fit. `lefts` are the
/// left parts of all pieces, `merges` the merges that have the row's piece on the left, in the order of their products.
/// Errors if V is false for a pair that merges, because its product then never occurs.
fn continue_row(
    row: &mut [u64],
    from: usize,
    lefts: &[usize],
    merges: &[RightMerge],
) -> Result<(), &'static str> {
    let mut merges = merges.iter().peekable();
    let mut at = from;
    while at < lefts.len() {
        if let Some(merge) = merges.next_if(|merge| merge.product == at) {
            let word = &mut row[merge.right / BITS];
            let bit = 1 << (merge.right % BITS);
            if *word & bit == 0 {
                return Err("a piece is not the encoding of its own letters");
            }
            *word &= !bit;
        }
        // Up to the next merge, which must clear its bit before later bits are derived from it, or to the end of the
        // 64-bit word, which stays in a register. A left part in this word must be read from the register, because its
        // bit may not have been stored.
        let end = (at / BITS + 1) * BITS;
        let end = end.min(lefts.len()).min(merges.peek().map_or(usize::MAX, |merge| merge.product));
        let mut word = row[at / BITS];
        for (bit, &left) in (at % BITS..).zip(&lefts[at..end]) {
            let from = if left / BITS == at / BITS { word } else { row[left / BITS] };
            word |= (from >> (left % BITS) & 1) << bit;
        }
        row[at / BITS] = word;
        at = end;
    }
    Ok(())
}
