//! Recognises files of other formats by their first bytes, so that an error can say what a file is and how to convert it.
//! Invariant: no FASTA or FASTQ file is recognised as another format.

use crate::sequence::Compression;

/// A file format that this program does not read, with the way to convert it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ForeignFormat {
    /// The format, with its article: `a BAM file`.
    pub what: &'static str,
    /// Instruction to convert such a file.
    pub advice: &'static str,
    /// Whether its files consist of readable text.
    pub is_text: bool,
}

/// Bytes that are enough to recognise every format; a tar archive has its mark at byte 257.
pub const ENOUGH: usize = 512;

/// A test of the first bytes of a file, and the format and the advice of files that pass it.
type FormatTest = (fn(&[u8]) -> bool, &'static str, &'static str);

/// Formats of binary data.
const BINARY: &[FormatTest] = &[
    (|s| s.starts_with(b"BAM\x01"), "a BAM file", "convert it: samtools fasta FILE > FILE.fa"),
    (|s| s.starts_with(b"CRAM"), "a CRAM file", "convert it: samtools fasta FILE > FILE.fa"),
    (
        |s| s.starts_with(b"PK\x03\x04") && is_office(s),
        "a spreadsheet or document of an office program",
        "export the sequences from it as plain text in FASTA format",
    ),
    (
        |s| s.starts_with(b"PK\x03\x04") || s.starts_with(b"PK\x05\x06"),
        "a zip archive",
        "unpack it first: unzip FILE",
    ),
    (
        |s| s.starts_with(b"\xd0\xcf\x11\xe0"),
        "a spreadsheet or document of an office program",
        "export the sequences from it as plain text in FASTA format",
    ),
    (|s| s.starts_with(b"7z\xbc\xaf\x27\x1c"), "a 7z archive", "unpack it first: 7z x FILE"),
    (|s| s.starts_with(b"Rar!\x1a\x07"), "a RAR archive", "unpack it first: unrar x FILE"),
    (
        |s| s.get(257..262) == Some(b"ustar"),
        "a tar archive",
        "unpack it first, tar -xf FILE, and give the files or their folder",
    ),
    (|s| s.starts_with(b"\x04\x22\x4d\x18"), "an lz4 file", "decompress it first: lz4 -d FILE"),
    (|s| s.starts_with(b"\x1f\x9d"), "a file of compress (.Z)", "decompress it first: gzip -d FILE"),
    (|s| s.starts_with(b"LZIP"), "an lzip file", "decompress it first: lzip -d FILE"),
    (
        |s| s.starts_with(b"\xff\xfe\0\0") || s.starts_with(b"\0\0\xfe\xff"),
        "text in UTF-32",
        "convert it: iconv -f utf-32 -t utf-8 FILE > FILE.utf8",
    ),
    (is_utf16, "text in UTF-16", "convert it: iconv -f utf-16 -t utf-8 FILE > FILE.utf8"),
    (|s| s.starts_with(b"%PDF"), "a PDF file", "export the sequences from it as plain text in FASTA format"),
    (
        |s| s.starts_with(b"\x89HDF\r\n\x1a\n"),
        "an HDF5 file (such as fast5)",
        "basecall it, or export its sequences as FASTA or FASTQ",
    ),
    (|s| s.starts_with(b"\x8bPOD\r\n\x1a\n"), "a POD5 file", "basecall it: dorado basecaller"),
    (|s| s.starts_with(b".sff"), "an SFF file", "convert it: sff2fastq FILE > FILE.fq"),
    (|s| s.starts_with(b"NCBI.sra"), "an SRA archive", "convert it: fasterq-dump FILE"),
    (
        |s| s.starts_with(b"\x43\x27\x41\x1a") || s.starts_with(b"\x1a\x41\x27\x43"),
        "a 2bit file",
        "convert it: twoBitToFa FILE FILE.fa",
    ),
    (|s| s.starts_with(b"ABIF"), "a trace file (AB1)", "convert it: seqret -sformat abi FILE FILE.fa"),
    (|s| s.starts_with(b"\x93NUMPY"), "a NumPy array", "give the sequences themselves, as FASTA or FASTQ"),
    (|s| s.starts_with(b"PAR1"), "a parquet table", "export its sequences as FASTA or FASTQ"),
    (
        |s| is_lfs_pointer(s),
        "a Git LFS pointer, which stands for a file that was not downloaded",
        "fetch the file itself: git lfs pull, or hf download",
    ),
];

