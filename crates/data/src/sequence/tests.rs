//! The reader on bytes in memory; `tests/it/reader.rs` has the files, gzip and random input.

use std::io::Cursor;

use super::*;

fn read(text: &[u8]) -> Result<Vec<Record>, DataError> {
    Reader::from_read("x", Cursor::new(text.to_vec()))?.records().collect()
}

/// `expected`: "id=SEQ" of each record.
fn check(text: &str, expected: &[&str]) {
    let records = read(text.as_bytes()).unwrap_or_else(|e| panic!("{text:?}: {e}"));
    let found: Vec<String> =
        records.iter().map(|r| format!("{}={}", r.id, String::from_utf8_lossy(&r.seq))).collect();
    assert_eq!(found, expected, "{text:?}");
}

fn check_error(text: &[u8], expected: &str) {
    let error = read(text).expect_err(&text.escape_ascii().to_string());
    assert_eq!(error.to_string(), expected);
}

#[test]
fn fasta() {
    check("", &[]);
    check("\n \n", &[]);
    check(">a\nACGT\n", &["a=ACGT"]);
    check(">a\nACGT", &["a=ACGT"]);
    check(">a b c\nAC\nGT\n>b\nTT\n", &["a=ACGT", "b=TT"]);
    check("\n\n>a\n\nAC\n\nGT\n\n", &["a=ACGT"]);
    check(">a\n>b\nA\n>c", &["a=", "b=A", "c="]);
    check(">\nA\n> \nC\n>  x y\nG\n", &["=A", "=C", "x=G"]);
    check(">a\tb\nA\n", &["a=A"]);
    check("\u{feff}>a\nA\n", &["a=A"]);
}

#[test]
fn blanks_and_line_ends() {
    check(">a x\r\nAC\r\nGT\r\n>b\r\n\r\nT\r\n", &["a=ACGT", "b=T"]);
    check(">a x\rAC\rGT\r>b\rT", &["a=ACGT", "b=T"]);
    check(">a\nA C G\n  T T  \n", &["a=ACGTT"]);
    // Biopython strips a line's end of all blanks, and only spaces elsewhere.
    check(">a\nA\tC\t \nG\x0b\n", &["a=A\tCG"]);
    check(">a\nA>C\n", &["a=A>C"]);
    check(">a\n >b\n", &["a=>b"]);
}

#[test]
fn the_letters_are_not_checked() {
    check(">a\nacgtNNRYK-*.@1\n", &["a=acgtNNRYK-*.@1"]);
    check(">é ü\nA\n", &["é=A"]);
    check(">a\u{a0}b\nA\n", &["a=A"]);
}

#[test]
fn fastq() {
    check("@a x\nACGT\n+\nIIII\n@b\nTT\n+b\n@+\n", &["a=ACGT", "b=TT"]);
    check("@a\r\nAC\r\n+\r\nII\r\n", &["a=AC"]);
    check("@a\nAC\nGT\n+a\nII\nII\n@b\nA\n+\n@\n", &["a=ACGT", "b=A"]);
    check("@a\n\n+\n\n@b\nA\n+\nI", &["a=", "b=A"]);
    check("@a x y\nA\n+a x y\nI\n\n\n", &["a=A"]);
}

#[test]
fn what_is_neither_format() {
    check_error(
        b"PK\x03\x04",
        "x, line 1: not FASTA or FASTQ: it starts with 'P', expected '>' or '@'; \
         give a FASTA or FASTQ file, plain or as .gz, .bz2, .zst or .xz",
    );
    check_error(
        b"\n\n;comment\n>a\nA\n",
        "x, line 3: not FASTA or FASTQ: it starts with ';', expected '>' or '@'; \
         give a FASTA or FASTQ file, plain or as .gz, .bz2, .zst or .xz",
    );
    check_error(
        b">a\nA\n>\xff\xfe b\nC\n",
        "x, line 3: the name '\\xff\\xfe' is not UTF-8; convert the file (iconv -t utf-8)",
    );
}

#[test]
fn broken_fastq() {
    let check = |text: &[u8], line: u64, id: &str, what: &str| {
        let id = if id.is_empty() { String::new() } else { format!(", '{id}'") };
        let rest = "repair or re-export the file";
        check_error(text, &format!("x, line {line}{id}: not valid FASTQ: {what}; {rest}"));
    };
    check(b"@a\nACGT\n", 3, "a", "the file ends before its '+' line");
    check(b"@a\nACGT\n+\nII\n", 5, "a", "the file ends after 2 of 4 qualities");
    check(b"@a\nACGT\n+\nIIIII\n", 5, "a", "5 qualities for 4 letters");
    check(b"@a\nA\n+b\nI\n", 4, "a", "the title after '+' differs from the one after '@'");
    check(b"@a\nA\n+\nI\nACGT\n", 5, "", "a record starts with 'A', expected '@'");
}

