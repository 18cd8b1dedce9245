//! Division of a matmul's output into tasks.

use core::ops::Range;

/// Limits of a [`TaskGrid`].
#[derive(Clone, Copy)]
pub(crate) struct GridLimits {
    /// Rows of the kernel's tallest register tile. Blocks consist of whole tiles, except at the end.
    pub(crate) tile_rows: usize,
    /// Maximum rows of a task.
    pub(crate) max_rows: usize,
    /// Minimum number of groups of panels.
    pub(crate) min_groups: usize,
}

/// Partition of the output into tasks: row blocks times groups of panels.
pub(crate) struct TaskGrid {
    m: usize,
    panels: usize,
    tile_rows: usize,
    blocks: usize,
    groups: usize,
}

impl TaskGrid {
    /// Divides `m` rows and `panels` panels among `threads` threads.
    pub(crate) fn new(m: usize, panels: usize, threads: usize, limits: GridLimits) -> TaskGrid {
        let GridLimits { tile_rows, max_rows, min_groups } = limits;
        // A multiple of the thread count, so that every thread gets equally many blocks, which differ by at most
        // one tile; but no block of less than a tile.
        let whole_tiles = max_rows / tile_rows * tile_rows;
        let blocks = m.div_ceil(whole_tiles).next_multiple_of(threads).min(m.div_ceil(tile_rows));
        // With few blocks, threads also divide the panels, although each task then copies the rows for itself.
        // There are then at least two tasks per thread.
        let shares = match blocks {
            0 => 0,
            _ if threads == 1 || blocks >= 2 * threads => 1,
            _ => (2 * threads).div_ceil(blocks),
        };
        TaskGrid { m, panels, tile_rows, blocks, groups: shares.max(min_groups).min(panels) }
    }

    /// Number of tasks.
    pub(crate) fn tasks(&self) -> usize {
        self.blocks * self.groups
    }

    /// The rows and panels of task number `task`.
    pub(crate) fn task(&self, task: usize) -> (Range<usize>, Range<usize>) {
        let block = task / self.groups;
        let group = task % self.groups;
        let rows = self.first_row(block)..self.first_row(block + 1);
        (rows, self.first_panel(group)..self.first_panel(group + 1))
    }

    /// First row of a block, or M for the block after the last.
    fn first_row(&self, block: usize) -> usize {
        // Whole tiles are distributed, not rows: only the last block may end inside a tile.
        self.m.min(block * self.m.div_ceil(self.tile_rows) / self.blocks * self.tile_rows)
    }

    /// First panel of a group, or the number of panels for the group after the last.
    fn first_panel(&self, group: usize) -> usize {
        group * self.panels / self.groups
    }
}
