//! Tensors of the reference kernels. Invariant: none of its own; `data` may have any length until `eval` checks it.

/// A heap-allocated tensor in C order.
#[derive(Clone, Debug, PartialEq)]
pub struct Tensor {
    /// Sizes of the dimensions, outermost first.
    pub shape: Vec<usize>,
    /// The elements, as many as the product of `shape`.
    pub data: Data,
}

/// The elements of a [`Tensor`].
#[derive(Clone, Debug, PartialEq)]
pub enum Data {
    /// Floats of any element type, widened to f64.
    Float(Vec<f64>),
    /// Token ids, row indices and spans.
    I32(Vec<i32>),
    /// 8-bit quantized values.
    U8(Vec<u8>),
}

impl Tensor {
    /// A tensor of floats.
    pub fn f64(shape: &[usize], data: Vec<f64>) -> Self {
        Self { shape: shape.to_vec(), data: Data::Float(data) }
    }

    /// A tensor of floats, given as f32.
    pub fn f32(shape: &[usize], data: Vec<f32>) -> Self {
        Self::f64(shape, data.into_iter().map(f64::from).collect())
    }

    /// A tensor of integers.
    pub fn i32(shape: &[usize], data: Vec<i32>) -> Self {
        Self { shape: shape.to_vec(), data: Data::I32(data) }
    }

    /// A tensor of 8-bit quantized values.
    pub fn u8(shape: &[usize], data: Vec<u8>) -> Self {
        Self { shape: shape.to_vec(), data: Data::U8(data) }
    }

    /// The floats; `None` for other element types.
    pub fn floats(&self) -> Option<&[f64]> {
        match &self.data {
            Data::Float(data) => Some(data),
            Data::I32(_) | Data::U8(_) => None,
        }
    }

    /// The floats rounded to f32; `None` for other element types.
    pub fn rounded(&self) -> Option<Vec<f32>> {
        Some(self.floats()?.iter().map(|&x| x as f32).collect())
    }

    /// The integers; `None` for other element types.
    pub fn integers(&self) -> Option<&[i32]> {
        match &self.data {
            Data::I32(data) => Some(data),
            Data::Float(_) | Data::U8(_) => None,
        }
    }

    /// The quantized values; `None` for other element types.
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

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}
