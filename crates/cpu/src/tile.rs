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

/// Cache lines to ask for, one with each k of a tile: what is needed soon is then in L2 without a burst that
/// the tile's own loads would have to wait behind.
#[derive(Clone, Copy)]
pub(super) struct Feed {
    /// The first.
    pub(super) at: *const f32,
    /// f32 from one to the next, `count` times;
    pub(super) step: usize,
    /// as many lines as rows, usually.
    pub(super) count: usize,
    /// f32 from where these began to where the next `count` begin.
    pub(super) hop: usize,
    /// All of them.
    pub(super) lines: usize,
}

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
/// `depth` rows of `PANEL`. The feeds may name any address.
#[inline(always)]
#[allow(clippy::too_many_arguments)] // three matrices, their sizes, and how to begin
pub(super) unsafe fn strip<S: Simd, const LDA: usize, const FEEDS: usize>(
    s: S,
    shape: (usize, usize),
    depth: usize,
    a: *const f32,
    b: *const f32,
    c: *mut f32,
    ldc: usize,
    begin: Begin,
    feeds: &[Feed; FEEDS],
) {
    let (rows, vecs) = shape;
    // SAFETY: handed on; each tile is the lowest of at least `rows` rows.
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
            let (b, c) = (b.wrapping_add(v * LANES), c.wrapping_add(v * LANES));
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

/// One tile of `ROWS` rows and `VECS` vectors, all sums in registers. `LDA` is a constant so
/// that all rows of `a` are one register plus displacements.
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
    feeds: &[Feed; FEEDS],
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

/// One k: a column of `a` times a row of the panel. (No `zip`: unless optimized across crates it is a call, and the sums
/// leave their registers.)
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
