//! Host memory of the process outside the plan's arenas: code, heap, stacks, queues, readers and writers. Invariant: on
//! a CPU the sum of these entries and the plan's peak is an upper bound of the peak resident memory that the system
//! counts, mapped files included. A run is therefore refused before its first step or stays under `--memory-budget`.

use crate::Settings;
use plimsoll_exec::memory::kib;
use plimsoll_graph::Bytes;
use plimsoll_plan::{PIECE, Staging};
use std::fs;
use std::sync::atomic::{AtomicBool, Ordering};

/// Granularity to which the heap entry is rounded up, so that two runs of one command report the same entry.
pub const HEAP_STEP: u64 = 4 << 20;

/// Allowance for later growth of the heap by small allocations that have no entry of their own.
const HEAP_MARGIN: u64 = 1 << 20;

/// Bytes charged for each thread: touched pages of its stack and its allocator cache.
const STACK: u64 = 256 << 10;

/// Most threads that load weights at startup.
const READERS: u64 = 8;

/// Buffers of weight elements that each loading thread holds, in units of one piece of f32 values: the values as f32,
/// as stored, packed, and waiting to be written to the arena.
const COPIES_OF_PIECE: u64 = 3;

/// Bytes charged for the plans of smaller steps: five programs of an encoder with 36 layers take 4 MB, however many replicas
/// run them.
const SIZES: u64 = 8 << 20;

/// Memory entries of the process on the host.
#[derive(Clone, Debug, Default)]
pub struct ProcessMemory {
    /// Labelled byte counts.
    pub lines: Vec<Staging>,
}

/// Whether this process runs a single command and nothing else.
static IS_A_COMMAND: AtomicBool = AtomicBool::new(false);

/// Declares that this process runs a single command, so that its code, heap and stacks count against a memory budget.
/// The command line calls this at startup; a program that links this library holds memory that belongs to no run and
/// must not call this function.
pub fn bill_whole_process() {
    IS_A_COMMAND.store(true, Ordering::Relaxed);
}

impl ProcessMemory {
    /// The entries of the process, to which a command adds its own; `None` where no budget covers the host's memory.
    /// For a GPU run with a budget for host memory, the list starts empty if the process is not counted.
    pub fn of(settings: &Settings) -> Option<Self> {
        if settings.is_on_host() {
            return Self::now(settings);
        }
        settings.host_memory.map(|_| Self::default())
    }

    /// The memory that the process holds now: the whole size of its binary and libraries, whose pages are resident once
    /// touched, and the highest heap and stack size so far. `None` where the budget does not cover host memory, the
    /// process runs other work than one command, or the system does not report its memory.
    pub fn now(settings: &Settings) -> Option<Self> {
        if !settings.is_on_host() || !IS_A_COMMAND.load(Ordering::Relaxed) {
            return None;
        }
        let maps = fs::read_to_string("/proc/self/maps").ok()?;
        let status = fs::read_to_string("/proc/self/status").ok()?;
        let code = mapped_files(&maps);
        // VmHWM is the peak of all resident memory; without the resident file pages, heap and stacks remain.
        let heap = kib(&status, "VmHWM:")?.saturating_sub(kib(&status, "RssFile:")?).0;
        let heap = (heap + HEAP_MARGIN).next_multiple_of(HEAP_STEP);
        let mut process = Self::default();
        process.add("code and tables", code);
        process.add("heap", heap);
        process.add("plans of smaller steps", if settings.dynamic.is_some() { SIZES } else { 0 });
        Some(process)
    }

    /// Adds an entry; zero bytes are left out.
    pub fn add(&mut self, label: &str, bytes: u64) {
        if bytes > 0 {
            self.lines.push(Staging { label: label.to_owned(), bytes: Bytes(bytes) });
        }
    }

    /// Returns the entries after subtracting `reserved` bytes that are accounted for elsewhere, starting with the
    /// first entry.
    pub fn beyond(mut self, reserved: Bytes) -> Vec<Staging> {
        let mut left = reserved;
        for line in &mut self.lines {
            let off = left.min(line.bytes);
            line.bytes = line.bytes.saturating_sub(off);
            left = left.saturating_sub(off);
        }
        self.lines.retain(|line| line.bytes > Bytes::ZERO);
        self.lines
    }

