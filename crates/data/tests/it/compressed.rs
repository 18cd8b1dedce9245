//! Tests of the sequence reader on compressed files: files of one or several streams, truncated and damaged files,
//! files that need too much memory, and the output of the compression programs.

use std::fs;
use std::io::{Cursor, Write};

pub use plimsoll_data::sequence::Compression as How;
use plimsoll_data::sequence::{Reader, Record};
use plimsoll_data::{DataError, DataErrorKind};
use proptest::prelude::*;
use sha2::{Digest, Sha256};

use crate::support::folder;

const ALL: [How; 4] = [How::Gzip, How::Bzip2, How::Zstd, How::Xz];

/// Compresses `text` to one stream.
pub fn pack(how: How, text: &[u8]) -> Vec<u8> {
    match how {
        How::Gzip => {
            let mut out = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
            out.write_all(text).unwrap();
            out.finish().unwrap()
        }
        How::Bzip2 => {
            let mut out = bzip2::write::BzEncoder::new(Vec::new(), bzip2::Compression::fast());
            out.write_all(text).unwrap();
            out.finish().unwrap()
        }
        How::Zstd => ruzstd::encoding::compress_to_vec(text, ruzstd::encoding::CompressionLevel::Fastest),
        How::Xz => {
            let options = lzma_rust2::XzOptions::with_preset(1);
            let mut out = lzma_rust2::XzWriter::new(Vec::new(), options).unwrap();
            out.write_all(text).unwrap();
            out.finish().unwrap()
        }
    }
}

/// A FASTA text of `records` records with 16 lines of 62 letters each.
fn fasta(records: usize) -> Vec<u8> {
    let mut text = Vec::new();
    for i in 0..records {
        writeln!(text, ">r{i} some words").unwrap();
        for line in 0..16 {
            let letters: Vec<u8> = (0..62).map(|j| b"ACGT"[(i + line * j + j / 3) % 4]).collect();
            writeln!(text, "{}", String::from_utf8(letters).unwrap()).unwrap();
        }
    }
    text
}

/// Writes `stored` to a file and returns its records; asserts the size and the digest that the reader reports.
fn read_stored(test: &str, stored: &[u8]) -> Vec<Record> {
    let path = folder(test).join("x");
    fs::write(&path, stored).unwrap();
    let mut reader = Reader::open([&path]).unwrap();
    assert_eq!(reader.total_bytes(), Some(stored.len() as u64));
    let mut record = Record::default();
    let mut records = Vec::new();
    while reader.read_into(&mut record).unwrap() {
        records.push(record.clone());
    }
    let [input] = reader.inputs() else { panic!("one input") };
    assert_eq!((input.path.as_path(), input.bytes), (path.as_path(), stored.len() as u64));
    assert_eq!(input.sha256[..], Sha256::digest(stored)[..]);
    assert_eq!(reader.bytes_read(), stored.len() as u64);
    records
}

fn from_bytes(bytes: Vec<u8>) -> Result<Vec<Record>, DataError> {
    Reader::from_read("reads", Cursor::new(bytes))?.records().collect()
}

#[test]
fn plain_compressed_and_many_parts_are_the_same() {
    let text = fasta(1000);
    let plain = read_stored("reader_plain", &text);
    assert_eq!(plain.len(), 1000);
    for how in ALL {
        let name = how.name();
        assert_eq!(read_stored(&format!("reader_{name}"), &pack(how, &text)), plain, "{name}");
        let parts = text.chunks(70_001).flat_map(|part| pack(how, part)).chain(pack(how, b""));
        let parts: Vec<u8> = parts.collect();
        assert_eq!(read_stored(&format!("reader_parts_{name}"), &parts), plain, "{name} in parts");
    }
}

#[test]
fn zstd_frames_to_be_skipped_are_skipped() {
    let text = fasta(3);
    let skipped = [&b"\x5a\x2a\x4d\x18"[..], &[3, 0, 0, 0], b"abc"].concat();
    let frame = pack(How::Zstd, &text);
    let stored = [&skipped, &frame[..], &skipped, &frame[..], &skipped].concat();
    let twice: Vec<Record> = [from_bytes(text.clone()).unwrap(), from_bytes(text).unwrap()].concat();
    assert_eq!(read_stored("reader_skippable", &stored), twice);
    let error = from_bytes(stored[..stored.len() - 1].to_vec()).unwrap_err();
    assert!(error.to_string().contains("the zstd data ends early"), "{error}");
}

#[test]
fn xz_may_be_padded_between_and_behind_streams() {
    let text = fasta(3);
    let one = pack(How::Xz, &text);
    let stored = [&one[..], &[0; 8], &one, &[0; 4]].concat();
    assert_eq!(read_stored("reader_xz_padding", &stored).len(), 6);
    assert!(from_bytes([&one[..], &[0; 3]].concat()).is_err());
}

/// Asserts that reading a file with the bytes `stored` fails, and that the message names the file and ends with
/// `expected`.
fn check_damage(test: &str, how: How, stored: &[u8], expected: &str) {
    let path = folder(&format!("{test}_{}", how.name())).join("reads.fa");
    fs::write(&path, stored).unwrap();
    let read: Result<Vec<Record>, DataError> = Reader::open([&path]).and_then(|r| r.records().collect());
    let error = read.expect_err(expected);
    assert!(matches!(error.kind, DataErrorKind::Compressed(h, _) if h == how), "{error:?}");
    assert_eq!(error.to_string(), format!("{}: the {} data {expected}", path.display(), how.name()));
}

