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
    check(">a\nA\tC\t \nG\x0b\n", &["a=ACG"]);
}

#[test]
fn every_letter_is_kept_in_its_case() {
    check(">a\nacgtNNRYKEFz\n", &["a=acgtNNRYKEFz"]);
    check(">é ü\nA\n", &["é=A"]);
    check(">a\u{a0}b\nA\n", &["a=A"]);
}

/// Reads `text` as sequences of an alphabet: "id=SEQ" or "id=SEQ/QUALITY" of each record, then the notes.
fn seen(alphabet: Alphabet, text: &[u8]) -> Result<Vec<String>, DataError> {
    let mut reader = Reader::from_read("x", Cursor::new(text.to_vec()))?;
    reader.set_alphabet(alphabet);
    reader.keep_qualities(true);
    let mut record = Record::default();
    let mut found = vec![];
    while reader.read_into(&mut record)? {
        let quality = if record.quality.is_empty() {
            String::new()
        } else {
            format!("/{}", String::from_utf8_lossy(&record.quality))
        };
        found.push(format!("{}={}{quality}", record.id, String::from_utf8_lossy(&record.seq)));
    }
    found.extend(reader.take_notes().iter().map(InputNote::detail));
    Ok(found)
}

/// Alphabet, file, and the records and notes that are read, or a part of the error.
type LineCase<'a> = (Alphabet, &'a [u8], Result<&'a [&'a str], &'a str>);

/// What each byte that is no letter comes to.
#[test]
fn bytes_that_are_no_letters_are_dropped_with_a_note_or_refused_with_their_place() {
    use Alphabet::{AminoAcids as Protein, Nucleotides as Dna};
    let table: &[LineCase<'_>] = &[
        // White space and digits, as in GenBank's lines; gaps of aligned sequences.
        (
            Dna,
            b">a\n        1 acgtacgtac gt\n       13 acgt\n>b\nAC\tGT\n",
            Ok(&[
                "a=acgtacgtacgtacgt",
                "b=ACGT",
                "22 blanks and digits in sequence lines of 2 records, the first in 'a', line 2",
            ]),
        ),
        (
            Dna,
            b">a\nAC--G.T\n>b\nA\n",
            Ok(&["a=ACGT", "b=A", "3 gaps ('-' and '.') in 1 record, the first in 'a', line 2"]),
        ),
        (Protein, b">a\nMK-V.\n", Ok(&["a=MKV", "2 gaps ('-' and '.') in 1 record, the first in 'a', line 2"])),
        (Dna, b">a\n---\n", Ok(&["a=", "3 gaps ('-' and '.') in 1 record, the first in 'a', line 2"])),
        // Of FASTQ, the quality goes with what is dropped.
        (
            Dna,
            b"@a\nA-C.G\n+\nIJKLM\n@b\nAC\n+\n@#\n",
            Ok(&["a=ACG/IKM", "b=AC/@#", "2 gaps ('-' and '.') in 1 record, the first in 'a', line 2"]),
        ),
        // Marks of proteins.
        (Protein, b">a\nMK*L?#V*\n", Ok(&["a=MK*L?#V*"])),
        (Dna, b">a\nACGT*\n", Err("x, line 2, 'a': byte 5 of the line is '*': the mark of a stop codon")),
        (Dna, b">a\nAC?T\n", Err("x, line 2, 'a': byte 3 of the line is '?'")),
        (Protein, b">a\nMK<mask>L\n", Err("line 2, 'a': byte 3 of the line is '<': markup")),
        (Dna, b">a\nAC\n<html>\n", Err("line 3, 'a': byte 1 of the line is '<': markup")),
        (Dna, b">a\nAC\0GT\n", Err("line 2, 'a': byte 3 of the line is 0x00: no text")),
        (Dna, b">a\nACGT\n;a comment\nAC\n", Err("line 3, 'a': byte 1 of the line is ';': a comment")),
        (Dna, b">a\nAC\xc3\xa9\n", Err("line 2, 'a': byte 3 of the line is 0xc3: no ASCII letter")),
        (Dna, b">a\nAC!\n", Err("line 2, 'a': byte 3 of the line is '!': no letter")),
        // Numbers in place of letters.
        (Dna, b">a\nT0120\n", Err("line 1, 'a': no sequence: 4 digits and 1 letters")),
        (Dna, b">a\n40 40 38\n", Err("line 1, 'a': no sequence: 6 digits and 0 letters")),
        // Records that would be lost.
        (Dna, b">a\nAC>b\nGT\n", Err("line 2, 'a': byte 3 of the line is '>': the start of a record inside")),
        (Dna, b">a\nAC@b\nGT\n", Err("line 2, 'a': byte 3 of the line is '@': the start of a record inside")),
        (
            Dna,
            b">a\nAC\n  >b\nGT\n",
            Err("line 3, 'a': byte 3 of the line is '>': a title with white space before it"),
        ),
        (
            Dna,
            b">a\nAC\n@b\nGT\n+\nII\n",
            Err("line 3, 'a': byte 1 of the line is '@': FASTQ records behind FASTA"),
        ),
        (Dna, b">a\nAC\n+\nII\n", Err("line 3, 'a': byte 1 of the line is '+': a line of FASTQ")),
        (
            Dna,
            b"@a\nAC\n+\nII\n>b\nGT\n",
            Err("line 5: not valid FASTQ: FASTA records stand behind FASTQ records"),
        ),
        (
            Dna,
            b"@a\nAC>b\n+\nIIII\n",
            Err("line 2, 'a': byte 3 of the line is '>': the start of a record inside"),
        ),
        (Dna, b"@a\n>b\nAC\n", Err("line 2, 'a': byte 1 of the line is '>': FASTA records behind FASTQ")),
        // Files without a record.
        (Dna, b"", Ok(&["the file has no record"])),
        (Dna, b"\n \n", Ok(&["the file has no record"])),
    ];
    for (alphabet, text, wanted) in table {
        let shown = text.escape_ascii();
        match (seen(*alphabet, text), wanted) {
            (Ok(found), Ok(wanted)) => assert_eq!(found, *wanted, "{shown}"),
            (Err(error), Err(wanted)) => assert!(error.to_string().contains(wanted), "{shown}: {error}"),
            (found, _) => panic!("{shown}: {found:?}"),
        }
    }
}

