//! Backward pass of attention in f32, recomputing the weights from lse (Dao et al., 2022; Dao, 2023): p = exp(score -
//! lse), ds = p (do v - D), D = rowsum(do o), then dv, dk and dq by three more GEMMs.
//!
//! Keys are the rows and queries the columns: scores are computed transposed, (keys, queries), so that p and ds are
//! already the left factors of dv and dk, lse and D are vectors, and a single transposition of ds serves dq.
//!
//! Invariant: a task owns one key/value head of one sequence together with all query heads that share it, so no other
//! task adds to its gradients: dk and dv are summed over heads, blocks and queries in order, dq over key tiles in
//! order.

use super::grad_workspace_bytes;
use super::pack::{Head, copy, gather, rotate, transpose, turn_back};
use super::{Attention, ROW, STRIP, View, keys_of, queries_of, show};
use crate::Cpu;
use crate::matmul::register_tile::{Begin, PANEL, strip};
use crate::simd::isa::Kernel;
use crate::simd::math::exp;
use crate::simd::{LANES, Simd};
use crate::view::{Rows, RowsMut};

/// Keys per tile, and the row stride of ds with queries as rows.
const KEYS: usize = 192;
const TURNED: usize = KEYS + 16;
/// Queries per block, and the row stride of p and ds with keys as rows.
const QUERIES: usize = 128;
const SCORES: usize = QUERIES + 16;

/// Inputs of the backward pass: inputs and outputs of the forward pass, and the gradient of o.
#[derive(Clone, Copy)]
pub struct SavedForward<'a> {
    /// Queries, (T, H hd).
    pub q: Rows<'a>,
    /// Keys, (T, G hd).
    pub k: Rows<'a>,
    /// Values, (T, G hd).
    pub v: Rows<'a>,
    /// Output of the forward pass, (T, H hd).
    pub o: Rows<'a>,
    /// Logarithm of each row's sum of exponentials, (T, H).
    pub lse: Rows<'a>,
    /// Gradient of o, (T, H hd).
    pub gradient: Rows<'a>,
}

/// Outputs of the backward pass, of the shapes of q, k and v; they may be columns of one matrix. `None` for a
/// gradient that is not needed, such as the gradient of k if only q and v of the first layer are trained.
pub struct Gradients<'a> {
    /// Gradient of q, (T, H hd).
    pub q: Option<RowsMut<'a>>,
    /// Gradient of k, (T, G hd).
    pub k: Option<RowsMut<'a>>,
    /// Gradient of v, (T, G hd).
    pub v: Option<RowsMut<'a>>,
}

/// Computes the gradients of q, k and v. `spans` are ascending and disjoint; rows outside them are set to zero.
/// `workspace` holds `grad_workspace_bytes(head_dim)` for each thread. No output may overlap an input. Panics if
/// shapes are inconsistent or a span is longer than the rope table.
pub fn attention_grad(
    cpu: &Cpu,
    config: Attention<'_>,
    given: SavedForward<'_>,
    spans: &[[u32; 2]],
    wanted: Gradients<'_>,
    workspace: &mut [f32],
) {
    let queries = [given.q, given.o, given.gradient, shape(&wanted.q, given.q)];
    config.check(&queries, [given.k, given.v], Some(given.lse), spans);
    config.check(&queries, [shape(&wanted.k, given.k), shape(&wanted.v, given.v)], None, spans);
    let parts = WorkspaceLayout::new(config.head_dim);
    let threads = cpu.threads();
    let each = grad_workspace_bytes(config.head_dim) / 4;
    assert!(workspace.len() >= each * threads, "workspace for {threads} threads");
    debug_assert!(parts.len <= each, "the parts fit");
    let mut row = 0;
    let end = given.q.rows() as u32;
    for &[start, end] in spans.iter().chain(&[[end, end]]) {
        clear(&wanted, row..start as usize);
        row = end as usize;
    }
    let scratch = workspace.as_mut_ptr() as usize;
    let job = GradientCall { config, given, wanted: &wanted };
    cpu.pool().run(spans.len() * config.kv_heads, &|task, worker| {
        let [start, end] = spans[task / config.kv_heads].map(|row| row as usize);
        let scratch = (scratch as *mut f32).wrapping_add(worker * each);
        let place = KeyHead { start, len: end - start, shared: task % config.kv_heads };
        cpu.isa().run(GradientBlock { job, place, parts, scratch });
    });
}

