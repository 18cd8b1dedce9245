//! Packed full-mask attention: softmax(q k^T + bias) v for each sequence and head, with rotary
//! positions or symmetric ALiBi, by key tiles with a running maximum (Milakov and Gimelshein,
//! 2018; Dao et al., 2022). No S x S, no S x tile of the whole sequence: the workspace is fixed.
//!
//! Invariant: key tiles start at the sequence's start and have a fixed size, and each query row
//! goes through them in order on its own: maximum, sixteen interleaved sums in the fixed tree,
//! one chain of `fma` over the keys. So the bits of a sequence depend on that sequence alone;
//! query blocks, strips and tasks only share the packed keys.

use super::Cpu;
use super::isa::Kernel;
use super::math::exp;
use super::simd::{LANES, Simd};
use super::tile::{Begin, PANEL, strip};
use super::view::{Rows, RowsMut};
use graph::Bytes;
use plan::Workspace;

/// Largest head dim.
pub const MAX_HEAD_DIM: usize = 128;

/// Keys of a tile, and the row stride of a strip of scores.
const KEYS: usize = 192;
const SCORES: usize = KEYS + 16;
/// Queries of a block, a multiple of the tallest tile: each block packs the keys anew.
const QUERIES: usize = 224;
/// Row stride of packed queries, past `MAX_HEAD_DIM` so that rows do not share cache sets.
const QUERY: usize = MAX_HEAD_DIM + 16;
/// Rows of a softmax at a time; every strip's height is a multiple.
const PAIR: usize = 2;
/// How many rows ahead of its use a row of q, k or v is asked for: a head's rows lie far apart.
const AHEAD: usize = 16;
/// Most rows of a strip.
const STRIP: usize = 14;

/// What is attended how.
#[derive(Clone, Copy)]
pub struct Attention<'a> {
    /// H.
    pub heads: usize,
    /// Width of one head, at most `MAX_HEAD_DIM`.
    pub head_dim: usize,
    /// Multiplies q first of all (before rotary, as ESM-2 does).
    pub scale: f32,
    /// Rotary positions of q and k.
    pub rope: Option<Rope<'a>>,
    /// ALiBi slopes, one per head: `-slope * |i - j|` is added to the scores (Press et al.,
    /// 2022; symmetric as in MosaicBERT).
    pub slopes: Option<&'a [f32]>,
}

/// Cosines and sines, both (longest, head_dim / 2), of positions that restart at 0 for each
/// sequence; half-split rotation (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin).
#[derive(Clone, Copy)]
pub struct Rope<'a> {
    /// cos(position * frequency).
    pub cos: &'a [f32],
    /// sin(position * frequency).
    pub sin: &'a [f32],
}

/// Bytes of workspace per thread, as the planner's table has them: the columns are `head_dim`.
pub const WORKSPACE: Workspace =
    Workspace { per_unit: Bytes(PER_UNIT), per_column: Bytes(PER_COLUMN), per_item: Bytes(0) };

/// Bytes of workspace per thread: that of `WORKSPACE` in whole cache lines.
pub const fn workspace_bytes(head_dim: usize) -> usize {
    (PER_UNIT as usize + PER_COLUMN as usize * head_dim).next_multiple_of(64)
}

