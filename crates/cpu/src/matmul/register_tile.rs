//! The f32 register tile that all matmuls here are built from: a strip of rows times a panel.
//!
//! Invariant: each element is one chain of `fma` over k in ascending order, with the initial value that
//! `InitialSums` gives. The tile's height and width only decide which elements are computed together, so they change no bit.

use crate::simd::{LANES, Simd};

/// Columns of a panel: of packed weights, of transposed keys, or of values.
pub const PANEL: usize = 32;

/// Prefetch distance in rows of a panel. Panels stream from L2, and without a prefetch the tile runs at two thirds of
/// its speed from L1 (measured with distances from 4 to 32; 8 and 12 are best).
const AHEAD: usize = 8;

/// Cache lines to prefetch into L2 while a tile is computed, one with each k.
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
pub(crate) enum InitialSums {
    /// Zero.
    Zero,
    /// The value in the output.
    Stored,
    /// The value in the output, row r multiplied by the r-th factor.
    Scaled(*const f32),
}

/// Operands of one strip: `c[r][j] = begin + sum over k of a[r][k] b[k][j]`. `a` is copied rows whose stride is the
/// constant `LDA` of [`strip`], `b` is a panel with rows of `PANEL`.
#[derive(Clone, Copy)]
pub(crate) struct StripMatmul {
    /// Rows to compute, at most `S::ROWS`.
    pub(crate) rows: usize,
    /// Vectors of columns, 1 or 2.
    pub(crate) vecs: usize,
    /// Length of k.
    pub(crate) depth: usize,
    pub(crate) a: *const f32,
    pub(crate) b: *const f32,
    pub(crate) c: *mut f32,
    /// Row stride of `c`, in f32.
    pub(crate) ldc: usize,
    pub(crate) begin: InitialSums,
}

/// Computes one strip. Rows past `matmul.rows`, up to the next tile height (even, at most `S::ROWS`), are computed and
/// stored as well.
///
/// # Safety
/// With that tile height `height`: `a` has `height` rows of `depth` f32 at stride `LDA`, `c` has `height` rows of the
/// columns at stride `ldc`, `Scaled` has `height` factors; `b` has `depth` rows of `PANEL`. The prefetches may contain
/// any address.
#[inline(always)]
pub(crate) unsafe fn strip<S: Simd, const LDA: usize, const PREFETCHES: usize>(
    s: S,
    matmul: StripMatmul,
    prefetches: &[PrefetchPlan; PREFETCHES],
) {
    // SAFETY: the caller's promise; each arm takes the lowest tile of at least `rows` rows.
    unsafe {
        if S::VECS == 2 && matmul.vecs == 2 {
            match matmul.rows {
                9.. => tile::<S, 14, 2, LDA, PREFETCHES>(s, matmul, prefetches),
                5.. => tile::<S, 8, 2, LDA, PREFETCHES>(s, matmul, prefetches),
                3.. => tile::<S, 4, 2, LDA, PREFETCHES>(s, matmul, prefetches),
                _ => tile::<S, 2, 2, LDA, PREFETCHES>(s, matmul, prefetches),
            }
            return;
        }
        for v in 0..matmul.vecs {
            let b = matmul.b.wrapping_add(v * LANES);
            let c = matmul.c.wrapping_add(v * LANES);
            let column = StripMatmul { b, c, ..matmul };
            match matmul.rows {
                9.. if S::ROWS == 14 => tile::<S, 14, 1, LDA, PREFETCHES>(s, column, prefetches),
                7.. if S::ROWS == 14 => tile::<S, 8, 1, LDA, PREFETCHES>(s, column, prefetches),
                5.. if S::ROWS >= 6 => tile::<S, 6, 1, LDA, PREFETCHES>(s, column, prefetches),
                3.. if S::ROWS >= 4 => tile::<S, 4, 1, LDA, PREFETCHES>(s, column, prefetches),
                _ => tile::<S, 2, 1, LDA, PREFETCHES>(s, column, prefetches),
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
unsafe fn tile<S: Simd, const ROWS: usize, const VECS: usize, const LDA: usize, const PREFETCHES: usize>(
    s: S,
    matmul: StripMatmul,
    prefetches: &[PrefetchPlan; PREFETCHES],
) {
    let StripMatmul { depth, a, b, c, ldc, begin, .. } = matmul;
    let mut sums = [[s.splat(0.0); VECS]; ROWS];
    // SAFETY: `k < depth`, `r < ROWS`, `v < VECS`: memory that the caller promises.
    unsafe {
        if !matches!(begin, InitialSums::Zero) {
            for (r, sums) in sums.iter_mut().enumerate() {
                for (v, sum) in sums.iter_mut().enumerate() {
                    *sum = s.load(c.add(r * ldc + v * LANES));
                    if let InitialSums::Scaled(factors) = begin {
                        *sum = s.mul(*sum, s.splat(*factors.add(r)));
                    }
                }
            }
        }
        let mut k = 0;
        // One prefetch with each k: a burst of prefetches would delay the loads of the tile itself.
        for plan in prefetches {
            let mut group = plan.at;
            let end = depth.min(k + plan.lines);
            while k < end {
                let mut line = group;
                for _ in 0..plan.count.min(end - k) {
                    s.prefetch_far(line);
                    line = line.wrapping_add(plan.step);
                    multiply_add::<S, ROWS, VECS, LDA>(s, &mut sums, a.add(k), b.add(k * PANEL));
                    k += 1;
                }
                group = group.wrapping_add(plan.hop);
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
