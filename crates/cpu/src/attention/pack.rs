//! Packing of rows of one head for the f32 register tiles, with rotary rotation.
//!
//! Invariant: in every layout an element has the value that `Rotation::apply` computes: its bits do not depend on where it is
//! stored.

use super::{ROW, RotaryTables};
use crate::element::Element;
use crate::matmul::register_tile::PANEL;
use crate::simd::{LANES, Simd};
use crate::view::Rows;
use core::ops::Range;

/// Distance, in rows, by which rows of q, k or v are prefetched: rows of one head lie far apart in memory.
const AHEAD: usize = 16;

/// One head of one sequence in a matrix of packed sequences: row i is position i.
pub(super) struct HeadRows<'a, E = f32> {
    /// The whole matrix (T, heads hd).
    pub(super) x: Rows<'a, E>,
    /// First row of the sequence.
    pub(super) start: usize,
    /// First column of the head.
    pub(super) column: usize,
    /// Head dimension.
    pub(super) dim: usize,
}

// Not derived: a derived `Clone` would require `E: Clone`.
impl<E> Clone for HeadRows<'_, E> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<E> Copy for HeadRows<'_, E> {}

impl<E: Element> HeadRows<'_, E> {
    /// Pointer to row `i`; may be read only inside the sequence.
    #[inline(always)]
    pub(super) fn row(&self, i: usize) -> *const E {
        self.x.row(self.start + i).wrapping_add(self.column)
    }

    /// Prefetches the row `AHEAD` rows after row `i`, which need not exist.
    #[inline(always)]
    pub(super) fn prefetch<S: Simd>(&self, s: S, i: usize) {
        for j in (0..self.dim).step_by(LANES) {
            s.prefetch(self.row(i + AHEAD).wrapping_add(j).cast());
        }
    }
}

/// How the rows of a head are transformed: multiplied by `scale`, then rotated if there are tables.
#[derive(Clone, Copy)]
pub(super) struct Rotation<'a> {
    pub(super) tables: Option<RotaryTables<'a>>,
    pub(super) scale: f32,
}

impl Rotation<'_> {
    /// The identity.
    pub(super) const NONE: Rotation<'static> = Rotation { tables: None, scale: 1.0 };

    /// Writes scale * x[i], rotated to position i, to `to`; columns past the head, up to ROW, may be overwritten.
    ///
    /// # Safety
    /// Position i lies in the sequence and in the tables; `to` holds ROW f32.
    #[inline(always)]
    pub(super) unsafe fn apply<S: Simd, E: Element>(self, s: S, head: HeadRows<'_, E>, i: usize, to: *mut f32) {
        let hd = head.dim;
        let scale = s.splat(self.scale);
        head.prefetch(s, i);
        let x = head.row(i);
        // SAFETY: j + n stays in the row, or in its half and position i's row of the tables.
        unsafe {
            let Some(tables) = self.tables else {
                for j in (0..hd).step_by(LANES) {
                    let n = LANES.min(hd - j);
                    s.store(to.add(j), s.mul(E::load_n(s, x.add(j), n), scale));
                }
                return;
            };
            // Whole vectors are stored where the excess is overwritten later or lies past the head.
            let half = hd / 2;
            for j in (0..half).step_by(LANES) {
                let n = LANES.min(half - j);
                let cos = s.load_n(tables.cos.as_ptr().add(i * half + j), n);
                let sin = s.load_n(tables.sin.as_ptr().add(i * half + j), n);
                let a = s.mul(E::load_n(s, x.add(j), n), scale);
                let b = s.mul(E::load_n(s, x.add(half + j), n), scale);
                let low = s.sub(s.mul(a, cos), s.mul(b, sin));
                let high = s.add(s.mul(b, cos), s.mul(a, sin));
                if j == 0 {
                    s.store(to, low);
                } else {
                    s.store_n(to.add(j), low, n);
                }
                s.store(to.add(half + j), high);
            }
        }
    }

    /// Writes scale * `from` to `to`, rotated back: the gradient of `apply` at position i. `to` may equal `from`.
    ///
    /// # Safety
    /// Both hold `hd` f32; position i lies in the tables.
    #[inline(always)]
    pub(super) unsafe fn apply_transpose<S: Simd>(
        self,
        s: S,
        hd: usize,
        i: usize,
        from: *const f32,
        to: *mut f32,
    ) {
        let scale = s.splat(self.scale);
        // SAFETY: j + n stays in the row, or in its half and position i's row of the tables; both elements of a rotated
        // pair are read before either is written.
        unsafe {
            let Some(tables) = self.tables else {
                for j in (0..hd).step_by(LANES) {
                    let n = LANES.min(hd - j);
                    s.store_n(to.add(j), s.mul(s.load_n(from.add(j), n), scale), n);
                }
                return;
            };
            let half = hd / 2;
            for j in (0..half).step_by(LANES) {
                let n = LANES.min(half - j);
                let cos = s.load_n(tables.cos.as_ptr().add(i * half + j), n);
                let sin = s.load_n(tables.sin.as_ptr().add(i * half + j), n);
                let a = s.mul(s.load_n(from.add(j), n), scale);
                let b = s.mul(s.load_n(from.add(half + j), n), scale);
                s.store_n(to.add(j), s.add(s.mul(a, cos), s.mul(b, sin)), n);
                s.store_n(to.add(half + j), s.sub(s.mul(b, cos), s.mul(a, sin)), n);
            }
        }
    }

    /// Writes `positions`, at most `LANES`, with `apply` to rows of stride ROW, and zeros to the rows after them.
    ///
    /// # Safety
    /// As `apply`; `to` holds `LANES` rows.
    #[inline(always)]
    pub(super) unsafe fn gather<S: Simd, E: Element>(
        self,
        s: S,
        head: HeadRows<'_, E>,
        positions: Range<usize>,
        to: *mut f32,
    ) {
        for r in 0..LANES {
            let i = positions.start + r;
            // SAFETY: as the caller promises.
            unsafe {
                if i < positions.end {
                    self.apply(s, head, i, to.add(r * ROW));
                } else {
                    to.add(r * ROW).write_bytes(0, head.dim);
                }
            }
        }
    }
}

