//! The one allocation of host memory. Invariant: every access is checked against its bounds, here.

use crate::DeviceError;
use graph::Bytes;
use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ptr::NonNull;

/// Slices start on cache lines, the arena on a page.
const PAGE: usize = 4096;

/// Bytes of host memory, page-aligned.
#[derive(Debug)]
pub struct Arena {
    start: NonNull<u8>,
    layout: Layout,
}

// SAFETY: the arena owns its memory; nothing else points to it between calls.
unsafe impl Send for Arena {}

impl Arena {
    /// Allocates `bytes`, zeroed.
    pub fn new(bytes: Bytes) -> Result<Self, DeviceError> {
        let fail = || DeviceError::OutOfMemory { bytes };
        let size = usize::try_from(bytes.0).map_err(|_| fail())?.max(PAGE);
        let layout = Layout::from_size_align(size, PAGE).map_err(|_| fail())?;
        // SAFETY: the layout's size is at least one page.
        let start = NonNull::new(unsafe { alloc_zeroed(layout) }).ok_or_else(fail)?;
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
        // SAFETY: the range is inside, was initialised by `new`, and writers need `&mut self`.
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
