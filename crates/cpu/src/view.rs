//! Views of matrices in memory, of f32 unless said otherwise: a pointer, a size and a row stride.
//!
//! Invariant: whoever holds a view may touch exactly its rows x cols elements while its
//! lifetime lasts. Kernels go through raw pointers only, so that an output view may lie exactly
//! on an input view where the kernel's documentation allows it.

use super::element::Element;
use core::marker::PhantomData;

/// A readable matrix: `rows` x `cols` elements, `ld` elements from one row to the next.
pub struct Rows<'a, E = f32> {
    ptr: *const E,
    rows: usize,
    cols: usize,
    ld: usize,
    life: PhantomData<&'a [E]>,
}

/// A writable matrix. Not `Copy`: while a kernel has it, nobody else writes there.
pub struct RowsMut<'a, E = f32> {
    ptr: *mut E,
    rows: usize,
    cols: usize,
    ld: usize,
    life: PhantomData<&'a mut [E]>,
}

// Derived, it would ask the same of the element.
impl<E> Clone for Rows<'_, E> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<E> Copy for Rows<'_, E> {}

// SAFETY: a `Rows` is a shared borrow of plain numbers.
unsafe impl<E: Element> Send for Rows<'_, E> {}
// SAFETY: as above; it has no interior state.
unsafe impl<E: Element> Sync for Rows<'_, E> {}
// SAFETY: the kernels write disjoint elements from their threads.
unsafe impl<E: Element> Send for RowsMut<'_, E> {}
// SAFETY: as above.
unsafe impl<E: Element> Sync for RowsMut<'_, E> {}

impl<'a, E: Element> Rows<'a, E> {
    /// The matrix that starts at `data[0]`. Panics if it does not fit or rows overlap.
    pub fn new(data: &'a [E], rows: usize, cols: usize, ld: usize) -> Rows<'a, E> {
        check_fits(data.len(), rows, cols, ld);
        // SAFETY: it fits in the borrowed slice.
        unsafe { Rows::from_raw(data.as_ptr(), rows, cols, ld) }
    }

    /// A view without a slice, for memory that an output may lie on as well.
    ///
    /// # Safety
    /// For `'a`, each row's `cols` elements must be readable, and written by nobody but a kernel
    /// that allows it.
    pub unsafe fn from_raw(ptr: *const E, rows: usize, cols: usize, ld: usize) -> Rows<'a, E> {
        assert!(ld >= cols || rows <= 1, "rows overlap");
        Rows { ptr, rows, cols, ld, life: PhantomData }
    }

    /// `n` columns from `start` on, for example q out of a fused (T, 3D).
    pub fn columns(self, start: usize, n: usize) -> Rows<'a, E> {
        assert!(start <= self.cols && n <= self.cols - start, "columns outside the matrix");
        // `wrapping_add`: an empty matrix may have any pointer.
        Rows { ptr: self.ptr.wrapping_add(start), cols: n, ..self }
    }

    /// `n` rows from `start` on, for example those of one expert.
    pub fn part(self, start: usize, n: usize) -> Rows<'a, E> {
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

    /// Elements from one row to the next.
    pub(super) fn ld(self) -> usize {
        self.ld
    }

    /// Where row `r` starts. May be called with any `r`; read only inside the matrix.
    #[inline(always)]
    pub(super) fn row(self, r: usize) -> *const E {
        self.ptr.wrapping_add(r * self.ld)
    }
}

impl<'a, E: Element> RowsMut<'a, E> {
    /// The matrix that starts at `data[0]`. Panics if it does not fit or rows overlap.
    pub fn new(data: &'a mut [E], rows: usize, cols: usize, ld: usize) -> RowsMut<'a, E> {
        check_fits(data.len(), rows, cols, ld);
        // SAFETY: it fits in the slice, which is borrowed for `'a`.
        unsafe { RowsMut::from_raw(data.as_mut_ptr(), rows, cols, ld) }
    }

    /// A view without a slice.
    ///
    /// # Safety
    /// For `'a`, each row's `cols` elements must be writable by the kernel that gets this view, and
    /// read by nobody but that kernel; of its inputs only those lie on it that it allows.
    pub unsafe fn from_raw(ptr: *mut E, rows: usize, cols: usize, ld: usize) -> RowsMut<'a, E> {
        assert!(ld >= cols || rows <= 1, "rows overlap");
        RowsMut { ptr, rows, cols, ld, life: PhantomData }
    }

    /// `n` columns from `start` on: one part of a concatenation.
    pub fn columns(&mut self, start: usize, n: usize) -> RowsMut<'_, E> {
        assert!(start <= self.cols && n <= self.cols - start, "columns outside the matrix");
        RowsMut { ptr: self.ptr.wrapping_add(start), cols: n, ..*self }
    }

    /// `n` rows from `start` on.
    pub fn part(&mut self, start: usize, n: usize) -> RowsMut<'_, E> {
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
    pub(super) fn as_rows(&self) -> Rows<'_, E> {
        Rows { ptr: self.ptr, rows: self.rows, cols: self.cols, ld: self.ld, life: PhantomData }
    }

    /// Elements from one row to the next.
    pub(super) fn ld(&self) -> usize {
        self.ld
    }

    /// Where row `r` starts.
    #[inline(always)]
    pub(super) fn row(&self, r: usize) -> *mut E {
        self.ptr.wrapping_add(r * self.ld)
    }
}

fn check_fits(len: usize, rows: usize, cols: usize, ld: usize) {
    let need = if rows == 0 || cols == 0 { 0 } else { (rows - 1) * ld + cols };
    assert!(need <= len, "a matrix of {rows} x {cols} (stride {ld}) in a slice of {len}");
}
