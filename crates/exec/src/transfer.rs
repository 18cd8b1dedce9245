//! Copies between memory spaces, as a device sees them. Invariant: positions and sizes come from a checked plan, so a
//! device never finds two transfers in flight that touch the same byte, unless both only read it.

use plimsoll_graph::Bytes;
use plimsoll_plan::{Location, Queue};
use std::path::Path;

/// A copy of bytes from one position to another, in the queue of its two spaces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Transfer {
    /// Number of the transfer, below [`Allocation::transfers`]. It may be started again after it was waited for.
    pub id: usize,
    /// First byte to read.
    pub from: Location,
    /// First byte to write.
    pub to: Location,
    /// Number of bytes.
    pub bytes: Bytes,
    /// Earlier work that the copy waits for.
    pub order: TransferOrder,
}

impl Transfer {
    /// A copy within the arena, in the queue of kernels. It is in order with the launches, so nobody waits for it.
    pub fn in_arena(from: u64, to: u64, bytes: Bytes) -> Self {
        let [from, to] = [from, to].map(Location::in_arena);
        Self { id: usize::MAX, from, to, bytes, order: TransferOrder::AfterLaunches }
    }

    /// The queue of the copy.
    pub fn queue(&self) -> Queue {
        Queue::of(self.from.space, self.to.space)
    }
}

/// Earlier work that a transfer waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TransferOrder {
    /// All launches, and all transfers that were waited for, before its start.
    AfterLaunches,
    /// Nothing: no work that was enqueued before uses the bytes.
    Free,
}

/// The memory of a program on a device.
#[derive(Clone, Copy, Debug)]
pub struct Allocation<'a> {
    /// Size of the arena.
    pub arena: Bytes,
    /// The first bytes of the arena are weights, which the replicas of one machine share.
    pub weights: Bytes,
    /// Sizes to which [`Device::set_mapped`](crate::Device::set_mapped) may later shrink or grow the arena; empty if it
    /// keeps its size.
    pub borders: &'a [Bytes],
    /// Size of pinned host memory.
    pub host: Bytes,
    /// Size of the scratch file.
    pub file: Bytes,
    /// Folder for the scratch file, which has no name there.
    pub folder: &'a Path,
    /// Number of transfers that are told apart.
    pub transfers: usize,
}

impl<'a> Allocation<'a> {
    /// An arena alone.
    pub fn arena(bytes: Bytes) -> Self {
        Self {
            arena: bytes,
            weights: Bytes::ZERO,
            borders: &[],
            host: Bytes::ZERO,
            file: Bytes::ZERO,
            folder: Path::new("."),
            transfers: 0,
        }
    }
}
