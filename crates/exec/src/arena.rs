//! Blocks of host memory, and the arena: the block that a plan addresses. Several CPU replicas may share the beginning of
//! their arenas, the weights.
//! Invariant: every access is checked against the arena's bounds here; a writer of shared bytes holds their lock
//! exclusively.

use crate::DeviceError;
use plimsoll_graph::Bytes;
use std::alloc::{Layout, alloc, dealloc};
use std::mem::MaybeUninit;
use std::ptr::NonNull;
use std::slice::ChunksMut;
use std::sync::{Arc, Mutex, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

/// Size of a huge page. The arena is aligned to it, so that the operating system can back all of it with huge pages,
/// which saves most of the address translation for streamed weights.
pub(crate) const HUGE_PAGE: usize = 2 << 20;

/// Bytes that a thread clears at once.
const CLEARED_AT_ONCE: usize = 16 * HUGE_PAGE;

/// An allocation of host memory, zeroed, on huge pages where the operating system grants them.
#[derive(Debug)]
pub struct HostBlock {
    start: NonNull<u8>,
    layout: Layout,
}

// SAFETY: the block owns its memory. Whoever keeps the address from `start` justifies the accesses through it.
unsafe impl Send for HostBlock {}
// SAFETY: through a shared reference a block gives only its address and size.
unsafe impl Sync for HostBlock {}

impl HostBlock {
    /// Allocates `bytes`, zeroed. Before that, gives memory that the process has freed back to the operating system: after
    /// planning, glibc's allocator holds up to some hundred megabytes, which would count beside the arena.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`] with the bytes.
    pub fn new(bytes: Bytes) -> Result<Self, DeviceError> {
        let mut block = Self::reserved(bytes)?;
        block.clear(1);
        Ok(block)
    }

    /// Like [`Self::new`], but clears the memory with all cores, because clearing takes most of the time.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`] with the bytes.
    pub fn cleared_in_parallel(bytes: Bytes) -> Result<Self, DeviceError> {
        let mut block = Self::reserved(bytes)?;
        block.clear(std::thread::available_parallelism().map_or(1, usize::from));
        Ok(block)
    }

    /// Allocates `bytes`, which must be cleared before they are read, and requests huge pages.
    fn reserved(bytes: Bytes) -> Result<Self, DeviceError> {
        #[cfg(all(target_os = "linux", target_env = "gnu"))]
        // SAFETY: the call accesses no memory that is in use.
        unsafe {
            libc::malloc_trim(0);
        }
        let out_of_memory = DeviceError::OutOfMemory { bytes };
        let Ok(size) = usize::try_from(bytes.0) else { return Err(out_of_memory) };
        let size = size.max(1);
        let Ok(layout) = Layout::from_size_align(size, HUGE_PAGE) else { return Err(out_of_memory) };
        // At this alignment the process's allocator returns null instead of ending the process (`heap.rs`).
        // SAFETY: the layout's size is not zero.
        let start = NonNull::new(unsafe { alloc(layout) }).ok_or(out_of_memory)?;
        // Only a hint: if it is not granted, pages are small and nothing else changes.
        #[cfg(target_os = "linux")]
        // SAFETY: the range is the allocation; the call does not change its content.
        unsafe {
            libc::madvise(start.as_ptr().cast(), size, libc::MADV_HUGEPAGE);
        }
        Ok(Self { start, layout })
    }

    /// Sets all bytes to zero, which also creates their pages.
    fn clear(&mut self, threads: usize) {
        // SAFETY: the range is the allocation, `&mut self` excludes all other accesses, and any byte may be uninitialised.
        let all = unsafe {
            std::slice::from_raw_parts_mut(self.start.as_ptr().cast::<MaybeUninit<u8>>(), self.size())
        };
        let parts = Mutex::new(all.chunks_mut(CLEARED_AT_ONCE));
        std::thread::scope(|scope| {
            for _ in 1..threads {
                // If a thread cannot be started, the other threads clear its parts.
                let _ = std::thread::Builder::new().spawn_scoped(scope, || clear_parts(&parts));
            }
            clear_parts(&parts);
        });
    }

    /// Address of the first byte; the caller must justify all accesses through it.
    pub fn start(&self) -> NonNull<u8> {
        self.start
    }

    /// Returns the pages behind the first `kept` bytes to the operating system; their content is lost.
    fn give_back(&mut self, kept: usize) {
        // Whole huge pages alone: the block is aligned to them, and the operating system would have to split one. The last
        // page may hold memory of other owners behind the block, so it stays.
        let first = kept.next_multiple_of(HUGE_PAGE);
        let last = self.size() / HUGE_PAGE * HUGE_PAGE;
        if first >= last {
            return;
        }
        #[cfg(target_os = "linux")]
        // SAFETY: the range is inside the block and consists of whole pages, `&mut self` excludes all other accesses, and the
        // memory is private and anonymous, so that it reads as zeros afterwards, which is initialised.
        unsafe {
            libc::madvise(self.start.as_ptr().add(first).cast(), last - first, libc::MADV_DONTNEED);
        }
    }

    /// Size in bytes.
    pub fn size(&self) -> usize {
        self.layout.size()
    }
}

/// Weights that several arenas share: they are the first bytes of each of these arenas.
#[derive(Debug)]
pub struct SharedWeights {
    block: HostBlock,
    access: RwLock<()>,
}

impl SharedWeights {
    /// Allocates `bytes`, zeroed.
    pub fn new(bytes: Bytes) -> Result<Self, DeviceError> {
        Ok(Self { block: HostBlock::new(bytes)?, access: RwLock::new(()) })
    }

    /// Whether the weights have `bytes` bytes.
    pub fn are(&self, bytes: Bytes) -> bool {
        self.block.size() as u64 == bytes.0.max(1)
    }
}

/// Host memory addressed by bytes from 0 on.
#[derive(Debug)]
pub struct Arena {
    /// The shared beginning, if any, and its size in bytes.
    shared: Option<(Arc<SharedWeights>, u64)>,
    own: HostBlock,
}

impl Arena {
    /// Allocates `bytes`, zeroed.
    pub fn new(bytes: Bytes) -> Result<Self, DeviceError> {
        Ok(Self { shared: None, own: HostBlock::new(bytes)? })
    }

    /// Makes an arena of `bytes` in total, of which the first `shared` are `weights`; allocates the rest, zeroed.
    /// Panics if `weights` has another size.
    pub fn sharing(weights: Arc<SharedWeights>, shared: Bytes, bytes: Bytes) -> Result<Self, DeviceError> {
        assert!(weights.are(shared), "weights of {shared}");
        Ok(Self { shared: Some((weights, shared.0)), own: HostBlock::new(bytes.saturating_sub(shared))? })
    }

    /// Number of shared bytes, which are the first ones.
    pub fn shared(&self) -> u64 {
        self.shared.as_ref().map_or(0, |(_, bytes)| *bytes)
    }

    /// Address of the first byte of a range. `Err` unless the range lies inside the arena, and entirely inside or
    /// outside the shared bytes. The caller must justify all accesses through the pointer.
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
        // SAFETY: the offset is at most the block's size.
        Ok(unsafe { block.start.add((at - first) as usize) })
    }

    /// Locks the shared bytes for reading. No other replica writes them while the guard lives; readers through
    /// `range` hold it for as long as they read.
    pub fn reading(&self) -> Option<RwLockReadGuard<'_, ()>> {
        self.shared.as_ref().map(|(weights, _)| weights.access.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// Locks the shared bytes exclusively, if a range that starts at `at` may include any.
    fn writing(&self, at: u64) -> Option<RwLockWriteGuard<'_, ()>> {
        let shared = self.shared.as_ref().filter(|(_, shared)| at < *shared);
        shared.map(|(weights, _)| weights.access.write().unwrap_or_else(PoisonError::into_inner))
    }

    /// Passes the bytes of a range to `take`, with shared bytes locked for reading.
    pub fn read<T>(&self, at: u64, bytes: Bytes, take: impl FnOnce(&[u8]) -> T) -> Result<T, DeviceError> {
        let start = self.range(at, bytes)?;
        let _unchanged = self.reading();
        // SAFETY: the range is inside and was initialised by `new`; writers need `&mut self` and, for shared bytes,
        // the lock.
        Ok(take(unsafe { std::slice::from_raw_parts(start.as_ptr(), bytes.0 as usize) }))
    }

    /// Copies `bytes` to position `at`.
    pub fn write(&mut self, at: u64, bytes: &[u8]) -> Result<(), DeviceError> {
        let start = self.range(at, Bytes(bytes.len() as u64))?;
        let _alone = self.writing(at);
        // SAFETY: the range is inside; `&mut self` and, for shared bytes, the lock exclude all other accesses.
        unsafe { start.copy_from_nonoverlapping(NonNull::from(bytes).cast(), bytes.len()) };
        Ok(())
    }

    /// Sets all bytes of a range to `byte`. The range may begin in the shared bytes and end behind them.
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

    /// Returns the pages behind the first `bytes` bytes, as far as they are this arena's own, to the operating system. They
    /// remain part of the arena: the next access of a page takes memory for it again, with zeros as content.
    pub fn give_back(&mut self, bytes: Bytes) {
        let kept = bytes.saturating_sub(Bytes(self.shared())).0 as usize;
        self.own.give_back(kept);
    }

    /// Copies a range to another position; the two may overlap.
    pub fn copy(&mut self, from: u64, to: u64, bytes: Bytes) -> Result<(), DeviceError> {
        let source = self.range(from, bytes)?;
        let target = self.range(to, bytes)?;
        let _alone = self.writing(from.min(to));
        // SAFETY: both ranges are inside; other accesses are excluded as in `write`; `copy_to` allows overlap.
        unsafe { source.copy_to(target, bytes.0 as usize) };
        Ok(())
    }
}

