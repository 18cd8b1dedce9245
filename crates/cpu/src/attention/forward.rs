//! Forward pass of attention in f32, over key tiles with an online softmax (Milakov and Gimelshein, 2018; Dao et al.,
//! 2022).
//!
//! Invariant: each query row goes through the key tiles in order and independently of other rows: a running maximum,
//! sixteen interleaved sums added in a fixed tree, one chain of `fma` over the keys. Query blocks, strips and tasks
//! share only the packed keys. All arithmetic is f32 whatever the element types of q, k, v and o are; o is rounded
//! once.

use super::pack::{HeadRows, Rotation, transpose};
use super::workspace_bytes;
use super::{
    AttentionConfig, AttentionOperands, QueryBlock, QueryPartition, ROW, STRIP, VisibleRange, by_query_blocks,
    keys_of, select,
};
use crate::Cpu;
use crate::element::Element;
use crate::matmul::register_tile::{InitialSums, PANEL, StripMatmul, strip};
use crate::simd::isa::SimdKernel;
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

/// Computes attention. `workspace` holds `workspace_bytes(head_dim)` for each thread. Panics if shapes are inconsistent
/// or a span is longer than the rotary tables.
pub fn attention<E: Element>(
    cpu: &Cpu,
    config: AttentionConfig<'_>,
    operands: AttentionOperands<'_, E>,
    workspace: &mut [f32],
) {
    let AttentionOperands { q, k, v, spans, o, lse } = operands;
    config.check(&[q, o.as_rows()], [k, v], lse.as_ref().map(RowsMut::as_rows), spans);
    let layout = ForwardWorkspace::new(config.head_dim);
    let threads = cpu.threads();
    let words_per_thread = workspace_bytes(config.head_dim) / 4;
    assert!(workspace.len() >= words_per_thread * threads, "workspace for {threads} threads");
    debug_assert!(layout.len <= words_per_thread, "the parts fit");
    let workspace = workspace.as_mut_ptr() as usize;
    let call = ForwardCall { config, q, k, v, o: &o, lse: lse.as_ref() };
    let partition = QueryPartition { heads: config.heads, queries: QUERIES, together: 1 };
    by_query_blocks(cpu, spans, partition, &|blocks, worker| {
        let scratch = (workspace as *mut f32).wrapping_add(worker * words_per_thread);
        for scheduled in blocks {
            cpu.isa().run(ForwardBlock { call: &call, block: scheduled.block, layout, scratch });
        }
    });
}

/// Offsets of the buffers in a thread's workspace, in f32.
#[derive(Clone, Copy)]
struct ForwardWorkspace {
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

impl ForwardWorkspace {
    const fn new(head_dim: usize) -> ForwardWorkspace {
        let keys = 0;
        let values = keys + KEYS * head_dim;
        let queries = values + KEYS * head_dim.next_multiple_of(PANEL);
        let scores = queries + QUERIES * ROW;
        let out = scores + STRIP * SCORES;
        let top = out + QUERIES * head_dim.next_multiple_of(LANES);
        let sum = top + QUERIES;
        ForwardWorkspace { keys, values, queries, scores, out, top, sum, len: sum + QUERIES }
    }
}

/// Inputs and outputs of one call, shared by all its tasks.
struct ForwardCall<'a, E> {
    config: AttentionConfig<'a>,
    q: Rows<'a, E>,
    k: Rows<'a, E>,
    v: Rows<'a, E>,
    o: &'a RowsMut<'a, E>,
    lse: Option<&'a RowsMut<'a>>,
}

/// Kernel that processes one block of queries of one head against all keys of its sequence. `scratch` is this
/// worker's own workspace of `workspace_bytes`.
struct ForwardBlock<'a, E> {
    call: &'a ForwardCall<'a, E>,
    block: QueryBlock,
    layout: ForwardWorkspace,
    scratch: *mut f32,
}

