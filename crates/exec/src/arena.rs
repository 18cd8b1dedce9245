//! The one allocation of host memory, whose beginning several lanes may have in common. Invariant: every access is checked
//! against its bounds, here; who writes what is shared holds its lock alone.

use crate::DeviceError;
use graph::Bytes;
use std::alloc::{Layout, alloc, dealloc};
use std::ptr::NonNull;
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

/// A huge page: the arena starts on one, so that the kernel can back all of it with huge ones, which saves
/// most of the address translation of streamed weights.
const HUGE_PAGE: usize = 2 << 20;

/// Bytes of host memory, on huge pages where the kernel gives them.
#[derive(Debug)]
struct Block {
    start: NonNull<u8>,
    layout: Layout,
}

// SAFETY: the block owns its memory; nothing else points to it between calls.
unsafe impl Send for Block {}
// SAFETY: it has no methods that touch its bytes; who does justifies it.
unsafe impl Sync for Block {}

impl Block {
    /// Allocates `bytes`, zeroed, and asks for huge pages. What the planner held before is given back first: it is
    /// free, but glibc's allocator keeps it, up to some hundred megabytes that the process would hold beside the arena.
    pub fn new(bytes: Bytes) -> Result<Self, DeviceError> {
        #[cfg(all(target_os = "linux", target_env = "gnu"))]
        // SAFETY: it touches no memory that is in use.
        unsafe {
            libc::malloc_trim(0);
        }
        let fail = || DeviceError::OutOfMemory { bytes };
        let size = usize::try_from(bytes.0).map_err(|_| fail())?.max(1);
        let layout = Layout::from_size_align(size, HUGE_PAGE).map_err(|_| fail())?;
        // SAFETY: the layout's size is not zero.
        let start = NonNull::new(unsafe { alloc(layout) }).ok_or_else(fail)?;
        // Only a wish: where it is not granted, pages are small and nothing else changes.
        #[cfg(target_os = "linux")]
        // SAFETY: the range is the allocation; the call changes no content.
        unsafe {
            libc::madvise(start.as_ptr().cast(), size, libc::MADV_HUGEPAGE);
        }
        // Pages are made by the first write, so the wish comes before it.
        // SAFETY: the range is the allocation, and nobody else has it yet.
        unsafe { start.write_bytes(0, size) };
        Ok(Self { start, layout })
    }

    /// Its bytes.
    fn size(&self) -> usize {
        self.layout.size()
    }
}

/// Weights of several arenas, which all begin with them.
#[derive(Debug)]
pub struct Weights {
    block: Block,
    access: RwLock<()>,
}

impl Weights {
    /// Allocates `bytes`, zeroed.
    pub fn new(bytes: Bytes) -> Result<Self, DeviceError> {
        Ok(Self { block: Block::new(bytes)?, access: RwLock::new(()) })
    }

    /// Whether they are so many bytes.
    pub fn are(&self, bytes: Bytes) -> bool {
        self.block.size() as u64 == bytes.0.max(1)
    }

    /// While it lives, nobody writes them.
    pub fn read(&self) -> RwLockReadGuard<'_, ()> {
        self.access.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// While it lives, nobody else reads or writes them.
    pub fn write(&self) -> RwLockWriteGuard<'_, ()> {
        self.access.write().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Bytes by their address from 0 on.
#[derive(Debug)]
pub struct Arena {
    /// What it begins with, and how many bytes these are.
    shared: Option<(Arc<Weights>, u64)>,
    own: Block,
}

impl Arena {
    /// Allocates `bytes`, zeroed.
    pub fn new(bytes: Bytes) -> Result<Self, DeviceError> {
        Ok(Self { shared: None, own: Block::new(bytes)? })
    }

    /// `bytes` in all, of which the first `shared` are those `weights`; allocates the others, zeroed.
    pub fn sharing(weights: Arc<Weights>, shared: Bytes, bytes: Bytes) -> Result<Self, DeviceError> {
        assert!(weights.are(shared), "weights of {shared}");
        Ok(Self { shared: Some((weights, shared.0)), own: Block::new(bytes.saturating_sub(shared))? })
    }

