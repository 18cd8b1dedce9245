//! Reader of metrics.jsonl, which a training run writes: one JSON object a line. Invariant: a reader holds one line of at most
//! 16 MiB; a line that is damaged or longer is an error with file and line, never passed over.
//!
//! The run may still be writing: a last line without its end is not read, and is read the next time once it is complete.

use plimsoll_data::{DataError, DataErrorKind};
use serde_json::{Map, Value};
use std::fs::File;
use std::io::{BufRead, BufReader, ErrorKind, Read, Seek, SeekFrom};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Name of the file.
pub const FILE: &str = "metrics.jsonl";

/// Maximum bytes of a line: the shares of 1024 layers with 256 experts have about 3 MB.
const LONGEST_LINE: u64 = 16 << 20;

/// Reads the lines of metrics.jsonl, each once, while the file grows.
#[derive(Clone, Debug)]
pub struct MetricsReader {
    path: PathBuf,
    /// Bytes of the lines that were read.
    read: u64,
    /// Number of the lines that were read.
    lines: u64,
    /// Device and inode of the file that was read.
    file: Option<(u64, u64)>,
}

/// The lines that were not read yet.
#[derive(Debug)]
pub struct NewLines<'a> {
    reader: &'a mut MetricsReader,
    file: BufReader<File>,
    line: Vec<u8>,
}

impl MetricsReader {
    /// A reader of the metrics in `folder`, from the first line on.
    pub fn new(folder: &Path) -> Self {
        Self { path: folder.join(FILE), read: 0, lines: 0, file: None }
    }

    /// Opens the file; `None` without one.
    ///
    /// # Errors
    /// A file that cannot be opened.
    pub fn open(&mut self) -> Result<Option<NewLines<'_>>, DataError> {
        let mut file = match plimsoll_data::bounded::open(&self.path) {
            Ok(file) => file,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(self.unreadable(error)),
        };
        let about = file.metadata().map_err(|e| self.unreadable(e))?;
        let found = Some((about.dev(), about.ino()));
        // A resumed run replaces the file by one without the lines of steps that it repeats.
        if self.file != found || about.len() < self.read {
            (self.read, self.lines, self.file) = (0, 0, found);
        }
        if self.read > 0 {
            file.seek(SeekFrom::Start(self.read)).map_err(|e| self.unreadable(e))?;
        }
        Ok(Some(NewLines { reader: self, file: BufReader::with_capacity(1 << 16, file), line: vec![] }))
    }

    fn unreadable(&self, error: std::io::Error) -> DataError {
        DataError::at(&self.path, DataErrorKind::Read(error))
    }
}

