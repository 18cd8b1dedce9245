//! External merge sort of lines. Invariant: lines are returned in byte order (for UTF-8, the order of code
//! points), and duplicates are preserved; memory holds one run of lines, or read buffers of a similar total size
//! (more if lines are longer than a buffer); the temporary file is unlinked right after it is created, so it
//! disappears however the process ends.
//!
//! Runs are sorted in memory and appended to one spool file in the output folder; then up to `fan_in` runs at a time are
//! merged, in as many passes as needed.

use plimsoll_data::{DataError, DataErrorKind};
use std::cmp::Ordering;
use std::collections::BinaryHeap;
use std::collections::binary_heap::PeekMut;
use std::fs::{self, File, OpenOptions};
use std::io::{self, BufWriter, ErrorKind, Read, Seek, SeekFrom, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering as Atomic};

/// Memory and merge width of a sort.
#[derive(Clone, Copy, Debug)]
pub struct SortLimits {
    /// Maximum size of a run in memory in bytes, including 16 bytes of index per line; also the total size of
    /// the read buffers in a merge.
    pub run_bytes: usize,
    /// Maximum number of runs merged at a time; [`Sorter::new`] raises it to at least 2.
    pub fan_in: usize,
}

impl Default for SortLimits {
    /// Runs of 16 MiB and a fan-in of 256: up to 4 GiB of lines and index are merged in one pass.
    fn default() -> Self {
        SortLimits { run_bytes: 16 << 20, fan_in: 256 }
    }
}

/// Sorts lines that are added in any order.
#[derive(Debug)]
pub struct Sorter {
    folder: PathBuf,
    limits: SortLimits,
    /// Concatenated lines of the current run.
    bytes: Vec<u8>,
    /// Position of each line in `bytes`.
    lines: Vec<Range<usize>>,
    /// Earlier runs; `None` while all lines are in memory.
    spool: Option<RunSpool>,
}

impl Sorter {
    /// Creates a sorter that writes full runs to a temporary file in `folder`, which must exist.
    pub fn new(folder: &Path, limits: SortLimits) -> Self {
        // With a fan-in of 1 a pass would not reduce the number of runs, and `finish` would loop forever.
        let limits = SortLimits { fan_in: limits.fan_in.max(2), ..limits };
        Sorter { folder: folder.to_owned(), limits, bytes: vec![], lines: vec![], spool: None }
    }

    /// Changes the maximum size of a run in memory to `run_bytes`.
    pub fn set_sort_bytes(&mut self, run_bytes: usize) {
        self.limits.run_bytes = run_bytes;
    }

    /// Adds a line, which must not contain a line feed.
    pub fn push(&mut self, line: &[u8]) -> Result<(), DataError> {
        debug_assert!(!line.contains(&b'\n'));
        let used = self.bytes.len() + size_of_val(&self.lines[..]);
        if used + line.len() + size_of::<Range<usize>>() > self.limits.run_bytes {
            self.spill()?;
        }
        let start = self.bytes.len();
        self.bytes.extend_from_slice(line);
        self.lines.push(start..self.bytes.len());
        Ok(())
    }

