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
use super::pack::{HeadRows, PanelRows, Rotation, copy, transpose};
use super::{AttentionConfig, ROW, STRIP, VisibleRange, keys_of, queries_of, select};
use crate::Cpu;
use crate::matmul::register_tile::{InitialSums, PANEL, StripMatmul, strip};
use crate::simd::isa::SimdKernel;
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
    /// (start, end) of every sequence, ascending and disjoint.
    pub spans: &'a [[u32; 2]],
}

/// Outputs of the backward pass, of the shapes of q, k and v; they may be columns of one matrix. `None` for a
/// gradient that is not needed, such as the gradient of k if only q and v of the first layer are trained.
pub struct AttentionGradients<'a> {
    /// Gradient of q, (T, H hd).
    pub q: Option<RowsMut<'a>>,
    /// Gradient of k, (T, G hd).
    pub k: Option<RowsMut<'a>>,
    /// Gradient of v, (T, G hd).
    pub v: Option<RowsMut<'a>>,
}

/// Computes the gradients of q, k and v. Rows outside of the sequences are set to zero. `workspace` holds
/// `grad_workspace_bytes(head_dim)` for each thread. No output may overlap an input. Panics if shapes are inconsistent
/// or a span is longer than the rotary tables.
pub fn attention_grad(
    cpu: &Cpu,
    config: AttentionConfig<'_>,
    saved: SavedForward<'_>,
    gradients: AttentionGradients<'_>,
    workspace: &mut [f32],
) {
    let spans = saved.spans;
    let queries = [saved.q, saved.o, saved.gradient, shape(&gradients.q, saved.q)];
    config.check(&queries, [saved.k, saved.v], Some(saved.lse), spans);
    config.check(&queries, [shape(&gradients.k, saved.k), shape(&gradients.v, saved.v)], None, spans);
    let layout = GradientWorkspace::new(config.head_dim);
    let threads = cpu.threads();
    let words_per_thread = grad_workspace_bytes(config.head_dim) / 4;
    assert!(workspace.len() >= words_per_thread * threads, "workspace for {threads} threads");
    debug_assert!(layout.len <= words_per_thread, "the parts fit");
    // The gaps between sequences, and the rows after the last.
    let mut row = 0;
    let end = saved.q.rows() as u32;
    for &[start, end] in spans.iter().chain(&[[end, end]]) {
        clear(&gradients, row..start as usize);
        row = end as usize;
    }
    let workspace = workspace.as_mut_ptr() as usize;
    let call = GradientCall { config, saved, gradients: &gradients };
    cpu.pool().run(spans.len() * config.kv_heads, &|task, worker| {
        let [start, end] = spans[task / config.kv_heads].map(|row| row as usize);
        let scratch = (workspace as *mut f32).wrapping_add(worker * words_per_thread);
        let kv_head = KeyValueHead { start, len: end - start, index: task % config.kv_heads };
        cpu.isa().run(GradientBlock { call, kv_head, layout, scratch });
    });
}

/// View of an output for the shape check; `like`, which has the required shape, if the output is not needed.
fn shape<'a>(x: &'a Option<RowsMut<'_>>, like: Rows<'a>) -> Rows<'a> {
    x.as_ref().map_or(like, |x| x.as_rows())
}

/// Zeroes the rows of all outputs that belong to no sequence.
fn clear(gradients: &AttentionGradients<'_>, rows: core::ops::Range<usize>) {
    for x in [&gradients.q, &gradients.k, &gradients.v].into_iter().flatten() {
        // SAFETY: rows of an output, to which no task writes yet.
        rows.clone().for_each(|r| unsafe { x.row(r).write_bytes(0, x.cols()) });
    }
}

