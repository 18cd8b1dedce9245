//! One stored tensor: name, type, shape, place, and reading its elements. Invariant: a `Tensor` is
//! made only after its bytes were checked to lie inside its file, and a read uses a fixed buffer
//! on the stack, never memory in proportion to the tensor.

use std::ops::Range;

use super::source::Source;
use super::{DType, WeightsError};

/// Bytes read at a time; a multiple of every element size.
const BUFFER: usize = 32 * 1024;

/// More dimensions than any tensor has.
pub(super) const MAX_DIMENSIONS: usize = 16;

/// A tensor's description and place; its values stay in the file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tensor {
    pub(super) name: String,
    pub(super) dtype: DType,
    pub(super) shape: Vec<u64>,
    pub(super) layout: Layout,
    pub(super) file: usize,
    pub(super) offset: u64,
}

/// How C-order elements lie in the file, counted in elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Layout {
    /// Element e at e.
    Contiguous,
    /// (R, C), element (i, j) at i * stride + j: columns cut off a wider matrix.
    Rows { columns: u64, stride: u64 },
    /// (R, C), element (i, j) at i + j * stride: a transposed view.
    Columns { columns: u64, stride: u64 },
}

impl Tensor {
    /// The name in the file.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The element type in the file.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The shape, outermost dimension first; empty for a scalar.
    pub fn shape(&self) -> &[u64] {
        &self.shape
    }

    /// The number of elements: the product of the shape, 1 for a scalar.
    pub fn elements(&self) -> u64 {
        self.shape.iter().product()
    }

    /// Bytes of the elements in the file's type.
    pub fn bytes(&self) -> u64 {
        self.elements() * self.dtype.size()
    }

    /// Which of the opened weight files holds the values (a shard's number; 0 without shards).
    pub fn file(&self) -> usize {
        self.file
    }

    /// Where in that file the first element lies, in bytes.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// Reads `elements` in C order into `out`, which holds as many.
    pub(super) fn read<T: Copy + Default>(
        &self,
        source: &Source,
        elements: Range<u64>,
        out: &mut [T],
        convert: fn(DType, &[u8], &mut [T]),
    ) -> Result<(), WeightsError> {
        let total = self.elements();
        let asked = elements.end.checked_sub(elements.start);
        if asked != Some(out.len() as u64) || elements.end > total {
            return Err(WeightsError::Range {
                tensor: self.name.clone(),
                range: (elements.start, elements.end),
                elements: total,
                buffer: out.len() as u64,
            });
        }
        if out.is_empty() {
            return Ok(());
        }
        let reader = Reader { source, dtype: self.dtype, offset: self.offset, convert };
        match self.layout {
            Layout::Contiguous => reader.run(elements.start, out),
            Layout::Rows { columns, stride } => reader.rows(elements.start, columns, stride, out),
            Layout::Columns { columns, stride } => reader.columns(elements, columns, stride, out),
        }
    }
}

/// A conversion bound to its tensor's bytes.
struct Reader<'a, T> {
    source: &'a Source,
    dtype: DType,
    offset: u64,
    convert: fn(DType, &[u8], &mut [T]),
}

impl<T: Copy + Default> Reader<'_, T> {
    /// Consecutive stored elements from `first`.
    fn run(&self, first: u64, out: &mut [T]) -> Result<(), WeightsError> {
        let mut buffer = [0u8; BUFFER];
        let size = self.dtype.size();
        let mut at = self.offset + first * size;
        for part in out.chunks_mut(BUFFER / size as usize) {
            let bytes = &mut buffer[..part.len() * size as usize];
            self.source.read_at(at, bytes)?;
            (self.convert)(self.dtype, bytes, part);
            at += bytes.len() as u64;
        }
        Ok(())
    }

    /// Row pieces of a matrix whose stored rows are `stride` apart.
    fn rows(&self, first: u64, columns: u64, stride: u64, out: &mut [T]) -> Result<(), WeightsError> {
        let (mut element, mut rest) = (first, out);
        while !rest.is_empty() {
            let (row, column) = (element / columns, element % columns);
            let count = (columns - column).min(rest.len() as u64);
            let (part, tail) = rest.split_at_mut(count as usize);
            self.run(row * stride + column, part)?;
            (element, rest) = (element + count, tail);
        }
        Ok(())
    }

    /// A transposed matrix: stored runs go down a column, so each is read whole and scattered.
    fn columns(
        &self,
        elements: Range<u64>,
        columns: u64,
        stride: u64,
        out: &mut [T],
    ) -> Result<(), WeightsError> {
        let mut values = [T::default(); 1024];
        for column in 0..columns {
            // The rows i with start <= i * columns + column < end.
            let first = (elements.start.saturating_sub(column)).div_ceil(columns);
            let last = (elements.end.saturating_sub(column)).div_ceil(columns);
            let mut row = first;
            while row < last {
                let count = (last - row).min(values.len() as u64) as usize;
                self.run(row + column * stride, &mut values[..count])?;
                let at = (row * columns + column - elements.start) as usize;
                let places = out[at..].iter_mut().step_by(columns as usize);
                places.zip(&values[..count]).for_each(|(place, value)| *place = *value);
                row += count as u64;
            }
        }
        Ok(())
    }
}