#[test]
fn an_error_ends_the_stream() {
    let mut reader = Reader::from_read("x", Cursor::new(b"@a\nA\n+\nI\nX\n@b\nA\n+\nI\n")).unwrap();
    let mut record = Record::default();
    assert!(reader.read_into(&mut record).unwrap());
    assert!(reader.read_into(&mut record).is_err());
    assert!(!reader.read_into(&mut record).unwrap());
}

#[test]
fn positions_and_digests() {
    let text = b">a\nA\n\n>b\r\nC\r\n";
    let mut reader = Reader::from_read("x", Cursor::new(text)).unwrap();
    let mut record = Record::default();
    let mut lines = Vec::new();
    while reader.read_into(&mut record).unwrap() {
        lines.push(reader.position().unwrap().1);
    }
    assert_eq!(lines, [1, 4]);
    assert_eq!(reader.position(), None);
    assert_eq!(reader.bytes_read(), text.len() as u64);
    assert_eq!(reader.inputs().len(), 1);
    let empty = read_inputs(b"");
    let of_nothing = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";
    assert_eq!((empty.bytes, empty.sha256_hex().as_str()), (0, of_nothing));
}

fn read_inputs(text: &'static [u8]) -> Input {
    let mut reader = Reader::from_read("x", Cursor::new(text)).unwrap();
    while reader.read_into(&mut Record::default()).unwrap() {}
    reader.inputs()[0].clone()
}

/// A reader that gives one byte at a time, to cut lines, line ends and marks everywhere.
struct Trickle(Cursor<Vec<u8>>);

impl Read for Trickle {
    fn read(&mut self, out: &mut [u8]) -> std::io::Result<usize> {
        let n = out.len().min(1);
        self.0.read(&mut out[..n])
    }
}

#[test]
fn pieces_of_any_size_give_the_same_records() {
    for text in
        [&b"\xef\xbb\xbf>a x\r\nAC GT\t \r\nGG\r\n\r\n>b\r\n"[..], b"@a x\r\nAC\r\nGT\r\n+a x\r\nII\r\nII\r\n"]
    {
        let trickle = Reader::from_read("x", Trickle(Cursor::new(text.to_vec()))).unwrap();
        let found: Result<Vec<Record>, DataError> = trickle.records().collect();
        assert_eq!(found.unwrap(), read(text).unwrap());
    }
}

/// Also if spaces precede the difference in the title, for any division of the input into pieces.
#[test]
fn a_title_behind_plus_differs_in_pieces_of_any_size() {
    let text = b"@a\nACGTACGT\n+a          X\nIIIIIIII\n";
    let trickle = Reader::from_read("x", Trickle(Cursor::new(text.to_vec()))).unwrap();
    for found in [trickle.records().collect::<Result<Vec<Record>, DataError>>(), read(text)] {
        assert!(found.unwrap_err().to_string().contains("the title after '+' differs"));
    }
}

#[test]
fn a_long_record_takes_little_more_than_its_bases() {
    let (line, lines) = ([b'A'; 61], 200_000);
    let mut text = b">long\n".to_vec();
    for _ in 0..lines {
        text.extend_from_slice(&line[..60]);
        text.push(b'\n');
    }
    let mut reader = Reader::from_read("x", Cursor::new(text)).unwrap();
    let mut record = Record::default();
    assert!(reader.read_into(&mut record).unwrap());
    assert_eq!(record.seq.len(), 60 * lines);
    assert!(record.seq.capacity() <= record.seq.len() * 9 / 8 + 256);
}

/// The file is read byte by byte, so that every piece of a record is cut at each position. A record that exceeds the
/// bounds is an error and is not truncated to a shorter record.
#[test]
fn records_are_held_to_what_was_planned_for() {
    let most = Extent { records: 2, longest: 4, longest_name: 3, longest_title: 8, ..Extent::default() };
    let held = |text: &str| {
        let mut reader = Reader::from_read("x", Trickle(Cursor::new(text.as_bytes().to_vec()))).unwrap();
        reader.hold_to(most.clone());
        reader.records().collect::<Result<Vec<Record>, DataError>>()
    };
    for text in
        [">abc 1234\nAC \t\nGT\t\n>b\n", "@a\nAC\nGT\n+a\t\nII\nII\n@b\nA\n+\nI\n", ">a\nACGT\t\t\t\t\n>b\nA\n"]
    {
        assert_eq!(held(text).unwrap(), read(text.as_bytes()).unwrap(), "{text:?}");
    }
    for (text, what) in [
        (">a\nACG\nTA\n", "line 1, 'a': a record has more than 4 letters"),
        (">a\nACGT\tC\n", "a record has more than 4 letters"),
        ("@a\nACGTACGT\n+\nIIIIIIII\n", "a record has more than 4 letters"),
        (">abcd\nA\n", "a name has more than 3 bytes"),
        (">a 2345678\nA\n", "a title has more than 8 bytes"),
        (">a\nA\n>b\nA\n>c\nA\n", "line 5: there are more than 2 records"),
    ] {
        let error = held(text).expect_err(text);
        assert!(matches!(error.kind, DataErrorKind::NoRoom(_)), "{text:?}: {error}");
        assert!(error.to_string().contains(what), "{text:?}: {error}");
    }
}