/// o (T, H hd) and, where given, lse (T, H), the natural logarithm of each row's sum of
/// exponentials. q, k, v are (T, H hd) with strides of their own, so that they may be columns
/// of one (T, 3 H hd). `spans` are ascending and disjoint; rows outside them are not written.
/// `workspace` holds `workspace_bytes(head_dim)` for each thread. No output may overlap an
/// input. Panics on sizes that do not fit together, a span longer than the rope table included.
#[allow(clippy::too_many_arguments)] // the op's inputs and outputs, each once
pub fn attention(
    cpu: &Cpu,
    config: Attention<'_>,
    q: Rows<'_>,
    k: Rows<'_>,
    v: Rows<'_>,
    spans: &[[u32; 2]],
    o: RowsMut<'_>,
    lse: Option<RowsMut<'_>>,
    workspace: &mut [f32],
) {
    check(&config, [q, k, v], spans, &o, lse.as_ref());
    let parts = Parts::new(config.head_dim);
    let (threads, each) = (cpu.threads(), workspace_bytes(config.head_dim) / 4);
    assert!(workspace.len() >= each * threads, "workspace for {threads} threads");
    debug_assert!(parts.len <= each, "the parts fit");
    let scratch = workspace.as_mut_ptr() as usize;
    let tokens = spans.last().map_or(0, |s| s[1] as usize);
    let job = Job { config, q, k, v, o: &o, lse: lse.as_ref() };
    // A task is a head of a window of tokens: the query blocks that start in that window.
    cpu.pool().run(tokens.div_ceil(QUERIES) * config.heads, &|task, worker| {
        let (window, head) = (task / config.heads, task % config.heads);
        let (from, to) = (window * QUERIES, (window + 1) * QUERIES);
        let first = spans.partition_point(|s| s[1] as usize <= from);
        let scratch = (scratch as *mut f32).wrapping_add(worker * each);
        for &[start, end] in spans[first..].iter().take_while(|s| (s[0] as usize) < to) {
            let (start, end) = (start as usize, end as usize);
            let mut block = start + from.saturating_sub(start).next_multiple_of(QUERIES);
            while block < end.min(to) {
                let queries = (block - start, (block - start + QUERIES).min(end - start));
                let place = Block { start, len: end - start, queries, head };
                cpu.isa().run(Task { job, place, parts, scratch });
                block += QUERIES;
            }
        }
    });
}

fn check(
    config: &Attention<'_>,
    inputs: [Rows<'_>; 3],
    spans: &[[u32; 2]],
    o: &RowsMut<'_>,
    lse: Option<&RowsMut<'_>>,
) {
    let (hd, rows, cols) = (config.head_dim, o.rows(), config.heads * config.head_dim);
    assert!((1..=MAX_HEAD_DIM).contains(&hd), "head dim {hd} of at most {MAX_HEAD_DIM}");
    assert!(o.cols() == cols, "o is (T, {cols})");
    assert!(inputs.iter().all(|x| x.rows() == rows && x.cols() == cols), "q, k, v of o's shape");
    assert!(lse.is_none_or(|l| l.rows() == rows && l.cols() == config.heads), "lse is (T, H)");
    assert!(config.slopes.is_none_or(|s| s.len() == config.heads), "one slope per head");
    super::check_spans(spans, rows);
    if let Some(rope) = config.rope {
        assert!(hd.is_multiple_of(2), "rotary positions need an even head dim");
        let longest = spans.iter().map(|s| (s[1] - s[0]) as usize).max().unwrap_or(0);
        let need = longest * (hd / 2);
        assert!(rope.cos.len() >= need && rope.sin.len() >= need, "rope table for {longest}");
    }
}

/// Keys, values and sums per column of a head; queries (one row to spare), scores and what rounding up the
/// columns takes. `Parts` fits in it for every head dim (tested).
const PER_COLUMN: u64 = 4 * (2 * KEYS + QUERIES) as u64;
const PER_UNIT: u64 = 4
    * (KEYS * (PANEL - 1) + QUERIES * (LANES - 1) + QUERIES * QUERY + STRIP * SCORES + 2 * QUERIES + QUERY)
        as u64;

/// Where the parts of a thread's workspace start, in f32.
#[derive(Clone, Copy)]
struct Parts {
    /// [panel of 32 keys][head_dim][32]
    keys: usize,
    /// [panel of 32 columns][KEYS][32]
    values: usize,
    /// [QUERIES][QUERY]
    queries: usize,
    /// [STRIP][SCORES]
    scores: usize,
    /// [QUERIES][columns rounded up to vectors]
    out: usize,
    /// [QUERIES] each: running maximum, running sum
    top: usize,
    sum: usize,
    len: usize,
}

impl Parts {
    const fn new(head_dim: usize) -> Parts {
        let keys = 0;
        let values = keys + KEYS * head_dim;
        let queries = values + KEYS * head_dim.next_multiple_of(PANEL);
        let scores = queries + QUERIES * QUERY;
        let out = scores + STRIP * SCORES;
        let top = out + QUERIES * head_dim.next_multiple_of(LANES);
        let sum = top + QUERIES;
        Parts { keys, values, queries, scores, out, top, sum, len: sum + QUERIES }
    }
}

#[derive(Clone, Copy)]
struct Job<'a> {
    config: Attention<'a>,
    q: Rows<'a>,
    k: Rows<'a>,
    v: Rows<'a>,
    o: &'a RowsMut<'a>,
    lse: Option<&'a RowsMut<'a>>,
}