/// View of an output for the shape check; `like`, which has the required shape, if the output is not needed.
fn shape<'a>(x: &'a Option<RowsMut<'_>>, like: Rows<'a>) -> Rows<'a> {
    x.as_ref().map_or(like, |x| x.as_rows())
}

/// Zeroes the rows of all outputs that belong to no sequence.
fn clear(wanted: &Gradients<'_>, rows: core::ops::Range<usize>) {
    for x in [&wanted.q, &wanted.k, &wanted.v].into_iter().flatten() {
        // SAFETY: rows of an output, to which no task writes yet.
        rows.clone().for_each(|r| unsafe { x.row(r).write_bytes(0, x.cols()) });
    }
}

/// Offsets of the buffers in a thread's workspace, in f32 elements. Each comment gives the shape and the content of the
/// buffers below it.
#[derive(Clone, Copy)]
struct WorkspaceLayout {
    /// [KEYS + STRIP][ROW] each: keys after the rotary embedding, and values
    keys: usize,
    values: usize,
    /// [panel of 32 columns][KEYS][32]: keys after the rotary embedding
    key_panels: usize,
    /// [KEYS + STRIP][columns rounded up to vectors] each: the sums dk, dv
    dk: usize,
    dv: usize,
    /// [panel of 32 queries][head_dim][32] each: q, do
    q_turned: usize,
    do_turned: usize,
    /// [panel of 32 columns][QUERIES][32] each: q, do
    q_panels: usize,
    do_panels: usize,
    /// [QUERIES] each: lse, D
    lse: usize,
    inner: usize,
    /// [STRIP][SCORES]: p of a strip of keys
    weights: usize,
    /// [KEYS + STRIP][SCORES]: ds, keys in rows
    ds: usize,
    /// [QUERIES + STRIP][TURNED]: ds, queries in rows
    ds_turned: usize,
    /// dq of a strip of queries: [STRIP][columns rounded up to vectors]
    dq: usize,
    len: usize,
}

impl WorkspaceLayout {
    const fn new(head_dim: usize) -> WorkspaceLayout {
        let wide = head_dim.next_multiple_of(LANES);
        let panels = head_dim.next_multiple_of(PANEL);
        let keys = 0;
        let values = keys + (KEYS + STRIP) * ROW;
        let key_panels = values + (KEYS + STRIP) * ROW;
        let dk = key_panels + KEYS * panels;
        let dv = dk + (KEYS + STRIP) * wide;
        let q_turned = dv + (KEYS + STRIP) * wide;
        let do_turned = q_turned + QUERIES * head_dim;
        let q_panels = do_turned + QUERIES * head_dim;
        let do_panels = q_panels + QUERIES * panels;
        let lse = do_panels + QUERIES * panels;
        let inner = lse + QUERIES;
        let weights = inner + QUERIES;
        let ds = weights + STRIP * SCORES;
        let ds_turned = ds + (KEYS + STRIP) * SCORES;
        let dq = ds_turned + (QUERIES + STRIP) * TURNED;
        let len = dq + STRIP * wide;
        WorkspaceLayout {
            keys,
            values,
            key_panels,
            dk,
            dv,
            q_turned,
            do_turned,
            q_panels,
            do_panels,
            lse,
            inner,
            weights,
            ds,
            ds_turned,
            dq,
            len,
        }
    }
}

/// Inputs and outputs of one call, shared by all its tasks.
#[derive(Clone, Copy)]
struct GradientCall<'a> {
    config: Attention<'a>,
    given: SavedForward<'a>,
    wanted: &'a Gradients<'a>,
}

