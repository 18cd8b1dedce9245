//! Reader of the part of the zip format that PyTorch uses: a directory of uncompressed entries. Invariant: an entry is
//! returned only if its bytes are inside the file, and memory is at most a few times the size of the directory. Source:
//! PKWARE APPNOTE 6.3.10, sections 4.3.7, 4.3.12 and 4.3.14 to 4.3.16.
//!
//! This is not a general zip crate, because only the positions of uncompressed bytes are needed, and decompression,
//! decryption and recovery of damaged archives must not happen here.

use std::collections::BTreeMap;

use super::WeightsError;
use super::source::ByteSource;
use crate::printable::Name;

const END_SIGNATURE: u32 = 0x0605_4b50;
const END64_SIGNATURE: u32 = 0x0606_4b50;
const LOCATOR64_SIGNATURE: u32 = 0x0706_4b50;
const CENTRAL_SIGNATURE: u32 = 0x0201_4b50;
const LOCAL_SIGNATURE: u32 = 0x0403_4b50;
const END_BYTES: u64 = 22;
const LOCATOR64_BYTES: u64 = 20;
const CENTRAL_BYTES: usize = 46;
const LOCAL_BYTES: u64 = 30;
/// Maximum size of the central directory in bytes, enough for half a million storages.
const DIRECTORY_LIMIT: u64 = 64 << 20;

/// First bytes of a zip file: the signature of the first entry's local header.
pub(super) const MAGIC: [u8; 4] = LOCAL_SIGNATURE.to_le_bytes();

/// The entries of a zip file by name.
#[derive(Debug)]
pub(super) struct Zip {
    entries: BTreeMap<String, ZipEntry>,
}

/// An entry of the central directory.
#[derive(Debug, Clone, Copy)]
struct ZipEntry {
    /// Whether the bytes are neither compressed nor encrypted.
    stored: bool,
    /// Size in bytes.
    size: u64,
    /// File offset of the local header.
    header: u64,
}

impl Zip {
    /// Reads the central directory. Errors if it is damaged, outside the file, or lists a name twice.
    pub(super) fn open(source: &ByteSource) -> Result<Zip, WeightsError> {
        let (offset, size, end) = find_directory(source)?;
        if offset.checked_add(size).is_none_or(|directory_end| directory_end > end) {
            return Err(source.malformed("its zip directory lies outside the file"));
        }
        let bytes = source.read_vec(offset, size, DIRECTORY_LIMIT, "a zip directory")?;
        let mut entries = BTreeMap::new();
        let mut rest = &bytes[..];
        while !rest.is_empty() {
            let (name, entry, tail) =
                parse_entry(rest).ok_or_else(|| source.malformed("a zip directory entry breaks off"))?;
            if entries.insert(name.clone(), entry).is_some() {
                return Err(source.malformed(format!("it contains `{}` twice", Name(&name))));
            }
            rest = tail;
        }
        Ok(Zip { entries })
    }

    /// Returns the names of all entries in sorted order.
    pub(super) fn names(&self) -> impl Iterator<Item = &str> {
        self.entries.keys().map(String::as_str)
    }

    /// Returns file offset and size of an entry's bytes; `None` if no entry has this name. Errors if the entry is
    /// compressed or encrypted, or reaches past the end of the file.
    pub(super) fn locate(&self, source: &ByteSource, name: &str) -> Result<Option<(u64, u64)>, WeightsError> {
        let Some(entry) = self.entries.get(name) else { return Ok(None) };
        if !entry.stored {
            return Err(WeightsError::Compressed { path: source.path().to_owned(), entry: name.to_owned() });
        }
        let mut header = [0; LOCAL_BYTES as usize];
        source.read_at(entry.header, &mut header)?;
        if u32_at(&header, 0) != Some(LOCAL_SIGNATURE) {
            let what = format!("the zip header of `{}` is not where the directory says", Name(name));
            return Err(source.malformed(what));
        }
        // The local header repeats the name and has its own extra field, which PyTorch pads to align storages; the
        // lengths in the central directory may differ.
        let skip = [26, 28].map(|at| u64::from(u16_at(&header, at).unwrap_or(0)));
        let start = entry.header + LOCAL_BYTES + skip[0] + skip[1];
        let expected = start.saturating_add(entry.size);
        if expected > source.len() {
            return Err(WeightsError::Truncated {
                path: source.path().to_owned(),
                expected,
                found: source.len(),
            });
        }
        Ok(Some((start, entry.size)))
    }
}

