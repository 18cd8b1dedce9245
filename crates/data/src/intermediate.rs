//! The three files between VirNucPro's stages (`chunked.fa`, `nucleotide.fa`, `protein.faa`) and the
//! names in them. Invariant: byte for byte what the original writes.

use std::fmt::Write as _;
use std::io::{self, Write};

use crate::translate::{Frame, Orf};

/// The line width of Biopython's FASTA writer.
const WIDTH: usize = 60;

/// Sets `name` to a chunk's: `RECORD_chunk_N`, where N counts from 1 and `chunk` from 0.
pub fn chunk_name(record: &str, chunk: usize, name: &mut String) {
    name.clear();
    // Writing to a String cannot fail.
    let _ = write!(name, "{record}_chunk_{}", chunk + 1);
}

/// Sets `name` to an open reading frame's: `RECORD_chunk_NF1` and so on.
pub fn orf_name(record: &str, chunk: usize, frame: Frame, name: &mut String) {
    chunk_name(record, chunk, name);
    name.push_str(frame.name());
}

/// Writes one record of `chunked.fa`: as in the input, wrapped at 60 columns.
pub fn write_chunk(out: &mut impl Write, name: &str, bases: &[u8]) -> io::Result<()> {
    writeln!(out, ">{name}")?;
    for line in bases.chunks(WIDTH) {
        out.write_all(line)?;
        out.write_all(b"\n")?;
    }
    Ok(())
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
    writeln!(out, ">{name}")?;
    out.write_all(letters)?;
    out.write_all(b"\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_count_from_one() {
        let mut name = String::from("old");
        chunk_name("r", 0, &mut name);
        assert_eq!(name, "r_chunk_1");
        orf_name("r", 9, Frame::R3, &mut name);
        assert_eq!(name, "r_chunk_10R3");
    }

    fn check(bases: usize, expected: &[usize]) {
        let mut out = Vec::new();
        write_chunk(&mut out, "c", &vec![b'A'; bases]).unwrap();
        let text = String::from_utf8(out).unwrap();
        let mut lines = text.lines();
        assert_eq!(lines.next(), Some(">c"));
        assert_eq!(lines.map(str::len).collect::<Vec<_>>(), expected);
        assert!(text.ends_with('\n'));
    }

    #[test]
    fn chunks_are_wrapped() {
        check(0, &[]);
        check(60, &[60]);
        check(61, &[60, 1]);
        check(180, &[60, 60, 60]);
    }
}
