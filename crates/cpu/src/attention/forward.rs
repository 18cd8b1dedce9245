//! Forward pass of attention in f32, over key tiles with an online softmax (Milakov and Gimelshein, 2018; Dao et al.,
//! 2022).
//!
//! Invariant: each query row goes through the key tiles in order and independently of other rows: a running maximum,
//! sixteen interleaved sums added in a fixed tree, one chain of `fma` over the keys. Query blocks, strips and tasks
//! share only the packed keys. All arithmetic is f32 whatever the element types of q, k, v and o are; o is rounded
//! once.

use super::pack::{Head, gather, rotate, transpose};
use super::workspace_bytes;
use super::{Attention, QueryBlock, ROW, STRIP, View, blocks, keys_of, show};
use crate::Cpu;
use crate::element::Element;
use crate::matmul::register_tile::{Begin, PANEL, strip};
use crate::simd::isa::Kernel;
use crate::simd::math::{exp, log_sum_exp};
use crate::simd::{LANES, Simd};
use crate::view::{Rows, RowsMut};

/// Distance, in rows, by which rows of v are prefetched.
const AHEAD: usize = 16;
/// Keys per tile, and the row stride of a strip of scores (padded).
const KEYS: usize = 192;
const SCORES: usize = KEYS + 16;
/// Queries per block. A multiple of the tallest register tile; large, because each block packs the keys again.
const QUERIES: usize = 224;
/// Rows that the softmax processes together; a divisor of every strip height.
const PAIR: usize = 2;
/// Initial running maximum of a row. Finite, so that subtracting it from itself gives zero and not NaN.
const LOWEST: f32 = f32::MIN;

/// Computes o (T, H hd) and, if given, lse (T, H), the natural logarithm of each row's sum of exponentials. q is (T,
/// H hd), k and v are (T, G hd), each with its own row stride, so that they may be columns of one (T, (H + 2 G) hd)
/// matrix. `spans` are ascending and disjoint; rows outside them are not written. `workspace` holds
/// `workspace_bytes(head_dim)` for each thread. No output may overlap an input. Panics if shapes are inconsistent or
/// a span is longer than the rope table.
#[allow(clippy::too_many_arguments)] // the op's inputs and outputs, each once
pub fn attention<E: Element>(
    cpu: &Cpu,
    config: Attention<'_>,
    q: Rows<'_, E>,
    k: Rows<'_, E>,
    v: Rows<'_, E>,
    spans: &[[u32; 2]],
    o: RowsMut<'_, E>,
    lse: Option<RowsMut<'_>>,
    workspace: &mut [f32],
) {
    config.check(&[q, o.as_rows()], [k, v], lse.as_ref().map(RowsMut::as_rows), spans);
    let parts = WorkspaceLayout::new(config.head_dim);
    let threads = cpu.threads();
    let each = workspace_bytes(config.head_dim) / 4;
    assert!(workspace.len() >= each * threads, "workspace for {threads} threads");
    debug_assert!(parts.len <= each, "the parts fit");
    let scratch = workspace.as_mut_ptr() as usize;
    let job = ForwardCall { config, q, k, v, o: &o, lse: lse.as_ref() };
    blocks(cpu, spans, (config.heads, QUERIES), 1, &|places, worker| {
        let scratch = (scratch as *mut f32).wrapping_add(worker * each);
        places.for_each(|(place, _)| cpu.isa().run(ForwardBlock { job: &job, place, parts, scratch }));
    });
}

/// Offsets of the buffers in a thread's workspace, in f32.
#[derive(Clone, Copy)]
struct WorkspaceLayout {
    /// Rotated keys: [panel of 32 keys][head_dim][32]
    keys: usize,
    /// Values: [panel of 32 columns][KEYS][32]
    values: usize,
    /// Rotated, scaled queries: [QUERIES][ROW]
    queries: usize,
    /// Scores of one strip: [STRIP][SCORES]
    scores: usize,
    /// Unnormalized output: [QUERIES][columns rounded up to vectors]
    out: usize,
    /// Online softmax state, [QUERIES] each: running maximum, running sum
    top: usize,
    sum: usize,
    len: usize,
}

