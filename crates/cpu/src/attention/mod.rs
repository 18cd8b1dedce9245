//! Attention over packed sequences: softmax(q k^T + bias) v for each sequence and head, with masks, grouped-query
//! heads, rotary positions or ALiBi; and its gradient.
//!
//! Invariant: no S x S matrix and no full-length row of scores is stored: the workspace depends on the head dimension
//! alone. Key tiles and query blocks start at the sequence's start and have a fixed size, so the bits of a sequence's
//! result depend on that sequence alone. Panels that are masked entirely are skipped; masked keys within a visited
//! panel get a weight of exactly zero.

mod forward;
mod gradient;
mod pack;
#[cfg(target_arch = "x86_64")]
pub(crate) mod tiles;

pub use forward::attention;
pub use gradient::{AttentionGradients, SavedForward, attention_grad};
pub use plimsoll_plan::{flash_bytes as workspace_bytes, flash_grad_bytes as grad_workspace_bytes};

use crate::Cpu;
use crate::element::{Bf16, Element};
use crate::matmul::register_tile::PANEL;
use crate::simd::{LANES, Simd};
use crate::view::{Rows, RowsMut};
use core::ops::Range;
use plimsoll_graph::ops::Mask;

/// Largest supported head dimension.
pub const MAX_HEAD_DIM: usize = plimsoll_plan::WIDEST_CPU_HEAD as usize;

/// Row stride, in f32, of packed rows of one head: larger than `MAX_HEAD_DIM` so that successive rows do not map to
/// the same cache sets.
const ROW: usize = MAX_HEAD_DIM + 16;
/// Largest number of rows of a strip (the tallest register tile).
const STRIP: usize = 14;

/// Parameters of an attention op.
#[derive(Clone, Copy)]
pub struct AttentionConfig<'a> {
    /// Number of query heads, H.
    pub heads: usize,
    /// Number of key/value heads, G; a divisor of `heads`.
    pub kv_heads: usize,
    /// Dimension of one head, hd; at most `MAX_HEAD_DIM`.
    pub head_dim: usize,
    /// Factor applied to q before the rotary rotation, as in ESM-2.
    pub scale: f32,
    /// Mask: which keys each query attends to.
    pub mask: Mask,
    /// Rotary position tables for q and k; `None` for no rotation.
    pub rope: Option<RotaryTables<'a>>,
    /// ALiBi slopes, one per head: `-slope * |i - j|` is added to the scores (Press et al., 2022; symmetric as in
    /// MosaicBERT).
    pub slopes: Option<&'a [f32]>,
}

/// Rotary position tables: cosines and sines, both (longest, head_dim / 2), for positions that restart at 0 in each
/// sequence. The rotation is half-split: (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin).
#[derive(Clone, Copy)]
pub struct RotaryTables<'a> {
    /// cos(position * frequency), row-major (longest, head_dim / 2).
    pub cos: &'a [f32],
    /// sin(position * frequency), row-major (longest, head_dim / 2).
    pub sin: &'a [f32],
}

/// Inputs and outputs of attention. No output may overlap an input.
pub struct AttentionOperands<'a, E> {
    /// Queries (T, H hd). q, k and v each have their own row stride, so that they may be columns of one (T, (H + 2 G)
    /// hd) matrix.
    pub q: Rows<'a, E>,
    /// Keys (T, G hd).
    pub k: Rows<'a, E>,
    /// Values (T, G hd).
    pub v: Rows<'a, E>,
    /// (start, end) of every sequence, ascending and disjoint; rows outside of them are not written.
    pub spans: &'a [[u32; 2]],
    /// Output (T, H hd).
    pub o: RowsMut<'a, E>,
    /// Natural logarithm of each row's sum of exponentials (T, H); written if given.
    pub lse: Option<RowsMut<'a>>,
}

