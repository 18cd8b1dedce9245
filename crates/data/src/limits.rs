//! Limits of the operating system on this process: address space, threads, open files. Invariant: a thread that cannot
//! be started is an error, never a panic, and an error that is caused by a limit can name that limit.

use std::error::Error;
use std::fs;
use std::io;
use std::thread::{Builder, JoinHandle};

/// Linux error numbers, which other Unix systems share up to `EAGAIN` (35 on the BSDs and macOS).
const EAGAIN: i32 = if cfg!(target_os = "linux") { 11 } else { 35 };
const ENOMEM: i32 = 12;
const ENFILE: i32 = 23;
const EMFILE: i32 = 24;
const EFBIG: i32 = 27;

/// Address space in bytes that a new thread needs: its 2 MiB stack (the default of `std`), guard pages and signal
/// stack, and a reserve for mappings that other threads create at the same time.
const THREAD: u64 = 4 << 20;

/// Starts a named thread; an error if the system refuses it, where `std::thread::spawn` panics.
pub fn spawn<T: Send + 'static>(
    name: &str,
    work: impl FnOnce() -> T + Send + 'static,
) -> io::Result<JoinHandle<T>> {
    room_for_threads(1)?;
    Builder::new().name(name.to_owned()).spawn(work)
}

/// Checks that the address space has room for `count` more threads. The check comes first because `std` panics inside
/// the new thread if it cannot map the signal stack, and no caller can catch that panic.
pub fn room_for_threads(count: usize) -> io::Result<()> {
    let Some(free) = free_address_space() else { return Ok(()) };
    if free < THREAD.saturating_mul(count as u64) { Err(io::Error::from_raw_os_error(ENOMEM)) } else { Ok(()) }
}

/// Bytes of address space left below the process's limit; `None` if there is no limit.
pub fn free_address_space() -> Option<u64> {
    let limit = limit("Max address space")?;
    let status = fs::read_to_string("/proc/self/status").ok()?;
    let used = status.lines().find_map(|line| line.strip_prefix("VmSize:"))?;
    let used = used.split_whitespace().next()?.parse::<u64>().ok()?;
    Some(limit.saturating_sub(used.saturating_mul(1024)))
}

/// An operating-system limit that caused an error.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limit {
    /// Text with the name of the limit, its value, and how to raise it.
    pub text: String,
    /// Whether it is a limit on memory.
    pub memory: bool,
}

/// Returns the limit that caused `error`, found by the first OS error number in the error and its causes.
pub fn behind(error: &(dyn Error + 'static)) -> Option<Limit> {
    let mut next = Some(error);
    while let Some(error) = next {
        let number = error.downcast_ref::<io::Error>().and_then(io::Error::raw_os_error);
        if let Some(limit) = number.and_then(of_number) {
            return Some(limit);
        }
        next = error.source();
    }
    None
}

/// Returns the limit on memory, for an allocation that the system refused.
pub fn memory() -> Limit {
    let text = match limit("Max address space") {
        Some(bytes) => format!("the limit on the address space (ulimit -v) is {} KiB; raise it", bytes / 1024),
        None => "the system has no more memory for this process".to_owned(),
    };
    Limit { text, memory: true }
}

/// Returns the limit behind an OS error number; `None` if the number does not stand for a limit.
fn of_number(number: i32) -> Option<Limit> {
    Some(match number {
        ENOMEM => memory(),
        EAGAIN => {
            let processes = process_limit("Max processes", "processes and threads", "ulimit -u", 1);
            match limit("Max address space") {
                Some(_) => Limit { text: format!("{}, and {}", processes.text, memory().text), memory: false },
                None => processes,
            }
        }
        EMFILE => process_limit("Max open files", "open files", "ulimit -n", 1),
        ENFILE => Limit {
            text: "the limit of the whole system on open files (fs.file-max) is reached".to_owned(),
            memory: false,
        },
        EFBIG => process_limit("Max file size", "file size in bytes", "ulimit -f", 1),
        _ => return None,
    })
}

/// The limit `name` of this process on `what`, which `flag` of the shell sets in units of `unit`.
fn process_limit(name: &str, what: &str, flag: &str, unit: u64) -> Limit {
    let limit = limit(name).map_or("not known".to_owned(), |value| (value / unit).to_string());
    Limit { text: format!("the limit on {what} ({flag}) is {limit}; raise it"), memory: false }
}

/// Returns the soft limit `name` of `/proc/self/limits`; `None` if it is unlimited or cannot be read.
fn limit(name: &str) -> Option<u64> {
    let limits = fs::read_to_string("/proc/self/limits").ok()?;
    let line = limits.lines().find_map(|line| line.strip_prefix(name))?;
    line.split_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{DataError, DataErrorKind};

    #[test]
    fn an_error_names_the_limit_that_caused_it() {
        let files = DataError::new(DataErrorKind::Read(io::Error::from_raw_os_error(EMFILE)));
        let limit = behind(&files).expect("a limit");
        assert!(limit.text.contains("ulimit -n") && !limit.memory, "{limit:?}");
        let memory = behind(&io::Error::from_raw_os_error(ENOMEM)).expect("a limit");
        assert!(memory.memory, "{memory:?}");
        assert_eq!(behind(&io::Error::from(io::ErrorKind::NotFound)), None);
        assert_eq!(behind(&DataError::new(DataErrorKind::Read(io::ErrorKind::UnexpectedEof.into()))), None);
    }

    #[test]
    fn a_thread_starts() {
        assert_eq!(spawn("test", || 7).expect("a thread").join().expect("it ended"), 7);
    }
}
