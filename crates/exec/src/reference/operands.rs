//! The inputs of an op, taken in the order of its documentation. Invariant: each input is checked when it is taken,
//! so kernels index without further checks.

use super::{Data, ReferenceError, Tensor};
use plimsoll_graph::packs::{NUMBER, TARGETS, WORDS};
use std::ops::Range;

/// The inputs not yet taken.
pub(super) struct Operands<'a> {
    ins: &'a [&'a Tensor],
    next: usize,
}

/// A matrix in C order.
#[derive(Clone, Copy)]
pub(super) struct Matrix<'a> {
    pub rows: usize,
    pub columns: usize,
    pub data: &'a [f64],
}

impl<'a> Matrix<'a> {
    /// Row `r`, which must exist.
    pub fn row(&self, r: usize) -> &'a [f64] {
        &self.data[r * self.columns..(r + 1) * self.columns]
    }

    /// All rows.
    pub(crate) fn iter_rows(self) -> impl Iterator<Item = &'a [f64]> {
        (0..self.rows).map(move |r| self.row(r))
    }
}

/// The input `packs`, whose words are not yet checked.
#[derive(Clone, Copy)]
pub(super) struct PackInputs<'a> {
    words: &'a [i32],
}

/// A pack of a step.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct PackRange {
    /// Its rows in the operand that the packs divide.
    pub rows: Range<usize>,
    /// Number of its targets.
    pub targets: u32,
    /// Its global number, modulo 2^32.
    pub number: u32,
}

impl PackInputs<'_> {
    /// The packs of an operand with `rows` rows, where `word` is the word of the first row of a pack. `Err` unless the
    /// rows of the packs follow one another and cover all `rows`, or if a number of targets is negative.
    pub fn of(self, word: usize, rows: usize) -> Result<Vec<PackRange>, ReferenceError> {
        let mut next = 0;
        let mut packs = Vec::with_capacity(self.words.len() / WORDS);
        for (pack, words) in self.words.chunks_exact(WORDS).enumerate() {
            let start = words[word];
            let end = words[word + 1];
            let outside = ReferenceError::Pack { pack, start, end, next, rows };
            let (Ok(first), Ok(last)) = (usize::try_from(start), usize::try_from(end)) else {
                return Err(outside);
            };
            if first != next || last < first || last > rows {
                return Err(outside);
            }
            let targets = words[TARGETS];
            let targets = u32::try_from(targets).map_err(|_| ReferenceError::Targets { pack, targets })?;
            packs.push(PackRange { rows: first..last, targets, number: words[NUMBER] as u32 });
            next = last;
        }
        if next != rows {
            return Err(ReferenceError::Uncovered { end: next, rows });
        }
        Ok(packs)
    }
}

