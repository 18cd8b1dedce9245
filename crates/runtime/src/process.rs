//! What the process itself holds on the host, beside the arenas of a plan: code, heap, stacks, queues, readers and writers.
//! Invariant: on a CPU these lines and the plan's peak are an upper bound of the peak resident memory that the system counts,
//! mapped files included, so that a run is refused before its first step or stays under `--memory-budget`.

use crate::Settings;
use exec::memory::kib;
use graph::Bytes;
use plan::{PIECE, Staging};
use serde_json::{Map, Value};
use std::fs;
use std::sync::atomic::{AtomicBool, Ordering};

/// What the heap's line is rounded up to, so that two runs of one command have the same line.
const HEAP_STEP: u64 = 4 << 20;

/// What the heap may grow by in small pieces that have no line of their own.
const HEAP_MARGIN: u64 = 1 << 20;

/// Bytes of a thread's stack that are touched, and of its allocator's cache.
const STACK: u64 = 256 << 10;

/// Most threads that read weights at the start.
const READERS: u64 = 8;

/// Elements of weights that one of these threads holds for each of a piece: as f32, as they are stored, packed, and as a part
/// that waits for the arena.
const COPIES_OF_PIECE: u64 = 3;

/// The lines of a process, on the host.
#[derive(Clone, Debug, Default)]
pub struct Process {
    /// Bytes by what holds them.
    pub lines: Vec<Staging>,
}

/// Whether this process runs one command and nothing else.
static IS_A_COMMAND: AtomicBool = AtomicBool::new(false);

/// Says that this process runs one command and nothing else, so that its code, heap and stacks count against a memory budget.
/// The command line calls it at its start; a program that uses this library holds memory that is not a run's to bill.
pub fn bill_whole_process() {
    IS_A_COMMAND.store(true, Ordering::Relaxed);
}

impl Process {
    /// The lines of a process to which a command adds its own; `None` where the host's memory has no line.
    pub fn of(settings: &Settings) -> Option<Self> {
        let on_gpu = || settings.host_memory.map(|_| Self::default());
        Self::now(settings).or_else(|| if settings.is_on_host() { None } else { on_gpu() })
    }

    /// What this process holds now: all pages of its binary and libraries, which are resident once they were touched, and
    /// the most that its heap and stacks have held so far. `None` where the line is not about the host's memory, or the
    /// system does not tell.
    pub fn now(settings: &Settings) -> Option<Self> {
        if !settings.is_on_host() || !IS_A_COMMAND.load(Ordering::Relaxed) {
            return None;
        }
        let maps = fs::read_to_string("/proc/self/maps").ok()?;
        let status = fs::read_to_string("/proc/self/status").ok()?;
        let code = mapped_files(&maps);
        let heap = kib(&status, "VmHWM:")?.saturating_sub(kib(&status, "RssFile:")?).0;
        let heap = (heap + HEAP_MARGIN).next_multiple_of(HEAP_STEP);
        let mut process = Self::default();
        process.add("code and tables", code);
        process.add("heap", heap);
        Some(process)
    }

    /// Adds a line.
    pub fn add(&mut self, label: &str, bytes: u64) {
        if bytes > 0 {
            self.lines.push(Staging { label: label.to_owned(), bytes: Bytes(bytes) });
        }
    }

    /// The lines, less what is reserved for them elsewhere, which comes off the first.
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

    /// Adds the stacks of the threads that compute, and of `others`.
    pub fn add_threads(&mut self, settings: &Settings, others: usize) {
        let readers = READERS.min(settings.threads as u64);
        // A thread leads the compute threads of each replica.
        let threads = 2 * settings.threads as u64 + readers + others as u64 + 1;
        self.add("thread stacks", threads * STACK);
    }

    /// Adds the larger of what queues hold in a run and what weights pass through before it.
    pub fn add_queues(&mut self, settings: &Settings, queues: u64) {
        let readers = READERS.min(settings.threads as u64);
        let piece = PIECE * 4;
        let weights = readers * COPIES_OF_PIECE * piece + if readers > 1 { 5 * piece } else { 0 };
        self.add("queues, or weights while they are loaded", queues.max(weights));
    }
}

/// What a run would hold in this process: the lines that do not depend on its input. Nothing where the
/// memory that is planned is not the host's.
pub fn before_input(settings: &Settings) -> Vec<Staging> {
    let Some(mut process) = Process::of(settings) else { return vec![] };
    process.add_threads(settings, settings.tokenizers().max(1) + 1);
    process.lines
}

/// The lines of a process as JSON: bytes by label.
pub fn to_json(lines: &[Staging]) -> Value {
    let lines: Map<String, Value> =
        lines.iter().map(|line| (line.label.clone(), line.bytes.0.into())).collect();
    lines.into()
}

/// The lines of a process under `heading`, as a person reads them, each with its end; nothing without lines.
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

/// Bytes that a record's name takes among those that were seen.
pub const NAME: u64 = 14;

/// Bytes of the files that are mapped, by the lines of /proc/self/maps: their pages count as resident once they were read.
fn mapped_files(maps: &str) -> u64 {
    let bytes = |line: &str| {
        let mut fields = line.split_whitespace();
        let range = fields.next()?;
        // Permissions, offset, device, inode.
        let path = fields.nth(4)?;
        let (start, end) = range.split_once('-')?;
        let number = |text| u64::from_str_radix(text, 16).ok();
        path.starts_with('/').then(|| Some(number(end)?.saturating_sub(number(start)?)))?
    };
    maps.lines().filter_map(bytes).sum()
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