/// A key/value head (`shared`) of the sequence of `len` rows that starts at row `start`.
#[derive(Clone, Copy)]
struct KeyHead {
    start: usize,
    len: usize,
    shared: usize,
}

/// A range of positions.
#[derive(Clone, Copy)]
struct Run {
    first: usize,
    count: usize,
}

/// Kernel that computes the gradients of one key/value head of one sequence. `scratch` is this worker's own workspace
/// of `grad_workspace_bytes`.
struct GradientBlock<'a> {
    job: GradientCall<'a>,
    place: KeyHead,
    parts: WorkspaceLayout,
    scratch: *mut f32,
}

impl Kernel for GradientBlock<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let len = self.place.len;
        let config = self.job.config;
        let group = self.place.shared * config.group()..(self.place.shared + 1) * config.group();
        let runs =
            |size: usize| (0..len).step_by(size).map(move |first| Run { first, count: size.min(len - first) });
        // SAFETY: the scratch is laid out by `bf16x3`; every row and column below lies in the task's sequence and
        // heads, which `attention_grad` has checked, and no other task writes there.
        unsafe {
            for head in group.clone() {
                (0..len).filter_map(|i| self.dq(head, i)).for_each(|dq| dq.write_bytes(0, config.head_dim));
            }
            for tile in runs(KEYS) {
                self.pack_keys(s, tile);
                for head in group.clone() {
                    for block in runs(QUERIES) {
                        if self.queries(tile, 0, tile.count, block).is_some() {
                            self.pack_queries(s, head, block);
                            self.keys_of_block(s, head, tile, block);
                            if self.job.wanted.q.is_some() {
                                self.queries_of_block(s, head, tile, block);
                            }
                        }
                    }
                }
                self.finish_keys(s, tile);
            }
            for head in group {
                for i in 0..len {
                    let Some(dq) = self.dq(head, i) else { break };
                    turn_back(s, config.head_dim, config.rope, i, config.scale, dq, dq);
                }
            }
        }
    }
}