    /// Adds the stacks of the compute threads, of the threads that load weights, and of `others` threads.
    pub fn add_threads(&mut self, settings: &Settings, others: usize) {
        let readers = READERS.min(settings.threads as u64);
        // Each replica has a leader thread beside its compute threads; there are at most as many replicas as threads.
        let threads = 2 * settings.threads as u64 + readers + others as u64 + 1;
        self.add("thread stacks", threads * STACK);
    }

    /// Adds the larger of the queues' bytes during a run and the buffers that weights pass through before the run.
    pub fn add_queues(&mut self, settings: &Settings, queues: u64) {
        let readers = READERS.min(settings.threads as u64);
        let piece = PIECE * 4;
        // With several readers the queue before a device holds four pieces, and the thread that uploads them a fifth.
        let weights = readers * COPIES_OF_PIECE * piece + if readers > 1 { 5 * piece } else { 0 };
        self.add("queues, or weights while they are loaded", queues.max(weights));
    }
}

/// The entries of the process that do not depend on the input. Empty where the planned memory is not the host's and has
/// no separate budget.
pub(crate) fn before_input(settings: &Settings) -> Vec<Staging> {
    let Some(mut process) = ProcessMemory::of(settings) else { return vec![] };
    process.add_threads(settings, settings.tokenizers().max(1) + 1);
    process.lines
}

/// The entries as indented text lines under `heading`, with their sum; an empty string without entries.
pub fn to_text(heading: &str, lines: &[Staging]) -> String {
    if lines.is_empty() {
        return String::new();
    }
    let sum = lines.iter().map(|line| line.bytes).sum::<Bytes>();
    let rows = lines.iter().map(|line| (&*line.label, line.bytes)).chain([("sum", sum)]);
    let rows: Vec<(&str, String)> = rows.map(|(label, bytes)| (label, bytes.to_string())).collect();
    let (labels, bytes) = rows.iter().fold((0, 0), |(labels, bytes), (label, text)| {
        (labels.max(label.chars().count()), bytes.max(text.chars().count()))
    });
    let rows = rows.iter().map(|(label, text)| format!("  {label:<labels$}  {text:>bytes$}\n"));
    format!("{heading}\n{}", rows.collect::<String>())
}

/// Bytes that each record takes in the set of record names already seen.
pub const NAME: u64 = 14;

/// Total size in bytes of the mapped files listed in the text of /proc/self/maps; pages of mapped files count as
/// resident once they were read.
fn mapped_files(maps: &str) -> u64 {
    maps.lines()
        .filter_map(|line| {
            let mut fields = line.split_whitespace();
            let range = fields.next()?;
            // The fields between the range and the path are permissions, offset, device and inode.
            let path = fields.nth(4)?;
            let (start, end) = range.split_once('-')?;
            if !path.starts_with('/') {
                return None;
            }
            let start = u64::from_str_radix(start, 16).ok()?;
            let end = u64::from_str_radix(end, 16).ok()?;
            Some(end.saturating_sub(start))
        })
        .sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_counted_and_anonymous_mappings_are_not() {
        let maps = "\
55d0c0000000-55d0c0100000 r--p 00000000 fd:01 12 /usr/bin/plimsoll
55d0c0100000-55d0c0101000 rw-p 00100000 fd:01 12 /usr/bin/plimsoll
55d0c1000000-55d0c2000000 rw-p 00000000 00:00 0 [heap]
7f0000000000-7f0000200000 rw-p 00000000 00:00 0
7f0000300000-7f0000302000 r-xp 00000000 fd:01 13 /lib/x86_64-linux-gnu/libc.so.6 (deleted)
7ffd00000000-7ffd00021000 rw-p 00000000 00:00 0 [stack]
";
        assert_eq!(mapped_files(maps), 0x100000 + 0x1000 + 0x2000);
    }
}
