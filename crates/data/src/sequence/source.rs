//! The bytes of one input file: from a file or stdin, decompressed if they are gzip, in lines.
//! Invariant: every stored byte is hashed exactly once, as it is read, and a gzip stream that is cut
//! short or damaged is an error.

use std::fmt::Write as _;
use std::fs::{self, File};
use std::io::{self, BufReader, ErrorKind, Read};
use std::path::{Path, PathBuf};

use flate2::bufread::MultiGzDecoder;
use sha2::{Digest, Sha256};

use crate::{DataError, DataErrorKind};

/// The decoded bytes held at a time.
const BUFFER: usize = 256 << 10;
/// The stored bytes held at a time when they are compressed.
const STORED_BUFFER: usize = 64 << 10;

/// A file that was read to its end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Input {
    /// As it was given; `-` is standard input.
    pub path: PathBuf,
    /// Its size, as stored.
    pub bytes: u64,
    /// Of the bytes as stored.
    pub sha256: [u8; 32],
}

impl Input {
    /// The digest as 64 hexadecimal digits.
    pub fn sha256_hex(&self) -> String {
        let mut text = String::with_capacity(64);
        for byte in self.sha256 {
            // Writing to a String cannot fail.
            let _ = write!(text, "{byte:02x}");
        }
        text
    }
}

pub(super) fn is_stdin(path: &Path) -> bool {
    path.as_os_str() == "-"
}

/// The bytes of the file at `path`, if it is a regular one; an error if it cannot be read at all.
pub(super) fn size(path: &Path) -> Result<Option<u64>, DataError> {
    if is_stdin(path) {
        return Ok(None);
    }
    let facts = fs::metadata(path).map_err(|e| DataError::at(path, DataErrorKind::Read(e)))?;
    if facts.is_dir() {
        let what = "a folder, not a file; name the files in it".to_owned();
        return Err(DataError::at(path, DataErrorKind::Malformed(what)));
    }
    Ok(facts.is_file().then_some(facts.len()))
}

/// What the files are, without looking into them; `None` where one can be read only once: standard input, a
/// pipe.
///
/// # Errors
/// A file that cannot be read.
pub fn digests(paths: &[PathBuf]) -> Result<Option<Vec<Input>>, DataError> {
    let mut inputs = Vec::with_capacity(paths.len());
    for path in paths {
        if size(path)?.is_none() {
            return Ok(None);
        }
        inputs.push(digest(path).map_err(|e| DataError::at(path, DataErrorKind::Read(e)))?);
    }
    Ok(Some(inputs))
}