/// Offsets of the buffers in a thread's workspace, in f32 elements. Each comment gives the shape and the content of the
/// buffers below it.
#[derive(Clone, Copy)]
struct GradientWorkspace {
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

impl GradientWorkspace {
    const fn new(head_dim: usize) -> GradientWorkspace {
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
        GradientWorkspace {
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
    config: AttentionConfig<'a>,
    saved: SavedForward<'a>,
    gradients: &'a AttentionGradients<'a>,
}

/// Key/value head `index` of the sequence of `len` rows that starts at row `start`.
#[derive(Clone, Copy)]
struct KeyValueHead {
    start: usize,
    len: usize,
    index: usize,
}

impl KeyValueHead {
    /// The positions of the sequence, `size` at a time.
    fn positions_by(self, size: usize) -> impl Iterator<Item = PositionRange> {
        (0..self.len).step_by(size).map(move |first| PositionRange { first, count: size.min(self.len - first) })
    }
}

/// Positions `first..first + count` of a sequence: a tile of keys, or a block of queries.
#[derive(Clone, Copy)]
struct PositionRange {
    first: usize,
    count: usize,
}

/// Rows of p and ds for one key; columns are queries.
#[derive(Clone, Copy)]
struct KeyRows {
    /// Position of the key.
    key: usize,
    weights: *mut f32,
    ds: *mut f32,
}

/// Kernel that computes the gradients of one key/value head of one sequence. `scratch` is this worker's own workspace
/// of `grad_workspace_bytes`.
struct GradientBlock<'a> {
    call: GradientCall<'a>,
    kv_head: KeyValueHead,
    layout: GradientWorkspace,
    scratch: *mut f32,
}

impl SimdKernel for GradientBlock<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let len = self.kv_head.len;
        let config = self.call.config;
        let group = self.kv_head.index * config.group()..(self.kv_head.index + 1) * config.group();
        let rotation = Rotation { tables: config.rope, scale: config.scale };
        // SAFETY: the scratch is laid out by `layout`; every row and column below lies in the task's sequence and
        // heads, which `attention_grad` has checked, and no other task writes there.
        unsafe {
            for head in group.clone() {
                (0..len).filter_map(|i| self.dq(head, i)).for_each(|dq| dq.write_bytes(0, config.head_dim));
            }
            for tile in self.kv_head.positions_by(KEYS) {
                self.pack_keys(s, tile);
                for head in group.clone() {
                    for block in self.kv_head.positions_by(QUERIES) {
                        if self.visible_queries(tile, 0, tile.count, block).is_some() {
                            self.pack_queries(s, head, block);
                            self.keys_of_block(s, head, tile, block);
                            if self.call.gradients.q.is_some() {
                                self.queries_of_block(s, head, tile, block);
                            }
                        }
                    }
                }
                self.finish_keys(s, tile);
            }
            // dq has been summed over all key tiles, in rotated coordinates.
            for head in group {
                for i in 0..len {
                    let Some(dq) = self.dq(head, i) else { break };
                    rotation.apply_transpose(s, config.head_dim, i, dq, dq);
                }
            }
        }
    }
}

