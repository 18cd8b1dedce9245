//! Writer of rows in numpy's `.npz` format: a zip archive of `.npy` arrays without compression. Invariant: the values are
//! written once, to their place in the file; the number of rows and the checksum are put into the headers before them at
//! the end. Names and lengths wait in a temporary file beside the output, not in memory.
//!
//! Source: PKWARE APPNOTE 6.3.10, sections 4.3.7, 4.3.12, 4.3.14 to 4.3.16 and 4.5.3 (zip64); numpy's
//! `numpy/lib/_npyio_impl.py`. A zip crate writes an entry from its start to its end, and the header of the values, which
//! has their number, is known only at the end: all values would be written twice.

use flate2::Crc;
use std::io::{BufReader, Read, Write};
use std::path::Path;

use super::npy::{HEADER, check_row, header, header_of};
use super::{ValueType, at, width};
use crate::atomic::AtomicFile;
use crate::{DataError, DataErrorKind};

/// Name of the array of values.
const VALUES: &str = "embeddings.npy";
/// Maximum size of the array of names, which has as many characters for every name as the longest name has.
const LARGEST_NAMES: u64 = 1 << 30;

/// Arrays of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NpzLayout {
    /// `embeddings` has one row for each name.
    Matrix,
    /// `embeddings` has one row for each token, sequence after sequence; `offsets` has the first row of each sequence,
    /// and the number of rows at its end.
    Tokens,
}

/// Writes named rows to an archive with the arrays `embeddings`, `ids`, `lengths` and `metadata`, and with
/// [`NpzLayout::Tokens`] `offsets`.
pub struct NpzWriter {
    archive: Archive,
    /// For each name: its bytes and their number, the length of the sequence, and the number of its rows.
    spool: AtomicFile,
    layout: NpzLayout,
    row: Vec<usize>,
    values: ValueType,
    /// Rows of the array of values.
    rows: u64,
    names: u64,
    /// Characters of the longest name.
    longest: u64,
    /// Checksum of the values so far, without their header.
    crc: Crc,
    bytes: Vec<u8>,
}

/// The archive being written.
struct Archive {
    file: AtomicFile,
    entries: Vec<Entry>,
    /// Bytes of the file so far.
    end: u64,
}

/// An entry of the archive.
struct Entry {
    name: &'static str,
    crc: u32,
    size: u64,
    /// File offset of its header.
    offset: u64,
}

impl NpzWriter {
    /// Starts writing the file `path`, which appears at [`finish`](Self::finish). `row` is the shape of the values of a
    /// name, or of a token: `[d]` or `[k, d]`.
    pub fn create(
        path: impl AsRef<Path>,
        layout: NpzLayout,
        row: &[usize],
        values: ValueType,
    ) -> Result<Self, DataError> {
        let path = path.as_ref();
        let mut file = AtomicFile::create(path)?;
        check_row(row).map_err(|kind| DataError::at(path, kind))?;
        // A place for the headers, which are known at the end.
        let start = local_header(&Entry { name: VALUES, crc: 0, size: 0, offset: 0 });
        file.write_all(&start)
            .and_then(|()| file.write_all(&header(0, row, values)))
            .map_err(|e| file.error(e))?;
        Ok(Self {
            archive: Archive { file, entries: vec![], end: (start.len() + HEADER) as u64 },
            spool: AtomicFile::create(path)?,
            layout,
            row: row.to_vec(),
            values,
            rows: 0,
            names: 0,
            longest: 0,
            crc: Crc::new(),
            bytes: vec![],
        })
    }

    /// Errors if an array with `names` names of up to `longest` characters is too large.
    pub fn check_names(names: u64, longest: u64) -> Result<(), DataErrorKind> {
        let bytes = 4 * u128::from(names).saturating_mul(longest.into()).min(u128::MAX / 4);
        if bytes <= u128::from(LARGEST_NAMES) {
            return Ok(());
        }
        let what = format!(
            "numpy stores {names} names of up to {longest} characters in {bytes} bytes, and a .npz may have \
             {LARGEST_NAMES} for them; write .npy or .parquet, or shorten the names"
        );
        Err(DataErrorKind::Malformed(what))
    }