impl AttentionConfig<'_> {
    /// Number of query heads that share one key/value head.
    fn group(&self) -> usize {
        self.heads / self.kv_heads
    }

    /// Panics if the shapes are inconsistent; `queries` are (T, H hd), `keys` (T, G hd), `sums` (T, H).
    fn check<E: Element>(
        &self,
        queries: &[Rows<'_, E>],
        keys: [Rows<'_, E>; 2],
        sums: Option<Rows<'_>>,
        spans: &[[u32; 2]],
    ) {
        let hd = self.head_dim;
        let rows = keys[0].rows();
        assert!((1..=MAX_HEAD_DIM).contains(&hd), "head dim {hd} of at most {MAX_HEAD_DIM}");
        assert!(self.kv_heads > 0 && self.heads.is_multiple_of(self.kv_heads), "shared heads divide the heads");
        let query_columns = self.heads * hd;
        let key_columns = self.kv_heads * hd;
        assert!(
            queries.iter().all(|x| x.rows() == rows && x.cols() == query_columns),
            "q and o are (T, {} {hd})",
            self.heads
        );
        assert!(
            keys.iter().all(|x| x.rows() == rows && x.cols() == key_columns),
            "k and v are (T, {} {hd})",
            self.kv_heads
        );
        assert!(sums.is_none_or(|l| l.rows() == rows && l.cols() == self.heads), "lse is (T, H)");
        assert!(self.slopes.is_none_or(|s| s.len() == self.heads), "one slope per head");
        assert!(self.mask.check().is_ok(), "a mask shows every query to itself");
        crate::check_spans(spans, rows);
        if let Some(rope) = self.rope {
            assert!(hd.is_multiple_of(2), "rotary positions need an even head dim");
            let longest = spans.iter().map(|s| (s[1] - s[0]) as usize).max().unwrap_or(0);
            let need = longest * (hd / 2);
            assert!(rope.cos.len() >= need && rope.sin.len() >= need, "rope table for {longest}");
        }
    }
}

/// Attention of bf16 tensors; arguments as for [`attention`]. Unmasked attention without lse, the form that inference
/// uses, runs on AMX tiles or on AVX512-BF16 dot products where the CPU has them; all other forms, which training
/// uses, run in f32 SIMD lanes.
pub fn attention_bf16(
    cpu: &Cpu,
    config: AttentionConfig<'_>,
    operands: AttentionOperands<'_, Bf16>,
    workspace: &mut [f32],
) {
    #[cfg(target_arch = "x86_64")]
    if tiles::takes(cpu.isa(), config, operands.lse.is_some()) {
        tiles::attention(cpu, config, &operands, workspace);
        return;
    }
    attention(cpu, config, operands, workspace);
}

/// A block of queries of one head: positions `first..end` of the sequence of `len` rows that starts at row `start`.
#[derive(Clone, Copy)]
struct QueryBlock {
    start: usize,
    len: usize,
    first: usize,
    end: usize,
    head: usize,
}

impl QueryBlock {
    /// Number of queries.
    #[inline(always)]
    fn count(&self) -> usize {
        self.end - self.first
    }
}

/// A query block, and the block that its task computes after it (for prefetching).
#[derive(Clone, Copy)]
struct ScheduledBlock {
    block: QueryBlock,
    next: Option<QueryBlock>,
}

/// The query blocks of one task.
type QueryBlocks<'a> = dyn Iterator<Item = ScheduledBlock> + 'a;

/// How queries are divided into blocks and tasks.
#[derive(Clone, Copy)]
struct QueryPartition {
    /// Number of heads, of which each block has one.
    heads: usize,
    /// Maximum number of queries of a block.
    queries: usize,
    /// Number of heads that share cache lines.
    together: usize,
}

/// Calls `work` for each task with its query blocks and the worker's index. A task covers some heads within a window of
/// `queries` tokens: all blocks that start in that window, head by head. Up to `together` heads are put into one task,
/// as long as there are enough tasks for all threads.
fn by_query_blocks(
    cpu: &Cpu,
    spans: &[[u32; 2]],
    partition: QueryPartition,
    work: &(dyn Fn(&mut QueryBlocks<'_>, usize) + Sync),
) {
    /// Minimum number of tasks per thread. Tasks differ in cost as their sequences differ in length, so several per
    /// thread are needed to balance the load.
    const TASKS: usize = 8;
    let QueryPartition { heads, queries, together } = partition;
    let windows = spans.last().map_or(0, |s| s[1] as usize).div_ceil(queries);
    let together = together.min(windows * heads / (TASKS * cpu.threads())).clamp(1, heads);
    let groups = heads.div_ceil(together);
    cpu.pool().run(windows * groups, &|task, worker| {
        let window = task / groups;
        let first_head = task % groups * together;
        let from = window * queries;
        let to = (window + 1) * queries;
        let first_span = spans.partition_point(|s| s[1] as usize <= from);
        let spans_here = spans[first_span..].iter().take_while(|s| (s[0] as usize) < to);
        let mut blocks = spans_here
            .flat_map(|&[start, end]| {
                let start = start as usize;
                let end = end as usize;
                // Blocks start at multiples of `queries` from the sequence's start, not from the window's: so the
                // blocks of a sequence do not depend on where it is packed.
                let first_block = start + from.saturating_sub(start).next_multiple_of(queries);
                (first_block..end.min(to)).step_by(queries).map(move |row| QueryBlock {
                    start,
                    len: end - start,
                    first: row - start,
                    end: (row - start + queries).min(end - start),
                    head: first_head,
                })
            })
            .flat_map(|block| {
                (first_head..heads.min(first_head + together)).map(move |head| QueryBlock { head, ..block })
            })
            .peekable();
        let mut scheduled = core::iter::from_fn(|| {
            Some(ScheduledBlock { block: blocks.next()?, next: blocks.peek().copied() })
        });
        work(&mut scheduled, worker);
    });
}

/// The part of a tile that a strip attends to: elements `from..to` relative to the tile's start, where `from` is a
/// multiple of the panel width.
#[derive(Clone, Copy)]
struct VisibleRange {
    from: usize,
    to: usize,
    /// Whether every row of the strip attends to every element of the range, so that no masking is needed.
    unmasked: bool,
    /// Whether the strip attends to nothing before this tile, so that its accumulators start at zero.
    first: bool,
}

/// The keys of `tile` that any of `queries` attends to, in a sequence of `n` positions; `None` if there are none.
#[inline]
fn keys_of(mask: Mask, queries: Range<usize>, tile: Range<usize>, n: usize) -> Option<VisibleRange> {
    // All ends of the key ranges grow with the query, so the first query has the lowest ends and the last query the
    // highest.
    let [far, near] = mask.keys(queries.start, n);
    let [last_far, last_near] = mask.keys(queries.end - 1, n);
    let far_keys = intersection(&(0..last_far.end), &tile);
    let near_keys = intersection(&(near.start..last_near.end), &tile);
    let start = if far_keys.is_empty() { near_keys.start } else { far_keys.start };
    let end = if near_keys.is_empty() { far_keys.end } else { near_keys.end };
    if start >= end {
        return None;
    }
    let from = (start - tile.start) / PANEL * PANEL;
    let start = tile.start + from;
    let unmasked = end <= far.end || (last_near.start <= start && end <= near.end);
    let lowest = if last_far.is_empty() { near.start } else { 0 };
    Some(VisibleRange { from, to: end - tile.start, unmasked, first: tile.start <= lowest })
}

/// The queries of `block` that attend to any of `keys`, in a sequence of `n` positions; `None` if there are none.
#[inline]
fn queries_of(mask: Mask, keys: Range<usize>, block: Range<usize>, n: usize) -> Option<VisibleRange> {
    let first = mask.queries(keys.start, n);
    let last = mask.queries(keys.end - 1, n);
    // Global keys, which every query attends to, come first, so the highest end may belong to the first or to the
    // last key.
    let seen = intersection(&(first.start..first.end.max(last.end)), &block);
    if seen.is_empty() {
        return None;
    }
    let from = (seen.start - block.start) / PANEL * PANEL;
    let lowest = keys.map(|j| mask.queries(j, n).end).min().unwrap_or(0);
    let unmasked = last.start <= block.start + from && seen.end <= lowest;
    Some(VisibleRange { from, to: seen.end - block.start, unmasked, first: false })
}

/// Intersection of two ranges.
fn intersection(a: &Range<usize>, b: &Range<usize>) -> Range<usize> {
    a.start.max(b.start)..a.end.min(b.end)
}

/// Returns `v` in the lanes whose positions lie in one of the `runs` and `other` in the remaining lanes; lane 0 is
/// position `at`.
#[inline(always)]
fn select<S: Simd>(s: S, runs: &[Range<usize>], at: usize, v: S::V, other: S::V) -> S::V {
    let mut selected = other;
    for run in runs {
        let start = run.start.saturating_sub(at).min(LANES);
        let end = run.end.saturating_sub(at).min(LANES);
        // Lanes below `end` get v, except that those below `start` keep what they had.
        selected = s.first(s.first(selected, v, start), selected, end);
    }
    selected
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Checks `keys_of` and `queries_of` against the masks, key by key and query by query.
    #[test]
    fn views_hold_what_is_seen_and_nothing_whole_is_hidden() {
        let sparse = |block, local, global| Mask::BlockSparse { block, local, global };
        for mask in [
            Mask::Full,
            Mask::Causal,
            Mask::Window(1),
            Mask::Window(40),
            sparse(1, 3, 5),
            sparse(16, 2, 1),
            sparse(50, 1, 0),
            sparse(7, 2, 11),
        ] {
            let n = 150;
            let sees = |i: usize, j: usize| mask.queries(j, n).contains(&i);
            for (tile, strip) in [(48, 14), (64, 6), (96, 2), (192, 14)] {
                for at in (0..n).step_by(tile) {
                    let tile = at..n.min(at + tile);
                    for row in (0..n).step_by(strip) {
                        let strip = row..n.min(row + strip);
                        let keys = keys_of(mask, strip.clone(), tile.clone(), n);
                        check(keys, &strip, &tile, sees);
                        let first = (0..tile.start).all(|j| !strip.clone().any(|i| sees(i, j)));
                        assert!(keys.is_none_or(|view| view.first == first), "{mask:?} {strip:?} {tile:?}");
                        check(queries_of(mask, strip.clone(), tile.clone(), n), &strip, &tile, |row, at| {
                            sees(at, row)
                        });
                    }
                }
            }
        }
    }

    #[track_caller]
    fn check(
        view: Option<VisibleRange>,
        strip: &Range<usize>,
        tile: &Range<usize>,
        sees: impl Fn(usize, usize) -> bool,
    ) {
        let view = view.unwrap_or(VisibleRange { from: 0, to: 0, unmasked: true, first: false });
        let run = tile.start + view.from..tile.start + view.to;
        assert!(view.from.is_multiple_of(PANEL) && run.end <= tile.end);
        for row in strip.clone() {
            for at in tile.clone() {
                assert!(!sees(row, at) || run.contains(&at), "{row} sees {at}, not in {run:?}");
                assert!(
                    !view.unmasked || !run.contains(&at) || sees(row, at),
                    "{run:?} is not whole for {row}"
                );
            }
        }
    }
}
