//! Forward pass of bf16 attention on AMX tiles, or on an emulation of them by AVX512-BF16 dot products (`dots`), for
//! unmasked attention without lse.
//!
//! Invariant: key blocks start at the sequence's start, and each query row goes through them in order; its offset
//! (the value subtracted from its scores), weights and sums depend on its strip alone. Query blocks, tasks and heads
//! packed together share only packed keys, so the bits of a sequence's result depend on that sequence alone.
//! Non-finite inputs are not hidden: a non-finite query makes all its scores, and therefore its maximum, non-finite;
//! non-finite keys, which maxima and integer arithmetic could hide, are searched for explicitly.
//!
//! q and k are rotated in f32 and rounded to bf16; with a rotation, q is multiplied by the scale in the same
//! step. Scores, maxima, sums of weights and output accumulators are f32; weights are bf16 (see `weights`). With
//! ALiBi, the accumulators of scores are initialized with its bias: a tile whose rows all come from one table by
//! distance, each row starting one element before the previous.
//!
//! A strip is 16 queries. While the vector units compute the softmax weights of one strip, the tile unit multiplies
//! the weights of the previous strip by the values and computes the scores of the next; a turn of tile products
//! follows each row of the softmax. If all strips of a narrow head have bounded scores, both kinds of work alternate
//! within a strip instead (`stream`), with identical bits.

mod dots;
mod matmuls;
mod pack;
mod registers;
mod stream;
mod weights;
mod workspace;

use super::pack::HeadRows;
use super::{
    AttentionConfig, AttentionOperands, QueryBlock, QueryPartition, ScheduledBlock, by_query_blocks,
    workspace_bytes,
};
use crate::Cpu;
use crate::element::Bf16;
use crate::simd::Simd;
use crate::simd::amx::{SIDE, STEP, TILE, Tiles};
use crate::simd::isa::Isa;
use crate::simd::x86::Avx512;
use crate::view::{Rows, RowsMut};
use core::arch::x86_64::*;
use core::f32::consts::LOG2_E;
use dots::DotRegisters;
use matmuls::{ValueProgress, pairs};
use pack::{HeadSplit, PairPermutation, RotatedPairs, columns};
use plimsoll_graph::ops::Mask;
pub(crate) use registers::{Registers, TileShape};
use weights::{RunningSoftmax, Scores, UNITS, bounded, rest, softmax_row, softmax_row_far};
use workspace::{NextBlock, TiledWorkspace};

/// Bytes of a row of a tile.
const LINE: usize = 64;
/// Keys per block, and the row stride, in f32, of a strip of scores (padded).
const KEYS: usize = 256;
const SCORES: usize = KEYS + SIDE;
/// Steps of 32 keys per key block.
const STEPS: usize = KEYS / STEP;
/// Queries per block, and strips per block.
const QUERIES: usize = 256;
const STRIPS: usize = QUERIES / SIDE;
/// Columns of the heads that one task processes one after the other: some cache lines.
const TOGETHER: usize = 128;
/// Largest number of output tiles that are accumulated at the same time.
const WIDE: usize = 4;

/// Whether this CPU has the vector instructions that are used between the tile matmuls. Every CPU with AMX has them,
/// unless they are disabled.
pub(crate) fn has_lanes() -> bool {
    is_x86_feature_detected!("avx2")
        && is_x86_feature_detected!("fma")
        && is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512dq")
        && is_x86_feature_detected!("avx512vl")
        && is_x86_feature_detected!("avx512vbmi")
        && is_x86_feature_detected!("avx512bf16")
}

/// Whether `isa` has tiles or dot products and this kernel supports the requested form: unmasked, without lse, as in
/// inference. The scale must be positive, since a negative one would turn maxima into minima.
pub(super) fn takes(isa: Isa, config: AttentionConfig<'_>, lse: bool) -> bool {
    (isa.has_tiles() || isa.has_dots())
        && has_lanes()
        && config.mask == Mask::Full
        && !lse
        && config.scale > 0.0
}

