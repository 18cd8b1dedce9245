//! The reader on files: plain, gzip of one and many members, damaged, several; and on random bytes.

use std::fs;
use std::io::{Cursor, Write};
use std::path::{Path, PathBuf};

use flate2::Compression;
use flate2::write::GzEncoder;
use plimsoll_data::sequence::{Reader, Record};
use plimsoll_data::{DataError, DataErrorKind};
use proptest::prelude::*;
use sha2::{Digest, Sha256};

use crate::support::folder;

fn gzip(text: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::default());
    encoder.write_all(text).unwrap();
    encoder.finish().unwrap()
}

fn read(paths: &[PathBuf]) -> Result<Vec<Record>, DataError> {
    Reader::open(paths)?.records().collect()
}

/// A FASTA text of `records` records of 1000 letters.
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

/// Reads `stored` from a file; the records, after checking size and digest of the input.
fn read_stored(test: &str, stored: &[u8]) -> Vec<Record> {
    let path = folder(test).join("x");
    fs::write(&path, stored).unwrap();
    let mut reader = Reader::open([&path]).unwrap();
    assert_eq!(reader.total_bytes(), Some(stored.len() as u64));
    let (mut record, mut records) = (Record::default(), Vec::new());
    while reader.read_into(&mut record).unwrap() {
        records.push(record.clone());
    }
    let [input] = reader.inputs() else { panic!("one input") };
    assert_eq!((input.path.as_path(), input.bytes), (path.as_path(), stored.len() as u64));
    assert_eq!(input.sha256[..], Sha256::digest(stored)[..]);
    assert_eq!(reader.bytes_read(), stored.len() as u64);
    records
}

#[test]
fn plain_gzip_and_many_members_are_the_same() {
    let text = fasta(1000);
    let plain = read_stored("reader_plain", &text);
    assert_eq!(plain.len(), 1000);
    assert_eq!(read_stored("reader_gzip", &gzip(&text)), plain);
    let members: Vec<u8> = text.chunks(70_001).flat_map(gzip).chain(gzip(b"")).collect();
    assert_eq!(read_stored("reader_members", &members), plain);
}

#[test]
fn damaged_gzip_is_an_error_that_names_the_file() {
    let whole = gzip(&fasta(500));
    let check = |stored: &[u8], expected: &str| {
        let path = folder("reader_damaged").join("reads.fa.gz");
        fs::write(&path, stored).unwrap();
        let error = read(std::slice::from_ref(&path)).expect_err(expected);
        assert!(matches!(error.kind, DataErrorKind::Gzip(_)), "{error:?}");
        assert_eq!(error.to_string(), format!("{}: {expected}", path.display()));
    };
    let truncated = "the gzip data ends early (truncated); copy or download it again";
    let corrupt = "the gzip data is corrupt; copy or download it again";
    for end in [5, 12, whole.len() / 2, whole.len() - 8, whole.len() - 1] {
        check(&whole[..end], truncated);
    }
    let mut bad = whole.clone();
    let middle = bad.len() / 2;
    bad[middle] ^= 0xff;
    bad[middle + 1] ^= 0xff;
    check(&bad, corrupt);
    check(&[&whole[..], b"some text behind the end"].concat(), corrupt);
    let mut wrong_sum = whole.clone();
    let at = wrong_sum.len() - 6;
    wrong_sum[at] ^= 1;
    check(&wrong_sum, corrupt);
}