impl GradientBlock<'_> {
    /// Pointer to the workspace buffer at `offset`.
    #[inline(always)]
    fn buffer(&self, offset: usize) -> *mut f32 {
        self.scratch.wrapping_add(offset)
    }

    /// View of head `head` of this sequence.
    #[inline(always)]
    fn head<'b>(&self, x: Rows<'b>, head: usize) -> HeadRows<'b> {
        let dim = self.call.config.head_dim;
        HeadRows { x, start: self.kv_head.start, column: head * dim, dim }
    }

    /// Where the gradient of position `i` of query head `head` is accumulated, in the output itself; `None` if it is
    /// not needed.
    #[inline(always)]
    fn dq(&self, head: usize, i: usize) -> Option<*mut f32> {
        let row = self.call.gradients.q.as_ref()?.row(self.kv_head.start + i);
        Some(row.wrapping_add(head * self.call.config.head_dim))
    }

    /// The queries of a block that attend to any of the keys `row..row + rows` of a tile.
    #[inline(always)]
    fn visible_queries(
        &self,
        tile: PositionRange,
        row: usize,
        rows: usize,
        block: PositionRange,
    ) -> Option<VisibleRange> {
        let first = tile.first + row;
        let block = block.first..block.first + block.count;
        queries_of(self.call.config.mask, first..first + rows, block, self.kv_head.len)
    }

    /// Packs the keys and values of a tile, with zero rows after them, and zeroes the accumulators of dk and dv.
    ///
    /// # Safety
    /// The tile lies in the sequence.
    #[inline(always)]
    unsafe fn pack_keys<S: Simd>(&self, s: S, tile: PositionRange) {
        let config = self.call.config;
        let layout = self.layout;
        let k = self.head(self.call.saved.k, self.kv_head.index);
        let v = self.head(self.call.saved.v, self.kv_head.index);
        let keys = self.buffer(layout.keys);
        let values = self.buffer(layout.values);
        let wide = config.head_dim.next_multiple_of(LANES);
        let rotation = Rotation { tables: config.rope, scale: 1.0 };
        // SAFETY: `tile.count <= KEYS`; the buffers have STRIP rows more.
        unsafe {
            for r in 0..tile.count {
                rotation.apply(s, k, tile.first + r, keys.add(r * ROW));
                Rotation::NONE.apply(s, v, tile.first + r, values.add(r * ROW));
            }
            keys.add(tile.count * ROW).write_bytes(0, STRIP * ROW);
            values.add(tile.count * ROW).write_bytes(0, STRIP * ROW);
            let rows = PanelRows { first: 0, count: tile.count, height: KEYS };
            copy(s, config.head_dim, keys, self.buffer(layout.key_panels), rows);
            self.buffer(layout.dk).write_bytes(0, (tile.count + STRIP) * wide);
            self.buffer(layout.dv).write_bytes(0, (tile.count + STRIP) * wide);
        }
    }

    /// Packs q and do of a block, both transposed and as panels, with zeros up to whole panels; also lse and D.
    ///
    /// # Safety
    /// The block lies in the sequence.
    #[inline(always)]
    unsafe fn pack_queries<S: Simd>(&self, s: S, head: usize, block: PositionRange) {
        let config = self.call.config;
        let layout = self.layout;
        let saved = self.call.saved;
        let rotation = Rotation { tables: config.rope, scale: config.scale };
        let [q, o, gradient] = [saved.q, saved.o, saved.gradient].map(|x| self.head(x, head));
        // ds is not in use yet, and its buffer is large enough for sixteen rows of ROW.
        let hd = config.head_dim;
        let rows = self.buffer(layout.ds_turned);
        for j in (0..block.count.next_multiple_of(PANEL)).step_by(LANES) {
            let positions = block.first + j..block.first + block.count;
            let panel_rows = PanelRows { first: j, count: LANES, height: QUERIES };
            // SAFETY: `block.count <= QUERIES`, a multiple of panels, so that sixteen rows more lie in the buffers;
            // positions below `block.count` are in the sequence.
            unsafe {
                rotation.gather(s, q, positions.clone(), rows);
                transpose(s, hd, rows, self.buffer(layout.q_turned), j);
                copy(s, hd, rows, self.buffer(layout.q_panels), panel_rows);
                Rotation::NONE.gather(s, gradient, positions, rows);
                transpose(s, hd, rows, self.buffer(layout.do_turned), j);
                copy(s, hd, rows, self.buffer(layout.do_panels), panel_rows);
                for r in 0..LANES {
                    let i = block.first + j + r;
                    let inside = j + r < block.count;
                    let inner = if inside { inner(s, o, i, rows.add(r * ROW)) } else { 0.0 };
                    let lse = if inside { *saved.lse.row(self.kv_head.start + i).add(head) } else { 0.0 };
                    self.buffer(layout.inner).add(j + r).write(inner);
                    self.buffer(layout.lse).add(j + r).write(lse);
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
    unsafe fn keys_of_block<S: Simd>(&self, s: S, head: usize, tile: PositionRange, block: PositionRange) {
        let layout = self.layout;
        let hd = self.call.config.head_dim;
        let wide = hd.next_multiple_of(LANES);
        let columns = block.count.next_multiple_of(LANES);
        let weights = self.buffer(layout.weights);
        for row in (0..tile.count).step_by(S::ROWS) {
            let rows = S::ROWS.min(tile.count - row);
            let ds = self.buffer(layout.ds).wrapping_add(row * SCORES);
            let visible = self.visible_queries(tile, row, rows, block);
            let (from, to) = visible.map_or((columns, columns), |visible| (visible.from, visible.to));
            let used = to.next_multiple_of(LANES);
            // SAFETY: strips start at multiples of the tile's height in buffers with STRIP rows to spare; columns
            // belong to the block, rounded up to panels.
            unsafe {
                // `queries_of_block` reads ds of all columns: zeros where these keys are not visible.
                for r in 0..rows {
                    ds.add(r * SCORES).write_bytes(0, from);
                    ds.add(r * SCORES + used).write_bytes(0, columns.saturating_sub(used));
                }
                let Some(visible) = visible else { continue };
                for j in (from..to).step_by(PANEL) {
                    let scores = StripMatmul {
                        rows,
                        vecs: (to - j).min(PANEL).div_ceil(LANES),
                        depth: hd,
                        a: self.buffer(layout.keys).add(row * ROW),
                        b: self.buffer(layout.q_turned).add(j * hd),
                        c: weights.add(j),
                        ldc: SCORES,
                        begin: InitialSums::Zero,
                    };
                    strip::<S, ROW, 0>(s, scores, &[]);
                    let do_v = StripMatmul {
                        a: self.buffer(layout.values).add(row * ROW),
                        b: self.buffer(layout.do_turned).add(j * hd),
                        c: ds.add(j),
                        ..scores
                    };
                    strip::<S, ROW, 0>(s, do_v, &[]);
                }
                for r in 0..rows {
                    let key_rows = KeyRows {
                        key: tile.first + row + r,
                        weights: weights.add(r * SCORES),
                        ds: ds.add(r * SCORES),
                    };
                    self.weights_and_ds(s, head, block, visible, key_rows);
                }
                for j in (0..hd).step_by(PANEL) {
                    let at = j * QUERIES + from * PANEL;
                    let dv = StripMatmul {
                        rows,
                        vecs: (hd - j).min(PANEL).div_ceil(LANES),
                        depth: to - from,
                        a: weights.add(from),
                        b: self.buffer(layout.do_panels).add(at),
                        c: self.buffer(layout.dv).add(row * wide + j),
                        ldc: wide,
                        begin: InitialSums::Stored,
                    };
                    strip::<S, SCORES, 0>(s, dv, &[]);
                    let dk = StripMatmul {
                        a: ds.add(from),
                        b: self.buffer(layout.q_panels).add(at),
                        c: self.buffer(layout.dk).add(row * wide + j),
                        ..dv
                    };
                    strip::<S, SCORES, 0>(s, dk, &[]);
                }
            }
        }
    }

    /// Replaces a row of scores by weights p, and a row of do v by ds, both for one key and the visible queries.
    ///
    /// # Safety
    /// Both rows hold the visible range, rounded up to vectors.
    #[inline(always)]
    unsafe fn weights_and_ds<S: Simd>(
        &self,
        s: S,
        head: usize,
        block: PositionRange,
        visible: VisibleRange,
        rows: KeyRows,
    ) {
        let KeyRows { key, weights, ds } = rows;
        let slope = self.call.config.slopes.map(|slopes| s.splat(-slopes[head]));
        let mut run = self.call.config.mask.queries(key, self.kv_head.len);
        run.end = run.end.min(block.first + visible.to);
        for j in (visible.from..visible.to).step_by(LANES) {
            // SAFETY: a vector of the rows, and of lse and D, which are as long as a block.
            unsafe {
                let lse = s.load(self.buffer(self.layout.lse).add(j));
                let inner = s.load(self.buffer(self.layout.inner).add(j));
                let mut score = s.load(weights.add(j));
                if let Some(slope) = slope {
                    // Distances are integers below 2^24, hence exact in f32.
                    let distance = s.sub(s.splat(key as f32 - (block.first + j) as f32), s.iota());
                    score = s.fma(slope, s.abs(distance), score);
                }
                let mut p = exp(s, s.sub(score, lse));
                let mut d = s.mul(p, s.sub(s.load(ds.add(j)), inner));
                if !visible.unmasked || j + LANES > visible.to {
                    // Selected, not multiplied by zero: a masked value may be infinite, and infinity times zero is
                    // NaN.
                    let runs = core::slice::from_ref(&run);
                    let zero = s.splat(0.0);
                    p = select(s, runs, block.first + j, p, zero);
                    d = select(s, runs, block.first + j, d, zero);
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
    unsafe fn queries_of_block<S: Simd>(&self, s: S, head: usize, tile: PositionRange, block: PositionRange) {
        let layout = self.layout;
        let hd = self.call.config.head_dim;
        let wide = hd.next_multiple_of(LANES);
        let keys = tile.first..tile.first + tile.count;
        let ds = self.buffer(layout.ds);
        let turned = self.buffer(layout.ds_turned);
        let sums = self.buffer(layout.dq);
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
                let mask = self.call.config.mask;
                let Some(visible) = keys_of(mask, first..first + rows, keys.clone(), self.kv_head.len) else {
                    continue;
                };
                for j in (0..hd).step_by(PANEL) {
                    let matmul = StripMatmul {
                        rows,
                        vecs: (hd - j).min(PANEL).div_ceil(LANES),
                        depth: visible.to - visible.from,
                        a: turned.add(row * TURNED + visible.from),
                        b: self.buffer(layout.key_panels).add(j * KEYS + visible.from * PANEL),
                        c: sums.add(j),
                        ldc: wide,
                        begin: InitialSums::Zero,
                    };
                    strip::<S, TURNED, 0>(s, matmul, &[]);
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
    unsafe fn finish_keys<S: Simd>(&self, s: S, tile: PositionRange) {
        let config = self.call.config;
        let layout = self.layout;
        let hd = config.head_dim;
        let wide = config.head_dim.next_multiple_of(LANES);
        let rotation = Rotation { tables: config.rope, scale: 1.0 };
        for r in 0..tile.count {
            let i = tile.first + r;
            let row = self.kv_head.start + i;
            let column = self.kv_head.index * hd;
            // SAFETY: rows of the tile; this task alone writes to this head.
            unsafe {
                let dk = self.buffer(layout.dk).add(r * wide);
                let dv = self.buffer(layout.dv).add(r * wide);
                if let Some(k) = &self.call.gradients.k {
                    rotation.apply_transpose(s, hd, i, dk, k.row(row).add(column));
                }
                if let Some(v) = &self.call.gradients.v {
                    Rotation::NONE.apply_transpose(s, hd, i, dv, v.row(row).add(column));
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
unsafe fn inner<S: Simd>(s: S, o: HeadRows<'_>, i: usize, row: *const f32) -> f32 {
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
            assert!(4 * GradientWorkspace::new(head_dim).len <= grad_workspace_bytes(head_dim), "{head_dim}");
        }
    }
}