/// Which queries: positions within the sequence that starts at row `start`.
#[derive(Clone, Copy)]
struct Block {
    start: usize,
    len: usize,
    queries: (usize, usize),
    head: usize,
}

/// One block of queries of one head against all keys of its sequence. `scratch` is `workspace_bytes`
/// of f32 of this worker's own.
struct Task<'a> {
    job: Job<'a>,
    place: Block,
    parts: Parts,
    scratch: *mut f32,
}

impl Kernel for Task<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let ((first, last), hd) = (self.place.queries, self.job.config.head_dim);
        // SAFETY: the scratch is laid out by `parts`; every row and column below lies in the
        // block's sequence and head, which `attention` has checked.
        unsafe {
            for i in first..last {
                let to = self.part(self.parts.queries).add((i - first) * QUERY);
                self.rotate(s, self.job.q, i, self.job.config.scale, to);
                let o = self.job.o.row(self.place.start + i).wrapping_add(self.place.head * hd);
                (0..hd).step_by(LANES).for_each(|j| s.prefetch_far(o.wrapping_add(j)));
            }
            // The tile's padding rows are computed too: keep them finite.
            let padding = (last - first).next_multiple_of(STRIP) - (last - first);
            let after = self.part(self.parts.queries).add((last - first) * QUERY);
            after.write_bytes(0, padding * QUERY);
            for tile in (0..self.place.len).step_by(KEYS) {
                let keys = KEYS.min(self.place.len - tile);
                self.pack_keys(s, tile, keys);
                self.pack_values(s, tile, keys);
                for row in (0..last - first).step_by(S::ROWS) {
                    let rows = S::ROWS.min(last - first - row);
                    self.attend(s, tile, keys, row, rows);
                }
            }
            for row in 0..last - first {
                self.finish(s, row);
            }
        }
    }
}