#[test]
fn several_files_one_after_the_other() {
    let folder = folder("reader_several");
    let paths = ["a.fa", "empty.fa", "b.fq", "c.fa.gz"].map(|name| folder.join(name));
    let contents: [&[u8]; 4] = [b">a1\nA\n>a2\nC", b"", b"@b1\nG\n+\nI\n", &gzip(b">c1\nT\n")];
    for (path, content) in paths.iter().zip(contents) {
        fs::write(path, content).unwrap();
    }
    let mut reader = Reader::open(&paths).unwrap();
    let (mut record, mut found) = (Record::default(), Vec::new());
    while reader.read_into(&mut record).unwrap() {
        let (path, line) = reader.position().unwrap();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        found.push(format!("{name}:{line} {}={}", record.id, String::from_utf8_lossy(&record.seq)));
    }
    assert_eq!(found, ["a.fa:1 a1=A", "a.fa:3 a2=C", "b.fq:1 b1=G", "c.fa.gz:1 c1=T"]);
    let inputs: Vec<&Path> = reader.inputs().iter().map(|i| i.path.as_path()).collect();
    assert_eq!(inputs, paths.each_ref().map(PathBuf::as_path));
}

#[test]
fn what_cannot_be_opened_is_refused_at_once() {
    let folder = folder("reader_missing");
    let there = folder.join("a.fa");
    fs::write(&there, ">a\nA\n").unwrap();
    let missing = folder.join("b.fa");
    let error = Reader::open([&there, &missing]).err().unwrap();
    let expected = format!("{}: there is no such file; check the path", missing.display());
    assert_eq!(error.to_string(), expected);
    let error = Reader::open([&folder]).err().unwrap();
    assert!(error.to_string().ends_with("a folder, not a file; name the files in it"));
    let error = Reader::open(["-", "-"]).err().unwrap();
    assert_eq!(error.to_string(), "standard input: given twice; it can be read only once");
}

#[test]
fn a_reader_can_move_to_another_thread() {
    fn is_send<T: Send>() {}
    is_send::<Reader>();
}

fn from_bytes(bytes: Vec<u8>) -> Result<Vec<Record>, DataError> {
    Reader::from_read("x", Cursor::new(bytes))?.records().collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..Default::default() })]

    #[test]
    fn random_bytes_never_panic(
        start in prop::sample::select(vec![&b""[..], b">", b"@", b"\x1f\x8b", b"\x1f\x8b\x08\0"]),
        rest in prop::collection::vec(any::<u8>(), 0..400),
    ) {
        let _ = from_bytes([start, &rest].concat());
    }

    #[test]
    fn random_lines_never_panic(
        text in prop::collection::vec(
            prop::sample::select(b">@+\n\n\r ACGTN\tI".to_vec()), 0..200),
    ) {
        if let Ok(records) = from_bytes(text) {
            for r in records {
                prop_assert!(!r.seq.iter().any(|b| b"\n\r ".contains(b)));
                prop_assert!(!r.id.contains(char::is_whitespace));
            }
        }
    }

    #[test]
    fn what_is_written_is_read(
        records in prop::collection::vec(("[!-~]{0,12}", "[A-Za-z*.-]{0,200}"), 0..8),
        width in 1_usize..80,
        end in prop::sample::select(vec!["\n", "\r\n", "\r"]),
        fastq in any::<bool>(),
    ) {
        let mut text = String::new();
        for (id, seq) in &records {
            let wrapped: Vec<&str> = seq
                .as_bytes()
                .chunks(width)
                .map(|line| std::str::from_utf8(line).unwrap())
                .collect();
            let lines = wrapped.join(end);
            if fastq {
                let quality = lines.replace(|c: char| !c.is_ascii_control(), "@");
                text += &format!("@{id} x{end}{lines}{end}+{end}{quality}{end}");
            } else {
                text += &format!(">{id} x{end}{lines}{end}");
            }
        }
        let found = from_bytes(text.clone().into_bytes()).unwrap();
        let found: Vec<(String, String)> =
            found.into_iter().map(|r| (r.id, String::from_utf8(r.seq).unwrap())).collect();
        let expected: Vec<(String, String)> = records
            .into_iter()
            .map(|(id, seq)| (if id.is_empty() { "x".to_owned() } else { id }, seq))
            .collect();
        prop_assert_eq!(found, expected, "{}", text);
    }
}
