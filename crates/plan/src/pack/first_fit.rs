//! First fit: places each block, in a given order, at the lowest offset that is free during its lifetime.
//!
//! Invariant: no block overlaps an earlier one.

use super::solve::PackBlock;

/// Packs `blocks` in `order` and returns the offset of each; `None` if a block would end above `limit`.
pub(super) fn pack(blocks: &[PackBlock], order: &[u32], limit: u64) -> Option<Vec<u64>> {
    let mut offsets = vec![0; blocks.len()];
    // Sorted by offset, so that one walk passes the gaps from the lowest to the highest.
    let mut placed: Vec<(u64, PackBlock)> = Vec::with_capacity(blocks.len());
    for &i in order {
        let block = blocks[i as usize];
        let mut offset = 0;
        for (start, other) in placed.iter().filter(|(_, other)| other.meets(&block)) {
            if block.end(offset) <= *start {
                break;
            }
            offset = offset.max(other.end(*start));
        }
        if block.end(offset) > limit {
            return None;
        }
        offsets[i as usize] = offset;
        let rank = placed.partition_point(|&(start, _)| start < offset);
        placed.insert(rank, (offset, block));
    }
    Some(offsets)
}