/// Formats of text.
const TEXT: &[FormatTest] = &[
    (is_sam, "a SAM file", "convert it: samtools fasta FILE > FILE.fa"),
    (
        |s| s.starts_with(b"LOCUS ") || s.starts_with(b"LOCUS\t"),
        "a GenBank file",
        "convert it: any2fasta FILE > FILE.fa, or seqret FILE FILE.fa",
    ),
    (
        |s| s.starts_with(b"ID   "),
        "an EMBL or Swiss-Prot file",
        "convert it: any2fasta FILE > FILE.fa, or seqret FILE FILE.fa",
    ),
    (
        |s| s.starts_with(b"##gff-version") || s.starts_with(b"##sequence-region"),
        "a GFF file",
        "give the FASTA file of its sequences; features are cut out with gffread -w or bedtools getfasta",
    ),
    (
        |s| s.starts_with(b"#!genome-build") || s.starts_with(b"#gtf-version"),
        "a GTF file",
        "give the FASTA file of its sequences; features are cut out with gffread -w or bedtools getfasta",
    ),
    (
        |s| s.starts_with(b"##fileformat=VCF"),
        "a VCF file",
        "make sequences of it: bcftools consensus -f REFERENCE.fa FILE > FILE.fa",
    ),
    (
        |s| s.starts_with(b"H\tVN:Z:") || s.starts_with(b"S\t"),
        "an assembly graph (GFA)",
        "convert it: any2fasta FILE > FILE.fa",
    ),
    (
        |s| begins(s, b"<!doctype html") || begins(s, b"<html") || begins(s, b"<head") || begins(s, b"<body"),
        "a web page (HTML), such as a failed download",
        "download the sequence file itself",
    ),
    (
        |s| begins(s, b"<?xml") || begins(s, b"<!doctype"),
        "an XML file",
        "download the sequences as FASTA instead",
    ),
    (
        |s| begins(s, b"{\\rtf"),
        "a document of an office program (RTF)",
        "save it as plain text in FASTA format",
    ),
    (|s| begins(s, b"#nexus"), "a NEXUS alignment", "convert it: seqret FILE FILE.fa"),
    (
        |s| s.starts_with(b"# STOCKHOLM"),
        "a Stockholm alignment",
        "convert it: esl-reformat fasta FILE > FILE.fa",
    ),
    (|s| begins(s, b"clustal"), "a Clustal alignment", "convert it: seqret FILE FILE.fa"),
    (|s| s.starts_with(b"HEADER    "), "a PDB structure", "download its sequences as FASTA"),
    (|s| s.starts_with(b"data_"), "an mmCIF structure", "download its sequences as FASTA"),
    (
        |s| s.starts_with(b"{") || s.starts_with(b"[{"),
        "a JSON file",
        "give the sequences as FASTA or FASTQ; lines of JSON (.jsonl) are read for language models and for training",
    ),
    (
        |s| s.starts_with(b";"),
        "FASTA with comments (';'), which programs read in different ways",
        "remove the lines that begin with ';'",
    ),
];

/// The format of a file that begins with `start`, its first [`ENOUGH`] bytes after decompression; `None` if it is not known.
/// `outer` is the compression that was removed.
pub fn recognise(start: &[u8], outer: Option<Compression>) -> Option<ForeignFormat> {
    if let Some(inner) = outer.and_then(|_| Compression::of(start)) {
        let advice = match inner {
            Compression::Gzip => {
                "decompress it once: gzip -dc FILE > NAME.fa.gz, or pipe it in twice decompressed"
            }
            Compression::Bzip2 => "decompress it once: bzip2 -dc FILE > NAME.fa.bz2",
            Compression::Zstd => "decompress it once: zstd -dc FILE > NAME.fa.zst",
            Compression::Xz => "decompress it once: xz -dc FILE > NAME.fa.xz",
        };
        return Some(ForeignFormat { what: "a file that was compressed twice", advice, is_text: false });
    }
    first_match(BINARY, start, false).or_else(|| first_match(TEXT, start, true))
}

/// The format of the first of `tests` that `start` passes.
fn first_match(tests: &[FormatTest], start: &[u8], is_text: bool) -> Option<ForeignFormat> {
    let (_, what, advice) = *tests.iter().find(|(test, _, _)| test(start))?;
    Some(ForeignFormat { what, advice, is_text })
}

/// Message for a file that is a pointer of Git LFS: what it is, and how to fetch the file.
pub const LFS_POINTER: &str = "it is a Git LFS pointer, which stands for a file that was not downloaded; fetch the file itself: git \
                               lfs pull, or hf download";

/// Whether a file that begins with `start` is a pointer that Git LFS leaves in place of a file. Source: the Git LFS
/// specification, "The pointer".
pub fn is_lfs_pointer(start: &[u8]) -> bool {
    start.starts_with(b"version https://git-lfs.github.com/spec/")
        || start.starts_with(b"version https://hawser.github.com/spec/")
}

