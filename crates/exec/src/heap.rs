//! The process's allocator: the system allocator, which ends the process with exit code 4 and a message if the system
//! refuses memory. Invariant: the message is built and written without an allocation.

use crate::arena::HUGE_PAGE;
use std::alloc::{GlobalAlloc, Layout, System};

/// Exit code of a run that does not fit in memory.
#[cfg(unix)]
const NO_MEMORY: i32 = 4;

/// Number of arenas of glibc's allocator. The default is eight per core, each of which reserves 64 MiB of address
/// space and keeps memory that was freed in it.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
const ARENAS: i32 = 2;

/// Allocations of at least this many bytes are separate mappings, which return to the system when freed. By default
/// glibc raises this threshold up to 32 MiB as such allocations are freed, and then keeps their memory.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
const MAPPED: i32 = 256 << 10;

/// The global allocator of the `plimsoll` binary. Without it, Rust aborts (SIGABRT) if the system refuses memory.
///
/// Arenas are the only allocations aligned to a huge page. Their owner turns a refusal into an error, so null is
/// returned for them.
#[derive(Clone, Copy, Debug, Default)]
pub struct Heap;

// SAFETY: every call goes to the system allocator; if that returns null the process ends, or null is returned.
unsafe impl GlobalAlloc for Heap {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's contract is the system allocator's.
        got(unsafe { System.alloc(layout) }, layout.size(), layout.align())
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: as in `alloc`.
        got(unsafe { System.alloc_zeroed(layout) }, layout.size(), layout.align())
    }

    unsafe fn realloc(&self, old: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // SAFETY: as in `alloc`.
        got(unsafe { System.realloc(old, layout, size) }, size, layout.align())
    }

    unsafe fn dealloc(&self, old: *mut u8, layout: Layout) {
        // SAFETY: as in `alloc`.
        unsafe { System.dealloc(old, layout) }
    }
}

/// Limits the freed memory and the address space that the allocator keeps. Call it before the first thread starts.
pub fn limit_slack() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: changes settings of the allocator only; accesses no memory that is in use.
    unsafe {
        libc::mallopt(libc::M_ARENA_MAX, ARENAS);
        libc::mallopt(libc::M_MMAP_THRESHOLD, MAPPED);
        libc::mallopt(libc::M_TRIM_THRESHOLD, 2 * MAPPED);
    }
}

/// Returns `pointer`, or ends the process if it is null and not an arena's.
#[inline]
fn got(pointer: *mut u8, bytes: usize, align: usize) -> *mut u8 {
    if pointer.is_null() && align < HUGE_PAGE {
        refused(bytes);
    }
    pointer
}

/// Prints that memory was refused, and the limit responsible, and ends the process.
#[cold]
#[cfg(unix)]
fn refused(bytes: usize) {
    let mut text = MessageBuffer { bytes: [0; 256], end: 0 };
    text.add(b"error: the system refused ");
    text.number(bytes as u64);
    text.add(b" B of memory\nlimit: ");
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the call writes to the struct only.
    let known = unsafe { libc::getrlimit(libc::RLIMIT_AS, &mut limit) } == 0;
    if known && limit.rlim_cur != libc::RLIM_INFINITY {
        text.add(b"the limit on the address space (ulimit -v) is ");
        text.number(limit.rlim_cur / 1024);
        text.add(b" KiB; raise it\n");
    } else {
        text.add(b"the system has no more memory for this process\n");
    }
    // SAFETY: the bytes are initialised. `_exit` runs no handlers, which could allocate; incomplete files keep their
    // temporary names, as after a kill.
    unsafe {
        libc::write(2, text.bytes.as_ptr().cast(), text.end);
        libc::_exit(NO_MEMORY);
    }
}

#[cold]
#[cfg(not(unix))]
fn refused(_: usize) {
    std::process::abort();
}

/// A message of at most 256 bytes, built without allocation; the rest is cut off.
#[cfg(unix)]
struct MessageBuffer {
    bytes: [u8; 256],
    end: usize,
}

#[cfg(unix)]
impl MessageBuffer {
    /// Appends text.
    fn add(&mut self, text: &[u8]) {
        let free = &mut self.bytes[self.end..];
        let count = text.len().min(free.len());
        free[..count].copy_from_slice(&text[..count]);
        self.end += count;
    }

    /// Appends a number in decimal.
    fn number(&mut self, number: u64) {
        let mut digits = [b'0'; 20];
        let mut first = 20;
        let mut rest = number;
        loop {
            first -= 1;
            digits[first] = b'0' + (rest % 10) as u8;
            rest /= 10;
            if rest == 0 {
                break;
            }
        }
        self.add(&digits[first..]);
    }
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;

    #[test]
    fn messages_are_made_in_place_and_end_at_their_room() {
        let mut text = MessageBuffer { bytes: [0; 256], end: 0 };
        [0, 7, 10, u64::MAX].into_iter().for_each(|number| {
            text.number(number);
            text.add(b" ");
        });
        assert_eq!(&text.bytes[..text.end], b"0 7 10 18446744073709551615 ");
        (0..300).for_each(|_| text.add(b"x"));
        assert_eq!(text.end, 256);
    }
}
