//! A compact set of record ids, to find duplicates among millions of records. Invariant: an id is reported as new
//! exactly once, at 10 to 13 bytes of memory per id, however long the ids are.
//!
//! Only a 64-bit hash of each id is stored. Among n different ids, two share a hash with probability about n^2 / 2^65:
//! 3e-8 for a million records, 3e-4 for a hundred million; such an id would be taken for a duplicate.

use std::hash::{DefaultHasher, Hasher};

/// The set is split by the top 8 bits of the hash, so that growing copies only 1/256 of it at a time.
const SHARDS: usize = 256;

/// A set of ids, stored as hashes.
pub struct IdSet {
    shards: Vec<IdTable>,
}

impl Default for IdSet {
    fn default() -> Self {
        Self::new()
    }
}

impl IdSet {
    /// An empty set.
    pub fn new() -> Self {
        IdSet { shards: (0..SHARDS).map(|_| IdTable::default()).collect() }
    }

    /// Adds `id` to the set; returns true if it was not in the set before.
    pub fn insert(&mut self, id: &str) -> bool {
        let hash = hash(id);
        // The top bits are equal in all hashes of a shard, so they are rotated out of the bits that select the slot.
        self.shards[(hash >> 56) as usize].insert(hash.rotate_left(8))
    }

    /// Returns whether `id` is in the set.
    pub fn contains(&self, id: &str) -> bool {
        let hash = hash(id);
        self.shards[(hash >> 56) as usize].contains(hash.rotate_left(8))
    }

    /// Returns the number of ids in the set.
    pub fn len(&self) -> usize {
        self.shards.iter().map(|shard| shard.len).sum()
    }

    /// Returns whether the set is empty.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the bytes of heap memory that the set holds.
    #[cfg(test)]
    fn heap_bytes(&self) -> usize {
        let slots: usize = self.shards.iter().map(|shard| shard.slots.len()).sum();
        slots * size_of::<u64>() + SHARDS * size_of::<IdTable>()
    }
}

/// An open-addressing table with linear probing; 0 marks a free slot. At most 4/5 full; it grows by a quarter instead
/// of doubling, which keeps it 64 % to 80 % full: 10 to 12.5 bytes per id.
#[derive(Default)]
struct IdTable {
    slots: Vec<u64>,
    len: usize,
}

impl IdTable {
    fn insert(&mut self, hash: u64) -> bool {
        // The hash 0, which marks free slots, is stored as 1: one more pair that could collide.
        let hash = hash.max(1);
        if (self.len + 1) * 5 > self.slots.len() * 4 {
            self.grow();
        }
        let new = place(&mut self.slots, hash);
        self.len += usize::from(new);
        new
    }

    fn contains(&self, hash: u64) -> bool {
        !self.slots.is_empty() && self.slots[slot(&self.slots, hash.max(1))] != 0
    }

    fn grow(&mut self) {
        let size = (self.slots.len() + self.slots.len() / 4).max(16);
        let old = std::mem::replace(&mut self.slots, vec![0; size]);
        for hash in old.into_iter().filter(|&hash| hash != 0) {
            place(&mut self.slots, hash);
        }
    }
}

/// Stores `hash` in its slot; false if it is already in the table.
fn place(slots: &mut [u64], hash: u64) -> bool {
    let at = slot(slots, hash);
    let is_new = slots[at] == 0;
    slots[at] = hash;
    is_new
}

/// Index of the slot that has `hash`, or else of the free slot where it belongs. A table always has a free slot.
fn slot(slots: &[u64], hash: u64) -> usize {
    // Maps the range of the hash to the size of the table without a division, for any size.
    let mut at = ((u128::from(hash) * slots.len() as u128) >> 64) as usize;
    while slots[at] != 0 && slots[at] != hash {
        at = if at + 1 == slots.len() { 0 } else { at + 1 };
    }
    at
}

/// Hash of an id: SipHash-1-3 with fixed keys, so that a set is the same in every run.
fn hash(id: &str) -> u64 {
    let mut hasher = DefaultHasher::new();
    hasher.write(id.as_bytes());
    hasher.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_is_new_once() {
        let mut set = IdSet::new();
        assert!(set.is_empty());
        for round in 0..2 {
            for i in 0..50_000 {
                assert_eq!(set.insert(&format!("read_{i}")), round == 0, "{i}");
            }
        }
        assert!(set.insert(""));
        assert!(!set.insert(""));
        assert_eq!(set.len(), 50_001);
        assert!(set.contains("read_7") && set.contains("") && !set.contains("read_50000"));
        assert!(!IdSet::new().contains(""));
    }

    #[test]
    fn memory_per_id_stays_under_14_bytes() {
        let mut set = IdSet::new();
        for i in 0..400_000_u64 {
            set.insert(&i.to_string());
            if i > 50_000 && i % 997 == 0 {
                let each = set.heap_bytes() as f64 / set.len() as f64;
                assert!(each < 14.0, "{each} at {i}");
            }
        }
        assert_eq!(set.len(), 400_000);
    }

    #[test]
    fn the_hash_zero_has_a_place() {
        let mut shard = IdTable::default();
        assert!(shard.insert(0));
        assert!(!shard.insert(0));
    }
}
