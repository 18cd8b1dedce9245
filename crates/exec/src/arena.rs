//! The one allocation of host memory, whose beginning several lanes may have in common. Invariant: every access is checked
//! against its bounds, here; who writes what is shared holds its lock alone.

use crate::DeviceError;
use graph::Bytes;
use std::alloc::{Layout, alloc, dealloc};
use std::ptr::NonNull;
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

/// A huge page: the arena starts on one, so that the kernel can back all of it with huge ones, which saves
/// most of the address translation of streamed weights.
pub const HUGE_PAGE: usize = 2 << 20;

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
        // At this alignment the process's allocator leaves a refusal to its caller (`heap.rs`).
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

    /// While it lives, nobody writes what is shared. Whoever reads by `range` holds it meanwhile.
    pub fn reading(&self) -> Option<RwLockReadGuard<'_, ()>> {
        self.shared.as_ref().map(|(weights, _)| weights.access.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// While it lives, nobody else reads or writes what is shared, if bytes from `at` on may be of it.
    fn writing(&self, at: u64) -> Option<RwLockWriteGuard<'_, ()>> {
        let shared = self.shared.as_ref().filter(|(_, shared)| at < *shared);
        shared.map(|(weights, _)| weights.access.write().unwrap_or_else(PoisonError::into_inner))
    }

    /// Reads a range, which nobody writes meanwhile.
    pub fn read<T>(&self, at: u64, bytes: Bytes, take: impl FnOnce(&[u8]) -> T) -> Result<T, DeviceError> {
        let start = self.range(at, bytes)?;
        let _unchanged = self.reading();
        // SAFETY: the range is inside, was written by `new`; writers need `&mut self`, and of what is shared the lock.
        Ok(take(unsafe { std::slice::from_raw_parts(start.as_ptr(), bytes.0 as usize) }))
    }

    /// Writes a range.
    pub fn write(&mut self, at: u64, bytes: &[u8]) -> Result<(), DeviceError> {
        let start = self.range(at, Bytes(bytes.len() as u64))?;
        let _alone = self.writing(at);
        // SAFETY: the range is inside; `&mut self` keeps everyone else out, of what is shared the lock.
        unsafe { start.copy_from_nonoverlapping(NonNull::from(bytes).cast(), bytes.len()) };
        Ok(())
    }

    /// Sets a range that may begin among what is shared and end behind it.
    pub fn fill(&mut self, at: u64, bytes: Bytes, byte: u8) -> Result<(), DeviceError> {
        let end = at.checked_add(bytes.0).ok_or(DeviceError::OutsideArena { at, bytes })?;
        let border = self.shared().clamp(at, end);
        let parts = [(at, Bytes(border - at)), (border, Bytes(end - border))]
            .map(|(at, bytes)| (self.range(at, bytes), bytes));
        let _alone = self.writing(at);
        for (start, bytes) in parts {
            // SAFETY: as in `write`.
            unsafe { start?.write_bytes(byte, bytes.0 as usize) };
        }
        Ok(())
    }

    /// Copies inside of the arena.
    pub fn copy(&mut self, from: u64, to: u64, bytes: Bytes) -> Result<(), DeviceError> {
        let (source, target) = (self.range(from, bytes)?, self.range(to, bytes)?);
        let _alone = self.writing(from.min(to));
        // SAFETY: both ranges are inside, may overlap, and are nobody else's as in `write`.
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
        one.write(0, &[1; 192]).expect_err("of both");
        one.write(120, &[7; 8]).expect("shared");
        one.write(128, &[9; 64]).expect("own");
        let all = |arena: &Arena, at, bytes, byte| {
            arena.read(at, Bytes(bytes), |read| read.iter().all(|&x| x == byte)).expect("inside")
        };
        assert!(all(&two, 120, 8, 7) && all(&two, 128, 64, 0));
        one.fill(124, Bytes(8), 5).expect("both");
        one.copy(124, 0, Bytes(4)).expect("shared");
        let held = |arena: &Arena, at| arena.read(at, Bytes(4), <[u8]>::to_vec).expect("inside");
        assert_eq!([0, 120, 124].map(|at| held(&two, at)), [[5; 4], [7; 4], [5; 4]]);
        assert_eq!(
            ([128, 132].map(|at| held(&one, at)), held(&two, 128)),
            ([[5; 4].to_vec(), [9; 4].to_vec()], vec![0; 4])
        );
        one.fill(u64::MAX, Bytes(2), 0).expect_err("outside");
        for (at, bytes) in [(127, 2), (128, 65), (193, 0), (u64::MAX, 2)] {
            assert!(two.range(at, Bytes(bytes)).is_err(), "{bytes} from {at}");
        }
        assert!(two.range(192, Bytes(0)).is_ok() && two.range(128, Bytes(0)).is_ok());
        assert_eq!(arena(128).own.size(), 1, "nothing of its own");
    }
}
