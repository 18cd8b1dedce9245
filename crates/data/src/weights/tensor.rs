//! A tensor in a weight file: its name, type, shape and location, and reading its elements. Invariant: a `StoredTensor` is
//! created only after its bytes were checked to lie inside its file, and a read uses buffers of fixed size on the
//! stack.

use std::ops::Range;

use super::source::ByteSource;
use super::{FileDType, WeightsError};

/// Size in bytes of the read buffer on the stack; a multiple of every element size.
const BUFFER: usize = 32 * 1024;

/// Maximum number of dimensions of a tensor; more are refused.
pub(super) const MAX_DIMENSIONS: usize = 16;

/// Name, type, shape and location of a tensor. The values stay in the file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoredTensor {
    pub(super) name: String,
    pub(super) dtype: FileDType,
    pub(super) shape: Vec<u64>,
    pub(super) layout: TensorLayout,
    pub(super) file: usize,
    pub(super) offset: u64,
}

/// Maps a tensor's indices to positions in the file; positions and strides are in elements, relative to the tensor's
/// first element.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum TensorLayout {
    /// C order: element `e` is at position `e`.
    Contiguous,
    /// Shape (R, C), element (i, j) is at `i * stride + j`: a slice of the columns of a wider matrix.
    Rows { columns: u64, stride: u64 },
    /// Shape (R, C), element (i, j) is at `i + j * stride`: a transposed view.
    Columns { columns: u64, stride: u64 },
}

impl StoredTensor {
    /// The tensor's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The element type in the file.
    pub fn dtype(&self) -> FileDType {
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

    /// The size of the elements in bytes, in the type that the file stores.
    pub fn bytes(&self) -> u64 {
        self.elements() * self.dtype.size()
    }

    /// The index of the weight file that holds the values: the shard's number, or 0 without shards.
    pub fn file(&self) -> usize {
        self.file
    }

    /// The offset of the first element in the weight file, in bytes.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// Checks that the range `elements` lies within the tensor and has as many elements as the caller's buffer.
    ///
    /// # Errors
    /// `Range` if not.
    pub(super) fn check_range(
        &self,
        source: &ByteSource,
        elements: &Range<u64>,
        buffer: u64,
    ) -> Result<(), WeightsError> {
        let asked = elements.end.checked_sub(elements.start);
        if asked == Some(buffer) && elements.end <= self.elements() {
            return Ok(());
        }
        Err(WeightsError::Range {
            path: source.path().to_owned(),
            tensor: self.name.clone(),
            range: (elements.start, elements.end),
            elements: self.elements(),
            buffer,
        })
    }

    /// Reads the range `elements` (indices in C order) into `out`, converted by `convert`. `Range` if `out` does not
    /// have the length of the range or the range exceeds the tensor.
    pub(super) fn read<T: Copy + Default>(
        &self,
        source: &ByteSource,
        elements: Range<u64>,
        out: &mut [T],
        convert: fn(FileDType, &[u8], &mut [T]),
    ) -> Result<(), WeightsError> {
        self.check_range(source, &elements, out.len() as u64)?;
        if out.is_empty() {
            return Ok(());
        }
        let reader = ElementReader { source, dtype: self.dtype, offset: self.offset, convert };
        match self.layout {
            TensorLayout::Contiguous => reader.run(elements.start, out),
            TensorLayout::Rows { columns, stride } => reader.rows(elements.start, columns, stride, out),
            TensorLayout::Columns { columns, stride } => reader.columns(elements, columns, stride, out),
        }
    }
}

/// Reads and converts the elements of one tensor.
struct ElementReader<'a, T> {
    source: &'a ByteSource,
    dtype: FileDType,
    offset: u64,
    convert: fn(FileDType, &[u8], &mut [T]),
}

impl<T: Copy + Default> ElementReader<'_, T> {
    /// Reads elements at consecutive positions in the file, from position `first` on.
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

    /// Reads from C-order index `first` on a matrix whose stored rows are `stride` elements apart, row by row.
    fn rows(&self, first: u64, columns: u64, stride: u64, out: &mut [T]) -> Result<(), WeightsError> {
        let mut element = first;
        let mut rest = out;
        while !rest.is_empty() {
            let row = element / columns;
            let column = element % columns;
            let count = (columns - column).min(rest.len() as u64);
            let (part, tail) = rest.split_at_mut(count as usize);
            self.run(row * stride + column, part)?;
            (element, rest) = (element + count, tail);
        }
        Ok(())
    }

    /// Reads the range `elements` (C order) of a transposed matrix. Elements of one column are consecutive in the
    /// file, so each column is read in runs, and the values are scattered to every `columns`-th place of `out`.
    fn columns(
        &self,
        elements: Range<u64>,
        columns: u64,
        stride: u64,
        out: &mut [T],
    ) -> Result<(), WeightsError> {
        let mut values = [T::default(); 1024];
        for column in 0..columns {
            // Rows i with start <= i * columns + column < end, as the half-open range first..last.
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
