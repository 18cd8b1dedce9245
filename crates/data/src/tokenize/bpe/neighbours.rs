//! Which pieces may stand beside each other in an encoding. Invariant: `fits(a, b)` is true exactly
//! if the encoding of the letters of `a` followed by those of `b` is `a` `b`.
//!
//! Byte-pair encoding merges, again and again, the leftmost of the adjacent pairs that make the
//! oldest piece. A boundary between two letters that survives to the end never matters to what
//! happens on its other side; so an encoding is right if and only if every two neighbours in it are
//! the encoding of their own letters. (Proof idea: run the merges on the whole and on the two sides
//! alone, in step; they differ only at the first merge across the boundary.)
//!
//! Pieces are numbered by age. Let V(a, b) say that the boundary lives until `a` and `b` are whole.
//! Undo the later of the two merges that made them:
//!
//! * `a` = (x, r) made last: V(a, b) = V(r, b), unless (r, b) merges before `a` is made;
//! * `b` = (l, y) made last: V(a, b) = V(a, l), unless (a, l) merges before `b` is made. When `a`
//!   and `b` are the same piece, `b` is made last, since it is to the right; and when (a, l) is the
//!   pair that makes `b` it comes first, since it is to the left.
//!
//! Then `a` and `b` fit if V(a, b) and they do not merge. So a row of the table begins as that of
//! the right part of its piece and goes on from itself.

use super::rules::Rules;

const BITS: usize = u64::BITS as usize;

/// A bit for each pair of pieces; a row for each left one, and one for the edge of a word.
pub(super) struct Neighbours {
    bits: Vec<u64>,
    /// Words in a row.
    width: usize,
}

/// That a piece merges with `right` to `product`.
struct Merge {
    right: usize,
    product: usize,
}

impl Neighbours {
    /// The table of `rules`. An error if a piece is not the encoding of its own letters: the table
    /// speaks only of pieces that occur.
    pub(super) fn new(rules: &Rules) -> Result<Self, &'static str> {
        let (pieces, letters) = (rules.texts.len(), rules.letters.len());
        let width = pieces.div_ceil(BITS);
        let mut merges: Vec<Vec<Merge>> = (0..pieces).map(|_| Vec::new()).collect();
        for (product, &(left, right)) in (letters..).zip(&rules.merges) {
            merges[usize::from(left)].push(Merge { right: usize::from(right), product });
        }
        // Of each piece, its left part; of a letter, nothing that is looked at.
        let lefts: Vec<usize> = vec![0; letters]
            .into_iter()
            .chain(rules.merges.iter().map(|&(left, _)| usize::from(left)))
            .collect();
        let mut new = Neighbours { bits: vec![0; (pieces + 1) * width], width };
        for piece in 0..pieces {
            match piece.checked_sub(letters) {
                // Between two letters there is a boundary from the start.
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

    /// The piece that stands for the edge of a word: every piece fits behind it.
    pub(super) fn edge(&self) -> usize {
        self.bits.len() / self.width - 1
    }

    /// Whether `left` and `right` may be neighbours.
    #[inline]
    pub(super) fn fits(&self, left: usize, right: usize) -> bool {
        self.bits[left * self.width + right / BITS] >> (right % BITS) & 1 != 0
    }

    /// V(piece, b) of all b older than `piece`: what fits its right part, and what that merges with,
    /// though not before `piece` is made.
    fn begin_row(&mut self, piece: usize, right: usize, merges: &[Merge]) {
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

/// Continues the row of a piece from V(piece, b) of all b before `from` to what fits it, where
/// `lefts` are the left parts of the pieces and `merges` those of the row's piece.
fn continue_row(row: &mut [u64], from: usize, lefts: &[usize], merges: &[Merge]) -> Result<(), &'static str> {
    let mut merges = merges.iter().peekable();
    let mut at = from;
    while at < lefts.len() {
        if let Some(merge) = merges.next_if(|merge| merge.product == at) {
            let (word, bit) = (&mut row[merge.right / BITS], 1 << (merge.right % BITS));
            if *word & bit == 0 {
                return Err("a piece is not the encoding of its own letters");
            }
            *word &= !bit;
        }
        // Up to the next merge, or the end of the word of bits, which is kept at hand.
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
