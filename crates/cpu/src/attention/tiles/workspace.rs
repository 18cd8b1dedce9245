//! Layout of a thread's workspace, and the addresses to prefetch for the next block.
//!
//! Invariant: every buffer consists of whole cache lines, and all fit in `workspace_bytes` for every head dimension.

use super::super::QueryBlock;
use super::pack::HeadSplit;
use super::{KEYS, LINE, QUERIES, SCORES, SIDE, STEPS, STRIPS, TILE, TiledCall};
use crate::element::Bf16;
use crate::view::Rows;

/// Offsets of the buffers in a thread's workspace, in bytes.
#[derive(Clone, Copy)]
pub(super) struct TiledWorkspace {
    /// Packed queries: one AMX tile for each strip of query rows and each block of head columns, in this order.
    pub(super) queries: usize,
    /// Packed keys: one AMX tile for each group of 16 keys and each block of head columns, in this order.
    pub(super) keys: usize,
    /// Packed values: one AMX tile for each group of 16 head columns and each block of keys, in this order.
    pub(super) values: usize,
    /// Scores of two strips, f32 (2, 16, SCORES); successive strips alternate between the two buffers.
    pub(super) scores: usize,
    /// Output accumulators: f32 (QUERIES, head columns rounded up to whole tiles).
    pub(super) out: usize,
    /// ALiBi bias for each distance of query and key: f32 (QUERIES + KEYS + 2 * SIDE).
    pub(super) bias: usize,
    /// Size of the workspace.
    pub(super) len: usize,
}

impl TiledWorkspace {
    /// The layout for heads split as `split`.
    pub(super) const fn new(split: HeadSplit) -> TiledWorkspace {
        let queries = 0;
        let keys = queries + STRIPS * split.steps() * TILE;
        let values = keys + KEYS / SIDE * split.steps() * TILE;
        let scores = values + split.together * split.tiles() * STEPS * TILE;
        let out = scores + 2 * SIDE * SCORES * 4;
        let bias = out + QUERIES * split.together * split.tiles() * LINE;
        TiledWorkspace { queries, keys, values, scores, out, bias, len: bias + (QUERIES + KEYS + 2 * SIDE) * 4 }
    }
}

/// Rows that the next block reads and writes, to be prefetched by software: rows of one head lie far apart in memory,
/// which hardware prefetchers do not follow.
#[derive(Clone, Copy)]
pub(super) struct NextBlock {
    /// Rows of q, k, v and o.
    pub(super) rows: [NextRows; 4],
    /// Cache lines per row.
    pub(super) lines: usize,
    /// Number of rows.
    pub(super) count: usize,
}

impl NextBlock {
    /// The rows of `block`.
    pub(super) fn new(call: &TiledCall<'_>, split: HeadSplit, block: QueryBlock) -> NextBlock {
        let row = block.start + block.first;
        let column = block.head * split.columns();
        let shared = block.head / call.config.group() * split.columns();
        let rows = [
            NextRows::new(call.q, row, column),
            NextRows::new(call.k, row, shared),
            NextRows::new(call.v, row, shared),
            NextRows::new(call.o.as_rows(), row, column),
        ];
        let before = call.q.row(row).wrapping_add(column).addr() % LINE;
        let lines = (before + 2 * split.columns()).div_ceil(LINE);
        NextBlock { rows, lines, count: block.count() }
    }
}

/// Rows of one head of a matrix.
#[derive(Clone, Copy)]
pub(super) struct NextRows {
    /// Cache line where the first row starts.
    pub(super) first: *const u8,
    /// Bytes from one row to the next.
    pub(super) stride: usize,
}

impl NextRows {
    fn new(x: Rows<'_, Bf16>, row: usize, column: usize) -> NextRows {
        let at = x.row(row).wrapping_add(column).cast::<u8>();
        NextRows { first: at.wrapping_sub(at.addr() % LINE), stride: 2 * x.ld() }
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::{MAX_HEAD_DIM, workspace_bytes};
    use super::*;

    #[test]
    fn the_parts_fit_in_the_workspace() {
        for head_dim in 1..=MAX_HEAD_DIM {
            for heads in [1, 2] {
                let layout = TiledWorkspace::new(HeadSplit::new(head_dim, heads, 1));
                assert!(layout.len <= workspace_bytes(head_dim), "{head_dim}");
                assert!([layout.queries, layout.out, layout.bias].iter().all(|at| at % LINE == 0));
            }
        }
    }
}
