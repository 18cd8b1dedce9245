//! FASTA and FASTQ files, plain and compressed, against an independent reference reader. Invariant: both
//! readers return equal records, or both refuse the file; each compression is one row of [`COMPRESSIONS`].

use super::{CaseResult, FuzzFormat, Seeds, check_error, measured};
use flate2::Compression as Level;
use flate2::bufread::MultiGzDecoder;
use flate2::write::GzEncoder;
use plimsoll_data::DataError;
use plimsoll_data::sequence::{Reader, Record};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::{Read, Write};
use std::path::Path;

/// A compression with an independent decoder.
struct Compression {
    formats: [&'static str; 2],
    /// First bytes of a compressed file.
    magic: &'static [u8],
    pack: fn(&[u8]) -> Vec<u8>,
    /// Decompresses; `None` if the data is damaged.
    unpack: fn(&[u8]) -> Option<Vec<u8>>,
    /// Memory limit of the decoder in bytes, for a text of any size.
    window: u64,
}

const COMPRESSIONS: &[Compression] = &[
    Compression {
        formats: ["fasta.gz", "fastq.gz"],
        magic: b"\x1f\x8b",
        pack: gzip,
        unpack: gunzip,
        window: 1 << 20,
    },
    Compression {
        formats: ["fasta.bz2", "fastq.bz2"],
        magic: b"BZh",
        pack: bzip2,
        unpack: bunzip2,
        window: 16 << 20,
    },
    Compression {
        formats: ["fasta.xz", "fastq.xz"],
        magic: b"\xfd7zXZ\0",
        pack: xz,
        unpack: unxz,
        window: 160 << 20,
    },
    Compression {
        formats: ["fasta.zst", "fastq.zst"],
        magic: b"\x28\xb5\x2f\xfd",
        pack: zstd,
        unpack: unzstd,
        window: 160 << 20,
    },
];

/// Memory limit of the reader's buffers in bytes.
const BUFFERS: u64 = 1 << 20;
/// Maximum length of a name in bytes.
const LONGEST_NAME: usize = 4096;

/// FASTA and FASTQ, plain and in every compression.
pub fn formats() -> Vec<FuzzFormat> {
    let mut formats = vec![
        FuzzFormat::new("fasta", "reads", fasta(), check),
        FuzzFormat::new("fastq", "reads", fastq(), check),
    ];
    for Compression { formats: [of_fasta, of_fastq], pack, .. } in COMPRESSIONS {
        for (name, seeds) in [(of_fasta, fasta()), (of_fastq, fastq())] {
            formats.push(FuzzFormat { encode: *pack, ..FuzzFormat::new(name, "reads", seeds, check) });
        }
    }
    formats
}

fn fasta() -> Seeds {
    let long = [&b">long\n"[..], &b"ACGTTGCATN".repeat(400)].concat();
    let members: [&[u8]; 7] = [
        b"",
        b">a one\nACGT\nACGT\n>b\nNNNN\n>a\nacgu\n",
        b"\xef\xbb\xbf>dos\r\nACGT\r\n\r\nTT TT\t\r\n>\r\nA\r\n",
        b"  \n\n>mac\rACGT\r>next\r\rACGT",
        b">sp|P1|X_Y \xce\xb1 words\nMKV.-\n\n>\xc2\xa0odd\nX\n>last",
        b">a\n>b\n>c\n\n\n>d\nA 12 C\n 13 e\n",
        &long,
    ];
    Seeds { corpus: members.map(<[u8]>::to_vec).to_vec(), words: words() }
}

fn fastq() -> Seeds {
    let bases = "ACGTTGCATN".repeat(60);
    let quality = "IIIIIFFF@+".repeat(60);
    let long = format!("@long\n{bases}\n+\n{quality}\n");
    let members: [&[u8]; 5] = [
        b"@a one\nACGT\n+\nIIII\n@b\nAC\n+b\n@@\n",
        b"@dos x\r\nACGT\r\n+dos x\r\nI+@I\r\n\r\n@e\r\n\r\n+\r\n\r\n",
        b"@lines\nAC\nGT\n+\nII\nII\n@z\nA\n+\n+\n",
        b"@a\nACGT\n+\nIII",
        long.as_bytes(),
    ];
    Seeds { corpus: members.map(<[u8]>::to_vec).to_vec(), words: words() }
}

fn words() -> Vec<Vec<u8>> {
    let long = [b">", &b"x".repeat(LONGEST_NAME - 1)[..], b"\nA\n"].concat();
    let words: [&[u8]; 26] = [
        b"@HD\tVN:1",
        b"*",
        b" 12 ",
        b"--.",
        b"\n>x\n",
        b">",
        b"@",
        b"\n@x\nA\n+\nI\n",
        b"\n+\n",
        b"\r\n",
        b"\r",
        b"\n\n\n",
        b" \t",
        b"\0",
        b"\x1b[2J",
        b"\xff\xfe",
        b"\xef\xbb\xbf",
        b"\x1f\x8b",
        b"\x1f\x8b\x08\0\0\0\0\0\0\x03",
        b"\xc2\x85",
        b"\xe2\x80\xa8",
        b">../../x",
        b">a\tb\x0b",
        b";",
        b"\x1c\x1f",
        &long,
    ];
    words.map(<[u8]>::to_vec).to_vec()
}

/// Number of records, hash of all records, and whether the file was read to its end.
type Digest = (u64, u64, bool);

/// Reads a case with the reader under test and with [`reference()`], and compares the digests.
fn check(path: &Path, bytes: &[u8]) -> Result<CaseResult, String> {
    let (read, peak) = measured(|| ours(path));
    let found = match &read {
        (digest, None) => *digest,
        (digest, Some(error)) => {
            check_error(error, path)?;
            *digest
        }
    };
    let compression = COMPRESSIONS.iter().find(|compression| bytes.starts_with(compression.magic));
    let text = match compression {
        Some(compression) => (compression.unpack)(bytes),
        None => Some(bytes.to_vec()),
    };
    let window = compression.map_or(0, |compression| compression.window);
    // The length of the text before the damage is unknown. 1032 is the maximum compression ratio of deflate, and these
    // cases do not reach it in other formats.
    let longest_text = text.as_ref().map_or(bytes.len().saturating_mul(1032), Vec::len);
    let result = CaseResult { accepted: found.2, peak, allowed: BUFFERS + window + 3 * longest_text as u64 };
    let Some(text) = text else {
        return if found.2 { Err("a damaged file is read to its end".to_owned()) } else { Ok(result) };
    };
    let wanted = reference(&text);
    if found == wanted {
        Ok(result)
    } else {
        Err(format!("(records, digest, complete) are {found:?}, of the reference {wanted:?}"))
    }
}

/// Digest by the reader under test, and its error.
fn ours(path: &Path) -> (Digest, Option<DataError>) {
    let mut digest = DefaultHasher::new();
    let mut count = 0;
    let mut record = Record::default();
    let mut reader = match Reader::open([path]) {
        Ok(reader) => reader,
        Err(error) => return ((0, digest.finish(), false), Some(error)),
    };
    loop {
        match reader.read_into(&mut record) {
            Ok(true) => (record.id.as_bytes(), &record.seq[..]).hash(&mut digest),
            Ok(false) => return ((count, digest.finish(), true), None),
            Err(error) => return ((count, digest.finish(), false), Some(error)),
        }
        count += 1;
    }
}

/// Digest by the reference reader, written for simplicity.
fn reference(text: &[u8]) -> Digest {
    let mut rest = text.strip_prefix(b"\xef\xbb\xbf").unwrap_or(text);
    let mut digest = DefaultHasher::new();
    let mut count = 0;
    let fastq = trimmed(rest).starts_with(b"@");
    if is_foreign(trimmed(rest)) {
        return (0, digest.finish(), false);
    }
    loop {
        rest = trimmed(rest);
        let record = match (rest.first(), fastq) {
            (None, _) => return (count, digest.finish(), true),
            (Some(b'>'), false) => fasta_record(&mut rest),
            (Some(b'@'), true) => fastq_record(&mut rest),
            (Some(_), _) => None,
        };
        let Some((id, sequence)) = record else { return (count, digest.finish(), false) };
        (id.as_bytes(), &sequence[..]).hash(&mut digest);
        count += 1;
    }
}

/// Takes a FASTA record from `rest`; `None` if its name is invalid.
fn fasta_record(rest: &mut &[u8]) -> Option<(String, Vec<u8>)> {
    let id = name(&line(rest)[1..])?;
    let mut sequence = Letters::default();
    while !rest.is_empty() && !rest.starts_with(b">") {
        sequence.add(line(rest))?;
    }
    Some((id, sequence.checked()?))
}

/// Takes a FASTQ record, which may span several lines, from `rest`; `None` if it is malformed.
fn fastq_record(rest: &mut &[u8]) -> Option<(String, Vec<u8>)> {
    let title = &line(rest)[1..];
    let id = name(title)?;
    let mut sequence = Letters::default();
    while !rest.starts_with(b"+") {
        if rest.is_empty() {
            return None;
        }
        sequence.add(line(rest))?;
    }
    let second = line(rest)[1..].trim_ascii_end();
    if !second.is_empty() && second != title.trim_ascii_end() {
        return None;
    }
    // A quality line may start with `@`, so only the number of characters ends the record.
    let mut quality = 0;
    while quality < sequence.characters {
        if rest.is_empty() {
            return None;
        }
        let more = line(rest).iter().filter(|b| !is_blank(b)).count();
        if more == 0 {
            return None;
        }
        quality += more;
    }
    let sequence = Some(sequence).filter(|sequence| quality == sequence.characters)?;
    Some((id, sequence.checked()?))
}

/// Takes the first line and its end from `rest`; returns the line without its end.
fn line<'a>(rest: &mut &'a [u8]) -> &'a [u8] {
    let end = rest.iter().position(|b| b"\r\n".contains(b)).unwrap_or(rest.len());
    let (line, tail) = rest.split_at(end);
    *rest = tail.strip_prefix(b"\r\n").unwrap_or(tail.get(1..).unwrap_or_default());
    line
}

