//! The register tile that every matrix product here is made of: a strip of rows times a panel.
//!
//! Invariant: each element is one chain of `fma` over k in ascending order, begun as `Begin`
//! says. The tile's height and width only say which elements are computed together, so they
//! change no bit.

use super::simd::{LANES, Simd};

/// Columns of a panel: of packed weights, of transposed keys, of values.
pub const PANEL: usize = 32;

/// How many rows of a panel ahead of its use a line is asked for: panels stream from L2, and without asking
/// the tile runs at two thirds of what it does from L1 (measured at 4 to 32; 8 and 12 are best).
const AHEAD: usize = 8;

/// What the sums of a strip begin with.
#[derive(Clone, Copy)]
pub(super) enum Begin {
    /// Zero.
    Zero,
    /// What stands in the output.
    Sums,
    /// What stands in the output, row r times the r-th factor.
    Scaled(*const f32),
}

/// `c[r][j] = begin + sum over k of a[r * LDA + k] * b[k * PANEL + j]`, for `shape.0` rows, at
/// most `S::ROWS`, and `shape.1` (1 or 2) vectors of columns. Up to the next tile height (even,
/// at most `S::ROWS`), rows past `shape.0` are computed and stored as well.
///
/// # Safety
/// With `height` that tile height: `a` has `height` rows of `depth` f32 at stride `LDA`, `c`
/// has `height` rows of the columns at stride `ldc`, `Scaled` has `height` factors; `b` has
/// `depth` rows of `PANEL`.
#[inline(always)]
#[allow(clippy::too_many_arguments)] // three matrices, their sizes, and how to begin
pub(super) unsafe fn strip<S: Simd, const LDA: usize>(
    s: S,
    shape: (usize, usize),
    depth: usize,
    a: *const f32,
    b: *const f32,
    c: *mut f32,
    ldc: usize,
    begin: Begin,
) {
    let (rows, vecs) = shape;
    // SAFETY: handed on; each tile is the lowest of at least `rows` rows.
    unsafe {
        if S::VECS == 2 && vecs == 2 {
            match rows {
                9.. => tile::<S, 14, 2, LDA>(s, depth, a, b, c, ldc, begin),
                5.. => tile::<S, 8, 2, LDA>(s, depth, a, b, c, ldc, begin),
                3.. => tile::<S, 4, 2, LDA>(s, depth, a, b, c, ldc, begin),
                _ => tile::<S, 2, 2, LDA>(s, depth, a, b, c, ldc, begin),
            }
            return;
        }
        for v in 0..vecs {
            let (b, c) = (b.wrapping_add(v * LANES), c.wrapping_add(v * LANES));
            match rows {
                9.. if S::ROWS == 14 => tile::<S, 14, 1, LDA>(s, depth, a, b, c, ldc, begin),
                7.. if S::ROWS == 14 => tile::<S, 8, 1, LDA>(s, depth, a, b, c, ldc, begin),
                5.. if S::ROWS >= 6 => tile::<S, 6, 1, LDA>(s, depth, a, b, c, ldc, begin),
                3.. if S::ROWS >= 4 => tile::<S, 4, 1, LDA>(s, depth, a, b, c, ldc, begin),
                _ => tile::<S, 2, 1, LDA>(s, depth, a, b, c, ldc, begin),
            }
        }
    }
}

/// One tile of `ROWS` rows and `VECS` vectors, all sums in registers. `LDA` is a constant so
/// that all rows of `a` are one register plus displacements.
///
/// # Safety
/// As `strip`, for `ROWS` rows.
#[inline(always)]
unsafe fn tile<S: Simd, const ROWS: usize, const VECS: usize, const LDA: usize>(
    s: S,
    depth: usize,
    a: *const f32,
    b: *const f32,
    c: *mut f32,
    ldc: usize,
    begin: Begin,
) {
    let mut sums = [[s.splat(0.0); VECS]; ROWS];
    // SAFETY: `k < depth`, `r < ROWS`, `v < VECS`: where the caller promises memory.
    unsafe {
        if !matches!(begin, Begin::Zero) {
            for (r, sums) in sums.iter_mut().enumerate() {
                for (v, sum) in sums.iter_mut().enumerate() {
                    *sum = s.load(c.add(r * ldc + v * LANES));
                    if let Begin::Scaled(factors) = begin {
                        *sum = s.mul(*sum, s.splat(*factors.add(r)));
                    }
                }
            }
        }
        for k in 0..depth {
            let mut right = [s.splat(0.0); VECS];
            for (v, right) in right.iter_mut().enumerate() {
                s.prefetch(b.wrapping_add((k + AHEAD) * PANEL + v * LANES));
                *right = s.load(b.add(k * PANEL + v * LANES));
            }
            for (r, sums) in sums.iter_mut().enumerate() {
                let left = s.splat(*a.add(r * LDA + k));
                for (sum, &right) in sums.iter_mut().zip(&right) {
                    *sum = s.fma(left, right, *sum);
                }
            }
        }
        for (r, sums) in sums.iter().enumerate() {
            for (v, &sum) in sums.iter().enumerate() {
                s.store(c.add(r * ldc + v * LANES), sum);
            }
        }
    }
}