impl<E: Element> SimdKernel for ForwardBlock<'_, E> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let queries = self.block.count();
        let hd = self.call.config.head_dim;
        let rotation = Rotation { tables: self.call.config.rope, scale: self.call.config.scale };
        // SAFETY: the scratch is laid out by `layout`; every row and column below lies in the block's sequence and
        // head, which `attention` has checked.
        unsafe {
            let q = self.head(self.call.q, self.block.head);
            for r in 0..queries {
                let i = self.block.first + r;
                rotation.apply(s, q, i, self.buffer(self.layout.queries).add(r * ROW));
                let o = self.call.o.row(self.block.start + i).wrapping_add(self.block.head * hd);
                (0..hd).step_by(LANES).for_each(|j| s.prefetch_far(o.wrapping_add(j).cast()));
            }
            // Strips compute whole register tiles, padding rows included: zeros keep those rows finite.
            let padding = queries.next_multiple_of(STRIP) - queries;
            self.buffer(self.layout.queries).add(queries * ROW).write_bytes(0, padding * ROW);
            for tile in (0..self.block.len).step_by(KEYS) {
                let keys = KEYS.min(self.block.len - tile);
                if self.visible(tile, keys, 0, queries).is_none() {
                    continue;
                }
                self.pack_keys(s, tile, keys);
                self.pack_values(s, tile, keys);
                for row in (0..queries).step_by(S::ROWS) {
                    let rows = S::ROWS.min(queries - row);
                    if let Some(visible) = self.visible(tile, keys, row, rows) {
                        self.attend(s, tile, visible, row, rows);
                    }
                }
            }
            for row in 0..queries {
                self.finish(s, row);
            }
        }
    }
}