    /// Appends the row of `id`, a sequence of `length` letters; with [`NpzLayout::Tokens`] its rows, which are `[n, d]`, or
    /// `[k, n, d]` if the shape of a row is `[k, d]`.
    pub fn write(&mut self, id: &str, length: u64, values: &[f32]) -> Result<(), DataError> {
        let row: usize = self.row.iter().product();
        let rows = match self.layout {
            NpzLayout::Matrix => 1,
            NpzLayout::Tokens => values.len() / row.max(1),
        };
        let longest = self.longest.max(id.chars().count() as u64);
        width(values.len(), rows * row)
            .and_then(|()| Self::check_names(self.names + 1, longest))
            .map_err(|kind| at(self.archive.file.target(), id, kind))?;
        self.longest = longest;
        self.names += 1;
        self.rows += rows as u64;
        match self.row[..] {
            // Layers of one token are not neighbours in `values`.
            [layers, width] if self.layout == NpzLayout::Tokens => {
                for token in 0..rows {
                    for layer in 0..layers {
                        self.append(id, &values[(layer * rows + token) * width..][..width])?;
                    }
                }
            }
            _ => self.append(id, values)?,
        }
        let spool = &mut self.spool;
        let record = [id.len() as u64, length, rows as u64];
        let record: Vec<u8> = record.iter().flat_map(|n| n.to_le_bytes()).collect();
        let spooled = spool.write_all(&record).and_then(|()| spool.write_all(id.as_bytes()));
        spooled.map_err(|e| self.spool.error(e))
    }

    fn append(&mut self, id: &str, values: &[f32]) -> Result<(), DataError> {
        let Archive { file, end, .. } = &mut self.archive;
        self.values.encode(values, &mut self.bytes).map_err(|kind| at(file.target(), id, kind))?;
        self.crc.update(&self.bytes);
        *end += self.bytes.len() as u64;
        file.write_all(&self.bytes).map_err(|e| file.error(e))
    }

    /// Completes the file with `metadata`, a text, gives it its final path, and returns the number of names.
    pub fn finish(self, metadata: &str) -> Result<u64, DataError> {
        let names = self.names;
        self.into_file(metadata)?.commit()?;
        Ok(names)
    }

    /// Completes the file with `metadata` and returns it, ready to be committed.
    pub fn into_file(self, metadata: &str) -> Result<AtomicFile, DataError> {
        let Self { mut archive, mut spool, layout, row, values, rows, names, longest, crc: of_values, .. } =
            self;
        let start = local_header(&Entry { name: VALUES, crc: 0, size: 0, offset: 0 }).len() as u64;
        let header = header(rows, &row, values);
        let mut crc = Crc::new();
        crc.update(&header);
        crc.combine(&of_values);
        let entry = Entry { name: VALUES, crc: crc.sum(), size: archive.end - start, offset: 0 };
        // The checksum and the sizes are known only now. The local header is as long as the one that stands there, so the
        // values behind it stay in their place.
        archive.file.patch(0, &local_header(&entry))?;
        archive.file.patch(start, &header)?;
        archive.entries.push(entry);
        let shape = format!("({names},)");
        let size = longest.max(1);
        let ids = Elements::new(&mut spool, names, header_of(&format!("<U{size}"), &shape), |record, bytes| {
            bytes.extend(record.name.chars().flat_map(|c| u32::from(c).to_le_bytes()));
            // Each name has as many characters as the longest; zeros at its end are no part of it.
            bytes.resize(4 * size as usize, 0);
        });
        archive.entry("ids.npy", &mut ids?)?;
        let lengths = Elements::new(&mut spool, names, header_of("<i8", &shape), |record, bytes| {
            bytes.extend(record.length.to_le_bytes());
        });
        archive.entry("lengths.npy", &mut lengths?)?;
        if layout == NpzLayout::Tokens {
            // The header of the array is followed by the first offset, 0.
            let mut first = header_of("<i8", &format!("({},)", names + 1));
            first.extend(0u64.to_le_bytes());
            let mut next = 0;
            let offsets = Elements::new(&mut spool, names, first, |record, bytes| {
                next += record.rows;
                bytes.extend(next.to_le_bytes());
            });
            archive.entry("offsets.npy", &mut offsets?)?;
        }
        let text: Vec<u8> = metadata.chars().flat_map(|c| u32::from(c).to_le_bytes()).collect();
        let mut whole = header_of(&format!("<U{}", text.len() / 4), "()");
        whole.extend(text);
        archive.entry("metadata.npy", &mut whole.as_slice())?;
        archive.directory()?;
        Ok(archive.file)
    }
}

