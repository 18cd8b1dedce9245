//! Views of f32 matrices in memory: a pointer, a size and a row stride.
//!
//! Invariant: whoever holds a view may touch exactly its rows x cols elements while its
//! lifetime lasts. Kernels go through raw pointers only, so that an output view may lie exactly
//! on an input view where the kernel's documentation allows it.

use core::marker::PhantomData;

/// A readable matrix: `rows` x `cols` f32, `ld` f32 from one row to the next.
#[derive(Clone, Copy)]
pub struct Rows<'a> {
    ptr: *const f32,
    rows: usize,
    cols: usize,
    ld: usize,
    life: PhantomData<&'a [f32]>,
}

/// A writable matrix. Not `Copy`: while a kernel has it, nobody else writes there.
pub struct RowsMut<'a> {
    ptr: *mut f32,
    rows: usize,
    cols: usize,
    ld: usize,
    life: PhantomData<&'a mut [f32]>,
}

// SAFETY: a `Rows` is a shared borrow of plain f32.
unsafe impl Send for Rows<'_> {}
// SAFETY: as above; it has no interior state.
unsafe impl Sync for Rows<'_> {}
// SAFETY: the kernels write disjoint elements from their threads.
unsafe impl Send for RowsMut<'_> {}
// SAFETY: as above.
unsafe impl Sync for RowsMut<'_> {}

impl<'a> Rows<'a> {
    /// The matrix that starts at `data[0]`. Panics if it does not fit or rows overlap.
    pub fn new(data: &'a [f32], rows: usize, cols: usize, ld: usize) -> Rows<'a> {
        check_fits(data.len(), rows, cols, ld);
        // SAFETY: it fits in the borrowed slice.
        unsafe { Rows::from_raw(data.as_ptr(), rows, cols, ld) }
    }

    /// A view without a slice, for memory that an output may lie on as well.
    ///
    /// # Safety
    /// For `'a`, each row's `cols` f32 must be readable, and written by nobody but a kernel
    /// that allows it.
    pub unsafe fn from_raw(ptr: *const f32, rows: usize, cols: usize, ld: usize) -> Rows<'a> {
        assert!(ld >= cols || rows <= 1, "rows overlap");
        Rows { ptr, rows, cols, ld, life: PhantomData }
    }

    /// `n` columns from `start` on, for example q out of a fused (T, 3D).
    pub fn columns(self, start: usize, n: usize) -> Rows<'a> {
        assert!(start <= self.cols && n <= self.cols - start, "columns outside the matrix");
        // `wrapping_add`: an empty matrix may have any pointer.
        Rows { ptr: self.ptr.wrapping_add(start), cols: n, ..self }
    }

    /// `n` rows from `start` on, for example those of one expert.
    pub fn part(self, start: usize, n: usize) -> Rows<'a> {
        assert!(start <= self.rows && n <= self.rows - start, "rows outside the matrix");
        Rows { ptr: self.row(start), rows: n, ..self }
    }

    /// Number of rows.
    pub fn rows(self) -> usize {
        self.rows
    }

    /// Number of columns.
    pub fn cols(self) -> usize {
        self.cols
    }

    /// f32 from one row to the next.
    pub(super) fn ld(self) -> usize {
        self.ld
    }

    /// Where row `r` starts. May be called with any `r`; read only inside the matrix.
    #[inline(always)]
    pub(super) fn row(self, r: usize) -> *const f32 {
        self.ptr.wrapping_add(r * self.ld)
    }
}

impl<'a> RowsMut<'a> {
    /// The matrix that starts at `data[0]`. Panics if it does not fit or rows overlap.
    pub fn new(data: &'a mut [f32], rows: usize, cols: usize, ld: usize) -> RowsMut<'a> {
        check_fits(data.len(), rows, cols, ld);
        // SAFETY: it fits in the slice, which is borrowed for `'a`.
        unsafe { RowsMut::from_raw(data.as_mut_ptr(), rows, cols, ld) }
    }

    /// A view without a slice.
    ///
    /// # Safety
    /// For `'a`, each row's `cols` f32 must be writable by the kernel that gets this view, and
    /// read by nobody but that kernel; of its inputs only those lie on it that it allows.
    pub unsafe fn from_raw(ptr: *mut f32, rows: usize, cols: usize, ld: usize) -> RowsMut<'a> {
        assert!(ld >= cols || rows <= 1, "rows overlap");
        RowsMut { ptr, rows, cols, ld, life: PhantomData }
    }

    /// `n` columns from `start` on: one part of a concatenation.
    pub fn columns(&mut self, start: usize, n: usize) -> RowsMut<'_> {
        assert!(start <= self.cols && n <= self.cols - start, "columns outside the matrix");
        RowsMut { ptr: self.ptr.wrapping_add(start), cols: n, ..*self }
    }

    /// `n` rows from `start` on.
    pub fn part(&mut self, start: usize, n: usize) -> RowsMut<'_> {
        assert!(start <= self.rows && n <= self.rows - start, "rows outside the matrix");
        RowsMut { ptr: self.row(start), rows: n, ..*self }
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Number of columns.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// The same matrix to read.
    pub(super) fn as_rows(&self) -> Rows<'_> {
        Rows { ptr: self.ptr, rows: self.rows, cols: self.cols, ld: self.ld, life: PhantomData }
    }

    /// f32 from one row to the next.
    pub(super) fn ld(&self) -> usize {
        self.ld
    }

    /// Where row `r` starts.
    #[inline(always)]
    pub(super) fn row(&self, r: usize) -> *mut f32 {
        self.ptr.wrapping_add(r * self.ld)
    }
}

fn check_fits(len: usize, rows: usize, cols: usize, ld: usize) {
    let need = if rows == 0 || cols == 0 { 0 } else { (rows - 1) * ld + cols };
    assert!(need <= len, "a matrix of {rows} x {cols} (stride {ld}) in a slice of {len}");
}
