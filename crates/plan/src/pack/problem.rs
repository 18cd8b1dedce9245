//! The problem: what must be stored, when, and the bound that no packing can beat.
//!
//! Invariant: every byte count here is of sizes rounded up to `align`, the ones that a packing pays.

/// One value to store: a size, and the instructions between which its bytes must survive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Item {
    /// Bytes, before rounding up to the alignment. Zero is legal: such an item takes no space.
    pub size: u64,
    /// Index of the first instruction at which it is alive (the one that writes it).
    pub birth: u32,
    /// Index of the last instruction at which it is alive (its last reader), `birth <= death`.
    pub death: u32,
}

/// Items that share one region.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// What to place; results are in this order.
    pub items: Vec<Item>,
    /// Bytes, positive: each offset is a multiple of it, and each size is rounded up to one.
    pub align: u64,
}

/// Where the live bytes are most.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peak {
    /// The largest sum of live sizes: the lower bound on any packing's height.
    pub bytes: u64,
    /// The first instruction index at which it is reached (0 for a problem without items).
    pub instant: u32,
}

impl Problem {
    /// Bytes that item `index` takes in a packing: its size rounded up to `align`.
    ///
    /// # Panics
    /// If `align` is zero or the rounded size exceeds `u64`.
    pub fn footprint(&self, index: usize) -> u64 {
        self.items[index].size.checked_next_multiple_of(self.align).expect("align > 0, sizes fit in u64")
    }

    /// The largest sum of live footprints and the first instant at which it falls. O(n log n).
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

    /// Indices of the items that hold bytes at `instant`, ascending.
    pub fn live_at(&self, instant: u32) -> Vec<usize> {
        let alive = |item: &Item| item.size > 0 && item.birth <= instant && instant <= item.death;
        (0..self.items.len()).filter(|&i| alive(&self.items[i])).collect()
    }
}
