//! Host memory of a device: the host's space, whose addresses come from the plan, and the ring buffer through which uploads
//! to the arena pass. Invariant: a range of the ring is reused only after the copy that used it has completed. If there is
//! no space, or no pinned memory, an upload uses the caller's memory directly.

use crate::CudaError;
use crate::api::Driver;
use crate::event::CudaEvent;
use cudarc::driver::sys as cu;
use plimsoll_exec::DeviceError;
use plimsoll_exec::arena::HostBlock;
use plimsoll_graph::Bytes;
use std::cell::UnsafeCell;
use std::collections::VecDeque;
use std::ops::Range;
use std::{ptr, slice};

/// A ring buffer of pinned memory, with an event for each range in use.
pub(crate) struct StagingBuffer {
    memory: PinnedMemory,
    ring: StagingSlots,
    events: VecDeque<CudaEvent>,
    spare: Vec<CudaEvent>,
}

impl StagingBuffer {
    /// Allocates a ring buffer of `bytes`.
    pub(crate) fn new(api: &'static Driver, bytes: Bytes) -> Result<Self, CudaError> {
        let memory = PinnedMemory::new(api, bytes.0 as usize)?;
        let ring = StagingSlots { bytes: bytes.0 as usize, taken: VecDeque::new() };
        Ok(Self { memory, ring, events: VecDeque::new(), spare: vec![] })
    }

    /// Reserves the next free range of the ring buffer. Returns its memory, and an event that the caller records after
    /// the copy; `None` if there is no space.
    pub(crate) fn take(&mut self, bytes: usize) -> Result<Option<(&mut [u8], &CudaEvent)>, CudaError> {
        let event = self.spare.pop().map_or_else(|| CudaEvent::new(self.memory.api), Ok)?;
        let Some(at) = self.ring.take(bytes) else {
            self.spare.push(event);
            return Ok(None);
        };
        self.events.push_back(event);
        Ok(self.events.back().map(|event| (self.memory.bytes(at..at + bytes), event)))
    }

    /// Like `take`, but waits for the copies of the oldest ranges until there is space; `None` if the whole buffer is
    /// smaller than `bytes`.
    pub(crate) fn wait_and_take(&mut self, bytes: usize) -> Result<Option<(&mut [u8], &CudaEvent)>, CudaError> {
        if bytes > self.ring.bytes {
            return Ok(None);
        }
        while !self.ring.fits(bytes) {
            self.wait_and_give(|_| ())?;
        }
        self.take(bytes)
    }

    /// Waits for the copy of the oldest range, passes its contents to `read`, and frees the range.
    pub(crate) fn wait_and_give(&mut self, read: impl FnOnce(&[u8])) -> Result<(), CudaError> {
        let Some(event) = self.events.pop_front() else { return Ok(()) };
        let waited = event.wait();
        self.spare.push(event);
        if let Some(range) = self.ring.give()
            && waited.is_ok()
        {
            read(self.memory.bytes(range));
        }
        waited
    }
}

/// Allocation of ranges in a ring buffer: taken behind the newest, freed from the oldest on.
struct StagingSlots {
    bytes: usize,
    taken: VecDeque<Range<usize>>,
}

impl StagingSlots {
    /// Returns the offset at which a new range of `bytes` would start, if it fits. Ranges never wrap around the end.
    fn place(&self, bytes: usize) -> Option<usize> {
        let (Some(oldest), Some(newest)) = (self.taken.front(), self.taken.back()) else {
            return (bytes <= self.bytes).then_some(0);
        };
        let start = newest.end.next_multiple_of(ALIGNMENT);
        // If the oldest range starts before the newest, the free space is behind the newest and before the oldest;
        // otherwise the ring has wrapped and the free space lies between the two.
        if oldest.start > newest.start {
            return (start + bytes <= oldest.start).then_some(start);
        }
        if start + bytes <= self.bytes {
            return Some(start);
        }
        (bytes <= oldest.start).then_some(0)
    }

    fn fits(&self, bytes: usize) -> bool {
        self.place(bytes.max(1)).is_some()
    }

