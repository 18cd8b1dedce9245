//! Views of matrices of codes, as `plimsoll_graph::Layout::Scaled` and `ScaledTiles` have them. Invariant: rows end in zeros up to
//! their stride, and each has one scale.

use core::marker::PhantomData;
use plimsoll_exec::scaled::stride;
use plimsoll_exec::tiles::codes_panel;

/// A readable matrix of integers, row by row.
#[derive(Clone, Copy)]
pub struct CodeRows<'a> {
    /// Rows of `stride` bytes.
    pub codes: &'a [u8],
    /// One for each row.
    pub scales: &'a [f32],
    /// Columns of a row, without the zeros behind them.
    pub columns: usize,
}

impl<'a> CodeRows<'a> {
    /// All bytes of a matrix of so many columns.
    pub fn new(bytes: &'a [u8], rows: usize, columns: usize) -> Self {
        assert_eq!(bytes.len(), rows * (stride(columns) + 4), "codes of ({rows}, {columns})");
        let (codes, scales) = bytes.split_at(rows * stride(columns));
        Self { codes, scales: bytemuck::cast_slice(scales), columns }
    }

    /// Bytes of a row.
    pub fn stride(&self) -> usize {
        stride(self.columns)
    }
}

/// A writable matrix of integers, row by row. Not `Copy`: while a kernel has it, nobody else writes there.
pub struct CodeRowsMut<'a> {
    codes: *mut u8,
    scales: *mut f32,
    rows: usize,
    columns: usize,
    life: PhantomData<&'a mut [u8]>,
}

// SAFETY: the kernels write disjoint rows from their threads.
unsafe impl Send for CodeRowsMut<'_> {}
// SAFETY: as above.
unsafe impl Sync for CodeRowsMut<'_> {}

impl<'a> CodeRowsMut<'a> {
    /// All bytes of a matrix of so many columns.
    pub fn new(bytes: &'a mut [u8], rows: usize, columns: usize) -> Self {
        assert_eq!(bytes.len(), rows * (stride(columns) + 4), "codes of ({rows}, {columns})");
        let (codes, scales) = bytes.split_at_mut(rows * stride(columns));
        let scales: &mut [f32] = bytemuck::cast_slice_mut(scales);
        Self { codes: codes.as_mut_ptr(), scales: scales.as_mut_ptr(), rows, columns, life: PhantomData }
    }

    /// (rows, columns)
    pub(super) fn size(&self) -> (usize, usize) {
        (self.rows, self.columns)
    }

    /// The first code of row `r`, and its scale.
    pub(super) fn row(&self, r: usize) -> (*mut u8, *mut f32) {
        (self.codes.wrapping_add(r * stride(self.columns)), self.scales.wrapping_add(r))
    }
}

/// A weight of integers in tiles.
#[derive(Clone, Copy)]
pub struct CodeTiles<'a> {
    /// Panel after panel.
    pub tiles: &'a [u8],
    /// One for each row, zeros behind the last.
    pub scales: &'a [f32],
}

impl<'a> CodeTiles<'a> {
    /// All bytes of a weight of `panels` times 32 rows of `k`.
    pub fn new(bytes: &'a [u8], panels: usize, k: usize) -> Self {
        let (tiles, scales) = bytes.split_at(panels * codes_panel(k));
        Self { tiles, scales: bytemuck::cast_slice(scales) }
    }
}
