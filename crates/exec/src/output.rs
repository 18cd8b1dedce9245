//! Memory for the outputs of asynchronous steps. Invariant: an output is returned in its own element type, and a buffer that
//! has held an output of a size holds it again without an allocation.

use plimsoll_graph::DType;

/// Memory for one output, which [`Executor::collect`](crate::Executor::collect) fills: a vector takes outputs in f32 alone,
/// [`OutputValues`] takes every output.
pub trait OutputBuffer {
    /// Whether the buffer takes outputs of this element type.
    fn takes(&self, dtype: DType) -> bool;

    /// Resizes the buffer to `n` values of an element type that it takes, and returns their bytes.
    fn resize(&mut self, dtype: DType, n: usize) -> &mut [u8];
}

/// Values of an output, in f32 or i32.
#[derive(Clone, Debug, PartialEq)]
pub enum OutputValues {
    /// Values of an output in f32.
    F32(Vec<f32>),
    /// Values of an output in i32.
    I32(Vec<i32>),
}

impl OutputValues {
    /// Memory for `n` values of an output, which is in i32 or else in f32.
    pub fn zeros(dtype: DType, n: usize) -> Self {
        if dtype == DType::I32 { Self::I32(vec![0; n]) } else { Self::F32(vec![0.0; n]) }
    }

    /// The values in f32; empty for an output in i32.
    pub fn as_f32(&self) -> &[f32] {
        match self {
            Self::F32(values) => values,
            Self::I32(_) => &[],
        }
    }

    /// The values in i32; empty for an output in f32.
    pub fn as_i32(&self) -> &[i32] {
        match self {
            Self::F32(_) => &[],
            Self::I32(values) => values,
        }
    }

    /// The values as bytes.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        match self {
            Self::F32(values) => bytemuck::cast_slice_mut(values),
            Self::I32(values) => bytemuck::cast_slice_mut(values),
        }
    }
}

impl Default for OutputValues {
    /// Memory without values, which becomes i32 with the first output in i32.
    fn default() -> Self {
        Self::F32(vec![])
    }
}

impl OutputBuffer for OutputValues {
    fn takes(&self, dtype: DType) -> bool {
        matches!(dtype, DType::F32 | DType::I32)
    }

    fn resize(&mut self, dtype: DType, n: usize) -> &mut [u8] {
        let is_i32 = matches!(self, Self::I32(_));
        if is_i32 != (dtype == DType::I32) {
            *self = Self::zeros(dtype, 0);
        }
        match self {
            Self::F32(values) => resized(values, n, 0.0),
            Self::I32(values) => resized(values, n, 0),
        }
        self.bytes_mut()
    }
}

impl OutputBuffer for Vec<f32> {
    fn takes(&self, dtype: DType) -> bool {
        dtype == DType::F32
    }

    fn resize(&mut self, _: DType, n: usize) -> &mut [u8] {
        resized(self, n, 0.0);
        bytemuck::cast_slice_mut(self)
    }
}

/// Resizes a vector to exactly `n` values: the memory ledger counts these bytes.
fn resized<T: Clone>(values: &mut Vec<T>, n: usize, zero: T) {
    values.reserve_exact(n.saturating_sub(values.len()));
    values.resize(n, zero);
}