impl WorkspaceLayout {
    const fn new(head_dim: usize) -> WorkspaceLayout {
        let keys = 0;
        let values = keys + KEYS * head_dim;
        let queries = values + KEYS * head_dim.next_multiple_of(PANEL);
        let scores = queries + QUERIES * ROW;
        let out = scores + STRIP * SCORES;
        let top = out + QUERIES * head_dim.next_multiple_of(LANES);
        let sum = top + QUERIES;
        WorkspaceLayout { keys, values, queries, scores, out, top, sum, len: sum + QUERIES }
    }
}

/// Inputs and outputs of one call, shared by all its tasks.
struct ForwardCall<'a, E> {
    config: Attention<'a>,
    q: Rows<'a, E>,
    k: Rows<'a, E>,
    v: Rows<'a, E>,
    o: &'a RowsMut<'a, E>,
    lse: Option<&'a RowsMut<'a>>,
}

/// Kernel that processes one block of queries of one head against all keys of its sequence. `scratch` is this
/// worker's own workspace of `workspace_bytes`.
struct ForwardBlock<'a, E> {
    job: &'a ForwardCall<'a, E>,
    place: QueryBlock,
    parts: WorkspaceLayout,
    scratch: *mut f32,
}

impl<E: Element> Kernel for ForwardBlock<'_, E> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let (first, last) = self.place.queries;
        let hd = self.job.config.head_dim;
        let rope = self.job.config.rope;
        let scale = self.job.config.scale;
        // SAFETY: the scratch is laid out by `bf16x3`; every row and column below lies in the block's sequence and
        // head, which `attention` has checked.
        unsafe {
            let q = self.head(self.job.q, self.place.head);
            for i in first..last {
                let to = self.part(self.parts.queries).add((i - first) * ROW);
                rotate(s, q, rope, i, scale, to);
                let o = self.job.o.row(self.place.start + i).wrapping_add(self.place.head * hd);
                (0..hd).step_by(LANES).for_each(|j| s.prefetch_far(o.wrapping_add(j).cast()));
            }
            // Strips compute whole register tiles, padding rows included: zeros keep those rows finite.
            let padding = (last - first).next_multiple_of(STRIP) - (last - first);
            let after = self.part(self.parts.queries).add((last - first) * ROW);
            after.write_bytes(0, padding * ROW);
            for tile in (0..self.place.len).step_by(KEYS) {
                let keys = KEYS.min(self.place.len - tile);
                if self.view(tile, keys, 0, last - first).is_none() {
                    continue;
                }
                self.pack_keys(s, tile, keys);
                self.pack_values(s, tile, keys);
                for row in (0..last - first).step_by(S::ROWS) {
                    let rows = S::ROWS.min(last - first - row);
                    if let Some(view) = self.view(tile, keys, row, rows) {
                        self.attend(s, tile, view, row, rows);
                    }
                }
            }
            for row in 0..last - first {
                self.finish(s, row);
            }
        }
    }
}