impl GradientBlock<'_> {
    /// Pointer to the workspace buffer at `offset`.
    #[inline(always)]
    fn part(&self, offset: usize) -> *mut f32 {
        self.scratch.wrapping_add(offset)
    }

    /// View of head `head` of this sequence.
    #[inline(always)]
    fn head<'b>(&self, x: Rows<'b>, head: usize) -> Head<'b> {
        let dim = self.job.config.head_dim;
        Head { x, start: self.place.start, column: head * dim, dim }
    }

    /// Where the gradient of position `i` of query head `head` is accumulated, in the output itself; `None` if it is
    /// not needed.
    #[inline(always)]
    fn dq(&self, head: usize, i: usize) -> Option<*mut f32> {
        let row = self.job.wanted.q.as_ref()?.row(self.place.start + i);
        Some(row.wrapping_add(head * self.job.config.head_dim))
    }

    /// The queries of a block that attend to any of the keys `row..row + rows` of a tile.
    #[inline(always)]
    fn queries(&self, tile: Run, row: usize, rows: usize, block: Run) -> Option<View> {
        let first = tile.first + row;
        let block = block.first..block.first + block.count;
        queries_of(self.job.config.mask, first..first + rows, block, self.place.len)
    }

    /// Packs the keys and values of a tile, with zero rows after them, and zeroes the accumulators of dk and dv.
    ///
    /// # Safety
    /// The tile lies in the sequence.
    #[inline(always)]
    unsafe fn pack_keys<S: Simd>(&self, s: S, tile: Run) {
        let config = self.job.config;
        let p = self.parts;
        let k = self.head(self.job.given.k, self.place.shared);
        let v = self.head(self.job.given.v, self.place.shared);
        let keys = self.part(p.keys);
        let values = self.part(p.values);
        let wide = config.head_dim.next_multiple_of(LANES);
        // SAFETY: `tile.count <= KEYS`; the parts have STRIP rows more.
        unsafe {
            for r in 0..tile.count {
                rotate(s, k, config.rope, tile.first + r, 1.0, keys.add(r * ROW));
                rotate(s, v, None, tile.first + r, 1.0, values.add(r * ROW));
            }
            keys.add(tile.count * ROW).write_bytes(0, STRIP * ROW);
            values.add(tile.count * ROW).write_bytes(0, STRIP * ROW);
            copy(s, config.head_dim, keys, self.part(p.key_panels), (0, tile.count, KEYS));
            self.part(p.dk).write_bytes(0, (tile.count + STRIP) * wide);
            self.part(p.dv).write_bytes(0, (tile.count + STRIP) * wide);
        }
    }

    /// Packs q and do of a block, both transposed and as panels, with zeros up to whole panels; also lse and D.
    ///
    /// # Safety
    /// The block lies in the sequence.
    #[inline(always)]
    unsafe fn pack_queries<S: Simd>(&self, s: S, head: usize, block: Run) {
        let config = self.job.config;
        let p = self.parts;
        let given = self.job.given;
        let [q, o, gradient] = [given.q, given.o, given.gradient].map(|x| self.head(x, head));
        // ds is not in use yet, and its buffer is large enough for sixteen rows of ROW.
        let hd = config.head_dim;
        let rows = self.part(p.ds_turned);
        for j in (0..block.count.next_multiple_of(PANEL)).step_by(LANES) {
            let some = (block.first + j, block.count.saturating_sub(j));
            let place = (j, LANES, QUERIES);
            // SAFETY: `block.count <= QUERIES`, a multiple of panels, so that sixteen rows more lie in the parts;
            // positions below `block.count` are in the sequence.
            unsafe {
                gather(s, q, config.rope, some, config.scale, rows);
                transpose(s, hd, rows, self.part(p.q_turned), j);
                copy(s, hd, rows, self.part(p.q_panels), place);
                gather(s, gradient, None, some, 1.0, rows);
                transpose(s, hd, rows, self.part(p.do_turned), j);
                copy(s, hd, rows, self.part(p.do_panels), place);
                for r in 0..LANES {
                    let i = block.first + j + r;
                    let inside = j + r < block.count;
                    let inner = if inside { inner(s, o, i, rows.add(r * ROW)) } else { 0.0 };
                    let lse = if inside { *given.lse.row(self.place.start + i).add(head) } else { 0.0 };
                    self.part(p.inner).add(j + r).write(inner);
                    self.part(p.lse).add(j + r).write(lse);
                }
            }
        }
    }

    /// Processes a block of queries against a tile of keys: computes p and ds, and adds their contributions to dv and
    /// dk.
    ///
    /// # Safety
    /// Tile and block are packed.
    #[inline(always)]
    unsafe fn keys_of_block<S: Simd>(&self, s: S, head: usize, tile: Run, block: Run) {
        let p = self.parts;
        let hd = self.job.config.head_dim;
        let wide = hd.next_multiple_of(LANES);
        let columns = block.count.next_multiple_of(LANES);
        let weights = self.part(p.weights);
        for row in (0..tile.count).step_by(S::ROWS) {
            let rows = S::ROWS.min(tile.count - row);
            let ds = self.part(p.ds).wrapping_add(row * SCORES);
            let view = self.queries(tile, row, rows, block);
            let (from, to) = view.map_or((columns, columns), |view| (view.from, view.to));
            let used = to.next_multiple_of(LANES);
            // SAFETY: strips start at multiples of the tile's height in parts with STRIP rows to spare; columns
            // belong to the block, rounded up to panels.
            unsafe {
                for r in 0..rows {
                    ds.add(r * SCORES).write_bytes(0, from);
                    ds.add(r * SCORES + used).write_bytes(0, columns.saturating_sub(used));
                }
                let Some(view) = view else { continue };
                for j in (from..to).step_by(PANEL) {
                    let shape = (rows, (to - j).min(PANEL).div_ceil(LANES));
                    let k = self.part(p.keys).add(row * ROW);
                    let v = self.part(p.values).add(row * ROW);
                    let q = self.part(p.q_turned).add(j * hd);
                    let dy = self.part(p.do_turned).add(j * hd);
                    strip::<S, ROW, 0>(s, shape, hd, k, q, weights.add(j), SCORES, Begin::Zero, &[]);
                    strip::<S, ROW, 0>(s, shape, hd, v, dy, ds.add(j), SCORES, Begin::Zero, &[]);
                }
                for r in 0..rows {
                    let at = (weights.add(r * SCORES), ds.add(r * SCORES));
                    self.weigh(s, head, tile.first + row + r, block, view, at);
                }
                for j in (0..hd).step_by(PANEL) {
                    let shape = (rows, (hd - j).min(PANEL).div_ceil(LANES));
                    let at = j * QUERIES + from * PANEL;
                    let q = self.part(p.q_panels).add(at);
                    let dy = self.part(p.do_panels).add(at);
                    let dk = self.part(p.dk).add(row * wide + j);
                    let dv = self.part(p.dv).add(row * wide + j);
                    let depth = to - from;
                    let begin = Begin::Sums;
                    strip::<S, SCORES, 0>(s, shape, depth, weights.add(from), dy, dv, wide, begin, &[]);
                    strip::<S, SCORES, 0>(s, shape, depth, ds.add(from), q, dk, wide, begin, &[]);
                }
            }
        }
    }

    /// Replaces a row of scores by weights p, and a row of do v by ds, both for key `key` and the queries of a view.
    ///
    /// # Safety
    /// Both rows hold the view, rounded up to vectors.
    #[inline(always)]
    unsafe fn weigh<S: Simd>(
        &self,
        s: S,
        head: usize,
        key: usize,
        block: Run,
        view: View,
        (weights, ds): (*mut f32, *mut f32),
    ) {
        let slope = self.job.config.slopes.map(|slopes| s.splat(-slopes[head]));
        let mut run = self.job.config.mask.queries(key, self.place.len);
        run.end = run.end.min(block.first + view.to);
        for j in (view.from..view.to).step_by(LANES) {
            // SAFETY: a vector of the rows, and of lse and D, which are as long as a block.
            unsafe {
                let lse = s.load(self.part(self.parts.lse).add(j));
                let inner = s.load(self.part(self.parts.inner).add(j));
                let mut score = s.load(weights.add(j));
                if let Some(slope) = slope {
                    // Distances are integers below 2^24, hence exact in f32.
                    let distance = s.sub(s.splat(key as f32 - (block.first + j) as f32), s.iota());
                    score = s.fma(slope, s.abs(distance), score);
                }
                let mut p = exp(s, s.sub(score, lse));
                let mut d = s.mul(p, s.sub(s.load(ds.add(j)), inner));
                if !view.whole || j + LANES > view.to {
                    // Selected, not multiplied by zero: a masked value may be infinite, and infinity times zero is
                    // NaN.
                    let runs = core::slice::from_ref(&run);
                    let zero = s.splat(0.0);
                    p = show(s, runs, block.first + j, p, zero);
                    d = show(s, runs, block.first + j, d, zero);
                }
                s.store(weights.add(j), p);
                s.store(ds.add(j), d);
            }
        }
    }

    /// Transposes ds and adds ds k to dq.
    ///
    /// # Safety
    /// ds of the tile and the block is whole.
    #[inline(always)]
    unsafe fn queries_of_block<S: Simd>(&self, s: S, head: usize, tile: Run, block: Run) {
        let p = self.parts;
        let hd = self.job.config.head_dim;
        let wide = hd.next_multiple_of(LANES);
        let keys = tile.first..tile.first + tile.count;
        let ds = self.part(p.ds);
        let turned = self.part(p.ds_turned);
        let sums = self.part(p.dq);
        // SAFETY: KEYS and QUERIES are multiples of the vector width; `ds_turned` has STRIP spare rows, and results
        // for rows past the block or keys past the tile are never read.
        unsafe {
            for k in (0..tile.count).step_by(LANES) {
                for j in (0..block.count).step_by(LANES) {
                    let mut square = [s.splat(0.0); LANES];
                    for (r, v) in square.iter_mut().enumerate() {
                        *v = s.load(ds.add((k + r) * SCORES + j));
                    }
                    s.transpose(&mut square);
                    for (r, &v) in square.iter().enumerate() {
                        s.store(turned.add((j + r) * TURNED + k), v);
                    }
                }
            }
            for row in (0..block.count).step_by(S::ROWS) {
                let rows = S::ROWS.min(block.count - row);
                let first = block.first + row;
                let mask = self.job.config.mask;
                let Some(view) = keys_of(mask, first..first + rows, keys.clone(), self.place.len) else {
                    continue;
                };
                let ds = turned.add(row * TURNED + view.from);
                for j in (0..hd).step_by(PANEL) {
                    let shape = (rows, (hd - j).min(PANEL).div_ceil(LANES));
                    let k = self.part(p.key_panels).add(j * KEYS + view.from * PANEL);
                    let depth = view.to - view.from;
                    strip::<S, TURNED, 0>(s, shape, depth, ds, k, sums.add(j), wide, Begin::Zero, &[]);
                }
                for r in 0..rows {
                    let Some(dq) = self.dq(head, first + r) else { break };
                    for j in (0..hd).step_by(LANES) {
                        let n = LANES.min(hd - j);
                        let sum = s.add(s.load_n(dq.add(j), n), s.load(sums.add(r * wide + j)));
                        s.store_n(dq.add(j), sum, n);
                    }
                }
            }
        }
    }

    /// Writes dk, rotated back, and dv to the outputs.
    ///
    /// # Safety
    /// The tile has seen all heads and blocks.
    #[inline(always)]
    unsafe fn finish_keys<S: Simd>(&self, s: S, tile: Run) {
        let config = self.job.config;
        let p = self.parts;
        let hd = config.head_dim;
        let wide = config.head_dim.next_multiple_of(LANES);
        for r in 0..tile.count {
            let i = tile.first + r;
            let row = self.place.start + i;
            let column = self.place.shared * hd;
            // SAFETY: rows of the tile; this task alone writes to this head.
            unsafe {
                let dk = self.part(p.dk).add(r * wide);
                let dv = self.part(p.dv).add(r * wide);
                if let Some(k) = &self.job.wanted.k {
                    turn_back(s, hd, config.rope, i, 1.0, dk, k.row(row).add(column));
                }
                if let Some(v) = &self.job.wanted.v {
                    turn_back(s, hd, None, i, 1.0, dv, v.row(row).add(column));
                }
            }
        }
    }
}

/// The dot product `o[i] . row`: sixteen interleaved sums, added in the fixed tree.
///
/// # Safety
/// Position i lies in the sequence; `row` holds the head.
#[inline(always)]
unsafe fn inner<S: Simd>(s: S, o: Head<'_>, i: usize, row: *const f32) -> f32 {
    o.prefetch(s, i);
    let mut sum = s.splat(0.0);
    for j in (0..o.dim).step_by(LANES) {
        let n = LANES.min(o.dim - j);
        // SAFETY: j + n stays in both rows.
        sum = unsafe { s.fma(s.load_n(o.row(i).add(j), n), s.load_n(row.add(j), n), sum) };
    }
    s.sum(sum)
}

#[cfg(test)]
mod tests {
    use super::super::MAX_HEAD_DIM;
    use super::*;

    #[test]
    fn the_parts_fit_in_the_workspace() {
        for head_dim in 1..=MAX_HEAD_DIM {
            assert!(4 * WorkspaceLayout::new(head_dim).len <= grad_workspace_bytes(head_dim), "{head_dim}");
        }
    }
}
