//! An append-only journal: a file of blocks under a key, which stores the finished results of a run so that a later run
//! can resume. Invariant: a block that is read is a complete block that was appended to this file at this position. An
//! incomplete frame at the end (an interrupted append) is ignored; damage before complete frames is an error.
//!
//! A frame consists of `MAGIC`, the block's number and length (u64, little-endian), the SHA-256 of key digest, number,
//! length and block, and the block itself. Frame 0 contains the key. Since the digest of every later frame covers the
//! key, a block of another journal is not accepted.

use crate::atomic::sync_folder;
use crate::bounded;
use crate::{DataError, DataErrorKind};
use sha2::{Digest, Sha256};
use std::fs::{File, OpenOptions};
use std::io::{self, BufReader, ErrorKind, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

const MAGIC: [u8; 8] = *b"plimjnl1";
const HEADER: usize = 8 + 8 + 8 + 32;

/// Writer of a journal.
#[derive(Debug)]
pub struct Journal {
    path: PathBuf,
    file: File,
    /// Bytes of complete frames in the file.
    end: u64,
    next: u64,
    key_digest: [u8; 32],
    frame: Vec<u8>,
}

impl Journal {
    /// Creates a journal under `key`, replacing an existing file.
    ///
    /// # Errors
    /// A file that cannot be written.
    pub fn create(path: &Path, key: &[u8]) -> Result<Self, DataError> {
        let file = OpenOptions::new().write(true).create(true).truncate(true).open(path);
        let file = file.map_err(|e| DataError::at(path, DataErrorKind::Write(e)))?;
        // The frame of the key itself is hashed under a digest of zeros.
        let mut journal =
            Self { path: path.to_owned(), file, end: 0, next: 0, key_digest: [0; 32], frame: vec![] };
        journal.append(key)?;
        // Without a synced directory entry the file would not survive a power failure.
        sync_folder(path).map_err(|e| DataError::at(path, DataErrorKind::Write(e)))?;
        journal.key_digest = Sha256::digest(key).into();
        Ok(journal)
    }

    /// Appends a block and waits until it is on disk.
    ///
    /// # Errors
    /// A file that cannot be written, for instance because the disk is full. Blocks appended before stay readable, and
    /// a later append may succeed.
    pub fn append(&mut self, block: &[u8]) -> Result<(), DataError> {
        self.frame.clear();
        self.frame.extend_from_slice(&MAGIC);
        self.frame.extend_from_slice(&self.next.to_le_bytes());
        self.frame.extend_from_slice(&(block.len() as u64).to_le_bytes());
        self.frame.extend_from_slice(&digest(&self.key_digest, self.next, block));
        self.frame.extend_from_slice(block);
        let written = self.file.write_all(&self.frame).and_then(|()| self.file.sync_data());
        if let Err(e) = written {
            // Cut off the partial frame: it would make all frames appended after it unreadable.
            let _ = self.file.set_len(self.end).and_then(|()| self.file.seek(SeekFrom::Start(self.end)));
            return Err(DataError::at(&self.path, DataErrorKind::Write(e)));
        }
        self.end += self.frame.len() as u64;
        self.next += 1;
        Ok(())
    }
}

/// Reader of a journal, block by block.
#[derive(Debug)]
pub struct Blocks {
    path: PathBuf,
    file: BufReader<File>,
    /// Bytes of the file when it was opened.
    length: u64,
    /// Bytes of complete frames read so far.
    end: u64,
    next: u64,
    key: Vec<u8>,
    key_digest: [u8; 32],
}

impl Blocks {
    /// Opens a journal; `None` if there is no file, or if the file ends before its key is complete.
    ///
    /// # Errors
    /// A file that cannot be read, or is no journal.
    pub fn open(path: &Path) -> Result<Option<Self>, DataError> {
        let file = match bounded::open(path) {
            Err(e) if e.kind() == ErrorKind::NotFound => return Ok(None),
            file => file.map_err(DataError::reading(path))?,
        };
        let length = file.metadata().map_err(DataError::reading(path))?.len();
        let mut blocks = Self {
            path: path.to_owned(),
            file: BufReader::new(file),
            length,
            end: 0,
            next: 0,
            key: vec![],
            key_digest: [0; 32],
        };
        let mut key = vec![];
        if !blocks.next_into(&mut key)? {
            return blocks.is_torn().map(|()| None);
        }
        blocks.key_digest = Sha256::digest(&key).into();
        blocks.key = key;
        Ok(Some(blocks))
    }

    /// Checks that a file without a complete key is an interrupted `create`; an error if it is a foreign file.
    fn is_torn(&mut self) -> Result<(), DataError> {
        let mut head = vec![];
        let read = self.file.seek(SeekFrom::Start(0));
        let read = read.and_then(|_| (&mut self.file).take(MAGIC.len() as u64).read_to_end(&mut head));
        read.map_err(|e| DataError::at(&self.path, DataErrorKind::Read(e)))?;
        // Zeros are accepted too: the length of a file can reach the disk before its bytes do.
        if MAGIC.starts_with(&head) || head.iter().all(|&b| b == 0) {
            return Ok(());
        }
        let what = "it is not a journal of plimsoll".to_owned();
        Err(DataError::at(&self.path, DataErrorKind::Damaged(what)))
    }

    /// Returns the key that the journal was created with.
    pub fn key(&self) -> &[u8] {
        &self.key
    }

    /// Reads the next block into `block`, replacing its content; returns false after the last complete block.
    ///
    /// # Errors
    /// A file that cannot be read; a damaged block that is followed by others.
    pub fn next_into(&mut self, block: &mut Vec<u8>) -> Result<bool, DataError> {
        block.clear();
        let whole = self.read_frame(block).map_err(|e| DataError::at(&self.path, DataErrorKind::Read(e)))?;
        if whole {
            self.next += 1;
            self.end += (HEADER + block.len()) as u64;
            return Ok(true);
        }
        block.clear();
        if self.later_frame().map_err(|e| DataError::at(&self.path, DataErrorKind::Read(e)))? {
            let what =
                format!("block {} at byte {} is damaged, and more blocks follow it", self.next, self.end);
            return Err(DataError::at(&self.path, DataErrorKind::Damaged(what)));
        }
        Ok(false)
    }

    /// Turns the reader into a writer that appends after the last complete block. All blocks must have been read; an
    /// incomplete frame at the end is cut off.
    ///
    /// # Errors
    /// A file that cannot be written.
    pub fn into_journal(self) -> Result<Journal, DataError> {
        let Self { path, end, next, key_digest, .. } = self;
        let file = open_cut(&path, end).map_err(DataError::writing(&path))?;
        Ok(Journal { path, file, end, next, key_digest, frame: vec![] })
    }

    /// Reads the frame at `end` into `block`; returns whether it is complete, valid and has the next number.
    fn read_frame(&mut self, block: &mut Vec<u8>) -> io::Result<bool> {
        self.file.seek(SeekFrom::Start(self.end))?;
        let mut header = [0; HEADER];
        let left = self.length.saturating_sub(self.end);
        if left < HEADER as u64 {
            return Ok(false);
        }
        self.file.read_exact(&mut header)?;
        let (found, bytes) = numbers(&header);
        if header[..8] != MAGIC || found != self.next || bytes > left - HEADER as u64 {
            return Ok(false);
        }
        (&mut self.file).take(bytes).read_to_end(block)?;
        Ok(header[24..] == digest(&self.key_digest, found, block))
    }

    /// Returns whether the magic bytes `found` bytes into the part read from file offset `at` start a plausible frame:
    /// record names may contain the magic bytes too. `header` starts at the magic bytes.
    fn is_later(&self, at: u64, header: &[u8], found: usize) -> bool {
        if header.len() < HEADER {
            return false;
        }
        let (number, bytes) = numbers(header);
        let left = self.length.saturating_sub(at + (found + HEADER) as u64);
        number > self.next && bytes <= left
    }

    /// Returns whether a plausible later frame starts anywhere behind the expected start of the next frame. If so, the
    /// file is damaged, because an interrupted append leaves an incomplete frame only at the end of the file.
    fn later_frame(&mut self) -> io::Result<bool> {
        const PART: usize = 1 << 16;
        let mut at = self.end + 1;
        let mut part = vec![];
        while at < self.length {
            self.file.seek(SeekFrom::Start(at))?;
            part.clear();
            // Parts overlap by the length of a header, so a header across the boundary of two parts is found.
            (&mut self.file).take((PART + HEADER) as u64).read_to_end(&mut part)?;
            if memchr::memmem::find_iter(&part, &MAGIC).any(|found| self.is_later(at, &part[found..], found)) {
                return Ok(true);
            }
            at += PART as u64;
        }
        Ok(false)
    }
}

/// Opens a file for appending at `end`, and cuts off what follows.
fn open_cut(path: &Path, end: u64) -> io::Result<File> {
    let mut file = OpenOptions::new().write(true).open(path)?;
    file.set_len(end)?;
    file.seek(SeekFrom::Start(end))?;
    Ok(file)
}

/// Returns the block's number and length from a frame's header.
fn numbers(header: &[u8]) -> (u64, u64) {
    let [number, length] = [8, 16].map(|at| u64::from_le_bytes(std::array::from_fn(|i| header[at + i])));
    (number, length)
}

/// Returns the digest of a frame: SHA-256 of key digest, number, length and block.
fn digest(key: &[u8; 32], number: u64, block: &[u8]) -> [u8; 32] {
    let mut hash = Sha256::new();
    hash.update(key);
    hash.update(number.to_le_bytes());
    hash.update((block.len() as u64).to_le_bytes());
    hash.update(block);
    hash.finalize().into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    const KEY: &[u8] = b"a key";

    struct Temporary(PathBuf);

    impl Temporary {
        fn new(name: &str) -> Self {
            Self(std::env::temp_dir().join(format!("plimsoll-journal-{name}-{}", std::process::id())))
        }
    }

    impl Drop for Temporary {
        fn drop(&mut self) {
            let _ = fs::remove_file(&self.0);
        }
    }

    fn blocks() -> Vec<Vec<u8>> {
        vec![b"one".to_vec(), vec![], vec![7; 100_000], b"four".to_vec()]
    }

    fn written(name: &str) -> Temporary {
        let file = Temporary::new(name);
        let mut journal = Journal::create(&file.0, KEY).expect("created");
        blocks().iter().for_each(|b| journal.append(b).expect("appended"));
        file
    }

    fn read(path: &Path) -> Result<Vec<Vec<u8>>, DataError> {
        let mut blocks = Blocks::open(path)?.expect("a journal");
        assert_eq!(blocks.key(), KEY);
        let mut all = vec![];
        let mut block = vec![];
        while blocks.next_into(&mut block)? {
            all.push(block.clone());
        }
        Ok(all)
    }

    #[test]
    fn blocks_come_back() {
        let file = written("whole");
        assert_eq!(read(&file.0).expect("read"), blocks());
        assert!(Blocks::open(Path::new("nowhere/at/all")).expect("no file").is_none());
    }

    #[test]
    fn a_file_of_somebody_else_is_no_torn_journal() {
        let check = |name: &str, bytes: &[u8], wanted: bool| {
            let file = Temporary::new(name);
            fs::write(&file.0, bytes).expect("written");
            assert_eq!(Blocks::open(&file.0).is_ok_and(|b| b.is_none()), wanted, "{name}");
        };
        check("diary", b"dear diary", false);
        check("short", b"no", false);
        check("empty", b"", true);
        check("begun", b"plimj", true);
        check("zeros", &[0; 100], true);
    }

    #[test]
    fn a_torn_tail_is_cut_off_at_any_byte() {
        let file = written("torn");
        let bytes = fs::read(&file.0).expect("bytes");
        let ends: Vec<usize> = std::iter::once(KEY)
            .chain(blocks().iter().map(Vec::as_slice))
            .scan(0, |end, b| {
                *end += HEADER + b.len();
                Some(*end)
            })
            .collect();
        for cut in (0..300).chain(bytes.len() - 200..bytes.len()) {
            fs::write(&file.0, &bytes[..cut]).expect("written");
            let whole = ends.iter().filter(|&&end| end <= cut).count();
            let Some(mut open) = Blocks::open(&file.0).expect("opened") else {
                assert_eq!(whole, 0, "{cut}");
                continue;
            };
            let mut block = vec![];
            let mut count = 0;
            while open.next_into(&mut block).expect("read") {
                count += 1;
            }
            assert_eq!(count, whole - 1, "{cut}");
            open.into_journal().expect("goes on").append(b"more").expect("appended");
            let wanted: Vec<Vec<u8>> = blocks().into_iter().take(count).chain([b"more".to_vec()]).collect();
            assert_eq!(read(&file.0).expect("read"), wanted, "{cut}");
        }
    }

    #[test]
    fn a_flipped_bit_is_never_read() {
        let file = written("flipped");
        let bytes = fs::read(&file.0).expect("bytes");
        let last = bytes.len() - HEADER - 4;
        let places = (HEADER + KEY.len()..300).chain([5000, last - 1, last, last + 30, bytes.len() - 1]);
        for at in places {
            let mut damaged = bytes.clone();
            damaged[at] ^= 4;
            fs::write(&file.0, &damaged).expect("written");
            match read(&file.0) {
                // A damaged last block looks like an interrupted append, so it is ignored, not trusted.
                Ok(found) => assert!(at >= last && found == blocks()[..3], "{at}"),
                Err(error) => assert!(at < last && error.to_string().contains("damaged"), "{at}: {error}"),
            }
        }
    }

    #[test]
    fn a_block_of_another_journal_does_not_pass() {
        let file = written("mine");
        let other = Temporary::new("theirs");
        let mut journal = Journal::create(&other.0, b"a kay").expect("created");
        journal.append(b"one").expect("appended");
        let key = HEADER + KEY.len();
        let mut bytes = fs::read(&file.0).expect("bytes");
        let theirs = fs::read(&other.0).expect("bytes");
        bytes.splice(key..key + HEADER + 3, theirs[key..].iter().copied());
        fs::write(&file.0, &bytes).expect("written");
        assert!(read(&file.0).expect_err("damaged").to_string().contains("block 1"));
    }
}