/// Computes attention in the forms that [`takes`] accepts. The arguments are those of the `attention` of the parent
/// module. Panics if `takes` does not accept the form.
pub(super) fn attention(
    cpu: &Cpu,
    config: AttentionConfig<'_>,
    operands: &AttentionOperands<'_, Bf16>,
    workspace: &mut [f32],
) {
    let isa = cpu.isa();
    assert!(takes(isa, config, false), "tiles, and a form for them");
    if isa.has_tiles() {
        // SAFETY: `has_tiles` proves that the CPU has tiles; a thread holds no other tiles while it runs a task.
        return attention_on::<Tiles>(cpu, config, operands, workspace, &|shape| unsafe {
            registers::configure(shape)
        });
    }
    // SAFETY: `has_dots` proves that the CPU has the instructions.
    attention_on(cpu, config, operands, workspace, &|_| unsafe { DotRegisters::new(config.head_dim) });
}

/// Runs attention on the registers that `configure` creates for each task.
pub(crate) fn attention_on<R: Registers>(
    cpu: &Cpu,
    config: AttentionConfig<'_>,
    operands: &AttentionOperands<'_, Bf16>,
    workspace: &mut [f32],
    configure: &(dyn Fn(TileShape) -> R + Sync),
) {
    let &AttentionOperands { q, k, v, spans, ref o, .. } = operands;
    config.check(&[q, o.as_rows()], [k, v], None, spans);
    let words_per_thread = workspace_bytes(config.head_dim) / 4;
    assert!(has_lanes() && workspace.len() >= words_per_thread * cpu.threads(), "lanes, workspace");
    let split = HeadSplit::new(config.head_dim, config.heads, config.group());
    let call = TiledCall { config, q, k, v, o, split, order: PairPermutation::new(split) };
    let shape = TileShape { pairs: if split.together == 2 { split.half } else { SIDE } };
    let workspace = workspace.as_mut_ptr() as usize;
    let partition = QueryPartition {
        heads: config.heads / split.together,
        queries: QUERIES,
        together: TOGETHER / split.columns(),
    };
    by_query_blocks(cpu, spans, partition, &|blocks, worker| {
        let scratch = (workspace as *mut f32).wrapping_add(worker * words_per_thread);
        let mut tiles = configure(shape);
        for scheduled in blocks {
            // SAFETY: `has_lanes` was asserted; each worker index, hence each scratch, is used by one thread at a
            // time.
            unsafe {
                match (split.dim, split.together) {
                    (16, 2) => call.run::<R, 16, 2>(scheduled, scratch, &mut tiles),
                    (24, 1) => call.run::<R, 24, 1>(scheduled, scratch, &mut tiles),
                    (32, 1) => call.run::<R, 32, 1>(scheduled, scratch, &mut tiles),
                    (64, 1) => call.run::<R, 64, 1>(scheduled, scratch, &mut tiles),
                    _ => call.run::<R, 0, 0>(scheduled, scratch, &mut tiles),
                }
            }
        }
    });
}

/// Inputs and outputs of one call, shared by all its tasks.
struct TiledCall<'a> {
    config: AttentionConfig<'a>,
    q: Rows<'a, Bf16>,
    k: Rows<'a, Bf16>,
    v: Rows<'a, Bf16>,
    o: &'a RowsMut<'a, Bf16>,
    split: HeadSplit,
    order: PairPermutation,
}

impl TiledCall<'_> {
    /// Processes one block of queries of one head, or of the heads packed together. `DIM` and `HEADS` are the
    /// head dimension and the number of heads packed together as compile-time constants, for specialized code; 0
    /// stands for any.
    ///
    /// # Safety
    /// `has_lanes` must hold; the block must lie in the matrices that were checked; no other thread may use
    /// `scratch` meanwhile.
    #[target_feature(enable = "avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512bf16")]
    unsafe fn run<R: Registers, const DIM: usize, const HEADS: usize>(
        &self,
        scheduled: ScheduledBlock,
        scratch: *mut f32,
        tiles: &mut R,
    ) {
        let split =
            if DIM > 0 { HeadSplit { dim: DIM, half: DIM.div_ceil(2), together: HEADS } } else { self.split };
        let layout = TiledWorkspace::new(split);
        debug_assert!(layout.len <= workspace_bytes(self.config.head_dim), "the parts fit");
        // SAFETY: as the caller promises.
        let s = unsafe { Avx512::assume() };
        let units = self.config.scale * LOG2_E * UNITS;
        let [factor, scale] = if self.config.rope.is_some() { [units, 1.0] } else { [1.0, units] };
        let next = scheduled.next.map(|next| NextBlock::new(self, split, next));
        let task = TiledBlock {
            call: self,
            block: scheduled.block,
            next,
            layout,
            split,
            scratch: scratch.cast(),
            s,
            factor,
            scale,
        };
        // SAFETY: as the caller promises.
        unsafe { task.run(tiles) };
    }
}

