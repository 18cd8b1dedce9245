//! Reads the lines of one input file or of standard input, decompressed if necessary. Invariant: a truncated or damaged
//! compressed stream is an error that names the file.

use std::fs::File;
use std::io::{self, ErrorKind, Read};
use std::path::{Path, PathBuf};

use super::decode::Body;
use super::stored::{HashedReader, Input, is_stdin};
use crate::{DataError, DataErrorKind, foreign};

/// Size of the buffer of decoded bytes.
const BUFFER: usize = 256 << 10;

/// Maximum number of bytes that are decoded to detect whether a compressed stream is damaged.
const MOST_CHECKED: usize = 256 << 20;

/// An open input file, read as lines that end with LF, CR or CR LF.
pub(crate) struct LineSource {
    path: PathBuf,
    body: Body,
    buffer: Vec<u8>,
    /// The bytes that are decoded but not consumed are `buffer[start..end]`.
    start: usize,
    end: usize,
    /// Number of line ends consumed.
    lines: u64,
}

impl LineSource {
    /// Opens the file at `path`, or standard input for `-`.
    pub(crate) fn open(path: &Path) -> Result<Self, DataError> {
        if is_stdin(path) {
            return LineSource::new(path, Box::new(io::stdin()));
        }
        let file = File::open(path).map_err(|e| DataError::at(path, DataErrorKind::Read(e)))?;
        LineSource::new(path, Box::new(file))
    }

    /// Reads from `inner`; `path` appears in errors.
    pub(crate) fn new(path: &Path, inner: Box<dyn Read + Send>) -> Result<Self, DataError> {
        let stored = HashedReader::new(inner).map_err(|e| DataError::at(path, DataErrorKind::Read(e)))?;
        let body = Body::new(stored);
        let path = path.to_owned();
        let buffer = vec![0; BUFFER];
        Ok(LineSource { path, body, buffer, start: 0, end: 0, lines: 0 })
    }

    /// The path that was given, `-` for standard input.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Stored bytes read so far.
    pub(crate) fn bytes(&self) -> u64 {
        self.body.stored().bytes()
    }

    /// The line number of the next byte, from 1.
    pub(crate) fn line(&self) -> u64 {
        self.lines + 1
    }

    /// Returns an error at the current line.
    pub(crate) fn error(&self, kind: DataErrorKind) -> DataError {
        DataError::at(&self.path, kind).with_line(self.line())
    }

    /// Returns size and digest of the file; call it after the end was reached.
    pub(crate) fn finish(self) -> Input {
        self.body.into_stored().finish(self.path)
    }

    /// Returns the next byte without consuming it; `None` at the end.
    #[inline]
    pub(crate) fn peek(&mut self) -> Result<Option<u8>, DataError> {
        if self.start == self.end {
            self.fill()?;
        }
        Ok(self.buffer[self.start..self.end].first().copied())
    }

    /// Returns the next bytes without consuming them: `count` of them, or fewer at the end of the input.
    pub(crate) fn ahead(&mut self, count: usize) -> Result<&[u8], DataError> {
        let count = count.min(self.buffer.len());
        if self.start + count > self.buffer.len() {
            self.buffer.copy_within(self.start..self.end, 0);
            self.end -= self.start;
            self.start = 0;
        }
        while self.end - self.start < count && self.read_more()? {}
        let end = self.end.min(self.start + count);
        Ok(&self.buffer[self.start..end])
    }

    /// Returns an error that names the format if the next bytes begin a file of another format. With `is_text`, only formats
    /// that are no text are refused.
    pub(crate) fn refuse_foreign(&mut self, is_text: bool) -> Result<(), DataError> {
        let outer = self.body.compression();
        let Some(format) = foreign::recognise(self.ahead(foreign::ENOUGH)?, outer) else { return Ok(()) };
        if is_text && format.is_text {
            Ok(())
        } else {
            Err(DataError::at(&self.path, DataErrorKind::Foreign(format)))
        }
    }

    /// Returns the error of a damaged compressed stream, found by reading on, of which wrong bytes were decoded before the
    /// checksum is compared. Reads at most [`MOST_CHECKED`] bytes.
    pub(crate) fn check_rest(&mut self) -> Result<(), DataError> {
        let mut read = 0;
        while self.body.compression().is_some() && read < MOST_CHECKED {
            self.fill()?;
            if self.end == 0 {
                break;
            }
            read += self.end;
        }
        Ok(())
    }

    /// Consumes the byte that [`LineSource::peek`] returned, which must not be a line end (lines are counted elsewhere).
    pub(crate) fn skip_byte(&mut self) {
        debug_assert!(self.start < self.end);
        self.start += 1;
    }

    /// Consumes whitespace and empty lines; returns the first other byte without consuming it.
    pub(crate) fn skip_blank(&mut self) -> Result<Option<u8>, DataError> {
        loop {
            match self.peek()? {
                Some(b'\n' | b'\r') => self.line_pieces(|_| {})?,
                Some(b) if super::is_blank(b) => self.start += 1,
                other => return Ok(other),
            }
        }
    }

    /// Consumes the UTF-8 byte order mark that some editors put at the start of a file. Call it before anything is
    /// read.
    pub(crate) fn skip_byte_order_mark(&mut self) -> Result<(), DataError> {
        const MARK: &[u8] = b"\xef\xbb\xbf";
        self.peek()?;
        // A read may end inside the mark: at the end of a gzip member, or if a pipe was written in pieces.
        while self.end < MARK.len() && MARK.starts_with(&self.buffer[..self.end]) && self.read_more()? {}
        if self.buffer[..self.end].starts_with(MARK) {
            self.start = MARK.len();
        }
        Ok(())
    }

    /// Passes the rest of the line to `f`, in as many pieces as the buffer divides it into, and consumes it together
    /// with its line end.
    #[inline]
    pub(crate) fn line_pieces(&mut self, mut f: impl FnMut(&[u8])) -> Result<(), DataError> {
        while self.peek()?.is_some() {
            let rest = &self.buffer[self.start..self.end];
            let Some(at) = memchr::memchr2(b'\n', b'\r', rest) else {
                f(rest);
                self.start = self.end;
                continue;
            };
            f(&rest[..at]);
            let end = rest[at];
            self.start += at + 1;
            self.lines += 1;
            if end == b'\r' && self.peek()? == Some(b'\n') {
                self.start += 1;
            }
            break;
        }
        Ok(())
    }

    /// Refills the buffer, which must be empty.
    #[cold]
    fn fill(&mut self) -> Result<(), DataError> {
        self.start = 0;
        self.end = 0;
        self.read_more().map(drop)
    }

    /// Appends decoded bytes to the buffer; false at the end of the input.
    fn read_more(&mut self) -> Result<bool, DataError> {
        loop {
            let free = &mut self.buffer[self.end..];
            match self.body.read(free) {
                Ok(n) => {
                    self.end += n;
                    return Ok(n > 0);
                }
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) => return Err(self.read_error(e)),
            }
        }
    }

    /// Converts an I/O error. An error of the decoder means corrupt data, unless reading the file itself failed.
    fn read_error(&self, e: io::Error) -> DataError {
        let kind = match self.body.compression() {
            Some(compression) if !self.body.stored().failed() => DataErrorKind::Compressed(compression, e),
            Some(_) | None => DataErrorKind::Read(e),
        };
        DataError::at(&self.path, kind)
    }
}