const TRUNCATED: &str = "ends early (truncated); copy or download it again";
const CORRUPT: &str = "is corrupt; copy or download it again";

#[test]
fn a_stream_that_is_cut_short_is_an_error_that_names_the_file() {
    for how in ALL {
        let whole = pack(how, &fasta(500));
        for end in [6, 12, whole.len() / 2, whole.len() - 8, whole.len() - 1] {
            check_damage("reader_cut", how, &whole[..end], TRUNCATED);
        }
    }
}

#[test]
fn a_damaged_stream_is_an_error_that_names_the_file() {
    for how in ALL {
        let whole = pack(how, &fasta(500));
        let flipped = |at: usize| {
            let mut bad = whole.clone();
            bad[at] ^= 0x55;
            bad
        };
        check_damage("reader_damaged", how, &flipped(whole.len() / 2), CORRUPT);
        check_damage("reader_damaged", how, &[&whole[..], b"some text behind the end"].concat(), CORRUPT);
        // This byte belongs to the checksum at the end; in xz to the magic bytes of the footer.
        check_damage(
            "reader_damaged",
            how,
            &flipped(whole.len() - if how == How::Gzip { 6 } else { 2 }),
            CORRUPT,
        );
    }
}

/// Asserts that `hex`, the output of `program` for the record `>a b`, `ACGTACGTACGT`, is read as this record. If
/// reading fails, `program` must be the message.
fn check_program(program: &str, hex: &str) {
    let digit = |at: usize| u8::from_str_radix(&hex[at..at + 2], 16).unwrap();
    let stored: Vec<u8> = (0..hex.len()).step_by(2).map(digit).collect();
    match from_bytes(stored) {
        Ok(records) => {
            let id = "a".to_owned();
            let description = b"b".to_vec();
            let seq = b"ACGTACGTACGT".to_vec();
            assert_eq!(records, [Record { id, description, seq, ..Record::default() }], "{program}");
        }
        Err(e) => assert_eq!(e.to_string(), program),
    }
}

#[test]
fn what_the_programs_make_is_read() {
    let frame = "28b52ffd04689100003e6120620a4143475441434754414347540a38326fe7";
    check_program("zstd -19 --check", frame);
    check_program("pzstd", &format!("502a4d18040000001f000000{}", frame.replacen("68", "58", 1)));
    check_program("zstd --ultra -22", &frame.replacen("68", "88", 1));
    check_program(
        "xz -9",
        "fd377a585a000004e6d6b446020021011c00000010cf58cce0001100105d001f184006369051\
         21d5d98b014ac7c00000b38d3a3b427c768b00012c12cdaf0eea1fb6f37d010000000004595a",
    );
    check_program(
        "bzip2",
        "425a68393141592653596a315528000001df0000104000000128800400300020003106\
         4c411a341ea683713ab9083c5dc914e14241a8c554a0",
    );
}

#[test]
fn what_asks_for_too_much_memory_is_refused_with_a_way_out() {
    let refused = |name: &str| {
        format!(
            "reads: the {name} data needs more than 128 MiB to be decompressed; \
             pipe it in: {name} -dc FILE | stdin"
        )
    };
    // Output of `zstd --ultra -22 --long=28` and `xz --lzma2=dict=256MiB`, whose windows exceed the reader's limit.
    check_program(&refused("zstd"), "28b52ffd04909100003e6120620a4143475441434754414347540a38326fe7");
    check_program(
        &refused("xz"),
        "fd377a585a000004e6d6b44602002101200000000988a576e0001100105d001f184006369051\
         21d5d98b014ac7c00000b38d3a3b427c768b00012c12cdaf0eea1fb6f37d010000000004595a",
    );
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 100, failure_persistence: None, ..Default::default() })]

    #[test]
    fn damage_never_panics_and_never_passes_for_more_records(
        how in prop::sample::select(ALL.to_vec()),
        records in 1_usize..20,
        at in any::<prop::sample::Index>(),
        bits in 1_u8..=255,
        cut in any::<prop::sample::Index>(),
    ) {
        let text = fasta(records);
        let mut stored = pack(how, &text);
        let whole = from_bytes(stored.clone()).unwrap();
        prop_assert_eq!(whole.len(), records);
        let at = at.index(stored.len());
        stored[at] ^= bits;
        // Some header bits do not affect the content. If the file is still accepted, its records are unchanged.
        if let Ok(found) = from_bytes(stored.clone()) {
            prop_assert!(found == whole, "{} at {}", how.name(), at);
        }
        stored.truncate(cut.index(stored.len()));
        let _ = from_bytes(stored);
    }

    #[test]
    fn random_streams_never_panic(
        start in prop::sample::select(vec![
            &b"\x1f\x8b\x08\0"[..], b"BZh9", b"BZh91AY&SY", b"\x28\xb5\x2f\xfd",
            b"\xfd7zXZ\0", b"\xfd7zXZ\0\0\x04\xe6\xd6\xb4\x46", b"\x50\x2a\x4d\x18",
        ]),
        rest in prop::collection::vec(any::<u8>(), 0..400),
    ) {
        let _ = from_bytes([start, &rest].concat());
    }
}
