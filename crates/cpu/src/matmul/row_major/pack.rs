//! Packing of matmul operands for the register tile: rows with consecutive k, and panels with 32 consecutive columns
//! for each k. Invariant: packing copies values unchanged, from either storage order, and fills with zeros past the
//! operand.

use super::{Factor, STRIDE};
use crate::matmul::register_tile::{PANEL, PrefetchPlan};
use crate::simd::{LANES, Simd};
use crate::view::Rows;
use core::ops::Range;

/// Packs the given rows and k of `a` as rows of stride `STRIDE`, with zero rows up to whole tiles.
///
/// # Safety
/// The rows and `ks` lie in `a`; `to` has space for the rows in whole tiles, and for `ks` in whole vectors.
#[inline(always)]
pub(super) unsafe fn rows<S: Simd>(s: S, a: Factor<'_>, rows: &Range<usize>, ks: &Range<usize>, to: *mut f32) {
    let height = rows.len().next_multiple_of(S::ROWS);
    match a {
        Factor::Stored(x) => {
            for r in 0..height {
                let to = to.wrapping_add(r * STRIDE);
                // SAFETY: as the caller promises.
                unsafe {
                    if r < rows.len() {
                        to.copy_from_nonoverlapping(x.row(rows.start + r).wrapping_add(ks.start), ks.len());
                    } else {
                        to.write_bytes(0, ks.len());
                    }
                }
            }
        }
        Factor::Transposed(x) => {
            for k in ks.clone().step_by(LANES) {
                for r in (0..height).step_by(LANES) {
                    let source = Square {
                        rows: k..ks.end.min(k + LANES),
                        column: rows.start + r,
                        columns: rows.len().saturating_sub(r).min(LANES),
                    };
                    let at = to.wrapping_add(r * STRIDE + k - ks.start);
                    let to = PackedRows { at, ld: STRIDE, count: (height - r).min(LANES) };
                    for next in 0..LANES {
                        s.prefetch(x.row(k + LANES + next).wrapping_add(rows.start + r));
                    }
                    // SAFETY: as the caller promises; a row's last vector ends inside its STRIDE.
                    unsafe { transpose(s, x, source, to) };
                }
            }
        }
    }
}

/// Packs the given columns and k of `b` as rows of `PANEL`, with zeros past the last column.
///
/// # Safety
/// The columns, at most PANEL, and `ks` lie in `b`; `to` has space for `ks.len()` rows of PANEL.
#[inline(always)]
pub(super) unsafe fn panel<S: Simd>(
    s: S,
    b: Factor<'_>,
    columns: &Range<usize>,
    ks: &Range<usize>,
    to: *mut f32,
) {
    for half in [0, LANES] {
        let width = columns.len().saturating_sub(half).min(LANES);
        let start = columns.start + half;
        let to = to.wrapping_add(half);
        match b {
            Factor::Stored(x) => {
                for (i, k) in ks.clone().enumerate() {
                    // SAFETY: as the caller promises.
                    unsafe {
                        s.store(to.add(i * PANEL), s.load_n(x.row(k).wrapping_add(start), width));
                    }
                }
            }
            Factor::Transposed(x) => {
                for k in ks.clone().step_by(LANES) {
                    let deep = (ks.end - k).min(LANES);
                    let to = to.wrapping_add((k - ks.start) * PANEL);
                    for r in start..start + width {
                        s.prefetch(x.row(r).wrapping_add(k + 2 * LANES));
                    }
                    let source = Square { rows: start..start + width, column: k, columns: deep };
                    // SAFETY: as the caller promises.
                    unsafe { transpose(s, x, source, PackedRows { at: to, ld: PANEL, count: deep }) };
                }
            }
        }
    }
}

/// At most 16 x 16 elements of a matrix.
struct Square {
    rows: Range<usize>,
    /// First column, and number of columns.
    column: usize,
    columns: usize,
}

/// `count` rows of sixteen f32, `ld` elements apart.
struct PackedRows {
    at: *mut f32,
    ld: usize,
    count: usize,
}

/// Transposes a square of x. Missing rows (fewer than sixteen) and columns are zero.
///
/// # Safety
/// The square lies in x; the packed rows are writable.
#[inline(always)]
unsafe fn transpose<S: Simd>(s: S, x: Rows<'_>, source: Square, to: PackedRows) {
    let mut square = [s.splat(0.0); LANES];
    for (v, r) in square.iter_mut().zip(source.rows) {
        // SAFETY: as the caller promises.
        *v = unsafe { s.load_n(x.row(r).wrapping_add(source.column), source.columns) };
    }
    s.transpose(&mut square);
    for (i, &v) in square.iter().enumerate().take(to.count) {
        // SAFETY: as the caller promises.
        unsafe { s.store(to.at.add(i * to.ld), v) };
    }
}

/// Prefetch addresses of the memory that a panel of b will be packed from: the share of strip number `strip` of
/// `strips`.
#[inline(always)]
pub(super) fn prefetch_plan(
    b: Factor<'_>,
    columns: &Range<usize>,
    ks: &Range<usize>,
    strip: usize,
    strips: usize,
) -> PrefetchPlan {
    let (x, rows, across) = match b {
        Factor::Stored(x) => (x, ks, columns),
        Factor::Transposed(x) => (x, columns, ks),
    };
    let share = rows.len().div_ceil(strips);
    let start = strip * share;
    let count = rows.len().saturating_sub(start).min(share);
    PrefetchPlan {
        at: x.row(rows.start + start).wrapping_add(across.start),
        step: x.ld(),
        count,
        hop: LANES,
        lines: count * across.len().div_ceil(LANES),
    }
}