impl Task<'_> {
    #[inline(always)]
    fn part(&self, offset: usize) -> *mut f32 {
        self.scratch.wrapping_add(offset)
    }

    /// Row `i` of this sequence and head of `x`.
    #[inline(always)]
    fn row(&self, x: Rows<'_>, i: usize) -> *const f32 {
        x.row(self.place.start + i).wrapping_add(self.place.head * self.job.config.head_dim)
    }

    /// Asks for row `i`, which need not exist.
    #[inline(always)]
    fn prefetch<S: Simd>(&self, s: S, x: Rows<'_>, i: usize) {
        for j in (0..self.job.config.head_dim).step_by(LANES) {
            s.prefetch(self.row(x, i).wrapping_add(j));
        }
    }

    /// Writes scale * x[i], rotated to position i, to `to`.
    ///
    /// # Safety
    /// Position i lies in the sequence; `to` holds QUERY f32.
    #[inline(always)]
    unsafe fn rotate<S: Simd>(&self, s: S, x: Rows<'_>, i: usize, scale: f32, to: *mut f32) {
        let (hd, scale) = (self.job.config.head_dim, s.splat(scale));
        self.prefetch(s, x, i + AHEAD);
        let x = self.row(x, i);
        // SAFETY: j + n stays in the row, or in its half and position i's row of the tables.
        unsafe {
            let Some(rope) = self.job.config.rope else {
                for j in (0..hd).step_by(LANES) {
                    let n = LANES.min(hd - j);
                    s.store(to.add(j), s.mul(s.load_n(x.add(j), n), scale));
                }
                return;
            };
            // Whole vectors where what spills over is written afterwards or lies past the head.
            let half = hd / 2;
            for j in (0..half).step_by(LANES) {
                let n = LANES.min(half - j);
                let cos = s.load_n(rope.cos.as_ptr().add(i * half + j), n);
                let sin = s.load_n(rope.sin.as_ptr().add(i * half + j), n);
                let a = s.mul(s.load_n(x.add(j), n), scale);
                let b = s.mul(s.load_n(x.add(half + j), n), scale);
                let (low, high) = (s.sub(s.mul(a, cos), s.mul(b, sin)), s.add(s.mul(b, cos), s.mul(a, sin)));
                if j == 0 {
                    s.store(to, low);
                } else {
                    s.store_n(to.add(j), low, n);
                }
                s.store(to.add(half + j), high);
            }
        }
    }

    /// Packs keys `tile..tile + keys`, rotated and transposed, zeros up to a whole panel.
    ///
    /// # Safety
    /// The keys lie in the sequence.
    #[inline(always)]
    unsafe fn pack_keys<S: Simd>(&self, s: S, tile: usize, keys: usize) {
        // The scores are not in use yet: sixteen rows of QUERY fit there.
        let (hd, rows) = (self.job.config.head_dim, self.part(self.parts.scores));
        for j in (0..keys.next_multiple_of(PANEL)).step_by(LANES) {
            let panel = self.part(self.parts.keys).wrapping_add(j / PANEL * PANEL * hd + j % PANEL);
            // SAFETY: `keys <= KEYS`, so each panel lies in its part; rows are QUERY long, more than
            // `head_dim` rounded up to vectors, and what was not written there is not kept.
            unsafe {
                for r in 0..LANES {
                    match j + r < keys {
                        true => self.rotate(s, self.job.k, tile + j + r, 1.0, rows.add(r * QUERY)),
                        false => rows.add(r * QUERY).write_bytes(0, hd),
                    }
                }
                for d in (0..hd).step_by(LANES) {
                    let mut square = [s.splat(0.0); LANES];
                    for (r, v) in square.iter_mut().enumerate() {
                        *v = s.load(rows.add(r * QUERY + d));
                    }
                    s.transpose(&mut square);
                    for (i, &v) in square.iter().enumerate().take(hd - d) {
                        s.store(panel.add((d + i) * PANEL), v);
                    }
                }
            }
        }
    }

    /// Copies values `tile..tile + keys` to panels of 32 columns, zeros past the head.
    ///
    /// # Safety
    /// The keys lie in the sequence.
    #[inline(always)]
    unsafe fn pack_values<S: Simd>(&self, s: S, tile: usize, keys: usize) {
        let hd = self.job.config.head_dim;
        for j in (0..hd).step_by(LANES) {
            let n = LANES.min(hd - j);
            let to = self.part(self.parts.values).wrapping_add(j / PANEL * PANEL * KEYS + j % PANEL);
            for key in 0..keys {
                s.prefetch(self.row(self.job.v, tile + key + AHEAD).wrapping_add(j));
                let from = self.row(self.job.v, tile + key).wrapping_add(j);
                // SAFETY: n columns of the key's row; a vector of its panel.
                unsafe { s.store(to.add(key * PANEL), s.load_n(from, n)) };
            }
        }
    }

    /// Takes one strip of queries through one tile of keys.
    ///
    /// # Safety
    /// The tile is packed; rows `row..row + rows` lie in the block.
    #[inline(always)]
    unsafe fn attend<S: Simd>(&self, s: S, tile: usize, keys: usize, row: usize, rows: usize) {
        let hd = self.job.config.head_dim;
        let scores = self.part(self.parts.scores);
        let mut decay = [0.0f32; STRIP];
        // SAFETY: strips start at multiples of the tile's height in parts of a multiple of it;
        // the parts hold the panels that are named.
        unsafe {
            let q = self.part(self.parts.queries).add(row * QUERY);
            for j in (0..keys).step_by(PANEL) {
                let shape = (rows, (keys - j).min(PANEL).div_ceil(LANES));
                let k = self.part(self.parts.keys).add(j * hd);
                strip::<S, QUERY, 0>(s, shape, hd, q, k, scores.add(j), SCORES, Begin::Zero, &[]);
            }
            for r in (0..rows).step_by(PAIR) {
                let two = self.soften(s, tile, keys, row + r, scores.add(r * SCORES));
                decay[r..r + PAIR].copy_from_slice(&two);
            }
            let begin = if tile == 0 { Begin::Zero } else { Begin::Scaled(decay.as_ptr()) };
            let ldo = hd.next_multiple_of(LANES);
            for j in (0..hd).step_by(PANEL) {
                let shape = (rows, (hd - j).min(PANEL).div_ceil(LANES));
                let v = self.part(self.parts.values).add(j * KEYS);
                let o = self.part(self.parts.out).add(row * ldo + j);
                strip::<S, SCORES, 0>(s, shape, keys, scores, v, o, ldo, begin, &[]);
            }
        }
    }

    /// Turns a pair of rows of scores into exponentials under their running maxima; returns the factors for
    /// what was summed before. Two rows at once, since one row's chain (maximum, exponentials, sum) is long.
    ///
    /// # Safety
    /// `scores` holds two rows of `keys` f32, rounded up to vectors; `row` lies in the block.
    #[inline(always)]
    unsafe fn soften<S: Simd>(
        &self,
        s: S,
        tile: usize,
        keys: usize,
        row: usize,
        scores: *mut f32,
    ) -> [f32; PAIR] {
        // SAFETY: as the caller promises; `top` and `sum` have an even number of entries.
        unsafe {
            let top = self.highest(s, tile, keys, row, scores);
            let mut now = [0.0; PAIR];
            let mut decay = [0.0; PAIR];
            for r in 0..PAIR {
                let at = self.part(self.parts.top + row + r);
                let before = if tile == 0 { f32::NEG_INFINITY } else { *at };
                now[r] = s.max_lane(top[r]).max(before);
                *at = now[r];
                if tile > 0 {
                    decay[r] = s.max_lane(exp(s, s.splat(before - now[r])));
                }
            }
            let now = now.map(|x| s.splat(x));
            let mut sums = [s.splat(0.0); PAIR];
            for j in (0..keys).step_by(LANES) {
                for r in 0..PAIR {
                    let at = scores.add(r * SCORES + j);
                    let e = exp(s, s.sub(s.load(at), now[r]));
                    s.store(at, e);
                    sums[r] = s.add(sums[r], e);
                }
            }
            for r in 0..PAIR {
                let at = self.part(self.parts.sum + row + r);
                let before = if tile == 0 { 0.0 } else { *at * decay[r] };
                *at = before + s.sum(sums[r]);
            }
            decay
        }
    }

    /// The lanes' maxima of a pair of rows of scores, after adding ALiBi's bias and turning what lies past
    /// the keys into -inf.
    ///
    /// # Safety
    /// As `soften`.
    #[inline(always)]
    unsafe fn highest<S: Simd>(
        &self,
        s: S,
        tile: usize,
        keys: usize,
        row: usize,
        scores: *mut f32,
    ) -> [S::V; PAIR] {
        let low = s.splat(f32::NEG_INFINITY);
        let mut top = [low; PAIR];
        let slope = self.job.config.slopes.map(|slopes| s.splat(-slopes[self.place.head]));
        for j in (0..keys).step_by(LANES) {
            for (r, top) in top.iter_mut().enumerate() {
                let at = scores.wrapping_add(r * SCORES + j);
                // SAFETY: a vector of the row's scores.
                let mut v = unsafe { s.load(at) };
                if let Some(slope) = slope {
                    // Distances below 2^24 are exact in f32.
                    let i = (self.place.queries.0 + row + r) as f32 - (tile + j) as f32;
                    v = s.fma(slope, s.abs(s.sub(s.splat(i), s.iota())), v);
                }
                let inside = LANES.min(keys - j);
                if inside < LANES {
                    v = s.first(v, low, inside);
                }
                if inside < LANES || slope.is_some() {
                    // SAFETY: as above.
                    unsafe { s.store(at, v) };
                }
                *top = s.max(v, *top);
            }
        }
        top
    }

    /// Divides a row by its sum and writes it out, with its lse.
    ///
    /// # Safety
    /// `row` lies in the block, which has seen all tiles.
    #[inline(always)]
    unsafe fn finish<S: Simd>(&self, s: S, row: usize) {
        let (hd, head) = (self.job.config.head_dim, self.place.head);
        let t = self.place.start + self.place.queries.0 + row;
        let from = self.part(self.parts.out).wrapping_add(row * hd.next_multiple_of(LANES));
        // SAFETY: this task alone writes row t of this head; the parts as laid out.
        unsafe {
            let (top, sum) = (*self.part(self.parts.top + row), *self.part(self.parts.sum + row));
            let inverse = s.splat(1.0 / sum);
            for j in (0..hd).step_by(LANES) {
                let v = s.mul(s.load(from.add(j)), inverse);
                s.store_n(self.job.o.row(t).add(head * hd + j), v, LANES.min(hd - j));
            }
            if let Some(lse) = self.job.lse {
                lse.row(t).add(head).write(top + sum.ln());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_parts_fit_in_the_workspace() {
        for head_dim in 1..=MAX_HEAD_DIM {
            assert!(4 * Parts::new(head_dim).len <= workspace_bytes(head_dim), "{head_dim}");
        }
    }
}
