//! Tests of the sequence reader on one file, several files and random bytes; `compressed.rs` has compressed files.

use std::fs;
use std::io::Cursor;
use std::path::{Path, PathBuf};

use plimsoll_data::DataError;
use plimsoll_data::sequence::{Reader, Record};
use proptest::prelude::*;

use crate::compressed::{How, pack};
use crate::support::folder;

#[test]
fn several_files_one_after_the_other() {
    let folder = folder("reader_several");
    let paths = ["a.fa", "empty.fa", "b.fq", "c.fa.gz"].map(|name| folder.join(name));
    let contents: [&[u8]; 4] = [b">a1\nA\n>a2\nC", b"", b"@b1\nG\n+\nI\n", &pack(How::Gzip, b">c1\nT\n")];
    for (path, content) in paths.iter().zip(contents) {
        fs::write(path, content).unwrap();
    }
    let mut reader = Reader::open(&paths).unwrap();
    let mut record = Record::default();
    let mut found = Vec::new();
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
                prop_assert!(r.seq.iter().all(u8::is_ascii_alphabetic));
                prop_assert!(!r.id.contains(char::is_whitespace));
            }
        }
    }

    #[test]
    fn what_is_written_is_read(
        records in prop::collection::vec(("[!-~]{0,12}", "[A-Za-z]{0,200}"), 0..8),
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