/// Transposes `LANES` rows written by `Rotation::gather` into columns `at..at + LANES` of panels of `hd` rows.
///
/// # Safety
/// `rows` are written; `panels` holds the panel of column `at`, which is a multiple of `LANES`.
#[inline(always)]
pub(super) unsafe fn transpose<S: Simd>(s: S, hd: usize, rows: *const f32, panels: *mut f32, at: usize) {
    let panel = panels.wrapping_add(at / PANEL * PANEL * hd + at % PANEL);
    for d in (0..hd).step_by(LANES) {
        let mut square = [s.splat(0.0); LANES];
        // SAFETY: rows are ROW long, more than `hd` rounded up to vectors; elements past the head are loaded but not
        // stored.
        unsafe {
            for (r, v) in square.iter_mut().enumerate() {
                *v = s.load(rows.add(r * ROW + d));
            }
            s.transpose(&mut square);
            for (i, &v) in square.iter().enumerate().take(hd - d) {
                s.store(panel.add((d + i) * PANEL), v);
            }
        }
    }
}

/// A range of rows of panels of `height` rows.
#[derive(Clone, Copy)]
pub(super) struct PanelRows {
    pub(super) first: usize,
    pub(super) count: usize,
    pub(super) height: usize,
}

/// Copies rows of stride ROW to the rows `to` of panels; columns past the head have unspecified contents.
///
/// # Safety
/// The rows are readable up to whole vectors; `panels` holds the panels of `hd` columns, of which `to` are rows.
#[inline(always)]
pub(super) unsafe fn copy<S: Simd>(s: S, hd: usize, rows: *const f32, panels: *mut f32, to: PanelRows) {
    for d in (0..hd).step_by(LANES) {
        // Column d lies in panel d / PANEL, which starts after that many panels of `height` rows.
        let panel = panels.wrapping_add(d / PANEL * PANEL * to.height + d % PANEL);
        for r in 0..to.count {
            // SAFETY: as the caller promises.
            unsafe { s.store(panel.add((to.first + r) * PANEL), s.load(rows.add(r * ROW + d))) };
        }
    }
}
