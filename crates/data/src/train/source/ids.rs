//! Reads the documents of a file of little-endian token ids, as nanoGPT's `prepare.py` writes it. Invariant: a document
//! ends with the end-of-document id or at the end of the file; a file that ends within an id is an error.
//!
//! The file is read through a buffer instead of being memory-mapped: mapped pages would count towards the resident
//! memory of the process, and a file truncated while mapped would raise SIGBUS instead of returning an error.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};

use super::{RawDocument, too_long};
use crate::train::settings::IdWidth;
use crate::{DataError, DataErrorKind};

/// Size of the read buffer in bytes, a multiple of every id width.
const BUFFER: usize = 256 << 10;
/// Magic numbers (first 32 bits) of llm.c's data files, which have a header of 1 KiB and are rejected.
const HEADERS: [u32; 2] = [20_240_520, 20_240_801];

/// Reader of a file of token ids.
pub(crate) struct Ids {
    path: PathBuf,
    file: BufReader<File>,
    /// Size of an id in bytes.
    width: usize,
    /// End-of-document id in little-endian byte order.
    end: Option<[u8; 4]>,
    /// Maximum length of a document in bytes.
    max_bytes: usize,
    /// Whether the end of the file was reached.
    ended: bool,
}

impl Ids {
    pub(super) fn open(
        path: &Path,
        width: IdWidth,
        end: Option<i32>,
        max_bytes: usize,
    ) -> Result<Self, DataError> {
        let file = File::open(path).map_err(DataError::reading(path))?;
        let bytes = file.metadata().map_err(DataError::reading(path))?.len();
        let width = width.bytes();
        if bytes % width as u64 != 0 {
            return Err(DataError::malformed(
                path,
                format!("{bytes} bytes are not a whole number of ids of {width} bytes; check the width"),
            ));
        }
        let mut file = BufReader::with_capacity(BUFFER, file);
        let start = file.fill_buf().map_err(DataError::reading(path))?;
        if start.first_chunk().is_some_and(|&first| HEADERS.contains(&u32::from_le_bytes(first))) {
            return Err(DataError::malformed(
                path,
                "it has the header of llm.c's files; write the ids alone, as nanoGPT does".to_owned(),
            ));
        }
        let end = end.map(i32::to_le_bytes);
        Ok(Ids { path: path.to_owned(), file, width, end, max_bytes, ended: false })
    }

    /// Reads the ids of the next document, its end-of-document id included, into `document`, reusing its buffer.
    /// Returns `false` after the last document.
    pub(super) fn read(&mut self, document: &mut RawDocument) -> Result<bool, DataError> {
        let ids = Width { bytes: self.width, end: self.end };
        while !self.ended {
            let bytes = self.file.fill_buf().map_err(DataError::reading(&self.path))?;
            if bytes.is_empty() {
                self.ended = true;
                let whole = document.bytes.len().is_multiple_of(self.width);
                if !whole {
                    let what = "it ends inside of an id; it was changed while it was read".to_owned();
                    return Err(DataError::at(&self.path, DataErrorKind::Malformed(what)));
                }
                return Ok(!document.bytes.is_empty());
            }
            // Number of bytes of an id that the end of the buffer has split; 0 if the document ends at a whole id.
            let open = document.bytes.len() % self.width;
            let (taken, ends) = match open {
                0 => ids.until_end(bytes),
                // A split id, which is rare, is completed byte by byte and compared with the end id below.
                _ => (1, false),
            };
            document.bytes.extend_from_slice(&bytes[..taken]);
            self.file.consume(taken);
            if document.bytes.len() > self.max_bytes {
                return Err(DataError { path: Some(self.path.clone()), ..too_long(self.max_bytes) });
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

/// Size of an id in bytes, and the end-of-document id.
struct Width {
    bytes: usize,
    end: Option<[u8; 4]>,
}

impl Width {
    /// Returns how many of `bytes` belong to the document, and whether the document ends there. `bytes` must start at
    /// an id boundary.
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

    /// Whether `id` is the end-of-document id.
    fn is_end(&self, id: &[u8]) -> bool {
        // An end id that does not fit the width must match nothing: its upper bytes have to be zero.
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
        // Buffer sizes that split ids at every byte.
        for buffer in [1, 3, 5, 64] {
            let mut file = Ids::open(&path, width, end, 1000).unwrap();
            file.file = BufReader::with_capacity(buffer, File::open(&path).unwrap());
            let mut document = RawDocument::default();
            let mut found = Vec::new();
            let mut all = Vec::new();
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
        // The bytes 09 00 of the id 9 occur here only across an id boundary, which must not end a document.
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
        assert!(refused(&[1, 2, 3]).contains("3 bytes are not a whole number of ids of 2 bytes"));
        assert!(refused(&20_240_520_u32.to_le_bytes()).contains("header of llm.c"));
        std::fs::remove_file(&path).unwrap();
    }
}