    fn take(&mut self, bytes: usize) -> Option<usize> {
        // A range of zero bytes would be equal in position to its successor, so `place` could not tell full from empty.
        let bytes = bytes.max(1);
        let at = self.place(bytes)?;
        self.taken.push_back(at..at + bytes);
        Some(at)
    }

    fn give(&mut self) -> Option<Range<usize>> {
        self.taken.pop_front()
    }
}

/// Ranges start at multiples of a cache line.
const ALIGNMENT: usize = 64;

/// An allocation of pinned host memory.
struct PinnedMemory {
    api: &'static Driver,
    start: *mut u8,
    bytes: usize,
    /// The memory, if it is the program's own and registered with the driver; `None` if the driver allocated it.
    registered: Option<HostBlock>,
}

/// Smallest size of pinned memory that the program allocates itself and registers with the driver. Measured on the host of
/// an H100: `cuMemHostAlloc` clears memory with one thread at 2.4 GB/s; 16 cores clear and register 22 GB/s. On the huge
/// pages of the program's allocation, copies to the GPU reach 55 GB/s instead of 49.
const REGISTERED: usize = 64 << 20;

/// Size of a page of host memory. A page is pinned as a whole, so that registered memory must not share one.
const PAGE: u64 = 4096;

// SAFETY: the memory is owned, and accessed only through its owner.
unsafe impl Send for PinnedMemory {}

impl PinnedMemory {
    fn new(api: &'static Driver, bytes: usize) -> Result<Self, CudaError> {
        // In some virtual machines the driver cannot register memory. Memory that it allocates itself is then used, which
        // takes longer to allocate and has the same properties.
        let registered = (bytes >= REGISTERED).then(|| Self::registered(api, bytes)).flatten();
        match registered {
            Some(pinned) => Ok(pinned),
            None => Self::of_driver(api, bytes),
        }
    }

    /// Memory of the program, registered with the driver; `None` if that fails.
    fn registered(api: &'static Driver, bytes: usize) -> Option<Self> {
        let block = HostBlock::cleared_in_parallel(Bytes(bytes as u64).align_up(PAGE)).ok()?;
        let start = block.start().as_ptr();
        // SAFETY: the range is the block, which the value owns until it has unregistered it.
        let code =
            unsafe { (api.cuMemHostRegister_v2)(start.cast(), block.size(), cu::CU_MEMHOSTREGISTER_PORTABLE) };
        api.check("cuMemHostRegister", code).ok()?;
        Some(Self { api, start, bytes, registered: Some(block) })
    }

    /// Memory that the driver allocates.
    fn of_driver(api: &'static Driver, bytes: usize) -> Result<Self, CudaError> {
        let mut start = ptr::null_mut();
        // SAFETY: the pointer is to a local. The driver maps pages that the operating system has filled with zeros, so the
        // memory is initialised.
        unsafe {
            let code = (api.cuMemHostAlloc)(&mut start, bytes.max(1), cu::CU_MEMHOSTALLOC_PORTABLE);
            api.check("cuMemHostAlloc", code)?;
        }
        Ok(Self { api, start: start.cast(), bytes, registered: None })
    }

    fn bytes(&mut self, range: Range<usize>) -> &mut [u8] {
        assert!(range.start <= range.end && range.end <= self.bytes, "places lie in the ring");
        // SAFETY: the range is in bounds by the assertion and was initialised by `new`; the events of its range make
        // sure that no copy of the GPU is reading or writing it.
        unsafe { slice::from_raw_parts_mut(self.start.add(range.start), range.len()) }
    }
}

impl Drop for PinnedMemory {
    fn drop(&mut self) {
        // SAFETY: the memory was registered or came from `cuMemHostAlloc`, and the device waited for its streams before. A
        // registered block is freed after this.
        unsafe {
            match self.registered {
                Some(_) => (self.api.cuMemHostUnregister)(self.start.cast()),
                None => (self.api.cuMemFreeHost)(self.start.cast()),
            }
        };
    }
}

/// The host's space of a device. Its bytes are accessed through copies only: by the device in the ranges of transfers, by
/// the host in ranges that no transfer in flight touches.
pub(crate) struct HostSpace {
    memory: HostPages,
    bytes: u64,
}

