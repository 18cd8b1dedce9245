//! A tensor on the heap. Invariant: none of its own; `data` may have any length until `eval` has checked it.

/// A tensor on the heap, C order.
#[derive(Clone, Debug, PartialEq)]
pub struct Tensor {
    /// Sizes, outermost first.
    pub shape: Vec<usize>,
    /// As many elements as the product of `shape`.
    pub data: Data,
}

/// The elements of a [`Tensor`].
#[derive(Clone, Debug, PartialEq)]
pub enum Data {
    /// Numbers: floats of every element type, widened.
    Float(Vec<f64>),
    /// Token ids, row indices and spans.
    I32(Vec<i32>),
    /// Codes of 8-bit states.
    U8(Vec<u8>),
}

impl Tensor {
    /// A tensor of floats.
    pub fn f64(shape: &[usize], data: Vec<f64>) -> Self {
        Self { shape: shape.to_vec(), data: Data::Float(data) }
    }

    /// A tensor of floats that are f32 elsewhere.
    pub fn f32(shape: &[usize], data: Vec<f32>) -> Self {
        Self::f64(shape, data.into_iter().map(f64::from).collect())
    }

    /// A tensor of integers.
    pub fn i32(shape: &[usize], data: Vec<i32>) -> Self {
        Self { shape: shape.to_vec(), data: Data::I32(data) }
    }

    /// A tensor of codes.
    pub fn u8(shape: &[usize], data: Vec<u8>) -> Self {
        Self { shape: shape.to_vec(), data: Data::U8(data) }
    }

    /// The floats, if it holds floats.
    pub fn floats(&self) -> Option<&[f64]> {
        match &self.data {
            Data::Float(data) => Some(data),
            Data::I32(_) | Data::U8(_) => None,
        }
    }

    /// The floats rounded to f32, if it holds floats.
    pub fn rounded(&self) -> Option<Vec<f32>> {
        Some(self.floats()?.iter().map(|&x| x as f32).collect())
    }

    /// The integers, if it holds integers.
    pub fn integers(&self) -> Option<&[i32]> {
        match &self.data {
            Data::I32(data) => Some(data),
            Data::Float(_) | Data::U8(_) => None,
        }
    }

    /// The codes, if it holds codes.
    pub fn codes(&self) -> Option<&[u8]> {
        match &self.data {
            Data::U8(data) => Some(data),
            Data::Float(_) | Data::I32(_) => None,
        }
    }
}

impl Data {
    /// Number of elements.
    pub fn len(&self) -> usize {
        match self {
            Self::Float(data) => data.len(),
            Self::I32(data) => data.len(),
            Self::U8(data) => data.len(),
        }
    }

    /// Whether there is no element.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}