/// Sets parts of a block to zero until none is left.
fn clear_parts(parts: &Mutex<ChunksMut<'_, MaybeUninit<u8>>>) {
    loop {
        // The lock is held only while the part is taken.
        let part = parts.lock().unwrap_or_else(PoisonError::into_inner).next();
        let Some(part) = part else { return };
        part.fill(MaybeUninit::new(0));
    }
}

impl Drop for HostBlock {
    fn drop(&mut self) {
        // SAFETY: allocated in `reserved` with this layout.
        unsafe { dealloc(self.start.as_ptr(), self.layout) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Shared bytes exist once, and no range may cross from shared to own bytes.
    #[test]
    fn arenas_that_share_begin_with_the_same_bytes() {
        let weights = Arc::new(SharedWeights::new(Bytes(128)).expect("memory"));
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

    /// Pages behind a border are given back, and those before keep their content.
    #[cfg(target_os = "linux")]
    #[test]
    fn memory_behind_a_border_is_given_back() {
        let size = 8 * HUGE_PAGE as u64;
        let mut arena = Arena::new(Bytes(size)).expect("memory");
        arena.fill(0, Bytes(size), 7).expect("inside");
        let resident = |arena: &Arena| {
            let mut pages = vec![0u8; arena.own.size().div_ceil(4096)];
            // SAFETY: the range is the block, and there is a byte for every page, which has at least 4096 bytes.
            let code = unsafe {
                libc::mincore(arena.own.start.as_ptr().cast(), arena.own.size(), pages.as_mut_ptr().cast())
            };
            assert_eq!(code, 0, "mincore");
            pages.iter().filter(|&&page| page & 1 == 1).count() as u64 * 4096
        };
        if resident(&arena) != size {
            println!("skipped: pages of this system are not of 4096 bytes, or are swapped out");
            return;
        }
        let border = 3 * HUGE_PAGE as u64 - 5;
        arena.give_back(Bytes(border));
        assert_eq!(resident(&arena), 3 * HUGE_PAGE as u64);
        let bytes = |arena: &Arena, at, n| arena.read(at, Bytes(n), <[u8]>::to_vec).expect("inside");
        assert_eq!(bytes(&arena, border - 4, 4), [7; 4]);
        assert_eq!(bytes(&arena, size - 4, 4), [0; 4], "taken again when it is read");
        arena.write(size - 4, &[9; 4]).expect("inside");
        arena.give_back(Bytes(size));
        assert_eq!(bytes(&arena, size - 4, 4), [9; 4], "nothing is behind the end");
    }
}