    /// What it shares with others: whoever reads or writes bytes holds its lock meanwhile.
    pub fn weights(&self) -> Option<Arc<Weights>> {
        self.shared.as_ref().map(|(weights, _)| Arc::clone(weights))
    }

    /// How many bytes are shared: the first.
    pub fn shared(&self) -> u64 {
        self.shared.as_ref().map_or(0, |(_, bytes)| *bytes)
    }

    /// The first byte of a range that lies inside, and is shared or is not. What is done through it is the caller's to
    /// justify.
    pub fn range(&self, at: u64, bytes: Bytes) -> Result<NonNull<u8>, DeviceError> {
        let outside = DeviceError::OutsideArena { at, bytes };
        let Some(end) = at.checked_add(bytes.0) else { return Err(outside) };
        let (block, first, size) = match &self.shared {
            Some((weights, shared)) if end <= *shared => (&weights.block, 0, *shared),
            _ => (&self.own, self.shared(), self.own.size() as u64),
        };
        if at < first || end - first > size {
            return Err(outside);
        }
        // SAFETY: at most the block's size.
        Ok(unsafe { block.start.add((at - first) as usize) })
    }

    /// A range to read.
    pub fn bytes(&self, at: u64, bytes: Bytes) -> Result<&[u8], DeviceError> {
        let start = self.range(at, bytes)?;
        // SAFETY: the range is inside, was written by `new`; writers need `&mut self`, and of what is shared the lock.
        Ok(unsafe { std::slice::from_raw_parts(start.as_ptr(), bytes.0 as usize) })
    }

    /// A range to write.
    pub fn bytes_mut(&mut self, at: u64, bytes: Bytes) -> Result<&mut [u8], DeviceError> {
        let start = self.range(at, bytes)?;
        // SAFETY: the range is inside, and `&mut self` keeps everyone else out, of what is shared the lock.
        Ok(unsafe { std::slice::from_raw_parts_mut(start.as_ptr(), bytes.0 as usize) })
    }

    /// Copies inside of the arena.
    pub fn copy(&mut self, from: u64, to: u64, bytes: Bytes) -> Result<(), DeviceError> {
        let (source, target) = (self.range(from, bytes)?, self.range(to, bytes)?);
        // SAFETY: both ranges are inside, may overlap, and are nobody else's as in `bytes_mut`.
        unsafe { source.copy_to(target, bytes.0 as usize) };
        Ok(())
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        // SAFETY: allocated in `new` with this layout.
        unsafe { dealloc(self.start.as_ptr(), self.layout) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What is shared is one memory, what is not is not even allocated twice; no range is of both.
    #[test]
    fn arenas_that_share_begin_with_the_same_bytes() {
        let weights = Arc::new(Weights::new(Bytes(128)).expect("memory"));
        let arena = |bytes| Arena::sharing(Arc::clone(&weights), Bytes(128), Bytes(bytes)).expect("memory");
        let [mut one, two] = [arena(192), arena(192)];
        assert_eq!((one.own.size(), one.shared()), (64, 128));
        one.bytes_mut(0, Bytes(192)).expect_err("of both");
        one.bytes_mut(120, Bytes(8)).expect("shared").fill(7);
        one.bytes_mut(128, Bytes(64)).expect("own").fill(9);
        assert!(two.bytes(120, Bytes(8)).expect("shared").iter().all(|&x| x == 7));
        assert!(two.bytes(128, Bytes(64)).expect("own").iter().all(|&x| x == 0));
        for (at, bytes) in [(127, 2), (128, 65), (193, 0), (u64::MAX, 2)] {
            assert!(two.range(at, Bytes(bytes)).is_err(), "{bytes} from {at}");
        }
        assert!(two.range(192, Bytes(0)).is_ok() && two.range(128, Bytes(0)).is_ok());
        assert_eq!(arena(128).own.size(), 1, "nothing of its own");
    }
}
