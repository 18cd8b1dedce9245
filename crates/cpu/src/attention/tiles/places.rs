//! Layout of a thread's workspace, and the addresses to prefetch for the next block.
//!
//! Invariant: every buffer consists of whole cache lines, and all fit in `workspace_bytes` for every head dimension.

use super::super::QueryBlock;
use super::pack::HeadSplit;
use super::{KEYS, LINE, QUERIES, SCORES, SIDE, STEPS, STRIPS, TILE, TiledCall};

/// Offsets of the buffers in a thread's workspace, in bytes.
#[derive(Clone, Copy)]
pub(super) struct WorkspaceLayout {
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

impl WorkspaceLayout {
    /// The layout for heads split as `cut`.
    pub(super) const fn new(cut: HeadSplit) -> WorkspaceLayout {
        let queries = 0;
        let keys = queries + STRIPS * cut.steps() * TILE;
        let values = keys + KEYS / SIDE * cut.steps() * TILE;
        let scores = values + cut.together * cut.tiles() * STEPS * TILE;
        let out = scores + 2 * SIDE * SCORES * 4;
        let bias = out + QUERIES * cut.together * cut.tiles() * LINE;
        WorkspaceLayout {
            queries,
            keys,
            values,
            scores,
            out,
            bias,
            len: bias + (QUERIES + KEYS + 2 * SIDE) * 4,
        }
    }
}

/// Rows that the next block reads and writes, to be prefetched by software: rows of one head lie far apart in memory,
/// which hardware prefetchers do not follow.
#[derive(Clone, Copy)]
pub(super) struct Next {
    /// For q, k, v and o: address of the cache line where the first row starts, and the row stride in bytes.
    pub(super) rows: [(*const u8, usize); 4],
    /// Cache lines per row.
    pub(super) lines: usize,
    /// Number of rows.
    pub(super) count: usize,
}

impl Next {
    /// The rows of `block`.
    pub(super) fn new(job: &TiledCall<'_>, cut: HeadSplit, block: QueryBlock) -> Next {
        let row = block.start + block.queries.0;
        let column = block.head * cut.columns();
        let shared = block.head / job.config.group() * cut.columns();
        let places = [(job.q, column), (job.k, shared), (job.v, shared), (job.o.as_rows(), column)];
        let rows = places.map(|(x, column)| {
            let at = x.row(row).wrapping_add(column).cast::<u8>();
            (at.wrapping_sub(at.addr() % LINE), 2 * x.ld())
        });
        let before = job.q.row(row).wrapping_add(column).addr() % LINE;
        let lines = (before + 2 * cut.columns()).div_ceil(LINE);
        Next { rows, lines, count: block.queries.1 - block.queries.0 }
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
                let parts = WorkspaceLayout::new(HeadSplit::new(head_dim, heads, 1));
                assert!(parts.len <= workspace_bytes(head_dim), "{head_dim}");
                assert!([parts.queries, parts.out, parts.bias].iter().all(|at| at % LINE == 0));
            }
        }
    }
}