fn digest(path: &Path) -> io::Result<Input> {
    let mut file = File::open(path)?;
    let (mut hash, mut bytes, mut buffer) = (Sha256::new(), 0, vec![0; BUFFER]);
    loop {
        match file.read(&mut buffer) {
            Ok(0) => return Ok(Input { path: path.to_owned(), bytes, sha256: hash.finalize().into() }),
            Ok(n) => {
                hash.update(&buffer[..n]);
                bytes += n as u64;
            }
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
}

/// One open file, seen as lines that end with LF, CR or CR LF.
pub(super) struct Source {
    path: PathBuf,
    body: Body,
    buffer: Vec<u8>,
    start: usize,
    end: usize,
    /// Line ends consumed.
    lines: u64,
}

enum Body {
    Plain(Hashing),
    Gzip(Box<MultiGzDecoder<BufReader<Hashing>>>),
}

impl Source {
    pub(super) fn open(path: &Path) -> Result<Self, DataError> {
        if is_stdin(path) {
            return Source::new(path, Box::new(io::stdin()));
        }
        let file = File::open(path).map_err(|e| DataError::at(path, DataErrorKind::Read(e)))?;
        Source::new(path, Box::new(file))
    }

    pub(super) fn new(path: &Path, inner: Box<dyn Read + Send>) -> Result<Self, DataError> {
        let stored = Hashing::new(inner).map_err(|e| DataError::at(path, DataErrorKind::Read(e)))?;
        let body = match stored.magic() {
            [0x1f, 0x8b] => {
                let stored = BufReader::with_capacity(STORED_BUFFER, stored);
                Body::Gzip(Box::new(MultiGzDecoder::new(stored)))
            }
            _ => Body::Plain(stored),
        };
        let (path, buffer) = (path.to_owned(), vec![0; BUFFER]);
        Ok(Source { path, body, buffer, start: 0, end: 0, lines: 0 })
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Stored bytes taken so far.
    pub(super) fn bytes(&self) -> u64 {
        self.stored().bytes
    }

    /// The number of the line of the next byte, from 1.
    pub(super) fn line(&self) -> u64 {
        self.lines + 1
    }

    /// An error at the current line.
    pub(super) fn error(&self, kind: DataErrorKind) -> DataError {
        DataError::at(&self.path, kind).with_line(self.line())
    }

    /// What was read, after the end was reached.
    pub(super) fn finish(self) -> Result<Input, DataError> {
        let stored = match self.body {
            Body::Plain(stored) => stored,
            Body::Gzip(decoder) => decoder.into_inner().into_inner(),
        };
        Ok(Input { path: self.path, bytes: stored.bytes, sha256: stored.hash.finalize().into() })
    }

    /// The next byte, not consumed; none at the end.
    #[inline]
    pub(super) fn peek(&mut self) -> Result<Option<u8>, DataError> {
        if self.start == self.end {
            self.fill()?;
        }
        Ok(self.buffer[self.start..self.end].first().copied())
    }

    /// Consumes the byte that [`Source::peek`] has shown, which does not end a line.
    pub(super) fn skip_byte(&mut self) {
        debug_assert!(self.start < self.end);
        self.start += 1;
    }

    /// Consumes blanks and empty lines; the first byte that is neither, not consumed.
    pub(super) fn skip_blank(&mut self) -> Result<Option<u8>, DataError> {
        loop {
            match self.peek()? {
                Some(b'\n' | b'\r') => self.line_pieces(|_| {})?,
                Some(b) if super::is_blank(b) => self.start += 1,
                other => return Ok(other),
            }
        }
    }

    /// Consumes the UTF-8 mark that some editors put at the start of a file, where nothing was read yet.
    pub(super) fn skip_byte_order_mark(&mut self) -> Result<(), DataError> {
        const MARK: &[u8] = b"\xef\xbb\xbf";
        self.peek()?;
        // A read may end inside of the mark: where a gzip member does, or a pipe was written in pieces.
        while self.end < MARK.len() && MARK.starts_with(&self.buffer[..self.end]) && self.read_more()? {}
        if self.buffer[..self.end].starts_with(MARK) {
            self.start = MARK.len();
        }
        Ok(())
    }

    /// Appends the rest of the line to `text` and consumes it.
    pub(super) fn line_into(&mut self, text: &mut Vec<u8>) -> Result<(), DataError> {
        self.line_pieces(|piece| text.extend_from_slice(piece))
    }

    /// Hands the rest of the line to `f`, in as many pieces as the buffer cuts it into, and consumes
    /// it with its end.
    #[inline]
    pub(super) fn line_pieces(&mut self, mut f: impl FnMut(&[u8])) -> Result<(), DataError> {
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

    /// Refills the empty buffer.
    #[cold]
    fn fill(&mut self) -> Result<(), DataError> {
        self.start = 0;
        self.end = 0;
        self.read_more().map(drop)
    }

    /// Reads behind what is in the buffer; false at the end.
    fn read_more(&mut self) -> Result<bool, DataError> {
        loop {
            let free = &mut self.buffer[self.end..];
            let result = match &mut self.body {
                Body::Plain(stored) => stored.read(free),
                Body::Gzip(decoder) => decoder.read(free),
            };
            match result {
                Ok(n) => {
                    self.end += n;
                    return Ok(n > 0);
                }
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) => return Err(self.read_error(e)),
            }
        }
    }

    /// The decoder reports damage with these kinds; the rest comes from the file below it.
    fn read_error(&self, e: io::Error) -> DataError {
        let damage = [ErrorKind::UnexpectedEof, ErrorKind::InvalidData, ErrorKind::InvalidInput];
        let kind = match self.body {
            Body::Gzip(_) if damage.contains(&e.kind()) => DataErrorKind::Gzip(e),
            Body::Gzip(_) | Body::Plain(_) => DataErrorKind::Read(e),
        };
        DataError::at(&self.path, kind)
    }

    fn stored(&self) -> &Hashing {
        match &self.body {
            Body::Plain(stored) => stored,
            Body::Gzip(decoder) => decoder.get_ref().get_ref(),
        }
    }
}

/// The stored bytes, hashed as they pass. The first two are read ahead: they tell gzip from text.
struct Hashing {
    inner: Box<dyn Read + Send>,
    hash: Sha256,
    bytes: u64,
    ahead: [u8; 2],
    ahead_len: usize,
    ahead_taken: usize,
}

impl Hashing {
    fn new(inner: Box<dyn Read + Send>) -> io::Result<Self> {
        let (hash, ahead) = (Sha256::new(), [0; 2]);
        let mut new = Hashing { inner, hash, bytes: 0, ahead, ahead_len: 0, ahead_taken: 0 };
        while new.ahead_len < 2 {
            match new.inner.read(&mut new.ahead[new.ahead_len..]) {
                Ok(0) => break,
                Ok(n) => new.ahead_len += n,
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
        new.hash.update(&new.ahead[..new.ahead_len]);
        new.bytes = new.ahead_len as u64;
        Ok(new)
    }

    fn magic(&self) -> &[u8] {
        &self.ahead[..self.ahead_len]
    }
}

impl Read for Hashing {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        if self.ahead_taken < self.ahead_len {
            // Ahead of the rest and in one call with it, so that whoever looks at the first bytes of
            // a text (a byte order mark) sees more than two.
            let n = out.len().min(self.ahead_len - self.ahead_taken);
            out[..n].copy_from_slice(&self.ahead[self.ahead_taken..][..n]);
            self.ahead_taken += n;
            return Ok(n + self.read_hashed(&mut out[n..])?);
        }
        self.read_hashed(out)
    }
}

impl Hashing {
    fn read_hashed(&mut self, out: &mut [u8]) -> io::Result<usize> {
        let n = self.inner.read(out)?;
        self.hash.update(&out[..n]);
        self.bytes += n as u64;
        Ok(n)
    }
}
