//! Packing of matmul operands for the register tile: rows with consecutive k, and panels with 32 consecutive columns
//! for each k. Invariant: packing copies values unchanged, from either storage order, and fills with zeros past the
//! operand.

use super::{Operand, STRIDE};
use crate::matmul::register_tile::{PANEL, PrefetchPlan};
use crate::simd::{LANES, Simd};
use crate::view::Rows;
use core::ops::Range;

/// Packs the given rows and k of `a` as rows of stride `STRIDE`, with zero rows up to whole tiles.
///
/// # Safety
/// The rows and `ks` lie in `a`; `to` has space for the rows in whole tiles, and for `ks` in whole vectors.
#[inline(always)]
pub(super) unsafe fn rows<S: Simd>(s: S, a: Operand<'_>, rows: &Range<usize>, ks: &Range<usize>, to: *mut f32) {
    let height = rows.len().next_multiple_of(S::ROWS);
    match a {
        Operand::Stored(x) => {
            for r in 0..height {
                let to = to.wrapping_add(r * STRIDE);
                // SAFETY: as the caller promises.
                unsafe {
                    match r < rows.len() {
                        true => {
                            to.copy_from_nonoverlapping(x.row(rows.start + r).wrapping_add(ks.start), ks.len())
                        }
                        false => to.write_bytes(0, ks.len()),
                    }
                }
            }
        }
        Operand::Transposed(x) => {
            for k in ks.clone().step_by(LANES) {
                for r in (0..height).step_by(LANES) {
                    let columns = rows.len().saturating_sub(r).min(LANES);
                    let at = (k..ks.end.min(k + LANES), rows.start + r);
                    let to = to.wrapping_add(r * STRIDE + k - ks.start);
                    for next in 0..LANES {
                        s.prefetch(x.row(k + LANES + next).wrapping_add(rows.start + r));
                    }
                    // SAFETY: as the caller promises; a row's last vector ends inside its STRIDE.
                    unsafe { square(s, x, at, columns, to, STRIDE, (height - r).min(LANES)) };
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
    b: Operand<'_>,
    columns: &Range<usize>,
    ks: &Range<usize>,
    to: *mut f32,
) {
    for half in [0, LANES] {
        let width = columns.len().saturating_sub(half).min(LANES);
        let start = columns.start + half;
        let to = to.wrapping_add(half);
        match b {
            Operand::Stored(x) => {
                for (i, k) in ks.clone().enumerate() {
                    // SAFETY: as the caller promises.
                    unsafe {
                        s.store(to.add(i * PANEL), s.load_n(x.row(k).wrapping_add(start), width));
                    }
                }
            }
            Operand::Transposed(x) => {
                for k in ks.clone().step_by(LANES) {
                    let deep = (ks.end - k).min(LANES);
                    let to = to.wrapping_add((k - ks.start) * PANEL);
                    for r in start..start + width {
                        s.prefetch(x.row(r).wrapping_add(k + 2 * LANES));
                    }
                    // SAFETY: as the caller promises.
                    unsafe { square(s, x, (start..start + width, k), deep, to, PANEL, deep) };
                }
            }
        }
    }
}

/// Transposes a block of at most 16 x 16: writes `most` rows of sixteen, `ld` elements apart, from the rows `at.0` of
/// x from column `at.1` on. Missing rows (fewer than sixteen) and columns (past `columns`) are zero.
///
/// # Safety
/// These rows and columns lie in x; `to` has space for `most` rows of sixteen.
#[inline(always)]
unsafe fn square<S: Simd>(
    s: S,
    x: Rows<'_>,
    at: (Range<usize>, usize),
    columns: usize,
    to: *mut f32,
    ld: usize,
    most: usize,
) {
    let mut square = [s.splat(0.0); LANES];
    for (v, r) in square.iter_mut().zip(at.0) {
        // SAFETY: as the caller promises.
        *v = unsafe { s.load_n(x.row(r).wrapping_add(at.1), columns) };
    }
    s.transpose(&mut square);
    for (i, &v) in square.iter().enumerate().take(most) {
        // SAFETY: as the caller promises.
        unsafe { s.store(to.add(i * ld), v) };
    }
}

/// Prefetch addresses of the memory that a panel of b will be packed from: share `part.0` of `part.1`.
#[inline(always)]
pub(super) fn prefetch_plan(
    b: Operand<'_>,
    columns: &Range<usize>,
    ks: &Range<usize>,
    part: (usize, usize),
) -> PrefetchPlan {
    let (x, rows, across) = match b {
        Operand::Stored(x) => (x, ks, columns),
        Operand::Transposed(x) => (x, columns, ks),
    };
    let share = rows.len().div_ceil(part.1);
    let start = part.0 * share;
    let count = rows.len().saturating_sub(start).min(share);
    PrefetchPlan {
        at: x.row(rows.start + start).wrapping_add(across.start),
        step: x.ld(),
        count,
        hop: LANES,
        lines: count * across.len().div_ceil(LANES),
    }
}