impl<E: Element> ForwardBlock<'_, E> {
    /// Pointer to the workspace buffer at `offset`.
    #[inline(always)]
    fn part(&self, offset: usize) -> *mut f32 {
        self.scratch.wrapping_add(offset)
    }

    /// View of head `head` of this sequence in q, k or v.
    #[inline(always)]
    fn head<'b>(&self, x: Rows<'b, E>, head: usize) -> Head<'b, E> {
        let dim = self.job.config.head_dim;
        Head { x, start: self.place.start, column: head * dim, dim }
    }

    /// View of the key/value head that this query head uses.
    #[inline(always)]
    fn shared<'b>(&self, x: Rows<'b, E>) -> Head<'b, E> {
        self.head(x, self.place.head / self.job.config.group())
    }

    /// The keys of a tile that rows `row..row + rows` of the block attend to.
    #[inline(always)]
    fn view(&self, tile: usize, keys: usize, row: usize, rows: usize) -> Option<View> {
        let first = self.place.queries.0 + row;
        keys_of(self.job.config.mask, first..first + rows, tile..tile + keys, self.place.len)
    }

    /// Packs keys `tile..tile + keys` rotated and transposed, with zeros up to a whole panel.
    ///
    /// # Safety
    /// The keys lie in the sequence.
    #[inline(always)]
    unsafe fn pack_keys<S: Simd>(&self, s: S, tile: usize, keys: usize) {
        // The scores are not in use yet, and their buffer is large enough for sixteen rows of ROW.
        let config = self.job.config;
        let rows = self.part(self.parts.scores);
        let k = self.shared(self.job.k);
        for j in (0..keys.next_multiple_of(PANEL)).step_by(LANES) {
            // SAFETY: `keys <= KEYS`, so each panel lies in its part.
            unsafe {
                gather(s, k, config.rope, (tile + j, keys.saturating_sub(j)), 1.0, rows);
                transpose(s, config.head_dim, rows, self.part(self.parts.keys), j);
            }
        }
    }

    /// Copies values `tile..tile + keys` into panels of 32 columns, with zeros past the head.
    ///
    /// # Safety
    /// The keys lie in the sequence.
    #[inline(always)]
    unsafe fn pack_values<S: Simd>(&self, s: S, tile: usize, keys: usize) {
        let hd = self.job.config.head_dim;
        let values = self.shared(self.job.v);
        for j in (0..hd).step_by(LANES) {
            let n = LANES.min(hd - j);
            let to = self.part(self.parts.values).wrapping_add(j / PANEL * PANEL * KEYS + j % PANEL);
            for key in 0..keys {
                s.prefetch(values.row(tile + key + AHEAD).wrapping_add(j).cast());
                let from = values.row(tile + key).wrapping_add(j);
                // SAFETY: n columns of the key's row; a vector of its panel.
                unsafe { s.store(to.add(key * PANEL), E::load_n(s, from, n)) };
            }
        }
    }

    /// Runs one strip of queries against the keys of a tile in `view`: scores, softmax, and the sum over values.
    ///
    /// # Safety
    /// The tile is packed; rows `row..row + rows` lie in the block.
    #[inline(always)]
    unsafe fn attend<S: Simd>(&self, s: S, tile: usize, view: View, row: usize, rows: usize) {
        let hd = self.job.config.head_dim;
        let View { from, to, .. } = view;
        let scores = self.part(self.parts.scores);
        let mut decay = [0.0f32; STRIP];
        // SAFETY: strips start at multiples of the tile height, and the last strip's tile ends at row QUERIES at
        // the latest: QUERIES is a multiple of 14, 4 and 2, and the tiles of AVX2 (6, 4 or 2 rows) have at most
        // one row of padding. The panels addressed lie inside their buffers.
        unsafe {
            let q = self.part(self.parts.queries).add(row * ROW);
            for j in (from..to).step_by(PANEL) {
                let shape = (rows, (to - j).min(PANEL).div_ceil(LANES));
                let k = self.part(self.parts.keys).add(j * hd);
                strip::<S, ROW, 0>(s, shape, hd, q, k, scores.add(j), SCORES, Begin::Zero, &[]);
            }
            for r in (0..rows).step_by(PAIR) {
                let two = self.softmax_row(s, tile, view, row + r, scores.add(r * SCORES));
                decay[r..r + PAIR].copy_from_slice(&two);
            }
            let begin = if view.first { Begin::Zero } else { Begin::Scaled(decay.as_ptr()) };
            let ldo = hd.next_multiple_of(LANES);
            for j in (0..hd).step_by(PANEL) {
                let shape = (rows, (hd - j).min(PANEL).div_ceil(LANES));
                let v = self.part(self.parts.values).add(j * KEYS + from * PANEL);
                let o = self.part(self.parts.out).add(row * ldo + j);
                strip::<S, SCORES, 0>(s, shape, to - from, scores.add(from), v, o, ldo, begin, &[]);
            }
        }
    }

    /// Softmax step for a pair of rows: replaces scores by exponentials relative to the updated running maxima, and
    /// returns the factors by which the earlier sums must be scaled. Two rows at once, because the dependency chain
    /// of one row (maximum, exponentials, sum) is long.
    ///
    /// # Safety
    /// `scores` holds two rows of the view, rounded up to vectors; `row` lies in the block.
    #[inline(always)]
    unsafe fn softmax_row<S: Simd>(
        &self,
        s: S,
        tile: usize,
        view: View,
        row: usize,
        scores: *mut f32,
    ) -> [f32; PAIR] {
        // SAFETY: as the caller promises; `top` and `sum` have an even number of entries.
        unsafe {
            let top = self.highest(s, tile, view, row, scores);
            let mut now = [0.0; PAIR];
            let mut decay = [0.0; PAIR];
            for r in 0..PAIR {
                let at = self.part(self.parts.top + row + r);
                let before = if view.first { LOWEST } else { *at };
                now[r] = s.max_lane(top[r]).max(before);
                *at = now[r];
                if !view.first {
                    decay[r] = s.max_lane(exp(s, s.splat(before - now[r])));
                }
            }
            let now = now.map(|x| s.splat(x));
            let mut sums = [s.splat(0.0); PAIR];
            for j in (view.from..view.to).step_by(LANES) {
                for r in 0..PAIR {
                    let at = scores.add(r * SCORES + j);
                    let e = exp(s, s.sub(s.load(at), now[r]));
                    s.store(at, e);
                    sums[r] = s.add(sums[r], e);
                }
            }
            for r in 0..PAIR {
                let at = self.part(self.parts.sum + row + r);
                let before = if view.first { 0.0 } else { *at * decay[r] };
                *at = before + s.sum(sums[r]);
            }
            decay
        }
    }

    /// Lane-wise maxima of a pair of rows of scores, after adding the ALiBi bias and replacing masked scores, and
    /// those past the view, by -inf.
    ///
    /// # Safety
    /// As for `softmax_row`.
    #[inline(always)]
    unsafe fn highest<S: Simd>(
        &self,
        s: S,
        tile: usize,
        view: View,
        row: usize,
        scores: *mut f32,
    ) -> [S::V; PAIR] {
        let low = s.splat(f32::NEG_INFINITY);
        let mut top = [low; PAIR];
        let slope = self.job.config.slopes.map(|slopes| s.splat(-slopes[self.place.head]));
        let query = self.place.queries.0 + row;
        let runs: [_; PAIR] = core::array::from_fn(|r| self.job.config.mask.keys(query + r, self.place.len));
        for j in (view.from..view.to).step_by(LANES) {
            for (r, top) in top.iter_mut().enumerate() {
                let at = scores.wrapping_add(r * SCORES + j);
                // SAFETY: a vector of the row's scores.
                let mut v = unsafe { s.load(at) };
                if let Some(slope) = slope {
                    // Distances are integers below 2^24, hence exact in f32.
                    let i = (query + r) as f32 - (tile + j) as f32;
                    v = s.fma(slope, s.abs(s.sub(s.splat(i), s.iota())), v);
                }
                let inside = LANES.min(view.to - j);
                if !view.whole {
                    v = show(s, &runs[r], tile + j, v, low);
                }
                if inside < LANES {
                    v = s.first(v, low, inside);
                }
                if inside < LANES || slope.is_some() || !view.whole {
                    // SAFETY: as above.
                    unsafe { s.store(at, v) };
                }
                *top = s.max(v, *top);
            }
        }
        top
    }

    /// Divides a row by its sum of exponentials and writes it out, together with its lse.
    ///
    /// # Safety
    /// `row` lies in the block, which has seen all tiles.
    #[inline(always)]
    unsafe fn finish<S: Simd>(&self, s: S, row: usize) {
        let hd = self.job.config.head_dim;
        let head = self.place.head;
        let t = self.place.start + self.place.queries.0 + row;
        let from = self.part(self.parts.out).wrapping_add(row * hd.next_multiple_of(LANES));
        // SAFETY: this task alone writes row t of this head; the parts as laid out.
        unsafe {
            let top = *self.part(self.parts.top + row);
            let sum = *self.part(self.parts.sum + row);
            let inverse = s.splat(1.0 / sum);
            for j in (0..hd).step_by(LANES) {
                let v = s.mul(s.load(from.add(j)), inverse);
                E::store_n(s, self.job.o.row(t).add(head * hd + j), v, LANES.min(hd - j));
            }
            if let Some(lse) = self.job.lse {
                lse.row(t).add(head).write(log_sum_exp(top, f64::from(sum)) as f32);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::MAX_HEAD_DIM;
    use super::*;

    #[test]
    fn the_parts_fit_in_the_workspace() {
        for head_dim in 1..=MAX_HEAD_DIM {
            assert!(4 * WorkspaceLayout::new(head_dim).len <= workspace_bytes(head_dim), "{head_dim}");
        }
    }
}
