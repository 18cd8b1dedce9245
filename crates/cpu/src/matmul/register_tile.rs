//! The f32 register tile that all matmuls here are built from: a strip of rows times a panel.
//!
//! Invariant: each element is one chain of `fma` over k in ascending order, with the initial value that `Begin`
//! gives. The tile's height and width only decide which elements are computed together, so they change no bit.

use crate::simd::{LANES, Simd};

/// Columns of a panel: of packed weights, of transposed keys, or of values.
pub const PANEL: usize = 32;

/// Prefetch distance in rows of a panel. Panels stream from L2, and without a prefetch the tile runs at two thirds of
/// its speed from L1 (measured with distances from 4 to 32; 8 and 12 are best).
const AHEAD: usize = 8;

/// Cache lines to prefetch into L2, one with each k of a tile: spread out like this, the prefetches do not delay the
/// tile's own loads as a burst would.
#[derive(Clone, Copy)]
pub(crate) struct PrefetchPlan {
    /// Address of the first line.
    pub(crate) at: *const f32,
    /// Distance between consecutive lines of a group, in f32.
    pub(crate) step: usize,
    /// Number of lines of a group, usually the number of rows.
    pub(crate) count: usize,
    /// Distance from the start of one group to the start of the next, in f32.
    pub(crate) hop: usize,
    /// Total number of lines.
    pub(crate) lines: usize,
}

/// Initial value of a strip's accumulators.
#[derive(Clone, Copy)]
pub(crate) enum Begin {
    /// Zero.
    Zero,
    /// The value in the output.
    Sums,
    /// The value in the output, row r multiplied by the r-th factor.
    Scaled(*const f32),
}

/// Computes `c[r][j] = begin + sum over k of a[r * LDA + k] * b[k * PANEL + j]` for `shape.0` rows, at most
/// `S::ROWS`, and `shape.1` (1 or 2) vectors of columns. Rows past `shape.0`, up to the next tile height (even, at
/// most `S::ROWS`), are computed and stored as well.
///
/// # Safety
/// With that tile height `height`: `a` has `height` rows of `depth` f32 at stride `LDA`, `c` has `height` rows of the
/// columns at stride `ldc`, `Scaled` has `height` factors; `b` has `depth` rows of `PANEL`. The feeds may contain any
/// address.
#[inline(always)]
#[allow(clippy::too_many_arguments)] // three matrices, their sizes, and how to begin
pub(crate) unsafe fn strip<S: Simd, const LDA: usize, const FEEDS: usize>(
    s: S,
    shape: (usize, usize),
    depth: usize,
    a: *const f32,
    b: *const f32,
    c: *mut f32,
    ldc: usize,
    begin: Begin,
    feeds: &[PrefetchPlan; FEEDS],
) {
    let (rows, vecs) = shape;
    // SAFETY: the caller's promise; each arm takes the lowest tile of at least `rows` rows.
    unsafe {
        if S::VECS == 2 && vecs == 2 {
            match rows {
                9.. => tile::<S, 14, 2, LDA, FEEDS>(s, depth, a, b, c, ldc, begin, feeds),
                5.. => tile::<S, 8, 2, LDA, FEEDS>(s, depth, a, b, c, ldc, begin, feeds),
                3.. => tile::<S, 4, 2, LDA, FEEDS>(s, depth, a, b, c, ldc, begin, feeds),
                _ => tile::<S, 2, 2, LDA, FEEDS>(s, depth, a, b, c, ldc, begin, feeds),
            }
            return;
        }
        for v in 0..vecs {
            let b = b.wrapping_add(v * LANES);
            let c = c.wrapping_add(v * LANES);
            match rows {
                9.. if S::ROWS == 14 => tile::<S, 14, 1, LDA, FEEDS>(s, depth, a, b, c, ldc, begin, feeds),
                7.. if S::ROWS == 14 => tile::<S, 8, 1, LDA, FEEDS>(s, depth, a, b, c, ldc, begin, feeds),
                5.. if S::ROWS >= 6 => tile::<S, 6, 1, LDA, FEEDS>(s, depth, a, b, c, ldc, begin, feeds),
                3.. if S::ROWS >= 4 => tile::<S, 4, 1, LDA, FEEDS>(s, depth, a, b, c, ldc, begin, feeds),
                _ => tile::<S, 2, 1, LDA, FEEDS>(s, depth, a, b, c, ldc, begin, feeds),
            }
        }
    }
}

/// Computes one tile of `ROWS` rows and `VECS` vectors with all accumulators in registers. `LDA` is a constant, so
/// that the addresses of all rows of `a` are one register plus displacements.
///
/// # Safety
/// As `strip`, for `ROWS` rows.
#[inline(always)]
#[allow(clippy::too_many_arguments)] // as `strip`
unsafe fn tile<S: Simd, const ROWS: usize, const VECS: usize, const LDA: usize, const FEEDS: usize>(
    s: S,
    depth: usize,
    a: *const f32,
    b: *const f32,
    c: *mut f32,
    ldc: usize,
    begin: Begin,
    feeds: &[PrefetchPlan; FEEDS],
) {
    let mut sums = [[s.splat(0.0); VECS]; ROWS];
    // SAFETY: `k < depth`, `r < ROWS`, `v < VECS`: memory that the caller promises.
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
        let mut k = 0;
        for feed in feeds {
            let mut line = feed.at;
            let end = depth.min(k + feed.lines);
            while k < end {
                let mut ask = line;
                for _ in 0..feed.count.min(end - k) {
                    s.prefetch_far(ask);
                    ask = ask.wrapping_add(feed.step);
                    multiply_add::<S, ROWS, VECS, LDA>(s, &mut sums, a.add(k), b.add(k * PANEL));
                    k += 1;
                }
                line = line.wrapping_add(feed.hop);
            }
        }
        while k < depth {
            multiply_add::<S, ROWS, VECS, LDA>(s, &mut sums, a.add(k), b.add(k * PANEL));
            k += 1;
        }
        for (r, sums) in sums.iter().enumerate() {
            for (v, &sum) in sums.iter().enumerate() {
                s.store(c.add(r * ldc + v * LANES), sum);
            }
        }
    }
}

/// Adds the products of one k: a column of `a` times a row of the panel. `zip` is avoided: where it is not optimized
/// across crates it is a call, and the accumulators are spilled from registers.
///
/// # Safety
/// As `tile`, at that k.
#[inline(always)]
unsafe fn multiply_add<S: Simd, const ROWS: usize, const VECS: usize, const LDA: usize>(
    s: S,
    sums: &mut [[S::V; VECS]; ROWS],
    a: *const f32,
    b: *const f32,
) {
    let mut right = [s.splat(0.0); VECS];
    for (v, right) in right.iter_mut().enumerate() {
        s.prefetch(b.wrapping_add(AHEAD * PANEL + v * LANES));
        // SAFETY: a vector of the panel's row.
        *right = unsafe { s.load(b.add(v * LANES)) };
    }
    for (r, sums) in sums.iter_mut().enumerate() {
        // SAFETY: row r of a.
        let left = s.splat(unsafe { *a.add(r * LDA) });
        for (v, sum) in sums.iter_mut().enumerate() {
            *sum = s.fma(left, right[v], *sum);
        }
    }
}