impl<E: Element> ForwardBlock<'_, E> {
    /// Pointer to the workspace buffer at `offset`.
    #[inline(always)]
    fn buffer(&self, offset: usize) -> *mut f32 {
        self.scratch.wrapping_add(offset)
    }

    /// View of head `head` of this sequence in q, k or v.
    #[inline(always)]
    fn head<'b>(&self, x: Rows<'b, E>, head: usize) -> HeadRows<'b, E> {
        let dim = self.call.config.head_dim;
        HeadRows { x, start: self.block.start, column: head * dim, dim }
    }

    /// View of the key/value head that this query head uses.
    #[inline(always)]
    fn shared<'b>(&self, x: Rows<'b, E>) -> HeadRows<'b, E> {
        self.head(x, self.block.head / self.call.config.group())
    }

    /// The keys of a tile that rows `row..row + rows` of the block attend to.
    #[inline(always)]
    fn visible(&self, tile: usize, keys: usize, row: usize, rows: usize) -> Option<VisibleRange> {
        let first = self.block.first + row;
        keys_of(self.call.config.mask, first..first + rows, tile..tile + keys, self.block.len)
    }

    /// Packs keys `tile..tile + keys` rotated and transposed, with zeros up to a whole panel.
    ///
    /// # Safety
    /// The keys lie in the sequence.
    #[inline(always)]
    unsafe fn pack_keys<S: Simd>(&self, s: S, tile: usize, keys: usize) {
        // The scores are not in use yet, and their buffer is large enough for sixteen rows of ROW.
        let config = self.call.config;
        let rows = self.buffer(self.layout.scores);
        let rotation = Rotation { tables: config.rope, scale: 1.0 };
        let k = self.shared(self.call.k);
        for j in (0..keys.next_multiple_of(PANEL)).step_by(LANES) {
            // SAFETY: `keys <= KEYS`, so each panel lies in its buffer.
            unsafe {
                rotation.gather(s, k, tile + j..tile + keys, rows);
                transpose(s, config.head_dim, rows, self.buffer(self.layout.keys), j);
            }
        }
    }

    /// Copies values `tile..tile + keys` into panels of 32 columns, with zeros past the head.
    ///
    /// # Safety
    /// The keys lie in the sequence.
    #[inline(always)]
    unsafe fn pack_values<S: Simd>(&self, s: S, tile: usize, keys: usize) {
        let hd = self.call.config.head_dim;
        let values = self.shared(self.call.v);
        for j in (0..hd).step_by(LANES) {
            let n = LANES.min(hd - j);
            let to = self.buffer(self.layout.values).wrapping_add(j / PANEL * PANEL * KEYS + j % PANEL);
            for key in 0..keys {
                s.prefetch(values.row(tile + key + AHEAD).wrapping_add(j).cast());
                let from = values.row(tile + key).wrapping_add(j);
                // SAFETY: n columns of the key's row; a vector of its panel.
                unsafe { s.store(to.add(key * PANEL), E::load_n(s, from, n)) };
            }
        }
    }

    /// Runs one strip of queries against the keys of a tile in `visible`: scores, softmax, and the sum over values.
    ///
    /// # Safety
    /// The tile is packed; rows `row..row + rows` lie in the block.
    #[inline(always)]
    unsafe fn attend<S: Simd>(&self, s: S, tile: usize, visible: VisibleRange, row: usize, rows: usize) {
        let hd = self.call.config.head_dim;
        let VisibleRange { from, to, .. } = visible;
        let scores = self.buffer(self.layout.scores);
        let mut decay = [0.0f32; STRIP];
        // SAFETY: strips start at multiples of the tile height, and the last strip's tile ends at row QUERIES at
        // the latest: QUERIES is a multiple of 14, 4 and 2, and the tiles of AVX2 (6, 4 or 2 rows) have at most
        // one row of padding. The panels addressed lie inside their buffers.
        unsafe {
            let q = self.buffer(self.layout.queries).add(row * ROW);
            for j in (from..to).step_by(PANEL) {
                let matmul = StripMatmul {
                    rows,
                    vecs: (to - j).min(PANEL).div_ceil(LANES),
                    depth: hd,
                    a: q,
                    b: self.buffer(self.layout.keys).add(j * hd),
                    c: scores.add(j),
                    ldc: SCORES,
                    begin: InitialSums::Zero,
                };
                strip::<S, ROW, 0>(s, matmul, &[]);
            }
            for r in (0..rows).step_by(PAIR) {
                let factors = self.softmax_rows(s, tile, visible, row + r, scores.add(r * SCORES));
                decay[r..r + PAIR].copy_from_slice(&factors);
            }
            let begin = if visible.first { InitialSums::Zero } else { InitialSums::Scaled(decay.as_ptr()) };
            let ldo = hd.next_multiple_of(LANES);
            for j in (0..hd).step_by(PANEL) {
                let matmul = StripMatmul {
                    rows,
                    vecs: (hd - j).min(PANEL).div_ceil(LANES),
                    depth: to - from,
                    a: scores.add(from),
                    b: self.buffer(self.layout.values).add(j * KEYS + from * PANEL),
                    c: self.buffer(self.layout.out).add(row * ldo + j),
                    ldc: ldo,
                    begin,
                };
                strip::<S, SCORES, 0>(s, matmul, &[]);
            }
        }
    }

    /// Softmax step for a pair of rows: replaces scores by exponentials relative to the updated running maxima, and
    /// returns the factors by which the earlier sums must be scaled. Two rows at once, because the dependency chain
    /// of one row (maximum, exponentials, sum) is long.
    ///
    /// # Safety
    /// `scores` holds two rows of the visible range, rounded up to vectors; `row` lies in the block.
    #[inline(always)]
    unsafe fn softmax_rows<S: Simd>(
        &self,
        s: S,
        tile: usize,
        visible: VisibleRange,
        row: usize,
        scores: *mut f32,
    ) -> [f32; PAIR] {
        // SAFETY: as the caller promises; `top` and `sum` have an even number of entries.
        unsafe {
            let top = self.highest(s, tile, visible, row, scores);
            let mut now = [0.0; PAIR];
            let mut decay = [0.0; PAIR];
            for r in 0..PAIR {
                let at = self.buffer(self.layout.top + row + r);
                let before = if visible.first { LOWEST } else { *at };
                now[r] = s.max_lane(top[r]).max(before);
                *at = now[r];
                if !visible.first {
                    decay[r] = s.max_lane(exp(s, s.splat(before - now[r])));
                }
            }
            let now = now.map(|x| s.splat(x));
            let mut sums = [s.splat(0.0); PAIR];
            for j in (visible.from..visible.to).step_by(LANES) {
                for r in 0..PAIR {
                    let at = scores.add(r * SCORES + j);
                    let e = exp(s, s.sub(s.load(at), now[r]));
                    s.store(at, e);
                    sums[r] = s.add(sums[r], e);
                }
            }
            for r in 0..PAIR {
                let at = self.buffer(self.layout.sum + row + r);
                let before = if visible.first { 0.0 } else { *at * decay[r] };
                *at = before + s.sum(sums[r]);
            }
            decay
        }
    }

    /// Lane-wise maxima of a pair of rows of scores, after adding the ALiBi bias and replacing masked scores, and
    /// those past the visible range, by -inf.
    ///
    /// # Safety
    /// As for `softmax_rows`.
    #[inline(always)]
    unsafe fn highest<S: Simd>(
        &self,
        s: S,
        tile: usize,
        visible: VisibleRange,
        row: usize,
        scores: *mut f32,
    ) -> [S::V; PAIR] {
        let low = s.splat(f32::NEG_INFINITY);
        let mut top = [low; PAIR];
        let slope = self.call.config.slopes.map(|slopes| s.splat(-slopes[self.block.head]));
        let query = self.block.first + row;
        let runs: [_; PAIR] = core::array::from_fn(|r| self.call.config.mask.keys(query + r, self.block.len));
        for j in (visible.from..visible.to).step_by(LANES) {
            for (r, top) in top.iter_mut().enumerate() {
                let at = scores.wrapping_add(r * SCORES + j);
                // SAFETY: a vector of the row's scores.
                let mut v = unsafe { s.load(at) };
                if let Some(slope) = slope {
                    // Distances are integers below 2^24, hence exact in f32.
                    let i = (query + r) as f32 - (tile + j) as f32;
                    v = s.fma(slope, s.abs(s.sub(s.splat(i), s.iota())), v);
                }
                let inside = LANES.min(visible.to - j);
                if !visible.unmasked {
                    v = select(s, &runs[r], tile + j, v, low);
                }
                if inside < LANES {
                    v = s.first(v, low, inside);
                }
                if inside < LANES || slope.is_some() || !visible.unmasked {
                    // SAFETY: as above.
                    unsafe { s.store(at, v) };
                }
                // `max` returns its second operand for NaN: in this order a NaN leaves the maximum unchanged,
                // and reaches the row's sum through `exp`. In the other order the next score would replace the
                // maximum of all before.
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
        let hd = self.call.config.head_dim;
        let head = self.block.head;
        let t = self.block.start + self.block.first + row;
        let from = self.buffer(self.layout.out).wrapping_add(row * hd.next_multiple_of(LANES));
        // SAFETY: this task alone writes row t of this head; the buffers as laid out.
        unsafe {
            let top = *self.buffer(self.layout.top + row);
            let sum = *self.buffer(self.layout.sum + row);
            let inverse = s.splat(1.0 / sum);
            for j in (0..hd).step_by(LANES) {
                let v = s.mul(s.load(from.add(j)), inverse);
                E::store_n(s, self.call.o.row(t).add(head * hd + j), v, LANES.min(hd - j));
            }
            if let Some(lse) = self.call.lse {
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
            assert!(4 * ForwardWorkspace::new(head_dim).len <= workspace_bytes(head_dim), "{head_dim}");
        }
    }
}
