//! The one allocation of host memory. Invariant: every access is checked against its bounds, here.

use crate::DeviceError;
use graph::Bytes;
use std::alloc::{Layout, alloc, dealloc};
use std::ptr::NonNull;

/// A huge page: the arena starts on one, so that the kernel can back all of it with huge ones, which saves
/// most of the address translation of streamed weights.
const HUGE_PAGE: usize = 2 << 20;

/// Bytes of host memory, on huge pages where the kernel gives them.
#[derive(Debug)]
pub struct Arena {
    start: NonNull<u8>,
    layout: Layout,
}

// SAFETY: the arena owns its memory; nothing else points to it between calls.
unsafe impl Send for Arena {}

impl Arena {
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
    pub fn size(&self) -> usize {
        self.layout.size()
    }

    /// The first byte of a range that lies inside. What is done through it is the caller's to justify.
    pub fn range(&self, at: u64, bytes: Bytes) -> Result<NonNull<u8>, DeviceError> {
        let end = at.checked_add(bytes.0).filter(|&end| end <= self.size() as u64);
        end.ok_or(DeviceError::OutsideArena { at, bytes })?;
        // SAFETY: `at` is at most the arena's size.
        Ok(unsafe { self.start.add(at as usize) })
    }

    /// A range to read.
    pub fn bytes(&self, at: u64, bytes: Bytes) -> Result<&[u8], DeviceError> {
        let start = self.range(at, bytes)?;
        // SAFETY: the range is inside, was written by `new`, and writers need `&mut self`.
        Ok(unsafe { std::slice::from_raw_parts(start.as_ptr(), bytes.0 as usize) })
    }

    /// A range to write.
    pub fn bytes_mut(&mut self, at: u64, bytes: Bytes) -> Result<&mut [u8], DeviceError> {
        let start = self.range(at, bytes)?;
        // SAFETY: the range is inside, and `&mut self` keeps everyone else out.
        Ok(unsafe { std::slice::from_raw_parts_mut(start.as_ptr(), bytes.0 as usize) })
    }

    /// Copies inside of the arena.
    pub fn copy(&mut self, from: u64, to: u64, bytes: Bytes) -> Result<(), DeviceError> {
        self.range(from, bytes)?;
        self.range(to, bytes)?;
        let (from, to, len) = (from as usize, to as usize, bytes.0 as usize);
        let all = Bytes(self.size() as u64);
        self.bytes_mut(0, all)?.copy_within(from..from + len, to);
        Ok(())
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        // SAFETY: allocated in `new` with this layout.
        unsafe { dealloc(self.start.as_ptr(), self.layout) }
    }
}
