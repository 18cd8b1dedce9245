//! Views of int8 matrices with one scale per row, in the layouts `graph::Layout::Scaled` and `ScaledTiles`.
//! Invariant: each row is padded with zeros to its stride and has one scale.

use core::marker::PhantomData;
use plimsoll_exec::scaled::stride;
use plimsoll_exec::tiles::codes_panel;

/// A readable int8 matrix in row-major order, with one scale per row.
#[derive(Clone, Copy)]
pub struct QuantizedRows<'a> {
    /// Quantized values, in rows of [`QuantizedRows::stride`] bytes.
    pub values: &'a [u8],
    /// Scale of each row.
    pub scales: &'a [f32],
    /// Number of columns, without the padding.
    pub columns: usize,
}

impl<'a> QuantizedRows<'a> {
    /// A view of `bytes`, a (rows, columns) matrix: first all rows, then all scales. Panics if the size is wrong.
    pub fn new(bytes: &'a [u8], rows: usize, columns: usize) -> Self {
        assert_eq!(bytes.len(), rows * (stride(columns) + 4), "codes of ({rows}, {columns})");
        let (values, scales) = bytes.split_at(rows * stride(columns));
        Self { values, scales: bytemuck::cast_slice(scales), columns }
    }

    /// Bytes from one row to the next.
    pub fn stride(&self) -> usize {
        stride(self.columns)
    }
}

/// A writable int8 matrix in row-major order, with one scale per row. Not `Copy`: while a kernel has it, no other
/// code writes its elements.
pub struct QuantizedRowsMut<'a> {
    values: *mut u8,
    scales: *mut f32,
    rows: usize,
    columns: usize,
    life: PhantomData<&'a mut [u8]>,
}

// SAFETY: the threads of a kernel write disjoint rows.
unsafe impl Send for QuantizedRowsMut<'_> {}
// SAFETY: as above.
unsafe impl Sync for QuantizedRowsMut<'_> {}

impl<'a> QuantizedRowsMut<'a> {
    /// A view of `bytes`, a (rows, columns) matrix: first all rows, then all scales. Panics if the size is wrong.
    pub fn new(bytes: &'a mut [u8], rows: usize, columns: usize) -> Self {
        assert_eq!(bytes.len(), rows * (stride(columns) + 4), "codes of ({rows}, {columns})");
        let (values, scales) = bytes.split_at_mut(rows * stride(columns));
        let scales: &mut [f32] = bytemuck::cast_slice_mut(scales);
        Self { values: values.as_mut_ptr(), scales: scales.as_mut_ptr(), rows, columns, life: PhantomData }
    }

    /// Number of rows.
    pub(crate) fn rows(&self) -> usize {
        self.rows
    }

    /// Number of columns, without the padding.
    pub(crate) fn cols(&self) -> usize {
        self.columns
    }

    /// Address of the first value of row `r`. May be called with any `r`, but accessed only inside the matrix.
    pub(crate) fn row(&self, r: usize) -> *mut u8 {
        self.values.wrapping_add(r * stride(self.columns))
    }

    /// Address of the scale of row `r`, as `row`.
    pub(crate) fn scale(&self, r: usize) -> *mut f32 {
        self.scales.wrapping_add(r)
    }
}

/// An int8 weight in the tile order of the matmul kernels, with one scale per row.
#[derive(Clone, Copy)]
pub struct QuantizedTiles<'a> {
    /// Quantized values, panel after panel of 32 rows.
    pub tiles: &'a [u8],
    /// Scale of each row; zeros in the padding of the last panel.
    pub scales: &'a [f32],
}

impl<'a> QuantizedTiles<'a> {
    /// A view of `bytes`, a weight of `panels` panels of 32 rows with `k` columns: first the tiles, then the scales.
    /// Panics if the bytes are too few.
    pub fn new(bytes: &'a [u8], panels: usize, k: usize) -> Self {
        let (tiles, scales) = bytes.split_at(panels * codes_panel(k));
        Self { tiles, scales: bytemuck::cast_slice(scales) }
    }
}