enum HostPages {
    Pinned(PinnedMemory),
    /// Pageable memory, as words so that it is aligned.
    Pageable(Box<[UnsafeCell<u64>]>),
}

// SAFETY: the memory is owned; concurrent accesses are in disjoint ranges, as above.
unsafe impl Send for HostSpace {}

impl HostSpace {
    /// Allocates pinned memory.
    pub(crate) fn pinned(api: &'static Driver, bytes: Bytes) -> Result<Self, CudaError> {
        Ok(Self { memory: HostPages::Pinned(PinnedMemory::new(api, bytes.0 as usize)?), bytes: bytes.0 })
    }

    /// Allocates memory that is not pinned.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`] with the bytes.
    pub(crate) fn pageable(bytes: Bytes) -> Result<Self, DeviceError> {
        let words = bytes.0.div_ceil(8) as usize;
        let mut memory = vec![];
        memory.try_reserve_exact(words).map_err(|_| DeviceError::OutOfMemory { bytes })?;
        memory.resize_with(words, || UnsafeCell::new(0));
        Ok(Self { memory: HostPages::Pageable(memory.into()), bytes: bytes.0 })
    }

    /// Whether copies from and to it can run beside the host.
    pub(crate) fn is_pinned(&self) -> bool {
        match self.memory {
            HostPages::Pinned(_) => true,
            HostPages::Pageable(_) => false,
        }
    }

    /// Address of the first byte of a range. `Err` unless the range lies inside.
    pub(crate) fn range(&self, at: u64, bytes: Bytes) -> Result<*mut u8, DeviceError> {
        if at.checked_add(bytes.0).is_none_or(|end| end > self.bytes) {
            return Err(DeviceError::OutsideArena { at, bytes });
        }
        let start = match &self.memory {
            HostPages::Pinned(pinned) => pinned.start,
            HostPages::Pageable(words) => UnsafeCell::raw_get(words.as_ptr()).cast(),
        };
        // SAFETY: the offset is at most the size of the memory.
        Ok(unsafe { start.add(at as usize) })
    }

    /// Copies bytes to position `at`; no transfer in flight may touch them.
    pub(crate) fn write(&self, at: u64, bytes: &[u8]) -> Result<(), DeviceError> {
        let to = self.range(at, Bytes(bytes.len() as u64))?;
        // SAFETY: the range is inside, and nobody else accesses it.
        unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) };
        Ok(())
    }

    /// Copies bytes from position `at`; no transfer in flight may write them.
    pub(crate) fn read(&self, at: u64, out: &mut [u8]) -> Result<(), DeviceError> {
        let from = self.range(at, Bytes(out.len() as u64))?;
        // SAFETY: the range is inside and initialised, and nobody writes it.
        unsafe { ptr::copy_nonoverlapping(from, out.as_mut_ptr(), out.len()) };
        Ok(())
    }

    /// Sets all bytes of a range; no transfer in flight may touch them.
    pub(crate) fn fill(&self, at: u64, bytes: Bytes, byte: u8) -> Result<(), DeviceError> {
        let to = self.range(at, bytes)?;
        // SAFETY: the range is inside, and nobody else accesses it.
        unsafe { ptr::write_bytes(to, byte, bytes.0 as usize) };
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_do_not_overlap_and_come_back() {
        let mut ring = StagingSlots { bytes: 1000, taken: VecDeque::new() };
        assert_eq!([ring.take(300), ring.take(300), ring.take(300)], [Some(0), Some(320), Some(640)]);
        assert_eq!(ring.take(300), None, "full");
        assert_eq!(ring.give(), Some(0..300));
        assert_eq!(ring.take(321), None, "the oldest place is in the way");
        assert_eq!(ring.take(300), Some(0), "from the start again");
        assert_eq!(ring.take(1), None);
        assert_eq!([ring.give(), ring.give()], [Some(320..620), Some(640..940)]);
        assert_eq!(ring.take(600), Some(320));
        assert_eq!([ring.give(), ring.give(), ring.give()], [Some(0..300), Some(320..920), None]);
        assert_eq!([ring.take(1001), ring.take(1000)], [None, Some(0)]);
    }
}
