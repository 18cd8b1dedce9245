//! Documents of a file of token ids, little-endian, as nanoGPT's `prepare.py` writes them. Invariant: a document
//! ends with the id that ends one, or with the file; a file that ends inside of an id is an error.
//!
//! The file is read through a buffer and not mapped: its pages then never count as this process's memory, and a
//! file that shrinks is an error instead of a signal.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};

use super::{Document, too_long};
use crate::train::settings::IdWidth;
use crate::{DataError, DataErrorKind};

/// The bytes held at a time: a multiple of every width.
const BUFFER: usize = 256 << 10;
/// What the files of llm.c start with, in 32 bits: a header of 1 KiB.
const HEADERS: [u32; 2] = [20_240_520, 20_240_801];

/// A file that is being read.
pub(crate) struct Ids {
    path: PathBuf,
    file: BufReader<File>,
    width: usize,
    end: Option<[u8; 4]>,
    most: usize,
    ended: bool,
}

impl Ids {
    pub(super) fn open(path: &Path, width: IdWidth, end: Option<i32>, most: usize) -> Result<Self, DataError> {
        let read = |e| DataError::at(path, DataErrorKind::Read(e));
        let refuse = |what: String| Err(DataError::at(path, DataErrorKind::Malformed(what)));
        let file = File::open(path).map_err(read)?;
        let (bytes, width) = (file.metadata().map_err(read)?.len(), width.bytes());
        if bytes % width as u64 != 0 {
            return refuse(format!(
                "{bytes} bytes are no whole number of ids of {width} bytes; check the width"
            ));
        }
        let mut file = BufReader::with_capacity(BUFFER, file);
        let start = file.fill_buf().map_err(read)?;
        if start.first_chunk().is_some_and(|&first| HEADERS.contains(&u32::from_le_bytes(first))) {
            return refuse(
                "it has the header of llm.c's files; write the ids alone, as nanoGPT does".to_owned(),
            );
        }
        let end = end.map(i32::to_le_bytes);
        Ok(Ids { path: path.to_owned(), file, width, end, most, ended: false })
    }

    pub(super) fn read(&mut self, document: &mut Document) -> Result<bool, DataError> {
        let read = |e| DataError::at(&self.path, DataErrorKind::Read(e));
        let ids = Width { bytes: self.width, end: self.end };
        while !self.ended {
            let bytes = self.file.fill_buf().map_err(read)?;
            if bytes.is_empty() {
                self.ended = true;
                let whole = document.bytes.len().is_multiple_of(self.width);
                if !whole {
                    let what = "it ends inside of an id; it was changed while it was read".to_owned();
                    return Err(DataError::at(&self.path, DataErrorKind::Malformed(what)));
                }
                return Ok(!document.bytes.is_empty());
            }
            // Bytes of an id that the end of a read has cut.
            let open = document.bytes.len() % self.width;
            let (taken, ends) = match open {
                0 => ids.until_end(bytes),
                // Rare: byte by byte up to a whole id, which is then looked at.
                _ => (1, false),
            };
            document.bytes.extend_from_slice(&bytes[..taken]);
            self.file.consume(taken);
            if document.bytes.len() > self.most {
                return Err(DataError { path: Some(self.path.clone()), ..too_long(self.most) });
            }
            let completed = open != 0 && document.bytes.len().is_multiple_of(self.width);
            let last = document.bytes.len().saturating_sub(self.width);
            if ends || completed && ids.is_end(&document.bytes[last..]) {
                return Ok(true);
            }
        }
        Ok(false)
    }
}

/// What an id is, and which one ends a document.
struct Width {
    bytes: usize,
    end: Option<[u8; 4]>,
}

impl Width {
    /// How many of `bytes`, which start with an id, belong to the document, and whether it ends there.
    fn until_end(&self, bytes: &[u8]) -> (usize, bool) {
        if bytes.len() < self.bytes {
            return (bytes.len(), false);
        }
        let whole = bytes.len() - bytes.len() % self.bytes;
        match bytes[..whole].chunks_exact(self.bytes).position(|id| self.is_end(id)) {
            Some(at) => ((at + 1) * self.bytes, true),
            None => (whole, false),
        }
    }

    fn is_end(&self, id: &[u8]) -> bool {
        // An end beyond the width ends nothing: the higher bytes differ.
        self.end.is_some_and(|end| id == &end[..self.bytes] && end[self.bytes..].iter().all(|&b| b == 0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(width: IdWidth, end: Option<i32>, ids: &[u32], expected: &[usize]) {
        let bytes: Vec<u8> = ids.iter().flat_map(|id| id.to_le_bytes()[..width.bytes()].to_vec()).collect();
        let path = std::env::temp_dir().join(format!("plimsoll-ids-{}-{}.bin", std::process::id(), ids.len()));
        std::fs::write(&path, &bytes).unwrap();
        // Buffers that cut ids everywhere.
        for buffer in [1, 3, 5, 64] {
            let mut file = Ids::open(&path, width, end, 1000).unwrap();
            file.file = BufReader::with_capacity(buffer, File::open(&path).unwrap());
            let (mut document, mut found, mut all) = (Document::default(), Vec::new(), Vec::new());
            while file.read(&mut document).unwrap() {
                found.push(document.bytes.len() / width.bytes());
                all.append(&mut document.bytes);
            }
            assert_eq!(found, expected, "buffers of {buffer}");
            assert_eq!(all, bytes);
        }
        std::fs::remove_file(&path).unwrap();
    }

    #[test]
    fn an_id_ends_a_document() {
        check(IdWidth::U16, Some(9), &[1, 9, 2, 3, 9, 4], &[2, 3, 1]);
        check(IdWidth::U32, Some(9), &[9, 70_000, 9, 2], &[1, 2, 1]);
        check(IdWidth::U16, Some(9), &[1, 2, 9], &[3]);
        check(IdWidth::U16, None, &[1, 9, 2, 3], &[4]);
        check(IdWidth::U16, Some(9), &[], &[]);
        // 9 stands in the bytes of 0x0900 and 0x0009 side by side, but is no id there.
        check(IdWidth::U16, Some(9), &[0x0900, 0x0a00, 5, 6, 7], &[5]);
        check(IdWidth::U16, Some(65_545), &[9, 1, 9, 1, 9, 1, 9], &[7]);
    }

    #[test]
    fn what_is_no_file_of_ids_is_refused() {
        let path = std::env::temp_dir().join(format!("plimsoll-ids-{}.bin", std::process::id()));
        let refused = |bytes: &[u8]| {
            std::fs::write(&path, bytes).unwrap();
            Ids::open(&path, IdWidth::U16, None, 100).err().expect("refused").to_string()
        };
        assert!(refused(&[1, 2, 3]).contains("3 bytes are no whole number of ids of 2 bytes"));
        assert!(refused(&20_240_520_u32.to_le_bytes()).contains("header of llm.c"));
        std::fs::remove_file(&path).unwrap();
    }
}