    /// Calls `on_line` with every line in sorted order.
    ///
    /// # Errors
    /// A temporary file that cannot be written or read; the first error of `on_line`, which ends the iteration.
    pub fn finish<E: From<DataError>>(
        mut self,
        mut on_line: impl FnMut(&[u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        if self.spool.is_none() {
            self.sort();
            return self.lines.iter().try_for_each(|line| on_line(&self.bytes[line.clone()]));
        }
        self.spill()?;
        let Sorter { folder, limits, spool, .. } = self;
        let Some(mut spool) = spool else { return Ok(()) };
        while spool.runs.len() > limits.fan_in {
            spool = spool.merge_once(&folder, limits)?;
        }
        let runs = spool.runs.clone();
        spool.merge(&runs, limits, on_line)
    }

    fn sort(&mut self) {
        let bytes = &self.bytes;
        // An unstable sort suffices: equal lines are identical.
        self.lines.sort_unstable_by(|a, b| bytes[a.clone()].cmp(&bytes[b.clone()]));
    }

    /// Sorts the current run and appends it to the spool, unless it is empty.
    fn spill(&mut self) -> Result<(), DataError> {
        if self.lines.is_empty() {
            return Ok(());
        }
        self.sort();
        let mut spool = match self.spool.take() {
            Some(spool) => spool,
            None => RunSpool::create(&self.folder)?,
        };
        for line in &self.lines {
            spool.write(&self.bytes[line.clone()])?;
        }
        spool.end_run();
        self.spool = Some(spool);
        self.bytes.clear();
        self.lines.clear();
        Ok(())
    }
}

/// Creates a temporary file in `folder` and unlinks it: the open file remains usable, and the system frees it when it is
/// closed. Returns the path that it had, for error messages.
pub(crate) fn unlinked(folder: &Path) -> Result<(PathBuf, File), DataError> {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    loop {
        let count = COUNT.fetch_add(1, Atomic::Relaxed);
        let path = folder.join(format!(".sort.{}-{count}.part", std::process::id()));
        let open = OpenOptions::new().read(true).write(true).create_new(true).open(&path);
        match open.and_then(|file| fs::remove_file(&path).map(|()| file)) {
            Ok(file) => return Ok((path, file)),
            Err(e) if e.kind() == ErrorKind::AlreadyExists => {}
            Err(e) => return Err(DataError::at(path, DataErrorKind::Write(e))),
        }
    }
}

/// Sorted runs of lines, each line with a line feed, in one unlinked file.
#[derive(Debug)]
struct RunSpool {
    /// Path of the file before it was unlinked, for error messages.
    path: PathBuf,
    file: BufWriter<File>,
    /// Number of bytes written.
    length: u64,
    /// Byte ranges of the complete runs.
    runs: Vec<Range<u64>>,
}

impl RunSpool {
    fn create(folder: &Path) -> Result<Self, DataError> {
        let (path, file) = unlinked(folder)?;
        Ok(RunSpool { path, file: BufWriter::with_capacity(64 << 10, file), length: 0, runs: Vec::new() })
    }

    fn write(&mut self, line: &[u8]) -> Result<(), DataError> {
        let written = self.file.write_all(line).and_then(|()| self.file.write_all(b"\n"));
        written.map_err(|e| DataError::at(&self.path, DataErrorKind::Write(e)))?;
        self.length += line.len() as u64 + 1;
        Ok(())
    }

    /// Ends the current run: the lines written since the preceding run.
    fn end_run(&mut self) {
        let start = self.runs.last().map_or(0, |run| run.end);
        self.runs.push(start..self.length);
    }

    /// Merges groups of up to `fan_in` runs and returns a spool with one run per group.
    fn merge_once(mut self, folder: &Path, limits: SortLimits) -> Result<RunSpool, DataError> {
        let mut merged = RunSpool::create(folder)?;
        let runs = std::mem::take(&mut self.runs);
        for group in runs.chunks(limits.fan_in) {
            self.merge(group, limits, |line| merged.write(line))?;
            merged.end_run();
        }
        Ok(merged)
    }

    /// Merges `runs` and calls `on_line` with their lines in sorted order.
    fn merge<E: From<DataError>>(
        &mut self,
        runs: &[Range<u64>],
        limits: SortLimits,
        mut on_line: impl FnMut(&[u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        let RunSpool { path, file, .. } = self;
        file.flush().map_err(|e| DataError::at(&*path, DataErrorKind::Write(e)))?;
        let file = file.get_mut();
        // All buffers together take no more memory than the run of lines, which was written before the merge.
        let buffer = (limits.run_bytes / runs.len().max(1)).clamp(1, 1 << 20);
        let mut heap = BinaryHeap::with_capacity(runs.len());
        for run in runs {
            let mut cursor = RunCursor::over(run.clone(), buffer);
            if cursor.advance(file).map_err(|e| unreadable(path, e))? {
                heap.push(cursor);
            }
        }
        // Dropping `top` after `advance` restores the heap order.
        while let Some(mut top) = heap.peek_mut() {
            on_line(top.line())?;
            if !top.advance(file).map_err(|e| unreadable(path, e))? {
                PeekMut::pop(top);
            }
        }
        // Cursors moved the position of the file; further writes must go to its end.
        file.seek(SeekFrom::End(0)).map_err(|e| unreadable(path, e))?;
        Ok(())
    }
}

/// The error for a temporary file that cannot be read.
fn unreadable(path: &Path, error: io::Error) -> DataError {
    DataError::at(path, DataErrorKind::Read(error))
}

/// Read position in a run. The order is the reverse of the order of lines, so that the maximum of
/// [`BinaryHeap`] is the cursor with the smallest line.
struct RunCursor {
    /// Byte range of the run that was not read into the buffer yet.
    unread: Range<u64>,
    /// Number of bytes per read.
    step: u64,
    buffer: Vec<u8>,
    /// Position of the current line in the buffer, without its line feed.
    line: Range<usize>,
    /// Position of the following line in the buffer.
    next: usize,
}

impl RunCursor {
    fn over(run: Range<u64>, step: usize) -> Self {
        RunCursor { unread: run, step: step as u64, buffer: Vec::new(), line: 0..0, next: 0 }
    }

    fn line(&self) -> &[u8] {
        &self.buffer[self.line.clone()]
    }

    /// Advances to the next line of the run; returns false after the last line. The buffer holds the beginning of a
    /// line and one read of `step` bytes; it grows further only for a line longer than `step`.
    fn advance(&mut self, file: &mut File) -> io::Result<bool> {
        // Bytes from `next` to `searched` contain no line feed, so they are not searched again after another read.
        let mut searched = self.next;
        loop {
            if let Some(found) = self.buffer[searched..].iter().position(|&b| b == b'\n') {
                self.line = self.next..searched + found;
                self.next = self.line.end + 1;
                return Ok(true);
            }
            self.buffer.drain(..self.next);
            self.next = 0;
            searched = self.buffer.len();
            let more = self.step.min(self.unread.end - self.unread.start);
            if more == 0 {
                return Ok(false);
            }
            self.buffer.resize(searched + more as usize, 0);
            file.seek(SeekFrom::Start(self.unread.start))?;
            file.read_exact(&mut self.buffer[searched..])?;
            self.unread.start += more;
        }
    }
}

impl Ord for RunCursor {
    fn cmp(&self, other: &Self) -> Ordering {
        other.line().cmp(self.line())
    }
}

impl PartialOrd for RunCursor {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for RunCursor {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for RunCursor {}

#[cfg(test)]
mod tests {
    use super::*;
    use plimsoll_testing::Folder;
    use proptest::prelude::*;

    fn sorted(lines: &[String], limits: SortLimits) -> (Vec<String>, usize) {
        let folder = Folder::new("sorted");
        let mut sorter = Sorter::new(&folder.0, limits);
        for line in lines {
            sorter.push(line.as_bytes()).unwrap();
        }
        let runs = sorter.spool.as_ref().map_or(0, |spool| spool.runs.len());
        let mut found = Vec::new();
        let each = |line: &[u8]| {
            found.push(String::from_utf8(line.to_vec()).unwrap());
            Ok::<(), DataError>(())
        };
        sorter.finish(each).unwrap();
        assert_eq!(folder.names(), Vec::<String>::new());
        (found, runs)
    }

    fn check(lines: Vec<String>, limits: SortLimits) -> usize {
        let (found, runs) = sorted(&lines, limits);
        let mut expected = lines;
        expected.sort();
        assert_eq!(found, expected, "{limits:?}");
        runs
    }

    #[test]
    fn chunk_numbers_sort_as_text() {
        let lines = ["r_chunk_2\tTrue", "r_chunk_10\tTrue", "r\tTrue", "r_chunk_1\tFalse", "é", "z", ""];
        let lines = lines.map(str::to_owned).to_vec();
        assert_eq!(check(lines.clone(), SortLimits::default()), 0);
        assert_eq!(check(lines, SortLimits { run_bytes: 1, fan_in: 2 }), 6);
        check(Vec::new(), SortLimits::default());
    }

    #[test]
    fn several_passes_over_many_runs() {
        // 2000 lines in runs of about 8, merged three at a time: five passes.
        let lines: Vec<String> =
            (0..2000u32).map(|i| format!("line {}", i.wrapping_mul(2_654_435_761))).collect();
        assert!(check(lines, SortLimits { run_bytes: 256, fan_in: 3 }) > 200);
    }

    #[test]
    fn an_error_of_the_reader_ends_it() {
        let folder = Folder::new("sorted");
        let mut sorter = Sorter::new(&folder.0, SortLimits { run_bytes: 1, fan_in: 2 });
        for line in ["b", "a", "c"] {
            sorter.push(line.as_bytes()).unwrap();
        }
        let refuse = |_: &[u8]| Err(DataError::new(DataErrorKind::Malformed("no".to_owned())));
        assert_eq!(sorter.finish(refuse).unwrap_err().to_string(), "no");
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]
        #[test]
        fn any_lines_and_limits_sort_as_in_memory(
            lines in prop::collection::vec("[a-c_0-9é\\t]{0,12}", 0..120),
            run_bytes in 0usize..400,
            fan_in in 2usize..6,
        ) {
            check(lines, SortLimits { run_bytes, fan_in });
        }
    }
}