/// Whether a text begins with `word`, a word in lower case, in any case.
fn begins(start: &[u8], word: &[u8]) -> bool {
    start.get(..word.len()).is_some_and(|begin| begin.eq_ignore_ascii_case(word))
}

/// Whether a zip archive is a document of an office program: such archives have certain first entries.
fn is_office(start: &[u8]) -> bool {
    let entries: [&[u8]; 5] =
        [b"[Content_Types].xml", b"_rels/", b"xl/", b"word/", b"mimetypeapplication/vnd."];
    entries.iter().any(|entry| start.get(30..30 + entry.len()) == Some(entry))
}

/// Whether a text is in UTF-16: it has the mark of its byte order, or every other byte of its beginning is 0.
fn is_utf16(start: &[u8]) -> bool {
    let marked = start.starts_with(b"\xff\xfe") || start.starts_with(b"\xfe\xff");
    marked || alternates(start, 0) || alternates(start, 1)
}

/// Whether, of the first four bytes, those at places of the parity `zero` are 0 and the others readable.
fn alternates(start: &[u8], zero: usize) -> bool {
    let Some(start) = start.get(..4) else { return false };
    start
        .iter()
        .enumerate()
        .all(|(at, &b)| if at % 2 == zero { b == 0 } else { matches!(b, b' '..=b'~' | b'\t' | b'\r' | b'\n') })
}

/// Whether a file is in the SAM format: with a header, or a first line of at least eleven columns with numbers in their places.
fn is_sam(start: &[u8]) -> bool {
    let headers: [&[u8]; 5] = [b"@HD\tVN:", b"@SQ\t", b"@RG\tID:", b"@PG\tID:", b"@CO\t"];
    if headers.iter().any(|header| start.starts_with(header)) {
        return true;
    }
    let line = start.split(|&b| b == b'\n').next().unwrap_or_default();
    let columns: Vec<&[u8]> = line.split(|&b| b == b'\t').collect();
    columns.len() >= 10
        && [1, 3, 4, 7]
            .into_iter()
            .all(|at| columns[at].iter().all(u8::is_ascii_digit) && !columns[at].is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formats_are_told_by_their_first_bytes() {
        let tar = [vec![b'a'; 257], b"ustar\0".to_vec()].concat();
        let table: &[(&[u8], &str)] = &[
            (b"BAM\x01\0", "a BAM file"),
            (b"CRAM\x03", "a CRAM file"),
            (b"@HD\tVN:1.6\n", "a SAM file"),
            (b"@SQ\tSN:chr1\tLN:5\n", "a SAM file"),
            (b"r1\t0\tchr1\t7\t60\t4M\t*\t0\t0\tACGT\tIIII\n", "a SAM file"),
            (b"PK\x03\x04\x14\0\0\0\0\0", "a zip archive"),
            (b"PK\x03\x04aaaaaaaaaaaaaaaaaaaaaaaaaa[Content_Types].xml", "a spreadsheet or document"),
            (b"\xff\xfe>\0a\0", "text in UTF-16"),
            (b"\xfe\xff\0>\0a", "text in UTF-16"),
            (b">\0a\0\n\0", "text in UTF-16"),
            (b"\0>\0a\0\n", "text in UTF-16"),
            (b"LOCUS       NC_001416", "a GenBank file"),
            (b"ID   X56734; SV 1;", "an EMBL"),
            (b"##gff-version 3\n", "a GFF file"),
            (b"##fileformat=VCFv4.2\n", "a VCF file"),
            (b"<!DOCTYPE html>", "a web page"),
            (b"<HTML>", "a web page"),
            (b"%PDF-1.7", "a PDF file"),
            (b"7z\xbc\xaf\x27\x1c\0", "a 7z archive"),
            (&tar, "a tar archive"),
            (b"#NEXUS\n", "a NEXUS alignment"),
            (b"CLUSTAL W", "a Clustal alignment"),
            (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "a Git LFS pointer"),
            (b";comment\n>a\n", "FASTA with comments"),
        ];
        for (start, wanted) in table {
            let found = recognise(start, None).unwrap_or_else(|| panic!("{wanted}"));
            assert!(found.what.starts_with(wanted), "{}: {}", start.escape_ascii(), found.what);
            assert!(!found.advice.is_empty());
        }
        let twice = recognise(b"\x1f\x8b\x08\0", Some(Compression::Gzip)).expect("known");
        assert_eq!(twice.what, "a file that was compressed twice");
        for start in
            [&b">a\nACGT\n"[..], b"@r1\nACGT\n+\nIIII\n", b"@HD 1\nAC\n", b"@SQ1\nAC\n", b"", b"ACGT", b">"]
        {
            assert_eq!(recognise(start, None), None, "{}", start.escape_ascii());
        }
    }
}
