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
    /// IEEE binary32.
    F32(Vec<f32>),
    /// Token ids, row indices and spans.
    I32(Vec<i32>),
}

impl Tensor {
    /// A tensor of floats.
    pub fn f32(shape: &[usize], data: Vec<f32>) -> Self {
        Self { shape: shape.to_vec(), data: Data::F32(data) }
    }

    /// A tensor of integers.
    pub fn i32(shape: &[usize], data: Vec<i32>) -> Self {
        Self { shape: shape.to_vec(), data: Data::I32(data) }
    }

    /// The floats, if it holds floats.
    pub fn floats(&self) -> Option<&[f32]> {
        match &self.data {
            Data::F32(data) => Some(data),
            Data::I32(_) => None,
        }
    }

    /// The integers, if it holds integers.
    pub fn integers(&self) -> Option<&[i32]> {
        match &self.data {
            Data::I32(data) => Some(data),
            Data::F32(_) => None,
        }
    }
}

impl Data {
    /// Number of elements.
    pub fn len(&self) -> usize {
        match self {
            Self::F32(data) => data.len(),
            Self::I32(data) => data.len(),
        }
    }

    /// Whether there is no element.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}