/// A byte that no sequence has is found at the same place however the file is cut into pieces.
#[test]
fn a_bad_byte_has_its_place_in_pieces_of_any_size() {
    let text = b">a\nACGT\n  AC 12 GT>b\nAC\n";
    let trickle = Reader::from_read("x", Trickle(Cursor::new(text.to_vec()))).unwrap();
    let errors =
        [trickle.records().collect::<Result<Vec<_>, _>>(), read(text)].map(|e| e.unwrap_err().to_string());
    assert_eq!(errors[0], errors[1]);
    assert!(errors[0].contains("line 3, 'a': byte 11 of the line is '>'"), "{}", errors[0]);
}

#[test]
fn a_file_of_another_format_is_named() {
    let gz = |bytes: &[u8]| {
        let mut file = flate2::write::GzEncoder::new(vec![], flate2::Compression::fast());
        std::io::Write::write_all(&mut file, bytes).unwrap();
        file.finish().unwrap()
    };
    let table: &[(Vec<u8>, &str)] = &[
        (gz(b"BAM\x01\0\0\0\0"), "x: this is a BAM file; convert it: samtools fasta"),
        (gz(&gz(b">a\nACGT\n")), "x: this is a file that was compressed twice; decompress it once: gzip -dc"),
        (b"@HD\tVN:1.6\n@SQ\tSN:a\tLN:4\n".to_vec(), "x: this is a SAM file"),
        (b"PK\x03\x04\x14\0".to_vec(), "x: this is a zip archive; unpack it first: unzip"),
        (b"\xff\xfe>\0a\0\n\0A\0".to_vec(), "x: this is text in UTF-16; convert it: iconv"),
        (b">\0a\0\n\0A\0".to_vec(), "x: this is text in UTF-16"),
        (b"LOCUS       X 4 bp\n".to_vec(), "x: this is a GenBank file"),
        (b"##gff-version 3\n".to_vec(), "x: this is a GFF file"),
        (b"\n<!DOCTYPE html>\n".to_vec(), "x: this is a web page"),
        (b";comment\n>a\nA\n".to_vec(), "x: this is FASTA with comments"),
        (b"version https://git-lfs.github.com/spec/v1\n".to_vec(), "x: this is a Git LFS pointer"),
    ];
    for (bytes, wanted) in table {
        let error = read(bytes).expect_err(wanted).to_string();
        assert!(error.starts_with(wanted), "{error}");
    }
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
        b"\n\nACGT\n>a\nA\n",
        "x, line 3: not FASTA or FASTQ: it starts with 'A', expected '>' or '@'; \
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
    check(b"@a\nACGT\n+\nII\n", 1, "a", "the file ends after 2 of 4 qualities");
    check(b"@a\nACGT\n+\nIIIII\n", 1, "a", "5 qualities for 4 letters");
    // A record without its quality is named by its own line, whatever the next record looks like.
    let missing = "its quality line is missing: the line behind its '+' is the title of the next record";
    check(b"@x\nA\n+\nI\n@a\nACGT\n+\n@b\nACGT\n+\nIIII\n", 5, "a", missing);
    check(b"@a\nACGT\n+\n@bcd\nACGT\n+\nIIII\n", 1, "a", missing);
    check(b"@a\nACGT\n+\n@bcdefg\nACGT\n+\nIIII\n", 1, "a", missing);
    check(b"@a\nACGT\n+\n", 1, "a", "its quality line is missing: the file ends behind its '+' line");
    check(b"@a\nACGT\n+\n\n@b\nACGT\n+\nIIII\n", 1, "a", "its quality line is empty (line 4)");
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
    let line = [b'A'; 61];
    let lines = 200_000;
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
    let most =
        InputExtent { records: 2, longest: 4, longest_name: 3, longest_title: 8, ..InputExtent::default() };
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
