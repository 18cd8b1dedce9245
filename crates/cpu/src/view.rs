//! Views of matrices in memory: a pointer, a size and a row stride. Elements are f32 unless stated otherwise.
//!
//! Invariant: the owner of a view may access exactly its rows x cols elements during its lifetime. Kernels access
//! them through raw pointers only, so that an output view may be exactly an input view where the kernel's
//! documentation allows it.

use crate::element::Element;
use core::marker::PhantomData;

/// A readable matrix: `rows` x `cols` elements, `ld` elements from one row to the next.
pub struct Rows<'a, E = f32> {
    ptr: *const E,
    rows: usize,
    cols: usize,
    ld: usize,
    life: PhantomData<&'a [E]>,
}

/// A writable matrix. Not `Copy`: while a kernel has it, no other code writes its elements.
pub struct RowsMut<'a, E = f32> {
    ptr: *mut E,
    rows: usize,
    cols: usize,
    ld: usize,
    life: PhantomData<&'a mut [E]>,
}

// Not derived: a derived impl would require `E: Clone`.
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
// SAFETY: the threads of a kernel write disjoint elements.
unsafe impl<E: Element> Send for RowsMut<'_, E> {}
// SAFETY: as above.
unsafe impl<E: Element> Sync for RowsMut<'_, E> {}

impl<'a, E: Element> Rows<'a, E> {
    /// A view of the matrix that starts at `data[0]`. Panics if it does not fit or rows overlap.
    pub fn new(data: &'a [E], rows: usize, cols: usize, ld: usize) -> Rows<'a, E> {
        check_fits(data.len(), rows, cols, ld);
        // SAFETY: it fits in the borrowed slice.
        unsafe { Rows::from_raw(data.as_ptr(), rows, cols, ld) }
    }

    /// A view of memory without a borrowed slice, for memory that an output may share.
    ///
    /// # Safety
    /// For `'a`, each row's `cols` elements must be readable, and must not be written except by a kernel that allows
    /// an output there.
    pub unsafe fn from_raw(ptr: *const E, rows: usize, cols: usize, ld: usize) -> Rows<'a, E> {
        assert!(ld >= cols || rows <= 1, "rows overlap");
        Rows { ptr, rows, cols, ld, life: PhantomData }
    }

    /// The `n` columns from `start` on, for example q of a fused (T, 3D).
    pub fn columns(self, start: usize, n: usize) -> Rows<'a, E> {
        assert!(start <= self.cols && n <= self.cols - start, "columns outside the matrix");
        // `wrapping_add`, because an empty matrix may have any pointer.
        Rows { ptr: self.ptr.wrapping_add(start), cols: n, ..self }
    }

    /// The `n` rows from `start` on, for example the rows of one expert.
    pub fn part(self, start: usize, n: usize) -> Rows<'a, E> {
        assert!(start <= self.rows && n <= self.rows - start, "rows outside the matrix");
        Rows { ptr: self.row(start), rows: n, ..self }
    }

    /// The same elements as rows of `1 / heads` of the columns: a row for each head. Panics if rows are not adjacent.
    pub(super) fn by_heads(self, heads: usize) -> Rows<'a, E> {
        let cols = head_columns(self.cols, self.ld, heads);
        Rows { rows: self.rows * heads, cols, ld: self.ld / heads, ..self }
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

    /// Address of row `r`. May be called with any `r`, but read only inside the matrix.
    #[inline(always)]
    pub(super) fn row(self, r: usize) -> *const E {
        self.ptr.wrapping_add(r * self.ld)
    }
}

impl<'a, E: Element> RowsMut<'a, E> {
    /// A view of the matrix that starts at `data[0]`. Panics if it does not fit or rows overlap.
    pub fn new(data: &'a mut [E], rows: usize, cols: usize, ld: usize) -> RowsMut<'a, E> {
        check_fits(data.len(), rows, cols, ld);
        // SAFETY: it fits in the slice, which is borrowed for `'a`.
        unsafe { RowsMut::from_raw(data.as_mut_ptr(), rows, cols, ld) }
    }

    /// A view of memory without a borrowed slice.
    ///
    /// # Safety
    /// For `'a`, each row's `cols` elements must be writable by the kernel that receives this view, and accessed by
    /// no other code; the kernel's inputs may overlap it only as the kernel allows.
    pub unsafe fn from_raw(ptr: *mut E, rows: usize, cols: usize, ld: usize) -> RowsMut<'a, E> {
        assert!(ld >= cols || rows <= 1, "rows overlap");
        RowsMut { ptr, rows, cols, ld, life: PhantomData }
    }

    /// The `n` columns from `start` on, for example one operand of a concatenation.
    pub fn columns(&mut self, start: usize, n: usize) -> RowsMut<'_, E> {
        assert!(start <= self.cols && n <= self.cols - start, "columns outside the matrix");
        RowsMut { ptr: self.ptr.wrapping_add(start), cols: n, ..*self }
    }

    /// The `n` rows from `start` on.
    pub fn part(&mut self, start: usize, n: usize) -> RowsMut<'_, E> {
        assert!(start <= self.rows && n <= self.rows - start, "rows outside the matrix");
        RowsMut { ptr: self.row(start), rows: n, ..*self }
    }

    /// The same elements as rows of `1 / heads` of the columns: a row for each head. Panics if rows are not adjacent.
    pub(super) fn by_heads(self, heads: usize) -> RowsMut<'a, E> {
        let cols = head_columns(self.cols, self.ld, heads);
        RowsMut { rows: self.rows * heads, cols, ld: self.ld / heads, ..self }
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Number of columns.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// A read-only view of the same matrix.
    pub(super) fn as_rows(&self) -> Rows<'_, E> {
        Rows { ptr: self.ptr, rows: self.rows, cols: self.cols, ld: self.ld, life: PhantomData }
    }

    /// Elements from one row to the next.
    pub(super) fn ld(&self) -> usize {
        self.ld
    }

    /// Address of row `r`. May be called with any `r`, but accessed only inside the matrix.
    #[inline(always)]
    pub(super) fn row(&self, r: usize) -> *mut E {
        self.ptr.wrapping_add(r * self.ld)
    }
}

/// Columns of one of `heads` heads of a row. Panics if there are gaps between rows, or the heads differ in width.
fn head_columns(cols: usize, ld: usize, heads: usize) -> usize {
    assert!(
        heads == 1 || (ld == cols && heads > 0 && cols.is_multiple_of(heads)),
        "{cols} columns, {heads} heads"
    );
    cols / heads
}

/// Panics if a matrix of this size and stride does not fit in a slice of `len` elements.
fn check_fits(len: usize, rows: usize, cols: usize, ld: usize) {
    let need = if rows == 0 || cols == 0 { 0 } else { (rows - 1) * ld + cols };
    assert!(need <= len, "a matrix of {rows} x {cols} (stride {ld}) in a slice of {len}");
}
