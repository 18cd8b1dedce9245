//! The packs of a training step, as kernels read them.
//!
//! Invariant: the rows of the packs follow one another and cover all rows, so every row is in exactly one pack. A pack
//! without rows is allowed.

use core::fmt;
use core::ops::Range;
use plimsoll_graph::packs::{NUMBER, TARGETS, WORDS};

/// The packs that divide the rows of an operand.
#[derive(Clone, Copy)]
pub struct Packs<'a> {
    words: &'a [[u32; WORDS]],
    /// The word of the first row of a pack; the next word is the end of its rows.
    first: usize,
}

/// A pack.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pack {
    /// Its rows.
    pub rows: Range<usize>,
    /// Number of its targets.
    pub targets: u32,
    /// Its global number, modulo 2^32.
    pub number: u32,
}

/// The rows of a range that are in one pack; at least one row.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PackPart {
    /// Index of the pack in the step.
    pub index: usize,
    /// The pack.
    pub pack: Pack,
    /// The rows of the range that are in the pack.
    pub rows: Range<usize>,
}

/// Packs that break the invariant of [`Packs`], or have a negative number of targets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PacksError {
    /// The rows of a pack do not follow those of the pack before it, or end behind the last row.
    Rows {
        /// Index of the pack.
        pack: usize,
        /// Its first row.
        start: u32,
        /// Row after its last row.
        end: u32,
        /// Row at which it must start.
        next: u32,
        /// Number of rows.
        rows: usize,
    },
    /// The packs do not cover all rows.
    Uncovered {
        /// Row after the last row of the last pack.
        end: u32,
        /// Number of rows.
        rows: usize,
    },
    /// The number of targets of a pack is negative as an i32.
    Targets {
        /// Index of the pack.
        pack: usize,
        /// The number.
        targets: i32,
    },
}

impl fmt::Display for PacksError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Rows { pack, start, end, next, rows } => {
                write!(f, "pack {pack} is rows {start}..{end}, not rows from {next} on in 0..{rows}")
            }
            Self::Uncovered { end, rows } => write!(f, "packs are rows 0..{end} of {rows}"),
            Self::Targets { pack, targets } => write!(f, "pack {pack} has {targets} targets"),
        }
    }
}

impl std::error::Error for PacksError {}

/// The words of one pack of `rows` rows, without targets, for [`Packs::new`] with any `first`.
pub fn whole(rows: usize) -> [[u32; WORDS]; 1] {
    let rows = rows as u32;
    [[0, rows, 0, rows, 0, 0]]
}

impl<'a> Packs<'a> {
    /// The packs of an operand with `rows` rows, from the words of each pack ([`plimsoll_graph::packs`]), where word
    /// `first` is the first row of a pack.
    ///
    /// # Errors
    /// Packs that do not follow one another, do not cover all rows, or have a negative number of targets.
    pub fn new(words: &'a [[u32; WORDS]], first: usize, rows: usize) -> Result<Packs<'a>, PacksError> {
        let mut next = 0;
        for (pack, pack_words) in words.iter().enumerate() {
            let start = pack_words[first];
            let end = pack_words[first + 1];
            if start != next || end < start || end as usize > rows {
                return Err(PacksError::Rows { pack, start, end, next, rows });
            }
            let targets = pack_words[TARGETS] as i32;
            if targets < 0 {
                return Err(PacksError::Targets { pack, targets });
            }
            next = end;
        }
        if next as usize != rows {
            return Err(PacksError::Uncovered { end: next, rows });
        }
        Ok(Packs { words, first })
    }

    /// Number of packs.
    pub fn count(self) -> usize {
        self.words.len()
    }

    /// Number of rows of all packs.
    pub fn rows(self) -> usize {
        self.words.last().map_or(0, |words| words[self.first + 1] as usize)
    }

    /// Pack `index`, which must exist.
    pub fn get(self, index: usize) -> Pack {
        let words = &self.words[index];
        let rows = words[self.first] as usize..words[self.first + 1] as usize;
        Pack { rows, targets: words[TARGETS], number: words[NUMBER] }
    }

    /// All packs.
    pub fn iter(self) -> impl Iterator<Item = Pack> + use<'a> {
        (0..self.count()).map(move |index| self.get(index))
    }

    /// The parts of the packs in `range`, in their order, without packs that have no row in it.
    pub fn parts(self, range: Range<usize>) -> impl Iterator<Item = PackPart> + use<'a> {
        let first = self.words.partition_point(|words| words[self.first + 1] as usize <= range.start);
        let end = range.end;
        (first..self.count())
            .map(move |index| {
                let pack = self.get(index);
                let rows = pack.rows.start.max(range.start)..pack.rows.end.min(range.end);
                PackPart { index, pack, rows }
            })
            .take_while(move |part| part.pack.rows.start < end)
            .filter(|part| !part.rows.is_empty())
    }
}