/// One block of queries of one head, or of the heads packed together.
struct TiledBlock<'a> {
    call: &'a TiledCall<'a>,
    block: QueryBlock,
    next: Option<NextBlock>,
    layout: TiledWorkspace,
    split: HeadSplit,
    scratch: *mut u8,
    s: Avx512,
    /// Queries are multiplied by `factor` when they are rotated, scores by `scale` otherwise; either way scores come
    /// out in units of a bf16 last place of the weights.
    factor: f32,
    scale: f32,
}

/// A block of keys of the sequence: `len` keys from `start` on.
#[derive(Clone, Copy)]
struct KeyBlock {
    start: usize,
    len: usize,
    /// Mask of the keys of the last, partial step (see `weights::rest`).
    rest: __mmask32,
}

/// All strips of one of the heads packed together.
#[derive(Clone, Copy)]
struct HeadStrips {
    head: usize,
    strips: usize,
    /// Whether this is the last head, and the last block of keys of the sequence: then the strips are written to o.
    last: bool,
}

/// A strip of one of the heads packed together, and whether its scores are bounded.
#[derive(Clone, Copy)]
struct QueryStrip {
    head: usize,
    strip: usize,
    bounded: bool,
}

impl TiledBlock<'_> {
    /// Runs the queries of the block against all key blocks.
    ///
    /// # Safety
    /// The requirements of `TiledCall::run`, which is the only caller.
    #[inline(always)]
    unsafe fn run<R: Registers>(&self, tiles: &mut R) {
        let strips = self.block.count().div_ceil(SIDE);
        // SAFETY: every row and column below lies in the block's sequence and heads.
        unsafe {
            let mut squares = [[0.0; 2]; STRIPS];
            for (strip, squares) in squares.iter_mut().enumerate().take(strips) {
                *squares = self.pack_queries(strip);
            }
            let mut running = [[RunningSoftmax::new(); STRIPS]; 2];
            for start in (0..self.block.len).step_by(KEYS) {
                let len = KEYS.min(self.block.len - start);
                let keys = KeyBlock { start, len, rest: rest(len) };
                let largest = self.pack_keys(keys);
                for head in 0..self.split.together {
                    self.pack_bias(keys, head);
                    self.check_bounds(keys, head, &squares[..strips], largest[head], &mut running[head]);
                    self.attend(tiles, keys, head, strips, &mut running);
                }
            }
        }
    }

    /// Determines for each strip whether its scores with this key block are bounded. If any key is not finite, sets
    /// all sums to NaN.
    ///
    /// # Safety
    /// The keys are packed.
    #[inline(always)]
    unsafe fn check_bounds(
        &self,
        keys: KeyBlock,
        head: usize,
        squares: &[[f32; 2]],
        largest: f32,
        running: &mut [RunningSoftmax; STRIPS],
    ) {
        for strip in 0..squares.len() {
            running[strip].bounded &= bounded(squares[strip][head], largest, self.scale);
        }
        let tiles = self.at(self.layout.keys);
        // SAFETY: as the caller promises.
        if !largest.is_finite() && unsafe { !pack::finite(self.split, head, tiles, keys.len.div_ceil(SIDE)) } {
            running.iter_mut().for_each(|r| r.fill_nan());
        }
    }

    /// Processes all strips against one block of keys.
    ///
    /// # Safety
    /// Queries, keys, values and bias are packed.
    #[inline(always)]
    unsafe fn attend<R: Registers>(
        &self,
        tiles: &mut R,
        keys: KeyBlock,
        head: usize,
        strips: usize,
        running: &mut [[RunningSoftmax; STRIPS]; 2],
    ) {
        let last = head + 1 == self.split.together && keys.start + keys.len == self.block.len;
        if self.ready() && running[head][..strips].iter().all(|running| running.bounded) {
            // SAFETY: as the caller promises.
            return unsafe { self.stream(tiles, keys, HeadStrips { head, strips, last }, running) };
        }
        // SAFETY: as the caller promises.
        unsafe {
            let mut current = QueryStrip { head, strip: 0, bounded: running[head][0].bounded };
            // While a strip's weights are computed, the tile unit works on its neighbours; only the first strip's
            // scores and the last strip's output have no neighbour to overlap with.
            for pair in 0..pairs(keys) {
                self.score(tiles, keys, current, pair);
            }
            for strip in 0..strips {
                let next = (strip + 1 < strips).then(|| {
                    let bounded = running[head][strip + 1].bounded;
                    QueryStrip { head, strip: strip + 1, bounded }
                });
                self.softmax_strip(tiles, keys, current, next, &mut running[head][strip]);
                if last && strip > 0 {
                    self.finish(strip - 1, running);
                }
                current = next.unwrap_or(current);
            }
            let mut progress = ValueProgress::new(head, strips - 1);
            for _ in 0..self.turns(keys) {
                self.multiply_values(tiles, keys, &mut progress);
            }
            if last {
                self.finish(strips - 1, running);
            }
        }
    }

    /// Turns the scores of a strip into weights, with turns of the tile unit in between: after the rows of the first
    /// half, the previous strip's weights are multiplied by the values; after the rows of the second half, the scores
    /// of the next strip, if any, are computed, overwriting the previous strip's weights. For heads packed together,
    /// score products follow every second row.
    ///
    /// # Safety
    /// The scores of the strip are stored.
    #[inline(always)]
    unsafe fn softmax_strip<R: Registers>(
        &self,
        tiles: &mut R,
        keys: KeyBlock,
        strip: QueryStrip,
        next: Option<QueryStrip>,
        running: &mut RunningSoftmax,
    ) {
        let QueryStrip { head, strip: index, .. } = strip;
        // Heads packed together need so few tile products that both kinds of turns may be mixed: a pair's scores
        // overwrite only weights that have already been used (tested below).
        let spread = self.split.together == 2;
        let turns = if index > 0 { self.turns(keys) } else { 0 };
        let next_pairs = if next.is_some() { pairs(keys) } else { 0 };
        // Not read if there is no next strip: then it has no pairs.
        let next = next.unwrap_or(strip);
        let mut progress = ValueProgress::new(head, index.wrapping_sub(1));
        // SAFETY: as the caller promises; there are at most 8 pairs.
        unsafe {
            let scores = self.scores(index);
            let decay = self.begin(keys, strip, running);
            let ready = running.bounded && self.ready();
            let far = running.has_far_offset();
            let mut offsets = [0.0; SIDE];
            let offset = if far { running.offsets_in_units() } else { running.offsets() };
            _mm512_storeu_ps(offsets.as_mut_ptr(), offset);
            let mut sums = [_mm512_setzero_ps(); SIDE];
            for (r, sums) in sums.iter_mut().enumerate() {
                let row = scores.add(r * SCORES);
                *sums = if ready {
                    softmax_row(row, keys.len, keys.rest, Scores::Ready)
                } else if far {
                    softmax_row_far(row, keys.len, keys.rest, self.scale, offsets[r])
                } else {
                    softmax_row(row, keys.len, keys.rest, Scores::Times(self.scale, offsets[r]))
                };
                if head == 0 && keys.start == 0 {
                    self.prefetch(index * SIDE + r);
                }
                for _ in 0..turns_after_row(r, turns) {
                    self.multiply_values(tiles, keys, &mut progress);
                }
                let pair = if spread { r / 2 } else { r.wrapping_sub(SIDE / 2) };
                if pair < next_pairs && (!spread || r % 2 == 1) {
                    self.score(tiles, keys, next, pair);
                }
            }
            running.add(decay, sums);
        }
    }

    /// Sets the offset that is subtracted from a strip's scores, and rescales the sums so far to that offset. Returns
    /// the factor for the sums of weights.
    ///
    /// # Safety
    /// The scores of the strip have been computed.
    #[inline(always)]
    unsafe fn begin(&self, keys: KeyBlock, strip: QueryStrip, running: &mut RunningSoftmax) -> __m512 {
        // SAFETY: as the caller promises.
        unsafe {
            if running.bounded {
                running.use_fixed_offset();
                return _mm512_set1_ps(1.0);
            }
            let decay = running.update_max(self.scores(strip.strip), keys.len, self.scale);
            if keys.start > 0 {
                self.decay(strip.head, strip.strip, decay);
            }
            decay
        }
    }

    /// Prefetches the cache lines that the next block reads and writes at its row `row`.
    #[inline(always)]
    fn prefetch(&self, row: usize) {
        let Some(next) = self.next.filter(|next| row < next.count) else { return };
        for rows in next.rows {
            for line in 0..next.lines {
                self.s.prefetch_far(rows.first.wrapping_add(row * rows.stride + line * LINE).cast());
            }
        }
    }

    /// Rescales the output sums of a strip by the factors `decay`, one per row.
    ///
    /// # Safety
    /// The strip has been through a block of keys.
    #[inline(always)]
    unsafe fn decay(&self, head: usize, strip: usize, decay: __m512) {
        let mut factors = [0.0; SIDE];
        // SAFETY: the strip's rows of `out`.
        unsafe {
            _mm512_storeu_ps(factors.as_mut_ptr(), decay);
            for (r, &factor) in factors.iter().enumerate() {
                for tile in 0..self.split.tiles() {
                    let at = self.out(strip * SIDE + r, head).add(tile * SIDE);
                    _mm512_storeu_ps(at, _mm512_mul_ps(_mm512_loadu_ps(at), _mm512_set1_ps(factor)));
                }
            }
        }
    }

    /// Called after the last block of keys: divides a strip's rows by their sums of weights and writes them to o.
    ///
    /// # Safety
    /// The strip has been through all blocks of keys, for every head.
    #[inline(always)]
    unsafe fn finish(&self, strip: usize, running: &[[RunningSoftmax; STRIPS]; 2]) {
        let first = self.block.start + self.block.first + strip * SIDE;
        let column = self.block.head * self.split.columns();
        let mut factors = [[0.0; SIDE]; 2];
        // SAFETY: this task alone writes these rows of these heads.
        unsafe {
            for head in 0..self.split.together {
                let factor = _mm512_div_ps(_mm512_set1_ps(1.0), running[head][strip].sum);
                _mm512_storeu_ps(factors[head].as_mut_ptr(), factor);
            }
            #[allow(clippy::needless_range_loop)] // zips and maps of arrays were calls
            for r in 0..self.rows(strip) {
                let o = self.call.o.row(first + r).add(column);
                columns(self.split, self.out(strip * SIDE + r, 0), [factors[0][r], factors[1][r]], o);
            }
        }
    }

    /// Packs the queries of a strip; returns, for each head, an upper bound of the largest sum of squares of a row.
    ///
    /// # Safety
    /// The strip lies in the block.
    #[inline(always)]
    unsafe fn pack_queries(&self, strip: usize) -> [f32; 2] {
        let at = self.block.first + strip * SIDE;
        let to = self.at(self.layout.queries + strip * self.split.steps() * TILE);
        let q = self.pairs(self.call.q, self.block.head, Some(self.factor));
        // SAFETY: positions of the sequence, and space in the buffers.
        unsafe { pack::queries(self.s, q, at..at + self.rows(strip), to) }
    }

    /// Packs keys and values. Returns, for each head, the largest sum of squares of a key.
    ///
    /// # Safety
    /// `keys` lie in the sequence.
    #[inline(always)]
    unsafe fn pack_keys(&self, keys: KeyBlock) -> [f32; 2] {
        let shared = self.block.head / self.call.config.group();
        let k = self.pairs(self.call.k, shared, None);
        let v = self.head(self.call.v, shared);
        // SAFETY: positions of the sequence, and space in the buffers.
        unsafe {
            let mut squares = [_mm512_setzero_ps(); 2];
            for tile in 0..keys.len.div_ceil(SIDE) {
                let to = self.at(self.layout.keys + tile * self.split.steps() * TILE);
                let first = tile * SIDE;
                let positions = keys.start + first..keys.start + keys.len.min(first + SIDE);
                pack::keys(self.s, k, positions, &mut squares, to);
            }
            for step in 0..keys.len.div_ceil(STEP) {
                let to =
                    pack::ValueTiles { first: self.at(self.layout.values + step * TILE), stride: STEPS * TILE };
                let first = step * STEP;
                let positions = keys.start + first..keys.start + keys.len.min(first + STEP);
                pack::values(self.s, self.split, v, positions, to);
            }
            [pack::largest(squares[0]), pack::largest(squares[1])]
        }
    }

    /// Tabulates ALiBi's bias for every distance between this block's queries and keys, for one of the heads packed
    /// together.
    ///
    /// # Safety
    /// The requirements of `TiledBlock::run`, which is the only caller.
    #[inline(always)]
    unsafe fn pack_bias(&self, keys: KeyBlock, head: usize) {
        let Some(slopes) = self.call.config.slopes else { return };
        // Divided by the scale, because the sum of score and bias is multiplied by it afterwards.
        let slope = -slopes[self.block.head * self.split.together + head] * LOG2_E * UNITS / self.scale;
        let to = self.at(self.layout.bias).cast::<f32>();
        // Entry e is the bias of key j of the key block and query i of the query block with e = QUERIES + j - i.
        let first = keys.start as isize - self.block.first as isize - QUERIES as isize;
        for e in 0..QUERIES + KEYS + SIDE {
            let distance = (first + e as isize).unsigned_abs() as f32;
            // SAFETY: an entry of the buffer.
            unsafe { to.add(e).write(slope * distance) };
        }
    }

    /// Whether bounded scores leave the tiles as `Scores::Ready`. This requires a product of a single step, so that
    /// rounding to whole numbers happens once, and accumulators that start with nothing but `BEGIN`.
    #[inline(always)]
    fn ready(&self) -> bool {
        self.split.narrow() && self.scale == 1.0 && self.call.config.slopes.is_none()
    }

    /// View of the heads of this sequence in q or k, read as pairs.
    #[inline(always)]
    fn pairs<'b>(&'b self, x: Rows<'b, Bf16>, head: usize, factor: Option<f32>) -> RotatedPairs<'b> {
        let head = self.head(x, head);
        RotatedPairs { split: self.split, head, rope: self.call.config.rope, factor, order: &self.call.order }
    }

    /// View of the heads of this sequence in q, k or v.
    #[inline(always)]
    fn head<'b>(&self, x: Rows<'b, Bf16>, head: usize) -> HeadRows<'b, Bf16> {
        let dim = self.split.columns();
        HeadRows { x, start: self.block.start, column: head * dim, dim }
    }

    /// Number of queries of a strip.
    #[inline(always)]
    fn rows(&self, strip: usize) -> usize {
        SIDE.min(self.block.count() - strip * SIDE)
    }

    /// Pointer to the workspace buffer at byte `offset`.
    #[inline(always)]
    fn at(&self, offset: usize) -> *mut u8 {
        self.scratch.wrapping_add(offset)
    }

    /// Score buffer of a strip; successive strips alternate between two buffers.
    #[inline(always)]
    fn scores(&self, strip: usize) -> *mut f32 {
        self.at(self.layout.scores).cast::<f32>().wrapping_add(strip % 2 * SIDE * SCORES)
    }

    /// Output accumulators of a row of the block, for one of the heads packed together.
    #[inline(always)]
    fn out(&self, row: usize, head: usize) -> *mut f32 {
        let tiles = row * self.split.together + head;
        self.at(self.layout.out).cast::<f32>().wrapping_add(tiles * self.split.tiles() * SIDE)
    }
}

/// Number of the `turns` turns that follow row `r`. All fall into the first half of the rows, at most one per row if
/// that is enough.
#[inline(always)]
fn turns_after_row(r: usize, turns: usize) -> usize {
    const HALF: usize = SIDE / 2;
    if turns <= HALF {
        return usize::from(r < turns);
    }
    // Spread evenly over the rows of the first half.
    if r < HALF { (r + 1) * turns / HALF - r * turns / HALF } else { 0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_turns_come_and_no_score_before_the_weights_it_replaces_were_used() {
        for turns in 0..=2 * STEPS {
            assert_eq!((0..SIDE).map(|r| turns_after_row(r, turns)).sum::<usize>(), turns);
            assert!((SIDE / 2..SIDE).all(|r| turns_after_row(r, turns) == 0));
        }
        // The scores of a pair occupy the memory of the weights of two steps.
        for steps in 1..=STEPS {
            for pair in 0..steps {
                let done: usize = (0..2 * pair + 2).map(|r| turns_after_row(r, steps)).sum();
                assert!(done >= (2 * pair + 2).min(steps), "pair {pair} of {steps}");
            }
        }
    }
}
