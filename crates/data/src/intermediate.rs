//! Writers of VirNucPro's three intermediate files (`chunked.fa`, `nucleotide.fa`, `protein.faa`) and the names of
//! their records. Invariant: the output is byte-identical to VirNucPro's.

use std::io::{self, Write};

use crate::translate::{Frame, Orf};

/// The line width of Biopython's FASTA writer.
const WIDTH: usize = 60;

/// Number of full lines that one write combines; a window of 500 bases has eight.
const LINES: usize = 8;

/// Sets `name` to the name of a window, `RECORD_chunk_N`, where N counts from 1 and `window` from 0.
pub fn window_name(record: &str, window: usize, name: &mut String) {
    name.clear();
    name.push_str(record);
    name.push_str("_chunk_");
    push_number(window + 1, name);
}

/// Sets `name` to the name of an open reading frame, the name of its window and frame: `RECORD_chunk_NF1`.
pub fn orf_name(record: &str, window: usize, frame: Frame, name: &mut String) {
    window_name(record, window, name);
    name.push_str(frame.name());
}

/// Writes one record of `chunked.fa`: the bases as in the input, wrapped at 60 columns.
pub fn write_window(out: &mut impl Write, name: &str, bases: &[u8]) -> io::Result<()> {
    write_title(out, name)?;
    write_lines(out, bases)
}

/// Writes `letters` in lines of 60 characters; the last line may be shorter. Writes nothing if `letters` is empty.
pub fn write_lines(out: &mut impl Write, letters: &[u8]) -> io::Result<()> {
    let (lines, rest) = letters.as_chunks::<WIDTH>();
    let mut text = [[b'\n'; WIDTH + 1]; LINES];
    for lines in lines.chunks(LINES) {
        for (to, line) in text.iter_mut().zip(lines) {
            to[..WIDTH].copy_from_slice(line);
        }
        out.write_all(text[..lines.len()].as_flattened())?;
    }
    if rest.is_empty() {
        return Ok(());
    }
    out.write_all(rest)?;
    out.write_all(b"\n")
}

/// Writes one record of `nucleotide.fa`, in two lines.
pub fn write_nucleotide(out: &mut impl Write, name: &str, orf: &Orf<'_>) -> io::Result<()> {
    write_unwrapped(out, name, orf.nucleotide)
}

/// Writes one record of `protein.faa`, in two lines.
pub fn write_protein(out: &mut impl Write, name: &str, orf: &Orf<'_>) -> io::Result<()> {
    write_unwrapped(out, name, orf.protein)
}

fn write_unwrapped(out: &mut impl Write, name: &str, letters: &[u8]) -> io::Result<()> {
    write_title(out, name)?;
    out.write_all(letters)?;
    out.write_all(b"\n")
}

/// Writes the FASTA title line. Three plain writes, because `write!` would cost more than translating a frame.
fn write_title(out: &mut impl Write, name: &str) -> io::Result<()> {
    out.write_all(b">")?;
    out.write_all(name.as_bytes())?;
    out.write_all(b"\n")
}

/// Appends `number` in decimal.
fn push_number(mut number: usize, text: &mut String) {
    let mut power = 1;
    while number / power >= 10 {
        power *= 10;
    }
    while power > 0 {
        text.push(char::from(b'0' + (number / power) as u8));
        number %= power;
        power /= 10;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_count_from_one() {
        let mut name = String::from("old");
        window_name("r", 0, &mut name);
        assert_eq!(name, "r_chunk_1");
        orf_name("r", 9, Frame::R3, &mut name);
        assert_eq!(name, "r_chunk_10R3");
        for window in (0..1200).chain([99_999, 100_000, usize::MAX - 1]) {
            window_name("", window, &mut name);
            assert_eq!(name, format!("_chunk_{}", window + 1));
        }
    }

    fn check(bases: usize, expected: &[usize]) {
        let mut out = Vec::new();
        write_window(&mut out, "c", &vec![b'A'; bases]).unwrap();
        let text = String::from_utf8(out).unwrap();
        let mut lines = text.lines();
        assert_eq!(lines.next(), Some(">c"));
        assert_eq!(lines.map(str::len).collect::<Vec<_>>(), expected);
        assert!(text.ends_with('\n'));
    }

    #[test]
    fn windows_are_wrapped() {
        check(0, &[]);
        check(60, &[60]);
        check(61, &[60, 1]);
        check(180, &[60, 60, 60]);
        check(500, &[60, 60, 60, 60, 60, 60, 60, 60, 20]);
        check(1020, &[60; 17]);
    }
}