impl<'a> Operands<'a> {
    /// All inputs. `Err` if the number of elements of one differs from its shape.
    pub fn new(ins: &'a [&'a Tensor]) -> Result<Self, ReferenceError> {
        for (input, tensor) in ins.iter().enumerate() {
            let product = tensor.shape.iter().try_fold(1_usize, |n, &d| n.checked_mul(d));
            let wanted = product.unwrap_or(usize::MAX);
            let found = tensor.data.len();
            if product != Some(found) {
                return Err(ReferenceError::Length { input, wanted, found });
            }
        }
        Ok(Self { ins, next: 0 })
    }

    /// Whether all inputs have been taken.
    pub fn is_empty(&self) -> bool {
        self.next == self.ins.len()
    }

    /// `Err` if inputs are left.
    pub fn end(&self) -> Result<(), ReferenceError> {
        if self.is_empty() {
            return Ok(());
        }
        Err(ReferenceError::Inputs { wanted: self.next, found: self.ins.len() })
    }

    /// Takes floats of any shape.
    pub fn floats(&mut self, what: &'static str) -> Result<(&'a [usize], &'a [f64]), ReferenceError> {
        let tensor = self.take()?;
        match &tensor.data {
            Data::Float(data) => Ok((&tensor.shape, data)),
            Data::I32(_) | Data::U8(_) => Err(ReferenceError::DType { what, wanted: "floats" }),
        }
    }

    /// Takes floats of the given shape.
    pub(crate) fn shaped(&mut self, what: &'static str, wanted: &[usize]) -> Result<&'a [f64], ReferenceError> {
        let (shape, data) = self.floats(what)?;
        if shape == wanted {
            return Ok(data);
        }
        Err(ReferenceError::Shape { what, wanted: wanted.to_vec(), found: shape.to_vec() })
    }

    /// Takes a matrix of any size.
    pub fn matrix(&mut self, what: &'static str) -> Result<Matrix<'a>, ReferenceError> {
        let (shape, data) = self.floats(what)?;
        match *shape {
            [rows, columns] => Ok(Matrix { rows, columns, data }),
            _ => Err(ReferenceError::Rank { what, wanted: 2, found: shape.to_vec() }),
        }
    }

    /// Takes a matrix with the given number of columns.
    pub fn columns(&mut self, what: &'static str, columns: usize) -> Result<Matrix<'a>, ReferenceError> {
        let x = self.matrix(what)?;
        if x.columns == columns {
            return Ok(x);
        }
        let wanted = vec![x.rows, columns];
        let found = vec![x.rows, x.columns];
        Err(ReferenceError::Shape { what, wanted, found })
    }

    /// Takes a matrix of the same size as `other`.
    pub fn same(&mut self, what: &'static str, other: Matrix<'_>) -> Result<Matrix<'a>, ReferenceError> {
        let data = self.shaped(what, &[other.rows, other.columns])?;
        Ok(Matrix { rows: other.rows, columns: other.columns, data })
    }

    /// Takes a vector of integers.
    pub fn integers(&mut self, what: &'static str) -> Result<&'a [i32], ReferenceError> {
        let tensor = self.take()?;
        match (&tensor.data, tensor.shape.len()) {
            (Data::I32(data), 1) => Ok(data),
            (Data::I32(_), _) => Err(ReferenceError::Rank { what, wanted: 1, found: tensor.shape.clone() }),
            (Data::Float(_) | Data::U8(_), _) => Err(ReferenceError::DType { what, wanted: "i32" }),
        }
    }

    /// Takes 8-bit quantized values of the given shape.
    pub fn codes(&mut self, what: &'static str, wanted: &[usize]) -> Result<&'a [u8], ReferenceError> {
        let tensor = self.take()?;
        match &tensor.data {
            Data::U8(data) if tensor.shape == wanted => Ok(data),
            Data::U8(_) => {
                let wanted = wanted.to_vec();
                let found = tensor.shape.clone();
                Err(ReferenceError::Shape { what, wanted, found })
            }
            Data::Float(_) | Data::I32(_) => Err(ReferenceError::DType { what, wanted: "codes" }),
        }
    }

    /// Takes integers of the given shape.
    pub(crate) fn shaped_integers(
        &mut self,
        what: &'static str,
        wanted: &[usize],
    ) -> Result<&'a [i32], ReferenceError> {
        let tensor = self.take()?;
        match &tensor.data {
            Data::I32(data) if tensor.shape == wanted => Ok(data),
            Data::I32(_) => {
                Err(ReferenceError::Shape { what, wanted: wanted.to_vec(), found: tensor.shape.clone() })
            }
            Data::Float(_) | Data::U8(_) => Err(ReferenceError::DType { what, wanted: "i32" }),
        }
    }

    /// Takes a matrix of integers with the given number of rows.
    pub(crate) fn integer_rows(
        &mut self,
        what: &'static str,
        rows: usize,
    ) -> Result<&'a [i32], ReferenceError> {
        let columns = self.ins.get(self.next).and_then(|t| t.shape.get(1)).copied();
        self.shaped_integers(what, &[rows, columns.unwrap_or(1)])
    }

    /// Takes the (start, end) spans of sequences. `Err` unless they lie inside `rows` and do not overlap.
    pub fn spans(&mut self, rows: usize) -> Result<Vec<Range<usize>>, ReferenceError> {
        let tensor = self.take()?;
        let Data::I32(data) = &tensor.data else {
            return Err(ReferenceError::DType { what: "spans", wanted: "i32" });
        };
        let [sequences, 2] = tensor.shape[..] else {
            let wanted = vec![tensor.shape.first().copied().unwrap_or(0), 2];
            return Err(ReferenceError::Shape { what: "spans", wanted, found: tensor.shape.clone() });
        };
        let mut taken = vec![false; rows];
        let mut spans = Vec::with_capacity(sequences);
        for (sequence, pair) in data.chunks_exact(2).enumerate() {
            let start = pair[0];
            let end = pair[1];
            let outside = ReferenceError::Span { sequence, start, end, rows };
            let (Ok(a), Ok(b)) = (usize::try_from(start), usize::try_from(end)) else {
                return Err(outside);
            };
            if a > b || b > rows {
                return Err(outside);
            }
            if let Some(i) = taken[a..b].iter().position(|&t| t) {
                return Err(ReferenceError::Overlap { sequence, row: a + i });
            }
            taken[a..b].fill(true);
            spans.push(a..b);
        }
        Ok(spans)
    }

    /// Takes the packs of a step: i32 (P, 6).
    pub fn packs(&mut self) -> Result<PackInputs<'a>, ReferenceError> {
        let packs = self.ins.get(self.next).and_then(|t| t.shape.first()).copied();
        Ok(PackInputs { words: self.shaped_integers("packs", &[packs.unwrap_or(0), WORDS])? })
    }

    /// Takes the next input, of any type and shape.
    pub fn take(&mut self) -> Result<&'a Tensor, ReferenceError> {
        let found = self.ins.len();
        let tensor = self.ins.get(self.next).ok_or(ReferenceError::Inputs { wanted: found + 1, found })?;
        self.next += 1;
        Ok(tensor)
    }
}

/// Converts `indices` to row numbers. `Err` unless all are below `limit`.
pub(super) fn rows_of(what: &'static str, indices: &[i32], limit: usize) -> Result<Vec<usize>, ReferenceError> {
    let mut rows = Vec::with_capacity(indices.len());
    for (position, &index) in indices.iter().enumerate() {
        match usize::try_from(index) {
            Ok(row) if row < limit => rows.push(row),
            Ok(_) | Err(_) => return Err(ReferenceError::Index { what, position, index, limit }),
        }
    }
    Ok(rows)
}

/// Converts `indices` to row numbers, with -1 as `None`. `Err` unless all others are below `limit`.
pub(super) fn slots_of(
    what: &'static str,
    indices: &[i32],
    limit: usize,
) -> Result<Vec<Option<usize>>, ReferenceError> {
    let mut slots = Vec::with_capacity(indices.len());
    for (position, &index) in indices.iter().enumerate() {
        match usize::try_from(index) {
            Ok(row) if row < limit => slots.push(Some(row)),
            Err(_) if index == -1 => slots.push(None),
            Ok(_) | Err(_) => return Err(ReferenceError::Index { what, position, index, limit }),
        }
    }
    Ok(slots)
}