/// Returns offset and size of the central directory, and the offset of the end record that follows it.
fn find_directory(source: &ByteSource) -> Result<(u64, u64, u64), WeightsError> {
    let tail_len = source.len().min(END_BYTES + u64::from(u16::MAX));
    let tail_start = source.len() - tail_len;
    let tail = source.read_vec(tail_start, tail_len, tail_len, "the end")?;
    // The end record is followed by a comment whose length it states (PyTorch writes none). The search goes backwards
    // and accepts a signature only if the stated length reaches exactly to the end of the file.
    let at = (0..tail.len().saturating_sub(END_BYTES as usize - 1))
        .rev()
        .find(|&at| {
            u32_at(&tail, at) == Some(END_SIGNATURE)
                && u16_at(&tail, at + 20).map(usize::from) == Some(tail.len() - at - END_BYTES as usize)
        })
        .ok_or_else(|| missing_directory(source))?;
    let end = tail_start + at as u64;
    let size = u32_at(&tail, at + 12).ok_or_else(|| missing_directory(source))?;
    let offset = u32_at(&tail, at + 16).ok_or_else(|| missing_directory(source))?;
    let count = u16_at(&tail, at + 10).ok_or_else(|| missing_directory(source))?;
    if size != u32::MAX && offset != u32::MAX && count != u16::MAX {
        return Ok((u64::from(offset), u64::from(size), end));
    }
    find_directory64(source, end)
}

fn missing_directory(source: &ByteSource) -> WeightsError {
    source.malformed("the zip directory at its end is missing, so the file is cut short or no zip file")
}

/// Returns the result of [`find_directory`] from the zip64 records, which precede the plain end record at `end`.
fn find_directory64(source: &ByteSource, end: u64) -> Result<(u64, u64, u64), WeightsError> {
    let mut locator = [0; LOCATOR64_BYTES as usize];
    source.read_at(end.checked_sub(LOCATOR64_BYTES).ok_or_else(|| bad_zip64(source))?, &mut locator)?;
    if u32_at(&locator, 0) != Some(LOCATOR64_SIGNATURE) {
        return Err(bad_zip64(source));
    }
    let end64 = u64_at(&locator, 8).filter(|&at| at < end).ok_or_else(|| bad_zip64(source))?;
    let mut record = [0; 56];
    source.read_at(end64, &mut record)?;
    if u32_at(&record, 0) != Some(END64_SIGNATURE) {
        return Err(bad_zip64(source));
    }
    match (u64_at(&record, 48), u64_at(&record, 40)) {
        (Some(offset), Some(size)) => Ok((offset, size, end64)),
        _ => Err(bad_zip64(source)),
    }
}

fn bad_zip64(source: &ByteSource) -> WeightsError {
    source.malformed("its zip64 end record is missing or wrong")
}

/// Parses the first entry of the central directory and returns its name, the entry, and the remaining bytes.
fn parse_entry(bytes: &[u8]) -> Option<(String, ZipEntry, &[u8])> {
    if u32_at(bytes, 0)? != CENTRAL_SIGNATURE {
        return None;
    }
    let flags = u16_at(bytes, 8)?;
    let method = u16_at(bytes, 10)?;
    let packed = u32_at(bytes, 20)?;
    let size = u32_at(bytes, 24)?;
    let header = u32_at(bytes, 42)?;
    let [name_len, extra_len, comment_len] = [28, 30, 32].map(|at| u16_at(bytes, at).map(usize::from));
    let name_len = name_len?;
    let extra_len = extra_len?;
    let comment_len = comment_len?;
    let name = bytes.get(CENTRAL_BYTES..CENTRAL_BYTES + name_len)?;
    let extra = bytes.get(CENTRAL_BYTES + name_len..CENTRAL_BYTES + name_len + extra_len)?;
    let rest = bytes.get(CENTRAL_BYTES + name_len + extra_len + comment_len..)?;
    // The zip64 extra field contains, in this order, only the values whose 32-bit fields are 2^32 - 1.
    let mut wide = zip64_extra(extra).unwrap_or(&[]);
    let size = widen(size, &mut wide)?;
    let packed = widen(packed, &mut wide)?;
    let header = widen(header, &mut wide)?;
    // Flag bit 0 means encrypted; method 0 means stored without compression.
    let stored = method == 0 && flags & 1 == 0 && size == packed;
    let name = std::str::from_utf8(name).ok()?.to_owned();
    Some((name, ZipEntry { stored, size, header }, rest))
}

/// Returns a 32-bit field as 64 bits: 2^32 - 1 stands for the next value of `wide`, which is consumed.
fn widen(value: u32, wide: &mut &[u8]) -> Option<u64> {
    if value != u32::MAX {
        return Some(u64::from(value));
    }
    let wide_value = u64_at(wide, 0)?;
    *wide = &wide[8..];
    Some(wide_value)
}

/// Returns the body of the zip64 extra field (id 1), if present.
fn zip64_extra(mut extra: &[u8]) -> Option<&[u8]> {
    loop {
        let id = u16_at(extra, 0)?;
        let len = usize::from(u16_at(extra, 2)?);
        let body = extra.get(4..4 + len)?;
        if id == 1 {
            return Some(body);
        }
        extra = &extra[4 + len..];
    }
}

fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_le_bytes(*bytes.get(at..)?.first_chunk()?))
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(*bytes.get(at..)?.first_chunk()?))
}

fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_le_bytes(*bytes.get(at..)?.first_chunk()?))
}