impl Archive {
    /// Appends an entry with the bytes of `content`.
    fn entry(&mut self, name: &'static str, content: &mut dyn Read) -> Result<(), DataError> {
        let offset = self.end;
        let place = local_header(&Entry { name, crc: 0, size: 0, offset });
        self.file.write_all(&place).map_err(|e| self.file.error(e))?;
        let mut crc = Crc::new();
        let mut size = 0;
        let mut buffer = vec![0; 64 << 10];
        loop {
            let read = content.read(&mut buffer).map_err(|e| self.file.error(e))?;
            if read == 0 {
                break;
            }
            crc.update(&buffer[..read]);
            size += read as u64;
            self.file.write_all(&buffer[..read]).map_err(|e| self.file.error(e))?;
        }
        let entry = Entry { name, crc: crc.sum(), size, offset };
        self.file.patch(offset, &local_header(&entry))?;
        self.end += place.len() as u64 + size;
        self.entries.push(entry);
        Ok(())
    }

    /// Appends the directory of the archive.
    fn directory(&mut self) -> Result<(), DataError> {
        let mut bytes = vec![];
        self.entries.iter().for_each(|entry| central_header(entry, &mut bytes));
        let directory =
            Directory { start: self.end, size: bytes.len() as u64, entries: self.entries.len() as u64 };
        end_of_directory(&directory, &mut bytes);
        self.file.write_all(&bytes).map_err(|e| self.file.error(e))
    }
}

/// A name in the spool, with the length of its sequence and the number of its rows.
struct SpoolRecord {
    name: String,
    length: u64,
    rows: u64,
}

/// Reads the records of the spool in the order in which they were written.
struct SpoolRecords<'a> {
    left: u64,
    spool: BufReader<&'a mut std::fs::File>,
    name: Vec<u8>,
}

impl SpoolRecords<'_> {
    fn next(&mut self) -> std::io::Result<Option<SpoolRecord>> {
        if self.left == 0 {
            return Ok(None);
        }
        self.left -= 1;
        let bytes = self.number()?;
        let length = self.number()?;
        let rows = self.number()?;
        self.name.resize(bytes as usize, 0);
        self.spool.read_exact(&mut self.name)?;
        Ok(Some(SpoolRecord { name: String::from_utf8_lossy(&self.name).into_owned(), length, rows }))
    }

    /// Reads a little-endian number.
    fn number(&mut self) -> std::io::Result<u64> {
        let mut bytes = [0; 8];
        self.spool.read_exact(&mut bytes).map(|()| u64::from_le_bytes(bytes))
    }
}

/// Bytes of an array of elements, which are made as they are read.
struct Elements<'a, F> {
    records: SpoolRecords<'a>,
    element: F,
    /// Bytes that are read next, from `at` on: first the header, then one element after the other.
    bytes: Vec<u8>,
    at: usize,
}

impl<'a, F: FnMut(&SpoolRecord, &mut Vec<u8>)> Elements<'a, F> {
    /// An array with an element for each of the `names` records of the spool, which `element` appends to an empty vector.
    fn new(spool: &'a mut AtomicFile, names: u64, header: Vec<u8>, element: F) -> Result<Self, DataError> {
        let records = SpoolRecords { left: names, spool: spool.read_back()?, name: vec![] };
        Ok(Self { records, element, bytes: header, at: 0 })
    }
}