/// The first word of a title; `None` if it is not valid UTF-8 or too long.
fn name(title: &[u8]) -> Option<String> {
    for word in title.split(is_blank).filter(|word| !word.is_empty()) {
        let word = std::str::from_utf8(word).ok()?;
        if let Some(word) = word.split_whitespace().next() {
            return (word.len() <= LONGEST_NAME).then(|| word.to_owned());
        }
    }
    Some(String::new())
}

/// The letters of a record.
#[derive(Default)]
struct Letters {
    letters: Vec<u8>,
    digits: usize,
    /// Number of bytes that have a quality: all but white space.
    characters: usize,
}

impl Letters {
    /// Adds a sequence line; `None` if it has a byte that is no letter and is not dropped.
    fn add(&mut self, line: &[u8]) -> Option<()> {
        for &byte in line {
            match byte {
                b'A'..=b'Z' | b'a'..=b'z' => self.letters.push(byte),
                b'0'..=b'9' => self.digits += 1,
                b'-' | b'.' => {}
                _ if is_blank(&byte) => continue,
                _ => return None,
            }
            self.characters += 1;
        }
        Some(())
    }

    /// The letters; `None` if digits outnumber them.
    fn checked(self) -> Option<Vec<u8>> {
        (self.digits <= self.letters.len()).then_some(self.letters)
    }
}

