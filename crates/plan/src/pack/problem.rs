//! The input of the packer: items with sizes and lifetimes, and a lower bound on the height of every packing.
//!
//! Invariant: every sum of sizes here uses sizes rounded up to `align`, as packings do.
#![expect(
    clippy::arithmetic_side_effects,
    reason = "the sum of all sizes fits 64 bits, which `solve` checks first"
)]

/// Buffer to place: its size and its lifetime in instructions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PackItem {
    /// Size in bytes before rounding up to the alignment. May be zero; such an item takes no space.
    pub size: u64,
    /// Index of the first instruction at which the item is live: its writer.
    pub birth: u32,
    /// Index of the last instruction at which the item is live: its last reader. At least `birth`.
    pub death: u32,
}

/// Packing problem: items to be placed in one region.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// Items to place; results are in this order.
    pub items: Vec<PackItem>,
    /// Alignment in bytes, positive: each offset is a multiple of it, and each size is rounded up to a multiple.
    pub align: u64,
}

/// Maximum of the live bytes over time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peak {
    /// Largest sum of live sizes: a lower bound on the height of every packing.
    pub bytes: u64,
    /// Index of the first instruction at which the maximum is reached; 0 for a problem without items.
    pub instant: u32,
}

impl Problem {
    /// Number of bytes of item `index` in a packing: its size rounded up to `align`.
    ///
    /// # Panics
    /// If `align` is zero or the rounded size exceeds `u64`.
    pub fn footprint(&self, index: usize) -> u64 {
        self.items[index].size.checked_next_multiple_of(self.align).expect("align > 0, sizes fit in u64")
    }

    /// Sum of the footprints of all items; `None` if it exceeds 64 bits.
    pub fn total(&self) -> Option<u64> {
        self.items.iter().try_fold(0_u64, |sum, item| {
            sum.checked_add(item.size.checked_next_multiple_of(self.align.max(1))?)
        })
    }

    /// Largest sum of the footprints of live items, and the first instruction at which it occurs, in O(n log n).
    pub fn lower_bound(&self) -> Peak {
        let mut births: Vec<usize> = (0..self.items.len()).collect();
        let mut deaths = births.clone();
        births.sort_by_key(|&i| self.items[i].birth);
        deaths.sort_by_key(|&i| self.items[i].death);
        let mut peak = Peak { bytes: 0, instant: 0 };
        let mut live = 0;
        let mut dead = deaths.into_iter().peekable();
        for born in births {
            let now = self.items[born].birth;
            while let Some(i) = dead.next_if(|&i| self.items[i].death < now) {
                live -= self.footprint(i);
            }
            live += self.footprint(born);
            if live > peak.bytes {
                peak = Peak { bytes: live, instant: now };
            }
        }
        peak
    }

    /// Indices of the items of nonzero size that are live at `instant`, ascending.
    pub fn live_at(&self, instant: u32) -> Vec<usize> {
        let live = self
            .items
            .iter()
            .enumerate()
            .filter(|(_, item)| item.size > 0 && item.birth <= instant && instant <= item.death);
        live.map(|(i, _)| i).collect()
    }
}