impl<F: FnMut(&SpoolRecord, &mut Vec<u8>)> Read for Elements<'_, F> {
    fn read(&mut self, out: &mut [u8]) -> std::io::Result<usize> {
        while self.at == self.bytes.len() {
            self.at = 0;
            self.bytes.clear();
            let Some(record) = self.records.next()? else { return Ok(0) };
            (self.element)(&record, &mut self.bytes);
        }
        let count = out.len().min(self.bytes.len() - self.at);
        out[..count].copy_from_slice(&self.bytes[self.at..][..count]);
        self.at += count;
        Ok(count)
    }
}

/// Version of the format with zip64.
const VERSION: u16 = 45;
/// Stands for a number that is in the zip64 field.
const IN_ZIP64: u32 = u32::MAX;
/// Modification date of the entries: 1 January 1980, the first that the format has, so that equal runs write equal bytes.
const DATE: u16 = 0x21;

/// Header before the bytes of an entry. Its size does not depend on the numbers in it.
fn local_header(entry: &Entry) -> Vec<u8> {
    let mut bytes = vec![];
    bytes.extend(0x0403_4b50_u32.to_le_bytes());
    common(entry, &mut bytes);
    bytes.extend(20u16.to_le_bytes());
    bytes.extend(entry.name.as_bytes());
    bytes.extend(1u16.to_le_bytes());
    bytes.extend(16u16.to_le_bytes());
    // Uncompressed and compressed size.
    bytes.extend([entry.size, entry.size].iter().flat_map(|n| n.to_le_bytes()));
    bytes
}

/// Appends the entry of the directory.
fn central_header(entry: &Entry, bytes: &mut Vec<u8>) {
    bytes.extend(0x0201_4b50_u32.to_le_bytes());
    // Made by this version, on Unix.
    bytes.extend((3 << 8 | VERSION).to_le_bytes());
    common(entry, bytes);
    bytes.extend(28u16.to_le_bytes());
    // No comment, first disk, no internal attributes.
    bytes.extend([0; 6]);
    // A regular file with mode 0644.
    bytes.extend((0o100_644_u32 << 16).to_le_bytes());
    bytes.extend(IN_ZIP64.to_le_bytes());
    bytes.extend(entry.name.as_bytes());
    bytes.extend(1u16.to_le_bytes());
    bytes.extend(24u16.to_le_bytes());
    bytes.extend([entry.size, entry.size, entry.offset].iter().flat_map(|n| n.to_le_bytes()));
}

/// Appends what both headers of an entry have: version, flags, method, time, date, checksum, sizes, length of the name.
fn common(entry: &Entry, bytes: &mut Vec<u8>) {
    bytes.extend([VERSION, 0, 0, 0, DATE].iter().flat_map(|n| n.to_le_bytes()));
    bytes.extend([entry.crc, IN_ZIP64, IN_ZIP64].iter().flat_map(|n| n.to_le_bytes()));
    bytes.extend((entry.name.len() as u16).to_le_bytes());
}

/// Place of the directory in the archive.
struct Directory {
    start: u64,
    size: u64,
    entries: u64,
}

/// Appends the records at the end of the archive.
fn end_of_directory(directory: &Directory, bytes: &mut Vec<u8>) {
    let &Directory { start, size, entries } = directory;
    bytes.extend(0x0606_4b50_u32.to_le_bytes());
    bytes.extend(44u64.to_le_bytes());
    bytes.extend([VERSION, VERSION].iter().flat_map(|n| n.to_le_bytes()));
    // This disk, and the disk of the directory.
    bytes.extend([0; 8]);
    bytes.extend([entries, entries, size, start].iter().flat_map(|n| n.to_le_bytes()));
    bytes.extend(0x0706_4b50_u32.to_le_bytes());
    bytes.extend(0u32.to_le_bytes());
    bytes.extend((start + size).to_le_bytes());
    bytes.extend(1u32.to_le_bytes());
    bytes.extend(0x0605_4b50_u32.to_le_bytes());
    bytes.extend([0, 0, entries as u16, entries as u16].iter().flat_map(|n| n.to_le_bytes()));
    bytes.extend([IN_ZIP64, IN_ZIP64].iter().flat_map(|n| n.to_le_bytes()));
    bytes.extend(0u16.to_le_bytes());
}