/// Whether a file that begins like FASTA or FASTQ is text in UTF-16 or a SAM file.
fn is_foreign(text: &[u8]) -> bool {
    let headers: [&[u8]; 5] = [b"@HD\tVN:", b"@SQ\t", b"@RG\tID:", b"@PG\tID:", b"@CO\t"];
    let is_utf16 = matches!(text, [b'@', 0, b' '..=b'~' | b'\t' | b'\r' | b'\n', 0, ..]);
    text.starts_with(b">\0") || is_utf16 || headers.iter().any(|header| text.starts_with(header))
}

/// The text without leading white space.
fn trimmed(text: &[u8]) -> &[u8] {
    let start = text.iter().position(|b| !is_blank(b)).unwrap_or(text.len());
    &text[start..]
}

/// White space as defined by `str.isspace` of Python, restricted to ASCII.
fn is_blank(b: &u8) -> bool {
    b" \t\n\x0b\x0c\r\x1c\x1d\x1e\x1f".contains(b)
}

fn gzip(text: &[u8]) -> Vec<u8> {
    // Two members, as parallel compressors write.
    let (first, second) = text.split_at(text.len() / 2);
    [gzip_member(first), gzip_member(second)].concat()
}

fn gzip_member(text: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(vec![], Level::fast());
    // Writing to a Vec cannot fail.
    let _ = encoder.write_all(text);
    encoder.finish().unwrap_or_default()
}

fn gunzip(bytes: &[u8]) -> Option<Vec<u8>> {
    let mut text = vec![];
    MultiGzDecoder::new(bytes).read_to_end(&mut text).ok().map(|_| text)
}

fn bzip2(text: &[u8]) -> Vec<u8> {
    let mut encoder = bzip2::write::BzEncoder::new(vec![], bzip2::Compression::fast());
    let _ = encoder.write_all(text);
    encoder.finish().unwrap_or_default()
}

fn bunzip2(bytes: &[u8]) -> Option<Vec<u8>> {
    let mut text = vec![];
    bzip2::read::MultiBzDecoder::new(bytes).read_to_end(&mut text).ok().map(|_| text)
}

fn xz(text: &[u8]) -> Vec<u8> {
    let Ok(mut encoder) = lzma_rust2::XzWriter::new(vec![], lzma_rust2::XzOptions::with_preset(0)) else {
        return vec![];
    };
    let _ = encoder.write_all(text);
    encoder.finish().unwrap_or_default()
}

fn unxz(bytes: &[u8]) -> Option<Vec<u8>> {
    let mut text = vec![];
    lzma_rust2::XzReader::new_mem_limit(bytes, true, 129 << 10).read_to_end(&mut text).ok().map(|_| text)
}

fn zstd(text: &[u8]) -> Vec<u8> {
    ruzstd::encoding::compress_to_vec(text, ruzstd::encoding::CompressionLevel::Fastest)
}

fn unzstd(bytes: &[u8]) -> Option<Vec<u8>> {
    let mut decoder = ruzstd::decoding::FrameDecoder::new();
    let mut text = Vec::with_capacity(4 << 20);
    decoder.decode_all_to_vec(bytes, &mut text).ok()?;
    // The decoder computes the checksum but leaves the comparison to its caller.
    let sums = (decoder.get_checksum_from_data(), decoder.get_calculated_checksum());
    (sums.0.is_none() || sums.0 == sums.1).then_some(text)
}