impl NewLines<'_> {
    /// Whether the next line is the first of the file: at the beginning, and after a resumed run has replaced the file.
    pub fn are_from_start(&self) -> bool {
        self.reader.lines == 0
    }

    /// The next complete line; `None` at the end of the file, or before a line that the run is writing or that a killed run
    /// left (resuming removes it).
    ///
    /// # Errors
    /// A line that is no JSON object or too long; the file cannot be read.
    pub fn next_line(&mut self) -> Result<Option<Map<String, Value>>, DataError> {
        self.line.clear();
        let read = self.file.by_ref().take(LONGEST_LINE).read_until(b'\n', &mut self.line);
        let read = read.map_err(|e| self.reader.unreadable(e))? as u64;
        // A line without its end: the run is still writing it, or it is longer than any line of a run.
        if self.line.last() != Some(&b'\n') {
            return if read == LONGEST_LINE {
                Err(self.at(self.reader.lines + 1, format!("longer than {LONGEST_LINE} bytes")))
            } else {
                Ok(None)
            };
        }
        self.reader.lines += 1;
        self.reader.read += read;
        match serde_json::from_slice(&self.line) {
            Ok(Value::Object(object)) => Ok(Some(object)),
            Ok(_) => Err(self.malformed("not a JSON object".to_owned())),
            Err(e) => Err(self.malformed(format!("not a line of JSON: {e}"))),
        }
    }

    /// Bytes of the line that was read last, with its end.
    pub fn text(&self) -> &[u8] {
        &self.line
    }

    /// An error in the line that was read last.
    pub fn malformed(&self, what: String) -> DataError {
        self.at(self.reader.lines, what)
    }

    fn at(&self, line: u64, what: String) -> DataError {
        DataError::at(&self.reader.path, DataErrorKind::Malformed(what)).with_line(line)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use plimsoll_testing::Folder;
    use std::fs::{self, OpenOptions};
    use std::io::Write;

    fn append(folder: &Folder, text: &str) {
        let file = OpenOptions::new().create(true).append(true).open(folder.path(FILE));
        file.and_then(|mut file| file.write_all(text.as_bytes())).expect("written");
    }

    /// Whether the new lines are from the start, and their steps.
    fn steps(reader: &mut MetricsReader) -> Result<(bool, Vec<u64>), String> {
        let mut lines = reader.open().map_err(|e| e.to_string())?.expect("a file");
        let (is_start, mut steps) = (lines.are_from_start(), vec![]);
        while let Some(line) = lines.next_line().map_err(|e| e.to_string())? {
            steps.push(line["step"].as_u64().expect("a step"));
        }
        Ok((is_start, steps))
    }

    #[test]
    fn lines_are_read_once_when_they_are_complete() {
        let folder = Folder::new("once");
        let mut reader = MetricsReader::new(&folder.0);
        assert!(reader.open().expect("no error").is_none());
        append(&folder, "{\"step\":1}\n{\"step\":2}\n{\"st");
        assert_eq!(steps(&mut reader), Ok((true, vec![1, 2])));
        assert_eq!(steps(&mut reader), Ok((false, vec![])));
        append(&folder, "ep\":3}\n");
        assert_eq!(steps(&mut reader), Ok((false, vec![3])));
        append(&folder, "[4]\n");
        let error = steps(&mut reader).expect_err("damaged");
        assert!(error.ends_with("metrics.jsonl, line 4: not a JSON object"), "{error}");
    }

    /// A resumed run replaces the file, and the new one may be longer than the lines that were read.
    #[test]
    fn a_replaced_file_is_read_from_its_start() {
        let folder = Folder::new("replaced");
        let mut reader = MetricsReader::new(&folder.0);
        append(&folder, "{\"step\":1}\n{\"step\":2}\n");
        assert_eq!(steps(&mut reader), Ok((true, vec![1, 2])));
        folder.write("new", "{\"step\":1}\n{\"step\":2}\n{\"step\":3}\n");
        fs::rename(folder.path("new"), folder.path(FILE)).expect("replaced");
        assert_eq!(steps(&mut reader), Ok((true, vec![1, 2, 3])));
        fs::write(folder.path(FILE), "{\"step\":9}\n").expect("cut");
        assert_eq!(steps(&mut reader), Ok((true, vec![9])));
    }

    #[test]
    fn a_line_without_an_end_is_refused() {
        let folder = Folder::new("endless");
        append(&folder, "{\"step\":1}\n");
        let file = OpenOptions::new().write(true).open(folder.path(FILE)).expect("opened");
        // A hole in the file: no bytes on the disk.
        file.set_len(LONGEST_LINE * 4).expect("grown");
        let mut reader = MetricsReader::new(&folder.0);
        for _ in 0..2 {
            let mut lines = reader.open().expect("opened").expect("a file");
            let is_first = lines.are_from_start();
            if is_first {
                assert!(lines.next_line().expect("read").is_some());
            }
            let error = lines.next_line().expect_err("too long").to_string();
            assert!(error.ends_with("metrics.jsonl, line 2: longer than 16777216 bytes"), "{error}");
            assert!(lines.line.capacity() as u64 <= 2 * LONGEST_LINE);
        }
    }
}
